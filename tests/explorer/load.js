"use strict";

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const FOLDER = path.join(__dirname, "..", "..", "minigpt", "explorer");

/** The page's maths: its files from attention.js to model.js, in its order, unchanged, in one scope. */
function load() {
  const page = fs.readFileSync(path.join(FOLDER, "page.html"), "utf-8");
  const files = Array.from(page.matchAll(/<script src="(.*?)">/g), ([, name]) => name);
  for (const name of files.slice(files.indexOf("attention.js"), files.indexOf("model.js") + 1)) {
    const filename = path.join(FOLDER, name);
    vm.runInThisContext(fs.readFileSync(filename, "utf-8"), { filename });
  }
  return vm.runInThisContext("({ Attention, Parts, References, Tokenizer, Sampling, Model })");
}

/** The numbers to be met, which tests/test_explorer_maths.py writes. */
function golden() {
  const file = process.env.EXPLORER_GOLDEN;
  if (!file) throw new Error("EXPLORER_GOLDEN names no file: run pytest tests/test_explorer_maths.py");
  return JSON.parse(fs.readFileSync(file, "utf-8"));
}

module.exports = { ...load(), golden };
