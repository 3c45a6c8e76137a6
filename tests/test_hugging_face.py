"""Folders of Hugging Face's transformers: what is written there, and what can't be."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from random_weights import assert_close, of_model, same_bits, saved
from running import EVALUATE, GENERATE, ROOT, Script, Trained

from minigpt.assembly import load_model
from minigpt.checkpoint import Checkpoint, find_checkpoint
from minigpt.config import DEFAULT_CONFIG, read_toml, validate
from minigpt.errors import UserError
from minigpt.interop.hugging_face import write_folder
from minigpt.normal_form import from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.sampling import SamplingOptions, generate
from minigpt.tokenizer import tokenizer_from_dict

EXPORT = ROOT / "scripts" / "export.py"
SHIPPED = sorted(path.stem for path in DEFAULT_CONFIG.parent.glob("*.toml"))
CLASSES = {name: "NanoChatForCausalLM" for name in SHIPPED if name != "tutorial"} | {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
}
LLAMA = read_toml(DEFAULT_CONFIG.parent / "llama.toml")["model"]


def compare(checkpoint: Checkpoint, folder: Path, other: Any) -> None:
    """Logits, greedy ids and the way back; ``other`` is the folder's network as the library reads it."""
    model = load_model(checkpoint, "cpu")
    tokens_BT = torch.randint(1, model.vocab_size, (2, model.longest), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(other(tokens_BT).logits, model(tokens_BT))
    prompt, count = tokens_BT[:1, :4], min(24, model.longest - 4)
    options = SamplingOptions(temperature=0)
    ours = generate(PlainEngine(from_checkpoint(checkpoint)), prompt[0].tolist(), max_new_tokens=count, options=options)
    written = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    assert [token for token in written[0, 4:].tolist() if token] == list(ours)
    back = find_checkpoint(folder)
    assert same_bits(back.tensors("model"), checkpoint.tensors("model"))
    assert back.tokenizer == checkpoint.tokenizer


# ── out ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CLASSES)
def test_shipped_configurations(transformers: Any, tmp_path: Path, english: str, name: str) -> None:
    config = validate(read_toml(DEFAULT_CONFIG.parent / f"{name}.toml"))
    checkpoint = saved(tmp_path / "here.safetensors", config, english)
    assert write_folder(checkpoint, tmp_path / "there").architecture == CLASSES[name]
    compare(checkpoint, tmp_path / "there", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there"))


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        ({"n_kv_head": 2, "tie_embeddings": False, "logit_softcap": 15.0}, "NanoChatForCausalLM"),
        (LLAMA | {"qk_norm": True}, "Qwen3ForCausalLM"),
        (LLAMA | {"tie_embeddings": True, "n_kv_head": 1}, "LlamaForCausalLM"),
    ],
)
def test_other_layouts(
    transformers: Any, tmp_path: Path, english: str, model: dict[str, Any], architecture: str
) -> None:
    checkpoint = saved(tmp_path / "here.safetensors", of_model("char", **model), english)
    assert write_folder(checkpoint, tmp_path / "there").architecture == architecture
    compare(checkpoint, tmp_path / "there", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there"))


@pytest.mark.parametrize("name", ["shakespeare_char", "llama"])
def test_their_tokenizer(transformers: Any, tmp_path: Path, english: str, name: str) -> None:
    """AutoTokenizer knows where a text ends, and reads no text as that."""
    config = validate(read_toml(DEFAULT_CONFIG.parent / f"{name}.toml"))
    checkpoint = saved(tmp_path / "here.safetensors", config, english + "<|end|>\t")
    write_folder(checkpoint, tmp_path / "there")
    ours, other = (
        tokenizer_from_dict(checkpoint.tokenizer),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "there"),
    )
    text = "the <|end|> of\n\tthe  café"
    ids = other(text).input_ids
    assert ids == ours.encode(text).tolist()
    assert other.decode(ids) == text
    assert other.eos_token_id == 0
    assert other.decode([*ids, 0], skip_special_tokens=True) == text


