"""The outermost frame of a job: exit codes, and the first error as the last words."""

from __future__ import annotations

import os
import sys
import traceback

from megatron.config import Settings
from megatron.errors import RunError, SharedRunError


def run_task(settings: Settings, task) -> int:
    """Train; returns the exit code of a run that ended in order, or ends the process without waiting for other ranks.

    A SharedRunError is raised on all ranks alike and printed once. Anything else may
    have struck this rank alone while its peers wait in a collective, so the process leaves
    at once and the launcher ends the others.
    """
    from megatron.training import pretrain

    rank = settings.parallel.rank
    try:
        return pretrain(settings, task)
    except SharedRunError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except RunError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        print(f"error on rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
