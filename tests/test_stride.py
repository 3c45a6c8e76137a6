"""Perplexity over windows that overlap, held against the guide's loop written out with the plain decoder."""

import math

import numpy as np
import pytest
from running import EVALUATE, Script, Trained
from tiny_runs import told

from minigpt import plain
from minigpt.checkpoint import find_checkpoint
from minigpt.normal_form import Array, NormalForm, from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.scoring import guide_perplexity, score, score_sliding
from minigpt.tokenizer import tokenizer_from_dict


def by_the_guide(model: NormalForm, tokens: Array, stride: int) -> tuple[float, float, int]:
    """Perplexity, that by the guide's own weights of windows, and tokens predicted."""
    total, weighted, count, weight, previous_end = 0.0, 0.0, 0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + model.context_length, len(tokens))
        target_length = end - previous_end
        logits = plain.forward(model, tokens[begin:end])
        losses = [-math.log(plain.softmax(logits[at - 1])[tokens[begin + at]]) for at in range(1, end - begin)]
        losses = losses[-target_length:]  # labels before are −100; the first of a window has no logits
        total, count = total + sum(losses), count + len(losses)
        if losses:  # the mean is weighted by one less than there are labels
            weighted += float(np.mean(losses)) * (target_length - 1)
            weight += target_length - 1
        previous_end = end
        if end == len(tokens):
            break
    return math.exp(total / count), math.exp(weighted / max(weight, 1)), count


@pytest.fixture(scope="module")
def model(trained: Trained) -> NormalForm:
    return from_checkpoint(find_checkpoint(trained.path))


@pytest.fixture(scope="module")
def tokens(trained: Trained) -> Array:
    text = trained.text.read_text(encoding="utf-8")[:700]
    return tokenizer_from_dict(find_checkpoint(trained.path).tokenizer).encode(text)


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 33, 700])
def test_it_is_the_guides_perplexity(model: NormalForm, tokens: Array, stride: int, length: int) -> None:
    expected, _, count = by_the_guide(model, tokens[:length], stride)
    scores = score_sliding(PlainEngine(model), tokens[:length], stride)
    assert math.exp(-scores.log_probability.mean()) == pytest.approx(expected, rel=1e-5)
    assert len(scores.token) == count
    if stride < 16:
        np.testing.assert_array_equal(scores.token, tokens[1:length])


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("length", [2, 16, 17, 33, 700])
def test_to_the_digits_of_the_guides_code(model: NormalForm, tokens: Array, stride: int, length: int) -> None:
    _, weighted, _ = by_the_guide(model, tokens[:length], stride)
    scores = score_sliding(PlainEngine(model), tokens[:length], stride)
    assert guide_perplexity(scores, 16, stride) == pytest.approx(weighted, rel=1e-5)


def test_a_stride_of_the_context_leaves_out_what_begins_a_window(model: NormalForm, tokens: Array) -> None:
    engine = PlainEngine(model)
    apart, sliding = score(engine, tokens), score_sliding(engine, tokens, 16)
    kept = np.arange(1, len(tokens)) % 16 != 0
    np.testing.assert_array_equal(sliding.token, apart.token[kept])
    np.testing.assert_allclose(sliding.log_probability, apart.log_probability[kept], atol=1e-5)
    np.testing.assert_array_equal(sliding.rank, apart.rank[kept])


def test_a_stride_of_one_gives_every_token_all_that_fits(model: NormalForm, tokens: Array) -> None:
    scores = score_sliding(PlainEngine(model), tokens[:40], 1)
    for place in (1, 15, 16, 39):
        logits = plain.forward(model, tokens[max(0, place - 15) : place])[-1]
        expected = math.log(plain.softmax(logits)[tokens[place]])
        assert scores.log_probability[place - 1] == pytest.approx(expected, rel=1e-4)


def test_the_script(trained: Trained, script: Script, model: NormalForm, tokens: Array) -> None:
    text = tokenizer_from_dict(find_checkpoint(trained.path).tokenizer).decode(tokens[:100].tolist())
    asked = (EVALUATE, trained.path, "--stride", 4, "--text", text.replace("\n", "\\n"))
    found = script(*asked, "--json").json
    assert (found["stride"], found["window"], found["tokens"]) == (4, 16, 99)
    assert found["perplexity"] == pytest.approx(by_the_guide(model, tokens[:100], 4)[0], rel=1e-5)
    written = script(*asked).out
    assert ": 99 tokens in windows of 16, one every 4\n" in written
    assert f"perplexity {found['perplexity']:.3f}" in written
    assert "stride" not in script(EVALUATE, trained.path, "--json").json


def test_a_stride_that_would_leave_tokens_out_is_refused(model: NormalForm, tokens: Array) -> None:
    for stride in (-1, 0, 17):
        sentence = told(score_sliding, PlainEngine(model), tokens, stride)
        assert sentence == f"--stride = {stride}: must be at least 1 and at most the context, 16"
