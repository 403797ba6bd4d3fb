"""Saving: one tag, visible only when all of it is on disk."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch.distributed as dist

from megatron import log_lines
from megatron.checkpoint import files
from megatron.checkpoint.progress import Progress, architecture, trained_names
from megatron.config import CheckpointConfig, Settings
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import capture_rng_state


def save(engine, settings: Settings, context: ParallelContext, progress: Progress, streams) -> None:
    """Collective: write one tag, then make it the latest.

    ``latest`` changes only after every rank's files are complete on disk, so a job
    killed in between leaves the previous tag as the one a resume finds.
    """
    folder, tag = settings.checkpoint.save, f"global_step{progress.iteration}"
    part = f"{tag}.part"
    if context.rank == 0:
        print(log_lines.saving_line(progress.iteration, folder), flush=True)
        shutil.rmtree(Path(folder) / part, ignore_errors=True)  # of a save that was killed
    start = time.monotonic()
    arguments = dict(settings.flags)
    arguments.update(consumed_train_samples=progress.consumed_train_samples,
                     consumed_valid_samples=progress.consumed_valid_samples,
                     gigaflos_no_embeds=progress.gigaflos_no_embeds,
                     padded_vocab_size=settings.model.padded_vocab_size)
    client = {
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
        client.update(capture_rng_state(streams))
    try:
        engine.save_checkpoint(folder, tag=part, client_state=client, save_latest=False)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
        raise RunError(f"--save {folder}: {tag} could not be written, {free / 2**20:,.0f} MiB are free there; "
                       f"the previous checkpoint is untouched ({str(error).splitlines()[0]})") from error
    # save_checkpoint ends with a barrier: all files of all ranks are in place
    if context.rank == 0:
        files.replace_folder(Path(folder) / part, Path(folder) / tag)
        files.write_text(Path(folder) / files.LATEST, tag)
        print(log_lines.saved_line(progress.iteration, folder), flush=True)
        print(f"  saving took {time.monotonic() - start:.2f} s", flush=True)
    if context.world_size > 1:
        dist.barrier()


def check_save_folder(config: CheckpointConfig, context: ParallelContext) -> None:
    """Collective: make ``--save`` and write to it now, not after hours of training."""
    problem = None
    if config.save and context.rank == 0:
        probe = Path(config.save) / ".probe"
        try:
            Path(config.save).mkdir(parents=True, exist_ok=True)
            files.write_text(probe, "writable")
            probe.unlink()
        except OSError as error:
            problem = f"--save {config.save} cannot be written: {error}"
    agree(context, problem)
