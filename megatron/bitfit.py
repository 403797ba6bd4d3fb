"""BitFit (Ben Zaken et al., arXiv 2106.10199): which parameters train, and the report.

Freezing happens once, between building the model and building the optimizer:
DeepSpeed then never sees a gradient, a buffer or a state for a frozen weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.config import BIAS_TERMS
from megatron.errors import SharedRunError
from megatron.model.attention import SelfAttention
from megatron.model.norm import LayerNorm
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import ParamTag, full_shape, mark, tag_of, tag_parameter
from megatron.partial_bias import SLICES, is_slice, train_slices

#: term of the paper for the bias of a linear layer, by the layer's name in a block
_TERMS = {"dense": "attention_output", "dense_h_to_4h": "mlp_intermediate", "dense_4h_to_h": "mlp_output"}


def is_bias(name: str) -> bool:
    """Whether a dotted parameter name ends in the component ``bias``, exactly."""
    return name.rpartition(".")[2] == "bias"


def freeze(model: torch.nn.Module, terms: tuple[str, ...] = BIAS_TERMS) -> None:
    """Leave only the biases of ``terms`` trainable; by default every bias there is.

    With some but not all of query, key and value those slices become parameters of their
    own (``megatron.partial_bias``). Must run once, with the weights loaded and before the
    optimizer exists; nothing after it may change ``requires_grad``. Raises ValueError
    for a bias that belongs to no term when only some terms are asked for.
    """
    if any(is_slice(param) for param in model.parameters()):
        raise ValueError("the model is frozen to slices of its biases already; build it anew")
    slices = tuple(name for name in SLICES if name in terms)
    for name, owner in list(model.named_modules()):
        for own_name, param in owner.named_parameters(recurse=False):
            param.requires_grad_(is_bias(own_name) and _trains(name, owner, terms))
        if isinstance(owner, SelfAttention) and 0 < len(slices) < len(SLICES):
            train_slices(owner.query_key_value, owner.heads, slices)


def _trains(name: str, owner: torch.nn.Module, terms: tuple[str, ...]) -> bool:
    """Whether the whole bias of the module ``owner``, called ``name``, belongs to ``terms``."""
    kind = name.rpartition(".")[2]
    if set(terms) == set(BIAS_TERMS):
        return True
    if isinstance(owner, LayerNorm):
        return "layernorm" in terms
    if kind == "query_key_value":
        return set(SLICES) <= set(terms)
    if kind not in _TERMS:
        raise ValueError(f"the bias of {name} belongs to none of the terms {', '.join(BIAS_TERMS)}")
    return _TERMS[kind] in terms


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of all that trains on this rank, without an anchor."""
    return [(name, param) for name, param in model.named_parameters()
            if param.requires_grad and not is_anchor(param)]


# --- stages with nothing to train -------------------------------------------------------------


def is_anchor(param: torch.nn.Parameter) -> bool:
    """Whether ``param`` is the stand-in of a stage that has nothing to train."""
    return getattr(param, "stage_anchor", False)


def add_anchor(model: torch.nn.Module, context: ParallelContext,
               dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter | None:
    """Give a rank without a countable trainable parameter one zero that never moves.

    DeepSpeed 0.19 cannot run an optimizer, nor a gradient norm, over nothing, yet
    every rank must take part in both. That happens to an embedding-only stage under
    BitFit, and to TP rank > 0 of a stage whose trainable tensors are all replicated
    (the norm counts those on TP rank 0 only). The anchor's gradient is zero, it is in no
    layer file and in no count. Returns it, or None where it is not needed.
    """
    for _, param in trainable(model):
        counted = context.tp_rank == 0 or tag_of(param).dim is not None
        if counted and not getattr(param, "ds_pipe_replicated", False):
            return None
    anchor = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    tag_parameter(anchor, ParamTag())
    # tensor_model_parallel, so that the norm counts it on this very rank
    mark(anchor, tensor_model_parallel=True, ds_pipe_replicated=False, stage_anchor=True)
    model.register_parameter("stage_anchor", anchor)
    model.register_forward_hook(_through_anchor)
    return anchor


class _ZeroGradient(torch.autograd.Function):
    """Identity of ``x`` that hands ``anchor`` a gradient of zero: DeepSpeed waits for one."""

    @staticmethod
    def forward(ctx, x, anchor):
        ctx.save_for_backward(anchor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        anchor, = ctx.saved_tensors
        return grad, torch.zeros_like(anchor)


def _through_anchor(model, inputs, outputs):
    if isinstance(outputs, tuple):  # hidden states first, then what carries no gradient
        return _ZeroGradient.apply(outputs[0], model.stage_anchor), *outputs[1:]
    return _ZeroGradient.apply(outputs, model.stage_anchor)


# --- the report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterReport:
    """What trains, over the whole model (TP shares merged, tied copies counted once)."""

    terms: dict[str, tuple[int, int]]
    """trainable tensors and elements per parameter name, layers added up"""
    trainable: int
    total: int

    @property
    def share(self) -> float:
        return self.trainable / self.total if self.total else 0.0


def term_of(name: str) -> str:
    """A parameter's name without the layer it sits in (``3.mlp.x.bias`` -> ``mlp.x.bias``)."""
    parts = name.split(".")
    if parts[0] in ("tied_modules", "layers"):
        parts = parts[2:]
    elif parts[0].isdigit():
        parts = parts[1:]
    return ".".join(parts) if len(parts) > 1 else f"final_layernorm.{parts[0]}"


def parameter_report(model: torch.nn.Module, context: ParallelContext) -> ParameterReport:
    """Collective: gather the counts of all stages."""
    terms: dict[str, tuple[int, int]] = {}
    total = 0
    for name, param in model.named_parameters():
        if is_anchor(param):
            continue
        if context.tp_rank or context.dp_rank or getattr(param, "ds_pipe_replicated", False):
            continue
        elements = torch.Size(full_shape(param, tag_of(param), context.tp_size)).numel()
        total += 0 if is_slice(param) else elements  # the fused bias has them already
        if param.requires_grad:
            tensors, sum_so_far = terms.get(term_of(name), (0, 0))
            terms[term_of(name)] = (tensors + 1, sum_so_far + elements)
    merged: dict[str, tuple[int, int]] = {}
    everyone = [(terms, total)]
    if context.world_size > 1:
        everyone *= context.world_size
        dist.all_gather_object(everyone, (terms, total))
    for their_terms, _ in everyone:
        for term, (tensors, elements) in their_terms.items():
            had = merged.get(term, (0, 0))
            merged[term] = (had[0] + tensors, had[1] + elements)
    report = ParameterReport(terms=merged,
                             trainable=sum(elements for _, elements in merged.values()),
                             total=sum(entry[1] for entry in everyone))
    if not report.trainable:
        raise SharedRunError("nothing to train: --bitfit trains biases only and this model has no bias "
                             "parameter at all; drop --bitfit or build the model with biases")
    return report


def format_report(report: ParameterReport) -> str:
    """The start-up table: one line per term, then trainable, total and share."""
    width = max(len(term) for term in (*report.terms, "trained term"))
    lines = [f"{'trained term':<{width}}  {'tensors':>8}  {'elements':>16}"]
    lines += [f"{term:<{width}}  {tensors:>8,}  {elements:>16,}"
              for term, (tensors, elements) in report.terms.items()]
    lines.append(f"trainable {report.trainable:,} of {report.total:,} parameters "
                 f"({100 * report.share:.4f} %)")
    return "\n".join(lines)
