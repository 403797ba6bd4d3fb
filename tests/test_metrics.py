"""Memory, timers, norms and TensorBoard curves, each against something counted elsewhere."""

import math
import multiprocessing
import time

import pytest
import torch

from megatron import tensorboard
from megatron.config import LoggingConfig
from megatron.errors import RunError
from megatron.log_lines import TrainingFacts
from megatron.metrics import LossWindow, Timers, params_norm, peak_memory_bytes
from megatron.mpu.context import ParallelContext, build_context
from megatron.mpu.tags import ParamTag, tag_parameter

# --- losses, times, memory --------------------------------------------------------------------


def test_the_window_averages_what_was_not_skipped():
    window = LossWindow()
    assert window.mean is None
    window.add(2.0)
    window.add(100.0, skipped=True)
    window.add(4.0)
    assert (window.mean, window.skipped, window.nan) == (3.0, 1, 0)
    window.add(math.inf)
    window.add(math.nan, skipped=True)
    assert (window.mean, window.skipped, window.nan) == (math.inf, 2, 2)


def test_timers_add_up_and_start_again_after_a_drain():
    timers = Timers()
    for _ in range(2):
        timers.start("sleep")
        time.sleep(0.02)
        timers.stop("sleep")
    assert 0.04 <= timers.elapsed("sleep") < 5
    assert timers.elapsed("never") == 0.0
    assert set(timers.drain()) == {"sleep"} and timers.elapsed("sleep") == 0.0
    with pytest.raises(RuntimeError, match="without a start"):
        timers.stop("sleep")
    timers.start("sleep")
    with pytest.raises(RuntimeError, match="already running"):
        timers.start("sleep")


def test_peak_memory_rises_with_what_is_held_and_stays_up():
    before, held = peak_memory_bytes(), []
    while peak_memory_bytes() < before + 2**26 and len(held) < 64:
        held.append(torch.ones(2**24 // 4))
    assert len(held) < 64
    peak = peak_memory_bytes()
    del held
    assert peak_memory_bytes() > 0.98 * peak  # the kernel counts in batches per thread


# --- norms ------------------------------------------------------------------------------------


def whole_parameters():
    torch.manual_seed(3)
    return {"sharded": torch.randn(8, 6), "replicated": torch.randn(6), "tied": torch.randn(4, 6)}


def stage(context):
    """This rank's parameters: a sharded and a replicated one, and one tied over both stages."""
    module, whole = torch.nn.Module(), whole_parameters()
    mine = whole["sharded"].chunk(context.tp_size)[context.tp_rank] * (1 + context.pp_rank)
    parts = {"sharded": (mine, 0), "replicated": (whole["replicated"] * (1 + context.pp_rank), None),
             "tied": (whole["tied"].chunk(context.tp_size)[context.tp_rank], 0)}
    for name, (value, dim) in parts.items():
        param = torch.nn.Parameter(value, requires_grad=name != "sharded")
        param.ds_pipe_replicated = name == "tied" and context.pp_rank > 0
        module.register_parameter(name, tag_parameter(param, ParamTag(dim=dim)))
    return module


def norm_on_rank(tp, pp, world, rank, store, results):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    context = build_context(tp, pp, world, rank)
    results.put(params_norm(stage(context), context))
    dist.barrier()
    dist.destroy_process_group()


def test_params_norm_counts_each_parameter_once_on_one_rank():
    whole = whole_parameters()
    assert params_norm(stage(ParallelContext()), ParallelContext()) == pytest.approx(
        torch.cat([value.flatten() for value in whole.values()]).norm().item(), rel=1e-6)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 1), (1, 2)])
def test_params_norm_counts_each_parameter_once_on_four_ranks(tp, pp, tmp_path):
    whole = whole_parameters()
    layers = [whole[name].flatten() * (1 + stage_) for name in ("sharded", "replicated") for stage_ in range(pp)]
    truth = torch.cat([*layers, whole["tied"].flatten()]).norm().item()
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    ranks = [fork.Process(target=norm_on_rank, args=(tp, pp, 4, rank, tmp_path / "store", results), daemon=True)
             for rank in range(4)]
    for process in ranks:
        process.start()
    norms = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert norms == [pytest.approx(truth, rel=1e-6)] * 4
    assert [process.exitcode for process in ranks] == [0] * 4


# --- TensorBoard ------------------------------------------------------------------------------

FACTS = TrainingFacts(iteration=10, train_iters=100, consumed_samples=80, consumed_tokens=5120,
                      seconds_per_iteration=0.5, learning_rate=1e-3, global_batch_size=8, loss=2.5, loss_scale=4096.0,
                      grad_norm=1.5, num_zeros=0.0, params_norm=30.0, samples_per_second=16.0, tflops=7.0)
ALWAYS = {
    "steps-vs-samples/y=steps,x=samples": (80, 10), "steps-vs-samples/y=samples,x=steps": (10, 80),
    "steps-vs-tokens/y=steps,x=tokens": (5120, 10), "steps-vs-tokens/y=tokens,x=steps": (10, 5120),
}


