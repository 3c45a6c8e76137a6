"""The compiled engine: the specification's numbers, the law's ids, the same text as every other engine."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import GENERATE, ROOT, Script, Trained
from test_plain import LAYOUTS, VOCAB, assert_engine_equal, model_of, random_tensors, small

import minigpt
from minigpt import compiled, fast
from minigpt.config import ModelConfig, read_toml, validate
from minigpt.errors import UserError
from minigpt.fast import FastEngine
from minigpt.model import GPT
from minigpt.network import TorchEngine
from minigpt.normal_form import NormalForm, from_tensors
from minigpt.packed import Crew, Desk, Law, Model
from minigpt.plain import PlainEngine, forward
from minigpt.sampling import (
    Engine,
    Rule,
    SamplingOptions,
    Text,
    WritingEngine,
    distribution,
    draw,
    generate,
    generate_together,
)

GREEDY = SamplingOptions(temperature=0)

# ── logits ─────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_all_logits_equal(model: NormalForm, n_prompt: int = 0, limit: float = 1e-5) -> None:
    """Token by token after a prompt of ``n_prompt``, up to a full memory."""
    tokens = np.random.default_rng(1).integers(model.vocab_size, size=model.context_length)
    reference, engine = forward(model, tokens), FastEngine(model)
    memory = engine.new_memory()
    if n_prompt:
        assert_engine_equal(engine.logits(tokens[:n_prompt], memory), reference[n_prompt - 1], limit)
    for i in range(n_prompt, len(tokens)):
        assert_engine_equal(engine.logits(tokens[i : i + 1], memory), reference[i], limit)
    assert memory.lengths[0] == len(tokens)


def rounding(model: NormalForm) -> float:
    """How far NumPy in float32 is from the specification, to the largest logit: where norms divide by very little."""
    tokens = np.random.default_rng(1).integers(model.vocab_size, size=model.context_length)
    reference, engine = forward(model, tokens), PlainEngine(model.astype(np.float32))
    logits = engine.all_logits(tokens, engine.new_memory())
    return float((np.abs(logits - reference).max(axis=-1) / np.abs(reference).max(axis=-1)).max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_prompt", [0, 5])
def test_logits_are_those_of_the_specification(layout: str, n_prompt: int) -> None:
    assert_all_logits_equal(model_of(small(LAYOUTS[layout])), n_prompt)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_layout_is_right(data: st.DataObject) -> None:
    one_of = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    n_head, flag = one_of(1, 2, 4, 6), st.booleans()
    config = ModelConfig(
        n_layer=one_of(1, 3),
        n_head=n_head,
        n_kv_head=one_of(*(n for n in (1, 2, 3, 4, 6) if n_head % n == 0)),
        d_model=n_head * one_of(4, 6, 10),
        d_ff=one_of(1, 7, 24),
        context_length=one_of(2, 9, 40),
        position=one_of("rotary", "sinusoidal", "learned", "none"),
        norm=one_of("rmsnorm", "layernorm"),
        norm_weight=data.draw(flag),
        embedding_norm=data.draw(flag),
        mlp=one_of("relu2", "relu", "gelu", "gelu_tanh", "swiglu"),
        qk_norm=data.draw(flag),
        bias=one_of("none", "no_qkv", "all"),
        embedding_scale=data.draw(flag),
        tie_embeddings=data.draw(flag),
        logit_softcap=one_of(0.0, 15.0),
    )
    model = model_of(config)
    assert_all_logits_equal(model, n_prompt=one_of(0, 2), limit=max(1e-5, 5 * rounding(model)))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_layouts_write_what_torch_writes(path: Path) -> None:
    shipped = validate(read_toml(path)).model
    config = shipped.model_copy(update={"n_layer": 2, "d_model": 8 * shipped.n_head, "d_ff": 0, "context_length": 12})
    tensors = random_tensors(config)
    model = GPT(config, VOCAB)
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    engines: list[Engine] = [TorchEngine(model.eval()), FastEngine(from_tensors(tensors, config))]
    greedy, same = (written(engine, GREEDY, n_token=40) for engine in engines)
    assert greedy == same
    tokens = np.arange(12) % VOCAB
    memories = [engine.new_memory() for engine in engines]
    for token in tokens:
        row = np.array([token])
        theirs, ours = (engine.logits(row, memory) for engine, memory in zip(engines, memories, strict=True))
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_exponentials() -> None:
    exponents = np.concatenate([np.linspace(-79, 0, 5000), [-80.5, -1e30, -np.inf, np.nan]]).astype(np.float32)
    powers, scratch = exponents.copy(), np.empty(len(exponents), np.int32)
    compiled.exponentiate(powers, scratch)
    np.testing.assert_allclose(powers[:5000], np.exp(exponents[:5000].astype(np.float64)), rtol=5e-7)
    assert (powers[5000:-1] < 1e-34).all() and np.isnan(powers[-1])


# ── the law ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_compiled_law_is_the_law() -> None:
    """A thousand random cases, many with ties, of every option and several sizes."""
    chance = np.random.default_rng(0)
    for number in range(1000):
        n_id = int(chance.choice([1, 2, 5, 9, VOCAB, 300]))
        logits = (chance.standard_normal(n_id) * chance.choice([0.1, 1, 5])).astype(np.float32)
        if number % 3 == 0:
            logits = np.round(2 * logits) / 2
        options = SamplingOptions(
            temperature=float(chance.choice([0, 1e-320, 0.3, 0.8, 1, 2])),
            top_k=[0, 1, 3, 40, 10**30][chance.integers(5)],
            top_p=float(chance.choice([1, 0.95, 0.5, 0.1])),
            min_p=float(chance.choice([0, 0.05, 0.5])),
            repetition_penalty=float(chance.choice([1, 1.3, 0.7])),
        )
        history, banned = set(chance.integers(n_id, size=4).tolist()), {0} if n_id > 1 else set()
        uniform = chance.random()
        expected = draw(distribution(logits, history, options, banned), uniform)
        law = Law.of([Rule(options, history, banned, None)], n_id)
        assert compiled.choose(logits, law, law.seen[0], uniform) == expected, (number, options)


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def written(engine: Engine, options: SamplingOptions, *, n_token: int, **named: Any) -> list[int]:
    named = {"end": None} | named
    return list(generate(engine, named.pop("prompt", [1, 2]), max_new_tokens=n_token, options=options, **named))


@pytest.mark.parametrize("layout", ["default", "gpt2", "llama"])
@pytest.mark.parametrize("n_prompt", [1, 11, 12, 13, 36])
def test_the_same_text_as_in_numpy(layout: str, n_prompt: int) -> None:
    """Far enough for the window to move several times; with every option; with an end."""
    model = model_of(small(LAYOUTS[layout]))
    prompt = np.random.default_rng(n_prompt).integers(1, VOCAB, size=n_prompt).tolist()
    engines = PlainEngine(model), FastEngine(model)
    for options in (
        SamplingOptions(temperature=1),
        SamplingOptions(temperature=2, top_k=12, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    ):
        for end in (None, 3):
            texts = [written(e, options, n_token=90, prompt=prompt, seed=4, end=end, banned=[5]) for e in engines]
            assert texts[0] == texts[1]
            assert not {5, end} & set(texts[0]) and (end or len(texts[0]) == 90)


def test_a_stretch_is_as_long_as_asked_or_as_fits_or_to_the_end() -> None:
    engine = FastEngine(model_of(small(LAYOUTS["default"])))
    assert isinstance(engine, WritingEngine) and not isinstance(
        PlainEngine(model_of(small(ModelConfig()))), WritingEngine
    )

    def stretch(most: int, n_read: int = 0, end: int | None = None) -> list[int]:
        memory = engine.new_memory()
        if n_read:
            engine.logits(np.arange(n_read), memory)
        text = Text.begin([1], max_new_tokens=most, options=SamplingOptions(temperature=1), seed=3, end=end)
        ids = engine.write({0: text}, memory)[0]
        assert memory.lengths[0] == n_read + len(ids)
        return ids

    free = stretch(8)
    assert len(free) == 8 and len(stretch(99)) == 12 and len(stretch(99, n_read=9)) == 3
    assert stretch(8, end=free[4]) == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("layout", ["default", "llama"])
def test_texts_written_side_by_side_are_those_written_alone(layout: str) -> None:
    """Of different lengths and ends, past several windows, and one whose reader has had enough."""
    engine = FastEngine(model_of(small(LAYOUTS[layout])), threads=2)
    law: dict[str, Any] = {"options": SamplingOptions(temperature=2, repetition_penalty=1.3), "end": 3, "banned": [5]}
    prompts, lengths = [[1, 2], [4], [*range(6, 19), *range(6, 12)], [9, 9, 9], [1, 2]], [70, 12, 40, 0, 33]
    texts = [
        Text.begin(prompt, max_new_tokens=length, seed=seed, **law)
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    ids: list[list[int]] = [[] for _ in texts]
    for number, token in generate_together(engine, texts):
        ids[number].append(token)
        if number == 4 and len(ids[4]) == 7:
            texts[4].left = 0
    alone = [
        list(generate(PlainEngine(model_of(small(LAYOUTS[layout]))), prompt, max_new_tokens=length, seed=seed, **law))
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    assert ids == [*alone[:4], alone[4][:7]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_that_share_a_token_give_the_same_bits(layout: str, size: int) -> None:
    normal = model_of(small(LAYOUTS[layout])).astype(np.float32)
    model, alone = Model.of(normal), FastEngine(normal)
    memory, shared = alone.new_memory(), alone.new_memory()
    with ThreadPoolExecutor(size) as pool:
        for tokens in ([1, 2, 3, 4, 5, 6, 7], [8], [9]):
            expected = alone.logits(tokens, memory)
            places = np.arange(memory.lengths[0] - len(tokens), memory.lengths[0])
            desk = Desk.of(model, n_token=len(tokens))
            arguments = (model, shared.keys, shared.values, 0 * places, places, np.array(tokens), desk)
            list(pool.map(partial(compiled.read, *arguments), Crew.of(size, patience=10**10)))
            assert desk.logits[0, :VOCAB].tobytes() == expected.tobytes()


def test_texts_of_several_threads_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = model_of(small(LAYOUTS["default"]))
    options = SamplingOptions(temperature=1, repetition_penalty=1.3)
    expected = written(FastEngine(normal), options, n_token=60)
    together = FastEngine(normal, threads=2)
    together.prepare()
    monkeypatch.setattr(fast, "LOOKS", 10**11)  # so patient that they do come together, however busy the machine is
    assert written(together, options, n_token=60) == expected
    assert (together._alone, together._next_alone) == (0, fast.FEW_ALONE)
    monkeypatch.setattr(fast, "LOOKS", 1000)
    kept = FastEngine(normal, threads=2)
    monkeypatch.setattr(kept, "_others", KeptFromComing())
    assert written(kept, options, n_token=60) == expected
    assert kept._next_alone > 2 * fast.FEW_ALONE, "it tries again now and then, ever more seldom"


class KeptFromComing:
    """A pool whose threads get no core."""

    def submit(self, *_call: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tensor", ["blocks.1.mlp.down_linear.weight", "blocks.0.attn.key_linear.weight"])
def test_damaged_weights_are_told_in_one_sentence(tensor: str, value: float) -> None:
    config = small(ModelConfig(qk_norm=False))
    tensors = random_tensors(config)
    tensors[tensor][:, 2:5] = value
    with pytest.raises(UserError, match="not finite"):
        written(FastEngine(from_tensors(tensors, config)), GREEDY, n_token=1, prompt=[1])


def test_damage_is_told_where_it_is_reached() -> None:
    """The embedding of one id is not a number: the text goes up to the place where that id is read."""
    config = small(ModelConfig(tie_embeddings=False))
    tensors = random_tensors(config)
    free = written(FastEngine(from_tensors(tensors, config)), SamplingOptions(), n_token=11, prompt=[1])
    at = next(i for i in range(3, 11) if free[i] not in (1, *free[:i]))
    tensors["token_embedding.weight"][free[at]] = np.nan
    ids = generate(
        FastEngine(from_tensors(tensors, config)), [1], max_new_tokens=11, options=SamplingOptions(), end=None
    )
    assert [next(ids) for _ in range(at + 1)] == free[: at + 1]
    with pytest.raises(UserError, match="not finite"):
        next(ids)


def test_more_than_the_context_is_refused() -> None:
    engine = FastEngine(model_of(small(ModelConfig())))
    memory = engine.new_memory()
    engine.logits(np.arange(12), memory)
    with pytest.raises(AssertionError, match="1 tokens do not fit"):
        engine.logits(np.array([0]), memory)


# ── where the code is kept, and the script ─────────────────────────────────────────────────────────────────────


def test_code_that_can_not_be_kept_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = compiled.numba.njit

    def nowhere(function: Any, cache: bool = False, **named: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **named)

    monkeypatch.setattr(compiled.numba, "njit", nowhere)
    assert compiled._jit(lambda x: x + 1)(2) == 3


SAMPLES = ("--prompt", "the ", "--max-new-tokens", 70, "--num-samples", 5)


def test_samples_side_by_side_are_those_one_by_one(trained: Trained, script: Script) -> None:
    for form in ((), ("--json",), ("--top-k", 5, "--stop", "e\\n")):
        answers = [script(GENERATE, trained.path, *SAMPLES, *form, "--engine", e) for e in ("numpy", "numba", "torch")]
        assert answers[0].code == 0
        assert answers[0].out == answers[1].out == answers[2].out


def test_code_made_from_other_files_is_forgotten(tmp_path: Path) -> None:
    """Whether they are older or newer."""
    folder, code = tmp_path / "not there yet", tmp_path / "not there yet" / "compiled.write-0.py0.nbi"
    fast.forget_other_code(folder)
    code.touch()
    fast.forget_other_code(folder)
    assert code.exists()
    (folder / "compiled.made-from").write_text("[(1, 2)]", encoding="utf-8")
    fast.forget_other_code(folder)
    assert not code.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_an_output_that_is_full_is_one_sentence(trained: Trained) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        words = [sys.executable, str(GENERATE), str(trained.path), "--max-new-tokens", "5"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (2, "error: the output can't be written, no space is left for it\n")


def test_engine_follows_the_length_of_the_text(
    trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(FastEngine, "prepare", lambda self: made.append("numba"))
    assert script(GENERATE, trained.path, "--max-new-tokens", 50).code == 0 and not made
    assert script(GENERATE, trained.path, "--max-new-tokens", 10**6, "--stop", "e").code == 0 and made == ["numba"]


def test_a_broken_numba_costs_no_text(trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: FastEngine) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FastEngine, "prepare", full_disk)
    answer = script(GENERATE, trained.path, "--max-new-tokens", 10**6, "--stop", "e")
    assert answer.code == 0 and answer.out
    assert "numba failed ([Errno 28] No space left on device): NumPy goes on" in answer.err


def test_without_numba_numpy_writes(trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("fast", "compiled"):
        monkeypatch.delitem(sys.modules, f"minigpt.{name}")
        monkeypatch.delattr(minigpt, name)
    answer = script(GENERATE, trained.path, "--max-new-tokens", 10**6, "--stop", "e")
    assert (answer.code, answer.err) == (0, "")
    asked = script(GENERATE, trained.path, "--engine", "numba")
    assert asked.code == 2 and "pip install numba" in asked.err


def test_engines_of_the_cpu_need_it(trained: Trained, script: Script) -> None:
    answer = script(GENERATE, trained.path, "--engine", "numba", "--device", "cuda")
    assert answer.code == 2 and "--engine numba runs on the CPU alone" in answer.err
