"""Bytes kept for backward and bytes per kind of tensor, against sums done by hand."""

import torch

from megatron.memory import SavedBytes


def test_saved_bytes_of_a_linear_layer_are_its_input_unless_it_is_frozen():
    layer, x = torch.nn.Linear(8, 16), torch.randn(5, 8, requires_grad=True)
    with SavedBytes(exclude=layer.parameters()) as kept:
        y = layer(x)
    assert (kept.bytes, kept.by_shape) == (5 * 8 * 4, {(5, 8): 160})
    y.sum().backward()
    assert (kept.bytes, kept.peak, kept.by_shape) == (0, 160, {})
    layer.weight.requires_grad_(False)
    with SavedBytes(exclude=layer.parameters()) as frozen:
        y = layer(x)
    assert frozen.bytes == 0
    with SavedBytes() as everything:
        y = layer(x)
    assert everything.by_shape == {(8, 16): 8 * 16 * 4} and y.requires_grad


def test_saved_bytes_count_a_storage_once_and_follow_graphs_that_overlap():
    with SavedBytes() as kept:
        x = torch.randn(4, 6, requires_grad=True)
        first = x * x.view(24).view(4, 6)  # two views of one storage
        assert kept.bytes == 24 * 4
        second = torch.exp(torch.randn(10, requires_grad=True))  # keeps its result
        assert kept.bytes == 24 * 4 + 10 * 4
        first.sum().backward()
        assert kept.bytes == 40
        third = torch.exp(torch.randn(100, requires_grad=True))
        second.sum().backward()
    third.sum().backward()  # freed after the block
    del first, second, third
    assert (kept.bytes, kept.peak) == (0, 440)


def test_gradients_are_the_same_under_the_count():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2))
    x = torch.randn(3, 6)
    net(x).pow(2).sum().backward()
    plain = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    with SavedBytes(exclude=net.parameters()):
        net(x).pow(2).sum().backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(net.parameters(), plain, strict=True))
