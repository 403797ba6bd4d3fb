"""LayerNorm with tagged parameters; the one place that knows of NVIDIA's apex."""

from __future__ import annotations

import functools
import importlib

import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.mpu.layers import constant_parameter
from megatron.mpu.tags import REPLICATED


@functools.cache
def apex_layer_norm():
    """apex's fused layer norm as a function, or None.

    ``pip install apex`` fetches an unrelated package of that name, hence the attributes
    are looked at and not just the import.
    """
    try:
        normalization = importlib.import_module("apex.normalization")
        fused = importlib.import_module("apex.normalization.fused_layer_norm")
        importlib.import_module("fused_layer_norm_cuda")
    except (ImportError, AttributeError, OSError, RuntimeError):  # unrelated or half-built
        return None
    if not hasattr(normalization, "FusedLayerNorm"):
        return None
    return getattr(fused, "fused_layer_norm_affine", None)


class LayerNorm(torch.nn.Module):
    """LayerNorm (arXiv 1607.06450) over the last dimension, biased variance, affine.

    The result has the dtype of the parameters; statistics of a wider input (an fp32
    residual stream) are taken in the input's dtype.
    """

    def __init__(self, config: ModelConfig, eps: float | None = None) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon if eps is None else eps
        shape = (config.hidden_size,)
        self.weight = constant_parameter(shape, 1.0, tag=REPLICATED, config=config)
        self.bias = constant_parameter(shape, 0.0, tag=REPLICATED, config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if x.dtype != self.weight.dtype:
            wide = F.layer_norm(x, shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
            return wide.to(self.weight.dtype)
        # apex computes the weight's gradient whether or not it is wanted; torch skips a frozen one
        if self.weight.requires_grad and x.device.type != "cpu" and (fused := apex_layer_norm()):
            return fused(x, self.weight, self.bias, shape, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
