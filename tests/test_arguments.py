"""The command line: old names and defaults and every rule between flags."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import TINY, parse, refusal, world

from megatron.argument_table import NO_EFFECT, REFUSED, USED
from megatron.arguments import accepted_without_effect, build_parser, format_argument_dump

# --- names and defaults -----------------------------------------------------------------------

DEFAULTS = {
    "ffn-hidden-size": None, "kv-channels": None, "max-position-embeddings": None,
    "make-vocab-size-divisible-by": 128, "pad-vocab-size-to": None, "layernorm-epsilon": 1e-5,
    "embed-layernorm": False, "sync-tp-duplicated-parameters": False, "check-tp-duplicated-parameters": 0,
    "apply-residual-connection-post-layernorm": False, "openai-gelu": False, "onnx-safe": None,
    "position-embedding-type": "absolute", "glu-activation": None, "kill-switch-path": None,
    "log-level": None, "log-level-replica": None, "attention-dropout": .1, "hidden-dropout": .1,
    "weight-decay": .01, "clip-grad": 1.0, "adam-beta1": .9, "adam-beta2": .999, "adam-eps": 1e-8,
    "sgd-momentum": .9, "bitfit": False, "bitfit-bias-terms": "all", "optimizer": "adam", "global-batch-size": None,
    "rampup-batch-size": None, "train-iters": None, "train-samples": None, "train-tokens": None,
    "checkpoint-activations": False, "checkpoint-num-layers": 1, "log-interval": 100, "exit-interval": None,
    "exit-duration-in-mins": None, "tensorboard-dir": None, "dataloader-type": "single", "eval-only": False,
    "skip-train-iteration-range": None, "pp-partition-method": None, "seed": 1234, "init-method-std": .02,
    "lr": None, "min-lr": 0.0, "lr-decay-style": "linear", "lr-decay-iters": None, "lr-decay-samples": None,
    "lr-decay-tokens": None, "lr-warmup-fraction": None, "lr-warmup-iters": 0, "lr-warmup-samples": 0,
    "override-lr-scheduler": False, "use-checkpoint-lr-scheduler": False, "save": None, "save-interval": None,
    "load": None, "finetune": False, "reset-progress": False, "fp16": False, "bf16": False, "loss-scale": None,
    "initial-loss-scale": 2.0**32, "min-loss-scale": 1.0, "loss-scale-window": 1000, "hysteresis": 2,
    "fp32-residual-connection": False, "attention-softmax-in-fp32": False, "fp16-lm-cross-entropy": False,
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "distributed-backend": "nccl",
    "local_rank": None, "use-cpu-initialization": False, "eval-iters": 100, "eval-interval": 1000,
    "log-params-norm": False, "log-num-zeros-in-grad": False, "tensorboard-log-interval": 1,
    "tensorboard-queue-size": 1000, "log-timers-to-tensorboard": False, "log-batch-size-to-tensorboard": False,
    "log-validation-ppl-to-tensorboard": False, "log-path": None, "data-path": None, "split": None,
    "train-weighted-split-paths": None, "valid-weighted-split-paths-path": None, "data-impl": "infer",
    "mmap-warmup": False, "seq-length": None, "encoder-seq-length": None, "num-workers": 2,
    "valid-num-workers": 2, "tokenizer-type": None, "tokenizer-name-or-path": None, "vocab-file": None,
    "merge-file": None, "vocab-extra-ids": 0, "reset-position-ids": False, "reset-attention-mask": False,
    "loss-normalization": "micro-batch", "eod-mask-loss": False, "deepspeed_config": None, "zero-stage": 1, "allow-fresh-start": False,
    "trust-checkpoint": False, "average-duplicated-parameters": False, "verify-checkpoint": False, "keep-last": None,
    "async-save": False, "save-delta-only": False, "exit-signal-handler": False, "max-skipped-iterations": None, "distributed-timeout-minutes": 30.0,
}
SWITCHED_OFF = {
    "no-query-key-layer-scaling": "query_key_layer_scaling", "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion", "no-save-rng": "save_rng", "no-load-optim": "load_optim",
    "no-load-rng": "load_rng", "no-log-learnig-rate-to-tensorboard": "log_learning_rate_to_tensorboard",
    "no-log-loss-scale-to-tensorboard": "log_loss_scale_to_tensorboard",
    "no-scatter-gather-tensors-in-pipeline": "scatter_gather_tensors_in_pipeline",
}
WITHOUT_EFFECT = [
    "--deepspeed", "--deepspeed-activation-checkpointing", "--contigious-checkpointing", "--synchronize-each-layer",
    "--accumulate-allreduce-grads-in-fp32", "--use-contiguous-buffers-in-ddp", "--zero-reduce-scatter",
    "--zero-contigious-gradients", "--split-transformers", "--use-pin-memory", "--scattered-embeddings",
    "--memory-centric-tiled-linear", "--no-bias-dropout-fusion", "--abort-on-unmet-fused-kernel-constraints",
    "--init-method-xavier-uniform"]
WITHOUT_EFFECT_VALUED = {"--DDP-impl": "torch", "--zero-reduce-bucket-size": "5_000", "--tile-factor": "2",
                         "--zero-allgather-bucket-size": "0", "--codecarbon-dir": "c", "--remote-device": "none",
                         "--lazy-mpu-init": "false"}
NOT_OFFERED = (
    "--use-bnb-optimizer", "--cpu-optimizer", "--cpu_torch_adam", "--inference", "--lazy-mpu-init true",
    "--distribute-checkpointed-activations", "--partition-activations", "--checkpoint-in-cpu",
    "--profile-backward", "--remote-device cpu", "--remote-device nvme", "--no-save-optim",
    "--num-layers-per-virtual-pipeline-stage 2", "--universal-checkpoint", "--loss-on-targets-only",
    "--reweight-loss-based-on-position-frequency", "--noise-density 0.15", "--mean-noise-span-length 3",
    "--decoder-seq-length 16", "--norm-target-loss", "--prefixlm", "--mtf-overlong drop", "--zero-stage 2", "--zero-stage 3",
    "--zero-stage 7")


@pytest.mark.parametrize("entry", ["pretrain_gpt", "finetune_t0"])
@pytest.mark.parametrize("name, default", DEFAULTS.items())
def test_a_flag_has_its_old_name_and_default(entry, name, default):
    field = name.replace("-", "_")
    action = next(a for a in build_parser(entry)._actions if f"--{name}" in a.option_strings)
    assert action.dest == field
    assert action.default == default and type(action.default) is type(default)


@pytest.mark.parametrize("name, field", SWITCHED_OFF.items())
def test_a_no_flag_turns_a_field_off_that_is_on(name, field):
    assert parse().flags[field] is True
    assert parse(f"{TINY} --{name}").flags[field] is False


def test_the_tables_of_this_test_cover_every_flag():
    named = {f"--{name}" for name in (*DEFAULTS, *SWITCHED_OFF)} | set(WITHOUT_EFFECT) | set(WITHOUT_EFFECT_VALUED)
    named |= {line.split()[0] for line in NOT_OFFERED} | {"--batch-size", "--warmup", "--model-parallel-size"}
    named |= {f"--{part}-weighted-split-paths{end}" for part in ("train", "valid", "test") for end in ("", "-path")}
    named |= {"--num-layers", "--hidden-size", "--num-attention-heads", "--micro-batch-size"}
    table = [flag.name for flags in (*USED.values(), NO_EFFECT, REFUSED) for flag in flags]
    assert set(table) == named and len(table) == len(named)


@pytest.mark.parametrize("flag", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_accepted_and_named(flag):
    assert accepted_without_effect(parse(f"{TINY} {flag}")) == [flag]


@pytest.mark.parametrize("flag, value", WITHOUT_EFFECT_VALUED.items())
def test_a_flag_without_effect_takes_its_value_and_is_named(flag, value):
    assert accepted_without_effect(parse(f"{TINY} {flag} {value}")) == [flag]


def test_nothing_is_named_when_no_such_flag_is_given():
    assert accepted_without_effect(parse()) == []


@pytest.mark.parametrize("line", NOT_OFFERED)
def test_a_flag_that_is_not_offered_is_refused_with_its_value(capsys, line):
    message = refusal(capsys, f"{TINY} {line}")
    assert line in message and len(message.split()) > 6


def test_all_refused_flags_of_a_line_are_named_at_once(capsys):
    """A start on a cluster waits in a queue: one flag a start would cost days."""
    message = refusal(capsys, f"{TINY} --partition-activations --bitfit --universal-checkpoint --noise-density 0.15")
    assert all(words in message for words in ("--partition-activations: ", "--universal-checkpoint: ", "--noise-density 0.15: "))


@pytest.mark.parametrize("old, new", [("--batch-size", "--micro-batch-size"), ("--warmup", "--lr-warmup-fraction"),
                                      ("--model-parallel-size", "--tensor-model-parallel-size")])
def test_a_removed_name_leads_to_the_new_one(capsys, old, new):
    message = refusal(capsys, f"{TINY} {old} 2")
    assert f"{old} 2" in message and new in message


@pytest.mark.parametrize("line", ["--num-layer 2", "--lr-warmup 3", "--frobnicate", "stray"])
def test_unknown_arguments_and_abbreviations_are_errors(capsys, line):
    assert line.split()[0] in refusal(capsys, f"{TINY} {line}")


@pytest.mark.parametrize("text, value", [("true", True), ("1", True), ("YES", True), ("false", False), ("0", False),
                                         ("no", False)])
def test_a_word_flag_means_what_it_says(text, value):
    assert parse(f"{TINY} --eval-only {text}").train.eval_only is value


# --- what the settings hold -------------------------------------------------------------------

def test_settings_of_a_tiny_run_hold_the_defaults_of_config():
    settings = parse()
    assert settings.model.ffn_hidden_size == 128 and settings.model.kv_channels == 8
    assert settings.model.activation == "gelu_tanh" and settings.model.attention_softmax_in_fp32
    assert settings.train.global_batch_size == 2 and settings.parallel.world_size == 1
    assert settings.data.data_path == ("d",) and settings.data.split == "969, 30, 1"
    assert settings.tokenizer.make_vocab_size_divisible_by == 128
    assert settings.model.params_dtype == "fp32" and settings.deepspeed is None
    assert settings.parallel.pp_partition_method == "type:transformer"


def test_every_value_reaches_its_field():
    line = (f"{TINY} --ffn-hidden-size 64 --kv-channels 16 --embed-layernorm --bf16 --seed 7 --clip-grad 0.5 "
            "--skip-train-iteration-range 8-9 2-4 3-5 --bitfit --eval-iters 0 --weight-decay 1e-1 --save s "
            "--save-interval 5 --load l --no-load-optim --reset-progress --allow-fresh-start --log-level info "
            "--reset-attention-mask --num-workers 0 --fp32-residual-connection --log-path p --zero-stage 0")
    s = parse(line)
    assert (s.model.ffn_hidden_size, s.model.kv_channels, s.model.projection_size) == (64, 16, 64)
    assert s.model.embed_layernorm and s.model.params_dtype == "bf16" and s.model.fp32_residual_connection
    assert s.train.seed == 7 and s.train.skip_train_iteration_range == ((2, 5), (8, 9)) and s.train.eval_iters == 0
    assert s.optimizer.bitfit and s.optimizer.clip_grad == .5 and s.optimizer.weight_decay == .1
    assert s.optimizer.zero_stage == 0
    assert (s.checkpoint.save, s.checkpoint.save_interval, s.checkpoint.load) == ("s", 5, "l")
    assert not s.checkpoint.load_optim and s.checkpoint.reset_progress and s.checkpoint.allow_fresh_start
    assert s.checkpoint.save_rng and s.checkpoint.load_rng and not s.checkpoint.finetune
    assert s.logging.log_level == "info" and s.logging.log_path == "p"
    assert s.data.reset_attention_mask and s.model.reset_attention_mask and s.data.num_workers == 0


@pytest.mark.parametrize("line, activation", [
    ("", "gelu_tanh"), ("--openai-gelu", "gelu_tanh"), ("--no-bias-gelu-fusion", "gelu_erf"),
    ("--no-bias-gelu-fusion --openai-gelu", "gelu_tanh"), ("--no-bias-gelu-fusion --onnx-safe true", "gelu_erf"),
    ("--onnx-safe false", "gelu_tanh"), ("--no-bias-gelu-fusion --glu-activation swiglu", "swiglu"),
])
def test_the_activation_follows_from_the_flags(line, activation):
    assert parse(f"{TINY} {line}").model.activation == activation


@pytest.mark.parametrize("line, in_fp32", [("", True), ("--no-query-key-layer-scaling", False),
                                           ("--no-query-key-layer-scaling --attention-softmax-in-fp32", True)])
def test_softmax_is_in_fp32_with_layer_scaling_or_when_asked(line, in_fp32):
    assert parse(f"{TINY} {line}").model.attention_softmax_in_fp32 is in_fp32


def test_the_former_name_of_the_sequence_length_is_read():
    s = parse(f"{TINY} --encoder-seq-length 16", without=["--seq-length"])
    assert s.model.seq_length == s.flags["seq_length"] == s.flags["encoder_seq_length"] == 16


def test_pretrain_gpt_reads_gpt2_files_by_default(tmp_path):
    for name in ("v", "m"):
        (tmp_path / name).write_text("")
    s = parse(f"{TINY} --vocab-file {tmp_path}/v --merge-file {tmp_path}/m",
              without=["--tokenizer-type", "--tokenizer-name-or-path"])
    assert s.tokenizer.tokenizer_type == s.flags["tokenizer_type"] == "GPT2BPETokenizer"


def test_weighted_groups_come_from_arguments_and_from_files(tmp_path):
    (tmp_path / "v.txt").write_text('"a: 1 0.9:1 /d/a" "b: 1 0.9:1 /d/b"\n')
    s = parse(f"{TINY} --train-weighted-split-paths 'train: 0.6 0:0.9 /d/a, 0.4 0:0.9 /d/b' "
              f"--valid-weighted-split-paths-path {tmp_path}/v.txt", without=["--data-path"])
    assert s.data.train_groups[0].weights == (.6, .4) and s.data.train_groups[0].paths == ("/d/a", "/d/b")
    assert [group.name for group in s.data.valid_groups] == ["a", "b"] and s.data.test_groups == ()


# --- rules ------------------------------------------------------------------------------------

GROUP = "--train-weighted-split-paths 'train: 1 0:1 /d'"
BAD = [  # flags added, flags taken away, words the message must hold
    ("", ["--num-layers"], "--num-layers required"),
    ("", ["--hidden-size"], "--hidden-size required"),
    ("", ["--micro-batch-size"], "--micro-batch-size required"),
    ("", ["--seq-length"], "--seq-length required"),
    ("--encoder-seq-length 16", [], "--seq-length --encoder-seq-length 16"),
    ("--num-layers 0", [], "--num-layers '0'"),
    ("--num-layers two", [], "--num-layers 'two'"),
    ("--seed 0", [], "--seed '0'"),
    ("--seed -3", [], "--seed '-3'"),
    ("--micro-batch-size 1.5", [], "--micro-batch-size '1.5'"),
    ("--hidden-dropout 1", [], "--hidden-dropout '1'"),
    ("--attention-dropout -0.1", [], "--attention-dropout '-0.1'"),
    ("--attention-dropout nan", [], "--attention-dropout 'nan'"),
    ("--lr inf", [], "--lr 'inf'"),
    ("--clip-grad -1", [], "--clip-grad '-1'"),
    ("--adam-beta2 1.0", [], "--adam-beta2 '1.0'"),
    ("--optimizer lion", [], "--optimizer lion adam sgd"),
    ("--position-embedding-type t5", [], "--position-embedding-type t5 alibi"),
    ("--dataloader-type random", [], "--dataloader-type random cyclic"),
    ("--data-impl csv", [], "--data-impl csv mmap"),
    ("--eval-only maybe", [], "--eval-only 'maybe' true"),
    ("--hidden-size 30", [], "--hidden-size 30 --num-attention-heads 4 --kv-channels"),
    ("--max-position-embeddings 15", [], "--max-position-embeddings 15 --seq-length 16 absolute"),
    ("", ["--max-position-embeddings"], "--max-position-embeddings --seq-length 16"),
    ("--position-embedding-type alibi", ["--max-position-embeddings"], "--max-position-embeddings alibi"),
    ("--position-embedding-type rotary", [], "--max-position-embeddings 16 rotary"),
    ("--position-embedding-type rotary --kv-channels 7", ["--max-position-embeddings"], "rotary 7 --kv-channels"),
    ("--glu-activation geglu", [], "--glu-activation geglu --no-bias-gelu-fusion"),
    ("--onnx-safe true", [], "--onnx-safe --no-bias-gelu-fusion"),
    ("--no-bias-gelu-fusion --openai-gelu --onnx-safe 1", [], "--openai-gelu --onnx-safe"),
    ("--no-bias-gelu-fusion --openai-gelu --glu-activation liglu", [], "--openai-gelu --glu-activation liglu"),
    ("--fp16 --bf16", [], "--fp16 --bf16"),
    ("--fp32-residual-connection", [], "--fp32-residual-connection --bf16"),
    ("--bf16 --fp16-lm-cross-entropy", [], "--fp16-lm-cross-entropy --fp16"),
    ("--bf16 --loss-scale 12", [], "--loss-scale 12 --fp16 bf16"),
    ("--fp16 --initial-loss-scale 1000", [], "--initial-loss-scale 1000 4096"),
    ("--fp16 --min-loss-scale 0.5", [], "--min-loss-scale 0.5"),
    ("--fp16 --initial-loss-scale 4 --min-loss-scale 8", [], "--min-loss-scale 8 --initial-loss-scale 4"),
    ("--tensor-model-parallel-size 2", [], "--tensor-model-parallel-size 2 world size 1"),
    ("--pipeline-model-parallel-size 3", [], "--pipeline-model-parallel-size 3 world size 1"),
    ("--pp-partition-method uniform", [], "--pp-partition-method uniform type:transformer"),
    ("--pp-partition-method type:nothing", [], "--pp-partition-method type:nothing 0"),
    ("--pp-partition-method type:(", [], "--pp-partition-method type:("),
    ("--global-batch-size 5", [], "--global-batch-size 5 --micro-batch-size 2 4 6"),
    ("--train-samples 100", [], "--train-iters 10 --train-samples 100"),
    ("", ["--train-iters"], "--train-iters --train-samples"),
    ("--lr-decay-samples 100", [], "--lr-decay-samples 100 --train-iters 10"),
    ("--lr-warmup-samples 100", [], "--lr-warmup-samples 100 --train-iters 10"),
    ("--rampup-batch-size 2 2 100 --global-batch-size 8", [], "--rampup-batch-size 2 2 100 --train-iters 10"),
    ("--train-samples 100 --lr-decay-iters 5", ["--train-iters"], "--lr-decay-iters 5 --train-samples 100"),
    ("--train-samples 100 --lr-warmup-iters 5", ["--train-iters"], "--lr-warmup-iters 5 --train-samples 100"),
    ("--train-samples 7 --global-batch-size 8", ["--train-iters"], "--train-samples 7 8"),
    ("--train-samples 100 --rampup-batch-size 2 2 --global-batch-size 8", ["--train-iters"],
     "--rampup-batch-size 2 values START"),
    ("--train-samples 100 --rampup-batch-size 8 2 50 --global-batch-size 8", ["--train-iters"],
     "--rampup-batch-size 8 2 50 --global-batch-size 8"),
    ("--train-samples 100 --rampup-batch-size 2 4 50 --global-batch-size 8", ["--train-iters"],
     "--rampup-batch-size 2 4 50 --global-batch-size 8"),
    ("--train-samples 100 --rampup-batch-size 2 3 50 --global-batch-size 8", ["--train-iters"],
     "--rampup-batch-size 2 3 50 size 5 --micro-batch-size 2"),
    ("--min-lr 1e-2", [], "--min-lr 0.01 --lr 0.001"),
    ("", ["--lr"], "--lr --eval-only"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", [], "--lr-warmup-fraction 0.1 --lr-warmup-iters 1"),
    ("--lr-warmup-fraction 1.5", [], "--lr-warmup-fraction '1.5'"),
    ("--lr-warmup-iters 10", [], "--lr-warmup-iters 10 --train-iters 10"),
    ("--lr-warmup-iters 5 --lr-decay-iters 4", [], "--lr-warmup-iters 5 --lr-decay-iters 4"),
    ("--override-lr-scheduler --use-checkpoint-lr-scheduler", [],
     "--override-lr-scheduler --use-checkpoint-lr-scheduler"),
    ("--save out", [], "--save out --save-interval"),
    ("--skip-train-iteration-range 9-3", [], "--skip-train-iteration-range 9-3 A-B"),
    ("--skip-train-iteration-range 0-3", [], "--skip-train-iteration-range 0-3"),
    ("--skip-train-iteration-range 3", [], "--skip-train-iteration-range 3"),
    ("", ["--data-path"], "--data-path --train-weighted-split-paths"),
    (GROUP, [], "--data-path d --train-weighted-split-paths"),
    (f"{GROUP} --split 9,1", ["--data-path"], "--split 9,1 --train-weighted-split-paths"),
    (f"{GROUP} --train-weighted-split-paths-path f", ["--data-path"], "--train-weighted-split-paths-path f"),
    ("--train-weighted-split-paths 'train: 1 1:0 /d'", ["--data-path"], "--train-weighted-split-paths 1:0"),
    ("--valid-weighted-split-paths 'v: 1 0:1 /d'", ["--data-path"], "--train-weighted-split-paths --eval-only"),
    ("--train-weighted-split-paths-path /nowhere", ["--data-path"], "--train-weighted-split-paths-path /nowhere"),
    ("--data-path 1 a 2", [], "--data-path 1 a 2"),
    ("--split 1,2,3,4", [], "--split 1,2,3,4"),
    ("--tokenizer-type Bert", [], "--tokenizer-type Bert PretrainedFromHF"),
    ("", ["--tokenizer-name-or-path"], "--tokenizer-name-or-path PretrainedFromHF"),
    ("", ["--tokenizer-type"], "--vocab-file GPT2BPETokenizer"),
    ("--vocab-file v", [], "--vocab-file v PretrainedFromHF"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file /nowhere --merge-file m", ["--tokenizer-name-or-path"],
     "--vocab-file /nowhere"),
    ("--pad-vocab-size-to 250", [], "--pad-vocab-size-to 250 --make-vocab-size-divisible-by 128"),
    ("--deepspeed_config /nowhere.json", [], "--deepspeed_config /nowhere.json"),
]


@pytest.mark.parametrize("added, removed, words", BAD)
def test_a_broken_rule_is_refused_naming_flags_and_values(capsys, added, removed, words):
    message = refusal(capsys, f"{' '.join(_drop(removed))} {added}")
    assert message.startswith("pretrain_gpt.py: error: ")
    assert all(word in message for word in words.split()), message


def _drop(removed):
    words = TINY.split()
    for flag in removed:
        at = words.index(flag)
        del words[at:at + 2]
    return words


@pytest.mark.parametrize("added, size, words", [
    ("--tensor-model-parallel-size 3", 3, "--num-attention-heads 4 --tensor-model-parallel-size 3"),
    ("--tensor-model-parallel-size 2 --ffn-hidden-size 33", 2, "--ffn-hidden-size 33 --tensor-model-parallel-size 2"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 4 6"),
    ("--pipeline-model-parallel-size 3", 3, "--num-layers 2 type:transformer --pipeline-model-parallel-size 3"),
    ("--pipeline-model-parallel-size 5 --pp-partition-method 'type:transformer|embedding'", 5,
     "--num-layers 2 type:transformer|embedding 4 --pipeline-model-parallel-size 5"),
    ("--global-batch-size 10 --micro-batch-size 4", 2, "--global-batch-size 10 --micro-batch-size 4 8 16"),
    ("--tensor-model-parallel-size 2 --pad-vocab-size-to 201 --make-vocab-size-divisible-by 1", 2,
     "--pad-vocab-size-to 201 --tensor-model-parallel-size 2"),
])
def test_what_does_not_divide_over_the_grid_is_refused(capsys, added, size, words):
    message = refusal(capsys, f"{TINY} {added}", environ=world(size))
    assert all(word in message for word in words.split()), message


TP, PP, HEADS = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-attention-heads"
NOT_DIVISIBLE = [  # flags, ranks, words of the sentence, the choices in it and flags with one of them
    (f"{HEADS} 6 --hidden-size 36 {TP} 4", 4, f"{HEADS} 6; {TP} 4", "1 or 2 would fit", f"{HEADS} 6 --hidden-size 36 {TP} 2"),
    # as many layers as degrees, or layers that divide where heads do not, are no help
    (f"--num-layers 4 {HEADS} 6 --hidden-size 36 {TP} 4", 12, f"{HEADS} 6; {TP} 4", "1 or 2 or 3 or 6 would fit",
     f"--num-layers 4 {HEADS} 6 --hidden-size 36 --ffn-hidden-size 36 {TP} 3"),
    (f"{TP} 2 {PP} 2", 6, f"{TP} 2; {PP} 2; = 4; world size 6", "start 4 or 8 ranks", f"{TP} 2 {PP} 1"),
    ("--global-batch-size 10 --micro-batch-size 4", 2, "--global-batch-size 10; --micro-batch-size 4; data parallel size 2 = 8",
     "try 8 or 16", "--global-batch-size 16 --micro-batch-size 4"),
    (f"{TP} 2 --global-batch-size 10 --micro-batch-size 4", 4, "--global-batch-size 10; data parallel size 2 = 8",
     "try 8 or 16", f"{TP} 2 --global-batch-size 8 --micro-batch-size 4"),
    ("--hidden-size 30", 1, f"--hidden-size 30; {HEADS} 4", "try --hidden-size 28 or 32, or give --kv-channels",
     "--hidden-size 28"),
]


@pytest.mark.parametrize("entry", ["pretrain_gpt", "finetune_t0"])
@pytest.mark.parametrize("added, size, words, choices, mended", NOT_DIVISIBLE)
def test_what_does_not_divide_ends_a_job_in_one_sentence_before_it_begins(entry, added, size, words, choices, mended,
                                                                          monkeypatch, capsys, tmp_path):
    """deepspeedai/DeepSpeed#3634 and the like: heads, ranks and batches checked late, against the wrong number, or cut in silence."""
    begun = []
    monkeypatch.setattr("megatron.launch.run_task", lambda *_: begun.append(None))  # groups, files: all behind it
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(entry).main

    def start(flags):
        monkeypatch.setattr(sys, "argv", [entry, *shlex.split(f"{TINY} {flags} --save run --save-interval 5")])
        for rank in range(size):
            for name, value in world(size, rank).items():
                monkeypatch.setenv(name, value)
            try:
                yield main()
            except SystemExit as exit:
                yield exit.code

    assert list(start(added)) == [2] * size
    out, sentence = capsys.readouterr()
    assert out == "" and sentence.count("\n") == 1 and all(word in sentence for word in [*words.split("; "), choices]), sentence
    assert not begun and not list(tmp_path.iterdir())
    assert list(start(mended)) == [None] * size == begun, "one of the choices does"


