"""One run of the trainer and its measurements, in a process of its own.

``run_job`` is what a worker calls. It parses real flags, runs ``megatron.training.pretrain``
with the task of pretrain_gpt.py or finetune_t0.py, then measures the checkpoints it saved and
writes one JSON file, last: a job is finished when that is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# The server that all jobs are forked from imports this module, so each job starts with all of these loaded.
# Those of _LOADED would else be imported by each job, which takes as long as a small fine-tuning.
import deepspeed.runtime.pipe.engine
import deepspeed.runtime.zero.muon.muon_optimizer
import measure
import prepare
import torch._dynamo
import torch.utils.tensorboard
import transformers
from plan import LENGTH, Job, Plan

import finetune_t0
import pretrain_gpt
from megatron.arguments import parse_arguments
from megatron.checkpoint.files import write_text
from megatron.config import ModelConfig, Settings
from megatron.model.pipe import GPTModel
from megatron.training import Task, pretrain

_LOADED = (deepspeed.runtime.pipe.engine, deepspeed.runtime.zero.muon.muon_optimizer, torch._dynamo,
           torch.utils.tensorboard, transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast)

INTERRUPTED = "interrupted.txt"


def result_file(folder: Path, job: Job) -> Path:
    """Where the figures of ``job`` lie once it is finished."""
    return folder / "results" / f"{job.name}.json"


def flags(folder: Path, plan: Plan, job: Job) -> list[str]:
    """The command line of ``job``, for pretrain_gpt.py or finetune_t0.py."""
    size, runs = job.size, folder / "runs"
    shared = [
        *prepare.tokenizer_flags(folder), "--num-layers", str(size.layers), "--hidden-size", str(size.hidden),
        "--num-attention-heads", str(size.heads), "--seq-length", str(LENGTH), "--max-position-embeddings", str(LENGTH),
        "--position-embedding-type", "alibi", "--embed-layernorm", "--hidden-dropout", "0", "--attention-dropout", "0",
        "--adam-beta2", "0.95", "--clip-grad", "1.0", "--micro-batch-size", "4", "--eval-iters", "0",
        "--num-workers", "0", "--valid-num-workers", "0", "--log-interval", "20", "--seed", str(job.seed),
        "--save", str(runs / job.name)]
    if job.method is None:
        return [*shared, "--global-batch-size", str(plan.pretraining_rows), "--train-iters", str(plan.pretraining_steps),
                "--lr", f"{size.pretraining_lr:g}", "--min-lr", f"{size.pretraining_lr / 20:g}",
                "--lr-decay-style", "cosine", "--lr-warmup-iters", str(plan.pretraining_steps // 20),
                "--weight-decay", "0.1", "--save-interval", str(max(1, plan.pretraining_steps // 4)),
                "--train-weighted-split-paths", f"train: 1 0:1 {folder / 'data' / 'text_text_document'}"]
    return [*shared, "--global-batch-size", str(plan.rows), "--train-iters", str(plan.steps), "--lr", f"{job.rate:g}",
            "--lr-decay-style", "constant", "--lr-warmup-iters", str(max(1, plan.steps // 10)), "--weight-decay", "0",
            "--loss-normalization", "global-tokens", "--save-interval", str(plan.steps // plan.points),
            "--train-weighted-split-paths", f"train: 1 0:1 {folder / 'data' / 'tasks'}",
            "--load", str(runs / f"base-{size.name}"), *job.method.flags]


def run_job(folder: Path, plan: Plan, job: Job, log: str) -> None:
    """Train and measure; what is printed goes to the file ``log``. Raises what the trainer raises."""
    os.setsid()  # Ctrl-C reaches the command alone, which then ends its jobs
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    began = time.monotonic()
    module, entry = (pretrain_gpt, "pretrain_gpt") if job.method is None else (finetune_t0, "finetune_t0")
    line = flags(folder, plan, job)
    print(f"{entry}.py {' '.join(line)}", flush=True)
    settings = parse_arguments(line, entry=entry)
    pretrain(settings, Task(datasets=module.datasets, batch=module.batch))
    trained = time.monotonic()
    saved = folder / "runs" / job.name
    figures = measured(folder, plan, job, saved, model_config(settings, folder))
    figures |= {"training_loss": last_loss(Path(log)), "training_seconds": trained - began,
                "seconds": time.monotonic() - began,
                "cpu_seconds": cpu_seconds()}
    write_text(result_file(folder, job), json.dumps(figures))
    if job.method is not None:
        shutil.rmtree(saved)


def model_config(settings: Settings, folder: Path) -> ModelConfig:
    """The model of ``settings`` with the vocabulary of the tokenizer, as the trainer completes it."""
    size = prepare.open_tokenizer(folder).vocab_size
    padded = -(-size // 128) * 128
    return dataclasses.replace(settings.model, vocab_size=size, padded_vocab_size=padded)


def measured(folder: Path, plan: Plan, job: Job, saved: Path, config: ModelConfig) -> dict:
    """Figures of the checkpoints in ``saved``: the last alone of a pretraining."""
    held_out = json.loads((folder / "data" / "held_out.json").read_text())
    steps = sorted(int(match[1]) for path in saved.iterdir() if (match := re.fullmatch(r"global_step(\d+)", path.name)))
    if job.method is None:
        for step in steps[:-1]:  # kept up to here to resume from
            shutil.rmtree(saved / f"global_step{step}")
        steps = steps[-1:]

    def point(step: int) -> tuple[GPTModel, dict]:
        model = measure.load_model(saved / f"global_step{step}", config)
        return model, {"step": step, "languages": measure.language_losses(model, held_out["languages"]),
                       "tasks": measure.task_losses(model, held_out["tasks"])}

    earlier = [point(step)[1] for step in steps[:-1]]
    model, last = point(steps[-1])
    figures: dict[str, Any] = {"job": job.name, "size": job.size.name, "method": job.method.name if job.method else None,
               "rate": job.rate, "seed": job.seed, "points": [*earlier, last],
               "accuracy": measure.task_accuracy(model, held_out["tasks"]),
               "weights": sum(param.numel() for param in model.parameters()),
               "biases": sum(param.numel() for name, param in model.named_parameters() if name.endswith("bias"))}
    if job.method is not None:
        base = folder / "runs" / f"base-{job.size.name}"
        before = measure.load_model(base / (base / "latest").read_text().strip(), config)
        figures["bias_changes"] = measure.bias_changes(model, before)
    return figures


def last_loss(log: Path) -> float:
    """The last training loss that the trainer printed."""
    found = re.findall(r"lm loss: +([\d.E+-]+)", log.read_text(errors="replace"))
    return float(found[-1]) if found else float("nan")


def work(folder: str, plan: Plan, job: Job, log: str) -> None:
    """Body of the process of a job: exit status 0, or 1 with the error last in ``log``.

    One that is ended early adds its processor time to ``interrupted.txt``, which the report counts too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_job(Path(folder), plan, job, log)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        with open(Path(folder) / INTERRUPTED, "a") as file:
            file.write(f"{cpu_seconds():.1f}\n")
        os._exit(1)


def cpu_seconds() -> float:
    """Processor time of this process so far."""
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
