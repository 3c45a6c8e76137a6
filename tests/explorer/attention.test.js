"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const { Attention, golden } = require("./load.js");
const { near } = require("./near.js");

const { examples, mistakes } = golden();
const STEPS = { raw: "raw_scores", scaled: "scaled_scores", weights: "weights", output: "output" };

for (const example of examples.attention) {
  test(`example ${example.name}`, () => {
    const isDeep = Array.isArray(example.query[0][0]);
    const found = Attention.heads(example).map(Attention.steps);
    for (const [step, name] of Object.entries(STEPS)) {
      near(isDeep ? found.map((steps) => steps[step]) : found[0][step], example[name], 1e-9);
    }
  });
}

test("each step by itself", () => {
  const { query, key, value, weights, output } = examples.attention[0];
  const scaled = Attention.scaled(Attention.scores(query, key), 2);
  near(Attention.masked(scaled, null).map(Attention.softmax), weights, 1e-9);
  near(Attention.weights(query, key), weights, 1e-9);
  near(weights.map((row) => Attention.weightedSum(row, value)), output, 1e-8);
  assert.deepStrictEqual(Attention.softmax([-Infinity, -Infinity]), [0, 0]);
  assert.deepStrictEqual(Attention.masked([[1, 2]], [[1, 0]]), [[1, -Infinity]]);
});

test("each mistake gives the numbers of the one that students are told", () => {
  const [known] = Object.values(mistakes);
  assert.ok(Attention.mistakes.length > 20);
  for (const { name } of Attention.mistakes) assert.ok(name in known, name);
  for (const [example, outputs] of Object.entries(mistakes)) {
    const problem = examples.attention.find(({ name }) => name === example);
    for (const { name, apply } of Attention.mistakes) {
      const found = apply(problem);
      const isMet = outputs[name].some((output) => agrees(found && found.output, output));
      assert.ok(isMet, `${example}, ${name}: ${JSON.stringify(found?.output)}, but ${JSON.stringify(outputs[name])}`);
    }
  }
});

test("most mistakes show in the causal example", () => {
  const [problem] = Attention.heads(examples.attention.find(({ name }) => name === "seed42_causal"));
  const right = JSON.stringify(Attention.steps(problem).output);
  const seen = Attention.mistakes.filter(({ apply }) => JSON.stringify(apply(problem).output) !== right);
  assert.ok(seen.length >= 17, seen.map(({ name }) => name).join());
});

/** Equal numbers; where Python has none (a row that a mistake leaves without keys) any will do. */
function agrees(found, expected) {
  if (found === null || expected === null) return found === expected;
  const isNear = (x, y) => x === null || Math.abs(x - y) < 1e-9 * Math.max(1, Math.abs(x));
  return expected.every((row, t) => row.every((x, i) => isNear(x, found[t]?.[i])));
}
