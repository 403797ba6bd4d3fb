"""The launch lines of old scripts."""

import json

import pytest
from command_lines import TINY, parse, refusal, world

from megatron.arguments import accepted_without_effect

# --- launch lines of old scripts --------------------------------------------------------------

def write_json(path, mbs, gbs, dtype, stage):
    """The file that the old SLURM scripts write before each start."""
    section = {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
                        "min_loss_scale": 1, "initial_scale_power": 12}} if dtype == "fp16" else {
                            "bf16": {"enabled": True}}
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": mbs, "train_batch_size": gbs, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage}, **section, "steps_per_print": 2000, "wall_clock_breakdown": False}))


SHAPES = {"350M": (24, 1024, 16), "760M": (24, 1536, 16), "1B3": (24, 2048, 16), "2B5": (30, 2560, 32),
          "6B3": (30, 4096, 32), "176B": (70, 14336, 112)}


def launch_line(folder, size, tp, pp, mbs, gbs, dtype, stage):
    layers, hidden, heads = SHAPES[size]
    write_json(folder / "ds.json", mbs, gbs, dtype, stage)
    (folder / "train.txt").write_text('"train: 0.5 0:0.95 /d/a, 0.5 0:0.95 /d/b"\n')
    (folder / "valid.txt").write_text('"valid_en: 1 0.95:1 /d/a" "valid_fr: 1 0.95:1 /d/b"\n')
    return f"""
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}
        --pp-partition-method 'type:transformer|embedding'
        --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048
        --max-position-embeddings 2048 --micro-batch-size {mbs} --global-batch-size {gbs}
        --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer --init-method-std 0.0048
        --embed-layernorm --{dtype} --seed 42 --position-embedding-type alibi --checkpoint-activations
        --abort-on-unmet-fused-kernel-constraints --kill-switch-path /k --pad-vocab-size-to 250880
        --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
        --exit-duration-in-mins 5990 --log-interval 1 --save-interval 100
        --tensorboard-dir /t --tensorboard-queue-size 5 --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --save /s --load /s
        --train-weighted-split-paths-path {folder}/train.txt --valid-weighted-split-paths-path {folder}/valid.txt
        --dataloader-type single --data-impl mmap --distributed-backend nccl --num-workers 2
        --deepspeed --deepspeed_config {folder}/ds.json --zero-stage {stage} --deepspeed-activation-checkpointing
    """


PRETRAIN = [
    ("350M", 32, 1, 1, 1, 256, 32, "3e-4", "1e-5", "fp16"), ("760M", 32, 1, 2, 1, 256, 16, "2.5e-4", "1e-5", "fp16"),
    ("1B3", 64, 2, 2, 1, 512, 16, "2e-4", "1e-5", "fp16"), ("2B5", 128, 4, 4, 1, 512, 32, "1.6e-4", "1e-5", "fp16"),
    ("6B3", 128, 4, 4, 1, 512, 32, "1.2e-4", "1e-5", "fp16"), ("176B", 192, 4, 12, 2, 2048, 16, "6e-5", "6e-6", "bf16"),
    ("176B", 384, 4, 12, 2, 2048, 16, "6e-5", "6e-6", "bf16"),
]


@pytest.mark.parametrize("size, ranks, tp, pp, mbs, gbs, step, lr, min_lr, dtype", PRETRAIN)
def test_the_pretraining_launch_lines_parse(tmp_path, size, ranks, tp, pp, mbs, gbs, step, lr, min_lr, dtype):
    stage = 0 if dtype == "bf16" else 1
    line = launch_line(tmp_path, size, tp, pp, mbs, gbs, dtype, stage) + f"""
        --rampup-batch-size 192 {step} 9_765_625 --train-samples 220_000_000 --lr {lr} --min-lr {min_lr}
        --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --weight-decay 1e-1
        --eval-interval 1000 --eval-iters 1 --valid-num-workers 0 --sync-tp-duplicated-parameters"""
    s = parse(line, environ=world(ranks, ranks - 1))
    assert s.parallel.data_parallel_size == ranks // (tp * pp)
    assert s.train.rampup_batch_size == (192, step, 9_765_625) and s.train.train_samples == 220_000_000
    assert s.optimizer.lr_warmup_samples == 183_105 and s.model.params_dtype == dtype
    assert s.optimizer.zero_stage == stage
    assert s.optimizer.initial_loss_scale == (4096 if dtype == "fp16" else 2.0**32)
    assert s.optimizer.loss_scale_window == (500 if dtype == "fp16" else 1000)
    assert s.parallel.sync_tp_duplicated_parameters
    assert accepted_without_effect(s) == ["--deepspeed",
                                          "--deepspeed-activation-checkpointing",
                                          "--abort-on-unmet-fused-kernel-constraints"]


FINETUNE = [
    ("350M", 32, 1, 1, 1, 1024, "fp16", 10), ("760M", 32, 1, 2, 1, 1024, "fp16", 10),
    ("1B3", 64, 2, 2, 1, 2048, "fp16", 10), ("2B5", 128, 1, 2, 1, 2048, "fp16", 2),
    ("6B3", 64, 1, 1, 4, 2048, "fp16", 10), ("176B", 288, 1, 72, 1, 2048, "bf16", 10),
]


@pytest.mark.parametrize("size, ranks, tp, pp, mbs, gbs, dtype, eval_iters", FINETUNE)
def test_the_multitask_launch_lines_parse(tmp_path, size, ranks, tp, pp, mbs, gbs, dtype, eval_iters):
    stage = 0 if dtype == "bf16" else 1
    line = launch_line(tmp_path, size, tp, pp, mbs, gbs, dtype, stage) + f"""
        --train-samples 6_348_800 --lr 2e-5 --lr-decay-style constant --lr-warmup-samples 0 --weight-decay 1e-4
        --no-load-optim --norm-target-loss --reset-progress --eval-interval 125 --eval-iters {eval_iters}"""
    s = parse(line, entry="finetune_t0", environ=world(ranks))
    assert s.optimizer.lr_decay_style == "constant" and s.checkpoint.reset_progress and not s.checkpoint.load_optim
    assert s.parallel.data_parallel_size == ranks // (tp * pp)  # 72 stages: 70 blocks, two ends
    assert s.train.global_batch_size == gbs and s.flags["norm_target_loss"] is True


def test_the_bitfit_launch_line_parses(tmp_path):
    line = launch_line(tmp_path, "6B3", 1, 1, 4, 2048, "fp16", 1) + """
        --train-samples 6_348_800 --lr 4e-5 --lr-decay-style constant --lr-warmup-samples 0 --weight-decay 1e-4
        --bitfit --no-load-optim --save-interval 2 --eval-interval 250 --eval-iters 50"""
    s = parse(line, entry="finetune_t0", environ=world(64))
    assert s.optimizer.bitfit and s.checkpoint.save_interval == 2 and s.parallel.data_parallel_size == 64


@pytest.mark.parametrize("line, words", [
    ("--position-embedding-type alibi --tokenizer-type GPT2BPETokenizer", "GPT2BPETokenizer PretrainedFromHF"),
    ("--tokenizer-type GPT2BPETokenizer", "GPT2BPETokenizer PretrainedFromHF"),
    ("--loss-normalization targets", "--loss-normalization targets global-targets"),
])
def test_finetune_t0_has_rules_of_its_own(capsys, line, words):
    message = refusal(capsys, f"{TINY} {line}", entry="finetune_t0")
    assert message.startswith("finetune_t0.py: error: ") and all(word in message for word in words.split()), message
