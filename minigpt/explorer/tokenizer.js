"use strict";

/**
 * Text ↔ token ids as minigpt/tokenizer.py has it: single characters, or byte pair encoding. Id 0 stands for the end of
 * a text; no text encodes to it. For texts up to 100,000 characters; longer ones are cut before BPE elsewhere.
 */
class Tokenizer {
  #tokens; // (V,) the bytes of each id, a string of one character a byte
  #ids; // Map from what an id stands for to the id: a character, or bytes
  #pattern; // null: a character is a token
  #isFallback; // whether characters without an id become their bytes
  #unseen; // what becomes of them otherwise: stop, skip or replace

  /** @param {{kind: string, tokens: string[], pattern: string, byte_fallback: boolean, unseen: string}} values */
  static of(values) {
    return new Tokenizer(values);
  }

  constructor({ kind, tokens, pattern = "", byte_fallback: isFallback = false, unseen = "stop" }) {
    this.#tokens = tokens.map((token) => atob(token));
    this.#isFallback = isFallback;
    this.#unseen = unseen;
    this.#pattern = kind === "bpe" ? new RegExp(pattern, "gu") : null;
    const name = (id) => (kind === "bpe" || (isFallback && id <= 256) ? this.#tokens[id] : this.decode([id]));
    this.#ids = new Map();
    for (let id = 1; id < tokens.length; id++) {
      if (tokens[id]) this.#ids.set(name(id), id);
    }
  }

  /** V, the number of ids. */
  get vocabSize() {
    return this.#tokens.length;
  }

  /** Ids beside 0 that stand for nothing and are never drawn. */
  get undefinedIds() {
    return this.#tokens.flatMap((token, id) => (id > 0 && token === "" ? [id] : []));
  }

  /** The bytes of one id; none for 0 and for undefined ids. */
  bytes(id) {
    if (!(id in this.#tokens)) throw new Error(`token id ${id}: must be at least 0 and below ${this.vocabSize}`);
    return Uint8Array.from(this.#tokens[id], (byte) => byte.charCodeAt(0));
  }

  /** The text of some ids; bytes that are not UTF-8 become U+FFFD. */
  decode(ids) {
    const bytes = Array.from(ids, (id) => this.#tokens[id]).join("");
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return decoder.decode(Uint8Array.from(bytes, (byte) => byte.charCodeAt(0)));
  }

  /** One id to look at: ␣ ⏎ ⇥ for blanks, <E3> for a byte of a split character, <U+200B> for what has no look. */
  show(id) {
    if (this.bytes(id).length === 0) return id === 0 ? "<|end|>" : `<id ${id}>`;
    let [shown, rest] = ["", this.#tokens[id]];
    while (rest) {
      const [bytes, character] = Tokenizer.#firstCharacter(rest);
      shown += character === null ? `<${hex(bytes.charCodeAt(0), 2)}>` : visible(character);
      rest = rest.slice(bytes.length);
    }
    return shown;

    function hex(code, places) {
      return code.toString(16).toUpperCase().padStart(places, "0");
    }

    function visible(character) {
      const signs = { " ": "␣", "\n": "⏎", "\t": "⇥" };
      return signs[character] ?? (/[\p{C}\p{Z}]/u.test(character) ? `<U+${hex(character.codePointAt(0), 4)}>` : character);
    }
  }

  /**
   * The ids of a text.
   * @throws {Error} in one sentence, for half a surrogate pair and for characters that no id stands for; of these
   *   `error.characters` has the list.
   */
  encode(text) {
    if (/\p{Cs}/u.test(text)) throw new Error("the text holds half of a surrogate pair and no character: remove it");
    return this.#pattern ? this.#encodeBytes(text) : this.#encodeCharacters(text);
  }

  #encodeCharacters(text) {
    const found = Array.from(text, (character) => this.#ids.get(character) ?? character);
    const unknown = found.filter((id) => typeof id === "string");
    if (unknown.length === 0) return found;
    if (this.#isFallback) {
      return found.flatMap((id) => (typeof id === "string" ? Array.from(utf8(id), (byte) => byte.charCodeAt(0) + 1) : id));
    }
    if (this.#unseen === "skip") return found.filter((id) => typeof id === "number");
    const replacement = ["\ufffd", "?", " "].map((sign) => this.#ids.get(sign)).find((id) => id);
    if (this.#unseen === "stop" || !replacement) throw Tokenizer.#unseenError(unknown);
    return found.map((id) => (typeof id === "string" ? replacement : id));
  }

  #encodeBytes(text) {
    const ids = [];
    let length = 0;
    for (const [piece] of text.matchAll(this.#pattern)) {
      length += piece.length;
      ids.push(...this.#merge(utf8(piece)));
    }
    if (length < text.length) throw new Error("the tokenizer is damaged: its split pattern does not take in every text");
    return ids;
  }

  /** One piece: the two neighbours whose union has the lowest id become one, from left to right, while there are any. */
  #merge(piece) {
    const whole = this.#ids.get(piece);
    if (whole !== undefined) return [whole];
    const starts = Array.from({ length: piece.length + 1 }, (_, i) => i); // of the parts, and the end
    const union = (i) => this.#ids.get(piece.slice(starts[i], starts[i + 2])) ?? Infinity;
    const unions = Array.from({ length: piece.length - 1 }, (_, i) => union(i)); // ids of parts i and i + 1 together
    while (unions.length > 0) {
      let lowest = 0;
      for (let i = 1; i < unions.length; i++) if (unions[i] < unions[lowest]) lowest = i;
      if (unions[lowest] === Infinity) break;
      starts.splice(lowest + 1, 1);
      unions.splice(lowest, 1);
      if (lowest > 0) unions[lowest - 1] = union(lowest - 1);
      if (lowest < unions.length) unions[lowest] = union(lowest);
    }
    return starts.slice(1).map((end, i) => this.#ids.get(piece.slice(starts[i], end)));
  }

  /** The first character of some bytes with the bytes it takes; null for a byte that belongs to none. */
  static #firstCharacter(bytes) {
    const lead = bytes.charCodeAt(0);
    const length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    const taken = bytes.slice(0, length);
    try {
      const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
      return [taken, decoder.decode(Uint8Array.from(taken, (byte) => byte.charCodeAt(0)))];
    } catch {
      return [bytes[0], null];
    }
  }

  static #unseenError(unknown) {
    const characters = [...new Set(unknown)].sort((a, b) => a.codePointAt(0) - b.codePointAt(0));
    const code = (character) => character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    const shown = characters.slice(0, 10).map((character) => `'${character}' (U+${code(character)})`);
    const more = characters.length > 10 ? ` and ${characters.length - 10} more` : "";
    const sentence = `characters that the tokenizer has never seen: ${shown.join(", ")}${more}; remove them`;
    return Object.assign(new Error(sentence), { characters });
  }
}
