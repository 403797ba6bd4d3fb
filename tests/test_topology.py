"""A run saved at some TP, PP, DP and precision goes on at others as if it had not been broken."""

import dataclasses

import pytest
import torch
from small_runs import VOCAB, Case, write_base
from topology_jobs import go_on, save_and_go_on, streams_after, streams_of_a_start

from megatron.mpu.tags import unshard

SAVED = Case(tp=2, pp=2, optimizer="adam", lr=1e-2, decay="linear", weight_decay=0.1, hidden=48, heads=12)
TERMS = ("query", "value", "mlp_intermediate", "layernorm")
KINDS = {"full": {}, "bitfit": {"bitfit": True}, "terms": {"bitfit": True, "bias_terms": TERMS}}
GRIDS = {"TP1": (1, 1, 1), "TP4": (4, 1, 1), "PP4": (1, 4, 1), "DP2": (1, 1, 2), "TP2DP2": (2, 1, 2), "PP2DP2": (1, 2, 2),
         "DP4": (1, 1, 4)}
#: greatest relative distance of losses and norms from the unbroken run
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 2e-2}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, worker_group):
    """``unbroken(case)``: folder with a save after five steps, and what each rank saw from there on."""
    root, known = tmp_path_factory.mktemp("topology"), {}

    def run(case: Case) -> tuple[str, list[dict]]:
        if case not in known:
            base = root / "base"
            if not base.exists():
                write_base(str(base), SAVED)
            folder = str(root / f"run{len(known)}")
            known[case] = folder, worker_group(case.world).run(save_and_go_on, case, str(base), folder, 5, 3)
        return known[case]

    return run


def whole(ranks: list[dict], dp_rank: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Tensors by (parameter, part), TP shares of one replica put together; copies must be equal."""
    shares: dict[tuple[str, str], dict] = {}
    tags = {}
    for rank in ranks:
        _, dp, tp = rank["place"]
        for name, (values, tag, copy) in rank["state"].items():
            for part, value in values.items() if dp == dp_rank and not copy else ():
                shares.setdefault((name, part), {})[tp] = value
                tags[name] = tag
    merged = {}
    for (name, part), by_tp in shares.items():
        pieces = [by_tp[tp] for tp in sorted(by_tp)]
        if tags[name].dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{part} of {name} differs over TP"
        tensor = unshard(pieces, tags[name])
        merged[name, part] = tensor[:VOCAB] if tags[name].tied else tensor
    return merged


def check(saved: Case, now: Case, unbroken, group) -> None:
    """State bit for bit right after the resume, losses and norms to the dtype's tolerance after it."""
    folder, truth = unbroken(saved)
    ranks = group.run(go_on, now, folder, 3)
    wanted = whole(truth)
    masters = {name for name, part in wanted if part == "master"}
    for dp_rank in range(now.dp):
        found = whole(ranks, dp_rank)
        assert found.keys() == wanted.keys() and len(found) >= 4 * len(masters)
        for (name, part), value in found.items():
            # a weight is its fp32 master, rounded as this run rounds, however the saved run did
            expected = wanted[name, part] if part != "weight" else rounded(wanted[name, "master"], now.dtype)
            assert torch.equal(value, expected), f"{part} of {name}"
    tolerance = max(TOLERANCE[saved.dtype], TOLERANCE[now.dtype])
    for rank in ranks:
        assert rank["eval"] == pytest.approx(truth[0]["eval"], rel=tolerance)
        assert rank["losses"] == pytest.approx(truth[0]["losses"], rel=tolerance)
        assert rank["norms"] == pytest.approx(truth[0]["norms"], rel=tolerance)
        for key in ("progress", "schedule", "counters"):
            assert rank[key] == truth[0][key], key


def rounded(master: torch.Tensor, dtype: str) -> torch.Tensor:
    return master.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()


def at(case: Case, grid: str, **changes) -> Case:
    tp, pp, dp = GRIDS[grid]
    return dataclasses.replace(case, tp=tp, pp=pp, dp=dp, **changes)


@pytest.mark.parametrize("kind, dtype, grid, changes", [
    ("full", "fp32", "TP1", {"padded": 128}),  # the number of padded rows follows the degree
    ("full", "fp32", "TP4", {}),
    ("full", "fp32", "PP4", {}),
    ("full", "fp32", "DP2", {"dtype": "bf16"}),
    ("bitfit", "bf16", "TP4", {"dtype": "fp32"}),
    ("terms", "bf16", "DP2", {}),
])
def test_a_run_goes_on_at_other_degrees_and_precision(kind, dtype, grid, changes, unbroken, worker_group):
    saved = dataclasses.replace(SAVED, dtype=dtype, **KINDS[kind])
    now = at(saved, grid, **changes)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.parametrize("kind, dtype, start, grid, changes", [
    ("full", "bf16", "TP2DP2", "PP4", {}),
    ("terms", "fp32", "PP2DP2", "TP4", {}),
])
def test_state_that_was_cut_over_replicas_is_put_together(kind, dtype, start, grid, changes, unbroken, worker_group):
    saved = at(dataclasses.replace(SAVED, dtype=dtype, **KINDS[kind]), start)
    now = at(saved, grid, **changes)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_on_at_every_grid(kind, dtype, grid, unbroken, worker_group):
    saved = dataclasses.replace(SAVED, dtype=dtype, **KINDS[kind])
    now = at(saved, grid)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["TP1", "PP4"])
