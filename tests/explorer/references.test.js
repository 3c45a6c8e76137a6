"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const { References, Tokenizer, golden } = require("./load.js");
const { near } = require("./near.js");

const { tokenizer: entry, cases } = golden().references;
const tokenizer = Tokenizer.of(entry);

test("patterns, how near heads are to them, and their names", () => {
  for (const { ids, maps, patterns, closeness, coverage, names, keys, first } of cases) {
    const drawn = Object.keys(patterns).map((name) => [name, References.pattern(name, ids, tokenizer)]);
    for (const [name, rows] of drawn) {
      rows.forEach((row, t) => near(row ?? new Float64Array(t + 1), patterns[name][t].slice(0, t + 1), 1e-7, name));
    }
    maps.forEach((map, head) => {
      const row = (t) => map[t].slice(0, t + 1);
      const found = drawn.map(([name, rows]) => [name, References.closeness(row, rows, ids.length)]);
      for (const [name, measures] of found) {
        near([measures.coverage], [coverage[name]], 1e-12, name);
        for (const [measure, expected] of Object.entries(closeness[name])) {
          near([measures[measure]], [expected[head]], 1e-6, `${measure} of ${name}`);
        }
      }
      assert.strictEqual(References.nearest(Object.fromEntries(found)), names[head]);
      near([References.effectiveKeys(row, ids.length)], [keys[head]], 1e-9);
      near([References.firstMass(row, ids.length)], [first[head]], 1e-9);
    });
  }
});

test("a name that untrained heads deserve as much is not given", () => {
  const measures = { previous: { tv: 0.2, lift: 0.8 }, first: { tv: NaN, lift: NaN } };
  assert.strictEqual(References.nearest(measures, { previous: { maximum: 0.1 } }), "previous");
  assert.strictEqual(References.nearest(measures, { first: { maximum: 0.9 } }), "previous");
  assert.strictEqual(References.nearest(measures, { previous: { maximum: 0.8 } }), null);
  assert.strictEqual(References.nearest({ first: measures.first }), null);
});

test("punctuation may have blanks around it and nothing else", () => {
  const tokens = ["", "a", ".", "\x1c.\x85 ", ". .", " ", "a.", "!?"];
  const packed = tokens.map((token) => Buffer.from(token).toString("base64"));
  const marks = Tokenizer.of({ kind: "bpe", pattern: ".", tokens: packed });
  const [last] = References.pattern("punctuation", [1, 2, 3, 4, 5, 6, 7], marks).slice(-1);
  near(last, [0, 1 / 3, 1 / 3, 0, 0, 0, 1 / 3], 1e-12);
});

test("the names that are offered are known, and no other", () => {
  for (const name of References.names) References.pattern(name, [1, 2], tokenizer);
  assert.throws(() => References.pattern("toString", [1], tokenizer), /toString: no such reference/);
  assert.throws(() => References.pattern("window:0", [1], tokenizer), /window:0: no such reference/);
});
