"""Many trainings of one kind: a grid of settings times a few seeds, each a run of its own; and runs side by side."""

import contextlib
import hashlib
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from minigpt.checkpoint import Checkpoint, find_checkpoint, last, list_checkpoints
from minigpt.config import Config, differences, merge, validate
from minigpt.console import wrapped
from minigpt.corpora import corpus_of, is_task
from minigpt.errors import TrainingStopped, UserError
from minigpt.files import safe_name

Settings = dict[str, str]  # by key, such as {"optim.lr": "1e-3"}
DERIVED = ("model.n_kv_head", "model.d_ff", "data.vocab_size")  # from 0, as a run is made
WIDTH = 80  # columns
LONGEST_NAME = 80  # characters
SAID_LAST = 300  # characters of what a failed training said


@dataclass(frozen=True)
class Cell:
    """One training: its settings on top of the common ones, and its seed."""

    settings: Settings
    seed: int

    @property
    def name(self) -> str:
        """The name of its run: ``lr-1e-3_kind-lstm_seed-2``."""
        words = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in self.settings.items())
        if (safe_name(words) != words and words) or len(words) > LONGEST_NAME:  # else two could have one name
            words = f"{safe_name(words)[:LONGEST_NAME]}_{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        return f"{words}_seed-{self.seed}" if words else f"seed-{self.seed}"

    def overrides(self, common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """The tables of its run."""
        tables = merge(common, {"run": {"dir": str(folder), "name": self.name, "seed": self.seed}})
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            tables = merge(tables, {section: {name: value}})
        return tables


@dataclass(frozen=True)
class Result:
    """What a run has come to. ``step`` is the best checkpoint's; NaN: not known."""

    run: str
    kind: str
    parameters: int
    step: int
    steps: int  # in all so far
    loss: float  # validation loss of the best checkpoint
    bits_per_byte: float
    accuracy: float  # of a task
    seconds: float
    failed: str = ""  # what stopped it


# ── a grid ─────────────────────────────────────────────────────────────────────────────────────────────────────


def cells(grid: Sequence[str], seeds: int, first_seed: int = 1) -> list[Cell]:
    """Every combination of ``key=value,value`` words, with each seed.

    Raises:
        UserError: for a word of another form, and a key that comes twice.
    """
    choices: dict[str, list[str]] = {}
    for word in grid:
        key, equals, values = word.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        chosen = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or "." not in key or not chosen:
            raise UserError(f"--grid {word}: must be a key and its values, such as optim.lr=1e-3,3e-3")
        if key in choices or key.startswith("run."):
            raise UserError(f"--grid {word}: {key} is set {'twice' if key in choices else 'by the sweep itself'}")
        choices[key] = list(dict.fromkeys(chosen))
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    return [Cell(settings, seed) for settings in combinations for seed in range(first_seed, first_seed + seeds)]


class Trainer(Protocol):
    """What trains a cell into ``folder / cell.name``, or goes on with it. Returns what stopped it, if not a signal."""

    def __call__(
        self, cell: Cell, common: Mapping[str, Any], folder: Path, *, config_path: Path | None, stop: Callable[[], bool]
    ) -> str:
        """As ``train_cell``."""
        ...


def run_cells(
    todo: Sequence[Cell],
    common: Mapping[str, Any],
    folder: Path,
    *,
    config_path: Path | None,
    stop: Callable[[], bool],
    say: Callable[[str], None],
    train: Trainer | None = None,
) -> list[tuple[Cell, Result]]:
    """Train what is not yet trained, one after the other, each in a run of its own; a stop leaves those before whole.

    Args:
        todo: the cells.
        common: tables that all share.
        folder: where their runs are.
        config_path: the TOML file of the common tables, named in messages.
        stop: asked before each step, and between cells.
        say: told a line a cell.
        train: trains one; None: ``train_cell``, in this process.

    Raises:
        UserError: before anything is trained, for settings that a cell can't have, or that its run had otherwise.
    """
    seen: dict[str, Cell] = {}
    notes: dict[str, None] = {}
    for cell in todo:
        config, told_of_it = check_cell(cell, common, folder)
        notes |= dict.fromkeys(told_of_it)
        config = config.with_values(run={"name": ""})
        if (same := seen.setdefault(config.model_dump_json(), cell)) is not cell:
            raise UserError(f"{cell.name}: is {same.name} once more; give different values")
    for note in notes:
        say(note)
    results = []
    for number, cell in enumerate(todo, 1):
        if stop():
            break
        if not is_finished(folder / cell.name, saved_checkpoint(folder / cell.name)):
            say(f"{number}/{len(todo)}  {cell.name}  is trained ...")
        failed = (train or train_cell)(cell, common, folder, config_path=config_path, stop=stop)
        if stop():
            break
        result = result_of(folder / cell.name, failed)
        results.append((cell, result))
        say(f"{number}/{len(todo)}  {cell.name}  {told(result)}")
    return results


def check_cell(cell: Cell, common: Mapping[str, Any], folder: Path) -> tuple[Config, Sequence[str]]:
    """The cell's configuration, and what is to be said of its task.

    Refuses settings that no run can have, and a run of that name with other settings.
    """
    from minigpt.machine import machine_choices  # torch: a second that a mistake in the options need not wait for

    try:
        config = validate(cell.overrides(common, folder))
        if config.train.minutes:
            raise UserError("train.minutes chooses a network for each run; a sweep compares given ones by max_steps")
        machine_choices(config)
        task = is_task(config.data.source)
        corpus = corpus_of(config.with_values(task={"examples": 1, "held_out": 1} if task else {}))
    except UserError as error:
        raise UserError(f"{cell.name}: {error}") from None
    saved = saved_checkpoint(folder / cell.name)
    notes = corpus.notes if task else ()
    if saved is None:
        return config, notes
    for key, (asked, had) in differences(config, saved.config).items():
        if not (key in DERIVED and not asked) and not (key.startswith("run.") and key != "run.seed"):
            raise UserError(
                f"{folder / cell.name}: was trained with {key} = {had!r}, not {asked!r}; give the sweep another "
                "--run.name"
            )
    return config, notes


def train_cell(
    cell: Cell, common: Mapping[str, Any], folder: Path, *, config_path: Path | None, stop: Callable[[], bool]
) -> str:
    """Train a cell, or go on with it, unless it is finished. Returns what stopped it, if it was not a signal."""
    from minigpt import launch  # torch: a second that a mistake in the options need not wait for

    saved, told_there = saved_checkpoint(folder / cell.name), io.StringIO()
    try:
        with contextlib.redirect_stderr(told_there):
            if saved is None:
                launch.start(cell.overrides(common, folder), config_path=config_path, stop=stop)
            elif not is_finished(folder / cell.name, saved):
                launch.resume(folder / cell.name, {}, stop=stop)
    except TrainingStopped as error:
        return str(error)
    except UserError as error:
        raise UserError(f"{cell.name}: {error}") from None
    return ""


def saved_checkpoint(run: Path) -> Checkpoint | None:
    """The last checkpoint of a run, if it has any."""
    found, _ = list_checkpoints(run / "checkpoints")
    return last(found) if found else None


def is_finished(run: Path, saved: Checkpoint | None) -> bool:
    """Whether all steps are done, or validation had stalled for as long as was set."""
    if saved is None:
        return False
    settings, best_loss, since = saved.config.train, math.inf, 0
    for row in rows(run):
        if "val_loss" in row:
            since = 0 if row["val_loss"] < best_loss else since + 1
            best_loss = min(best_loss, row["val_loss"])
    return saved.step >= settings.max_steps or 0 < settings.early_stop <= since


# ── what came of them ──────────────────────────────────────────────────────────────────────────────────────────


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``; lines that are none are passed over."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    found.append(row)
    return found


def result_of(run: Path, failed: str = "") -> Result:
    """The result of a run folder.

    Raises:
        UserError: if it holds no checkpoint.
    """
    checkpoint = find_checkpoint(run, "best")
    logged = rows(run)
    here = next((row for row in reversed(logged) if row["step"] == checkpoint.step and "val_loss" in row), {})
    return Result(
        run=str(run),
        kind=checkpoint.config.model.kind,
        parameters=sum(tensor.size for tensor in checkpoint.tensors("model").values()),
        step=checkpoint.step,
        steps=max((row["step"] for row in logged), default=checkpoint.step),
        loss=checkpoint.val_loss,
        bits_per_byte=here.get("val_bits_per_byte", math.nan),
        accuracy=here.get("val_accuracy", math.nan),
        seconds=max((row.get("seconds", 0.0) for row in logged), default=math.nan),
        failed=failed[:SAID_LAST],
    )


def told(result: Result) -> str:
    """In a few words."""
    accuracy = "" if math.isnan(result.accuracy) else f"  right {result.accuracy:.1%}"
    failed = f"  stopped: {result.failed}" if result.failed else ""
    return f"loss {result.loss:.4f}{accuracy}  {result.seconds:.0f} s{failed}"


@dataclass(frozen=True)
class Mean:
    """Mean and standard error over seeds; NaN for the error of one."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """Of at least one value."""
        known = list(values)
        if len(known) < 2 or not all(map(math.isfinite, known)):
            return cls(statistics.fmean(known), math.nan)
        return cls(statistics.fmean(known), statistics.stdev(known) / math.sqrt(len(known)))

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if math.isnan(self.error) else f" ± {self.error:.4f}")


def sweep_table(results: Sequence[tuple[Cell, Result]]) -> list[list[str]]:
    """Rows of text: the settings, then means ± standard errors over seeds, the lowest loss first."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for cell, result in results:
        groups.setdefault(tuple(cell.settings.values()), []).append(result)
    keys = [key.rpartition(".")[2] for key in (results[0][0].settings if results else {})]
    tasks = any(not math.isnan(result.accuracy) for _, result in results)
    table = [[*keys, "seeds", "parameters", "loss", *(["right"] if tasks else ["bits/byte"]), "seconds"]]
    means = {values: Mean.of(r.loss for r in group).mean for values, group in groups.items()}
    ordered = sorted(groups.items(), key=lambda group: (math.isnan(means[group[0]]), means[group[0]]))
    for values, group in ordered:
        measure = Mean.of(r.accuracy if tasks else r.bits_per_byte for r in group)
        table.append(
            [
                *values,
                f"{len(group)}" + (f" ({failed} stopped)" if (failed := sum(bool(r.failed) for r in group)) else ""),
                f"{group[0].parameters:,}",
                str(Mean.of(r.loss for r in group)),
                str(measure),
                f"{statistics.fmean(r.seconds for r in group):.0f}",
            ]
        )
    return table


def runs_table(results: Sequence[Result]) -> list[list[str]]:
    """Rows of text, one a run, the lowest loss first."""
    tasks = any(not math.isnan(result.accuracy) for result in results)
    table = [["run", "kind", "parameters", "step", "loss", "right" if tasks else "bits/byte", "seconds"]]
    for r in sorted(results, key=lambda r: (math.isnan(r.loss), r.loss)):
        measure = r.accuracy if tasks else r.bits_per_byte
        table.append(
            [
                *(r.run, r.kind, f"{r.parameters:,}", f"{r.step:,}/{r.steps:,}"),
                *(f"{r.loss:.4f}", f"{measure:.4f}", f"{r.seconds:.0f}"),
            ]
        )
    return table


def different_settings(runs: Sequence[Path]) -> list[str]:
    """Lines of text: of each run the settings in which they are not all alike; none if they are."""
    configs = {run: find_checkpoint(run, "last").config for run in runs}
    first = next(iter(configs.values()))
    keys = sorted({key for config in configs.values() for key in differences(first, config)} - {"run.name", "run.dir"})
    if not keys:
        return []
    lines = ["", "settings that differ:"]
    for run, config in configs.items():
        settings = ", ".join(f"{key} = {value_of(config, key)}" for key in keys)
        lines += [f"{run}:", *(f"  {line}" for line in wrapped(settings, WIDTH - 2).splitlines())]
    return lines


def value_of(config: Config, key: str) -> Any:
    """``value_of(config, "optim.lr")``."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def curves(runs: Mapping[str, Path]) -> dict[str, list[tuple[float, float]]]:
    """Validation loss over steps, by name; runs that were never validated are left out."""
    found = {
        name: [(float(row["step"]), float(row["val_loss"])) for row in rows(run) if row.get("val_loss") is not None]
        for name, run in runs.items()
    }
    return {name: [point for point in curve if point[0] > 0] for name, curve in found.items() if curve}


def as_plain(result: Result, cell: Cell | None = None) -> dict[str, Any]:
    """For JSON and CSV: settings and seed of a cell, then the result; what is not known is null."""
    settings: dict[str, Any] = {**cell.settings, "seed": cell.seed} if cell else {}
    return settings | {
        key: None if value == "" or (isinstance(value, float) and not math.isfinite(value)) else value
        for key, value in asdict(result).items()
    }
