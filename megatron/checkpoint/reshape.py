"""A checkpoint written again at another TP degree, in another dtype or numbering, without a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.convert import write_layer_folder
from megatron.checkpoint.delta import is_delta_tag
from megatron.checkpoint.layouts import ShareSource
from megatron.checkpoint.load_plan import find_checkpoint
from megatron.checkpoint.progress import ARCHITECTURE_FLAGS, stored_architecture, stored_arguments, stored_vocabulary
from megatron.checkpoint.sources import averaged_lines, open_source
from megatron.config import CheckpointConfig, ModelConfig
from megatron.errors import RunError
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK
from megatron.mpu.layers import TORCH_DTYPES
from megatron.tokenizer.padding import padded_vocab_size

#: --make-vocab-size-divisible-by where a checkpoint does not tell it
_DIVISIBLE_BY = 128


def reshape(load: str, save: str, *, tp: int, dtype: str | None = None, layout: str = "bigscience",
            heads: int | None = None, vocab_size: int | None = None, trust: bool = False,
            average: bool = False) -> list[str]:
    """Write the weights of checkpoint ``load`` into the new folder ``save``, cut for ``tp`` ranks.

    ``heads`` and ``vocab_size`` are for checkpoints whose state file does not tell them. Returns
    what was done, as lines. Raises RunError, leaving nothing, when it cannot be.
    """
    if tp < 1:
        raise RunError(f"--target-tp {tp} must be at least 1")
    allowed = CheckpointConfig(load=load, trust_checkpoint=trust, average_duplicated_parameters=average)
    plan = find_checkpoint(load)
    source = open_source(plan.path, allowed)
    if not isinstance(source, ShareSource):
        raise RunError(f"{plan.path} holds biases alone; tools/bitfit_delta.py apply puts them onto a copy of their base"
                       if is_delta_tag(plan.path) else f"--load {load} is a Hugging Face folder; from-hf converts it")
    assert plan.tag is not None  # only a Hugging Face folder has none
    stored = source.stored()
    shape, unknown = shape_of(source, heads=heads, vocab_size=vocab_size)
    rows = rows_for(shape, stored_arguments(stored), tp)
    folder = write_layer_folder(save, plan.tag, source, dataclasses.replace(shape, padded_vocab_size=rows), tp=tp,
                                dtype=dtype, layout=layout, stored=stored, unknown=unknown)
    lines = [*([plan.warning] if plan.warning else []), *source.notes]
    lines.append(f"{folder}: {shape.num_layers} blocks at TP {tp}, from {source.where} at TP {source.degree}")
    if rows != shape.padded_vocab_size:
        lines.append(f"  the word table has {rows:,} rows, {shape.padded_vocab_size:,} before")
    if unknown:
        lines.append(f"  not recorded, because the source does not tell: {', '.join(sorted(unknown))}")
    return lines + list(averaged_lines(source.averaged))


def shape_of(source: ShareSource, *, heads: int | None = None,
             vocab_size: int | None = None) -> tuple[ModelConfig, frozenset[str]]:
    """The model in ``source``, and those settings of it that nothing tells.

    Sizes are read off the tensors, the rest is what the state file says. ``padded_vocab_size`` is
    the number of rows stored, ``vocab_size`` 0 where nothing tells it. Raises RunError where the two
    contradict each other, or the number of heads is not known.
    """
    stored = source.stored()
    told, seen = stored_architecture(stored), _seen(source)
    told["vocab_size"] = vocab_size or stored_vocabulary(stored)
    told["num_attention_heads"] = heads or told.get("num_attention_heads")
    told = {name: told[name] for name in ARCHITECTURE_FLAGS if told.get(name) is not None}
    if "num_attention_heads" not in told:
        raise RunError(f"{source.where} does not tell how many attention heads its model has; give --num-attention-heads")
    width, gated = seen.pop("projection_size"), seen.pop("gated")
    seen["kv_channels"], rest = divmod(width, told["num_attention_heads"])
    if rest:
        raise RunError(f"{source.where}: heads of {told['num_attention_heads']} do not divide a projection of {width}")
    for name in seen.keys() & told.keys():
        if told[name] != seen[name]:
            raise RunError(f"{source.where}: {name} is {told[name]} in the state file, but {seen[name]} in the layer files")
    if "activation" in told and gated != told["activation"].endswith("glu"):
        raise RunError(f"{source.where}: the state file says activation {told['activation']}, but the first projection of "
                       f"the MLP has {'two halves' if gated else 'one half'}")
    rows = seen["padded_vocab_size"]
    if told.get("vocab_size", 0) > rows:
        raise RunError(f"{source.where}: a vocabulary of {told['vocab_size']} does not fit into {rows} rows of the word table")
    arguments = stored_arguments(stored)
    facts = {"activation": "geglu" if gated else "gelu_tanh", "position_embedding_type": "alibi", "seq_length": 1,
             **{name: arguments[name] for name in ("seq_length", "max_position_embeddings") if arguments.get(name)},
             **told, **seen}
    return ModelConfig(**facts), frozenset(ARCHITECTURE_FLAGS.keys() - told.keys() - seen.keys())


def _seen(source: ShareSource) -> dict:
    """What the tensors tell of the model."""
    embedding, block = source.shapes(EMBEDDING_INDEX), source.shapes(FIRST_BLOCK)
    try:
        rows, hidden = embedding["word_embeddings.weight"][0]
        kind = embedding["word_embeddings.weight"][1]
        inner = block["mlp.dense_4h_to_h.weight"][0][1]
        seen: dict[str, Any] = {"num_layers": source.num_layers, "hidden_size": hidden, "padded_vocab_size": rows * source.degree,
                "projection_size": block["self_attention.dense.weight"][0][1] * source.degree,
                "ffn_hidden_size": inner * source.degree, "gated": block["mlp.dense_h_to_4h.weight"][0][0] == 2 * inner,
                "embed_layernorm": "word_embeddings.norm.weight" in embedding}
    except (KeyError, ValueError) as error:
        raise RunError(f"{source.where} holds no model of the kind that is known here: its embedding or its first block "
                       f"lacks {error}") from error
    if positions := embedding.get("position_embeddings.weight"):
        seen |= {"position_embedding_type": "absolute", "max_position_embeddings": positions[0][0]}
    elif "self_attention.rotary_emb.inv_freq" in block:
        seen["position_embedding_type"] = "rotary"
    return seen | {"params_dtype": next((name for name, dtype in TORCH_DTYPES.items() if dtype == kind), "fp32")}


def rows_for(shape: ModelConfig, arguments: dict, tp: int) -> int:
    """Rows of the word table at TP degree ``tp``, by the rule the source's own run followed.

    Without a known true size no row can be called padding: then all stay, and zeros are added where
    they do not divide.
    """
    if not shape.vocab_size and shape.padded_vocab_size % tp == 0:
        return shape.padded_vocab_size
    fixed = arguments.get("pad_vocab_size_to")
    return padded_vocab_size(shape.vocab_size or shape.padded_vocab_size, tp=tp,
                             divisible_by=arguments.get("make_vocab_size_divisible_by") or _DIVISIBLE_BY,
                             pad_to=fixed if fixed and fixed % tp == 0 else None)
