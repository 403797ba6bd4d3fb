"""What a plan is asked about: the flags of pretrain_gpt.py, presets, and a few flags of its own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.argument_table import NO_EFFECT, USED, amount, count, positive
from megatron.arguments import build_parser, read_flags, settings_from
from megatron.arguments_check import UsageError
from megatron.config import Settings
from megatron.errors import RunError
from megatron.planning.shape import PRESET_LENGTH, PRESET_PADDED_VOCAB, PRESET_VOCAB, PRESETS
from megatron.tokenizer.padding import padded_vocab_size

#: finetune_t0.py has all flags of pretrain_gpt.py, and these of its own
_ENTRY, _BASE_ENTRY = "finetune_t0", "pretrain_gpt"
_OF_PAIRS = {"prefixlm", "norm_target_loss", "mtf_overlong"}
#: flags that a preset stands for, or that have a default here
_SHAPE, _ONE = {"num_layers", "hidden_size", "num_attention_heads"}, {"micro_batch_size"}
#: samples per update the BLOOM models were trained with
_PRESET_BATCH = {"bloom-560m": 256, "bloom-1b1": 256, "bloom-1b7": 512, "bloom-3b": 512, "bloom-7b1": 512,
                 "bloom-176b": 2048}
#: groups of flags that a plan does not depend on, and what is needed of them all the same
_IGNORED = ("data", "learning rate", "checkpoints", "validation and logging")
_NEEDED = {"seq_length", "encoder_seq_length", "reset_attention_mask", "prefixlm"}
_FILLED_IN: dict[str, Any] = {
    "lr": 1.0, "train_iters": 1, "train_samples": None, "rampup_batch_size": None, "skip_train_iteration_range": None,
    "eval_only": False, "data_path": ["none"], "tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": "none",
    "local_rank": None, "deepspeed_config": None, "seed": 1234}


@dataclass(frozen=True)
class Request:
    """A run to plan. ``tp``, ``pp`` and ``gpus`` are None where the plan may choose."""

    name: str
    tp: int | None
    pp: int | None
    gpus: int | None
    gpu_memory: float
    """GiB of one GPU"""
    reserve: float
    """GiB of it that the plan leaves free"""
    gpus_per_node: int
    explain: bool
    json: bool
    values: Mapping[str, Any]
    given: frozenset[str]
    vocab_size: int
    entry: str = _BASE_ENTRY
    """the script whose rules hold"""

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a rank may hold."""
        return int((self.gpu_memory - self.reserve) * 2**30)

    def settings(self, tp: int = 1, pp: int = 1, dp: int = 1) -> Settings:
        """The run on TP x PP x DP ranks, checked as a launch would check it. Raises UsageError."""
        world = tp * pp * dp
        values = {**self.values, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        settings = settings_from(values, set(self.given), self.entry,
                                 {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": "none",
                                  "MASTER_PORT": "1"})
        try:
            padded = padded_vocab_size(self.vocab_size, tp=tp, pad_to=settings.tokenizer.pad_vocab_size_to,
                                       divisible_by=settings.tokenizer.make_vocab_size_divisible_by)
        except RunError as error:
            raise UsageError(str(error)) from error
        return dataclasses.replace(settings, model=dataclasses.replace(
            settings.model, vocab_size=self.vocab_size, padded_vocab_size=padded))

    def by_degree(self) -> dict[int, Settings]:
        """TP degree -> settings, for each degree the run could have. Raises UsageError when there is none."""
        if self.tp:
            return {self.tp: self.settings(self.tp)}
        found, degree = {1: self.settings()}, 2
        while degree <= self.gpus_per_node:
            try:
                found[degree] = self.settings(degree)
            except UsageError:  # does not divide heads, MLP or vocabulary
                pass
            degree *= 2
        return found


def plan_parser() -> argparse.ArgumentParser:
    """The parser of pretrain_gpt.py with a group of its own for the plan."""
    parser = build_parser(_ENTRY)
    parser.prog = "plan_run.py"
    parser.description = ("Memory, traffic, operations and file sizes of a run, without starting it. Takes --preset, or "
                          "the flags of pretrain_gpt.py or finetune_t0.py; those of data, tokenizer, learning rate and "
                          "logging may be left out. A flag that only finetune_t0.py has (--prefixlm, --norm-target-loss, "
                          "--mtf-overlong) makes it a plan for that script.")
    for action in parser._actions:  # said by read_request instead, with what else there is
        if action.dest in _SHAPE | _ONE:
            action.required = False
            action.help = (action.help or "").replace("(required)", "(default: 1)" if action.dest in _ONE else
                                              "(required without --preset)")
        elif action.dest == "seq_length":
            action.help = "tokens per sample; required without --preset"
    group = parser.add_argument_group("plan")
    group.add_argument("--preset", choices=PRESETS, help="shape, precision and batch of a BLOOM model; flags override it")
    group.add_argument("--vocab-size", type=count, metavar="N", help="token ids, padded as in training")
    group.add_argument("--padded-vocab-size", type=count, metavar="N", help="exact rows of the word table")
    group.add_argument("--fp32", action="store_const", const=True, help="weights in float32, against a preset's bf16")
    group.add_argument("--gpus", type=count, metavar="N", help="world size; TP x PP if both are given")
    group.add_argument("--gpu-memory-gb", type=positive, metavar="X", help="GiB (2^30 bytes) of one GPU (default: 80)")
    group.add_argument("--gpu-reserve-gb", type=amount, metavar="X",
                       help="GiB of it to leave free for context, communication and fragmentation (default: 4)")
    group.add_argument("--gpus-per-node", type=count, metavar="N", help="largest TP that is tried (default: 8)")
    group.add_argument("--explain", action="store_const", const=True, help="what each block keeps, term by term")
    group.add_argument("--json", action="store_const", const=True, help="print JSON: sizes in bytes, traffic in "
                       "bytes per step, operations in FLOP per step over all ranks, memory of a GPU in GiB")
    return parser


def read_request(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Request:
    """The request in ``argv``. Raises UsageError; a word that is no flag ends the process with code 2."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    preset = first.parse_known_args(list(argv))[0].preset
    ahead = ["--micro-batch-size", "1"]  # flags that must be there; those in argv come later and win
    if preset in PRESETS:
        for flag, value in zip(("--num-layers", "--hidden-size", "--num-attention-heads"), PRESETS[preset]):
            ahead += [flag, str(value)]
    values, given = read_flags(parser, [*ahead, *argv], _ENTRY)
    if missing := [f"--{name.replace('_', '-')}" for name in sorted(_SHAPE) if values[name] is None]:
        raise UsageError(f"--preset ({', '.join(PRESETS)}), or the shape of the model is required; "
                         f"missing: {', '.join(missing)}")
    entry = _ENTRY if given & _OF_PAIRS or values["loss_normalization"] == "global-targets" else _BASE_ENTRY
    own = {name: values.pop(name, None) for name in (
        "preset", "vocab_size", "padded_vocab_size", "fp32", "gpus", "gpu_memory_gb", "gpu_reserve_gb",
        "gpus_per_node", "explain", "json")}
    given -= own.keys()
    if preset:
        for name, value in _preset_values(preset, values, given, own).items():
            if name not in given:
                values[name] = value
    if own["fp32"] and (values["fp16"] or values["bf16"]):
        raise UsageError(f"--fp32 and {'--fp16' if values['fp16'] else '--bf16'} exclude each other; give one")
    vocab_size = _vocabulary(values, own, given, preset)
    given = _forget(values, given)
    request = Request(
        name=preset or "model", tp=_asked(values, given, "tensor_model_parallel_size"),
        pp=_asked(values, given, "pipeline_model_parallel_size"), gpus=own["gpus"],
        gpu_memory=own["gpu_memory_gb"] or 80.0,
        reserve=4.0 if own["gpu_reserve_gb"] is None else own["gpu_reserve_gb"],
        gpus_per_node=own["gpus_per_node"] or 8, explain=bool(own["explain"]), json=bool(own["json"]),
        values=values, given=frozenset(given), vocab_size=vocab_size, entry=entry)
    _check_batch(request)
    if request.usable <= 0:
        raise UsageError(f"--gpu-reserve-gb {request.reserve:g} leaves nothing of --gpu-memory-gb {request.gpu_memory:g}")
    return request


def _check_batch(request: Request) -> None:
    """What no DP can mend is said without naming one; raises UsageError."""
    total, micro = request.values["global_batch_size"], request.values["micro_batch_size"]
    if total is None or total % micro == 0:
        return
    dp = (request.gpus or 1) // ((request.tp or 1) * (request.pp or 1))
    more = f"; at DP {dp} it must be a multiple of {dp * micro}" if dp > 1 else ""
    raise UsageError(f"--global-batch-size {total} is not a multiple of --micro-batch-size {micro}, so that no data parallel "
                     f"size (DP) is possible; try {total // micro * micro or micro} or {(total // micro + 1) * micro}{more}")


def _asked(values: Mapping[str, Any], given: set[str], name: str) -> int | None:
    return values[name] if name in given else None


def _preset_values(preset: str, values: Mapping[str, Any], given: set[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields a preset sets beside the required ones; each one loses against a flag."""
    found: dict[str, Any] = {"position_embedding_type": "alibi", "embed_layernorm": True, "attention_dropout": 0.0,
                             "hidden_dropout": 0.0, "global_batch_size": _PRESET_BATCH[preset]}
    if "encoder_seq_length" not in given:
        found["seq_length"] = PRESET_LENGTH
    kind = values["position_embedding_type"] if "position_embedding_type" in given else "alibi"
    if kind != "rotary":
        found["max_position_embeddings"] = values["encoder_seq_length"] or values["seq_length"] or PRESET_LENGTH
    if own["vocab_size"] is None and own["padded_vocab_size"] is None:
        found["pad_vocab_size_to"] = PRESET_PADDED_VOCAB
    if not (own["fp32"] or values["fp16"]):
        found["bf16"] = True
    return found


def _vocabulary(values: dict[str, Any], own: Mapping[str, Any], given: set[str], preset: str | None) -> int:
    """True size of the vocabulary; sets ``pad_vocab_size_to`` where the padded size was asked for."""
    padded = own["padded_vocab_size"]
    if padded is not None:
        if "pad_vocab_size_to" in given and values["pad_vocab_size_to"] != padded:
            raise UsageError(f"--padded-vocab-size {padded} and --pad-vocab-size-to {values['pad_vocab_size_to']} "
                             "contradict each other; give one")
        values["pad_vocab_size_to"] = padded
        if "make_vocab_size_divisible_by" not in given:
            values["make_vocab_size_divisible_by"] = 1
    exact = values["pad_vocab_size_to"]
    size = own["vocab_size"] or (min(PRESET_VOCAB, exact or PRESET_VOCAB) if preset else exact)
    if not size:
        raise UsageError("--padded-vocab-size or --vocab-size is required without --preset, as no tokenizer is read: "
                         "preprocess_data.py prints both, and so does the start of a run ('padded vocab')")
    return size


def _forget(values: dict[str, Any], given: set[str]) -> set[str]:
    """Set what a plan does not depend on to values that pass the rules; returns what is still given."""
    ignored = {flag.field: flag.default for title in _IGNORED for flag in USED[title]}
    ignored |= {flag.field: flag.default for flag in NO_EFFECT}
    for name in list(values):
        if name in ignored and name not in _NEEDED:
            values[name] = ignored[name]
            given = given - {name}
    values.update(_FILLED_IN)
    return given - _FILLED_IN.keys()
