"""Random and hostile input: what is read gives a result or one sentence. ``stress fuzz`` tries far more of it."""

from collections.abc import Callable

import pytest

from minigpt.studies.fuzzing import SURFACES, fuzz

EACH = 50


@pytest.mark.parametrize("name", SURFACES)
def test_no_input_ends_in_a_traceback(name: str, record_property: Callable[[str, object], None]) -> None:
    tally = fuzz(name, EACH)
    record_property("tried", tally.tried)
    assert tally.tried >= EACH + len(SURFACES[name].found)
    assert 0 < tally.refused < tally.tried, "some is refused, some is read"
