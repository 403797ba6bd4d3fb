"""Saving biases alone (--save-delta-only): what a run adds to its checkpoints instead of frozen weights."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.bitfit import is_anchor, trainable
from megatron.checkpoint.delta import base_folder, checkpoint_folder, is_delta_tag
from megatron.checkpoint.delta_file import NAME, Delta, DeltaFacts, frozen_print, read_delta, target_of, to_bytes
from megatron.checkpoint.fingerprint import as_text, tensor_print
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.sources import WeightSource, open_source
from megatron.config import CheckpointConfig, Settings
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.model.numbering import canonical_name
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import tag_of, unshard
from megatron.partial_bias import is_slice
from megatron.replicas import checkpoint_name


class DeltaSaves:
    """The delta of one run, tag after tag. Build it with the weights loaded and frozen.

    The frozen tensors are fingerprinted once, each TP rank its share; nothing of them is
    exchanged but sums. Raises SharedRunError when this run has no base on disk.
    """

    def __init__(self, model, settings: Settings, context: ParallelContext, plan: LoadPlan) -> None:
        """Collective. ``plan`` is what this run has loaded."""
        started = time.monotonic()
        self._model, self._context = model, context
        base, problem = None, None
        try:
            base = _base_of(plan, settings.checkpoint)
        except RunError as error:
            problem = str(error)
        agree(context, problem)
        assert base is not None  # or all ranks would have ended just above
        shape = settings.model
        self._facts = DeltaFacts(
            num_layers=shape.num_layers, num_attention_heads=shape.num_attention_heads, dtype=shape.params_dtype,
            terms=settings.optimizer.bitfit_bias_terms, vocab_size=shape.vocab_size, base=str(base.resolve()),
            arguments=settings.flags)
        mine = frozen_prints(model, context, shape.vocab_size)
        if _is_whole_tag_of_this_run(plan, settings.checkpoint):
            _check_base(model, base, dataclasses.replace(self._facts, prints=mine), settings, context)
        everyones = self._from_stages(mine)
        if context.rank == 0:
            self._facts = dataclasses.replace(self._facts, prints=everyones)
            print(f"--save-delta-only: checkpoints refer to the base {base} ({len(everyones)} frozen tensors, fingerprint "
                  f"{self._facts.base_fingerprint[:16]}, taken in {time.monotonic() - started:.2f} s)", flush=True)

    @torch.no_grad()
    def file(self, step: int) -> bytes | None:
        """Collective: the delta file of this moment on rank 0, None elsewhere."""
        context = self._context
        mine: dict[str, torch.Tensor] = {}
        if context.dp_rank == 0:
            for name, param in trainable(self._model):
                if not getattr(param, "ds_pipe_replicated", False):
                    mine[checkpoint_name(name)] = _whole(param, context)
        everyones = self._from_stages(mine)
        if context.rank:
            return None
        return to_bytes(Delta(everyones, dataclasses.replace(self._facts, step=step)))

    def _from_stages(self, mine: dict) -> dict:
        """Collective: on rank 0 the entries of all stages, in their order; ``mine`` elsewhere."""
        context, everyones = self._context, dict(mine)
        if context.tp_rank or context.dp_rank:
            return everyones
        if context.pp_rank:
            dist.send_object_list([mine], dst=0)
            return everyones
        for stage in range(1, context.pp_size):
            box: list[dict] = [{}]
            dist.recv_object_list(box, src=stage * context.dp_size * context.tp_size)
            everyones |= box[0]
        return everyones


def _whole(param: torch.nn.Parameter, context: ParallelContext) -> torch.Tensor:
    """Collective over TP: the whole of ``param`` on the CPU."""
    tag, mine = tag_of(param), param.detach()
    shares = [mine]
    if tag.dim is not None and context.tp_size > 1:
        shares = [torch.empty_like(mine) for _ in range(context.tp_size)]
        dist.all_gather(shares, mine.contiguous(), group=context.tp_group)
    return unshard([share.cpu() for share in shares], tag).clone()


def frozen_prints(model, context: ParallelContext, vocab_size: int) -> dict[str, str]:
    """Collective over TP: fingerprints of this stage's frozen tensors by canonical name, in the model's dtype."""
    frozen = [(checkpoint_name(name), param) for name, param in model.named_parameters()
              if not (param.requires_grad or is_anchor(param) or getattr(param, "ds_pipe_replicated", False))]
    if not frozen:
        return {}
    parts = []
    for _, param in frozen:
        tag = tag_of(param)
        part = tensor_print(param, tag, context.tp_rank, context.tp_size, vocab_size if tag.tied else None)
        # copies of a replicated tensor are equal: TP rank 0 speaks for all
        parts.append(part if tag.dim is not None or context.tp_rank == 0 else torch.zeros_like(part))
    sums = torch.stack(parts)
    if context.tp_size > 1:
        dist.all_reduce(sums, group=context.tp_group)
    return {name: as_text(part) for (name, _), part in zip(frozen, sums.tolist())}


# --- which base ---------------------------------------------------------------------------------


def _base_of(plan: LoadPlan, config: CheckpointConfig) -> Path:
    """Where the frozen weights of this run lie, and stay. Raises RunError where that is not known."""
    if plan.folder is None:
        raise RunError("--save-delta-only saves biases alone, and this run starts from random weights: "
                       "give the base they belong to with --load")
    if not _own(plan, config):
        return plan.path
    if is_delta_tag(plan.path):
        return base_folder(plan.path, read_delta(plan.path / NAME).facts, config.load)
    if not config.load or Path(config.load).resolve() in (Path(plan.folder).resolve(), plan.path.resolve()):
        raise RunError(f"--save-delta-only: {plan.path} is a whole checkpoint of this run and does not say what its base was; "
                       "give the base with --load")
    return checkpoint_folder(config.load)


def _own(plan: LoadPlan, config: CheckpointConfig) -> bool:
    return bool(config.save and plan.folder and Path(plan.folder).resolve() == Path(config.save).resolve())


def _is_whole_tag_of_this_run(plan: LoadPlan, config: CheckpointConfig) -> bool:
    return _own(plan, config) and not is_delta_tag(plan.path)


def _check_base(model, base: Path, facts: DeltaFacts, settings: Settings, context: ParallelContext) -> None:
    """Collective: compare this stage's frozen tensors with those in ``base``, which were not read at this start."""
    problem = None
    try:
        if context.tp_rank == context.dp_rank == 0:
            source = open_source(base, settings.checkpoint)
            for local, layer in enumerate(model.forward_funcs):
                if isinstance(layer, torch.nn.Module) and list(layer.parameters()):
                    _check_layer(layer, local + model._local_start, source, facts)
    except RunError as error:
        problem = str(error)
    agree(context, problem)


def _check_layer(layer: torch.nn.Module, index: int, source: WeightSource, facts: DeltaFacts) -> None:
    tags = {name: tag_of(param) for name, param in layer.named_parameters() if not is_slice(param)}
    tensors, trained = source.layer(index, tags), [name for name, _ in trainable(layer)]
    for name, tag in tags.items():
        whole = canonical_name(index, name, facts.num_layers)
        there = frozen_print(name, tensors[name], tag, [each for each in trained if target_of(each)[0] == name], facts)
        if there != facts.prints.get(whole):
            raise RunError(f"{source.where} is not the base of this run: their {whole} differs; give the right one with --load")
