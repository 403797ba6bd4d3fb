"""Every flag of the command line, as data.

A flag is used, accepted without effect (what it asks for always holds here), or
refused with a sentence (it asks for something this program does not have).
``megatron.arguments`` turns the table into a parser. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENTRIES = ("pretrain_gpt", "finetune_t0")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. ``kind`` None makes it a switch; ``--no-x`` switches set field ``x`` to False."""

    name: str
    kind: Callable[[str], Any] | None = None
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] | None = None
    many: bool = False
    empty: bool = False
    """with ``many``: the flag may stand without a value, and a rule says what is missing"""
    required: bool = False
    dest: str = ""
    aliases: tuple[str, ...] = ()
    entry: str | None = None
    """the only entry point that has this flag; refused in others"""
    no_effect: bool = False
    refused: str = ""
    """why not, and what to do instead; empty for a flag that is accepted"""
    neutral: tuple[str, ...] = ()
    """values of a refused flag that ask for nothing and are accepted"""
    hidden: bool = False

    @property
    def negative(self) -> bool:
        """Whether giving the flag switches something off."""
        return self.kind is None and self.name.startswith("--no-")

    @property
    def field(self) -> str:
        """Name in the parsed arguments and in the settings."""
        return self.dest or self.name.removeprefix("--no-" if self.negative else "--").replace("-", "_")


def _number(text: str, kind: type, allowed: Callable[[Any], bool], wanted: str) -> Any:
    try:
        value = kind(text) if text.isascii() else None  # int() reads the digits of every script
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or not allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def count(text: str) -> int:
    """A whole number from 1; underscores may group its digits."""
    return _number(text, int, lambda v: v >= 1, "a whole number from 1")


def whole(text: str) -> int:
    """A whole number from 0; underscores may group its digits."""
    return _number(text, int, lambda v: v >= 0, "a whole number from 0")


def positive(text: str) -> float:
    """A finite number above 0."""
    return _number(text, float, lambda v: v > 0, "a number above 0")


def amount(text: str) -> float:
    """A finite number from 0."""
    return _number(text, float, lambda v: v >= 0, "a number from 0")


def text(given: str) -> str:
    """Any text but none: what a shell makes of an unset variable is no folder, file or name."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"{given!r} is empty; give a value, or leave the flag out")
    return given


def share(text: str) -> float:
    """A number in [0, 1)."""
    return _number(text, float, lambda v: 0 <= v < 1, "a number from 0 to below 1")


def word(text: str) -> bool:
    """A truth value. [BUG] in the original any word, even ``false``, meant true."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of true, false, yes, no, 1, 0")
    return value


def _used(name: str, kind: Any = None, default: Any = None, help: str = "", **more: Any) -> Flag:
    return Flag(name=name, kind=kind, default=default, help=help, **more)


def _switch(name: str, help: str, **more: Any) -> Flag:
    return Flag(name=name, help=help, default=name.startswith("--no-"), **more)


def _idle(name: str, help: str, kind: Any = None, **more: Any) -> Flag:
    return Flag(name=name, kind=kind, help=help, no_effect=True, default=False if kind is None else None, **more)


def _refused(name: str, why: str, **more: Any) -> Flag:
    return Flag(name=name, help=why, refused=why, **more)


_LEVELS = ("debug", "info", "warning", "error", "critical")

