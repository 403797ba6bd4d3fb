"""Time of a full and of a BitFit training step, beside the bound that counting operations gives.

    python benchmarks/full_against_bitfit.py
    python benchmarks/full_against_bitfit.py --hidden 1024 2048 --dtypes fp32
    python benchmarks/full_against_bitfit.py --quick

Each row is one shape: both steps are DeepSpeed's real one (TP = PP = 1), interleaved in one process.

  step ratio     BitFit's step time / full's, median [min-max] of the repetitions
  compute ratio  the same without the optimizer (clipping, Adam), which is bound by memory, not by products
  bound          operations_needed(bitfit) / operations_needed(full) of megatron/flops.py: matrix products only
  to bound       how far the median compute ratio lies above the bound

A compute-bound model comes within a few percent of the bound; small ones do not, since what is not a
matrix product (LayerNorm, GELU, softmax, the loss) is the same in both steps. Larger hidden sizes have
fewer layers and tokens, so that a step stays within seconds on two cores.
"""

from __future__ import annotations

import gc
import time

import common
from common import Shape

#: hidden size -> shape
SHAPES = {
    256: Shape(layers=8, hidden=256, heads=4, vocabulary=2048, length=512, batch=2),
    512: Shape(layers=4, hidden=512, heads=8, vocabulary=2048, length=512, batch=2),
    1024: Shape(layers=3, hidden=1024, heads=16, vocabulary=2048, length=256, batch=4),
    2048: Shape(layers=1, hidden=2048, heads=32, vocabulary=2048, length=256, batch=4),
}
QUICK = (Shape(layers=2, hidden=64, heads=4, vocabulary=256, length=64, batch=2),)


def optimizer_clock(trainer) -> list[float]:
    """Seconds of each later optimizer step of ``trainer``, as they come."""
    from deepspeed.accelerator import get_accelerator

    optimizer, spent = trainer.engine.optimizer, []
    original = optimizer.step

    def timed(*arguments, **named):
        get_accelerator().synchronize()
        start = time.perf_counter()
        result = original(*arguments, **named)
        get_accelerator().synchronize()
        spent.append(time.perf_counter() - start)
        return result

    optimizer.step = timed
    return spent


def measure(shape: Shape, repetitions: int) -> dict:
    """Step and optimizer seconds of both variants, and the bound."""
    from our_trainer import build_trainer, start_world

    from megatron.flops import operations_needed

    context = start_world()
    trainers = {name: build_trainer(shape, bitfit=name == "BitFit", context=context) for name in ("full", "BitFit")}
    clocks = {name: optimizer_clock(trainer) for name, trainer in trainers.items()}
    steps = common.interleave({name: common.synchronized(trainer.step) for name, trainer in trainers.items()},
                              repetitions, warmup=2)
    model = trainers["full"].settings.model
    needed = {name: operations_needed(model, shape.batch, bitfit=name == "BitFit").total for name in trainers}
    optimizer = {name: clock[-repetitions:] for name, clock in clocks.items()}
    compute = {name: [step - part for step, part in zip(steps[name], optimizer[name], strict=True)] for name in steps}
    return {"steps": steps, "optimizer": optimizer, "compute": compute, "operations": needed,
            "step_ratio": common.ratios(steps["BitFit"], steps["full"]),
            "compute_ratio": common.ratios(compute["BitFit"], compute["full"]),
            "bound": needed["BitFit"] / needed["full"]}


def row(shape: Shape, seen: dict) -> list[str]:
    """One line of the table."""
    step, compute = common.spread(seen["step_ratio"]), common.spread(seen["compute_ratio"])
    milliseconds = {name: f"{1000 * common.spread(values).median:,.0f}" for name, values in seen["steps"].items()}
    return [str(shape.hidden), str(shape.layers), f"{shape.batch} x {shape.length}", shape.dtype,
            "on" if shape.checkpointing else "off", milliseconds["full"], milliseconds["BitFit"], step.text(3),
            compute.text(3), f"{seen['bound']:.3f}", f"{100 * (compute.median / seen['bound'] - 1):+.1f} %"]


def command_line():
    made = common.parser(__doc__, repetitions=7)
    made.add_argument("--hidden", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES), metavar="H",
                      help=f"hidden sizes, of {', '.join(map(str, SHAPES))} (default all; not with --quick)")
    made.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], metavar="DTYPE",
                      help="fp32, bf16 (default both)")
    made.add_argument("--checkpointing", choices=("off", "on", "both"), default="both",
                      help="recomputation of each block in backward (default %(default)s)")
    return made


def main(arguments=None) -> None:
    import dataclasses

    options = common.parse(command_line(), arguments)
    shapes = QUICK if options.quick else [SHAPES[hidden] for hidden in options.hidden]
    recompute = {"off": (False,), "on": (True,), "both": (False, True)}[options.checkpointing]
    rows, figures = [], []
    for base in shapes:
        for dtype in options.dtypes:
            for checkpointing in recompute:
                shape = dataclasses.replace(base, dtype=dtype, checkpointing=checkpointing)
                common.progress(f"{shape.text()}, checkpointing {'on' if checkpointing else 'off'}")
                seen = measure(shape, options.repetitions)
                gc.collect()  # engines hold each other in cycles
                rows.append(row(shape, seen))
                figures.append({"shape": dataclasses.asdict(shape), **seen})
    header = ["hidden", "layers", "batch", "dtype", "checkpointing", "full ms", "BitFit ms", "step ratio",
              "compute ratio", "bound", "to bound"]
    common.report(options, f"A BitFit step against a full one: medians [min-max] of {options.repetitions} "
                  "interleaved repetitions", common.table(header, rows, text_columns=0), figures)


if __name__ == "__main__":
    main()
