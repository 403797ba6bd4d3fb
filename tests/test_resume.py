"""A resumed run is the unbroken run, bit for bit; what cannot be resumed says why."""

import dataclasses
from pathlib import Path

import pytest
import torch
from resume_jobs import ends_of_runs, first_half, plan_of, rates_after_resume, refusals, second_half, straight
from small_runs import Case, write_base
from tiny_data import small_model_flags
from worker_group import JobFailed

from megatron.checkpoint import files
from megatron.checkpoint.load_plan import plan_load
from megatron.config import BIAS_TERMS, CheckpointConfig
from megatron.errors import RunError

GRID = dict(tp=2, pp=2, optimizer="adam", lr=1e-2, dropout=0.1, decay="linear", weight_decay=0.1)


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_three_and_three_steps_equal_six_bit_for_bit(dtype, bitfit, base, tmp_path, worker_group):
    case = Case(bitfit=bitfit, dtype=dtype, **GRID)
    group = worker_group(4)
    unbroken = group.run(straight, case, base, 6)
    halves = group.run(first_half, case, base, 3, str(tmp_path / "run"))
    resumed = group.run(second_half, case, str(tmp_path / "run"), 3)
    for whole, first, second in zip(unbroken, halves, resumed):
        assert whole["losses"] == first + second["losses"]
        for name, tensor in whole["tensors"].items():
            assert torch.equal(tensor, second["tensors"][name]), name
        for key in ("optimizer", "schedule", "lr", "progress"):
            assert whole[key] == second[key], key


@pytest.mark.parametrize("grid", [dict(tp=1, pp=1, dp=2), dict(tp=1, pp=2, dp=2)], ids=["DP2", "PP2DP2"])
def test_sharded_optimizer_state_resumes_bit_for_bit(grid, base, tmp_path, worker_group):
    case = Case(bitfit=True, dtype="bf16", **{**GRID, **grid})
    group = worker_group(case.world)
    unbroken = group.run(straight, case, base, 4)
    group.run(first_half, case, base, 2, str(tmp_path / "run"))
    resumed = group.run(second_half, case, str(tmp_path / "run"), 2)
    for whole, second in zip(unbroken, resumed):
        assert whole["optimizer"] == second["optimizer"]
        assert all(torch.equal(tensor, second["tensors"][name]) for name, tensor in whole["tensors"].items())