USED: dict[str, tuple[Flag, ...]] = {
    "network": (
        _used("--num-layers", count, required=True, help="transformer blocks"),
        _used("--hidden-size", count, required=True, help="width of the model"),
        _used("--num-attention-heads", count, required=True, help="attention heads"),
        _used("--ffn-hidden-size", count, help="inner width of the MLP; 4 x hidden size if not given"),
        _used("--kv-channels", count, help="width of one head; hidden size / heads if not given"),
        _used("--max-position-embeddings", count,
              help="largest position; at least the sequence length, absent with rotary"),
        _used("--position-embedding-type", str, "absolute", "kind of positions",
              choices=("absolute", "rotary", "alibi")),
        _used("--make-vocab-size-divisible-by", count, 128, "the padded vocabulary is a multiple of this (x TP)"),
        _used("--pad-vocab-size-to", count, help="exact size of the padded vocabulary"),
        _used("--layernorm-epsilon", positive, 1e-5, "epsilon of the LayerNorms of the blocks and the last one"),
        _switch("--embed-layernorm", "LayerNorm after the word embedding"),
        _switch("--apply-residual-connection-post-layernorm", "the residual is the output of the LayerNorm"),
        _switch("--openai-gelu", "tanh GELU also with --no-bias-gelu-fusion"),
        _used("--onnx-safe", word, help="erf GELU for export; with --no-bias-gelu-fusion"),
        _used("--glu-activation", str, help="gated MLP; with --no-bias-gelu-fusion",
              choices=("liglu", "geglu", "reglu", "swiglu")),
        _switch("--no-bias-gelu-fusion", "exact (erf) GELU instead of the tanh form"),
        _switch("--no-masked-softmax-fusion", "explicit attention instead of torch's fused one"),
    ),
    "regularisation and optimizer": (
        _used("--attention-dropout", share, 0.1, "dropout of attention weights"),
        _used("--hidden-dropout", share, 0.1, "dropout of embeddings and residual branches"),
        _used("--weight-decay", amount, 0.01, "decay of weights (never of biases and LayerNorms)"),
        _used("--clip-grad", amount, 1.0, "largest gradient norm, 0 for no limit; the DeepSpeed JSON may give it"),
        _used("--optimizer", str, "adam", "update rule", choices=("adam", "sgd")),
        _used("--adam-beta1", share, 0.9, "decay of Adam's first moment"),
        _used("--adam-beta2", share, 0.999, "decay of Adam's second moment"),
        _used("--adam-eps", positive, 1e-8, "Adam's epsilon"),
        _used("--sgd-momentum", share, 0.9, "momentum of SGD"),
        _switch("--bitfit", "train the biases only; every weight is frozen"),
        _used("--bitfit-bias-terms", str, "all", many=True, empty=True,
              help="biases that --bitfit trains: all, or some of query key value attention_output "
                   "mlp_intermediate mlp_output layernorm"),
    ),
    "training": (
        _used("--micro-batch-size", count, required=True, help="samples per rank and pass"),
        _used("--global-batch-size", count, help="samples per update; micro batch x DP if not given"),
        _used("--rampup-batch-size", count, many=True,
              help="START INCREMENT SAMPLES: batch size grows over so many samples"),
        _used("--train-iters", count, help="updates to make; this or --train-samples"),
        _used("--train-samples", count, help="samples to train on; this or --train-iters"),
        _used("--seed", count, 1234, "random seed, above 0"),
        _used("--init-method-std", positive, 0.02, "standard deviation of initial weights"),
        _switch("--checkpoint-activations", "recompute activations in the backward pass"),
        _used("--checkpoint-num-layers", count, 1, "blocks recomputed together"),
        _used("--exit-interval", count, help="save and exit at multiples of this iteration"),
        _used("--exit-duration-in-mins", count, help="save and exit after so many minutes"),
        _used("--kill-switch-path", str, help="save and exit when this file exists"),
        _switch("--exit-signal-handler", "SIGTERM or SIGUSR1 on any rank: save and exit with code 75 (requeue); "
                "a second one quits at once"),
        _used("--max-skipped-iterations", count, help="give up, without saving, after so many skipped updates in a row"),
        _used("--skip-train-iteration-range", str, many=True, help="A-B ...: iterations whose data is discarded"),
        _used("--eval-only", word, False, "evaluate, do not train"),
    ),
    "learning rate": (
        _used("--lr", amount, help="highest learning rate; required for training"),
        _used("--min-lr", amount, 0.0, "lowest rate of the decay"),
        _used("--lr-decay-style", str, "linear", "shape of the decay", choices=("constant", "linear", "cosine")),
        _used("--lr-decay-iters", count, help="decay ends here; the run's length if not given"),
        _used("--lr-decay-samples", count, help="decay ends here; the run's length if not given"),
        _used("--lr-decay-tokens", count, help="decay by tokens seen and end here"),
        _used("--lr-warmup-fraction", share, help="warm-up as a share of the decay length"),
        _used("--lr-warmup-iters", whole, 0, "iterations of linear warm-up"),
        _used("--lr-warmup-samples", whole, 0, "samples of linear warm-up"),
        _switch("--override-lr-scheduler", "on load, schedule constants of the command line win"),
        _switch("--use-checkpoint-lr-scheduler", "on load, schedule constants of the checkpoint win"),
    ),
    "checkpoints": (
        _used("--save", str, help="folder to write checkpoints to"),
        _used("--save-interval", count, help="iterations between checkpoints; required with --save"),
        _used("--load", str, help="folder to read a checkpoint from"),
        _switch("--no-save-rng", "leave random states out of checkpoints"),
        _switch("--no-load-optim", "load weights only: no optimizer, schedule or counters of the engine"),
        _switch("--no-load-rng", "keep fresh random states"),
        _switch("--finetune", "start at iteration 0 with fresh random states"),
        _switch("--reset-progress", "start at iteration 0 and sample 0, ignoring the checkpoint's arguments"),
        _switch("--allow-fresh-start", "start from random weights when --load holds no checkpoint"),
        _switch("--trust-checkpoint", "unpickle checkpoint files that hold more than tensors and plain values; "
                "such a file can run code, so give it for files of people you trust"),
        _switch("--average-duplicated-parameters", "copies over TP that differ in the checkpoint are averaged; "
                "without it they are an error"),
        _switch("--verify-checkpoint", "compare checksums with the manifest before loading, not sizes alone"),
        _used("--keep-last", count, help="checkpoints kept in --save; older ones are removed after each save"),
        _switch("--async-save", "write checkpoints while training goes on"),
        _switch("--save-delta-only", "with --bitfit: save what trains, not the frozen weights of the base"),
    ),
    "precision": (
        _switch("--fp16", "weights in float16"),
        _switch("--bf16", "weights in bfloat16"),
        _used("--loss-scale", positive, help="fixed loss scale for fp16; dynamic if not given"),
        _used("--initial-loss-scale", positive, 2.0**32, "first dynamic loss scale, a power of two"),
        _used("--min-loss-scale", positive, 1.0, "lowest dynamic loss scale"),
        _used("--loss-scale-window", count, 1000, "updates without overflow before the scale doubles"),
        _used("--hysteresis", count, 2, "overflows before the scale halves"),
        _switch("--fp32-residual-connection", "residual stream in float32; needs --fp16 or --bf16"),
        _switch("--no-query-key-layer-scaling", "do not divide and multiply attention scores by the layer number"),
        _switch("--attention-softmax-in-fp32", "softmax in float32; always so with query-key layer scaling"),
        _switch("--fp16-lm-cross-entropy", "cross entropy in float16; needs --fp16"),
    ),
    "distributed": (
        _used("--tensor-model-parallel-size", count, 1, "ranks that share each layer (TP)"),
        _used("--pipeline-model-parallel-size", count, 1, "stages of the pipeline (PP)"),
        _used("--pp-partition-method", str,
              help="type:REGEX, layers whose class the stages share equally; type:transformer if not given"),
        _used("--distributed-backend", str, "nccl", "gloo takes over where there is no accelerator",
              choices=("nccl", "gloo")),
        _used("--distributed-timeout-minutes", positive, 30.0,
              "how long ranks wait for each other, at the start and in every exchange"),
        _switch("--no-scatter-gather-tensors-in-pipeline", "do not split activations over TP between stages"),
        _used("--local_rank", whole, help="rank on this node; must not contradict the launcher (docs/launching.md)",
              aliases=("--local-rank",)),
        _switch("--use-cpu-initialization", "draw whole weights on the CPU, then slice: equal at any TP"),
        _used("--deepspeed_config", str, help="DeepSpeed JSON; must agree with the flags, may be left out"),
        _switch("--sync-tp-duplicated-parameters",
                "compare what all TP ranks hold alike (LayerNorms, row biases) each iteration, repair from TP rank 0"),
        _used("--check-tp-duplicated-parameters", count, 0,
              "compare it every N iterations and name what differs; 0 for never"),
        _used("--zero-stage", whole, 1, "0 or 1; optimizer state is sharded (stage 1) in either case"),
    ),
    "validation and logging": (
        _used("--eval-iters", whole, 100, "batches per evaluation; 0 for none"),
        _used("--eval-interval", count, 1000, "iterations between evaluations"),
        _used("--log-interval", count, 100, "iterations per log line"),
        _used("--log-level", str, help="verbosity of rank 0", choices=_LEVELS),
        _used("--log-level-replica", str, help="verbosity of other ranks", choices=_LEVELS),
        _switch("--log-params-norm", "norm of the parameters in the log line"),
        _used("--tensorboard-dir", str, help="folder for event files"),
        _used("--tensorboard-log-interval", count, 1, "iterations between scalars"),
        _used("--tensorboard-queue-size", count, 1000, "events held before writing"),
        _switch("--log-timers-to-tensorboard", "timers as scalars"),
        _switch("--log-batch-size-to-tensorboard", "batch size as scalar"),
        _switch("--no-log-learnig-rate-to-tensorboard", "no learning rate scalar (old spelling)",
                dest="log_learning_rate_to_tensorboard"),
        _switch("--no-log-loss-scale-to-tensorboard", "no loss scale scalar"),
        _switch("--log-validation-ppl-to-tensorboard", "validation perplexity as scalar"),
        _used("--log-path", str, help="folder for a copy of the argument dump"),
    ),
    "data": (
        _used("--data-path", str, many=True, help="PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..."),
        _used("--split", str, help="shares of train, valid, test of --data-path; '969, 30, 1' if not given"),
        *(_used(f"--{part}-weighted-split-paths", str, many=True,
                help=f"'NAME: WEIGHT START:END PREFIX, ...' for {part}") for part in ("train", "valid", "test")),
        *(_used(f"--{part}-weighted-split-paths-path", str,
                help=f"file that holds the groups for {part}") for part in ("train", "valid", "test")),
        _used("--data-impl", str, "infer", "format of the indexed files",
              choices=("lazy", "cached", "mmap", "infer")),
        _switch("--mmap-warmup", "read the data files once at the start"),
        _used("--dataloader-type", str, "single", "one pass in order, or shuffled for ever",
              choices=("single", "cyclic")),
        _used("--num-workers", whole, 2, "loader processes for training and test"),
        _used("--valid-num-workers", whole, 2, "loader processes for validation"),
        _used("--seq-length", count, help="tokens per sample; this or --encoder-seq-length is required"),
        _used("--encoder-seq-length", count, help="former name of --seq-length"),
        _used("--tokenizer-type", str, help="tokenizer; GPT2BPETokenizer if not given to pretrain_gpt",
              choices=("GPT2BPETokenizer", "PretrainedFromHF")),
        _used("--tokenizer-name-or-path", str, help="for PretrainedFromHF"),
        _used("--vocab-file", str, help="JSON vocabulary for GPT2BPETokenizer"),
        _used("--merge-file", str, help="merges for GPT2BPETokenizer"),
        _used("--vocab-extra-ids", whole, 0, "<extra_id_i> tokens to add, PretrainedFromHF only"),
        _switch("--reset-position-ids", "positions restart after each end of document"),
        _switch("--reset-attention-mask", "documents of a row do not see each other"),
        _switch("--eod-mask-loss", "no loss on ends of documents"),
        _switch("--norm-target-loss", "every target counts alike, whatever its length", entry="finetune_t0"),
        _used("--loss-normalization", str, "micro-batch", "what the loss is divided by: the weights of its micro-batch, "
              "or those of the whole global batch, each token or each target counting alike",
              choices=("micro-batch", "global-tokens", "global-targets")),
        _switch("--prefixlm", "inputs see each other in both directions", entry="finetune_t0"),
        _used("--mtf-overlong", str, "drop", "pairs longer than a row: leave out, cut the front of the inputs, or stop",
              choices=("drop", "truncate-inputs", "error"), entry="finetune_t0"),
    ),
}

