"""Made-up text of any size, the same on every machine: words as frequent as words are, in letters of two scripts."""

from pathlib import Path

import numpy as np

WORDS = 20_000
BLOCK = 20_000_000  # bytes after which a text begins anew
SENTENCE = 12  # words

# letters of the words, those that are frequent first; what stands between words and after sentences
SCRIPTS = {
    "English": ("etaoinshrdlucmwfgypbvkjxqz", " ", ".\n"),
    "Japanese": ("".join(map(chr, [*range(0x3042, 0x3094), *range(0x4E00, 0x5200)])), "", "。\n"),
}


def write_text(path: Path, script: str, size: int) -> None:
    """Write about ``size`` bytes, UTF-8."""
    block = made_text(script, min(size, BLOCK)).encode("utf-8")
    with path.open("wb") as file:
        for _ in range(max(1, round(size / len(block)))):
            file.write(block)


def made_text(script: str, size: int) -> str:
    """At least ``size`` bytes of UTF-8, cut after a sentence. Letters and words follow Zipf's law."""
    letters, between, after = SCRIPTS[script]
    lots = np.random.default_rng(0)
    lengths = lots.integers(1, 10 if between else 4, WORDS)
    spelled = [
        "".join(letters[i] for i in lots.choice(len(letters), length, p=_zipf(len(letters)))) for length in lengths
    ]
    frequencies = _zipf(WORDS)
    sentences: list[str] = []
    written = 0
    while written < size:
        drawn = lots.choice(WORDS, (1000, SENTENCE), p=frequencies)
        more = [between.join(spelled[word] for word in row) + after for row in drawn.tolist()]
        written += len("".join(more).encode("utf-8"))
        sentences += more
    return "".join(sentences)


def _zipf(n: int) -> np.ndarray:
    shares = 1 / (1 + np.arange(n))
    return shares / shares.sum()
