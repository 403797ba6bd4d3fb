"""docs/troubleshooting.md quotes messages that the program really has."""

import ast
import re
from functools import cache

import pytest
from launching import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"
#: of argparse and Python, and said by this program in its place
OF_LIBRARIES = ("unrecognized arguments: ", "No module named ")


def _literal(node: ast.AST) -> str:
    """The text of a string in the source, with a gap for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return GAP


@cache
def literals() -> tuple[str, ...]:
    sources = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    return tuple({_literal(node) for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                  if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))}) + OF_LIBRARIES


def messages() -> list[str]:
    rows = re.findall(r"^\| (.+?) \| ", PAGE.read_text(encoding="utf-8"), re.M)
    return [row[1:-1] for row in rows if row.startswith("`") and row.endswith("`") and row.count("`") == 2]


def test_the_page_has_messages():
    assert len(messages()) > 40


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_is_in_the_program(message):
    """Its parts between the dots stand in one string of the source, in this order."""
    parts = [re.escape(part.strip(" ")) for part in message.split("…") if part.strip(" ;,():")]
    assert parts and max(map(len, parts)) > 10
    wanted = re.compile(".*".join(parts), re.S)
    assert any(wanted.search(literal) for literal in literals()), message
