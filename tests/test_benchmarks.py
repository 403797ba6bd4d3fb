"""The benchmarks' arithmetic and pieces on tiny shapes; what they time is nobody's business here."""

import argparse
import dataclasses
import itertools
import json
import platform
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common
import full_against_bitfit
import reduction
import saved_activations

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
TINY = common.Shape(layers=2, hidden=24, heads=4, vocabulary=48, length=16, batch=2)


# --- timing and ratios ------------------------------------------------------------------------


def test_interleaving_alternates_and_ratios_survive_a_machine_that_slows_down():
    clock, order = [0.0], []

    def work(name, cost):
        def step():
            order.append(name)
            # each repetition of two steps (after the two of warming up) is half as fast as the one before
            clock[0] += cost * 2 ** ((len(order) - 3) // 2)
        return step

    notes = []
    seconds = common.interleave({"a": work("a", 3.0), "b": work("b", 2.0)}, 3, warmup=1, timer=lambda: clock[0],
                                note=notes.append)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"] and len(notes) == 3
    assert seconds == {"a": [3.0, 6.0, 12.0], "b": [2.0, 4.0, 8.0]}
    assert common.ratios(seconds["a"], seconds["b"]) == [1.5, 1.5, 1.5]
    assert common.spread(seconds["b"]) == common.Spread(4.0, 2.0, 8.0)
    assert common.Spread(1234.5678, 2, 3).text(1) == "1,234.6 [2.0-3.0]"
    with pytest.raises(ValueError):
        common.ratios([1.0], [1.0, 2.0])


def test_ratio_beside_its_bound():
    seen = {"steps": {"full": [2.0, 4.0], "BitFit": [1.5, 3.0]}, "step_ratio": [0.75, 0.75],
            "compute_ratio": [0.66, 0.72], "bound": 0.6}
    row = full_against_bitfit.row(TINY, seen)
    assert row == ["24", "2", "2 x 16", "fp32", "off", "3,000", "2,250", "0.750 [0.750-0.750]", "0.690 [0.660-0.720]",
                   "0.600", "+15.0 %"]


# --- command line and output ------------------------------------------------------------------


def test_there_is_a_line_for_each_script():
    text = (BENCHMARKS / "README.md").read_text()
    assert len(SCRIPTS) == 6 and all(f"python benchmarks/{name}.py" in text for name in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_reads_from_the_first_line_to_the_last_flag(script):
    module = __import__(script)
    text = module.command_line().format_help()
    assert module.__doc__.splitlines()[0] in text and f"python benchmarks/{script}.py --quick" in text
    assert all(flag in text for flag in ("--quick", "--repetitions", "--threads", "--json FILE"))


def test_shape_from_flags():
    made = common.parser("x", repetitions=3)
    common.shape_options(made, TINY, dataclasses.replace(TINY, hidden=8))
    options = made.parse_args(["--quick", "--layers", "5", "--dtype", "bf16"])
    assert common.shape_of(options) == dataclasses.replace(TINY, hidden=8, layers=5, dtype="bf16")
    assert common.shape_of(made.parse_args([])) == TINY
    with pytest.raises(SystemExit):
        made.parse_args(["--layers", "0"])


@pytest.mark.parametrize(("given", "words", "threads"), [
    (None, "", 2), ("5", "", 5), ("5", "--threads 3", 3), ("4,2", "", 2), ("0", "", 2)])
def test_threads_of_the_environment_count_unless_the_flag_is_given(given, words, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert common.parser("x", repetitions=3).parse_args(words.split()).threads == threads


def test_report_names_the_machine_but_not_the_host(tmp_path, capsys):
    table = common.table(["what", "n"], [["a", 1], ["bcd", 22]])
    assert table.splitlines() == ["| what |   n |", "|------|----:|", "| a    |   1 |", "| bcd  |  22 |"]
    options = argparse.Namespace(json=str(tmp_path / "out.json"), quick=True)
    common.report(options, "Title", table, {"a": [1.5]})
    written = json.loads((tmp_path / "out.json").read_text())
    said = capsys.readouterr().out
    assert said.endswith(f"\n\n{common.QUICK}\n")
    common.report(argparse.Namespace(json=None, quick=False), "Title", table, {})
    assert common.QUICK not in capsys.readouterr().out
    assert written["figures"] == {"a": [1.5]} and written["options"] == {"quick": True}
    assert set(written["machine"]) == {"cpu", "cores", "threads", "accelerator", "torch", "deepspeed", "python"}
    assert said.startswith("Title\n\n| what") and f"torch {written['machine']['torch']}" in said
    assert platform.node() not in said and [path.name for path in tmp_path.iterdir()] == ["out.json"]


# --- what is measured -------------------------------------------------------------------------


@pytest.mark.parametrize("positions,dtype", list(itertools.product(("alibi", "absolute"), ("fp32", "bf16"))))
def test_kept_bytes_of_a_block_against_a_sum_by_hand(positions, dtype):
    """Two LayerNorm inputs, query-key-value, attention output and GELU's 4h; with weights three inputs more."""
    shape = dataclasses.replace(TINY, positions=positions, dtype=dtype, length=32)
    width = {"fp32": 4, "bf16": 2}[dtype]
    tokens = shape.batch * shape.length
    statistics = tokens * (4 * width + 4 * shape.heads)  # mean and deviation twice; fp32 sum of each softmax row
    bitfit, full = (saved_activations.kept_by_block(shape, bitfit=bitfit) for bitfit in (True, False))
    assert saved_activations.block_bytes(bitfit) == tokens * shape.hidden * width * (2 + 3 + 1 + 4) + statistics
    assert saved_activations.block_bytes(full) == tokens * shape.hidden * width * (10 + 1 + 1 + 4) + statistics
    only_weights = [entry for entry in full if entry.operations == "_Linear"]
    assert {entry.module for entry in only_weights} == {
        "self_attention.query_key_value", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    lines, figures = saved_activations.detail_rows(shape)
    assert lines[-1][-2:] == [f"{figures['bytes'][name] / figures['unit']:.3f}" for name in ("full", "BitFit")]
    for column, name in ((-2, "full"), (-1, "BitFit")):
        rows = sum(float(line[column]) for line in lines[:-1] if "not in the sum" not in line[3])
        assert rows == pytest.approx(figures["bytes"][name] / figures["unit"], abs=0.01)


def losses_job(dtype: str) -> dict:
    """Job: two steps of all that Hugging Face and we can train; name -> (trained elements, losses)."""
    import against_hugging_face as benchmark

    names = [name for name in benchmark.VARIANTS if name != "PEFT LoRA"]  # peft may not be installed
    contenders = benchmark.build(dataclasses.replace(TINY, dtype=dtype), names, learning_rate=1e-2)
    for contender in contenders.values():
        contender()
        contender()
    benchmark.check_equal_losses(contenders, dtype)
    contenders["HF BitFit"].losses[1] *= 1.1
    try:
        benchmark.check_equal_losses(contenders, dtype)
    except SystemExit as error:
        refused = str(error)
    return {"refused": refused, **{name: (one.trainable, one.losses) for name, one in contenders.items()}}


def test_hugging_face_starts_from_the_same_weights_and_trains_the_same(worker_group):
    seen, = worker_group(1).run(losses_job, "fp32")
    assert "second BitFit loss" in seen.pop("refused")
    biases = 11 * TINY.hidden * TINY.layers + 2 * TINY.hidden
    everything = TINY.layers * (12 * TINY.hidden**2 + 13 * TINY.hidden) + TINY.hidden * (TINY.vocabulary + 4)
    assert {name: trained for name, (trained, _) in seen.items()} == {
        "ours full": everything, "HF full": everything, "ours BitFit": biases, "HF BitFit": biases}
    first = seen["HF full"][1][0]
    assert all(losses[0] == pytest.approx(first, rel=1e-5) for _, losses in seen.values())
    # the update differs, and by far more than the tolerance
    assert abs(seen["ours full"][1][1] - seen["ours BitFit"][1][1]) > 1e-3 * first


def reduction_job() -> dict:
    """Job: what reduction.measure sees of two steps of each variant."""
    import torch.distributed as dist

    from megatron.mpu.context import build_context

    count = reduction.CollectiveBytes()
    with count.installed():
        return reduction.measure(TINY, 1, build_context(1, 1, dist.get_world_size(), dist.get_rank()), count)


def test_reduced_bytes_stand_in_the_ratio_of_trained_elements(worker_group):
    for seen in worker_group(2).run(reduction_job):
        assert all(one["reduced"] == 4 * one["trained"] and len(one["seconds"]) == 1 for one in seen.values())
        reduction.check_exact(seen)
        seen["BitFit"]["reduced"] += 4
        with pytest.raises(SystemExit, match="not in the ratio"):
            reduction.check_exact(seen)


def memory_job() -> list[dict]:
    import peak_memory

    return [peak_memory.measure(TINY, bitfit=bitfit) for bitfit in (False, True)]


def test_predicted_memory_is_the_sum_of_what_is_trained_and_kept(worker_group):
    full, bitfit = worker_group(1).run(memory_job)[0]
    everything = TINY.layers * (12 * TINY.hidden**2 + 13 * TINY.hidden) + TINY.hidden * (TINY.vocabulary + 4)
    biases = 11 * TINY.hidden * TINY.layers + 2 * TINY.hidden
    for seen, trained in ((full, everything), (bitfit, biases)):
        assert (seen["parameters"], seen["gradients"]) == (4 * everything, 4 * trained)
        # an fp32 copy of what trains and two moments, padded by ZeRO
        assert 0 <= seen["optimizer"] - 12 * trained <= 12 * 8
        assert seen["predicted"] == sum(seen[kind] for kind in ("parameters", "gradients", "optimizer", "activations"))
    # three inputs of linear layers in each block
    assert full["activations"] - bitfit["activations"] >= 6 * 4 * TINY.tokens * TINY.hidden * TINY.layers
