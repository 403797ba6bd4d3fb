"""Base plus delta: taking a delta out of a checkpoint, and reading weights through it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import files, manifest
from megatron.checkpoint.delta_file import (
    NAME,
    Delta,
    DeltaFacts,
    dtype_name,
    frozen_print,
    put,
    read_delta,
    take,
    target_of,
    targets,
)
from megatron.checkpoint.hugging_face import is_hugging_face, read_config
from megatron.checkpoint.layer_tags import layer_kind, layer_order, layer_tags, trained_names
from megatron.checkpoint.load_plan import find_checkpoint
from megatron.checkpoint.progress import stored_architecture, stored_arguments, stored_vocabulary
from megatron.checkpoint.sources import WeightSource, open_source
from megatron.config import BIAS_TERMS, CheckpointConfig
from megatron.errors import RunError
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK, canonical_name
from megatron.mpu.tags import ParamTag


class DeltaSource(WeightSource):
    """A base with a delta on it. What is frozen is compared with the fingerprints in the delta.

    A bias that trained as a whole has the delta's dtype, one of which slices trained the wider of both.
    """

    def __init__(self, base: WeightSource, delta: Delta, name: str, folder: Path | None = None) -> None:
        """``name`` is what messages call the delta; ``folder`` is the tag it lies in, if it does.

        Raises RunError for another number of blocks.
        """
        if base.num_layers != delta.facts.num_layers:
            raise RunError(f"{base.where} has {base.num_layers} layers, {name} belongs to a base of {delta.facts.num_layers}")
        self.base, self.delta, self.name = base, delta, name
        self.num_layers, self.where = base.num_layers, f"{name} on {base.where}"
        self._targets, self._folder = targets(delta), folder
        self.replaced: dict[str, torch.Tensor] = {}
        """the base's values of what has been set so far, by canonical name"""
        self.averaged = base.averaged
        self.notes = (*base.notes, *(manifest.notes(folder) if folder else ()))

    def layer(self, index: int, tags: Mapping[str, ParamTag]) -> dict[str, torch.Tensor]:
        tensors, facts = self.base.layer(index, tags), self.delta.facts
        for name in [name for name in tags if name in tensors]:
            whole = canonical_name(index, name, self.num_layers)
            trained = self._targets.get(whole, [])
            mine = frozen_print(whole, tensors[name], tags[name], trained, facts) if facts.prints else None
            if mine is not None and facts.prints.get(whole) != mine:
                raise RunError(f"{self.base.where} is not the base of {self.name}, their {whole} differs; it was trained on "
                               f"{facts.base or 'another one'}")
            if trained:
                values = [self.delta.tensors[each] for each in trained]
                partly = target_of(trained[0])[1] is not None
                self.replaced[whole] = tensors[name].clone()
                dtype = torch.promote_types(tensors[name].dtype, values[0].dtype) if partly else values[0].dtype
                tensors[name] = tensors[name].to(dtype, copy=True)
                for each, value in zip(trained, values):
                    put(tensors[name], each, value, facts.num_attention_heads)
        return tensors

    def described(self, index: int) -> str:
        return f"{self.base.described(index)} with {self.name}"

    def stored(self) -> dict:
        return self.base.stored() if self._folder is None else files.read(files.mp_rank_file(self._folder, 0))


def is_delta_tag(folder: Path) -> bool:
    """Whether ``folder`` was saved with --save-delta-only."""
    return (folder / NAME).is_file() and folder / NAME in manifest.files_of(folder)


def open_delta_tag(folder: Path, config: CheckpointConfig | None) -> DeltaSource:
    """The weights of a tag that was saved with --save-delta-only: its base, with its delta on it.

    The base is --load where that is another folder than this run's, else the recorded one.
    Raises RunError when it is not there, or has other frozen weights (on reading them).
    """
    delta = read_delta(folder / NAME)
    base = base_folder(folder, delta.facts, config.load if config else None)
    _check_chain(folder, base)
    # --load speaks of this tag's base; a base that is a delta itself knows its own
    return DeltaSource(open_source(base, replace(config, load=None) if config else None), delta, str(folder), folder)


def _check_chain(folder: Path, base: Path) -> None:
    """RunError where the bases of bases of ``folder`` come back to one of them."""
    seen = {folder.resolve()}
    while base.resolve() not in seen:
        if not is_delta_tag(base) or not (following := read_delta(base / NAME).facts.base):
            return
        seen.add(base.resolve())
        base = Path(following)
    raise RunError(f"{folder} holds biases only, and its bases lead back to {base}, which is a delta too; give the base with "
                   "--load, or write both as one with tools/bitfit_delta.py apply")


def base_folder(folder: Path, facts: DeltaFacts, load: str | None) -> Path:
    """Where the base of the delta tag ``folder`` is. RunError when it is nowhere."""
    if load and Path(load).resolve() not in (folder.resolve(), folder.parent.resolve()):
        same_tag = Path(load) / Path(facts.base).name
        return same_tag if facts.base and same_tag.is_dir() else checkpoint_folder(load)
    if not facts.base or not Path(facts.base).is_dir():
        raise RunError(f"{folder} holds biases only, and the base they belong to is not there ({facts.base or 'not recorded'}); "
                       "put it back, resume with --load BASE, or write both as one with tools/bitfit_delta.py apply")
    return Path(facts.base)