@pytest.mark.parametrize("dtypes", ["fp32 bf16", "bf16 fp32", "fp16 fp16", "fp16 fp32", "fp32 fp16", "bf16 fp16"])
@pytest.mark.parametrize("kind", ["full", "bitfit"])
def test_every_precision_goes_on_in_every_other(kind, dtypes, grid, unbroken, worker_group):
    before, after = dtypes.split()
    saved = dataclasses.replace(SAVED, dtype=before, **KINDS[kind])
    now = at(saved, grid, dtype=after)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["TP1", "PP4", "DP2"])
@pytest.mark.parametrize("kind", ["full", "bitfit"])
def test_momentum_of_sgd_goes_along(kind, grid, unbroken, worker_group):
    saved = dataclasses.replace(SAVED, optimizer="sgd", lr=0.2, **KINDS[kind])
    now = at(saved, grid)
    check(saved, now, unbroken, worker_group(now.world))


def test_zero_stage_0_and_1_are_one(unbroken, worker_group):
    """Optimizer state is sharded in either case, so the unbroken run goes on bit for bit."""
    saved = dataclasses.replace(SAVED, bitfit=True, dtype="bf16")
    folder, truth = unbroken(saved)
    for rank, wanted in zip(worker_group(4).run(go_on, dataclasses.replace(saved, zero_stage=0), folder, 3), truth):
        for key in ("digest", "losses", "norms", "eval", "counters"):
            assert rank[key] == wanted[key], key


def test_random_streams_start_anew_where_no_saved_one_belongs(unbroken, worker_group):
    folder, _ = unbroken(SAVED)
    now = at(SAVED, "TP2DP2")
    first, again = (worker_group(4).run(streams_after, now, folder) for _ in range(2))
    assert first == again
    by_place = {rank["place"]: rank for rank in first}
    for dp in (0, 1):  # as at any start: replicas draw alike, the private streams differ over TP
        assert by_place[0, dp, 0]["default"] == by_place[0, dp, 1]["default"] == by_place[0, 0, 0]["default"]
        assert by_place[0, dp, 0]["private"] != by_place[0, dp, 1]["private"]
        assert by_place[0, dp, 1]["private"] == by_place[0, 0, 1]["private"]
    at_start = worker_group(4).run(streams_of_a_start, now)
    kept = worker_group(4).run(streams_after, SAVED, folder)
    for stream in ("default", "private", "numpy", "python"):
        drawn = {rank[stream] for rank in first}
        assert not drawn & {rank[stream] for rank in [*at_start, *kept]}
