"use strict";

/**
 * A trained decoder on the normal form (minigpt/normal_form.py), by the formulas of minigpt/plain.py: numbers are kept as
 * float32 and added up in float64. Every sum runs in one order, however many tokens are computed at once, so that a
 * changed text gives the same bits as a new one.
 *
 * Axes: T tokens, H query heads, G key/value heads, K head size, D model width, F feed-forward width, V vocabulary,
 * C context length, L layers, W = (H + 2G)·K. Weights are (out, in): y = W x + b. Arrays are flat, the last axis first.
 */
const Model = (() => {
  const LAYER_NORM_EPSILON = 1e-5;
  const RMS_NORM_EPSILON = 1e-6;
  const REMEMBERED = 4; // traces whose rows are used again

  // ── the parts ──────────────────────────────────────────────────────────────────────────────────────────────

  /** y_t += W x_t + b: (T, I), (O, I) → (T, O). Four tokens and two outputs at a time: of six numbers, eight products. */
  function addLinear(x, weight, bias, y, nToken) {
    const nOut = bias.length;
    const nIn = weight.length / nOut;
    const wholeTokens = nToken - (nToken % 4);
    const wholeOut = nToken < 4 ? 0 : nOut - (nOut % 2);
    for (let j = 0; j < wholeOut; j += 2) {
      const w0 = j * nIn;
      const w1 = w0 + nIn;
      for (let t = 0; t < wholeTokens; t += 4) {
        const x0 = t * nIn;
        const x1 = x0 + nIn;
        const x2 = x1 + nIn;
        const x3 = x2 + nIn;
        let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
        for (let i = 0; i < nIn; i++) {
          const a = weight[w0 + i];
          const b = weight[w1 + i];
          const p = x[x0 + i];
          const q = x[x1 + i];
          const r = x[x2 + i];
          const s = x[x3 + i];
          a0 += a * p;
          a1 += a * q;
          a2 += a * r;
          a3 += a * s;
          b0 += b * p;
          b1 += b * q;
          b2 += b * r;
          b3 += b * s;
        }
        const out = t * nOut + j;
        y[out] += a0 + bias[j];
        y[out + 1] += b0 + bias[j + 1];
        y[out + nOut] += a1 + bias[j];
        y[out + nOut + 1] += b1 + bias[j + 1];
        y[out + 2 * nOut] += a2 + bias[j];
        y[out + 2 * nOut + 1] += b2 + bias[j + 1];
        y[out + 3 * nOut] += a3 + bias[j];
        y[out + 3 * nOut + 1] += b3 + bias[j + 1];
      }
    }
    for (let t = 0; t < nToken; t++) {
      addProduct(x, t * nIn, weight, bias, y, t * nOut, t < wholeTokens ? wholeOut : 0);
    }
  }

  /** The same for one token, from output `first` on: four outputs at a time. */
  function addProduct(x, at, weight, bias, y, out, first) {
    const nOut = bias.length;
    const nIn = weight.length / nOut;
    let j = first;
    for (; j + 3 < nOut; j += 4) {
      const w0 = j * nIn;
      const w1 = w0 + nIn;
      const w2 = w1 + nIn;
      const w3 = w2 + nIn;
      let a = 0, b = 0, c = 0, d = 0;
      for (let i = 0; i < nIn; i++) {
        const p = x[at + i];
        a += weight[w0 + i] * p;
        b += weight[w1 + i] * p;
        c += weight[w2 + i] * p;
        d += weight[w3 + i] * p;
      }
      y[out + j] += a + bias[j];
      y[out + j + 1] += b + bias[j + 1];
      y[out + j + 2] += c + bias[j + 2];
      y[out + j + 3] += d + bias[j + 3];
    }
    for (; j < nOut; j++) {
      let total = 0;
      for (let i = 0; i < nIn; i++) total += weight[j * nIn + i] * x[at + i];
      y[out + j] += total + bias[j];
    }
  }

  /** layer_norm or rms_norm of each row, times gain plus shift: (T, D) → (T, D). */
  function normed(x, { gain, shift, centred }) {
    const width = gain.length;
    const y = new Float32Array(x.length);
    for (let at = 0; at < x.length; at += width) {
      let mean = 0;
      let squares = 0;
      if (centred) {
        for (let i = 0; i < width; i++) mean += x[at + i];
        mean /= width;
      }
      for (let i = 0; i < width; i++) squares += (x[at + i] - mean) ** 2;
      const scale = 1 / Math.sqrt(squares / width + (centred ? LAYER_NORM_EPSILON : RMS_NORM_EPSILON));
      for (let i = 0; i < width; i++) y[at + i] = (x[at + i] - mean) * scale * gain[i] + shift[i];
    }
    return y;
  }

  /** erf(x) = 2/√π · x e^(−x²) Σ_n (2x²)ⁿ / (1·3·5…(2n+1)), all terms of one sign. */
  function erf(x) {
    if (Math.abs(x) > 6) return Math.sign(x);
    let term = x;
    let total = x;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(total); n++) total += term *= (2 * x * x) / (2 * n + 1);
    return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * total;
  }

  /** up = activate(up, gate), number by number. */
  const activations = {
    relu: (up) => (up > 0 ? up : 0),
    relu2: (up) => (up > 0 ? up * up : 0),
    gelu: (up) => 0.5 * up * (1 + erf(up * Math.SQRT1_2)),
    swiglu: (up, gate) => (up * gate) / (1 + Math.exp(-gate)),
  };

  /** Softmax of numbers, in float64. */
  function softmax(scores) {
    const largest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
    const powers = Float64Array.from(scores, (score) => Math.exp(score - largest));
    const total = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / total);
  }

  // ── from the page's data to arrays ─────────────────────────────────────────────────────────────────────────

  /** The zlib-deflated floats of a blob in base64. */
  async function inflated(blob, precision) {
    const packed = atob(blob);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    return precision === "f16" ? widened(new Uint16Array(buffer)) : new Float32Array(buffer);
  }

  /** float16 → float32: sign, five bits of exponent, ten of fraction. */
  function widened(halves) {
    const table = Float32Array.from({ length: 1 << 15 }, (_, bits) => {
      const [exponent, fraction] = [bits >> 10, bits & 0x3ff];
      if (exponent === 31) return fraction ? NaN : Infinity;
      return exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    });
    return Float32Array.from(halves, (bits) => (bits >> 15 ? -table[bits & 0x7fff] : table[bits]));
  }

  /** Every array of the normal form by its name; those that are left out are full of what changes nothing. */
  function named(arrays, floats, entry) {
    const { n_layer: L, d_model: D, d_ff: F, head_dim: K, context_length: C } = entry.sizes;
    const W = (entry.sizes.n_head + 2 * entry.sizes.n_kv_head) * K;
    const half = Math.floor(K / 2);
    const found = {
      position_table: new Float32Array(C * D),
      cos: new Float32Array(C * half).fill(1),
      sin: new Float32Array(C * half),
    };
    for (const name of ["embedding", "final"]) {
      found[`${name}_gain`] = new Float32Array(D).fill(1);
      found[`${name}_shift`] = new Float32Array(D);
    }
    for (const name of ["attn", "mlp"]) {
      found[`layers.${name}_gain`] = new Float32Array(L * D).fill(1);
      found[`layers.${name}_shift`] = new Float32Array(L * D);
    }
    for (const [name, size] of Object.entries({ qkv: W, output: D, up: F, gate: F, down: D })) {
      found[`layers.${name}_bias`] = new Float32Array(L * size);
    }
    let start = 0;
    for (const { name, shape } of arrays) {
      const size = shape.reduce((product, n) => product * n, 1);
      found[name] = floats.subarray(start, start + size);
      start += size;
    }
    if (start !== floats.length) throw new Error("the page's weights are damaged: export it again");
    found.head ??= found.token_table; // tied
    return found;
  }

  /** The arrays of one block. */
  function layerOf(found, layer, nLayer, centred) {
    const part = (name) => {
      const all = found[`layers.${name}`];
      return all?.subarray((layer * all.length) / nLayer, ((layer + 1) * all.length) / nLayer);
    };
    const linear = (name) => ({ weight: part(`${name}_weight`), bias: part(`${name}_bias`) });
    const norm = (name) => ({ gain: part(`${name}_gain`), shift: part(`${name}_shift`), centred });
    const [attnNorm, mlpNorm] = [norm("attn"), norm("mlp")];
    return { attnNorm, mlpNorm, ...Object.fromEntries(["qkv", "output", "up", "gate", "down"].map((n) => [n, linear(n)])) };
  }

  // ── the model ──────────────────────────────────────────────────────────────────────────────────────────────

  /** One checkpoint in the page (the interface of an engine): any text, any change of a head. */
  class Model {
    canType = true;
    canChange = true;
    #recent = []; // the last traces, the latest first

    /** @param {object} entry one of the payload's models */
    static async of(entry) {
      return new Model(entry, await inflated(entry.blob, entry.precision));
    }

    constructor(entry, floats) {
      const { sizes, flags } = entry;
      const found = named(entry.arrays, floats, entry);
      Object.assign(this, { name: entry.name, step: entry.step, precision: entry.precision, sizes, flags });
      this.keyHead = entry.key_head;
      this.outside = found;
      this.embeddingNorm = { gain: found.embedding_gain, shift: found.embedding_shift, centred: flags.centred };
      this.finalNorm = { gain: found.final_gain, shift: found.final_shift, centred: flags.centred };
      this.noBias = new Float32Array(sizes.vocab_size);
      this.layers = Array.from({ length: sizes.n_layer }, (_, l) => layerOf(found, l, sizes.n_layer, flags.centred));
    }

    get contextLength() {
      return this.sizes.context_length;
    }

    /**
     * All that the model computes on a text; it stays as it is when other texts are traced.
     * @param {number[]} ids (T,), 1 ≤ T ≤ C
     * @param {?Array<{layer: number, head: number, off?: boolean, weights?: function(number): ?Float64Array}>} changes
     *   heads whose output is 0, or whose weights in row t are `weights(t)` unless that is null; all later numbers follow
     * @returns {Promise<Trace>}
     */
    async trace(ids, changes = null) {
      if (ids.length < 1 || ids.length > this.contextLength) {
        throw new RangeError(`${ids.length} tokens: the model reads 1 to ${this.contextLength}`);
      }
      const trace = new Trace(this, Array.from(ids), changes ?? []);
      const shared = this.#recent.map((old) => trace.sharedRows(old));
      const sum = (rows) => rows.reduce((total, n) => total + n, 0);
      const best = shared.reduce((most, rows, i) => (sum(rows) > sum(shared[most]) ? i : most), 0);
      trace.compute(this.#recent[best], shared[best]);
      this.#recent = [trace, ...this.#recent].slice(0, REMEMBERED);
      return trace;
    }

    /** Next-token logits if the model ended with this row of the stream: (D,) → (V,). */
    logitsOf(row) {
      const logits = new Float32Array(this.sizes.vocab_size);
      addLinear(normed(row, this.finalNorm), this.outside.head, this.noBias, logits, 1);
      const { softcap } = this.flags;
      return softcap ? logits.map((logit) => softcap * Math.tanh(logit / softcap)) : logits;
    }

    /** The stream's rows from `first` on before the first block: (T, D). */
    embed(ids, stream, first) {
      const { token_table: tokens, position_table: positions } = this.outside;
      const D = this.sizes.d_model;
      for (let t = first; t < ids.length; t++) {
        for (let i = 0; i < D; i++) stream[t * D + i] = tokens[ids[t] * D + i] + positions[t * D + i];
      }
      if (this.flags.embedding_norm) stream.set(normed(stream.subarray(first * D), this.embeddingNorm), first * D);
    }

    /** Queries and keys as they enter attention, in place: normed and rotated, from row `first` on of (T, W). */
    turn(qkv, first) {
      const { n_head: H, n_kv_head: G, head_dim: K } = this.sizes;
      const { cos, sin } = this.outside;
      const [W, half] = [(H + 2 * G) * K, Math.floor(K / 2)];
      for (let t = first; t * W < qkv.length; t++) {
        for (let at = t * W; at < t * W + (H + G) * K; at += K) {
          if (this.flags.qk_norm) {
            let squares = 0;
            for (let i = 0; i < K; i++) squares += qkv[at + i] * qkv[at + i];
            const scale = 1 / Math.sqrt(squares / K + RMS_NORM_EPSILON);
            for (let i = 0; i < K; i++) qkv[at + i] *= scale;
          }
          for (let i = 0; i < half; i++) {
            const a = qkv[at + i];
            const b = qkv[at + half + i];
            const c = cos[t * half + i];
            const s = sin[t * half + i];
            qkv[at + i] = a * c - b * s;
            qkv[at + half + i] = a * s + b * c;
          }
        }
      }
    }

    /** stream += feed_forward(norm(stream)), rows (T, D). */
    addFeedForward(stream, layer, nToken) {
      const F = this.sizes.d_ff;
      const x = normed(stream, layer.mlpNorm);
      const up = new Float32Array(nToken * F);
      addLinear(x, layer.up.weight, layer.up.bias, up, nToken);
      const gate = layer.gate.weight ? new Float32Array(nToken * F) : up;
      if (layer.gate.weight) addLinear(x, layer.gate.weight, layer.gate.bias, gate, nToken);
      const activate = activations[this.flags.activation];
      for (let i = 0; i < up.length; i++) up[i] = activate(up[i], gate[i]);
      addLinear(up, layer.down.weight, layer.down.bias, stream, nToken);
    }
  }

  // ── what it computes on one text ───────────────────────────────────────────────────────────────────────────

  /** All numbers of one text: views into arrays that nothing changes any more. */
  class Trace {
    #model;
    #changes;
    #qkv; // a layer: (T, W), as they enter attention
    #weights; // a layer: for each t the heads' rows (H, t + 1), one after the other
    #heads; // a layer: (T, H·K), before W_O
    #stream; // before the first block and after each: (T, D)
    #logits = []; // a token: (V,) once it was asked for

    constructor(model, ids, changes) {
      const { n_layer: L, n_head: H, n_kv_head: G, head_dim: K, d_model: D } = model.sizes;
      const T = ids.length;
      const empty = (count, size) => Array.from({ length: count }, () => new Float32Array(size));
      this.#model = model;
      this.#changes = changes;
      this.ids = ids;
      this.length = T;
      this.#qkv = empty(L, T * (H + 2 * G) * K);
      this.#weights = empty(L, (H * T * (T + 1)) / 2);
      this.#heads = empty(L, T * H * K);
      this.#stream = empty(L + 1, T * D);
    }

    /** How many rows of another trace are this one's too, in each layer. */
    sharedRows(old) {
      const differs = this.ids.findIndex((id, t) => id !== old.ids[t]);
      const rows = differs < 0 ? this.length : differs;
      let isSame = true;
      return this.#qkv.map((_, l) => ((isSame &&= this.#hasSameChanges(old, l)) ? rows : 0));
    }

    #hasSameChanges(old, layer) {
      const [mine, others] = [this, old].map((trace) => trace.#changes.filter((change) => change.layer === layer));
      const isSame = (a, b) => a.head === b.head && a.off === b.off && a.weights === b.weights;
      return mine.length === others.length && mine.every((change, i) => isSame(change, others[i]));
    }

    /** Fill the arrays: in layer l the first `shared[l]` rows from another trace. */
    compute(old, shared) {
      const { n_layer: L, n_head: H, d_model: D } = this.#model.sizes;
      const copy = (to, from, size) => to.set(from.subarray(0, size));
      const known = old ? Math.max(...shared) : 0;
      if (known) copy(this.#stream[0], old.#stream[0], known * D);
      this.#model.embed(this.ids, this.#stream[0], known);
      for (let l = 0; l < L; l++) {
        const rows = old ? shared[l] : 0;
        if (rows) {
          copy(this.#qkv[l], old.#qkv[l], (rows * this.#qkv[l].length) / this.length);
          copy(this.#weights[l], old.#weights[l], (H * rows * (rows + 1)) / 2);
          copy(this.#heads[l], old.#heads[l], (rows * this.#heads[l].length) / this.length);
          copy(this.#stream[l + 1], old.#stream[l + 1], rows * D);
        }
        this.#computeBlock(l, rows);
      }
      if (old) this.#logits = old.#logits.slice(0, shared[L - 1]);
    }

    #computeBlock(l, first) {
      const D = this.#model.sizes.d_model;
      const layer = this.#model.layers[l];
      const [nToken, W] = [this.length - first, layer.qkv.bias.length];
      const before = this.#stream[l].subarray(first * D);
      const after = this.#stream[l + 1].subarray(first * D);
      const x = normed(before, layer.attnNorm);
      addLinear(x, layer.qkv.weight, layer.qkv.bias, this.#qkv[l].subarray(first * W), nToken);
      this.#model.turn(this.#qkv[l], first);
      for (let t = first; t < this.length; t++) this.#attend(l, t);
      after.set(before);
      addLinear(this.#heads[l].subarray((first * this.#heads[l].length) / this.length),
        layer.output.weight, layer.output.bias, after, nToken);
      this.#model.addFeedForward(after, layer, nToken);
    }

    /** Weights and output of all heads in row t. */
    #attend(l, t) {
      for (let h = 0; h < this.#model.sizes.n_head; h++) {
        const change = this.#changes.find(({ layer, head }) => layer === l && head === h);
        const row = this.weights(l, h, t);
        const given = change?.weights?.(t);
        if (given) row.set(given);
        else this.#softmaxOfScores(l, h, t, row);
        if (!change?.off) this.#mix(l, h, t, row);
      }
    }

    /** row = softmax of q·k_s / √K over the keys s ≤ t. */
    #softmaxOfScores(l, h, t, row) {
      const K = this.#model.sizes.head_dim;
      const [qkv, W, key] = [this.#qkv[l], this.#model.layers[l].qkv.bias.length, this.#keyAt(h)];
      const [query, scale] = [t * W + h * K, 1 / Math.sqrt(K)];
      const scores = new Float64Array(t + 1);
      let largest = -Infinity;
      let total = 0;
      for (let s = 0; s <= t; s++) {
        let score = 0;
        for (let i = 0, at = s * W + key; i < K; i++) score += qkv[query + i] * qkv[at + i];
        scores[s] = score * scale;
        if (scores[s] > largest) largest = scores[s];
      }
      for (let s = 0; s <= t; s++) total += scores[s] = Math.exp(scores[s] - largest);
      for (let s = 0; s <= t; s++) row[s] = scores[s] / total;
    }

    /** The head's output Σ_s row_s v_s: four keys at a time. */
    #mix(l, h, t, row) {
      const { n_kv_head: G, head_dim: K } = this.#model.sizes;
      const [qkv, W, value] = [this.#qkv[l], this.#model.layers[l].qkv.bias.length, this.#keyAt(h) + G * K];
      const sums = new Float64Array(K);
      let s = 0;
      for (; s + 3 <= t; s += 4) {
        const at = s * W + value;
        const a = row[s];
        const b = row[s + 1];
        const c = row[s + 2];
        const d = row[s + 3];
        for (let i = at; i < at + K; i++) {
          sums[i - at] += a * qkv[i] + b * qkv[i + W] + c * qkv[i + 2 * W] + d * qkv[i + 3 * W];
        }
      }
      for (; s <= t; s++) for (let i = 0, at = s * W + value; i < K; i++) sums[i] += row[s] * qkv[at + i];
      this.output(l, h, t).set(sums);
    }

    /** Where the key of query head h begins in a row (W,). */
    #keyAt(h) {
      return (this.#model.sizes.n_head + this.#model.keyHead[h]) * this.#model.sizes.head_dim;
    }

    #part(l, t, start) {
      const at = t * this.#model.layers[l].qkv.bias.length + start;
      return this.#qkv[l].subarray(at, at + this.#model.sizes.head_dim);
    }

    /** The query of query head h, normed and rotated, not divided by √K: (K,). */
    query(l, h, t) {
      return this.#part(l, t, h * this.#model.sizes.head_dim);
    }

    /** The key that query head h uses, normed and rotated: (K,). */
    key(l, h, t) {
      return this.#part(l, t, this.#keyAt(h));
    }

    /** The value that query head h uses: (K,). */
    value(l, h, t) {
      return this.#part(l, t, this.#keyAt(h) + this.#model.sizes.n_kv_head * this.#model.sizes.head_dim);
    }

    /** The weights that made the head's output, or would have if it is off: (t + 1,). */
    weights(l, h, t) {
      const at = (this.#model.sizes.n_head * t * (t + 1)) / 2 + h * (t + 1);
      return this.#weights[l].subarray(at, at + t + 1);
    }

    /** The head's output before W_O: (K,). */
    output(l, h, t) {
      const { n_head: H, head_dim: K } = this.#model.sizes;
      return this.#heads[l].subarray((t * H + h) * K, (t * H + h + 1) * K);
    }

    /** Of the token after t: (V,). */
    logits(t) {
      return (this.#logits[t] ??= this.#logitsAfter(this.#stream.length - 1, t));
    }

    #logitsAfter(depth, t) {
      const D = this.#model.sizes.d_model;
      return this.#model.logitsOf(this.#stream[depth].subarray(t * D, (t + 1) * D));
    }

    /** The n likeliest next tokens if the model ended after `depth` blocks, the likeliest first (of equals the lowest id). */
    guesses(depth, t, n) {
      const isLast = depth === this.#stream.length - 1;
      const shares = softmax(isLast ? this.logits(t) : this.#logitsAfter(depth, t));
      const best = [];
      shares.forEach((p, id) => {
        if (best.length >= n && p <= best.at(-1).p) return;
        const place = best.findIndex((other) => other.p < p);
        best.splice(place < 0 ? best.length : place, 0, { id, p });
        if (best.length > n) best.pop();
      });
      return best;
    }

    /** −ln p of the token after t, in nats; NaN where the text ends. */
    loss(t) {
      if (t + 1 >= this.length) return NaN;
      const logits = this.logits(t);
      const largest = logits.reduce((most, logit) => Math.max(most, logit), -Infinity);
      const total = logits.reduce((sum, logit) => sum + Math.exp(logit - largest), 0);
      return Math.log(total) - (logits[this.ids[t + 1]] - largest);
    }
  }

  return Model;
})();
