"""Say what a run will cost, without starting it: memory, traffic, operations, files, fewest GPUs.

    python tools/plan_run.py --preset bloom-176b --bitfit
    python tools/plan_run.py --preset bloom-7b1 --tensor-model-parallel-size 2 --gpus 8 --explain
    python tools/plan_run.py <the flags of pretrain_gpt.py> --padded-vocab-size 50304 --gpus 16 --json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments_check import UsageError  # noqa: E402
from megatron.errors import print_answer  # noqa: E402
from megatron.planning.grids import make_plan, smallest_grid, variant  # noqa: E402
from megatron.planning.report import as_data, as_text  # noqa: E402
from megatron.planning.request import Request, plan_parser, read_request  # noqa: E402

#: name of each way to train -> (biases only, activations recomputed)
WAYS = {"full": (False, False), "full, recomputed": (False, True),
        "BitFit": (True, False), "BitFit, recomputed": (True, True)}


def answer(request: Request) -> str:
    """The plan as text or JSON. Raises UsageError when no grid is possible."""
    degrees = request.by_degree()
    if request.pp:
        request.settings(request.tp or 1, request.pp)  # more stages than layers: said as a launch says it
    base = next(iter(degrees.values()))
    asked = next(name for name, way in WAYS.items()
                 if way == (base.optimizer.bitfit, base.model.checkpoint_activations))

    def search(name: str, **fixed: int | None):
        bitfit, recompute = WAYS[name]
        return smallest_grid({tp: variant(settings, bitfit=bitfit, recompute=recompute)
                              for tp, settings in degrees.items()}, request.usable, **fixed)

    smallest = {name: search(name) for name in WAYS}
    complete = request.tp is not None and request.pp is not None
    if complete:
        grid = _given_grid(request)
    else:
        grid = search(asked, pp=request.pp, world=request.gpus) if request.pp or request.gpus else smallest[asked]
        if grid is None:
            raise UsageError(f"no grid {f'of --gpus {request.gpus} ' if request.gpus else ''}holds {asked} training in "
                             f"--gpu-memory-gb {request.gpu_memory:g} less --gpu-reserve-gb {request.reserve:g}; give "
                             "--tensor-model-parallel-size and --pipeline-model-parallel-size to see what it would take")
    settings = request.settings(*grid)
    plans = {name: make_plan(variant(settings, bitfit=bitfit, recompute=recompute))
             for name, (bitfit, recompute) in WAYS.items()}
    facts = (request, plans, smallest, asked, not complete)
    return json.dumps(as_data(*facts), indent=1) if request.json else as_text(*facts)


def _given_grid(request: Request) -> tuple[int, int, int]:
    tp, pp = request.tp, request.pp
    gpus = request.gpus or tp * pp
    if gpus % (tp * pp):
        raise UsageError(f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does not "
                         f"divide --gpus {gpus}")
    return tp, pp, gpus // (tp * pp)


def main(argv: list[str] | None = None) -> int:
    """0 when answered, 2 with one sentence otherwise."""
    parser = plan_parser()
    try:
        print_answer(answer(read_request(parser, sys.argv[1:] if argv is None else argv)))
    except UsageError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
