"""Other people's programs, run the way their authors run them: nanoGPT from a checkout, transformers as installed."""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.config import ModelConfig, OptimConfig, validate
from minigpt.corpus import Corpus
from minigpt.errors import UserError
from minigpt.optim import learning_rate_factor
from minigpt.sampling import window_start
from minigpt.tokenizer import END
from minigpt.training import evaluate

NO_NANOGPT = "nanoGPT left out: give --nanogpt DIR, a checkout of github.com/karpathy/nanoGPT"
NO_TRANSFORMERS = "transformers left out: pip install transformers, and give --transformers"

# nanoGPT's recipe for a CPU: the command of its README over config/train_shakespeare_char.py.
RECIPE_STEPS, RECIPE_EVAL_INTERVAL, RECIPE_RATE = 2000, 250, 1e-3
RECIPE = OptimConfig(name="adamw", schedule="cosine", warmup_steps=100, min_lr_fraction=0.1)
RECIPE_FLAGS = (
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12"),
    *("--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"),
)


# ── nanoGPT ────────────────────────────────────────────────────────────────────────────────────────────────────


def nanogpt_module(folder: Path) -> Any:
    """nanoGPT's ``model.py``, from a folder that has it."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nanogpt_model(folder: Path, shape: ModelConfig, vocab_size: int) -> Any:
    """nanoGPT's network of our shape, in its recipe's layout (no biases, no dropout)."""
    module = nanogpt_module(folder)
    config = module.GPTConfig(
        block_size=shape.context_length,
        vocab_size=vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.d_model,
        dropout=0.0,
        bias=False,
    )
    torch.manual_seed(1337)
    with contextlib.redirect_stdout(io.StringIO()):
        return module.GPT(config)


def nanogpt_writer(folder: Path, shape: ModelConfig, vocab_size: int) -> Callable[[int], None]:
    """Writes so many tokens after a first one, sampled at temperature 1: the cheapest way it has."""
    model = nanogpt_model(folder, shape, vocab_size).eval()
    return lambda n_token: model.generate(torch.ones(1, 1, dtype=torch.long), n_token)


def write_nanogpt_data(corpus: Corpus, folder: Path) -> int:
    """``train.bin``, ``val.bin`` and ``meta.pkl`` of a text in characters, as nanoGPT's ``prepare.py`` leaves them.

    Its ids are ours less one, for it has no ``<|end|>``. Returns the number of ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        nanogpt_ids(tokens).tofile(folder / f"{name}.bin")
    vocab_size = corpus.tokenizer.vocab_size - 1
    # train.py reads the number of ids from a pickled dictionary; this is one in the text form of that format.
    (folder / "meta.pkl").write_bytes(b"(dVvocab_size\nI%d\ns." % vocab_size)
    return vocab_size


def nanogpt_ids(tokens: np.ndarray) -> np.ndarray:
    """Our character ids (N,) → nanoGPT's, in uint16."""
    return (tokens[tokens != END] - 1).astype(np.uint16)


class NanoGptTraining:
    """Training steps as nanoGPT's ``train.py`` does them on a CPU, with its recipe."""

    def __init__(self, folder: Path, data: Path, shape: ModelConfig, *, vocab_size: int, batch_size: int) -> None:
        self.model = nanogpt_model(folder, shape, vocab_size)
        with contextlib.redirect_stdout(io.StringIO()):
            self.optimizer = self.model.configure_optimizers(0.1, RECIPE_RATE, (0.9, 0.99), "cpu")
        self.data, self.length, self.batch_size, self.n_step = data, shape.context_length, batch_size, 0
        self.random = torch.Generator().manual_seed(1337)  # its own, for our steps seed torch's
        self.batch = self.next_batch()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Windows at random places of the file, which is opened anew for each batch."""
        ids = np.memmap(self.data / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(ids) - self.length, (self.batch_size,), generator=self.random).tolist()
        rows = [torch.from_numpy(ids[i : i + self.length + 1].astype(np.int64)) for i in starts]
        return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])

    def step(self) -> None:
        """One update; the next batch is fetched between forward and backward."""
        for group in self.optimizer.param_groups:
            group["lr"] = RECIPE_RATE * learning_rate_factor(self.n_step, RECIPE_STEPS, RECIPE)
        _, loss = self.model(*self.batch)
        self.batch = self.next_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.n_step += 1
        loss.item()  # it logs the loss of every step


class AllLogits(nn.Module):
    """nanoGPT's network as (B, T) → (B, T, V); by itself it tells the last place alone unless targets are given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, T, V)."""
        return self.model(tokens, tokens)[0]


