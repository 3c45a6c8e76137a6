"""One process, or many that torchrun started: the only file that knows ranks.

Every process holds the whole model and reads the whole batch; each computes its share of the sequences, gradients are
summed, and all take the same step. What is written, said and locked is the first process's alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from minigpt.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = timedelta(minutes=10)  # for the slowest process: preparing a long text, an evaluation, a save


@dataclass(frozen=True)
class World:
    """This process's number among ``size``; alone unless said otherwise."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def share(self, rows: "Tensor") -> "Tensor":
        """This process's part of a batch: (B, ...) → (B / size, ...)."""
        return rows.chunk(self.size)[self.rank]

    def sum(self, tensor: "Tensor") -> "Tensor":
        """Add up a tensor over all processes, in place."""
        if self.size > 1:
            import torch.distributed as group

            group.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; none goes on before all have answered."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.sum(torch.tensor(float(flag))).item())

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The first process does what follows before the others do: it fills caches and finds mistakes for all."""
        if not self.leads:
            self._meet()
        yield
        if self.leads:
            self._meet()

    def _meet(self) -> None:
        self.any(False)


ALONE = World()


def processes_here() -> int:
    """Processes of this run on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def joined() -> Iterator[World]:
    """The processes that torchrun started together, connected while the context is open; without torchrun this one.

    They talk by NCCL between GPUs, of which each process takes its own, and by gloo between CPUs. What goes wrong in
    all of them alike is told by the first of each machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "MASTER_ADDR" not in os.environ:
        yield ALONE
        return
    import torch
    import torch.distributed as group

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield World(group.get_rank(), group.get_world_size())
    except (UserError, TrainingStopped) as error:
        if os.environ["LOCAL_RANK"] == "0":
            raise
        raise SystemExit(2 if isinstance(error, UserError) else 3) from None
    finally:
        group.destroy_process_group()


def check_divisible(batch_size: int, grad_accumulation: int, size: int) -> None:
    """Refuse a batch that the processes can't share equally.

    Raises:
        UserError: with the nearest size that works.
    """
    parts = size * grad_accumulation
    if batch_size % parts:
        nearest = max(parts, round(batch_size / parts) * parts)
        raise UserError(
            f"train.batch_size = {batch_size}: {size} processes with train.grad_accumulation = {grad_accumulation} "
            f"need a multiple of {parts}, such as {nearest}"
        )
