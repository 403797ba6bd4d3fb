"""The linear product, GELU and dropout of our own against torch's autograd in fp64, and closed forms."""

import pytest
import torch
import torch.nn.functional as F
from small_model import ALONE, config

from megatron.model.activations import dropout, gelu_tanh
from megatron.model.blocked_attention import Visibility, blocked_attention
from megatron.model.norm import LayerNorm
from megatron.mpu import linear as linear_module
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.linear import linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype, frozen, tokens=300):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    x, weight, bias = draw(2, tokens, 24), draw(40, 24), draw(40)
    weight.requires_grad_(not frozen)
    return x, weight, bias, torch.randn(2, tokens, 40, generator=generator).to(dtype)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_fp32", [True, False])
def test_product_and_gradients_are_those_of_fp64_rounded_once(dtype, frozen, in_fp32, monkeypatch):
    monkeypatch.setattr(linear_module, "_has_units_for", lambda _: not in_fp32)
    x, weight, bias, grad = operands(dtype, frozen)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = linear(x, weight, bias, ALONE)
    y.backward(grad)
    F.linear(*wide).backward(grad.double())
    assert y.dtype == dtype
    # rounding to nearest: half a unit in the last place, plus what fp32 sums lose
    rtol = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    expected = F.linear(*wide)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=2e-5)
    for mine, truth in zip((x, weight, bias), wide):
        if mine.requires_grad:
            assert mine.grad.dtype == dtype
            torch.testing.assert_close(mine.grad.double(), truth.grad, rtol=rtol, atol=5e-5)
    assert (weight.grad is None) == frozen


def test_fp32_result_is_torchs_to_the_bit():
    x, weight, bias, grad = operands(torch.float32, frozen=True)
    copies = [t.detach().clone().requires_grad_() for t in (x, bias)]
    y = linear(x, weight, bias, ALONE)
    expected = F.linear(copies[0], weight, copies[1])
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(y, expected) and torch.equal(x.grad, copies[0].grad)
    torch.testing.assert_close(bias.grad, copies[1].grad, rtol=1e-6, atol=1e-6)


def test_16_bit_bias_gradient_is_summed_in_fp32():
    """4096 tokens of 1 + 2^-7: a bf16 sum stops growing at 256."""
    bias = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    y = linear(torch.zeros(4096, 4, dtype=torch.bfloat16), weight, bias, ALONE)
    y.backward(torch.full_like(y, 1 + 2**-7))
    assert bias.grad.tolist() == [4096 + 32] * 4


@pytest.mark.parametrize("needed", ["input", "bias", "both"])
def test_only_what_is_asked_for_is_computed(needed):
    x, weight, bias, grad = operands(torch.float32, frozen=True)
    x.requires_grad_(needed != "bias")
    bias.requires_grad_(needed != "input")
    linear(x, weight, bias, ALONE).backward(grad)
    assert (x.grad is None) == (needed == "bias") and (bias.grad is None) == (needed == "input")


def test_layer_norm_with_a_frozen_scale_gives_the_other_gradients_unchanged():
    norm = LayerNorm(config())
    torch.nn.init.normal_(norm.weight)
    results = []
    for frozen in (False, True):
        norm.weight.requires_grad_(not frozen)
        norm.zero_grad()
        x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        (norm(x) ** 2).sum().backward()
        assert (norm.weight.grad is None) == frozen
        results.append((x.grad, norm.bias.grad))
    for mine, other in zip(*results):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_the_tanh_form_with_its_derivative(dtype):
    # more than one chunk, the tails, and zero
    x = torch.cat([torch.linspace(-30, 30, 200_001), torch.tensor([0.0, -200.0, 200.0])]).to(dtype)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = gelu_tanh(x), F.gelu(wide, approximate="tanh")
    grad = torch.linspace(-2, 2, x.numel()).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=eps, atol=2e-6)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2 * eps, atol=3e-6)


def test_gelu_keeps_one_tensor_of_the_size_of_its_input_and_nothing_without_gradients():
    kept = []
    x = torch.randn(10, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        gelu_tanh(x)
        assert kept == [x.nbytes]
        with torch.no_grad():
            gelu_tanh(x)
    assert kept == [x.nbytes]


def test_dropout_zeroes_its_share_scales_the_rest_and_passes_gradients_alike():
    x = torch.ones(100_000, requires_grad=True)
    y = dropout(x, 0.3, True)
    kept = y != 0
    assert abs(float(kept.float().mean()) - 0.7) < 5 * (0.3 * 0.7 / 100_000)**0.5
    torch.testing.assert_close(y[kept], torch.full((int(kept.sum()),), 1 / 0.7))
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(x.grad, 2 * y.detach())
    assert not torch.equal(dropout(x, 0.3, True) != 0, kept)
    assert dropout(x, 0.3, False) is x and dropout(x, 0.0, True) is x
    assert dropout(x, 1.0, True).eq(0).all()


@pytest.mark.parametrize("function", [
    gelu_tanh, lambda x: dropout(x, 0.5, True), lambda x: linear(x, torch.ones(4, 3, requires_grad=True), None, ALONE),
    lambda x: blocked_attention(x.view(1, 2, 1, 3, 1), Visibility()),
    lambda x: vocab_parallel_cross_entropy(x, torch.tensor([0, 2]), context=ALONE)],
    ids=["gelu", "dropout", "linear", "attention", "cross entropy"])
def test_a_second_derivative_is_refused_in_clear_words(function):
    """What these keep for backward has no history: a second derivative would silently lack terms."""
    x = torch.randn(2, 3, requires_grad=True)
    first, = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
