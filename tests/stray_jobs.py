"""Jobs of tests/test_stray_files.py: starts and saves with files in the tag that are no part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

from resume_jobs import first_half, second_half
from small_runs import Case, build_run, local_tensors

from megatron.checkpoint import load_plan, save
from megatron.config import CheckpointConfig
from megatron.initialize import SharedRunError


def go_on(case: Case, folders: list[str], steps: int) -> list[tuple[dict, str]]:
    """Of a resume from each of ``folders``: what it comes to after ``steps`` steps, and what it prints."""
    results = []
    for folder in folders:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            outcome = second_half(case, folder, steps)
        results.append((outcome, said.getvalue()))
    return results


def start_from(case: Case, folders: list[str]) -> list[tuple[dict, str]]:
    """Of a start from each of ``folders`` as a base: its tensors before the first step, and what it prints."""
    results = []
    for folder in folders:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            plan = load_plan.plan_load(CheckpointConfig(load=folder, verify_checkpoint=True))
            *_, engine, _ = build_run(dataclasses.replace(case, seed=case.seed + 1), plan)
        results.append(({name: value[0] for name, value in local_tensors(engine).items()}, said.getvalue()))
    return results


def save_beside_a_stranger(case: Case, base: str, folder: str, name: str) -> str | None:
    """What a save says when file ``name`` turns up in the tag that is being written."""
    def look(self, tag, entries, problem):
        (Path(folder) / f"{tag}.part" / name).write_bytes(b"of another job")
        return agree(self, tag, entries, problem)

    agree, save.Saver._agree_on_files = save.Saver._agree_on_files, look
    try:
        first_half(case, base, 1, folder)
    except SharedRunError as error:
        return str(error)
    finally:
        save.Saver._agree_on_files = agree
    return None
