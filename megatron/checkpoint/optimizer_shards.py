"""Optimizer state of a tag, read at any degrees and written into an engine at any other.

DeepSpeed cuts the state twice: model-parallel rank MM holds the parameters of its stage as
TP shares, laid end to end, and each of its DP ranks the D-th part of that row. So a
parameter's state is put together from the pieces of all D and from the shares of all TP ranks,
and cut again for the rank that reads it. Files are mapped, not read: one tensor of one
parameter is in memory at a time.

Works on what DeepSpeed 0.19 writes for ZeRO stage 1 (fp32, fp16) and for its bf16 optimizer,
and on older files that say where each parameter lies (``param_slice_mappings``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.bitfit import trainable
from megatron.checkpoint import manifest, unpickling
from megatron.checkpoint.sources import merge_shares
from megatron.checkpoint.weights import cut
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import ParamTag, tag_of

#: the fp32 values that the optimizer updates; moments go by the optimizer's own names
MASTER = "fp32 master"
#: what the optimizer counts of the dynamic loss scale; its constants are those of the flags
_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ANCHOR = "stage_anchor"


@dataclass(frozen=True)
class _Piece:
    """Where one DP rank's part of one TP share lies: elements start .. start + numel of flat tensors."""

    tensors: Mapping[str, torch.Tensor]
    start: int
    numel: int
    path: Path


@dataclass
class _Parameter:
    stage: int
    shares: dict[int, list[_Piece]] = field(default_factory=dict)
    """pieces in DP order by TP rank"""


