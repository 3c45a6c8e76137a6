"""What is measured from outside: the scripts as a person starts them, each in a process of its own."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.config import merge, read_toml
from minigpt.console import counted
from minigpt.errors import UserError
from minigpt.shipped import CONFIGS, SCRIPTS
from minigpt.studies.measure import Report, Spread, table
from minigpt.studies.sweep import Cell, Mean, cells, run_cells

if TYPE_CHECKING:  # loading torch here would hide what the processes need
    from minigpt.studies.peers import RecipeResult

SPEEDRUN = CONFIGS / "speedrun_cpu.toml"
SAMPLE = re.compile(r"── step \d+ writes ──")  # what train.py shows above a sample


@dataclass(frozen=True)
class Trained:
    """A finished training process."""

    seconds: float
    first_sample_seconds: float | None
    path: Path


# ── the benchmarks ─────────────────────────────────────────────────────────────────────────────────────────────


def default(*, repeats: int, flags: Sequence[str]) -> Report:
    """The default run: whole seconds, seconds until the first sample is shown, peak memory.

    Args:
        repeats: runs, of which medians are told.
        flags: options handed on to ``train.py``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        runs = [train_process(flags, Path(scratch) / str(number)) for number in range(repeats)]
    memory = peak_child_bytes()
    samples = [run.first_sample_seconds for run in runs if run.first_sample_seconds is not None]
    rows = [
        ["whole run", f"{Spread.of([run.seconds for run in runs])} s"],
        ["first sample shown after", f"{Spread.of(samples)} s" if samples else "none shown"],
        ["peak resident memory", f"{memory / 1e9:.2f} GB" if memory else "not measured on this system"],
    ]
    numbers = {"seconds": [run.seconds for run in runs], "first_sample_seconds": samples, "peak_bytes": memory}
    return Report(["scripts/train.py " + " ".join(flags), *table(rows)], numbers)


