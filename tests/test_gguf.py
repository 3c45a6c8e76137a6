"""GGUF files, read back by the library that llama.cpp's authors keep, and by transformers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_weights import assert_close, of_model, saved
from running import ROOT, Script

from minigpt.assembly import load_model
from minigpt.checkpoint import Checkpoint
from minigpt.config import DEFAULT_CONFIG, read_toml
from minigpt.errors import UserError
from minigpt.interop.gguf_file import write_gguf
from minigpt.tokenizer import tokenizer_from_dict

LLAMA, GPT2 = (read_toml(DEFAULT_CONFIG.parent / f"{name}.toml")["model"] for name in ("llama", "gpt2"))
LAYOUTS = {"llama": LLAMA, "llama, tied": LLAMA | {"tie_embeddings": True}, "gpt2": GPT2 | {"mlp": "gelu_tanh"}}


@pytest.fixture
def gguf() -> Any:
    return pytest.importorskip("gguf", reason='gguf is not installed: pip install "minigpt[interop]"')


def checkpoint_of(folder: Path, text: str, tokenizer: str = "bpe", **model: Any) -> Checkpoint:
    return saved(folder / "here.safetensors", of_model(tokenizer, **model), text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_reads_the_same(gguf: Any, transformers: Any, tmp_path: Path, english: str, layout: str) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    checkpoint = checkpoint_of(tmp_path, english, **LAYOUTS[layout])
    assert write_gguf(checkpoint, tmp_path / "there.gguf", "f32") == ""
    known = {"n_positions": 16} if layout == "gpt2" else {}  # which the library does not read from such files
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="there.gguf", **known).eval()
    model, tokenizer = load_model(checkpoint, "cpu"), tokenizer_from_dict(checkpoint.tokenizer)
    text = "the café's 古い clock"
    ids = tokenizer.encode(text).tolist()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="there.gguf")(text).input_ids == ids
    tokens_BT = torch.tensor([ids[:16]])
    with torch.no_grad():
        assert_close(other(tokens_BT).logits, model(tokens_BT))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_cpp_reads_the_same(gguf: Any, tmp_path: Path, english: str, layout: str, dtype: str) -> None:
    """Ids of a text, and logits; llama.cpp takes GELU from a table of half precision."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    checkpoint = checkpoint_of(tmp_path, english, **LAYOUTS[layout])
    write_gguf(checkpoint, tmp_path / "there.gguf", dtype)
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    other = llama_cpp.Llama(str(tmp_path / "there.gguf"), n_ctx=16, logits_all=True, verbose=False, **exact)
    model, tokenizer = load_model(checkpoint, "cpu"), tokenizer_from_dict(checkpoint.tokenizer)
    text = "the café's 古い clock"
    ids = tokenizer.encode(text).tolist()
    assert other.tokenize(text.encode(), add_bos=False, special=False) == ids
    other.eval(ids[:16])
    with torch.no_grad():
        expected = model(torch.tensor([ids[:16]]))[0]
    limit = 1e-2 if dtype == "f16" else 1e-3 if layout == "gpt2" else 1e-4
    assert np.abs(other.scores[:16] - expected.numpy()).max() <= limit * np.abs(expected.numpy()).max()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_what_the_file_says(gguf: Any, tmp_path: Path, english: str, dtype: str) -> None:
    checkpoint = checkpoint_of(tmp_path, english, **GPT2)
    assert write_gguf(checkpoint, tmp_path / "there.gguf", dtype).startswith("llama.cpp computes GELU by tanh")
    reader = gguf.GGUFReader(tmp_path / "there.gguf")
    said = {key: reader.fields[key].contents() for key in reader.fields}
    assert said["general.architecture"] == said["tokenizer.ggml.model"] == "gpt2"
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert said["tokenizer.ggml.eos_token_id"] == said["tokenizer.ggml.bos_token_id"] == 0
    assert said["tokenizer.ggml.tokens"][0] == "<|end|>"
    assert said["tokenizer.ggml.token_type"][:3] == [3, 1, 1]
    assert (said["gpt2.context_length"], said["gpt2.block_count"], said["gpt2.attention.head_count"]) == (16, 2, 4)
    tensors, ours = {tensor.name: tensor.data for tensor in reader.tensors}, checkpoint.tensors("model")
    kind = np.float16 if dtype == "f16" else np.float32
    assert np.array_equal(tensors["blk.1.ffn_up.weight"], ours["blocks.1.mlp.up_linear.weight"].astype(kind))
    assert np.array_equal(tensors["blk.1.ffn_up.bias"], ours["blocks.1.mlp.up_linear.bias"])
    assert np.array_equal(tensors["position_embd.weight"], ours["position_embedding.weight"])
    assert len(tensors) == 2 + 2 * 12 + 2


@pytest.mark.parametrize(
    ("tokenizer", "model", "words"),
    [
        ("char", LLAMA, "--format gguf holds a bpe alone; train with --data.tokenizer bpe"),
        ("byte", LLAMA, "--format gguf holds a bpe alone"),
        ("bpe", {}, "not that of NanoChatForCausalLM; train one with configs/llama.toml"),
    ],
)
def test_what_it_can_not_hold(
    gguf: Any, tmp_path: Path, english: str, tokenizer: str, model: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        write_gguf(checkpoint_of(tmp_path, english, tokenizer, **model), tmp_path / "there.gguf", "f32")
    assert [path.name for path in tmp_path.iterdir()] == ["here.safetensors"]


def test_script(gguf: Any, tmp_path: Path, english: str, script: Script) -> None:
    checkpoint, out = checkpoint_of(tmp_path, english, **LLAMA), tmp_path / "there.gguf"
    words = (ROOT / "scripts" / "export.py", checkpoint.path, "--out", out, "--dtype", "f16")
    refused = script(*words)
    assert (refused.code, refused.err) == (2, "error: --dtype f16: is for --format gguf; hf keeps every bit\n")
    done = script(*words, "--format", "gguf")
    assert (done.code, done.out) == (0, f"{out}: step 5 of {checkpoint.path} as GGUF, f16\n")
    again = script(*words, "--format", "gguf")
    assert again.code == 2
    assert "name a new file" in again.err


def test_without_the_library(tmp_path: Path, english: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError) as refused:
        write_gguf(checkpoint_of(tmp_path, english, **LLAMA), tmp_path / "there.gguf", "f32")
    assert str(refused.value) == '--format gguf needs the library gguf: pip install "minigpt[interop]"'
