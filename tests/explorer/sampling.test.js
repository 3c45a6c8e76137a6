"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const { Sampling, golden } = require("./load.js");
const { near } = require("./near.js");

const { cases, uniforms } = golden().sampling;

test("1,000 laws keep the same ids, with the same probabilities and draws", () => {
  assert.strictEqual(cases.length, 1000);
  for (const { logits, options, history, banned, probabilities, uniform, drawn } of cases) {
    const found = Sampling.distribution(logits, options, history, banned);
    const kept = (numbers) => Array.from(numbers.keys()).filter((id) => numbers[id] > 0);
    assert.deepStrictEqual(kept(found.probabilities), kept(probabilities), JSON.stringify({ logits, options }));
    near(found.probabilities, probabilities, 1e-13);
    assert.strictEqual(Sampling.draw(found.probabilities, uniform), drawn);
  }
});

test("what is cut has lost its probability to a rule, and nothing else has", () => {
  for (const { logits, options, history, banned } of cases.filter(({ options: { temperature } }) => temperature > 0)) {
    const { probabilities, cut, tempered } = Sampling.distribution(logits, options, history, banned);
    cut.forEach((rule, id) => assert.strictEqual(probabilities[id] === 0, rule !== null || tempered[id] === 0));
    near([tempered.reduce((sum, p) => sum + p, 0)], [1], 1e-12);
  }
});

test("the rule that cuts is named", () => {
  const logits = [0.4, 0.2, 0.15, 0.1, 0.08, 0.07].map(Math.log);
  const cut = (options, banned) => Sampling.distribution(logits, { temperature: 1, ...options }, [], banned).cut;
  assert.deepStrictEqual(cut({ topK: 3, topP: 0.7 }), [null, null, "top-p", "top-k", "top-k", "top-k"]);
  assert.deepStrictEqual(cut({ topP: 0.7 }), [null, null, null, "top-p", "top-p", "top-p"]);
  assert.deepStrictEqual(cut({ minP: 0.3 }, [0]), ["banned", null, null, null, null, null]);
  assert.deepStrictEqual(cut({ minP: 0.3 }), [null, null, null, "min-p", "min-p", "min-p"]);
  assert.deepStrictEqual(cut({ temperature: 0 }), [null, null, null, null, null, null]);
});

test("a draw takes the lowest id whose cumulated probability exceeds the uniform", () => {
  assert.strictEqual(Sampling.draw([0, 1], 0), 1);
  assert.strictEqual(Sampling.draw([0.5, 0.5], 0.5), 1);
  assert.strictEqual(Sampling.draw([0.7, 0.3, 0], 1), 1); // rounded up to the total itself
});

test("uniforms are numpy's, bit for bit", () => {
  for (const [seed, expected] of Object.entries(uniforms)) {
    const next = Sampling.uniforms(seed);
    assert.deepStrictEqual(expected.map(next), expected, `seed ${seed}`);
  }
  assert.strictEqual(Sampling.uniforms(1234)(), uniforms[1234][0]);
  assert.throws(() => Sampling.uniforms(-1), /seed = -1: must be a whole number of at least 0/);
});

test("logits that are no numbers are refused", () => {
  assert.throws(() => Sampling.distribution([1, NaN], {}), /not finite/);
});
