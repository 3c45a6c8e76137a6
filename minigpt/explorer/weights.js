"use strict";

/** The weights of one of the payload's models: the arrays of the normal form (minigpt/normal_form.py), flat, row by row. */
const Weights = (() => {
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
  function named(floats, entry) {
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
    for (const { name, shape } of entry.arrays) {
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
    const linears = ["qkv", "output", "up", "gate", "down"].map((name) => [name, linear(name)]);
    return { attnNorm, mlpNorm, ...Object.fromEntries(linears) };
  }

  /**
   * @param {object} entry one of the payload's models
   * @returns {Promise<{outside: Object<string, Float32Array>, layers: object[]}>} all arrays by their name, and those of
   *   each block: norms {gain, shift, centred} and linears {weight, bias}
   */
  async function of(entry) {
    const outside = named(await inflated(entry.blob, entry.precision), entry);
    const { n_layer: nLayer } = entry.sizes;
    const layers = Array.from({ length: nLayer }, (_, l) => layerOf(outside, l, nLayer, entry.flags.centred));
    return { outside, layers };
  }

  return { of };
})();
