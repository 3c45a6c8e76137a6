"""How many threads there are to be; work in several at once, its results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def in_threads(
    function: Callable[[In], Out], values: Iterable[In], *, size: Callable[[In], int], enough: int
) -> Iterator[Out]:
    """``map(function, values)`` on all cores, for a function that lets go of Python's lock.

    Values are handed over in bundles whose sizes add up to ``enough`` or more; a single bundle is worked here. Few of
    them wait at any time, so that endless ``values`` need no more memory than some.
    """
    bundles = _bundles(values, size, enough)
    first, second = next(bundles, []), next(bundles, None)
    if second is None:
        yield from map(function, first)
        return
    threads = usual_threads()
    begun: deque[Future[list[Out]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for bundle in chain([first, second], bundles):
                begun.append(pool.submit(_worked, function, bundle))
                if len(begun) > 2 * threads:
                    yield from begun.popleft().result()
            while begun:
                yield from begun.popleft().result()
        finally:  # after an error or a signal nobody waits for the rest
            for future in begun:
                future.cancel()


def _bundles(values: Iterable[In], size: Callable[[In], int], enough: int) -> Iterator[list[In]]:
    bundle: list[In] = []
    total = 0
    for value in values:
        bundle.append(value)
        total += size(value)
        if total >= enough:
            yield bundle
            bundle, total = [], 0
    if bundle:
        yield bundle


def _worked(function: Callable[[In], Out], bundle: list[In]) -> list[Out]:
    return list(map(function, bundle))


def usual_threads() -> int:
    """One a core, or fewer if OMP_NUM_THREADS says so."""
    return min(wished_threads() or core_count(), core_count())


def wished_threads() -> int:
    """What OMP_NUM_THREADS says, which libraries of numbers read too (of nested loops the outermost); 0: nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
