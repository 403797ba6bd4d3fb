"""A bias delta: what a bias-only run trained, as one small ``safetensors`` file.

Names are canonical and know neither parallelism nor Hugging Face: ``embedding.<name>``,
``layers.<block>.<name>``, ``final_layernorm.bias``. Tensors are whole. In the file one tensor per
name holds all blocks, ``layers.<name>`` of shape [blocks, ...]: its header stays small at any depth.
Where some of query, key and value trained alone, they are vectors
``...query_key_value.query.bias`` of shape [heads * width]. A fused bias lies as [head][q, k, v][width].

The metadata say which base the values belong to: a fingerprint of every frozen tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import files
from megatron.checkpoint.fingerprint import as_text, digest, tensor_print
from megatron.config import BIAS_TERMS
from megatron.errors import RunError
from megatron.mpu.tags import ParamTag

NAME = "delta.safetensors"
"""of the delta in a tag that was saved with --save-delta-only"""
_FORMAT, _VERSION = "bitfit-delta", "2"
_SLICES = BIAS_TERMS[:3]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRINT = 16  # digits
_LONGEST = 1000


@dataclass(frozen=True, kw_only=True)
class DeltaFacts:
    """What a delta says of itself."""

    num_layers: int
    num_attention_heads: int
    dtype: str
    """fp32, bf16 or fp16: of the model that trained, in which the fingerprints were taken"""
    terms: tuple[str, ...] = BIAS_TERMS
    """kinds of bias in it"""
    vocab_size: int = 0
    """rows of the word table that count in its fingerprint; 0: all there are"""
    step: int = 0
    base: str = ""
    """where the frozen weights were read from: a tag folder or a Hugging Face folder; "" if not known"""
    prints: Mapping[str, str] = field(default_factory=dict)
    """fingerprint of each frozen tensor by its canonical name, see ``checkpoint.fingerprint``"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """flags of the run; of a long value the start alone is written"""

    @property
    def base_fingerprint(self) -> str:
        """One hash over the fingerprints of all frozen tensors; equal for deltas of one base and one set of terms."""
        return digest(self.prints)

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class Delta:
    """Trained values by canonical name, one block at a time, and what they belong to."""

    tensors: Mapping[str, torch.Tensor]
    facts: DeltaFacts

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16 or fp16; RunError for a dtype no model here has."""
    for name, each in _DTYPES.items():
        if each == dtype:
            return name
    raise RunError(f"biases are {dtype}; a delta holds {', '.join(_DTYPES)}")


# --- one file ---------------------------------------------------------------------------------


def to_bytes(delta: Delta) -> bytes:
    """The file. Raises RunError when a name of one block is missing in another."""
    from safetensors.torch import save

    facts = delta.facts
    tensors = {key: torch.stack(list(values)).contiguous() if key.startswith("layers.") else values[0].contiguous()
               for key, values in _by_kind(delta.tensors, facts.num_layers).items()}
    prints = {key: "".join(values) for key, values in _by_kind(facts.prints, facts.num_layers).items()}
    return save(tensors, metadata={
        "format": _FORMAT, "version": _VERSION, "step": str(facts.step), "layers": str(facts.num_layers),
        "heads": str(facts.num_attention_heads), "dtype": facts.dtype, "terms": " ".join(facts.terms),
        "vocab_size": str(facts.vocab_size), "base": facts.base, "base_fingerprint": facts.base_fingerprint,
        "frozen": json.dumps(prints, separators=(",", ":")),
        "arguments": json.dumps(dict(map(_short, facts.arguments.items())), separators=(",", ":"), default=str)})


def _short(item: tuple[str, Any]) -> tuple[str, Any]:
    """An argument as it is, or the start of its text: lists of data sets can be longer than all else in a header."""
    name, value = item
    return (name, value) if len(str(value)) <= _LONGEST else (name, str(value)[:_LONGEST] + " ...")


def write_delta(path: str | Path, delta: Delta) -> None:
    """Write ``delta`` in one step, over another delta at most. Raises RunError where ``path`` is a file of another kind."""
    if Path(path).is_file():
        try:
            read_delta(path)
        except RunError:
            raise RunError(f"{path} exists already and is no delta; give another file") from None
    files.write_bytes(Path(path), to_bytes(delta))


