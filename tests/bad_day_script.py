"""``pretrain_gpt.py`` one rank of which has a bad day.

The environment variable BAD_DAY of a rank holds a JSON object; all of it is optional:

- ``rank``: the only rank that this is about;
- ``at``: a place of PLACES. The first time this rank comes there, in iteration 2 if it is one of an iteration,
  ``how`` happens: "raise" something unexpected, "refuse" with a sentence, "kill" the process, "touch" a ``file``, or what
  stop_script.happen knows ("signals", "gap", "sleep");
- ``children``: a file that gets the ids of the processes of this rank's data loader first;
- ``start``: how these are started, "fork" or "forkserver";
- ``hang``: true to begin a thread first that Python would wait for.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import deepspeed
from stop_script import happen
from torch.utils.data import get_worker_info

import pretrain_gpt
from megatron import training
from megatron.checkpoint.writer import TagWriter
from megatron.data.gpt_dataset import GPTDataset
from megatron.errors import RunError
from megatron.model.block import ParallelTransformerLayerPipe

PLACES = ("arguments", "meeting", "data", "model", "forward", "backward", "update", "evaluation", "save", "loader", "end",
          "group")


class Place:
    """Where something happens on this rank, once."""

    def __init__(self, day: dict) -> None:
        self.day, self.name, self.iteration, self.over = day, day.get("at"), 0, False

    def come(self, name: str) -> None:
        """This rank, or the process of a loader of its, is at ``name`` now."""
        early = get_worker_info() is None if name == "loader" else self.iteration == 1
        if name != self.name or early or self.over:
            return
        self.over = True
        if "children" in self.day:
            Path(self.day["children"]).write_text(json.dumps([each.pid for each in multiprocessing.active_children()]))
        if self.day.get("hang"):
            threading.Thread(target=time.sleep, args=(600,)).start()
        if "signals" in self.day:
            happen(self.day)
        elif self.day["how"] == "touch":
            Path(self.day["file"]).touch()
        elif self.day["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise (RunError if self.day["how"] == "refuse" else KeyError)(f"a bad day at {name}")

    def before(self, owner, attribute: str, name: str) -> None:
        """Whoever calls ``owner.attribute`` comes to ``name`` first."""
        function = getattr(owner, attribute)

        def called(*args, **named):
            self.come(name)
            return function(*args, **named)

        setattr(owner, attribute, called)

    def find(self, engine) -> None:
        """The places that exist once the engine does."""
        self.before(engine, "eval_batch", "evaluation")
        self.before(engine.optimizer, "step", "update")
        block = next(layer for layer in engine.module.modules() if isinstance(layer, ParallelTransformerLayerPipe))
        block.register_forward_hook(lambda module, inputs, output: self.forward(output))

    def forward(self, output) -> None:
        """A block's output exists, and its gradient will."""
        self.come("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.come("backward"))


def arm(day: dict) -> None:
    """Have this rank come to its place."""
    step, place = training._step, Place(day)
    # as under a launcher before Python 3.14; the loader's processes get what follows
    multiprocessing.set_start_method(day.get("start", "fork"), force=True)
    place.before(pretrain_gpt, "parse_arguments", "arguments")
    place.before(training, "initialize_distributed", "meeting")
    place.before(pretrain_gpt, "datasets", "data")
    place.before(training, "build_model", "model")
    place.before(TagWriter, "save", "save")
    place.before(training, "shutdown", "end")
    place.before(deepspeed, "init_distributed", "group")
    place.before(GPTDataset, "__getitem__", "loader")

    def watched(run, rows, samples):
        if not place.iteration:
            place.find(run.engine)
        place.iteration = run.progress.iteration + 1
        return step(run, rows, samples)

    training._step = watched


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in its background
    day = json.loads(os.environ.get("BAD_DAY", "{}"))
    if day and day.get("rank", os.environ["RANK"]) == os.environ["RANK"]:
        arm(day)
    sys.exit(pretrain_gpt.main())
