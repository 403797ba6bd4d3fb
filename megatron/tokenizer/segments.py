"""Long texts cut where words begin, so that encoding one takes memory for a segment and not for all of it.

The ``tokenizers`` library keeps some 250 bytes per character of a text while it encodes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

#: characters encoded at once
SEGMENT = 1 << 20
_WORD_BEGINS = re.compile(r"(?<=\w) (?=\w)")


def segments(text: str, size: int, is_cut: Callable[[str, int], bool] | None = None) -> Iterator[str]:
    """Pieces of more than ``size`` characters (the last may have fewer) that make up ``text``.

    They are cut before a space that stands between word characters, and only where
    ``is_cut(text, position)`` holds, if that is given. Without such a place nothing is cut.
    """
    start = 0
    while len(text) - start > size:
        places = (match.start() for match in _WORD_BEGINS.finditer(text, start + size))
        cut = next((at for at in places if is_cut is None or is_cut(text, at)), None)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]
