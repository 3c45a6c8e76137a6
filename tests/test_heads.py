"""``compare_attention.py heads``: named heads, chance, foreign maps, and maps of every layout of the network."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_set import HEADS, SIZE, hand_set_model, repeated_text, save_run
from running import ROOT, Script, Trained

from minigpt import plain
from minigpt.attention import CausalSelfAttention
from minigpt.config import validate
from minigpt.errors import UserError
from minigpt.inspection.capture import attention_maps, looking
from minigpt.inspection.compare import closeness
from minigpt.inspection.maps import read_foreign_maps, read_foreign_tokens
from minigpt.inspection.nulls import FreshNetworks, kept_nulls
from minigpt.inspection.patterns import parse_reference
from minigpt.model import GPT
from minigpt.normal_form import Array, NormalForm, from_tensors
from minigpt.sampling import window_start

COMPARE = ROOT / "scripts" / "compare_attention.py"
TEXT = "cgkamfbdcgkamfbd"
NAMES = [name for layer in HEADS for name in layer]


@pytest.fixture(scope="module")
def hand_set_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(hand_set_model(), tmp_path_factory.mktemp("hand-set") / "run")


# ── the proof ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_heads_set_by_hand_are_named(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--json")
    assert answer.code == 0, answer.err
    heads = answer.json["heads"]
    assert [head["head"] for head in heads] == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert [head["name"] for head in heads] == [head["nearest"] for head in heads] == NAMES
    for head in heads:
        values = head["references"][head["name"]]
        assert values["total_variation"] < 0.01 and values["jensen_shannon"] < 0.01 and abs(values["kl"]) < 0.01
        assert values["mass"] > 0.99 and values["argmax"] == 1
        if head["name"] == "uniform":
            assert values["lift"] is None and head["normalised_entropy"] == pytest.approx(1, abs=1e-5)
        else:
            assert values["lift"] > 0.99 and values["percentile"] == 0, "no fresh head is as near"
    assert answer.json["references"]["induction"]["coverage"] == pytest.approx(8 / 15)


def test_the_network_set_by_hand_uses_its_heads() -> None:
    """It expects what followed a token before; without the previous head below, or the induction head, it can't."""
    model, tokens = hand_set_model(), torch.as_tensor(repeated_text())

    def loss_of_second_half(broken: tuple[int, int] | None) -> float:
        def silence(layer: int, heads: torch.Tensor) -> torch.Tensor:
            if broken is None or layer != broken[0]:
                return heads
            return torch.cat(
                [heads[:, : broken[1]], 0 * heads[:, broken[1] : broken[1] + 1], heads[:, broken[1] + 1 :]], 1
            )

        with torch.no_grad(), looking(model, change_heads=silence):
            logits = model(tokens[None])[0]
        return torch.nn.functional.cross_entropy(logits[SIZE // 2 : -1], tokens[SIZE // 2 + 1 :]).item()

    assert loss_of_second_half(None) < 0.01
    assert all((loss_of_second_half(head) > 1) == (head in ((0, 0), (1, 0))) for head in np.ndindex(2, 4))


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "position": "learned"}, {"n_kv_head": 1, "n_layer": 1}])
def test_fresh_networks_are_uniform_or_none(script: Script, tmp_path: Path, changes: dict[str, Any]) -> None:
    for seed in range(3):
        run = fresh_run(tmp_path / str(seed), seed, **changes)
        answer = script(COMPARE, "heads", run, "--text", TEXT, "--json", *("--ref=uniform", "--ref=previous"),
                        *("--ref=first", "--ref=self", "--ref=duplicate", "--ref=induction"))  # fmt: skip
        assert {head["name"] for head in answer.json["heads"]} <= {"uniform", "none"}, answer.out
        assert all(head["nearest"] for head in answer.json["heads"])


def fresh_run(folder: Path, seed: int, **changes: Any) -> Path:
    """A run's folder with an untrained network."""
    config = fresh_config(seed, **changes)
    torch.manual_seed(seed)
    return save_run(GPT(config.model, SIZE), folder, config)


def fresh_config(seed: int, **changes: Any) -> Any:
    model = {"n_layer": 2, "n_head": 4, "d_model": 32, "context_length": SIZE, **changes}
    return validate({"run": {"name": "fresh", "seed": seed}, "model": model})


