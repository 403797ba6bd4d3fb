"""Gradients that data-parallel ranks reduce in one step: bytes and time, full against BitFit.

    python benchmarks/reduction.py
    python benchmarks/reduction.py --ranks 2 --hidden 1024
    python benchmarks/reduction.py --quick

Starts 2 and then 4 ranks on this machine (gloo on CPUs, the launcher's usual back end on enough
accelerators) and takes DeepSpeed's real steps, full and BitFit in turn. Counted is what each rank hands to
collectives while the engine reduces gradients, and in the optimizer step (gradient norm, and updated parameters,
counted as the whole that is gathered); timed is the reduction alone, from a barrier to its end. The benchmark ends with an error unless the ratio of
reduced bytes equals that of trained elements exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections import Counter
from fractions import Fraction

import common
from common import Shape

VARIANTS = ("full", "BitFit")
#: collectives of torch.distributed that carry gradients or parameters
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "reduce_scatter", "all_gather",
               "all_gather_into_tensor")
JOIN_SECONDS = 900


class CollectiveBytes:
    """Counts the bytes of the first tensor of each collective called inside ``counting(label)``.

    Enter ``installed()`` before DeepSpeed starts: its back end looks some functions up once.
    """

    def __init__(self) -> None:
        self.total: Counter = Counter()
        self._label: tuple | None = None

    @contextlib.contextmanager
    def installed(self):
        """Wrap the collectives of torch.distributed."""
        import torch.distributed as dist

        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        try:
            for name, call in originals.items():
                setattr(dist, name, self._wrap(call))
            yield
        finally:
            for name, call in originals.items():
                setattr(dist, name, call)

    @contextlib.contextmanager
    def counting(self, *label):
        """What is called inside counts under ``label``."""
        self._label = label
        try:
            yield
        finally:
            self._label = None

    def _wrap(self, call):
        import torch

        @functools.wraps(call)
        def wrapped(*arguments, **named):
            if self._label is not None:
                values = [*arguments, *named.values()]
                values += [part for value in values if isinstance(value, list) for part in value]
                first = next(value for value in values if torch.is_tensor(value))
                self.total[self._label] += first.numel() * first.element_size()
            return call(*arguments, **named)

        return wrapped


def meter(engine, name: str, count: CollectiveBytes) -> list[float]:
    """Count what ``engine`` reduces and gathers from now on; seconds of each reduction, as they come."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    seconds: list[float] = []

    def timed(reduce):
        def call(*arguments, **named):
            get_accelerator().synchronize()
            dist.barrier()
            start = time.perf_counter()
            with count.counting(name, "reduced"):
                result = reduce(*arguments, **named)
            get_accelerator().synchronize()
            seconds.append(time.perf_counter() - start)
            return result
        return call

    def counted(step):
        def call(*arguments, **named):
            with count.counting(name, "step"):
                return step(*arguments, **named)
        return call

    # one of the two is what the pipeline engine calls: the second for bf16
    for method in ("allreduce_gradients", "_bf16_reduce_grads"):
        setattr(engine, method, timed(getattr(engine, method)))
    engine.optimizer.step = counted(engine.optimizer.step)
    return seconds


def measure(shape: Shape, repetitions: int, context, count: CollectiveBytes) -> dict:
    """Collective: per variant trained elements, bytes per step and seconds of each reduction on this rank."""
    from our_trainer import build_trainer

    from megatron.bitfit import trainable

    trainers = {name: build_trainer(shape, bitfit=name == "BitFit", context=context) for name in VARIANTS}
    seconds = {name: meter(trainer.engine, name, count) for name, trainer in trainers.items()}
    common.interleave({name: trainer.step for name, trainer in trainers.items()}, repetitions, warmup=1)
    result = {}
    for name, trainer in trainers.items():
        steps = len(seconds[name])
        result[name] = {"trained": sum(param.numel() for _, param in trainable(trainer.engine.module)),
                        "reduced": count.total[name, "reduced"] // steps, "step": count.total[name, "step"] // steps,
                        "seconds": seconds[name][-repetitions:]}
    return result


