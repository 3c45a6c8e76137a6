"""Work in several threads: the results of one, in order, and an end without waiting when something goes wrong."""

from collections.abc import Iterator
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.threads import in_threads


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), max_size=60), enough=st.integers(1, 40))
def test_results_are_those_of_one_thread_in_order(sizes: list[int], enough: int) -> None:
    numbered = list(enumerate(sizes))
    results = in_threads(lambda pair: (pair, sum(range(pair[1]))), numbered, size=lambda pair: pair[1], enough=enough)
    assert list(results) == [(pair, sum(range(pair[1]))) for pair in numbered]


def test_endless_values_are_taken_as_they_are_needed() -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        for number in count():
            taken += 1
            yield number

    assert list(islice(in_threads(str, endless(), size=lambda _number: 1, enough=1), 50)) == [*map(str, range(50))]
    assert taken < 1000


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_comes_out_and_ends_it(kind: type[BaseException]) -> None:
    def fail_at_ten(number: int) -> int:
        if number == 10:
            raise kind("ten")
        return number

    results = in_threads(fail_at_ten, count(), size=lambda _number: 1, enough=3)
    with pytest.raises(kind, match="ten"):
        for _ in results:
            pass
    assert list(results) == []
