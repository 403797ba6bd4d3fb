"""What autograd keeps of one transformer block for backward, tensor by tensor, full against BitFit.

    python benchmarks/saved_activations.py
    python benchmarks/saved_activations.py --dtype bf16 --dropout 0.1 --positions absolute
    python benchmarks/saved_activations.py --sums
    python benchmarks/saved_activations.py --quick

Figures are bytes in units of s b h (sequence x micro-batch x hidden size), as in arXiv 2205.05198: one
fp32 tensor [b, s, h] is 4, one of 16 bits is 2. Parameters do not count, and a storage counts once,
whatever number of views of it is kept. Measured in the second of two blocks: what both keep (an
attention bias, say) is listed apart, for it exists once per stage.

The rows come from the autograd graph (which operation keeps what), the total from hooks on saved tensors
(megatron/memory.py); the benchmark ends with an error if the two differ. --quick changes the size only:
it does not alter the figures as long as h is large against s and the number of heads.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import common
from common import Shape

#: operation of the autograd graph -> what backward needs its tensors for
PURPOSE = {
    "_Linear": "gradient of the weight",
    "NativeLayerNorm": "gradient of the input, and of the scale where it trains",
    "FusedLayerNormAffineFunction": "gradient of the input, and of the scale where it trains",
    "_GeluTanh": "derivative of GELU",
    "Gelu": "gradient of GELU, from its input",
    "_Attention": "gradients of query, key and value; scores are formed again from them",
    "ScaledDotProduct": "gradients of query, key and value; scores are formed again from them",
    "_Dropout": "which elements dropout kept",
    "NativeDropout": "which elements dropout kept",
    "Mul": "which elements dropout kept",
    "Softmax": "gradient of the scores",
    "Bmm": "gradient of the other factor",
    "Index": "where the elements came from",
}
ATTENTION = re.compile("^_Attention|ScaledDotProduct")
CONFIGS = [(dtype, dropout, positions) for dtype in ("fp32", "bf16") for dropout in (0.0, 0.1)
           for positions in ("alibi", "absolute")]


@dataclass(frozen=True)
class Kept:
    """One storage that backward of a block needs."""

    module: str
    """the module in whose forward it was first kept"""
    operations: str
    """what keeps it: operations of the autograd graph"""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    shared: bool
    """whether the block before keeps it too"""


def nodes_behind(output) -> dict:
    """All nodes of the autograd graph of ``output``, in the order they are met."""
    found: dict = {}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [before for before, _ in node.next_functions]
    return found


def tensors_of(node) -> list:
    """Tensors that ``node`` saved."""
    import torch

    if hasattr(node, "saved_tensors"):  # a torch.autograd.Function
        saved = list(node.saved_tensors)
    else:
        saved = [getattr(node, name) for name in dir(node)
                 if name.startswith("_saved_") and not name.startswith("_saved_for")]
    flat: list = []
    for value in saved:
        flat += value if isinstance(value, (tuple, list)) else [value]
    return [value for value in flat if torch.is_tensor(value) and value.numel()]


def operation(node) -> str:
    """``NativeLayerNormBackward0`` -> ``NativeLayerNorm``."""
    return node.name().rpartition("Backward")[0] or node.name()


def block_pair(shape: Shape, *, bitfit: bool):
    """Two blocks in training mode and their input, which needs a gradient as behind other blocks."""
    import torch
    from our_trainer import settings_of

    from megatron.bitfit import freeze
    from megatron.model.block import ParallelTransformerLayerPipe
    from megatron.model.positions import PositionCache
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.layers import torch_dtype
    from megatron.mpu.random import seed_everything

    context = ParallelContext()
    streams = seed_everything(1, context)
    config = settings_of(shape, bitfit=bitfit).model
    positions = PositionCache(config, context)
    blocks = torch.nn.ModuleList(ParallelTransformerLayerPipe(config, context, streams, positions, number)
                                 for number in range(2)).train()
    if bitfit:
        freeze(blocks)
    device = next(blocks.parameters()).device
    x = torch.randn(shape.batch, shape.length, shape.hidden, device=device).to(torch_dtype(config))
    return blocks, x.requires_grad_()


def kept_by_block(shape: Shape, *, bitfit: bool) -> list[Kept]:
    """What the second of two blocks keeps; raises SystemExit when two ways to count differ."""
    import torch

    from megatron.memory import SavedBytes, storage_key

    blocks, x = block_pair(shape, bitfit=bitfit)
    with SavedBytes(exclude=blocks.parameters()) as counted:
        middle = blocks[0](x)
        first = counted.bytes
        output = blocks[1](middle)
        by_hooks = counted.bytes - first
    del middle, output

    parameters = {storage_key(param) for param in blocks.parameters()}
    inside: list[str] = []
    places: dict = {}

    def enter(name):
        return lambda *_: inside.append(name)

    def leave(*_):
        inside.pop()

    for name, module in blocks.named_modules():
        module.register_forward_pre_hook(enter(name.partition(".")[2]))
        module.register_forward_hook(leave)

    def note_place(tensor):
        places.setdefault(storage_key(tensor), inside[-1] if inside else "")
        return tensor

    middle = blocks[0](x)
    before = nodes_behind(middle)
    earlier = {storage_key(tensor) for node in before for tensor in tensors_of(node)}
    with torch.autograd.graph.saved_tensors_hooks(note_place, lambda tensor: tensor):
        output = blocks[1](middle)
    kept: dict[tuple, Kept] = {}
    for node in reversed(nodes_behind(output)):
        if node in before:
            continue
        for tensor in tensors_of(node):
            key, name = storage_key(tensor), operation(node)
            if key in parameters:
                continue
            if key not in kept:
                kept[key] = Kept(places[key], name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
                                 tensor.untyped_storage().nbytes(), key in earlier)
            elif name not in kept[key].operations.split(", "):
                kept[key] = dataclasses.replace(kept[key], operations=f"{kept[key].operations}, {name}")
    by_graph = sum(entry.bytes for entry in kept.values() if not entry.shared)
    if by_graph != by_hooks:
        raise SystemExit(f"the autograd graph shows {by_graph} kept bytes, the hooks {by_hooks}: a tensor is missed")
    return list(kept.values())


def block_bytes(kept: list[Kept]) -> int:
    """Of one block: what it shares with others left out."""
    return sum(entry.bytes for entry in kept if not entry.shared)


def purpose(operations: str, dims: tuple[int, ...], dtype: str) -> str:
    """What the operations that keep a tensor need it for."""
    if "LayerNorm" in operations and dims[-1] == 1:
        return "mean or deviation of each token"
    if ATTENTION.search(operations) and dtype in ("bool", "uint8"):
        return "which attention weights dropout kept"
    if ATTENTION.search(operations) and len(dims) == 3:
        return "sum of each row of the softmax"
    found = []
    for name in operations.split(", "):
        text = next((text for start, text in PURPOSE.items() if name.startswith(start)), f"backward of {name}")
        if text not in found:
            found.append(text)
    return "; ".join(found)


def detail_rows(shape: Shape) -> tuple[list[list[str]], dict]:
    """A row per kept tensor of the full step with the same tensor's share under BitFit, and the sums."""
    unit = shape.tokens * shape.hidden
    kept = {name: kept_by_block(shape, bitfit=name == "BitFit") for name in ("full", "BitFit")}
    rows: dict[tuple, list] = {}
    for column, entries in enumerate(kept.values()):
        seen: dict[tuple, int] = {}
        for entry in entries:
            first = (entry.module, entry.shape, entry.dtype, entry.bytes, entry.shared)
            number = seen[first] = seen.get(first, 0) + 1
            line = rows.setdefault((*first, number), [set(), 0, 0])
            line[0].add(entry.operations)
            line[1 + column] = entry.bytes
    lines = []
    for (module, dims, dtype, _, shared, _), (operations, *amounts) in rows.items():
        named = ", ".join(dict.fromkeys(", ".join(sorted(operations, key=len)).split(", ")))
        reason = purpose(named, dims, dtype) + ("; one for all blocks, not in the sum" if shared else "")
        lines.append([module or "block", " x ".join(map(str, dims)), dtype, reason,
                      *(f"{amount / unit:.3f}" for amount in amounts)])
    sums = {name: block_bytes(entries) for name, entries in kept.items()}
    lines.append(["sum of a block", "", "", "", *(f"{amount / unit:.3f}" for amount in sums.values())])
    return lines, {"rows": lines, "bytes": sums, "unit": unit}


