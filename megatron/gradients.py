"""Gradients as DeepSpeed's optimizers hold them when an update is decided on.

BF16_Optimizer, which steps bf16, has the sum over DP of every gradient on each replica;
DeepSpeedZeroOptimizer, which steps fp32 and fp16, has this replica's part of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import mark

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Held = tuple[torch.nn.Parameter, torch.Tensor]


def _is_bf16(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_groups_gradients")


def held_gradients(optimizer: Any) -> Iterator[Held]:
    """Trained parameters, or those in this rank's part, with the gradient that is held of each, of any shape."""
    if _is_bf16(optimizer):
        for params, gradients, present in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients,
                                              optimizer.fp32_groups_has_gradients):
            yield from ((param, gradient) for param, gradient, there in zip(params, gradients, present) if there)
    else:
        for group, params in enumerate(optimizer.params_in_partition):
            yield from zip(params, _without_padding(optimizer.averaged_gradients[group] or ()))


def _without_padding(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in gradients if not getattr(each, "_zero_padding", False)]


def accumulation_line(engine: Any) -> str:
    """In which dtypes an engine adds gradients up and steps; read from the engine, not from what it was asked for."""
    _, over_steps = engine.get_data_types()
    over_replicas, stepped = engine.communication_data_type, engine.optimizer.optimizer.param_groups[0]["params"][0].dtype
    return (f"gradients add up over micro-batches in {_NAMES[over_steps]} and over replicas in {_NAMES[over_replicas]}; the optimizer "
            f"steps in {_NAMES[stepped]}")


def watch_decisions(optimizer: Any, decided: Callable[[bool], None]) -> bool:
    """Have ``decided`` called with whether an update is skipped, before the gradients are freed.

    Returns False, and does nothing, with a version of DeepSpeed that has other optimizers.
    """
    if _is_bf16(optimizer):
        clear = optimizer.clear_hp_grads

        def cleared() -> None:
            if any(map(any, optimizer.fp32_groups_has_gradients)):  # it is called a second time, for nothing
                decided(optimizer.overflow)
            clear()

        optimizer.clear_hp_grads = cleared
        return True
    update = getattr(optimizer, "_update_scale", None)
    if update is None:
        return False

    def updated(overflow: bool = False) -> None:
        decided(overflow)
        update(overflow)

    optimizer._update_scale = updated
    return True


def count_bad_copies(optimizer: Any, context: ParallelContext) -> None:
    """Let NaN or infinity in any gradient make the norm so, and all ranks skip the update.

    The norm counts a gradient that several ranks hold on one of them. Should another copy be
    spoilt, by a defect of that device, say, this rank would update alone. So the norms of
    copies that do not count enter multiplied with zero: nothing, or NaN.
    """
    def left_out(param: torch.nn.Parameter) -> bool:
        shared = context.tp_rank > 0 and not getattr(param, "tensor_model_parallel", False)
        return shared or getattr(param, "ds_pipe_replicated", False)

    def carrier(held: Sequence[Held]) -> list[torch.Tensor]:
        norms = [gradient.detach().float().norm() for param, gradient in held if left_out(param)]
        return [0.0 * torch.stack(norms).sum().view(1)] if norms else []

    if _is_bf16(optimizer):
        of_tensors = optimizer.get_grads_for_norm

        def with_carrier(for_clipping: bool = False):
            if for_clipping:
                return of_tensors(for_clipping=True)
            counted, experts = of_tensors()
            return counted + carrier(list(held_gradients(optimizer))), experts

        optimizer.get_grads_for_norm = with_carrier
    else:
        norm_of = optimizer.get_grad_norm_direct
        counts = torch.nn.Parameter(torch.zeros(1))
        mark(counts, tensor_model_parallel=True)

        def with_carrier_of(gradients, params, *more):
            held = list(zip(params, _without_padding(gradients)))  # as DeepSpeed pairs them: padding at the end is not marked
            extra = carrier(held)
            return norm_of([gradient for _, gradient in held] + extra, [param for param, _ in held] + [counts for _ in extra], *more)

        optimizer.get_grad_norm_direct = with_carrier_of