class OptimizerShards:
    """All optimizer files of the tag folder ``folder``, written at TP ``tp_size`` and PP ``pp_size``.

    With ``trust`` files may run code, with ``average`` copies that differ over TP are averaged.
    ``our_name`` turns names of a trainer that numbers its layers otherwise into ours; ``dp_size`` is the DP degree
    where that is known. Raises RunError naming the file when one is missing, damaged or does not say which
    parameters it holds.
    """

    def __init__(self, folder: Path, tp_size: int, pp_size: int, *, trust: bool = False, average: bool = False,
                 our_name: Callable[[str], str] = str, dp_size: int | None = None) -> None:
        self.folder, self.tp_size, self.pp_size = folder, tp_size, pp_size
        self._our_name = our_name
        self.moments: tuple[str, ...] = ()
        """names of the moments; () when no step was made before the save"""
        self.step: float | None = None
        """updates that Adam has counted; None for optimizers that count none"""
        self.optimizer: str | None = None
        """adam or sgd, as far as the files tell"""
        self.loss_scaler = None
        """DeepSpeed's LossScaler or DynamicLossScaler; None under bf16"""
        self.averaged: dict[str, float] | None = {} if average else None
        """copies over TP that differed and were averaged -> largest difference; None where that is refused"""
        self._parameters: dict[str, _Parameter] = {}
        self._seen = False
        paths = _paths(folder, tp_size * pp_size)
        self.dp_size = len(paths[0])
        if dp_size not in (None, self.dp_size):
            raise RunError(f"{folder} holds optimizer state of {self.dp_size} DP ranks and was saved by {dp_size}: "
                           "files are missing, or left of another save")
        for mp_rank, over_dp in enumerate(paths):
            for path in over_dp:
                self._add(path, *divmod(mp_rank, tp_size), trust)

    @property
    def names(self) -> frozenset[str]:
        """Parameters there is state of, named as the pipeline names them; anchors left out."""
        return frozenset(self._parameters)

    def _add(self, path: Path, stage: int, tp_rank: int, trust: bool) -> None:
        try:
            state = unpickling.load(path, trust=trust, mmap=True)["optimizer_state_dict"]
            groups = _groups(state)
            slices = state["param_slice_mappings"]
        except (KeyError, TypeError, IndexError) as error:
            raise RunError(f"{path} is no optimizer state that can be regrouped ({type(error).__name__} {error}); "
                           "start from the weights with --load of it and another --save folder") from error
        self.loss_scaler = state.get("loss_scaler", self.loss_scaler)
        self.optimizer = _kind_of(state) or self.optimizer
        for (tensors, step), by_name in zip(groups, slices, strict=True):
            self._agree(path, tuple(sorted(tensors.keys() - {MASTER})), step)
            for name, address in by_name.items():
                name = self._our_name(name)
                known = self._parameters.setdefault(name, _Parameter(stage))
                if name == _ANCHOR:
                    del self._parameters[name]
                elif known.stage == stage:  # the stage of the head has a copy of the word table
                    known.shares.setdefault(tp_rank, []).append(_Piece(tensors, address.start, address.numel, path))

    def _agree(self, path: Path, moments: tuple[str, ...], step: float | None) -> None:
        if self._seen and (moments, step) != (self.moments, self.step):
            raise RunError(f"{path} holds {', '.join(moments) or 'no moments'} after {step} updates, other files of "
                           f"this tag {', '.join(self.moments) or 'no moments'} after {self.step}")
        self.moments, self.step, self._seen = moments, step, True

    # --- one tensor of one parameter --------------------------------------------------------

    def share(self, name: str, key: str, local: torch.Tensor, context: ParallelContext) -> torch.Tensor:
        """This rank's TP share of ``key`` of parameter ``name``: fp32 on the CPU, shaped like ``local``.

        ``key`` is ``MASTER`` or one of ``moments``; ``local`` is the tagged parameter of the model.
        At the TP degree of the save it is the share of that rank as it was; otherwise shares are
        merged, of which copies must be equal, and cut anew. Raises RunError otherwise, and for a
        shape that does not fit.
        """
        tag, shares = tag_of(local), self._parameters[name].shares
        if sorted(shares) != list(range(self.tp_size)):
            raise RunError(f"{self.folder} has optimizer state of {name} for TP ranks {sorted(shares)} "
                           f"of {self.tp_size} only")
        if self.tp_size == context.tp_size:
            mine = self._share(name, key, context.tp_rank, tag, local)
            if mine.shape == local.shape:
                return mine
        every = [self._share(name, key, rank, tag, local) for rank in range(self.tp_size)]
        whole = merge_shares(f"{key} of {name}", every, tag, [shares[rank][0].path for rank in range(self.tp_size)],
                             averaged=self.averaged)
        return cut(whole, local, context, f"{key} of {name} in {self.folder}")

    def _share(self, name: str, key: str, rank: int, tag: ParamTag, local: torch.Tensor) -> torch.Tensor:
        """The share of TP rank ``rank`` at the time of the save, put together over DP."""
        pieces = []
        for piece in self._parameters[name].shares[rank]:
            flat = piece.tensors[key]
            if piece.start + piece.numel > flat.numel():
                raise RunError(f"{piece.path} holds {flat.numel()} elements of {key}, {name} should end at "
                               f"{piece.start + piece.numel}")
            pieces.append(flat[piece.start:piece.start + piece.numel])
        flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        shape = list(local.shape)
        if tag.dim is not None:
            shape[tag.dim] = flat.numel() // math.prod(size for dim, size in enumerate(shape) if dim != tag.dim)
        if math.prod(shape) != flat.numel():
            raise RunError(f"{key} of {name} in {self.folder} has {flat.numel()} elements on TP rank {rank}, which "
                           f"do not make a share like {tuple(local.shape)}; check the architecture flags")
        return flat.view(shape)


def _paths(folder: Path, mp_ranks: int) -> list[list[Path]]:
    """Files by model-parallel rank and DP rank; RunError where one is missing."""
    found = {(int(match[2]), int(match[1])): path for path in manifest.files_of(folder)
             if (match := _FILE.fullmatch(path.name))}
    if not found:
        raise RunError(f"{folder} holds no optimizer state (no ...zero_pp_rank_0_mp_rank_00_optim_states.pt); "
                       "--no-load-optim goes on without")
    dp_ranks = max(dp for _, dp in found) + 1
    for mp, dp in ((mp, dp) for mp in range(mp_ranks) for dp in range(dp_ranks)):
        if (mp, dp) not in found:
            raise RunError(f"{folder} lacks the optimizer state of DP rank {dp}, model-parallel rank {mp} "
                           f"({next(iter(found.values())).name} is there)")
    return [[found[mp, dp] for dp in range(dp_ranks)] for mp in range(mp_ranks)]


