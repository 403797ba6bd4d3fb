"""Saving biases alone (--save-delta-only) against saving the whole model: time and bytes of one save.

    python benchmarks/delta_save.py
    python benchmarks/delta_save.py --hidden 2048 --dtype bf16
    python benchmarks/delta_save.py --quick --folder /mnt/disk

One process trains a BitFit model for a step and saves it both ways in turn, with all that a run does: files are
synchronised with the disk, a manifest is written, the tag renamed. Columns: bytes of all files of a tag; of these, what
holds the weights (layer files, or the delta) and the optimizer; seconds per save. The fingerprint of the frozen
tensors is taken once per run, at the start. The benchmark ends with an error unless the delta holds exactly the bytes of
what trains, and less than 64 KiB around them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tempfile
import time
from functools import partial
from pathlib import Path

import common
from common import Shape

WHOLE, DELTA = "whole", "delta"


def bytes_of(tag: Path) -> dict[str, int]:
    """Bytes of a tag: all files, what holds weights, what holds optimizer state."""
    sizes = {path.name: path.stat().st_size for path in tag.iterdir()}
    return {"all": sum(sizes.values()),
            "weights": sum(size for name, size in sizes.items() if name.startswith(("layer_", "delta"))),
            "optimizer": sum(size for name, size in sizes.items() if "optim_states" in name)}


def measure(shape: Shape, repetitions: int, folder: Path) -> dict:
    """Bytes and seconds of both kinds of save; ``fingerprint``: of the start of a run that saves deltas."""
    from our_trainer import build_trainer, start_world

    from megatron.bitfit import trainable
    from megatron.checkpoint import save
    from megatron.checkpoint.delta_run import DeltaSaves
    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.checkpoint.progress import Progress
    from megatron.mpu.random import seed_everything

    context = start_world()
    trainer = build_trainer(shape, bitfit=True, context=context)
    engine, streams = trainer.engine, seed_everything(1, context)
    trainer.step()

    def saver(kind: str, deltas=None) -> save.Saver:
        checkpoint = dataclasses.replace(trainer.settings.checkpoint, save=str(folder / kind))
        return save.Saver(dataclasses.replace(trainer.settings, checkpoint=checkpoint), context, None, deltas)

    with contextlib.redirect_stdout(io.StringIO()):
        saver("base").save(engine, Progress(), streams)
        start, used = time.perf_counter(), time.process_time()
        deltas = DeltaSaves(engine.module, trainer.settings, context, LoadPlan(str(folder / "base"), "global_step0"))
        fingerprint = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}
        savers = {WHOLE: saver(WHOLE), DELTA: saver(DELTA, deltas)}
        progress = Progress(iteration=1)
        seconds = common.interleave({kind: common.synchronized(partial(each.save, engine, progress, streams))
                                     for kind, each in savers.items()}, repetitions)
    params = [param for _, param in trainable(engine.module)]
    frozen = sum(param.numel() for param in engine.module.parameters()) - sum(param.numel() for param in params)
    return {"seconds": seconds, "fingerprint": fingerprint, "frozen": frozen,
            "trained_bytes": sum(param.numel() * param.element_size() for param in params),
            "bytes": {kind: bytes_of(folder / kind / "global_step1") for kind in savers}}


def check_delta(seen: dict) -> None:
    """Raises SystemExit unless the delta file is what trains and a small header."""
    around = seen["bytes"][DELTA]["weights"] - seen["trained_bytes"]
    if not 0 < around < 2**16:
        raise SystemExit(f"the delta has {seen['bytes'][DELTA]['weights']:,} bytes, the trained elements "
                         f"{seen['trained_bytes']:,}: what is around them should be less than 65,536")


def command_line():
    made = common.parser(__doc__, repetitions=7)
    common.shape_options(made, Shape(layers=12, hidden=768, heads=12, vocabulary=50304, length=16, batch=1),
                         Shape(layers=2, hidden=64, heads=4, vocabulary=256, length=16, batch=1))
    made.add_argument("--folder", metavar="FOLDER", help="where to save, in a folder that is removed (default: the system's)")
    return made


def main(arguments=None) -> None:
    options = common.parse(command_line(), arguments)
    shape = common.shape_of(options)
    common.progress(shape.text())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seen = measure(shape, options.repetitions, Path(folder))
    check_delta(seen)
    whole = seen["seconds"][WHOLE]
    rows = [[kind, f"{seen['bytes'][kind]['all']:,}", f"{seen['bytes'][kind]['weights']:,}",
             f"{seen['bytes'][kind]['optimizer']:,}", common.spread(seconds).text(3),
             common.spread(common.ratios(seconds, whole)).text(3)] for kind, seconds in seen["seconds"].items()]
    body = common.table(["save", "bytes", "weights", "optimizer", "seconds", "time / whole"], rows)
    taken = seen["fingerprint"]
    body += (f"\n\nFingerprint of {seen['frozen']:,} frozen elements, once per run: {taken['seconds']:.2f} s, "
             f"{taken['processor_seconds']:.2f} s of them computing ({1e9 * taken['processor_seconds'] / seen['frozen']:.1f} ns each)")
    common.report(options, f"One save of a BitFit run, {shape.text()}: median [min-max] of {options.repetitions} interleaved "
                  "repetitions", body, {**seen, "shape": dataclasses.asdict(shape)})


if __name__ == "__main__":
    main()