def sum_rows(shape: Shape) -> tuple[list[list[str]], dict]:
    """A row per configuration: kept bytes of a block, full and BitFit."""
    unit = shape.tokens * shape.hidden
    rows: list[list[str]] = []
    figures: dict = {"unit": unit}
    for dtype, dropout, positions in CONFIGS:
        common.progress(f"{dtype}, dropout {dropout}, {positions}")
        chosen = dataclasses.replace(shape, dtype=dtype, dropout=dropout, positions=positions)
        full, bitfit = (block_bytes(kept_by_block(chosen, bitfit=bitfit)) for bitfit in (False, True))
        rows.append([dtype, positions, f"{dropout:g}", f"{full / unit:.3f}", f"{bitfit / unit:.3f}", f"{bitfit / full:.3f}"])
        figures[f"{dtype} {positions} {dropout:g}"] = {"full": full, "BitFit": bitfit}
    return rows, figures


def command_line():
    made = common.parser(__doc__, repetitions=1, quick_repetitions=1)
    common.shape_options(made, Shape(layers=2, hidden=1024, heads=16, vocabulary=128, length=512, batch=1),
                         Shape(layers=2, hidden=256, heads=4, vocabulary=128, length=64, batch=1))
    made.add_argument("--dropout", type=float, default=0.0, metavar="P",
                      help="probability, of attention and hidden states (default %(default)s)")
    made.add_argument("--positions", choices=("alibi", "absolute"), default="alibi",
                      help="ALiBi or learned absolute positions (default %(default)s)")
    made.add_argument("--sums", action="store_true",
                      help="instead one line for each of fp32/bf16, dropout 0/0.1, ALiBi/absolute")
    return made


def main(arguments=None) -> None:
    options = common.parse(command_line(), arguments)
    shape = dataclasses.replace(common.shape_of(options), dropout=options.dropout, positions=options.positions)
    size = f"sequence {shape.length}, micro-batch {shape.batch}, hidden {shape.hidden}, {shape.heads} heads"
    if options.sums:
        rows, figures = sum_rows(shape)
        body = common.table(["dtype", "positions", "dropout", "full", "BitFit", "BitFit / full"], rows, text_columns=2)
        title = f"Bytes kept for backward by one block, in s b h: {size}"
    else:
        rows, figures = detail_rows(shape)
        body = common.table(["kept in", "shape", "dtype", "needed for", "full", "BitFit"], rows, text_columns=4)
        title = (f"Bytes kept for backward by one block, in s b h: {size}, {shape.dtype}, dropout {shape.dropout:g}, "
                 f"{shape.positions} positions")
    common.report(options, title, body, figures)


if __name__ == "__main__":
    main()
