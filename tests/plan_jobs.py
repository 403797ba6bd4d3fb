"""Jobs that measure what a plan predicts: bytes moved, bytes held, bytes written."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from pathlib import Path

import torch
from counting import counted_collectives
from small_runs import Case, build_run, train_steps


def traffic_run(case: Case, base: str) -> dict:
    """Two steps; the tensors every call of the second one carried, with their groups."""
    import torch.distributed as dist
    from deepspeed.comm import comm

    _, context, _, engine, _ = build_run(case, base)
    train_steps(engine, case, context, 0, 1)
    gathered: Counter = Counter()
    original = comm.cdb.all_gather_function

    def gather(*, output_tensor, group=None, **rest):
        gathered[tuple(dist.get_process_group_ranks(group))] += output_tensor.numel() * output_tensor.element_size()
        return original(output_tensor=output_tensor, group=group, **rest)

    sizes: Counter = Counter()
    reduce = dist.all_reduce

    def tell_small(tensor, *args, **kwargs):
        group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD)
        if tensor.numel() == 1:
            sizes[tuple(dist.get_process_group_ranks(group))] += tensor.element_size()
        return reduce(tensor, *args, **kwargs)

    comm.cdb.all_gather_function, dist.all_reduce = gather, tell_small
    try:
        with counted_collectives() as counted:
            train_steps(engine, case, context, 1, 1)
    finally:
        comm.cdb.all_gather_function, dist.all_reduce = original, reduce
    def ranks(group, degree):
        return tuple(dist.get_process_group_ranks(group)) if degree > 1 else ()

    return {"place": (context.pp_rank, context.dp_rank, context.tp_rank), "counted": dict(counted),
            "gathered": dict(gathered), "single": dict(sizes), "dp": ranks(context.dp_group, context.dp_size),
            "tp": ranks(context.tp_group, context.tp_size),
            "pp": ranks(engine.mpu.get_pipe_parallel_group(), context.pp_size)}


def moved(result: dict) -> dict[str, int]:
    """Bytes by kind of parallelism. One-element tensors are scalars; a group of one moves nothing."""
    counted, gathered, single = Counter(result["counted"]), Counter(result["gathered"]), Counter(result["single"])

    def reduced(group):
        return counted["all_reduce", group] - single[group] if group else 0

    sent = sum(size for (name, _), size in counted.items() if name == "send")
    scalars = sum(size for group, size in single.items() if len(group) > 1)
    scalars += sum(size for (name, group), size in counted.items() if name == "broadcast" and len(group) > 1)
    return {"dp": reduced(result["dp"]) + gathered[result["dp"]], "tp": reduced(result["tp"]) + gathered[result["tp"]],
            "pp": reduced(result["pp"]) + sent, "scalars": scalars}


# --- memory -----------------------------------------------------------------------------------


def _storages() -> dict[int, int]:
    """Address -> bytes of every tensor that Python can reach, gradients included."""
    found = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor):
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def measured(settings) -> dict[str, int]:
    """Most bytes allocated in forward and backward passes, in reduction and update, and at all.

    What exists between steps is counted from the tensors there are; what the next step adds,
    from the allocator. Products are made in the dtype of the weights, as accelerators make them.
    """
    import torch.distributed as dist

    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.engine import build_engine, build_model
    from megatron.mpu import linear
    from megatron.mpu.context import build_context
    from megatron.mpu.random import seed_everything

    usual, linear.computes_in_fp32 = linear.computes_in_fp32, lambda tensor: False
    gc.collect()
    before = _storages().keys()
    parallel = settings.parallel
    context = build_context(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                            dist.get_world_size(), dist.get_rank())
    streams = seed_everything(1, context)
    model = build_model(settings, context, streams, LoadPlan(None, None))
    engine, _ = build_engine(model, settings, context, 10, settings.train.global_batch_size)
    length, train = settings.model.seq_length, settings.train

    def split(rows):
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(length).expand_as(tokens).contiguous()
        return (tokens, positions), (labels, torch.ones(labels.shape))

    engine.set_batch_fn(split)
    passes = train.global_batch_size // train.micro_batch_size
    rows = torch.zeros(passes, train.micro_batch_size, length + 1, dtype=torch.int64)
    reads = context.is_first_stage or context.is_last_stage
    marks = []
    name = "buffered_allreduce_fallback" if engine.using_bf16_optimizer else "allreduce_gradients"
    reduce = getattr(engine, name)

    def marking(*args, **kwargs):
        marks.append(time.time_ns())
        return reduce(*args, **kwargs)

    setattr(engine, name, marking)
    try:
        engine.train_batch(iter(rows) if reads else None)
        # else the profiler misses that these are freed, having not seen them made
        for slots in engine.pipe_buffers.values():
            slots[:] = [None] * len(slots)
        engine.loss = engine.total_loss = None
        gc.collect()
        held = sum(size for address, size in _storages().items() if address not in before)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine.train_batch(iter(rows) if reads else None)
    finally:
        linear.computes_in_fp32 = usual
    events = sorted((event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events()
                    if event.name() == "[memory]")
    now, most = held, {"passes": held, "update": held}
    for when, size in events:
        now += size
        phase = "passes" if when < marks[1] else "update"
        most[phase] = max(most[phase], now)
    return {**most, "peak": max(most.values()), "stage": context.pp_rank}


# --- files ------------------------------------------------------------------------------------


def files_of(case: Case, base: str, folder: str) -> None:
    """One step and a save."""
    from megatron.checkpoint import save
    from megatron.checkpoint.progress import Progress

    case = dataclasses.replace(case, save=folder)
    settings, context, streams, engine, _ = build_run(case, base)
    train_steps(engine, case, context, 0, 1)
    save.save(engine, settings, context, Progress(iteration=1, consumed_train_samples=case.global_batch), streams)


def stored(folder: Path) -> tuple[tuple[int, int], tuple[int, int], int]:
    """(number, bytes of tensors) of layer files, the same of optimizer files, bytes of all files."""
    from bitfit_jobs import tensors_in

    from megatron.checkpoint import files

    found = {"layer": (0, 0), "optim": (0, 0)}
    for path in folder.iterdir():
        kind = "layer" if path.name.startswith("layer") else "optim" if "optim_states" in path.name else None
        if kind:
            # single numbers, such as the step of each moment, are not state
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(files.read(path))
                       if tensor.numel() > 1)
            found[kind] = found[kind][0] + 1, found[kind][1] + size
    return found["layer"], found["optim"], sum(path.stat().st_size for path in folder.iterdir())
