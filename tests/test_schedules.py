"""Batch-size and learning-rate schedules against closed forms and figures of published runs."""

import math
import shutil

import pytest
from launching import run_alone, training_lines
from tiny_data import small_model_flags

from megatron.config import OptimizerConfig, TrainConfig
from megatron.optimizer.batch_size import BatchSizeSchedule, training_iterations
from megatron.optimizer.learning_rate import LearningRateSchedule, build_schedule, low_rate_notice


class Owner:
    """Anything with parameter groups."""

    def __init__(self, groups=2):
        self.param_groups = [{"params": [], "lr": -1.0} for _ in range(groups)]

    def rates(self):
        return [group["lr"] for group in self.param_groups]


def bloom_176b(**changes):
    return TrainConfig(**{"micro_batch_size": 2, "global_batch_size": 2048, "train_samples": 220_000_000,
                          "rampup_batch_size": (192, 16, 9_765_625), **changes})


# --- batch size -------------------------------------------------------------------------------


def test_iterations_of_published_runs():
    assert training_iterations(bloom_176b(), 8) == 115_311
    small = bloom_176b(micro_batch_size=1, global_batch_size=256, rampup_batch_size=(192, 32, 9_765_625))
    assert training_iterations(small, 32) == 868_457


def test_iterations_without_a_ramp_drop_the_last_incomplete_batch():
    assert training_iterations(TrainConfig(micro_batch_size=1, global_batch_size=8, train_samples=103), 2) == 12
    assert training_iterations(TrainConfig(micro_batch_size=1, global_batch_size=8, train_iters=103), 2) == 103


def test_a_run_that_ends_inside_its_ramp_consumes_no_more_than_asked():
    config = TrainConfig(micro_batch_size=1, global_batch_size=16, train_samples=30, rampup_batch_size=(4, 4, 300))
    schedule, consumed = BatchSizeSchedule(config, 1), 0
    for _ in range(training_iterations(config, 1)):
        consumed += schedule.size(consumed)
    assert 30 - schedule.size(consumed) < consumed <= 30


def test_the_ramp_holds_each_size_for_the_same_number_of_samples():
    schedule = BatchSizeSchedule(TrainConfig(micro_batch_size=2, global_batch_size=16, train_samples=10**4,
                                             rampup_batch_size=(4, 4, 300)), 2)
    assert [schedule.size(n) for n in (0, 99, 100, 199, 200, 299, 300, 301, 9999)] == [4, 4, 8, 8, 12, 12, 16, 16, 16]
    assert [schedule.micro_batches(n) for n in (0, 100, 301)] == [1, 2, 4]


def test_a_resumed_ramp_continues_like_the_unbroken_one():
    config = TrainConfig(micro_batch_size=1, global_batch_size=16, train_samples=500, rampup_batch_size=(4, 4, 120))
    def sizes(consumed, steps):
        schedule, taken = BatchSizeSchedule(config, 2), []
        for _ in range(steps):
            taken.append(schedule.size(consumed))
            consumed += taken[-1]
        return taken, consumed
    whole, _ = sizes(0, 25)
    first, consumed = sizes(0, 9)
    second, _ = sizes(consumed, 16)
    assert first + second == whole
    assert set(whole) == {4, 8, 12, 16}


@pytest.mark.parametrize("ramp", [None, (4, 4, 100)])
@pytest.mark.parametrize("batch, dp", [(16, 1), (16, 2), (24, 1), (32, 4)])
def test_a_run_that_goes_on_with_another_batch_size_still_reads_its_samples(ramp, batch, dp):
    def run(config, iteration, consumed, until):
        schedule = BatchSizeSchedule(config, dp)
        while iteration < until:
            consumed += schedule.size(consumed)
            iteration += 1
        return consumed
    first = TrainConfig(micro_batch_size=1, global_batch_size=16, train_samples=500, rampup_batch_size=ramp)
    then = TrainConfig(micro_batch_size=1, global_batch_size=batch, train_samples=500, rampup_batch_size=ramp)
    consumed = run(first, 0, 0, 12)
    end = training_iterations(then, dp, iteration=12, consumed=consumed)
    assert 500 - batch < run(then, 12, consumed, end) <= 500
    if batch == 16:
        assert end == training_iterations(first, dp)
    assert training_iterations(then, dp, iteration=12, consumed=600) == 12