NO_EFFECT: tuple[Flag, ...] = (
    _idle("--train-tokens", "never ended a run; --train-iters or --train-samples does", count),
    _idle("--log-num-zeros-in-grad", "DeepSpeed does not count them: the field is always 0.0"),
    _idle("--deepspeed", "always on"),
    _idle("--deepspeed-activation-checkpointing", "--checkpoint-activations alone decides"),
    _idle("--contigious-checkpointing", "activations are kept as torch allocates them"),
    _idle("--synchronize-each-layer", "recomputation needs no synchronisation"),
    _idle("--accumulate-allreduce-grads-in-fp32", "always on with bf16 and fp32; fp16 gradients are summed in fp16"),
    _idle("--DDP-impl", "DeepSpeed reduces the gradients", str, choices=("local", "torch")),
    _idle("--use-contiguous-buffers-in-ddp", "DeepSpeed reduces the gradients"),
    _idle("--zero-reduce-scatter", "gradients are all-reduced"),
    _idle("--zero-contigious-gradients", "always on"),
    _idle("--zero-reduce-bucket-size", "sized to what is trained", whole),
    _idle("--zero-allgather-bucket-size", "DeepSpeed's own size", whole),
    _idle("--split-transformers", "never did more than change a counter"),
    _idle("--use-pin-memory", "was never used"),
    _idle("--scattered-embeddings", "was never used"),
    _idle("--memory-centric-tiled-linear", "was never used"),
    _idle("--tile-factor", "was never used", count),
    _idle("--no-bias-dropout-fusion", "bias and dropout are separate operations already"),
    _idle("--abort-on-unmet-fused-kernel-constraints", "no kernel here has such constraints"),
    _idle("--init-method-xavier-uniform", "never applied to GPT"),
    _idle("--codecarbon-dir", "was already disabled", str),
)

