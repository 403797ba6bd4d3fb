"""The DeepSpeed configuration: derived from the settings, checked against a user's JSON.

The JSON is optional. What it says about clipping and loss scaling fills in for
flags that were not given, as in the launch scripts of the original; what
contradicts a flag is an error that shows both values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.arguments_check import UsageError, check_loss_scale
from megatron.config import Settings

#: steps between DeepSpeed's own progress lines; the trainer prints its own
_NEVER = 10**12
#: keys that only make DeepSpeed say more; passed on as they are
_SPOKEN = ("wall_clock_breakdown", "dump_state", "memory_breakdown")
_HARMLESS = ("steps_per_print", *_SPOKEN, "comms_logger", "flops_profiler", "tensorboard", "csv_monitor", "wandb",
             "timers")
_READ = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping",
         "zero_optimization", "fp16", "bf16", "bfloat16", "zero_allow_untested_optimizer")
#: sections of fp16 -> (field of the settings, value of the settings from the value of the JSON)
_LOSS_SCALING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss_scale": ("loss_scale", lambda value: value or None),
    "initial_scale_power": ("initial_loss_scale", lambda value: 2.0**value),
    "loss_scale_window": ("loss_scale_window", int),
    "hysteresis": ("hysteresis", int),
    "min_loss_scale": ("min_loss_scale", float),
}
#: keys of zero_optimization that have one right value here; buckets are sized to what is trained
_ZERO_FIXED = {"reduce_scatter": False, "overlap_comm": False, "contiguous_gradients": True}
_ZERO_SIZES = ("reduce_bucket_size", "allgather_bucket_size")


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """The JSON object in ``path``. Raises UsageError when it is missing, broken, or repeats a key."""
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} stands twice in one object")
        return found

    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file, object_pairs_hook=once)
    except RecursionError as error:
        raise UsageError(f"--deepspeed_config {path} nests its brackets too deep to be read", local=True) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--deepspeed_config {path} cannot be read as JSON: {error}", local=True) from error
    if not isinstance(config, dict):
        kinds = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
        raise UsageError(f"--deepspeed_config {path} holds {kinds.get(type(config), 'a number')}, not a JSON object "
                         "{...} of settings", local=True)
    return config


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name == "bf16" and "bfloat16" in config:  # DeepSpeed's older spelling
        if "bf16" in config:
            raise UsageError("the DeepSpeed JSON has both bf16 and bfloat16, two names of one section; give one")
        name = "bfloat16"
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{name} in the DeepSpeed JSON is {json.dumps(section)}, not an object")
    return section


def _get_number(section: Mapping[str, Any], key: str, *, whole: bool = False, least: float = 0,
                most: float = math.inf) -> Any:
    value = section[key]
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    if not good or not least <= value <= most or (whole and value != int(value)):
        limit = f"from {least}" + (f" to {most}" if most < math.inf else "")
        raise UsageError(f"{key} in the DeepSpeed JSON is {json.dumps(value)}, not a {'whole ' if whole else ''}"
                         f"number {limit}")
    return int(value) if whole else value


def fold_deepspeed_config(config: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """Settings that the JSON decides because their flags are not in ``given``.

    Covers clip_grad, loss scaling and the ZeRO stage; keys are field names.
    """
    found: dict[str, Any] = {}
    if "gradient_clipping" in config:
        found["clip_grad"] = float(_get_number(config, "gradient_clipping"))
    fp16 = _section(config, "fp16")
    if fp16.get("enabled") is True:
        for key, (field, convert) in _LOSS_SCALING.items():
            if key in fp16:
                found[field] = convert(_scaling_number(fp16, key))
    zero = _section(config, "zero_optimization")
    if "stage" in zero:
        found["zero_stage"] = _get_number(zero, "stage", whole=True)
    return {field: value for field, value in found.items() if field not in given}


def _scaling_number(fp16: Mapping[str, Any], key: str) -> Any:
    if key == "loss_scale":
        return float(_get_number(fp16, key))
    return _get_number(fp16, key, whole=True, least=0 if key == "initial_scale_power" else 1,
                       most=127 if key == "initial_scale_power" else math.inf)


def _differ(key: str, value: Any, flag: str, flag_value: Any) -> UsageError:
    return UsageError(f"the DeepSpeed JSON says {key} {json.dumps(value)} but {flag} is {flag_value}; "
                      "make them agree or remove the key")


def check_against_flags(config: Mapping[str, Any], settings: Settings) -> None:
    """Raise UsageError where ``config`` contradicts ``settings`` or asks for what is not offered.

    ``settings`` are those after ``fold_deepspeed_config``, so a difference in
    clipping or loss scaling means that the flag was given. Stages 0 and 1 of
    ZeRO are the same engine here and never contradict each other.
    """
    for key in config:
        if key not in _HARMLESS and key not in _READ and not _is_off(config[key]):
            raise UsageError(f"{key} in the DeepSpeed JSON is not offered; remove it (allowed are "
                             f"{', '.join((*_READ, *_HARMLESS))})")
    _check_harmless(config)
    _check_batch(config, settings)
    if "gradient_clipping" in config and config["gradient_clipping"] != settings.optimizer.clip_grad:
        raise _differ("gradient_clipping", config["gradient_clipping"], "--clip-grad", settings.optimizer.clip_grad)
    for dtype in ("fp16", "bf16"):
        section, asked = _section(config, dtype), settings.model.params_dtype == dtype
        enabled = section.get("enabled", False if section else asked)
        if enabled is not asked:
            raise _differ(f"{dtype}.enabled", enabled, f"--{dtype}", "given" if asked else "not given")
        if unknown := set(section) - {"enabled", *(_LOSS_SCALING if dtype == "fp16" else ())}:
            raise UsageError(f"{dtype}.{min(unknown)} in the DeepSpeed JSON is not offered; remove it")
    if settings.model.params_dtype == "fp16":
        for key, (field, convert) in _LOSS_SCALING.items():
            fp16, ours = _section(config, "fp16"), getattr(settings.optimizer, field)
            if key in fp16 and convert(_scaling_number(fp16, key)) != ours:
                raise _differ(f"fp16.{key}", fp16[key], f"--{field.replace('_', '-')}",
                              "dynamic" if ours is None else f"{ours:g}")
        check_loss_scale("--initial-loss-scale (2 ** initial_scale_power in the DeepSpeed JSON)",
                         settings.optimizer.initial_loss_scale, settings.optimizer.min_loss_scale)
    _check_zero(_section(config, "zero_optimization"), settings.optimizer.zero_stage)


def _check_harmless(config: Mapping[str, Any]) -> None:
    """DeepSpeed would end in a traceback over these, after the model has been built."""
    for key in _HARMLESS:
        if key not in config:
            continue
        if key == "steps_per_print":
            _get_number(config, key, whole=True, least=1)
        elif key in _SPOKEN:
            if not isinstance(config[key], bool):
                raise UsageError(f"{key} in the DeepSpeed JSON is {json.dumps(config[key])}; allowed are true and false")
        elif not isinstance(enabled := _section(config, key).get("enabled", False), bool):
            raise UsageError(f"{key}.enabled in the DeepSpeed JSON is {json.dumps(enabled)}; allowed are true and false")


def _check_batch(config: Mapping[str, Any], settings: Settings) -> None:
    """Sizes may be those of the full batch or, with a ramp, of its first size."""
    train = settings.train
    unit = train.micro_batch_size * settings.parallel.data_parallel_size
    sizes = [train.global_batch_size, *(train.rampup_batch_size or ())[:1]]
    expected = {
        "train_micro_batch_size_per_gpu": ([train.micro_batch_size], "--micro-batch-size", train.micro_batch_size),
        "train_batch_size": (sizes, "--global-batch-size", train.global_batch_size),
        "gradient_accumulation_steps": (
            [size // unit for size in sizes], "--global-batch-size / (--micro-batch-size x data parallel size)",
            (f"{train.global_batch_size} / ({train.micro_batch_size} x {unit // train.micro_batch_size}) = "
            f"{train.global_batch_size // unit}")),
    }
    for key, (allowed, flag, shown) in expected.items():
        if key in config and _get_number(config, key, whole=True, least=1) not in allowed:
            raise _differ(key, config[key], flag, shown)


def _check_zero(zero: Mapping[str, Any], asked: int) -> None:
    for key, value in zero.items():
        if key == "stage":
            if value not in (0, 1):
                flag = "" if value == asked else f" (--zero-stage is {asked})"
                raise UsageError(f"zero_optimization.stage {json.dumps(value)} in the DeepSpeed JSON is not offered{flag}; "
                                 "allowed are 0 and 1, and optimizer state is sharded (stage 1) in either case")
        elif key in _ZERO_FIXED:
            if value is not _ZERO_FIXED[key]:
                raise UsageError(f"zero_optimization.{key} {json.dumps(value)} in the DeepSpeed JSON: only "
                                 f"{json.dumps(_ZERO_FIXED[key])} is allowed; remove it")
        elif key in _ZERO_SIZES:
            _get_number(zero, key, least=1)
        elif not _is_off(value):
            raise UsageError(f"zero_optimization.{key} in the DeepSpeed JSON is not offered; remove it (allowed are "
                             f"{', '.join(('stage', *_ZERO_FIXED, *_ZERO_SIZES))})")


def _is_off(value: Any) -> bool:
    """Whether a setting of something not offered asks for nothing."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(part) for part in value.values())
    return value in (None, False, "none")


