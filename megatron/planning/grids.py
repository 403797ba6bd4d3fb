"""One grid worked out in full, and the smallest grid that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatron import flops
from megatron.config import Settings
from megatron.planning.files import CheckpointSize, checkpoint_size, delta_size
from megatron.planning.memory import RankMemory, rank_memory
from megatron.planning.shape import WIDTH, Stage, held, stages, total_parameters, trainable_parameters
from megatron.planning.traffic import Traffic, rank_traffic, total_traffic

#: TP, PP, DP
Grid = tuple[int, int, int]
#: replicas the search goes up to: more only spread the optimizer state thinner
MOST_REPLICAS = 64


@dataclass(frozen=True)
class Plan:
    """What one way of training costs on one grid; bytes, and operations per step."""

    settings: Settings
    cut: tuple[Stage, ...]
    parameters: int
    trainable: int
    memory: tuple[RankMemory, ...]
    """per stage"""
    traffic: tuple[Traffic, ...]
    """per stage, of one rank"""
    traffic_total: Traffic
    operations: flops.Operations
    checkpoint: CheckpointSize
    delta: int | None
    """size of the file of biases; None in full training"""

    @property
    def worst(self) -> int:
        """Stage whose ranks need most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)


def variant(settings: Settings, *, bitfit: bool, recompute: bool) -> Settings:
    """The same run, trained another way."""
    return dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, checkpoint_activations=recompute),
        optimizer=dataclasses.replace(settings.optimizer, bitfit=bitfit))


def on_grid(settings: Settings, tp: int, pp: int, dp: int) -> Settings:
    """The same run on TP x PP x DP ranks."""
    return dataclasses.replace(settings, parallel=dataclasses.replace(
        settings.parallel, world_size=tp * pp * dp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp))


def make_plan(settings: Settings) -> Plan:
    """Everything about ``settings`` on its own grid. Raises ValueError for more stages than layers."""
    model, parallel, optimizer = settings.model, settings.parallel, settings.optimizer
    cut = stages(model, parallel.pipeline_model_parallel_size, parallel.pp_partition_method)
    operations = flops.operations_needed(
        model, settings.train.global_batch_size, bitfit=optimizer.bitfit, bias_terms=optimizer.bitfit_bias_terms,
        blocks_per_stage=[stage.blocks for stage in cut])
    return Plan(
        settings=settings, cut=cut, parameters=total_parameters(model),
        trainable=trainable_parameters(model, optimizer),
        memory=tuple(rank_memory(settings, stage) for stage in cut),
        traffic=tuple(rank_traffic(settings, cut, stage) for stage in cut),
        traffic_total=total_traffic(settings, cut), operations=operations,
        checkpoint=checkpoint_size(settings, cut), delta=delta_size(settings) if optimizer.bitfit else None)


def smallest_grid(by_degree: Mapping[int, Settings], usable: int, *, pp: int | None = None,
                  world: int | None = None) -> Grid | None:
    """(TP, PP, DP) of the fewest GPUs of which the fullest holds at most ``usable`` bytes; None if none does.

    ``by_degree``: the run at each TP degree that is possible. PP goes up to the number of
    blocks, DP to MOST_REPLICAS (or ``world``) where the global batch divides. Of as many GPUs the grid with
    the fewest stages is taken. ``pp`` and ``world`` fix what was asked for.
    """
    steady = {}
    for tp, settings in by_degree.items():
        mine = held(stages(settings.model, 1)[0], tp, settings.optimizer)
        steady[tp] = mine.weights, mine.trained
    roomy: dict[tuple[int, int], bool] = {}
    for tp, depth, dp in _grids(by_degree, pp, world):
        settings = by_degree[tp]
        if _least(settings, *steady[tp], dp) > usable * depth:
            continue
        # replicas shrink the optimizer state and nothing else: what does not fit without it never does
        if (tp, depth) not in roomy:
            roomy[tp, depth] = _fits(on_grid(settings, tp, depth, dp), usable, optimizer=False)
        if roomy[tp, depth] and _fits(on_grid(settings, tp, depth, dp), usable):
            return tp, depth, dp
    return None


def replicas(settings: Settings, most: int) -> tuple[list[int], list[int]]:
    """Divisors of ``most`` that DP can be with the global batch, and those that it cannot be."""
    samples = settings.train.global_batch_size // settings.train.micro_batch_size
    divisors = [dp for dp in range(1, most + 1) if most % dp == 0]
    return [dp for dp in divisors if samples % dp == 0], [dp for dp in divisors if samples % dp]


def _grids(by_degree: Mapping[int, Settings], pp: int | None, world: int | None) -> list[Grid]:
    train = next(iter(by_degree.values())).train
    model = next(iter(by_degree.values())).model
    depths = [pp] if pp else range(1, model.num_layers + 1)
    samples = train.global_batch_size // train.micro_batch_size
    grids = [(tp, depth, dp) for tp in by_degree for depth in depths for dp in range(1, (world or MOST_REPLICAS) + 1)
             if samples % dp == 0 and world in (None, tp * depth * dp)]
    return sorted(grids, key=lambda grid: (grid[0] * grid[1] * grid[2], grid[1], grid[0]))


def _least(settings: Settings, weights: int, trained: int, dp: int) -> int:
    """Bytes below which the weights, gradients and states of all stages together cannot be."""
    width = WIDTH[settings.model.params_dtype]
    gradient = width + 4 if settings.model.params_dtype == "bf16" else width
    moments = 2 if settings.optimizer.optimizer == "adam" else int(settings.optimizer.sgd_momentum > 0)
    return width * weights + trained * gradient + (1 + moments) * 4 * trained // dp


def _fits(settings: Settings, usable: int, *, optimizer: bool = True) -> bool:
    cut = stages(settings.model, settings.parallel.pipeline_model_parallel_size,
                 settings.parallel.pp_partition_method)
    for stage in cut:
        memory = rank_memory(settings, stage)
        if memory.total - (0 if optimizer else memory.optimizer + memory.update) > usable:
            return False
    return True
