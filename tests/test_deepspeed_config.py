"""DeepSpeed's configuration: derived from flags, and in agreement with a user's JSON."""

import json

import pytest
from command_lines import world

from megatron.arguments import parse_arguments
from megatron.arguments_check import UsageError
from megatron.deepspeed_config import check_against_flags, derive_deepspeed_config, zero_stage_notice

BASE = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --data-path d --tokenizer-type PretrainedFromHF "
        "--tokenizer-name-or-path t")
ITERS = "--train-iters 10"
RAMP = "--train-samples 1000 --rampup-batch-size 8 4 100"
WORLD = world(2)
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 12}
OLD = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16, "gradient_clipping": 1.0,
       "zero_optimization": {"stage": 1}, "steps_per_print": 2000, "wall_clock_breakdown": False}


@pytest.fixture
def parse(tmp_path):
    def parse(line="", config=None, length=ITERS, environ=WORLD):
        words = [*BASE.split(), *length.split(), *line.split()]
        if config is not None:
            (tmp_path / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
            words += ["--deepspeed_config", str(tmp_path / "ds.json")]
        return parse_arguments(words, environ=environ)
    return parse


def derive(settings, size=16, trainable=5000):
    return derive_deepspeed_config(settings, global_batch_size=size, trainable_per_rank=trainable)


@pytest.mark.parametrize("stage", ["", "--zero-stage 0", "--zero-stage 1"])
@pytest.mark.parametrize("dtype", ["", "--bf16", "--fp16"])
def test_every_precision_runs_zero_stage_one_with_a_small_bucket(parse, dtype, stage):
    config = derive(parse(f"{dtype} {stage}"))
    assert config["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 5000, "reduce_scatter": False,
                                           "overlap_comm": False, "contiguous_gradients": True}
    assert config["pipeline"]["use_reentrant"] is False and config["pipeline"]["activation_checkpoint_interval"] == 0
    assert derive(parse(dtype), trainable=3)["zero_optimization"]["reduce_bucket_size"] == 1024


def test_batch_sizes_multiply_out(parse):
    config = derive(parse())
    assert [config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                                    "train_batch_size")] == [2, 4, 16]
    assert derive(parse(length=RAMP), size=8)["gradient_accumulation_steps"] == 2
    with pytest.raises(UsageError, match="batch size 6 .*--micro-batch-size 2 x data parallel size 2"):
        derive(parse(), size=6)


def test_bf16_accumulates_and_communicates_in_fp32_and_fp16_does_not(parse):
    bf16, fp16, fp32 = (derive(parse(line)) for line in ("--bf16", "--fp16", ""))
    assert bf16["bf16"] == {"enabled": True} and bf16["data_types"] == {"grad_accum_dtype": "fp32"}
    assert bf16["communication_data_type"] == "fp32" and "fp16" not in bf16
    assert "data_types" not in fp16 and "communication_data_type" not in fp16 and "bf16" not in fp16
    assert not {"bf16", "fp16", "data_types"} & fp32.keys()


@pytest.mark.parametrize("line, expected", [
    ("", (0, 32, 1000, 2, 1)),
    ("--initial-loss-scale 4096 --loss-scale-window 7 --hysteresis 3 --min-loss-scale 4", (0, 12, 7, 3, 4)),
    ("--loss-scale 128", (128, 32, 1000, 2, 1)),
])
def test_loss_scaling_comes_from_the_flags(parse, line, expected):
    fp16 = derive(parse(f"--fp16 {line}"))["fp16"]
    assert tuple(fp16[key] for key in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                                       "min_loss_scale")) == expected


def test_clipping_and_activation_splitting_come_from_the_flags(parse):
    config = derive(parse("--clip-grad 0.25 --no-scatter-gather-tensors-in-pipeline"))
    assert config["gradient_clipping"] == .25
    assert config["pipeline"]["pipe_partitioned"] is config["pipeline"]["grad_partitioned"] is False
    assert derive(parse())["pipeline"]["pipe_partitioned"] is True


# --- with a JSON ------------------------------------------------------------------------------

@pytest.mark.parametrize("line, config", [
    ("--fp16", {**OLD, "fp16": FP16}),
    ("--fp16 --zero-stage 1 --clip-grad 1.0", {**OLD, "fp16": FP16}),
    ("--fp16 --zero-stage 0", {**OLD, "fp16": FP16}),
    ("--bf16 --zero-stage 0", {**OLD, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}),
    ("--bf16", {**OLD, "bfloat16": {"enabled": True}, "fp16": {"enabled": False}}),
    ("--bf16", OLD), ("", OLD), ("", {}), ("", {"gradient_accumulation_steps": 4}),
    ("", {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}, "contiguous_gradients": True}}),
    ("--fp16 --loss-scale 64", {"fp16": {"enabled": True, "loss_scale": 64}}),
])
def test_a_json_that_agrees_is_accepted(parse, line, config):
    assert parse(f"--deepspeed {line}", config).deepspeed == config


