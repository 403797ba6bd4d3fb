"""Random streams: one shared by all TP ranks, one private to each, and recomputation.

The default stream is seeded ``seed + 100 * pp_rank`` and is the same on every TP
and DP rank: it serves replicated weights and the dropout of whole hidden states.
The model-parallel stream is seeded with that value ``+ 2718 + tp_rank``: it serves
sharded weights and the dropout of attention weights, whose heads differ per rank.
On a machine without accelerator both streams live on the CPU generator.
"""

from __future__ import annotations

import contextlib
import random

import numpy
import torch
import torch.utils.checkpoint
from deepspeed.accelerator import get_accelerator

from megatron.mpu.context import ParallelContext

_STAGE_STEP = 100
_MODEL_PARALLEL_OFFSET = 2718
_STREAM_NAME = "model-parallel-rng"


class RandomStreams:
    """The model-parallel stream next to the device's default one."""

    def __init__(self, seed: int) -> None:
        before = _device_state()
        get_accelerator().manual_seed(seed)
        self._state = _device_state()
        _set_device_state(before)
        self._forked = False

    @contextlib.contextmanager
    def fork(self):
        """Inside, the device draws from the model-parallel stream.

        Raises RuntimeError when nested: the inner block would draw from a stale state.
        """
        if self._forked:
            raise RuntimeError("the model-parallel random stream is already in use; fork() does not nest")
        default = _device_state()
        _set_device_state(self._state)
        self._forked = True
        try:
            yield
        finally:
            self._forked = False
            self._state = _device_state()
            _set_device_state(default)

    def get_state(self) -> torch.Tensor:
        """A copy of the stream's state (uint8, on the CPU)."""
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        """Continue from what ``get_state`` returned. Raises ValueError for another kind of device."""
        _check_size(state, self._state, _STREAM_NAME)
        self._state = state.clone()


def _device_state() -> torch.Tensor:
    return get_accelerator().get_rng_state()


def _set_device_state(state: torch.Tensor) -> None:
    get_accelerator().set_rng_state(state)


def _check_size(state: torch.Tensor, current: torch.Tensor, name: str) -> None:
    if state.dtype != torch.uint8 or state.shape != current.shape:
        raise ValueError(f"random state {name} holds {state.numel()} bytes, this device's has "
                         f"{current.numel()}: it was saved on another kind of device; "
                         "start with --no-load-rng")


def seed_everything(seed: int, context: ParallelContext) -> RandomStreams:
    """Seed python, numpy, torch and the device for this rank; return the model-parallel stream."""
    stage_seed = seed + _STAGE_STEP * context.pp_rank
    highest = 2**32 - 1 - _STAGE_STEP * (context.pp_size - 1)  # the same verdict on every stage
    if not 0 <= seed <= highest:
        raise ValueError(f"--seed {seed} is out of range, it must lie between 0 and {highest}")
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    get_accelerator().manual_seed(stage_seed)
    return RandomStreams(stage_seed + _MODEL_PARALLEL_OFFSET + context.tp_rank)


def capture_rng_state(streams: RandomStreams) -> dict:
    """All random states of this rank as tensors, tuples and numbers.

    ``torch.load(weights_only=True)`` can read it back; the keys are the ones of the
    trainers our users come from.
    """
    generator = numpy.random.get_state(legacy=False)
    keys, position = generator["state"]["key"], generator["state"]["pos"]
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (str(generator["bit_generator"]), torch.from_numpy(keys.astype("int64")), int(position),
                         int(generator["has_gauss"]), float(generator["gauss"])),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": _device_state(),
        "rng_tracker_states": {_STREAM_NAME: streams.get_state()},
    }


def restore_rng_state(state: dict, streams: RandomStreams) -> None:
    """Continue all streams from ``capture_rng_state``.

    Raises ValueError, before anything is changed, for the state of another kind of device.
    """
    private = state["rng_tracker_states"][_STREAM_NAME]
    _check_size(private, streams.get_state(), _STREAM_NAME)
    _check_size(state["cuda_rng_state"], _device_state(), "cuda_rng_state")
    version, words, gauss = state["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["np_rng_state"]
    numpy.random.set_state((kind, numpy.asarray(keys, dtype="uint32"), *rest))
    torch.set_rng_state(state["torch_rng_state"])
    _set_device_state(state["cuda_rng_state"])
    streams.set_state(private)


def checkpoint(function, *args, streams: RandomStreams):
    """``function(*args)``, keeping only its inputs and running it again in backward.

    Activation recomputation (arXiv 1604.06174). torch replays the default streams;
    the model-parallel one is replayed here and afterwards put back to where it was.
    Non-reentrant, so parameters get their gradients even when no input needs one.
    """
    at_start = streams.get_state()

    @contextlib.contextmanager
    def replay():
        now = streams.get_state()
        streams.set_state(at_start)
        try:
            yield
        finally:
            streams.set_state(now)

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=True,
        context_fn=lambda: (contextlib.nullcontext(), replay()))