# ── what is told ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_fits_a_terminal(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--full", "--ref", "previous", "--ref", "window:16")
    assert max(map(len, answer.out.splitlines())) <= 80
    overview, previous, window, legend = answer.out.split("\n\n")
    assert [line.split()[0] for line in overview.splitlines()] == ["head", *(f"L{i}H{j}" for i, j in np.ndindex(2, 4))]
    first = overview.splitlines()[1].split()
    assert first[:5] == ["L0H0", "previous", "0.00", "1.00", "1.00"] and first[-1] == "-", (
        "one text: no positional share"
    )
    assert "L1H0 none (window:16)" in overview
    assert previous.startswith("previous: defined in 15 of 15 rows") and "before training: median" in previous
    assert window.startswith("window:16") and legend.startswith("TV:")


def test_a_csv_row_for_each_head_and_reference(script: Script, hand_set_run: Path, tmp_path: Path) -> None:
    words = ("heads", hand_set_run, "--text", TEXT, "--ref", "previous", "--ref", "uniform", "--ref", "previous")
    answer = script(COMPARE, *words, "--csv", tmp_path / "out.csv", "--json")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["head"], row["reference"]) for row in rows[:3]] == [
        ("L0H0", "previous"), ("L0H0", "uniform"), ("L0H1", "previous"),
    ] and len(rows) == 16  # fmt: skip
    for row in rows:
        head = next(head for head in answer.json["heads"] if head["head"] == row["head"])
        for name, value in head["references"][row["reference"]].items():
            assert (float(row[name]) if row[name] else None) == value
        assert row["name"] == head["name"] and float(row["mean_distance"]) == head["mean_distance"]


def test_a_head_can_be_judged(script: Script, hand_set_run: Path) -> None:
    words = ("heads", hand_set_run, "--text", TEXT, "--head", "L0H0", "--max-tv", "0.2", "--ref")
    good = script(COMPARE, *words, "previous")
    assert (good.code, good.out, good.err) == (0, "L0H0: total variation 0.0000 from previous, at most 0.2\n", "")
    bad = script(COMPARE, *words, "first")
    assert bad.code == 1 and bad.out == "" and bad.err == "L0H0: total variation 0.9333 from first, above 0.2\n"
    told = script(COMPARE, *words, "first", "--json")
    assert told.code == 1 and told.json["holds"] is False and told.json["total_variation"] == pytest.approx(14 / 15)
    nowhere = script(COMPARE, "heads", hand_set_run, "--text", "abc", *words[4:], "induction")
    assert nowhere.code == 2 and "is defined in no row of what was read" in nowhere.err


def test_one_head_alone(script: Script, hand_set_run: Path) -> None:
    answer = script(COMPARE, "heads", hand_set_run, "--text", TEXT, "--head", "L1H0", "--json")
    assert [(head["head"], head["name"]) for head in answer.json["heads"]] == [("L1H0", "induction")]


def test_windows_of_a_trained_run(script: Script, trained: Trained, tmp_path: Path) -> None:
    """Several texts, references that need the tokens' text, and one that is nowhere defined."""
    run = tmp_path / "run"
    shutil.copytree(trained.path, run)
    pairs = tmp_path / "mine.json"
    pairs.write_text("[[9, 0], [12, 3, 2.5]]", encoding="utf-8")
    references = ("punctuation", "brackets", "duplicate", str(pairs), "window:4")
    words = [word for name in references for word in ("--ref", name)]
    answer = script(COMPARE, "heads", run, "--json", *words)
    assert answer.code == 0, answer.err
    told = answer.json
    assert (told["texts"], told["length"]) == (8, 16)
    assert "brackets: is defined in no row" in answer.err
    assert told["references"][str(pairs)]["coverage"] == pytest.approx(2 / 15)
    assert told["references"]["brackets"]["coverage"] == 0 < told["references"]["punctuation"]["coverage"] < 1
    for head in told["heads"]:
        assert head["references"]["brackets"]["total_variation"] is None
        assert 1 / 8 <= head["positional_share"] <= 1
        assert 0 <= head["references"]["window:4"]["percentile"] <= 100
    assert script(COMPARE, "heads", run, *words, "--full").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give a run, or maps by --maps FILE, and not both"),
        (["RUN", "--maps", "a.npy"], "not both"),
        (["RUN", "--tokens", "a.txt"], "--tokens: belongs to --maps"),
        (["--maps", "a.npy", "--text", "a"], "--maps: these are maps of a text already"),
        (["--maps", "a.txt"], "a.txt: maps are read from .npy, .pt, .json files"),
        (["--maps", "nowhere.npy"], "nowhere.npy: cannot be read"),
        (["RUN", "--max-tv", "0.1"], "--max-tv: name the head and one reference"),
        (["RUN", "--max-tv", "2", "--head", "L0H0", "--ref", "self"], "--max-tv = 2.0: must be at least 0"),
        (["RUN", "--text", TEXT, "--head", "L2H0"], "L2H0: no such head; this model has L0H0 to L1H3"),
        (["RUN", "--text", TEXT, "--ref", "slef"], "slef: no such reference; did you mean self?"),
    ],
)
def test_mistakes(script: Script, hand_set_run: Path, words: list[str], told: str) -> None:
    answer = script(COMPARE, "heads", *(str(hand_set_run) if word == "RUN" else word for word in words))
    assert answer.code == 2 and answer.out == "" and told in answer.err and len(answer.err.splitlines()) == 1


