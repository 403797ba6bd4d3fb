"""``pretrain_gpt.py`` on a node with two accelerators, which compute on the CPU and note who uses them.

At the end each rank prints ``rank R used the devices {...}``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import deepspeed.ops
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

import pretrain_gpt


class _Event:
    """A moment on the host's clock, as ``torch.cuda.Event`` is one on the device's."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return 1000 * (later.at - self.at)

    def synchronize(self) -> None:
        """It has passed."""


class TwoDevices(CPU_Accelerator):
    """Devices ``cpu:0`` and ``cpu:1``; like others, it is on device 0 until told otherwise."""

    Event = _Event

    def __init__(self) -> None:
        super().__init__()
        self.now, self.used = 0, set()

    def device_count(self) -> int:
        return 2

    def set_device(self, device_index: int) -> None:
        if not 0 <= int(device_index) < 2:
            raise RuntimeError(f"invalid device ordinal {device_index}")
        self.now = int(device_index)
        self.used.add(self.now)

    def current_device(self) -> int:
        self.used.add(self.now)
        return self.now

    def current_device_name(self) -> str:
        return f"cpu:{self.current_device()}"

    def device_name(self, device_index: int | None = None) -> str:
        """Without an index it is asked what kind of device this is, not for one."""
        if device_index is not None:
            self.used.add(int(device_index))
        return f"cpu:{self.now if device_index is None else device_index}"


if __name__ == "__main__":
    accelerator = TwoDevices()
    set_accelerator(accelerator)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # of the CPU it really is; would be compiled
    code = pretrain_gpt.main()
    print(f"rank {os.environ['RANK']} used the devices {accelerator.used}", flush=True)
    sys.exit(code)
