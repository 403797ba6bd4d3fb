"""A small rule-based sentence splitter for many scripts. It is not NLTK's punkt and learns nothing.

A sentence ends

* after a character that Unicode calls a sentence terminal (``Sentence_Terminal``:
  . ! ? and those of some forty other scripts) with the closing quotes and brackets
  behind it, when whitespace follows; after the wide terminals of Chinese and
  Japanese also without whitespace;
* at an empty line.

A full stop does not end one when the next word begins with a small letter ("e.g. this"),
or when the word before it is a single letter ("J. Smith", "U.S. law").
"""

from __future__ import annotations

import regex

_CLOSING = r"[\p{Pe}\p{Pf}\p{Quotation_Mark}]*"
_WIDE = "。！？｡．"
_OTHER = rf"[\p{{STerm}}--[.{_WIDE}]]"
# every alternative is tried once per run of its characters, so a long run costs linear time
_END = regex.compile(rf"""
      (?: (?<! (?:^|\P{{L}})\p{{L}} ) \. {_CLOSING} (?=\s) (?! \s+ \p{{Ll}} )
        | (?<! {_OTHER} ) {_OTHER}++ {_CLOSING} (?=\s)
        | [{_WIDE}]+ {_CLOSING}
        | (?<=\S) (?= \s*? \n [^\S\n]* \n )
      ) (?P<gap>\s*)
""", regex.VERBOSE | regex.VERSION1)


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences of ``text`` in order, without the whitespace between them; never an empty one.

    With ``keep_newlines`` the line breaks behind a sentence stay at its end.
    """
    sentences, start = [], 0
    cuts = [(match.start("gap"), match.end("gap")) for match in _END.finditer(text)]
    for end, resume in [*cuts, (len(text.rstrip()), len(text))]:
        sentence = text[start:end].strip()
        if sentence:
            sentences.append(sentence + "\n" * (text.count("\n", end, resume) if keep_newlines else 0))
        start = max(start, resume)
    return sentences
