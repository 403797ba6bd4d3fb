"""Frozen parameters on their way through files, DeepSpeed and the pipeline."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from frozen_jobs import few_biases, float_segments, no_bias_at_all, resume, steps_without_gradient, train_and_save
from small_model import LENGTH, build, config
from small_runs import Case, grid_run, merge, pipeline_name
from tiny_data import small_model_flags
from worker_group import JobFailed

from megatron.bitfit import is_bias
from megatron.checkpoint import files
from megatron.checkpoint.optimizer_shards import OptimizerShards
from megatron.checkpoint.sources import open_source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tensors_of(tag: Path) -> dict[str, torch.Tensor]:
    """What the layer files of one TP rank hold, named as the pipeline names it."""
    return {pipeline_name(f"layers.{int(path.name[6:8])}.{name}"): tensor
            for path in sorted(tag.glob("layer_*")) for name, tensor in files.read(path).items()}


# --- files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumes(base, tmp_path_factory, worker_group):
    """(dtype, ZeRO stage) -> what each rank held when it saved, and after a resume in a new process."""
    root, group = tmp_path_factory.mktemp("resumes"), worker_group(2)
    cases = {(dtype, stage): Case(dp=2, bitfit=True, dtype=dtype, zero_stage=stage, optimizer="adam", lr=1e-2)
             for dtype in DTYPES for stage in (0, 1)}
    folders = [str(root / f"{dtype}{stage}") for dtype, stage in cases]
    saved = group.run(train_and_save, list(cases.values()), base, folders, 2)
    group.close()
    again = group.run(resume, list(cases.values()), folders)
    return {key: [(before[at], after[at]) for before, after in zip(saved, again)] for at, key in enumerate(cases)}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resume_in_new_processes_brings_every_tensor_back(dtype, stage, base, resumes):
    """deepspeedai/DeepSpeed#3090: frozen weights came back as the random ones of the new start."""
    original = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors_of(Path(base) / "global_step1").items()}
    for before, after in resumes[dtype, stage]:
        assert before["kept"].keys() == after.keys() == original.keys()
        for name, (tensor, trains) in before["kept"].items():
            assert torch.equal(tensor, after[name][0]), name
            assert trains == is_bias(name) and torch.equal(tensor, original[name]) != trains, name