def read_delta(path: str | Path) -> Delta:
    """The delta in a file. Raises RunError, naming the file, when it is none or damaged."""
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        tag = Path(path) if (Path(path) / NAME).is_file() else Path(path) / "TAG"
        raise RunError(f"{path} is a folder; give the file of a delta, such as {tag / NAME}")
    try:
        with safe_open(str(path), "pt", device="cpu") as file:
            stored = file.metadata() or {}
            if (stored.get("format"), stored.get("version")) != (_FORMAT, _VERSION):
                raise RunError(f"{path} is no bias delta of format {_VERSION}; tools/bitfit_delta.py extract writes one")
            layers = int(stored["layers"])
            tensors: dict[str, torch.Tensor] = {}
            for key in file.keys():
                tensors |= _one_by_one(key, file.get_tensor(key), layers)
        prints: dict[str, str] = {}
        for key, joined in json.loads(stored["frozen"]).items():
            prints |= _one_by_one(key, [joined[at:at + _PRINT] for at in range(0, len(joined), _PRINT)], layers)
        facts = DeltaFacts(num_layers=layers, num_attention_heads=int(stored["heads"]), dtype=stored["dtype"],
                           terms=tuple(stored["terms"].split()), vocab_size=int(stored["vocab_size"]),
                           step=int(stored["step"]), base=stored["base"], prints=prints,
                           arguments=json.loads(stored["arguments"]))
        _check_read(tensors, facts)
        if stored["dtype"] not in _DTYPES or facts.base_fingerprint != stored["base_fingerprint"]:
            raise RunError(f"{path} is damaged: its metadata do not agree with each other")
    except FileNotFoundError:
        raise RunError(f"there is no file {path}") from None
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is no bias delta, or a damaged one: {error}") from error
    return Delta(tensors, facts)


def _check_read(tensors: Mapping[str, torch.Tensor], facts: DeltaFacts) -> None:
    """ValueError for a file that would do else than set biases."""
    for name, value in tensors.items():
        if not name.endswith(".bias") or not value.is_floating_point() or value.dim() != 1:
            raise ValueError(f"{name} of {value.dtype} and shape {tuple(value.shape)} is no bias")
    whole = [name for name in tensors if target_of(name)[1] is None]
    if twice := [name for name in tensors if target_of(name)[1] and target_of(name)[0] in whole]:
        raise ValueError(f"{twice[0]} is in it as a part and as a whole")
    if facts.num_attention_heads < (len(whole) < len(tensors)):
        raise ValueError(f"it tells {facts.num_attention_heads} heads")
    if not isinstance(facts.arguments, dict) or "\0" in facts.base:
        raise ValueError("its arguments are no object, or its base is no path")


def _by_kind(values: Mapping[str, Any], num_layers: int) -> dict[str, list]:
    """Values of all blocks in one list under ``layers.<name>``; others in a list of one."""
    kinds = dict.fromkeys(_kind(name) for name in values)
    try:
        return {kind: [values[f"layers.{block}{kind.removeprefix('layers')}"] for block in range(num_layers)]
                if kind.startswith("layers.") else [values[kind]] for kind in kinds}
    except KeyError as error:
        raise RunError(f"a delta of {num_layers} layers lacks {error.args[0]}") from None


