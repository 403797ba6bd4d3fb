"""Bias deltas on a ``transformers`` model in memory: apply one, swap it for another, take it off. Needs no DeepSpeed.

    model = transformers.BloomForCausalLM.from_pretrained(BASE)
    poems, code = load_delta("poems.safetensors"), load_delta("code.safetensors")
    with delta_applied(model, poems):
        model.generate(...)
    before = apply_delta(model, code)    # stays on
    apply_delta(model, before)           # and is gone, bit for bit

A swap writes the biases, 0.006 % of BLOOM-176B, and moves nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint.delta_file import Delta, frozen_print, put, read_delta, targets
from megatron.config import ModelConfig
from megatron.errors import RunError
from megatron.model.hf_names import NamePair, bloom_names, from_hugging_face, gpt2_names, to_hugging_face
from megatron.model.numbering import EMBEDDING_INDEX, canonical_name
from megatron.mpu.tags import ParamTag

__all__ = ["Delta", "apply_delta", "check_base", "delta_applied", "load_delta"]


def load_delta(path: str | Path) -> Delta:
    """The delta in a file that ``tools/bitfit_delta.py`` or ``--save-delta-only`` wrote. Raises RunError for another file."""
    return read_delta(path)


@torch.no_grad()
def apply_delta(model: torch.nn.Module, delta: Delta) -> Delta:
    """Write ``delta`` into a BloomForCausalLM or GPT2LMHeadModel (or their models without head), in its dtype, on its device.

    Returns the values that were there as a delta; applying that restores the model bit for bit. Nothing is written when
    RunError is raised, for a model that the delta does not fit. Whether it is the right base is not looked at: `check_base`.
    """
    shape, places = _places(model)
    _check_fits(model, shape, places, delta)
    fresh: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    for target, names in targets(delta).items():
        pair, param = places[target]
        kept[target] = from_hugging_face(pair, param.detach(), shape).clone()
        fresh[target] = kept[target].clone()
        for name in names:
            put(fresh[target], name, delta.tensors[name].to(param.device), shape.num_attention_heads)
    for target, values in fresh.items():
        pair, param = places[target]
        param.copy_(to_hugging_face(pair, values, shape))
    return Delta(kept, replace(delta.facts, prints={}))


@contextlib.contextmanager
def delta_applied(model: torch.nn.Module, delta: Delta) -> Iterator[torch.nn.Module]:
    """``model`` with ``delta`` inside, and as it was behind, whatever happens."""
    before = apply_delta(model, delta)
    try:
        yield model
    finally:
        apply_delta(model, before)


@torch.no_grad()
def check_base(model: torch.nn.Module, delta: Delta) -> None:
    """Compare the frozen tensors of ``model`` with the fingerprints in ``delta``; reads all of them once.

    Raises RunError naming the first that differs. A model loaded in fewer bits than the
    delta's dtype differs in all.
    """
    shape, places = _places(model)
    _check_fits(model, shape, places, delta)
    trained = targets(delta)
    for name, (pair, param) in places.items():
        tag = ParamTag(tied="word table") if pair.index == EMBEDDING_INDEX and pair.name == "word_embeddings.weight" else ParamTag()
        values = param.detach() if tag.tied else from_hugging_face(pair, param.detach(), shape)
        mine = frozen_print(name, values, tag, trained.get(name, []), delta.facts)
        if mine is not None and delta.facts.prints.get(name) != mine:
            raise RunError(f"this {type(model).__name__} is not the base of the delta: their {name} differs")


def _check_fits(model: torch.nn.Module, shape: ModelConfig, places: Mapping[str, tuple[NamePair, torch.nn.Parameter]],
                delta: Delta) -> None:
    """RunError for a delta of another architecture, and for weights that are not in memory."""
    name, facts = type(model).__name__, delta.facts
    # one taken from a checkpoint that does not tell its heads says 0
    for what, theirs, ours in (("layers", facts.num_layers, shape.num_layers),
                               ("attention heads", facts.num_attention_heads or shape.num_attention_heads, shape.num_attention_heads)):
        if theirs != ours:
            raise RunError(f"the delta belongs to a model of {theirs} {what}, this {name} has {ours}")
    trained = targets(delta)
    if unknown := [target for target in (*trained, *facts.prints) if target not in places]:
        raise RunError(f"the delta has {unknown[0]}, which a {name} has not")
    if facts.prints and (unknown := [target for target in places if target not in trained and target not in facts.prints]):
        raise RunError(f"this {name} has {unknown[0]}, which the delta's base has not")
    if any(param.is_meta for _, param in places.values()):
        raise RunError(f"weights of this {name} are on the meta device (not loaded, or offloaded); a delta needs them in memory")


def _places(model: torch.nn.Module) -> tuple[ModelConfig, dict[str, tuple[NamePair, torch.nn.Parameter]]]:
    """What the model is in our words, and its parameters by canonical name."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or kind not in ("bloom", "gpt2"):
        raise RunError(f"a delta goes onto a BLOOM or GPT-2 of transformers, not a {type(model).__name__} ({kind or 'no config'})")
    bloom = kind == "bloom"
    shape = ModelConfig(num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, seq_length=1,
                        num_attention_heads=config.num_attention_heads, embed_layernorm=bloom,
                        ffn_hidden_size=0 if bloom else config.n_inner or 0,
                        position_embedding_type="alibi" if bloom else "absolute", max_position_embeddings=1)
    params = {name.removeprefix("transformer."): param for name, param in model.named_parameters()}
    pairs = bloom_names(shape) if bloom else gpt2_names(shape)
    if lacking := next((pair.hf_name for pair in pairs if pair.hf_name.removeprefix("transformer.") not in params), None):
        raise RunError(f"this {type(model).__name__} has no {lacking}; a delta goes onto the model itself: unwrap what PEFT, "
                       "torch.compile or a data-parallel class put around it")
    return shape, {canonical_name(pair.index, pair.name, shape.num_layers): (pair, params[pair.hf_name.removeprefix("transformer.")])
                   for pair in pairs}
