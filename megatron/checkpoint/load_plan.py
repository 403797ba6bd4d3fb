"""What a start loads, and which parts of it.

docs/loading.md holds the rules as a table, which tests/test_loading.py proves cell by cell. In short:

- ``--save`` holds a checkpoint: this run is resumed from there, whatever else ``--load`` names.
- ``--load`` is another folder: the base of a new run, of which the weights alone are read.
- ``--load`` is the ``--save`` folder: a resume, less what ``--finetune``, ``--no-load-optim``,
  ``--no-load-rng`` and ``--reset-progress`` leave out.
- ``--load`` holds no checkpoint: an error, unless ``--allow-fresh-start``.

Rank 0 decides; the others compare what they see with what it saw (``shared_plan``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint import files, manifest
from megatron.checkpoint.iteration_folder import LATEST as ITERATION
from megatron.checkpoint.iteration_folder import is_iteration_folder, newest_iteration
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext

#: a folder right inside the one that ``latest`` lies in: no separators, no leading dot
_TAG = re.compile(r"\w[\w.+=-]{0,199}", re.ASCII)
_DELTA = "delta.safetensors"
#: what makes a folder a tag: weights per pipeline layer, the state of a rank, or biases alone
_PARTS = re.compile(r"(layer_\d+-model_\d+-model_states|mp_rank_\d+_model_states)\.pt|" + re.escape(_DELTA))
_TAIL = 64 * 2**10


@dataclass(frozen=True)
class LoadPlan:
    """Where a start reads from, and which parts of it."""

    folder: str | None
    tag: str | None
    """None for a Hugging Face folder, which has none"""
    resume: bool = False
    """optimizer, schedule and counters of the engine too, not the weights alone"""
    progress: bool = False
    rng: bool = False
    reason: str = "starting from random weights"
    warning: str | None = None
    """what the user should hear about the checkpoint before training goes on"""

    @property
    def weights_only(self) -> bool:
        return self.folder is not None and not (self.resume or self.progress or self.rng)

    @property
    def path(self) -> Path:
        """The folder with the files; asked for only where something is loaded."""
        assert self.folder is not None, self.reason
        return Path(self.folder, self.tag or "")


@dataclass(frozen=True)
class _Found:
    """A checkpoint on disk."""

    folder: str
    tag: str | None
    warning: str | None = None

    @property
    def name(self) -> str:
        return f"{self.folder} ({self.tag or 'Hugging Face format'})"

    @property
    def path(self) -> Path:
        return Path(self.folder, self.tag or "")


# --- one process --------------------------------------------------------------------------------


def plan_load(config: CheckpointConfig, *, eval_only: bool = False, damaged: Mapping[str, str] = {}) -> LoadPlan:  # noqa: B006
    """Decide what this start loads; looks at names, ``latest`` and lengths of files, not into them.

    With ``eval_only`` nothing is written, so ``--load`` is read whatever ``--save`` holds (or
    ``--save``, without ``--load``), and the iteration it was saved at is kept for the evaluation's
    lines. ``damaged``: paths of tags whose checksums are known to be wrong, and what is wrong.

    Raises RunError when ``--load`` holds no checkpoint and a fresh start was not allowed, and
    for a folder in which no tag can be chosen.
    """
    same = bool(config.save and config.load and _same(config.save, config.load))
    if config.save and not same and not eval_only and (own := _find("--save", config.save, True, damaged)):
        return LoadPlan(own.folder, own.tag, resume=True, progress=True, rng=config.load_rng, warning=own.warning,
                        reason=f"resuming: --save {config.save} holds this run's {own.tag}{_unused(config, own)}")
    flag, folder = "--load", config.load
    if eval_only and not folder:
        flag, folder = "--save", config.save
    if not folder:
        return LoadPlan(None, None)
    found = _find(flag, folder, same and not eval_only, damaged, optimizer=same and not eval_only and config.load_optim)
    if found is None:
        if config.allow_fresh_start:
            return LoadPlan(None, None, reason=f"{flag} {folder} holds no checkpoint; "
                                               "--allow-fresh-start: starting from random weights")
        raise RunError(f"{flag} {folder} holds no checkpoint ({_what_is(Path(folder))}); give the "
                       "folder that was used with --save, or --allow-fresh-start to train from "
                       "random weights")
    plan = LoadPlan(found.folder, found.tag, warning=found.warning)
    if eval_only:
        # layer files alone, or weights of another format, do not say their iteration
        says = found.tag is not None and files.mp_rank_file(plan.path, 0).exists()
        return dataclasses.replace(plan, progress=says, reason=f"evaluating {found.name}")
    if not same or found.tag is None:
        return dataclasses.replace(plan, reason=f"starting from the base {found.name}: weights only; optimizer, "
                                                "schedule, progress and random states start fresh")
    resume, rng = config.load_optim, config.load_rng and not config.finetune
    progress = not (config.finetune or config.reset_progress)
    left_out = [name for name, kept in (("optimizer and schedule", resume), ("progress", progress),
                                        ("random states", rng)) if not kept]
    without = f" without {', '.join(left_out)}" if left_out else ""
    if not progress:
        without += ("; each start with these flags counts from 0 again and replaces checkpoints of the same iterations in "
                    "this folder: take them out before the next one, or give a new folder as --save to keep what is here")
    return dataclasses.replace(plan, resume=resume, progress=progress, rng=rng,
                               reason=f"resuming from {found.name}{without}")


def find_checkpoint(folder: str | Path, flag: str = "--load") -> LoadPlan:
    """The checkpoint that a tool reads, in ``folder``, which was given with ``flag``; found as --load would.

    Raises RunError, naming flag and folder, where there is none, or none that can be chosen.
    """
    found = _find(flag, str(folder), False, {}, optimizer=False)
    if found is None:
        raise RunError(f"{flag} {folder} holds no checkpoint ({_what_is(Path(folder))}); give the folder that was used "
                       "with --save, a tag in it, or a Hugging Face folder")
    return LoadPlan(found.folder, found.tag, warning=found.warning)


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _unused(config: CheckpointConfig, own: _Found) -> str:
    """What a resume from ``--save`` leaves unread, for the log. Raises RunError for a tag of the run itself."""
    if not config.load:
        base = ""
    elif _same(str(Path(config.load).parent), own.folder) and _is_tag(Path(config.load)):
        raise RunError(f"--load {config.load} is a tag of this run, which would go on from {own.tag}; to go back to it, "
                       f"write {Path(config.load).name} into {Path(own.folder) / files.LATEST}, or --save elsewhere")
    elif own.path / _DELTA in manifest.files_of(own.path):
        base = f"; the weights that do not train come from its base, --load {config.load}"
    else:
        base = f"; --load {config.load} was its base and is not read again"
    spent = [flag for flag, given in (("--finetune", config.finetune), ("--no-load-optim", not config.load_optim),
                                      ("--reset-progress", config.reset_progress)) if given]
    return base + (f"; {', '.join(spent)} concerned the first start alone" if spent else "")


def _find(flag: str, folder: str, resume: bool, damaged: Mapping[str, str], *, optimizer: bool = True) -> _Found | None:
    """The checkpoint in ``folder``, or None where there is nothing of one; ``optimizer``: whether its optimizer files are needed.

    A resume may go on from an older tag than a damaged newest one; a base must be what it is
    said to be. Raises RunError naming the tags there when none can be chosen.
    """
    root = Path(folder)
    bad = {Path(path).name: what for path, what in damaged.items() if Path(path).parent == root}
    named = _named(flag, root, empty_too=resume)
    if named is not None or resume:
        try:
            tag, warning = manifest.usable_tag(root, damaged=bad, fallback=resume, optimizer=optimizer)
        except RunError as error:
            raise RunError(f"{flag} {error}{_tags_there(root)}") from None
        if tag is not None:
            return _Found(folder, tag, warning)
    tags = tags_in(root)
    if len(tags) == 1:
        return _whole(flag, _Found(folder, tags[0], f"{folder} has no file 'latest'; its only tag {tags[0]} is read"), bad, optimizer)
    if tags:
        raise RunError(f"{flag} {folder} holds the tags {_listed(tags)} but no file 'latest' that says which of them to "
                       f"read: write one of these names into {root / files.LATEST}"
                       + (f", or give {flag} {root / tags[-1]}" if flag != "--save" else ""))
    if flag == "--save":
        return None
    if _is_tag(root) and not resume:
        inside = root.resolve()
        bad = {inside.name: damaged[str(inside)]} if str(inside) in damaged else {}
        return _whole(flag, _Found(str(inside.parent), inside.name,
                                   f"{flag} {folder} is one tag itself, and is read whatever 'latest' beside it names"), bad, optimizer)
    if not resume and (found := _iteration(flag, root)):
        return found
    return _Found(folder, None) if is_hugging_face(root) else None


def _iteration(flag: str, root: Path) -> _Found | None:
    """A checkpoint of Megatron-LM without DeepSpeed in ``root``, or that ``root`` is; weights alone are read of it."""
    name = newest_iteration(root)
    if name and is_iteration_folder(root / name):
        return _Found(str(root), name)
    if name:
        raise RunError(f"{flag} {root}: its file {ITERATION} means {name}, but there is no such folder with files in it")
    if is_iteration_folder(root):
        inside = root.resolve()
        return _Found(str(inside.parent), inside.name)
    return None


def _whole(flag: str, found: _Found, bad: Mapping[str, str], optimizer: bool) -> _Found:
    """``found``, unless its files are not those of its manifest."""
    path = found.path
    if wrong := bad.get(path.name) or manifest.damage(path, optimizer=optimizer):
        raise RunError(f"{flag} {path} is damaged: {wrong}; copy it again, or load another tag")
    return found


def _named(flag: str, root: Path, *, empty_too: bool) -> str | None:
    """What ``latest`` says, None without such a file. Raises RunError for all that is not the name of a folder."""
    try:
        with open(root / files.LATEST, "rb") as file:
            text = file.read(4096).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{flag} {root}: its file 'latest' cannot be read ({error})") from None
    if not _TAG.fullmatch(text) and (text or not empty_too):
        raise RunError(f"{flag} {root}: its file 'latest' holds {text[:80]!r}, but should hold the name of one folder in it, "
                       f"such as global_step100{_tags_there(root)}")
    return text


def tags_in(folder: str | Path) -> list[str]:
    """Names of the folders in ``folder`` that hold a checkpoint, by number; unfinished saves are none."""
    root = Path(folder)
    found = [path.name for path in (root.iterdir() if root.is_dir() else ())
             if _TAG.fullmatch(path.name) and path.suffix not in (".part", ".old") and _is_tag(path)]
    return sorted(found, key=lambda name: [(int(part), "") if part.isdigit() else (0, part)
                                           for part in re.split(r"(\d+)", name)])


def _is_tag(path: Path) -> bool:
    return path.is_dir() and any(_PARTS.fullmatch(name) for name in os.listdir(path))


def is_hugging_face(folder: str | Path) -> bool:
    """Whether ``folder`` is laid out as transformers saves a model, and holds no checkpoint of ours."""
    root = Path(folder)
    return (root / "config.json").is_file() and not (root / files.LATEST).exists() and not tags_in(root) and not _is_tag(root)


def _tags_there(root: Path) -> str:
    tags = tags_in(root)
    return f" (tags there: {_listed(tags)})" if tags else ""


def _listed(tags: list[str]) -> str:
    return ", ".join(tags if len(tags) <= 8 else [*tags[:3], f"{len(tags) - 6} more", *tags[-3:]])


def _what_is(root: Path) -> str:
    if not root.exists():
        return "there is no such folder"
    if not root.is_dir():
        return "it is a file"
    if (root / "latest_universal").exists():
        return "latest_universal in it shows the universal format, which is not read; its DeepSpeed pipeline format is"
    if (root / ITERATION).exists():
        return f"{ITERATION} in it shows a run without DeepSpeed, of which weights are read: --load it with another --save"
    return "the folder is empty" if not any(root.iterdir()) else "no file 'latest' and no tag in it"


# --- all ranks ----------------------------------------------------------------------------------


def shared_plan(config: CheckpointConfig, context: ParallelContext, *, eval_only: bool = False) -> LoadPlan:
    """Collective: rank 0's plan, after every rank has seen the same files.

    With ``--verify-checkpoint`` the ranks divide the reading of the tag among themselves; a
    resume goes on from the tag before a damaged one. Raises SharedRunError on all ranks with the
    first rank's sentence.
    """
    damaged: dict[str, str] = {}
    while True:
        plan = _plan_of_rank_0(config, context, eval_only, damaged)
        if not (plan.folder and config.verify_checkpoint):
            return plan
        wrong = _gathered(context, manifest.damage(plan.path, True, share=(context.rank, context.world_size),
                                                   optimizer=plan.resume))
        if not any(wrong):
            return plan
        damaged[str(plan.path)] = next(sentence for sentence in wrong if sentence)


def _plan_of_rank_0(config: CheckpointConfig, context: ParallelContext, eval_only: bool, damaged: dict[str, str]) -> LoadPlan:
    plan, problem = LoadPlan(None, None), None
    theirs: dict[str, str] = {}
    if context.rank == 0:
        try:
            plan = plan_load(config, eval_only=eval_only, damaged=damaged)
            theirs = _sight(config, plan)
        except RunError as error:
            problem = str(error)
        except OSError as error:
            problem = f"the checkpoint cannot be looked at: {error}"
    box = [(plan, problem, theirs)]
    if context.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    plan, problem, theirs = box[0]
    agree(context, problem)
    difference = None
    for what, seen in (_sight(config, plan) if context.rank else theirs).items():
        if seen != theirs[what]:
            difference = f"sees {seen} in {what}, where rank 0 sees {theirs[what]}; all ranks need the same files"
            break
    agree(context, difference)
    return plan


def _gathered(context: ParallelContext, mine: str | None) -> list[str | None]:
    everyones = [mine]
    if context.world_size > 1:
        everyones *= context.world_size
        dist.all_gather_object(everyones, mine)
    return everyones


def _sight(config: CheckpointConfig, plan: LoadPlan) -> dict[str, str]:
    """What this rank finds on its disk, in words: path -> what is there."""
    seen = {}
    for folder in filter(None, (config.save, config.load)):
        path = Path(folder) / files.LATEST
        try:
            with open(path, "rb") as file:
                seen[str(path)] = repr(file.read(4096).decode(errors="replace"))
        except OSError as error:
            seen[str(path)] = "nothing" if Path(folder).is_dir() else f"no folder ({error.strerror})"
    if plan.folder:
        try:
            seen[str(plan.path)] = contents(plan.path)
        except OSError as error:
            seen[str(plan.path)] = f"nothing ({error.strerror})"
    return seen


def contents(folder: Path) -> str:
    """Identity of the files in and below ``folder`` without reading them all, as a sentence with 64 bits of SHA-256.

    Names, lengths, the manifest, and the end of each state file of rank 0: it is a zip file, which
    ends with checksums of all it holds, iteration and random states among them. Where a manifest says
    what the tag consists of, other files do not count. Raises OSError.
    """
    def fail(error: OSError):  # os.walk would pass over a folder that is not there
        raise error

    try:
        listed = manifest.read(folder) is not None
    except RunError:  # of another program: a Hugging Face folder may hold a file of that name
        listed = False
    if listed:
        paths = [*manifest.files_of(folder), folder / manifest.NAME]
    else:
        paths = [Path(where, name) for where, _, names in os.walk(folder, onerror=fail) for name in names]
    lengths = sorted((str(path.relative_to(folder)), path.stat().st_size) for path in paths)
    digest = hashlib.sha256(repr(lengths).encode())
    for path in (folder / manifest.NAME, files.mp_rank_file(folder, 0)):
        if path.exists():
            with open(path, "rb") as file:
                if path.name != manifest.NAME:
                    file.seek(max(0, path.stat().st_size - _TAIL))
                digest.update(file.read())
    total = sum(length for _, length in lengths)
    return f"{len(lengths)} files of {total:,} bytes (fingerprint {digest.hexdigest()[:16]})"
