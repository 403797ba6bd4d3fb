"""Curves of runs as one self-contained HTML page: SVG in the page, no script, nothing fetched.

The page is well-formed XML too. It follows the reader's light or dark setting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from html import escape
from pathlib import Path

from megatron.errors import RunError

#: more points than this in one curve are thinned, see ``thinned``
MOST_POINTS = 2000
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 44
#: Okabe and Ito's colours, distinct to colour-blind eyes; on light paper, on dark
COLOURS = (("#0072b2", "#56b4e9"), ("#d55e00", "#ff9248"), ("#007a5a", "#2fd1a5"), ("#b0508a", "#e69fc8"),
           ("#8a6d00", "#f0e442"), ("#444444", "#cccccc"))
#: with the seventh run the colours begin again, drawn in dashes
DASHES = ("none", "7 4", "2 3")

Series = list[tuple[int, float | None]]


# --- numbers ----------------------------------------------------------------------------------


def thinned(series: list[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most ``most`` of the points: all of them if they are not more.

    Else they are cut into ``most // 2`` stretches of equal count, of each the lowest and the
    highest point stay: a spike is never lost.
    """
    if len(series) <= most:
        return series
    kept, stretches = [], most // 2
    for i in range(stretches):
        part = range(i * len(series) // stretches, (i + 1) * len(series) // stretches)
        lowest, highest = min(part, key=lambda j: series[j][1]), max(part, key=lambda j: series[j][1])
        kept += [series[j] for j in sorted({lowest, highest})]
    return kept


def pieces(series: Series) -> list[list[tuple[int, float]]]:
    """Stretches of ``series`` between values that are missing, NaN or infinite."""
    parts: list[list] = [[]]
    for x, y in series:
        if y is not None and math.isfinite(y):
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, about ``wanted``."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``, and 2 and 5 times them if those are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 8)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    marks = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def _range(values: list[float]) -> tuple[float, float, bool]:
    """Lowest and highest value of an axis, and whether it is logarithmic: over a factor of 50."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 50:
        return low / 1.1, high * 1.1, True
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin, False


# --- one chart --------------------------------------------------------------------------------


def _axes(x_of: Callable, y_of: Callable, x_marks: list, y_marks: list, log: bool) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn = []
    for mark in y_marks:
        y = y_of(mark)
        drawn.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
                     f'<text class="y" x="{LEFT - 8}" y="{y + 4:.1f}">{mark:.5g}</text>')
    for mark in x_marks:
        x = x_of(mark)
        drawn.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
                     f'<text class="x" x="{x:.1f}" y="{bottom + 19}">{round(mark):,}</text>')
    drawn.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
                 f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}"/>'
                 f'<text class="x" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}">iteration'
                 f'{" (values on a logarithmic scale)" if log else ""}</text>')
    return drawn


def chart(title: str, runs: list[tuple[str, Series]]) -> str:
    """A figure with one SVG: a curve per run, broken where a run has no finite value."""
    parts = [pieces(series) for _, series in runs]
    every = [point for stretches in parts for stretch in stretches for point in stretch]
    head = f"<figure><figcaption>{escape(title)}</figcaption>"
    if not every:
        return f"{head}<p>No run reports a finite value.</p></figure>"
    xs = [x for x, _ in every]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high, log = _range([y for _, y in every])
    scale = math.log if log else float

    def x_of(x: float) -> float:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return LEFT + share * (WIDTH - RIGHT - LEFT)

    def y_of(y: float) -> float:
        share = (scale(y) - scale(y_low)) / (scale(y_high) - scale(y_low))
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    x_marks = sorted({round(mark) for mark in ticks(x_low, x_high)} & set(range(x_low, x_high + 1)))
    drawn = _axes(x_of, y_of, x_marks, log_ticks(y_low, y_high) if log else ticks(y_low, y_high), log)
    for index, ((name, _), stretches) in enumerate(zip(runs, parts, strict=True)):
        total = sum(map(len, stretches))
        for stretch in stretches:
            most = len(stretch) if total <= MOST_POINTS else max(2, MOST_POINTS * len(stretch) // total)
            shown = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in thinned(stretch, most)]
            label = f"<title>{escape(name)}</title>"
            if len(shown) == 1:  # a line of one point would not be seen
                x, y = shown[0].split(",")
                drawn.append(f'<circle class="r{index}" cx="{x}" cy="{y}" r="2">{label}</circle>')
            else:
                drawn.append(f'<polyline class="r{index}" points="{" ".join(shown)}">{label}</polyline>')
    return (f'{head}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by iteration">'
            + "\n".join(drawn) + "</svg></figure>")


# --- the page ---------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --faint: #ddd; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e8; --faint: #3a3d44; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto;
       max-width: 1500px; padding: 0 1rem; }
h1 { font-size: 1.3rem; } figure { margin: 0; } figcaption { font-weight: 600; margin: .4rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; list-style: none; padding: 0; }
.legend svg { width: 34px; height: 10px; margin-right: .5rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
text.x { text-anchor: middle; } text.y { text-anchor: end; }
line.grid { stroke: var(--faint); } line.axis { stroke: var(--ink); }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.table { overflow-x: auto; } table { border-collapse: collapse; margin-top: 1.5rem; }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid var(--faint);
         font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; }
"""


def _colours(runs: int) -> str:
    light: list[str] = []
    dark: list[str] = []
    for index in range(runs):
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        for rules, colour in zip((light, dark), COLOURS[index % len(COLOURS)], strict=True):
            rules.append(f"polyline.r{index} {{ stroke: {colour}; stroke-dasharray: {dash}; }} "
                         f"circle.r{index} {{ fill: {colour}; }}")
    return "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])


def page(names: list[str], charts: list[tuple[str, list[Series]]], table: list[tuple[str, ...]]) -> str:
    """The page: legend, a chart per entry (title, a series per run), and the table with its heading first.

    A series is a list of (iteration, value), iterations ascending.
    """
    title = f"{' and '.join(names) if len(names) < 4 else f'{len(names)} runs'} side by side"
    swatch = '<svg viewBox="0 0 34 10" aria-hidden="true"><polyline class="r{}" points="1,5 33,5"/></svg>'
    legend = "".join(f"<li>{swatch.format(i)}{escape(name)}</li>" for i, name in enumerate(names))
    drawn = "\n".join(chart(name, list(zip(names, series, strict=True))) for name, series in charts)
    head, *rows = table
    lines = ["<tr>" + "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head) + "</tr>"]
    lines += [f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
              + "</tr>" for row in rows]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title><style>{_STYLE}{_colours(len(names))}</style></head><body>
<h1>{escape(title)}</h1>
<ul class="legend">{legend}</ul>
<div class="charts">{drawn}</div>
<p>Curves break where a run has no finite value; a value alone is a dot. A curve of more than {MOST_POINTS:,} points
keeps the lowest and the highest of every stretch of equal length.</p>
<div class="table"><table>
{chr(10).join(lines)}
</table></div>
</body></html>
"""


def write_page(path: Path, text: str) -> None:
    """Write the page whole or not at all; RunError, naming the file, if it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"--html {path} cannot be written: {error.strerror or error}") from error
