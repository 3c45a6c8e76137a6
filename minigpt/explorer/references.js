"use strict";

/**
 * Fixed attention patterns that heads are held against, and how near heads are to them, as minigpt/inspection defines
 * it. Row 0 is left out by every pattern: it has one key, so that all heads agree there with everything.
 *
 * Axes: T tokens; row t has the keys 0 … t.
 */
const References = (() => {
  const names = [
    "uniform", "previous", "first", "self", "window:4", "duplicate", "induction", "punctuation", "brackets",
  ];
  const NEAR = 0.5; // largest total variation of a head that is named after a reference
  const NEAR_UNIFORM = 0.1; // ... and after uniform
  const BRACKETS = { ")": "(", "]": "[", "}": "{", "）": "（", "］": "［", "」": "「", "』": "『", "】": "【", "》": "《" };
  const OPENING = new Set(Object.values(BRACKETS));
  const PUNCTUATION = /^[\t-\r\x1c-\x20\x85\p{Z}]*\p{P}+[\t-\r\x1c-\x20\x85\p{Z}]*$/u; // with space around it

  /** Whether row t should move information from key s, by the position alone. */
  const byPosition = {
    uniform: () => true,
    previous: (t, s) => s === t - 1,
    first: (t, s) => s === 0,
    self: (t, s) => s === t,
  };

  /** The same, by which tokens there are. */
  const byIdentity = {
    duplicate: (ids) => (t, s) => s < t && ids[s] === ids[t],
    induction: (ids) => (t, s) => s > 0 && ids[s - 1] === ids[t],
  };

  /** The same, by the tokens' text. */
  const byText = {
    punctuation(texts) {
      const marks = texts.map((text) => PUNCTUATION.test(text));
      return (t, s) => marks[s];
    },
    brackets(texts) {
      const open = innermostOpen(texts);
      return (t, s) => s === open[t];
    },
  };

  /**
   * Where a head should move information from: for each row the shares of its keys, which sum to 1; null where the
   * pattern has nothing to say.
   * @param {string} name one of `names`, `window:` with any width
   * @param {number[]} ids (T,)
   * @param {{bytes: function(number): Uint8Array}} tokenizer
   * @returns {(?Float64Array)[]} (T,) of (t + 1,)
   */
  function pattern(name, ids, tokenizer) {
    const isKey = rule(name, ids, tokenizer);
    return Array.from(ids, (_, t) => {
      const row = new Float64Array(t + 1);
      let count = 0;
      for (let s = 0; s <= t; s++) count += row[s] = +isKey(t, s);
      return t > 0 && count > 0 ? row.map((is) => is / count) : null;
    });
  }

  function rule(name, ids, tokenizer) {
    const width = /^window:([1-9]\d*)$/.exec(name)?.[1];
    if (width) return (t, s) => s > t - width;
    if (Object.hasOwn(byPosition, name)) return byPosition[name];
    if (Object.hasOwn(byIdentity, name)) return byIdentity[name](ids);
    if (!Object.hasOwn(byText, name)) throw new Error(`${name}: no such reference; there are ${names.join(", ")}`);
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return byText[name](Array.from(ids, (id) => decoder.decode(tokenizer.bytes(id))));
  }

  /** For each token the place of the innermost bracket still open once it is read, or −1. */
  function innermostOpen(texts) {
    const stillOpen = [];
    return texts.map((text, t) => {
      for (const character of text) {
        if (OPENING.has(character)) stillOpen.push({ character, t });
        else if (stillOpen.length && stillOpen.at(-1).character === BRACKETS[character]) stillOpen.pop();
      }
      return stillOpen.at(-1)?.t ?? -1;
    });
  }

  /**
   * How near a head is to a pattern: means over the rows where it is defined, NaN where there is none.
   * @param {function(number): ArrayLike<number>} weightsOfRow t → (t + 1,)
   * @param {(?Float64Array)[]} wanted a `pattern` on the same text
   * @param {number} length T
   * @returns {{tv, mass, agreement, coverage, lift}} tv: ½ Σ|A − P|, the share of the weight that is elsewhere; mass:
   *   weight on the pattern's keys; agreement: share of rows whose largest weight is on one; coverage: share of rows
   *   where the pattern is defined; lift: (mass − uniform's) / (1 − uniform's)
   */
  function closeness(weightsOfRow, wanted, length) {
    let [rows, tv, mass, agreement, uniform] = [0, 0, 0, 0, 0];
    for (let t = 1; t < length; t++) {
      const target = wanted[t];
      if (!target) continue;
      const row = weightsOfRow(t);
      let largest = 0;
      for (let s = 0; s <= t; s++) {
        tv += Math.abs(row[s] - target[s]) / 2;
        if (target[s] > 0) [mass, uniform] = [mass + row[s], uniform + 1 / (t + 1)];
        if (row[s] > row[largest]) largest = s;
      }
      agreement += target[largest] > 0;
      rows += 1;
    }
    const [mean, room] = [mass / rows, 1 - uniform / rows];
    const lift = room > 1e-9 ? (mean - uniform / rows) / room : NaN;
    return { tv: tv / rows, mass: mean, agreement: agreement / rows, coverage: rows / (length - 1), lift };
  }

  /**
   * The reference that a head is named after: the one of the smallest total variation, if it is near and no head of an
   * untrained network leans to it as much; else null.
   * @param {Object<string, {tv: number, lift: number}>} measures the `closeness` to each reference
   * @param {?Object<string, {maximum: number}>} nulls the largest lift of untrained heads, where it is known
   */
  function nearest(measures, nulls = null) {
    const defined = Object.keys(measures).filter((name) => !Number.isNaN(measures[name].tv));
    if (defined.length === 0) return null;
    const name = defined.reduce((best, other) => (measures[other].tv < measures[best].tv ? other : best));
    const { tv, lift } = measures[name];
    if (name === "uniform") return tv <= NEAR_UNIFORM ? name : null;
    return tv <= NEAR && !(lift <= nulls?.[name]?.maximum) ? name : null;
  }

  /** e^entropy of a row, the number of keys with equal weights that would have it: mean over the rows after row 0. */
  const effectiveKeys = (weightsOfRow, length) =>
    meanOfRows(length, (t) => Math.exp(-weightsOfRow(t).reduce((sum, w) => sum + (w > 0 ? w * Math.log(w) : 0), 0)));

  /** Weight on the first token: mean over the rows after row 0, which has no other. */
  const firstMass = (weightsOfRow, length) => meanOfRows(length, (t) => weightsOfRow(t)[0]);

  function meanOfRows(length, measure) {
    let total = 0;
    for (let t = 1; t < length; t++) total += measure(t);
    return total / (length - 1);
  }

  return { names, pattern, closeness, nearest, effectiveKeys, firstMass };
})();
