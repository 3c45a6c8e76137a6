"""Whether a file's own numbers are right, to the places they are printed with."""

from decimal import Decimal

import numpy as np

from minigpt.errors import UserError
from minigpt.inspection.worked.agreement import compare
from minigpt.inspection.worked.examples import Examples
from minigpt.inspection.worked.fields import Array
from minigpt.inspection.worked.plain_steps import plain_steps

FEWEST_PLACES = 3  # whole numbers, too, are held to so many


def require_right(examples: Examples) -> None:
    """Hold every expected number against plain NumPy, so that nobody is judged by a mistake in the file.

    A field passes within 1e-6 + 1e-6·|x|, and if no number is off by more than one unit of the last place that any
    number of the field is printed with, of the third place at most: numbers rounded, or cut off, to three places or
    more are right.

    Raises:
        UserError: for the first field that is not.
    """
    for case in examples.cases():
        got = plain_steps(case)
        for step, expected in case.expected().items():
            unit = 10.0 ** -max(FEWEST_PLACES, _places(expected))
            agreement = compare({step: expected}, got)
            wrong = agreement.first_wrong
            if wrong is None or agreement.largest <= unit:
                continue
            assert wrong.place is not None, "the file's shapes were checked when it was read"
            index = f"[{', '.join(map(str, wrong.place))}]" if wrong.place else ""
            raise UserError(
                f"{examples.path}: example {case.name}, field {step}{index}: {expected[wrong.place]:.10g} is wrong, it"
                f" must be {got[step][wrong.place]:.10g}; mend the file before any code is judged by it"
            )


def _places(numbers: Array) -> int:
    """The most decimal places of any of them, in their shortest form."""
    exponents = [Decimal(repr(number)).normalize().as_tuple().exponent for number in np.ravel(numbers).tolist()]
    return max(-exponent for exponent in exponents if isinstance(exponent, int))
