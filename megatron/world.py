"""Which rank this process is, of how many, and where they meet: read from what a launcher exported.

Pure functions of an environment; no torch, no process group, no name is resolved.
docs/launching.md has the order of trust as a table.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.arguments_check import UsageError

#: (launcher, rank, ranks, local ranks, sizes of a node), the first of several names that is set counts
_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
     ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",),
     ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
     ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
)
#: names that are equal on all ranks of an MPI job and differ between jobs
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID")
#: derived ports lie here: above the well-known ones, below those the system gives to outgoing connections
_FIRST_PORT, _PORTS = 12_000, 20_000
#: steps of one SLURM job that never share a port; jobs do not if their numbers are less than 1250 apart
_STEPS = 16
#: SLURM numbers interactive shells, batch scripts and the like from here: nobody's tasks
_NO_STEP = 0xFFFF_FF00


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers."""

    launcher: str = "none"
    """torchrun, deepspeed, variables (set by hand), srun, Open MPI, MVAPICH2, MPICH or Intel MPI, or none"""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    """where rank 0 listens"""
    master_port: int = 0
    """0, for any free port, in a world of one only"""


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """What one launcher says."""

    launcher: str
    rank: int
    size: int
    names: tuple[str, str]
    local_rank: int | None
    local_name: str
    local_size: int | None = None

    def __str__(self) -> str:
        return f"{self.names[0]}={self.rank} of {self.names[1]}={self.size}"

    def same_place(self, other: _Claim) -> bool:
        return (self.rank, self.size) == (other.rank, other.size)


def read_world(environ: Mapping[str, str], local_rank_flag: int | None = None) -> World:
    """The place of this process, from the first launcher in the order of trust that is found.

    RANK and WORLD_SIZE come first (torchrun, deepspeed, or by hand), then the variables
    of an mpirun, then those of a task that srun started; without any of them the process is
    a world of one. ``local_rank_flag`` is ``--local_rank``. Raises UsageError, with
    ``local`` set, for half a pair, for numbers outside their range, for launchers that
    contradict each other, and when nothing says where the ranks meet.
    """
    outer = [*_mpi(environ), *_step(environ)]
    own = _exported(environ, outer)
    claims = [*([own] if own else []), *outer]
    if not claims:
        if _text(environ, "PMIX_RANK") not in (None, "0"):
            raise _fault(f"environment variable PMIX_RANK={environ['PMIX_RANK']} has no number of ranks beside it; "
                         "export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to every rank, or use torchrun")
        return World(local_rank=_local_rank(environ, None, local_rank_flag))
    first = claims[0]
    for claim in claims:
        _check_range(claim)
    agreeing = [claim for claim in claims if claim.same_place(first)]
    if first.launcher not in ("torchrun", "deepspeed"):  # these number what they start, whoever started them
        for claim in claims[1:]:
            _check_agreement(first, claim)
    local = next((claim for claim in agreeing if claim.local_rank is not None), first)
    local_rank = _local_rank(environ, local, local_rank_flag, exported=first is own)
    addr, port = _meeting_point(environ, first, agreeing)
    return World(launcher=first.launcher, rank=first.rank, world_size=first.size, local_rank=local_rank,
                 master_addr=addr, master_port=port)


def rank_text(environ: Mapping[str, str]) -> str:
    """The rank as some launcher spelled it, "0" if none did; for messages, before anything is checked."""
    names = ("RANK", *(names[1] for names in _MPI), "SLURM_PROCID")
    return next((text for name in names if (text := _text(environ, name))), "0")


# --- what is found ----------------------------------------------------------------------------

def _fault(message: str) -> UsageError:
    return UsageError(message, local=True)


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = _text(environ, name)
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise _fault(f"environment variable {name}={text[:40]!r} is not a whole number")
    return None if text is None else int(text)


def _first_whole(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int | None]:
    for name in names:
        if (value := _whole(environ, name)) is not None:
            return name, value
    return names[0], None


