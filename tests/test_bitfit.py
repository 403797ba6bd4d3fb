"""--bitfit: what trains, and that nothing else costs anything."""

import pytest
import torch
from bitfit_jobs import cost_run
from small_runs import SEQ, VOCAB, Case

from megatron.bitfit import freeze, is_bias, parameter_report, term_of, trainable
from megatron.config import ModelConfig
from megatron.errors import RunError
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything


def small_model(**changes) -> GPTModel:
    context = ParallelContext()
    shape = dict(num_layers=2, hidden_size=24, num_attention_heads=4, seq_length=SEQ, vocab_size=VOCAB,
                 padded_vocab_size=96, position_embedding_type="alibi", max_position_embeddings=SEQ,
                 embed_layernorm=True, attention_dropout=0.0, hidden_dropout=0.0)
    return GPTModel(ModelConfig(**{**shape, **changes}), context, seed_everything(1, context))


def test_bias_is_an_exact_component_not_a_substring():
    assert is_bias("3.mlp.dense_h_to_4h.bias") and is_bias("bias")
    assert not is_bias("3.bias_gate.weight") and not is_bias("3.mlp.debias") and not is_bias("bias.weight")


def test_the_biases_of_a_bloom_model_are_eleven_h_per_layer_plus_two_h():
    model = small_model()
    freeze(model)
    report = parameter_report(model, ParallelContext())
    layers, hidden = 2, 24
    assert report.trainable == 11 * hidden * layers + 2 * hidden
    assert report.total == 96 * hidden + 4 * hidden + layers * (12 * hidden**2 + 13 * hidden)
    assert report.terms["self_attention.query_key_value.bias"] == (layers, 3 * hidden * layers)
    assert report.terms["word_embeddings.norm.bias"] == (1, hidden)
    assert report.terms["final_layernorm.bias"] == (1, hidden)


def test_terms_lose_their_layer():
    assert term_of("tied_modules.embed.word_embeddings.norm.bias") == "word_embeddings.norm.bias"
    assert term_of("17.mlp.dense_h_to_4h.bias") == "mlp.dense_h_to_4h.bias"
    assert term_of("9.bias") == "final_layernorm.bias"


def test_a_model_without_any_bias_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    from megatron.mpu.tags import REPLICATED, tag_parameter
    tag_parameter(model[0].weight, REPLICATED)
    freeze(model)
    with pytest.raises(RunError, match="no bias"):
        parameter_report(model, ParallelContext())


def test_frozen_weights_get_no_gradient_and_biases_all_do():
    model = small_model()
    freeze(model)
    tokens = torch.randint(0, VOCAB, (2, SEQ))
    model(tokens).pow(2).mean().backward()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == is_bias(name), name
    assert len(trainable(model)) == 6 * 2 + 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("grid", [(2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=lambda g: "TP{}PP{}DP{}".format(*g))
def test_a_frozen_parameter_costs_nothing(grid, dtype, base, worker_group):
    """deepspeedai/DeepSpeed#8029: 12 bytes per element that trains, none for the others."""
    case = Case(tp=grid[0], pp=grid[1], dp=grid[2], bitfit=True, dtype=dtype, optimizer="adam", lr=1e-3)
    results = worker_group(4).run(cost_run, case, base, 10)
    width = {"fp32": 4, "bf16": 4, "fp16": 2}[dtype]  # bf16 gradients are reduced in fp32
    for result in results:
        assert result["frozen_moved"] == [] and result["frozen_with_grad"] == []
        assert result["unmoved"] == []
        assert all(is_bias(name) for name in result["trainable_names"])
        assert "tied_modules.embed.word_embeddings.weight" not in result["trainable_names"]
        dp_ranks = result["dp_ranks"]
        reduced = result["moved"].get(("all_reduce", dp_ranks), 0)
        # beside the gradients only scalars are reduced over DP: the loss, an overflow flag, a norm
        gradient_bytes = result["trainable"] * width
        assert gradient_bytes <= reduced <= gradient_bytes + 64
        assert result["facts"].gradient_bytes_per_step == gradient_bytes
        # the stages of the tied embedding reduce scalars (norm, overflow), never its gradient
        if case.pp > 1:
            assert result["moved"].get(("all_reduce", result["tied_ranks"]), 0) < 64
        state = 12 * result["trainable"] / case.dp  # a copy in fp32 and two moments, sharded over DP
        assert state <= result["facts"].state_bytes <= state + 12 * 64
    # Adam keeps two moments per trainable element, sharded over DP; padding to the DP degree at most
    for dp_group in {result["dp_ranks"] for result in results}:
        members = [result for result in results if result["dp_ranks"] == dp_group]
        moments = sum(result["moment_elements"] for result in members)
        assert 2 * members[0]["trainable"] <= moments <= 2 * (members[0]["trainable"] + 64 * case.dp)


def test_key_biases_have_no_gradient_but_every_other_slice_moves(base, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, lr=0.5, clip=0.0)
    for result in worker_group(4).run(cost_run, case, base, 10):
        for name, moved in result["query_key_value"].items():
            query, key, value = moved.view(result["heads"], 3, -1).unbind(1)
            assert float(key.max()) < 1e-5, f"{name}: softmax ignores a constant per query row"
            assert float(query.min()) > 0 and float(value.min()) > 0, name
