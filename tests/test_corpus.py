"""The quickstart's corpus: what is read from Django's catalogues, and what ends up in the files."""

import gettext
import json
import os
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import make_corpus

SOME = ("en", "ru", "el", "he", "hi", "th")
PO = r'''
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\n"

msgid "one"
msgstr "eins"

#, fuzzy
msgid "two"
msgstr "falsch"

msgid "three"
msgstr ""

msgid "four"
msgid_plural "fours"
msgstr[0] "vier"
msgstr[1] "viere"

msgid "five"
msgid_plural "fives"
msgstr[0] "fünf"
msgstr[1] "fünf"

#~ msgid "old"
#~ msgstr "alt"
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, make_corpus.make_corpus(folder)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_fuzzy_empty_and_obsolete_messages_are_left_out(tmp_path):
    (tmp_path / "x.po").write_text(PO, encoding="utf-8")
    assert list(make_corpus.messages(tmp_path / "x.po", "de")) == ["eins", "vier", "viere", "fünf"]
    assert list(make_corpus.messages(tmp_path / "x.po", "en")) == ["one", "three", "four", "fours", "five", "fives"]


def test_documents_are_runs_of_messages_of_one_catalogue(tmp_path):
    for app, count in (("conf", 5), ("contrib/b", 1)):
        folder = tmp_path / app / "locale" / "de" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "django.po").write_text("\n".join(f'msgid "{i}"\nmsgstr "{app[-1].upper()}{i}"\n' for i in range(count)))
    found = [(d.text, d.source) for d in make_corpus.documents(tmp_path, "de", size=2)]
    place = "locale/de/LC_MESSAGES/django.po"
    assert found == [("F0\nF1", f"conf/{place}:1"), ("F2\nF3", f"conf/{place}:3"), ("F4", f"conf/{place}:5"),
                     ("B0", f"contrib/b/{place}:1")]


def test_the_corpus_has_many_languages_and_scripts_by_unicode_names(made):
    folder, table = made
    records = lines(folder / "corpus.jsonl") + lines(folder / "valid.jsonl")
    assert all(set(record) == {"text", "language", "source"} and record["text"].strip() for record in records)
    by_language = {}
    for record in records:
        # the first word of a letter's Unicode name is its script: an independent count
        names = (unicodedata.name(c, "?").split()[0] for c in record["text"] if c.isalpha())
        by_language.setdefault(record["language"], Counter()).update(names)
    assert set(by_language) == set(make_corpus.LANGUAGES) and len(by_language) >= 20
    scripts = {counts.most_common(1)[0][0] for counts in by_language.values()}
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "CJK", "HANGUL"} <= scripts
    assert all(language in table for language in by_language)


def test_no_catalogue_of_django_is_missed():
    root = make_corpus.django_folder()
    sources = {d.source.rsplit(":", 1)[0] for d in make_corpus.documents(root, "de")}
    assert sources == {p.relative_to(root).as_posix() for p in root.rglob("de/LC_MESSAGES/*.po")}


def test_every_twentieth_document_is_held_out_and_none_is_lost(tmp_path):
    make_corpus.make_corpus(tmp_path, SOME, min_languages=6)
    train, valid = lines(tmp_path / "corpus.jsonl"), lines(tmp_path / "valid.jsonl")
    root = make_corpus.django_folder()
    expected = Counter(d.source for language in SOME for d in make_corpus.documents(root, language))
    assert Counter(record["source"] for record in train + valid) == expected and max(expected.values()) == 1
    assert len(valid) == (len(train) + len(valid)) // 20
    # languages take turns: a tenth of the corpus already holds all of them
    assert {record["language"] for record in train[:len(train) // 10]} == set(SOME)


def test_the_translations_are_those_of_the_compiled_catalogue(made):
    folder, _ = made
    record = next(r for r in lines(folder / "corpus.jsonl") if r["source"].startswith("conf/locale/ru/LC_MESSAGES/django.po"))
    with open(make_corpus.django_folder() / "conf/locale/ru/LC_MESSAGES/django.mo", "rb") as file:
        catalogue = gettext.GNUTranslations(file)
    known = {text.strip() for text in catalogue._catalog.values() if isinstance(text, str)}
    assert set(record["text"].split("\n")) <= {line for text in known for line in text.split("\n")}


def test_the_same_django_gives_the_same_bytes_and_no_other_file(tmp_path):
    for name in ("a", "b"):  # processes of different hash seeds
        subprocess.run([sys.executable, str(ROOT / "examples" / "make_corpus.py"), "--output-dir", str(tmp_path / name),
                        "--min-languages", "6", "--languages", *SOME], check=True, capture_output=True,
                       env={**os.environ, "PYTHONHASHSEED": str(ord(name))})
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["corpus.jsonl", "valid.jsonl"]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("package, why", [("django", "find_spec"), ("polib", "import")])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, capsys, package, why):
    if why == "find_spec":
        monkeypatch.setattr(make_corpus.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, package, None)
    assert make_corpus.main(["--output-dir", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert package in said and "pip install -e .[quickstart]" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv, message", [
    (["--languages", "de", "fr"], "--min-languages is 12"),
    (["--languages", "de", "xx", "--min-languages", "2"], "catalogues of 1 of"),
    (["--languages", "de", "fr", "ru", "--min-languages", "3"], "in 2 scripts (Cyrillic, Latin)"),
])
def test_too_few_languages_or_scripts_are_refused(tmp_path, capsys, argv, message):
    assert make_corpus.main(["--output-dir", str(tmp_path / "out"), *argv]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
