"""Training processes killed at random moments: each goes on, and ends in the bits of the one that nobody disturbed."""

import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minigpt.checkpoint import last, list_checkpoints
from minigpt.errors import UserError
from minigpt.shipped import SCRIPTS
from minigpt.tasks import tales

TRAIN = SCRIPTS / "train.py"
MAX_STEPS = 600
TEXT_LENGTH = 100_000  # characters; the steps go round it more than once, whatever the tokenizer
COMMON = {
    "run.threads": 1, "run.device": "cpu", "model.n_layer": 1, "model.n_head": 2, "model.d_model": 32,
    "model.context_length": 32, "model.dropout": 0.1, "train.batch_size": 8, "train.grad_accumulation": 2,
    "train.max_steps": MAX_STEPS, "train.eval_interval": 100, "train.save_interval": 10, "train.keep_last": 2,
}  # fmt: skip
KINDS = [
    {"optim.name": optimizer, "data.tokenizer": tokenizer, "data.vocab_size": size}
    for optimizer, (tokenizer, size) in itertools.product(("muon", "adamw"), (("char", 0), ("bpe", 300)))
]
CLOCK = ("tokens_per_second", "seconds")
PATIENCE = 600.0  # seconds for one training process


@dataclass(frozen=True)
class Kill:
    """One killed process: how, after how long, what it had saved, and what differs in the end (nothing, one hopes)."""

    kind: str
    seconds: float
    saved_step: int | None
    differences: list[str]


def kills(times: int, seed: int) -> Iterator[Kill]:
    """Kill ``times`` training processes, each somewhere else, and let each run go on to its end.

    The kinds of run take turns: both optimizers with both tokenizers, all with dropout, accumulation and the end of
    an epoch on the way. A third of the runs are killed again after they went on.

    Raises:
        UserError: if an undisturbed run does not come to its end.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "tales.txt"
        source.write_text("\n".join(tales.corpus(size=TEXT_LENGTH)), encoding="utf-8")
        wholes = [Whole(Path(scratch) / f"whole-{i}", source, kind) for i, kind in enumerate(KINDS[:times])]
        done = 0
        while done < times:
            whole = wholes[done % len(wholes)]
            folder = Path(scratch) / f"killed-{done}"
            struck = []
            while not struck or (chance.random() < 1 / 3 and done + len(struck) < times):
                moment = whole.moment(chance)
                if not whole.killed(folder, moment):
                    break  # it had come to its end before
                struck.append((moment, _last_step(folder / "run")))
            found = differences(whole.path, whole.finished(folder)) if struck else []
            for moment, step in struck:
                yield Kill(whole.name, moment, step, found)
            done += len(struck)
            shutil.rmtree(folder)


class Whole:
    """A run of one kind that nobody disturbs, to compare with."""

    def __init__(self, folder: Path, source: Path, kind: dict[str, object]) -> None:
        self.name = f"{kind['optim.name']} {kind['data.tokenizer']}"
        cache = source.parent / "cache"
        keys = {**COMMON, **kind, "data.source": source, "data.cache_dir": cache, "run.name": "run"}
        self._options = [word for key, value in keys.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        begun = time.monotonic()
        self.path = self.finished(folder)
        seconds = time.monotonic() - begun
        training = json.loads((self.path / "metrics.jsonl").read_bytes().splitlines()[-1])["seconds"]
        self._training_begins, self._ends = seconds - training, seconds

    def moment(self, chance: random.Random) -> float:
        """Seconds after a process began: mostly while it trains, sometimes while it gets ready."""
        if chance.random() < 1 / 5:
            return chance.uniform(0, self._training_begins)
        return chance.uniform(self._training_begins, self._ends)

    def process(self, folder: Path) -> subprocess.Popen[str]:
        """A training process: one that goes on with what there is, or begins."""
        run = folder / "run"
        saved = any((run / "checkpoints").glob("step-*.safetensors"))
        words = ["--resume", str(run)] if saved else [*self._options, "--run.dir", str(folder)]
        folder.mkdir(exist_ok=True)
        with (folder / "told.txt").open("a", encoding="utf-8") as told:
            command = [sys.executable, str(TRAIN), *words]
            return subprocess.Popen(command, stdout=told, stderr=told, stdin=subprocess.DEVNULL, text=True)

    def killed(self, folder: Path, moment: float) -> bool:
        """Start a process and kill it after so many seconds; False if it had ended before."""
        process = self.process(folder)
        try:
            process.wait(moment)
            return False
        except subprocess.TimeoutExpired:
            return True
        finally:
            process.kill()
            process.wait()

    def finished(self, folder: Path) -> Path:
        """Go on to the end; the run."""
        run = folder / "run"
        if _last_step(run) != MAX_STEPS and self.process(folder).wait(PATIENCE):
            told = (folder / "told.txt").read_text(encoding="utf-8", errors="replace")
            raise UserError(f"a run ({self.name}) that should have come to its end did not:\n{told[-2000:]}")
        return run


def differences(whole: Path, run: Path) -> list[str]:
    """What is not the same in two runs: checkpoints, their arrays and losses, logged rows; and files half-written."""
    found = []
    ours, _ = list_checkpoints(whole / "checkpoints", verify=True)
    theirs, complaints = list_checkpoints(run / "checkpoints", verify=True)
    if [c.step for c in ours] != [c.step for c in theirs] or complaints:
        found.append(f"checkpoints of steps {[c.step for c in theirs]} {' '.join(complaints)}")
    for one, other in zip(ours, theirs, strict=False):
        for kind in ("model", "optimizer"):
            arrays, same = one.tensors(kind), other.tensors(kind)
            if arrays.keys() != same.keys() or any(a.tobytes() != same[n].tobytes() for n, a in arrays.items()):
                found.append(f"{kind} of step {one.step}")
        if any(one.metadata[key] != other.metadata[key] for key in ("val_loss", "best_val_loss", "train_loss")):
            found.append(f"losses of step {one.step}")
    if _rows(run) != _rows(whole):
        found.append("metrics.jsonl")
    if left := [path.name for path in run.rglob("*.tmp")]:
        found.append(f"left behind: {', '.join(left)}")
    return found


def _last_step(run: Path) -> int | None:
    checkpoints, _ = list_checkpoints(run / "checkpoints")
    return last(checkpoints).step if checkpoints else None


def _rows(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]