def test_the_data_parallel_size_counts_neither_tp_nor_pp():
    s = parse(f"{TINY} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", environ=world(8, rank=5))
    assert (s.parallel.data_parallel_size, s.train.global_batch_size) == (2, 4)
    assert (s.parallel.rank, s.parallel.world_size, s.parallel.local_rank) == (5, 8, 5)


def test_a_run_that_only_evaluates_needs_no_learning_rate():
    s = parse(f"{TINY} --eval-only true", without=["--lr"])
    assert s.optimizer.lr is None and s.train.eval_only


# --- help and dump ----------------------------------------------------------------------------

@pytest.mark.parametrize("entry", ["pretrain_gpt", "finetune_t0"])
def test_help_names_every_flag_without_importing_torch(entry):
    code = ("import sys\nfrom megatron.arguments import parse_arguments\n"
            f"try: parse_arguments(['--help'], entry={entry!r}, environ={{}})\n"
            "except SystemExit as e: assert e.code == 0\n"
            "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    for flag in (flag for flags in (*USED.values(), NO_EFFECT, REFUSED) for flag in flags if not flag.hidden):
        assert f"  {flag.name}" in done.stdout and flag.help
    assert all(f"\n{title}:\n" in done.stdout for title in USED)
    assert "--batch-size" not in done.stdout.split()


def test_the_dump_pads_names_to_48_and_sorts_without_case():
    lines = format_argument_dump(parse(f"{TINY} --DDP-impl torch")).splitlines()
    assert lines[0].startswith("-----") and lines[-1].startswith("-----")
    body = lines[1:-1]
    names = [line.split()[0] for line in body]
    assert names == sorted(names, key=str.lower)
    assert names.index("DDP_impl") == names.index("deepspeed_config") - 2 + ("deepspeed" not in names)
    assert "  lr " + "." * 46 + " 0.001" in body
    assert "  micro_batch_size " + "." * 32 + " 2" in body


def test_all_flags_are_plain_values_that_json_can_hold(tmp_path):
    flags = parse(f"{TINY} --skip-train-iteration-range 3-4").flags
    assert json.loads(json.dumps(flags)) == flags
