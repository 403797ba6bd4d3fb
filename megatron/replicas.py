"""Whether the TP ranks still hold equal copies of what they should hold alike.

LayerNorms, the biases of row-parallel layers and learned positions are whole on every TP
rank (``ParamTag.dim`` None). Nothing exchanges them: they stay equal because every rank
computes the same update. This module checks that bit for bit, and repairs it: the
parameter, its fp32 master, and the optimizer's moments of it.

A check sends one 64-bit fingerprint per tensor. Fingerprints of the pieces of a tensor add
up to that of the whole, so it does not matter where DeepSpeed cut masters and moments over
DP. Only a tensor whose fingerprints differ is sent itself. Frozen parameters are looked at
once, at the start: they do not move.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.bitfit import is_anchor
from megatron.config import Settings
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import tag_of

PARAMETER, MASTER = "parameter", "fp32 master"
CHECK, SYNC = "--check-tp-duplicated-parameters", "--sync-tp-duplicated-parameters"
#: differences named per check; the rest is counted
NAMED = 20
#: weights of a fingerprint repeat, times a power of _FACTOR, after so many elements
_BLOCK = 2**18
_FACTOR = 0x9E3779B97F4A7C15
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Difference:
    """One tensor of which some ranks hold another copy than TP rank 0 of their stage."""

    name: str
    """as in a bias delta: ``layers.0.input_layernorm.bias``"""
    part: str
    """parameter, fp32 master, or the optimizer's name of a moment (exp_avg, exp_avg_sq)"""
    greatest: float
    """greatest absolute difference; nan where one of the copies is not a number"""
    ranks: tuple[int, ...]
    """global ranks whose copy, or shard of it, is not that of TP rank 0"""

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{self.name} ({self.part}): greatest difference {self.greatest:.6g}, {ranks}"


@dataclass(frozen=True)
class _Copy:
    """What this rank holds of one replicated tensor: elements start .. start + len(values)."""

    name: str
    part: str
    numel: int
    start: int
    values: torch.Tensor
    """flat view into the live tensor, float32 unless a 16-bit parameter; may be empty"""

    @property
    def bits(self) -> torch.Tensor:
        return _bits(self.values)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN then equals itself, and 0 does not equal -0."""
    return values.view(_INTEGERS[values.element_size()])


def checkpoint_name(name: str) -> str:
    """A parameter's name that knows no pipeline: ``3.mlp.x`` -> ``layers.0.mlp.x``."""
    first, _, rest = name.partition(".")
    if first == "tied_modules":
        return f"embedding.{rest.partition('.')[2]}"
    if int(first) == EMBEDDING_INDEX:
        return f"embedding.{rest}"
    return f"layers.{int(first) - FIRST_BLOCK}.{rest}" if "." in rest else f"final_layernorm.{rest}"


# --- fingerprints -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd random int64 numbers [count], the same on every rank; no global stream is drawn from."""
    generator = torch.Generator().manual_seed(271828)
    return (torch.randint(-2**63, 2**63 - 1, (count,), generator=generator) | 1).to(device)


