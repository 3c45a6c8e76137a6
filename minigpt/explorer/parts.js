"use strict";

/**
 * The other parts of a Transformer, as the worked examples have them: from what an example gives, all that it publishes.
 * Rows of numbers, y = x Wᵀ + b.
 */
const Parts = (() => {
  const vector = (a, f) => a.map(f);
  const added = (a, b) => a.map((row, i) => row.map((x, j) => x + b[i][j]));

  /** x Wᵀ + b: (T, in), (out, in) → (T, out). */
  const linear = (rows, weight, bias = null) =>
    rows.map((row) => weight.map((w, i) => Attention.dot(row, w) + (bias ? bias[i] : 0)));

  /** (x − mean) ÷ √(variance + ε). */
  function layerNorm(row, epsilon = 1e-5) {
    const mean = row.reduce((sum, x) => sum + x, 0) / row.length;
    return rmsNorm(vector(row, (x) => x - mean), epsilon);
  }

  /** x ÷ √(mean of x² + ε). */
  function rmsNorm(row, epsilon = 1e-6) {
    const size = Math.sqrt(Attention.dot(row, row) / row.length + epsilon);
    return vector(row, (x) => x / size);
  }

  /** Angles p · 10000^(−2i/d), (d/2,). */
  const angles = (position, size) => Array.from({ length: size / 2 }, (_, i) => position * 10000 ** ((-2 * i) / size));

  /** sin of the angles on even places, cos on odd ones (Vaswani 2017). */
  const sinusoidal = (position, size) => angles(position, size).flatMap((angle) => [Math.sin(angle), Math.cos(angle)]);

  /** The pairs (x_i, x_{i + d/2}) turned by the angles of the position (Su 2021). */
  function rotated(row, position) {
    const half = row.length / 2, turns = angles(position, row.length);
    return row.map((x, i) => {
      const angle = turns[i % half];
      return i < half ? x * Math.cos(angle) - row[i + half] * Math.sin(angle) : x * Math.cos(angle) + row[i - half] * Math.sin(angle);
    });
  }

  const relu = (rows) => rows.map((row) => vector(row, (x) => Math.max(0, x)));
  const part = (rows, head, size) => rows.map((row) => row.slice(head * size, (head + 1) * size));
  const merged = (heads) => heads[0].map((_, t) => heads.flatMap((head) => head[t]));

  /** Projections, attention in each of two heads, the heads side by side. */
  function twoHeads(x, { W_Q: wq, W_K: wk, W_V: wv, mask }) {
    const [query, key, value] = [wq, wk, wv].map((weight) => linear(x, weight));
    const size = query[0].length / 2;
    const steps = [0, 1].map((head) => Attention.steps({
      query: part(query, head, size), key: part(key, head, size), value: part(value, head, size), mask, scaled: true,
    }));
    return { query, key, value, steps, heads: merged(steps.map(({ output }) => output)) };
  }

  const projections = ({ query, key, value }) => [["query", "x W_Qᵀ", query], ["key", "x W_Kᵀ", key], ["value", "x W_Vᵀ", value]];
  const ofHeads = (steps, name) => steps.map((one) => one[name]);

  function multiHead(example) {
    const found = twoHeads(example.x, example);
    return [
      ...projections(found),
      ["weights", "softmax(q · k ÷ √d), each head for itself", ofHeads(found.steps, "weights")],
      ["output", "[head 0, head 1] W_Oᵀ + b_O", linear(found.heads, example.W_O, example.b_O)],
    ];
  }

  function block(example) {
    const causal = example.x.map((_, t) => example.x.map((_, s) => +(s <= t)));
    const attnNorm = example.x.map((row) => layerNorm(row));
    const found = twoHeads(attnNorm, { ...example, mask: causal });
    const after = added(example.x, linear(found.heads, example.W_O, example.b_O));
    const mlpNorm = after.map((row) => layerNorm(row));
    const hidden = relu(linear(mlpNorm, example.W1, example.b1));
    return [
      ["attn_norm", "(x − mean) ÷ √(variance + 1e-5)", attnNorm],
      ...projections(found).map(([name, formula, rows]) => [name, formula.replace("x", "norm(x)"), rows]),
      ["scaled_scores", "q · k ÷ √d", ofHeads(found.steps, "scaled")],
      ["weights", "softmax(masked scores)", ofHeads(found.steps, "weights")],
      ["heads", "[head 0, head 1], each Σ weight × value", found.heads],
      ["after_attention", "y = x + heads W_Oᵀ + b_O", after],
      ["mlp_norm", "(y − mean) ÷ √(variance + 1e-5)", mlpNorm],
      ["hidden", "max(0, norm(y) W1ᵀ + b1)", hidden],
      ["output", "y + hidden W2ᵀ + b2", added(after, linear(hidden, example.W2, example.b2))],
    ];
  }

  const named = {
    sinusoidal_positions: (e) => [
      ["value", "sin(p · 10000^(−2i/d)), cos(p · 10000^(−2i/d))", e.value.map((row, p) => sinusoidal(p, row.length))],
    ],
    rotary_table: (e) => [
      ["cos", "cos(p · 10000^(−2i/d))", e.x.map((row, p) => vector(angles(p, row.length), Math.cos))],
      ["sin", "sin(p · 10000^(−2i/d))", e.x.map((row, p) => vector(angles(p, row.length), Math.sin))],
      ["value", "x_i cos − x_{i+d/2} sin, x_{i+d/2} cos + x_i sin", e.x.map(rotated)],
    ],
    rotary_relative: (e) => [
      ["product", "R(p) q · R(p − distance) k", e.positions.map((p) => Attention.dot(rotated(e.query, p), rotated(e.key, p - e.distance)))],
    ],
    layer_norm: (e) => [["value", "(x − mean) ÷ √(variance + 1e-5)", layerNorm(e.x)]],
    rms_norm: (e) => [["value", "x ÷ √(mean of x² + 1e-6)", rmsNorm(e.x)]],
    feed_forward_relu: (e) => {
      const hidden = relu(linear(e.x, e.W1, e.b1));
      return [["hidden", "max(0, x W1ᵀ + b1)", hidden], ["value", "hidden W2ᵀ + b2", linear(hidden, e.W2, e.b2)]];
    },
    masking: (e) => [
      ["minus_infinity", "softmax, −∞ where masked; a row of −∞ alone: 0", Attention.masked(e.scores, e.mask).map(Attention.softmax)],
      ["minus_1e9", "softmax, −1e9 where masked", e.scores.map((row, t) => Attention.softmax(row.map((x, s) => (e.mask[t][s] ? x : -1e9))))],
    ],
    transformer_block: block,
  };

  /**
   * What an example publishes, computed from what it gives.
   * @returns {?{name: string, formula: string, got, published}[]} in the order of the computation; null for a part that
   *   is not known here
   */
  function steps(example) {
    const compute = example.W_Q && !example.W1 ? multiHead : named[example.name];
    return compute ? compute(example).map(([name, formula, got]) => ({ name, formula, got, published: example[name] })) : null;
  }

  /** The largest difference of two arrays of any depth; NaN where shapes differ. */
  function apart(a, b) {
    if (!Array.isArray(a)) return Math.abs(a - b);
    return a.length === b?.length ? Math.max(0, ...a.map((one, i) => apart(one, b[i]))) : NaN;
  }

  return { steps, apart, linear, layerNorm, rmsNorm, sinusoidal, rotated };
})();
