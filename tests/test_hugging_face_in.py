"""Folders of Hugging Face's transformers, of this project and from elsewhere, taken as a run is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_weights import assert_close, same_bits
from running import ROOT, TRAIN, Script, Trained, as_options
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minigpt.assembly import load_model
from minigpt.checkpoint import find_checkpoint
from minigpt.errors import UserError
from minigpt.interop.hugging_face import write_folder
from minigpt.tokenizer import tokenizer_from_dict


@pytest.fixture
def folder(tmp_path: Path, trained: Trained) -> Path:
    write_folder(find_checkpoint(trained.path), tmp_path / "there")
    return tmp_path / "there"


def test_fine_tuning(tmp_path: Path, folder: Path, tiny: Tables, script: Script) -> None:
    """Training begins with the folder's weights and tokenizer; the text has to be named."""
    weights = find_checkpoint(folder).tensors("model")
    untold = script(TRAIN, "--init-from", folder, "--run.dir", tmp_path / "runs")
    assert untold.code == 2
    assert "weights from elsewhere bring no text: name one, by --data.source" in untold.err
    options = as_options({key: tiny[key] for key in ("run", "train")})
    source = ["--data.source", tiny["data"]["source"], "--data.cache-dir", tmp_path / "cache"]
    done = script(TRAIN, "--init-from", folder, *options, *source, "--data.unseen", "skip")
    assert done.code == 0, done.err
    first = find_checkpoint(tmp_path / "runs" / "tiny", "0")
    assert same_bits(first.tensors("model"), weights)
    assert first.tokenizer["characters"] == find_checkpoint(folder).tokenizer["characters"]
    assert find_checkpoint(tmp_path / "runs" / "tiny", "last").step == 20


def test_looking_into_one(tmp_path: Path, folder: Path, trained: Trained, script: Script) -> None:
    """compare_attention.py and explore.py say of the folder what they say of the run, but for the step."""
    heads = [
        script(ROOT / "scripts" / "compare_attention.py", "heads", path, "--file", trained.text, "--json")
        for path in (trained.path, folder)
    ]
    assert [answer.code for answer in heads] == [0, 0], heads[1].err
    assert heads[0].json["heads"] == heads[1].json["heads"]
    page = tmp_path / "page.html"
    shown = script(ROOT / "scripts" / "explore.py", folder, "--text", "the clock", "--export", page)
    assert shown.code == 0, shown.err
    assert "weights of step 0" in shown.out
    assert page.stat().st_size > 10_000


def _edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: _edit(f, "config.json", model_type="mamba"), "model_type = 'mamba': this project can hold nanochat"),
        (lambda f: _edit(f, "config.json", rms_norm_eps=1e-5), "rms_norm_eps = 1e-05: this project's"),
        (lambda f: _edit(f, "config.json", rope_parameters={"rope_theta": 5e5}), "with base 500000"),
        (lambda f: _edit(f, "config.json", rope_parameters=[7]), "config.json: "),
        (lambda f: _edit(f, "config.json", head_dim=5), "head_dim = 5"),
        (lambda f: _edit(f, "config.json", num_hidden_layers="x"), "model.n_layer = x: must be a whole number"),
        (lambda f: _edit(f, "config.json", num_hidden_layers=10**9), "no tensors of so many blocks"),
        (lambda f: _edit(f, "config.json", eos_token_id="x"), "must be the id that ends a text"),
        (lambda f: _edit(f, "config.json", vocab_size=None), "vocab_size = None: must be from 2"),
        (lambda f: _edit(f, "config.json", vocab_size=9), "lacks"),
        (lambda f: _edit(f, "config.json", vocab_size=999), "and the network has 999 ids"),
        (lambda f: _edit(f, "config.json", vocab_size=10**12), "vocab_size = 1000000000000"),
        (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]", encoding="utf-8"), "not a JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), "a Hugging Face folder with a fast tokenizer has this file"),
        (lambda f: (f / "model.safetensors").unlink(), "there is no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "is damaged"),
        (lambda f: _leave_out(f, "model.embed_tokens.weight"), "tensor token_embedding.weight is missing"),
        (lambda f: save_file({"odd": np.ones(2)}, f / "model-2.safetensors"), "tensor odd: this project's network has"),
        (lambda f: save_file({"odd": np.ones(2, int)}, f / "model-2.safetensors"), "weights are read as F32"),
        (lambda f: _put(f, "model.embed_tokens.weight", np.float32(1)), "embed_tokens.weight is a single number"),
        (lambda f: _two_heads(f), "tie_word_embeddings is true, and lm_head.weight is another matrix"),
        (lambda f: _index(f, "model-2-of-2.safetensors"), "model-2-of-2.safetensors is missing, a part of the weights"),
        (lambda f: _edit(f, "tokenizer.json", normalizer={"type": "NFC"}), "it changes the text first (normalizer)"),
        (lambda f: _edit(f, "tokenizer.json", post_processor={"type": "RobertaProcessing"}), "tokens around each text"),
        (lambda f: _edit(f, "tokenizer.json", post_processor=_begins_with(0)), "tokens around each text"),
        (lambda f: _bpe(f, end_of_word_suffix="</w>"), "it marks parts of words (end_of_word_suffix = '</w>')"),
        (lambda f: _bpe(f, type="WordPiece"), "it is of the kind WordPiece, no BPE"),
        (lambda f: _bpe(f, vocab={}), "parts that a byte-level BPE has are missing or of another kind"),
        (lambda f: _edit(f, "tokenizer.json", added_tokens=[{"id": 5, "content": "a", "special": False}]), "('a' in"),
    ],
)  # fmt: skip
def test_folders_that_can_not_be_read(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(folder)
    with pytest.raises(UserError) as refused:
        find_checkpoint(folder).tensors("model")
    assert words in str(refused.value)
    assert str(folder) in str(refused.value)


def _bpe(folder: Path, **changes: Any) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    _edit(folder, "tokenizer.json", model=model | changes)


def _begins_with(token: int) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": str(token), "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single}


