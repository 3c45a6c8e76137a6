"""What others write and we read, as strategies of hypothesis, with the reading of each: as the scripts do it."""

import argparse
import contextlib
import io
import json
import runpy
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minigpt.assembly import load_model
from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.cli import add_config_options, config_overrides, parse_options, unescape
from minigpt.config import Config, DataConfig, section_class, to_toml, validate
from minigpt.corpus import batch, open_corpus
from minigpt.launch import saved_progress
from minigpt.model import GPT
from minigpt.normal_form import from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.sampling import SamplingOptions, distribution, draw, generate
from minigpt.shipped import SCRIPTS
from minigpt.tokenizer import tokenizer_from_dict, train_tokenizer
from minigpt.training import Progress

KEYS = [(t, k) for t, section in Config.model_fields.items() for k in section_class(section).model_fields]

# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────

INTEGERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 10**400])
FLOATS = st.floats() | st.sampled_from([5e-324, 1e-300, 1e300, 1e308])
ANY_TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(["", "\0", "\ud800", "~nobody/x", "true", "1e999"])
KEY_NAMES = st.text(st.characters(), max_size=6) | st.sampled_from(["", "\0", "\ud800", "__class__"])
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | ANY_TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY_NAMES, inner, max_size=3)
)


# ── configuration and command lines ────────────────────────────────────────────────────────────────────────────


def config_tables() -> st.SearchStrategy[Any]:
    """Tables of known and unknown keys with values of any kind."""
    likely = st.integers(1, 8) | st.floats(0, 1) | st.sampled_from(["true", "0.5", "7", "text"])
    keys = st.lists(st.tuples(st.sampled_from(KEYS), likely | VALUES), max_size=3)
    good = st.builds(lambda pairs: {t: {k: value} for (t, k), value in pairs}, keys)
    return good | st.dictionaries(st.sampled_from(list(Config.model_fields)) | KEY_NAMES, VALUES, max_size=4)


def read_config(tables: Any, _place: Path) -> None:
    config = validate(tables)
    assert validate(tomllib.loads(to_toml(config))) == config


def command_lines() -> st.SearchStrategy[Any]:
    """A script's name and words, many of them its options."""
    options = [f"--{t}.{k}" for t, k in KEYS] + ["--resume", "--help", "--prompt", "--temperature", "--stop", "--text"]
    values = st.sampled_from(["0", "-1", "nan", "true", "9" * 5000, "--", "a=b", "\\", "\udce9"]) | ANY_TEXT
    words = st.sampled_from(options) | values | st.builds("{}={}".format, st.sampled_from(options), values)
    return st.tuples(st.sampled_from(["train", "generate", "evaluate"]), st.lists(words, max_size=6))


def read_command_line(line: tuple[str, list[str]], _place: Path) -> None:
    name, words = line
    if name == "train":
        parser = argparse.ArgumentParser()
        parser.add_argument("config", nargs="?", type=Path)
        add_config_options(parser)
    else:
        parser = runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="fuzzed")["make_parser"]()
    with contextlib.redirect_stdout(io.StringIO()):
        options = parse_options(parser, words)
    validate(config_overrides(options))
    for typed in ("prompt", "text"):
        unescape(getattr(options, typed, None) or "")
    if name == "generate":
        SamplingOptions(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)


# ── tokenizers and texts ───────────────────────────────────────────────────────────────────────────────────────

TOKENIZERS = [train_tokenizer(name, ["to be or not to be"], size).to_dict()
              for name, size in (("char", 0), ("char", 260), ("byte", 0), ("bpe", 262))]  # fmt: skip
PATTERNS = ["", "x*", "(a+)+$", "(?:a|a)*b", "a{1000000000}", "(?=a)", "(?<=a+)b", "\\p{No}", "(", ".", "\\S+|\\s+"]


