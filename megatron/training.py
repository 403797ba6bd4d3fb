"""The loop: set up a run, train, evaluate, save, stop.

``pretrain`` is what an entry script calls; the script says what is trained on what
by passing a ``Task``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron import bitfit, log_lines
from megatron.arguments import accepted_without_effect, format_argument_dump
from megatron.checkpoint import load_plan, resume, save
from megatron.checkpoint.delta_run import DeltaSaves
from megatron.checkpoint.files import write_text
from megatron.checkpoint.progress import Progress
from megatron.config import Settings
from megatron.data.blending import Dataset
from megatron.data.broadcast import BroadcastRows
from megatron.data.gpt_dataset import Datasets, check_same_data
from megatron.data.loaders import build_loader
from megatron.deepspeed_config import zero_stage_notice
from megatron.engine import build_engine, build_model
from megatron.errors import RunError, SharedRunError
from megatron.flops import gigaflos, tflops_reported
from megatron.initialize import agree, check_precision, initialize_distributed, shutdown, tells_overdue
from megatron.log_level import set_log_level
from megatron.metrics import LossWindow, Timers, params_norm
from megatron.model.loss import GlobalWeight
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams, seed_everything
from megatron.optimizer.batch_size import BatchSizeSchedule, training_iterations
from megatron.optimizer.learning_rate import LearningRateSchedule, low_rate_notice
from megatron.peers import Peers
from megatron.replicas import Replicas
from megatron.run_report import RunReport
from megatron.signals import Signals, end_with_rank, outlive_signals
from megatron.stopping import GradientWatch, Stop, Stopping
from megatron.tensorboard import TensorBoardWriter
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.padding import padded_vocab_size


@dataclass(frozen=True)
class Task:
    """What an entry script plugs into the loop."""
    datasets: Callable[[Settings, tuple[int, int, int]], Datasets]
    """(settings, samples wanted for train, valid, test) -> megatron.data.gpt_dataset.Datasets"""
    batch: Callable[[Settings, Tokenizer], Callable[[torch.Tensor], tuple]]
    """(settings, tokenizer) -> function from rows [b, s + 1] to (stage inputs, labels)"""


@dataclass(kw_only=True)
class Start:
    """What is known of a run before its model is built."""

    settings: Settings
    context: ParallelContext
    streams: RandomStreams
    train_iters: int
    batch_sizes: BatchSizeSchedule
    progress: Progress
    writer: TensorBoardWriter
    stopping: Stopping

    def say(self, text: str) -> None:
        """Print once per job."""
        if self.context.rank == 0:
            print(text, flush=True)

    def say_last(self, text: str) -> None:
        """Print on the last rank, where the training lines come from."""
        if self.context.is_last_rank:
            print(text, flush=True)


@dataclass(kw_only=True)
class Run(Start):
    """A run in progress; lives for one call of ``pretrain``."""

    engine: Any
    schedule: LearningRateSchedule
    replicas: Replicas
    report: RunReport
    to_batch: Callable[[torch.Tensor], tuple]
    weight: GlobalWeight | None
    """None where each micro-batch is divided by its own weight"""
    saver: save.Saver | None = None
    """None where nothing is trained (--eval-only)"""
    last_saved: int = -1
    timers: Timers = field(default_factory=Timers)


@tells_overdue
def pretrain(settings: Settings, task: Task, *, peers: Peers | None = None, signals: Signals | None = None) -> int:
    """Run one job from parsed settings to its last log line, on every rank. Returns the exit code.

    ``peers`` end together from the moment the ranks have met; ``signals`` may ask to stop.
    """
    set_log_level(settings)
    context = initialize_distributed(settings.parallel, peers)
    check_precision(settings.model.params_dtype)
    start = _prepare(settings, context, signals)
    tokenizer = _with_vocabulary(start)
    settings = start.settings
    plan = load_plan.shared_plan(settings.checkpoint, context, eval_only=settings.train.eval_only)
    start.say(plan.reason)
    if settings.optimizer.bitfit and plan.folder is None:
        start.say("warning: --bitfit trains the biases alone, and all weights stay random; --load names the base they belong to")
    if plan.warning:
        start.say(f"warning: {plan.warning}")
    stored = resume.check_stored(plan, settings, context) if plan.folder else {}
    if plan.progress:
        start.progress = resume.stored_progress(stored)
    _set_length(start)
    # before the model, which takes minutes to build, and before the folder of a run that will not be
    datasets = _datasets(start, task)
    if not settings.train.eval_only:
        save.check_save_folder(settings.checkpoint, context)
    weight = None if settings.train.loss_normalization == "micro-batch" else GlobalWeight(context)
    model = build_model(settings, context, start.streams, plan, weight)
    resume.check_trained(plan, stored, settings, context, model)
    parameters = bitfit.parameter_report(model, context)
    start.say(bitfit.format_report(parameters))
    engine, schedule = build_engine(model, settings, context, start.train_iters, start.batch_sizes.size(0))
    report = RunReport(engine, settings, context)
    start.say(report.at_start())
    run = Run(**vars(start), engine=engine, schedule=schedule, report=report, weight=weight,
              replicas=Replicas(engine, context, settings, start.writer), to_batch=task.batch(settings, tokenizer))
    if plan.folder:
        run.progress = resume.resume(engine, plan, stored, run.streams, settings, context)
        run.say_last(log_lines.loaded_line(plan.folder, run.progress.iteration))
        if plan.resume and plan.progress:
            run.last_saved = run.progress.iteration
    run.replicas.start(run.progress.iteration)
    run.writer.log_restart(run.progress.iteration, context.world_size)
    engine.set_batch_fn(run.to_batch)
    valid = {name: _rows(run, dataset, valid=True, groups=len(datasets.valid))
             for name, dataset in datasets.valid.items()}
    stop = None
    if settings.train.eval_iters and not valid:
        run.say("no validation data: nothing is evaluated")
    run.say(log_lines.datetime_line("before the start of training step"))
    if settings.train.eval_only:
        for name, rows in (valid if settings.train.eval_iters else {}).items():
            evaluate(run, name, rows, f"iteration {run.progress.iteration}")
    else:
        config = settings.checkpoint
        deltas = DeltaSaves(model, settings, context, plan) if config.save and config.save_delta_only else None
        run.saver = save.Saver(settings, context, plan, deltas)
        stop = train(run, run.saver, _rows(run, datasets.train), valid)
        if run.progress.iteration >= run.train_iters and not (stop and stop.exit_code):  # time is short then
            _final_evaluation(run, valid, datasets.test)
    for line in run.report.at_end(parameters):
        run.say_last(line)
    run.writer.close()
    shutdown()
    return stop.exit_code if stop else 0


# --- set-up -----------------------------------------------------------------------------------


def _prepare(settings: Settings, context: ParallelContext, signals: Signals | None) -> Start:
    streams = seed_everything(settings.train.seed, context)
    train_iters = training_iterations(settings.train, context.dp_size)
    start = Start(settings=settings, context=context, streams=streams, train_iters=train_iters,
                  batch_sizes=BatchSizeSchedule(settings.train, context.dp_size), progress=Progress(),
                  stopping=Stopping(settings.train, context, time.monotonic(), signals),
                  writer=TensorBoardWriter(settings.logging, enabled=context.is_last_rank,
                                           data_parallel_size=context.dp_size, seq_length=settings.model.seq_length))
    start.say(log_lines.world_size_line(settings.parallel))
    start.say(format_argument_dump(settings))
    if settings.logging.log_path and context.rank == 0:
        folder = Path(settings.logging.log_path)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"args_{time.strftime('%Y-%m-%dT%H:%M:%S')}.txt", format_argument_dump(settings) + "\n")
    if ignored := accepted_without_effect(settings):
        start.say(f"accepted, no effect here: {', '.join(ignored)}")
    for notice in filter(None, (zero_stage_notice(settings), low_rate_notice(settings.optimizer))):
        start.say(notice)
    start.say(log_lines.training_iterations_line(train_iters))
    start.writer.log_arguments(settings.flags)
    return start


def _with_vocabulary(run: Start) -> Tokenizer:
    """Read the tokenizer, on every rank, and put its vocabulary size into the settings."""
    tokenizer, padded, problem = None, 0, None
    config = run.settings.tokenizer
    try:
        tokenizer = build_tokenizer(config)
        padded = padded_vocab_size(tokenizer.vocab_size, tp=run.context.tp_size, pad_to=config.pad_vocab_size_to,
                                   divisible_by=config.make_vocab_size_divisible_by)
    except (OSError, ValueError, RunError) as error:
        problem = f"tokenizer: {error}"
    agree(run.context, problem)
    assert tokenizer is not None  # or all ranks would have ended just above
    run.say(f"{tokenizer.describe()}\n{log_lines.padded_vocab_line(tokenizer.vocab_size, padded)}")
    model = dataclasses.replace(run.settings.model, vocab_size=tokenizer.vocab_size,
                                padded_vocab_size=padded)
    run.settings = dataclasses.replace(run.settings, model=model)
    return tokenizer


def _set_length(run: Start) -> None:
    """The last iteration of a run that goes on, perhaps with another batch size than before."""
    before, progress = run.train_iters, run.progress
    run.train_iters = training_iterations(run.settings.train, run.context.dp_size, iteration=progress.iteration,
                                          consumed=progress.consumed_train_samples)
    if run.train_iters != before:
        run.say(f"{progress.consumed_train_samples} samples were read in {progress.iteration} iterations, by batches of other "
                f"sizes: the last iteration is {run.train_iters}")
    if progress.iteration >= run.train_iters and not run.settings.train.eval_only:
        run.say(f"nothing is left to train: the checkpoint is of iteration {progress.iteration}, the run ends at {run.train_iters}; "
                "a larger --train-iters or --train-samples goes on")


def samples_wanted(run: Start) -> tuple[int, int, int]:
    """Samples of train, validation (per group) and test that the whole run reads."""
    config = run.settings.train
    size = config.global_batch_size
    left = run.train_iters - run.progress.iteration
    train = config.train_samples or (
        run.progress.consumed_train_samples + left * size if left > 0 else run.train_iters * size)
    evaluations = run.train_iters // config.eval_interval + 1
    return train, evaluations * config.eval_iters * size, config.eval_iters * size


def _datasets(run: Start, task: Task) -> Datasets:
    """Collective: open the datasets where data are read; the other ranks learn their names, and hold None under them.

    Raises SharedRunError on every rank when one of the readers fails or reads other samples than rank 0.
    """
    datasets, problem = Datasets(train=None), None
    if run.context.reads_data:
        wanted = samples_wanted(run)
        try:
            datasets = task.datasets(run.settings, wanted)
        except (OSError, ValueError, RunError) as error:
            problem = str(error)
        except MemoryError as error:
            problem = (f"an index of {', '.join(map(str, wanted))} samples for training, validation and test does not fit into "
                       f"memory ({error}); lower --train-iters, --train-samples or --eval-iters")
    agree(run.context, problem)
    read = (datasets.train is not None, list(datasets.valid), list(datasets.test), datasets.prints())
    everyone = [(run.context.reads_data, read)]
    if run.context.world_size > 1:
        everyone *= run.context.world_size
        dist.all_gather_object(everyone, (run.context.reads_data, read))
    has_train, valid, test, _ = everyone[0][1]  # rank 0 always reads
    check_same_data([theirs[-1] if reads else None for reads, theirs in everyone])
    for name, words in datasets.facts().items():
        run.say(f"{name} data: {words}")
    if not has_train and not run.settings.train.eval_only:
        raise SharedRunError("no training data: the share of --split for training holds no document")
    return Datasets(train=datasets.train, valid={name: datasets.valid.get(name) for name in valid},
                    test={name: datasets.test.get(name) for name in test})


def _rows(run: Run, dataset: Dataset | None, *, valid: bool = False, groups: int = 1, test: bool = False) -> Iterator | None:
    """Rows of this rank's data-parallel share, or None on a middle stage."""
    context, settings = run.context, run.settings
    if not (context.is_first_stage or context.is_last_stage):
        return None
    source = None
    if context.tp_rank == 0:
        assert dataset is not None, "a rank that reads has all datasets of rank 0"
        consumed = 0 if test else run.progress.consumed_train_samples
        if valid:
            consumed = run.progress.consumed_valid_samples // groups
        source = build_loader(dataset, batch_size=settings.train.micro_batch_size,
                              dp_rank=context.dp_rank, dp_size=context.dp_size,
                              consumed_samples=consumed, kind=settings.data.dataloader_type,
                              num_workers=settings.data.valid_num_workers if valid
                              else settings.data.num_workers, seed=settings.train.seed, cycle=valid or test,
                              worker_start=outlive_signals if settings.train.exit_signal_handler else end_with_rank)
    return BroadcastRows(source, context, settings.train.micro_batch_size, settings.model.seq_length + 1)