def _groups(state: dict) -> Iterator[tuple[dict[str, torch.Tensor], float | None]]:
    """Per optimizer group its flat tensors by key, and the updates it has counted."""
    base, masters = state["base_optimizer_state"], state["single_partition_of_fp32_groups"]
    groups = base["param_groups"] if isinstance(base, dict) else [{}] * len(masters)
    result = []
    for index, (group, master) in enumerate(zip(groups, masters, strict=True)):
        # a list is DeepSpeed's "elastic" form, the default of old
        kept = base["state"].get(group["params"][0], {}) if isinstance(base, dict) else base[index]
        step = kept.get("step", group.get("step", state.get("base_optimizer_state_step")))
        tensors = {key: value for key, value in kept.items() if torch.is_tensor(value) and key != "step"}
        result.append(({MASTER: master, **tensors}, None if step is None else float(step)))
    return iter(result)


def _kind_of(state: dict) -> str | None:
    base = state["base_optimizer_state"]
    constants = base["param_groups"][0] if isinstance(base, dict) else {}
    return "adam" if "betas" in constants else "sgd" if "momentum" in constants else None


# --- into an engine ---------------------------------------------------------------------------


@torch.no_grad()
def load_optimizer(optimizer, model: torch.nn.Module, shards: OptimizerShards, context: ParallelContext) -> None:
    """Collective: put masters, moments, step and loss scale into DeepSpeed's ``optimizer`` of ``model``.

    ``optimizer`` is a ZeRO stage 1 or a bf16 optimizer, fresh or not. Afterwards the trained
    parameters of ``model`` are its masters, rounded to their dtype. Groups keep the constants of
    this run's flags. Raises RunError, on this rank alone, when the state does not fit; the exchange
    between ranks is left to ``publish_masters``.
    """
    inner = optimizer.optimizer
    _check_kind(inner, shards)
    flats = [group["params"][0] for group in inner.param_groups]
    moments = [{key: torch.zeros_like(flat) for key in shards.moments} for flat in flats]
    for name, param in trainable(model):
        place = param._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
        if place is None:  # other DP ranks update it
            continue
        here, there = place.hp_fragment_address, place.lp_fragment_address
        targets = {MASTER: flats[place.param_group_index].data, **moments[place.param_group_index]}
        for key, target in targets.items():
            values = shards.share(name, key, param, context).flatten()
            target[here.start:here.start + here.numel] = values[there.start:there.start + there.numel]
    state = inner.state_dict()
    state["state"] = {}
    for group, tensors in zip(state["param_groups"], moments):
        if shards.step is not None and shards.moments:
            if type(inner).__module__.startswith("torch.optim"):
                tensors = {"step": torch.tensor(shards.step, dtype=torch.float32), **tensors}
            else:  # apex counts per group
                group["step"] = int(shards.step)
        if tensors:
            state["state"][group["params"][0]] = tensors
    inner.load_state_dict(state)
    _load_scale(getattr(optimizer, "loss_scaler", None), shards.loss_scaler)


def publish_masters(optimizer) -> None:
    """Collective: every trained parameter becomes its fp32 master, rounded to its dtype."""
    optimizer.update_lp_params()


def _check_kind(inner: torch.optim.Optimizer, shards: OptimizerShards) -> None:
    if isinstance(inner, torch.optim.SGD):
        kind, wanted = "sgd", {"momentum_buffer"} if inner.param_groups[0]["momentum"] else set()
    else:
        kind, wanted = "adam", {"exp_avg", "exp_avg_sq"}
    if shards.moments and set(shards.moments) != wanted:
        raise RunError(f"{shards.folder} holds {', '.join(shards.moments)} of each parameter, --optimizer {kind} needs "
                       f"{', '.join(sorted(wanted)) or 'nothing'}; resume with the optimizer it was saved with, or start "
                       "with --no-load-optim")
    if shards.optimizer not in (None, kind):  # plain SGD leaves nothing that would not fit
        raise RunError(f"{shards.folder} was saved with --optimizer {shards.optimizer}, this run has --optimizer {kind}; "
                       "resume with the optimizer it was saved with, or start with --no-load-optim")


def _load_scale(scaler, stored) -> None:
    """Continue a dynamic loss scale; fixed ones are what the flags say."""
    if stored is not None and scaler is not None and getattr(scaler, "dynamic", False) and stored.dynamic:
        for name in _SCALE_STATE:
            setattr(scaler, name, getattr(stored, name))
