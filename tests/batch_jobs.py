"""Jobs about what one update is made of: micro-batches that add up, evaluations in between, activations sent and kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import resume_jobs
import small_runs
import torch
from small_runs import Case, build_run, global_batch, local_tensors, split_rows, train_steps

FIRST_EVALUATION = 500
"""step of ``global_batch`` whose rows the first evaluation reads"""


# --- evaluations between updates --------------------------------------------------------------


def trained(case: Case, base: str, evaluations: tuple[int, ...]) -> dict:
    """One update for each of ``evaluations``, after an evaluation on so many micro-batches (0: on none)."""
    _, context, _, engine, _ = build_run(case, base)
    result = {"losses": [], "norms": [], "evaluated": [], "place": (context.pp_rank, context.dp_rank, context.tp_rank)}
    for step, count in enumerate(evaluations):
        if count:
            before = local_tensors(engine)
            rows = global_batch(FIRST_EVALUATION + step, count * case.micro).split(case.micro)
            result["evaluated"].append((float(engine.eval_batch(iter(rows), num_micro_batches=count)), before))
        losses, norms = train_steps(engine, case, context, step, 1)
        result["losses"] += losses
        result["norms"] += norms
    return {**result, "tensors": local_tensors(engine), "random": torch.get_rng_state()}


def trained_twice(case: Case, base: str, evaluations: tuple[int, ...]) -> tuple[dict, dict]:
    """``trained`` with these evaluations, and with none."""
    return trained(case, base, evaluations), trained(case, base, (0,) * len(evaluations))


def evaluation_loss(case: Case, tensors: dict[str, torch.Tensor], step: int, count: int) -> float:
    """The same mean in plain torch, in fp32 and without dropout."""
    from megatron.model.pipe import loss_function
    from megatron.mpu.context import ParallelContext

    model = plain_model(case, tensors).eval()
    loss_of = loss_function(model.config, ParallelContext())
    losses = []
    for chunk in global_batch(FIRST_EVALUATION + step, count * case.micro).split(case.micro):
        inputs, labels = split_rows(chunk, case.reset_mask)
        with torch.no_grad():
            losses.append(float(loss_of(model(*inputs), labels)))
    return sum(losses) / count


def plain_model(case: Case, tensors: dict[str, torch.Tensor], dtype: str = "fp32"):
    """A GPTModel with these full tensors, which are named as the pipeline names them."""
    from megatron.model.pipe import GPTModel
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import seed_everything

    context = ParallelContext()
    config = dataclasses.replace(small_runs.settings_of(case).model, params_dtype=dtype)
    model = GPTModel(config, context, seed_everything(1, context))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(tensors[small_runs.pipeline_name(name)])
    return model


# --- micro-batches that add up ----------------------------------------------------------------


@dataclass(frozen=True)
class Batch64(Case):
    """A case whose global batch has 64 rows."""

    @property
    def global_batch(self) -> int:
        return 64


def summed_gradients(case: Case, base: str) -> dict[str, torch.Tensor]:
    """Name -> gradient, fp32, that the optimizer is given for the first global batch; for one replica alone."""
    from megatron.gradients import held_gradients, watch_decisions

    _, context, _, engine, _ = build_run(case, base)
    names, seen = {id(param): name for name, param in engine.module.named_parameters()}, {}

    def look(skipped: bool) -> None:
        for param, gradient in held_gradients(engine.optimizer):
            seen[names[id(param)]] = gradient.detach().float().view(param.shape).clone()

    watch_decisions(engine.optimizer, look)
    train_steps(engine, case, context, 0, 1)
    return seen


# --- loss scale -------------------------------------------------------------------------------


def loss_scales(case: Case, base: str, folder: str, steps: int, stop: int) -> tuple[list, list]:
    """What ``steps`` fp16 updates in one go saw, and what they saw when stopped after ``stop`` and resumed.

    Of each: loss, whether it was skipped, the loss scale and where it is in its window.
    """
    from megatron.checkpoint import save
    from megatron.checkpoint.progress import Progress

    def seen(engine, context, first: int, count: int) -> list:
        told = []
        for step in range(first, first + count):
            before = engine.skipped_steps
            losses, _ = train_steps(engine, case, context, step, 1)
            scaler = engine.optimizer.loss_scaler
            told.append((losses[0], engine.skipped_steps > before, scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter,
                         scaler.cur_hysteresis))
        return told

    with changed({}, {}, {"loss_scale_window": 3}):
        _, context, _, engine, _ = build_run(case, base)
        whole = seen(engine, context, 0, steps)
        settings, context, streams, engine, _ = build_run(dataclasses.replace(case, save=folder), base)
        parts = seen(engine, context, 0, stop)
        save.save(engine, settings, context, Progress(iteration=stop, consumed_train_samples=stop * case.global_batch), streams)
        context, engine, _, progress, _ = resume_jobs.resumed(case, folder)
        return whole, parts + seen(engine, context, progress.iteration, steps - stop)


def refused_in_fp16(flags: list[str]) -> str:
    """The sentence that ends a whole run of these flags in fp16, which this machine is made to compute in."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    return resume_jobs.end_of_run([*flags, "--fp16"])


# --- activations ------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(model: dict, parallel: dict, optimizer: dict | None = None) -> Iterator[None]:
    """Inside, every case has these settings of the model, of the grid and of the optimizer."""
    real = small_runs.settings_of

    def settings_of(case: Case, rank: int = 0):
        settings = real(case, rank)
        return dataclasses.replace(settings, model=dataclasses.replace(settings.model, **model),
                                   parallel=dataclasses.replace(settings.parallel, **parallel),
                                   optimizer=dataclasses.replace(settings.optimizer, **optimizer or {}))

    with mock.patch.object(small_runs, "settings_of", settings_of), mock.patch.object(resume_jobs, "settings_of", settings_of):
        yield


def runs_with(changes: list[tuple[Case, dict, dict]], base: str) -> list[dict]:
    """``grid_run`` of each case with its settings of model and grid."""
    results = []
    for case, model, parallel in changes:
        with changed(model, parallel):
            results.append(small_runs.grid_run(case, base))
    return results
