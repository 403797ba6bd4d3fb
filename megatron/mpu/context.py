"""Where this rank sits in the pipeline x data x tensor grid, and its groups.

Global rank order is that of the trainers our users come from (and of
DeepSpeed's PipeModelDataParallelTopology): ``rank = pp * (DP * TP) + dp * TP + tp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """Coordinates, degrees and process groups of one rank.

    The default value is the world of size one: no process group is needed and
    every collective of ``megatron.mpu.collectives`` is the identity.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    tp_group: Any = None
    """torch ProcessGroup of the TP ranks of this stage and replica; None when tp_size is 1"""
    dp_group: Any = None
    """ranks that hold the same parameters; None when dp_size is 1"""
    tp_ranks: tuple[int, ...] = (0,)
    """global ranks of the TP group, in TP order"""
    topology: Any = field(default=None, compare=False)
    """DeepSpeed PipeModelDataParallelTopology, what PipelineModule is built with"""

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def rank(self) -> int:
        return (self.pp_rank * self.dp_size + self.dp_rank) * self.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_last_rank(self) -> bool:
        """The rank that prints the training lines and writes TensorBoard."""
        return self.rank == self.world_size - 1

    @property
    def reads_data(self) -> bool:
        """Batches are read on TP rank 0 of the first and the last stage only."""
        return self.tp_rank == 0 and (self.is_first_stage or self.is_last_stage)


def build_context(tp_size: int, pp_size: int, world_size: int, rank: int) -> ParallelContext:
    """Create the grid's groups; every rank of an initialised world must call it.

    Raises ValueError when ``world_size`` does not divide by ``tp_size * pp_size``.
    """
    if world_size % (tp_size * pp_size):
        raise ValueError(f"world size {world_size} does not divide by tensor parallel {tp_size} x "
                         f"pipeline parallel {pp_size}")
    import torch.distributed as dist
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    dp_size = world_size // (tp_size * pp_size)
    topology = PipeModelDataParallelTopology(num_pp=pp_size, num_mp=tp_size, num_dp=dp_size)
    mine: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for axis in ("model", "data"):
        for ranks in topology.get_axis_comm_lists(axis):
            if len(ranks) < 2:
                continue
            group = dist.new_group(ranks)  # collective: all ranks create all groups, in one order
            if rank in ranks:
                mine[axis] = (group, tuple(ranks))
    here = topology.get_coord(rank)
    tp_group, tp_ranks = mine.get("model", (None, (rank,)))
    dp_group, _ = mine.get("data", (None, (rank,)))
    return ParallelContext(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size, tp_rank=here.model,
                           pp_rank=here.pipe, dp_rank=here.data, tp_group=tp_group,
                           dp_group=dp_group, tp_ranks=tp_ranks, topology=topology)
