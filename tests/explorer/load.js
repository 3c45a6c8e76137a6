"use strict";

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const FOLDER = path.join(__dirname, "..", "..", "minigpt", "explorer");
const NAMES = { attention: "Attention", references: "References", tokenizer: "Tokenizer", sampling: "Sampling", model: "Model" };

/** The page's maths as the page has it: its files, unchanged and in order, in one scope. */
function load() {
  for (const file of Object.keys(NAMES)) {
    const filename = path.join(FOLDER, `${file}.js`);
    vm.runInThisContext(fs.readFileSync(filename, "utf-8"), { filename });
  }
  return vm.runInThisContext(`({ ${Object.values(NAMES).join(", ")} })`);
}

/** The numbers to be met, which tests/test_explorer_maths.py writes. */
function golden() {
  const file = process.env.EXPLORER_GOLDEN;
  if (!file) throw new Error("EXPLORER_GOLDEN names no file: run pytest tests/test_explorer_maths.py");
  return JSON.parse(fs.readFileSync(file, "utf-8"));
}

module.exports = { ...load(), golden };
