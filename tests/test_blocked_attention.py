"""Attention in blocks against the whole square in fp64, gradients by torch's autograd."""

import math

import pytest
import torch

from megatron.memory import SavedBytes
from megatron.model import blocked_attention as blocked
from megatron.model.positions import alibi_slopes, hidden_keys

HEADS, WIDTH = 3, 8


def square(fused, key_bias, segments, keep=None, dropout=0.0):
    """softmax(q k^T / sqrt(d) + bias) v over the whole square; ``keep`` [b, heads, s, s] of the weights."""
    query, key, value = fused.permute(3, 0, 2, 1, 4)
    length = query.shape[2]
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if key_bias is not None:
        scores = scores + key_bias.to(scores.dtype)[None, :, None, :]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if keep is not None:
        weights = weights * keep / (1 - dropout)
    return (weights @ value).transpose(1, 2).flatten(2)


def draw(length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    fused = torch.randn(2, length, HEADS, 3, WIDTH, generator=generator).to(dtype).requires_grad_()
    return fused, torch.randn(2, length, HEADS * WIDTH, generator=generator).to(dtype)


def alibi(length):
    return alibi_slopes(HEADS)[:, None] * torch.arange(length)


def compare(fused, grad, visibility, rtol, atol):
    wide = fused.detach().double().requires_grad_()
    out = blocked.blocked_attention(fused, visibility)
    expected = square(wide, visibility.key_bias, visibility.segments)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == fused.dtype
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(fused.grad.double(), wide.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("length", [1, 5, 12, 13, 36])
@pytest.mark.parametrize("with_alibi", [True, False])
@pytest.mark.parametrize("segmented", [True, False])
def test_blocks_give_the_whole_square(length, with_alibi, segmented, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 5)
    fused, grad = draw(length)
    segments = torch.tensor([[1] * length, [0, 0, 7] + [2] * 15 + [3] * 40][:1] * 2)[:, :length].clone()
    segments[1, length // 3:] = 9
    compare(fused, grad, blocked.Visibility(alibi(length) if with_alibi else None,
                                            segments if segmented else None), 1e-5, 1e-5)


def allowed_by_hand(marks, prefix_lm):
    """Which key each query sees, one pair of positions at a time; marks are 2 * segment + is_input."""
    batch, length = marks.shape
    seen = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for i in range(length):
            for j in range(length):
                one, other = int(marks[b, i]), int(marks[b, j])
                both_inputs = prefix_lm and one % 2 == 1 and other % 2 == 1
                seen[b, i, j] = one // 2 == other // 2 and (j <= i or both_inputs)
    return seen


@pytest.mark.parametrize("with_alibi", [True, False])
def test_inputs_of_a_prefix_model_see_each_other_and_no_other_segment(with_alibi, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 4)
    marks = torch.tensor([[3] * 5 + [2] * 2 + [5, 4, 4, 7, 7, 7, 6, 0], [3] * 9 + [2] * 6])
    length = marks.shape[1]
    fused, grad = draw(length)
    key_bias = alibi(length) if with_alibi else None
    seen = allowed_by_hand(marks, True)
    assert torch.equal(~hidden_keys(marks, marks, 0, True), seen)
    assert torch.equal(~hidden_keys(marks[:, 6:9], marks, 6, True), seen[:, 6:9])
    wide = fused.detach().double().requires_grad_()
    query, key, value = wide.permute(3, 0, 2, 1, 4)
    scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH)
    if with_alibi:
        scores = scores + key_bias.double()[None, :, None, :]
    expected = (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)
    out = blocked.blocked_attention(fused, blocked.Visibility(key_bias, marks, prefix_lm=True))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(fused.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_16_bit_results_are_fp32_ones_rounded(dtype, tolerance):
    fused, grad = draw(2 * blocked.BLOCK + 3, dtype)
    compare(fused, grad, blocked.Visibility(alibi(2 * blocked.BLOCK + 3)), tolerance, tolerance)


def test_alibi_of_a_long_row_costs_no_precision():
    """Bias and position reach the thousands, where fp32 has four digits after the point."""
    length = 3000
    fused, _ = draw(length)
    bias = alibi(length)
    with torch.no_grad():
        out = blocked.blocked_attention(fused, blocked.Visibility(bias))[:, -1]
        query, key, value = fused.double().permute(3, 0, 2, 1, 4)
        scores = (query[:, :, -1:] @ key.transpose(-1, -2)) / math.sqrt(WIDTH) + bias.double()[None, :, None]
        expected = (scores.softmax(-1) @ value).flatten(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)


def test_dropout_drops_its_share_and_backward_uses_the_same_draw(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 5)
    drawn = []
    plain = torch.Tensor.bernoulli_
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda self, p: drawn.append(plain(self, p)) or drawn[-1])
    length, dropout = 12, 0.3
    fused, grad = draw(length)
    out = blocked.blocked_attention(fused, blocked.Visibility(alibi(length)), dropout)
    keep = torch.zeros(2, HEADS, length, length, dtype=torch.float64)
    masks = iter(drawn)
    for row in range(2):
        for start in range(0, length, 5):
            stop = min(start + 5, length)
            keep[row, :, start:stop, :stop] = (~next(masks)).double()
    wide = fused.detach().double().requires_grad_()
    expected = square(wide, alibi(length), None, keep, dropout)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(fused.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)

    drawn.clear()
    monkeypatch.setattr(blocked, "BLOCK", 128)
    fused, _ = draw(400)
    blocked.blocked_attention(fused, blocked.Visibility(), dropout)
    count = sum(mask.numel() for mask in drawn)
    share = sum(int(mask.sum()) for mask in drawn) / count
    assert abs(share - dropout) < 5 * math.sqrt(dropout * (1 - dropout) / count)


def test_nothing_of_length_times_length_is_kept():
    length = 4 * blocked.BLOCK
    fused, _ = draw(length)
    with SavedBytes() as kept:
        out = blocked.blocked_attention(fused, blocked.Visibility(alibi(length), torch.ones(2, length).long()))
    assert kept.bytes == fused.nbytes + out.nbytes + 4 * 2 * HEADS * length
