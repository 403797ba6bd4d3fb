"""The network as a list of pipeline layers, and the two things that run it.

Indices are those of existing layer files: 1 embedding, 3 .. L+2 blocks, L+4 final
LayerNorm. 2 and L+3 were transposes; hidden states are [b, s, h] throughout here and
the two entries only keep the numbering. L+5 is the tied head, L+6 the cast of logits.
"""

from __future__ import annotations

import functools

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from megatron.config import ModelConfig
from megatron.model.block import ParallelTransformerLayerPipe
from megatron.model.embedding import TIE, EmbeddingHead, EmbeddingPipe
from megatron.model.loss import loss_function
from megatron.model.norm import LayerNorm
from megatron.model.positions import PositionCache
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import parallel_logits
from megatron.mpu.random import RandomStreams, checkpoint

POSITION_TYPES = ("absolute", "rotary", "alibi")


# --- layers without parameters. DeepSpeed matches partition patterns against function
# --- names too, so none of these may contain "transformer" or "embedding".


def check_inputs(inputs, *, segments_expected: bool):
    """Pass on (tokens, position ids[, segment ids]), each int64 [b, s]; ValueError otherwise."""
    wanted = 3 if segments_expected else 2
    if not isinstance(inputs, tuple) or len(inputs) != wanted:
        got = f"a tuple of {len(inputs)}" if isinstance(inputs, tuple) else type(inputs).__name__
        raise ValueError(f"the first stage takes tokens, position ids{' and segment ids' * segments_expected} "
                         f"(--reset-attention-mask is {'on' if segments_expected else 'off'}), got {got}")
    for name, ids in zip(("tokens", "position ids", "segment ids"), inputs):
        # whatever is floating point gets a gradient back from the next stage, and ids have none
        if ids.dtype != torch.int64 or ids.shape != inputs[0].shape:
            raise ValueError(f"{name} must be int64 of the shape of tokens, {list(inputs[0].shape)}, got "
                             f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}")
    return inputs


def enter_blocks(inputs):
    """Keeps the file numbering (a transpose in the original)."""
    return inputs


def leave_blocks(inputs):
    """Drop the segment ids behind the last block."""
    return inputs[0] if isinstance(inputs, tuple) else inputs


def tied_logits(module, x: torch.Tensor, *, context: ParallelContext) -> torch.Tensor:
    """Logits [b, s, V / TP] from the word table that ``module`` holds."""
    return parallel_logits(x, module.word_embeddings.weight, context)


def widen_logits(logits: torch.Tensor) -> torch.Tensor:
    """Cast to fp32, as the loss wants them."""
    return logits.float()


def keep_logits(logits: torch.Tensor) -> torch.Tensor:
    """--fp16-lm-cross-entropy: leave logits in 16 bits to save memory."""
    return logits