REFUSED: tuple[Flag, ...] = (
    _refused("--batch-size", "this name was removed; use --micro-batch-size", hidden=True),
    _refused("--warmup", "this name was removed; use --lr-warmup-fraction", hidden=True),
    _refused("--model-parallel-size", "this name was removed; use --tensor-model-parallel-size", hidden=True),
    _refused("--decoder-seq-length", "there is no decoder of its own; use --seq-length"),
    _refused("--use-bnb-optimizer", "there is no 8-bit Adam; leave it out, and give --embed-layernorm, "
                                    "which it implied, if the model has one"),
    _refused("--cpu-optimizer", "the optimizer runs where the model is; leave it out"),
    _refused("--cpu_torch_adam", "the optimizer runs where the model is; leave it out"),
    _refused("--inference", "this program trains; use --eval-only true to evaluate"),
    _refused("--lazy-mpu-init", "process groups are always made at the start; only false is allowed",
             neutral=("false", "0", "no")),
    _refused("--distribute-checkpointed-activations", "saved activations are not sharded over TP; leave it out"),
    _refused("--partition-activations", "saved activations are not sharded over TP; leave it out"),
    _refused("--checkpoint-in-cpu", "saved activations stay on the device; leave it out"),
    _refused("--profile-backward", "there is no such profiler; use --log-timers-to-tensorboard"),
    _refused("--remote-device", "weights are not offloaded; only none is allowed", neutral=("none",)),
    _refused("--num-layers-per-virtual-pipeline-stage", "stages are not interleaved; leave it out"),
    _refused("--no-save-optim", "optimizer state is part of every checkpoint; leave it out"),
    _refused("--universal-checkpoint", "universal checkpoints are not read; give --load the ordinary checkpoint"),
    _refused("--loss-on-targets-only", "finetune_t0.py always counts the loss on targets only; leave it out"),
    _refused("--reweight-loss-based-on-position-frequency",
             "the loss is not weighted by position; leave it out"),
    _refused("--noise-density", "span corruption is not offered"),
    _refused("--mean-noise-span-length", "span corruption is not offered"),
)
