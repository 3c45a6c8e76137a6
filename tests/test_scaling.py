"""Why scores are divided by √d: the law, and the formulas it is shown with."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from running import ROOT, Script

from minigpt.inspection.worked.scaling import SIZES, ScalingRow, jacobian_norm, scaling_table, spread
from minigpt.plain import softmax


@pytest.fixture(scope="module")
def rows() -> list[ScalingRow]:
    return scaling_table(seed=3)


def test_spread_of_products_grows_as_the_root_of_d(rows: list[ScalingRow]) -> None:
    assert [row.size for row in rows] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert_allclose([row.raw.deviation / math.sqrt(row.size) for row in rows], 1, rtol=0.05)
    slope, _ = np.polyfit(np.log(SIZES), np.log([row.raw.deviation for row in rows]), 1)
    assert slope == pytest.approx(0.5, abs=0.01)


def test_divided_scores_do_not_know_d(rows: list[ScalingRow]) -> None:
    scaled = [row.scaled for row in rows]
    assert_allclose([one.deviation for one in scaled], 1, rtol=0.05)
    assert_allclose([one.jacobian for one in scaled], scaled[-1].jacobian, rtol=0.05)
    assert_allclose([one.largest_weight for one in scaled], scaled[-1].largest_weight, rtol=0.12)


def test_undivided_softmax_hardens_and_its_jacobian_vanishes(rows: list[ScalingRow]) -> None:
    assert (np.diff([row.raw.largest_weight for row in rows]) > 0).all()
    assert (np.diff([row.raw.jacobian for row in rows]) < 0).all()
    assert rows[-1].raw.largest_weight > 0.95
    assert rows[-1].raw.jacobian < 0.15 * rows[-1].scaled.jacobian


def test_jacobian_norm_is_that_of_the_derivative() -> None:
    scores = np.random.default_rng(0).standard_normal((5, 4)) * 3
    step = 1e-6
    for row in scores:
        columns = [(softmax(row + step * e) - softmax(row - step * e)) / (2 * step) for e in np.eye(4)]
        assert float(jacobian_norm(softmax(row))) == pytest.approx(float(np.linalg.norm(columns)), abs=1e-8)


def test_spread_of_known_scores() -> None:
    uniform = spread(np.zeros((2, 4)))
    assert (uniform.deviation, uniform.largest_weight) == (0, 0.25)
    assert uniform.jacobian == pytest.approx(math.sqrt(3) / 4)  # diag(1/4) - 1/16, by hand: sqrt(4/16 - 1/16)
    assert spread(np.array([[1000.0, 0, 0]])).jacobian == 0


def test_same_seed_same_numbers() -> None:
    assert scaling_table(5, sizes=(4,)) == scaling_table(5, sizes=(4,)) != scaling_table(6, sizes=(4,))


def test_the_part_prints_a_small_table(script: Script) -> None:
    answer = script(ROOT / "scripts" / "compare_attention.py", "scaling", "--seed", 1)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:12]] == [str(size) for size in SIZES]
    assert " ".join(lines[13:]).startswith("Undivided, the scores spread as sqrt(d), to 3")


def test_the_part_as_json(script: Script) -> None:
    path = ROOT / "scripts" / "compare_attention.py"
    answer = script(path, "scaling", "--seed", 1, "--json")
    assert answer.json["rows"][0]["size"] == 2
    assert answer.json["rows"][0]["raw"]["deviation"] == scaling_table(1)[0].raw.deviation
    refused = script(path, "scaling", "--seed", -1)
    assert (refused.code, refused.err) == (2, "error: --seed = -1: must be at least 0\n")