def test_without_a_ramp_the_size_is_constant_and_an_empty_ramp_is_none():
    plain = BatchSizeSchedule(TrainConfig(micro_batch_size=2, global_batch_size=8, train_iters=9), 2)
    assert {plain.size(n) for n in range(50)} == {8} and plain.micro_batches(0) == 2
    for ramp in ((4, 4, 0), (8, 4, 100)):
        empty = BatchSizeSchedule(TrainConfig(micro_batch_size=1, global_batch_size=8, train_samples=90,
                                              rampup_batch_size=ramp), 1)
        assert {empty.size(n) for n in range(90)} == {8}
        assert training_iterations(TrainConfig(micro_batch_size=1, global_batch_size=8, train_samples=90,
                                               rampup_batch_size=ramp), 1) == 11


@pytest.mark.parametrize(("changes", "said"), [
    ({"global_batch_size": 2050}, "--global-batch-size"),
    ({"rampup_batch_size": (192, 24, 1000)}, "--rampup-batch-size"),
    ({"rampup_batch_size": (184, 8, 1000), "micro_batch_size": 1, "global_batch_size": 2048, "dp": 16}, "184"),
    ({"rampup_batch_size": (192, 8, 1000), "micro_batch_size": 1, "dp": 16}, "increment"),
    ({"rampup_batch_size": (4096, 16, 1000)}, "never reach"),
    ({"rampup_batch_size": (192, 0, 1000)}, "positive"),
    ({"train_samples": None, "train_iters": 10}, "--train-samples"),
    ({"train_samples": 100}, "nothing would be trained"),
])
def test_an_impossible_batch_schedule_is_refused_at_the_start(changes, said):
    """deepspeedai/DeepSpeedExamples#418 and deepspeedai/DeepSpeed#2798: ramps that no micro-batches on all replicas make up."""
    dp = changes.pop("dp", 8)
    with pytest.raises(ValueError, match=said):
        training_iterations(bloom_176b(**changes), dp)


# --- learning rate ----------------------------------------------------------------------------


def test_rate_of_a_published_run():
    """The 176B run's log prints 7.610E-06 at iteration 94768."""
    train = bloom_176b()
    config = OptimizerConfig(lr=6e-5, min_lr=6e-6, lr_decay_style="cosine", lr_decay_samples=200_000_000,
                             lr_warmup_samples=183_105)
    schedule = build_schedule(config, train, Owner(), training_iterations(train, 8))
    sizes, consumed = BatchSizeSchedule(train, 8), 0
    for _ in range(94_768):
        size = sizes.size(consumed)
        consumed += size
        schedule.num_steps += size
    schedule.step(0)
    assert f"{schedule.get_lr():.3E}" == "7.610E-06"


def expected(style, n, top=1e-3, low=1e-4, warmup=100, decay=500):
    if n <= warmup:
        return top * n / warmup
    if style == "constant":
        return top
    r = min(1.0, (n - warmup) / (decay - warmup))
    return low + (top - low) * {"linear": 1 - r, "cosine": 0.5 * (1 + math.cos(math.pi * r))}[style]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_every_step_follows_the_closed_form_in_every_group(style):
    owner = Owner()
    schedule = LearningRateSchedule(owner, max_lr=1e-3, min_lr=1e-4, warmup_steps=100, decay_steps=500,
                                    decay_style=style)
    assert owner.rates() == [0.0, 0.0]
    for n in range(20, 800, 20):
        schedule.step(20)
        assert owner.rates() == [schedule.get_lr()] * 2
        assert math.isclose(schedule.get_lr(), expected(style, n), rel_tol=1e-12)
    assert schedule.get_lr() == (1e-3 if style == "constant" else 1e-4)


def test_without_warmup_the_first_update_uses_the_full_rate():
    owner = Owner()
    LearningRateSchedule(owner, max_lr=0.5, decay_steps=10)
    assert owner.rates() == [0.5, 0.5]


def test_a_step_without_an_increment_is_a_type_error_that_changes_nothing():
    """DeepSpeed calls step() first and passes the batch size only after a TypeError."""
    schedule = LearningRateSchedule(Owner(), max_lr=1.0, warmup_steps=8, decay_steps=80)
    with pytest.raises(TypeError):
        schedule.step()
    schedule.step(4)
    assert schedule.num_steps == 4 and schedule.get_lr() == 0.5
    assert not callable(schedule), "DeepSpeed would call a callable as a factory"