# ── chance ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_null_is_kept_with_the_run(script: Script, tmp_path: Path) -> None:
    run = save_run(hand_set_model(), tmp_path / "run")
    words = ("heads", run, "--text", TEXT, "--json", "--ref", "previous", "--ref")
    first = script(COMPARE, *words, "first")
    (file,) = (run / "attention").glob("null-*.json")
    assert "fresh networks" in first.err
    again = script(COMPARE, *words, "first")
    assert again.out == first.out and again.err == "" and first.json["references"]["first"]["null_heads"] == 104
    more = script(COMPARE, *words, "self")
    assert "fresh networks" in more.err, "computed for the new reference, and kept beside the others"
    assert len(json.loads(file.read_text(encoding="utf-8"))["total_variation"]) == 3
    other = script(COMPARE, "heads", run, "--text", TEXT[::-1], "--json")
    assert "fresh networks" in other.err and len(list((run / "attention").glob("null-*.json"))) == 2
    file.write_text("{damaged", encoding="utf-8")
    assert script(COMPARE, *words, "first").out == first.out


def test_the_null_is_computed_anew_where_it_can_not_be_kept(script: Script, tmp_path: Path) -> None:
    run = save_run(hand_set_model(), tmp_path / "run")
    kept = script(COMPARE, "heads", run, "--text", TEXT, "--json")
    (checkpoint,) = (run / "checkpoints").iterdir()
    before = sorted(tmp_path.rglob("*"))
    alone = script(COMPARE, "heads", checkpoint, "--text", TEXT, "--json")
    assert "one checkpoint file has no folder" in alone.err and alone.json["heads"] == kept.json["heads"]
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(run / "attention")
    (run / "attention").write_text("in the way", encoding="utf-8")
    refused = script(COMPARE, "heads", run, "--text", TEXT, "--json")
    assert "will be read anew each time: could not write" in refused.err
    assert refused.json["heads"] == kept.json["heads"]


def test_the_null_is_of_fresh_networks_on_the_same_texts(tmp_path: Path) -> None:
    """One of them, made here, is in it; and the state of torch's generator is not touched."""
    config, tokens = fresh_config(4), repeated_text()[None]
    fresh = FreshNetworks(config.model, SIZE, config.run.seed, tokens)
    pattern = parse_reference("previous", None).pattern(tokens[0])
    before = torch.get_rng_state()
    null = kept_nulls(fresh, {"previous": [pattern]}, tmp_path)["previous"]
    assert torch.equal(torch.get_rng_state(), before)
    assert list(fresh.seeds) == list(range(5, 18)) and null.total_variation.shape == (104,)
    torch.manual_seed(17)  # the last of them
    one = closeness(attention_maps(GPT(config.model, SIZE), torch.as_tensor(tokens[0])), pattern).total_variation
    assert all(np.isclose(null.total_variation, value, atol=1e-6).any() for value in one.ravel())


# ── maps of other networks ─────────────────────────────────────────────────────────────────────────────────────


def written(path: Path, maps: Any) -> Path:
    match path.suffix:
        case ".npy":
            np.save(path, maps)
        case ".pt":
            torch.save(maps, path)
        case _:
            path.write_text(json.dumps(maps), encoding="utf-8")
    return path


