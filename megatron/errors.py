"""Errors meant for the user: one sentence, no traceback."""


class RunError(RuntimeError):
    """A fault of the configuration or the files of a run; the message is the remedy."""
