"""The interface that preprocessing, the loop and the datasets know a tokenizer by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from megatron.errors import RunError

#: what a tokenizer may have an id for
ROLES = ("eod", "bos", "eos", "pad", "cls", "sep", "mask")


class MissingToken(RunError, AttributeError):
    """The tokenizer has no token for the role that was asked for."""


class Tokenizer(ABC):
    """Text to token ids and back.

    ``name`` says in one word or path what was loaded. ``vocab_size`` is the highest
    token id + 1, so added tokens and holes are counted. ``eod`` (ends a document),
    ``bos``, ``eos``, ``pad``, ``cls``, ``sep`` and ``mask`` are ids; one that the
    tokenizer lacks raises MissingToken (``has(role)`` asks first).
    """

    name: str
    vocab_size: int

    def __init__(self, name: str, vocab_size: int, special: Mapping[str, int]) -> None:
        self.name, self.vocab_size = name, vocab_size
        self._special = dict(special)

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``. Raises ValueError for text that UTF-8 cannot hold (lone surrogates)."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an unknown id."""

    def has(self, role: str) -> bool:
        """Whether there is an id for ``role`` (eod, bos, eos, pad, cls, sep or mask)."""
        return role in self._special

    def special(self, role: str) -> int:
        """The id for ``role``, or MissingToken."""
        try:
            return self._special[role]
        except KeyError:
            have = ", ".join(self._special) or "none"
            raise MissingToken(f"the tokenizer {self.name} has no {role} token (it has: {have})") from None

    eod = property(lambda self: self.special("eod"), doc="id that ends a document")
    bos = property(lambda self: self.special("bos"), doc="id that begins a text")
    eos = property(lambda self: self.special("eos"), doc="id that ends a text")
    pad = property(lambda self: self.special("pad"), doc="id that fills rows and counts for nothing")
    cls = property(lambda self: self.special("cls"), doc="id of the classification token")
    sep = property(lambda self: self.special("sep"), doc="id of the separator token")
    mask = property(lambda self: self.special("mask"), doc="id of the mask token")

    def describe(self) -> str:
        """One line: name, size, ids by role, and which roles share an id (a padding equal to eos, say)."""
        parts = [f"{self.name}: {self.vocab_size} token ids",
                 *(f"{role} {self._special[role]}" for role in ROLES if role in self._special)]
        shared: dict[int, list[str]] = {}
        for role in ROLES[1:]:  # eod is meant to be eos
            if role in self._special:
                shared.setdefault(self._special[role], []).append(role)
        parts += [f"{' and '.join(roles)} share id {i}" for i, roles in shared.items() if len(roles) > 1]
        return ", ".join(parts)

    def _check_text(self, text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, "
                             "which UTF-8 cannot hold") from None

    def _check_ids(self, ids: Sequence[int]) -> None:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is not one of {self.name}'s 0 .. {self.vocab_size - 1}")
