"""How much the libraries may say."""

from __future__ import annotations

import logging
import sys

from megatron.config import Settings


def set_log_level(settings: Settings) -> None:
    """What DeepSpeed and other libraries may say: warnings, unless the flags ask for more or less."""
    config = settings.logging
    level = config.log_level if settings.parallel.rank == 0 else config.log_level_replica
    level = (level or "warning").upper()
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s")
    for name in (None, "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(level)
