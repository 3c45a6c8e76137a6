"""An exported run in TransformerLens, by the lines of the README, run as they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT, Trained

from minigpt.checkpoint import find_checkpoint
from minigpt.interop.hugging_face import write_folder
from minigpt.trained import load

LINES = re.search(r"```python\n(from transformer_lens.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_ten_lines(transformers: Any, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and logits are those that minigpt tells of the run."""
    pytest.importorskip("transformer_lens", reason="pip install transformer-lens")
    assert LINES and len(LINES[1].splitlines()) <= 10
    write_folder(find_checkpoint(trained.path), tmp_path / "bard-hf")
    monkeypatch.chdir(tmp_path)
    there: dict[str, Any] = {}
    exec(LINES[1].replace("ROMEO:", "the clock"), there)
    ours = load(trained.path).attention("the clock")
    assert there["tokens"][0].tolist() == ours.ids.tolist()
    for layer, weights in enumerate(ours.weights):
        theirs = there["cache"][f"blocks.{layer}.attn.hook_pattern"][0].numpy()
        np.testing.assert_allclose(theirs, weights, atol=1e-5)
