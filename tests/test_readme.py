"""README, docs and CONTRIBUTING say what the program does."""

import ast
import re
import sys
from fnmatch import fnmatch

import pytest
from launching import ROOT

from megatron.argument_table import NO_EFFECT, REFUSED, USED

sys.path.insert(0, str(ROOT / "tools"))
import flag_table

PAGES = sorted([ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
#: what each part may import from the others
BELOW = {"mpu": {"config", "errors"}, "model": {"config", "mpu"}, "tokenizer": {"config", "errors"},
         "data": {"config", "errors", "mpu", "tokenizer"}, "optimizer": {"config", "errors"},
         "planning": {"argument_table", "arguments", "arguments_check", "config", "errors", "flops", "tokenizer"}}
#: who may know the engine and the loop
ABOVE = {"engine": {"training", "run_report"}, "training": {"launch"}, "launch": set()}
OURS = re.compile(r"`((?:tools|examples|tests|docs|benchmarks|megatron)/[\w./-]+\.\w+)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_flag_table_is_that_of_the_parser():
    text = read("docs/flags.md")
    assert flag_table.replaced(text, flag_table.flag_table()) == text, "run: python tools/flag_table.py --write docs/flags.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    named = [ROOT / name for name in OURS.findall(text)] + [page.parent / link for link in links if link]
    assert [str(path) for path in named if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_a_page_meet_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, anchor = link.split("#")
        if "://" not in link:
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            known = [re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in re.findall(r"^#+ (.*)$", text, re.M)]
            assert anchor in known, link


def test_the_migration_page_has_every_flag_once():
    """Each flag that acts means the same, something else, or is new; those without effect and the refused have tables of their own."""
    text = read("docs/migration.md")
    sections = {part.split("\n")[0]: part for part in text.split("\n## ")}
    other = "\n".join(line.split(" | ")[0] for line in sections["Flags that mean something else here"].splitlines()
                      if line.startswith("| `"))
    new = "\n".join(line.split(" | ")[0] for line in sections["Flags that are new"].splitlines() if line.startswith("| `"))
    found = sorted(flag for part in (other, new, sections["Flags that mean the same"]) for flag in re.findall(r"`(--[\w-]+)`", part))
    elsewhere = {flag.name for flag in (*NO_EFFECT, *REFUSED)}
    assert [flag for flag in found if flag not in elsewhere] == sorted(flag.name for flags in USED.values() for flag in flags)


def test_the_module_map_names_every_module_and_no_other():
    """A name with a star stands for several; one that two folders share must be there for each."""
    block = read("docs/architecture.md").split("```")[1]
    named = re.findall(r"[\w*]+\.(?:py|cpp)", block)
    there = [path.name for path in (*(ROOT / "megatron").rglob("*.py"), *(ROOT / "megatron").rglob("*.cpp"))
             if path.name != "__init__.py"] + [path.name for path in ROOT.glob("*.py") if path.name != "setup.py"]
    assert sorted({name for name in there if sum(fnmatch(name, each) for each in named) < there.count(name)}) == []
    tools = {path.name for path in (ROOT / "tools").glob("*.py")}
    assert [each for each in named if each not in tools and not any(fnmatch(name, each) for name in there)] == []


def parts_imported(path) -> set[str]:
    """First names behind ``megatron.`` of what a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "megatron":
            names |= {f"megatron.{each.name}" for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return {name.split(".")[1] for name in names if name.startswith("megatron.")}


def test_nothing_below_knows_what_is_above_it():
    """The first sentence of docs/architecture.md."""
    for path in (ROOT / "megatron").rglob("*.py"):
        part = path.relative_to(ROOT / "megatron").with_suffix("").parts[0]
        known = parts_imported(path) - {part}
        assert known <= BELOW.get(part, known), f"{path}: {known - BELOW.get(part, known)}"
        assert [above for above in ABOVE if above in known and part not in ABOVE[above]] == [], path


def test_the_readme_leads_to_every_page():
    pages = [str(page.relative_to(ROOT)) for page in (*ROOT.glob("CONTRIBUTING.md"), *(ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if page not in read("README.md")] == []
