"""Why scores are divided by √d: what softmax makes of random queries and keys, with the division and without.

The product of two independent vectors of d standard normal numbers has variance d (Vaswani et al. 2017, section
3.2.1, footnote 4). Softmax of scores so far apart puts all on one key, where its Jacobian, and so what training can
tell queries and keys, is next to nothing.
"""

from dataclasses import dataclass

import numpy as np

from minigpt.inspection.worked.fields import Array
from minigpt.plain import softmax

SIZES = tuple(2**power for power in range(1, 11))
DRAWS, N_QUERY, N_KEY = 256, 4, 8  # of queries and keys together; queries and keys in each


@dataclass(frozen=True)
class Spread:
    """What one way of making weights from random queries and keys comes to, on average."""

    deviation: float  # standard deviation of the scores
    largest_weight: float  # mean over queries; 1 / number of keys if softmax were uniform, 1 if it chose one key
    jacobian: float  # mean Frobenius norm of softmax's Jacobian, 0 where no gradient passes


@dataclass(frozen=True)
class ScalingRow:
    """Both ways for one size of query and key."""

    size: int
    raw: Spread
    scaled: Spread


def scaling_table(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[ScalingRow]:
    """Raw and scaled scores of standard normal queries and keys, 256 draws of 4 queries and 8 keys for each size.

    With many more keys the raw Jacobian's norm rises at first: it is small too where softmax is spread over many.
    """
    random = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        query = random.standard_normal((DRAWS, N_QUERY, size))
        key = random.standard_normal((DRAWS, N_KEY, size))
        scores = query @ key.swapaxes(-1, -2)
        rows.append(ScalingRow(size, spread(scores), spread(scores / np.sqrt(size))))
    return rows


def spread(scores: Array) -> Spread:
    """Of scores (..., S), one softmax a row."""
    weights = softmax(scores)
    return Spread(
        deviation=float(scores.std()),
        largest_weight=float(weights.max(axis=-1).mean()),
        jacobian=float(jacobian_norm(weights).mean()),
    )


def jacobian_norm(weights: Array) -> Array:
    """Frobenius norm of ∂softmax/∂scores = diag(p) − p pᵀ for each row p: (..., S) → (...).

    Its square is Σp² − 2Σp³ + (Σp²)²; it is 0 where one weight is 1 and the others 0.
    """
    squares = (weights**2).sum(axis=-1)
    return np.sqrt(np.maximum(squares - 2 * (weights**3).sum(axis=-1) + squares**2, 0))
