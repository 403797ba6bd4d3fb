"""Checking a stored run against this one, and bringing it back."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import files, layouts, manifest
from megatron.checkpoint.hugging_face import unfit, unread
from megatron.checkpoint.iteration_folder import is_iteration_folder
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.optimizer_shards import OptimizerShards, load_optimizer, publish_masters
from megatron.checkpoint.progress import (
    ARCHITECTURE_FLAGS,
    Progress,
    architecture,
    stored_architecture,
    stored_arguments,
    trained_names,
)
from megatron.checkpoint.sources import averaged_lines, open_source
from megatron.config import BIAS_TERMS, Settings
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.model.numbering import FINAL_NORM, FIRST_BLOCK
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams, restore_rng_state, seed_everything


def check_stored(plan: LoadPlan, settings: Settings, context: ParallelContext) -> dict:
    """Collective: read the state file and refuse a model that does not fit this run.

    Returns the file of this rank's place where the checkpoint was saved at the same TP and PP
    degrees, else rank 0's; {} where there is none and nothing but weights is wanted (layer files
    alone are a base). Every rank raises when one of them refuses.
    """
    problem, stored, trust = None, {}, settings.checkpoint.trust_checkpoint
    if plan.tag is None:  # a Hugging Face folder: its config.json says what it holds
        try:
            problem = unfit(plan.path, settings.model)
        except RunError as error:
            problem = str(error)
        agree(context, problem)
        if context.rank == 0 and (note := unread(plan.path, settings.model)):
            print(f"  {note}", flush=True)
        return {}
    try:
        if is_iteration_folder(plan.path):
            stored = open_source(plan.path, settings.checkpoint).stored()
        else:
            stored = files.read(files.mp_rank_file(plan.path, 0), trust=trust)
        problem = _other_architecture(stored, plan, settings)
        if not plan.weights_only and not problem:
            rank, first = context.pp_rank * context.tp_size + context.tp_rank, stored
            if saved_degrees(stored, plan.path)[:2] == (context.tp_size, context.pp_size) and rank:
                stored = files.read(files.mp_rank_file(plan.path, rank), trust=trust)
            problem = _other_iteration(stored, first, plan, rank)
            if plan.resume and "lr_scheduler" not in stored:
                problem = (f"{plan.path} has no state of a learning-rate schedule, so it is no run to be resumed; "
                           "start from its weights: --load it with another --save folder")
    except RunError as error:
        # foreign state files hold objects that are not read; their layer files are plain tensors
        problem = None if plan.weights_only else str(error)
        if problem is None and context.rank == 0 and files.mp_rank_file(plan.path, 0).exists():
            print(f"  {error}; whether the architecture flags fit it shows in the shapes of its tensors alone", flush=True)
    agree(context, problem)
    return stored


def saved_degrees(stored: dict, folder: Path) -> tuple[int, int, int]:
    """TP, PP and DP degree at which the state file ``stored`` of ``folder`` was written.

    Raises RunError when neither it nor the names of the layer files tell.
    """
    dims, arguments = stored.get("checkpoint_parallel_dimensions") or {}, stored_arguments(stored)
    tp = dims.get("tp_degree") or arguments.get("tensor_model_parallel_size") or layouts.tensor_parallel_degree(folder)
    pp = dims.get("pp_degree") or arguments.get("pipeline_model_parallel_size") or stored.get("mp_world_size", tp) // tp
    return tp, pp, stored.get("dp_world_size", 1)


def _other_architecture(stored: dict, plan: LoadPlan, settings: Settings) -> str | None:
    now = architecture(settings.model)
    for name, value in stored_architecture(stored).items():
        if name in now and value != now[name]:
            return (f"{plan.path} holds a model with {name} {value}, this run has {now[name]} "
                    f"({ARCHITECTURE_FLAGS[name]}); make them equal, or load another checkpoint")
    return None


def _other_iteration(stored: dict, first: dict, plan: LoadPlan, rank: int) -> str | None:
    """Whether a state file comes from another save than the rest: ranks would count differently."""
    known = manifest.read(plan.path)
    for where, iteration in ((manifest.NAME, known and known.iteration), ("that of rank 0", first.get("iteration"))):
        if None not in (iteration, stored.get("iteration")) and iteration != stored["iteration"]:
            return (f"{files.mp_rank_file(plan.path, rank)} is of iteration {stored['iteration']}, {where} says {iteration}: "
                    "files of several saves are mixed; copy the checkpoint again")
    return None


def check_trained(plan: LoadPlan, stored: dict, settings: Settings, context: ParallelContext, model: torch.nn.Module) -> None:
    """Collective: refuse a resume whose optimizer state belongs to other parameters than train now.

    Whole models are compared, whichever stages they were and are cut into.
    """
    if not plan.resume:
        return
    problem = None
    box: list[frozenset[str]] = [frozenset()]
    if context.rank == 0:  # some thousand files at times, and the same for all
        try:
            box = [_open_shards(plan, stored, settings).names]
        except RunError as error:
            problem = str(error)
    agree(context, problem)
    if context.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    saved, = box
    now = _trained_anywhere(model, context)
    if now != saved:
        kind = _kind(stored.get("bitfit"), stored.get("bitfit_bias_terms"))
        asked = _kind(settings.optimizer.bitfit, settings.optimizer.bitfit_bias_terms)
        only_there, only_here = sorted(saved - now), sorted(now - saved)
        first = f"{only_there[0]} trained there alone" if only_there else f"{only_here[0]} trains here alone"
        problem = (f"{plan.path} holds optimizer state of {kind}, but this run is {asked} and trains another "
                   f"set of parameters ({first}); to resume, train what it trained ({kind}); to start from its weights "
                   f"alone, --load {plan.folder} and save to another --save folder, or make it both --load and "
                   "--save and add --finetune --no-load-optim")
    agree(context, problem)


def _open_shards(plan: LoadPlan, stored: dict, settings: Settings) -> OptimizerShards:
    tp, pp, _ = saved_degrees(stored, plan.path)
    allowed = settings.checkpoint
    return OptimizerShards(plan.path, tp, pp, trust=allowed.trust_checkpoint,
                           average=allowed.average_duplicated_parameters, dp_size=stored.get("dp_world_size"),
                           our_name=functools.partial(_our_name, _numbers(plan.path, allowed.trust_checkpoint)))


def _numbers(folder: Path, trust: bool) -> dict[str, int]:
    """Numbers in names of parameters -> ours, where the layer files of ``folder`` carry another trainer's."""
    if not layouts.has_layer_files(folder):
        return {}  # a bias delta of ours
    source = layouts.LayerFolder(folder, trust=trust)
    numbers = layouts.NUMBERS[source.layout]
    blocks = range(FIRST_BLOCK, FIRST_BLOCK + source.num_layers)
    return {str(numbers.of(index, source.num_layers)): index for index in (*blocks, blocks.stop + FINAL_NORM - FIRST_BLOCK)}


