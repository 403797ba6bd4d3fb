"""The outermost frame of a job: exit codes, and the first error as the last words."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from typing import TYPE_CHECKING, NoReturn

from megatron.config import Settings
from megatron.errors import RunError, SecondHandError, SharedRunError
from megatron.peers import Peers, end, say_last
from megatron.signals import Signals

if TYPE_CHECKING:
    from megatron.training import Task

#: exit code of a run that the keyboard interrupted: 128 + SIGINT
INTERRUPTED = 130


def run_task(settings: Settings, task: Task) -> int:
    """Train; returns the exit code of a run that ended in order, or ends the process without waiting for other ranks.

    A SharedRunError is raised on all ranks alike and printed once. Anything else may
    have struck this rank alone while its peers wait in a collective: they are told, and the process leaves
    at once, whatever threads it has. Of several ranks only the one that failed first shows its error, the others name it.
    """
    rank = settings.parallel.rank
    peers = Peers(rank)
    train = settings.train
    signals = Signals(peers.quit) if train.exit_signal_handler and not train.eval_only else None
    try:
        from megatron.training import pretrain  # imports torch, which takes long

        code = pretrain(settings, task, peers=peers, signals=signals)
        peers.close()
        return code
    except SharedRunError as error:
        try:
            _interrupt_no_more()
            say_last(f"error: {error}", aloud=rank == 0)
            peers.close()
        finally:
            os._exit(1)
    except RunError as error:
        _fail(peers, _line(error), second_hand=isinstance(error, SecondHandError))
    except KeyboardInterrupt:
        _fail(peers, "interrupted (SIGINT)", exit_code=INTERRUPTED)
    except BaseException as error:
        _fail(peers, _line(error), traceback.format_exc())


def _fail(peers: Peers, line: str, callstack: str | None = None, exit_code: int = 1, second_hand: bool = False) -> NoReturn:
    try:
        _interrupt_no_more()
        failure = peers.first(line, exit_code, second_hand=second_hand)
        if failure.rank != peers.rank:
            peers.leave(failure)
        end(f"error on rank {peers.rank}: {line}", exit_code, callstack)
    finally:
        os._exit(exit_code)


def _interrupt_no_more() -> None:
    """Who presses Ctrl-C twice must not interrupt the way out."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _line(error: BaseException) -> str:
    """``error`` in one line; one of a data loader's process holds the traceback there, and itself at the end."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # of an exception class that is wrong itself
        lines = ["(its message cannot be shown)"]
    if "in DataLoader worker process" in lines[0]:
        return lines[-1].removeprefix(f"{RunError.__module__}.RunError: ")
    return lines[0] if isinstance(error, RunError) else f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
