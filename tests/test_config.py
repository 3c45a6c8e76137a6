"""Configuration and command line: merged, typed and checked once; mistakes told in one line each."""

import argparse
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.cli import add_config_options, config_overrides, parse_options, run_script, unescape
from minigpt.config import Config, differences, merge, read_toml, section_class, to_toml, validate
from minigpt.errors import UserError


def problems(values: dict) -> str:
    with pytest.raises(UserError) as caught:
        validate(values)
    return str(caught.value)


def parse(*words: str) -> tuple[argparse.Namespace, dict]:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("config", nargs="?")
    add_config_options(parser)
    options = parse_options(parser, words)
    return options, config_overrides(options)


# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["false", "False", "0", "FALSE", False])
def test_false_is_false(text):
    assert validate({"run": {"compile": text}}).run.compile is False


@pytest.mark.parametrize("text", ["true", "True", "1", True])
def test_true_is_true(text):
    assert validate({"run": {"compile": text}}).run.compile is True


def test_numbers_as_typed():
    config = validate({"optim": {"lr": "1e-3"}, "model": {"n_layer": "2"}, "data": {"val_fraction": "0.05"}})
    assert (config.optim.lr, config.model.n_layer, config.data.val_fraction) == (0.001, 2, 0.05)


@pytest.mark.parametrize(
    ("table", "key", "value", "told"),
    [
        ("model", "dropout", 2.0, "model.dropout = 2.0: must be a number, at least 0 and below 1"),
        ("model", "n_layer", "2.5", "model.n_layer = 2.5: must be a whole number, at least 1 and at most 2147483647"),
        ("model", "n_layer", True, "model.n_layer = True: must be a whole number, at least 1 and at most 2147483647"),
        ("model", "mlp", "relu3", "model.mlp = relu3: must be one of relu2, relu, gelu, gelu_tanh, swiglu"),
        ("run", "compile", "maybe", "run.compile = maybe: must be true or false"),
        ("run", "name", 5, "run.name = 5: must be text"),
        ("run", "seed", -1, "run.seed = -1: must be a whole number, at least 0 and below 4294967296"),
        ("optim", "lr", "nan", "optim.lr = nan: must be a number, at least 0"),
        ("optim", "lr", "inf", "optim.lr = inf: must be a number, at least 0"),
        ("optim", "eps", "inf", "optim.eps = inf: must be a number, above 0"),
        ("model", "n_layerz", 4, "model.n_layerz: unknown key; did you mean model.n_layer?"),
        ("train", "lr", 4, "train.lr: unknown key; did you mean optim.lr?"),
        ("models", "n_layer", 4, "models: unknown table; did you mean model?"),
    ],
)
def test_one_mistake_one_line(table, key, value, told):
    assert problems({table: {key: value}}) == told


def test_all_mistakes_are_told_together():
    told = problems({"model": {"dropout": 1, "n_layerz": 3}, "run": {"compile": 2}, "lr": 1})
    assert [line.split(":")[0] for line in told.splitlines()] == [
        "run.compile = 2",
        "model.dropout = 1",
        "model.n_layerz",
        "lr",
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model": {"d_model": 30, "n_head": 4}}, "model.d_model = 30: must be a multiple of model.n_head = 4"),
        ({"model": {"d_model": 12, "n_head": 4}}, "model.d_model / model.n_head = 3: rotary positions need an even"),
        ({"model": {"n_head": 4, "n_kv_head": 3}}, "model.n_kv_head = 3: must divide model.n_head = 4"),
        (
            {"model": {"d_model": 33, "n_head": 3, "position": "sinusoidal"}},
            "model.d_model = 33: sinusoidal positions need an even width",
        ),
        ({"data": {"val_fraction": 0.5, "test_fraction": 0.5}}, "data.val_fraction + data.test_fraction = 1: must"),
        (
            {"train": {"batch_size": 6, "grad_accumulation": 4}},
            "train.grad_accumulation = 4: must divide train.batch_size = 6",
        ),
    ],
)
def test_values_that_exclude_each_other(values, told):
    assert problems(values).startswith(told)


def test_a_number_in_place_of_a_table():
    assert problems({"run": 3}) == "run: must be a table of keys, not 3"


# ── sources ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_line_wins_even_with_false_and_changes_nothing_else():
    file = {"run": {"compile": True, "seed": 7}}
    _, overrides = parse("--run.compile", "false")
    assert merge(file, overrides) == {"run": {"compile": "false", "seed": 7}}
    config = validate(merge(file, overrides))
    assert config.run.compile is False
    assert config.run.seed == 7
    assert file == {"run": {"compile": True, "seed": 7}}


def test_with_values_validates():
    four_layers = Config().with_values(model={"n_layer": 4})
    config = four_layers.with_values(run={"name": "bard"}, model={"n_layer": 2})
    assert differences(four_layers, config) == {"run.name": ("", "bard"), "model.n_layer": (4, 2)}
    with pytest.raises(UserError, match="n_layerz"):
        config.with_values(model={"n_layerz": 2})


