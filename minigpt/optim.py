"""How weights move: AdamW, Muon, and learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.config import OptimConfig

# Quintic whose iteration sends singular values in (0, 1] near 1 (Jordan et al. 2024, "Muon").
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


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


class Muon(torch.optim.Optimizer):
    """Momentum, then each matrix's update is replaced by the nearest orthogonal one (Jordan et al. 2024).

    Matrices of one shape are orthogonalised together, in float32 throughout.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], config: OptimConfig) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        defaults = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        self.ns_steps = config.ns_steps
        super().__init__([{"params": same} for same in by_shape.values()], defaults)
        for group in self.param_groups:
            stacked = torch.zeros(len(group["params"]), *group["params"][0].shape, device=group["params"][0].device)
            group["stacked"] = stacked
            for matrix, momentum in zip(group["params"], stacked, strict=True):
                self.state[matrix]["momentum"] = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients in ``.grad``."""
        for group in self.param_groups:
            matrices, lr = group["params"], group["lr"]
            gradients = torch.stack([matrix.grad for matrix in matrices]).float()
            momentum = group["stacked"].lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp_(momentum, group["momentum"]), self.ns_steps)  # Nesterov's look ahead
            rows, columns = matrices[0].shape
            update.mul_(-lr * max(1.0, rows / columns) ** 0.5)
            for matrix, change in zip(matrices, update, strict=True):
                matrix.mul_(1 - lr * group["weight_decay"]).add_(change)


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """(n, R, C) → about U Vᵀ of each matrix's singular value decomposition, by Newton–Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizers:
    """The optimizers of one model, stepped together; their state has names and can be saved as plain tensors."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, loss_scaling: bool = False) -> None:
        """``loss_scaling``: for float16, whose small gradients would vanish."""
        named = dict(model.named_parameters())
        self.names: dict[Any, str] = {parameter: name for name, parameter in named.items()}
        matrices = [p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")]
        others = [p for name, p in named.items() if p.ndim != 2 or not name.startswith("blocks.")]
        adam: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
        if config.name == "muon":
            rest = [{"params": others, "weight_decay": 0.0, "lr": config.adam_lr}]
            self.all = [Muon(matrices, config), torch.optim.AdamW(rest, **adam)]
        else:
            decayed = {"params": [p for p in self.names if p.ndim == 2], "weight_decay": config.weight_decay}
            plain = {"params": [p for p in self.names if p.ndim != 2], "weight_decay": 0.0}
            groups = [group for group in (decayed, plain) if group["params"]]
            self.all = [torch.optim.AdamW(groups, lr=config.lr, **adam)]
        self.scaler = torch.amp.GradScaler(enabled=loss_scaling)
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
        """Add the gradients of ``loss`` (scaled first, in float16)."""
        self.scaler.scale(loss).backward()

    def clip(self, largest: float) -> float:
        """Shorten the gradient to the norm ``largest`` (0: leave it); returns the norm it had."""
        for optimizer in self.all:
            self.scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(list(self.names), largest or math.inf).item()

    def can_step(self, gradient_norm: float) -> bool:
        """Whether the gradient is finite, or float16's scaler will skip this update and scale less."""
        return math.isfinite(gradient_norm) or self.scaler.is_enabled()

    def step(self) -> None:
        """Move the weights and drop the gradients."""
        for optimizer in self.all:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()

    def state(self) -> dict[str, Tensor]:
        """``{"blocks.0.attn.query_linear.weight.momentum": tensor, ...}``: all that the next step depends on."""
        tensors = {f"scaler.{key}": torch.tensor(value) for key, value in self.scaler.state_dict().items()}
        for optimizer in self.all:
            for parameter, values in optimizer.state.items():
                tensors |= {f"{self.names[parameter]}.{key}": value for key, value in values.items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``state`` gave; exact to the bit. What another kind of optimizer kept is passed over."""
        for optimizer in self.all:
            keys = ("momentum",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq", "step")
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state[parameter]
                for key in keys:
                    saved = tensors.get(f"{self.names[parameter]}.{key}")
                    if saved is not None and key in state:
                        state[key].copy_(saved)  # Muon's momenta are slices of one stack
                    elif saved is not None:
                        state[key] = saved.clone().to(parameter.device)
        scaler = {key.removeprefix("scaler."): v.item() for key, v in tensors.items() if key.startswith("scaler.")}
        if scaler:
            self.scaler.load_state_dict(scaler)