def tokenizer_headers() -> st.SearchStrategy[Any]:
    """Stored tokenizers with some entries changed, and a text."""
    words = st.lists(st.sampled_from(["", "AA==", "YQ==", "YWI=", "====", "é"]) | ANY_TEXT, max_size=4).map(" ".join)
    changes = st.fixed_dictionaries({}, optional={
        "name": st.sampled_from(["char", "byte", "bpe", "gpt2"]) | SCALARS,
        "pattern": st.sampled_from(PATTERNS) | SCALARS,
        "tokens": words | VALUES,
        "characters": ANY_TEXT | VALUES,
        "byte_fallback": SCALARS,
        "unseen": st.sampled_from(["skip", "replace"]) | SCALARS,
    })  # fmt: skip
    texts = ANY_TEXT | st.sampled_from(["a" * 40 + "!", " " * 1000])
    return st.tuples(st.builds(lambda old, new: {**old, **new}, st.sampled_from(TOKENIZERS), changes), texts)


def read_tokenizer(header_and_text: tuple[dict[str, Any], str], _place: Path) -> None:
    header, text = header_and_text
    tokenizer = tokenizer_from_dict(json.loads(json.dumps(header)))
    decoded = tokenizer.decode(tokenizer.encode(text).tolist())
    assert decoded == text or header.get("unseen", "stop") != "stop" or "\udc80" <= max(text) <= "\udcff"


def corpora() -> st.SearchStrategy[Any]:
    """The bytes of a file, its suffix, and how it is to be read."""
    rows = st.lists(st.builds(lambda value: json.dumps({"text": value}), VALUES), max_size=4).map("\n".join)
    texts = st.text(max_size=200) | rows | st.sampled_from([" " * 3000, "a\0b\n" * 40, 'text\n"' + "x\n" * 50])
    encodings = st.sampled_from(["utf-8", "utf-16", "utf-16-le", "cp1252", "shift_jis", "gb18030", "idna", "undefined"])
    contents = st.binary(max_size=300) | st.builds(
        lambda text, encoding: text.encode(encoding, "replace") * 5, texts,
        st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"]),
    )  # fmt: skip
    suffixes = st.sampled_from(["txt", "jsonl", "csv"])
    tokenizers = st.sampled_from(
        [("char", 0), ("char", 300), ("byte", 0), ("bpe", 0), ("bpe", 300), ("bpe", 2**31 - 1)]
    )
    return st.tuples(contents, suffixes, encodings, tokenizers)


def read_corpus(given_file: tuple[bytes, str, str, tuple[str, int]], place: Path) -> None:
    content, suffix, encoding, (tokenizer, vocab_size) = given_file
    path = place / f"text.{suffix}"
    path.write_bytes(content)
    keys = {"tokenizer": tokenizer, "vocab_size": vocab_size, "encoding": encoding, "cache_dir": str(place / "cache")}
    corpus = open_corpus(DataConfig(source=str(path), **keys), context_length=8, seed=1)
    inputs, targets = batch(corpus.train, seed=1, step=3, batch_size=2, context_length=8)
    assert max(inputs.max(), targets.max()) < corpus.tokenizer.vocab_size
    assert not list((place / "cache").glob("unfinished-*"))


# ── sampling ───────────────────────────────────────────────────────────────────────────────────────────────────


def samplings() -> st.SearchStrategy[Any]:
    """Options of any size, logits, ids seen, ids banned."""
    sizes, parts = st.floats(0, 2) | FLOATS, st.floats(0, 1) | st.floats(0, 1) | FLOATS
    options = st.tuples(sizes, st.integers(0, 6) | INTEGERS, parts, parts, sizes)
    some = st.sets(st.integers(0, 4), max_size=4)
    number = st.floats(-30, 30, width=32) | st.floats(allow_nan=False, allow_infinity=False, width=32)
    logits = st.lists(number, min_size=5, max_size=5)
    return st.tuples(options, logits | st.lists(st.floats(width=32), min_size=5, max_size=5), some, some)


