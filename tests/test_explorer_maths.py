"""The page's maths in JavaScript, unchanged under node, against the numbers of the Python it follows."""

import json
import math
import os
import random
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from test_plain import LAYOUTS, random_tensors, small
from tiktoken_ext import openai_public

from minigpt import plain
from minigpt.checkpoint import Checkpoint
from minigpt.config import DEFAULT_CONFIG, ModelConfig, read_toml
from minigpt.errors import UserError
from minigpt.explorer import payload
from minigpt.inspection.compare import closeness, describe
from minigpt.inspection.head_report import NONE, HeadReport
from minigpt.inspection.heads import Head
from minigpt.inspection.patterns import parse_reference
from minigpt.inspection.students.mistakes import candidates
from minigpt.inspection.students.mistakes import made_of as with_mistakes
from minigpt.inspection.students.steps import Inputs, compute
from minigpt.normal_form import Array, NormalForm, from_tensors
from minigpt.plain import merge_heads, rms_norm, rotate, split_heads
from minigpt.sampling import SamplingOptions, distribution, draw
from minigpt.tokenizer import BpeTokenizer, CharTokenizer, Tokenizer, train_tokenizer

EXAMPLES = json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))
TESTS = Path(__file__).parent / "explorer"
SHIPPED = {path.stem: read_toml(path)["model"] for path in sorted(DEFAULT_CONFIG.parent.glob("*.toml"))}
WORDS = (
    "the old miller", " café", "'s", "don't we'll", "O'ſ I'LL", "1 234", "  ", "\n\n", "\t", " \r\n", "\u3000",
    "\u00a0", "\u0085", "\ufeff", "\u200b", "\u2028", "時計は", "。「青い」", "ﾊﾟ", "👩\u200d🚀", "🇯🇵", "e\u0301",
    "<|end|>", "</script>", "{[(", ")]}", "»…", "   x",
)  # fmt: skip


def test_the_page_has_the_numbers_of_python(tmp_path: Path) -> None:
    """Every ``*.test.js``, in one run of node on one file of numbers."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; it runs the page's maths here (apt-get install nodejs)")
    golden = tmp_path / "golden.json"
    parts = {
        "examples": EXAMPLES,
        "mistakes": mistakes(),
        "models": models(),
        "sampling": sampling(),
        "tokenizers": tokenizers(),
        "references": references(),
    }
    golden.write_text(json.dumps(parts, allow_nan=False), encoding="utf-8")
    files = sorted(map(str, TESTS.glob("*.test.js")))
    ran = subprocess.run(
        [node, "--test", "--test-reporter=spec", *files],
        env={**os.environ, "EXPLORER_GOLDEN": str(golden)},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert files


def listed(numbers: Any) -> Any:
    """Nested lists for JSON; null for what is not finite."""
    if isinstance(numbers, np.ndarray | np.generic):
        numbers = numbers.tolist()
    if isinstance(numbers, list | tuple):
        return [listed(number) for number in numbers]
    if isinstance(numbers, Mapping):
        return {name: listed(number) for name, number in numbers.items()}
    return None if isinstance(numbers, float) and not math.isfinite(numbers) else numbers


# ── worked examples ────────────────────────────────────────────────────────────────────────────────────────────


def mistakes() -> dict[str, dict[str, list[Any]]]:
    """For each example on one head and each mistake's name: the outputs of its kinds, null where shapes forbid one."""
    made: dict[str, dict[str, list[Any]]] = {}
    for example in EXAMPLES["attention"]:
        if np.ndim(example["query"]) == 2 and example["scaled"]:
            query, key, value = (np.array(example[part], float) for part in ("query", "key", "value"))
            inputs = Inputs(query, key, value, np.array(example["mask"], bool) if example["mask"] else None)
            outputs = made[example["name"]] = {}
            for (mistake,) in candidates(layer=False, n_axis=2, number=1):
                output = compute(inputs, with_mistakes([mistake]))
                outputs.setdefault(mistake.name, []).append(None if output is None else listed(output))
    return made


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────


def model_entry(form: NormalForm, precision: str) -> dict[str, Any]:
    """What the page is given of a model, which here comes from no file."""
    return payload.model_entry(payload.Model(cast(Checkpoint, SimpleNamespace(step=1)), form, "", 0, precision))


