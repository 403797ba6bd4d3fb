"""Errors meant for the user: one sentence, no traceback."""

import os
import sys


class RunError(RuntimeError):
    """A fault of the configuration or the files of a run; the message is the remedy."""


class SharedRunError(RunError):
    """A RunError that every rank raises alike, so that one of them may speak for all."""


class SecondHandError(RunError):
    """A RunError of a rank that another one told of its failure, without saying what it was."""


def print_answer(text: str) -> None:
    """Print what a tool was asked for; a reader that has seen enough (``| head``) is no fault.

    Ends the process with code 1 and one sentence where standard output cannot be written (a full disk).
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: standard output cannot be written: {error.strerror}; give the answer a file or disk that "
                  "has room", file=sys.stderr)
            raise SystemExit(1) from None