def read_sampling(parts: tuple[tuple[Any, ...], list[float], set[int], set[int]], _place: Path) -> None:
    options, logits, history, banned = parts
    probabilities = distribution(np.array(logits, np.float32), history, SamplingOptions(*options), banned)
    assert np.isfinite(probabilities).all() and (probabilities >= 0).all() and abs(probabilities.sum() - 1) < 1e-9
    for uniform in (0.0, 0.5, 1 - 2**-53):
        chosen = draw(probabilities, uniform)
        assert probabilities[chosen] > 0 and chosen not in banned


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────

MODEL = {"n_layer": 1, "n_head": 2, "d_model": 8, "context_length": 8}
SIZES = st.integers(-3, 70) | st.sampled_from(
    [2**50, 2**63, 10**30]
)  # no number that memory might just be laid out for
ENTRIES = (
    "step",
    "config",
    "tokenizer",
    "val_loss",
    "machine",
    "versions",
    "corpus",
    "tokens_seen",
    "seconds",
    "format",
)


@cache
def saved_bytes() -> bytes:
    """A good checkpoint of a tiny untrained model."""
    config = validate({"model": MODEL, "data": {"tokenizer": "char"}})
    tokenizer = tokenizer_from_dict(TOKENIZERS[0])
    weights = GPT(config.model, tokenizer.vocab_size).state_dict()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "x.safetensors"
        metadata = {"config": config.model_dump(), "tokenizer": TOKENIZERS[0], **asdict(Progress(step=3, val_loss=2.5))}
        save_checkpoint(path, {f"model.{name}": tensor.numpy() for name, tensor in weights.items()}, metadata)
        return path.read_bytes()


def checkpoints() -> st.SearchStrategy[Any]:
    """Changes to a checkpoint: its metadata, one model key, one array's entry, single bytes, its length."""
    entry = st.tuples(st.just("metadata"), st.sampled_from(ENTRIES), st.integers(0, 9) | VALUES)
    model_key = st.tuples(
        st.just("model"), st.sampled_from(sorted(k for t, k in KEYS if t == "model")), SCALARS | SIZES
    )
    kinds = st.sampled_from(["F32", "F16", "BF16", "I64", "U8", "F8_E4M3", "C64", "F99"])
    array = st.tuples(st.just("array"), st.sampled_from(["dtype", "shape", "data_offsets"]),
                      kinds | st.lists(SIZES, max_size=4) | VALUES)  # fmt: skip
    flip = st.tuples(st.just("byte"), st.integers(0, 10_000), st.integers(0, 255))
    cut = st.tuples(st.just("cut"), st.integers(0, 10_000), st.booleans())
    return st.lists(entry | model_key | array | flip | cut, min_size=1, max_size=3)


def changed(content: bytes, changes: Sequence[tuple[str, Any, Any]]) -> bytes:
    """The file with the changes made; those of the header first."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = json.loads(header["__metadata__"]["minigpt"])
    for kind, key, value in changes:
        if kind == "metadata":
            metadata[key] = value
        elif kind == "model":
            metadata.setdefault("config", {})
            if isinstance(metadata["config"], dict) and isinstance(metadata["config"].get("model"), dict):
                metadata["config"]["model"][key] = value
        elif kind == "array":
            header[sorted(header)[1]][key] = value
    header["__metadata__"]["minigpt"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + body
    for kind, place, value in changes:
        place = place % len(content) if kind in ("byte", "cut") and content else 0
        if kind == "byte":
            content = content[:place] + bytes([value]) + content[place + 1 :]
        elif kind == "cut":
            content = content[:place] if value else content + bytes(place)
    return content


def read_saved(changes: Sequence[tuple[str, Any, Any]], place: Path) -> None:
    path = place / "x.safetensors"
    path.write_bytes(changed(saved_bytes(), changes))
    checkpoint = find_checkpoint(path)
    saved_progress(checkpoint)
    tokenizer = tokenizer_from_dict(checkpoint.tokenizer)
    engine = PlainEngine(from_checkpoint(checkpoint))
    ids = generate(engine, tokenizer.encode("to be").tolist(), max_new_tokens=3, options=SamplingOptions())
    tokenizer.decode(list(ids))
    load_model(checkpoint, "cpu")
