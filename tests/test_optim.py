"""Schedules at their corners, Muon's orthogonal updates, and state that comes back exact."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from running import ROOT
from torch import nn

from minigpt.config import OptimConfig
from minigpt.optim import (
    REACH,
    AdamW,
    Bundle,
    Muon,
    Optimizers,
    learning_rate_factor,
    nearest_to_one,
    orthogonalise,
    polar_quintics,
)


def test_linear_schedule_corners() -> None:
    config = OptimConfig(schedule="linear", warmup_steps=4)
    factors = [learning_rate_factor(step, 10, config) for step in range(11)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0])


def test_cosine_schedule_corners() -> None:
    config = OptimConfig(schedule="cosine", min_lr_fraction=0.1)
    assert learning_rate_factor(0, 100, config) == 1.0
    assert learning_rate_factor(50, 100, config) == pytest.approx(0.55)
    assert learning_rate_factor(100, 100, config) == pytest.approx(0.1)
    assert learning_rate_factor(500, 100, config) == pytest.approx(0.1)


def test_constant_schedule_and_a_warm_up_longer_than_the_run() -> None:
    assert learning_rate_factor(99, 100, OptimConfig(schedule="constant")) == 1.0
    assert learning_rate_factor(4, 5, OptimConfig(warmup_steps=9)) == 0.5


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 4), (1, 4, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    left, values, right = torch.linalg.svd(orthogonalise(matrices, polar_quintics(3)), full_matrices=False)
    assert ((values > 0.6) & (values < 1.3)).all()
    exact_left, _, exact_right = torch.linalg.svd(matrices, full_matrices=False)
    cosine = ((left @ right) * (exact_left @ exact_right)).sum((-2, -1)) / min(shape[1:])
    assert (cosine > 0.99).all()


@pytest.mark.parametrize(("low", "high"), [(0.01, 1.0), (0.3, 1.7), (0.9, 1.1)])
def test_no_odd_quintic_is_nearer_to_one(low: float, high: float) -> None:
    """It errs equally at four places, in turn above and below: Chebyshev's mark of the best."""
    (a, b, c), error = nearest_to_one(low, high)
    at = np.linspace(low, high, 20_001)
    errs = 1 - (a * at + b * at**3 + c * at**5)
    assert np.abs(errs).max() == pytest.approx(error, rel=1e-6)
    extreme = np.sign(errs[np.abs(errs) > error * (1 - 1e-4)])
    assert np.count_nonzero(np.diff(extreme)) == 3
    assert (np.sign(errs[0]), np.sign(errs[-1])) == (1, -1)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_quintics_together_bring_small_singular_values_near_one(steps: int) -> None:
    values = np.geomspace(REACH**-steps, 1, 1000)
    for a, b, c in polar_quintics(steps):
        values = a * values + b * values**3 + c * values**5
    assert np.abs(1 - values).max() < 0.32


def test_muon_follows_its_formula_one_matrix_at_a_time() -> None:
    """Stacking matrices of one shape changes nothing against treating each alone."""
    torch.manual_seed(1)
    config = OptimConfig(lr=0.1, momentum=0.9, weight_decay=0.5, ns_steps=3)
    together = nn.Parameter(torch.randn(3, 6, 4))
    alone = [nn.Parameter(matrix.detach()[None].clone()) for matrix in together]
    optimizers = [Muon([together], config), *(Muon([matrix], config) for matrix in alone)]
    momentum, by_hand = torch.zeros(3, 6, 4), together.detach().clone()
    for _ in range(3):
        gradients = torch.randn(3, 6, 4)
        together.grad = gradients.clone()
        for matrix, gradient in zip(alone, gradients, strict=True):
            matrix.grad = gradient[None].clone()
        for optimizer in optimizers:
            optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradients
        update = orthogonalise(0.1 * gradients + 0.9 * momentum, polar_quintics(3)) * (6 / 4) ** 0.5
        by_hand = by_hand * (1 - 0.1 * 0.5) - 0.1 * update
    torch.testing.assert_close(together.detach(), torch.cat([matrix.detach() for matrix in alone]))
    torch.testing.assert_close(together.detach(), by_hand)


def test_adamw_is_torchs_own_to_the_bit() -> None:
    torch.manual_seed(3)
    ours = nn.Parameter(torch.randn(40))
    theirs = nn.Parameter(ours.detach().clone())
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "fused": True}
    optimizers = {ours: AdamW([ours], **settings), theirs: torch.optim.AdamW([theirs], **settings)}
    for gradient in torch.randn(4, 40):
        for parameter, optimizer in optimizers.items():
            parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(ours, theirs)


