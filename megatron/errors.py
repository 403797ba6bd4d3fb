"""Errors meant for the user: one sentence, no traceback."""

import os
import sys


class RunError(RuntimeError):
    """A fault of the configuration or the files of a run; the message is the remedy."""


class SharedRunError(RunError):
    """A RunError that every rank raises alike, so that one of them may speak for all."""


def print_answer(text: str) -> None:
    """Print what a tool was asked for; a reader that has seen enough (``| head``) is no fault."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
