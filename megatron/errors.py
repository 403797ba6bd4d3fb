"""Errors meant for the user: one sentence, no traceback."""


class RunError(RuntimeError):
    """A fault of the configuration or the files of a run; the message is the remedy."""


class SharedRunError(RunError):
    """A RunError that every rank raises alike, so that one of them may speak for all."""
