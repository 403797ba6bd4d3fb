"""This trainer's real step in one process: what the benchmarks time.

Models, DeepSpeed engine and optimizer come from ``megatron.engine``, as in training; only
the data differ: random tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Shape

from megatron.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Settings,
    TokenizerConfig,
    TrainConfig,
)


def settings_of(shape: Shape, *, bitfit: bool, learning_rate: float = 1e-4, rank: int = 0, world: int = 1) -> Settings:
    """Settings of a run at TP = PP = 1 with BLOOM's layout (or learned positions), no weight decay."""
    alibi = shape.positions == "alibi"
    model = ModelConfig(num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
                        seq_length=shape.length, vocab_size=shape.vocabulary, padded_vocab_size=shape.vocabulary,
                        position_embedding_type=shape.positions, embed_layernorm=alibi,
                        max_position_embeddings=None if alibi else shape.length,
                        attention_dropout=shape.dropout, hidden_dropout=shape.dropout, params_dtype=shape.dtype,
                        checkpoint_activations=shape.checkpointing, use_cpu_initialization=True)
    optimizer = OptimizerConfig(lr=learning_rate, lr_decay_style="constant", weight_decay=0.0, bitfit=bitfit)
    train = TrainConfig(micro_batch_size=shape.batch, global_batch_size=shape.batch * world, train_iters=10**6)
    return Settings(model=model, optimizer=optimizer, train=train,
                    parallel=ParallelConfig(world_size=world, rank=rank, local_rank=rank),
                    checkpoint=CheckpointConfig(), data=DataConfig(), tokenizer=TokenizerConfig(),
                    logging=LoggingConfig())


@dataclass
class Trainer:
    """An engine and a step over one fixed batch."""

    engine: Any
    settings: Settings
    step: Callable[[], float]
    """one optimizer step; returns its loss"""


def random_tokens(shape: Shape, seed: int = 5) -> torch.Tensor:
    """Token ids [batch, length], int64, the same for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.length), generator=generator)


def stage_batch(tokens: torch.Tensor) -> tuple:
    """Stage inputs and labels as Hugging Face's models take them from ``labels=tokens``.

    Every position predicts the next token; the last one of a row predicts nothing.
    """
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0
    return (tokens, positions), (tokens.roll(-1, dims=1).contiguous(), mask)


def build_trainer(shape: Shape, *, bitfit: bool, context=None, learning_rate: float = 1e-4,
                  vary_vectors: bool = False, tokens: torch.Tensor | None = None) -> Trainer:
    """Collective: model and engine of this rank, weights drawn from one seed.

    ``vary_vectors`` moves biases and LayerNorm scales away from 0 and 1, so that a
    comparison of losses sees all of them. ``context``: what ``start_world`` returned.
    """
    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.engine import build_engine, build_model
    from megatron.mpu.random import seed_everything

    context = context or start_world()
    settings = settings_of(shape, bitfit=bitfit, learning_rate=learning_rate, rank=context.rank,
                           world=context.world_size)
    model = build_model(settings, context, seed_everything(1234, context), LoadPlan(None, None))
    if vary_vectors:
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for _, param in sorted(model.named_parameters()):
                if param.dim() == 1:
                    param.add_((torch.randn(param.shape, generator=generator) * 0.02).to(param))
    engine, _ = build_engine(model, settings, context, 10**6, settings.train.global_batch_size)
    engine.set_batch_fn(stage_batch)
    rows = random_tokens(shape, seed=5 + context.dp_rank) if tokens is None else tokens
    return Trainer(engine, settings, lambda: float(engine.train_batch(iter([rows]))))


def start_world(rank: int = 0, world: int = 1):
    """The ParallelContext of this process, TP = PP = 1; starts torch.distributed where needed."""
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    from megatron.initialize import initialize_distributed

    return initialize_distributed(ParallelConfig(world_size=world, rank=rank, local_rank=rank))