def test_foreign_maps_give_the_same_numbers(script: Script, hand_set_run: Path, tmp_path: Path) -> None:
    tokens = repeated_text()
    maps = attention_maps(hand_set_model(), torch.as_tensor(tokens))
    text = "".join("abcdefghijklmno"[token - 1] for token in tokens)
    own = script(COMPARE, "heads", hand_set_run, "--text", text, "--json").json["heads"]
    tensors = [torch.from_numpy(layer)[None] for layer in maps]  # as transformers gives them
    files = [
        written(tmp_path / "a.npy", maps), written(tmp_path / "b.pt", tensors),
        written(tmp_path / "c.pt", torch.from_numpy(maps)), written(tmp_path / "d.json", maps.tolist()),
    ]  # fmt: skip
    names = written(tmp_path / "tokens.json", list(text))
    for file in files:
        answer = script(COMPARE, "heads", "--maps", file, "--tokens", names, "--json")
        assert answer.code == 0 and "not known, names rest on total variation alone" in answer.err
        assert answer.json["causal"] is True
        for theirs, ours in zip(answer.json["heads"], own, strict=True):
            assert theirs["name"] == ours["name"] and theirs["mean_distance"] == pytest.approx(ours["mean_distance"])
            for name, values in theirs["references"].items():
                assert values["percentile"] is None
                assert values["mass"] == pytest.approx(ours["references"][name]["mass"], abs=1e-6)


def test_foreign_maps_without_tokens(script: Script, tmp_path: Path) -> None:
    file = written(tmp_path / "a.npy", np.tile(np.eye(5, k=-1) + np.eye(5)[:, :1] * np.eye(5)[0], (1, 2, 1, 1)))
    answer = script(COMPARE, "heads", "--maps", file, "--json")
    assert list(answer.json["references"]) == ["uniform", "previous", "first", "self"], "those that need no tokens"
    assert [head["name"] for head in answer.json["heads"]] == ["previous", "previous"]
    assert "-" in script(COMPARE, "heads", "--maps", file, "--full").out
    for reference in ("induction", "punctuation"):
        refused = script(COMPARE, "heads", "--maps", file, "--ref", reference)
        assert refused.code == 2 and "--tokens FILE" in refused.err


