"""Bytes kept for backward and bytes per kind of tensor, against sums done by hand."""

from types import SimpleNamespace

import torch

from megatron.memory import HeldBytes, SavedBytes, expected_bytes, held_bytes


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


class Optimizer:
    """Shaped like DeepSpeed's: an inner optimizer over a flat copy, gradients in a flat buffer."""

    def __init__(self, params):
        self.flat = torch.cat([param.detach().flatten() for param in params]).float().requires_grad_()
        self.optimizer = torch.optim.Adam([self.flat])
        self.gradients_flat = torch.zeros_like(self.flat)
        self.views = list(self.gradients_flat.split(4))
        self.shapes = [torch.empty(param.shape, device="meta") for param in params]


def test_held_bytes_count_each_storage_once_under_its_kind():
    module = torch.nn.Linear(8, 4)
    module.register_buffer("table", torch.zeros(3))
    module.weight.requires_grad_(False)
    engine = SimpleNamespace(module=module, optimizer=Optimizer([module.bias]))
    expected = expected_bytes(engine, "fp32", "adam", 0.0)
    assert expected == HeldBytes(weights=(32 + 4 + 3) * 4, gradients=4 * 4, optimizer=4 * 4 * 3)
    assert held_bytes(engine) == HeldBytes(weights=39 * 4, gradients=16, optimizer=16)
    module(torch.randn(2, 8)).sum().backward()
    engine.optimizer.flat.grad = engine.optimizer.gradients_flat  # the same storage again
    engine.optimizer.optimizer.step()
    assert held_bytes(engine) == HeldBytes(weights=39 * 4, gradients=2 * 16, optimizer=16 * 3 + 4)  # Adam's step count
    assert expected_bytes(engine, "bf16", "sgd", 0.0).optimizer == 16
    assert expected_bytes(engine, "bf16", "sgd", 0.9).gradients == 4 * 6
