"""Any grid must train exactly as one process of plain torch does."""

import dataclasses

import pytest
import torch
from small_runs import Case, grid_run, merge, overflow_run, pipeline_name, reference_run, write_base

GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One base checkpoint per architecture, written at full size."""
    made = {}

    def folder(case: Case) -> str:
        key = (case.embed_layernorm, case.positions, case.layers, case.hidden, case.heads)
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("base") / "checkpoint")
            write_base(made[key], case)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def truth(base):
    """The plain-torch run of a case, computed once whatever grid it is compared with."""
    known = {}

    def run(case: Case) -> dict:
        case = dataclasses.replace(case, tp=1, pp=1, dp=1, recompute=False, dtype="fp32", zero_stage=1)
        if case not in known:
            known[case] = reference_run(case, base(case))
        return known[case]

    return run


def check(case: Case, results: list[dict], expected: dict, tolerance: float) -> None:
    """Losses, norms and every trained tensor agree; frozen ones neither moved nor got a gradient."""
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert result["frozen_moved"] == [] and result["frozen_grads"] == []
    for dp_rank in range(case.dp):
        tensors = merge(results, dp_rank)
        assert tensors.keys() == expected["tensors"].keys()
        for name, wanted in expected["tensors"].items():
            scale = float(wanted.abs().max())
            error = float((tensors[name] - wanted).abs().max()) / scale
            assert error <= tolerance, f"{name} is off by {error:.2e} of its largest value"


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "TP{}PP{}DP{}".format(*grid))
def test_five_steps_equal_plain_torch(grid, bitfit, base, truth, worker_group):
    case = Case(tp=grid[0], pp=grid[1], dp=grid[2], bitfit=bitfit, clip=0.2)
    results = worker_group(case.world).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)
    assert (results[0]["frozen"] > 0) == bitfit


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_runs_agree_to_their_precision(dtype, bitfit, base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=bitfit, dtype=dtype, lr=0.05, steps=3)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 2e-2 if dtype == "bf16" else 4e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_zero_stage_0_is_routed_to_the_path_that_is_right(dtype, base, truth, worker_group):
    case = Case(tp=2, pp=1, dp=2, bitfit=True, dtype=dtype, zero_stage=0, lr=0.05, steps=3)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype])


@pytest.mark.parametrize("embed_layernorm", [True, False], ids=["embedLN", "plain"])
@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_recomputation_changes_nothing(bitfit, embed_layernorm, base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=bitfit, recompute=True, embed_layernorm=embed_layernorm)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


def test_layers_that_do_not_divide_over_stages_are_all_built(base, truth, worker_group):
    case = Case(pp=2, layers=3, bitfit=True)
    results = worker_group(2).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_with_nothing_to_train_works(tp, dtype, base, truth, worker_group):
    """Stage 0 is the embedding alone, without LayerNorm: BitFit has nothing to train there."""
    case = Case(tp=tp, pp=2, layers=1, bitfit=True, embed_layernorm=False, dtype=dtype, steps=3, lr=0.05,
                partition="type:embedding")
    results = worker_group(case.world).run(grid_run, case, base(case))
    check(case, results, truth(case), {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype])


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_other_position_types_agree_over_the_grid(positions, base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, positions=positions)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


def test_segment_ids_travel_between_stages(base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, reset_mask=True)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)
    without = truth(dataclasses.replace(case, reset_mask=False))
    assert abs(without["losses"][0] - results[0]["losses"][0]) > 1e-4


def test_an_overflow_skips_the_step_on_all_ranks_together(base, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, dtype="fp16", steps=8, lr=1e-3, initial_scale_power=22)
    results = worker_group(4).run(overflow_run, case, base(case))
    seen = results[0]["seen"]
    assert all(result["seen"] == seen or [step[:3] for step in result["seen"]] == [step[:3] for step in seen]
               for result in results)
    skips = [step[0] for step in seen]
    assert skips[0] == 1, "the first step overflows"
    assert not seen[0][3] and seen[0][2] == 0, "neither weights nor schedule moved"
    assert skips[-1] < len(seen) and seen[-1][3], "then the scale has come down and training goes on"
    assert seen[-1][1] < 2.0**22 and seen[-1][2] == 8 * (len(seen) - skips[-1])


def test_gradient_norm_of_bitfit_is_that_of_the_bias_part(base, truth):
    full, bitfit = truth(Case(clip=0.0)), truth(Case(clip=0.0, bitfit=True))
    assert full["losses"][0] == bitfit["losses"][0]
    part = torch.sqrt(sum((gradient.double()**2).sum() for name, gradient in full["gradients"].items()
                          if name.rpartition(".")[2] == "bias"))
    assert bitfit["norms"][0] == pytest.approx(float(part), rel=1e-9)
    assert bitfit["norms"][0] < full["norms"][0]
    assert pipeline_name("layers.1.word_embeddings.weight") in full["gradients"]