@pytest.mark.parametrize("size", [16, 8])
def test_with_a_ramp_the_json_may_hold_the_full_or_the_first_batch_size(parse, size):
    parse("", {"train_batch_size": size, "gradient_accumulation_steps": size // 4}, length=RAMP)


def test_the_json_decides_what_no_flag_says(parse):
    s = parse("--fp16", {**OLD, "gradient_clipping": 0.3, "zero_optimization": {"stage": 0},
                         "fp16": {**FP16, "hysteresis": 4, "min_loss_scale": 2}})
    assert (s.optimizer.clip_grad, s.optimizer.initial_loss_scale, s.optimizer.loss_scale_window) == (.3, 4096, 500)
    assert (s.optimizer.hysteresis, s.optimizer.min_loss_scale, s.optimizer.loss_scale) == (4, 2, None)
    assert s.optimizer.zero_stage == 0 and s.flags["clip_grad"] == .3 and s.flags["initial_loss_scale"] == 4096
    config = derive(s)
    assert config["gradient_clipping"] == .3 and config["fp16"]["initial_scale_power"] == 12
    assert parse("--clip-grad 0.5", {"gradient_clipping": .5}).optimizer.clip_grad == .5
    assert parse("--fp16", {"fp16": {"enabled": True, "loss_scale": 64}}).optimizer.loss_scale == 64


def test_keys_that_only_make_deepspeed_talk_are_passed_on(parse):
    user = {"steps_per_print": 7, "comms_logger": {"enabled": True}, "wall_clock_breakdown": True,
            "flops_profiler": {"enabled": False}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 9e6}}
    config = derive(parse("", user))
    assert config["steps_per_print"] == 7 and config["comms_logger"] == {"enabled": True}
    assert config["wall_clock_breakdown"] is True and config["flops_profiler"] == {"enabled": False}
    assert config["zero_optimization"]["reduce_bucket_size"] == 9_000_000


CONTRADICTIONS = [
    ("", {"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu 4 --micro-batch-size 2"),
    ("", {"train_batch_size": 32}, "train_batch_size 32 --global-batch-size 16"),
    ("", {"train_batch_size": 8}, "train_batch_size 8 --global-batch-size 16"),
    ("", {"gradient_accumulation_steps": 8}, "gradient_accumulation_steps 8 = 4"),
    ("--clip-grad 0.5", {"gradient_clipping": 1.0}, "gradient_clipping 1.0 --clip-grad 0.5"),
    ("--clip-grad 1.0", {"gradient_clipping": 0}, "gradient_clipping 0 --clip-grad 1.0"),
    ("", {"fp16": FP16}, "fp16.enabled true --fp16 not given"),
    ("", {"bf16": {"enabled": True}}, "bf16.enabled true --bf16 not given"),
    ("", {"bfloat16": {"enabled": True}}, "bf16.enabled true --bf16 not given"),
    ("--bf16", {"fp16": FP16}, "fp16.enabled true --fp16 not given"),
    ("--fp16", {"fp16": {**FP16, "enabled": False}}, "fp16.enabled false --fp16 given"),
    ("--bf16", {"bf16": {}, "bfloat16": {}}, "bf16 bfloat16"),
    ("--fp16 --loss-scale 12", {"fp16": FP16}, "fp16.loss_scale 0 --loss-scale 12"),
    ("--fp16 --initial-loss-scale 65536", {"fp16": FP16}, "fp16.initial_scale_power 12 --initial-loss-scale 65536"),
    ("--fp16 --loss-scale-window 1000", {"fp16": FP16}, "fp16.loss_scale_window 500 --loss-scale-window 1000"),
    ("--fp16 --hysteresis 1", {"fp16": FP16}, "fp16.hysteresis 2 --hysteresis 1"),
    ("--fp16 --min-loss-scale 2", {"fp16": FP16}, "fp16.min_loss_scale 1 --min-loss-scale 2"),
    ("--fp16", {"fp16": {**FP16, "min_loss_scale": 8192}}, "8192 4096"),
    ("--fp16 --min-loss-scale 8192", {"fp16": {"enabled": True, "initial_scale_power": 12}}, "8192 4096"),
    ("--fp16", {"fp16": {**FP16, "auto_cast": True}}, "fp16.auto_cast"),
    ("", {"zero_optimization": {"stage": 2}}, "zero_optimization.stage 2 0 1"),
    ("--zero-stage 1", {"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 --zero-stage 1 0"),
    ("", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
    ("", {"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm true false"),
    ("", {"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload"),
    ("", {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, "optimizer"),
    ("", {"scheduler": {"type": "WarmupLR"}}, "scheduler"),
    ("", {"pipeline": {"use_reentrant": True}}, "pipeline"),
    ("", {"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
    ("", {"data_types": {"grad_accum_dtype": "bf16"}}, "data_types"),
    ("", {"zero_optimization": []}, "zero_optimization []"),
    ("", {"gradient_clipping": "auto"}, 'gradient_clipping "auto"'),
    ("", {"train_batch_size": True}, "train_batch_size true"),
    ("--fp16", {"fp16": {**FP16, "initial_scale_power": 1.5}}, "initial_scale_power 1.5"),
    ("--fp16", {"fp16": {**FP16, "initial_scale_power": 4000}}, "initial_scale_power 4000"),
    ("", "{", "--deepspeed_config"),
    ("", "[]", "--deepspeed_config list"),
    ("", '{"bf16": {}, "bf16": {}}', "--deepspeed_config bf16 twice"),
]


@pytest.mark.parametrize("line, config, words", CONTRADICTIONS)
def test_a_json_that_contradicts_is_refused_with_both_values(parse, capsys, line, config, words):
    """deepspeedai/DeepSpeed#17: a batch, precision, clipping or stage that file and flags set apart."""
    with pytest.raises(SystemExit) as exit:
        parse(line, config)
    message = capsys.readouterr().err
    assert exit.value.code == 2 and message.count("\n") == 1
    assert all(word in message for word in words.split()), message


@pytest.mark.parametrize("line, stage, asked", [
    ("", 1, None), ("--zero-stage 1", 1, None), ("", 0, "--zero-stage 0:"), ("--zero-stage 0", None, "--zero-stage 0:"),
    ("--zero-stage 1", 0, "--zero-stage 1, the DeepSpeed JSON says stage 0:"),
    ("--zero-stage 0", 1, "--zero-stage 0, the DeepSpeed JSON says stage 1:"),
])
def test_two_stages_that_both_mean_stage_1_are_told_with_both_values(parse, line, stage, asked):
    """deepspeedai/DeepSpeed#17"""
    settings = parse(line, {} if stage is None else {"zero_optimization": {"stage": stage}})
    told = zero_stage_notice(settings)
    assert told is None if asked is None else told.startswith(asked) and "stage 1" in told.split(asked)[1]
    assert derive(settings)["zero_optimization"]["stage"] == 1


def test_ranks_of_tp_and_pp_are_no_replicas_to_the_json(parse, capsys):
    """deepspeedai/DeepSpeed#17: 8 ranks at TP=2, PP=2 are 2 replicas, so 16 = 2 x 4 steps x 2, and not 2 x 1 x 8 or 2 x 2 x 4."""
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    environ = {**WORLD, "WORLD_SIZE": "8"}
    right = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert parse(grid, right, environ=environ).parallel.data_parallel_size == 2
    for wrong in (1, 2, 8):
        with pytest.raises(SystemExit):
            parse(grid, {**right, "gradient_accumulation_steps": wrong}, environ=environ)
        message = capsys.readouterr().err
        assert f"gradient_accumulation_steps {wrong} " in message and "16 / (2 x 2) = 4" in message
    without = {name: right[name] for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    assert derive(parse(grid, without, environ=environ)) == derive(parse(grid, environ=environ))


def test_check_against_flags_raises_a_usage_error(parse):
    with pytest.raises(UsageError, match="train_batch_size 15 .*--global-batch-size is 16"):
        check_against_flags({"train_batch_size": 15}, parse())


# --- DeepSpeed's own reading ------------------------------------------------------------------

@pytest.mark.parametrize("line, config", [("", None), ("--bf16", None), ("--fp16", None),
                                          ("--fp16", {**OLD, "fp16": FP16})])
def test_deepspeed_reads_the_configuration_as_meant(parse, line, config):
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(derive(parse(line, config, environ={})))
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (16, 2, 8)
    assert read.zero_optimization_stage == 1 and read.gradient_clipping == 1.0
    assert read.zero_config.reduce_bucket_size == 5000 and read.zero_config.reduce_scatter is False
    assert read.pipeline["use_reentrant"] is False and read.zero_allow_untested_optimizer is True
    assert read.bfloat16_config.enabled is ("bf16" in line) and read.float16_config.enabled is ("fp16" in line)
    assert read.grad_accum_dtype == ("fp32" if "bf16" in line else None)
    assert str(read.communication_data_type) == ("torch.float32" if "bf16" in line else "None")
    if config:
        assert (read.float16_config.initial_scale_power, read.float16_config.loss_scale_window) == (12, 500)
