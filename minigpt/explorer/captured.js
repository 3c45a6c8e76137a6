/**
 * A model whose weights the page does not have: what it did with some texts is in the payload, or a server on this
 * machine tells it. L layers, H query heads, G key/value heads, T tokens, K head size, V vocabulary.
 */
class Captured {
  /** @param {object} payload of the page @param {number} index of the checkpoint among those it has */
  constructor(payload, index = 0) {
    const about = Captured.checkpoints(payload)[index];
    Object.assign(this, { name: about.name, sizes: about.sizes, precision: about.precision, index });
    this.server = payload.server;
    this.canType = Boolean(payload.server);
    this.canChange = false;
    this.entries = payload.captured.filter((entry) => entry.name === about.name);
  }

  /** An engine for each checkpoint that the payload has captured texts of, or its server models of. */
  static engines(payload) {
    return Captured.checkpoints(payload).map((about, index) => new Captured(payload, index));
  }

  static checkpoints(payload) {
    if (payload.server) return payload.server.models;
    const first = new Map(payload.captured.map((entry) => [entry.name, entry]).reverse());
    return [...new Set(payload.captured.map((entry) => entry.name))].map((name) => first.get(name));
  }

  get contextLength() {
    return this.sizes.context_length;
  }

  /** Texts that can be traced; empty where any can. */
  get texts() {
    return this.entries.map((entry) => entry.text);
  }

  /** Ids of a captured text. */
  ids(text) {
    const entry = this.entries.find((candidate) => candidate.text === text) ?? this.entries[0];
    return entry.ids;
  }

  /** The trace of a captured text, or of any that the server reads. */
  async trace(ids, changes = null) {
    if (changes?.length) throw new Error("Heads can be changed only in a page that carries the model's weights.");
    const entry = this.server ? await this.ask(ids) : this.entries.find((candidate) => String(candidate.ids) === String(ids));
    if (!entry) throw new Error("This page has no numbers of this text: it carries captured texts, and no weights.");
    return Captured.Trace.of(entry, this.sizes);
  }

  async ask(ids) {
    const request = {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Explorer-Token": this.server.token },
      body: JSON.stringify({ ids: [...ids], model: this.index }),
    };
    const answer = await fetch(`${this.server.url}/api/trace`, request).catch(() => {
      const sentence = "The server of this page does not answer: start it again, and reload the page.";
      throw Object.assign(new Error(sentence), { key: "mistake.server" });
    });
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    return content;
  }

  /** One text's numbers; see the engine's Trace in model.js, whose interface this is. */
  static Trace = class {
    constructor(entry, sizes, arrays) {
      Object.assign(this, arrays, { ids: entry.ids, length: entry.ids.length, sizes, count: entry.guesses.count });
    }

    static async of(entry, sizes) {
      const { query, key, value, weights, losses, logits, guesses } = entry;
      const blobs = {
        queries: [query, Float32Array], keys: [key, Float32Array], values: [value, Float32Array], halves: [weights, Uint16Array],
        losses: [losses, Float32Array], largest: [logits.values, Float32Array], largestIds: [logits.ids, Uint32Array],
        totals: [logits.log_sum, Float32Array], guessedIds: [guesses.ids, Uint32Array], guessed: [guesses.p, Float32Array],
      };
      const arrays = {};
      await Promise.all(Object.entries(blobs).map(async ([name, [text, Kind]]) => {
        if (text) arrays[name] = new Kind(await Captured.inflated(text));
      }));
      return new this(entry, sizes, arrays);
    }

    /** The key/value head that a query head uses. */
    group(h) {
      return Math.floor((h * this.sizes.n_kv_head) / this.sizes.n_head);
    }

    vector(array, heads, l, h, t) {
      const size = this.sizes.head_dim, start = ((l * heads + h) * this.length + t) * size;
      return array.subarray(start, start + size);
    }

    query(l, h, t) {
      return this.vector(this.queries, this.sizes.n_head, l, h, t);
    }

    key(l, h, t) {
      return this.vector(this.keys, this.sizes.n_kv_head, l, this.group(h), t);
    }

    value(l, h, t) {
      return this.vector(this.values, this.sizes.n_kv_head, l, this.group(h), t);
    }

    /** The model's own, kept in 16 bits: to 0.0005 of the largest. */
    weights(l, h, t) {
      const triangle = (this.length * (this.length + 1)) / 2;
      const start = (l * this.sizes.n_head + h) * triangle + (t * (t + 1)) / 2;
      return Float64Array.from(this.halves.subarray(start, start + t + 1), Captured.fromHalf);
    }

    /** Σ weight × value, of the weights as they are kept. */
    output(l, h, t) {
      const sum = new Float64Array(this.sizes.head_dim);
      this.weights(l, h, t).forEach((weight, s) => this.value(l, h, s).forEach((x, i) => (sum[i] += weight * x)));
      return Float32Array.from(sum);
    }

    /** All logits; where the largest alone were captured, NaN for the others. */
    logits(t) {
      const size = this.sizes.vocab_size, kept = this.largest.length / this.length;
      const values = this.largest.subarray(t * kept, (t + 1) * kept);
      if (!this.largestIds) return values;
      const all = new Float32Array(size).fill(NaN);
      values.forEach((x, i) => (all[this.largestIds[t * kept + i]] = x));
      return all;
    }

    /** The model's distribution; NaN where the logit was not captured. */
    shares(t) {
      const logits = this.logits(t);
      return this.totals ? Float64Array.from(logits, (x) => Math.exp(x - this.totals[t])) : Attention.softmax(Array.from(logits));
    }

    guesses(depth, t, n) {
      const start = (depth * this.length + t) * this.count;
      return Array.from({ length: Math.min(n, this.count) }, (_, i) => ({ id: this.guessedIds[start + i], p: this.guessed[start + i] }));
    }

    loss(t) {
      return t < this.losses.length ? this.losses[t] : NaN;
    }
  };

  /** Base64 of deflated bytes → the bytes. */
  static async inflated(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  /** The number that 16 bits stand for, of those from 0 to 1 (IEEE 754 binary16). */
  static fromHalf(bits) {
    const exponent = bits >> 10, fraction = bits & 1023;
    return exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  }
}
