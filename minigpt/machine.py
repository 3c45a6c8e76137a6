"""The machine: choice of device, arithmetic and threads, how it is prepared, and what is told of it."""

import ctypes
import platform
import re
import sys
from collections.abc import Mapping

import torch

from minigpt.checkpoint import versions
from minigpt.config import Config
from minigpt.console import counted
from minigpt.distributed import processes_here
from minigpt.errors import UserError
from minigpt.threads import core_count, wished_threads

MOST_THREADS = 16  # a core


def machine_choices(config: Config) -> dict[str, object]:
    """Device, dtype and threads in place of ``auto`` and 0."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = choose_device(config.run.device, cuda=cuda, mps=torch.backends.mps.is_available())
    bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported()
    return {
        "device": device,
        "dtype": choose_dtype(config.run.dtype, device, bf16=bf16),
        "threads": choose_threads(config.run.threads, processes=processes_here()),
    }


def choose_device(asked: str, *, cuda: int, mps: bool) -> str:
    """``run.device`` → a device's name, given the number of CUDA devices and whether Apple's MPS works.

    Raises:
        UserError: if it isn't there.
    """
    if asked == "auto":
        return "cuda" if cuda else "mps" if mps else "cpu"
    match = re.fullmatch(r"cuda(?::(\d+))?", asked)
    if asked not in ("cpu", "mps") and not match:
        raise UserError(f"run.device = {asked}: must be auto, cpu, mps, cuda, or cuda: and a number")
    if match and int(match[1] or 0) >= cuda:
        raise UserError(
            f"run.device = {asked}: torch sees {cuda or 'no'} CUDA device(s) here; auto takes what there is"
        )
    if asked == "mps" and not mps:
        raise UserError("run.device = mps: torch sees no Apple GPU here; auto takes what there is")
    return asked


def choose_dtype(asked: str, device: str, *, bf16: bool) -> str:
    """``run.dtype`` → float32, bfloat16 or float16, given whether the device computes in bfloat16.

    ``auto`` is float32 except on a CUDA device that has bfloat16.

    Raises:
        UserError: if the device can't do it.
    """
    kind = device.partition(":")[0]
    if asked == "auto":
        return "bfloat16" if kind == "cuda" and bf16 else "float32"
    if asked == "float16" and kind != "cuda":
        raise UserError(f"run.dtype = float16: needs a CUDA device, this is {device}; use float32")
    if asked == "bfloat16" and kind != "cpu" and not bf16:
        raise UserError(f"run.dtype = bfloat16: {device} can't compute in it; use float32")
    return asked


def needs_loss_scaler(device: str, dtype: str) -> bool:
    """Gradients in float16 underflow unless the loss is scaled; only CUDA trains in float16 here."""
    return device.startswith("cuda") and dtype == "float16"


def choose_threads(asked: int, processes: int = 1) -> int:
    """``run.threads``; for 0 OMP_NUM_THREADS, or else the cores this process may use, its share where several run here.

    Raises:
        UserError: for so many that the machine would not get to work.
    """
    cores, wished = core_count(), wished_threads()
    if processes > 1 and wished == 1:  # torchrun sets it to 1 where nobody else has
        wished = 0
    threads, key = (asked, "run.threads") if asked else (wished, "OMP_NUM_THREADS")
    if threads > (most := MOST_THREADS * cores):
        raise UserError(f"{key} = {threads}: this machine has {counted(cores, 'core')}; choose at most {most}")
    return threads or max(1, cores // processes)


# ── preparing and telling ──────────────────────────────────────────────────────────────────────────────────────


def prepare_machine(config: Config) -> None:
    """Threads, memory that is kept, and no arithmetic on denormal numbers, which slows training many times over."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(config.run.threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Have glibc, where the system uses it, keep the memory a step frees for the next step.

    It would return large pieces to the system, which clears each page before it gives it back: a twentieth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
        for option in (trim_threshold, mmap_threshold):
            mallopt(option, 2**30)


def machine_facts(config: Config, processes: int) -> dict[str, str]:
    """What besides seed and data decides the exact bits of a run; kept in every checkpoint."""
    kernels = torch.backends.cpu.get_cpu_capability()
    if config.run.device.startswith("cuda"):
        kernels = torch.cuda.get_device_name(config.run.device)
    return {
        "device": config.run.device,
        "threads": str(config.run.threads),
        "processor": platform.machine(),
        **versions(),
        "kernels": kernels,
        "processes": str(processes),
    }


def machine_changes(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Sentences on what differs from the machine that saved: the run goes on, but not bit for bit."""
    return [
        f"{key} was {saved.get(key, 'unknown')}, is {value}: the run goes on, but not bit for bit as it would have"
        for key, value in now.items()
        if saved.get(key) != value and key != "minigpt"
    ]
