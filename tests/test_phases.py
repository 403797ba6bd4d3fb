"""Times by phase, on a stand-in for an engine whose instructions take known times."""

import time
from types import MethodType, SimpleNamespace

import pytest
from deepspeed.runtime.pipe import schedule

from megatron import phases
from megatron.phases import PHASES, StepPhases, shares
from megatron.run_report import blocks_per_stage

INSTRUCTIONS = (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass, schedule.ReduceTiedGrads,
                schedule.ReduceGrads, schedule.OptimizerStep, schedule.SendActivation, schedule.RecvActivation,
                schedule.SendGrad, schedule.RecvGrad)


class Clock:
    """Time that passes only when an instruction says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(phases.time, "perf_counter", lambda: self.now)


def engine_of(run):
    """An engine that knows every instruction as DeepSpeed's does: functions to be bound."""
    return SimpleNamespace(_INSTRUCTION_MAP={kind: (lambda engine, _kind=kind, **kwargs: run(_kind))
                                             for kind in INSTRUCTIONS})


def execute(engine, *kinds):
    for kind in kinds:
        MethodType(engine._INSTRUCTION_MAP[kind], engine)(buffer_id=0)


def test_each_instruction_is_charged_to_its_phase(monkeypatch):
    clock = Clock(monkeypatch)
    takes = {kind: 1.0 + number for number, kind in enumerate(INSTRUCTIONS)}

    def run(kind):
        clock.now += takes[kind]

    engine = engine_of(run)
    timed, seen = StepPhases(engine), []
    timed.before_reduction = lambda: seen.append(clock.now)
    execute(engine, schedule.ForwardPass)  # evaluation: outside of a step
    assert timed.drain() == {} and clock.now == 102
    for _ in range(3):
        timed.begin()
        execute(engine, *INSTRUCTIONS)
        clock.now += 5.0
        timed.end()
    step = {"data": 1, "forward": 2, "backward": 3, "reduction": 4 + 5, "optimizer": 6, "send": 7 + 9,
            "pipeline wait": 8 + 10, "rest": 5}
    assert timed.seconds == {phase: 2 * step[phase] for phase in PHASES} and timed.steps == 3
    assert timed.drain() == pytest.approx({phase: step[phase] / 60 for phase in PHASES})
    assert timed.drain() == {} and seen == [102 + 1 + 2 + 3]
    execute(engine, schedule.ForwardPass)  # evaluation between two steps
    timed.begin()
    timed.end()
    assert timed.drain() == {}


def test_on_an_accelerator_events_tell_the_time_and_are_used_again(monkeypatch):
    clock = Clock(monkeypatch)
    made = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            made.append(self)

        def record(self):
            self.at = clock.now

        def elapsed_time(self, other):
            return (other.at - self.at) * 1000

    accelerator = SimpleNamespace(device_name=lambda: "cuda", synchronize=lambda: None, Event=Event)
    monkeypatch.setattr(phases, "get_accelerator", lambda: accelerator)

    def run(kind):
        clock.now += 2.0

    engine = engine_of(run)
    timed = StepPhases(engine)
    for _ in range(2):
        timed.begin()
        execute(engine, schedule.ForwardPass, schedule.BackwardPass, schedule.ForwardPass)
        timed.end()
    assert timed.seconds["forward"] == 4 and timed.seconds["backward"] == 2 and timed.seconds["rest"] == 0
    assert len(made) == 6


def test_timing_an_instruction_costs_microseconds():
    engine = engine_of(lambda kind: None)
    StepPhases(engine).begin()
    call = MethodType(engine._INSTRUCTION_MAP[schedule.ForwardPass], engine)
    best = 1.0
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            call(buffer_id=0)
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 2e-5  # 0.1 % of an instruction of 20 ms


def test_shares_of_nothing_are_nothing():
    assert shares({"forward": 0.0}) == {} and shares({"forward": 1.0, "rest": 3.0}) == {"forward": 0.25, "rest": 0.75}


@pytest.mark.parametrize(("parts", "layers", "blocks"), [
    ([0, 11], 4, [4]), ([0, 5, 11], 4, [2, 2]), ([0, 2, 9], 2, [0, 2]), ([0, 3, 5, 6, 9], 2, [0, 2, 0, 0])])
def test_blocks_of_a_stage(parts, layers, blocks):
    assert blocks_per_stage(SimpleNamespace(parts=parts), layers) == blocks
