"""Rules between flags, and the values that follow from them.

Pure functions over the parsed flags; no argparse, torch or process group. Every
broken rule is a UsageError whose sentence names the flags, their values and what
is allowed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import BIAS_TERMS, SplitGroup
from megatron.data.splits import (
    parse_data_path,
    parse_split,
    parse_weighted_groups,
    read_weighted_groups_file,
)

Values = Mapping[str, Any]
_PARTS = ("train", "valid", "test")
#: class names of the layers of the pipeline, which --pp-partition-method is matched against
_BLOCK, _ENDS = "ParallelTransformerLayerPipe", {"EmbeddingPipe": 1, "EmbeddingHead": 1, "LayerNorm": 1}


class UsageError(ValueError):
    """A fault of the command line or a file it names, in one sentence.

    ``local`` marks a fault that one rank may see alone, so each rank reports it.
    """

    def __init__(self, message: str, *, local: bool = False) -> None:
        super().__init__(message)
        self.local = local


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Put ``what``, a flag and its value, before a UsageError from inside that does not name it."""
    try:
        yield
    except UsageError as error:
        if str(error).startswith(what):
            raise
        raise UsageError(f"{what}: {error}", local=error.local) from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _exclusive(values: Values, *flags: str) -> None:
    """At most one of ``flags`` may have a value (None, False and 0 count as absent)."""
    set_ones = [flag for flag in flags if values[flag]]
    if len(set_ones) > 1:
        shown = " and ".join(_show(flag, values[flag]) for flag in set_ones)
        raise UsageError(f"{shown} exclude each other; give one")


def _neighbours(number: int, unit: int) -> str:
    """The multiples of ``unit`` on both sides of ``number``, as a choice."""
    below = number // unit
    return " or ".join(str(times * unit) for times in (below, below + 1) if times)


def _show(field: str, value: Any) -> str:
    name = field if field.startswith("--") else "--" + field.replace("_", "-")
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return name if value is True else f"{name} {value}"


# --- the rules --------------------------------------------------------------------------------

def check_arguments(values: Values, given: set[str], entry: str) -> dict[str, Any]:
    """Check all rules between flags; returns the settings that are derived from flags.

    ``values`` holds every flag under its field name plus rank and world_size;
    ``given`` names those that stood on the command line.
    """
    derived = _check_model(values)
    derived |= _check_bias_terms(values, given)
    derived |= _check_precision(values)
    derived |= _check_grid(values, derived)
    derived |= _check_length(values)
    derived |= _check_batches({**values, **derived})
    _check_schedule(values)
    _check_checkpoints(values)
    derived |= _check_data(values, given)
    derived |= _check_tokenizer(values, entry)
    if entry == "finetune_t0":  # rows hold several pairs, which must not see each other
        derived |= {"reset_attention_mask": True, "prefix_lm": values["prefixlm"]}
        if values["loss_normalization"] == "global-targets":
            derived["norm_target_loss"] = True
    else:
        _require(values["loss_normalization"] != "global-targets",
                 "--loss-normalization global-targets: running text has no targets; "
                 "pretrain_gpt.py allows micro-batch and global-tokens")
    return derived


