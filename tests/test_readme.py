"""The README says what the program does."""

import sys

from launching import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import flag_table


def test_the_flag_table_is_that_of_the_parser():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert flag_table.replaced(text, flag_table.flag_table()) == text, \
        "run: python tools/flag_table.py --write README.md"


def test_every_file_the_readme_names_exists():
    import re
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:tools|examples|tests|docs)/[\w.]+\.\w+", text))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
