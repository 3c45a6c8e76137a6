"""Numbers on maps: by their definitions, at their ends, and the same whichever way the maps are stacked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.inspection.compare import Maps, Null, closeness, describe, pooled
from minigpt.inspection.patterns import Pattern, links_reference, parse_reference


def random_maps(*shape: int, seed: int = 0, dtype: type = np.float64) -> Maps:
    """Causal maps (*shape, T, T), T the last of the shape, from peaked to flat."""
    *heads, length = shape
    scores = np.random.default_rng(seed).normal(scale=3, size=(*heads, length, length))
    weights = np.exp(scores) * np.tri(length)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(dtype)


def pattern_of(name: str, length: int, seed: int = 0) -> Pattern:
    return parse_reference(name, None).pattern(np.random.default_rng(seed).integers(0, 4, length))


def uniform_maps(length: int) -> Maps:
    return np.tri(length) / np.arange(1, length + 1)[:, None]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["uniform", "previous", "window:3", "duplicate", "induction"]),
    length=st.integers(2, 12),
    seed=st.integers(0, 99),
)
def test_closeness_is_its_definition(name: str, length: int, seed: int) -> None:
    """Against the formulas written out on whole rows."""
    maps, pattern = random_maps(2, 3, length, seed=seed), pattern_of(name, length, seed)
    found = closeness(maps, pattern)
    if not pattern.defined.any():
        assert found.rows == 0 and found.coverage == 0 and np.isnan(found.total_variation).all()
        return
    a, p = maps[..., pattern.defined, :], pattern.weights[pattern.defined].astype(np.float64)
    m = (a + p) / 2

    def divergence(left: Maps, right: Maps) -> Maps:
        safe = np.where(left > 0, left, 1)
        return np.where(left > 0, left * np.log(safe / np.where(left > 0, right, 1)), 0).sum(axis=-1)

    expected = {
        "total_variation": np.abs(a - p).sum(axis=-1) / 2,
        "jensen_shannon": (divergence(a, m) + divergence(np.broadcast_to(p, a.shape), m)) / (2 * np.log(2)),
        "kl": divergence(np.broadcast_to(p, a.shape), a),
        "mass": (a * (p > 0)).sum(axis=-1),
        "argmax": np.take_along_axis(np.broadcast_to(p, a.shape), a.argmax(axis=-1)[..., None], -1)[..., 0] > 0,
    }
    for measure, rows in expected.items():
        assert getattr(found, measure) == pytest.approx(rows.mean(axis=-1), abs=1e-6), measure
    assert found.coverage == pattern.defined.sum() / (length - 1)
    base = (uniform_maps(length)[pattern.defined] * (p > 0)).sum(axis=-1).mean()
    assert found.uniform_mass == pytest.approx(base)
    if base < 1 - 1e-9:
        assert found.lift == pytest.approx((found.mass - base) / (1 - base), abs=1e-5)


def test_the_ends_of_the_scales() -> None:
    length, previous = 8, pattern_of("previous", 8)
    elsewhere = closeness(np.eye(length), previous)
    assert (elsewhere.total_variation, elsewhere.jensen_shannon, elsewhere.mass, elsewhere.argmax) == (1, 1, 0, 0)
    assert np.isinf(elsewhere.kl), "no weight at all where the pattern has some"
    uniform = closeness(uniform_maps(length), previous)
    assert uniform.lift == pytest.approx(0, abs=1e-12)
    assert uniform.mass == pytest.approx(uniform.uniform_mass) == pytest.approx(0.245, abs=5e-4)


def test_rows_that_are_not_defined_do_not_count() -> None:
    """Nonsense in the other rows changes nothing."""
    maps, pattern = random_maps(3, 9), pattern_of("induction", 9)
    assert 0 < pattern.defined.sum() < 8
    other = np.where(pattern.defined[:, None], maps, random_maps(3, 9, seed=5))
    for measure in ("total_variation", "jensen_shannon", "kl", "mass", "argmax", "lift"):
        assert getattr(closeness(maps, pattern), measure) == pytest.approx(getattr(closeness(other, pattern), measure))


def test_maps_that_see_the_future_are_compared_too() -> None:
    """A third of each row on a later token is a third elsewhere."""
    length = 6
    maps = np.eye(length, k=-1) * 2 / 3 + np.eye(length, k=1) / 3
    maps[-1, 0] += 1 / 3  # the last row has none later
    found = closeness(maps, pattern_of("previous", length))
    assert found.mass == pytest.approx(2 / 3) and found.total_variation == pytest.approx(1 / 3)


def test_texts_count_by_their_rows() -> None:
    """Two texts pooled are all of their rows; one without a row counts nothing."""
    maps = random_maps(2, 4, 7)
    one, many, none = (
        links_reference(links).pattern(np.arange(7)) for links in ([(3, [1])], [(2, [1]), (4, [2]), (6, [6])], [])
    )
    whole = pooled([closeness(maps[0], one), closeness(maps[1], many), closeness(maps[0], none)])
    assert whole.rows == 4 and whole.all_rows == 18 and whole.coverage == 4 / 18
    rows = np.stack([maps[0, :, 3, 1], maps[1, :, 2, 1], maps[1, :, 4, 2], maps[1, :, 6, 6]])
    assert whole.mass == pytest.approx(rows.mean(axis=0))
    assert whole.uniform_mass == pytest.approx((1 / 4 + 1 / 3 + 1 / 5 + 1 / 7) / 4)
    assert whole.lift == pytest.approx((whole.mass - whole.uniform_mass) / (1 - whole.uniform_mass))
    nothing = pooled([closeness(maps[0], none)] * 2)
    assert nothing.rows == 0 and np.isnan(nothing.mass).all() and np.isnan(nothing.lift).all()
    assert nothing.mass.shape == (4,)


@pytest.mark.parametrize("length", [2, 3, 8, 64, 256])
def test_uniform_attention_has_entropy_one(length: int) -> None:
    found = describe(uniform_maps(length).astype(np.float32)[None, None])
    assert found.normalised_entropy == pytest.approx([1], abs=1e-6)
    assert found.mean_distance == pytest.approx([(length - 1) / 4], rel=1e-5)
    assert found.effective_keys == pytest.approx([np.arange(2, length + 1).mean()], rel=1e-5)
    assert found.first_token_mass == pytest.approx([(1 / np.arange(2, length + 1)).mean()], rel=1e-5)


def test_descriptions_by_hand() -> None:
    """Three rows: all on key 0; halves; a quarter, a quarter and a half."""
    maps = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])[None]
    found = describe(maps)
    entropies = np.array([np.log(2), 1.5 * np.log(2)])
    assert found.normalised_entropy == pytest.approx((1 + entropies[1] / np.log(3)) / 2)
    assert found.effective_keys == pytest.approx(np.exp(entropies).mean())
    assert found.mean_distance == pytest.approx((0 + 0.5 + 0.75) / 3)
    assert found.first_token_mass == pytest.approx((0.5 + 0.25) / 2)
    assert np.isnan(found.positional_share), "one text can't tell"
    one_hot = describe(np.eye(5, k=0)[None])
    assert (one_hot.normalised_entropy, one_hot.effective_keys, one_hot.mean_distance) == (0, 1, 0)


def test_all_keys_count_where_maps_are_not_causal() -> None:
    found = describe(np.full((1, 4, 4), 0.25), causal=False)
    assert found.normalised_entropy == pytest.approx(1) and found.effective_keys == pytest.approx(4)
    assert found.mean_distance == pytest.approx(np.abs(np.subtract.outer(range(4), range(4))).mean())


def test_positional_share() -> None:
    """1 for the same map on all texts, 1/N when each text's keys are its own."""
    same = np.tile(random_maps(1, 6), (4, 1, 1, 1))
    assert describe(same).positional_share == pytest.approx([1])
    apart = np.zeros((3, 1, 3, 3))
    for text in range(3):
        apart[text, 0, :, text] = 1
    assert describe(apart).positional_share == pytest.approx([1 / 3])
    mixed = random_maps(5, 2, 6)
    mean = mixed.mean(axis=0)
    variability = np.abs(mixed - mean).sum(axis=(0, -2, -1)) / (2 * mixed.sum(axis=(0, -2, -1)))
    assert describe(mixed).positional_share == pytest.approx(1 - variability)


def test_heads_are_independent_of_each_other_and_float32_is_enough() -> None:
    maps, pattern = random_maps(3, 2, 40), pattern_of("induction", 40)
    together = closeness(maps.astype(np.float32), pattern)
    for layer in range(3):
        for head in range(2):
            alone = closeness(maps[layer, head], pattern)
            for measure in ("total_variation", "jensen_shannon", "kl", "mass", "argmax", "lift"):
                assert getattr(together, measure)[layer, head] == pytest.approx(getattr(alone, measure), rel=2e-6)


def test_maps_are_not_written_to() -> None:
    maps = random_maps(2, 2, 10)
    before = maps.copy()
    closeness(maps, pattern_of("duplicate", 10))
    describe(maps)
    assert np.array_equal(maps, before)


def test_percentiles_of_a_null() -> None:
    null = Null(np.linspace(0.5, 0.995, 100))
    assert null.percentile(np.array([0.2, 0.5, 0.7474, 2.0])).tolist() == [0, 1, 50, 100]
    assert null.first_percentile == pytest.approx(np.percentile(null.total_variation, 1))
