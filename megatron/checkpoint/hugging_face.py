"""A Hugging Face folder as a source of weights: BLOOM and GPT-2 of any size, sharded or not.

Tensors are looked up with and without the leading ``transformer.`` (older BLOOM
folders lack it). The head must be the word table, as it is in all models trained here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.hugging_face_files import DTYPES, TensorFiles, read_json
from megatron.checkpoint.load_plan import is_hugging_face
from megatron.checkpoint.progress import ARCHITECTURE_FLAGS, architecture
from megatron.checkpoint.sources import WeightSource
from megatron.config import ModelConfig
from megatron.errors import RunError
from megatron.model.hf_names import (
    GROUPED,
    TRANSPOSED,
    VOCABULARY,
    NamePair,
    bloom_names,
    from_hugging_face,
    gpt2_names,
)
from megatron.mpu.tags import ParamTag

__all__ = ["HuggingFaceFolder", "StoredConfig", "is_hugging_face", "read_config", "shape_there", "unfit",
           "unread"]

CONFIG = "config.json"
PREFIX = "transformer."
HEAD = "lm_head.weight"
#: masks that older GPT-2 files carry
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
#: names of one setting, in order of preference
_BLOOM_KEYS = {"num_layers": ("n_layer", "num_hidden_layers"), "hidden_size": ("hidden_size", "n_embed", "n_embd"),
               "num_attention_heads": ("n_head", "num_attention_heads")}
_GPT2_KEYS = {"num_layers": ("n_layer", "num_hidden_layers"), "hidden_size": ("n_embd", "hidden_size"),
              "num_attention_heads": ("n_head", "num_attention_heads"),
              "max_position_embeddings": ("n_positions", "max_position_embeddings", "n_ctx")}
#: spellings of GELU by tanh, equal to 3e-10
_TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class StoredConfig:
    """What a ``config.json`` says."""

    kind: str
    """bloom or gpt2"""
    model: ModelConfig
    """the same in our words; lengths and dropout mean nothing where the file does not fix them"""
    rows: int
    """rows of its word table, padding included"""
    raw: dict
    """the file as it is"""

    def pairs(self) -> list[NamePair]:
        """All its parameters here and there."""
        return bloom_names(self.model) if self.kind == "bloom" else gpt2_names(self.model)


def read_config(folder: str | Path) -> StoredConfig:
    """Read and check ``folder/config.json``.

    Raises RunError for another architecture than BLOOM and GPT-2, and for settings of
    these that the layers here cannot compute, naming the setting.
    """
    path = Path(folder) / CONFIG
    raw = read_json(path)
    named = str(raw.get("architectures") or "")
    kind = raw.get("model_type") or ("bloom" if "Bloom" in named else "gpt2" if "GPT2" in named else None)
    if kind not in ("bloom", "gpt2"):
        raise RunError(f"{path} describes a model of type {kind or named or 'unknown'}; "
                       "only bloom (BloomForCausalLM) and gpt2 (GPT2LMHeadModel) can be read")

    def number(keys: tuple[str, ...], default: int | None = None) -> int:
        key, value = next(((key, raw[key]) for key in keys if raw.get(key) is not None), (keys[0], default))
        if type(value) is not int or value < 1:
            raise RunError(f"{path}: {key} is {value!r}, but must be a whole number above 0")
        return value

    wanted: dict[str, bool | None] = {"quantization_config": None}
    if kind == "gpt2":
        wanted |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for key, value in wanted.items():
        if raw.get(key, value) != value:
            raise RunError(f"{path}: {key} is {raw[key]!r}; only {value!r} can be computed here")
    fields: dict[str, Any] = {name: number(keys) for name, keys in (_BLOOM_KEYS if kind == "bloom" else _GPT2_KEYS).items()}
    if kind == "bloom":
        fields |= {"position_embedding_type": "alibi", "embed_layernorm": True, "seq_length": number(("seq_length",), 2048),
                   "apply_residual_connection_post_layernorm":
                       bool(raw.get("apply_residual_connection_post_layernorm", False))}
    else:
        if (activation := raw.get("activation_function", "gelu_new")) not in _TANH_GELU:
            raise RunError(f"{path}: activation_function is {activation!r}; only {', '.join(_TANH_GELU)} can be computed here")
        fields |= {"seq_length": fields["max_position_embeddings"], "ffn_hidden_size": number(("n_inner",), 4 * fields["hidden_size"])}
    epsilon = raw.get("layer_norm_epsilon", 1e-5)
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise RunError(f"{path}: layer_norm_epsilon is {epsilon!r}, but must be a number from 0 to 1")
    try:
        model = ModelConfig(layernorm_epsilon=float(epsilon), **fields)
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error
    return StoredConfig(kind, model, number(("vocab_size",)), raw)


def unfit(folder: str | Path, model: ModelConfig) -> str | None:
    """Why the model in ``folder`` cannot fill ``model``, naming the flag to change; None where it can."""
    stored = read_config(folder)
    theirs, ours = architecture(stored.model), architecture(model)
    flags = ARCHITECTURE_FLAGS
    if stored.kind == "gpt2":  # ALiBi has no table of positions
        flags = {**flags, "max_position_embeddings": "--max-position-embeddings"}
        theirs["max_position_embeddings"] = stored.model.max_position_embeddings
        ours["max_position_embeddings"] = model.max_position_embeddings
    for name in flags:
        if name != "vocab_size" and theirs[name] != ours[name]:
            return (f"{folder} holds a model with {name} {theirs[name]}, this run has {ours[name]} "
                    f"({flags[name]}); make them equal, or load another model")
    if stored.rows < model.vocab_size:
        return (f"{folder} holds a word table of {stored.rows} rows, but this run's tokenizer has {model.vocab_size} "
                "token ids; give the tokenizer that the model was trained with")
    return None


def unread(folder: str | Path, model: ModelConfig) -> str | None:
    """What of the model in ``folder`` does not get into ``model``, for the log; None where all of it does."""
    rows = read_config(folder).rows
    if rows <= model.padded_vocab_size:
        return None
    return (f"its word table has {rows} rows, this run's padded vocabulary {model.padded_vocab_size} for {model.vocab_size} token "
            "ids: the rest, padding for this tokenizer, is not read (--pad-vocab-size-to keeps it)")


class HuggingFaceFolder(WeightSource):
    """BLOOM or GPT-2 in ``safetensors`` or ``.bin`` files, one file or many with an index."""

    def __init__(self, folder: str | Path) -> None:
        """Compare the names in the files with those of the architecture; reads no weights.

        Raises RunError naming what is missing, damaged or not part of the model.
        """
        self.folder = Path(folder)
        self.where = str(folder)
        self.config = read_config(folder)
        self.num_layers = self.config.model.num_layers
        self.files = TensorFiles(self.folder)
        if self.num_layers > len(self.files.file_of):  # before all their names are listed
            raise RunError(f"{folder} holds {len(self.files.file_of)} tensors, too few for {self.num_layers} layers")
        self.layers: dict[int, list[NamePair]] = {}
        for pair in self.config.pairs():
            self.layers.setdefault(pair.index, []).append(pair)
        names = {name.removeprefix(PREFIX): name for name in self.files.file_of}
        if twice := sorted(self.files.file_of.keys() - names.values()):
            raise RunError(f"{folder} holds {_some(twice)} both with and without the leading {PREFIX}")
        stored = {pair.hf_name: names.pop(pair.hf_name.removeprefix(PREFIX), None)
                  for pairs in self.layers.values() for pair in pairs}
        self._head = names.pop(HEAD, None)
        self._stored_name = {name: there for name, there in stored.items() if there is not None}
        if missing := [name for name in stored if name not in self._stored_name]:
            raise RunError(f"{folder} lacks {_some(missing)} of a {self.config.kind} model with {self.num_layers} layers")
        ignored = _BUFFERS if self.config.kind == "gpt2" else re.compile("$^")
        if unknown := [name for short, name in names.items() if not ignored.fullmatch(short)]:
            raise RunError(f"{folder} holds {_some(unknown)}, which a {self.config.kind} model with {self.num_layers} "
                           "layers does not have")

    def layer(self, index: int, tags: Mapping[str, ParamTag]) -> dict[str, torch.Tensor]:
        if index not in self.layers:
            raise RunError(f"{self.folder} has no weights for pipeline layer {index}: it holds {self.num_layers} layers")
        pairs = self.layers[index]
        there = {pair.hf_name: self._stored_name[pair.hf_name] for pair in pairs}
        read = self.files.read(there.values())
        found = {}
        for pair in pairs:
            tensor = read.pop(there[pair.hf_name])
            shape = shape_there(pair, self.config.model, self.config.rows)
            if tuple(tensor.shape) != shape or tensor.dtype not in DTYPES:
                raise RunError(f"{there[pair.hf_name]} in {self.files.file_of[there[pair.hf_name]]} is {tensor.dtype} of shape "
                               f"{tuple(tensor.shape)}; by {CONFIG} it should hold floating point numbers of 16 to 64 bits, shape {shape}")
            if pair.layout == VOCABULARY and self._head:
                self._check_head(self._head, there[pair.hf_name], tensor)
            # the table as it is: whoever asks adds or drops padding
            found[pair.name] = tensor if pair.layout == VOCABULARY else from_hugging_face(pair, tensor, self.config.model)
        return found

    def described(self, index: int) -> str:
        paths = {self.files.file_of[self._stored_name[pair.hf_name]] for pair in self.layers.get(index, ())}
        return ", ".join(map(str, sorted(paths))) or self.where

    def _check_head(self, head: str, name: str, table: torch.Tensor) -> None:
        row = 0
        for piece in self.files.rows(head):
            if not torch.equal(piece, table[row:row + piece.shape[0]]):
                break
            row += piece.shape[0]
        if row != table.shape[0]:
            raise RunError(f"{head} in {self.folder} is not equal to {name}: a head of its own cannot be loaded, "
                           "models here share the word table with it")


def shape_there(pair: NamePair, model: ModelConfig, rows: int) -> tuple[int, ...]:
    """Shape of a parameter in Hugging Face's layout; the word table has ``rows`` rows."""
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    tables = {"word_embeddings.weight": rows, "position_embeddings.weight": model.max_position_embeddings or 0}
    if pair.name in tables:
        return tables[pair.name], hidden
    matrices = {"self_attention.query_key_value": (3 * hidden, hidden), "self_attention.dense": (hidden, hidden),
                "mlp.dense_h_to_4h": (inner, hidden), "mlp.dense_4h_to_h": (hidden, inner)}
    module, _, kind = pair.name.rpartition(".")
    if module not in matrices:
        return (hidden,)
    outputs, inputs = matrices[module]
    if kind == "bias":
        return (outputs,)
    return (inputs, outputs) if pair.layout in (TRANSPOSED, GROUPED) else (outputs, inputs)


def _some(names: list[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
