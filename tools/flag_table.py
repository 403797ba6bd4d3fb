"""Print every flag of the training scripts as a Markdown table, or refresh it in a file.

    python tools/flag_table.py                        # to the terminal
    python tools/flag_table.py --write docs/flags.md  # between the two marker lines of the file
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.argument_table import NO_EFFECT, REFUSED, USED, Flag  # noqa: E402

START, END = "<!-- flag table: start -->", "<!-- flag table: end -->"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def _row(flag: Flag) -> str:
    if flag.kind is None:
        default = "off"
    elif flag.required:
        default = "required"
    else:
        default = "none" if flag.default is None else f"`{flag.default:g}`" if isinstance(
            flag.default, float) else f"`{flag.default}`"
    help = flag.help + (f" ({', '.join(flag.choices)})" if flag.choices and flag.kind is str else "")
    only = f" (`{flag.entry}.py` only)" if flag.entry else ""
    return f"| `{flag.name}` | {default} | {_cell(help)}{only} |"


def flag_table() -> str:
    """All flags, group by group; last those without effect and those that are refused."""
    lines = []
    for group, flags in USED.items():
        lines += [f"**{group.capitalize()}**", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += [_row(flag) for flag in flags]
        lines.append("")
    lines += ["**Accepted, but without effect here** (the start of a run lists those that were given)", "",
              "| flag | why |", "|---|---|"]
    lines += [f"| `{flag.name}` | {_cell(flag.help)} |" for flag in NO_EFFECT]
    lines += ["", "**Refused** (the run does not start)", "", "| flag | what to do |", "|---|---|"]
    lines += [f"| `{flag.name}` | {_cell(flag.refused)} |" for flag in REFUSED]
    return "\n".join(lines)


def replaced(text: str, table: str) -> str:
    """``text`` with what stands between the marker lines replaced; ValueError without markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the lines {START} and {END} are missing")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> int:
    """Print, or write into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="FILE", help="file with the marker lines to refresh")
    options = parser.parse_args()
    if not options.write:
        print(flag_table())
        return 0
    path = Path(options.write)
    try:
        path.write_text(replaced(path.read_text(encoding="utf-8"), flag_table()), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: --write {path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
