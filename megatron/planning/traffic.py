"""Bytes that one training step hands to collectives and to its neighbours in the pipeline.

Counted as a tensor's own size where a rank gives it to a call, which is what can be seen and
tested; a ring moves 2 (n - 1) / n of an all-reduce, (n - 1) / n of a gather, over each link.
A group of one rank moves nothing and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import Settings
from megatron.planning.shape import WIDTH, Stage, held


@dataclass(frozen=True)
class Traffic:
    """Bytes per step: of one rank, or of all of them together."""

    dp_gradients: int = 0
    """all-reduced over DP"""
    dp_weights: int = 0
    """updated weights gathered over DP, counted as the gathered whole"""
    tp_activations: int = 0
    """all-reduced over TP in forward, recomputation and the loss"""
    tp_gradients: int = 0
    """all-reduced over TP in backward"""
    tp_boundary: int = 0
    """what crosses a stage boundary in TP pieces, gathered on each side"""
    pp_sent: int = 0
    """activations, their gradients and DeepSpeed's headers of both"""
    pp_tied: int = 0
    """gradient of the word table, all-reduced over the stages that hold it"""
    scalars: int = 0
    """loss and gradient norm, over whatever group"""

    @property
    def dp(self) -> int:
        return self.dp_gradients + self.dp_weights

    @property
    def tp(self) -> int:
        return self.tp_activations + self.tp_gradients + self.tp_boundary

    @property
    def pp(self) -> int:
        return self.pp_sent + self.pp_tied

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, factor: int) -> Traffic:
        return Traffic(*(factor * value for value in vars(self).values()))


def micro_batches(settings: Settings) -> int:
    """Micro-batches per step and replica at the full global batch."""
    return settings.train.global_batch_size // (settings.train.micro_batch_size * settings.parallel.data_parallel_size)


def rank_traffic(settings: Settings, cut: Sequence[Stage], stage: Stage, tp_rank: int = 0) -> Traffic:
    """What TP rank ``tp_rank`` of ``stage`` hands over in one step."""
    model, parallel = settings.model, settings.parallel
    tp, dp, width = parallel.tensor_model_parallel_size, parallel.data_parallel_size, WIDTH[model.params_dtype]
    gradient_width = 2 if model.params_dtype == "fp16" else 4  # bf16 gradients travel in fp32
    passes = micro_batches(settings)
    tokens = settings.train.micro_batch_size * model.seq_length
    hidden = tokens * model.hidden_size * width
    mine = held(stage, tp, settings.optimizer, tp_rank)
    found: dict[str, int] = {}
    if dp > 1:
        reduced = sum(mine.padded(dp)) if model.params_dtype == "bf16" else mine.trained
        found |= {"dp_gradients": reduced * gradient_width, "dp_weights": sum(mine.padded(dp)) * width}
    if tp > 1:
        forward, backward = _blocks_over_tp(settings, cut, stage)
        loss = 3 * 4 * tokens if stage.last else 0  # peak and target in one call, then the denominator
        found["tp_activations"] = passes * ((forward + stage.first) * hidden + loss)
        found["tp_gradients"] = passes * (backward + stage.last) * hidden
    split = tp > 1 and parallel.scatter_gather_tensors_in_pipeline
    if not (stage.first and stage.last):
        boundary = tokens * model.hidden_size * (4 if model.fp32_residual_connection else width)
        segments = 8 * tokens if model.reset_attention_mask else 0
        # with TP pieces travels a header of int64: rank of the shape, shape, parts, own part, tp + 1 offsets
        piece = boundary // tp + 8 * (4 + 2 + tp + 1) if split else boundary
        up, down = not stage.last, not stage.first
        found["pp_sent"] = passes * (up * (piece + segments) + down * piece)
        if split:  # the input once; the output, whose pieces were sent, and its gradient
            found["tp_boundary"] = passes * boundary * (down + 2 * up)
        if not settings.optimizer.bitfit and (stage.first or stage.last):
            table = next(tensor for tensor in stage.ends if tensor.name == "word_embeddings.weight")
            found["pp_tied"] = table.local(tp) * gradient_width
    return Traffic(**found, scalars=_scalars(settings, stage, len(mine.padded(1))))


def _scalars(settings: Settings, stage: Stage, groups: int) -> int:
    """Loss and norm. ZeRO sums the norm over DP and over the rest of a replica for each parameter group."""
    parallel, dtype = settings.parallel, settings.model.params_dtype
    dp, pp = parallel.data_parallel_size, parallel.pipeline_model_parallel_size
    replica = pp * parallel.tensor_model_parallel_size
    total = 4 * (dp > 1 and stage.last) + 8 * (pp > 1)
    if dtype == "bf16":
        return total + 4 * (replica > 1)
    flag = 1 if dtype == "fp16" else 0  # overflow
    return total + (4 * groups + flag) * ((dp > 1) + (replica > 1))


def _blocks_over_tp(settings: Settings, cut: Sequence[Stage], stage: Stage) -> tuple[int, int]:
    """How often a micro-batch's hidden states are summed over TP in the blocks of ``stage``.

    Forward: behind both row-parallel layers, and once more where blocks are recomputed. torch
    stops a recomputation when all that backward needs is there: with frozen weights and no
    dropout that is before the last linear layer of a chunk. Backward: before both
    column-parallel layers, if their input needs a gradient.
    """
    model, optimizer = settings.model, settings.optimizer
    forward = 2 * stage.blocks
    if model.checkpoint_activations:
        chunks = -(-stage.blocks // model.checkpoint_num_layers)
        forward += 2 * stage.blocks - (chunks if optimizer.bitfit and model.hidden_dropout == 0 else 0)
    trained = set(optimizer.bitfit_bias_terms) if optimizer.bitfit else {"weights", "layernorm"}
    norm = "layernorm" in trained
    before = sum(other.blocks for other in cut[:stage.index])
    needed = not optimizer.bitfit or before > 0 or not stage.first or (model.embed_layernorm and norm)
    backward = 0
    for _ in range(stage.blocks):
        backward += needed or norm
        needed = needed or norm or bool(trained & {"query", "key", "value", "attention_output"})
        backward += needed
        needed = needed or bool(trained & {"mlp_intermediate", "mlp_output"})
    return forward, backward


def total_traffic(settings: Settings, cut: Sequence[Stage]) -> Traffic:
    """All ranks together."""
    tp, dp = settings.parallel.tensor_model_parallel_size, settings.parallel.data_parallel_size
    total = Traffic()
    for stage in cut:
        for tp_rank in range(min(tp, 2)):  # the ranks after the first are alike
            total += rank_traffic(settings, cut, stage, tp_rank).times(dp * (tp - 1 if tp_rank else 1))
    return total
