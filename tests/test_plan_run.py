"""tools/plan_run.py against published totals, the model itself, counted bytes, real files and measured memory."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest
import torch
from launching import ROOT
from plan_jobs import files_of, measured, moved, stored, traffic_run
from small_runs import Case, settings_of, write_base

from megatron.config import BIAS_TERMS, ModelConfig, OptimizerConfig
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import tag_of
from megatron.planning.files import checkpoint_size, delta_size
from megatron.planning.grids import make_plan, on_grid, smallest_grid
from megatron.planning.memory import BLOCK, HEAD, kept_bytes, rank_memory, sizes_of
from megatron.planning.request import plan_parser, read_request
from megatron.planning.shape import PRESETS, held, stages, tensors, total_parameters, trainable_parameters
from megatron.planning.traffic import rank_traffic, total_traffic

sys.path.insert(0, str(ROOT / "tools"))
import plan_run

#: parameters of the published models
PUBLISHED = {"bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960,
             "bloom-3b": 3_002_557_440, "bloom-7b1": 7_069_016_064, "bloom-176b": 176_247_271_424}


def request(*words):
    return read_request(plan_parser(), [str(word) for word in words])


def shape(**changes):
    return ModelConfig(**{"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 16,
                          "vocab_size": 93, "padded_vocab_size": 96, "position_embedding_type": "alibi",
                          "max_position_embeddings": 16, "embed_layernorm": True, **changes})


# --- tensors and stages -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    settings = request("--preset", name, "--bitfit").settings()
    assert total_parameters(settings.model) == PUBLISHED[name]
    layers, hidden = settings.model.num_layers, settings.model.hidden_size
    assert trainable_parameters(settings.model, settings.optimizer) == 11 * hidden * layers + 2 * hidden


@pytest.mark.parametrize("changes", [
    {}, {"embed_layernorm": False}, {"position_embedding_type": "absolute", "max_position_embeddings": 20},
    {"position_embedding_type": "rotary"}, {"activation": "swiglu", "ffn_hidden_size": 40}, {"kv_channels": 10}],
    ids=str)
def test_tensors_are_those_of_the_model(changes):
    model = shape(**changes)
    real = GPTModel(model, ParallelContext(), seed_everything(1, ParallelContext()))
    mine = {f"layers.{tensor.layer}.{tensor.name}": (tensor.shape, tensor.sharded)
            for tensor in tensors(model) if not tensor.copy}
    assert mine == {name: (tuple(param.shape), tag_of(param).dim is not None)
                    for name, param in real.named_parameters()}


@pytest.mark.parametrize("method", ["type:transformer", "type:transformer|embedding"])
def test_stages_are_cut_where_deepspeed_cuts(method):
    from deepspeed.runtime.utils import partition_balanced

    for layers in (1, 2, 5, 7, 13, 24):
        names = ["", "EmbeddingPipe", "", *["ParallelTransformerLayerPipe"] * layers, "", "LayerNorm", "EmbeddingHead", ""]
        words = method[5:].split("|")
        weights = [int(any(word in name.lower() for word in words)) for name in names]
        for pp in range(1, min(9, layers + 1)):
            cut = stages(shape(num_layers=layers), pp, method)
            assert [stage.start for stage in cut] + [cut[-1].stop] == list(map(int, partition_balanced(weights, pp)))
            assert sum(stage.blocks for stage in cut) == layers


def test_terms_of_biases_add_up_to_all_of_them():
    model = shape()
    alone = [trainable_parameters(model, OptimizerConfig(bitfit=True, bitfit_bias_terms=(term,))) for term in BIAS_TERMS]
    assert alone[:3] == [3 * 24] * 3 and alone[-1] == (2 * 3 + 2) * 24
    assert sum(alone) == trainable_parameters(model, OptimizerConfig(bitfit=True))


# --- bytes that move --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("plan") / "base")
    write_base(folder, Case())
    return folder


RUNS = [Case(tp=2, pp=2), Case(tp=2, pp=2, bitfit=True, recompute=True), Case(tp=2, dp=2, recompute=True),
        Case(pp=2, dp=2, dtype="bf16"), Case(tp=2, dp=2, bitfit=True, dtype="bf16"), Case(pp=2, dp=2, bitfit=True)]


@pytest.mark.parametrize("case", RUNS, ids=lambda c: f"TP{c.tp}PP{c.pp}DP{c.dp}-{c.dtype}-{'bitfit' if c.bitfit else 'full'}"
                         + "-recompute" * c.recompute)
def test_bytes_are_those_that_collectives_carry(case, base, worker_group):
    case = dataclasses.replace(case, optimizer="adam", lr=1e-3)
    settings = settings_of(case)
    cut = stages(settings.model, case.pp)
    results = worker_group(4).run(traffic_run, case, base)
    for result in results:
        stage, _, tp_rank = result["place"]
        planned = rank_traffic(settings, cut, cut[stage], tp_rank)
        assert moved(result) == {"dp": planned.dp, "tp": planned.tp, "pp": planned.pp, "scalars": planned.scalars}
    total = total_traffic(settings, cut)
    for kind in ("dp", "tp", "pp", "scalars"):
        assert sum(moved(result)[kind] for result in results) == getattr(total, kind)
    assert total.tp > 0 or case.tp == 1
    assert total.dp > 0 or case.dp == 1


# --- memory -----------------------------------------------------------------------------------


def wide(dtype, **changes):
    """Settings of a run whose tensors are larger than what the model leaves out."""
    settings = settings_of(Case(dtype=dtype, optimizer="adam", lr=1e-3, recompute=changes.pop("recompute", False),
                                bitfit=changes.pop("bitfit", False)))
    model = dataclasses.replace(settings.model, hidden_size=256, ffn_hidden_size=1024, kv_channels=64, seq_length=128,
                                max_position_embeddings=128, vocab_size=1000, padded_vocab_size=1024,
                                **{"activation": "gelu_erf", **changes})
    train = dataclasses.replace(settings.train, micro_batch_size=2, global_batch_size=6)
    return dataclasses.replace(settings, model=model, train=train)


@pytest.mark.parametrize(("dtype", "bitfit", "recompute"), [
    ("fp32", False, False), ("fp32", False, True), ("fp32", True, False), ("fp32", True, True), ("bf16", False, True),
    ("bf16", True, False), pytest.param("bf16", False, False, marks=pytest.mark.slow),
    pytest.param("bf16", True, True, marks=pytest.mark.slow)])
def test_memory_is_within_a_tenth_of_what_a_run_allocates(dtype, bitfit, recompute, worker_group):
    settings = wide(dtype, bitfit=bitfit, recompute=recompute)
    result = worker_group(1).run(measured, settings)[0]
    planned = rank_memory(settings, stages(settings.model, 1)[0], fused_update=False)
    steady = planned.weights + planned.gradients + planned.optimizer
    assert result["passes"] == pytest.approx(steady + planned.activations + planned.working, rel=0.1)
    assert result["update"] == pytest.approx(steady + planned.update, rel=0.1)
    assert result["peak"] == pytest.approx(planned.total, rel=0.1)


def test_memory_of_each_stage_is_what_its_ranks_allocate(worker_group):
    # wider than alone: threads of collectives let go of their buffers sooner or later, 1.5 of 11 MB seen
    settings = on_grid(wide("fp32", bitfit=True), 2, 2, 1)
    cut = stages(settings.model, 2)
    for result in worker_group(4).run(measured, settings):
        planned = rank_memory(settings, cut[result["stage"]], fused_update=False)
        assert result["peak"] == pytest.approx(planned.total, rel=0.2), result["stage"]


@pytest.mark.parametrize("changes", [{}, {"activation": "swiglu"}, {"position_embedding_type": "rotary"}], ids=str)
@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_a_block_keeps_what_the_table_says(bitfit, changes):
    from megatron.bitfit import freeze
    from megatron.memory import SavedBytes

    settings = wide("fp32", bitfit=bitfit, num_layers=2, **changes)
    model = GPTModel(settings.model, ParallelContext(), seed_everything(1, ParallelContext()))
    if bitfit:
        freeze(model)
    model.train()
    x = torch.randn(2, 128, 256, requires_grad=True)
    shared = (model.layers["4"].self_attention.positions.rotary(128, x.device, x.dtype)
              if settings.model.position_embedding_type == "rotary" else ())
    with SavedBytes(exclude=[*model.parameters(), *shared]) as kept:
        out = model.layers["4"](x)
    assert kept.bytes == pytest.approx(kept_bytes(BLOCK, sizes_of(settings)), rel=0.005)
    with SavedBytes(exclude=model.parameters()) as kept:
        logits = model._run[-1](model._run[-2](model._run[-3](out)))
    assert logits.requires_grad
    norm_and_table = [term for term in HEAD if "logits" not in term.name and "labels" not in term.name]
    assert kept.bytes == pytest.approx(kept_bytes(tuple(norm_and_table), sizes_of(settings)), rel=0.005)


def test_stages_keep_as_many_micro_batches_as_they_are_from_the_end():
    settings = on_grid(request("--preset", "bloom-7b1", "--bitfit").settings(), 1, 4, 1)
    assert [rank_memory(settings, stage).in_flight for stage in stages(settings.model, 4)] == [4, 3, 2, 1]
    few = dataclasses.replace(settings, train=dataclasses.replace(settings.train, global_batch_size=2))
    assert [rank_memory(few, stage).in_flight for stage in stages(settings.model, 4)] == [2, 2, 2, 1]


def test_the_grid_that_bloom_was_trained_on_has_room():
    """TP 4 x PP 12 x DP 8 on GPUs of 80 GB, two samples at a time, activations recomputed (arXiv 2211.05100)."""
    asked = request("--preset", "bloom-176b", "--checkpoint-activations", "--micro-batch-size", 2)
    plan = make_plan(asked.settings(4, 12, 8))
    assert 40 * 2**30 < plan.memory[plan.worst].total < asked.usable
    assert make_plan(asked.settings(4, 6, 8)).memory[0].total > asked.usable


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(tp=2, pp=2, bitfit=True), Case(pp=2, dp=2, dtype="bf16")], ids=["bitfit", "full"])
def test_sizes_of_saved_files(case, base, worker_group, tmp_path):
    case = dataclasses.replace(case, optimizer="adam", lr=1e-3)
    worker_group(4).run(files_of, case, base, str(tmp_path / "run"))
    settings = settings_of(case)
    planned = checkpoint_size(settings, stages(settings.model, case.pp))
    layers, optimizer, whole = stored(tmp_path / "run" / "global_step1")
    assert layers == (planned.layer_files, planned.layers)
    assert optimizer == (planned.optimizer_files, planned.optimizer)
    assert whole == pytest.approx(planned.total, rel=0.1)
    if case.bitfit:
        from megatron.checkpoint.delta import extract
        from megatron.checkpoint.delta_file import to_bytes

        data = to_bytes(extract(tmp_path / "run"))
        around = 8 + int.from_bytes(data[:8], "little")
        assert len(data) - around == 4 * trainable_parameters(settings.model, settings.optimizer)
        # names and fingerprints alone are in this one, no arguments of a command line
        assert len(data) < delta_size(settings) < len(data) + 6_000


# --- the search and the tool ------------------------------------------------------------------


def test_the_smallest_grid_fits_and_nothing_smaller_does():
    asked = request("--preset", "bloom-7b1", "--gpu-memory-gb", "24", "--global-batch-size", "64")
    degrees = asked.by_degree()
    found = smallest_grid(degrees, asked.usable)
    tp, pp, dp = found
    count = tp * pp * dp

    def peak(tp, pp, dp):
        return max(memory.total for memory in make_plan(on_grid(degrees[tp], tp, pp, dp)).memory)

    assert peak(*found) <= asked.usable
    others = [(a, b, c) for a in degrees for b in range(1, 31) for c in (1, 2, 4, 8)
              if a * b * c < count and a * b * c > count // 2]
    assert others and all(peak(*grid) > asked.usable for grid in others)
    assert smallest_grid(degrees, 2**20) is None


def test_the_answer_for_176b_comes_at_once():
    start = time.monotonic()
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "plan_run.py"), "--preset", "bloom-176b", "--bitfit"],
                          capture_output=True, text=True)
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert "176,247,271,424 parameters" in done.stdout and "11,067,392" in done.stdout
    assert took < 4, f"{took:.1f} s"  # 2 on a machine of its own


def test_a_thousand_blocks_are_cut_into_few_stages_at_once():
    start = time.process_time()
    cut = stages(shape(num_layers=1000), 3)
    assert sorted(stage.blocks for stage in cut) == [333, 333, 334]
    assert time.process_time() - start < 20  # for all numbers of stages: minutes


def test_no_torch_is_imported():
    code = "import sys; import plan_run; plan_run.main(['--preset', 'bloom-560m']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", check=True, capture_output=True)


def test_json_says_what_the_text_says(capsys):
    assert plan_run.main(["--preset", "bloom-7b1", "--gpus", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    tp, pp, dp = (said["grid"][name] for name in ("tp", "pp", "dp"))
    assert set(said["plans"]["BitFit"]["smallest_grid"]) == {"tp", "pp", "dp"}
    assert tp * pp * dp == 4 and said["asked"] == "full" and said["parameters"] == PUBLISHED["bloom-7b1"]
    assert set(said["plans"]) == set(plan_run.WAYS)
    for plan in said["plans"].values():
        assert len(plan["stages"]) == pp
        assert plan["fits"] == (max(s["memory"]["total"] for s in plan["stages"]) <= 76 * 2**30)
    assert plan_run.main(["--preset", "bloom-7b1", "--gpus", "4", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "7,069,016,064 parameters" in text and "query, key, value" in text


def test_flags_beside_a_preset_win_and_the_flags_of_a_launch_are_taken():
    settings = request("--preset", "bloom-560m", "--num-layers", 6, "--fp16", "--seq-length", 512,
                       "--micro-batch-size", 4, "--global-batch-size", 32).settings()
    assert (settings.model.num_layers, settings.model.hidden_size, settings.model.params_dtype) == (6, 1024, "fp16")
    assert (settings.train.micro_batch_size, settings.train.global_batch_size) == (4, 32)
    assert request("--preset", "bloom-560m", "--fp32").settings().model.params_dtype == "fp32"
    launch = request(
        "--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--micro-batch-size", 1, "--seq-length", 32,
        "--max-position-embeddings", 32, "--train-samples", 1000, "--rampup-batch-size", 2, 2, 100, "--lr", "1e-3",
        "--lr-warmup-samples", 10, "--data-path", "nowhere", "--vocab-file", "none.json", "--merge-file", "none.txt",
        "--save", "out", "--save-interval", 5, "--global-batch-size", 8, "--vocab-size", 1000,
        "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    settings = launch.settings(2, 2, 2)
    assert (launch.tp, launch.pp, settings.parallel.data_parallel_size) == (2, 2, 2)
    assert settings.model.padded_vocab_size == 1024 and settings.train.global_batch_size == 8


@pytest.mark.parametrize(("words", "said"), [
    (("--preset", "bloom-560m", "--tensor-model-parallel-size", "3"), "--num-attention-heads 16"),
    (("--preset", "bloom-560m", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "25"),
     "--pipeline-model-parallel-size 25"),
    (("--preset", "bloom-560m", "--pipeline-model-parallel-size", "26"), "--pipeline-model-parallel-size 26"),
    (("--preset", "bloom-560m", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--gpus", "6"),
     "--gpus 6"),
    (("--preset", "bloom-176b", "--gpus", "2"), "--gpus 2"),
    (("--preset", "bloom-560m", "--fp32", "--fp16"), "--fp32 and --fp16"),
    (("--preset", "bloom-560m", "--gpu-memory-gb", "3"), "--gpu-reserve-gb 4"),
    (("--preset", "bloom-560m", "--gpus", "3", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
     "--global-batch-size 256"),
    (("--preset", "bloom-560m", "--micro-batch-size", "4", "--global-batch-size", "30", "--gpus", "8"),
     "--global-batch-size 30 is not a multiple of --micro-batch-size 4, so that no data parallel size (DP) is possible; "
     "try 28 or 32; at DP 8 it must be a multiple of 32"),
    (("--preset", "bloom-560m", "--micro-batch-size", "4", "--global-batch-size", "28", "--gpus", "8",
      "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"), "x data parallel size 8 = 32"),
    (("--preset", "bloom-560m", "--tensor-model-parallel-size", "2", "--gpus", "3"),
     "--tensor-model-parallel-size 2 does not divide --gpus 3"),
    (("--preset", "bloom-7b1", "--gpus", "2", "--global-batch-size", "3"), "DP can be 1, not 2"),
    ((), "--preset (bloom-560m"),
    (("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "8",
      "--max-position-embeddings", "8"), "so does the start of a run ('padded vocab')"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_refused_by_name(words, said, capsys):
    assert plan_run.main(list(words)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("tool", ["plan_run.py", "compare_runs.py"])
def test_a_reader_that_has_seen_enough_is_no_fault(tool, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(f" iteration {n}/ 4 | elapsed time per iteration (s): 0.1 | lm loss: 2.5E+00 |\n"
                           for n in range(1, 5)))
    words = ["--preset", "bloom-560m"] if tool == "plan_run.py" else [str(log), str(log)]
    process = subprocess.Popen([sys.executable, str(ROOT / "tools" / tool), *words], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 0 and error == b"", error


def test_a_missing_shape_is_named(capsys):
    assert plan_run.main(["--bitfit", "--hidden-size", "64"]) == 2
    assert "missing: --num-attention-heads, --num-layers\n" in capsys.readouterr().err
    text = " ".join(plan_parser().format_help().split())
    assert "(required)" not in text and "transformer blocks (required without --preset)" in text


def test_a_grid_says_how_it_was_chosen_and_where_other_ways_fit(capsys):
    assert plan_run.main(["--preset", "bloom-7b1", "--bitfit", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "TP 1 x PP 1 x DP 8 = 8 GPUs, fewest stages, then lowest TP at which BitFit fits" in text
    assert "BitFit*" in text and "full*" not in text
    assert "\nfull: does not fit this grid, but fits TP 2 x PP 1 x DP 4 = 8 GPUs\n" in text
    asked = request("--preset", "bloom-7b1")
    for grid, fits in (((1, 1, 8), False), ((2, 1, 4), True)):
        plan = make_plan(asked.settings(*grid))
        assert (plan.memory[plan.worst].total <= asked.usable) == fits
    assert plan_run.main(["--preset", "bloom-560m"]) == 0
    assert "= 1 GPU, the fewest GPUs on which full fits;" in capsys.readouterr().out


def test_degrees_that_were_given_stay_in_the_fewest_gpus(capsys):
    assert plan_run.main(["--preset", "bloom-560m", "--pipeline-model-parallel-size", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]["full"]["smallest_grid"] == {"tp": 1, "pp": 3, "dp": 1}
    words = ["--preset", "bloom-560m", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    assert plan_run.main([*words, "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert text.count("4 = 2 x 2 x 1") == 4 and "at TP 2 PP 2 as given" in text and "DP 2 = 8 GPUs; blocks" in text


def test_replicas_that_the_batch_forbids_are_named(capsys):
    assert plan_run.main(["--preset", "bloom-560m", "--gpus", "8", "--global-batch-size", "14"]) == 0
    assert "DP can be 1, 2, not 4, 8: the global batch of 14 has 14 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--prefixlm"], ["--norm-target-loss"], ["--mtf-overlong", "error"],
                                   ["--loss-normalization", "global-targets"]], ids=" ".join)
def test_flags_of_finetuning_make_it_a_plan_of_packed_pairs(words):
    asked = request("--preset", "bloom-560m", *words)
    model = asked.settings().model
    assert asked.entry == "finetune_t0" and model.reset_attention_mask and model.prefix_lm == ("--prefixlm" in words)
    plain = request("--preset", "bloom-560m", "--loss-normalization", "global-tokens")
    assert plain.entry == "pretrain_gpt" and not plain.settings().model.reset_attention_mask


def test_held_counts_an_anchor_where_nothing_trains():
    case = Case(tp=2, pp=3, partition="type:transformer|embeddingpipe|layernorm", layers=1, embed_layernorm=False,
                bitfit=True)
    settings = settings_of(case)
    embedding, block, norm = stages(settings.model, 3, case.partition)
    assert [stage.blocks for stage in (embedding, block, norm)] == [0, 1, 0]
    assert held(embedding, 2, settings.optimizer).trained == 1
    assert held(block, 2, settings.optimizer, tp_rank=1).trained == held(block, 2, settings.optimizer).trained
    assert held(norm, 2, settings.optimizer).trained == 24
    assert held(norm, 2, settings.optimizer, tp_rank=1).trained == 25  # the norm counts LayerNorms on rank 0 only
