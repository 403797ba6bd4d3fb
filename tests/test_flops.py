"""Floating-point operations: as logged, and as autograd really spends them."""

import dataclasses

import pytest
import torch
from small_model import LENGTH, build, config, loss_of
from torch.utils.flop_counter import FlopCounterMode

from megatron.bitfit import freeze
from megatron.config import BIAS_TERMS, ModelConfig
from megatron.flops import (
    gigaflos,
    operations_needed,
    parameters_without_embeddings,
    parameters_without_embeddings_in_billions,
    tflops_reported,
)


def bloom(layers, hidden, heads, **changes):
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048,
                       padded_vocab_size=250_880, position_embedding_type="alibi", embed_layernorm=True, **changes)


# --- operations -------------------------------------------------------------------------------


def test_tflops_of_a_published_log():
    """The 176B run: 192 GPUs, 215.82 s per iteration of 2048 samples."""
    model = bloom(70, 14336, 112, checkpoint_activations=True)
    assert f"{tflops_reported(model, 2048, 215.82, 192):.2f}" == "145.31"
    without = bloom(70, 14336, 112)
    assert tflops_reported(without, 2048, 215.82, 192) == pytest.approx(145.31 * 3 / 4, abs=0.01)


def test_a_gated_mlp_is_reported_with_factor_32():
    plain, gated = bloom(2, 64, 4), bloom(2, 64, 4, activation="swiglu")
    assert tflops_reported(gated, 8, 1.0, 2) == pytest.approx(tflops_reported(plain, 8, 1.0, 2) * 32 / 24)


@pytest.mark.parametrize(("layers", "hidden", "heads", "total"), [
    (24, 1024, 16, 559_214_592), (24, 1536, 16, 1_065_314_304), (24, 2048, 16, 1_722_408_960),
    (30, 2560, 32, 3_002_557_440), (30, 4096, 32, 7_069_016_064), (70, 14336, 112, 176_247_271_424)])
def test_parameters_of_published_models(layers, hidden, heads, total):
    model = bloom(layers, hidden, heads)
    assert parameters_without_embeddings(model) + (250_880 + 2) * hidden == total
    assert parameters_without_embeddings_in_billions(model) == parameters_without_embeddings(model) / 1e9


def test_gigaflos_count_six_operations_per_token_and_parameter():
    model = bloom(24, 1024, 16)
    assert gigaflos(model, 3) == pytest.approx(6 * 3 * 2048 * parameters_without_embeddings(model) / 1e9)


def batched(total, left, right, *rest, **named):
    """Products of [b, n, k] and [b, k, m], added in place: the one kind torch's counter leaves out."""
    return 2 * left[0] * left[1] * left[2] * right[2]


SHAPES = {
    "plain": {}, "fused": {"masked_softmax_fusion": True}, "gated": {"activation": "swiglu"},
    "widths": {"kv_channels": 4, "ffn_hidden_size": 40}, "rotary": {"position_embedding_type": "rotary"},
    "recompute": {"checkpoint_activations": True}, "fused recompute": {
        "masked_softmax_fusion": True, "checkpoint_activations": True},
    "recompute by two": {"num_layers": 3, "checkpoint_activations": True, "checkpoint_num_layers": 2},
    "recompute, dropout": {"checkpoint_activations": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recompute by two, dropout": {"num_layers": 3, "checkpoint_activations": True, "checkpoint_num_layers": 2,
                                  "hidden_dropout": 0.1},
}


def operations_counted(settings, terms):
    """What torch counts in forward and backward of three samples; ``terms`` None is full training."""
    model = build(settings)
    if terms is not None:
        freeze(model, terms)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: batched}) as counted:
        loss_of(model, settings).backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("embed_layernorm", [True, False], ids=["embedLN", "plain"])
@pytest.mark.parametrize("terms", [None, BIAS_TERMS], ids=["full", "bitfit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_operations_needed_are_those_torch_counts(shape, terms, embed_layernorm):
    settings = config(**{"masked_softmax_fusion": False, "num_layers": 2, "hidden_size": 24,
                         "embed_layernorm": embed_layernorm, **SHAPES[shape]})
    needed = operations_needed(settings, 3, bitfit=terms is not None).total
    if settings.masked_softmax_fusion:  # scores are formed again in backward
        needed += 2 * 2 * 3 * LENGTH**2 * settings.projection_size
    assert needed == operations_counted(settings, terms)


LOW_TO_HIGH = ("query", "attention_output", "mlp_intermediate", "mlp_output")


@pytest.mark.parametrize(("shape", "several"), [
    ("plain", [*((term,) for term in LOW_TO_HIGH), ("value", "layernorm")]),
    ("recompute", [("key", "mlp_output"), ("mlp_intermediate",), ("mlp_output",)]),
    ("recompute by two, dropout", [("mlp_output",)])])
def test_the_input_gradient_goes_down_to_the_lowest_trained_bias_only(shape, several):
    settings = config(**{"masked_softmax_fusion": False, "num_layers": 2, "hidden_size": 24,
                         "embed_layernorm": False, **SHAPES[shape]})
    totals = [operations_needed(settings, 3, bitfit=True).total]
    for terms in several:
        totals.append(operations_needed(settings, 3, bitfit=True, bias_terms=terms).total)
        assert totals[-1] == operations_counted(settings, terms), terms
    if shape == "plain":
        assert totals[5] == totals[0]
        assert all(upper < lower for lower, upper in zip(totals[:5], totals[1:5]))


def test_stages_ask_for_the_gradient_of_what_they_receive_and_end_a_chunk():
    settings = config(num_layers=4, embed_layernorm=False, checkpoint_activations=True, checkpoint_num_layers=4)
    whole, split = (operations_needed(settings, 2, bitfit=True, bias_terms=("mlp_output",), blocks_per_stage=stages)
                    for stages in ([4], [3, 1]))
    tokens, hidden, ffn = 2 * LENGTH, settings.hidden_size, settings.ffn_hidden_size
    # one more chunk leaves out its last product
    assert whole.recompute - split.recompute == 2 * tokens * ffn * hidden
    assert split.activation_gradient == whole.activation_gradient
    first = dataclasses.replace(settings, num_layers=1)
    received = operations_needed(first, 2, bitfit=True, bias_terms=("mlp_output",), blocks_per_stage=[0, 1])
    assert received == operations_needed(first, 2, bitfit=True)
    with pytest.raises(ValueError, match="do not add up"):
        operations_needed(settings, 2, bitfit=True, blocks_per_stage=[1, 1])


def test_with_recomputation_the_reported_figure_is_what_full_training_needs():
    model = bloom(24, 1024, 16, checkpoint_activations=True)
    assert operations_needed(model, 64, bitfit=False).total / 1e12 == pytest.approx(tflops_reported(model, 64, 1, 1))


def test_bitfit_saves_at_most_a_third_of_the_operations_or_a_quarter_with_recomputation():
    for recompute, floor in ((False, 2 / 3), (True, 3 / 4)):
        model = bloom(70, 14336, 112, checkpoint_activations=recompute)
        ratio = operations_needed(model, 8, bitfit=True).total / operations_needed(model, 8, bitfit=False).total
        assert floor < ratio < floor + 0.02
