"""Settings that state files of BigScience's trainer hold as enum members.

Such a file pickles ``megatron.enums.PositionEmbeddingType``. With a class of that name here,
its arguments can be read without running code, and what is written here compares equal there.
"""

from __future__ import annotations

import enum


class PositionEmbeddingType(enum.Enum):
    """``--position-embedding-type`` in the ``args`` of a state file; values are those found in files."""

    rotary = 1
    absolute = 2
    alibi = 3
