"""What tests of whole runs share: beginning one, stopping it, and comparing what is left."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Tables

from minigpt.assembly import assembled
from minigpt.checkpoint import find_checkpoint, list_checkpoints
from minigpt.config import merge
from minigpt.errors import UserError
from minigpt.launch import Outcome, Stop, start
from minigpt.training import Run

MakeRun = Callable[..., Run]
CLOCK = ("tokens_per_second", "seconds")  # numbers that no seed fixes


def new_run(tiny: Tables, **sections: dict[str, Any]) -> Run:
    """What the training loop works on, for the tiny run with some keys changed; nothing on disk but the tokens."""
    parts = assembled(merge(tiny, sections), config_path=None, source_given=False, init_from=None)
    return Run(config=parts.config, corpus=parts.corpus, model=parts.model, optimizers=parts.optimizers)


def begun(tiny: Tables, stop: Stop | None = None, **sections: dict[str, Any]) -> Outcome:
    """Train the tiny run with some keys changed."""
    return start(merge(tiny, sections), stop=stop or (lambda: False))


def after(steps: int) -> Callable[[], bool]:
    """A stop that comes when so many steps are done."""
    asked = iter(range(steps + 1))
    return lambda: next(asked) == steps


def told(call: Callable[..., object], *arguments: Any, error: type[Exception] = UserError, **options: Any) -> str:
    """The sentence that a call ends with."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def rows(run: Path) -> list[dict[str, float]]:
    """What a run has logged, but for the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def assert_same_bits(one: Path, other: Path) -> None:
    """All checkpoints of two runs hold the same arrays and, but for the clock and the name, the same header."""
    first, second = (list_checkpoints(run / "checkpoints", verify=True)[0] for run in (one, other))
    assert [c.step for c in first] == [c.step for c in second]
    for a, b in zip(first, second, strict=True):
        for kind in ("model", "optimizer"):
            arrays, same = a.tensors(kind), b.tensors(kind)
            assert arrays.keys() == same.keys()
            for name, array in arrays.items():
                assert array.tobytes() == same[name].tobytes(), (a.step, kind, name)
        assert a.tensors("optimizer") or a.step == 0
        for key in ("val_loss", "best_val_loss", "validations_since_best", "train_loss", "tokens_seen", "corpus"):
            assert a.metadata[key] == b.metadata[key], (a.step, key)


def contents(run: Path) -> tuple[set[str], dict[str, Any]]:
    """The files there are; and every bit of the last state, with what was logged."""
    saved = find_checkpoint(run, "last", verify=True)
    tensors = {
        f"{kind}.{name}": t.tobytes() for kind in ("model", "optimizer") for name, t in saved.tensors(kind).items()
    }
    files = {str(path.relative_to(run)) for path in run.rglob("*") if "tensorboard" not in str(path)}
    return files, {"step": saved.step, "best": saved.metadata["best_val_loss"], "rows": rows(run), **tensors}
