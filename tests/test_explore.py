"""The page of a run: what it carries, that nothing in it does harm, and how it is made and served."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT, Answer, Script, Trained, command, environment
from test_plain import LAYOUTS, model_of, small

from minigpt import plain
from minigpt.checkpoint import find_checkpoint, save_checkpoint
from minigpt.config import ModelConfig
from minigpt.explorer import making, page, payload
from minigpt.explorer.capture import capture, captured_entry, read_out
from minigpt.explorer.making import Wish, made
from minigpt.explorer.page import MOST_CODE, Page, as_script
from minigpt.explorer.payload import PAGE_BYTES, load_model, model_entry, spread
from minigpt.normal_form import Array, NormalForm
from minigpt.tokenizer import tokenizer_from_dict

EXPLORE, COMPARE = (ROOT / "scripts" / f"{name}.py" for name in ("explore", "compare_attention"))
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def numbers(blob: str, dtype: str, *shape: int) -> Array:
    """What the page reads."""
    return np.frombuffer(zlib.decompress(base64.b64decode(blob)), dtype).reshape(shape or -1)


def assert_holds(blob: str, dtype: str, expected: Array) -> None:
    np.testing.assert_array_equal(numbers(blob, dtype, *expected.shape), expected.astype(dtype))


def unpacked(entry: dict[str, Any]) -> dict[str, Array]:
    """The arrays of a model in a payload by name."""
    flat, at, found = numbers(entry["blob"], {"f32": "<f4", "f16": "<f2"}[entry["precision"]]), 0, {}
    for array in entry["arrays"]:
        size = int(np.prod(array["shape"]))
        found[array["name"]] = flat[at : at + size].reshape(array["shape"])
        at += size
    assert at == len(flat)
    return found


def arrays_of(form: NormalForm) -> dict[str, Array]:
    own = {name: value for name, value in vars(form).items() if isinstance(value, np.ndarray) and name != "key_head"}
    return own | {f"layers.{name}": array for name, array in form.layers._asdict().items()}


def payload_in(page_text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', page_text, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


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
    guesses: places.map((t) => trace.guesses(1, t, 3)), losses: places.map((t) => trace.loss(t)),
  }));
})();
"""


def looked(payload: dict[str, Any], asked: list[int]) -> dict[str, Any]:
    """What captured.js says of a payload."""
    node = shutil.which("node") or pytest.skip("there is no node here")
    script = (page.PARTS / "captured.js").read_text(encoding="utf-8") + LOOKING
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
    shares = plain.softmax(np.array(seen["logits"]))
    kept = np.argsort(-found.logits, axis=1)[:, : 19 if whole else 15]
    expected = plain.softmax(found.logits)
    seen_kept, expected_kept = (np.take_along_axis(p, kept, axis=1) for p in (shares, expected))
    np.testing.assert_allclose(seen_kept, expected_kept, atol=1e-6)
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
    assert MOST_CODE + len(as_script({"model": entry, "examples": payload.examples()})) <= PAGE_BYTES

    heads = {name: random.standard_normal((6, 6, 128, 64)).astype("f4") for name in ("query", "key", "value")}
    weights = plain.softmax(np.where(np.tri(128, dtype=bool), random.standard_normal((6, 6, 128, 128)), -np.inf))
    logits, stream = random.standard_normal((128, 1792)), random.standard_normal((7, 128, 384))
    done = capture_of(heads, weights, logits, stream)
    assert MOST_CODE + len(as_script({"captured": done, "examples": payload.examples()})) <= 6_000_000


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


def test_the_page_s_own_code_is_small() -> None:
    assert len(Page({"server": None}).html().encode()) <= MOST_CODE


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


# ── from a run ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of sizes, for models of a few thousand parameters."""
    monkeypatch.setattr(making, "PARAMETERS", 100)
    monkeypatch.setattr(payload, "PARAMETERS", 100)