def _our_name(numbers: dict[str, int], name: str) -> str:
    layer, _, rest = name.partition(".")
    return f"{numbers[layer]}.{layouts.current_name(rest)}" if layer in numbers else name


def _trained_anywhere(model: torch.nn.Module, context: ParallelContext) -> frozenset[str]:
    """Collective: names of what trains, of all stages."""
    mine = trained_names(model) if context.tp_rank == context.dp_rank == 0 else []
    everyones = [mine]
    if context.world_size > 1:
        everyones *= context.world_size
        dist.all_gather_object(everyones, mine)
    return frozenset(name for names in everyones for name in names)


def _kind(bitfit: bool | None, terms: Sequence[str] | None) -> str:
    """What trains, in the words of the command line."""
    if not bitfit:
        return "full training"
    terms = terms or BIAS_TERMS
    return f"--bitfit --bitfit-bias-terms {'all' if set(terms) == set(BIAS_TERMS) else ' '.join(terms)}"


def resume(engine: Any, plan: LoadPlan, stored: dict[str, Any], streams: RandomStreams, settings: Settings,
           context: ParallelContext) -> Progress:
    """Collective: bring optimizer, schedule, counters and random states back into an engine.

    The weights are in the model already (``engine.build_model``, whatever was their layout). With
    ``plan.resume`` the optimizer gets the fp32 masters and moments of the tag, saved at whatever
    degrees and precision, and what trains becomes these masters; constants (decay, betas, clipping,
    loss scaling) are those of the flags. Random states are the saved ones at the saved TP and PP
    degrees, see ``restart_streams`` for others. ``stored`` is what ``check_stored`` returned.
    Raises SharedRunError on all ranks when the state does not fit, ScheduleError (a ValueError) for
    a schedule that contradicts the flags.
    """
    if plan.resume:
        engine.lr_scheduler.load_state_dict(stored["lr_scheduler"])
        problem = None
        try:
            shards = _open_shards(plan, stored, settings)
            load_optimizer(engine.optimizer, engine.module, shards, context)
            if context.tp_rank == context.dp_rank == 0:
                for line in averaged_lines(shards.averaged or {}):
                    print(line, flush=True)
        except RunError as error:
            problem = str(error)
        agree(context, problem)
        publish_masters(engine.optimizer)
        engine.lr_scheduler.apply()
        engine.global_steps = stored.get("global_steps", stored.get("iteration", 0))
        engine.global_samples = stored.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = stored.get("skipped_steps", 0)
    progress = stored_progress(stored) if plan.progress else Progress()
    # both need the state file of a run
    saved = saved_degrees(stored, plan.path) if plan.resume or plan.rng else (1, 1, 1)
    problem = None
    anew = plan.rng and ("torch_rng_state" not in stored or saved[:2] != (context.tp_size, context.pp_size))
    if anew:
        restart_streams(settings.train.seed, stored.get("iteration", 0), context, streams)
    elif plan.rng:
        try:
            restore_rng_state(stored, streams)
        except (ValueError, KeyError) as error:
            problem = f"random states of {plan.path} cannot be taken up: {error}"
    agree(context, problem)
    if context.rank == 0 and (plan.resume or plan.rng):
        for line in (*_what_changed(saved, context, settings, stored.get("iteration", 0) if anew else None),
                     *_other_flags(stored, settings)):
            print(line, flush=True)
    return progress