def test_optimizers_do_not_load_the_compiler() -> None:
    script = (
        "import sys; from torch import nn\n"
        "from minigpt.config import OptimConfig; from minigpt.optim import Optimizers\n"
        "layer = nn.ModuleDict({'blocks': nn.Linear(3, 2)}); optimizers = Optimizers(layer, OptimConfig(name='muon'))\n"
        "optimizers.backward(layer['blocks'].weight.sum() + layer['blocks'].bias.sum()); optimizers.clip(1.0)\n"
        "optimizers.step(); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_a_bundle_shares_memory_with_its_parts() -> None:
    """What the optimizer does to the whole is done to the model, and weights loaded into the model reach the whole."""
    model = TwoParts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bundle = Bundle(dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        bundle.whole.mul_(2)
    assert all(torch.equal(value, 2 * before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    assert all(torch.equal(piece, before[name]) for name, piece in bundle.pieces(bundle.whole).items())
    assert torch.equal(bundle.joined(list(bundle.pieces(bundle.whole).values())), bundle.whole)


def test_a_number_of_a_saved_state_goes_where_its_parameters_are() -> None:
    """AdamW's count of steps is read from a file into main memory; a GPU's fused kernel wants it on the GPU."""
    bundle = Bundle({"weight": nn.Parameter(torch.zeros(2, device="meta"))})
    assert bundle.joined([torch.tensor(3.0)]).device == torch.device("meta")
    count = torch.tensor(3.0)
    assert Bundle({"weight": nn.Parameter(torch.zeros(2))}).joined([count]).data_ptr() != count.data_ptr()


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def steps(model: TwoParts, optimizers: Optimizers, count: int) -> None:
    for _ in range(count):
        optimizers.backward(model(torch.arange(5)).square().sum())
        optimizers.clip(1.0)
        optimizers.step()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_state_comes_back_to_the_bit(name: str) -> None:
    torch.manual_seed(2)
    config = OptimConfig(name=name, lr=0.05)  # type: ignore[arg-type]
    model = TwoParts()
    optimizers = Optimizers(model, config)
    steps(model, optimizers, 3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value.clone() for key, value in optimizers.state().items()}
    steps(model, optimizers, 3)

    again = TwoParts()
    again.load_state_dict(weights)
    resumed = Optimizers(again, config)
    resumed.load_state(state)
    steps(again, resumed, 3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    for key, value in optimizers.state().items():
        assert torch.equal(value, resumed.state()[key]), key


def test_muon_takes_block_matrices_alone() -> None:
    optimizers = Optimizers(TwoParts(), OptimConfig(lr=0.02, adam_lr=0.006))
    muon, adam = optimizers.all
    assert isinstance(muon, Muon)
    assert [bundle.names for bundle in optimizers.bundles] == [
        ["blocks.0.weight", "blocks.1.weight"],
        ["token_embedding.weight", "blocks.0.bias", "blocks.1.bias"],
    ]
    assert isinstance(adam, torch.optim.AdamW)
    optimizers.set_rate(0.5)
    assert optimizers.rate == 0.01
    assert adam.param_groups[0]["lr"] == 0.003


def test_a_gradient_that_overflows_moves_nothing_and_halves_the_scale() -> None:
    """Infinite in one matrix alone: neither optimizer steps, whichever of them has it."""
    for name in ("token_embedding.weight", "blocks.0.weight"):
        model = TwoParts()
        optimizers = Optimizers(model, OptimConfig(), loss_scaling=True)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        optimizers.backward(model(torch.arange(5)).square().sum())
        dict(model.named_parameters())[name].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
        norm = optimizers.clip(1.0)
        assert not math.isfinite(norm) and optimizers.can_step(norm)
        optimizers.step()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert optimizers.scale.value == 2**15
        resumed = Optimizers(TwoParts(), OptimConfig(), loss_scaling=True)
        resumed.load_state(optimizers.state())
        assert resumed.scale.value == 2**15
    for _ in range(15):
        optimizers.scale.adapt(overflowed=True)
    assert not optimizers.can_step(math.inf), "at a scale of 1 it is no matter of scale"


def test_the_scale_changes_no_update() -> None:
    """A power of two, taken out of the gradients again; doubled after 2,000 updates without overflow."""
    models = TwoParts(), TwoParts()
    models[1].load_state_dict(models[0].state_dict())
    scaled = False, True
    both = [Optimizers(m, OptimConfig(), loss_scaling=s) for m, s in zip(models, scaled, strict=True)]
    for model, optimizers in zip(models, both, strict=True):
        steps(model, optimizers, 3)
    for key, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[key])
    for _ in range(2000 - 3):
        both[1].scale.adapt(overflowed=False)
    assert [optimizers.scale.value for optimizers in both] == [1, 2**17]


def test_a_parameter_without_a_gradient_is_left_as_it_is() -> None:
    model = TwoParts()
    block = model.blocks[0].requires_grad_(False)
    assert isinstance(block, nn.Linear)
    frozen = block.weight.clone()
    optimizers = Optimizers(model, OptimConfig(name="adamw", lr=0.1, weight_decay=0.0))
    steps(model, optimizers, 2)
    assert torch.equal(block.weight, frozen)


def test_clip_tells_the_norm_it_found() -> None:
    model = TwoParts()
    optimizers = Optimizers(model, OptimConfig())
    optimizers.backward(model(torch.arange(5)).square().sum())
    norm = optimizers.clip(0.0)
    assert norm > 1
    assert optimizers.clip(0.5) == pytest.approx(norm)
    assert optimizers.clip(0.0) == pytest.approx(0.5)
    assert optimizers.can_step(norm)
    assert not optimizers.can_step(float("nan"))


@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_another_optimizer_takes_what_fits_of_a_state(before: str, after: str) -> None:
    """``--resume RUN --optim.name adamw``: parameters that move together go on together, or begin anew together."""
    model = TwoParts()
    old = Optimizers(model, OptimConfig(name=before))  # type: ignore[arg-type]
    steps(model, old, 2)
    new = Optimizers(model, OptimConfig(name=after))  # type: ignore[arg-type]
    new.load_state(old.state())
    steps(model, new, 2)
    keys = {name.rsplit(".", 1)[1] for name in new.state() if name.startswith("blocks.0.weight.")}
    assert keys == ({"momentum"} if after == "muon" else {"exp_avg", "exp_avg_sq", "step"})
    assert new.state()["blocks.0.bias.step"] == 4
    assert new.state()["token_embedding.weight.step"] == (4 if after == "muon" else 2)
