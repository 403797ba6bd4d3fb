"""Which samples each data-parallel rank reads, micro-batch by micro-batch.

Both samplers are iterables of lists of ``batch_size`` sample numbers, so a torch
DataLoader takes them as ``batch_sampler``. All ranks yield the same number of
batches; what does not fill ``batch_size * dp_size`` samples is left out of each
pass. ``consumed_samples`` counts the samples that all ranks together have read
since the run began, over all passes, and is the whole state of a sampler.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class BatchSampler:
    """Common part: sizes, checks, and the way from consumed samples to (pass, position).

    With ``cycle`` passes follow one another for ever, else iteration ends with
    the pass it began in. Raises ValueError when a pass would be empty.
    """

    def __init__(self, total_samples: int, *, batch_size: int, dp_rank: int, dp_size: int,
                 consumed_samples: int = 0, cycle: bool = False) -> None:
        if batch_size < 1 or not 0 <= dp_rank < dp_size or consumed_samples < 0:
            raise ValueError(f"batch size {batch_size}, data-parallel rank {dp_rank} of {dp_size} and "
                             f"{consumed_samples} consumed samples do not make a sampler")
        self.total_samples, self.batch_size, self.cycle = total_samples, batch_size, cycle
        self.dp_rank, self.dp_size, self.consumed_samples = dp_rank, dp_size, consumed_samples
        self.chunk = batch_size * dp_size
        #: samples of one pass over all ranks
        self.pass_samples = total_samples // self.chunk * self.chunk
        if not self.pass_samples:
            raise ValueError(f"the dataset has {total_samples} samples, fewer than one step of micro batch "
                             f"{batch_size} x data parallel {dp_size} = {self.chunk}")

    def _place(self) -> tuple[int, int]:
        # Consumed samples that another batch size left between two chunks are rounded up:
        # less than a chunk is passed over, and a later resume finds the same place.
        chunks = -(-self.consumed_samples // self.chunk)
        done, chunk = divmod(chunks, self.pass_samples // self.chunk)
        return done, chunk * self.chunk

    def _one_pass(self, number: int, start: int) -> Iterator[list[int]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[int]]:
        number, start = self._place()
        yield from self._one_pass(number, start)
        while self.cycle:
            number += 1
            yield from self._one_pass(number, 0)


class SequentialSampler(BatchSampler):
    """Samples in order (``--dataloader-type single``): rank r takes the r-th batch of each chunk.

    Without ``cycle`` it begins at ``consumed_samples`` exactly and ends with the
    dataset; ValueError when nothing is left.
    """

    def __init__(self, total_samples: int, **kwargs) -> None:
        super().__init__(total_samples, **kwargs)
        if not self.cycle and self.consumed_samples >= total_samples:
            raise ValueError(f"{self.consumed_samples} samples are consumed already, but the dataset has "
                             f"only {total_samples}")

    def _place(self) -> tuple[int, int]:
        return super()._place() if self.cycle else (0, self.consumed_samples)

    def _one_pass(self, number: int, start: int) -> Iterator[list[int]]:
        for chunk in range(start, self.total_samples - self.chunk + 1, self.chunk):
            first = chunk + self.dp_rank * self.batch_size
            yield list(range(first, first + self.batch_size))


class CyclicSampler(BatchSampler):
    """Each rank owns a bucket of consecutive samples and visits it in a new random order every pass.

    The order is ``torch.randperm`` seeded with the number of the pass, so it
    depends on nothing else and resumes anywhere.
    """

    def _one_pass(self, number: int, start: int) -> Iterator[list[int]]:
        bucket = self.pass_samples // self.dp_size
        order = torch.randperm(bucket, generator=torch.Generator().manual_seed(number))
        own = order + self.dp_rank * bucket
        for first in range(start // self.dp_size, bucket, self.batch_size):
            yield own[first:first + self.batch_size].tolist()


SAMPLERS = {"single": SequentialSampler, "cyclic": CyclicSampler}


def build_sampler(kind: str, total_samples: int, **kwargs) -> BatchSampler:
    """The sampler for ``--dataloader-type`` single or cyclic; see BatchSampler for the arguments."""
    if kind not in SAMPLERS:
        raise ValueError(f"--dataloader-type {kind!r} is not one of {', '.join(SAMPLERS)}")
    return SAMPLERS[kind](total_samples, **kwargs)
