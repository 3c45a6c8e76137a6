"use strict";

const assert = require("node:assert");
const { test } = require("node:test");
const { Tokenizer, golden } = require("./load.js");

const cases = golden().tokenizers;
const of = (name) => Tokenizer.of(cases.find((one) => one.name === name).entry);

for (const { name, entry, texts, ids, decoded } of cases) {
  test(`${name}: the ids of ${texts.length} texts, and back`, () => {
    const tokenizer = Tokenizer.of(entry);
    assert.strictEqual(tokenizer.vocabSize, entry.tokens.length);
    texts.forEach((text, i) => {
      if (ids[i] === null) return assert.throws(() => tokenizer.encode(text), /never seen/);
      assert.deepStrictEqual(tokenizer.encode(text), ids[i], JSON.stringify(text));
      const isWhole = entry.kind === "bpe" || entry.byte_fallback || entry.unseen === "stop";
      if (isWhole) assert.strictEqual(tokenizer.decode(ids[i]), text);
    });
    for (const piece of decoded) assert.strictEqual(tokenizer.decode(piece.ids), piece.text);
  });
}

test("ids that stand for nothing", () => {
  assert.deepStrictEqual(of("bpe with holes").undefinedIds, [301, 302]);
  assert.deepStrictEqual(of("bpe").undefinedIds, []);
  assert.throws(() => of("bpe").bytes(10_000), /token id 10000: must be at least 0 and below/);
});

test("a whole piece that is a token is one, whatever the merges", () => {
  const tokens = ["", "a", "b", "c", "abc", "bc"].map(btoa);
  assert.deepStrictEqual(Tokenizer.of({ kind: "bpe", pattern: "\\w+", tokens }).encode("abc"), [4]);
  assert.deepStrictEqual(Tokenizer.of({ kind: "bpe", pattern: "\\w", tokens }).encode("abc"), [1, 2, 3]);
});

test("the first of three signs stands for the unknown", () => {
  const packed = (signs) => ["", ...signs].map((sign) => Buffer.from(sign).toString("base64"));
  const replacing = (...signs) => Tokenizer.of({ kind: "char", unseen: "replace", tokens: packed(signs) });
  assert.deepStrictEqual(replacing(" ", "?", "\ufffd").encode("x"), [3]);
  assert.deepStrictEqual(replacing(" ", "?").encode("x"), [2]);
  assert.throws(() => replacing("a").encode("x"), /never seen/);
});

test("ids to look at", () => {
  const [byte, char] = [of("byte"), of("char")];
  const shown = (tokenizer, text) => tokenizer.encode(text).map((id) => tokenizer.show(id)).join("|");
  assert.strictEqual(shown(byte, "a \n\t\r"), "a|␣|⏎|⇥|<U+000D>");
  assert.strictEqual(shown(byte, "時"), "<E6>|<99>|<82>");
  assert.strictEqual(shown(char, "時\u200b\u3000"), "時|<U+200B>|<U+3000>");
  assert.strictEqual(byte.show(0), "<|end|>");
  assert.strictEqual(of("bpe with holes").show(301), "<id 301>");
  const split = Tokenizer.of({ kind: "bpe", pattern: ".", tokens: ["", btoa("é\xe6\x99"), btoa("\xc3\xa9!")] });
  assert.strictEqual(split.show(1), "<E9><E6><99>");
  assert.strictEqual(split.show(2), "é!");
});

test("what is no text, or unknown, is told in a sentence", () => {
  assert.throws(() => of("bpe").encode("a\ud83d"), /half of a surrogate pair/);
  const letters = Tokenizer.of({ kind: "char", tokens: ["", btoa("a")] });
  const message = "characters that the tokenizer has never seen: 'b' (U+0062), 'c' (U+0063); remove them";
  assert.throws(() => letters.encode("cab"), { message, characters: ["b", "c"] });
  assert.throws(() => letters.encode("bcdefghijklmno"), /'k' \(U\+006B\) and 4 more;/);
});