def exported(script: Script, folder: Path, run: Path, *words: object) -> tuple[Answer, dict[str, Any]]:
    file = folder / "page.html"
    answer = script(EXPLORE, run, "--export", file, *words)
    assert answer.code == 0, answer.err
    return answer, payload_in(file.read_text(encoding="utf-8"))


def test_the_page_of_a_run(trained: Trained, script: Script, tmp_path: Path, stand_in: Path) -> None:
    answer, found = exported(script, tmp_path, trained.path)
    best = find_checkpoint(trained.path)
    assert re.fullmatch(rf"{tmp_path}/page.html: 0\.\d MB, weights of step {best.step}, step 0\n", answer.out)
    assert [(model["step"], model["precision"]) for model in found["models"]] == [(best.step, "f32"), (0, "f16")]
    np.testing.assert_array_equal(
        unpacked(found["models"][0])["token_table"], best.tensors("model")["token_embedding.weight"]
    )
    assert found["run"] == {
        "name": "tiny",
        "step": best.step,
        "steps": 40,
        "val_loss": best.val_loss,
        "parameters": 14_080,
    }
    assert found["captured"] == [] and found["server"] is None and found["text"]
    tokens = [base64.b64decode(token).decode() for token in found["tokenizer"]["tokens"]]
    assert "".join(tokens) == best.tokenizer["characters"]
    assert set(found["nulls"]["previous"]) == {"heads", "median", "maximum", "first_percentile"}
    assert found["film"]["steps"] == [0, 10, 20, 30, 40]
    assert found["film"]["length"] == 16 and len(found["film"]["text"]) == 16
    frame = numbers(found["film"]["maps"], "u1", 5, 1, 2, 136)[-1]
    kept = np.load(trained.path / "attention" / "step-00000040.npy")
    np.testing.assert_array_equal(frame, kept[..., *np.tril_indices(16)])
    assert [row["head"] for row in found["film"]["heads"][0]] == ["L0H0", "L0H1"]
    assert found["examples"]["attention"][0]["name"] == "three_token_full"


def test_what_the_page_opens_with(trained: Trained, script: Script, tmp_path: Path, stand_in: Path) -> None:
    _, found = exported(
        script, tmp_path, trained.path, "--text", "the\\n", "--text", "a", "--view", "compare", "--lang", "ja"
    )
    assert (found["text"], found["texts"], found["view"], found["lang"]) == ("the\n", ["the\n", "a"], "compare", "ja")
    (tmp_path / "some.txt").write_text("a grey heron counts the wet rope", encoding="utf-8")
    answer, found = exported(script, tmp_path, trained.path, "--file", tmp_path / "some.txt", "--f16")
    assert found["text"] == "a grey heron cou" and "cut to its first 16 tokens" in answer.err
    assert {model["precision"] for model in found["models"]} == {"f16"}
    rounded = unpacked(found["models"][0])["token_table"]
    own = find_checkpoint(trained.path).tensors("model")["token_embedding.weight"]
    np.testing.assert_array_equal(rounded, own.astype("f2"))


