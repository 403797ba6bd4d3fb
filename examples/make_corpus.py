"""Make a small multilingual corpus from the translations that Django ships.

Django's gettext catalogues hold the same interface texts in about a hundred languages. Each
document is a run of consecutive messages of one catalogue in one language, one per line. The
documents of all languages take turns, so any stretch of the corpus is multilingual, and the
same Django version gives the same bytes. Every 20th document goes to valid.jsonl, the others
to corpus.jsonl; a line is {"text": ..., "language": ..., "source": ...}.

Needs the extra: pip install -e .[quickstart]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import regex

#: names of Django's locale folders; "en" is read from the untranslated messages
LANGUAGES = ("en", "de", "fr", "es", "pt_BR", "it", "pl", "tr", "vi", "id", "ru", "uk", "bg", "el", "ar", "fa",
             "he", "hi", "bn", "ta", "th", "ka", "zh_Hans", "ja", "ko")
SCRIPTS = ("Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Bengali", "Tamil", "Thai", "Georgian",
           "Han", "Hiragana", "Katakana", "Hangul", "Armenian", "Khmer", "Telugu", "Kannada", "Malayalam")
FEWEST_SCRIPTS = 5
MESSAGES_PER_DOCUMENT = 20
VALID_EVERY = 20
_INSTALL = "install the extra that the quickstart needs: pip install -e .[quickstart]"
_SCRIPT = {name: regex.compile(rf"\p{{Script={name}}}") for name in SCRIPTS}


class CorpusError(RuntimeError):
    """The corpus cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Document:
    """Consecutive messages of one catalogue."""

    text: str
    language: str
    source: str
    """catalogue, below the package: "contrib/admin/locale/de/LC_MESSAGES/django.po:21" with the first message's place"""


def django_folder() -> Path:
    """Where Django is installed; it is found, not imported. Raises CorpusError without it."""
    spec = importlib.util.find_spec("django")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(f"the package django is not installed; {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def messages(catalogue: Path, language: str) -> Iterator[str]:
    """Finished translations of a .po file in its order; for "en" the messages themselves.

    Fuzzy, empty and obsolete entries are left out. A plural gives each of its
    different forms once.
    """
    try:
        import polib
    except ImportError:
        raise CorpusError(f"the package polib is not installed; {_INSTALL}") from None
    for entry in polib.pofile(str(catalogue), encoding="utf-8"):
        if entry.obsolete or entry.fuzzy:
            continue
        if language == "en":
            forms = [entry.msgid, entry.msgid_plural]
        elif entry.msgid_plural:
            forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
        else:
            forms = [entry.msgstr]
        yield from dict.fromkeys(form.strip() for form in forms if form and form.strip())


def documents(root: Path, language: str, size: int = MESSAGES_PER_DOCUMENT) -> list[Document]:
    """All documents of ``language``, each of ``size`` messages or the rest of a catalogue."""
    made = []
    # where Django keeps them; "**" would walk the whole package for every language
    catalogues = [path for place in ("conf", "contrib/*")
                  for path in root.glob(f"{place}/locale/{language}/LC_MESSAGES/*.po")]
    for path in sorted(catalogues):
        found = list(messages(path, language))
        for start in range(0, len(found), size):
            made.append(Document("\n".join(found[start:start + size]), language,
                                 f"{path.relative_to(root).as_posix()}:{start + 1}"))
    return made


def take_turns(groups: Iterable[list[Document]]) -> list[Document]:
    """First documents of all groups, then second ones, and so on; shorter groups spread over the whole."""
    placed = [((i + 0.5) / len(group), order, document)
              for order, group in enumerate(groups) for i, document in enumerate(group)]
    return [document for _, _, document in sorted(placed, key=lambda each: each[:2])]


def scripts_of(texts: Iterable[str]) -> Counter:
    """Letters per script."""
    counts: Counter = Counter()
    for text in texts:
        for name, pattern in _SCRIPT.items():
            counts[name] += len(pattern.findall(text))
    return +counts


def table(groups: dict[str, list[Document]]) -> tuple[str, set[str]]:
    """language, documents, characters and main script, as text; and the set of main scripts."""
    lines, scripts = [f"{'language':<10}{'documents':>10}{'characters':>12}  script"], set()
    for language, group in groups.items():
        counts = scripts_of(document.text for document in group)
        # placeholders such as %(name)s are Latin in every language
        others = [(count, name) for name, count in counts.items() if name != "Latin" and count > counts["Latin"] / 2]
        main = max(others)[1] if others else "Latin"
        scripts.add(main)
        characters = sum(len(document.text) for document in group)
        lines.append(f"{language:<10}{len(group):>10}{characters:>12}  {main}")
    return "\n".join(lines), scripts


def write_jsonl(path: Path, made: Iterable[Document]) -> None:
    """One line per document, UTF-8; the file appears whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(vars(document), ensure_ascii=False) + "\n" for document in made)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def make_corpus(folder: Path, languages: Iterable[str] = LANGUAGES, min_languages: int = 12) -> str:
    """Write corpus.jsonl and valid.jsonl into ``folder``; returns the table that describes them.

    ``languages`` are names of Django's locale folders, or "all" alone.
    Raises CorpusError when a package is missing, or when fewer than
    ``min_languages`` languages or FEWEST_SCRIPTS scripts are found.
    """
    root = django_folder()
    if list(languages) == ["all"]:
        languages = sorted({path.name for path in root.glob("conf/locale/*") if path.is_dir()} - {"__pycache__"})
    groups = {language: made for language in languages if (made := documents(root, language))}
    if len(groups) < min_languages:
        raise CorpusError(f"Django in {root} has catalogues of {len(groups)} of the languages asked for; "
                          f"--min-languages is {min_languages}")
    text, scripts = table(groups)
    if len(scripts) < FEWEST_SCRIPTS:
        raise CorpusError(f"the languages {', '.join(groups)} are written in {len(scripts)} scripts "
                          f"({', '.join(sorted(scripts))}); choose some of at least {FEWEST_SCRIPTS}")
    everything = take_turns(groups.values())
    valid = everything[VALID_EVERY - 1::VALID_EVERY]
    train = [document for i, document in enumerate(everything, 1) if i % VALID_EVERY]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "valid.jsonl", valid)
    write_jsonl(folder / "corpus.jsonl", train)
    version = importlib.metadata.version("django")
    return (f"{text}\nDjango {version}: {len(groups)} languages, {len(scripts)} scripts, "
            f"{len(train)} documents in {folder / 'corpus.jsonl'}, {len(valid)} in {folder / 'valid.jsonl'}")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after one sentence on stderr."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="folder for the two files")
    p.add_argument("--languages", nargs="+", default=LANGUAGES, metavar="NAME",
                   help=f"Django's locale folders, or all (default: {' '.join(LANGUAGES)})")
    p.add_argument("--min-languages", type=int, default=12, metavar="N",
                   help="fail when fewer are found (default: 12)")
    args = p.parse_args(argv)
    try:
        print(make_corpus(args.output_dir, dict.fromkeys(args.languages), args.min_languages))
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