def over(name, value, *axes):
    """Curves of one value: {name with axis: (x, y)}."""
    x = {"": 10, " vs samples": 80, " vs tokens": 5120, " vs gigaflos (without embeddings)": 777}
    return {name + axis: (x[axis], value) for axis in ("", *axes)}


def read_back(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        (event,) = events.Scalars(tag)
        scalars[tag] = (event.step, pytest.approx(event.value))
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return scalars, texts


def test_every_curve_has_its_old_name_and_axis(tmp_path):
    config = LoggingConfig(tensorboard_dir=str(tmp_path), log_timers_to_tensorboard=True,
                           log_batch_size_to_tensorboard=True, log_validation_ppl_to_tensorboard=True)
    writer = tensorboard.TensorBoardWriter(config, True, data_parallel_size=2, seq_length=64)
    writer.log_arguments({"lr": 1e-3, "bitfit": True})
    writer.log_restart(10, 4)
    writer.log_training(FACTS, gigaflos=777.9, timers={"forward": 0.25}, tflops_needed=5.0)
    writer.log_shares({"forward": 0.75, "pipeline wait": 0.25}, 10)
    writer.log_validation("valid_fr", 3.0, 20.5, iteration=10, samples=80, tokens=5120, gigaflos=777.9)
    writer.close()
    scalars, texts = read_back(tmp_path)
    samples, tokens, flos = " vs samples", " vs tokens", " vs gigaflos (without embeddings)"
    assert scalars == {
        **ALWAYS, **over("learning-rate/learning-rate", 1e-3, samples, tokens),
        **over("batch-size/batch-size", 8, samples), **over("lm-loss-training/lm loss", 2.5, samples, tokens, flos),
        **over("loss-scale/loss-scale", 4096, samples, tokens), **over("grad-norm/grad-norm", 1.5, samples, tokens),
        **over("num-zeros/num-zeros", 0, samples, tokens), **over("params-norm/params-norm", 30, samples, tokens),
        **over("iteration-time/iteration-time", 0.5, samples, tokens),
        **over("iteration-time/samples per second", 16), **over("iteration-time/samples per second per replica", 8),
        **over("iteration-time/tokens per second", 1024), **over("iteration-time/tokens per second per replica", 512),
        **over("iteration-time/TFLOPs per gpu (estimated)", 7), **over("time/forward-time", 0.25),
        **over("iteration-time/TFLOPs per gpu (operations needed)", 5),
        **over("time-share/forward", 0.75), **over("time-share/pipeline wait", 0.25),
        **over("iteration-time/world_size", 4),
        **over("lm-loss-validation/valid_fr/lm loss validation", 3, samples, tokens, flos),
        **over("lm-loss-validation/valid_fr/lm loss validation ppl", 20.5, samples, tokens, flos)}
    assert texts == {"lr/text_summary": "0.001", "bitfit/text_summary": "True"}


def test_curves_that_were_not_asked_for_or_do_not_exist_are_not_written(tmp_path):
    config = LoggingConfig(tensorboard_dir=str(tmp_path), log_learning_rate_to_tensorboard=False,
                           log_loss_scale_to_tensorboard=False, tensorboard_log_interval=5)
    writer = tensorboard.TensorBoardWriter(config, True)
    bare = {**vars(FACTS), "loss": None, "grad_norm": None, "num_zeros": None, "params_norm": None}
    writer.log_training(TrainingFacts(**{**bare, "iteration": 9}), gigaflos=1.0)
    writer.log_training(TrainingFacts(**bare), gigaflos=1.0)
    writer.log_restart(10, 4)
    writer.log_shares({}, 10)
    writer.log_validation("valid", 3.0, 20.5, iteration=10, samples=80, tokens=5120, gigaflos=777.9)
    writer.close()
    curves = over("lm-loss-validation/valid/lm loss validation", 3, " vs samples", " vs tokens",
                  " vs gigaflos (without embeddings)")
    assert read_back(tmp_path)[0] == {**ALWAYS, **curves}


@pytest.mark.parametrize(("folder", "enabled"), [(None, True), ("events", False)])
def test_without_a_folder_or_on_another_rank_nothing_is_written(tmp_path, folder, enabled):
    config = LoggingConfig(tensorboard_dir=folder and str(tmp_path / folder), log_timers_to_tensorboard=True)
    writer = tensorboard.TensorBoardWriter(config, enabled)
    writer.log_arguments({"lr": 1})
    writer.log_restart(1, 1)
    writer.log_training(FACTS, gigaflos=1.0)
    writer.log_validation("valid", 3.0, 20.5, iteration=1, samples=8, tokens=8, gigaflos=1.0)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_missing_package_and_a_bad_folder_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--tensorboard-dir .*file/events cannot be written"):
        tensorboard.TensorBoardWriter(LoggingConfig(tensorboard_dir=f"{tmp_path}/file/events"), True)
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    for enabled in (True, False):
        with pytest.raises(RunError, match="pip install tensorboard"):
            tensorboard.TensorBoardWriter(LoggingConfig(tensorboard_dir=str(tmp_path)), enabled)