# --- training ---------------------------------------------------------------------------------


def train(run: Run, saver: save.Saver, rows: Iterator | None, valid: dict[str, Iterator | None]) -> Stop | None:
    """Iterate until the run's length, or until something asks it to stop, which is returned."""
    settings, progress = run.settings, run.progress
    line, gradients, owed = _Line(run), GradientWatch(run.engine, run.context), False
    stop = run.stopping.signalled(run.engine.device)
    while not stop and progress.iteration < run.train_iters:
        size = run.batch_sizes.size(progress.consumed_train_samples)
        if any(first <= progress.iteration + 1 <= last for first, last in settings.train.skip_train_iteration_range):
            _discard(run, rows, size)
        else:
            loss, skipped = _step(run, rows, size)
            line.add(loss, skipped, size)
            if skipped:
                run.say(gradients.told(progress.iteration, loss))
            if problem := run.stopping.count(progress.iteration, skipped=skipped):
                _give_up(run, problem)
        saver.poll()
        run.replicas.after(progress.iteration)
        paused = time.monotonic()
        if valid and settings.train.eval_iters and progress.iteration % settings.train.eval_interval == 0:
            for name, group_rows in valid.items():
                evaluate(run, name, group_rows, f"iteration {progress.iteration}")
        interval = settings.checkpoint.save_interval
        if settings.checkpoint.save and interval and (owed or progress.iteration % interval == 0):
            owed = run.stopping.holds_saves_back
            if not owed:
                _save(run, saver)
        line.leave_out(time.monotonic() - paused)
        stop = run.stopping.after(progress.iteration, run.engine.device)
    if stop:
        run.say(f"exiting program at iteration {progress.iteration}: {stop.reason}")
    if settings.checkpoint.save and run.last_saved != progress.iteration and progress.iteration:
        _save(run, saver)
    saver.finish()
    if not stop and (stop := run.stopping.signalled(run.engine.device)):
        run.say(f"exiting program at iteration {progress.iteration}: {stop.reason}")
    run.stopping.close(stop)
    return stop