def test_the_checkpoint_folder_alone_holds_the_model_and_a_state_for_each_name_that_trains(base, tmp_path, worker_group):
    """deepspeedai/DeepSpeed#5439: no record of frozen parameters, and fewer optimizer entries than parameters."""
    case = Case(tp=2, pp=2, bitfit=True, dtype="bf16", optimizer="adam", lr=1e-2)
    results = [each for each, in worker_group(4).run(train_and_save, [case], base, [str(tmp_path / "run")], 1)]
    tag, wanted = tmp_path / "run" / "global_step1", merge(results)
    source, found = open_source(tag), {}
    for index in (1, 3, 4, 5, 6, 8):
        mine = next(result["tensors"] for result in results if result["place"][0] == (index > 4))
        head = pipeline_name(f"layers.{index}.")
        tags = {name.removeprefix(head): tag for name, (_, tag, copy) in mine.items() if name.startswith(head) and not copy}
        found |= {head + name: tensor for name, tensor in source.layer(index, tags).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in wanted.items())
    biases = {name for name in wanted if is_bias(name)}
    assert OptimizerShards(tag, 2, 2).names == biases and len(biases) == 6 * 4 + 2
    for rank, result in enumerate(results):
        trained = {name for name, (_, trains) in result["kept"].items() if trains}
        state = files.read(tag / f"mp_rank_{rank:02d}_model_states.pt")
        assert set(state["trainable_parameters"]) == trained
        assert {name for group in state["param_shapes"] for name in group} == trained
        optimizer = files.read(tag / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt", trust=True)
        mapped = optimizer["optimizer_state_dict"]["param_slice_mappings"]
        assert {name for group in mapped for name in group} == trained


# --- parameter groups -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_empty_group_is_built_and_no_bias_decays(dtype, stage, base, worker_group):
    """deepspeedai/DeepSpeed#4277: the group of what decays has no member that trains under --bitfit."""
    case = Case(bitfit=True, dtype=dtype, zero_stage=stage, weight_decay=0.1, optimizer="adam", lr=0.5, steps=2)
    seen, = worker_group(1).run(steps_without_gradient, case, base)
    assert seen["groups"] == [(0.0, 11 * 24 * 4 + 2 * 24)]
    assert seen["rate"] == 0.5 and seen["norms"] == [0.0, 0.0]
    for name, (tensor, _) in seen["before"].items():
        assert torch.equal(tensor, seen["after"][name][0]), name


def test_the_same_steps_decay_the_matrices_of_full_training(base, worker_group):
    """deepspeedai/DeepSpeed#4277: without gradients decay alone moves what it is for, so the test above sees it."""
    case = Case(weight_decay=0.1, optimizer="adam", lr=0.5, steps=2)
    seen, = worker_group(1).run(steps_without_gradient, case, base)
    assert [decay for decay, _ in seen["groups"]] == [0.1, 0.0]
    for name, (tensor, _) in seen["before"].items():
        factor = (1 - 0.5 * 0.1)**2 if tensor.dim() > 1 else 1.0
        torch.testing.assert_close(seen["after"][name][0], tensor * factor, rtol=1e-5, atol=0)


# --- between stages ---------------------------------------------------------------------------


def test_ids_in_floating_point_are_refused_before_they_reach_the_next_stage(base, worker_group):
    """deepspeedai/DeepSpeed#3895: the next stage would wait for a gradient of them that is never sent."""
    case = Case(pp=2, bitfit=True, reset_mask=True)
    worker_group(2).run(grid_run, dataclasses.replace(case, steps=1), base)  # started, and integers pass
    began = time.monotonic()
    with pytest.raises(JobFailed, match="segment ids must be int64 of the shape of tokens, .2, 16., got float32 .2, 16."):
        worker_group(2).run(float_segments, case, base, timeout=100)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("which, name", [(0, "tokens"), (1, "position ids"), (2, "segment ids")])
@pytest.mark.parametrize("spoil, got", [(torch.Tensor.float, "float32 .2, 16."), (torch.Tensor.int, "int32 .2, 16."),
                                        (lambda ids: ids[:, None], "int64 .2, 1, 16.")], ids=["float", "int32", "mask"])
def test_the_first_stage_takes_ids_alone(which, name, spoil, got):
    """deepspeedai/DeepSpeed#3895: masks and positions of other kinds never come to a boundary between stages."""
    settings = config(reset_attention_mask=True)
    inputs = [torch.zeros(2, LENGTH, dtype=torch.int64) for _ in range(3)]
    inputs[which] = spoil(inputs[which])
    if which == 0 and inputs[0].dim() > 2:
        name, got = "position ids", "int64 .2, 16."  # tokens give the shape
    with pytest.raises(ValueError, match=f"{name} must be int64 of the shape of tokens, .*, got {got}"):
        build(settings)(*inputs)


# --- models that lack biases ------------------------------------------------------------------


def test_a_model_without_linear_biases_trains_and_lists_what_there_is(worker_group):
    """deepspeedai/DeepSpeed#3339: names that fit no parameter ended in an autograd error."""
    for seen in worker_group(2).run(few_biases, Case(pp=2, bitfit=True, layers=2, steps=2)):
        terms = {"word_embeddings.norm.bias": (1, 24), "input_layernorm.bias": (2, 48),
                 "post_attention_layernorm.bias": (2, 48), "final_layernorm.bias": (1, 24)}
        assert seen["report"].terms == terms and seen["report"].trainable == 144
        assert all(f"{term} " in seen["table"] for term in terms)
        assert seen["trained"] and seen["moved"] == seen["trained"]


def test_a_model_without_any_bias_stops_all_ranks_before_training(tmp_path, worker_group):
    """deepspeedai/DeepSpeed#3339: nothing to train is said so, by the loop itself and before it has an optimizer."""
    flags = [*small_model_flags(tmp_path), "--train-iters", "1", "--bitfit", "--pipeline-model-parallel-size", "2"]
    for said, built in worker_group(2).run(no_bias_at_all, flags):
        assert "nothing to train: --bitfit trains biases only and this model has no bias parameter at all" in said
        assert not built
