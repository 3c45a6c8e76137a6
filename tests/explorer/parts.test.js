"use strict";

const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");
const test = require("node:test");
const vm = require("node:vm");

require("./load"); // Attention, which the parts use

const ROOT = path.join(__dirname, "..", "..", "minigpt");
const filename = path.join(ROOT, "explorer", "parts.js");
const Parts = vm.runInThisContext(`${fs.readFileSync(filename, "utf-8")}; Parts`, { filename });
const examples = JSON.parse(fs.readFileSync(path.join(ROOT, "inspection", "examples.json"), "utf-8"));

for (const example of [...examples.multi_head, ...examples.parts]) {
  test(`${example.name}: all that is published is computed`, () => {
    for (const { name, got, published } of Parts.steps(example)) {
      assert.ok(Parts.apart(got, published) <= 1e-9, `${name}: ${Parts.apart(got, published)}`);
    }
  });
}

test("arrays of different shapes are apart", () => {
  assert.ok(Number.isNaN(Parts.apart([[1, 2]], [[1]])));
  assert.equal(Parts.apart([[1, 2]], [[1, 4]]), 2);
});

test("a part that is not known has no steps", () => {
  assert.equal(Parts.steps({ name: "another" }), null);
});
