"""Size of the global batch over a run, and the number of iterations that follows from it."""

from __future__ import annotations

from megatron.config import TrainConfig
from megatron.errors import SharedRunError


class ScheduleError(SharedRunError, ValueError):
    """A schedule that the flags (or a checkpoint) make impossible; the same on every rank."""


class BatchSizeSchedule:
    """Global batch size in samples as a function of the samples consumed so far.

    Without ``--rampup-batch-size`` it is constant. With (start, increment, samples) it
    grows from start to ``--global-batch-size`` in equal increments, each held for the
    same number of samples.

    Raises ScheduleError (a ValueError) when a size that the ramp visits does not divide
    by micro batch x data-parallel size, when the increments do not end at the global
    batch size, or when a ramp meets a run counted in iterations.
    """

    def __init__(self, train: TrainConfig, data_parallel_size: int):
        self.final = train.global_batch_size
        self.per_step = train.micro_batch_size * data_parallel_size
        self.start, self.increment, self.ramp_samples = self.final, 0, 0
        if train.rampup_batch_size is not None:
            self._check_ramp(train, *train.rampup_batch_size)
            self.start, self.increment, self.ramp_samples = train.rampup_batch_size
        for flag, size in (("--global-batch-size", self.final), ("the start of --rampup-batch-size", self.start),
                           ("the increment of --rampup-batch-size", self.increment)):
            if size % self.per_step:
                raise ScheduleError(
                    f"{flag} is {size}, which does not divide by --micro-batch-size {train.micro_batch_size} x "
                    f"data-parallel size {data_parallel_size} = {self.per_step}")

    @staticmethod
    def _check_ramp(train: TrainConfig, start: int, increment: int, samples: int) -> None:
        given = f"--rampup-batch-size {start} {increment} {samples}"
        if train.train_samples is None:
            raise ScheduleError(f"{given} needs a run counted in samples: give --train-samples, not --train-iters")
        if start < 1 or increment < 1 or samples < 0:
            raise ScheduleError(f"{given}: start and increment must be positive and samples not negative")
        if start > train.global_batch_size or (train.global_batch_size - start) % increment:
            raise ScheduleError(f"{given}: increments of {increment} from {start} never reach "
                                f"--global-batch-size {train.global_batch_size}")

    def size(self, consumed_samples: int) -> int:
        """Samples of the next global batch, ``consumed_samples`` having been trained on."""
        if consumed_samples > self.ramp_samples or self.start == self.final or not self.ramp_samples:
            return self.final
        # floats on purpose: where a rounded quotient decides, old runs took this very branch
        samples_per_increment = self.ramp_samples / ((self.final - self.start) / self.increment)
        return min(self.final, self.start + int(consumed_samples / samples_per_increment) * self.increment)

    def micro_batches(self, consumed_samples: int) -> int:
        """Gradient accumulation steps of the next global batch."""
        return self.size(consumed_samples) // self.per_step


def training_iterations(train: TrainConfig, data_parallel_size: int, *, iteration: int = 0, consumed: int = 0) -> int:
    """Iterations of the whole run; in samples mode an incomplete last batch is dropped.

    ``iteration`` of them are over and took ``consumed`` samples, at whatever batch sizes.

    Raises ScheduleError (a ValueError) when ``--train-samples`` is less than one batch,
    unless nothing is trained anyway (``--eval-only``).
    """
    schedule = BatchSizeSchedule(train, data_parallel_size)
    if train.train_samples is None:
        return train.train_iters or 0
    iterations = iteration
    if schedule.start != schedule.final:
        while consumed <= schedule.ramp_samples and consumed + schedule.size(consumed) <= train.train_samples:
            consumed += schedule.size(consumed)
            iterations += 1
    iterations += max(0, train.train_samples - consumed) // schedule.final
    if not iterations and not train.eval_only:
        raise ScheduleError(f"--train-samples {train.train_samples} is less than one global batch of "
                            f"{schedule.size(0)} samples: nothing would be trained")
    return iterations