def _check_model(values: Values) -> dict[str, Any]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    _exclusive(values, "seq_length", "encoder_seq_length")
    seq_length = values["seq_length"] or values["encoder_seq_length"]
    _require(seq_length is not None, "--seq-length is required: tokens per sample")
    if values["kv_channels"] is None:
        _require(hidden % heads == 0, f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}; "
                                      f"try --hidden-size {_neighbours(hidden, heads)}, or give --kv-channels")
    kv_channels = values["kv_channels"] or hidden // heads
    kind, positions = values["position_embedding_type"], values["max_position_embeddings"]
    if kind == "rotary":
        _require(positions is None, f"--max-position-embeddings {positions} must be left out with "
                                    "--position-embedding-type rotary")
        _require(kv_channels % 2 == 0, f"--position-embedding-type rotary needs an even head width, not {kv_channels} "
                                       "(--kv-channels, or --hidden-size / --num-attention-heads)")
    else:
        _require(positions is not None and positions >= seq_length,
                 f"--max-position-embeddings {'is not set but' if positions is None else positions} must be at least "
                 f"--seq-length {seq_length} with --position-embedding-type {kind}")
    partition = values["pp_partition_method"] or "type:transformer"
    # DeepSpeed lowers the pattern, and reads up to a second colon only
    pattern = partition.lower().removeprefix("type:")
    _require(pattern not in ("", partition.lower()) and ":" not in pattern and _is_regex(pattern),
             f"--pp-partition-method {partition!r} is not of the form type:REGEX without another colon, such as "
             "type:transformer or type:transformer|embedding")
    derived = {"seq_length": seq_length, "encoder_seq_length": seq_length, "kv_channels": kv_channels,
               "ffn_hidden_size": values["ffn_hidden_size"] or 4 * hidden, "pp_partition_method": partition,
               "activation": _activation(values)}
    if values["query_key_layer_scaling"]:
        derived["attention_softmax_in_fp32"] = True
    return derived


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _activation(values: Values) -> str:
    """Name of the MLP's activation; what needs the unfused form is refused with the fused one."""
    fused, gated = values["bias_gelu_fusion"], values["glu_activation"]
    _exclusive(values, "openai_gelu", "onnx_safe", "glu_activation")
    for flag in ("onnx_safe", "glu_activation"):
        _require(not (values[flag] and fused), f"{_show(flag, values[flag])} needs --no-bias-gelu-fusion")
    if gated:
        return gated
    return "gelu_tanh" if fused or values["openai_gelu"] else "gelu_erf"


def _check_bias_terms(values: Values, given: set[str]) -> dict[str, Any]:
    """The terms in the order of BIAS_TERMS, whatever order they were given in."""
    if "bitfit_bias_terms" not in given:
        return {"bitfit_bias_terms": BIAS_TERMS}
    shown = _show("bitfit_bias_terms", values["bitfit_bias_terms"]).strip()
    allowed = f"allowed are all, or some of {' '.join(BIAS_TERMS)}"
    listed = " ".join(values["bitfit_bias_terms"]).strip()
    terms = re.split(r"\s*,\s*|\s+", listed) if listed.strip(", ") else []
    _require(values["bitfit"], f"{shown} says which biases --bitfit trains; give --bitfit too, or leave it out")
    _require(bool(terms), f"{shown} names no bias; {allowed}")
    if terms == ["all"]:
        return {"bitfit_bias_terms": BIAS_TERMS}
    for term in terms:
        _require(bool(term), f"{shown}: a comma has no bias on one side; {allowed}")
        _require(term != "all", f"{shown}: all stands alone; {allowed}")
        _require(term in BIAS_TERMS, f"{shown}: {term!r} is not a kind of bias; {allowed}")
        _require(terms.count(term) == 1, f"{shown}: {term} is given {terms.count(term)} times; {allowed}")
    return {"bitfit_bias_terms": tuple(term for term in BIAS_TERMS if term in terms)}


def _check_precision(values: Values) -> dict[str, Any]:
    _exclusive(values, "fp16", "bf16")
    dtype = "fp16" if values["fp16"] else "bf16" if values["bf16"] else "fp32"
    _require(not values["fp32_residual_connection"] or dtype != "fp32",
             "--fp32-residual-connection needs --fp16 or --bf16")
    _require(not values["fp16_lm_cross_entropy"] or dtype == "fp16", "--fp16-lm-cross-entropy needs --fp16")
    _require(values["loss_scale"] is None or dtype == "fp16",
             f"--loss-scale {values['loss_scale']} needs --fp16; {dtype} is not scaled")
    if dtype == "fp16":
        check_loss_scale("--initial-loss-scale", values["initial_loss_scale"], values["min_loss_scale"])
    _require(values["zero_stage"] in (0, 1), f"--zero-stage {values['zero_stage']} is not offered; allowed are 0 and 1, "
                                             "and optimizer state is sharded (stage 1) in either case")
    return {"params_dtype": dtype}


def check_loss_scale(flag: str, initial: float, minimum: float) -> None:
    """DeepSpeed takes the first scale as a power of two and the lowest as a whole number."""
    power = math.log2(initial)
    _require(power == int(power) and power >= 0,
             f"{flag} {initial:g} is not a power of two, such as 4096 or 65536")
    _require(minimum == int(minimum) and minimum <= initial,
             f"--min-loss-scale {minimum:g} is not a whole number up to {flag} {initial:g}")


