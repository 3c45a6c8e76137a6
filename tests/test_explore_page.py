"""The page and its data: what it carries of a model, and that nothing in it does harm."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exploring import IDS, numbers, payload_in, unpacked
from running import Trained
from test_plain import LAYOUTS, model_of, small

from minigpt import plain
from minigpt.checkpoint import find_checkpoint
from minigpt.config import ModelConfig
from minigpt.explorer import page, payload
from minigpt.explorer.capture import capture, captured_entry, read_out
from minigpt.explorer.page import MOST_CODE, Page, as_script
from minigpt.explorer.payload import PAGE_BYTES, load_model, model_entry
from minigpt.normal_form import Array, NormalForm


def arrays_of(form: NormalForm) -> dict[str, Array]:
    own = {name: value for name, value in vars(form).items() if isinstance(value, np.ndarray) and name != "key_head"}
    return own | {f"layers.{name}": array for name, array in form.layers._asdict().items()}


# ── what a model did ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
def test_a_capture_equals_the_specification(config: ModelConfig) -> None:
    model = model_of(small(config))
    found = capture(model, IDS)
    logits = plain.forward(model, IDS)
    np.testing.assert_array_equal(found.logits, logits)
    shared_key, shared_value = found.key[:, model.key_head], found.value[:, model.key_head]
    again = plain.attention_weights(found.query, shared_key, plain.causal_mask(len(IDS)))
    np.testing.assert_allclose(found.weights, again, atol=1e-15)
    x = found.stream[0]
    for l, layer in enumerate(model.per_layer()):  # noqa: E741
        x = plain.block(x, layer, model)
        np.testing.assert_allclose(found.stream[l + 1], x, atol=1e-12)
        merged = plain.merge_heads(found.weights[l] @ shared_value[l]) @ layer.output_weight.T + layer.output_bias
        norm = plain.layer_norm if model.centred else plain.rms_norm
        normed = norm(found.stream[l]) * layer.attn_gain + layer.attn_shift
        np.testing.assert_allclose(merged, plain.self_attention(normed, layer, model), atol=1e-12)
    np.testing.assert_array_equal(read_out(found.stream[-1], model), logits)


def test_a_captured_text_holds_the_model_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(small(LAYOUTS["everything at once"]))
    found, entry = capture(model, IDS), captured_entry(model, IDS)
    assert entry["ids"] == IDS.tolist()
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(
            numbers(entry[name], "<f4", *getattr(found, name).shape), getattr(found, name).astype("f4")
        )
    triangle = found.weights[:, :, *np.tril_indices(len(IDS))]
    np.testing.assert_array_equal(numbers(entry["weights"], "<f2", *triangle.shape), triangle.astype("f2"))
    np.testing.assert_array_equal(
        numbers(entry["logits"]["values"], "<f4", *found.logits.shape), found.logits.astype("f4")
    )
    shares = plain.softmax(found.logits)
    losses = -np.log(shares[np.arange(len(IDS) - 1), IDS[1:]])
    np.testing.assert_allclose(numbers(entry["losses"], "<f4"), losses, rtol=1e-6)
    guessed = numbers(entry["guesses"]["ids"], "<u4", 3, len(IDS), 5)
    np.testing.assert_array_equal(guessed[-1], np.argsort(-shares, axis=1)[:, :5])
    best = np.take_along_axis(shares, guessed[-1].astype(int), axis=1)
    np.testing.assert_allclose(numbers(entry["guesses"]["p"], "<f4", 3, len(IDS), 5)[-1], best, rtol=1e-6)

    monkeypatch.setattr("minigpt.explorer.capture.ALL_LOGITS", 10)
    monkeypatch.setattr("minigpt.explorer.capture.LARGEST_LOGITS", 4)
    logits = captured_entry(model, IDS)["logits"]
    ids = numbers(logits["ids"], "<u4", len(IDS), 4).astype(int)
    np.testing.assert_array_equal(ids, np.argsort(-found.logits, axis=1)[:, :4])
    total = numbers(logits["log_sum"], "<f4")[:, None]
    largest = np.exp(numbers(logits["values"], "<f4", len(IDS), 4) - total)
    np.testing.assert_allclose(largest, np.take_along_axis(shares, ids, axis=1), rtol=1e-5)


LOOKING = """
(async () => {
  const { payload, asked } = JSON.parse(require("fs").readFileSync(0, "utf-8"));
  globalThis.fetch = async () => ({ ok: true, json: async () => payload.served });
  const [engine, ...others] = Captured.engines(payload);
  const trace = await engine.trace(asked);
  const places = asked.map((_, t) => t), layers = [0, 1], heads = [0, 1, 2, 3];
  const each = (read) => layers.map((l) => heads.map((h) => places.map((t) => Array.from(read(l, h, t)))));
  const refused = await engine.trace([9, 9]).then(() => "", (error) => error.message);
  console.log(JSON.stringify({
    name: engine.name, others: others.map((other) => other.name), canType: engine.canType, texts: engine.texts, refused,
    query: each((l, h, t) => trace.query(l, h, t)), key: each((l, h, t) => trace.key(l, h, t)),
    value: each((l, h, t) => trace.value(l, h, t)), output: each((l, h, t) => trace.output(l, h, t)),
    weights: each((l, h, t) => trace.weights(l, h, t)), logits: places.map((t) => Array.from(trace.logits(t))),
    shares: places.map((t) => Array.from(trace.shares(t))),
    guesses: places.map((t) => trace.guesses(1, t, 3)), losses: places.map((t) => trace.loss(t)),
  }));
})();
"""


def looked(payload: dict[str, Any], asked: list[int]) -> dict[str, Any]:
    """What captured.js says of a payload."""
    node = shutil.which("node") or pytest.skip("there is no node here")
    parts = ("attention.js", "captured.js")
    script = "".join((page.PARTS / name).read_text(encoding="utf-8") for name in parts) + LOOKING
    words, given = [node, "-e", script], json.dumps({"payload": payload, "asked": asked})
    done = subprocess.run(words, input=given, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("whole", [True, False])
def test_the_page_reads_a_captured_text(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr("minigpt.explorer.capture.ALL_LOGITS", 10)
        monkeypatch.setattr("minigpt.explorer.capture.LARGEST_LOGITS", 15)
    model, ids = model_of(small(LAYOUTS["everything at once"])), IDS.tolist()
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 8, "vocab_size": 19, "context_length": 12}
    entry, found = captured_entry(model, ids), capture(model, ids)
    about = {"name": "step 9", "sizes": sizes, "precision": "f32", "text": "abc"}
    captured = [
        {**about, **entry},
        {**about, "text": "d", **captured_entry(model, [1])},
        {**about, "name": "step 0", **entry},
    ]
    seen = looked({"captured": captured, "server": None}, ids)
    assert (seen["name"], seen["others"], seen["canType"], seen["texts"]) == ("step 9", ["step 0"], False, ["abc", "d"])
    assert "captured texts" in seen["refused"]
    np.testing.assert_array_equal(np.array(seen["query"], "f4"), found.query.astype("f4"))
    for name in ("key", "value"):
        np.testing.assert_array_equal(np.array(seen[name], "f4"), getattr(found, name)[:, model.key_head].astype("f4"))
    rows = [[[seen["weights"][l][h][t] for t in range(len(ids))] for h in range(4)] for l in range(2)]  # noqa: E741
    for place in np.ndindex(2, 4, len(ids)):
        l, h, t = place  # noqa: E741
        np.testing.assert_array_equal(rows[l][h][t], found.weights[l, h, t, : t + 1].astype("f2"))
    heads = found.weights @ found.value[:, model.key_head]
    np.testing.assert_allclose(seen["output"], heads, atol=2e-3 * abs(heads).max())
    expected = plain.softmax(found.logits)
    known = np.argsort(np.argsort(-found.logits, axis=1), axis=1) < (19 if whole else 15)
    for name, numbers_there in (("logits", found.logits), ("shares", expected)):
        shown = np.array(seen[name], dtype=float)
        np.testing.assert_array_equal(np.isnan(shown), ~known, err_msg="what was not captured is no number")
        np.testing.assert_allclose(shown[known], numbers_there[known], rtol=1e-5)
    depth = plain.softmax(read_out(found.stream[1], model))
    assert [[guess["id"] for guess in row] for row in seen["guesses"]] == np.argsort(-depth, axis=1)[:, :3].tolist()
    assert seen["losses"][-1] is None
    of_next = np.array(seen["losses"][:-1])
    np.testing.assert_allclose(np.exp(-of_next), expected[np.arange(len(ids) - 1), ids[1:]], rtol=1e-5)

    server = {"url": "", "token": "secret", "models": [about]}
    live = looked({"captured": [], "server": server, "served": entry}, ids)
    assert live["canType"] and live["query"] == seen["query"]


# ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_come_back_bit_for_bit(trained: Trained, config: ModelConfig, precision: str) -> None:
    form = model_of(small(config)).astype(np.float32)
    if precision == "f16":
        form = form.astype(np.float16).astype(np.float32)
    model = replace(load_model(find_checkpoint(trained.path)), form=form, precision=precision)
    entry = json.loads(json.dumps(model_entry(model)))
    found = unpacked(entry)
    assert entry["key_head"] == form.key_head.tolist()
    assert {key: entry["flags"][key] for key in ("qk_norm", "softcap")} == {
        "qk_norm": form.qk_norm,
        "softcap": form.softcap,
    }
    for name, array in arrays_of(form).items():
        if name in found:
            np.testing.assert_array_equal(found[name].astype("f4"), array)
        elif name == "head":
            np.testing.assert_array_equal(array, form.token_table)
        else:
            neutral = 1 if name.endswith(("gain", "cos")) else 0
            assert (array == neutral).all(), name
            assert name.endswith(("gain", "cos", "shift", "bias", "table", "sin", "gate_weight"))
    if config == LAYOUTS["default"]:
        assert set(found) == {
            "token_table",
            "cos",
            "sin",
            *(f"layers.{name}_weight" for name in ("qkv", "output", "up", "down")),
        }


def test_sizes(trained: Trained) -> None:
    """0.8 million parameters in 5 MB; six layers of six heads on 128 tokens in 6 MB."""
    model, random = load_model(find_checkpoint(trained.path)), np.random.default_rng(0)
    form = model_of(small(ModelConfig(n_layer=2)))
    table = random.standard_normal((800_000 // 128, 128)).astype("f4")
    entry = model_entry(replace(model, form=replace(form, token_table=table, head=table)))
    assert size_of({"models": [entry]}) <= PAGE_BYTES

    heads = {name: random.standard_normal((6, 6, 128, 64)).astype("f4") for name in ("query", "key", "value")}
    weights = plain.softmax(np.where(np.tri(128, dtype=bool), random.standard_normal((6, 6, 128, 128)), -np.inf))
    logits, stream = random.standard_normal((128, 1792)), random.standard_normal((7, 128, 384))
    done = capture_of(heads, weights, logits, stream)
    assert size_of({"captured": [done]}) <= 6_000_000


def size_of(data: dict[str, Any]) -> int:
    """Bytes of a page with these data."""
    return len(Page({"examples": payload.examples(), **data}).html().encode())


def capture_of(heads: dict[str, Array], weights: Array, logits: Array, stream: Array) -> dict[str, Any]:
    """The entry of a pass that is made up."""
    from minigpt.explorer import capture as module

    ids = np.arange(128)
    found = module.Captured(ids, **heads, weights=weights, stream=stream, logits=logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "capture", lambda model, ids: found)
        patch.setattr(module, "read_out", lambda x, model: logits)
        return captured_entry(model_of(small(ModelConfig())), ids)


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of three parts."""
    folder = tmp_path / "parts"
    (folder / "views").mkdir(parents=True)
    (folder / "page.html").write_text(
        '<!doctype html>\n<html><head>\n<meta charset="utf-8">\n'
        '<link rel="stylesheet" href="page.css">\n</head><body>\n'
        '<script type="application/json" id="payload">null</script>\n<script src="a.js"></script>\n'
        '<script src="views/b.js"></script>\n</body></html>\n',
        encoding="utf-8",
    )
    (folder / "page.css").write_text("body { color: #123 }\n", encoding="utf-8")
    (folder / "a.js").write_text('const A = "é \\\\1 \\\\g<0>";\r\n', encoding="utf-8", newline="")
    (folder / "views" / "b.js").write_text("const B = 1;\n", encoding="utf-8")
    monkeypatch.setattr(page, "PARTS", folder)
    return folder