def test_deepspeed_steps_it_by_the_global_batch(tmp_path, monkeypatch):
    import deepspeed
    import torch
    import torch.distributed as dist

    class Model(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    # compiled where it is missing, and waited for without end where a killed compiler left its lock
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = Model(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        schedule = LearningRateSchedule(optimizer, max_lr=1.0, warmup_steps=30, decay_steps=100)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config={
            "train_micro_batch_size_per_gpu": 3, "train_batch_size": 6, "steps_per_print": 1000},
            dist_init_required=False)
        before = model.weight.detach().clone()
        for _ in range(4):  # two updates of two micro batches
            engine.backward(engine(torch.ones(3, 3)))
            engine.step()
            if schedule.num_steps == 0 or engine.global_steps == 1:
                assert torch.equal(model.weight, before), "the first update has rate 0"
        assert schedule.num_steps == 12
        assert optimizer.param_groups[0]["lr"] == pytest.approx(12 / 30)
        assert not torch.equal(model.weight, before)
    finally:
        if started:
            dist.destroy_process_group()


def test_decay_by_tokens_starts_where_the_warmup_ended():
    schedule = LearningRateSchedule(Owner(), max_lr=1.0, warmup_steps=20, decay_steps=10**9, decay_style="linear",
                                    decay_tokens=1000, tokens_per_step=10)
    for n in range(10, 150, 10):
        schedule.step(10)
        tokens = 10 * n
        line = n / 20 if n <= 20 else max(0.0, 1 - (tokens - 200) / (1000 - 200))
        assert schedule.get_lr() == pytest.approx(line, abs=1e-12)
    assert schedule.state_dict()["warmup_tokens"] == 200 and schedule.state_dict()["num_tokens"] == 1400


def test_decay_by_tokens_counts_from_zero_when_the_warmup_end_is_jumped_over():
    schedule = LearningRateSchedule(Owner(), max_lr=1.0, warmup_steps=15, decay_steps=10**9, decay_tokens=1000)
    schedule.step(10, tokens=100)
    schedule.step(10, tokens=200)
    assert schedule.get_lr() == pytest.approx(0.8)
    with pytest.raises(ValueError, match="--lr-decay-tokens"):
        schedule.step(10)


# --- what the flags mean ----------------------------------------------------------------------


def lengths(train, **flags):
    schedule = build_schedule(OptimizerConfig(lr=1.0, **flags), train, Owner(), train.train_iters or 0, 64)
    return schedule.warmup_steps, schedule.decay_steps


def test_lengths_become_samples():
    by_iters = TrainConfig(micro_batch_size=1, global_batch_size=8, train_iters=50)
    by_samples = TrainConfig(micro_batch_size=1, global_batch_size=8, train_samples=403)
    assert lengths(by_iters) == (0, 400)
    assert lengths(by_iters, lr_warmup_iters=5, lr_decay_iters=30) == (40, 240)
    assert lengths(by_iters, lr_warmup_fraction=0.25) == (100, 400)
    assert lengths(by_samples) == (0, 403)
    assert lengths(by_samples, lr_warmup_samples=7, lr_decay_samples=300) == (7, 300)
    assert lengths(by_samples, lr_warmup_fraction=0.5, lr_decay_samples=300) == (150, 300)


@pytest.mark.parametrize(("flags", "said"), [
    ({"lr_warmup_iters": 50}, "--lr-warmup-iters"), ({"lr": None}, "--lr is missing"),
    ({"min_lr": 2.0}, "--min-lr"), ({"lr_decay_style": "step"}, "linear"),
    ({"lr_decay_tokens": 5}, "--seq-length"),
    ({"override_lr_scheduler": True, "use_checkpoint_lr_scheduler": True}, "exclude"),
])
def test_contradicting_flags_are_refused_by_name(flags, said):
    train = TrainConfig(micro_batch_size=1, global_batch_size=8, train_iters=50)
    with pytest.raises(ValueError, match=said):
        build_schedule(OptimizerConfig(**{"lr": 1.0, **flags}), train, Owner(), 50)


def test_an_evaluation_needs_no_rate_and_no_length():
    train = TrainConfig(micro_batch_size=1, global_batch_size=8, train_iters=0, eval_only=True)
    schedule = build_schedule(OptimizerConfig(), train, Owner(), 0)
    assert schedule.get_lr() == 0.0
    schedule.load_state_dict(LearningRateSchedule(Owner(), max_lr=1.0, decay_steps=9).state_dict())


# --- resuming ---------------------------------------------------------------------------------


def schedule_of(**changes):
    return LearningRateSchedule(Owner(), **{"max_lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 100, "decay_steps": 600,
                                            "decay_style": "cosine", **changes})


def test_a_resumed_schedule_continues_without_a_second_warmup():
    """verl-project/verl#7953: the scheduler was saved and not restored."""
    unbroken, first, second = schedule_of(), schedule_of(), schedule_of()
    for _ in range(15):
        unbroken.step(10)
        first.step(10)
    state = first.state_dict()
    assert list(state) == ["max_lr", "min_lr", "warmup_steps", "num_steps", "warmup_tokens", "num_tokens",
                           "decay_style", "decay_steps"]
    second.load_state_dict(state)
    assert second.owner.rates() == unbroken.owner.rates() == [unbroken.get_lr()] * 2
    for _ in range(50):
        unbroken.step(10)
        second.step(10)
        assert second.owner.rates() == unbroken.owner.rates()
    assert second.state_dict() == unbroken.state_dict()


@pytest.mark.slow
def test_logged_rates_go_on_after_a_stop_and_follow_new_flags(tmp_path):
    """verl-project/verl#7953: the warm-up was run through again after each restart; NVIDIA/Megatron-LM#963: stored limits
    of the rate won over new flags."""
    run = tmp_path / "run"
    flags = [*small_model_flags(tmp_path), "--eval-iters", "0", "--train-iters", "20", "--lr", "1e-3", "--lr-warmup-iters", "10",
             "--lr-decay-style", "linear", "--num-layers", "1", "--bitfit", "--save", str(run), "--save-interval", "15"]
    logs = [run_alone([*flags, "--exit-interval", "15"])]
    shutil.copytree(run, tmp_path / "lower")
    logs.append(run_alone(flags))
    lines = [line for log in logs for line in training_lines(log)]
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    for top, shown in ((1e-3, lines), (1e-4, training_lines(run_alone(
            [*flags, "--save", str(tmp_path / "lower"), "--lr", "1e-4", "--override-lr-scheduler"])))):
        for line in shown:
            rate = expected("linear", 8 * line["iteration"], top=top, low=0.0, warmup=80, decay=160)
            assert line["learning_rate"] == pytest.approx(rate, rel=1e-3, abs=1e-9), line["iteration"]
    assert shown[0]["iteration"] == 16 and len(shown) == 5
    refused = run_alone([*flags, "--lr", "1e-4"], expect=1)
    assert "0.001" in refused and "0.0001" in refused and "--override-lr-scheduler" in refused


def test_other_constants_are_refused_naming_values_and_flags_and_change_nothing():
    stored = schedule_of()
    stored.step(300)
    fresh = schedule_of(max_lr=1e-4, decay_style="linear")
    with pytest.raises(ValueError) as caught:
        fresh.load_state_dict(stored.state_dict())
    for word in ("0.001", "0.0001", "--lr-decay-style", "--override-lr-scheduler", "--use-checkpoint-lr-scheduler"):
        assert word in str(caught.value)
    assert fresh.num_steps == 0 and fresh.owner.rates() == [0.0, 0.0]


def test_override_follows_the_flags_from_the_stored_progress_on():
    stored = schedule_of()
    stored.step(300)
    fresh = schedule_of(max_lr=1e-4, decay_style="linear", override=True)
    fresh.load_state_dict(stored.state_dict())
    assert fresh.owner.rates() == [pytest.approx(1e-5 + (1e-4 - 1e-5) * (1 - 200 / 500))] * 2


def test_use_checkpoint_follows_the_stored_constants():
    stored = schedule_of()
    stored.step(300)
    fresh = schedule_of(max_lr=1e-4, decay_style="linear", use_checkpoint=True)
    fresh.load_state_dict(stored.state_dict())
    assert fresh.state_dict() == stored.state_dict() and fresh.owner.rates() == stored.owner.rates()


def test_apply_overwrites_the_rate_that_a_loaded_optimizer_brings():
    """Groups restored after the schedule carry the stored rate, in a new list."""
    schedule = schedule_of(override=True)
    schedule.step(100)
    schedule.owner.param_groups = [{"params": [], "lr": 123.0}]
    schedule.apply()
    assert schedule.owner.rates() == [1e-3]


def test_a_state_without_its_keys_is_refused():
    with pytest.raises(ValueError, match="decay_steps"):
        schedule_of().load_state_dict({"max_lr": 1.0, "num_steps": 3})


@pytest.mark.parametrize("lr, bitfit, told", [(2e-5, True, True), (4e-5, True, True), (2e-5, False, False), (1e-3, True, False),
                                              (1e-4, True, False), (None, True, False)])
def test_a_bitfit_run_with_the_rate_of_full_fine_tuning_is_told_so(lr, bitfit, told):
    notice = low_rate_notice(OptimizerConfig(lr=lr, bitfit=bitfit))
    assert (notice is not None) is told
    assert not told or f"--lr {lr:g}" in notice and "1e-3" in notice


def test_a_bitfit_start_without_base_and_with_a_low_rate_says_both(tmp_path):
    said = run_alone([*small_model_flags(tmp_path), "--bitfit", "--lr", "2e-5", "--train-iters", "1"])
    assert "\n--lr 2e-05 is a rate of full fine-tuning" in said
    assert "\nwarning: --bitfit trains the biases alone, and all weights stay random; --load names the base" in said
