"""Sizes of what a save writes and of the file that ``tools/bitfit_delta.py`` extracts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import Settings
from megatron.planning.shape import EMBEDDING, FIRST_BLOCK, WIDTH, Stage, held, tensors

#: bytes that torch.save adds: to each file, and to each tensor in it
FILE_OVERHEAD, TENSOR_OVERHEAD = 1650, 320
#: arguments, random states and counters of one model-parallel rank; what describes its optimizer's shares
STATE_FILE, OPTIMIZER_FILE = 28_000, 2_500


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of tensors on disk, all ranks together, and how many files hold them."""

    layers: int
    """layer files: the weights, replicated ones once per TP rank"""
    optimizer: int
    """optimizer files: fp32 copies and moments, padding of the shares included"""
    layer_files: int
    optimizer_files: int
    state_files: int
    overhead: int
    """what the file format, arguments and random states add, roughly"""

    @property
    def total(self) -> int:
        return self.layers + self.optimizer + self.overhead


def checkpoint_size(settings: Settings, cut: Sequence[Stage]) -> CheckpointSize:
    """One tag of ``--save``."""
    model, parallel = settings.model, settings.parallel
    tp, dp = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    saved = [tensor for tensor in tensors(model) if not tensor.copy]
    payload = tp * WIDTH[model.params_dtype] * sum(tensor.local(tp) for tensor in saved)
    rotary = model.num_layers if model.position_embedding_type == "rotary" else 0
    payload += tp * rotary * model.kv_channels // 2 * WIDTH[model.params_dtype]
    moments = 2 if settings.optimizer.optimizer == "adam" else int(settings.optimizer.sgd_momentum > 0)
    state = groups = 0
    for stage in cut:
        for tp_rank in range(tp):
            padded = held(stage, tp, settings.optimizer, tp_rank).padded(dp)
            groups += dp * len(padded)
            state += (1 + moments) * 4 * sum(padded)
    layer_files = tp * (model.num_layers + 2)
    states = tp * len(cut)
    overhead = (FILE_OVERHEAD * (layer_files + states + states * dp) + STATE_FILE * states + OPTIMIZER_FILE * states * dp
                + TENSOR_OVERHEAD * (tp * (len(saved) + rotary) + (1 + moments) * groups))
    return CheckpointSize(layers=payload, optimizer=state, layer_files=layer_files, optimizer_files=states * dp,
                          state_files=states, overhead=overhead)


def delta_size(settings: Settings, tag: str = "global_step1000") -> int:
    """Bytes of the safetensors file with all biases, whole, in the dtype of the weights."""
    model = settings.model
    width = WIDTH[model.params_dtype]
    last = model.num_layers + 4
    header: dict = {"__metadata__": {
        "format": "bitfit-delta", "tag": tag, "layers": str(model.num_layers),
        "checkpoint_parameters": str(_stored_elements(settings))}}
    offset = 0
    for tensor in tensors(model):
        if tensor.name.rpartition(".")[2] != "bias":
            continue
        place = ("embedding" if tensor.layer == EMBEDDING else "final_layernorm" if tensor.layer == last
                 else f"layers.{tensor.layer - FIRST_BLOCK}")
        end = offset + width * tensor.elements
        header[f"{place}.{tensor.name}"] = {"dtype": {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[model.params_dtype],
                                            "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + offset


def _stored_elements(settings: Settings) -> int:
    model, tp = settings.model, settings.parallel.tensor_model_parallel_size
    rotary = model.num_layers * model.kv_channels // 2 if model.position_embedding_type == "rotary" else 0
    return tp * (rotary + sum(tensor.local(tp) for tensor in tensors(model) if not tensor.copy))
