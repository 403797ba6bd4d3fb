"""Attention against the formula in fp64, alone and inside the model."""

import math

import pytest
import torch
from small_model import ALONE, LENGTH, SEGMENTS, VOCAB, batch, build, config

from megatron.model import positions
from megatron.mpu.context import ParallelContext


@pytest.mark.parametrize("heads", [4, 6, 7, 12, 112])
def test_alibi_slopes_follow_the_paper(heads):
    """bigscience-workshop/Megatron-DeepSpeed#227: each TP rank has the slopes of its own heads."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    expected = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    expected += [2 ** (-4 * m / power) for m in range(1, 999, 2)][: heads - power]
    torch.testing.assert_close(positions.alibi_slopes(heads), torch.tensor(expected), rtol=1e-6, atol=0)
    for size in (size for size in (1, 2, 4, 7) if heads % size == 0):
        shares = [positions.local_alibi_slopes(heads, ParallelContext(tp_size=size, tp_rank=rank))
                  for rank in range(size)]
        assert torch.equal(torch.cat(shares), positions.alibi_slopes(heads))
        assert {len(share) for share in shares} == {heads // size}


def by_hand(attention, x, allowed, slopes, turn):
    """Attention as in the paper, one query, head and row at a time, in fp64."""
    width, heads = attention.config.kv_channels, attention.heads
    weight, bias = (p.double() for p in attention.query_key_value.parameters())
    fused = (x.double() @ weight.T + bias).view(*x.shape[:2], heads, 3, width)
    out = torch.zeros(*x.shape[:2], heads, width, dtype=torch.float64)
    for b in range(x.shape[0]):
        for head in range(heads):
            query, key, value = fused[b, :, head].unbind(1)
            query, key = turn(query), turn(key)
            for i in range(x.shape[1]):
                seen = [j for j in range(x.shape[1]) if allowed(b, i, j)]
                scores = torch.stack([query[i] @ key[j] / math.sqrt(width) + slopes[head] * j for j in seen])
                out[b, i, head] = scores.softmax(0) @ value[seen]
    weight, bias = (p.double() for p in attention.dense.parameters())
    return out.flatten(2) @ weight.T + bias


def turn_by_hand(vectors):
    """Rotary positions with complex numbers: pair (i, i + d/2) turns by position * 10000^(-2i/d)."""
    width = vectors.shape[-1]
    numbers = torch.complex(vectors[:, : width // 2], vectors[:, width // 2:])
    for position in range(len(vectors)):
        for i in range(width // 2):
            angle = position * 10000 ** (-2 * i / width)
            numbers[position, i] = numbers[position, i] * complex(math.cos(angle), math.sin(angle))
    return torch.cat((numbers.real, numbers.imag), dim=-1)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("kind", ["alibi", "rotary", "absolute"])
def test_attention_is_the_written_formula(kind, segmented, explicit):
    settings = config(position_embedding_type=kind, max_position_embeddings=20, kv_channels=4,
                      masked_softmax_fusion=not explicit)
    attention = build(settings).layers["4"].self_attention
    assert attention.dense.weight.shape == (24, 16)
    torch.manual_seed(3)
    x = torch.randn(3, LENGTH, 24)

    def allowed(b, i, j):
        return j <= i and (not segmented or SEGMENTS[b, i] == SEGMENTS[b, j])

    with torch.no_grad():
        slopes = positions.alibi_slopes(4).double() if kind == "alibi" else torch.zeros(4)
        expected = by_hand(attention, x, allowed, slopes, turn_by_hand if kind == "rotary" else lambda v: v)
        got = attention(x, SEGMENTS if segmented else None)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling, softmax_fp32", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-5), ("bf16", 0.06)])
def test_explicit_attention_agrees_with_the_fused_one(dtype, tolerance, scaling, softmax_fp32):
    results = []
    for fusion in (True, False):
        settings = config(masked_softmax_fusion=fusion, query_key_layer_scaling=scaling, num_layers=4,
                          attention_softmax_in_fp32=softmax_fp32, params_dtype=dtype)
        attention = build(settings).layers["6"].self_attention
        assert attention.layer_scale == (3 if scaling else 1)
        x = torch.randn(2, LENGTH, 24, generator=torch.Generator().manual_seed(3))
        x = x.to(attention.dense.weight.dtype).requires_grad_()
        y = attention(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad / x.grad.abs().max()))
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(explicit, fused, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["alibi", "rotary", "absolute"])
def test_a_token_changes_no_logit_before_it(kind):
    model = build(config(position_embedding_type=kind, max_position_embeddings=20)).eval()
    tokens, _, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert before[:, 9:].ne(after[:, 9:]).any(-1).all()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", ["alibi", "rotary"])
def test_documents_of_one_row_do_not_see_each_other(kind, explicit):
    """NVIDIA/Megatron-LM#2357: attention across the documents of a row."""
    settings = config(position_embedding_type=kind, reset_attention_mask=True,
                      masked_softmax_fusion=not explicit)
    model = build(settings).eval()
    tokens, _, _ = batch(rows=1)
    segments = torch.tensor([[1] * 7 + [2] * 9])
    changed = tokens.clone()
    changed[:, :7] = (changed[:, :7] + 3) % VOCAB
    with torch.no_grad():
        before, after = model(tokens, segment_ids=segments), model(changed, segment_ids=segments)
        alone = model(tokens[:, 7:], segment_ids=segments[:, 7:])
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert before[:, :7].ne(after[:, :7]).any()
    torch.testing.assert_close(before[:, 7:], alone, rtol=1e-5, atol=1e-5)


def test_one_segment_per_row_is_plain_causal_attention():
    plain, segmented = build(config()), build(config(reset_attention_mask=True))
    tokens, _, _ = batch()
    torch.testing.assert_close(segmented(tokens, segment_ids=torch.ones_like(tokens)), plain(tokens))


@pytest.mark.parametrize("segmented", [False, True])
def test_bias_is_built_once_per_forward_and_never_reused_for_other_segments(segmented, monkeypatch):
    settings = config(num_layers=4, reset_attention_mask=segmented, checkpoint_activations=True,
                      masked_softmax_fusion=False)
    model = build(settings)
    built = []
    plain_fill = torch.Tensor.masked_fill
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda *a: built.append(1) or plain_fill(*a))
    tokens, _, _ = batch()
    segments = SEGMENTS.clone() if segmented else None
    first = model(tokens, segment_ids=segments)
    first.sum().backward()
    assert len(built) == 1
    if segmented:
        segments[:, :] = 1  # the same memory with other contents
        second = model(tokens, segment_ids=segments)
        assert len(built) == 2 and not torch.allclose(first, second)


def test_16_bit_alibi_is_the_fp32_product_rounded():
    cache = positions.PositionCache(config(num_attention_heads=6), ALONE)
    bias = cache.bias(LENGTH, None, torch.device("cpu"), torch.bfloat16)
    expected = (positions.alibi_slopes(6)[:, None] * torch.arange(LENGTH)).bfloat16()
    assert torch.equal(bias[0, :, -1], expected)
    assert bias[0, 0, 3, 4:].isneginf().all() and bias[0, 0, 3, :4].isfinite().all()
