"""What a complete tag consists of, and which tag of a folder can be used.

``SAVE/TAG/manifest.json`` is the last file written into a tag: name, length and CRC-32 of
every other file, computed while they were written. A tag whose files differ from it is
damaged. A file that it does not list is no part of the tag, whatever its name, and is never
read (`files_of`). CRC-32 (ISO 3309, ``zlib``) finds what disks and killed jobs do to a file; it
is no protection against somebody who changes files on purpose.

Tags without a manifest, of older versions and of other programs, are used as they are.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.checkpoint import files
from megatron.errors import RunError

NAME = "manifest.json"
FORMAT = 1
#: a tag of ours; with a dot (`files.aside`) it was being replaced or removed when its job was killed
_TAG = re.compile(r"global_step(\d+)|(\.)global_step(\d+)\.old")
#: names of files that are read as part of a tag, of which those of the optimizer end in _OPTIMIZER
_PART = re.compile(r"(layer_\d+-model_\d+-model_states|mp_rank_\d+_model_states|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states)"
                   r"\.pt|delta\.safetensors")
_OPTIMIZER = "_optim_states.pt"
_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class Entry:
    """One file of a tag."""

    name: str
    bytes: int
    crc32: str
    """eight hexadecimal digits"""


@dataclass(frozen=True)
class Manifest:
    """What a tag holds, and where it stands in its folder."""

    iteration: int
    run: str
    """drawn at the first start of a run, kept by each resume: whose tag this is"""
    sequence: int
    """1 for the first tag saved into a folder, then one more for each"""
    degrees: dict[str, int]
    """tp, pp and dp of the job that saved"""
    dtype: str
    files: tuple[Entry, ...]


def write(folder: Path, manifest: Manifest) -> None:
    """Put ``manifest`` into ``folder`` in one step."""
    facts = {**asdict(manifest), "format": FORMAT,
             "files": {entry.name: {"bytes": entry.bytes, "crc32": entry.crc32} for entry in manifest.files}}
    files.write_text(folder / NAME, json.dumps(facts, indent=1, sort_keys=True) + "\n")


def read(folder: Path) -> Manifest | None:
    """The manifest in ``folder``, None without one.

    Raises RunError for one that cannot be understood.
    """
    path = folder / NAME
    try:
        facts = json.loads(path.read_bytes())
        if facts.pop("format") != FORMAT:
            raise RunError(f"{path} is of a later version of this program")
        entries = tuple(Entry(name, **entry) for name, entry in facts.pop("files").items())
        if any(Path(entry.name).name != entry.name for entry in entries):
            raise ValueError("a file outside the folder")
        manifest = Manifest(**facts, files=entries)
        numbers = manifest.iteration, manifest.sequence, *(entry.bytes for entry in entries)
        if any(type(number) is not int for number in numbers):
            raise ValueError("a length, iteration or sequence that is no whole number")
        return manifest
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error})") from None


def crc32_of(path: Path) -> str:
    """Checksum of a file as it is on disk."""
    value, buffer = 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as source:
        while count := source.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return f"{value:08x}"


def files_of(folder: Path) -> list[Path]:
    """The files of the tag in ``folder`` that are there, by name: those its manifest lists, without one all.

    Whoever looks for files of a tag looks here, so that shares of other degrees, left or copied into the
    folder, are not taken for parts of it. Raises RunError for a manifest that cannot be understood.
    """
    manifest = read(folder)
    listed = None if manifest is None else {entry.name for entry in manifest.files}
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in there if listed is None or path.name in listed]


def unlisted(folder: Path) -> list[str]:
    """Names of files in ``folder`` that look like parts of the tag, but are not in its manifest; [] without one."""
    known = {path.name for path in files_of(folder)}
    return [path.name for path in sorted(folder.iterdir() if folder.is_dir() else ())
            if path.name not in known and _PART.fullmatch(path.name)]


def notes(folder: Path) -> tuple[str, ...]:
    """What the user should hear of files in ``folder`` that are left out: one sentence, or none."""
    names = unlisted(folder)
    return (f"{folder}: {named(names)} ignored: not in {NAME}, which lists all files of this checkpoint",) if names else ()


def named(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"


def damage(folder: Path, verify: bool = False, *, share: tuple[int, int] = (0, 1), optimizer: bool = True) -> str | None:
    """What is wrong with the tag in ``folder``, naming the file; None where all is well.

    Lengths are always compared, checksums with ``verify``, of every n-th file from the i-th
    on for a ``share`` (i, n), so that ranks can divide the reading. Without ``optimizer`` files of
    optimizer state do not matter: they may be gone, as where only weights were published. Files that
    are not listed do not matter either. A tag without a manifest passes if the folder exists.
    """
    if not folder.is_dir():
        return f"there is no folder {folder.name}"
    try:
        manifest = read(folder)
        if manifest is None:
            return None
        found = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except (OSError, RunError) as error:
        return str(error)
    wanted = [entry for entry in manifest.files if optimizer or not entry.name.endswith(_OPTIMIZER)]
    for entry in wanted:
        if entry.name not in found:
            return f"{folder / entry.name} is missing, {NAME} lists it"
        if found[entry.name] != entry.bytes:
            return f"{folder / entry.name} has {found[entry.name]:,} bytes, {NAME} says {entry.bytes:,}"
    by_size = sorted(wanted, key=lambda entry: (-entry.bytes, entry.name))
    for entry in by_size[share[0]::share[1]] if verify else ():
        try:
            seen = crc32_of(folder / entry.name)
        except OSError as error:
            return str(error)
        if seen != entry.crc32:
            return f"{folder / entry.name} has checksum {seen}, {NAME} says {entry.crc32}"
    return None


@functools.lru_cache(4096)
def _facts(folder: Path, *identity: int) -> Manifest | None:
    """The manifest in ``folder`` without its list of files; ``identity`` changes when the file does."""
    manifest = read(folder)
    return manifest and replace(manifest, files=())


def tags_with_manifest(folder: str | Path) -> list[tuple[str, Manifest | None]]:
    """Tags saved into ``folder`` by this program, newest first, damaged ones included; their lists of files left out.

    Where a manifest cannot be read it is None, and the tag comes last. Links and folders of
    other names or without a manifest are not among them.
    """
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        match = _TAG.fullmatch(path.name)
        if not match or path.is_symlink() or not (path / NAME).is_file():
            continue
        try:
            stat = (path / NAME).stat()  # a save asks each time, and runs may keep hundreds of tags of thousands of files
            manifest = _facts(path, stat.st_mtime_ns, stat.st_ino, stat.st_size)
        except (OSError, RunError):
            manifest = None
        age = (manifest.sequence if manifest else 0, int(match[1] or match[3]), not match[2])
        found.append((age, path.name, manifest))
    return [(name, manifest) for _, name, manifest in sorted(found, key=lambda each: each[0], reverse=True)]


def newest_valid_tag(folder: str | Path, verify: bool = False, *, damaged: Mapping[str, str] | None = None,
                     optimizer: bool = True) -> str | None:
    """The tag saved last into ``folder`` of those whose files match their manifest, or None.

    ``damaged``: tags that are known to be damaged, as by checksums that ranks compared; ``optimizer``
    as in `damage`.
    """
    for tag, _ in tags_with_manifest(folder):
        if tag not in (damaged or {}) and damage(Path(folder) / tag, verify, optimizer=optimizer) is None:
            return tag
    return None


def usable_tag(folder: str | Path, verify: bool = False, *, damaged: Mapping[str, str] | None = None,
               fallback: bool = True, optimizer: bool = True) -> tuple[str | None, str | None]:
    """The tag to read from ``folder`` and what must be said about it: (tag, warning).

    That is the tag ``latest`` names. Where it names none, or a damaged one, the newest valid
    tag is taken and the warning says what was wrong. A tag without a manifest is taken
    with a note. (None, None): the folder holds no checkpoint of which anything can be said.

    Without ``fallback`` no other tag than the named one is taken, which suits all that is
    no resume: other weights are no continuation. ``damaged`` and ``optimizer`` are as in `newest_valid_tag`.
    Raises RunError naming the damaged file when no usable tag is left.
    """
    folder = Path(folder)
    tag = files.latest_tag(folder)
    wrong: str | None
    if tag is None:
        wrong = "has no file 'latest'"
    elif not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        wrong = f"its file 'latest' names {tag or 'nothing'}, but there is no such folder in it"
    else:
        wrong = (damaged or {}).get(tag) or damage(folder / tag, verify, optimizer=optimizer)
        if wrong is None:
            return tag, None if (folder / tag / NAME).is_file() else (
                f"{folder / tag} has no {NAME} (saved by another program or an older version): "
                "whether its files are complete is not checked")
        wrong = f"{tag} is damaged: {wrong}"
    known = tags_with_manifest(folder)
    if tag is None and not known:
        return None, None
    other = newest_valid_tag(folder, verify, damaged=damaged, optimizer=optimizer) if fallback else None
    if other is None:
        more = "" if not fallback else "; no other checkpoint in it is complete" if known else (
            "; no other checkpoint in it is known to be complete")
        raise RunError(f"{folder}: {wrong}{more}; copy the checkpoint again, or name a complete tag in "
                       f"{folder / files.LATEST}")
    return other, f"{folder}: {wrong}; continuing from {other}, the newest complete checkpoint in it"
