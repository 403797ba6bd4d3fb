"""What TP ranks hold and compute alike stays alike; what they share out adds up."""

import re

import pytest
import torch
from command_lines import TINY, refusal
from launching import launch
from small_model import config
from small_runs import Case, write_base
from tensor_parallel_jobs import CHANGED, copies_after, logits_of, logits_over_tp, skipped_with_a_bad_copy
from tiny_data import small_model_flags

from megatron.config import BIAS_TERMS


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base") / "checkpoint")
    write_base(folder, Case(layers=2))
    return folder


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_twenty_clipped_bf16_steps_leave_all_copies_equal(bitfit, base, worker_group):
    """bigscience-workshop/Megatron-DeepSpeed#272: gradients were not clipped on every TP rank, and LayerNorms drifted."""
    case = Case(tp=2, layers=2, bitfit=bitfit, dtype="bf16", steps=20, clip=1e-3, optimizer="adam", lr=1e-2)
    first, second = worker_group(2).run(copies_after, case, base)
    assert first["norms"] == second["norms"] and min(first["norms"]) > 10 * case.clip
    norms = {name for name, _ in first["copies"] if "norm" in name or name in ("6.weight", "6.bias")}
    assert len(norms) == 2 * (2 * case.layers + 2)
    trained = {name for name, part in first["copies"] if part == "exp_avg"}
    assert trained == {name for name, _ in first["copies"] if not bitfit or name.endswith("bias")}
    assert first["copies"].keys() == {(name, part) for name, _ in first["copies"] for part in (
        "weight", "master", "exp_avg", "exp_avg_sq") if part == "weight" or name in trained}
    assert all(torch.equal(value, second["copies"][key]) for key, value in first["copies"].items())
    assert first["moved"] == trained


def test_a_bad_copy_skips_the_update_on_all_ranks_where_deepspeed_pads_a_rank_s_part(base, worker_group):
    """LayerNorm biases alone: TP rank 1 has nothing that counts, and an odd number of values."""
    cases = [Case(tp=2, layers=2, bitfit=True, bias_terms=terms, dtype=dtype, clip=clip)
             for terms, dtype, clip in ((("layernorm",), "fp32", 1.0), (("layernorm",), "fp32", 0.0), (("layernorm",), "bf16", 1.0),
                                        (("layernorm",), "fp16", 1.0), (BIAS_TERMS, "fp32", 1.0))]
    for seen in worker_group(2).run(skipped_with_a_bad_copy, cases, base):
        assert seen == [([1], True)] * len(cases)


# --- logits -----------------------------------------------------------------------------------

#: 96 rows of vocabulary divide by all degrees
RUNS = [(f"{heads} heads, TP {size}, {'explicit' if explicit else 'blocked'}{', biases up to 5' if bias else ''}",
         (config(num_attention_heads=heads, padded_vocab_size=96, masked_softmax_fusion=not explicit), bias, size))
        for heads, size in ((4, 2), (4, 4), (6, 2), (6, 3), (12, 4)) for explicit in (False, True)
        for bias in ((None, 5.0) if heads == 4 and not explicit else (None,))]


@pytest.fixture(scope="module")
def over_tp(worker_group):
    """name of a run -> whole logits of both batches."""
    seen, *_ = worker_group(4).run(logits_over_tp, [run for _, run in RUNS])
    return dict(zip((name for name, _ in RUNS), seen, strict=True))


# bigscience-workshop/Megatron-DeepSpeed#227: all TP ranks took the first slice of ALiBi's slopes.
# huggingface/text-generation-inference#1036: row-parallel biases, here up to 5, were added once per TP rank.
@pytest.mark.parametrize("name, run", RUNS, ids=[name for name, _ in RUNS])
def test_logits_at_any_tp_are_those_of_one_process_and_causal(name, run, over_tp):
    settings, bias, _ = run
    before, after = over_tp[name]
    for mine, whole in zip((before, after), logits_of(settings, bias)):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(before[:, :CHANGED], after[:, :CHANGED])
    assert before[:, CHANGED:].ne(after[:, CHANGED:]).any(-1).all()


# --- random streams ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """workers -> {(rank, iteration): {stream: hash}} of a run at TP 2 with dropout and evaluations."""
    flags = [*small_model_flags(tmp_path_factory.mktemp("streams")), "--tensor-model-parallel-size", "2", "--train-iters", "3",
             "--eval-interval", "2", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    seen = {}
    for workers in ("0", "2"):
        said = launch([*flags, "--num-workers", workers, "--valid-num-workers", workers], ranks=2, script="tests/streams_script.py")
        lines = re.findall(r"^streams rank (\d) iteration (\d) (.*)$", said, re.MULTILINE)
        seen[workers] = {(int(rank), int(iteration)): dict(part.split("=") for part in parts.split())
                         for rank, iteration, parts in lines}
    return seen


@pytest.mark.parametrize("workers", ["0", "2"])
def test_reading_data_on_one_rank_leaves_the_streams_equal(workers, streams):
    """bigscience-workshop/Megatron-DeepSpeed#276: loader workers drew their seed from TP rank 0's global generator."""
    seen = streams[workers]
    assert sorted(seen) == [(rank, iteration) for rank in (0, 1) for iteration in (1, 2, 3)]
    for iteration in (1, 2, 3):
        first, second = seen[0, iteration], seen[1, iteration]
        assert {name for name in first if first[name] == second[name]} == {"python", "numpy", "torch", "hidden"}
        assert {name for name in first if first[name] != second[name]} == {"private", "attention"}
    assert len({seen[0, iteration]["torch"] for iteration in (1, 2, 3)}) == 3, "dropout draws"
    assert seen == streams["0"], "workers draw from no stream of training"


# --- what would make copies partial -----------------------------------------------------------


@pytest.mark.parametrize("more", ["", "--bitfit"])
@pytest.mark.parametrize("flag", ["--sequence-parallel", "--group-query-attention", "--num-query-groups 2",
                                  "--num-key-value-heads 2"])
def test_ways_to_partial_gradients_of_copies_are_no_flags(capsys, flag, more):
    """bigcode-project/Megatron-LM#12: shared projections and sequence parallelism would need sums over TP that BitFit lacks."""
    assert flag.split()[0] in refusal(capsys, f"{TINY} {more} {flag}")
