"""FLOP counts, memory, timers, norms and TensorBoard curves, each against something counted elsewhere."""

import math
import multiprocessing
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatron import tensorboard
from megatron.config import LoggingConfig, ModelConfig
from megatron.errors import RunError
from megatron.flops import (
    gigaflos,
    operations_needed,
    parameters_without_embeddings,
    parameters_without_embeddings_in_billions,
    tflops_reported,
)
from megatron.log_lines import TrainingFacts
from megatron.metrics import LossWindow, Timers, params_norm, peak_memory_bytes
from megatron.mpu.context import ParallelContext, build_context
from megatron.mpu.tags import ParamTag, tag_parameter


def bloom(layers, hidden, heads, **changes):
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048,
                       padded_vocab_size=250_880, position_embedding_type="alibi", embed_layernorm=True, **changes)


# --- operations -------------------------------------------------------------------------------


def test_tflops_of_a_published_log():
    """The 176B run: 192 GPUs, 215.82 s per iteration of 2048 samples."""
    model = bloom(70, 14336, 112, checkpoint_activations=True)
    assert f"{tflops_reported(model, 2048, 215.82, 192):.2f}" == "145.31"
    without = bloom(70, 14336, 112)
    assert tflops_reported(without, 2048, 215.82, 192) == pytest.approx(145.31 * 3 / 4, abs=0.01)


def test_a_gated_mlp_is_reported_with_factor_32():
    plain, gated = bloom(2, 64, 4), bloom(2, 64, 4, activation="swiglu")
    assert tflops_reported(gated, 8, 1.0, 2) == pytest.approx(tflops_reported(plain, 8, 1.0, 2) * 32 / 24)


@pytest.mark.parametrize(("layers", "hidden", "heads", "total"), [
    (24, 1024, 16, 559_214_592), (24, 1536, 16, 1_065_314_304), (24, 2048, 16, 1_722_408_960),
    (30, 2560, 32, 3_002_557_440), (30, 4096, 32, 7_069_016_064), (70, 14336, 112, 176_247_271_424)])
def test_parameters_of_published_models(layers, hidden, heads, total):
    model = bloom(layers, hidden, heads)
    assert parameters_without_embeddings(model) + (250_880 + 2) * hidden == total
    assert parameters_without_embeddings_in_billions(model) == parameters_without_embeddings(model) / 1e9


def test_gigaflos_count_six_operations_per_token_and_parameter():
    model = bloom(24, 1024, 16)
    assert gigaflos(model, 3) == pytest.approx(6 * 3 * 2048 * parameters_without_embeddings(model) / 1e9)


class Block(torch.nn.Module):
    """The matrix products of one block and their biases, written with plain torch."""

    def __init__(self, config):
        super().__init__()
        first = config.ffn_hidden_size * (2 if config.gated else 1)
        self.config = config
        self.norm = torch.nn.LayerNorm(config.hidden_size)
        self.qkv = torch.nn.Linear(config.hidden_size, 3 * config.projection_size)
        self.dense = torch.nn.Linear(config.projection_size, config.hidden_size)
        self.first = torch.nn.Linear(config.hidden_size, first)
        self.second = torch.nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x):
        config = self.config
        q, k, v = (t.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
                   for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.dense(((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.first(x)
        y = torch.mul(*y.chunk(2, dim=-1)) if config.gated else F.gelu(y)
        return x + self.second(y)


@pytest.mark.parametrize("bitfit", [False, True])
@pytest.mark.parametrize("changes", [{}, {"checkpoint_activations": True}, {"activation": "swiglu"},
                                     {"kv_channels": 6, "ffn_hidden_size": 40}])
def test_operations_needed_are_those_torch_counts(bitfit, changes):
    config = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=12,
                         padded_vocab_size=96, **changes)
    blocks = torch.nn.ModuleList(Block(config) for _ in range(config.num_layers))
    table = torch.nn.Parameter(torch.randn(96, 32), requires_grad=not bitfit)
    norm = torch.nn.LayerNorm(32)
    if bitfit:
        for name, param in [*blocks.named_parameters(), *norm.named_parameters()]:
            param.requires_grad_(name.endswith("bias"))
    with FlopCounterMode(display=False) as counted:
        x = norm(F.embedding(torch.randint(96, (5, 12)), table))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True) if config.checkpoint_activations else block(x)
        (x @ table.t()).float().logsumexp(-1).sum().backward()
    assert operations_needed(config, 5, bitfit=bitfit).total == counted.get_total_flops()


def test_with_recomputation_the_reported_figure_is_what_full_training_needs():
    model = bloom(24, 1024, 16, checkpoint_activations=True)
    assert operations_needed(model, 64, bitfit=False).total / 1e12 == pytest.approx(tflops_reported(model, 64, 1, 1))


def test_bitfit_saves_at_most_a_third_of_the_operations_or_a_quarter_with_recomputation():
    for recompute, floor in ((False, 2 / 3), (True, 3 / 4)):
        model = bloom(70, 14336, 112, checkpoint_activations=recompute)
        ratio = operations_needed(model, 8, bitfit=True).total / operations_needed(model, 8, bitfit=False).total
        assert floor < ratio < floor + 0.02


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
    writer.log_training(FACTS, gigaflos=777.9, timers={"forward": 0.25})
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