def fingerprint(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Weighted sum of the raw bits of flat ``values`` modulo 2**64, an int64 scalar tensor.

    ``start`` is the position of the first element in the whole tensor; the fingerprints of
    its pieces add up to its own. Multilinear hashing (Carter and Wegman 1979) with odd
    weights: one changed element always shows, several escape with a chance of at most 2**-32.
    """
    bits = _bits(values)
    weights = _weights(_BLOCK, values.device)
    if start + len(bits) <= _BLOCK:
        return (bits * weights[start:start + len(bits)]).sum()
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    at = 0
    while at < len(bits):
        block, offset = divmod(start + at, _BLOCK)
        count = min(_BLOCK - offset, len(bits) - at)
        factor = pow(_FACTOR, block, 2**64)
        part = (bits[at:at + count] * weights[offset:offset + count]).sum()
        total += part * (factor - 2**64 if factor >= 2**63 else factor)
        at += count
    return total


# --- what is compared -------------------------------------------------------------------------


def _replicated(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, param in model.named_parameters():
        if not is_anchor(param) and tag_of(param).dim is None:
            yield checkpoint_name(name), param


def _optimizer_copies(name: str, param: torch.nn.Parameter, inner: torch.optim.Optimizer) -> Iterator[_Copy]:
    """This rank's shard of the master and of each moment of ``param``.

    DeepSpeed flattens the parameters of a group and cuts the result over DP; its
    ``_hp_mapping`` (None where the shard holds nothing of ``param``) says which elements lie
    where. The state is asked for by the flat tensor, for the mapping's own links to it do
    not outlive a load.
    """
    mapping = param._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
    group = 0 if mapping is None else mapping.param_group_index
    flat = inner.param_groups[group]["params"][0]
    state = {key: value for key, value in inner.state.get(flat, {}).items()
             if torch.is_tensor(value) and value.shape == flat.shape}
    for part, whole in ((MASTER, flat), *sorted(state.items())):
        if mapping is None:
            yield _Copy(name, part, param.numel(), 0, whole.detach()[:0])
        else:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield _Copy(name, part, param.numel(), here.start, whole.detach().narrow(0, there.start, there.numel))


class Replicas:
    """Checks and repairs of one run, after its weights and its optimizer state were loaded.

    ``settings.parallel`` says how often: every ``check_tp_duplicated_parameters``
    iterations; under ``sync_tp_duplicated_parameters`` every iteration if that is 0, and
    what differs is overwritten by the copy of TP rank 0. Nothing happens when neither is set
    or TP is 1.
    """

    def __init__(self, engine, context: ParallelContext, settings: Settings, writer=None) -> None:
        self._engine, self._context, self._writer = engine, context, writer
        self._repair = settings.parallel.sync_tp_duplicated_parameters
        self._every = settings.parallel.check_tp_duplicated_parameters or int(self._repair)
        if self._every and context.tp_size == 1:
            if context.rank == 0:
                print(f"{SYNC if self._repair else CHECK}: TP is 1, there are no copies to compare", flush=True)
            self._every = 0
        self._frozen: set[str] | None = None
        """frozen parameters still to look at; None, before the first check, for all of them"""

    def after(self, iteration: int) -> None:
        """Collective: check if this iteration is one of those asked for."""
        if self._every and iteration % self._every == 0:
            self.check(iteration)

    def start(self, iteration: int) -> None:
        """Collective: the check before the first step, frozen parameters included."""
        if self._every:
            self.check(iteration)

    @torch.no_grad()
    def check(self, iteration: int) -> list[Difference]:
        """Collective: compare over TP, say what differs (once per job), repair it if asked.

        Returns the differences of all stages and replicas, the same list on every rank.
        """
        copies = list(self._copies())
        found = [part for copy in self._unequal(copies) if (part := self._compare(copy))]
        frozen = {name for name, param in _replicated(self._engine.module) if not param.requires_grad}
        differences = _merge(self._everyones(found))
        # a frozen tensor that stays different is named in every later check too
        self._frozen = set() if self._repair else frozen & {each.name for each in differences}
        if self._context.rank == 0 and differences:
            print(format_differences(differences, iteration, repaired=self._repair), flush=True)
        if self._writer is not None:
            self._writer.log_differing_copies(len(differences), iteration)
        return differences

    def _copies(self) -> Iterator[_Copy]:
        """The same tensors in the same order on all ranks of a stage."""
        inner = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        for name, param in _replicated(self._engine.module):
            if not param.requires_grad and self._frozen is not None and name not in self._frozen:
                continue
            yield _Copy(name, PARAMETER, param.numel(), 0, param.detach().view(-1))
            if param.requires_grad:
                yield from _optimizer_copies(name, param, inner)

    def _unequal(self, copies: Sequence[_Copy]) -> list[_Copy]:
        """Those whose fingerprints are not the same on all TP ranks."""
        if not copies:
            return []
        prints = torch.stack([fingerprint(copy.values, copy.start) for copy in copies])
        if self._context.dp_size > 1:
            # parameters are whole on every DP rank and are compared there, each by itself
            sharded = torch.tensor([copy.part != PARAMETER for copy in copies], device=prints.device)
            sums = prints * sharded
            dist.all_reduce(sums, group=self._context.dp_group)
            prints = torch.where(sharded, sums, prints)
        both = torch.cat([prints, ~prints])  # ~ turns the order round: one reduction for MAX and MIN
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._context.tp_group)
        highest, lowest = both[:len(copies)], ~both[len(copies):]
        return [copy for copy, differs in zip(copies, (highest != lowest).tolist()) if differs]

    def _compare(self, copy: _Copy) -> Difference | None:
        """Collective over the stage: this rank's piece against TP rank 0's tensor; repair it if asked."""
        context, stop = self._context, copy.start + len(copy.values)
        truth = torch.zeros(copy.numel, dtype=copy.bits.dtype, device=copy.values.device)
        if context.tp_rank == 0:
            truth[copy.start:stop] = copy.bits
            if copy.part != PARAMETER and context.dp_size > 1:
                dist.all_reduce(truth, group=context.dp_group)  # whole from shards: the others are zero there
        dist.broadcast(truth.view(torch.uint8), src=context.tp_ranks[0], group=context.tp_group)
        wanted = truth[copy.start:stop]
        unequal = copy.bits != wanted
        if not unequal.any():
            return None
        change = copy.values[unequal].double() - wanted.view(copy.values.dtype)[unequal].double()
        if self._repair:
            copy.bits.copy_(wanted)
        return Difference(copy.name, copy.part, float(change.abs().max()), (context.rank,))

    def _everyones(self, found: list[Difference]) -> list[Difference]:
        """``found`` of all ranks; nothing but one number is sent when there is none."""
        count = torch.tensor(len(found), device=self._engine.device)
        dist.all_reduce(count)
        if not count:
            return []
        everyone: list[list[Difference]] = [[]] * self._context.world_size
        dist.all_gather_object(everyone, found)
        return [each for theirs in everyone for each in theirs]


# --- what is said -----------------------------------------------------------------------------


def _merge(found: Iterable[Difference]) -> list[Difference]:
    """One entry per tensor, with the greatest difference and all ranks."""
    merged: dict[tuple[str, str], Difference] = {}
    for each in found:
        had = merged.get((each.name, each.part))
        if had is not None:
            values = (had.greatest, each.greatest)
            greatest = math.nan if any(map(math.isnan, values)) else max(values)
            each = Difference(each.name, each.part, greatest, tuple(sorted({*had.ranks, *each.ranks})))
        merged[each.name, each.part] = each
    return list(merged.values())


def format_differences(differences: Sequence[Difference], iteration: int, *, repaired: bool) -> str:
    """The warning of one check: the count, what was done, the first NAMED tensors."""
    many = len(differences)
    done = "repaired from TP rank 0" if repaired else f"training goes on with them; {SYNC} would repair them"
    lines = [f"WARNING: iteration {iteration}: {many} tensor{'s' if many > 1 else ''} replicated over TP "
             f"differ{'' if many > 1 else 's'} from TP rank 0's copy; {done}:"]
    lines += [f"  {difference}" for difference in differences[:NAMED]]
    if many > NAMED:
        lines.append(f"  ... and {many - NAMED} more")
    return "\n".join(lines)