def _kind(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"layers.{rest.partition('.')[2]}" if first == "layers" else name


def _one_by_one(key: str, value, num_layers: int) -> dict:
    if not key.startswith("layers."):
        return {key: value[0] if isinstance(value, list) else value}
    if len(value) != num_layers:
        raise ValueError(f"{key} has {len(value)} entries for {num_layers} layers")
    return {f"layers.{block}{key.removeprefix('layers')}": each for block, each in enumerate(value)}


# --- values and the tensors they belong in ------------------------------------------------------


def target_of(name: str) -> tuple[str, str | None]:
    """The tensor that trained values go into, and the slice of it: (``...bias``, query, key, value or None)."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-2] in _SLICES:
        return ".".join([*parts[:-2], parts[-1]]), parts[-2]
    return name, None


def slot(whole: torch.Tensor, which: str | None, heads: int) -> torch.Tensor:
    """A view of ``whole`` where the values of slice ``which`` live: [heads, width], or all of it."""
    return whole if which is None else whole.view(heads, len(_SLICES), -1)[:, _SLICES.index(which)]


def put(whole: torch.Tensor, name: str, values: torch.Tensor, heads: int) -> None:
    """Copy trained ``values`` called ``name`` into their place in ``whole``. RunError where they do not fit."""
    which = target_of(name)[1]
    if whole.numel() != values.numel() * (3 if which else 1) or whole.numel() % (3 * heads if which else 1):
        raise RunError(f"{name} has shape {tuple(values.shape)} in the delta, which does not fit the base's "
                       f"{tuple(whole.shape)}")
    place = slot(whole, which, heads)
    place.copy_(values.view(place.shape))


def take(whole: torch.Tensor, name: str, heads: int) -> torch.Tensor:
    """A contiguous copy of the values called ``name`` from ``whole``."""
    return slot(whole, target_of(name)[1], heads).reshape(-1).clone()


def targets(delta: Delta) -> dict[str, list[str]]:
    """Names in the delta by the tensor they go into."""
    found: dict[str, list[str]] = {}
    for name in delta.tensors:
        found.setdefault(target_of(name)[0], []).append(name)
    return found


def frozen_print(name: str, whole: torch.Tensor, tag: ParamTag, trained: Sequence[str], facts: DeltaFacts) -> str | None:
    """Fingerprint of what is frozen of the whole tensor ``name``; None where all of it trains.

    ``trained`` are the names of what trains of it. Taken in the dtype of the delta.
    """
    which = [target_of(each)[1] for each in trained]
    if None in which:
        return None
    values = whole.to(facts.torch_dtype, copy=bool(which))
    for each in which:
        slot(values, each, facts.num_attention_heads).zero_()
    return as_text(tensor_print(values, tag, true_rows=facts.vocab_size if tag.tied else None))


# --- several ------------------------------------------------------------------------------------


def average(deltas: Sequence[Delta], weights: Sequence[float] | None = None) -> Delta:
    """The mean of deltas of one base, weighted by ``weights`` (normalised to sum 1; equal without).

    Sums in fp64, rounded once. Raises RunError for another base or other terms, or
    weights that are negative or all zero. Step and arguments are those of the first.
    """
    weights = [1.0] * len(deltas) if weights is None else list(weights)
    if not deltas or len(weights) != len(deltas):
        raise RunError(f"{len(weights)} weights were given for {len(deltas)} deltas")
    if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise RunError(f"weights {' '.join(map(str, weights))}: give numbers of 0 and more, one of them above 0")
    first = deltas[0]
    for other in deltas[1:]:
        if other.facts.dtype != first.facts.dtype:
            raise RunError(f"deltas of {first.facts.dtype} and of {other.facts.dtype} cannot be averaged")
        if other.tensors.keys() != first.tensors.keys():
            raise RunError(f"deltas of different terms cannot be averaged: {' '.join(first.facts.terms)} and "
                           f"{' '.join(other.facts.terms)}")
        if name := first_difference(first.facts.prints, other.facts.prints):
            raise RunError(f"deltas of different bases cannot be averaged: their {name} differs")
        if name := next((name for name, value in first.tensors.items() if other.tensors[name].shape != value.shape), None):
            raise RunError(f"deltas of different shapes cannot be averaged: their {name} differs")
    share = [weight / sum(weights) for weight in weights]
    tensors = {name: sum((part * delta.tensors[name].double() for part, delta in zip(share, deltas)),
                         torch.zeros_like(value, dtype=torch.float64)).to(value.dtype)
               for name, value in first.tensors.items()}
    return replace(first, tensors=tensors)


def first_difference(prints: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """The first name, in the order of ``prints``, whose fingerprint is not the same in both."""
    return next((name for name in [*prints, *others] if prints.get(name) != others.get(name)), None)