def test_the_page_is_one_file_that_reaches_nothing(stand_in: Path) -> None:
    text = Page({"server": None}).html()
    assert not re.search(r"\b(src|href)=", text)
    assert 'const A = "é \\\\1 \\\\g<0>";\n' in text and "const B = 1;" in text and "color: #123" in text
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy and text.index(policy[0]) < text.index("<style>") < text.index("<script>")
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert rules[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert "connect-src 'self';" in Page({"server": {"token": "x"}}).html()


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "]]>\u2028\u2029\ud83d&quot;\0"]
)
def test_no_text_leaves_the_data(stand_in: Path, text: str) -> None:
    written = Page({"text": text, "tokens": [text], "server": None}).html()
    found = payload_in(written)
    assert found["text"] == text and found["tokens"] == [text]
    assert written.isascii() or "é" in written
    assert written.count("<script") == 3 and written.count("</script") == 3 and "<!--" not in written


def test_a_notebook_shows_the_page_in_a_sandbox(stand_in: Path) -> None:
    shown = Page({"text": '"</iframe>', "server": None})
    frame = re.fullmatch(
        r'<iframe sandbox="allow-scripts allow-downloads" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown._repr_html_()
    )
    assert frame and html.unescape(frame[1]) == shown.html()
    assert frame[1].isascii(), "whatever the encoding of the notebook, the policy's hashes hold"


def test_the_page_s_own_code_is_small() -> None:
    text = Page({"server": None}).html()
    assert len(text.encode()) - len(as_script(payload_in(text)).encode()) <= MOST_CODE


@pytest.mark.parametrize("part", sorted(page.PARTS.rglob("*.js")), ids=lambda part: part.name)
def test_scripts_stay_what_they_are_without_comments(part: Path) -> None:
    source = part.read_text(encoding="utf-8")
    left = page.without_comments(source)
    assert all(line.count("`") % 2 == 0 for line in left.splitlines()), (
        "a text over several lines would lose its indents"
    )
    assert not re.search(r"^ |^//|^/\*|^\*|\n\n", left, re.MULTILINE)
    assert left.splitlines() == [line.strip() for line in source.splitlines() if line.strip() in set(left.splitlines())]
    if node := shutil.which("node"):
        done = subprocess.run([node, "--check", "-"], input=left, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