def _give_up(run: Run, problem: str) -> NoReturn:
    """Collective: end all ranks with this sentence, once a tag that is under way is complete."""
    if run.saver:
        run.saver.finish()
    raise SharedRunError(problem)


def _step(run: Run, rows: Iterator | None, samples: int) -> tuple[float, bool]:
    """One update on ``samples`` rows. Returns the mean loss, and whether the update was skipped."""
    engine = run.engine
    run.timers.start("train-batch")
    engine.set_train_batch_size(samples)
    skipped_before = engine.skipped_steps
    try:
        with run.report.step(samples):
            loss = float(engine.train_batch(_weighed(run, rows, samples)))
    except Exception as error:
        if "loss scale already at minimum" in str(error):  # DeepSpeed's only sign of it
            _give_up(run, f"iteration {run.progress.iteration + 1}: gradients overflow even at the lowest loss "
                          "scale (--min-loss-scale); train with --bf16, or with a lower --lr")
        raise
    skipped = engine.skipped_steps > skipped_before
    run.progress.skipped_iterations += skipped
    _count(run, samples)
    run.timers.stop("train-batch")
    return loss, skipped


def _weighed(run: Run, rows: Iterator | None, samples: int) -> Iterator | None:
    """``rows``, or where the loss is divided over the global batch, those of it, read ahead to weigh them."""
    if run.weight is None or rows is None:
        return rows
    with run.report.reading():
        batch = [next(rows) for _ in range(samples // (run.settings.train.micro_batch_size * run.context.dp_size))]
        if run.context.is_last_stage:
            run.weight.set([run.to_batch(micro_batch)[1][1] for micro_batch in batch])
    return iter(batch)


class _Line:
    """What the next training line will say, and when it is due."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.window, self.iterations = LossWindow(), 0
        self.start = self.last = time.monotonic()

    def add(self, loss: float, skipped: bool, size: int) -> None:
        """Count one iteration; print and draw what is due. Collective under --log-params-norm."""
        run, config = self.run, self.run.settings.logging
        now, iteration = time.monotonic(), run.progress.iteration
        self.window.add(loss, skipped=skipped)
        self.iterations += 1
        line_due = iteration % config.log_interval == 0
        curves_due = config.tensorboard_dir is not None and iteration % config.tensorboard_log_interval == 0
        weights = None
        if config.log_params_norm and (line_due or curves_due):
            weights = params_norm(run.engine.module, run.context)
        times = run.timers.drain() if line_due else {}
        if curves_due:
            step = LossWindow()
            step.add(loss, skipped=skipped)
            run.writer.log_training(_facts(run, step, size, now - self.last, weights),
                                    gigaflos=run.progress.gigaflos_no_embeds, timers=times,
                                    tflops_needed=run.report.tflops_needed(size, now - self.last))
        if line_due:
            seconds = (now - self.start) / self.iterations
            run.say_last(log_lines.training_line(_facts(run, self.window, size, seconds, weights)))
            run.say_last(log_lines.timers_line({name: 1000 * each for name, each in times.items()}))
            run.writer.log_shares(run.report.shares(), iteration)
            self.window, self.iterations, self.start = LossWindow(), 0, now
        self.last = now

    def leave_out(self, seconds: float) -> None:
        """A line times iterations, not the evaluations and saves between them."""
        self.start += seconds
        self.last += seconds


def _count(run: Run, samples: int) -> None:
    progress, model = run.progress, run.settings.model
    progress.iteration += 1
    progress.consumed_train_samples += samples
    progress.consumed_train_tokens += samples * model.seq_length
    progress.gigaflos_no_embeds += gigaflos(model, samples)


def _discard(run: Run, rows: Iterator | None, samples: int) -> None:
    """Throw one iteration's data away: counters move as if it had been trained, weights do not."""
    if rows is not None:
        for _ in range(samples // (run.settings.train.micro_batch_size * run.context.dp_size)):
            next(rows)
    run.schedule.step(samples)
    _count(run, samples)
    run.say(f"iteration {run.progress.iteration}: data discarded (--skip-train-iteration-range)")


def _save(run: Run, saver: save.Saver) -> None:
    run.timers.start("save-checkpoint")
    saver.save(run.engine, run.progress, run.streams)
    run.timers.stop("save-checkpoint")
    run.last_saved = run.progress.iteration


def _facts(run: Run, window: LossWindow, size: int, seconds: float,
           weights_norm: float | None) -> log_lines.TrainingFacts:
    """Figures of the iterations in ``window``, each of which took ``seconds``."""
    settings, progress, norm = run.settings, run.progress, run.engine.get_global_grad_norm()
    scale = run.engine.optimizer.cur_scale if settings.model.params_dtype == "fp16" else None
    return log_lines.TrainingFacts(
        iteration=progress.iteration, train_iters=run.train_iters,
        consumed_samples=progress.consumed_train_samples,
        consumed_tokens=progress.consumed_train_tokens, seconds_per_iteration=seconds,
        learning_rate=run.schedule.get_lr(), global_batch_size=size, loss=window.mean,
        loss_scale=scale, grad_norm=None if norm is None else float(norm), num_zeros=0.0,
        params_norm=weights_norm, skipped_iterations=window.skipped, nan_iterations=window.nan,
        samples_per_second=size / seconds,
        tflops=tflops_reported(settings.model, size, seconds, run.context.world_size))


# --- evaluation -------------------------------------------------------------------------------


def evaluate(run: Run, name: str, rows: Iterator | None, prefix: str) -> float:
    """Mean loss of ``eval_iters`` global batches of one validation group; logs it."""
    config = run.settings.train
    run.timers.start("evaluation")
    micro_batches = config.global_batch_size // (config.micro_batch_size * run.context.dp_size)
    total = 0.0
    for _ in range(config.eval_iters):
        batch = _weighed(run, rows, config.global_batch_size)
        total += float(run.engine.eval_batch(batch, num_micro_batches=micro_batches))
        run.progress.consumed_valid_samples += config.global_batch_size
    loss = total / config.eval_iters
    run.timers.stop("evaluation")
    for line in log_lines.evaluation_lines(name, prefix, loss):
        run.say_last(line)
    run.writer.log_validation(name, loss, log_lines.perplexity(loss), iteration=run.progress.iteration,
                              samples=run.progress.consumed_train_samples,
                              tokens=run.progress.consumed_train_tokens,
                              gigaflos=run.progress.gigaflos_no_embeds)
    return loss


def _final_evaluation(run: Run, valid: Mapping[str, Iterator | None], test: Mapping[str, Dataset | None]) -> None:
    if not run.settings.train.eval_iters:
        return
    for name, rows in valid.items():
        evaluate(run, name, rows, "the end of training for val data")
    for name, dataset in test.items():
        evaluate(run, name, _rows(run, dataset, test=True), "the end of training for test data")
