"""Vocabulary-parallel cross entropy against torch's (one rank; two ranks in test_layers)."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.model.loss import loss_function
from megatron.mpu.context import ParallelContext
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy

ALONE = ParallelContext()


def case(dtype=torch.float32, scale=5.0):
    torch.manual_seed(0)
    logits = (scale * torch.randn(2, 7, 40)).to(dtype).requires_grad_()
    return logits, torch.randint(0, 33, (2, 7))


@pytest.mark.parametrize("scale", [1.0, 50.0, 1000.0])
@pytest.mark.parametrize("vocab_size", [None, 40, 33])
def test_loss_and_gradient_are_those_of_torch_over_the_real_columns(vocab_size, scale):
    logits, labels = case(scale=scale)
    reference = logits.detach().clone().requires_grad_()
    expected = F.cross_entropy(reference[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none")
    loss = vocab_parallel_cross_entropy(logits, labels, context=ALONE, vocab_size=vocab_size)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), expected, rtol=1e-6, atol=1e-5)
    weights = torch.rand(14)
    (loss.flatten() * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-5, atol=1e-6)


def test_padded_columns_have_no_influence_and_no_gradient():
    logits, labels = case()
    with torch.no_grad():
        logits[..., 33:] = 1e4
    loss = vocab_parallel_cross_entropy(logits, labels, context=ALONE, vocab_size=33)
    loss.sum().backward()
    assert float(loss.detach().max()) < 100
    assert logits.grad[..., 33:].eq(0).all() and logits.grad[..., :33].ne(0).any()


def test_label_outside_the_vocabulary_is_never_silent():
    logits, labels = case()
    labels[0, 3] = 35  # a padding row
    labels[1, 2] = -100
    loss = vocab_parallel_cross_entropy(logits, labels, context=ALONE, vocab_size=33)
    assert loss[0, 3].isinf() and loss[1, 2].isinf() and loss.isinf().sum() == 2


def test_16_bit_logits_give_an_fp32_loss_and_a_16_bit_gradient():
    logits, labels = case(torch.bfloat16)
    loss = vocab_parallel_cross_entropy(logits, labels, context=ALONE)
    loss.sum().backward()
    expected = F.cross_entropy(logits.detach().float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss.detach().flatten(), expected, rtol=1e-6, atol=1e-5)
    assert logits.grad.dtype == torch.bfloat16


def model_config():
    return ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=7,
                       vocab_size=33, padded_vocab_size=40)


def test_loss_function_is_the_mean_over_the_mask_with_any_weights():
    logits, labels = case()
    mask = torch.rand(2, 7).round(decimals=1)
    expected = F.cross_entropy(logits[..., :33].flatten(0, 1), labels.flatten(), reduction="none")
    expected = (expected * mask.flatten()).sum() / mask.sum()
    torch.testing.assert_close(loss_function(model_config(), ALONE)(logits, (labels, mask)), expected)


def test_all_zero_mask_gives_zero_loss_and_zero_gradient():
    logits, labels = case()
    labels[0, 0] = -100
    loss = loss_function(model_config(), ALONE)(logits, (labels, torch.zeros(2, 7)))
    loss.backward()
    assert float(loss) == 0.0 and logits.grad.eq(0).all()


def test_masked_out_position_may_hold_any_label():
    logits, labels = case()
    mask = torch.ones(2, 7)
    mask[0, 0] = 0.0
    expected = loss_function(model_config(), ALONE)(logits, (labels, mask))
    labels[0, 0] = -100
    loss = loss_function(model_config(), ALONE)(logits, (labels, mask))
    loss.backward()
    assert torch.equal(loss, expected) and logits.grad.isfinite().all()
