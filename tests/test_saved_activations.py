"""Bytes a block keeps for backward, in 16 bits, per token and hidden unit."""

import pytest
import torch
from small_model import build, config, freeze_weights

from megatron.memory import SavedBytes

BATCH, LENGTH, HIDDEN, HEADS = 2, 192, 128, 4


def kept_by_a_block(frozen, **changes):
    settings = config(params_dtype="bf16", hidden_size=HIDDEN, num_attention_heads=HEADS, seq_length=LENGTH,
                      max_position_embeddings=LENGTH, **changes)
    model = build(settings)
    if frozen:
        freeze_weights(model)
    block = model.layers["4"]
    x = torch.randn(BATCH, LENGTH, HIDDEN).bfloat16().requires_grad_()
    with SavedBytes(exclude=model.parameters()) as kept:
        y = block(x)
    assert y.requires_grad
    return kept.bytes / (BATCH * LENGTH * HIDDEN)


@pytest.mark.parametrize("positions", ["alibi", "rotary", "absolute"])
def test_frozen_weights_keep_20_bytes_where_training_them_keeps_32(positions):
    # 2 + 2 both LayerNorm inputs, 6 query, key and value, 2 attention output, 8 derivative of GELU
    bitfit = 2 + 2 + 6 + 2 + 8
    # training adds the inputs of query_key_value, h_to_4h (LayerNorm outputs) and 4h_to_h (GELU output);
    # the input of the dense projection is the attention output kept already
    full = bitfit + 2 + 2 + 8
    # per token: mean and reciprocal deviation of two LayerNorms, and one fp32 per head
    statistics_bytes = (2 * 2 * 4 + 4 * HEADS) / HIDDEN
    # cosines and sines [s, width], one pair for all blocks of a stage
    tables = 2 * 2 * (HIDDEN // HEADS) / (BATCH * HIDDEN) if positions == "rotary" else 0.0
    frozen = kept_by_a_block(True, position_embedding_type=positions)
    assert frozen - tables == pytest.approx(bitfit + statistics_bytes, abs=2 * 2 * 4 / HIDDEN)
    assert frozen <= 22
    assert kept_by_a_block(False, position_embedding_type=positions) - frozen == full - bitfit


def test_dropout_adds_masks_only():
    without = kept_by_a_block(True)
    with_masks = kept_by_a_block(True, hidden_dropout=0.1)
    assert with_masks - without == 2  # two masks of a byte an element
