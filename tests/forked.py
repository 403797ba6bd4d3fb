"""Processes that start warm: forked from one server that has imported torch and the trainer already.

A fresh interpreter spends some seven seconds of a core on imports until its first optimizer is
built, which is more than most tests need altogether. The server itself runs nothing but the imports and has no threads, so a
fork of it is as good as a fresh process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

#: the last two are what building an optimizer and an engine import when first done
PRELOADED = ["pytest", "torch", "deepspeed", "megatron.training", "megatron.engine", "small_runs", "torch._dynamo",
             "deepspeed.runtime.zero.muon.original_muon"]
TESTS = Path(__file__).parent
#: seconds the other ranks get to end by themselves once one has failed
GRACE = 10.0


def warm_context():
    """The multiprocessing context whose processes are forked from the warm server."""
    # before Python 3.13 the server does not get this process's sys.path, and leaves out in silence what it misses
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(TESTS.parent), str(TESTS), *filter(None, known)]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run_script(script: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_ranks(script: Path, arguments: list[str], environments: list[dict[str, str]], folder: Path,
              timeout: float) -> tuple[list[int], str]:
    """Run ``script`` as ``__main__`` in one warm process per environment.

    Returns the exit codes and all that was printed, rank by rank; a rank that had to be
    stopped has a negative code, and after ``timeout`` seconds all are stopped. ``folder``
    keeps the logs. Standard output is a file for them, so they buffer as under a launcher.
    """
    context = warm_context()
    logs = [folder / f"rank{rank}.log" for rank in range(len(environments))]
    # not daemons: those may not start the workers of a data loader
    processes = [context.Process(target=_run_script, args=(str(script), list(arguments), environment, str(log)))
                 for environment, log in zip(environments, logs)]
    try:
        for process in processes:
            process.start()
        _wait(processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    return [process.exitcode for process in processes], text


def _wait(processes: list, deadline: float) -> None:
    """Until all have ended, or ``deadline``, or a while after the first failure."""
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        if not wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic())):
            return