def test_the_folder_has_the_pipeline_layout_of_old(base, tmp_path, worker_group):
    """ROCm/Megatron-LM#56: the arguments in a state file of ours, a namespace, are read the safe way."""
    case = Case(bitfit=True, dtype="bf16", **GRID)
    worker_group(4).run(first_half, case, base, 1, str(tmp_path / "run"))
    tag = tmp_path / "run" / "global_step1"
    assert (tmp_path / "run" / "latest").read_text() == "global_step1"
    names = {path.name for path in tag.iterdir()}
    layers = {f"layer_{index:02d}-model_{tp:02d}-model_states.pt"
              for index in (1, 3, 4, 5, 6, 8) for tp in (0, 1)}
    assert layers <= names and not {name for name in names if name.startswith("layer_")} - layers
    assert {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)} <= names
    assert {f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(4)} <= names
    embedding = torch.load(tag / "layer_01-model_00-model_states.pt", weights_only=True)
    assert list(embedding) == ["word_embeddings.weight", "word_embeddings.norm.weight",
                               "word_embeddings.norm.bias"]
    block = torch.load(tag / "layer_03-model_01-model_states.pt", weights_only=True)
    assert list(block) == [
        "input_layernorm.weight", "input_layernorm.bias", "self_attention.query_key_value.weight",
        "self_attention.query_key_value.bias", "self_attention.dense.weight", "self_attention.dense.bias",
        "post_attention_layernorm.weight", "post_attention_layernorm.bias", "mlp.dense_h_to_4h.weight",
        "mlp.dense_h_to_4h.bias", "mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"]
    assert block["self_attention.query_key_value.weight"].shape == (3 * 24 // 2, 24)
    assert block["mlp.dense_4h_to_h.weight"].dtype == torch.bfloat16
    state = files.read(tag / "mp_rank_03_model_states.pt")
    assert state["iteration"] == 1 and state["checkpoint_version"] == 3.0
    assert state["mp_world_size"] == 4 and state["args"].consumed_train_samples == 8
    assert state["args"].position_embedding_type.name == "alibi"  # what other trainers compare
    assert state["checkpoint_info"] == {"padded_vocab_size": 96, "original_vocab_size": 93}
    assert state["lr_scheduler"].keys() >= {"max_lr", "min_lr", "warmup_steps", "num_steps", "decay_style"}


#: what was trained -> what would train now: all, biases, a bias less, and as many elements of other biases
OTHER_SETS = {
    "full": [dict(bitfit=True)],
    "all biases": [dict(bitfit=False), dict(bias_terms=BIAS_TERMS[1:]), dict(frozen="4.mlp.dense_h_to_4h.bias")],
    "some biases": [dict(bias_terms=("mlp_output", "layernorm")), dict(bias_terms=("attention_output",)),
                    dict(bias_terms=("attention_output", "value"))],
}
SAVED_SETS = {"full": {}, "all biases": dict(bitfit=True),
              "some biases": dict(bitfit=True, bias_terms=("attention_output", "layernorm"))}


@pytest.mark.parametrize("trained", OTHER_SETS)
def test_optimizer_state_of_another_trainable_set_is_refused(trained, base, tmp_path, worker_group):
    """unslothai/unsloth#3108: the trainable set changed between save and resume, and a size differed far inside the optimizer."""
    saved = Case(**{**GRID, "tp": 1}, **SAVED_SETS[trained])
    group = worker_group(2)
    group.run(first_half, saved, base, 1, str(tmp_path / "run"))
    kinds = {False: "full training", True: "--bitfit --bitfit-bias-terms"}
    for answers in group.run(refusals, saved, [{}, *OTHER_SETS[trained]], str(tmp_path / "run")):
        assert answers[0] is None
        for said, change in zip(answers[1:], OTHER_SETS[trained], strict=True):
            assert said and f"holds optimizer state of {kinds[saved.bitfit]}" in said and "--finetune --no-load-optim" in said
            assert f"this run is {kinds[change.get('bitfit', saved.bitfit)]}" in said
            assert change.get("frozen", "trained there alone") in said or "trains here alone" in said


def test_a_whole_run_refuses_what_another_trainable_set_left(tmp_path, worker_group):
    """unslothai/unsloth#3108, by the loop itself: the same line with ``--bitfit`` put in, or taken out, and no other flag."""
    flags = [*small_model_flags(tmp_path), "--num-layers", "1", "--eval-iters", "0", "--train-iters", "2", "--save-interval", "1"]
    lines = [[*flags, "--save", str(tmp_path / kind), "--load", str(tmp_path / kind), "--allow-fresh-start", *more, *last]
             for kind, first, then in (("full", [], ["--bitfit"]), ("biases", ["--bitfit"], []))
             for more, last in ((first, ["--exit-interval", "1"]), (then, []), (first, []))]
    (begun, other, same, *biases), = worker_group(1).run(ends_of_runs, *lines)
    assert begun == same == biases[0] == biases[2] == ""
    assert "holds optimizer state of full training, but this run is --bitfit" in other and "--finetune --no-load-optim" in other
    assert "holds optimizer state of --bitfit" in biases[1] and "but this run is full training" in biases[1]


def test_bf16_asked_for_without_zero_is_resumed_bit_for_bit(base, tmp_path, worker_group):
    """deepspeedai/DeepSpeed#7786: the optimizer state of bf16 with ZeRO stage 0 was not saved."""
    case = Case(bitfit=True, dtype="bf16", zero_stage=0, **{**GRID, "tp": 1, "pp": 1})
    group = worker_group(1)
    whole, = group.run(straight, case, base, 10)
    first, = group.run(first_half, case, base, 5, str(tmp_path / "run"))
    second, = group.run(second_half, case, str(tmp_path / "run"), 5)
    assert whole["losses"] == first + second["losses"]
    assert whole["optimizer"] == second["optimizer"]  # fp32 masters and both moments
    assert all(torch.equal(tensor, second["tensors"][name]) for name, tensor in whole["tensors"].items())


def test_every_rank_gets_its_own_random_states_back_under_recomputation(base, tmp_path, worker_group):
    """NVIDIA/Megatron-LM#6858: a resume gave ranks the random state of another one; here dropout goes on as it would have."""
    case = Case(bitfit=True, recompute=True, **{**GRID, "pp": 1, "dp": 2})
    group = worker_group(4)
    unbroken = group.run(straight, case, base, 6)
    halves = group.run(first_half, case, base, 3, str(tmp_path / "run"))
    resumed = group.run(second_half, case, str(tmp_path / "run"), 3)
    for whole, first, second in zip(unbroken, halves, resumed):
        assert whole["losses"] == first + second["losses"] and whole["optimizer"] == second["optimizer"]
        assert all(torch.equal(tensor, second["tensors"][name]) for name, tensor in whole["tensors"].items())


def test_a_new_learning_rate_wins_only_when_asked(base, tmp_path, worker_group):
    """NVIDIA/Megatron-LM#963: limits kept in the stored optimizer groups won over the new ones."""
    case = Case(bitfit=True, **GRID)
    group = worker_group(4)
    group.run(first_half, case, base, 2, str(tmp_path / "run"))
    lower = dataclasses.replace(case, lr=1e-4)
    for said in group.run(rates_after_resume, lower, str(tmp_path / "run")):
        assert "--override-lr-scheduler" in said
    for schedule, optimizer in group.run(rates_after_resume, dataclasses.replace(lower, override=True),
                                         str(tmp_path / "run")):
        assert schedule == optimizer == pytest.approx(1e-4 * (1 - 2 * 8 / 800))


def checkpoint_in(folder: Path, tag: str = "global_step5") -> str:
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag)
    return str(folder)