def zero_stage_notice(settings: Settings) -> str | None:
    """What is said at the start where flag or JSON ask for another stage of ZeRO than 1, or for different ones."""
    stage = settings.optimizer.zero_stage
    in_file = (settings.deepspeed or {}).get("zero_optimization", {}).get("stage", stage)
    if stage == in_file == 1:
        return None
    asked = f"--zero-stage {stage}" if stage == in_file else f"--zero-stage {stage}, the DeepSpeed JSON says stage {in_file}"
    return (f"{asked}: optimizer state is sharded over DP (stage 1) all the same; stage 0 of DeepSpeed loses the loss scale "
            "in fp16, resumes wrongly in bf16 and clips by a wrong norm in fp32")


def derive_deepspeed_config(settings: Settings, *, global_batch_size: int, trainable_per_rank: int) -> dict[str, Any]:
    """What ``deepspeed.initialize`` is given for these settings.

    ``global_batch_size`` (samples) is the one to start with, a multiple of micro
    batch x DP; ``trainable_per_rank`` counts elements that train on this rank.
    Always ZeRO stage 1: stage 0 leaves the fp16 loss unscaled, cannot resume bf16,
    and in fp32 gets the gradient norm wrong over stages.
    """
    train, optimizer = settings.train, settings.optimizer
    unit = train.micro_batch_size * settings.parallel.data_parallel_size
    if global_batch_size < 1 or global_batch_size % unit:
        raise UsageError(f"global batch size {global_batch_size} is not a multiple of --micro-batch-size "
                         f"{train.micro_batch_size} x data parallel size {settings.parallel.data_parallel_size}")
    split_over_tp = settings.parallel.scatter_gather_tensors_in_pipeline
    user = settings.deepspeed or {}
    config: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": global_batch_size // unit,
        "gradient_clipping": optimizer.clip_grad,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,  # SGD
        # DeepSpeed allocates this bucket whole, by default 5e8 elements, however little trains
        "zero_optimization": {"stage": 1, "reduce_bucket_size": max(trainable_per_rank, 1024), **_ZERO_FIXED},
        # reentrant recomputation loses gradients where no input requires one, as under a frozen embedding
        "pipeline": {"use_reentrant": False, "activation_checkpoint_interval": 0,
                     "pipe_partitioned": split_over_tp, "grad_partitioned": split_over_tp},
    }
    if settings.model.params_dtype == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    elif settings.model.params_dtype == "fp16":  # no fp32 accumulation: DeepSpeed then skips the tied gradients
        config["fp16"] = _fp16_section(settings)
    config.update({key: user[key] for key in _HARMLESS if key in user})
    user_zero = user.get("zero_optimization", {})
    config["zero_optimization"].update({key: int(user_zero[key]) for key in _ZERO_SIZES if key in user_zero})
    return config


def _fp16_section(settings: Settings) -> dict[str, Any]:
    optimizer = settings.optimizer
    check_loss_scale("--initial-loss-scale", optimizer.initial_loss_scale, optimizer.min_loss_scale)
    return {
        "enabled": True,
        "loss_scale": optimizer.loss_scale or 0,
        "initial_scale_power": int(math.log2(optimizer.initial_loss_scale)),
        "loss_scale_window": optimizer.loss_scale_window,
        "hysteresis": optimizer.hysteresis,
        "min_loss_scale": int(optimizer.min_loss_scale),
    }
