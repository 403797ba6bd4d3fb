"""Evaluations between updates of a pipeline: the right loss on every rank, and training that does not notice."""

import pytest
import torch
from batch_jobs import evaluation_loss, trained_twice
from small_runs import Case, merge, write_base


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 2e-3)])
def test_evaluate_train_evaluate_train(dtype, tolerance, tmp_path, worker_group):
    """deepspeedai/DeepSpeed#3316: a 16-bit loss read as fp32 by other stages, micro-batches counted as in training, states mixed up.

    An update has 4 micro-batches here, the evaluations 1, 6 and 4.
    """
    counts = (1, 6, 4)
    case = Case(pp=2, bitfit=True, dtype=dtype, optimizer="adam", lr=0.05, dropout=0.1)
    write_base(str(tmp_path / "base"), case)
    results = worker_group(2).run(trained_twice, case, str(tmp_path / "base"), counts)
    for with_evaluations, without in results:
        for key in ("losses", "norms"):
            assert with_evaluations[key] == without[key]
        assert torch.equal(with_evaluations["random"], without["random"])
        for name, (tensor, _, _) in without["tensors"].items():
            assert torch.equal(with_evaluations["tensors"][name][0], tensor), name
    for step, count in enumerate(counts):
        losses = [run["evaluated"][step][0] for run, _ in results]
        weights = merge([{"place": run["place"], "tensors": run["evaluated"][step][1]} for run, _ in results])
        assert len(set(losses)) == 1, "equal on all ranks"
        assert losses[0] == pytest.approx(evaluation_loss(case, weights, step, count), rel=tolerance)
    assert len({run["evaluated"][step][0] for run, _ in results for step in range(3)}) == 3
