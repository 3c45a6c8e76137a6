"""The notebook, cell by cell, without Jupyter."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT

TOUR = json.loads((ROOT / "scripts" / "tour.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in TOUR["cells"] if cell["cell_type"] == "code"]


def test_its_cells_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("minigpt.corpus.cache_folder", lambda _: tmp_path / "cache")
    names: dict[str, Any] = {}
    for source in CODE:
        exec(compile(source, "tour.ipynb", "exec"), names)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tour"] and (tmp_path / "cache").is_dir()
    assert names["trained"].progress.best_val_loss < 2.5
    assert np.abs(names["output"] - names["example"].output).max() < 1e-9
    assert names["seen"].weights.shape == (1, 2, 22, 22)
    assert "<iframe" in names["page"]._repr_html_()
    told = capsys.readouterr().out
    assert "== three_token_causal ==" in told and "'T'" not in told and "previous" in told


def test_it_is_a_notebook_without_outputs() -> None:
    assert (TOUR["nbformat"], TOUR["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in TOUR["cells"]]
    assert len(set(ids)) == len(ids) >= 12
    for cell in TOUR["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
