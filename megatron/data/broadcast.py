"""Batches read on one TP rank, handed to the others of its group.

Only TP rank 0 of the first and of the last stage reads; the other TP ranks of these
stages receive its rows, middle stages get nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.errors import RunError, SecondHandError
from megatron.mpu.context import ParallelContext

#: first entry of a row that stands for a failure of the reader; no token id is negative
_FAILED = -1


class BroadcastRows:
    """Iterator of int64 rows [micro_batch, row_length], equal on all ranks of a TP group.

    ``source`` yields dicts with the key ``text`` on TP rank 0 and is None elsewhere.
    An error of the reader, its end included, is raised on every rank of the group: the
    others would otherwise wait for a broadcast that never comes.
    """

    def __init__(self, source: Iterator | None, context: ParallelContext, micro_batch: int,
                 row_length: int) -> None:
        self.source = source
        self.context = context
        self.shape = (micro_batch, row_length)
        self.device = torch.device(get_accelerator().current_device_name())

    def __iter__(self) -> BroadcastRows:
        return self

    def __next__(self) -> torch.Tensor:
        error: Exception | None = None
        rows = torch.full(self.shape, _FAILED, dtype=torch.int64)
        if self.context.tp_rank == 0:
            try:
                assert self.source is not None, "TP rank 0 reads"
                rows = next(self.source)["text"].to(torch.int64).reshape(self.shape)
            except StopIteration:
                error = RunError("the data ended before the run did")
            except ValueError as fault:  # a row that cannot be used; the message names its file
                # from a worker process it comes as the last line of a traceback
                error = RunError(str(fault).strip().splitlines()[-1].removeprefix("ValueError: "))
            except Exception as fault:  # told to the group first, raised below
                error = fault
        rows = rows.to(self.device)
        if self.context.tp_size > 1:
            dist.broadcast(rows, src=self.context.tp_ranks[0], group=self.context.tp_group)
        if error is not None:
            raise error
        if self.context.tp_rank and int(rows[0, 0]) == _FAILED:
            raise SecondHandError("reading data failed on TP rank 0 of this group; its message says why")
        return rows
