"""``pretrain_gpt.py`` that prints, after every iteration and on every rank, hashes of its random streams and dropout.

One line: ``streams rank R iteration N`` and name=hash of: the global generators (python, numpy, torch), the
private stream, everything that dropout of hidden states gave (hidden), and the generator as each attention
found it (attention).
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy
import torch

import pretrain_gpt
from megatron import training
from megatron.model import attention, block, embedding


def noted(plain, digest, what):
    """``plain``, with ``what(its result)`` put into ``digest``."""
    def call(*args, **given):
        before = torch.get_rng_state()
        result = plain(*args, **given)
        digest.update((before if what == "state" else result.detach()).contiguous().numpy().tobytes())
        return result
    return call


def watch() -> None:
    hidden, heads, step = hashlib.sha256(), hashlib.sha256(), training._step
    for owner in (block, embedding):
        owner.dropout = noted(owner.dropout, hidden, "result")
    attention.blocked_attention = noted(attention.blocked_attention, heads, "state")

    def told(run, rows, samples):
        result = step(run, rows, samples)
        parts = {"python": repr(random.getstate()).encode(), "numpy": numpy.random.get_state()[1].tobytes(),
                 "torch": torch.get_rng_state().numpy().tobytes(), "private": run.streams.get_state().numpy().tobytes()}
        hashes = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
        hashes |= {"hidden": hidden.hexdigest(), "attention": heads.hexdigest()}
        print(f"streams rank {run.context.rank} iteration {run.progress.iteration} "
              + " ".join(f"{name}={value[:12]}" for name, value in hashes.items()), flush=True)
        return result

    training._step = told


if __name__ == "__main__":
    watch()
    sys.exit(pretrain_gpt.main())
