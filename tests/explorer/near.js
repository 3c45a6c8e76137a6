"use strict";

const assert = require("node:assert");

/** Nested lists whose numbers differ by at most `tolerance` of the largest, or of 1 if all are less; null is NaN. */
function near(found, expected, tolerance, what = "") {
  const [a, b] = [flat(found), flat(expected)];
  assert.strictEqual(a.length, b.length, what);
  const largest = b.reduce((most, x) => Math.max(most, Math.abs(x ?? 0)), 1);
  a.forEach((x, i) => {
    const isNear = b[i] === null ? Number.isNaN(x) : Math.abs(x - b[i]) <= tolerance * largest;
    assert.ok(isNear, `${what}: number ${i} of ${a.length} is ${x}, not ${b[i]}`);
  });
}

function flat(numbers) {
  return numbers === null || typeof numbers === "number" ? [numbers] : Array.from(numbers).flatMap(flat);
}

module.exports = { near };