#: what a resume takes from the flags though it is part of what the run computes
_FROM_FLAGS = ("seed", "data_path", "train_weighted_split_paths", "split", "seq_length", "dataloader_type", "micro_batch_size",
               "global_batch_size", "rampup_batch_size", "loss_normalization", "weight_decay", "clip_grad", "adam_beta1",
               "adam_beta2", "adam_eps", "sgd_momentum", "hidden_dropout", "attention_dropout")


def _other_flags(stored: dict, settings: Settings) -> Iterator[str]:
    """A line about flags that are not as they were at the save."""
    then, now = stored_arguments(stored), settings.flags
    changed = [f"--{name.replace('_', '-')} {then[name]} -> {now[name]}" for name in _FROM_FLAGS
               if name in then and name in now and then[name] != now[name]]
    if changed:
        yield f"changed since the save: {', '.join(changed)}"


def _what_changed(saved: tuple[int, int, int], context: ParallelContext, settings: Settings,
                  anew_at: int | None) -> Iterator[str]:
    """Lines about a resume at other degrees: what is not as in the unbroken run."""
    now = context.tp_size, context.pp_size, context.dp_size
    if saved != now:
        yield f"saved at TP, PP, DP = {saved}, going on at {now}: what is loaded is the same, cut otherwise"
    if anew_at is not None:
        yield (f"  random streams start anew from --seed {settings.train.seed} and iteration {anew_at}: dropout differs "
               "from that of the unbroken run")
    if saved[2] != context.dp_size and settings.data.dataloader_type == "cyclic":
        yield ("  --dataloader-type cyclic shuffles the data of each replica by itself, so with another number of them the "
               "rest of this pass reads samples in another order, some of them again")


def stored_progress(stored: dict) -> Progress:
    """What a checkpoint has counted: counters of our own record, else what older trainers keep in several places."""
    if "progress" in stored:
        return Progress(**stored["progress"])
    arguments = stored_arguments(stored)
    return Progress(iteration=stored.get("iteration", 0),
                    consumed_train_samples=arguments.get("consumed_train_samples") or 0,
                    consumed_train_tokens=stored.get("tokens") or 0,
                    consumed_valid_samples=arguments.get("consumed_valid_samples") or 0,
                    gigaflos_no_embeds=arguments.get("gigaflos_no_embeds") or 0.0)


def restart_streams(seed: int, iteration: int, context: ParallelContext, streams: RandomStreams) -> None:
    """Seed all streams of this rank as a start would whose --seed is a hash of ``seed`` and ``iteration``.

    For a resume where no saved state belongs to this rank (other TP or PP degrees, --no-save-rng): the same
    resume draws the same numbers again, and no rank those of before the save.
    """
    digest = hashlib.sha256(f"{seed} {iteration}".encode()).digest()
    streams.set_state(seed_everything(int.from_bytes(digest[:4], "big") >> 1, context).get_state())
