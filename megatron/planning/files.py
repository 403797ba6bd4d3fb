"""Sizes of what a save writes and of the file that ``tools/bitfit_delta.py`` extracts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import Settings
from megatron.planning.shape import WIDTH, Stage, held, tensors, trainable_parameters

#: bytes that torch.save adds: to each file, and to each tensor in it
FILE_OVERHEAD, TENSOR_OVERHEAD = 1650, 320
#: arguments, random states and counters of one model-parallel rank; what describes its optimizer's shares
STATE_FILE, OPTIMIZER_FILE = 28_000, 2_500
#: names and arguments in the header of a delta; what tells a frozen tensor from another
DELTA_HEADER, FINGERPRINT = 6_000, 16


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


def delta_size(settings: Settings) -> int:
    """Bytes of the safetensors file with what trains, whole, in the dtype of the weights, and a header of some kilobytes."""
    model = settings.model
    frozen = sum(not tensor.copy and tensor.trained(1, settings.optimizer) < tensor.elements for tensor in tensors(model))
    return WIDTH[model.params_dtype] * trainable_parameters(model, settings.optimizer) + DELTA_HEADER + FINGERPRINT * frozen
