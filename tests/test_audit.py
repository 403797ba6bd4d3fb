"""Frozen parameters cost nothing anywhere in DeepSpeed's objects, at the start, or in a step."""

import pytest
from audit_jobs import audit_run, unequal_start
from small_runs import Case

from megatron.phases import PHASES

SCALAR = 64  # bytes: a loss, an overflow flag, a norm


@pytest.mark.parametrize("dtype, stage", [("fp32", 1), ("bf16", 1), ("bf16", 0), ("fp16", 1)])
def test_nothing_for_frozen_parameters(dtype, stage, base, worker_group):
    """deepspeedai/DeepSpeed#8029: masters and buffers for frozen weights, with bf16 and stage 0."""
    case = Case(pp=2, dp=2, bitfit=True, dtype=dtype, zero_stage=stage, optimizer="adam", lr=1e-3)
    for result in worker_group(4).run(audit_run, case, base, 3):
        trained, held, expected = result["trained"], result["held"], result["expected"]
        assert result["frozen_bytes"] > 10 * result["trained_bytes"]
        assert result["frozen_known"] == [] and result["frozen_shaped"] == []
        assert result["objects"] > 20, "the walk found the optimizer's tensors"
        # memory: as told at the start, and in proportion to what trains
        width = {"fp32": 4, "bf16": 2 + 4, "fp16": 2}[dtype]
        padding = 16 * case.dp
        assert result["gradients_at_most"] == [pytest.approx(trained * width, abs=padding * width)]
        assert expected.gradients == trained * width
        assert held.optimizer == pytest.approx(12 * trained / case.dp, abs=12 * padding)
        assert expected.optimizer == pytest.approx(held.optimizer, abs=SCALAR)
        assert held.weights <= result["frozen_bytes"] + result["trained_bytes"] + 4 * padding
        # at the start: what trains is broadcast over DP, of the rest sixteen bytes a tensor
        dp = result["dp_ranks"]
        assert sum(result["start"]["broadcast", dp]) == result["trained_bytes"]
        assert not any(size > result["trained_bytes"] for sizes in result["start"].values() for size in sizes
                       if size != table_bytes(case, dtype)), "only the tied table's copy is large"
        # a step: one flat reduction of the biases, then the updated shards come together
        moved = result["moved"]
        large = [size for size in moved["all_reduce", dp] if size > SCALAR]
        assert large == [trained * {"fp32": 4, "bf16": 4, "fp16": 2}[dtype]]
        assert all(size <= SCALAR for size in moved.get(("all_reduce", result["tied_ranks"]), []))
        gathered = sum(sum(sizes) for (name, _), sizes in moved.items() if name.startswith("all_gather"))
        assert result["trained_bytes"] <= gathered <= result["trained_bytes"] + 8 * padding
        assert not any(size > SCALAR for (name, _), sizes in moved.items() for size in sizes
                       if name in ("reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor"))
        # time: every phase that exists on this stage took some, the shares add up
        assert result["steps"] == 3 and set(result["shares"]) == set(PHASES) and result["left"] == {}
        assert sum(result["shares"].values()) == pytest.approx(1)
        assert all(result["seconds"][phase] > 0 for phase in PHASES)


def table_bytes(case, dtype):
    """The padded word table, which the first stage sends to the last at the start."""
    return 96 * case.hidden * (4 if dtype == "fp32" else 2)


def test_full_training_is_broadcast_whole_and_costs_what_it_trains(base, worker_group):
    case = Case(pp=2, dp=2, optimizer="adam", lr=1e-3)
    for result in worker_group(4).run(audit_run, case, base, 1):
        assert result["frozen_bytes"] == 0
        assert sum(result["start"]["broadcast", result["dp_ranks"]]) == result["trained_bytes"]
        assert result["gradients_at_most"] == [4 * result["trained"]]
        assert any(size == table_bytes(case, "fp32") for size in result["moved"]["all_reduce", result["tied_ranks"]])


def test_a_frozen_weight_that_differs_between_replicas_is_broadcast(base, worker_group):
    results = worker_group(4).run(unequal_start, Case(tp=2, dp=2, bitfit=True), base)
    for result in results:
        assert result["sizes"]["broadcast", result["dp_ranks"]].count(result["bytes"]) == 1
    assert len({result["value"] for result in results[::2]}) == 1  # DP ranks of TP rank 0
