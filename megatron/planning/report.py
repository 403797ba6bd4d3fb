"""A plan as text and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.planning.grids import Plan
from megatron.planning.memory import BLOCK, EMBEDDING_LAYER, HEAD, kept_bytes, sizes_of
from megatron.planning.request import Request
from megatron.planning.shape import WIDTH
from megatron.planning.traffic import micro_batches

Grid = tuple[int, int, int]
_WIDTH = 21


@dataclass(frozen=True)
class Answer:
    """All that is said about a request; the mappings are by way to train."""

    request: Request
    plans: Mapping[str, Plan]
    """all on one grid"""
    asked: str
    """the way of the command line"""
    why: str
    """how the grid was chosen; empty if it was given"""
    smallest: Mapping[str, Grid | None]
    """the fewest GPUs that fit, at the TP and PP that were given"""
    elsewhere: Mapping[str, Grid]
    """for ways that do not fit the grid: one of as many GPUs that they fit"""
    note: str
    """which DP the global batch allows; empty if all"""


def size(number: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.2f} {unit}"
        number /= 1024
    raise AssertionError


def grid_text(grid: Grid | None) -> str:
    """``16 = 8 x 2 x 1``, or that there is none."""
    if grid is None:
        return "none found"
    tp, pp, dp = grid
    return f"{tp * pp * dp} = {tp} x {pp} x {dp}"


def degrees(grid: Grid) -> str:
    """``TP 8 x PP 2 x DP 1 = 16 GPUs``."""
    tp, pp, dp = grid
    return f"TP {tp} x PP {pp} x DP {dp} = {gpus(tp * pp * dp)}"


def gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def _grid(answer: Answer) -> Grid:
    parallel = answer.plans[answer.asked].settings.parallel
    return (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size)


def as_text(answer: Answer) -> str:
    """The table between what it is about and what its rows mean."""
    request, plans, asked = answer.request, answer.plans, answer.asked
    settings = plans[asked].settings
    model, train = settings.model, settings.train
    blocks = ", ".join(str(stage.blocks) for stage in plans[asked].cut)
    lines = [
        f"{request.name}{' as finetune_t0.py trains it' * (request.entry == 'finetune_t0')}: {plans[asked].parameters:,} parameters, {model.num_layers} blocks, hidden "
        f"{model.hidden_size}, {model.num_attention_heads} heads, sequence {model.seq_length}, "
        f"{model.padded_vocab_size:,} rows of vocabulary, {model.params_dtype}",
        f"grid of all columns: {degrees(_grid(answer))}{', ' * bool(answer.why)}{answer.why}; blocks per stage: {blocks}",
        *(f"{name}: does not fit this grid, but fits {degrees(grid)}" for name, grid in answer.elsewhere.items()),
        f"batch: micro {train.micro_batch_size}, global {train.global_batch_size}, "
        f"{micro_batches(settings)} micro-batches per step and replica", *filter(None, [answer.note]),
        f"GPU: {request.gpu_memory:g} GiB, of which {request.reserve:g} GiB stay free; 1 GiB = 2^30 bytes",
        "", " " * 34 + "".join(f"{name + '*' * (name == asked):>{_WIDTH}}" for name in plans)]
    for title, cells in _rows(request, plans):
        lines.append(f"{title:<34}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    lines.append(f"{'fewest GPUs = TP x PP x DP':<34}"
                 + "".join(f"{grid_text(answer.smallest[name]):>{_WIDTH}}" for name in plans))
    lines += ["", *legend(answer)]
    if request.explain:
        lines += ["", *explanation(plans)]
    return "\n".join(lines)


def legend(answer: Answer) -> list[str]:
    """What the rows mean that do not say it."""
    request, settings = answer.request, answer.plans[answer.asked].settings
    dtype, adam = settings.model.params_dtype, settings.optimizer.optimizer == "adam"
    gradient = ("6 bytes a trained parameter: 2 of bf16 that backward writes, 4 of the fp32 sum over micro-batches"
                if dtype == "bf16" else f"{WIDTH[dtype]} bytes a trained parameter")
    state = "fp32 copy and two moments, 12 bytes" if adam else "fp32 copy and the momentum if there is one, 4 or 8 bytes"
    kept = [f"{name} {degree}" for name, degree in (("TP", request.tp), ("PP", request.pp)) if degree]
    return [
        "*            what your flags ask for; the other columns differ in --bitfit and --checkpoint-activations alone",
        "peak         weights + gradients + optimizer + the larger of: activations kept + work of a micro-batch; work",
        "             of the update (buffers of the gradient reduction and the optimizer, when activations are gone)",
        f"gradients    {gradient}",
        f"optimizer    {state} a trained parameter, shared out over DP",
        "in flight    micro-batches that went forward through the stage and not yet back: their activations are kept",
        "work         of a micro-batch: gradients on the way, logits in the loss, one block computed again, attention bias",
        "DP, TP, PP   bytes that the busiest rank hands to collectives and sends to neighbour stages in a step, counted",
        "             as the size of the tensors; for an all-reduce a ring moves up to twice that over each link",
        "FLOP         multiplications and additions of one step over all ranks; none for gradients of frozen weights",
        f"fewest GPUs  on which the peak fits{f', at {chr(32).join(kept)} as given' if kept else ''}; the rows above are "
        "of the grid at the top"]


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
    yield row("  work of a micro-batch", worst("working"))
    yield row("  or work of the update", worst("update"))
    yield row("  peak", worst("total"))
    yield row("  fits", lambda plan: "yes" if plan.memory[plan.worst].total <= request.usable else "no")
    for kind in ("dp", "tp", "pp"):
        yield row(f"{kind.upper()} payload per step, busiest rank",
                  lambda plan, kind=kind: size(max(getattr(traffic, kind) for traffic in plan.traffic)))
        yield row("  all ranks", lambda plan, kind=kind: size(getattr(plan.traffic_total, kind)))
    yield row("FLOP per step, all ranks", lambda plan: f"{plan.operations.total:.4e}")
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


def as_data(answer: Answer) -> dict:
    """The same as plain values; ``--json``'s help names the units."""
    request, plans, asked = answer.request, answer.plans, answer.asked
    settings = plans[asked].settings
    return {
        "name": request.name, "asked": asked, "grid_was_searched": bool(answer.why), "grid": _grid_data(_grid(answer)),
        "gpu_memory_gib": request.gpu_memory, "gpu_reserve_gib": request.reserve,
        "parameters": plans[asked].parameters, "dtype": settings.model.params_dtype,
        "micro_batch_size": settings.train.micro_batch_size, "global_batch_size": settings.train.global_batch_size,
        "plans": {name: _plan_data(request, plan, answer.smallest[name]) for name, plan in plans.items()}}


def _grid_data(grid: Grid | None) -> dict[str, int] | None:
    return None if grid is None else dict(zip(("tp", "pp", "dp"), grid))


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
        "smallest_grid": _grid_data(smallest)}
