"""A small model, its batch and its loss, for the tests of the model."""

import torch

from megatron.config import ModelConfig
from megatron.model.pipe import GPTModel, loss_function
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import shard, tag_of

ALONE = ParallelContext()
VOCAB, LENGTH = 50, 16
#: segment ids of the three rows of batch(): documents, then padding
SEGMENTS = torch.tensor([[1] * 5 + [2] * 9 + [0, 0], [1] * 16, [3] * 2 + [7] * 14])


def config(**changes):
    heads = changes.get("num_attention_heads", 4)
    return ModelConfig(**{"num_layers": 2, "hidden_size": 6 * heads, "num_attention_heads": heads,
                          "seq_length": LENGTH, "vocab_size": VOCAB, "padded_vocab_size": 64,
                          "position_embedding_type": "alibi", "embed_layernorm": True,
                          "attention_dropout": 0.0, "hidden_dropout": 0.0, **changes})


def absolute(**changes):
    return config(position_embedding_type="absolute", max_position_embeddings=20, embed_layernorm=False,
                  **changes)


def randomize(model, seed=7):
    """Values no term can hide behind: nonzero biases, LayerNorm weights away from one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            norm_weight = name.endswith("weight") and param.dim() == 1
            param.copy_(1 + 0.3 * noise if norm_weight else 0.3 * noise)
    return model


def build(settings, context=ALONE, seed=1):
    """A randomized model: whole, or this rank's share of the same one."""
    model = GPTModel(settings, context, seed_everything(seed, context))
    if context.tp_size == 1:
        return randomize(model)
    whole = randomize(GPTModel(settings, ALONE, seed_everything(seed, ALONE)))
    with torch.no_grad():
        for param, full in zip(model.parameters(), whole.parameters(), strict=True):
            param.copy_(shard(full, tag_of(full), context.tp_rank, context.tp_size))
    return model


def batch(rows=3, seed=5):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    mask = (torch.rand(rows, LENGTH, generator=generator) > 0.3).float()
    return data[:, :-1], data[:, 1:], mask


def loss_of(model, settings, context=ALONE, segments=None):
    tokens, labels, mask = batch()
    return loss_function(settings, context)(model(tokens, segment_ids=segments), (labels, mask))


def grads(model):
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def freeze_weights(model):
    """What BitFit leaves trainable: the biases."""
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
