"""Command line -> validated, frozen Settings. The only module that knows argparse.

Every check is made before a process group or file exists. Imports neither torch
nor deepspeed. A fault ends the process with exit code 2 and one sentence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron.argument_table import (
    ENTRIES,
    NO_EFFECT,
    REFUSED,
    USED,
    Flag,
    amount,
    count,
    positive,
    share,
    text,
    whole,
    word,
)
from megatron.arguments_check import UsageError, check_arguments, named
from megatron.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Settings,
    TokenizerConfig,
    TrainConfig,
)
from megatron.deepspeed_config import check_against_flags, fold_deepspeed_config, read_deepspeed_config
from megatron.world import rank_text, read_world

_NOT_GIVEN = object()
_DUMP_WIDTH = 48
_METAVARS = {count: "N", whole: "N", int: "N", positive: "X", amount: "X", share: "X", word: "true|false"}


class _Parser(argparse.ArgumentParser):
    """Prints one sentence instead of the whole usage; silent when ``quiet``."""

    quiet = False
    #: a sentence per refused flag, said all at once: on a cluster each start may wait hours in a queue
    refused: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.refused = ()
        parsed = super().parse_known_args(args, namespace)
        if self.refused:
            self.error("")
        return parsed

    def error(self, message: str) -> NoReturn:
        # what else is wrong may follow from them: --batch-size in place of --micro-batch-size
        message = ". ".join(self.refused) or message
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            near = get_close_matches(unknown.split()[0].split("=")[0], self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else "; --help lists all flags and what they take"
        message = message.replace("ignored explicit argument", "takes no value; leave out")
        self.exit(2, None if self.quiet else f"{self.prog}: error: {message}\n")


class _Refuse(argparse.Action):
    """The action of a flag this program cannot honour: an error naming flag, value and remedy."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, neutral: tuple[str, ...] = (), why: str = "",
                 **more: Any) -> None:
        super().__init__(option_strings, dest, nargs="*", **more)
        self.neutral, self.why = neutral, why

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        given = " ".join(values)
        if given.lower() not in self.neutral:
            parser.refused += (f"{' '.join([option_string, *values])}: {self.why}",)
        setattr(namespace, self.dest, given)


def _help(flag: Flag) -> str:
    text = flag.help.replace("%", "%%")
    if flag.required:
        return f"{text} (required)"
    if flag.kind is None:
        return f"{text} (default: off)"
    return f"{text} (default: {'not set' if flag.default is None else flag.default})"


def _add(group: argparse._ArgumentGroup, flag: Flag, entry: str) -> None:
    why = flag.refused
    if flag.entry not in (None, entry):
        why = f"belongs to {flag.entry}.py; leave it out here"
    if why:
        shown = argparse.SUPPRESS if flag.hidden else why
        group.add_argument(flag.name, action=_Refuse, why=why, neutral=flag.neutral, dest=flag.field, help=shown,
                           metavar="VALUE")
        return
    shown = flag.help if flag.no_effect else _help(flag)
    names = (flag.name, *flag.aliases)
    if flag.kind is None:
        group.add_argument(*names, dest=flag.field, action="store_const", const=not flag.negative,
                           default=flag.default, help=shown)
        return
    # choices and --bitfit-bias-terms say themselves what is allowed instead of nothing
    kind = text if flag.kind is str and not (flag.choices or flag.empty or flag.no_effect) else flag.kind
    metavar = None if flag.choices else _METAVARS.get(flag.kind, "TEXT")
    group.add_argument(*names, dest=flag.field, type=kind, default=flag.default, help=shown, metavar=metavar,
                       choices=flag.choices, required=flag.required, nargs=("*" if flag.empty else "+") if flag.many else None)


def build_parser(entry: str = "pretrain_gpt") -> _Parser:
    """The grouped parser of ``entry`` (pretrain_gpt or finetune_t0); knows types, not rules between flags."""
    if entry not in ENTRIES:
        raise ValueError(f"entry {entry!r} is not one of {', '.join(ENTRIES)}")
    parser = _Parser(prog=f"{entry}.py", allow_abbrev=False, usage="%(prog)s FLAGS",
                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
                     description="Megatron-DeepSpeed compatible training with tensor, pipeline and data parallelism.")
    absent: list[Flag] = list(REFUSED)
    for title, table in USED.items():
        group = parser.add_argument_group(title)
        for flag in table:
            if flag.entry in (None, entry):
                _add(group, flag, entry)
            else:
                absent.append(flag)
    for title, table in (("accepted for old scripts, without effect here", NO_EFFECT),
                         ("refused with an error", tuple(absent))):
        group = parser.add_argument_group(title)
        for flag in table:
            _add(group, flag, entry)
    return parser


