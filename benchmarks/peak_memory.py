"""Peak memory of a training step, full against BitFit, beside the bytes of the tensors it must hold.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py --hidden 2048 --layers 2 --heads 32
    python benchmarks/peak_memory.py --quick

Each measurement is a fresh process (TP = PP = 1, DeepSpeed's real step), the variants in turn. On a CPU it is
the kernel's high-water mark of resident memory (VmHWM) during the third step, minus what the process held
after its imports and two steps of a tiny model; on an accelerator max_memory_allocated of that step. Processes on CPUs hold freed memory
back, and libraries have buffers of their own, so that column lies above the prediction.

The prediction adds up the tensors of such a step at once: parameters, gradients of what trains, fp32 copies and
moments of the optimizer, and what autograd keeps for backward (megatron/memory.py). Not in it: what operations
use for themselves while they run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import common
from common import Shape

MIB = 2**20
STEPS_BEFORE = 2
TIMEOUT = 900


def status_bytes(field: str) -> int:
    """A line of /proc/self/status, VmRSS or VmHWM, in bytes; SystemExit where the kernel has none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status shows no {field}: on a CPU this benchmark needs Linux")


def forget_peak() -> None:
    """Start the high-water mark anew where the kernel allows it (Linux: 5 into clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        common.progress("note: the kernel does not reset VmHWM; the peak covers building the model as well")


def measure(shape: Shape, *, bitfit: bool) -> dict:
    """In a fresh process: peak bytes of one step, and the bytes of its tensors by kind."""
    import our_trainer
    from deepspeed.accelerator import get_accelerator

    from megatron.engine import optimizer_facts
    from megatron.memory import SavedBytes

    context = our_trainer.start_world()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    # libraries load parts of themselves in the first steps; a tiny model makes them do it now
    tiny = dataclasses.replace(shape, layers=1, hidden=32, heads=2, vocabulary=32, length=16, batch=1)
    trainer = our_trainer.build_trainer(tiny, bitfit=bitfit, context=context)
    for _ in range(STEPS_BEFORE):
        trainer.step()
    baseline = status_bytes("VmRSS") if on_cpu else 0
    trainer = our_trainer.build_trainer(shape, bitfit=bitfit, context=context)
    for _ in range(STEPS_BEFORE):
        trainer.step()
    if on_cpu:
        forget_peak()
    else:
        accelerator.reset_peak_memory_stats()
    trainer.step()
    accelerator.synchronize()
    peak = status_bytes("VmHWM") - baseline if on_cpu else accelerator.max_memory_allocated()
    params = list(trainer.engine.module.parameters())
    facts = optimizer_facts(trainer.engine, trainer.settings)
    with SavedBytes(exclude=params) as kept:
        trainer.step()
    held = {"parameters": sum(param.numel() * param.element_size() for param in params),
            "gradients": facts.gradient_bytes_per_step, "optimizer": facts.state_bytes, "activations": kept.peak}
    return {"peak": peak, "predicted": sum(held.values()), **held}


def in_fresh_process(shape: Shape, bitfit: bool, threads: int) -> dict:
    """``measure`` in a new interpreter. Raises SystemExit with its last words if it fails."""
    job = json.dumps({"shape": dataclasses.asdict(shape), "bitfit": bitfit, "threads": threads})
    done = subprocess.run([sys.executable, __file__, "--job", job], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise SystemExit(f"the measuring process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def command_line():
    made = common.parser(__doc__, repetitions=3, quick_repetitions=1)
    common.shape_options(made, Shape(layers=8, hidden=1024, heads=16, vocabulary=8192, length=512, batch=2),
                         Shape(layers=2, hidden=64, heads=4, vocabulary=256, length=64, batch=2))
    made.add_argument("--checkpointing", choices=("off", "on", "both"), default="both",
                      help="recomputation of each block in backward (default %(default)s)")
    return made


def main(arguments=None) -> None:
    options = common.parse(command_line(), arguments)
    shape = common.shape_of(options)
    recompute = {"off": (False,), "on": (True,), "both": (False, True)}[options.checkpointing]
    rows, figures = [], []
    for checkpointing in recompute:
        chosen = dataclasses.replace(shape, checkpointing=checkpointing)
        seen: dict[str, list[dict]] = {"full": [], "BitFit": []}
        for repetition in range(options.repetitions):
            for name in seen if repetition % 2 == 0 else reversed(seen):
                common.progress(f"{name}, checkpointing {'on' if checkpointing else 'off'}, "
                                f"repetition {repetition + 1} of {options.repetitions}")
                seen[name].append(in_fresh_process(chosen, name == "BitFit", options.threads))
        peaks = {name: [one["peak"] for one in results] for name, results in seen.items()}
        for name, results in seen.items():
            first, ratio = results[0], common.spread(common.ratios(peaks[name], peaks["full"]))
            kinds = (first[kind] / MIB for kind in ("parameters", "gradients", "optimizer", "activations", "predicted"))
            rows.append([name, "on" if checkpointing else "off",
                         common.spread([peak / MIB for peak in peaks[name]]).text(1), ratio.text(3),
                         *(f"{amount:,.1f}" for amount in kinds), f"{first['predicted'] / seen['full'][0]['predicted']:.3f}"])
        figures.append({"shape": dataclasses.asdict(chosen), **seen})
    header = ["variant", "checkpointing", "peak MiB", "peak / full", "parameters", "gradients", "optimizer",
              "activations", "predicted MiB", "predicted / full"]
    common.report(options, f"Peak memory of a step, {shape.text()}: median [min-max] of {options.repetitions} "
                  "interleaved processes", common.table(header, rows, text_columns=2), figures)


def run_job(text: str) -> None:
    """One measurement for ``in_fresh_process``: JSON in, JSON out as the last line."""
    job = json.loads(text)
    common.use_threads(job["threads"])
    print(json.dumps(measure(Shape(**job["shape"]), bitfit=job["bitfit"])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_job(sys.argv[2])
    else:
        main()
