"use strict";

/**
 * Scaled dot-product attention as the formulas have it: rows of numbers, one step after the other (Vaswani 2017,
 * eq. 1), and the same with one named mistake. The mistakes bear the names that students' code is told.
 *
 * Axes: T queries, S keys, K their size. A mask (T, S) holds 1 where a query may look, else 0; null: it may everywhere.
 */
const Attention = (() => {
  const RIGHT = { inputs: "qkv", swapped: false, scale: "sqrt_d", mask: "right", softmax: "keys", transposed: false };

  /** Σ_i a_i b_i. */
  function dot(a, b) {
    let total = 0;
    for (let i = 0; i < a.length; i++) total += a[i] * b[i];
    return total;
  }

  /** Q Kᵀ: (T, K), (S, K) → (T, S). */
  const scores = (query, key) => query.map((q) => key.map((k) => dot(q, k)));

  /** S / √K. */
  const scaled = (rows, size) => times(rows, 1 / Math.sqrt(size));

  /** −∞ where the mask says no. */
  const masked = (rows, mask) => hidden(rows, mask, -Infinity);

  /** exp(s_j) / Σ_k exp(s_k); −∞ gets 0, also where the whole row is −∞. */
  function softmax(row) {
    const largest = Math.max(...row);
    if (largest === -Infinity) return row.map(() => 0);
    const powers = row.map((score) => Math.exp(score - largest)); // the same quotient, never overflowing
    const total = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / total);
  }

  /** softmax(Q Kᵀ / √K): (T, K), (S, K) → (T, S). */
  const weights = (query, key, mask = null, isScaled = true) =>
    steps({ query, key, value: key, mask, scaled: isScaled }).weights;

  /** Σ_j w_j v_j: (S,), (S, width of v) → (width of v,). */
  function weightedSum(row, value) {
    return value[0].map((_, i) => row.reduce((sum, weight, j) => sum + weight * value[j][i], 0));
  }

  /**
   * All steps of attention. A query that may look at nothing gets weights 0 and output 0.
   * @param {{query: number[][], key: number[][], value: number[][], mask: ?number[][], scaled: boolean}} problem
   * @returns {{raw, scaled, masked, weights, output}} (T, S) each, the output (T, width of v)
   */
  const steps = (problem) => taken(problem, problem.scaled ? RIGHT : { ...RIGHT, scale: "none" });

  /** One problem for each head where arrays have a leading axis: query head h uses key head ⌊h·G/H⌋. */
  function heads({ query, key, value, mask, scaled: isScaled }) {
    if (!Array.isArray(query[0][0])) return [{ query, key, value, mask, scaled: isScaled }];
    return query.map((one, h) => {
      const g = Math.floor((h * key.length) / query.length);
      const own = mask && Array.isArray(mask[0][0]) ? mask[h] : mask;
      return { query: one, key: key[g], value: value[g], mask: own, scaled: isScaled };
    });
  }

  // ── the steps, each of which can be taken the wrong way ────────────────────────────────────────────────────

  /** The steps as `how` takes them; null where shapes forbid it. */
  function taken(problem, how) {
    const parts = { q: problem.query, k: problem.key, v: problem.value };
    const [query, key, value] = [...how.inputs].map((letter) => parts[letter]);
    const [nQuery, nKey, size] = [query.length, key.length, query[0].length];
    if (size !== key[0].length || nKey !== value.length) return null;
    const isTurned = how.swapped || how.transposed || (problem.mask && how.mask === "transposed");
    if (isTurned && nQuery !== nKey) return null;
    const factor = factors(size, value[0].length, nKey)[how.scale];
    const raw = how.swapped ? scores(key, query) : scores(query, key);
    const divided = times(raw, factor);
    const mask = seen(problem.mask, how.mask, nQuery, nKey);
    const shown = hidden(divided, how.mask === "after_softmax" ? null : mask, instead(how.mask));
    let shares = normalised(shown, how.softmax);
    if (how.mask === "after_softmax") shares = hidden(shares, mask, 0);
    if (how.scale === "after") shares = times(shares, 1 / Math.sqrt(size));
    if (how.transposed) shares = flipped(shares);
    const output = shares.map((row) => weightedSum(row, value));
    return { raw, scaled: divided, masked: shown, weights: shares, output };
  }

  /** What scores are multiplied by. */
  const factors = (size, valueSize, nKey) => ({
    sqrt_d: 1 / Math.sqrt(size),
    none: 1,
    d: 1 / size,
    times: Math.sqrt(size),
    sqrt_d_v: 1 / Math.sqrt(valueSize),
    sqrt_keys: 1 / Math.sqrt(nKey),
    after: 1,
  });

  /** Which keys each query sees; null: all. */
  function seen(mask, how, nQuery, nKey) {
    const causal = () => Array.from({ length: nQuery }, (_, i) => Array.from({ length: nKey }, (_, j) => +(j <= i)));
    if (how === "causal_always") return causal();
    if (mask === null || how === "missing") return null;
    if (how === "causal") return causal();
    if (how === "transposed") return flipped(mask);
    if (how === "inverted") return mask.map((row) => row.map((sees) => +!sees));
    return how === "strict" ? mask.map((row, i) => row.map((sees, j) => (i === j ? 0 : sees))) : mask;
  }

  /** The score that stands where a key is hidden. */
  const instead = (how) => ({ multiplied: 0, minus_one: -1 })[how] ?? -Infinity;

  /** Softmax over some of the numbers; −∞ that meets no softmax is no number. */
  function normalised(rows, how) {
    if (how === "missing") return rows.map((row) => row.map((score) => (score === -Infinity ? NaN : score)));
    if (how === "queries") return flipped(flipped(rows).map(softmax));
    if (how === "keys") return rows.map(softmax);
    const all = softmax(rows.flat());
    return rows.map((row, i) => row.map((_, j) => all[i * row.length + j]));
  }

  const times = (rows, factor) => rows.map((row) => row.map((number) => number * factor));
  const flipped = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));
  const hidden = (rows, mask, other) =>
    mask ? rows.map((row, i) => row.map((number, j) => (mask[i][j] ? number : other))) : rows;

  /** `apply(problem)` gives the steps with the mistake in them, null where shapes forbid it. */
  const mistake = (name, step, changes) => ({
    name,
    step,
    apply: (problem) => taken(problem, { ...(problem.scaled ? RIGHT : { ...RIGHT, scale: "none" }), ...changes }),
  });

  const mistakes = [
    mistake("Q and K swapped", "raw scores", { swapped: true }),
    mistake("K and V swapped", "raw scores", { inputs: "qvk" }),
    mistake("Q and V swapped", "raw scores", { inputs: "vkq" }),
    mistake("no sqrt(d)", "scaling", { scale: "none" }),
    mistake("d instead of sqrt(d)", "scaling", { scale: "d" }),
    mistake("times sqrt(d)", "scaling", { scale: "times" }),
    mistake("sqrt(number of keys)", "scaling", { scale: "sqrt_keys" }),
    mistake("sqrt(d_v) instead of sqrt(d_k)", "scaling", { scale: "sqrt_d_v" }),
    mistake("scaled after the softmax", "scaling", { scale: "after" }),
    mistake("mask missing", "mask", { mask: "missing" }),
    mistake("mask transposed", "mask", { mask: "transposed" }),
    mistake("mask strict", "mask", { mask: "strict" }),
    mistake("mask inverted", "mask", { mask: "inverted" }),
    mistake("mask after the softmax", "mask", { mask: "after_softmax" }),
    mistake("mask multiplied before the softmax", "mask", { mask: "multiplied" }),
    mistake("-1 instead of -inf", "mask", { mask: "minus_one" }),
    mistake("own causal mask", "mask", { mask: "causal" }),
    mistake("masked without a mask", "mask", { mask: "causal_always" }),
    mistake("softmax over the queries", "softmax", { softmax: "queries" }),
    mistake("softmax over the whole matrix", "softmax", { softmax: "matrix" }),
    mistake("softmax missing", "softmax", { softmax: "missing" }),
    mistake("weights transposed", "weighted sum", { transposed: true }),
  ];

  return { dot, scores, scaled, masked, softmax, weights, weightedSum, steps, heads, mistakes };
})();
