"""The NumPy decoder: its parts against worked examples, its engine against its specification."""

import itertools
import json
from importlib import resources

import numpy as np
import pytest

from minigpt import plain
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.normal_form import Array, NormalForm, from_tensors, rotary_angles, sinusoidal_positions
from minigpt.plain import PlainEngine, forward
from minigpt.sampling import SamplingOptions, generate

EXAMPLES = json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))
PARTS = {example["name"]: example for example in EXAMPLES["parts"]}

BARE = {"norm_weight": False, "embedding_norm": False, "qk_norm": False, "bias": "none", "logit_softcap": 0.0}
LAYOUTS = {
    "default": ModelConfig(),
    "modern": ModelConfig(tie_embeddings=False, logit_softcap=15),
    "tutorial": ModelConfig(
        position="sinusoidal", norm="layernorm", norm_weight=True, mlp="relu", bias="no_qkv",
        embedding_scale=True, embedding_norm=False, qk_norm=False, tie_embeddings=False, logit_softcap=0,
    ),
    "gpt2": ModelConfig(
        position="learned", norm="layernorm", norm_weight=True, mlp="gelu", bias="all", tie_embeddings=True,
        embedding_norm=False, qk_norm=False, logit_softcap=0,
    ),
    "llama": ModelConfig(
        norm_weight=True, mlp="swiglu", n_kv_head=2, embedding_norm=False, qk_norm=False, tie_embeddings=False,
        logit_softcap=0,
    ),
    "no positions, odd heads": ModelConfig(
        position="none", d_model=36, n_kv_head=1, d_ff=20, bias="all", tie_embeddings=False, logit_softcap=15,
    ),
    "everything at once": ModelConfig(
        norm="layernorm", norm_weight=True, mlp="swiglu", n_kv_head=2, bias="all", embedding_scale=True,
        tie_embeddings=True, logit_softcap=15,
    ),
    "one head, tight cap": ModelConfig(
        n_head=1, position="learned", mlp="gelu", tie_embeddings=False, logit_softcap=1.5,
    ),
}  # fmt: skip
VOCAB = 19


def small(config: ModelConfig, **changes: object) -> ModelConfig:
    """The same layout, small enough to run in milliseconds."""
    width = config.d_model if config.d_model < 128 else 32
    return config.model_copy(update={"n_layer": 2, "d_model": width, "context_length": 12, **changes})


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Array]:
    """A checkpoint's tensors with every weight random, large enough to make each part matter."""
    random = np.random.default_rng(seed)
    width, key_width = config.d_model, (config.n_kv_head or config.n_head) * config.head_dim
    hidden, bias = config.feed_forward_width, config.bias != "none"
    linears: dict[str, tuple[int, int, bool]] = {}
    norms = ["final_norm"] + ["embedding_norm"] * config.embedding_norm
    for i in range(config.n_layer):
        norms += [f"blocks.{i}.attn_norm", f"blocks.{i}.mlp_norm"]
        for part, rows in (("query", width), ("key", key_width), ("value", key_width)):
            linears[f"blocks.{i}.attn.{part}_linear"] = rows, width, config.bias == "all"
        linears[f"blocks.{i}.attn.output_linear"] = width, width, bias
        for part in ("up", "gate") if config.mlp == "swiglu" else ("up",):
            linears[f"blocks.{i}.mlp.{part}_linear"] = hidden, width, bias
        linears[f"blocks.{i}.mlp.down_linear"] = width, hidden, bias
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (VOCAB, width)}
    if config.position == "learned":
        shapes["position_embedding.weight"] = (config.context_length, width)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (VOCAB, width)
    if config.norm_weight:
        shapes |= {f"{name}.weight": (width,) for name in norms}
        shapes |= {f"{name}.bias": (width,) for name in norms if config.norm == "layernorm"}
    shapes |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, has_bias) in linears.items() if has_bias}
    return {name: (random.standard_normal(shape) / shape[-1] ** 0.25).astype("f4") for name, shape in shapes.items()}


