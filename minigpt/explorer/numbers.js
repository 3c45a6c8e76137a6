"use strict";

/**
 * What a decoder is computed of, on flat arrays of float32 with sums in float64. Every sum runs in one order, however
 * many tokens are computed at once. Weights are (out, in): y = W x + b. T tokens, D their width.
 */
const Numbers = (() => {
  const LAYER_NORM_EPSILON = 1e-5;
  const RMS_NORM_EPSILON = 1e-6;

  /** y_t += W x_t + b: (T, in) → (T, out). Four tokens and two outputs at a time: of six numbers, eight products. */
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
    gelu_tanh: (up) => 0.5 * up * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (up + 0.044715 * up ** 3))),
    swiglu: (up, gate) => (up * gate) / (1 + Math.exp(-gate)),
  };

  /** Softmax of numbers, in float64. */
  function softmax(scores) {
    const largest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
    const powers = Float64Array.from(scores, (score) => Math.exp(score - largest));
    const total = powers.reduce((sum, power) => sum + power, 0);
    return powers.map((power) => power / total);
  }

  return { RMS_NORM_EPSILON, addLinear, normed, activations, softmax };
})();
