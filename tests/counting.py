"""Count the bytes every collective moves, per process group, by wrapping torch.distributed."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

import torch.distributed as dist

WRAPPED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor",
           "all_gather", "reduce_scatter", "send", "recv", "isend", "irecv")


class Traffic(Counter):
    """(name, ranks of the group) -> bytes of the first tensor, summed over calls."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict = {}
        """the same keys -> bytes of each call, in order"""


@contextlib.contextmanager
def counted_collectives():
    """Yield the Traffic of this rank inside the block."""
    import torch

    seen = Traffic()
    originals = {name: getattr(dist, name) for name in WRAPPED}

    def wrap(name, call):
        def counting(*args, **kwargs):
            tensor = next((value for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
            group = kwargs.get("group")
            if group is None:
                group = next((value for value in args if isinstance(value, dist.ProcessGroup)), None)
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            if tensor is not None:
                size = tensor.numel() * tensor.element_size()
                seen[name, ranks] += size
                seen.sizes.setdefault((name, ranks), []).append(size)
            return call(*args, **kwargs)
        return counting

    # DeepSpeed looks this one up once, when it starts
    backend = sys.modules["deepspeed.comm.comm"].cdb if "deepspeed.comm.comm" in sys.modules else None
    gather = getattr(backend, "all_gather_function", None)
    try:
        for name, call in originals.items():
            setattr(dist, name, wrap(name, call))
        if gather is not None:
            backend.all_gather_function = wrap("all_gather_into_tensor", gather)
        yield seen
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)
        if gather is not None:
            backend.all_gather_function = gather