def model_of(config: ModelConfig) -> NormalForm:
    return from_tensors(random_tensors(config), config)


def close(actual: Array, expected: object) -> None:
    np.testing.assert_allclose(actual, np.array(expected, dtype=np.float64), rtol=1e-6, atol=1e-6)


# ── worked examples ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("example", EXAMPLES["attention"], ids=lambda example: example["name"])
def test_attention_examples(example: dict) -> None:
    query, key, value = (np.array(example[name], dtype=np.float64) for name in ("query", "key", "value"))
    mask = np.array(example["mask"], dtype=bool) if example["mask"] else None
    if example["name"] == "grouped_query":
        key, value = key[[0, 0, 1, 1]], value[[0, 0, 1, 1]]
    close(plain.attention_weights(query, key, mask, scaled=example["scaled"]), example["weights"])
    close(plain.attention(query, key, value, mask, scaled=example["scaled"]), example["output"])


@pytest.mark.parametrize("example", EXAMPLES["multi_head"], ids=lambda example: example["name"])
def test_multi_head_examples(example: dict) -> None:
    config = ModelConfig(
        **{**BARE, "bias": "no_qkv"}, n_layer=1, n_head=2, d_model=4, d_ff=4, context_length=3, position="none"
    )
    tensors = random_tensors(config)
    for part, letter in {"query": "Q", "key": "K", "value": "V", "output": "O"}.items():
        matrix = np.array(example.get(f"W_{letter}", np.eye(4)), dtype=np.float64)
        tensors[f"blocks.0.attn.{part}_linear.weight"] = matrix
    tensors["blocks.0.attn.output_linear.bias"] = np.array(example.get("b_O", np.zeros(4)))
    model = from_tensors(tensors, config)
    close(plain.self_attention(np.array(example["x"]), model.per_layer()[0], model), example["output"])


def test_feed_forward_example() -> None:
    example = PARTS["feed_forward_relu"]
    config = ModelConfig(
        **{**BARE, "bias": "all"}, n_layer=1, n_head=1, d_model=2, d_ff=4, context_length=2, mlp="relu"
    )
    tensors = random_tensors(config)
    for part, index in {"up": 1, "down": 2}.items():
        tensors[f"blocks.0.mlp.{part}_linear.weight"] = np.array(example[f"W{index}"])
        tensors[f"blocks.0.mlp.{part}_linear.bias"] = np.array(example[f"b{index}"])
    layer = from_tensors(tensors, config).per_layer()[0]
    close(plain.feed_forward(np.array(example["x"]), layer, "relu"), example["value"])


def test_norm_and_position_examples() -> None:
    for norm in (plain.layer_norm, plain.rms_norm):
        close(norm(np.array(PARTS[norm.__name__]["x"])), PARTS[norm.__name__]["value"])
    close(sinusoidal_positions(3, 4), PARTS["sinusoidal_positions"]["value"])
    example = PARTS["rotary_relative"]
    cos, sin = rotary_angles(41, 4)
    turned = [
        plain.rotate(np.array(example["query"]), cos[p], sin[p])
        @ plain.rotate(np.array(example["key"]), cos[p - 3], sin[p - 3])
        for p in (3, 5, 40)
    ]
    close(np.array(turned), example["product"])


def test_activations() -> None:
    up, gate = np.array([-2.0, 0.0, 3.0]), np.array([1.0, 5.0, -1000.0])
    close(plain.activate("relu2", up, gate), [0, 0, 9])
    close(plain.activate("relu", up, gate), [0, 0, 3])
    close(plain.activate("gelu", up, gate), [-0.0455002639, 0, 2.9959503059])
    close(plain.activate("gelu_tanh", up, gate), [-0.0454023059, 0, 2.9963625967])
    close(plain.activate("swiglu", up, gate), [-2 / (1 + np.exp(-1)), 0, 0])


