"""Reading files of torch.save: a short list of classes, or everything where the user trusts the file.

A pickle is a program. ``torch.load(weights_only=True)`` runs none but knows tensors and plain
containers only; the classes beside them that checkpoints hold are listed here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import OrderedDict
from pathlib import Path

import numpy
import torch

from megatron.enums import PositionEmbeddingType
from megatron.errors import RunError

#: numpy dtypes that random states and counters come in
_NUMBERS = ("u4", "i4", "i8", "f4", "f8")


def safe_classes() -> list:
    """What our files, DeepSpeed's and those of older trainers hold beside tensors; building it runs no code."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # NumPy arrays and numbers are made by two functions whose module got another name in NumPy 2
    array, number = numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]
    made_by = [(made, f"{module}.{name}") for module in ("numpy.core.multiarray", "numpy._core.multiarray")
               for made, name in ((array, "_reconstruct"), (number, "scalar"))]
    return [argparse.Namespace, OrderedDict, LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum,
            torch.Size, PositionEmbeddingType, numpy.ndarray, numpy.dtype,
            *(type(numpy.dtype(code)) for code in _NUMBERS), *made_by]


def load(path: str | Path, *, trust: bool = False, mmap: bool = False):
    """What torch.save put into ``path``, on the CPU; no code of the file runs unless ``trust``.

    With ``mmap`` tensors are read from the disk when they are used. Trusting a file matters only
    where the listed classes do not suffice, and is said on stderr. Raises RunError for a missing
    or damaged file, and for one that needs trust and has none, naming what it holds.
    """
    with torch.serialization.safe_globals(safe_classes()):
        try:
            return _load(path, True, mmap)
        except FileNotFoundError:
            raise RunError(f"checkpoint file {path} does not exist") from None
        except Exception as error:
            foreign = _unlisted(path, str(error))
            if not foreign:
                lines = str(error).splitlines() or [type(error).__name__]
                raise RunError(f"checkpoint file {path} cannot be read safely: {lines[0]}") from error
    if not trust:
        raise RunError(f"checkpoint file {path} cannot be read safely: it holds {', '.join(foreign)}; if you trust "
                       "whoever wrote it, --trust-checkpoint reads it, and runs what code it may contain")
    print(f"warning: --trust-checkpoint: {path} holds {', '.join(foreign)} and is read with everything it may run",
          file=sys.stderr, flush=True)
    try:
        return _load(path, False, mmap)
    except ModuleNotFoundError as error:
        raise RunError(f"checkpoint file {path} needs the Python module {error.name}, which is not here") from error
    except Exception as error:
        raise RunError(f"checkpoint file {path} cannot be read: {type(error).__name__}: {error}") from error


def _load(path: str | Path, safely: bool, mmap: bool):
    try:
        return torch.load(path, map_location="cpu", weights_only=safely, mmap=mmap)
    except RuntimeError as error:
        if not mmap or "mmap" not in str(error):  # files older than torch 1.6 cannot be mapped
            raise
        return torch.load(path, map_location="cpu", weights_only=safely)


def _unlisted(path: str | Path, problem: str) -> list[str]:
    """Classes and functions named in the file that are not on the list; [] where none can be found."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # damaged, or of the format before torch 1.6: torch's message names the first
        return re.findall(r"GLOBAL (\S+)", problem)[:1]
