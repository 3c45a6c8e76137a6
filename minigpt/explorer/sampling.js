"use strict";

/**
 * From logits to an id by the law of minigpt/sampling.py: with the same logits and the same seed, the same draw.
 * V: number of ids.
 */
const Sampling = (() => {
  const LARGEST = 1e300; // what a score is at most after an absurd penalty, so that differences stay finite
  const MASK64 = (1n << 64n) - 1n;
  const MASK128 = (1n << 128n) - 1n;
  const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

  /**
   * Probabilities of the next token, and which rule cut which. In this order: repetition penalty over the history; ban;
   * temperature; top-k (ties: lowest ids); softmax; top-p (likeliest first, then by id); min-p against the likeliest
   * left; renormalise. Temperature 0 puts everything on the largest logit's lowest id, and cuts nothing.
   * @param {ArrayLike<number>} logits (V,)
   * @param {{temperature: number, topK: number, topP: number, minP: number, repetitionPenalty: number}} options
   * @param {Iterable<number>} history ids of the text so far
   * @param {Iterable<number>} banned ids never drawn
   * @returns {{probabilities: Float64Array, cut: (?string)[], tempered: Float64Array}} (V,) each; cut: null, "banned",
   *   "top-k", "top-p" or "min-p"; tempered: the probabilities after the temperature, before any cut
   */
  function distribution(logits, options, history = [], banned = []) {
    const { temperature = 0.8, topK = 0, topP = 1, minP = 0, repetitionPenalty = 1 } = options;
    const scores = penalised(logits, new Set(history), repetitionPenalty);
    const cut = new Array(scores.length).fill(null);
    for (const id of banned) [scores[id], cut[id]] = [-Infinity, "banned"];
    const likeliest = argmax(scores);
    if (temperature === 0) {
      const certain = new Float64Array(scores.length);
      certain[likeliest] = 1;
      return { probabilities: certain, cut, tempered: certain };
    }
    const powers = scores.map((score) => Math.exp((score - scores[likeliest]) / temperature));
    const tempered = shares(powers);
    if (topK > 0 && topK < scores.length) keep(largestFirst(scores).slice(0, topK), powers, cut, "top-k");
    const probabilities = shares(powers);
    if (topP < 1) keep(nucleus(probabilities, topP), probabilities, cut, "top-p");
    const floor = minP * probabilities[argmax(probabilities)];
    keep(Array.from(cut.keys()).filter((id) => probabilities[id] >= floor), probabilities, cut, "min-p");
    return { probabilities: shares(probabilities), cut, tempered };
  }

  /** A positive logit of an id that was there is divided by the penalty, a negative one multiplied (Keskar 2019). */
  function penalised(logits, history, penalty) {
    const scores = Float64Array.from(logits);
    if (!scores.every(Number.isFinite)) {
      throw new Error("the model's logits are not finite: sample from an earlier step");
    }
    if (penalty === 1) return scores;
    for (const id of history) {
      const score = scores[id] > 0 ? scores[id] / penalty : scores[id] * penalty;
      scores[id] = Math.min(Math.max(score, -LARGEST), LARGEST);
    }
    return scores;
  }

  /** The smallest set of the likeliest ids that has at least this much probability. */
  function nucleus(probabilities, mass) {
    const order = largestFirst(probabilities);
    let [count, cumulated] = [0, 0];
    while (count < order.length && cumulated < mass) cumulated += probabilities[order[count++]];
    return order.slice(0, count);
  }

  /** Cut all but these ids. */
  function keep(ids, numbers, cut, rule) {
    const kept = new Set(ids);
    numbers.forEach((_, id) => {
      if (kept.has(id)) return;
      numbers[id] = 0;
      cut[id] ??= rule;
    });
  }

  const argmax = (numbers) => numbers.reduce((best, number, id) => (number > numbers[best] ? id : best), 0);
  const largestFirst = (numbers) => Array.from(numbers.keys()).sort((a, b) => numbers[b] - numbers[a] || a - b);

  function shares(numbers) {
    const total = numbers.reduce((sum, number) => sum + number, 0);
    return numbers.map((number) => number / total);
  }

  /** The lowest id whose cumulated probability exceeds `uniform` in [0, 1): the inverse CDF in id order. */
  function draw(probabilities, uniform) {
    const total = probabilities.reduce((sum, probability) => sum + probability, 0);
    let [cumulated, last] = [0, -1];
    for (let id = 0; id < probabilities.length; id++) {
      cumulated += probabilities[id];
      if (cumulated > uniform * total) return id;
      if (probabilities[id] > 0) last = id;
    }
    return last; // rounding carried uniform · total up to the total itself
  }

  // ── numpy.random.Generator(PCG64(seed)).random ─────────────────────────────────────────────────────────────

  /**
   * Uniforms in [0, 1), one a call: PCG XSL RR 128/64 (O'Neill 2014), begun as NumPy begins it.
   * @param {number|bigint|string} seed a whole number of at least 0, of any size
   */
  function uniforms(seed) {
    const number = BigInt(seed);
    if (number < 0n) throw new RangeError(`seed = ${seed}: must be a whole number of at least 0`);
    const words = seedWords(number);
    const wide = (i) => (words[i] << 64n) | words[i + 1];
    const increment = ((wide(2) << 1n) | 1n) & MASK128;
    const next = (state) => (state * MULTIPLIER + increment) & MASK128;
    let state = next(increment + wide(0));
    return () => {
      state = next(state);
      const folded = (state >> 64n) ^ (state & MASK64);
      const turn = state >> 122n;
      const bits = ((folded >> turn) | (folded << (64n - turn))) & MASK64;
      return Number(bits >> 11n) * 2 ** -53;
    };
  }

  /** numpy.random.SeedSequence(seed).generate_state(4, uint64). */
  function seedWords(seed) {
    const entropy = [];
    for (let rest = seed; rest > 0n; rest >>= 32n) entropy.push(Number(rest & 0xffffffffn));
    const hash = hasher(0x43b0d7e5, 0x931e8875);
    const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0));
    const mixInto = (i, word) => {
      pool[i] = scrambled(Math.imul(pool[i], 0xca01f9dd) - Math.imul(hash(word), 0x4973f715));
    };
    for (let source = 0; source < 4; source++) {
      for (let i = 0; i < 4; i++) if (i !== source) mixInto(i, pool[source]);
    }
    for (const word of entropy.slice(4)) for (let i = 0; i < 4; i++) mixInto(i, word);
    const hashOut = hasher(0x8b51f9dd, 0x58f38ded);
    const halves = [0, 1, 2, 3, 0, 1, 2, 3].map((i) => BigInt(hashOut(pool[i])));
    return [0, 2, 4, 6].map((i) => halves[i] | (halves[i + 1] << 32n));
  }

  /** Hashes one 32-bit word a call, each time with the next constant. */
  function hasher(constant, multiplier) {
    return (word) => {
      const mixed = word ^ constant;
      constant = Math.imul(constant, multiplier);
      return scrambled(Math.imul(mixed, constant));
    };
  }

  const scrambled = (word) => (word ^ (word >>> 16)) >>> 0;

  return { distribution, draw, uniforms };
})();
