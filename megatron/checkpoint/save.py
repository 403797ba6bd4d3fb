"""Saving: one tag, visible only when all of it is on disk. See docs/checkpoints.md."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import log_lines
from megatron.checkpoint import files, manifest
from megatron.checkpoint.delta_file import NAME as DELTA
from megatron.checkpoint.delta_run import DeltaSaves
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.progress import Progress, architecture, position_type, trained_names
from megatron.checkpoint.writer import TagWriter
from megatron.config import CheckpointConfig, Settings
from megatron.errors import RunError, SharedRunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams, capture_rng_state

#: seconds after which rank 0 looks again for files of other nodes: network file systems cache what a folder holds
NETWORK_DELAYS = (1, 4, 15, 40)


@dataclass
class _Pending:
    """A tag whose files are being written."""

    tag: str
    iteration: int
    writer: TagWriter
    started: float
    device: torch.device


class Saver:
    """Saves the tags of one run into ``--save``.

    The order that makes a killed job harmless: all ranks write into ``TAG.part`` -> they agree
    that all files are complete -> manifest -> the folder is renamed to ``TAG`` -> ``latest``
    -> with ``--keep-last``, older tags go. With ``--async-save`` the files are written by a thread
    while training goes on, and all that follows happens in `poll` or `finish`.
    """

    def __init__(self, settings: Settings, context: ParallelContext, plan: LoadPlan | None = None,
                 deltas: DeltaSaves | None = None) -> None:
        """``deltas``: write biases alone, and no layer files."""
        self.settings, self.context, self._deltas = settings, context, deltas
        self.folder = Path(settings.checkpoint.save or "")
        self._pending: _Pending | None = None
        self._run = _run_of(plan) if context.rank == 0 else ""  # rank 0 alone writes manifests
        self._known = _newest(self.folder)[0] if context.rank == 0 and settings.checkpoint.save else 0

    def save(self, engine: Any, progress: Progress, streams: RandomStreams) -> None:
        """Collective: write one tag of this state; on return it is visible, or under way with ``--async-save``.

        Raises SharedRunError on all ranks when one of them cannot write; the tags before are
        then what they were.
        """
        self.finish()
        tag = f"global_step{progress.iteration}"
        started = time.monotonic()
        writer = TagWriter(background=self.settings.checkpoint.async_save)
        if self.context.rank == 0:
            print(log_lines.saving_line(progress.iteration, self.folder), flush=True)
            writer.attempt(self.folder.mkdir, parents=True, exist_ok=True)
            writer.attempt(self._check_alone)
            for leftover in _named(self.folder, r"global_step\d+\.part"):  # of a save that was killed
                writer.attempt(shutil.rmtree, leftover)
        state = _client_state(engine, self.settings, self.context, progress, streams)
        try:
            self._write(engine, tag, state, writer)
            if self._deltas and (data := self._deltas.file(progress.iteration)):
                writer.write_bytes(data, self.folder / f"{tag}.part" / DELTA)
        except (OSError, RuntimeError) as error:  # such as a rank that is gone
            raise RunError(self._failure(tag, f"it was interrupted: {str(error).splitlines()[0]}")) from error
        self._pending = _Pending(tag, progress.iteration, writer, started, engine.device)
        if not self.settings.checkpoint.async_save:
            self.finish()

    def poll(self) -> None:
        """Collective: make a tag visible as soon as all ranks have written it; costs nothing when none is under way."""
        pending = self._pending
        if pending is None:
            return
        done = torch.tensor(int(pending.writer.done), dtype=torch.int32, device=pending.device)
        if self.context.world_size > 1:
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            self.finish()

    def finish(self) -> None:
        """Collective: wait for a tag that is under way, and make it visible.

        Raises SharedRunError as `save` does.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        entries, problem = pending.writer.finish()
        everyones = self._agree_on_files(pending.tag, entries, problem)
        problem = None
        if self.context.rank == 0:
            try:
                self._publish(pending, everyones)
                self._remove_older()
            except (OSError, RunError) as error:
                problem = self._failure(pending.tag, str(error))
                shutil.rmtree(self.folder / f"{pending.tag}.part", ignore_errors=True)
        agree(self.context, problem)
        if self.context.rank == 0:  # not among what may fail above: a log that nobody reads is no failed save
            print(log_lines.saved_line(pending.iteration, self.folder), flush=True)
            print(f"  saving took {time.monotonic() - pending.started:.2f} s", flush=True)

    def _write(self, engine: Any, tag: str, state: dict, writer: TagWriter) -> None:
        """Collective: this rank's files into ``TAG.part``, or into memory; ends with a barrier."""
        engine.checkpoint_engine.writer = writer
        # a helper script that DeepSpeed copies beside the tags, on rank 0 alone and before a barrier
        copy_script, engine._copy_recovery_script = engine._copy_recovery_script, lambda folder: writer.attempt(
            copy_script, folder)
        engine.module.layer_files = self._deltas is None
        try:
            engine.save_checkpoint(str(self.folder), tag=f"{tag}.part", client_state=state, save_latest=False)
        finally:
            engine.checkpoint_engine.writer = None
            del engine._copy_recovery_script  # the method of the class is back

    def _agree_on_files(self, tag: str, entries: list[manifest.Entry], problem: str | None) -> list[manifest.Entry]:
        """Collective: every rank's entries. Raises on all ranks when one has a problem; ``TAG.part`` is then removed."""
        try:
            agree(self.context, self._failure(tag, problem) if problem else None)
        except SharedRunError:
            if self.context.rank == 0:
                shutil.rmtree(self.folder / f"{tag}.part", ignore_errors=True)
            raise
        everyones = [entries]
        if self.context.world_size > 1:
            everyones *= self.context.world_size
            dist.all_gather_object(everyones, entries)
        return [entry for each in everyones for entry in each]

    def _publish(self, pending: _Pending, entries: list[manifest.Entry]) -> None:
        part = self.folder / f"{pending.tag}.part"
        degrees = {"tp": self.context.tp_size, "pp": self.context.pp_size, "dp": self.context.dp_size}
        sequence = self._check_alone() + 1
        manifest.write(part, manifest.Manifest(
            iteration=pending.iteration, run=self._run, degrees=degrees, dtype=self.settings.model.params_dtype,
            sequence=sequence, files=tuple(sorted(entries, key=lambda entry: entry.name))))
        wrong = manifest.damage(part)
        for wait in NETWORK_DELAYS:
            if wrong is None:
                break
            time.sleep(wait)
            wrong = manifest.damage(part)
        if wrong is not None:
            raise RunError(f"{wrong}; --save must be on a file system that all ranks share")
        if others := manifest.unlisted(part):  # a later start would leave it out
            raise RunError(f"{part / others[0]} is there, but none of this job's ranks wrote it; only one job may save there")
        files.replace_folder(part, self.folder / pending.tag)
        self._known = sequence
        files.write_text(self.folder / files.LATEST, pending.tag)

    def _check_alone(self) -> int:
        """Place in the sequence of saves of the newest tag. Raises RunError for one that another job has saved meanwhile."""
        sequence, tag = _newest(self.folder)
        if sequence > self._known:
            raise RunError(f"another job has saved {tag} into this folder since this one last looked; only one may save there")
        return sequence

    def _remove_older(self) -> None:
        """Remove what ``--keep-last`` does not keep: complete tags of this run, and of no other."""
        keep = self.settings.checkpoint.keep_last
        try:
            for leftover in _named(self.folder, r"\.global_step\d+\.old"):  # of a removal that was killed
                shutil.rmtree(leftover)
            if keep is None:
                return
            valid = [tag for tag, each in manifest.tags_with_manifest(self.folder)
                     if each and each.run == self._run and manifest.damage(self.folder / tag) is None]
            for tag in valid[max(1, keep):]:
                files.remove_folder(self.folder / tag)
        except OSError as error:
            print(f"warning: an older checkpoint could not be removed ({error})", flush=True)

    def _failure(self, tag: str, what: str) -> str:
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        return (f"--save {self.folder}: {tag} could not be written: {what} ({free / 2**20:,.0f} MiB are free there; "
                "the previous checkpoint is untouched)")


