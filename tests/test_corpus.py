"""The quickstart's corpus: what is read from Django's catalogues, and what ends up in the files."""

import gettext
import json
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import make_corpus

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
    for app, count in (("a", 5), ("b", 1)):
        folder = tmp_path / app / "locale" / "de" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "django.po").write_text("\n".join(f'msgid "{app}{i}"\nmsgstr "{app.upper()}{i}"\n' for i in range(count)))
    found = [(d.text, d.source) for d in make_corpus.documents(tmp_path, "de", size=2)]
    place = "locale/de/LC_MESSAGES/django.po"
    assert found == [("A0\nA1", f"a/{place}:1"), ("A2\nA3", f"a/{place}:3"), ("A4", f"a/{place}:5"), ("B0", f"b/{place}:1")]


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


def test_every_twentieth_document_is_held_out_and_none_is_lost(made):
    folder, _ = made
    train, valid = lines(folder / "corpus.jsonl"), lines(folder / "valid.jsonl")
    root = make_corpus.django_folder()
    expected = Counter(d.source for language in make_corpus.LANGUAGES for d in make_corpus.documents(root, language))
    assert Counter(record["source"] for record in train + valid) == expected and max(expected.values()) == 1
    assert len(valid) == (len(train) + len(valid)) // 20
    # languages take turns: a tenth of the corpus already holds all of them
    assert {record["language"] for record in train[:len(train) // 10]} == set(make_corpus.LANGUAGES)


def test_the_translations_are_those_of_the_compiled_catalogue(made):
    folder, _ = made
    record = next(r for r in lines(folder / "corpus.jsonl") if r["source"].startswith("conf/locale/ru/LC_MESSAGES/django.po"))
    with open(make_corpus.django_folder() / "conf/locale/ru/LC_MESSAGES/django.mo", "rb") as file:
        catalogue = gettext.GNUTranslations(file)
    known = {text.strip() for text in catalogue._catalog.values() if isinstance(text, str)}
    assert set(record["text"].split("\n")) <= {line for text in known for line in text.split("\n")}


def test_the_same_django_gives_the_same_bytes_and_no_other_file(made, tmp_path):
    make_corpus.make_corpus(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "valid.jsonl"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (made[0] / path.name).read_bytes()


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
