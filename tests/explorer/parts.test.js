"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const { Parts, golden } = require("./load.js");

const { examples } = golden();

for (const example of [...examples.multi_head, ...examples.parts]) {
  test(`${example.name}: all that is published is computed`, () => {
    for (const { name, got, published } of Parts.steps(example)) {
      assert.ok(Parts.apart(got, published) <= 1e-9, `${name}: ${Parts.apart(got, published)}`);
    }
  });
}

test("arrays of different shapes are apart", () => {
  assert.ok(Number.isNaN(Parts.apart([[1, 2]], [[1]])));
  assert.strictEqual(Parts.apart([[1, 2]], [[1, 4]]), 2);
});

test("a part that is not known has no steps", () => {
  assert.strictEqual(Parts.steps({ name: "another" }), null);
});
