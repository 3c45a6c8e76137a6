"""The loss: the same in one pass or many, and in validation the mean over every token, by whatever engine."""

import math

import numpy as np
import pytest
import torch
from tiny_runs import MakeRun
from torch import Tensor

from minigpt.normal_form import from_tensors
from minigpt.plain import PlainEngine
from minigpt.scoring import score
from minigpt.training import UNCOUNTED, evaluate, loss_sum, train_step

# ── accumulation ───────────────────────────────────────────────────────────────────────────────────────────────


def masked_batch(*_arguments: object) -> tuple[Tensor, Tensor]:
    """8 sequences whose counted targets are 16, 15, …, 9: a mean of means would be wrong."""
    draw = torch.Generator().manual_seed(4)
    inputs, targets = (torch.randint(1, 20, (8, 16), generator=draw) for _ in range(2))
    for row in range(8):
        targets[row, :row] = UNCOUNTED
    targets[3] = UNCOUNTED
    return inputs, targets


@pytest.mark.parametrize("masked", [False, True], ids=["all counted", "masked"])
def test_accumulated_gradients_are_the_whole_batchs(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    if masked:
        monkeypatch.setattr("minigpt.training.next_batch", masked_batch)

    def gradients(passes: int) -> tuple[dict[str, Tensor], float, float]:
        run = make_run(train={"batch_size": 8, "grad_accumulation": passes}, optim={"grad_clip": 0.0})
        draw = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in run.model.parameters():  # the head starts at zero, and would stop all gradients
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
        found: dict[str, Tensor] = {}
        monkeypatch.setattr(
            run.optimizers,
            "step",
            lambda: found.update({n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}),
        )
        norm = train_step(run)
        return found, run.progress.train_loss, norm

    whole, loss, norm = gradients(1)
    assert norm > 0.1
    for passes in (2, 4, 8):
        parts, same_loss, same_norm = gradients(passes)
        assert same_loss == pytest.approx(loss, rel=1e-6)
        assert same_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in whole.items():
            assert (parts[name] - gradient).norm() <= 1e-6 * gradient.norm(), (name, passes)


def test_targets_that_do_not_count_change_nothing() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, UNCOUNTED, 4], [UNCOUNTED, UNCOUNTED, 0]])
    log_p = logits.log_softmax(-1)
    by_hand = -(log_p[0, 0, 1] + log_p[0, 2, 4] + log_p[1, 2, 0])
    torch.testing.assert_close(loss_sum(logits, targets), by_hand)


# ── evaluation ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [2, 16, 17, 33, 120])
def test_evaluation_is_the_mean_over_every_token(
    make_run: MakeRun, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window, whole windows, and a short last one; by torch's loop, by hand, and by the NumPy engine."""
    monkeypatch.setattr("minigpt.training.EVALUATION_TOKENS", 48)  # several passes
    run = make_run(model={"dropout": 0.5})
    for _ in range(3):
        train_step(run)
    tokens = run.corpus.val[:length]
    result = evaluate(run.model, tokens, run.config, run.corpus.tokenizer.byte_lengths)
    assert run.model.training, "the model is left as it was"

    run.model.eval()
    total = 0.0
    for place in range(1, length):
        window = tokens[(place - 1) // 16 * 16 : place]
        log_p = run.model(torch.from_numpy(window.astype(np.int64))[None])[0, -1].log_softmax(-1)
        total -= log_p[int(tokens[place])].item()
    text = run.corpus.tokenizer.decode(tokens[1:].tolist())
    assert (result.n_token, result.n_byte) == (length - 1, len(text.encode()))
    assert result.loss == pytest.approx(total / (length - 1), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)

    arrays = {name: tensor.numpy() for name, tensor in run.model.state_dict().items()}
    scores = score(PlainEngine(from_tensors(arrays, run.config.model)), tokens)
    assert -scores.log_probability.mean() == pytest.approx(result.loss, rel=1e-5)
