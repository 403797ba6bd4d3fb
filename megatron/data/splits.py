"""Text forms of "which part of which dataset": --split, --data-path and weighted split paths.

Pure Python, so that the command line can be checked before anything is imported
or opened. Every error is a ValueError naming the flag and the offending text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.config import SplitGroup


def _number(flag: str, text: str, what: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan  # float() reads the digits of every script
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{flag}: {what} {text.strip()!r} is not a finite number")
    return value


def parse_split(text: str) -> tuple[float, float, float]:
    """Fractions of train, valid and test, summing to 1, from e.g. ``"969, 30, 1"`` or ``"9/1"``.

    The separator is a comma, else a slash; missing parts are zero.
    """
    separator = "," if "," in text else "/"
    parts = [_number("--split", part, "part") for part in text.split(separator)]
    if len(parts) > 3:
        raise ValueError(f"--split {text!r} has {len(parts)} parts; at most three are allowed: "
                         "train, valid, test")
    if min(parts) < 0:
        raise ValueError(f"--split {text!r} has a negative part; parts must be zero or more")
    total = sum(parts)
    if not 0 < total < math.inf:
        raise ValueError(f"--split {text!r} sums to {total}; the sum must be positive and finite")
    train, valid, test = [part / total for part in parts] + [0.0] * (3 - len(parts))
    return train, valid, test


def split_boundaries(split: Sequence[float], n: int) -> list[int]:
    """Four document numbers: split k holds documents ``[b[k], b[k + 1])`` of ``n``.

    Each share is rounded half to even; what the rounded shares have too much or
    too little is taken from every boundary but the first. [BUG] in the trainers
    users come from this may give a negative boundary (``0,50,50`` of 3
    documents), which reads documents from the end; here it is zero.
    """
    boundaries = [0]
    for fraction in split:
        boundaries.append(boundaries[-1] + round(fraction * n))
    excess = boundaries[-1] - n
    return [0] + [max(0, boundary - excess) for boundary in boundaries[1:]]


def _parse_part(flag: str, text: str) -> tuple[float, tuple[float, float], str]:
    fields = text.split()
    if len(fields) != 3:
        raise ValueError(f"{flag}: {text.strip()!r} has {len(fields)} fields; expected WEIGHT START:END PATH "
                         "(so a path may hold neither spaces nor commas)")
    weight = _number(flag, fields[0], "weight")
    if weight < 0:
        raise ValueError(f"{flag}: weight {fields[0]} in {text.strip()!r} is negative; "
                         "it must be zero or more")
    ends = fields[1].split(":")
    if len(ends) != 2:
        raise ValueError(f"{flag}: range {fields[1]!r} in {text.strip()!r} is not of the form START:END")
    start, end = (_number(flag, value, "range limit") for value in ends)
    if not 0 <= start < end <= 1:
        raise ValueError(f"{flag}: range {fields[1]!r} in {text.strip()!r} must satisfy "
                         "0 <= START < END <= 1")
    return weight, (start, end), fields[2]


def _parse_group(flag: str, argument: str) -> SplitGroup:
    name, colon, rest = argument.partition(":")
    name = name.strip()
    if not colon or not name:
        raise ValueError(f"{flag}: {argument!r} has no name; expected 'NAME: WEIGHT START:END PATH, ...'")
    weights, splits, paths = zip(*(_parse_part(flag, part) for part in rest.split(",")))
    if len(paths) > 1 and not 0 < sum(weights) < math.inf:
        raise ValueError(f"{flag}: the weights of group {name!r} sum to {sum(weights)}; "
                         "the sum must be positive and finite")
    return SplitGroup(name=name, paths=paths, weights=weights, splits=splits)


def parse_weighted_groups(flag: str, arguments: Sequence[str]) -> tuple[SplitGroup, ...]:
    """Groups ``NAME: W S:E PATH[, W S:E PATH]*``, one per shell argument of ``flag``.

    A flag that begins with ``--train-`` takes exactly one group, others one or
    more with distinct names. Weights stay as given (not normalised).
    """
    groups = tuple(_parse_group(flag, argument) for argument in arguments)
    if not groups:
        raise ValueError(f"{flag}: no group given; expected 'NAME: WEIGHT START:END PATH, ...'")
    if flag.startswith("--train-") and len(groups) > 1:
        raise ValueError(f"{flag}: {len(groups)} groups given ({', '.join(group.name for group in groups)}); "
                         "training takes exactly one, with its datasets separated by commas")
    seen: set[str] = set()
    for group in groups:
        if group.name in seen:
            raise ValueError(f"{flag}: the name {group.name!r} is given to more than one group")
        seen.add(group.name)
    return groups


def read_weighted_groups_file(flag: str, path: str) -> tuple[SplitGroup, ...]:
    """Groups from a file of one line: ``"group" "group" ...``, each in double quotes."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {path!r} cannot be read: {error}") from error
    if len(lines) != 1:
        raise ValueError(f"{flag}: {path!r} holds {len(lines)} lines; it must hold exactly one")
    line = lines[0]
    if len(line) < 2 or line[0] != '"' or line[-1] != '"':
        raise ValueError(f"{flag}: the line of {path!r}, {line!r}, must begin and end with a double quote")
    groups = line[1:-1].split('" "')
    for group in groups:
        if '"' in group:
            raise ValueError(f"{flag}: {path!r} has a stray double quote in {group!r}; "
                             "groups are separated by quote, one space, quote")
    return parse_weighted_groups(f"{flag} {path!r}", groups)


def parse_data_path(arguments: Sequence[str]) -> tuple[list[str], list[float]]:
    """Prefixes and weights from ``P`` or ``W1 P1 W2 P2 ...`` (weights as given)."""
    if len(arguments) == 1:
        return [arguments[0]], [1.0]
    if not arguments or len(arguments) % 2:
        raise ValueError(f"--data-path: {len(arguments)} values given ({' '.join(arguments)!r}); "
                         "expected one prefix, or weight and prefix in turn")
    weights = [_number("--data-path", text, "weight") for text in arguments[::2]]
    for text, weight in zip(arguments[::2], weights):
        if weight < 0:
            raise ValueError(f"--data-path: weight {text} is negative; it must be zero or more")
    if not 0 < sum(weights) < math.inf:
        raise ValueError(f"--data-path: the weights sum to {sum(weights)}; "
                         "the sum must be positive and finite")
    return list(arguments[1::2]), weights
