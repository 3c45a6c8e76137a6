"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const zlib = require("node:zlib");
const { Model, References, golden } = require("./load.js");
const { near } = require("./near.js");

const cases = golden().models;
const places = (trace) => Array.from(trace.ids.keys());
const allLogits = (trace) => places(trace).map((t) => trace.logits(t));

for (const one of cases) {
  test(`${one.name}: every number`, async () => {
    const model = await Model.of(one.entry);
    const trace = await model.trace(one.ids);
    near(allLogits(trace), one.logits, 1e-5, "logits"); // the bar is 1e-4
    one.layers.forEach((layer, l) => {
      for (const [part, heads] of Object.entries(layer)) {
        heads.forEach((rows, h) => {
          const found = places(trace).map((t) => trace[part](l, h, t));
          near(found, part === "weights" ? rows.map((row, t) => row.slice(0, t + 1)) : rows, 1e-5, part);
        });
      }
    });
    near(places(trace).slice(0, -1).map((t) => trace.loss(t)), one.losses, 1e-5, "losses");
    assert.ok(Number.isNaN(trace.loss(trace.length - 1)));
  });

  test(`${one.name}: guesses after each block`, async () => {
    const trace = await (await Model.of(one.entry)).trace(one.ids);
    one.shares.forEach((rows, depth) => {
      rows.forEach((shares, t) => {
        const guesses = trace.guesses(depth, t, 5);
        near(guesses.map(({ p }) => p), [...shares].sort((a, b) => b - a).slice(0, 5), 1e-5);
        near(guesses.map(({ p }) => p), guesses.map(({ id }) => shares[id]), 1e-5);
      });
    });
    assert.strictEqual(trace.guesses(0, 0, 1e6).length, one.entry.sizes.vocab_size);
  });

  test(`${one.name}: heads off and replaced`, async () => {
    const model = await Model.of(one.entry);
    const rows = References.pattern("previous", one.ids, null);
    const [layer, head] = one.previous;
    const changes = [{ layer: 0, head: 0, off: true }, { layer, head, weights: (t) => rows[t] }];
    const [before, changed] = [await model.trace(one.ids), await model.trace(one.ids, changes)];
    near(allLogits(changed), one.changed, 1e-5);
    near(allLogits(before), one.logits, 1e-5);
    assert.deepStrictEqual(Array.from(changed.weights(layer, head, 3)), [0, 0, 1, 0]);
    assert.ok(changed.output(0, 0, 3).every((x) => x === 0));
  });

  test(`${one.name}: a changed text has the bits of a new one`, async () => {
    const [reused, ids] = [await Model.of(one.entry), one.ids];
    const V = one.entry.sizes.vocab_size;
    const edited = ids.map((id, t) => (t === 5 ? (id + 1) % V : id));
    const old = await reused.trace(ids.slice(0, -1));
    const oldLogits = allLogits(old).map((row) => row.slice());
    for (const text of [ids, edited, edited.slice(0, 3), ids.slice(1), ids, ids.slice(0, -1)]) {
      const [found, fresh] = [await reused.trace(text), await (await Model.of(one.entry)).trace(text)];
      assert.deepStrictEqual(allLogits(found), allLogits(fresh));
      for (const t of places(found)) assert.deepStrictEqual(found.weights(1, 0, t), fresh.weights(1, 0, t));
    }
    assert.deepStrictEqual(allLogits(old), oldLogits); // and what was handed out stays
  });
}

test("changes of later blocks leave the earlier ones, and are forgotten", async () => {
  const [{ entry, ids }] = cases;
  const model = await Model.of(entry);
  for (const changes of [null, [{ layer: 1, head: 0, off: true }], [{ layer: 0, head: 1, off: true }], [], null]) {
    const fresh = await (await Model.of(entry)).trace(ids, changes);
    assert.deepStrictEqual(allLogits(await model.trace(ids, changes)), allLogits(fresh));
  }
});

test("of equal guesses the lowest ids come first", async () => {
  const [{ entry }] = cases;
  const count = entry.arrays.reduce((sum, { shape }) => sum + shape.reduce((product, n) => product * n), 0);
  const model = await Model.of({ ...entry, blob: zlib.deflateSync(Buffer.alloc(4 * count)).toString("base64") });
  assert.deepStrictEqual((await model.trace([1])).guesses(2, 0, 3).map(({ id }) => id), [0, 1, 2]);
});

test("16 bits hold every kind of number", async () => {
  const { entry } = cases.find(({ entry: { precision } }) => precision === "f16");
  const bits = new Uint16Array([0x0001, 0x03ff, 0x0400, 0x3c00, 0xc000, 0x7bff, 0x7c00, 0x8000]);
  const blob = zlib.deflateSync(Buffer.from(bits.buffer)).toString("base64");
  const model = await Model.of({ ...entry, arrays: [{ name: "token_table", shape: [8] }], blob });
  const expected = [2 ** -24, 1023 * 2 ** -24, 2 ** -14, 1, -2, 65504, Infinity, -0];
  assert.deepStrictEqual(Array.from(model.outside.token_table), expected);
});

test("too much, too little, and damaged weights are told in a sentence", async () => {
  const [{ entry }] = cases;
  const model = await Model.of(entry);
  await assert.rejects(model.trace([]), /0 tokens: the model reads 1 to 12/);
  await assert.rejects(model.trace(new Array(13).fill(1)), /13 tokens: the model reads 1 to 12/);
  await assert.rejects(Model.of({ ...entry, arrays: entry.arrays.slice(1) }), /damaged/);
});