def looked(form: NormalForm, tokens: Array, changes: Mapping[tuple[int, int], Any]) -> dict[str, Any]:
    """All numbers of the decoder on a text, in float64; a change of a head is its weights, or None for no output."""
    form, length = form.astype(np.float64), len(tokens)
    norm = plain.layer_norm if form.centred else rms_norm
    x = form.token_table[tokens] + form.position_table[:length]
    if form.embedding_norm:
        x = norm(x) * form.embedding_gain + form.embedding_shift
    streams, layers = [x], []
    for i, layer in enumerate(form.per_layer()):
        normed = norm(x) * layer.attn_gain + layer.attn_shift
        heads = split_heads(normed @ layer.qkv_weight.T + layer.qkv_bias, form.head_dim)
        query, key, value = np.split(heads, [form.n_head, form.n_head + form.n_kv_head])
        if form.qk_norm:
            query, key = rms_norm(query), rms_norm(key)
        query, key = (rotate(part, form.cos[:length], form.sin[:length]) for part in (query, key))
        key, value = key[form.key_head], value[form.key_head]
        weights = plain.attention_weights(query, key, plain.causal_mask(length))
        for (at, head), rows in changes.items():
            if at == i and rows is not None:
                weights[head] = np.where(rows.any(axis=-1, keepdims=True), rows, weights[head])
        output = weights @ value
        for (at, head), rows in changes.items():
            if at == i and rows is None:
                output[head] = 0
        x = x + merge_heads(output) @ layer.output_weight.T + layer.output_bias
        x = x + plain.feed_forward(norm(x) * layer.mlp_gain + layer.mlp_shift, layer, form.activation)
        streams.append(x)
        layers.append({"query": query, "key": key, "value": value, "weights": weights, "output": output})
    depths = [(norm(x) * form.final_gain + form.final_shift) @ form.head.T for x in streams]
    if form.softcap:
        depths = [form.softcap * np.tanh(logits / form.softcap) for logits in depths]
    if not changes:
        np.testing.assert_allclose(depths[-1], plain.forward(form, tokens), rtol=0, atol=1e-12)
    shares = plain.softmax(np.array(depths))
    losses = -np.log(shares[-1][np.arange(length - 1), tokens[1:]])
    return {"layers": layers, "logits": depths[-1], "shares": shares, "losses": losses}


def models() -> list[dict[str, Any]]:
    """Every layout with its numbers on a text, and one with heads changed."""
    shipped = {f"{name}.toml": ModelConfig(**values) for name, values in SHIPPED.items()}
    layouts = {name: small(config, d_ff=40) for name, config in LAYOUTS.items()}
    layouts |= {name: small(config, d_ff=40, d_model=8 * config.n_head) for name, config in shipped.items()}
    layouts["gelu_tanh"] = small(ModelConfig(mlp="gelu_tanh"), d_ff=40)
    cases = []
    for number, (name, config) in enumerate(layouts.items()):
        precision = "f16" if name == "modern" else "f32"
        form = from_tensors(random_tensors(config, seed=number), config, np.float32)
        if precision == "f16":
            form = form.astype(np.float16)
        tokens = np.random.default_rng(number).integers(0, form.vocab_size, config.context_length - number % 3)
        numbers = {"ids": tokens, **looked(form, tokens, {})}
        last = (1, form.n_head - 1)
        changed = looked(form, tokens, {last: np.eye(len(tokens), k=-1), (0, 0): None})
        case = {"name": name, "entry": model_entry(form, precision), "previous": last, "changed": changed["logits"]}
        cases.append(listed({**case, **numbers}))
    return cases


# ── sampling ───────────────────────────────────────────────────────────────────────────────────────────────────


def sampling() -> dict[str, Any]:
    """1,000 random laws with what they make of random logits, many of them equal; and uniforms of many seeds."""
    rng = random.Random(1)
    cases = []
    for seed in range(1000):
        size = rng.choice((2, 5, 19, 40))
        logits = np.random.default_rng(seed).normal(0, rng.choice((0.5, 3, 20)), size)
        if seed % 3 == 0:
            logits = np.round(logits)
        options = SamplingOptions(
            temperature=rng.choice((0.0, 0.3, 0.8, 1.0, 2.5)),
            top_k=rng.choice((0, 0, 1, 3, 10, 100)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.5, 0.05)),
            min_p=rng.choice((0.0, 0.0, 0.05, 0.4)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.7)),
        )
        history = [rng.randrange(size) for _ in range(rng.randrange(6))]
        banned = rng.sample(range(size), rng.randrange(2))
        probabilities, uniform = distribution(logits, history, options, banned), rng.random()
        law = {name: getattr(options, key) for name, key in LAW.items()}
        case = {"logits": logits, "options": law, "history": history, "banned": banned, "uniform": uniform}
        cases.append({**listed(case), "probabilities": listed(probabilities), "drawn": draw(probabilities, uniform)})
    seeds = [0, 1, 2, 1234, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**64 + 5, 2**128, 2**200 + 2**70 + 3]
    uniforms = {str(seed): np.random.Generator(np.random.PCG64(seed)).random(20).tolist() for seed in seeds}
    return {"cases": cases, "uniforms": uniforms}


LAW = {
    "temperature": "temperature", "topK": "top_k", "topP": "top_p", "minP": "min_p",
    "repetitionPenalty": "repetition_penalty",
}  # fmt: skip


