"""Run checks on two tensor-parallel ranks, in one start of two processes."""

import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from launching import free_port

from megatron.mpu.context import ParallelContext

SIZE = 2


def _rank(rank: int, port: int, folder: str, checks: dict) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    context = ParallelContext(tp_size=SIZE, tp_rank=rank, tp_group=dist.group.WORLD, tp_ranks=(0, 1))
    for name, check in checks.items():
        try:
            check(context)
        except Exception:  # noqa: BLE001 - the parent shows it as that check's failure
            Path(folder, f"{name}.{rank}").write_text(traceback.format_exc())
    Path(folder, f"done.{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


def run_checks(checks: dict) -> dict[str, str]:
    """Call each check with the context of both ranks; return the tracebacks of those that failed.

    The checks must be functions at module level. One that fails on one rank only may
    leave the other waiting in a collective; gloo ends that when the process exits.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (free_port(), folder, checks), nprocs=SIZE)
        assert all(Path(folder, f"done.{rank}").exists() for rank in range(SIZE))
        return {path.name.partition(".")[0]: path.read_text()
                for path in Path(folder).iterdir() if not path.name.startswith("done")}