def test_a_run_without_its_text_opens_without_one(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = moved(trained, tmp_path, data={"source": str(tmp_path / "gone.txt"), "cache_dir": str(tmp_path)})
    found = made(checkpoint, Wish()).payload
    assert found["text"] == "" and found["nulls"] is None and len(found["models"]) == 1 and found["film"] is None
    assert "gone.txt" in capsys.readouterr().err


def moved(trained: Trained, folder: Path, **sections: dict[str, Any]) -> Path:
    """The best checkpoint as a file of its own, some settings changed."""
    best, path = find_checkpoint(trained.path), folder / "alone.safetensors"
    config = best.config.with_values(**sections).model_dump()
    tensors = {f"model.{name}": tensor for name, tensor in best.tensors("model").items()}
    save_checkpoint(path, tensors, {**best.metadata, "config": config})
    return path


def test_step_0_is_left_out_of_a_large_page(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "PAGE_BYTES", 200_000)
    assert len(made(trained.path, Wish()).payload["models"]) == 1
    assert "left out" in capsys.readouterr().err


def test_another_model_beside_it(trained: Trained, script: Script, tmp_path: Path, stand_in: Path) -> None:
    other = trained.path / "checkpoints" / "step-00000020.safetensors"
    _, found = exported(script, tmp_path, trained.path, "--compare", other)
    assert [model["name"] for model in found["models"]][1] == "step 20"
    _, found = exported(script, tmp_path, trained.path, "--compare", moved(trained, tmp_path))
    assert found["models"][1]["name"].startswith(f"{tmp_path}/alone.safetensors, step ")
    best = find_checkpoint(trained.path)
    foreign = tmp_path / "foreign.safetensors"
    characters = best.tokenizer["characters"][:-1] + "☃"
    metadata = {**best.metadata, "tokenizer": {**best.tokenizer, "characters": characters}}
    save_checkpoint(foreign, {f"model.{name}": tensor for name, tensor in best.tensors("model").items()}, metadata)
    answer = script(EXPLORE, trained.path, "--export", tmp_path / "no.html", "--compare", foreign)
    assert answer.code == 2 and "another tokenizer" in answer.err and answer.err.count("\n") == 1


def test_a_larger_model_s_texts(trained: Trained, script: Script, tmp_path: Path, stand_in: Path, larger: None) -> None:
    answer, found = exported(script, tmp_path, trained.path, "--text", "the old miller paints", "--text", "a")
    assert "14,080 parameters, of which a page carries at most 100: this one shows 2 texts" in answer.err
    assert "cut to its first 16 tokens" in answer.err and answer.out.endswith("captured texts\n")
    assert found["models"] == [] and [entry["text"] for entry in found["captured"]] == ["the old miller p", "a"]
    checkpoint = find_checkpoint(trained.path)
    model = load_model(checkpoint)
    logits = plain.forward(model.form, found["captured"][0]["ids"])
    kept = numbers(found["captured"][0]["logits"]["values"], "<f4", *logits.shape)
    np.testing.assert_array_equal(kept, logits.astype("f4"))
    assert tokenizer_from_dict(checkpoint.tokenizer).decode(found["captured"][0]["ids"]) == "the old miller p"
    answer = script(EXPLORE, trained.path, "--export", tmp_path / "no.html", "--f16")
    assert answer.code == 2 and "--f16" in answer.err


def test_a_long_film_is_thinned_evenly(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, said = tokenizer_from_dict(find_checkpoint(trained.path).tokenizer), list[str]()
    whole = payload.film_entry(trained.path, tokenizer, said.append)
    assert whole and whole["left_out"] == 0 and not said
    monkeypatch.setattr(payload, "FILM_BYTES", len(whole["maps"]) - 1)
    thinned = payload.film_entry(trained.path, tokenizer, said.append)
    assert thinned and thinned["steps"] in ([0, 10, 30, 40], [0, 20, 40], [0, 40])
    assert thinned["left_out"] == 5 - len(thinned["steps"]) and len(said) == 1
    monkeypatch.setattr(payload, "FILM_BYTES", 1)
    last = payload.film_entry(trained.path, tokenizer, said.append)
    assert last and last["steps"] == [40] and len(last["heads"]) == 1
    assert spread(range(0, 1000, 10), 10) == [0, 110, 220, 330, 440, 550, 660, 770, 880, 990]


@pytest.mark.parametrize(
    ("words", "view", "texts"),
    [
        (["heads", "RUN", "--text", "the old"], "look", ["the old"]),
        (["sentences", "RUN", "the old", "a grey"], "compare", ["the old", "a grey"]),
        (["film", "RUN"], "film", None),
    ],
)
def test_the_page_of_what_is_compared(
    trained: Trained,
    script: Script,
    tmp_path: Path,
    stand_in: Path,
    words: list[str],
    view: str,
    texts: list[str] | None,
) -> None:
    file = tmp_path / "page.html"
    answer = script(COMPARE, *(trained.path if word == "RUN" else word for word in words), "--html", file)
    assert answer.code == 0 and f"{file}: 0." in answer.err, answer.err
    found = payload_in(file.read_text(encoding="utf-8"))
    assert found["view"] == view and found["texts"] == (texts or found["texts"])


def test_sentences_of_two_checkpoints(trained: Trained, script: Script, tmp_path: Path, stand_in: Path) -> None:
    file = tmp_path / "page.html"
    answer = script(COMPARE, "sentences", trained.path, "the", "--which", 0, "--which", 20, "--html", file)
    assert answer.code == 0, answer.err
    assert [model["step"] for model in payload_in(file.read_text(encoding="utf-8"))["models"]] == [20, 0]


def test_the_film_as_a_table(trained: Trained, script: Script) -> None:
    answer = script(COMPARE, "film", trained.path)
    title, head, *rows = answer.out.splitlines()
    assert (
        answer.code == 0
        and "5 frames of 16 tokens" in title
        and head.split() == ["head", "reference", *["0", "10", "20", "30", "40"]]
    )
    assert [row.split()[0] for row in rows] == ["L0H0", "L0H1"]
    assert all(0 <= float(cell) <= 1 for row in rows for cell in row.split()[2:])
    found = script(COMPARE, "film", trained.path, "--json").json
    assert found["steps"] == [0, 10, 20, 30, 40] and len(found["rows"]) == 10
    answer = script(COMPARE, "film", trained.path / "samples")
    assert answer.code == 2 and answer.err.count("\n") == 1


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN"], "--export FILE writes it"),
        (["RUN", "--export", "x.html", "--serve"], "give one of them"),
        (["--export", "x.html"], "or --demo"),
        (["RUN", "--demo", "--export", "x.html"], "and not both"),
        (["RUN", "--export", "x.html", "--open"], "belong to --serve"),
        (["RUN", "--export", "x.html", "--text", "a", "--file", "b"], "give one of them"),
        (["--demo", "--export", "x.html", "--which", "last"], "trains its own model"),
        (["RUN", "--export", "no/where/x.html"], "can't be written"),
        (["RUN", "--export", "x.html", "--view", "films"], "films"),
        (["RUN", "--export", "x.html", "--text", ""], "no token"),
        (["RUN", "--export", "x.html", "--text", "☃"], "--unseen"),
        (["nowhere", "--export", "x.html"], "nowhere"),
        (["RUN", "--serve", "--port", "70000"], "--port 70000"),
    ],
)
def test_mistakes_get_one_sentence(
    trained: Trained, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = script(EXPLORE, *(trained.path if word == "RUN" else word for word in words))
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1 and sentence in answer.err


def test_a_recurrent_run_gets_one_sentence(trained: Trained, script: Script, tmp_path: Path) -> None:
    checkpoint = moved(trained, tmp_path, model={"kind": "lstm"}, optim={"name": "adamw"})
    answer = script(EXPLORE, checkpoint, "--export", tmp_path / "page.html")
    assert answer.code == 2 and "recurrent" in answer.err and answer.err.count("\n") == 1


def test_weights_that_fit_nowhere(trained: Trained, script: Script, tmp_path: Path) -> None:
    best = find_checkpoint(trained.path)
    tensors = {f"model.{name}": tensor.copy() for name, tensor in best.tensors("model").items()}
    for value, words, hint in ((1e6, ["--f16"], "leave out --f16"), (np.nan, [], "take an earlier step")):
        tensors["model.token_embedding.weight"][0, 0] = value
        save_checkpoint(tmp_path / "wild.safetensors", tensors, best.metadata)
        answer = script(EXPLORE, tmp_path / "wild.safetensors", "--export", tmp_path / "page.html", *words)
        assert answer.code == 2 and hint in answer.err and answer.err.count("\n") == 1


def test_exporting_needs_no_torch(trained: Trained, tmp_path: Path) -> None:
    code = (
        f"import runpy, sys\ntry: runpy.run_path({str(EXPLORE)!r}, run_name='__main__')\n"
        "except SystemExit as leaving: sys.exit(leaving.code or 77 * ('torch' in sys.modules))"
    )
    words = command("-c", code, trained.path, "--export", tmp_path / "page.html")
    done = subprocess.run(words, env=environment(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


# ── served ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Client:
    """Asks a server of this process."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token

    def ask(self, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/api/trace", content, {"X-Explorer-Token": self.token, **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def page(self, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
def client(trained: Trained, stand_in: Path, larger: None) -> Iterator[Client]:
    uvicorn = pytest.importorskip("uvicorn", reason='pip install -e ".[serve]"')
    from minigpt.explorer import server

    with server.listening(0) as listener:
        port = listener.getsockname()[1]
        service = server.Service(made(trained.path, Wish(live=True)), port)
        running = uvicorn.Server(uvicorn.Config(service.app(), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Client(port, service.token)
        running.should_exit = True
        thread.join()


def test_the_server_answers_its_own_page(client: Client, trained: Trained) -> None:
    status, text = client.page()
    found = payload_in(text)
    assert status == 200 and "connect-src 'self'" in text
    assert found["server"]["token"] == client.token and found["models"] == found["captured"] == []
    assert found["server"]["models"][0]["sizes"]["context_length"] == 16
    status, entry = client.ask({"ids": IDS.tolist(), "model": 0})
    form = load_model(find_checkpoint(trained.path)).form
    logits = plain.forward(form, IDS)
    assert status == 200 and entry["ids"] == IDS.tolist()
    np.testing.assert_allclose(
        numbers(entry["logits"]["values"], "<f4", *logits.shape), logits, atol=1e-5 * abs(logits).max()
    )


def test_the_server_refuses(client: Client) -> None:
    good = {"ids": [1, 2, 3]}
    cases: list[tuple[int, object, dict[str, str]]] = [
        (403, good, {"Host": "evil.example"}),
        (403, good, {"Host": f"evil.example:{client.port}"}),
        (403, good, {"X-Explorer-Token": ""}),
        (403, good, {"X-Explorer-Token": "ä" + client.token[1:]}),
        (400, b"no JSON", {}),
        (400, b"\xff", {}),
        (400, [1, 2], {}),
        (400, {"ids": "abc"}, {}),
        (400, {"ids": []}, {}),
        (400, {"ids": [1] * 17}, {}),
        (400, {"ids": [True]}, {}),
        (400, {"ids": [-1]}, {}),
        (400, {"ids": [10**30]}, {}),
        (400, {"ids": [1], "model": 7}, {}),
        (413, b" " * 70_000, {}),
    ]
    for status, body, headers in cases:
        found, answer = client.ask(body, **headers)
        assert (found, list(answer)) == (status, ["error"]), (body, headers, answer)
    assert client.page(Host="evil.example")[0] == 403
    assert client.ask(good)[0] == 200


def test_the_server_answers_many_at_once(client: Client) -> None:
    asked = [[1 + i % 20, 2, 3] for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda ids: client.ask({"ids": ids}), asked))
    assert [(status, entry["ids"]) for status, entry in answers] == [(200, ids) for ids in asked]
    same = [entry["logits"] for _, entry in answers if entry["ids"] == [1, 2, 3]]
    assert all(logits == same[0] for logits in same)


def test_a_port_in_use_gets_one_sentence(client: Client, trained: Trained, script: Script) -> None:
    answer = script(EXPLORE, trained.path, "--serve", "--port", client.port)
    assert answer.code == 2 and f"--port {client.port}" in answer.err and answer.err.count("\n") == 1


def test_without_the_server_s_packages(trained: Trained, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "minigpt.explorer.server", raising=False)
    answer = script(EXPLORE, trained.path, "--serve")
    assert answer.code == 2 and "pip install starlette uvicorn" in answer.err and answer.err.count("\n") == 1