def test_toml_with_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "café.toml"
    path.write_bytes(b'\xef\xbb\xbf[train]\r\nsample_prompt = "\xc3\xa9\xe4\xb8\xad"\r\n')
    assert validate(read_toml(path)).train.sample_prompt == "é中"


def test_files_that_are_no_toml(tmp_path: Path):
    broken, latin = tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("[train\n", encoding="utf-8")
    latin.write_bytes(b'[train]\nsample_prompt = "\xe9"\n')
    for path in (broken, latin, tmp_path / "missing.toml", tmp_path):
        with pytest.raises(UserError) as caught:
            read_toml(path)
        assert str(path) in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    rate=st.floats(0, 1e6, allow_nan=False),
    seed=st.integers(0, 2**32 - 1),
)
def test_saved_configuration_reads_back_equal(tmp_path_factory, text, rate, seed):
    config = Config().with_values(train={"sample_prompt": text}, optim={"lr": rate}, run={"seed": seed})
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_bytes(to_toml(config).encode())
    assert validate(read_toml(path)) == config


def test_every_key_is_saved_and_none_is_none():
    saved = Config().model_dump()
    assert all(value is not None for table in saved.values() for value in table.values())
    assert all(f"\n{key} = " in to_toml(Config()) for table in saved.values() for key in table)


# ── command line ───────────────────────────────────────────────────────────────────────────────────────────────


def test_help_lists_every_key_with_type_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as leaving:
        parse("--help")
    assert leaving.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for table, field in Config.model_fields.items():
        for key, what in section_class(field).model_fields.items():
            option = f"  --{table}.{key.replace('_', '-')} "
            (start,) = (number for number, line in enumerate(lines) if line.startswith(option))
            told = " ".join(line.strip() for line in lines[start : start + 2])
            assert str(what.description) in told
            assert f"(default: {what.default if what.default != '' else chr(34) * 2})" in told
    assert any("--model.norm rmsnorm|layernorm" in line for line in lines)


def test_names_with_underscores_and_values_after_equals():
    options, overrides = parse("configs/a.toml", "--model.n_layer", "4", "--train.max-steps=2", "--optim.lr=-1e-3")
    assert options.config == "configs/a.toml"
    assert overrides == {"model": {"n_layer": "4"}, "train": {"max_steps": "2"}, "optim": {"lr": "-1e-3"}}


def test_underscores_in_values_stay():
    assert parse("--run.name", "my_run", "--data.source=my_text")[1] == {
        "run": {"name": "my_run"},
        "data": {"source": "my_text"},
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.n_layerz", "4"], "--model.n-layerz: unknown option; did you mean --model.n-layer?"),
        (["--lr", "1"], "--lr: unknown option; did you mean --optim.lr?"),
        (["--train.lr=1"], "--train.lr=1: unknown option; did you mean --optim.lr?"),
        (["--train.max", "1"], "--train.max: unknown option; known are --train.batch-size, "),  # no abbreviations
        (["--train.max-steps"], "argument --train.max-steps: expected one argument"),
        (["a.toml", "b.toml"], "b.toml: not expected here"),
    ],
)
def test_mistakes_on_the_command_line(words, told):
    with pytest.raises(UserError) as caught:
        parse(*words)
    assert str(caught.value).startswith(told)


def test_escapes():
    assert unescape(r"a\nb\t\\n\q") == "a\nb\t\\n\\q"
    assert unescape("é中😀\\") == "é中😀\\"


def test_utf8_words_that_python_took_for_ascii_are_put_right():
    assert unescape("é中😀\\n".encode().decode("ascii", "surrogateescape")) == "é中😀\n"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_typed(text):
    typed = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    assert unescape(typed) == text


def outcome(main) -> int | str | None:
    with pytest.raises(SystemExit) as leaving:
        run_script(main)
    return leaving.value.code


def test_exit_codes(capsys):
    def mistaken():
        raise UserError("text.txt: no such file")

    def interrupted():
        raise KeyboardInterrupt

    assert outcome(lambda: None) == 0
    assert outcome(lambda: 3) == 3
    assert outcome(mistaken) == 2
    assert capsys.readouterr().err == "error: text.txt: no such file\n"
    assert outcome(interrupted) == 130
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run_script(lambda: 1 // 0)


def test_a_console_that_cannot_show_a_text_shows_its_escapes(tmp_path, monkeypatch):
    with (tmp_path / "out.txt").open("w", encoding="ascii") as console:
        monkeypatch.setattr(sys, "stdout", console)
        assert outcome(lambda: print("é中")) == 0
    assert (tmp_path / "out.txt").read_bytes().strip() == rb"\xe9\u4e2d"
