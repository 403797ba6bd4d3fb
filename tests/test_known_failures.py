"""docs/known-failures.md names real tests, and each of them cites the public report it answers."""

import ast
import re

import pytest
from launching import ROOT

TABLE = ROOT / "docs" / "known-failures.md"
#: entries of each group; none may get lost
ENTRIES = {"A": 10, "B": 9, "C": 14, "D": 13, "E": 9, "F": 9}
ROW = re.compile(r"^\| ([A-F]\d+) \| (.+?) \| (.+?) \|(?: (.+?) \|)?$", re.MULTILINE)


def rows() -> list[tuple[str, str, str, str | None]]:
    """Entry, reports, words, and tests, or None in the table of those that cannot apply."""
    return [tuple(match.groups()) for match in ROW.finditer(TABLE.read_text(encoding="utf-8"))]


def source_of(name: str) -> str:
    """A test function with its decorators, docstring and the comment right above it."""
    file, function = name.split("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            while first and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            return "\n".join(lines[first:node.end_lineno])
    raise AssertionError(f"{file} has no test {function}")


def test_every_entry_has_one_row():
    assert [row[0] for row in sorted(rows(), key=lambda row: (row[0][0], int(row[0][1:])))] == [
        f"{group}{number}" for group, count in ENTRIES.items() for number in range(1, count + 1)]


@pytest.mark.parametrize("entry, reports, words, tests", rows(), ids=[row[0] for row in rows()])
def test_its_tests_exist_and_cite_the_report(entry, reports, words, tests):
    report = re.split(", ", reports)[0]
    assert re.fullmatch(r"[\w./-]+#\d+", report), f"{report!r} is no public report"
    if tests is None:
        assert len(words) > 30, "an entry that cannot apply needs a reason"
        return
    names = re.findall(r"`(test_\w+\.py::test_\w+)`", tests)
    assert names, f"no test named in {tests!r}"
    assert [name for name in names if report not in source_of(name)] == [], f"do not cite {report}"