def _check_grid(values: Values, derived: Values) -> dict[str, Any]:
    """[BUG] the original cut TP and PP down to the world size; here that is an error."""
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    world = values["world_size"]
    _require(world % (tp * pp) == 0,
             f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does not divide "
             f"the world size {world}; start {_neighbours(world, tp * pp)} ranks, or change one of the flags")
    shared = {"--num-attention-heads": values["num_attention_heads"],
              "--ffn-hidden-size": derived["ffn_hidden_size"],
              "--pad-vocab-size-to": values["pad_vocab_size_to"] or 0}
    fitting = [degree for degree in range(1, world // pp + 1)
               if world % (degree * pp) == 0 and not any(value % degree for value in shared.values())]
    for flag, value in shared.items():
        _require(value % tp == 0, f"{flag} {value} does not divide by --tensor-model-parallel-size {tp}; "
                                  f"{' or '.join(map(str, fitting))} would fit these {world} ranks")
    layers, method = values["num_layers"], derived["pp_partition_method"]
    shared_out = sum(number for name, number in {**_ENDS, _BLOCK: layers}.items()
                     if re.search(method.lower()[5:], name.lower()))
    _require(shared_out >= pp, f"--num-layers {layers} with --pp-partition-method {method} gives {shared_out} layers to "
                               f"share out, less than --pipeline-model-parallel-size {pp}")
    last = values["seed"] + 100 * (values["pipeline_model_parallel_size"] - 1)
    _require(last < 2**32, f"--seed {values['seed']} is too large: every pipeline stage adds 100, and seeds end "
                           f"below 2**32; {2**32 - 1 - (last - values['seed'])} is the largest here")
    return {"data_parallel_size": world // (tp * pp)}


def _check_length(values: Values) -> dict[str, Any]:
    iters, samples = values["train_iters"], values["train_samples"]
    _require(iters is not None or samples is not None, "one of --train-iters and --train-samples is required")
    _exclusive(values, "train_iters", "train_samples")
    mode = "train_iters" if samples is None else "train_samples"
    other = (("lr_decay_samples", "lr_warmup_samples", "rampup_batch_size") if samples is None
             else ("lr_decay_iters", "lr_warmup_iters"))
    for field in other:
        _require(not values[field], f"{_show(field, values[field])} cannot be combined with {_show(mode, values[mode])}")
    return {"skip_train_iteration_range": skip_ranges(values["skip_train_iteration_range"] or [])}


def skip_ranges(texts: list[str]) -> tuple[tuple[int, int], ...]:
    """Inclusive iteration ranges from ``A-B`` texts, sorted, overlapping ones merged."""
    ranges = []
    for text in texts:
        match = re.fullmatch(r"([0-9_]+)-([0-9_]+)", text)
        try:
            first, last = (int(part) for part in match.groups()) if match else (1, 0)
        except ValueError:
            first, last = 1, 0
        _require(1 <= first <= last, f"--skip-train-iteration-range {text!r} is not of the form A-B with 1 <= A <= B")
        ranges.append((first, last))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _check_batches(values: Values) -> dict[str, Any]:
    micro, replicas = values["micro_batch_size"], values["data_parallel_size"]
    unit = micro * replicas
    total = values["global_batch_size"] or unit
    per_pass = f"--micro-batch-size {micro} x data parallel size {replicas} = {unit}"
    _require(total % unit == 0, f"--global-batch-size {total} is not a multiple of {per_pass}; "
                                f"try {_neighbours(total, unit)}")
    first = total
    if ramp := values["rampup_batch_size"]:
        shown = _show("rampup_batch_size", ramp)
        _require(len(ramp) == 3, f"{shown} has {len(ramp)} values; expected START INCREMENT SAMPLES")
        first, step, _ = ramp
        _require(first < total, f"{shown} starts at {first}, which is not below --global-batch-size {total}")
        _require((total - first) % step == 0, f"{shown} does not reach --global-batch-size {total} from {first} "
                                              f"in steps of {step}")
        for size in range(first, total, step):
            _require(size % unit == 0, f"{shown} has the batch size {size}, which is not a multiple of {per_pass}")
    samples = values["train_samples"]
    _require(samples is None or samples >= first,
             f"--train-samples {samples} is less than one global batch of {first}")
    return {"global_batch_size": total}


def _check_schedule(values: Values) -> None:
    lr, min_lr = values["lr"], values["min_lr"]
    _require(lr is not None or values["eval_only"], "--lr is required for training (or give --eval-only true)")
    _require(lr is None or min_lr <= lr, f"--min-lr {min_lr:g} is above --lr {lr or 0:g}")
    _exclusive(values, "override_lr_scheduler", "use_checkpoint_lr_scheduler")
    _exclusive(values, "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
    unit = "iters" if values["train_samples"] is None else "samples"
    length_flag = f"lr_decay_{unit}" if values[f"lr_decay_{unit}"] else f"train_{unit}"
    warmup = values[f"lr_warmup_{unit}"]
    _require(warmup < values[length_flag],
             f"--lr-warmup-{unit} {warmup} is not less than {_show(length_flag, values[length_flag])}, where the "
             "decay of the learning rate ends")


def _check_checkpoints(values: Values) -> None:
    _require(values["save"] is None or values["save_interval"] is not None,
             f"--save {values['save']} needs --save-interval")
    _require(not values["save_delta_only"] or (values["bitfit"] and values["save"]),
             "--save-delta-only saves the biases that --bitfit trains into --save; give both")
    for name in ("keep_last", "async_save", "exit_signal_handler"):
        _require(not values[name] or values["save"], f"{_show(name, values[name])} concerns what is saved; give --save too")


def _check_data(values: Values, given: set[str]) -> dict[str, Any]:
    groups = {f"{part}_groups": _groups(values, part) for part in _PARTS}
    weighted = [f"--{part}-weighted-split-paths" for part in _PARTS if groups[f"{part}_groups"]]
    if values["data_path"]:
        _require(not weighted, f"{_show('data_path', values['data_path'])} cannot be combined with {' '.join(weighted)}")
        split = values["split"] or "969, 30, 1"
        try:
            parse_data_path(values["data_path"])
            parse_split(split)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return groups | {"split": split}
    _require(bool(weighted), "no data: give --data-path or --train-weighted-split-paths")
    _require("split" not in given, f"--split {values['split']!r} belongs to --data-path and cannot be combined with "
                                   f"{' '.join(weighted)}, which have their own ranges")
    _require(bool(groups["train_groups"]) or values["eval_only"],
             f"{' '.join(weighted)} given, but training needs --train-weighted-split-paths (or --eval-only true)")
    return groups


def _groups(values: Values, part: str) -> tuple[SplitGroup, ...]:
    texts, path = values[f"{part}_weighted_split_paths"], values[f"{part}_weighted_split_paths_path"]
    flag = f"--{part}-weighted-split-paths"
    _require(texts is None or path is None, f"{flag} and {flag}-path {path} exclude each other; give one")
    try:
        if texts is not None:
            return parse_weighted_groups(flag, texts)
        return () if path is None else read_weighted_groups_file(f"{flag}-path", path)
    except ValueError as error:
        raise UsageError(str(error), local=path is not None) from error


def _check_tokenizer(values: Values, entry: str) -> dict[str, Any]:
    kind = values["tokenizer_type"] or ("GPT2BPETokenizer" if entry == "pretrain_gpt" else None)
    _require(kind is not None, "--tokenizer-type is required; finetune_t0.py allows PretrainedFromHF")
    _require(entry != "finetune_t0" or kind == "PretrainedFromHF",
             f"--tokenizer-type {kind} has no padding token; finetune_t0.py allows PretrainedFromHF")
    wanted: tuple[str, ...] = ("vocab_file", "merge_file")
    unwanted = ("tokenizer_name_or_path", "vocab_extra_ids")
    if kind == "PretrainedFromHF":
        wanted, unwanted = ("tokenizer_name_or_path",), ("vocab_file", "merge_file")
    for field in wanted:
        _require(values[field] is not None, f"--tokenizer-type {kind} needs --{field.replace('_', '-')}")
    for field in unwanted:
        _require(not values[field], f"{_show(field, values[field])} does not belong to --tokenizer-type {kind}; "
                                    "leave it out")
    for field in ("vocab_file", "merge_file"):
        if values[field] is not None and not os.path.isfile(values[field]):
            raise UsageError(f"{_show(field, values[field])} is not a file", local=True)
    exact, unit = values["pad_vocab_size_to"], values["make_vocab_size_divisible_by"]
    _require(exact is None or exact % unit == 0,
             f"--pad-vocab-size-to {exact} is no multiple of --make-vocab-size-divisible-by {unit}; change one of them")
    return {"tokenizer_type": kind}
