"""What ends a script in an orderly way; every other exception is a bug and keeps its traceback."""


class CheckFailed(Exception):
    """Something that is checked did not hold (exit code 1)."""


class UserError(ValueError):
    """A mistake in a file, an option or a text: one sentence saying what, where, and what to do (exit code 2)."""


class TrainingStopped(Exception):
    """Training ended itself: the loss is not finite, or the disk takes no more (exit code 3)."""