def test_first_and_later_starts_need_no_edited_flags(tmp_path):
    base, run = checkpoint_in(tmp_path / "base"), str(tmp_path / "run")
    config = CheckpointConfig(load=base, save=run, save_interval=1)
    first = plan_load(config)
    assert first.folder == base and not (first.resume or first.progress or first.rng)
    checkpoint_in(Path(run), "global_step7")
    later = plan_load(config)
    assert later.folder == run and later.tag == "global_step7"
    assert later.resume and later.progress and later.rng


def test_old_flags_keep_their_meaning_in_one_folder(tmp_path):
    folder = checkpoint_in(tmp_path / "run")
    plain = CheckpointConfig(load=folder, save=folder, save_interval=1)
    assert plan_load(plain).resume and plan_load(plain).progress and plan_load(plain).rng
    plan = plan_load(dataclasses.replace(plain, load_optim=False))
    assert not plan.resume and plan.progress and plan.rng
    plan = plan_load(dataclasses.replace(plain, finetune=True))
    assert plan.resume and not plan.progress and not plan.rng
    plan = plan_load(dataclasses.replace(plain, load_optim=False, reset_progress=True, load_rng=False))
    assert not (plan.resume or plan.progress or plan.rng)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None], ids=["empty", "missing"])
def test_a_load_folder_without_checkpoint_is_an_error_unless_allowed(make, tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#1649, OpenRLHF/OpenRLHF#1208: starting from random weights needs its own flag."""
    make(tmp_path / "nothing")
    config = CheckpointConfig(load=str(tmp_path / "nothing"))
    with pytest.raises(RunError, match="--load .*nothing.*--allow-fresh-start"):
        plan_load(config)
    assert plan_load(dataclasses.replace(config, allow_fresh_start=True)).folder is None


def test_a_latest_that_names_a_missing_tag_is_an_error(tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#1649."""
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(RunError, match="global_step9"):
        plan_load(CheckpointConfig(load=str(tmp_path)))


def test_all_ranks_refuse_together(tmp_path, worker_group):
    for said in worker_group(2).run(plan_of, Case(tp=2, load=str(tmp_path / "none"))):
        assert said.startswith("refused:") and "holds no checkpoint" in said


def test_a_damaged_or_missing_layer_file_is_named(base, tmp_path, worker_group):
    import shutil

    from small_runs import grid_run
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    (broken / "global_step1" / "layer_04-model_00-model_states.pt").unlink()
    with pytest.raises(Exception, match="no file for pipeline layer 4"):
        worker_group(2).run(grid_run, Case(pp=2), str(broken))


@pytest.mark.slow
def test_a_hundred_blocks_are_saved_found_and_resumed(tmp_path, worker_group):
    """deepspeedai/DeepSpeed#1377: of more than a hundred layers some were not found, or others taken for them."""
    case = Case(pp=2, layers=100, hidden=8, heads=2, bitfit=True, optimizer="adam", lr=1e-2)
    write_base(str(tmp_path / "base"), case)
    group = worker_group(2)
    unbroken = group.run(straight, case, str(tmp_path / "base"), 2)
    first = group.run(first_half, case, str(tmp_path / "base"), 1, str(tmp_path / "run"))
    tag = tmp_path / "run" / "global_step1"
    assert {path.name[:9] for path in tag.glob("layer_*")} == {f"layer_{index:02d}-"[:9] for index in (1, *range(3, 103), 104)}
    (tag / "manifest.json").unlink()
    torch.save({"weight": torch.ones(8)}, tag / "layer_105-model_00-model_states.pt")
    for whole, losses, second in zip(unbroken, first, group.run(second_half, case, str(tmp_path / "run"), 1)):
        assert whole["losses"] == losses + second["losses"] and whole["optimizer"] == second["optimizer"]
    (tag / "layer_101-model_00-model_states.pt").unlink()
    with pytest.raises(JobFailed, match="no file for pipeline layer 101 .layer_101-model_00-model_states.pt"):
        group.run(second_half, case, str(tmp_path / "run"), 1)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path):
    """ROCm/Megatron-LM#56: arguments inside checkpoints made users switch the safe way of loading off."""
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(RunError, match="cannot be read safely"):
        files.read(tmp_path / "evil.pt")
    torch.save({"args": Evil()}, tmp_path / "evil2.pt")
    with pytest.raises(RunError, match="cannot be read safely"):
        files.read(tmp_path / "evil2.pt")
    assert not (tmp_path / "pwned").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "latest"
    files.write_text(path, "global_step1")

    class Unpicklable:
        def __reduce__(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.checkpoint_engine().save({"x": Unpicklable()}, str(path))
    assert path.read_text() == "global_step1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]
