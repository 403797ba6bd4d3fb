"""Say what a run will cost, without starting it: memory, traffic, operations, files, fewest GPUs.

    python tools/plan_run.py --preset bloom-176b --bitfit
    python tools/plan_run.py --preset bloom-7b1 --tensor-model-parallel-size 2 --gpus 8 --explain
    python tools/plan_run.py <the flags of pretrain_gpt.py> --padded-vocab-size 50304 --gpus 16 --json
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments_check import UsageError  # noqa: E402
from megatron.config import Settings  # noqa: E402
from megatron.errors import print_answer  # noqa: E402
from megatron.planning.grids import Grid, make_plan, replicas, smallest_grid, variant  # noqa: E402
from megatron.planning.report import Answer, as_data, as_text  # noqa: E402
from megatron.planning.request import Request, plan_parser, read_request  # noqa: E402

#: name of each way to train -> (biases only, activations recomputed)
WAYS = {"full": (False, False), "full, recomputed": (False, True),
        "BitFit": (True, False), "BitFit, recomputed": (True, True)}


def answer(request: Request) -> Answer:
    """The plan. Raises UsageError when no grid is possible."""
    _check_gpus(request)
    given = _given_grid(request)
    if given:
        request.settings(*given)  # what is wrong is said of the grid that was meant
    elif request.pp:
        request.settings(1, request.pp)  # more stages than layers: said as a launch says it
    degrees = request.by_degree()
    base = next(iter(degrees.values()))
    asked = next(name for name, way in WAYS.items()
                 if way == (base.optimizer.bitfit, base.model.checkpoint_activations))

    def search(name: str, by_degree=degrees, **fixed: int | None) -> Grid | None:
        bitfit, recompute = WAYS[name]
        return smallest_grid({tp: variant(settings, bitfit=bitfit, recompute=recompute)
                              for tp, settings in by_degree.items()}, request.usable, **fixed)

    smallest = {name: search(name, pp=request.pp) for name in WAYS}
    why = note = ""
    grid = given
    if grid is None:
        note = _batch_note(request, base)
        grid = search(asked, pp=request.pp, world=request.gpus) if request.gpus else smallest[asked]
        if grid is None:
            raise UsageError(f"no grid {f'of --gpus {request.gpus} ' if request.gpus else ''}holds {asked} training in "
                             f"--gpu-memory-gb {request.gpu_memory:g} less --gpu-reserve-gb {request.reserve:g}; give "
                             "--tensor-model-parallel-size and --pipeline-model-parallel-size to see what it would take"
                             + (note and f" ({note})"))
        why = (f"{'' if request.pp else 'fewest stages, then '}lowest TP at which {asked} fits" if request.gpus
               else f"the fewest GPUs on which {asked} fits")
    settings = request.settings(*grid)
    plans = {name: make_plan(variant(settings, bitfit=bitfit, recompute=recompute))
             for name, (bitfit, recompute) in WAYS.items()}
    outside = [name for name, plan in plans.items() if plan.memory[plan.worst].total > request.usable]
    anyhow = dataclasses.replace(request, tp=None, pp=None).by_degree() if outside else {}
    found = {name: search(name, anyhow, world=math.prod(grid)) for name in outside}
    return Answer(request, plans, asked, why, smallest, {name: other for name, other in found.items() if other}, note)


def _check_gpus(request: Request) -> None:
    given = [f"{flag} {degree}" for flag, degree in (("--tensor-model-parallel-size", request.tp),
                                                     ("--pipeline-model-parallel-size", request.pp)) if degree]
    least = (request.tp or 1) * (request.pp or 1)
    if request.gpus and request.gpus % least:
        raise UsageError(f"{' x '.join(given)}{f' = {least}' if len(given) > 1 else ''} does not divide --gpus {request.gpus}")


def _given_grid(request: Request) -> Grid | None:
    """The grid that the flags name; None where the plan may choose."""
    if not (request.tp and request.pp):
        return None
    least = request.tp * request.pp
    return request.tp, request.pp, (request.gpus or least) // least


def _batch_note(request: Request, base: Settings) -> str:
    """Which DP of --gpus are out because of the global batch; empty if none."""
    if not request.gpus:
        return ""
    possible, not_possible = replicas(base, request.gpus // ((request.tp or 1) * (request.pp or 1)))
    if not not_possible:
        return ""
    train = base.train
    default = "" if request.values["global_batch_size"] else ", the default without --global-batch-size,"
    return (f"DP can be {', '.join(map(str, possible))}, not {', '.join(map(str, not_possible))}: the global batch of "
            f"{train.global_batch_size}{default} has {train.global_batch_size // train.micro_batch_size} micro-batches")


def main(argv: list[str] | None = None) -> int:
    """0 when answered, 2 with one sentence otherwise."""
    parser = plan_parser()
    try:
        found = answer(read_request(parser, sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print_answer(json.dumps(as_data(found), indent=1) if found.request.json else as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