def _index(folder: Path, name: str) -> None:
    text = json.dumps({"weight_map": {"model.norm.weight": name}})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _put(folder: Path, name: str, array: Any) -> None:
    save_file(load_file(folder / "model.safetensors") | {name: np.asarray(array)}, folder / "model.safetensors")


def _two_heads(folder: Path) -> None:
    _edit(folder, "config.json", tie_word_embeddings=True)
    _put(folder, "lm_head.weight", 1 + load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_a_tokenizer_file_of_old_says_no_kind(folder: Path) -> None:
    before, text = find_checkpoint(folder).tokenizer, (folder / "tokenizer.json").read_text(encoding="utf-8")
    values = json.loads(text)
    del values["model"]["type"]
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    assert find_checkpoint(folder).tokenizer == before


def test_a_file_of_the_folder_is_not_the_folder(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(UserError, match=f"{name}: is part of a folder of transformers: give the folder, "):
            find_checkpoint(folder / name)


def _leave_out(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


ANY_JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just([]) | st.just([{}])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_damaged_is_told(folder: Path, data: st.DataObject) -> None:
    """A value of some other kind, anywhere in the two files that are believed, ends in a sentence or does no harm."""
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer.json"]))
    whole = path.read_text(encoding="utf-8")
    values = place = json.loads(whole)
    keys = st.sampled_from
    while True:
        key = data.draw(keys(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ANY_JSON)
    path.write_text(json.dumps(values), encoding="utf-8")
    try:
        find_checkpoint(folder).tensors("model")
    except UserError as error:
        assert str(folder) in str(error)
    finally:
        path.write_text(whole, encoding="utf-8")


def test_it_has_one_step(folder: Path) -> None:
    assert find_checkpoint(folder, "last").step == find_checkpoint(folder, "0").step == 0
    with pytest.raises(UserError, match="no checkpoint of step 7; a Hugging Face folder holds one, step 0"):
        find_checkpoint(folder, "7")


def test_weights_of_sixteen_bits_in_several_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    exact = find_checkpoint(folder).tensors("model")
    halves = {name: array.astype(np.float16) for name, array in tensors.items()}
    (folder / "model.safetensors").unlink()
    for i, names in enumerate((list(halves)[:3], list(halves)[3:])):
        save_file({name: halves[name] for name in names}, folder / f"model-0000{i}-of-00002.safetensors")
    read = find_checkpoint(folder).tensors("model")
    assert all(np.array_equal(read[name], exact[name].astype(np.float16)) for name in exact)


def _random(transformers: Any, architecture: str, folder: Path, **changes: Any) -> Any:
    """A small random network that transformers made and saved, with a byte tokenizer that ends texts with id 256."""
    numbers = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 256}
    if architecture == "GPT2LMHeadModel":
        numbers |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    else:
        numbers |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        numbers |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
    torch.manual_seed(2)
    network = getattr(transformers, architecture)
    model = network(network.config_class(**numbers, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" not in name and "k_norm" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"<|endoftext|>": 256}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    fast.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast.add_special_tokens(["<|endoftext|>"])
    fast.save(str(folder / "tokenizer.json"))
    return model, fast


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GPT2LMHeadModel", {}),
        ("GPT2LMHeadModel", {"activation_function": "gelu"}),
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {}),
        ("NanoChatForCausalLM", {}),
    ],
)
def test_networks_from_elsewhere(transformers: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    other, fast = _random(transformers, architecture, tmp_path / "there", **changes)
    checkpoint = find_checkpoint(tmp_path / "there")
    tokenizer, model = tokenizer_from_dict(checkpoint.tokenizer), load_model(checkpoint, "cpu")
    text = "the café's 古い"
    ids, theirs = tokenizer.encode(text)[:16], fast.encode(text).ids[:16]
    with torch.no_grad():
        ours_TV = model(torch.tensor(ids[None].astype(np.int64)))[0]
        theirs_TV = other(torch.tensor([theirs])).logits[0]
    assert_close(ours_TV[:, 0], theirs_TV[:, 256])
    assert_close(ours_TV[:, 1:], theirs_TV[:, [i for i in range(260) if i != 256]])


def test_gains_of_queries_and_keys_have_no_place(transformers: Any, tmp_path: Path) -> None:
    model, _ = _random(transformers, "Qwen3ForCausalLM", tmp_path / "there")
    torch.nn.init.constant_(model.model.layers[1].self_attn.k_norm.weight, 1.5)
    model.save_pretrained(tmp_path / "there")
    with pytest.raises(
        UserError, match=r"layers\.1\.self_attn\.k_norm\.weight: this project's norm of queries and keys"
    ):
        find_checkpoint(tmp_path / "there").tensors("model")
