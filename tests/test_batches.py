"""Batches are a function of (seed, step) alone; evaluation predicts every token once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.corpus import batch, evaluation_batches

LENGTHS = st.tuples(st.integers(2, 400), st.integers(1, 40)).filter(lambda pair: pair[0] > pair[1])


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_an_epoch_has_each_window_once(lengths: tuple[int, int], seed: int, epoch: int) -> None:
    length, context = lengths
    tokens = np.arange(length, dtype=np.uint16)
    n = max(1, (length - context) // context)
    inputs, targets = batch(tokens, seed=seed, step=epoch, batch_size=n, context_length=context)
    assert inputs.shape == targets.shape == (n, context) and inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1), "each target is the next token"
    starts = np.sort(inputs[:, 0])
    assert 0 <= starts[0] < context or n == 1
    assert np.array_equal(starts, starts[0] + context * np.arange(n))
    assert targets.max() < length


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99), size=st.sampled_from([1, 2, 4, 8]), step=st.integers(0, 30))
def test_a_step_is_the_same_however_it_is_asked_for(lengths: tuple[int, int], seed: int, size: int, step: int) -> None:
    length, context = lengths
    tokens = np.arange(length, dtype=np.uint16)
    whole, _ = batch(tokens, seed=seed, step=step, batch_size=8, context_length=context)
    parts = range(8 // size * step, 8 // size * (step + 1))
    smaller = [batch(tokens, seed=seed, step=part, batch_size=size, context_length=context)[0] for part in parts]
    assert np.array_equal(whole, np.concatenate(smaller))


def test_batches_differ_by_seed_and_epoch() -> None:
    tokens = np.arange(1000, dtype=np.uint16)

    def starts(seed: int, step: int) -> list[int]:
        return batch(tokens, seed=seed, step=step, batch_size=99, context_length=10)[0][:, 0].tolist()

    epochs = [starts(1, step) for step in range(8)]
    assert starts(2, 0) != epochs[0] != epochs[1]
    assert len({min(epoch) for epoch in epochs}) > 1, "offsets differ"


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 300), context=st.integers(1, 40), size=st.integers(1, 9))
def test_evaluation_predicts_every_token_but_the_first_once(length: int, context: int, size: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    batches = list(evaluation_batches(tokens, context, size))
    predicted = [target for _, targets in batches for target in targets.ravel().tolist()]
    assert predicted == list(range(1, length))
    for inputs, targets in batches:
        assert np.array_equal(targets, inputs + 1) and inputs.dtype == np.int64
        assert inputs.shape[0] <= size and inputs.shape[1] <= context
        assert inputs.shape[1] == context or inputs.shape[0] == 1