def check_exact(seen: dict) -> None:
    """Raises SystemExit unless reduced bytes stand to each other as trained elements do."""
    bytes_ratio = Fraction(seen["BitFit"]["reduced"], seen["full"]["reduced"])
    trained_ratio = Fraction(seen["BitFit"]["trained"], seen["full"]["trained"])
    if bytes_ratio != trained_ratio:
        raise SystemExit(f"reduced bytes {seen['BitFit']['reduced']:,} of {seen['full']['reduced']:,} are not in the "
                         f"ratio of trained elements {seen['BitFit']['trained']:,} of {seen['full']['trained']:,}")


def rank_main(rank: int, shape: Shape, repetitions: int, threads: int, environment: dict, answers) -> None:
    """Body of one started rank; rank 0 puts what it saw into ``answers``."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    common.use_threads(threads)
    from our_trainer import start_world

    from megatron.initialize import shutdown

    count = CollectiveBytes()
    with count.installed():
        context = start_world(rank, int(environment["WORLD_SIZE"]))
        seen = measure(shape, repetitions, context, count)
    if rank == 0:
        answers.put(seen)
    shutdown()


def start_ranks(count: int, shape: Shape, repetitions: int, threads: int) -> dict:
    """Run ``count`` ranks to their end; what rank 0 saw. Raises SystemExit when one of them fails."""
    from multiprocessing import connection, get_context

    from deepspeed.accelerator import get_accelerator

    with socket.socket() as probe:  # a port nobody listens on
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if get_accelerator().device_name() == "cpu" or get_accelerator().device_count() < count:
        environment["DS_ACCELERATOR"] = "cpu"
    spawn = get_context("spawn")
    answers = spawn.Queue()
    ranks = [spawn.Process(target=rank_main, daemon=True,
                           args=(rank, shape, repetitions, max(1, threads // count), environment, answers))
             for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        running, deadline, seen = {process.sentinel: process for process in ranks}, time.monotonic() + JOIN_SECONDS, None
        while running:
            if seen is None and not answers.empty():
                seen = answers.get()
            ready = connection.wait(list(running), timeout=1.0)
            ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
            failed = [process.exitcode for process in ended if process.exitcode]
            if failed or time.monotonic() > deadline:
                why = f"with exit code {failed[0]}" if failed else f"not within {JOIN_SECONDS} s"
                raise SystemExit(f"a rank of {count} ended {why}; its messages are above")
        return seen if seen is not None else answers.get(timeout=10)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def command_line():
    made = common.parser(__doc__, repetitions=9)
    common.shape_options(made, Shape(layers=8, hidden=512, heads=8, vocabulary=8192, length=32, batch=1),
                         Shape(layers=2, hidden=64, heads=4, vocabulary=256, length=16, batch=1))
    made.add_argument("--ranks", type=common.positive, nargs="+", metavar="N",
                      help="data-parallel ranks (default 2 4, with --quick 2)")
    return made


def main(arguments=None) -> None:
    made = command_line()
    options = common.parse(made, arguments)
    shape = common.shape_of(options)
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    if min(options.ranks) < 2:
        made.error("--ranks 1: a single rank reduces nothing; give 2 or more")
    rows, figures = [], {}
    for count in options.ranks:
        common.progress(f"{count} ranks: {shape.text()}")
        seen = start_ranks(count, shape, options.repetitions, options.threads)
        check_exact(seen)
        figures[count] = {**seen, "shape": dataclasses.asdict(shape)}
        for name in VARIANTS:
            mine, full = seen[name], seen["full"]
            ratio = common.spread(common.ratios(mine["seconds"], full["seconds"]))
            rows.append([name, str(count), f"{mine['trained']:,}", f"{mine['reduced']:,}",
                         f"{mine['reduced'] / full['reduced']:.6f}", f"{mine['step']:,}",
                         common.spread([1000 * value for value in mine["seconds"]]).text(2), ratio.text(4)])
    header = ["variant", "ranks", "trained elements", "reduced bytes", "bytes / full", "bytes of optimizer step",
              "reduction ms", "time / full"]
    common.report(options, f"Data-parallel reduction of one step, per rank, {shape.text()}: median [min-max] of "
                  f"{options.repetitions} interleaved repetitions", common.table(header, rows), figures)


if __name__ == "__main__":
    main()
