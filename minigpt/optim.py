"""How weights move: AdamW, Muon, and learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.config import OptimConfig
from minigpt.distributed import ALONE, World

Quintic = tuple[float, float, float]

REACH = 4.6  # an orthogonalisation of n iterations brings singular values from REACH⁻ⁿ to 1 within 0.3 of 1


def learning_rate_factor(step: int, max_steps: int, config: OptimConfig) -> float:
    """Part of the peak rate used by the update number ``step`` (from 0): linear warm-up, then the decay.

    The first update of a warm-up of n steps uses 1/(n+1) and never 0; the decay would reach ``min_lr_fraction``
    just after the last update.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * left


class Bundle:
    """Parameters that move together: from now on views of one tensor, which their optimizer sees instead of them."""

    def __init__(self, named: Mapping[str, nn.Parameter], *, matrices: bool = False) -> None:
        """``matrices``: all of one shape, (R, C), bundled as (n, R, C); else of any shape, bundled as (n,)."""
        self.names, self.parts = list(named), list(named.values())
        shape = (len(self.parts), *self.parts[0].shape) if matrices else (-1,)
        self.whole = nn.Parameter(torch.cat([part.data.flatten() for part in self.parts]).view(shape))
        for part, piece in zip(self.parts, self.pieces(self.whole.data).values(), strict=True):
            part.data = piece

    def gather_gradients(self) -> Tensor | None:
        """Move the gradients of the parts into that of the whole; None if there are no new ones."""
        if all(part.grad is None for part in self.parts):
            return None
        assert self.parts[0].data_ptr() == self.whole.data_ptr(), "the model was moved after its optimizers were made"
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in self.parts]
        for part in self.parts:
            part.grad = None
        self.whole.grad = torch.cat([gradient.flatten() for gradient in gradients]).view(self.whole.shape)
        return self.whole.grad

    def pieces(self, whole: Tensor) -> dict[str, Tensor]:
        """What each named part owns of a tensor of the bundle's shape; all own a number that belongs to the whole."""
        if whole.ndim == 0:
            return dict.fromkeys(self.names, whole)
        pieces = whole.view(-1).split([part.numel() for part in self.parts])
        return {name: piece.view(part.shape) for name, piece, part in zip(self.names, pieces, self.parts, strict=True)}

    def joined(self, pieces: list[Tensor]) -> Tensor:
        """The reverse of ``pieces``."""
        if pieces[0].ndim == 0:
            return pieces[0].to(self.whole.device, copy=True)
        return torch.cat([piece.flatten() for piece in pieces]).view(self.whole.shape).to(self.whole)


def bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizers without its wrapper, which loads torch's compiler: a second of each start."""
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.AdamW):
    """torch's own, to the bit; it can't be compiled."""

    add_param_group = bare(torch.optim.Optimizer.add_param_group)
    zero_grad = bare(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(bare(torch.optim.AdamW.step))


class Muon(torch.optim.Optimizer):
    """Momentum, then each matrix's update is replaced by the nearest orthogonal one (Jordan et al. 2024).

    Parameters are stacks of matrices, (n, R, C), orthogonalised together, in float32 throughout; of several processes
    each takes its share of a stack.
    """

    add_param_group = bare(torch.optim.Optimizer.add_param_group)
    zero_grad = bare(torch.optim.Optimizer.zero_grad)

    def __init__(self, stacks: Iterable[nn.Parameter], config: OptimConfig, world: World = ALONE) -> None:
        defaults = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        self.quintics, self.world = polar_quintics(config.ns_steps), world
        super().__init__(stacks, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients in ``.grad``."""
        for group in self.param_groups:
            for stack in group["params"]:
                gradient = stack.grad.float()
                state = self.state[stack]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                momentum = state["momentum"].lerp_(gradient, 1 - group["momentum"])
                ahead = gradient.lerp(momentum, group["momentum"])  # Nesterov's look
                update = self._orthogonalised(ahead)
                rows, columns = stack.shape[-2:]
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                stack.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _orthogonalised(self, stack: Tensor) -> Tensor:
        if self.world.size == 1:
            return orthogonalise(stack, self.quintics)
        shares, update = stack.tensor_split(self.world.size), torch.zeros_like(stack)
        mine = update.tensor_split(self.world.size)[self.world.rank]
        if len(mine):
            mine.copy_(orthogonalise(shares[self.world.rank], self.quintics))
        return self.world.sum(update)  # all but one add zero: exact


def orthogonalise(matrices: Tensor, quintics: Iterable[Quintic]) -> Tensor:
    """(n, R, C) → about U Vᵀ of each matrix's singular value decomposition: its singular values go through each
    quintic in turn (Newton–Schulz iteration)."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in quintics:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def polar_quintics(steps: int) -> list[Quintic]:
    """(a, b, c) of a σ + b σ³ + c σ⁵ for each iteration: together they bring all of [REACH⁻ⁿ, 1] near 1.

    Each is the one that errs least on the interval that those before it have left (Amsel et al. 2025, "The Polar
    Express"), so three do what five equal ones do.
    """
    quintics, low, high = [], REACH**-steps, 1.0
    for _ in range(steps):
        quintic, error = nearest_to_one(low, high)
        quintics.append(quintic)
        low, high = 1 - error, 1 + error
    return quintics


def nearest_to_one(low: float, high: float) -> tuple[Quintic, float]:
    """The odd quintic whose largest distance from 1 on [low, high] is least, and that distance (Remez 1934).

    It errs as much, in turn above and below, at both ends and at the two places between where it turns.
    """
    turns, solution = low + (high - low) * np.array([0.25, 0.75]), np.zeros(4)
    for _ in range(30):
        points = np.array([low, *turns, high])
        solution = np.linalg.solve(np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        a, b, c, _ = solution
        turns = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))
    a, b, c, error = solution.tolist()
    return (a, b, c), error


class LossScale:
    """A factor on the loss that keeps float16's small gradients from vanishing: halved when they overflow.

    One for all optimizers: an update is made by all of them or by none.
    """

    GROWTH_INTERVAL = 2000  # updates without overflow until it is doubled
    LEAST = 1.0  # gradients that overflow even so are no matter of scale

    def __init__(self, *, enabled: bool) -> None:
        self.value, self.good_updates = (2.0**16 if enabled else 1.0), 0
        self.enabled = enabled

    def adapt(self, *, overflowed: bool) -> None:
        """Take note of how an update went."""
        if not self.enabled:
            return
        self.good_updates = 0 if overflowed else self.good_updates + 1
        if overflowed:
            self.value /= 2
        elif self.good_updates % self.GROWTH_INTERVAL == 0:
            self.value *= 2


class Optimizers:
    """The optimizers of one model, stepped together; their state has names and can be saved as plain tensors."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, loss_scaling: bool = False, world: World = ALONE
    ) -> None:
        """``loss_scaling``: for float16, whose small gradients would vanish; ``world``: who else trains this model."""
        adam: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
        named = dict(model.named_parameters())
        if config.name == "muon":
            matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
            by_shape: dict[torch.Size, dict[str, nn.Parameter]] = {}
            for name, matrix in matrices.items():
                by_shape.setdefault(matrix.shape, {})[name] = matrix
            stacks = [Bundle(same, matrices=True) for same in by_shape.values()]
            rest = Bundle({name: p for name, p in named.items() if name not in matrices})
            group = {"params": [rest.whole], "weight_decay": 0.0, "lr": config.adam_lr}
            self.bundles = [*stacks, rest]
            self.all = [Muon([stack.whole for stack in stacks], config, world), AdamW([group], **adam)]
        else:
            decayed = Bundle({name: p for name, p in named.items() if p.ndim == 2})
            groups = [{"params": [decayed.whole], "weight_decay": config.weight_decay}]
            self.bundles = [decayed]
            vectors = {name: p for name, p in named.items() if p.ndim != 2}
            if vectors:
                self.bundles.append(Bundle(vectors))
                groups.append({"params": [self.bundles[-1].whole], "weight_decay": 0.0})
            self.all = [AdamW(groups, lr=config.lr, **adam)]
        self.world = world
        self.scale, self.skip = LossScale(enabled=loss_scaling), False
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.all]

    @property
    def rate(self) -> float:
        """The main learning rate as last set."""
        return self.all[0].param_groups[0]["lr"]

    def set_rate(self, factor: float) -> None:
        """Give every group its peak rate times ``factor``."""
        for optimizer, peaks in zip(self.all, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` (scaled, in float16)."""
        (loss * self.scale.value if self.scale.enabled else loss).backward()

    def clip(self, largest: float) -> float:
        """Sum the gradient over all processes and shorten it to the norm ``largest`` (0: leave it).

        Returns the norm it had.
        """
        for bundle in self.bundles:
            gradient = bundle.gather_gradients()
            if gradient is not None:
                self.world.sum(gradient)
                if self.scale.enabled:
                    gradient.div_(self.scale.value)
        gradients = [bundle.whole.grad for bundle in self.bundles if bundle.whole.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        if 0 < largest < norm:  # torch's clip_grad_norm_ would multiply by 1 otherwise
            for gradient in gradients:
                gradient.mul_(largest / (norm + 1e-6))
        self.skip = not math.isfinite(norm)
        return norm

    def can_step(self, gradient_norm: float) -> bool:
        """Whether the gradient is finite, or too large for float16 at this scale: then the next is scaled less."""
        return math.isfinite(gradient_norm) or (self.scale.enabled and self.scale.value > LossScale.LEAST)

    def step(self) -> None:
        """Move the weights, unless the gradient was not finite, and drop the gradients."""
        for optimizer in self.all:
            if not self.skip:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.scale.adapt(overflowed=self.skip)

    def state(self) -> dict[str, Tensor]:
        """``{"blocks.0.attn.query_linear.weight.momentum": tensor, ...}``: all that the next step depends on."""
        tensors: dict[str, Tensor] = {}
        if self.scale.enabled:
            tensors["loss_scale"] = torch.tensor([self.scale.value, self.scale.good_updates], dtype=torch.float64)
        for bundle, state in self._states():
            for key, value in state.items():
                tensors |= {f"{name}.{key}": piece for name, piece in bundle.pieces(value).items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``state`` gave; exact to the bit.

        Parameters that move together and did not all have the same kind of state begin anew: another optimizer's.
        """
        for bundle, state in self._states():
            keys = ("momentum",) if bundle.whole.ndim > 1 else ("exp_avg", "exp_avg_sq", "step")
            saved = {key: [tensors.get(f"{name}.{key}") for name in bundle.names] for key in keys}
            pieces = {key: [part for part in parts if part is not None] for key, parts in saved.items()}
            if all(len(parts) == len(bundle.names) for parts in pieces.values()):
                state.update({key: bundle.joined(parts) for key, parts in pieces.items()})
        if self.scale.enabled and "loss_scale" in tensors:
            value, good_updates = tensors["loss_scale"].tolist()
            self.scale.value, self.scale.good_updates = value, int(good_updates)

    def _states(self) -> list[tuple[Bundle, dict[str, Tensor]]]:
        owners = {whole: owner for owner in self.all for group in owner.param_groups for whole in group["params"]}
        return [(bundle, owners[bundle.whole].state[bundle.whole]) for bundle in self.bundles]
