"""A plan as text and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from megatron.planning.grids import Plan
from megatron.planning.memory import BLOCK, EMBEDDING_LAYER, HEAD, kept_bytes, sizes_of
from megatron.planning.request import Request
from megatron.planning.traffic import micro_batches

Grid = tuple[int, int, int]
_WIDTH = 21


def size(number: int) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.2f} {unit}"
        number /= 1024
    raise AssertionError


def grid_text(grid: Grid | None) -> str:
    """``16 = TP 8 x PP 2 x DP 1``, or that there is none."""
    if grid is None:
        return "none found"
    tp, pp, dp = grid
    return f"{tp * pp * dp} = {tp} x {pp} x {dp}"


def as_text(request: Request, plans: Mapping[str, Plan], smallest: Mapping[str, Grid | None], asked: str,
            chosen: bool) -> str:
    """The table; ``asked`` names the column of the command line, ``chosen`` says that its grid was searched for."""
    settings = plans[asked].settings
    model, parallel, train = settings.model, settings.parallel, settings.train
    tp, pp, dp = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                  parallel.data_parallel_size)
    blocks = ", ".join(str(stage.blocks) for stage in plans[asked].cut)
    lines = [
        f"{request.name}: {plans[asked].parameters:,} parameters, {model.num_layers} blocks, hidden "
        f"{model.hidden_size}, {model.num_attention_heads} heads, sequence {model.seq_length}, "
        f"{model.padded_vocab_size:,} rows of vocabulary, {model.params_dtype}",
        f"grid: TP {tp} x PP {pp} x DP {dp} = {parallel.world_size} GPUs"
        + (f", the smallest that fits {asked}" if chosen else "") + f"; blocks per stage: {blocks}",
        f"batch: micro {train.micro_batch_size}, global {train.global_batch_size}, "
        f"{micro_batches(settings)} micro-batches per step and replica",
        f"GPU: {request.gpu_memory:g} GiB, of which {request.reserve:g} GiB stay free; 1 GiB = 2^30 bytes",
        "", " " * 34 + "".join(f"{name:>{_WIDTH}}" for name in plans)]
    for title, cells in _rows(request, plans):
        lines.append(f"{title:<34}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    lines.append(f"{'fewest GPUs = TP x PP x DP':<34}"
                 + "".join(f"{grid_text(smallest[name]):>{_WIDTH}}" for name in plans))
    if request.explain:
        lines += ["", *explanation(plans)]
    return "\n".join(lines)


def _rows(request: Request, plans: Mapping[str, Plan]) -> Iterator[tuple[str, list[str]]]:
    columns = list(plans.values())

    def row(title: str, value) -> tuple[str, list[str]]:
        return title, [value(plan) for plan in columns]

    def worst(name: str):
        return lambda plan: size(getattr(plan.memory[plan.worst], name))

    yield row("trained parameters", lambda plan: f"{plan.trainable:,}")
    yield row("  share", lambda plan: f"{100 * plan.trainable / plan.parameters:.4f} %")
    yield row("memory of the fullest rank, stage", lambda plan: f"{plan.worst + 1} of {len(plan.cut)}")
    for name in ("weights", "gradients", "optimizer"):
        yield row(f"  {name}", worst(name))
    yield row("  micro-batches in flight", lambda plan: str(plan.memory[plan.worst].in_flight))
    yield row("  activations kept for them", worst("activations"))
    yield row("  at work beside them", worst("working"))
    yield row("  or, in the update, buffers", worst("update"))
    yield row("  peak", worst("total"))
    yield row("  fits", lambda plan: "yes" if plan.memory[plan.worst].total <= request.usable else "no")
    for kind in ("dp", "tp", "pp"):
        yield row(f"{kind.upper()} bytes per step, a rank at most",
                  lambda plan, kind=kind: size(max(getattr(traffic, kind) for traffic in plan.traffic)))
        yield row("  all ranks", lambda plan, kind=kind: size(getattr(plan.traffic_total, kind)))
    yield row("operations per step", lambda plan: f"{plan.operations.total:.4e}")
    yield row("  of full training without recompute",
              lambda plan: f"{plan.operations.total / columns[0].operations.total:.4f}")
    yield row("checkpoint", lambda plan: size(plan.checkpoint.total))
    yield row("  layer files", lambda plan: size(plan.checkpoint.layers))
    yield row("  optimizer files", lambda plan: size(plan.checkpoint.optimizer))
    yield row("delta file of the biases", lambda plan: "-" if plan.delta is None else size(plan.delta))


def explanation(plans: Mapping[str, Plan]) -> list[str]:
    """What one micro-batch leaves behind for backward, term by term."""
    whole = next(iter(plans.values()))
    trained = {"full": whole.settings, "BitFit": list(plans.values())[-1].settings}
    lines = ["kept for backward by one micro-batch on one rank, without recomputation (t = micro batch x sequence,",
             "h hidden, p = heads x head width, f MLP width, V vocabulary, w bytes of a value, r of the residual stream)"]
    for title, table in (("embedding, first stage", EMBEDDING_LAYER), ("each block", BLOCK),
                         ("final LayerNorm, head and loss, last stage", HEAD)):
        lines.append(f"{title:<100}" + "".join(f"{name:>14}" for name in trained))
        for term in table:
            cells = [size(term.bytes(z)) if term.when(z) else "-" for z in map(sizes_of, trained.values())]
            if any(cell != "-" for cell in cells):
                lines.append(f"  {term.name:<56}{term.formula:<42}" + "".join(f"{cell:>14}" for cell in cells))
        totals = [kept_bytes(table, sizes_of(settings)) for settings in trained.values()]
        lines.append(f"  {'sum':<98}" + "".join(f"{size(total):>14}" for total in totals))
    return lines


def as_data(request: Request, plans: Mapping[str, Plan], smallest: Mapping[str, Grid | None], asked: str,
            chosen: bool) -> dict:
    """The same as plain values: sizes in bytes, grids as [TP, PP, DP]."""
    settings = plans[asked].settings
    parallel = settings.parallel
    return {
        "name": request.name, "asked": asked, "grid_was_searched": chosen,
        "grid": [parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                 parallel.data_parallel_size],
        "gpu_memory_gib": request.gpu_memory, "gpu_reserve_gib": request.reserve,
        "parameters": plans[asked].parameters, "dtype": settings.model.params_dtype,
        "micro_batch_size": settings.train.micro_batch_size, "global_batch_size": settings.train.global_batch_size,
        "plans": {name: _plan_data(request, plan, smallest[name]) for name, plan in plans.items()}}


def _plan_data(request: Request, plan: Plan, smallest: Grid | None) -> dict:
    def traffic(value) -> dict:
        return dataclasses.asdict(value) | {"dp": value.dp, "tp": value.tp, "pp": value.pp}

    return {
        "trainable": plan.trainable,
        "fits": plan.memory[plan.worst].total <= request.usable,
        "worst_stage": plan.worst,
        "stages": [{"blocks": stage.blocks, "memory": dataclasses.asdict(memory) | {"total": memory.total},
                    "traffic_per_rank": traffic(moved)}
                   for stage, memory, moved in zip(plan.cut, plan.memory, plan.traffic)],
        "traffic_total": traffic(plan.traffic_total),
        "operations": dataclasses.asdict(plan.operations) | {"total": plan.operations.total},
        "checkpoint": dataclasses.asdict(plan.checkpoint) | {"total": plan.checkpoint.total},
        "delta": plan.delta,
        "smallest_grid": None if smallest is None else list(smallest)}
