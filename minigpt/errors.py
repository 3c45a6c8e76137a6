"""The one exception for what a user can mend; every other exception is a bug and keeps its traceback."""


class UserError(ValueError):
    """A mistake in a file, an option or a text: one sentence saying what, where, and what to do."""
