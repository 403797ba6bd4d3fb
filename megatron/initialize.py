"""Start of a run: torch.distributed, the process grid, random streams, quiet libraries."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.config import ParallelConfig
from megatron.errors import RunError, SharedRunError
from megatron.mpu.context import ParallelContext, build_context


def free_port() -> int:
    """A TCP port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def export_rendezvous(parallel: ParallelConfig, environ=os.environ) -> None:
    """Fill in the five variables DeepSpeed reads, without overwriting a launcher's.

    Without a launcher a run is a world of one on a free port. DeepSpeed asks for
    mpi4py when any of the five is missing, which says nothing to the user.
    """
    environ.setdefault("RANK", str(parallel.rank))
    environ.setdefault("WORLD_SIZE", str(parallel.world_size))
    environ.setdefault("LOCAL_RANK", str(parallel.local_rank))
    if parallel.world_size == 1:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", str(free_port()))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise RunError(f"{' and '.join(missing)} not set for a world of {parallel.world_size} ranks; "
                       "start with torchrun, or export the address and a free port of the first node")


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


def initialize_distributed(parallel: ParallelConfig, timeout_minutes: float = 30) -> ParallelContext:
    """Join the world and build the grid; every rank of the job must call it once.

    Uses the accelerator DeepSpeed finds. Where that is the CPU the back end is gloo
    whatever ``--distributed-backend`` says, so that one launch line serves both.
    """
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    # said by torch about DeepSpeed's calls, once per rank; neither is anything a user could act on
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*c10d::broadcast_: an autograd kernel was not registered")
    export_rendezvous(parallel)
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        # before torch starts its threads, which inherit it: results that underflow (far keys of ALiBi,
        # Adam's moments of a bias without gradient) are zero, not slow
        torch.set_flush_denormal(True)
        # a shared-memory kernel for inference only; building it would cost a minute and a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(parallel.local_rank)
    if not dist.is_initialized():
        backend = "gloo" if on_cpu else parallel.distributed_backend
        with quiet():
            deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(minutes=timeout_minutes))
    return build_context(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                         parallel.world_size, parallel.rank)


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
