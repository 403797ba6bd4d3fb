"""Micro-batches that add up to one gradient, whatever their number, and activations that are sent and kept in several ways."""

import dataclasses
import re

import pytest
import torch
from batch_jobs import Batch64, plain_model, runs_with, summed_gradients
from command_lines import TINY, parse, refusal, world
from small_runs import Case, global_batch, merge, pipeline_name, reference_run, split_rows, write_base

from megatron import argument_table
from megatron.bitfit import freeze
from megatron.model.loss import loss_function
from megatron.mpu.context import ParallelContext


def relative(gradient, wanted):
    """Distance in units of the length of ``wanted``."""
    return float((gradient - wanted).norm() / wanted.norm())


def own_sums(case, base, dtypes):
    """The gradients of all 64 rows, one by one as the engine computes them, added up in each of ``dtypes`` by plain torch."""
    tensors = reference_run(dataclasses.replace(case, dtype="fp32", steps=0), base)["tensors"]
    model = plain_model(case, tensors, case.dtype)
    freeze(model)
    trained = {pipeline_name(name): param for name, param in model.named_parameters() if param.requires_grad}
    sums = {dtype: {name: torch.zeros_like(param, dtype=dtype) for name, param in trained.items()} for dtype in dtypes}
    loss_of = loss_function(model.config, ParallelContext())
    for row in global_batch(0, 64).split(1):
        inputs, labels = split_rows(row)
        (loss_of(model(*inputs), labels) / 64).backward()
        for name, param in trained.items():
            for dtype in dtypes:
                sums[dtype][name] += param.grad.to(dtype)
            param.grad = None
    return sums.values()


def test_64_micro_batches_in_bf16_lose_no_more_than_bf16_itself(tmp_path, worker_group):
    """deepspeedai/DeepSpeed#1800: gradients of many micro-batches added up in bf16, or with ZeRO stage 0 not added up at all."""
    case = Batch64(bitfit=True, dtype="bf16", micro=1, steps=1, clip=0.0, zero_stage=0, layers=2)
    base = str(tmp_path / "base")
    write_base(base, case)
    found, = worker_group(1).run(summed_gradients, case, base)
    at_once = reference_run(dataclasses.replace(case, dtype="fp32", micro=64), base)["gradients"]
    exact, lossy = own_sums(case, base, (torch.float64, torch.bfloat16))
    assert found.keys() == at_once.keys() == exact.keys() and len(found) == 2 * 6 + 2
    worst = 0.0
    for name, gradient in found.items():
        assert relative(gradient, at_once[name]) < 2e-2, name
        assert relative(gradient, exact[name]) < 1e-5, name
        worst = max(worst, relative(lossy[name].float(), exact[name]))
    assert worst > 3e-3, "what adding up in bf16 would lose"


# --- activations, sent and kept ---------------------------------------------------------------

GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
REFUSED = ["--partition-activations", "--distribute-checkpointed-activations", "--checkpoint-in-cpu", "--profile-backward"]
IDLE = ["--deepspeed-activation-checkpointing", "--contigious-checkpointing", "--synchronize-each-layer"]
USED = ["--checkpoint-activations", "--checkpoint-num-layers", "--no-scatter-gather-tensors-in-pipeline"]
#: settings of model and grid that these lead to
CHANGES = [
    ({}, {"scatter_gather_tensors_in_pipeline": False}),
    ({"checkpoint_activations": True, "checkpoint_num_layers": 2}, {}),
    ({"checkpoint_activations": True}, {"scatter_gather_tensors_in_pipeline": False}),
]


def test_an_activation_flag_is_refused_changes_nothing_or_is_tried_below(capsys):
    """deepspeedai/DeepSpeed#1538: activations partitioned at TP=2, PP=2 broke in the middle of the first step."""
    names = [flag.name for table in (*argument_table.USED.values(), argument_table.NO_EFFECT, argument_table.REFUSED)
             for flag in table if re.search("checkpoint-(act|num|in)|checkpointed|activation|checkpointing|gather-tensors|"
                                            "synchronize-each|profile-backward", flag.name)]
    assert set(names) - {"--glu-activation"} == {*REFUSED, *IDLE, *USED}
    line = f"{TINY} {GRID} --bitfit"
    for flag in REFUSED:
        assert flag in refusal(capsys, f"{line} {flag}", environ=world(4))
    plain = parse(line, environ=world(4))
    for flag in IDLE:
        assert dataclasses.replace(parse(f"{line} {flag}", environ=world(4)), flags=plain.flags) == plain
    values = {"--checkpoint-num-layers": "2"}
    tried = {}
    for flag in USED:
        given = parse(f"{line} {flag} {values.get(flag, '')}", environ=world(4))
        tried |= {field: getattr(part, field) for part, before in ((given.model, plain.model), (given.parallel, plain.parallel))
                  for field in vars(part) if getattr(part, field) != getattr(before, field)}
    assert tried == {name: value for change in CHANGES for each in change for name, value in each.items()}


@pytest.mark.parametrize("bitfit", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bitfit", "full"])
def test_however_activations_are_sent_and_kept_the_run_is_the_same(bitfit, tmp_path, worker_group):
    """deepspeedai/DeepSpeed#1538, with segment ids beside the hidden states too, which are no multiple of anything."""
    cases = [Case(tp=2, pp=2, bitfit=bitfit, steps=2, reset_mask=masked, recompute="checkpoint_activations" in model)
             for (model, _), masked in zip(CHANGES, (True, False, True))]
    base = str(tmp_path / "base")
    write_base(base, cases[0])
    results = worker_group(4).run(runs_with, [(case, *change) for case, change in zip(cases, CHANGES)], base)
    for case, per_rank in zip(cases, zip(*results, strict=True)):
        truth = reference_run(dataclasses.replace(case, tp=1, pp=1), base)
        for run in per_rank:
            assert run["losses"] == pytest.approx(truth["losses"], rel=1e-5)
            assert run["norms"] == pytest.approx(truth["norms"], rel=1e-5)
        for name, tensor in merge(list(per_rank)).items():
            assert float((tensor - truth["tensors"][name]).abs().max()) < 1e-5 * float(tensor.abs().max()), name