# ── tokenizers ─────────────────────────────────────────────────────────────────────────────────────────────────


def random_texts(count: int) -> list[str]:
    """Words, blanks of all kinds, Japanese, emoji, and any characters that Unicode 14 has."""
    rng = random.Random(2)
    texts = ["", " ", "\n", " " * 300, "これは長い文です" * 30]
    while len(texts) < count:
        pieces = [
            rng.choice(WORDS) if rng.random() < 0.8 else chr(rng.randrange(0x20000))
            for _ in range(rng.randrange(1, 25))
        ]
        text = "".join(piece * rng.choice((1, 1, 1, 3)) for piece in pieces)
        if not {"Cn", "Cs"} & set(map(unicodedata.category, text)):
            texts.append(text)
    return texts


def tokenizers() -> list[dict[str, Any]]:
    """Every kind with the ids of many texts; null where a character is unknown."""
    texts = random_texts(300)
    learned = ["".join(texts[50:])]
    bpe = train_tokenizer("bpe", learned, 700)
    assert isinstance(bpe, BpeTokenizer)
    known = "".join(sorted(set("".join(texts[:150])) | set(" ?")))
    kinds = {
        **{f"bpe, {name}": BpeTokenizer(name, bpe.tokens, pattern) for name, pattern in named_patterns().items()},
        "bpe": bpe,
        "bpe with holes": BpeTokenizer("holes", [*bpe.tokens[:300], None, None, *bpe.tokens[300:]], bpe.pattern),
        "byte": train_tokenizer("byte", []),
        "char": CharTokenizer(known, byte_fallback=False),
        "char, skip": CharTokenizer(known, byte_fallback=False, unseen="skip"),
        "char, replace": CharTokenizer(known, byte_fallback=False, unseen="replace"),
        "char, bytes": train_tokenizer("char", learned, 300),
    }
    cases = []
    for name, tokenizer in kinds.items():
        found = [ids_of(tokenizer, text) for text in texts]
        pieces = [ids[1 : 1 + i % 5] for i, ids in enumerate(found) if ids]
        decoded = [{"ids": ids, "text": tokenizer.decode(ids)} for ids in pieces]
        cases.append(
            {
                "name": name,
                "entry": payload.tokenizer_entry(tokenizer),
                "texts": texts,
                "ids": found,
                "decoded": decoded,
            }
        )
    return cases


def named_patterns() -> dict[str, str]:
    """The split patterns of tiktoken's encodings, without their tables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(openai_public, name, lambda *_, **__: {})
        return {name: make()["pat_str"] for name, make in openai_public.ENCODING_CONSTRUCTORS.items()}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int] | None:
    try:
        return tokenizer.encode(text).tolist()
    except UserError:
        return None


# ── references ─────────────────────────────────────────────────────────────────────────────────────────────────


def references() -> dict[str, Any]:
    """Patterns on random tokens, and heads held against them: some random, some near a pattern."""
    tokenizer = train_tokenizer("bpe", random_texts(200), 500)
    marks = tokenizer.encode("a b (c [d] e) 「f」, .\n ! ）x")
    cases = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(2, 24))
        tokens = rng.choice(marks, length) if seed % 2 else rng.integers(0, tokenizer.vocab_size, length)
        drawn = {name: parse_reference(name, tokenizer).pattern(tokens) for name in REFERENCES}
        rows = np.where(np.tri(length, dtype=bool), rng.normal(0, 2, (3, length, length)), -np.inf)
        near = drawn[REFERENCES[seed % len(REFERENCES)]]
        pure = np.where(near.defined[:, None], near.weights, np.eye(length))
        maps = np.stack([*plain.softmax(rows), pure, 0.7 * pure + 0.3 * plain.softmax(rows[0])])[None]
        close = {name: closeness(maps, pattern) for name, pattern in drawn.items()}
        told = HeadReport(close, nulls={}, description=describe(maps[None]), about={}, heads=[], title="")
        names = [told.name(Head(0, head)) for head in range(maps.shape[1])]
        measures = {
            name: {"tv": one.total_variation[0], "mass": one.mass[0], "agreement": one.argmax[0], "lift": one.lift[0]}
            for name, one in close.items()
        }
        case = {
            "ids": tokens,
            "maps": maps[0],
            "patterns": {name: one.weights for name, one in drawn.items()},
            "closeness": measures,
            "coverage": {name: one.coverage for name, one in close.items()},
            "names": [None if name == NONE else name for name in names],
            "keys": told.description.effective_keys[0],
            "first": told.description.first_token_mass[0],
        }
        cases.append(listed(case))
    return {"tokenizer": payload.tokenizer_entry(tokenizer), "cases": cases}


REFERENCES = (
    "uniform", "previous", "first", "self", "window:4", "window:1", "duplicate", "induction", "punctuation", "brackets",
)  # fmt: skip
