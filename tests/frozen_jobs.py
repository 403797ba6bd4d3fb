"""Jobs around frozen parameters: what a resume brings back, what reaches DeepSpeed, models that lack biases."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import torch
from resume_jobs import end_of_run, resumed
from small_runs import Case, build_run, local_tensors, split_rows, train_steps

from megatron import bitfit
from megatron.checkpoint import save
from megatron.checkpoint.progress import Progress


def kept(engine) -> dict[str, tuple[torch.Tensor, bool]]:
    """A copy of every parameter of this rank as it is, and whether it trains."""
    return {name: (param.detach().clone(), param.requires_grad) for name, param in engine.module.named_parameters()}


def train_and_save(cases: list[Case], base: str, folders: list[str], steps: int) -> list[dict]:
    """Train and save each case in its folder, and tell what every parameter is."""
    seen = []
    for case, folder in zip(cases, folders, strict=True):
        settings, context, streams, engine, _ = build_run(dataclasses.replace(case, save=folder), base)
        train_steps(engine, case, context, 0, steps)
        progress = Progress(iteration=steps, consumed_train_samples=steps * case.global_batch)
        save.save(engine, settings, context, progress, streams)
        seen.append({"kept": kept(engine), "tensors": local_tensors(engine),
                     "place": (context.pp_rank, context.dp_rank, context.tp_rank)})
    return seen


def resume(cases: list[Case], folders: list[str]) -> list[dict]:
    """Every parameter after resumes that start from other random weights."""
    return [kept(resumed(case, folder)[1]) for case, folder in zip(cases, folders, strict=True)]


@contextlib.contextmanager
def groups_given_to_deepspeed():
    """Yield a list that gets (weight decay, elements) of every parameter group at ``deepspeed.initialize``."""
    import deepspeed

    plain, seen = deepspeed.initialize, []

    def noted(*args, optimizer, **given):
        seen.extend((group["weight_decay"], sum(param.numel() for param in group["params"]))
                    for group in optimizer.param_groups)
        return plain(*args, optimizer=optimizer, **given)

    deepspeed.initialize = noted
    try:
        yield seen
    finally:
        deepspeed.initialize = plain


def steps_without_gradient(case: Case, base: str) -> dict:
    """``case.steps`` updates on batches whose loss counts nowhere, so that all gradients are zero."""
    with groups_given_to_deepspeed() as groups:
        _, context, _, engine, schedule = build_run(case, base)

    def no_loss(rows):
        inputs, (labels, mask) = split_rows(rows)
        return inputs, (labels, torch.zeros_like(mask))

    engine.set_batch_fn(no_loss)
    before = kept(engine)
    _, norms = train_steps(engine, case, context, 0, case.steps)
    return {"groups": groups, "norms": norms, "rate": schedule.get_lr(), "before": before, "after": kept(engine)}


def float_segments(case: Case, base: str) -> None:
    """A step whose segment ids are floating-point numbers."""
    _, context, _, engine, _ = build_run(case, base)

    def as_floats(rows):
        (tokens, positions, segments), labels = split_rows(rows, case.reset_mask)
        return (tokens, positions, segments.float()), labels

    engine.set_batch_fn(as_floats)
    train_steps(engine, case, context, 0, 1)


# --- models that lack biases ------------------------------------------------------------------


class _NoBiasNorm(torch.nn.Module):
    """Only the scale of a LayerNorm."""

    def __init__(self, config, eps=None):
        from megatron.mpu.layers import constant_parameter
        from megatron.mpu.tags import REPLICATED

        super().__init__()
        self.weight = constant_parameter((config.hidden_size,), 1.0, tag=REPLICATED, config=config)

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight)


@contextlib.contextmanager
def models_without_biases(norms_too: bool):
    """Inside, linear layers are built without bias, and LayerNorms too if asked for."""
    from megatron.model import attention, block, embedding, mlp, pipe

    changes = [(module, name, functools.partial(getattr(module, name), bias=False))
               for module in (attention, mlp) for name in ("ColumnParallelLinear", "RowParallelLinear")]
    if norms_too:
        changes += [(module, "LayerNorm", _NoBiasNorm) for module in (block, embedding, pipe)]
    originals = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for original in originals:
            setattr(*original)


def few_biases(case: Case) -> dict:
    """Train a model whose linear layers have no bias: the report, and what moved."""
    with models_without_biases(norms_too=False):
        _, context, _, engine, _ = build_run(case, None)
    report = bitfit.parameter_report(engine.module, context)
    before = kept(engine)
    losses, _ = train_steps(engine, case, context, 0, case.steps)
    moved = [name for name, (value, _) in kept(engine).items() if not torch.equal(value, before[name][0])]
    return {"report": report, "table": bitfit.format_report(report), "losses": losses, "moved": moved,
            "trained": [name for name, (_, trains) in before.items() if trains]}


def no_bias_at_all(flags: list[str]) -> tuple[str, bool]:
    """What a whole run of these flags says to a model without any bias, and whether it built an optimizer before."""
    from megatron import training

    with models_without_biases(norms_too=True), mock.patch.object(training, "build_engine") as built:
        said = end_of_run(flags)
    return said, built.called
