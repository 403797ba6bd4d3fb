"""``pretrain_gpt.py`` to which something happens.

The environment variable BAD_DAY of a rank holds a JSON object; all of it is optional:

- ``after``: the iteration after whose step this happens: ``signals``, names sent to this process one after the
  other, ``gap`` seconds apart; ``workers``, true to send the first to its data loader's processes too; ``sleep``, seconds
  in which this rank does nothing; ``ahead``, seconds that its clock jumps ahead;
- ``nan`` or ``inf``: [parameter, or number of a pipeline layer; iterations]: in those iterations the gradient of that
  parameter, or of that layer's output, is NaN or infinite on this rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretrain_gpt
from megatron import stopping, training


def happen(day: dict) -> None:
    """What ``day`` says, now."""
    numbers = [getattr(signal, name) for name in day.get("signals", ())]
    if day.get("workers"):
        for worker in multiprocessing.active_children():
            subprocess.run(["kill", f"-{numbers[0]}", str(worker.pid)], check=True)  # from outside, as a scheduler does
    for place, number in enumerate(numbers):
        threading.Timer(place * day.get("gap", 0), os.kill, (os.getpid(), number)).start()
    if "ahead" in day:
        clock = time.monotonic
        stopping.time = type("Clock", (), {"monotonic": staticmethod(lambda: clock() + day["ahead"])})
    end = time.monotonic() + day.get("sleep", 0.05 if numbers else 0)
    while time.monotonic() < end:
        time.sleep(0.01)


def spoil(model, where: str | int, value: float, active) -> None:
    """``value`` added to the gradient of one parameter, or of the output of one layer, while ``active()``."""
    def spoilt(gradient):
        return gradient + value if active() else gradient

    if isinstance(where, str):
        dict(model.named_parameters())[where].register_hook(spoilt)
    else:
        dict(model.named_modules())[str(where)].register_forward_hook(
            lambda module, inputs, output: output.register_hook(spoilt) and None)


def arm(day: dict) -> None:
    """Have the loop meet ``day``."""
    step, hooked = training._step, []

    def watched(run, rows, samples):
        iteration = run.progress.iteration + 1
        value = next(iter({"nan", "inf"} & day.keys()), None)
        if value and not hooked:
            where, iterations = day[value]
            spoil(run.engine.module, where, float(value), lambda: run.progress.iteration + 1 in iterations)
            hooked.append(where)
        result = step(run, rows, samples)
        if iteration == day.get("after"):
            happen(day)
        return result

    training._step = watched


if __name__ == "__main__":
    arm(json.loads(os.environ.get("BAD_DAY", "{}")))
    sys.exit(pretrain_gpt.main())