def save(engine: Any, settings: Settings, context: ParallelContext, progress: Progress, streams: RandomStreams) -> None:
    """Collective: one tag of a run that saves once; see `Saver`."""
    saver = Saver(settings, context)
    saver.save(engine, progress, streams)
    saver.finish()


def _newest(folder: Path) -> tuple[int, str]:
    """Place in the sequence of saves, and name, of the tag saved last into ``folder``; (0, "") without one."""
    return max(((each.sequence, tag) for tag, each in manifest.tags_with_manifest(folder) if each), default=(0, ""))


def _run_of(plan: LoadPlan | None) -> str:
    """The name of the run that goes on: that of the tag it continues, or a new one."""
    continued = manifest.read(plan.path) if plan and plan.progress else None
    return continued.run if continued else secrets.token_hex(8)


def _named(folder: Path, pattern: str) -> list[Path]:
    """Real folders in ``folder`` whose whole name matches."""
    return [path for path in (folder.iterdir() if folder.is_dir() else ())
            if re.fullmatch(pattern, path.name) and path.is_dir() and not path.is_symlink()]


def _client_state(engine: Any, settings: Settings, context: ParallelContext, progress: Progress,
                  streams: RandomStreams) -> dict[str, Any]:
    """What the state file of a model-parallel rank holds beside DeepSpeed's part."""
    arguments = dict(settings.flags)
    arguments.update(consumed_train_samples=progress.consumed_train_samples,
                     consumed_valid_samples=progress.consumed_valid_samples,
                     gigaflos_no_embeds=progress.gigaflos_no_embeds,
                     padded_vocab_size=settings.model.padded_vocab_size,
                     position_embedding_type=position_type(settings.model.position_embedding_type))
    state = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "tokens": progress.consumed_train_tokens,
        "architecture": architecture(settings.model),
        "checkpoint_info": {"padded_vocab_size": settings.model.padded_vocab_size,
                            "original_vocab_size": settings.model.vocab_size},
        "progress": dict(vars(progress)),
        "bitfit": settings.optimizer.bitfit,
        "bitfit_bias_terms": list(settings.optimizer.bitfit_bias_terms),
        "trainable_parameters": trained_names(engine.module),
        "dp_world_size": context.dp_size,
    }
    if settings.checkpoint.save_rng:
        state.update(capture_rng_state(streams))
    return state


def check_save_folder(config: CheckpointConfig, context: ParallelContext) -> None:
    """Collective: make ``--save`` and write to it now, not after hours of training."""
    problem = None
    if config.save and context.rank == 0:
        probe = Path(config.save) / f".probe.{os.getpid()}"
        try:
            Path(config.save).mkdir(parents=True, exist_ok=True)
            files.write_text(probe, "writable")
            probe.unlink(missing_ok=True)
        except OSError as error:
            problem = f"--save {config.save} cannot be written: {error}"
    agree(context, problem)
