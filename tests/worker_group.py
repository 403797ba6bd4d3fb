"""Started ranks that tests share: starting four of them costs more than most tests.

A group is N processes that joined one torch.distributed world and then wait for
jobs: module-level functions with picklable arguments, run on all ranks at once.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

TESTS = Path(__file__).parent
START_TIMEOUT = 180.0


def free_port() -> int:
    """A TCP port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class JobFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback and output."""


def _serve(rank: int, size: int, port: int, pipe: Connection, log: str) -> None:
    """Body of one rank: join the world, then run jobs until told to stop."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for folder in (str(TESTS.parent), str(TESTS)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    import torch

    from megatron.config import ParallelConfig
    from megatron.initialize import initialize_distributed, shutdown

    torch.set_num_threads(1)
    initialize_distributed(ParallelConfig(world_size=size, rank=rank, local_rank=rank), timeout_minutes=5)
    pipe.send_bytes(pickle.dumps(("ready", None)))
    while (job := pipe.recv()) is not None:
        module, name, args = job
        try:
            # plain pickle: the pipe's own way with tensors shares memory with this process
            answer = pickle.dumps(("done", getattr(importlib.import_module(module), name)(*args)))
        except BaseException as error:
            answer = pickle.dumps(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        pipe.send_bytes(answer)
    shutdown()


class WorkerGroup:
    """``size`` ranks with a default process group; started on the first job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="worker-group-")
        self._processes: list = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable, *args, timeout: float = 180.0) -> list:
        """What ``function(*args)`` returns on each rank, in rank order.

        Raises JobFailed with the first failing rank's traceback; the group is then
        stopped, for its other ranks may wait in a collective, and the next job starts
        a fresh one.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        return self._gather("done", timeout)

    def _start(self) -> None:
        context = get_context("spawn")
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            log = f"{self._folder.name}/rank{rank}.log"
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs, log), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._gather("ready", START_TIMEOUT)

    def _gather(self, wanted: str, timeout: float) -> list:
        answers: dict[int, object] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in answers]
                self._fail(missing[0], f"no answer from ranks {missing} within {timeout:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._fail(rank, "the process died")
                if kind != wanted:
                    self._fail(rank, "\n".join(value))
                answers[rank] = value
        return [answers[rank] for rank in range(self.size)]

    def _fail(self, rank: int, what: str) -> None:
        log = Path(self._folder.name, f"rank{rank}.log")
        output = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        self.close(at_once=True)
        raise JobFailed(f"rank {rank} of {self.size}: {what}\n--- its output ---\n{output}")

    def close(self, at_once: bool = False) -> None:
        """Stop the ranks; ``at_once`` when they cannot be expected to listen."""
        if not at_once:
            for pipe in self._pipes:
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for process in self._processes:
            if not at_once:
                process.join(timeout=20)
            if process.is_alive():
                process.kill()
            process.join(timeout=20)
        self._processes, self._pipes = [], []
