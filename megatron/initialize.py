"""Start of a run: torch.distributed, the process grid, quiet libraries; and problems that all ranks share."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import socket
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.config import ParallelConfig, Settings
from megatron.errors import RunError, SharedRunError
from megatron.meeting import meet
from megatron.mpu.context import ParallelContext, build_context
from megatron.peers import Peers


def meeting_point(parallel: ParallelConfig, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port of ``parallel``, or of MASTER_ADDR and MASTER_PORT where it names none; port 0 is any."""
    alone = parallel.world_size == 1
    addr = parallel.master_addr or environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else "")
    port = parallel.master_port or (0 if alone and parallel.master_addr else int(environ.get("MASTER_PORT") or 0))
    if not alone and not (addr and port):
        raise RunError(f"MASTER_ADDR and MASTER_PORT not set for a world of {parallel.world_size} ranks; "
                       "start with torchrun, or export the address and a free port of the first node")
    return addr, port


def choose_device(local_rank: int, accelerator: Any) -> int:
    """Number of the accelerator that a rank computes on, among those it sees.

    A launcher may show each rank its own one only (srun --gpus-per-task=1): that is number
    0 for every rank. Raises RunError when there are several, but not enough.
    """
    count = accelerator.device_count()
    if count == 1:
        return 0
    if local_rank >= count:
        raise RunError(f"local rank {local_rank} has no accelerator: this process sees {count} "
                       f"({accelerator.device_name()}; CUDA_VISIBLE_DEVICES="
                       f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start at most {count} ranks on this node")
    return local_rank


def _device_identity(accelerator: Any, device: int) -> str | None:
    """What no other accelerator has, where the platform tells it and only one is visible."""
    if accelerator.device_count() > 1:
        return None
    kind = torch.get_device_module(accelerator.device_name())
    properties = kind.get_device_properties(device) if hasattr(kind, "get_device_properties") else None
    identity = getattr(properties, "uuid", None)
    return f"{identity} of {socket.gethostname()}" if identity else None


@contextlib.contextmanager
def quiet(active: bool = True):
    """Swallow what DeepSpeed prints while it builds things; the text comes back on an error."""
    if not active:
        yield
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except BaseException:
        print(said.getvalue(), end="", flush=True)
        raise


def initialize_distributed(parallel: ParallelConfig, peers: Peers | None = None) -> ParallelContext:
    """Join the world and build the grid; every rank of the job must call it once. ``peers`` join as soon as all have met.

    Uses the accelerator DeepSpeed finds. Where that is the CPU the back end is gloo
    whatever ``--distributed-backend`` says, so that one launch line serves both. Raises
    RunError or SharedRunError, see ``megatron.meeting``, when not all ranks meet in time.
    """
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # said by torch about DeepSpeed's calls, once per rank; neither is anything a user could act on
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*c10d::broadcast_: an autograd kernel was not registered")
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    local_rank, identity = parallel.local_rank, None
    if on_cpu:
        # before torch starts its threads, which inherit it: results that underflow (far keys of ALiBi,
        # Adam's moments of a bias without gradient) are zero, not slow
        torch.set_flush_denormal(True)
        # a shared-memory kernel for inference only; building it would cost a minute and a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        local_rank = choose_device(parallel.local_rank, accelerator)
        accelerator.set_device(local_rank)
        identity = _device_identity(accelerator, local_rank)
    if not dist.is_initialized():
        backend = "gloo" if on_cpu else parallel.distributed_backend
        _make_group(parallel, local_rank, backend, identity if backend == "nccl" else None, peers)
    return build_context(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                         parallel.world_size, parallel.rank)


def _make_group(parallel: ParallelConfig, local_rank: int, backend: str, identity: str | None, peers: Peers | None) -> None:
    """Have all ranks meet, then DeepSpeed and torch make the group of the world."""
    import deepspeed

    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    addr, port = meeting_point(parallel)
    if parallel.launcher and parallel.world_size > 1 and parallel.rank == 0:
        print(f"launched by {parallel.launcher}: {parallel.world_size} ranks meet at {addr}:{port}", flush=True)
    store = meet(parallel, addr, port, identity)
    if peers:
        peers.join(parallel.world_size, store, addr)
    # DeepSpeed reads all five, and the device from LOCAL_RANK; if one is missing it looks for mpi4py
    os.environ.update(RANK=str(parallel.rank), WORLD_SIZE=str(parallel.world_size), LOCAL_RANK=str(local_rank),
                      MASTER_ADDR=addr, MASTER_PORT=str(port or store.port))
    # of the groups made later without a timeout, by DeepSpeed too; that of the world does not pass on its own
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    try:
        with quiet():
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout)
    except RuntimeError as error:
        raise RunError(f"all {parallel.world_size} ranks met at {addr}:{port}, but the {backend} connections between them "
                       f"failed ({str(error).strip().splitlines()[0]}); if hosts have several networks, name one in "
                       f"{'GLOO' if backend == 'gloo' else 'NCCL'}_SOCKET_IFNAME") from error
    del store


def overdue(error: BaseException, parallel: ParallelConfig) -> str | None:
    """One sentence for an exchange between ranks that took too long or lost its other end; None for other errors.

    gloo raises these as RuntimeError; NCCL ends the process from a thread of its own.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or isinstance(error, RunError):
        return None
    if re.search(r"timed out|timeout", text, re.IGNORECASE) and re.search(r"gloo|c10d|wait|NCCL", text):
        minutes = parallel.distributed_timeout_minutes
        return (f"rank {parallel.rank} waited {minutes:g} minute{'' if minutes == 1 else 's'} (--distributed-timeout-minutes) "
                "in an exchange for other ranks: one of them is stuck, or busy for longer; raise the flag for the latter")
    if re.search(r"closed by peer|reset by peer|broken pipe|socket closed|connection closed", text, re.IGNORECASE):
        return (f"rank {parallel.rank} lost its connection to another rank in an exchange; that rank has ended, and its log "
                "says why")
    return None


def tells_overdue(job: Callable) -> Callable:
    """Have ``job(settings, ...)`` raise what ``overdue`` says of an error as a RunError."""

    @functools.wraps(job)
    def told(settings: Settings, *args: Any, **named: Any) -> Any:
        try:
            return job(settings, *args, **named)
        except RuntimeError as error:
            if sentence := overdue(error, settings.parallel):
                raise RunError(sentence) from error
            raise

    return told


def check_precision(dtype: str) -> None:
    """Refuse, on all ranks alike, a 16-bit type that the accelerator does not compute in."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    for name, supported in (("fp16", accelerator.is_fp16_supported), ("bf16", accelerator.is_bf16_supported)):
        if dtype == name and not supported():
            raise SharedRunError(f"--{name}: this {accelerator.device_name()} has no {name} arithmetic; "
                                 f"train with --{'bf16' if name == 'fp16' else 'fp16'} or in fp32 (neither flag)")


def agree(context: ParallelContext, problem: str | None) -> None:
    """Collective: stop all ranks together when any of them met a problem.

    Raises SharedRunError with the first rank's sentence on every rank, so that none is
    left waiting for the others.
    """
    problems = [problem]
    if context.world_size > 1:
        problems = [None] * context.world_size
        dist.all_gather_object(problems, problem)
    for rank, sentence in enumerate(problems):
        if sentence is not None:
            where = f"rank {rank}: " if any(other != sentence for other in problems) else ""
            raise SharedRunError(where + sentence)


def shutdown() -> None:
    """Leave together: gloo aborts a process whose peers vanish while a group is open."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