def checkpoint_folder(path: str | Path, flag: str = "--load") -> Path:
    """The folder with weights that ``path``, given with ``flag``, stands for. RunError where there is none."""
    return find_checkpoint(path, flag).path


# --- offline: one layer after the other ---------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """What decides which parameters a model has."""

    gated: bool
    learned_positions: bool
    embed_layernorm: bool


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk and what it says of itself."""

    folder: Path
    source: WeightSource
    shape: _Shape
    state: Mapping[str, Any]
    heads: int

    def layers(self) -> Iterator[tuple[int, str, dict[str, ParamTag], dict[str, torch.Tensor]]]:
        """(index, kind, tags, whole tensors) of each layer with parameters."""
        tags = layer_tags(**vars(self.shape))
        for index in layer_order(self.source.num_layers):
            kind = layer_kind(index, self.source.num_layers)
            yield index, kind, tags[kind], self.source.layer(index, tags[kind])


def open_stored(path: str | Path, flag: str = "--base") -> Stored:
    """The checkpoint in ``path``, of any layout that can be read; ``flag`` gave it."""
    folder = checkpoint_folder(path, flag)
    source = open_source(folder)
    for note in source.notes:
        print(f"warning: {note}", file=sys.stderr)
    embedding, block = source.layer(EMBEDDING_INDEX, {}), source.layer(FIRST_BLOCK, {})
    try:
        first, second = block["mlp.dense_h_to_4h.weight"], block["mlp.dense_4h_to_h.weight"]
    except KeyError as error:
        raise RunError(f"{source.described(FIRST_BLOCK)} lacks {error.args[0]}") from None
    shape = _Shape(gated=first.shape[0] == 2 * second.shape[1], learned_positions="position_embeddings.weight" in embedding,
                   embed_layernorm="word_embeddings.norm.weight" in embedding)
    try:
        state = source.stored()
    except RunError:  # of another trainer, perhaps: tensors can be read all the same
        state = {}
    model = read_config(folder).model.num_attention_heads if is_hugging_face(folder) else None
    return Stored(folder, source, shape, state, model or stored_architecture(state).get("num_attention_heads") or 0)


def extract(checkpoint: str | Path, base: str | Path | None = None) -> Delta:
    """The delta of a checkpoint: what its run trained, with fingerprints of the rest.

    The terms are those its state file names, or all. With ``base`` the frozen tensors of both
    are compared, in the checkpoint's dtype. Raises RunError naming the first that differs.
    """
    folder = checkpoint_folder(checkpoint, "--checkpoint")
    if is_delta_tag(folder):
        delta = read_delta(folder / NAME)
    else:
        delta = _extracted(open_stored(folder), None)
    if base is not None:
        base = checkpoint_folder(base, "--base")
        verify(base, delta, str(checkpoint))
        delta = replace(delta, facts=replace(delta.facts, base=str(base.resolve())))
    return delta


def biases_of(checkpoint: str | Path) -> Delta:
    """Every bias of a checkpoint, whatever trained, as a delta: put back, it removes any other delta."""
    return _extracted(open_stored(checkpoint), BIAS_TERMS)


def _extracted(stored: Stored, terms: Sequence[str] | None) -> Delta:
    state, source = stored.state, stored.source
    if terms is None:
        terms = tuple(state.get("bitfit_bias_terms") or BIAS_TERMS) if state.get("bitfit") else BIAS_TERMS
    facts = DeltaFacts(num_layers=source.num_layers, num_attention_heads=stored.heads, dtype="fp32", terms=tuple(terms),
                       vocab_size=stored_vocabulary(state) or 0,
                       step=state.get("iteration") or 0, arguments=stored_arguments(state))
    trains = trained_names(**vars(stored.shape), terms=tuple(terms))
    tensors: dict[str, torch.Tensor] = {}
    prints: dict[str, str] = {}
    for index, kind, tags, found in stored.layers():
        if index == EMBEDDING_INDEX:
            facts = replace(facts, dtype=dtype_name(found["word_embeddings.weight"].dtype))
        for name, tag in tags.items():
            mine = [each for each in trains[kind] if target_of(each)[0] == name]
            for each in mine:
                tensors[canonical_name(index, each, source.num_layers)] = take(found[name], each, stored.heads)
            if (value := frozen_print(name, found[name], tag, mine, facts)) is not None:
                prints[canonical_name(index, name, source.num_layers)] = value
    return Delta(tensors, replace(facts, prints=prints))


def verify(base: str | Path, delta: Delta, name: str) -> None:
    """Compare all frozen tensors of ``base`` with the delta's fingerprints; RunError naming the first that differs."""
    stored = open_stored(base)
    for _ in replace(stored, source=DeltaSource(stored.source, delta, name)).layers():
        pass