def nanogpt_loss(model: Any, val_tokens: np.ndarray) -> float:
    """Loss over our whole validation part (N,), in windows of the context length: the measure of our own models."""
    values = {"run": {"device": "cpu", "dtype": "float32"}, "model": {"context_length": model.config.block_size}}
    ids = nanogpt_ids(val_tokens)
    return evaluate(AllLogits(model), ids, validate(values), np.ones(model.config.vocab_size, dtype=np.int64)).loss


def n_parameter(model: nn.Module) -> int:
    """Number of learned numbers, a tied matrix counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class RecipeResult:
    """Another program's training as a whole process."""

    seconds: float
    n_parameter: int
    steps: int
    loss: float


def nanogpt_recipe(folder: Path, corpus: Corpus, scratch: Path, *, threads: int, steps: int) -> RecipeResult:
    """Run nanoGPT's ``train.py`` with its README's settings for a CPU; nothing is written into ``folder``.

    Raises:
        UserError: if it fails.
    """
    write_nanogpt_data(corpus, scratch / "data")
    begun = time.perf_counter()
    for _line in nanogpt_lines(folder, scratch, threads=threads, steps=steps, eval_interval=RECIPE_EVAL_INTERVAL):
        pass
    seconds = time.perf_counter() - begun
    module = nanogpt_module(folder)
    saved = torch.load(scratch / "out" / "ckpt.pt", map_location="cpu", weights_only=True)
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.GPT(module.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    return RecipeResult(seconds, n_parameter(model), steps, nanogpt_loss(model, corpus.val))


def nanogpt_lines(folder: Path, scratch: Path, *, threads: int, steps: int, eval_interval: int) -> Iterator[str]:
    """What nanoGPT's training prints, as it comes; it reads ``scratch/data`` and writes ``scratch/out``.

    Raises:
        UserError: if it fails, with what it said last.
    """
    flags = [
        *RECIPE_FLAGS,
        f"--max_iters={steps}",
        f"--lr_decay_iters={steps}",
        f"--eval_interval={min(eval_interval, steps)}",
        f"--dataset={(scratch / 'data').resolve()}",
        f"--out_dir={(scratch / 'out').resolve()}",
        "--always_save_checkpoint=True",  # else the last weights are lost when an estimate on 20 batches got no better
    ]
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout
        last = "(no message)"
        for line in process.stdout:
            last = line.strip() or last
            yield line
    if process.returncode:
        raise UserError(f"{folder}: its train.py failed: {last}")


# ── x-transformers ─────────────────────────────────────────────────────────────────────────────────────────────


def x_transformers_recipe(source: str, *, seed: int, threads: int) -> RecipeResult:
    """Run ``x_transformers_recipe.py``; ``source`` as ``data.source`` has it.

    Raises:
        UserError: if it fails, as it does where the library is not installed.
    """
    command = [sys.executable, "-m", "minigpt.studies.x_transformers_recipe", source, str(seed), str(threads)]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    seconds = time.perf_counter() - begun
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise UserError(f"x-transformers can't be compared with ({reason}): pip install x-transformers")
    answer = json.loads(done.stdout)
    return RecipeResult(seconds, answer["parameters"], answer["steps"], answer["loss"])


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────


def transformers_writer(shape: ModelConfig, vocab_size: int, n_stream: int) -> Callable[[int], None] | None:
    """Writes so many tokens in each of several texts with ``generate``, greedy, with its cache; None if not installed.

    Past the context it is called anew on the window that minigpt would take, so that both do the same work.
    """
    try:
        transformers: Any = importlib.import_module("transformers")  # by its name: a type check can do without it
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=shape.context_length,
        n_embd=shape.d_model,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()

    def write(n_token: int) -> None:
        tokens, total = torch.arange(1, 1 + n_stream)[:, None], 1 + n_token
        while tokens.shape[1] < total:
            start = window_start(tokens.shape[1], shape.context_length)
            window = tokens[:, start:]
            room = min(shape.context_length + 1 - window.shape[1], total - tokens.shape[1])
            longer = model.generate(
                window,
                attention_mask=torch.ones_like(window),
                max_new_tokens=room,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
            tokens = torch.cat([tokens[:, :start], longer], dim=1)
        assert tokens.shape[1] == total

    return write