def tales(*, run: Path | None, flags: Sequence[str]) -> Report:
    """How often the words that a story determines are found: ``evaluate.py``'s answer on the default run.

    Args:
        run: a finished run; None: the default run is trained first.
        flags: options handed on to ``train.py``.

    Raises:
        UserError: if the run's text is not ``tales``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = run or train_process(flags, Path(scratch) / "run").path
        answer = evaluation(path)
    if "tales" not in answer:
        raise UserError(f"{path}: evaluate.py tells nothing about tales; give a run on that text")
    lines = [
        f"{run or 'the default run'}, step {answer['step']}",
        *table([[name, text] for name, text in flat(answer["tales"])]),
    ]
    return Report(lines, {"tales": answer["tales"]})


def train(
    *, seeds: int, peers: Sequence[str], nanogpt: Path | None, threads: int, overrides: Mapping[str, Any]
) -> Report:
    """``configs/speedrun_cpu.toml`` as a sweep over seeds, and other programs' trainings of that size beside it.

    Each cell is a whole process. The loss of all is over the whole validation part in windows of the context length, of
    the last weights. The first run also makes the token files, the others find them.

    Args:
        seeds: runs, with seeds 1, 2, ...
        peers: "nanogpt", its recipe for a CPU, and "x-transformers".
        nanogpt: its checkout.
        threads: CPU threads of the others.
        overrides: tables on top of the configuration.
    """
    with tempfile.TemporaryDirectory() as scratch:
        checked = merge(merge(read_toml(SPEEDRUN), overrides), {"data": {"cache_dir": str(Path(scratch) / "checked")}})
        runs: list[Trained] = []

        def as_process(
            cell: Cell, common: Mapping[str, Any], folder: Path, *, config_path: Path | None, stop: Callable[[], bool]
        ) -> str:
            """With another cache than the settings were checked with, so that the first run finds none."""
            tables = merge(common, {"data": {"cache_dir": str(Path(scratch) / "cache")}})
            runs.append(
                train_process([str(config_path), *as_flags(cell.overrides(tables, folder))], folder / cell.name)
            )
            return ""

        run_cells(
            cells([], seeds),
            checked,
            Path(scratch) / "runs",
            config_path=SPEEDRUN,
            stop=lambda: False,
            say=lambda _line: None,
            train=as_process,
        )
        ours = [_told(run) for run in runs]
        theirs = {name: _peer(name, runs[0].path, nanogpt, Path(scratch), threads) for name in peers}
    rows = [["", "parameters", "steps", "seconds", "validation loss"]]
    rows += [[f"minigpt, seed {seed}", *_cells(run)] for seed, run in enumerate(ours, start=1)]
    rows += [[name, *_cells(asdict(result))] for name, result in theirs.items()]
    losses = [run["loss"] for run in ours]
    lines = [f"mean loss of {counted(seeds, 'seed')}: {Mean.of(losses)}"]
    for name, result in theirs.items():
        ratio = Spread.of([run["seconds"] / result.seconds for run in ours])
        lines.append(
            f"minigpt's time / {name}'s: {ratio}; that of the first run {ours[0]['seconds'] / result.seconds:.3f}"
        )
    if not theirs:
        lines.append(
            "beside others: --nanogpt DIR --full (a checkout of github.com/karpathy/nanoGPT), --x-transformers"
        )
    head = "Whole processes; loss over the whole validation part, in windows of the context"
    numbers = {"minigpt": ours, "peers": {name: asdict(result) for name, result in theirs.items()}}
    return Report([head, *table(rows), *lines], numbers)


def _cells(run: Mapping[str, Any]) -> list[str]:
    return [f"{run['n_parameter']:,}", f"{run['steps']:,}", f"{run['seconds']:.1f}", f"{run['loss']:.4f}"]


def _told(trained: Trained) -> dict[str, Any]:
    from minigpt.checkpoint import find_checkpoint

    tensors = find_checkpoint(trained.path, "last").tensors("model")
    answer = evaluation(trained.path, "--which", "last")
    return {
        "n_parameter": sum(tensor.size for tensor in tensors.values()),
        "steps": answer["step"],
        "seconds": trained.seconds,
        "loss": answer["loss"],
        "tokens": answer["tokens"],
        "window": answer["window"],
    }


def _peer(name: str, run: Path, nanogpt: Path | None, scratch: Path, threads: int) -> "RecipeResult":
    """Another program on the text of one of our runs."""
    from minigpt.checkpoint import find_checkpoint
    from minigpt.corpus import open_corpus
    from minigpt.studies.peers import RECIPE_STEPS, nanogpt_recipe, x_transformers_recipe

    config = find_checkpoint(run, "last").config
    if name == "x-transformers":
        return x_transformers_recipe(config.data.source, seed=config.run.seed, threads=threads)
    assert nanogpt
    corpus = open_corpus(config.data, context_length=config.model.context_length, seed=config.run.seed)
    return nanogpt_recipe(nanogpt, corpus, scratch / "nanogpt", threads=threads, steps=RECIPE_STEPS)


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────


def as_flags(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """``{"train": {"max_steps": 5}}`` as options of ``train.py``: ``["--train.max-steps", "5"]``."""
    keys = {f"--{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    return [word for key, value in keys.items() for word in (key.replace("_", "-"), str(value))]


def train_process(flags: Sequence[str], run: Path) -> Trained:
    """Run ``scripts/train.py`` into the folder of a new run, with a clock on it.

    Raises:
        UserError: if it fails, with what it said last.
    """
    begun, first_sample, told = time.perf_counter(), None, []
    there = as_flags({"run": {"dir": run.parent, "name": run.name}})
    command = [sys.executable, str(SCRIPTS / "train.py"), *flags, *there]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()) as process:
        assert process.stdout
        for line in process.stdout:
            told.append(line.decode("utf-8", "replace").strip())
            if first_sample is None and SAMPLE.search(told[-1]):
                first_sample = time.perf_counter() - begun
    seconds = time.perf_counter() - begun
    if process.returncode:
        raise UserError(f"scripts/train.py failed: {told[-1] if told else f'exit code {process.returncode}'}")
    return Trained(seconds, first_sample, run)


def evaluation(run: Path, *flags: str) -> dict[str, Any]:
    """What ``scripts/evaluate.py RUN --json`` answers.

    Raises:
        UserError: if it fails, with what it said last.
    """
    command = [sys.executable, str(SCRIPTS / "evaluate.py"), str(run), "--json", *flags]
    done = subprocess.run(command, capture_output=True, env=_environment())
    if done.returncode:
        raise UserError(f"scripts/evaluate.py failed: {done.stderr.decode('utf-8', 'replace').strip()}")
    return json.loads(done.stdout)


def first_token_seconds(checkpoint: Path, prompt: str) -> float:
    """Seconds from starting ``scripts/generate.py`` until the first byte after the prompt comes out of it.

    Raises:
        UserError: if it fails.
    """
    options = ["--prompt", prompt, "--max-new-tokens", "8"]
    command = [sys.executable, str(SCRIPTS / "generate.py"), str(checkpoint), *options]
    begun = time.perf_counter()
    # Without a buffer a read returns as soon as the first byte is there.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment(), bufsize=0) as process:
        assert process.stdout
        for _ in range(len(prompt.encode("utf-8")) + 1):
            process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode:
        raise UserError(f"scripts/generate.py failed with exit code {process.returncode}; its message is above")
    return seconds


def peak_child_bytes() -> int | None:
    """Largest resident memory of any process started from here that has ended; None where the system doesn't tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested dictionaries: ``("pronoun.accuracy", "0.9731")``."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, f"{value:.4f}" if isinstance(value, float) else str(value)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONUTF8": "1"}