def test_maps_that_see_the_future_are_said_to(script: Script, tmp_path: Path) -> None:
    file = written(tmp_path / "a.npy", np.full((1, 1, 4, 4), 0.25))
    answer = script(COMPARE, "heads", "--maps", file, "--json")
    assert "not causal, rows move information from later tokens too" in answer.err
    assert answer.json["causal"] is False and answer.json["heads"][0]["normalised_entropy"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("maps", "told"),
    [
        (np.ones((2, 3, 3)) / 3, r"has shape \(2, 3, 3\); must be layers x heads x T x T"),
        (np.ones((1, 1, 2, 3)) / 3, "has shape"),
        (np.ones((1, 1, 1, 1)), "T at least 2"),
        (np.ones((0, 1, 2, 2)), "has shape"),
        (np.full((1, 1, 2, 2), np.nan), "L0H0, row 0, key 0 is not a finite number"),
        (np.array([[[[1, 0], [0.5, 0.5]], [[1, 0], [2, -1]]]]), "L0H1, row 1, key 1 is below 0"),
        (np.array([[[[1, 0], [0.6, 0.6]]]]), "L0H0, row 1 sums to 1.2, not 1"),
        (np.array([[[["a", "b"], ["c", "d"]]]]), "not numbers"),
        (np.array([[[[1 + 1j, 0], [0, 1]]]]), "not numbers"),
    ],
)
def test_arrays_that_are_no_maps(tmp_path: Path, maps: np.ndarray, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_foreign_maps(written(tmp_path / "a.npy", maps))


class Evil:
    """What a pickle could do: run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_files_that_execute_something_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    np.save(tmp_path / "a.npy", np.array([Evil(mark)], dtype=object), allow_pickle=True)
    torch.save(Evil(mark), tmp_path / "a.pt")
    for name, told in (("a.npy", "not an .npy file of numbers"), ("a.pt", "not a .pt file of tensors alone")):
        with pytest.raises(UserError, match=told):
            read_foreign_maps(tmp_path / name)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", b"", "not an .npy file"),
        ("a.npy", b"nonsense", "not an .npy file"),
        ("a.pt", b"nonsense", "not a .pt file"),
        ("a.json", b"[[", "not a valid JSON file"),
        ("a.json", b"\xff", "not a valid JSON file"),
        ("a.json", b"[" * 100_000, "not a valid JSON file"),
        ("a.json", b"[[1, 0], [1]]", "holds no array of numbers"),
        ("a.json", b"{}", "has shape"),
        ("a.json", b"[[[[1, null], [0, 1]]]]", "not numbers"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_foreign_maps(tmp_path / name)


def test_a_file_of_other_things_than_tensors(tmp_path: Path) -> None:
    for content in ({"a": torch.ones(2)}, [torch.ones(2), 3], 5):
        with pytest.raises(UserError, match="must hold one tensor, or a list of one tensor a layer"):
            read_foreign_maps(written(tmp_path / "a.pt", content))
    with pytest.raises(UserError, match="holds no array of numbers"):
        read_foreign_maps(written(tmp_path / "a.pt", [torch.ones(1, 2, 2), torch.ones(1, 3, 3)]))


def test_tokens_from_files(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"The\r\n cat\r\n(\r\n cat\r\n")
    tokens = read_foreign_tokens(path, 4)
    assert tokens.ids.tolist() == [0, 1, 2, 1] and tokens.token_bytes(1) == b" cat"
    assert parse_reference("brackets", tokens).pattern(tokens.ids).defined.tolist() == [False, False, True, True]
    numbers = read_foreign_tokens(written(tmp_path / "t.json", [7, 9, 7]), 3)
    assert numbers.ids.tolist() == [0, 1, 0] and not numbers.texts
    with pytest.raises(UserError, match="has 4 tokens, but the maps are of 5"):
        read_foreign_tokens(path, 5)
    for content in ({}, [], [1, "a"], [True, False], "ab", [1.5]):
        with pytest.raises(UserError, match="must be a list of texts or of whole numbers"):
            read_foreign_tokens(written(tmp_path / "t.json", content), 2)


# ── the maps are the plain case's, whatever the layout ─────────────────────────────────────────────────────────

LAYOUTS = {
    "plain": {"position": "none", "qk_norm": False, "embedding_norm": False},
    "rotary": {"qk_norm": False},
    "rotary and QK-norm": {},
    "grouped heads": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1, "position": "sinusoidal", "embedding_scale": True},
    "gpt2-like": {"position": "learned", "norm": "layernorm", "norm_weight": True, "bias": "all", "mlp": "gelu"},
}


def shaken(**changes: Any) -> GPT:
    """A network whose weights are all away from their start."""
    torch.manual_seed(3)
    model = GPT(fresh_config(0, **changes).model, SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def plain_maps(form: NormalForm, tokens: Array) -> Array:
    """(layers, H, T, T) by the float64 decoder, written out."""
    norm, length = plain.layer_norm if form.centred else plain.rms_norm, len(tokens)
    x = form.token_table[tokens] + form.position_table[:length]
    if form.embedding_norm:
        x = norm(x) * form.embedding_gain + form.embedding_shift
    maps = []
    for layer in form.per_layer():
        normed = norm(x) * layer.attn_gain + layer.attn_shift
        heads = plain.split_heads(normed @ layer.qkv_weight.T + layer.qkv_bias, form.head_dim)
        query, key, _ = np.split(heads, [form.n_head, form.n_head + form.n_kv_head])
        if form.qk_norm:
            query, key = plain.rms_norm(query), plain.rms_norm(key)
        query, key = (plain.rotate(part, form.cos[:length], form.sin[:length]) for part in (query, key))
        maps.append(plain.attention_weights(query, key[form.key_head], plain.causal_mask(length)))
        x = plain.block(x, layer, form)
    return np.stack(maps)


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_maps_are_those_of_the_plain_decoder(changes: dict[str, Any]) -> None:
    """In a window that was cropped, too: it is filled anew from position 0."""
    model = shaken(**changes)
    form = from_tensors({name: tensor.numpy() for name, tensor in model.state_dict().items()}, model.config)
    tokens = np.random.default_rng(1).integers(0, SIZE, SIZE + 5)
    start = window_start(len(tokens), SIZE)
    assert start > 0
    for text in (tokens[:SIZE], tokens[start:]):
        assert np.allclose(attention_maps(model, torch.as_tensor(text)), plain_maps(form, text), atol=2e-5)


@pytest.mark.parametrize("changes", [LAYOUTS["rotary and QK-norm"], LAYOUTS["grouped heads"]], ids=["plain", "grouped"])
def test_a_cache_holds_the_keys_that_are_shown(changes: dict[str, Any]) -> None:
    """Fed in pieces with a memory, each layer keeps the keys and values which the map of the whole text comes from."""
    model, tokens = shaken(**changes), torch.as_tensor(repeated_text(12))[None]
    with looking(model) as looks, torch.no_grad():
        model(tokens)
    memory = model.new_memory()
    with torch.no_grad():
        for piece in tokens.split([5, 1, 6], dim=1):
            model(piece, memory)
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    for look, layer, cache in zip(looks, layers, memory.caches, strict=True):
        for shown, kept in ((look.key, cache.keys), (look.value, cache.values)):
            torch.testing.assert_close(layer.share_heads(kept[:, :, :12]), shown, rtol=1e-4, atol=1e-5)
