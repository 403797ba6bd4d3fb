"""Started ranks that tests share: starting four of them costs more than most tests.

A group is N processes that joined one torch.distributed world and then wait for
jobs: module-level functions with picklable arguments, run on all ranks at once. A job
seeds what it draws itself, since the ranks have run other jobs before.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from forked import warm_context
from launching import free_port

TESTS = Path(__file__).parent
START_TIMEOUT = 180.0
#: seconds in which other ranks may add their own failure to the first one
GRACE = 1.0
#: jobs after which a group starts afresh: the engines of each leave some twenty process groups
#: behind, whose gloo threads wake up all the time and take the cores from everybody else
JOBS_PER_START = 3


class JobFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback and output."""


def _serve(rank: int, pipe: Connection, log: str, environment: dict[str, str]) -> None:
    """Body of one rank: join the world, then run jobs until told to stop."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.environ.update(environment)
    for folder in (str(TESTS.parent), str(TESTS)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    import torch

    from megatron.config import ParallelConfig
    from megatron.initialize import initialize_distributed, shutdown

    torch.set_num_threads(1)
    world = ParallelConfig(world_size=int(environment["WORLD_SIZE"]), rank=rank, local_rank=rank,
                           distributed_timeout_minutes=5)
    initialize_distributed(world)
    # DeepSpeed collects garbage six times while it builds a bf16 optimizer: not among all that was imported
    gc.freeze()
    pipe.send_bytes(pickle.dumps(("done", None)))
    while (message := pipe.recv_bytes()) != b"":
        try:
            module, name, args = pickle.loads(message)
            # plain pickle: the pipe's own way with tensors shares memory with this process
            answer = pickle.dumps(("done", getattr(importlib.import_module(module), name)(*args)))
        except BaseException as error:
            answer = pickle.dumps(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        sys.stdout.flush()
        pipe.send_bytes(answer)
    shutdown()


class WorkerGroup:
    """``size`` ranks with a default process group; started on the first job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="worker-group-")
        self._logs = [Path(self._folder.name, f"rank{rank}.log") for rank in range(size)]
        self._processes: list = []
        self._pipes: list[Connection] = []
        self._jobs = 0

    def run(self, function: Callable, *args, timeout: float = 180.0) -> list:
        """What ``function(*args)`` returns on each rank, in rank order.

        Raises JobFailed with the traceback and output of the failing ranks when one raises,
        dies or takes more than ``timeout`` seconds. The group is then stopped, for its other
        ranks may wait in a collective, and the next job starts a fresh one. Raises ValueError
        for a function that cannot be found by its name.
        """
        if "<" in function.__qualname__ or "." in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not a function at the top of a module")
        if not all(process.is_alive() for process in self._processes) or self._jobs >= JOBS_PER_START:
            self.close(at_once=True)
        if not self._processes:
            self._start()
        for log in self._logs:
            os.truncate(log, 0)
        self._jobs += 1
        message = pickle.dumps((function.__module__, function.__qualname__, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._gather(timeout)

    def _start(self) -> None:
        self._jobs = 0
        context = warm_context()
        world = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                 "DS_ACCELERATOR": "cpu"}
        for rank, log in enumerate(self._logs):
            ours, theirs = context.Pipe()
            environment = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_serve, args=(rank, theirs, str(log), environment), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._gather(START_TIMEOUT)

    def _gather(self, timeout: float) -> list:
        answers: dict[int, object] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(failures) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)
                       if rank not in answers and rank not in failures}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    kind, value = "failed", "the process died"
                if kind == "done":
                    answers[rank] = value
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
                failures[rank] = value
        if not failures and len(answers) < self.size:
            self._show_stacks()
            failures = {rank: f"no answer within {timeout:.0f} s" for rank in range(self.size)
                        if rank not in answers}
        if failures:
            self._fail(failures)
        return [answers[rank] for rank in range(self.size)]

    def _show_stacks(self) -> None:
        """Have each rank write into its log where it is."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _fail(self, failures: dict[int, str]) -> NoReturn:
        """Stop the group and tell what happened, the first failure first."""
        self.close(at_once=True)
        told = []
        for rank, what in failures.items():
            output = self._logs[rank].read_text(errors="replace")[-3000:]
            told.append(f"rank {rank} of {self.size}: {what}\n--- output of rank {rank} ---\n{output}")
        raise JobFailed("\n".join(told))

    def close(self, at_once: bool = False) -> None:
        """Stop the ranks; ``at_once`` when they cannot be expected to listen."""
        for pipe in self._pipes:
            if not at_once:
                try:
                    pipe.send_bytes(b"")
                except OSError:
                    pass  # it died, and is joined below
        for process in self._processes:
            if not at_once:
                process.join(timeout=20)
            if process.is_alive():
                process.kill()
            process.join(timeout=20)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