# ── the normal form ────────────────────────────────────────────────────────────────────────────────────────────


def test_feed_forward_width_is_derived() -> None:
    assert ModelConfig(d_model=48).feed_forward_width == 192
    assert ModelConfig(d_model=48, mlp="swiglu").feed_forward_width == 128
    assert ModelConfig(d_model=128, mlp="swiglu").feed_forward_width == 344  # 341.3 rounded up to a multiple of 8
    assert ModelConfig(d_model=128, mlp="swiglu", d_ff=10).feed_forward_width == 10


def test_tied_head_is_the_unscaled_embedding() -> None:
    model = model_of(small(ModelConfig(tie_embeddings=True, embedding_scale=True)))
    np.testing.assert_allclose(model.token_table, model.head * 32**0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm.weight": None}, "final_norm.weight is missing"),
        ({"blocks.1.mlp.up_linear.weight": np.zeros((3, 32))}, r"up_linear.weight has shape \(3, 32\)"),
        ({"blocks.0.attn.query_linear.bias": np.zeros(32)}, "query_linear.bias is not part of the model"),
        ({"token_embedding.weight": None}, "token_embedding.weight is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Array | None], message: str) -> None:
    config = small(ModelConfig(norm_weight=True))
    tensors = {name: tensor for name, tensor in (random_tensors(config) | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        from_tensors(tensors, config)


# ── the whole forward, and the engine against it ───────────────────────────────────────────────────────────────


def test_forward_is_causal() -> None:
    model = model_of(small(ModelConfig()))
    tokens = np.arange(12) % VOCAB
    changed = tokens.copy()
    changed[7:] = 3
    before, after = forward(model, tokens), forward(model, changed)
    np.testing.assert_allclose(after[:7], before[:7], rtol=1e-13, atol=1e-13)
    assert np.abs(after[7:] - before[7:]).max(axis=1).min() > 1e-3


def test_forward_tells_order_only_with_positions() -> None:
    def last_logits(position: str, tokens: list[int]) -> Array:
        return forward(model_of(small(ModelConfig(), position=position, n_layer=1)), tokens)[-1]

    np.testing.assert_allclose(last_logits("none", [1, 2, 3]), last_logits("none", [2, 1, 3]), atol=1e-12)
    for position in ("rotary", "sinusoidal", "learned"):
        assert np.abs(last_logits(position, [1, 2, 3]) - last_logits(position, [2, 1, 3])).max() > 1e-3


def assert_engine_equal(logits: Array, reference: Array, limit: float = 1e-5) -> None:
    assert logits.dtype == np.float32
    assert np.abs(logits - reference).max() <= limit * np.abs(reference).max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_equals_forward(layout: str) -> None:
    """One pass, token by token, and chunks on a filled memory, up to exactly full."""
    model = model_of(small(LAYOUTS[layout]))
    tokens = np.random.default_rng(1).integers(VOCAB, size=12)
    reference, engine = forward(model, tokens), PlainEngine(model)
    assert_engine_equal(engine.all_logits(tokens, engine.new_memory()), reference)
    for cuts in (range(13), (0, 12), (0, 5, 6, 12), (0, 1, 11, 12)):
        memory = engine.new_memory()
        for start, end in itertools.pairwise(cuts):
            assert_engine_equal(engine.logits(tokens[start:end], memory), reference[end - 1])
            assert memory.length == end


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "learned", "none"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("mlp", ["relu2", "relu", "gelu", "gelu_tanh", "swiglu"])
def test_every_combination_runs_equal(position: str, norm: str, mlp: str) -> None:
    config = small(ModelConfig(), position=position, norm=norm, mlp=mlp, n_kv_head=2, norm_weight=True, bias="no_qkv")
    model = model_of(config)
    tokens = np.arange(9)
    engine = PlainEngine(model)
    memory = engine.new_memory()
    engine.logits(tokens[:-1], memory)
    assert_engine_equal(engine.logits(tokens[-1:], memory), forward(model, tokens)[-1])


def test_memory_crops_and_tells_its_size() -> None:
    config = small(ModelConfig(n_kv_head=2))
    model = model_of(config)
    engine = PlainEngine(model)
    memory = engine.new_memory()
    engine.logits(np.arange(10), memory)
    memory.crop(4)
    assert_engine_equal(engine.logits(np.array([7, 8]), memory), forward(model, [0, 1, 2, 3, 7, 8])[-1])
    assert memory.length == 6
    assert memory.nbytes == 2 * 4 * config.n_layer * config.context_length * 2 * config.head_dim


def test_engine_refuses_more_than_the_context() -> None:
    engine = PlainEngine(model_of(small(ModelConfig())))
    memory = engine.new_memory()
    engine.logits(np.arange(12), memory)
    with pytest.raises(AssertionError, match="1 tokens do not fit"):
        engine.logits(np.array([0]), memory)


def test_engine_leaves_its_model_alone() -> None:
    model = from_tensors(random_tensors(config := small(ModelConfig())), config, np.float32)
    before = forward(model, range(5))
    engine = PlainEngine(model)
    engine.logits(np.arange(5), engine.new_memory())
    np.testing.assert_array_equal(forward(model, range(5)), before)


@pytest.mark.parametrize("option", ["qk_norm", "embedding_norm"])
def test_norms_make_blind_to_scale(option: str) -> None:
    """Queries and keys, or embeddings, 64 times as large: no difference with the norm, a clear one without."""
    names = ("query_linear", "key_linear") if option == "qk_norm" else ("token_embedding",)
    for on in (True, False):
        config = small(ModelConfig(tie_embeddings=False), **{option: on})
        tensors = random_tensors(config)
        larger = {name: tensor * (64 if name.split(".")[-2] in names else 1) for name, tensor in tensors.items()}
        change = forward(from_tensors(larger, config), range(6)) - forward(from_tensors(tensors, config), range(6))
        assert (np.abs(change).max() < 1e-3) == on


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_weights_are_told_in_one_sentence(value: float) -> None:
    config = small(ModelConfig(qk_norm=False))
    tensors = random_tensors(config)
    tensors["blocks.1.mlp.down_linear.weight"][:, 2:5] = value
    engine = PlainEngine(from_tensors(tensors, config))
    with pytest.raises(UserError, match="not finite"):
        next(generate(engine, [1, 2], max_new_tokens=1, options=SamplingOptions()))


def test_softcap_bounds_the_logits() -> None:
    assert 0.4 < np.abs(forward(model_of(small(ModelConfig(logit_softcap=0.5))), range(5))).max() <= 0.5


# ── generation with and without a cache ────────────────────────────────────────────────────────────────────────


class UncachedEngine:
    """The specification as an engine: one whole float64 pass over the window for each token."""

    def __init__(self, model: NormalForm) -> None:
        self.model, self.vocab_size, self.context_length = model, model.vocab_size, model.context_length

    def new_memory(self) -> list[int]:
        return []

    def logits(self, tokens: Array, memory: list[int]) -> Array:
        memory.extend(tokens.tolist())
        return forward(self.model, memory)[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prompt_length", [1, 11, 12, 13, 36])
def test_same_text_with_and_without_a_cache(layout: str, prompt_length: int) -> None:
    """Greedy and drawn, for prompts around the context length, far enough for the window to move three times."""
    model = model_of(small(LAYOUTS[layout]))
    prompt = np.random.default_rng(prompt_length).integers(VOCAB, size=prompt_length).tolist()
    drawn: list[int] = []
    for temperature in (0, 1):
        options = SamplingOptions(temperature=temperature)
        drawn, reference = (
            list(generate(engine, prompt, max_new_tokens=28, options=options, seed=3, end=None))
            for engine in (PlainEngine(model), UncachedEngine(model))
        )
        assert drawn == reference
        assert len(drawn) == 28
    assert len(set(drawn)) > 3