@pytest.mark.parametrize("stride", [1, 3, 12, 16])
def test_the_guides_perplexity(
    transformers: Any, tmp_path: Path, trained: Trained, script: Script, stride: int
) -> None:
    """The loop of "Perplexity of fixed-length models" with the library's own loss, on the folder that was written."""
    write_folder(find_checkpoint(trained.path), tmp_path / "there")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there").eval()
    text = trained.text.read_text(encoding="utf-8")[:400]
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")(text, return_tensors="pt").input_ids
    total, count, previous_end, length = 0.0, 0, 0, 16
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : previous_end - end] = -100
        predicted = int((labels != -100).sum()) - 1
        with torch.no_grad():
            total += float(other(ids[:, begin:end], labels=labels).loss) * predicted
        count, previous_end = count + predicted, end
        if end == ids.shape[1]:
            break
    for run in (trained.path, tmp_path / "there"):
        found = script(EVALUATE, run, "--stride", stride, "--text", text.replace("\n", "\\n"), "--json")
        assert found.json["guide_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare_bpe", "gpt2", "llama"])
def test_what_transformers_saves_again_is_read_again(
    transformers: Any, tmp_path: Path, english: str, name: str
) -> None:
    checkpoint = saved(
        tmp_path / "here.safetensors", validate(read_toml(DEFAULT_CONFIG.parent / f"{name}.toml")), english
    )
    write_folder(checkpoint, tmp_path / "there")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        kind.from_pretrained(tmp_path / "there").save_pretrained(tmp_path / "again")
    again = find_checkpoint(tmp_path / "again")
    assert same_bits(again.tensors("model"), checkpoint.tensors("model"))
    assert again.tokenizer == checkpoint.tokenizer


def test_the_tutorial_is_named_with_what_to_train_instead(tmp_path: Path, english: str) -> None:
    config = validate(read_toml(DEFAULT_CONFIG.parent / "tutorial.toml"))
    checkpoint = saved(tmp_path / "here.safetensors", config, english)
    with pytest.raises(UserError) as refused:
        write_folder(checkpoint, tmp_path / "there")
    assert "model.position = sinusoidal, model.embedding_scale = true, model.mlp = relu" in str(refused.value)
    assert "for GPT2LMHeadModel train one with --model.position learned --model.embedding-scale false" in str(
        refused.value
    )
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"norm_weight": True}, "--model.norm-weight false"),
        ({"qk_norm": False}, "NanoChatForCausalLM train one with --model.qk-norm true"),
        (LLAMA | {"logit_softcap": 15.0}, "LlamaForCausalLM train one with --model.logit-softcap 0.0"),
    ],
)
def test_no_class_for_it(tmp_path: Path, english: str, model: dict[str, Any], words: str) -> None:
    checkpoint = saved(tmp_path / "here.safetensors", of_model("char", **model), english)
    with pytest.raises(UserError, match=words):
        write_folder(checkpoint, tmp_path / "there")


def test_script(tmp_path: Path, trained: Trained, script: Script) -> None:
    """Written whole; a folder in use is left alone; generate.py and evaluate.py take it as they take the run."""
    out = tmp_path / "there"
    told = script(EXPORT, trained.path, "--out", out).out.splitlines()
    assert told[0].endswith("as NanoChatForCausalLM")
    assert told[1:] == ["AutoTokenizer drops characters that the tokenizer has never seen; here they are refused"]
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    again = script(EXPORT, trained.path, "--out", out)
    assert again.code == 2
    assert "name a new folder" in again.err
    for words in ([GENERATE, "--prompt", "the", "--seed", "3"], [EVALUATE, "--text", "the clock counts"]):
        run, folder = (script(words[0], path, *words[1:], "--json") for path in (trained.path, out))
        same = ("samples", "loss", "perplexity")
        assert folder.code == 0, folder.err
        assert {key: run.json.get(key) for key in same} == {key: folder.json.get(key) for key in same}


def test_a_full_disk_leaves_nothing(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_folder(find_checkpoint(trained.path), tmp_path / "there")
    assert not list(tmp_path.iterdir())
