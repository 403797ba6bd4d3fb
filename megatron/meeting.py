"""Before there is a process group: all ranks meet at the store of rank 0, or all learn why not.

torch would wait without a word, and for ever where another program listens on the port. Here rank 0
calls the roll and tells everybody what came of it, so that a missing rank, two ranks of one
number, another job on the port and two ranks on one GPU each end in one sentence.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron.config import ParallelConfig
from megatron.errors import RunError, SharedRunError

#: seconds a listener on the port has to answer like a store of this job; a name server, to answer at all
ANSWER, NAMES = 60.0, 30.0
#: seconds after its own deadline that a rank still waits for rank 0's word, which names the missing ones
GRACE = 10.0
#: how rank 0 calls off the meeting and when it may leave
_GO, _HEARD_WITHIN = "go", 5.0
_TOO_LATE = "raise --distributed-timeout-minutes if ranks start further apart"


def uses_agent_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun listens on the port, and rank 0 is one more visitor."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(parallel: ParallelConfig, addr: str, port: int, device: str | None = None) -> Any:
    """Collective: returns a store, to be kept until torch has one of its own, once all ranks are here.

    In a world of one, ``port`` 0 takes any; the store's ``port`` says which. ``device``
    identifies the accelerator of this rank over the whole machine room, None where ranks may share it. Raises
    RunError or SharedRunError, after at most ``distributed_timeout_minutes`` and some seconds.
    """
    place = f"{addr}:{port}"
    if parallel.world_size == 1 and not uses_agent_store():
        return _listen(parallel, addr, port, timedelta(seconds=ANSWER))
    limit = 60 * parallel.distributed_timeout_minutes
    deadline = time.monotonic() + limit
    _resolve(addr, place, min(NAMES, limit))
    hosts = parallel.rank == 0 and not uses_agent_store()
    if hosts:
        store = _listen(parallel, addr, port, timedelta(seconds=limit))
    else:
        _knock(parallel, addr, port, deadline)
        store = _join(addr, port, limit)
    roll = _Roll(store, parallel, place, deadline)
    try:
        roll.sign(device)
        if hosts:
            _reach_myself(addr, port, roll)
        verdict = roll.call() if parallel.rank == 0 else roll.answer()
    except RuntimeError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"rank 0, whom all ranks meet at {place}, ended before all had come; its log says why") from error
    if verdict != _GO:
        raise SharedRunError(verdict)
    return store


# --- rank 0's door ----------------------------------------------------------------------------

def _listen(parallel: ParallelConfig, addr: str, port: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    try:
        # shared with the store that torch opens on this port in this process; its own client needs no name
        return dist.TCPStore("127.0.0.1", port, parallel.world_size, True, timeout, wait_for_workers=False,
                             multi_tenant=True)
    except RuntimeError as error:
        busy = "EADDRINUSE" in str(error)
        what = (f"another program, another job or another rank 0 listens on port {port} of this host "
                f"({socket.gethostname()})" if busy else
                f"rank 0 cannot listen on port {port} of this host ({socket.gethostname()}): {_first_line(error)}")
        raise RunError(f"{what}, where the ranks should meet (MASTER_ADDR={addr}); set MASTER_PORT to a free port, "
                       "the same on all ranks (torchrun, deepspeed: --master_port)") from error


def _resolve(addr: str, place: str, seconds: float) -> None:
    """A name server may be busy when all ranks of a job ask it at once."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not again or time.monotonic() > end:
                why = error.strerror if isinstance(error, OSError) else str(error)
                raise RunError(f"no host is found by the name {addr} ({why}), where the ranks should meet ({place}); set "
                               "MASTER_ADDR to a name or address of the host of rank 0 that all hosts know") from error
        time.sleep(0.5)


def _reaches(addr: str, port: int, seconds: float) -> bool:
    try:
        socket.create_connection((addr, port), timeout=max(seconds, 0.1)).close()
    except OSError:
        return False
    return True


