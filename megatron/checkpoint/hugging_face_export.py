"""Whole folders between Hugging Face's layout and ours, one pipeline layer in memory at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron.checkpoint import files
from megatron.checkpoint.convert import write_layer_folder
from megatron.checkpoint.hugging_face import (
    CONFIG,
    HuggingFaceFolder,
    StoredConfig,
    is_hugging_face,
    read_config,
    shape_there,
)
from megatron.checkpoint.hugging_face_files import ShardWriter
from megatron.checkpoint.layer_tags import layer_kind, layer_order, layer_tags
from megatron.checkpoint.load_plan import find_checkpoint
from megatron.checkpoint.progress import (
    ARCHITECTURE_FLAGS,
    architecture,
    stored_architecture,
    stored_arguments,
    stored_vocabulary,
)
from megatron.checkpoint.sources import WeightSource, averaged_lines, open_source
from megatron.config import CheckpointConfig, ModelConfig
from megatron.errors import RunError
from megatron.model.hf_names import VOCABULARY, to_hugging_face
from megatron.model.numbering import EMBEDDING_INDEX
from megatron.tokenizer.padding import padded_vocab_size

#: where from-hf keeps what is not weights, for to-hf and as a tokenizer folder
CARRIED = "hf"
#: what from-hf calls the only tag: nothing was trained yet
TAG = "global_step0"
GENERATION = "generation_config.json"
#: what a tokenizer may consist of
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
                   "chat_template.json")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HF_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
             torch.float64: "float64"}
CLASSES = {"bloom": "BloomForCausalLM", "gpt2": "GPT2LMHeadModel"}


def carry_files(source: Path, target: Path, *, config: bool) -> list[str]:
    """Copy tokenizer files, ``generation_config.json`` and, if asked, ``config.json``; returns their names."""
    wanted = [*TOKENIZER_FILES, GENERATION, *([CONFIG] if config else [])]
    names = [name for name in wanted if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def convert_dtype(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """``tensor`` in ``dtype`` (fp32, bf16, fp16, or keep). RunError where a number is too large for fp16."""
    if dtype == "keep":
        return tensor
    cast = tensor.to(DTYPES[dtype])
    if dtype == "fp16" and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise RunError(f"{name} holds numbers of up to {tensor.abs().max().item():.3g}, too large for fp16; "
                       "take bf16 or fp32")
    return cast


# --- Hugging Face -> ours ---------------------------------------------------------------------


def from_folder(folder: str | Path, target: str | Path, *, tp: int = 1, dtype: str = "keep", divisible_by: int = 128,
                pad_to: int | None = None) -> list[str]:
    """Write the Hugging Face ``folder`` as a checkpoint in ``target``, cut for ``tp`` ranks.

    Config, tokenizer and generation files go to ``target/hf``. All rows of the word table
    are kept; zero rows are added up to a multiple of ``divisible_by * tp``, or to ``pad_to``.
    Returns the flags of a training command that fit. Raises RunError, leaving nothing, for a
    ``target`` that is in use and for what cannot be read, cut or cast.
    """
    target = Path(target)
    if tp < 1:
        raise RunError(f"--target-tp {tp} must be at least 1")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"--save {target} exists already and is no empty folder; give a new one")
    if not is_hugging_face(folder):
        raise RunError(_no_model("--load", folder))
    source = HuggingFaceFolder(folder)
    stored = source.config
    if pad_to is not None and pad_to < stored.rows:
        raise RunError(f"--pad-vocab-size-to {pad_to} is smaller than the {stored.rows} rows of the word table in {folder}")
    rows = padded_vocab_size(stored.rows, tp=tp, divisible_by=divisible_by, pad_to=pad_to)
    shape = replace(stored.model, padded_vocab_size=rows)
    carried = target / CARRIED
    try:
        carried.mkdir(parents=True)
        for name in carry_files(source.folder, carried, config=True):
            _sync(carried / name)
        # how many of the rows are padding, and how long BLOOM's texts were, no file says
        unknown = {"vocab_size"} | ({"seq_length", "max_position_embeddings"} if stored.kind == "bloom" else set())
        write_layer_folder(target, TAG, source, shape, tp=tp, dtype=None if dtype == "keep" else dtype, unknown=unknown)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return training_flags(stored, target, rows, divisible_by)


def training_flags(stored: StoredConfig, target: Path, rows: int, divisible_by: int) -> list[str]:
    """Flags, one with its value each, that a run needs to start from ``target``."""
    model = stored.model
    flags = [f"--num-layers {model.num_layers}", f"--hidden-size {model.hidden_size}",
             f"--num-attention-heads {model.num_attention_heads}", f"--seq-length {model.seq_length}"]
    if model.ffn_hidden_size != 4 * model.hidden_size:
        flags.append(f"--ffn-hidden-size {model.ffn_hidden_size}")
    flags.append(f"--max-position-embeddings {model.max_position_embeddings or model.seq_length}")
    if stored.kind == "bloom":
        flags += ["--position-embedding-type alibi", "--embed-layernorm"]
    if model.layernorm_epsilon != 1e-5:
        flags.append(f"--layernorm-epsilon {model.layernorm_epsilon}")
    if model.apply_residual_connection_post_layernorm:
        flags.append("--apply-residual-connection-post-layernorm")
    if divisible_by != 128:
        flags.append(f"--make-vocab-size-divisible-by {divisible_by}")
    flags.append(f"--pad-vocab-size-to {rows}")
    if any((target / CARRIED / name).exists() for name in TOKENIZER_FILES):
        flags += ["--tokenizer-type PretrainedFromHF", f"--tokenizer-name-or-path {target / CARRIED}"]
    return [*flags, f"--load {target}"]


# --- ours -> Hugging Face ---------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """What ``to_folder`` wrote."""

    kind: str
    parameters: int
    bytes: int
    rows: int
    """rows of the word table"""
    dropped_rows: int
    files: tuple[str, ...]
    carried: tuple[str, ...]
    """tokenizer and generation files"""
    notes: tuple[str, ...]
    """what the user should hear about the checkpoint"""


def to_folder(checkpoint: str | Path, target: str | Path, *, base: str | Path | None = None,
              max_shard_bytes: int = 5 * 10**9, keep_padding: bool = False, dtype: str = "keep",
              config: CheckpointConfig | None = None) -> Exported:
    """Write the weights of ``checkpoint`` (a tag, or a folder with ``latest``) as a Hugging Face folder.

    ``base`` is a Hugging Face folder of the same architecture: its config, tokenizer and
    generation files are copied. Without one, the ``hf`` folder that ``from_folder`` left
    beside the tag serves, else the checkpoint's own state file. ``config`` says what may
    be read (trust, averages).

    The word table keeps the rows of ``base`` or of the true vocabulary, whichever are more, or all
    with ``keep_padding``. Rows that a run with a smaller table left out come from ``base``, if it has
    weights. Raises RunError, leaving no ``target``, when something does not fit.
    """
    target = Path(target)
    if target.exists():
        raise RunError(f"--save {target} exists already; give a new folder")
    config = replace(config or CheckpointConfig(), load=str(checkpoint))
    plan = find_checkpoint(checkpoint)
    folder, source = plan.path, open_source(plan.path, config)
    base = _base_of(folder, base)
    state = _state(source)
    model, kind = _model(folder, state, base)
    if source.num_layers != model.num_layers:
        raise RunError(f"{folder} holds {source.num_layers} layers, {base or 'its state file'} describes {model.num_layers}")
    pairs = StoredConfig(kind, model, 0, {}).pairs()
    true_sizes = {read_config(base).rows if base else None, stored_vocabulary(state)}
    part = files.unfinished(target, folder)
    writer = ShardWriter(part, [pair.hf_name for pair in pairs], max_shard_bytes)
    try:
        part.mkdir(parents=True)
        tags = layer_tags(gated=False, learned_positions=kind == "gpt2", embed_layernorm=kind == "bloom")
        rows = stored_rows = parameters = missing = 0
        table_dtype = torch.float32  # until the word table is read
        for index in tqdm(layer_order(model.num_layers), desc=f"writing {target.name}", unit="layer", disable=None):
            tensors = source.layer(index, tags[layer_kind(index, model.num_layers)])
            for pair in (pair for pair in pairs if pair.index == index):
                if pair.name not in tensors:
                    raise RunError(f"{source.described(index)} lacks {pair.name}")
                tensor = tensors.pop(pair.name)
                if pair.layout == VOCABULARY:
                    if base is not None and (missing := _missing_rows(base, tensor.shape[0])):
                        tensor = torch.cat([tensor, _rows_of(base, tensor.shape[0]).to(tensor.dtype)])
                    stored_rows = tensor.shape[0]
                    rows = _kept_rows(stored_rows, true_sizes, keep_padding)
                    tensor, table_dtype = tensor[:rows], tensor.dtype
                _check_shape(pair, tensor, model, rows, source)
                tensor = convert_dtype(pair.hf_name, to_hugging_face(pair, tensor, model, keep_padding=True), dtype)
                writer.add(pair.hf_name, tensor)
                parameters += tensor.numel()
            # older trainers keep buffers of attention beside its parameters
            if unknown := sorted(name for name in tensors if not name.startswith("self_attention.")):
                raise RunError(f"{source.described(index)} holds {', '.join(unknown[:3])}, for which {CLASSES[kind]} has no place")
        written = writer.close()
        stored_dtype = table_dtype if dtype == "keep" else DTYPES[dtype]
        carried = _write_rest(part, base, state, model, kind, rows, stored_dtype)
        files.publish(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what is still to be written may not fit either
            writer.abandon()
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{target} cannot be written: {error}") from error
        raise
    return Exported(kind=kind, parameters=parameters, bytes=writer.total_bytes, rows=rows,
                    dropped_rows=stored_rows - rows, files=tuple(path.name for path in written),
                    carried=tuple(name for name in carried if name != CONFIG),
                    notes=(*([plan.warning] if plan.warning else []), *source.notes, *averaged_lines(source.averaged),
                           *([f"the last {missing} rows of the word table, padding that the run left out, are those of {base}"]
                             if missing else [])))


def _no_model(flag: str, folder: str | Path) -> str:
    why = f"it has no {CONFIG}" if Path(folder).is_dir() else "there is no such folder"
    return f"{flag} {folder} is no Hugging Face folder: {why}; give one as from_pretrained takes it"


def _base_of(folder: Path, base: str | Path | None) -> Path | None:
    if base is not None:
        if not is_hugging_face(base):
            raise RunError(_no_model("--base", base))
        return Path(base)
    places = [folder, folder / CARRIED, folder.parent / CARRIED]
    return next((place for place in places if is_hugging_face(place)), None)


def _state(source: WeightSource) -> dict:
    """The state file beside the weights; {} where there is none that can be read: the tensors can all the same."""
    try:
        return source.stored()
    except RunError:
        return {}


def _model(folder: Path, state: dict, base: Path | None) -> tuple[ModelConfig, str]:
    """Architecture of the stored model and bloom or gpt2."""
    stored = {name: value for name, value in stored_architecture(state).items() if name in _TOLD}
    if base is not None:
        theirs = read_config(base)
        for name, value in architecture(theirs.model).items():
            if stored.get(name, value) != value:
                raise RunError(f"{folder} holds a model with {name} {stored[name]}, {base / CONFIG} describes one with {value}; "
                               "give --base with the Hugging Face folder that it was made from")
        return theirs.model, theirs.kind
    if silent := [name for name in _TOLD if name not in stored]:
        raise RunError(f"{folder} does not tell the {', '.join(silent)} of its model; give --base with a Hugging Face folder "
                       "of the same architecture")
    lengths: dict[str, Any] = {name: stored_arguments(state).get(name) or 2048 for name in ("seq_length", "max_position_embeddings")}
    kinds = {"alibi": "bloom", "absolute": "gpt2"}
    if stored["position_embedding_type"] not in kinds:
        raise RunError(f"{folder} holds a model with {stored['position_embedding_type']} positions, which neither BLOOM "
                       "(alibi) nor GPT-2 (absolute) has")
    kind = kinds[stored["position_embedding_type"]]
    model = ModelConfig(**stored, **lengths)
    try:
        StoredConfig(kind, model, 0, {}).pairs()
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from error
    return model, kind


#: settings a model can be described from; the vocabulary's size shows in its table
_TOLD = [name for name in ARCHITECTURE_FLAGS if name != "vocab_size"]


def _kept_rows(stored: int, true_sizes: set[int | None], keep_padding: bool) -> int:
    fitting = [size for size in true_sizes if size and size <= stored]
    return stored if keep_padding else max(fitting, default=stored)


def _missing_rows(base: Path, stored: int) -> int:
    """How many rows the table of ``base`` has beyond ``stored`` ones; 0 without weights there."""
    if not any(base.glob("*.safetensors*")) and not any(base.glob("*.bin*")):
        return 0
    return max(0, read_config(base).rows - stored)


def _rows_of(base: Path, first: int) -> torch.Tensor:
    """Rows of the word table of ``base`` from ``first`` on."""
    return HuggingFaceFolder(base).layer(EMBEDDING_INDEX, {})["word_embeddings.weight"][first:]


def _check_shape(pair, tensor: torch.Tensor, model: ModelConfig, rows: int, source: WeightSource) -> None:
    theirs = shape_there(pair, model, rows)
    ours = theirs if pair.layout in ("same", VOCABULARY) else theirs[::-1]
    if tuple(tensor.shape) != ours:
        raise RunError(f"{pair.name} in {source.described(pair.index)} has shape {tuple(tensor.shape)}; by the "
                       f"configuration it should have {ours}")


def _write_rest(part: Path, base: Path | None, state: dict, model: ModelConfig, kind: str, rows: int,
                dtype: torch.dtype) -> list[str]:
    """Config, generation settings and tokenizer; returns the names of what was written."""
    if base is not None:
        carried = carry_files(base, part, config=False)
        config = read_config(base).raw
    else:
        carried = _carry_tokenizer(state, part)
        config = _fresh_config(model, kind) | _special_ids(state)
    config = config | {"architectures": [CLASSES[kind]], "model_type": kind, "vocab_size": rows,
                       "tie_word_embeddings": True}
    config.pop("torch_dtype" if "dtype" in config else "dtype", None)
    config["dtype" if "dtype" in config else "torch_dtype"] = HF_DTYPES[dtype]
    (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [CONFIG, *carried]


def _fresh_config(model: ModelConfig, kind: str) -> dict:
    common = {"layer_norm_epsilon": model.layernorm_epsilon, "n_layer": model.num_layers, "n_head": model.num_attention_heads}
    if kind == "bloom":
        return common | {"hidden_size": model.hidden_size, "seq_length": model.seq_length, "apply_residual_connection_"
                         "post_layernorm": model.apply_residual_connection_post_layernorm}
    inner = None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size
    return common | {"n_embd": model.hidden_size, "n_positions": model.max_position_embeddings, "n_inner": inner,
                     "activation_function": "gelu_new"}


def _trained_tokenizer(state: dict):
    """Settings of the tokenizer the run was started with, where its files are still there."""
    from megatron.config import TokenizerConfig

    names = ("tokenizer_type", "tokenizer_name_or_path", "vocab_file", "merge_file")
    found = {name: value for name in names if (value := stored_arguments(state).get(name))}
    paths = [found[name] for name in names[1:] if name in found]
    return TokenizerConfig(**found) if paths and all(Path(path).exists() for path in paths) else None


def _special_ids(state: dict) -> dict:
    """Token ids that differ from the classes' defaults, which are those of the public models."""
    from megatron.tokenizer import build_tokenizer

    config = _trained_tokenizer(state)
    if config is None:
        return {"bos_token_id": None, "eos_token_id": None}
    tokenizer = build_tokenizer(config)
    ids = {role: tokenizer.special(role) if tokenizer.has(role) else None for role in ("bos", "eos", "pad")}
    return {"bos_token_id": ids["bos"], "eos_token_id": tokenizer.eod if tokenizer.has("eod") else ids["eos"],
            "pad_token_id": ids["pad"]}


def _carry_tokenizer(state: dict, part: Path) -> list[str]:
    config = _trained_tokenizer(state)
    if config is None:
        return []
    if config.tokenizer_name_or_path:
        place = Path(config.tokenizer_name_or_path)
        return carry_files(place if place.is_dir() else place.parent, part, config=False)
    shutil.copyfile(config.vocab_file, part / "vocab.json")
    shutil.copyfile(config.merge_file, part / "merges.txt")
    end = "<|endoftext|>"
    (part / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": end, "eos_token": end,
         "unk_token": end}, indent=2) + "\n")
    return ["vocab.json", "merges.txt", "tokenizer_config.json"]


def _sync(path: Path) -> None:
    with open(path, "rb") as done:
        os.fsync(done.fileno())
