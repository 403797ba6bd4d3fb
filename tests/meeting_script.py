"""A rank that only joins and then takes part in two exchanges; started by tests/test_meeting.py.

    meeting_script.py --minutes M --day DAY [--device D]

DAY: plain, sleep (in the second exchange, rank 1), gone (rank 1). With D, the accelerator it would say it is on, it only meets.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from megatron.arguments_check import UsageError
from megatron.config import ParallelConfig
from megatron.errors import RunError, SharedRunError
from megatron.world import read_world


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--day", default="plain")
    parser.add_argument("--device")
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    try:
        world = read_world(os.environ)
    except UsageError as error:
        print(f"usage: {error}", flush=True)
        return 2
    parallel = ParallelConfig(**vars(world), distributed_timeout_minutes=given.minutes, tensor_model_parallel_size=given.tp)

    import torch
    import torch.distributed as dist

    from megatron.initialize import initialize_distributed, overdue, shutdown
    from megatron.meeting import meet

    try:
        if given.device:
            store = meet(parallel, world.master_addr, world.master_port, given.device.replace("RANK", str(world.rank)))
            print(f"rank {world.rank} goes on", flush=True)
            store.add("left", 1)
            while world.rank == 0 and store.add("left", 0) < world.world_size:
                time.sleep(0.05)
            return 0
        context = initialize_distributed(parallel)
        if world.world_size > 1:
            import deepspeed.comm

            # what DeepSpeed's pipeline and ZeRO make for themselves
            theirs = deepspeed.comm.new_group(ranks=list(range(world.world_size)))
            groups = {"world": dist.group.WORLD, "ours": context.dp_group or context.tp_group, "DeepSpeed's": theirs}
            seconds = {name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                       for name, group in groups.items()}
            print(f"rank {world.rank} timeouts {seconds}", flush=True)
            mine = torch.ones(1)
            dist.all_reduce(mine, group=groups["ours"])
            print(f"rank {world.rank} sum {mine.item():g}", flush=True)
            if world.rank == 1 and given.day == "sleep":
                time.sleep(60 * given.minutes + 3)
            if world.rank == 1 and given.day == "gone":
                os._exit(9)
            dist.all_reduce(mine, group=theirs)
        shutdown()
    except SharedRunError as error:
        if world.rank == 0:
            print(f"all: {error}", flush=True)
        os._exit(1)
    except RunError as error:
        print(f"rank {world.rank}: {error}", flush=True)
        os._exit(1)
    except RuntimeError as error:
        if not (sentence := overdue(error, parallel)):
            raise
        print(f"rank {world.rank}: {sentence}", flush=True)
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
