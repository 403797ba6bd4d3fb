"""--bitfit-bias-terms: which biases train, down to slices of the fused query-key-value bias."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from bias_term_jobs import loaded, terms_run
from command_lines import TINY, parse
from command_lines import refusal as refused
from resume_jobs import first_half, refusal, second_half, straight
from small_model import ALONE, build, config, loss_of
from small_runs import Case, reference_run, write_base

from megatron.bitfit import freeze, parameter_report, trainable
from megatron.checkpoint import delta, files
from megatron.config import BIAS_TERMS, OptimizerConfig
from megatron.model.pipe import GPTModel
from megatron.mpu.random import seed_everything
from megatron.optimizer.build import build_optimizer
from megatron.partial_bias import separate_again

HALF = ("query", "mlp_intermediate")
FUSED = "self_attention.query_key_value.bias"

# --- the flag ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text, terms", [
    ("", BIAS_TERMS), ("all", BIAS_TERMS), ("mlp_intermediate query", HALF), ("query,mlp_intermediate", HALF),
    ("'query, mlp_intermediate' layernorm", (*HALF, "layernorm")), (" ".join(reversed(BIAS_TERMS)), BIAS_TERMS)])
def test_terms_are_kept_in_one_order(text, terms):
    flag = f"--bitfit-bias-terms {text}" if text else ""
    assert parse(f"{TINY} --bitfit {flag}").optimizer.bitfit_bias_terms == terms


@pytest.mark.parametrize("text, said", [
    ("querry", "'querry' is not a kind of bias"), ("query query", "query is given 2 times"), ("", "names no bias"),
    (",", "names no bias"), ("''", "names no bias"), ("all query", "all stands alone"),
    ("layernorm,Query", "'Query' is not a kind of bias")])
def test_a_wrong_list_is_refused_with_what_is_allowed(capsys, text, said):
    message = refused(capsys, f"{TINY} --bitfit --bitfit-bias-terms {text}")
    assert said in message and "--bitfit-bias-terms" in message
    assert f"allowed are all, or some of {' '.join(BIAS_TERMS)}" in message


@pytest.mark.parametrize("text", ["all", "query"])
def test_terms_without_bitfit_are_refused(capsys, text):
    message = refused(capsys, f"{TINY} --bitfit-bias-terms {text}")
    assert f"--bitfit-bias-terms {text}" in message and "--bitfit too" in message


# --- one process ------------------------------------------------------------------------------


def slices_of(fused: torch.Tensor, heads: int = 4) -> dict[str, torch.Tensor]:
    """Query, key and value of a whole fused bias, written out by hand."""
    width = fused.numel() // (3 * heads)
    at = {term: [head * 3 * width + which * width + i for head in range(heads) for i in range(width)]
          for which, term in enumerate(("query", "key", "value"))}
    return {term: fused[places] for term, places in at.items()}


@pytest.mark.parametrize("terms", [("query",), ("key", "value"), ("value", "layernorm", *HALF)], ids="+".join)
@pytest.mark.parametrize("more", [{}, {"checkpoint_activations": True, "activation": "swiglu"}], ids=["plain", "more"])
def test_gradients_are_those_slices_of_the_full_gradient(terms, more):
    settings = config(position_embedding_type="rotary", **more)  # key biases learn only with rotary positions
    full, part = build(settings), build(settings)
    freeze(part, terms)
    for model in (full, part):
        loss_of(model, settings).backward()
    assert torch.equal(loss_of(full, settings), loss_of(part, settings))
    wanted = {}
    for name, param in full.named_parameters():
        if name.endswith(FUSED):
            wanted.update({name.replace(".bias", f".{term}.bias"): values
                           for term, values in slices_of(param.grad).items() if term in terms})
        elif "mlp_intermediate" in terms and name.endswith("dense_h_to_4h.bias"):
            wanted[name] = param.grad
        elif "layernorm" in terms and name.endswith(("norm.bias", "layers.6.bias")):
            wanted[name] = param.grad
    got = {name: param.grad for name, param in part.named_parameters() if param.grad is not None}
    assert got.keys() == wanted.keys() == dict(trainable(part)).keys()
    for name, grad in wanted.items():
        assert float(grad.abs().max()) > 0, name
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-8)


def test_steps_with_decay_and_clipping_leave_everything_else_as_it_was():
    settings = config()
    model, before = build(settings), build(settings).state_dict()
    freeze(model, HALF)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5, bitfit_bias_terms=HALF))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, settings).backward()
        torch.nn.utils.clip_grad_norm_([param for _, param in trainable(model)], 0.1)
        optimizer.step()
    after = model.state_dict()
    assert list(after) == list(before), "the old keys in the old order"
    for name, value in before.items():
        if name.endswith(FUSED):
            old, new = slices_of(value), slices_of(after[name])
            assert torch.equal(old["key"], new["key"]) and torch.equal(old["value"], new["value"])
            assert bool((old["query"] != new["query"]).all())
            assert torch.equal(new["query"], dict(model.named_parameters())[name.replace(".bias", ".query.bias")])
        else:
            assert torch.equal(value, after[name]) == (not name.endswith("dense_h_to_4h.bias")), name


@pytest.mark.parametrize("way", ["state_dict", "copy"])
def test_a_load_fills_the_slices_and_the_rest(way):
    settings = config()
    model, other = build(settings, seed=2), build(settings)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(-2)
    freeze(model, ("key", "value"))
    if way == "state_dict":
        model.load_state_dict(other.state_dict(), strict=True)
    else:
        whole = dict(other.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name in whole:
                    param.copy_(whole[name])
        separate_again(model)
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        if name.endswith(FUSED):
            params = dict(model.named_parameters())
            assert torch.equal(params[name.replace(".bias", ".key.bias")], slices_of(value)["key"])
    assert torch.equal(loss_of(model, settings), loss_of(other, settings))
    short = {name: value[:-1] if name.endswith(FUSED) else value for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch for layers.3.self_attention.query_key_value.bias"):
        model.load_state_dict(short)


@pytest.mark.parametrize("term, per_layer, once", [
    ("query", 1, 0), ("key", 1, 0), ("value", 1, 0), ("attention_output", 1, 0), ("mlp_intermediate", 4, 0),
    ("mlp_output", 1, 0), ("layernorm", 2, 2)])
def test_the_report_counts_each_term_in_multiples_of_h(term, per_layer, once):
    settings = config(num_layers=3)
    layers, hidden = 3, settings.hidden_size
    model = GPTModel(settings, ALONE, seed_everything(1, ALONE))
    freeze(model, (term,))
    report = parameter_report(model, ALONE)
    assert report.trainable == (per_layer * layers + once) * hidden
    assert report.total == 64 * hidden + 4 * hidden + layers * (12 * hidden**2 + 13 * hidden)
    assert sum(elements for _, elements in report.terms.values()) == report.trainable


def test_all_of_query_key_and_value_is_the_plain_path():
    model = build(config())
    names = [name for name, _ in model.named_parameters()]
    freeze(model, ("query", "key", "value"))
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in trainable(model)] == [f"layers.{i}.{FUSED}" for i in (3, 4)]


def test_slices_are_made_once():
    model = build(config())
    freeze(model, ("query",))
    with pytest.raises(ValueError, match="already"):
        freeze(model, BIAS_TERMS)


# --- ranks ------------------------------------------------------------------------------------


def canonical(name: str, layers: int) -> str:
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed", "embedding")
    index, rest = name.split(".", 1)
    return f"final_layernorm.{rest}" if int(index) == layers + 4 else f"layers.{int(index) - 3}.{rest}"


def make_base(folder: Path, case: Case) -> str:
    write_base(str(folder), case)
    return str(folder)


PLAIN = dict(bitfit=True, weight_decay=0.3, clip=0.2, steps=3)
CASES = {
    "TP2": Case(tp=2, bias_terms=HALF, **PLAIN),
    "TP2-anchor-on-one-rank": Case(tp=2, bias_terms=("attention_output",), activation="geglu", **PLAIN),
    "PP4-anchors-on-both-ends": Case(pp=4, layers=2, partition="type:transformer|embedding", recompute=True,
                                     bias_terms=("value",), **PLAIN),
    "DP2": Case(dp=2, bias_terms=("query", "value", "layernorm"), **PLAIN),
    "TP2PP2": Case(tp=2, pp=2, bias_terms=("value", "mlp_output"), activation="swiglu", recompute=True, **PLAIN),
}


def check_run(case: Case, folder: Path, worker_group) -> list[dict]:
    """Train ``case`` on ranks and compare with plain torch; returns what the ranks saw."""
    base = make_base(folder / "base", case)
    truth = reference_run(case, base)
    results = worker_group(case.world).run(terms_run, case, base, str(folder / "run"))
    weights = sum(float(tensor.double().pow(2).sum()) for tensor in truth["tensors"].values())
    for result in results:
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(truth["losses"]), rtol=1e-4, atol=0)
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(truth["norms"]), rtol=1e-4, atol=0)
        assert result["params_norm"] == pytest.approx(math.sqrt(weights), rel=1e-5)
    old, new = delta.biases_of(base).tensors, delta.biases_of(folder / "run").tensors
    wanted = {canonical(name, case.layers): tensor for name, tensor in truth["tensors"].items()
              if name.endswith("bias")}
    assert old.keys() == new.keys() == wanted.keys()
    moved = 0
    for name, tensor in wanted.items():
        still = tensor == old[name]
        assert torch.equal(new[name][still], old[name][still]), f"{name}: what does not train is not touched"
        torch.testing.assert_close(new[name], tensor, rtol=1e-4, atol=1e-6)
        moved += int((~still).sum())
    assert moved == sum(values.numel() for values in trained_in(case, wanted))
    return results


def trained_in(case: Case, biases: dict[str, torch.Tensor]):
    owners = {"attention.dense.": "attention_output", "dense_h_to_4h": "mlp_intermediate",
              "dense_4h_to_h": "mlp_output", "norm.bias": "layernorm"}
    for name, tensor in biases.items():
        if name.endswith(FUSED):
            yield from (values for term, values in slices_of(tensor, case.heads).items() if term in case.bias_terms)
        elif next(term for part, term in owners.items() if part in name) in case.bias_terms:
            yield tensor


def test_half_size_bitfit_over_tp_equals_plain_torch_and_loads_anywhere(tmp_path, worker_group):
    case = CASES["TP2"]
    results = check_run(case, tmp_path, worker_group)
    for result in results:
        mine = {f"{layer}.self_attention.query_key_value.query.bias": 12 for layer in range(3, 7)}
        mine |= {f"{layer}.mlp.dense_h_to_4h.bias": 48 for layer in range(3, 7)}
        assert result["trained"] == mine and result["anchors"] == 0
        assert sum(mine.values()) <= result["moments"] < sum(mine.values()) + 64
    # the files have the old keys; a start at another TP degree sees the trained values
    block = files.read(tmp_path / "run" / "global_step1" / "layer_03-model_01-model_states.pt")
    fresh = files.read(tmp_path / "base" / "global_step1" / "layer_03-model_00-model_states.pt")
    assert list(block) == list(fresh)
    whole = delta.biases_of(tmp_path / "run").tensors
    other = dataclasses.replace(case, tp=1, dp=2, bias_terms=("query", "key"))
    for result in worker_group(2).run(loaded, other, str(tmp_path / "run")):
        for layer in range(4):
            fused = whole[f"layers.{layer}.{FUSED}"]
            assert torch.equal(result["layers"][3 + layer][FUSED], fused)
            for term in ("query", "key"):
                assert torch.equal(result["trained"][f"{3 + layer}.self_attention.query_key_value.{term}.bias"],
                                   slices_of(fused)[term])


@pytest.mark.parametrize("name, anchors", [("TP2-anchor-on-one-rank", [0, 1]),
                                           ("PP4-anchors-on-both-ends", [1, 0, 0, 1])])
def test_ranks_without_anything_to_train_take_part(name, anchors, tmp_path, worker_group):
    results = check_run(CASES[name], tmp_path, worker_group)
    assert [result["anchors"] for result in results] == anchors


def test_only_the_slices_are_reduced_over_dp_and_have_state(tmp_path, worker_group):
    results = check_run(CASES["DP2"], tmp_path, worker_group)
    trained = 24 * (2 * 4 + 2 * 4 + 2)
    for result in results:
        assert sum(result["trained"].values()) == trained
        assert 4 * trained <= result["dp_bytes"] <= 4 * trained + 64
    assert trained <= sum(result["moments"] for result in results) <= trained + 64 * 2


@pytest.mark.slow
def test_slices_over_tp_and_pp_with_a_gated_mlp_and_recomputation(tmp_path, worker_group):
    check_run(CASES["TP2PP2"], tmp_path, worker_group)


def test_a_resume_is_the_unbroken_run_bit_for_bit_and_other_terms_are_refused(tmp_path, worker_group):
    case = Case(tp=2, bitfit=True, dtype="bf16", optimizer="adam", lr=1e-2, dropout=0.1, decay="linear",
                weight_decay=0.1, layers=2, bias_terms=("query", "layernorm"))
    base, folder = make_base(tmp_path / "base", case), str(tmp_path / "run")
    group = worker_group(2)
    unbroken = group.run(straight, case, base, 4)
    halves = group.run(first_half, case, base, 2, folder)
    for whole, first, second in zip(unbroken, halves, group.run(second_half, case, folder, 2)):
        assert whole["losses"] == first + second["losses"]
        assert any(name.endswith("query.bias") for name in whole["tensors"])
        for name, tensor in whole["tensors"].items():
            assert torch.equal(tensor, second["tensors"][name]), name
        assert whole["optimizer"] == second["optimizer"]
    for said in group.run(refusal, dataclasses.replace(case, bias_terms=("key", "layernorm")), folder):
        assert "to resume, train what it trained (--bitfit --bitfit-bias-terms query layernorm)" in said
        assert "this run is --bitfit --bitfit-bias-terms key layernorm" in said
