"""The loss of a micro-batch against sums written out, for every divisor, and where there is nothing to learn."""

import math

import pytest
import small_model
import torch

from megatron.model.loss import GlobalWeight, loss_function

SHAPE = (2, 5)
WEIGHTS = [[1, 0, 0.5, 0, 1], [0, 0.25, 0, 0, 0]]


def drawn(rows=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, SHAPE[1], 64, generator=generator)
    return logits.requires_grad_(), torch.randint(0, small_model.VOCAB, (rows, SHAPE[1]), generator=generator)


def weighted_sum(logits, labels, weights):
    """Sum of weight * -log p over the true vocabulary, one term at a time in double precision."""
    total = 0.0
    for b, row in enumerate(weights):
        for j, weight in enumerate(row):
            scores = [float(score) for score in logits[b, j, :small_model.VOCAB].detach()]
            total += weight * (math.log(sum(math.exp(score) for score in scores)) - scores[labels[b, j]])
    return total


def test_weights_weigh_and_their_sum_divides():
    logits, labels = drawn()
    loss = loss_function(small_model.config(), small_model.ALONE)(logits, (labels, torch.tensor(WEIGHTS)))
    assert loss.item() == pytest.approx(weighted_sum(logits, labels, WEIGHTS) / 2.75, rel=1e-6)


def test_over_the_global_batch_the_mean_of_micro_batches_is_the_whole_quotient():
    weight = GlobalWeight(small_model.ALONE)
    loss_of = loss_function(small_model.config(), small_model.ALONE, weight)
    masks = [torch.tensor(WEIGHTS), torch.zeros(SHAPE), torch.ones(SHAPE)]
    batches = [drawn(seed=seed) for seed in range(3)]
    weight.set(masks)
    assert float(weight.per_micro_batch) == pytest.approx(12.75 / 3)
    losses = [loss_of(logits, (labels, mask)) for (logits, labels), mask in zip(batches, masks)]
    whole = sum(weighted_sum(*batch, mask.tolist()) for batch, mask in zip(batches, masks)) / 12.75
    assert (sum(losses) / 3).item() == pytest.approx(whole, rel=1e-6) and losses[1].item() == 0
    weight.set([torch.zeros(SHAPE)] * 3)  # another global batch, without anything to learn
    assert loss_of(batches[0][0], (batches[0][1], torch.zeros(SHAPE))).item() == 0


@pytest.mark.parametrize("over_global_batch", [False, True])
@pytest.mark.parametrize("label", [7, 63, 64])
def test_without_weight_loss_and_gradient_are_zero_whatever_the_label(label, over_global_batch):
    """63 is a padding row of the table, 64 is outside of it: their losses are infinite."""
    weight = None
    if over_global_batch:
        weight = GlobalWeight(small_model.ALONE)
        weight.set([torch.zeros(SHAPE)])
    logits, labels = drawn()
    loss = loss_function(small_model.config(), small_model.ALONE, weight)(
        logits, (torch.full_like(labels, label), torch.zeros(SHAPE)))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_the_divisor_is_fp32_in_16_bits_too():
    """A hundred thousand tokens are more than bf16 or fp16 can count."""
    weight = GlobalWeight(small_model.ALONE)
    weight.set([torch.ones(1, 100_001, dtype=torch.bfloat16)])
    assert float(weight.per_micro_batch) == 100_001