def _knock(parallel: ParallelConfig, addr: str, port: int, deadline: float) -> None:
    pause = 0.05
    while not _reaches(addr, port, min(5.0, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            raise RunError(f"waited {_minutes(parallel)} and nobody listened on {addr}:{port} (MASTER_ADDR and "
                           "MASTER_PORT): rank 0 is missing, runs on another host, or a firewall is between; "
                           f"{_TOO_LATE}")
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _reach_myself(addr: str, port: int, roll: _Roll) -> None:
    """The name of another host would leave everybody waiting."""
    if not _reaches(addr, port, 30.0):
        raise RunError(f"rank 0 listens on port {port} of this host ({socket.gethostname()}), but does not reach itself by "
                       f"the name {addr}; set MASTER_ADDR to the host of rank 0")


def _join(addr: str, port: int, seconds: float) -> Any:
    """A store's client, made on a thread: torch waits without limit for a listener that says nothing."""
    import torch.distributed as dist

    made: list[Any] = []

    def connect() -> None:
        try:
            made.append(dist.TCPStore(addr, port, None, False, timedelta(seconds=seconds), wait_for_workers=False))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(min(ANSWER, seconds))
    if made and not isinstance(made[0], RuntimeError):
        return made[0]
    raise _stranger(f"{addr}:{port}")


def _stranger(place: str) -> RunError:
    return RunError(f"what listens on {place} is not rank 0 of this job: another program or job has the port; set "
                    "MASTER_PORT to a free port, the same on all ranks, and see what rank 0 said")


def _minutes(parallel: ParallelConfig) -> str:
    number = parallel.distributed_timeout_minutes
    return f"{number:g} minute{'' if number == 1 else 's'} (--distributed-timeout-minutes)"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- the roll ---------------------------------------------------------------------------------

class _Roll:
    """The keys that ranks leave in the store."""

    def __init__(self, store: Any, parallel: ParallelConfig, place: str, deadline: float) -> None:
        self.store, self.parallel, self.place, self.deadline = store, parallel, place, deadline
        # torchrun starts all ranks again with --max_restarts
        self.prefix = f"megatron/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        job = [f"{name}={os.environ[name]}" for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if name in os.environ]
        self.job = " ".join([f"{parallel.world_size} ranks", *job])

    def key(self, name: object) -> str:
        return f"{self.prefix}/{name}"

    def get(self, name: object) -> str | None:
        return self.store.get(self.key(name)).decode() if self.store.check([self.key(name)]) else None

    def until(self, names: list[object], deadline: float) -> bool:
        """Wait for these keys; False when ``deadline`` passes first."""
        keys, pause = [self.key(name) for name in names], 0.005
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(0.25, 1.5 * pause)
        return True

    def sign(self, device: str | None) -> None:
        """Say that this rank is here, once it is sure to be among its own."""
        rank = self.parallel.rank
        if rank == 0:
            self.store.set(self.key("job"), self.job)
        else:
            # a store that rank 0 opened knows its job at once; torchrun's learns of it when rank 0 comes
            wait = self.deadline if uses_agent_store() else min(self.deadline, time.monotonic() + ANSWER)
            if not self.until(["job"], wait):
                raise RunError(self.missing()) if uses_agent_store() else _stranger(self.place)
            if (theirs := self.get("job")) != self.job:
                raise RunError(f"{self.place} is where another job meets ({theirs}; this one: {self.job}); set "
                               "MASTER_PORT to a free port, the same on all ranks")
        self.store.set(self.key(f"device of {rank}"), device or "")
        if self.store.add(self.key(rank), 1) > 1:
            raise RunError(f"rank {rank} has come to {self.place} already: two processes were given this number, or another "
                           "job meets there; check what the launcher sets (docs/launching.md), or set MASTER_PORT to "
                           "another port")

    def call(self) -> str:
        """On rank 0: wait for all, and tell them what came of it."""
        came = self.until(list(range(self.parallel.world_size)), self.deadline)
        verdict = (self.one_device_each() or _GO) if came else self.missing()
        self.store.set(self.key("verdict"), verdict)
        if verdict != _GO:  # the store ends with this process
            present = sum(self.here()) - 1
            end = time.monotonic() + _HEARD_WITHIN
            while present and self.store.add(self.key("heard"), 0) < present and time.monotonic() < end:
                time.sleep(0.02)
        return verdict

    def answer(self) -> str:
        """On the others: what rank 0 says."""
        if not self.until(["verdict"], self.deadline + GRACE):
            raise RunError(self.missing())
        verdict = self.get("verdict") or ""
        if verdict != _GO:
            self.store.add(self.key("heard"), 1)
        return verdict

    def here(self) -> list[bool]:
        return [self.store.check([self.key(rank)]) for rank in range(self.parallel.world_size)]

    def missing(self) -> str:
        here = self.here()
        absent = [str(rank) for rank, came in enumerate(here) if not came]
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        what = f"missing: rank{'s' * (len(absent) > 1)} {shown}" if absent else "rank 0 does not answer"
        return (f"waited {_minutes(self.parallel)} for all ranks at {self.place}: {sum(here)} of {len(here)} came, {what}; "
                f"look for what ended them, or {_TOO_LATE}")

    def one_device_each(self) -> str | None:
        """A sentence when two ranks would compute on the same accelerator, which NCCL cannot do."""
        owners: dict[str, int] = {}
        for rank in range(self.parallel.world_size):
            device = self.get(f"device of {rank}")
            if device and device in owners:
                return (f"ranks {owners[device]} and {rank} see the same single accelerator ({device}); start as many ranks per "
                        "node as it has accelerators, or give each its own (srun --gpus-per-task=1)")
            if device:
                owners[device] = rank
        return None
