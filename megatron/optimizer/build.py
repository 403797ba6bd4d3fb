"""Parameter groups and the optimizer over what trains."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megatron.config import OptimizerConfig


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in at most two groups; an empty group is left out.

    Matrices decay, vectors (biases and LayerNorm scales) do not. Under BitFit only
    the second group exists: an empty or all-frozen group makes DeepSpeed fail.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def nvidia_fused_adam():
    """FusedAdam of NVIDIA's apex, or None; PyPI's package of that name is something else."""
    try:
        from apex.optimizers import FusedAdam
    except (ImportError, AttributeError):
        return None
    return FusedAdam


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Adam with decoupled decay (arXiv 1711.05101) or SGD, over the trainable parameters.

    On an accelerator Adam is apex's FusedAdam where that is installed, else torch's fused one.
    """
    groups = parameter_groups(model, config.weight_decay)
    rate = config.lr if config.lr is not None else 0.0
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.sgd_momentum)
    constants: dict[str, Any] = {"lr": rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    on_cpu = get_accelerator().device_name() == "cpu"
    fused_adam = None if on_cpu else nvidia_fused_adam()
    if fused_adam is not None:
        return fused_adam(groups, adam_w_mode=True, **constants)
    return torch.optim.AdamW(groups, fused=get_accelerator().device_name() == "cuda", **constants)
