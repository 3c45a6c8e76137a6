"use strict";

/**
 * Text ↔ token ids as minigpt/tokenizer.py has it: single characters, or byte pair encoding. Id 0 stands for the end of
 * a text; no text encodes to it. For texts up to 100,000 characters, which are encoded in one piece. V: number of ids.
 *
 * Bytes are kept as strings of one character a byte, as `atob` gives them: they can be cut, joined and looked up.
 */
const Tokenizer = (() => {
  const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥" };
  const NAMED_AT_MOST = 10; // unknown characters

  const bytesOf = (packed) => Uint8Array.from(packed, (byte) => byte.charCodeAt(0));
  const utf8 = (text) => Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
  const text = (packed, fatal = false) => new TextDecoder("utf-8", { ignoreBOM: true, fatal }).decode(bytesOf(packed));
  const hex = (code, places) => code.toString(16).toUpperCase().padStart(places, "0");
  const codePoint = (character) => `U+${hex(character.codePointAt(0), 4)}`;

  /**
   * A split pattern of tiktoken's for JavaScript: \s is Unicode's White_Space, (?i:…) is written out, and possessive
   * quantifiers become plain ones, which in these patterns find the same: nothing that they take could be given back.
   */
  function splitPattern(source) {
    const cases = (letter) => letter + letter.toUpperCase() + ({ s: "ſ", k: "\u212a" }[letter] ?? "");
    const eitherCase = (part, inClass) => `[${(inClass ?? part).replace(/[a-z]/g, cases)}]`;
    const translated = source
      .replace(/\(\?i:([^()]*)\)/g, (_, body) => `(?:${body.replace(/\[(.*?)\]|[a-z]/g, eitherCase)})`)
      .replace(/([?*+]|\{[\d,]+\})\+/g, "$1")
      .replaceAll("\\s", "\\p{White_Space}")
      .replaceAll("\\S", "\\P{White_Space}");
    return new RegExp(translated, "gu");
  }

  /** The bytes of the first character of some bytes; null if they begin with none. */
  function firstCharacter(packed) {
    const lead = packed.charCodeAt(0);
    const bytes = packed.slice(0, lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4);
    try {
      text(bytes, true);
      return bytes;
    } catch {
      return null;
    }
  }

  function unseenError(unknown) {
    const characters = [...new Set(unknown)].sort((a, b) => a.codePointAt(0) - b.codePointAt(0));
    const shown = characters.slice(0, NAMED_AT_MOST).map((character) => `'${character}' (${codePoint(character)})`);
    const rest = characters.length - shown.length;
    const list = shown.join(", ") + (rest ? ` and ${rest} more` : "");
    const sentence = `characters that the tokenizer has never seen: ${list}; remove them`;
    return Object.assign(new Error(sentence), { characters, key: "mistake.unseen", values: { list: shown.join(" ") + (rest ? " …" : "") } });
  }

  class Tokenizer {
    #tokens; // (V,) the bytes of each id
    #ids = new Map(); // the id of what it stands for: a character, or bytes
    #pattern; // null: a character is a token
    #isFallback; // whether characters without an id become their bytes
    #unseen; // what becomes of them otherwise: stop, skip or replace

    /** @param {{kind: string, tokens: string[], pattern: string, byte_fallback: boolean, unseen: string}} values */
    static of(values) {
      return new Tokenizer(values);
    }

    constructor({ kind, tokens, pattern, byte_fallback: isFallback = false, unseen = "stop" }) {
      this.#tokens = tokens.map((token) => atob(token));
      this.#pattern = kind === "bpe" ? splitPattern(pattern) : null;
      this.#isFallback = isFallback;
      this.#unseen = unseen;
      const areBytes = (id) => kind === "bpe" || (isFallback && id <= 256);
      this.#tokens.forEach((token, id) => {
        if (token) this.#ids.set(areBytes(id) ? token : text(token), id);
      });
    }

    /** V. */
    get vocabSize() {
      return this.#tokens.length;
    }

    /** Ids beside 0 that stand for nothing and are never drawn. */
    get undefinedIds() {
      return this.#tokens.flatMap((token, id) => (id > 0 && token === "" ? [id] : []));
    }

    /** The bytes of one id; none for 0 and for undefined ids. */
    bytes(id) {
      return bytesOf(this.#packed(id));
    }

    /** The text of some ids; bytes that are not UTF-8 become U+FFFD. */
    decode(ids) {
      return text(Array.from(ids, (id) => this.#packed(id)).join(""));
    }

    /** One id to look at: ␣ ⏎ ⇥ for blanks, <E3> for a byte of a split character, <U+200B> for what has no look. */
    show(id) {
      let [shown, rest] = ["", this.#packed(id)];
      if (!rest) return id === 0 ? "<|end|>" : `<id ${id}>`;
      while (rest) {
        const bytes = firstCharacter(rest);
        const character = bytes && text(bytes);
        if (!bytes) shown += `<${hex(rest.charCodeAt(0), 2)}>`;
        else shown += SIGNS[character] ?? (/[\p{C}\p{Z}]/u.test(character) ? `<${codePoint(character)}>` : character);
        rest = rest.slice(bytes?.length ?? 1);
      }
      return shown;
    }

    /**
     * The ids of a text.
     * @throws {Error} in one sentence, for half a surrogate pair and for characters that no id stands for, which
     *   `error.characters` lists.
     */
    encode(text) {
      if (/\p{Cs}/u.test(text)) throw new Error("the text holds half of a surrogate pair and no character: remove it");
      return this.#pattern ? this.#encodeBytes(text) : this.#encodeCharacters(text);
    }

    #packed(id) {
      if (!(id in this.#tokens)) throw new RangeError(`token id ${id}: must be at least 0 and below ${this.vocabSize}`);
      return this.#tokens[id];
    }

    #encodeCharacters(text) {
      const found = Array.from(text, (character) => this.#ids.get(character) ?? character);
      const isUnknown = (id) => typeof id === "string";
      const unknown = found.filter(isUnknown);
      if (unknown.length === 0) return found;
      const asBytes = (character) => Array.from(new TextEncoder().encode(character), (byte) => byte + 1);
      if (this.#isFallback) return found.flatMap((id) => (isUnknown(id) ? asBytes(id) : id));
      if (this.#unseen === "skip") return found.filter((id) => !isUnknown(id));
      const replacement = ["\ufffd", "?", " "].map((sign) => this.#ids.get(sign)).find((id) => id);
      if (this.#unseen === "stop" || !replacement) throw unseenError(unknown);
      return found.map((id) => (isUnknown(id) ? replacement : id));
    }

    #encodeBytes(text) {
      const pieces = Array.from(text.matchAll(this.#pattern), ([piece]) => piece);
      if (pieces.join("") !== text) {
        throw new Error("the tokenizer is damaged: its split pattern does not take in every text");
      }
      return pieces.flatMap((piece) => this.#merge(utf8(piece)));
    }

    /** A piece's ids: while two neighbours have an id together, those of the lowest become one, of equals the first. */
    #merge(piece) {
      if (this.#ids.has(piece)) return [this.#ids.get(piece)];
      const starts = Array.from({ length: piece.length + 1 }, (_, i) => i); // of the parts, and the end
      const part = (i, n) => this.#ids.get(piece.slice(starts[i], starts[i + n])) ?? Infinity;
      const unions = starts.slice(2).map((_, i) => part(i, 2)); // the id of parts i and i + 1 together
      for (;;) {
        let lowest = 0;
        for (let i = 1; i < unions.length; i++) if (unions[i] < unions[lowest]) lowest = i;
        if (!(unions[lowest] < Infinity)) return starts.slice(1).map((_, i) => part(i, 1));
        starts.splice(lowest + 1, 1);
        unions.splice(lowest, 1);
        if (lowest > 0) unions[lowest - 1] = part(lowest - 1, 2);
        if (lowest < unions.length) unions[lowest] = part(lowest, 2);
      }
    }
  }

  return Tokenizer;
})();