def _flags_of(entry: str) -> list[Flag]:
    return [flag for table in USED.values() for flag in table if flag.entry in (None, entry)]


def _looks_like_rank_zero(environ: Mapping[str, str]) -> bool:
    return rank_text(environ) == "0"


def parse_arguments(argv: Sequence[str] | None = None, *, entry: str = "pretrain_gpt",
                    environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings of this process from ``argv`` (default: sys.argv) and the launcher's variables.

    A fault of the arguments is printed by rank 0, a fault only this rank may see (a
    file, the environment) by every rank; the process exits with code 2 (SystemExit).
    """
    parser = build_parser(entry)
    quiet = parser.quiet = not _looks_like_rank_zero(environ)
    values, given = read_flags(parser, argv, entry)
    try:
        return settings_from(values, given, entry, environ)
    except UsageError as error:
        parser.quiet = quiet and not error.local
        parser.error(f"rank {rank_text(environ)}: {error}" if quiet else str(error))


def read_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None,
               entry: str) -> tuple[dict[str, Any], set[str]]:
    """(field -> value of every flag, fields of the flags that stood in ``argv``), rules not yet checked."""
    # Preset attributes keep argparse from filling in defaults, which tells given flags from others.
    slots = {action.dest: _NOT_GIVEN for action in parser._actions if action.dest != "help"}
    parsed = vars(parser.parse_args(argv, argparse.Namespace(**slots)))
    given = {name for name, value in parsed.items() if value is not _NOT_GIVEN}
    known = {flag.field for flag in _flags_of(entry)}
    return {name: value if name in given else parser.get_default(name)
            for name, value in parsed.items() if name in known | given}, given


def settings_from(values: dict[str, Any], given: set[str], entry: str, environ: Mapping[str, str]) -> Settings:
    """Settings from what ``read_flags`` returned. Raises UsageError for the first broken rule."""
    world = read_world(environ, values["local_rank"])
    values.update(rank=world.rank, world_size=world.world_size, local_rank=world.local_rank)
    derived = check_arguments(values, given, entry)
    config = None
    if values["deepspeed_config"] is not None:
        with named(f"--deepspeed_config {values['deepspeed_config']}"):
            config = read_deepspeed_config(values["deepspeed_config"])
            derived |= fold_deepspeed_config(config, given)
    flags = values | {name: value for name, value in derived.items() if _plain(value)}
    values |= derived
    settings = Settings(
        model=_fill(ModelConfig, values), parallel=_fill(ParallelConfig, values | asdict(world)),
        optimizer=_fill(OptimizerConfig, values), train=_fill(TrainConfig, values),
        checkpoint=_fill(CheckpointConfig, values), data=_fill(DataConfig, values),
        tokenizer=_fill(TokenizerConfig, values), logging=_fill(LoggingConfig, values),
        deepspeed=config, flags=flags)
    if config is not None:
        with named(f"--deepspeed_config {values['deepspeed_config']}"):
            check_against_flags(config, settings)
    return settings


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or (
        isinstance(value, list) and all(_plain(item) for item in value))


def _fill(cls: type, values: Mapping[str, Any]) -> Any:
    """``cls`` from the values of its field names; what is None keeps the field's default."""
    mine = {field.name: values[field.name] for field in fields(cls) if values.get(field.name) is not None}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in mine.items()})


def accepted_without_effect(settings: Settings) -> list[str]:
    """Names of the flags that were given but change nothing here, for one line at the start."""
    return [flag.name for flag in (*NO_EFFECT, *REFUSED) if flag.field in settings.flags]


def format_argument_dump(settings: Settings) -> str:
    """Lines ``  name ....... value`` between lines of dashes, sorted case-insensitively by name.

    Dots pad the name to 48 columns, as log parsers of the old trainers expect.
    """
    lines = [f"  {name} {'.' * (_DUMP_WIDTH - len(name))} {settings.flags[name]}"
             for name in sorted(settings.flags, key=str.lower)]
    return "\n".join([" arguments ".center(60, "-"), *lines, " end of arguments ".center(60, "-")])
