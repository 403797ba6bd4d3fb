"""Dropout streams, recomputation and frozen weights inside the model, by counting and comparing."""

import pytest
import torch
from small_model import LENGTH, batch, build, config, freeze_weights, grads, loss_of


def test_hidden_dropout_uses_the_default_stream_and_attention_dropout_the_private_one():
    for which in ("hidden_dropout", "attention_dropout"):
        settings = config(**{which: 0.5})
        model = build(settings)
        default, private = torch.get_rng_state(), model.streams.get_state()
        model(batch()[0])
        moved = (not torch.equal(default, torch.get_rng_state()),
                 not torch.equal(private, model.streams.get_state()))
        assert moved == (which == "hidden_dropout", which == "attention_dropout")
        default, private = torch.get_rng_state(), model.streams.get_state()
        model.eval()(batch()[0])
        assert torch.equal(default, torch.get_rng_state()) and torch.equal(private, model.streams.get_state())


@pytest.mark.parametrize("embed_norm", [True, False])
@pytest.mark.parametrize("only_biases", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_recomputation_changes_no_gradient_with_dropout_on(chunk, only_biases, embed_norm):
    results, states = [], []
    for recompute in (False, True):
        settings = config(num_layers=4, embed_layernorm=embed_norm, hidden_dropout=0.2, attention_dropout=0.2,
                          checkpoint_activations=recompute, checkpoint_num_layers=chunk)
        model = build(settings)
        if only_biases:
            freeze_weights(model)
        for _ in range(2):
            loss_of(model, settings).backward()
        results.append(grads(model))
        states.append((torch.get_rng_state(), model.streams.get_state()))
    plain, recomputed = results
    biases = 11 * 24 * 4 + 24 + 24 * embed_norm
    if only_biases:
        assert sum(grad.numel() for grad in plain.values()) == biases
    assert plain.keys() == recomputed.keys()
    for name, grad in plain.items():
        assert torch.equal(grad, recomputed[name]), name
        assert grad.ne(0).any(), name
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def kept_bytes(settings, frozen=False):
    """Bytes autograd holds between forward and backward, parameters not counted."""
    model = build(settings)
    if frozen:
        freeze_weights(model)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, settings)
    size = sum(nbytes for nbytes, _ in kept.values())
    loss.backward()
    return size, model


def test_recomputation_keeps_one_input_per_chunk():
    held = {}
    for layers in (4, 8):
        for recompute, chunk in ((False, 1), (True, 1), (True, 2)):
            held[layers, recompute, chunk], _ = kept_bytes(config(
                num_layers=layers, checkpoint_activations=recompute, checkpoint_num_layers=chunk))
    hidden = 3 * LENGTH * 24 * 4
    assert held[8, True, 1] - held[4, True, 1] == pytest.approx(4 * hidden, rel=0.1)
    assert held[8, True, 2] - held[4, True, 2] == pytest.approx(2 * hidden, rel=0.1)
    assert held[8, False, 1] - held[4, False, 1] > 4 * 10 * hidden


def test_frozen_weights_get_no_gradient_and_no_saved_input():
    full, _ = kept_bytes(config())
    biases_only, model = kept_bytes(config(), frozen=True)
    for name, param in model.named_parameters():
        assert (param.grad is None) != name.endswith("bias"), name
    hidden = 3 * LENGTH * 24 * 4
    # per block both LayerNorm outputs and the 4h-wide activation; attention itself needs the fourth
    # linear's input. Once: the input of the tied head and the token ids (rows of LENGTH + 1)
    assert full - biases_only == 2 * (2 + 4) * hidden + hidden + 3 * (LENGTH + 1) * 8


def test_key_biases_get_no_gradient_without_rotary_positions():
    settings = config()
    model = build(settings)
    loss_of(model, settings).backward()
    grad = model.layers["3"].self_attention.query_key_value.bias.grad.view(4, 3, 6)
    assert float(grad[:, 1].abs().max()) < 1e-6
    assert float(grad[:, 0].abs().max()) > 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_model_without_anything_trainable_before_a_block_still_trains_it(recompute):
    settings = config(embed_layernorm=False, num_layers=2, checkpoint_activations=recompute)
    model = build(settings)
    model.requires_grad_(False)
    model.layers["3"].mlp.dense_4h_to_h.bias.requires_grad_(True)
    assert not model.layers["1"]((batch()[0], None)).requires_grad  # nothing below needs a gradient
    loss_of(model, settings).backward()
    (grad,) = grads(model).values()
    assert grad.ne(0).all()
