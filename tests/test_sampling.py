"""The sampling law against a slow restatement of it, the generation loop on fake engines, stop strings."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minigpt.errors import UserError
from minigpt.sampling import Array, SamplingOptions, distribution, draw, generate, window_start

GREEDY = SamplingOptions(temperature=0)

# ── options ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", math.nan),
        ("min_p", 1.0), ("min_p", -0.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.nan),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^{name} = {value}: must be "):
        SamplingOptions(**{name: value})  # type: ignore[arg-type]


# ── the law ────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_distribution(logits: list[float], history: set[int], options: SamplingOptions, banned: set[int]) -> Array:
    """The law of sampling, sentence by sentence, on a dictionary id → value."""
    scores = {i: logit for i, logit in enumerate(logits) if i not in banned}
    for i in history & scores.keys():
        penalty = options.repetition_penalty
        scores[i] = scores[i] / penalty if scores[i] > 0 else scores[i] * penalty
    by_score = sorted(scores, key=lambda i: (-scores[i], i))
    if options.temperature == 0:
        return np.array([float(i == by_score[0]) for i in range(len(logits))])
    kept = by_score[: options.top_k or None]
    weights = {i: math.exp((scores[i] - scores[by_score[0]]) / options.temperature) for i in kept}
    total = sum(weights[i] for i in sorted(kept))
    by_probability = sorted(kept, key=lambda i: (-weights[i] / total, i))
    nucleus, mass = [], 0.0
    for i in by_probability:
        if options.top_p < 1 and mass >= options.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    largest = max(weights[i] for i in nucleus)
    final = {i: weights[i] for i in nucleus if weights[i] >= options.min_p * largest}
    return np.array([final.get(i, 0.0) / sum(final.values()) for i in range(len(logits))])


LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12)  # few values: many ties


@settings(max_examples=200, deadline=None)
@given(data=st.data(), logits=LOGITS)
def test_distribution_is_the_law(data: st.DataObject, logits: list[float]) -> None:
    ids = st.sets(st.integers(0, len(logits) - 1))
    history, banned = data.draw(ids), data.draw(ids)
    assume(len(banned) < len(logits))
    options = SamplingOptions(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=data.draw(st.integers(0, 14)),
        top_p=data.draw(st.sampled_from([1.0, 0.9137, 0.6171, 0.2313, 1e-9])),
        min_p=data.draw(st.sampled_from([0.0, 0.0517, 0.4871])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.7])),
    )
    expected = slow_distribution(logits, history, options, banned)
    actual = distribution(np.array(logits, np.float32), history, options, banned)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-15)
    assert not actual[list(banned)].any()


def kept(logits: list[float], **options: float) -> list[int]:
    return np.flatnonzero(distribution(np.array(logits), (), SamplingOptions(**options))).tolist()  # type: ignore[arg-type]


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    assert kept([1, 2, 1, 3, 1], top_k=3) == [0, 1, 3]
    assert kept([1, 2, 1, 3, 1], top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    quarters = [0.0] * 4  # a quarter each, exactly
    assert kept(quarters, temperature=1, top_p=0.5) == [0, 1]
    assert kept(quarters, temperature=1, top_p=0.501) == [0, 1, 2]
    assert kept(quarters, temperature=1, top_p=1e-9) == [0]


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log([0.4, 0.2, 0.15, 0.1, 0.08, 0.07]).tolist()
    assert kept(logits, temperature=1, top_k=3, top_p=0.7) == [0, 1]
    assert kept(logits, temperature=1, top_p=0.7) == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept(np.log([0.5, 0.3, 0.15, 0.05]).tolist(), temperature=1, min_p=0.29) == [0, 1, 2]


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert distribution(np.array([1.0, 5.0, 5.0]), (), GREEDY).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-8, 1e-320])
def test_tiny_temperature_does_not_overflow(temperature: float) -> None:
    options = SamplingOptions(temperature=temperature)
    assert distribution(np.array([-3.0, 80.0, 79.0], np.float32), (), options).tolist() == [0, 1, 0]


def test_repetition_penalty_works_on_both_signs() -> None:
    options = SamplingOptions(temperature=1, repetition_penalty=2)
    expected = np.exp([1.0, -2.0, 1.0])
    np.testing.assert_allclose(distribution(np.array([2.0, -1.0, 1.0]), {0, 1}, options), expected / expected.sum())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    for options in (GREEDY, SamplingOptions()):
        with pytest.raises(UserError, match="logits are not finite"):
            distribution(np.array([0.0, value]), (), options)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(0, 3), min_size=1, max_size=8).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_draw_is_the_inverse_cdf(weights: list[int], uniform: float) -> None:
    probabilities = np.array(weights) / sum(weights)
    token = draw(probabilities, uniform)
    below, above = probabilities[:token].sum(), probabilities[: token + 1].sum()
    assert probabilities[token] > 0
    assert below - 1e-12 <= uniform <= above + 1e-12


def test_draw_at_the_ends() -> None:
    probabilities = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [draw(probabilities, u) for u in (0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0))] == [1, 1, 3, 3]
    assert draw(np.full(10, 0.1), np.nextafter(1, 0)) == 9


# ── generation ─────────────────────────────────────────────────────────────────────────────────────────────────


class TableEngine:
    """A fake: the logits depend on the last token alone, and every call is noted."""

    def __init__(self, table: Array, context_length: int = 8) -> None:
        self.table, self.vocab_size, self.context_length = table, len(table), context_length
        self.calls: list[list[int]] = []

    def new_memory(self) -> list[int]:
        return []

    def logits(self, tokens: Array, memory: list[int]) -> Array:
        self.calls.append(tokens.tolist())
        memory.extend(tokens.tolist())
        assert 0 < len(memory) <= self.context_length
        return self.table[memory[-1]]


def uniform_engine(vocab_size: int = 5) -> TableEngine:
    return TableEngine(np.zeros((vocab_size, vocab_size)))


def count_up() -> TableEngine:
    """Each id is followed by the next, the last by 0."""
    return TableEngine(np.roll(np.eye(5), 1, axis=1))


def test_window_start_in_numbers() -> None:
    assert [window_start(total, 4) for total in range(1, 12)] == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert [window_start(total, 1) for total in range(1, 5)] == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(total=st.integers(1, 400), context_length=st.integers(1, 40))
def test_window_is_cut_to_its_half_only_when_full(total: int, context_length: int) -> None:
    length, after = (n - window_start(n, context_length) for n in (total, total + 1))
    assert 1 <= length <= context_length
    assert after == (max(1, context_length // 2) if length == context_length else length + 1)


def test_generation_is_a_function_of_the_seed() -> None:
    def text(seed: int) -> list[int]:
        options = SamplingOptions(temperature=1)
        return list(generate(uniform_engine(), [1], max_new_tokens=40, options=options, seed=seed, end=None))

    uniforms = np.random.Generator(np.random.PCG64(7)).random(40)
    assert text(7) == [int(uniform * 5) for uniform in uniforms]
    assert text(7) == text(7) != text(9)


def test_greedy_needs_no_seed() -> None:
    texts = [list(generate(count_up(), [1], max_new_tokens=9, options=GREEDY, seed=s, end=None)) for s in (0, 1)]
    assert texts == [[2, 3, 4, 0, 1, 2, 3, 4, 0]] * 2


def test_generation_ends_at_the_end_id_and_starts_from_it() -> None:
    assert list(generate(count_up(), [2], max_new_tokens=9, options=GREEDY)) == [3, 4]
    assert list(generate(count_up(), [], max_new_tokens=9, options=GREEDY)) == [1, 2, 3, 4]
    assert list(generate(count_up(), [2], max_new_tokens=0, options=GREEDY)) == []


def test_a_document_is_never_empty() -> None:
    """A tied head, untrained, finds END likeliest after END: the text begins with the next likeliest all the same."""
    ends_at_once = TableEngine(np.tile([9.0, 1.0, 4.0, 2.0, 3.0], (5, 1)))
    for prompt in ([], [0]):
        assert list(generate(ends_at_once, prompt, max_new_tokens=9, options=GREEDY)) == [2]
    assert list(generate(ends_at_once, [3], max_new_tokens=9, options=GREEDY)) == []
    assert list(generate(ends_at_once, [0], max_new_tokens=2, options=GREEDY, end=None)) == [0, 0]


def test_negative_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed = -3"):
        next(generate(uniform_engine(), [1], max_new_tokens=1, options=GREEDY, seed=-3))


def test_padded_ids_are_never_drawn() -> None:
    options = SamplingOptions(temperature=1)
    ids = generate(uniform_engine(320), [1], max_new_tokens=1000, options=options, end=None, banned=range(257, 320))
    assert max(ids) == 256


def test_penalty_sees_prompt_and_output() -> None:
    options = SamplingOptions(temperature=0, repetition_penalty=1e9)
    engine = TableEngine(np.tile([5.0, 4.0, 3.0, 2.0, 1.0], (5, 1)))
    assert list(generate(engine, [1], max_new_tokens=4, options=options, end=None)) == [0, 2, 3, 4]


def test_each_token_is_read_once_until_the_window_moves() -> None:
    engine = count_up()
    list(generate(engine, [1, 2], max_new_tokens=10, options=GREEDY, end=None))
    assert engine.calls == [[1, 2], [3], [4], [0], [1], [2], [3], [1, 2, 3, 4], [0], [1]]


def test_generation_stops_at_logits_that_are_not_finite() -> None:
    table = count_up().table
    table[3, 0] = np.nan
    ids = generate(TableEngine(table), [1], max_new_tokens=9, options=GREEDY)
    assert [next(ids), next(ids)] == [2, 3]
    with pytest.raises(UserError, match="not finite"):
        next(ids)