def build_specs(config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> list:
    """All layers of the model in pipeline order; nothing is allocated yet.

    Raises ValueError for settings no network can be built from.
    """
    if config.position_embedding_type not in POSITION_TYPES:
        raise ValueError(f"position_embedding_type {config.position_embedding_type!r} is not one of "
                         f"{', '.join(POSITION_TYPES)}")
    if config.position_embedding_type == "rotary" and config.kv_channels % 2:
        raise ValueError(f"rotary positions need an even head width, got kv_channels {config.kv_channels}")
    positions = PositionCache(config, context)
    parts = (config, context, streams)
    check = functools.partial(check_inputs, segments_expected=config.reset_attention_mask)
    blocks = [LayerSpec(ParallelTransformerLayerPipe, *parts, positions, number)
              for number in range(config.num_layers)]
    return [
        check,
        TiedLayerSpec(TIE, EmbeddingPipe, *parts, tied_weight_attr="word_embeddings.weight"),
        enter_blocks,
        *blocks,
        leave_blocks,
        LayerSpec(LayerNorm, config),
        TiedLayerSpec(TIE, EmbeddingHead, *parts, tied_weight_attr="word_embeddings.weight",
                      forward_fn=functools.partial(tied_logits, context=context)),
        keep_logits if config.fp16_lm_cross_entropy else widen_logits,
    ]


def run_layers(layers, x, *, config: ModelConfig, streams: RandomStreams, training: bool):
    """Apply ``layers`` in turn; recompute chunks of blocks in backward where asked.

    With ``checkpoint_activations`` each run of ``checkpoint_num_layers`` consecutive
    blocks keeps its input only. Embedding and head are never recomputed.
    """
    recompute = config.checkpoint_activations and training and torch.is_grad_enabled()
    start = 0
    while start < len(layers):
        stop = start + 1
        if recompute and isinstance(layers[start], ParallelTransformerLayerPipe):
            limit = min(start + config.checkpoint_num_layers, len(layers))
            while stop < limit and isinstance(layers[stop], ParallelTransformerLayerPipe):
                stop += 1
            inputs = x if isinstance(x, tuple) else (x,)
            x = checkpoint(functools.partial(_in_turn, layers[start:stop]), *inputs, streams=streams)
        else:
            x = layers[start](x)
        start = stop
    return x


def _in_turn(layers, *inputs):
    x = inputs if len(inputs) > 1 else inputs[0]
    for layer in layers:
        x = layer(x)
    return x


class GPTPipeline(PipelineModule):
    """The stage of this rank, for DeepSpeed's pipeline engine; needs torch.distributed.

    First stage input: see ``check_inputs``. Between stages: hidden states [b, s, h], or
    the pair of them and segment ids. The name matters: DeepSpeed treats modules called
    GPTModelPipe or GPT2ModelPipe specially. DeepSpeed's own recomputation stays off
    (interval 0), ``run_layers`` does it.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams, *,
                 partition_method: str = "type:transformer", loss_fn=None) -> None:
        self._settings = (config, streams)
        super().__init__(layers=build_specs(config, context, streams),
                         topology=context.topology,
                         num_stages=None if context.topology else context.pp_size,
                         loss_fn=loss_fn or loss_function(config, context),
                         partition_method=partition_method,
                         activation_checkpoint_interval=0)

    def get_tied_weights_and_groups(self):
        """Tied weights whose gradients are summed over stages: a frozen one has none."""
        return [(weight, group) for weight, group in super().get_tied_weights_and_groups()
                if weight.requires_grad]

    #: whether a save writes layer files; a save of biases alone does not
    layer_files = True

    def save_state_dict(self, *args, **kwargs):
        """Called by the engine: write this stage's layer files."""
        if self.layer_files:
            super().save_state_dict(*args, **kwargs)

    def forward(self, x):
        config, streams = self._settings
        return run_layers(self.forward_funcs, x, config=config, streams=streams, training=self.training)


class GPTModel(torch.nn.Module):
    """All pipeline layers in one process, without DeepSpeed's engine or any process group.

    Parameters are named ``layers.{pipeline index}.{name}``. With a TP degree above one
    the context must carry a TP group.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__()
        self.config = config
        self.streams = streams
        self.layers = torch.nn.ModuleDict()
        self._run = []
        tied: dict[str, torch.nn.Module] = {}
        for index, spec in enumerate(build_specs(config, context, streams)):
            layer = spec
            if isinstance(spec, TiedLayerSpec) and spec.key in tied:
                layer = tied[spec.key]
            elif isinstance(spec, LayerSpec):
                layer = self.layers[str(index)] = spec.build()
            if isinstance(spec, TiedLayerSpec):
                tied.setdefault(spec.key, layer)
                if spec.forward_fn is not None:
                    layer = functools.partial(spec.forward_fn, layer)
            self._run.append(layer)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None,
                segment_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [b, s, V / TP] in fp32; position ids default to 0 .. s-1."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs = (tokens, position_ids) if segment_ids is None else (tokens, position_ids, segment_ids)
        return run_layers(self._run, inputs, config=self.config, streams=self.streams,
                          training=self.training)
