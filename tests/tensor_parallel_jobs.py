"""Jobs that look at copies and logits over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from small_model import ALONE, VOCAB, batch, build
from small_runs import Case, build_run, local_tensors, train_steps
from topology_jobs import _state

from megatron.config import ModelConfig
from megatron.mpu.context import ParallelContext

#: position whose token is changed
CHANGED = 9


def copies_after(case: Case, base: str) -> dict:
    """Train; whatever this rank holds of replicated parameters: {(name, part): tensor}, and norms."""
    _, context, _, engine, _ = build_run(case, base)
    before = local_tensors(engine)
    _, norms = train_steps(engine, case, context, 0, case.steps)
    copies = {(name, "weight"): tensor for name, (tensor, tag, _) in local_tensors(engine).items() if tag.dim is None}
    copies |= {(name, part): value for name, (values, tag, _) in _state(engine).items() if tag.dim is None
               for part, value in values.items()}
    moved = {name for (name, part), value in copies.items() if part == "weight" and not torch.equal(value, before[name][0])}
    return {"copies": copies, "norms": norms, "moved": moved}


def skipped_with_a_bad_copy(cases: list[Case], base: str) -> list[tuple[list[int], bool]]:
    """Of each case: which of three updates are skipped, and whether this rank's weights stay finite.

    In the second one the copy that the last rank has of a LayerNorm's bias gets a gradient that is not.
    """
    results = []
    for case in cases:
        _, context, _, engine, _ = build_run(case, base)
        now, skipped = [0], []
        if context.rank == context.world_size - 1:
            def spoilt(gradient, now=now):
                return gradient * float("inf") if now[0] == 1 else gradient

            dict(engine.module.named_parameters())["3.input_layernorm.bias"].register_hook(spoilt)
        for now[0] in range(3):
            before = engine.skipped_steps
            train_steps(engine, case, context, now[0], 1)
            skipped += [now[0]] * (engine.skipped_steps - before)
        results.append((skipped, all(bool(torch.isfinite(param).all()) for param in engine.module.parameters())))
    return results


def two_batches() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [3, LENGTH], and the same with another token at position CHANGED."""
    tokens, _, _ = batch(rows=3)
    other = tokens.clone()
    other[:, CHANGED] = (other[:, CHANGED] + 1) % VOCAB
    return tokens, other


def logits_of(settings: ModelConfig, bias: float | None, context: ParallelContext = ALONE) -> list[torch.Tensor]:
    """Whole logits [3, LENGTH, V] of both batches; biases of row-parallel layers run from -bias to bias."""
    model = build(settings, context).eval()
    logits = []
    with torch.no_grad():
        for name, param in model.named_parameters():
            if bias is not None and name.endswith(("self_attention.dense.bias", "mlp.dense_4h_to_h.bias")):
                # not the same everywhere, which the next LayerNorm would take out again
                param.copy_(torch.linspace(-bias, bias, len(param)))
        for tokens in two_batches():
            mine = model(tokens).contiguous()
            shares = [torch.empty_like(mine) for _ in range(context.tp_size)]
            if context.tp_size > 1:
                dist.all_gather(shares, mine, group=context.tp_group)
            logits.append(torch.cat(shares, -1) if context.tp_size > 1 else mine)
    return logits


def logits_over_tp(runs: list[tuple[ModelConfig, float | None, int]]) -> list[list[torch.Tensor]]:
    """``logits_of`` at the TP degree of each run, on the first ranks of the world."""
    rank, seen = dist.get_rank(), []
    groups = {size: dist.new_group(list(range(size))) for size in sorted({size for _, _, size in runs})}
    for settings, bias, size in runs:
        if rank < size:
            context = ParallelContext(tp_size=size, tp_rank=rank, tp_group=groups[size], tp_ranks=tuple(range(size)))
            seen.append(logits_of(settings, bias, context))
    return seen