def _pair(environ: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    rank, size = (_whole(environ, name) for name in names)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, absent = names if size is None else names[::-1]
        raise _fault(f"environment variable {there} is set to {environ[there]} but {absent} is not; a launcher sets both")
    return rank, size


def _exported(environ: Mapping[str, str], outer: list[_Claim]) -> _Claim | None:
    """RANK and WORLD_SIZE; one of them alone is taken for a repetition of what a launcher says."""
    names = "RANK", "WORLD_SIZE"
    rank, size = (_whole(environ, name) for name in names)
    if (rank is None) != (size is None):
        if outer:
            theirs, name = (outer[0].size, "WORLD_SIZE") if rank is None else (outer[0].rank, "RANK")
            if (rank if rank is not None else size) != theirs:
                raise _fault(f"environment variable {name}={environ[name]} contradicts {outer[0]}; unset {name}")
            return None
        if rank is None and size == 1:
            return None
    pair = _pair(environ, names)
    if pair is None:
        return None
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "deepspeed" if "CROSS_RANK" in environ else "variables"
    return _Claim(launcher=launcher, rank=pair[0], size=pair[1], names=names, local_rank=_whole(environ, "LOCAL_RANK"),
                  local_name="LOCAL_RANK")


def _mpi(environ: Mapping[str, str]) -> Iterator[_Claim]:
    for launcher, rank, size, local_ranks, local_sizes in _MPI:
        if pair := _pair(environ, (rank, size)):
            name, local = _first_whole(environ, local_ranks)
            yield _Claim(launcher=launcher, rank=pair[0], size=pair[1], names=(rank, size), local_rank=local,
                         local_name=name, local_size=_first_whole(environ, local_sizes)[1])


def _step(environ: Mapping[str, str]) -> Iterator[_Claim]:
    """The task of a job step. A batch script or the shell of an allocation is none, however large the allocation."""
    rank, step = _whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_STEP_ID")
    size_name = "SLURM_STEP_NUM_TASKS" if _text(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if rank is None or (step is not None and step >= _NO_STEP):
        return
    size = _whole(environ, size_name)
    if step is None and size_name == "SLURM_NTASKS":
        if rank:  # rank 0 would take itself for a batch script
            raise _fault(f"environment variable SLURM_PROCID={rank} has neither SLURM_STEP_ID nor SLURM_STEP_NUM_TASKS "
                         "beside it; pass on all variables that srun sets")
        return
    if size is None:
        raise _fault(f"environment variable SLURM_PROCID is set to {rank} but SLURM_STEP_NUM_TASKS is not; srun sets both")
    yield _Claim(launcher="srun", rank=rank, size=size, names=("SLURM_PROCID", size_name),
                 local_rank=_whole(environ, "SLURM_LOCALID"), local_name="SLURM_LOCALID")


# --- what is checked --------------------------------------------------------------------------

def _check_range(claim: _Claim) -> None:
    rank, size = claim.names
    if claim.size < 1:
        raise _fault(f"{size}={claim.size} is no world; it counts the processes, from 1")
    if claim.rank >= claim.size:
        raise _fault(f"{rank}={claim.rank} is outside the world of {size}={claim.size}; allowed are 0 to {claim.size - 1}")


def _check_agreement(inner: _Claim, outer: _Claim) -> None:
    """An outer launcher may have started fewer processes: the nodes' daemons, which started the ranks."""
    if inner.size > outer.size or inner.same_place(outer):
        return
    separate = ("" if inner.size == outer.size else
                f" (the {outer.size} processes would be worlds of their own; if so, unset {outer.names[0]})")
    raise _fault(f"environment variables {inner} and {outer} contradict each other; unset {inner.names[0]} and "
                 f"{inner.names[1]}, or make them equal{separate}")


def _local_rank(environ: Mapping[str, str], claim: _Claim | None, flag: int | None, *, exported: bool = False) -> int:
    """LOCAL_RANK, else ``--local_rank``, else what the launcher says.

    Where a launcher other than RANK's says it, the first two must not contradict it: a
    script that exports them once gives all ranks of a node the same number.
    """
    variable = _whole(environ, "LOCAL_RANK")
    if None not in (variable, flag) and variable != flag:
        raise _fault(f"--local_rank {flag} contradicts environment variable LOCAL_RANK={variable}; leave the flag out")
    said = claim.local_rank if claim else None
    for value, shown, remedy in ((variable, f"LOCAL_RANK={variable}", "unset LOCAL_RANK"),
                                 (flag, f"--local_rank {flag}", "leave the flag out")):
        if value is None:
            continue
        if not exported and said is not None and claim is not None and claim.size > 1 and value != said:
            raise _fault(f"{shown} contradicts {claim.local_name}={said} of {claim.launcher}; {remedy}")
        return value
    if said is not None:
        return said
    if claim and claim.size > 1:  # falling back to 0 would put all ranks of a node on one device
        raise _fault(f"environment variable LOCAL_RANK is not set for rank {claim.rank} of {claim.size}; set it or give "
                     "--local_rank")
    return 0


# --- where the ranks meet ---------------------------------------------------------------------

def _meeting_point(environ: Mapping[str, str], first: _Claim, agreeing: list[_Claim]) -> tuple[str, int]:
    addr, port = _text(environ, "MASTER_ADDR"), _whole(environ, "MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise _fault(f"MASTER_PORT={port} is no port; allowed are 1 to 65535")
    if first.size == 1 and first.launcher != "torchrun":
        return "127.0.0.1", 0
    by_srun = any(claim.launcher == "srun" for claim in agreeing)
    by_mpi = any(claim.launcher in (names[0] for names in _MPI) for claim in agreeing)
    if addr is None and by_srun:
        addr = _address_of_step(environ)
    if addr is None and any(claim.local_size == claim.size for claim in agreeing):
        addr = "127.0.0.1"
    if port is None and by_srun:
        port = slurm_port(_whole(environ, "SLURM_JOB_ID") or 0, _whole(environ, "SLURM_STEP_ID") or 0)
    if port is None and by_mpi:
        job = next((f"{name}={text}" for name in _MPI_JOB if (text := _text(environ, name))), None)
        port = 29500 if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    if addr is None or port is None:
        absent = [name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if value is None]
        how = ("mpirun -x MASTER_ADDR=HOST (Open MPI) or mpiexec -genv MASTER_ADDR HOST (MPICH, Intel MPI)" if by_mpi
               else "export the address and a free port of the host of rank 0, or start with torchrun")
        raise _fault(f"environment variable{'s' * (len(absent) - 1)} {' and '.join(absent)} not set for {first}; {how}"
                     + (", HOST being that of rank 0" if by_mpi else ""))
    return addr, port


def slurm_port(job: int, step: int) -> int:
    """The same port on all ranks of a step, and another one for other jobs and steps on the node."""
    return _FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS


def _address_of_step(environ: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := _text(environ, name):
            try:
                hosts = list(itertools.islice(expand_hosts(text), 2))
            except ValueError as error:
                raise _fault(f"environment variable {name}={text!r}: {error}; set MASTER_ADDR to the host of rank 0") from error
            return hosts[0] if len(hosts) > 1 else "127.0.0.1"
    return None


def expand_hosts(nodelist: str) -> Iterator[str]:
    """Host names of a compact SLURM list such as ``n[01-03,07],r[0-1]c[1-2]``, one by one.

    Zeros in front are kept. Raises ValueError where the text is no such list.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise ValueError("not a list of host names")
    for part in parts:
        pieces = re.split(r"\[([^\]]*)\]", part)  # plain, bracket, plain, ..
        yield from map("".join, _product([[text] if at % 2 == 0 else _Numbers(text) for at, text in enumerate(pieces)]))


class _Numbers:
    """The texts that ``01-03,07`` stands for; may be walked more than once."""

    def __init__(self, text: str) -> None:
        self._ranges = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
            if not match or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(f"[{text}] is not of the form [A-B,C]")
            self._ranges.append((int(match[1]), int(match[2] or match[1]), len(match[1])))

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{width}d}" for first, last, width in self._ranges for number in range(first, last + 1))


def _product(choices: list) -> Iterator[tuple[str, ...]]:
    """Like itertools.product, which would hold a whole range of hosts to give the first."""
    if not choices:
        yield ()
        return
    for head in choices[0]:
        for rest in _product(choices[1:]):
            yield head, *rest
