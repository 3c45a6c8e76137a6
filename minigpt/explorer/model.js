"use strict";

/**
 * A trained decoder on the normal form (minigpt/normal_form.py), by the formulas of minigpt/plain.py. A changed text
 * gives the same bits as a new one, and costs what comes after the change.
 *
 * Axes: T tokens, H query heads, G key/value heads, K head size, D model width, F feed-forward width, V vocabulary,
 * C context length, L layers, W = (H + 2G)·K, D = H·K. Weights are (out, in): y = W x + b. Arrays are flat, row by row.
 */
const Model = (() => {
  const { RMS_NORM_EPSILON, addLinear, normed, activations, softmax } = Numbers;
  const REMEMBERED = 4; // traces whose rows are used again

  // ── the model ──────────────────────────────────────────────────────────────────────────────────────────────

  /** One checkpoint in the page (the interface of an engine): any text, any change of a head. */
  class Model {
    canType = true;
    canChange = true;
    #recent = []; // the last traces, the latest first

    /** @param {object} entry one of the payload's models */
    static async of(entry) {
      return new Model(entry, await Weights.of(entry));
    }

    constructor({ name, step, precision, sizes, flags, key_head: keyHead }, { outside, layers }) {
      Object.assign(this, { name, step, precision, sizes, flags, keyHead, outside, layers });
      this.embeddingNorm = { gain: outside.embedding_gain, shift: outside.embedding_shift, centred: flags.centred };
      this.finalNorm = { gain: outside.final_gain, shift: outside.final_shift, centred: flags.centred };
      this.noBias = new Float32Array(sizes.vocab_size);
    }

    get contextLength() {
      return this.sizes.context_length;
    }

    /**
     * All that the model computes on a text; it stays as it is when other texts are traced.
     * @param {number[]} ids (T,), 1 ≤ T ≤ C
     * @param {?Array<{layer: number, head: number, off?: boolean, weights?: function(number)}>} changes heads whose
     *   output is 0, or whose weights in row t are `weights(t)` (t + 1,) unless that is null; all later numbers follow
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

    /** Queries and keys as they enter attention, from row `first` on of (T, W): normed and rotated in place. */
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

  /** All numbers of one text, as views into arrays that nothing may change any more. */
  class Trace {
    #model;
    #changes;
    #qkv; // a layer: (T, W), as they enter attention
    #weights; // a layer: for each t the heads' rows (H, t + 1), one after the other
    #heads; // a layer: (T, D), before W_O
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
      this.#heads = empty(L, T * D);
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
          copy(this.#qkv[l], old.#qkv[l], rows * this.#model.layers[l].qkv.bias.length);
          copy(this.#weights[l], old.#weights[l], (H * rows * (rows + 1)) / 2);
          copy(this.#heads[l], old.#heads[l], rows * D);
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
      const heads = this.#heads[l].subarray(first * D); // H·K = D
      addLinear(heads, layer.output.weight, layer.output.bias, after, nToken);
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

    /** The model's distribution (V,) of the next token. */
    shares(t) {
      return Attention.softmax(Array.from(this.logits(t)));
    }

    #logitsAfter(depth, t) {
      const D = this.#model.sizes.d_model;
      return this.#model.logitsOf(this.#stream[depth].subarray(t * D, (t + 1) * D));
    }

    /** The n likeliest next tokens if the model ended after `depth` blocks, the likeliest first, then by id. */
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
