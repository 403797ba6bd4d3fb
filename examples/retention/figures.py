"""The figures of the report, PNG files drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path

from analysis import Curve, Results, mean, spread

from megatron.errors import RunError

#: Okabe and Ito's colours, distinct to colour-blind eyes
COLOURS = {"full": "#d55e00", "bitfit": "#0072b2", "bitfit-qm": "#009e73"}
MARKS = ("o", "s", "^", "D", "v")


def draw(results: Results, titles: dict[str, str], folder: Path) -> list[str]:
    """Write all figures into ``folder``; returns their file names. Raises RunError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise RunError("the figures need matplotlib: pip install -e .[retention]; the runs are kept") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 110,
                         "figure.constrained_layout.use": True})
    drawn = []
    for name, figure in (("pareto", _pareto(plt, results, titles)), ("languages", _languages(plt, results, titles)),
                         ("biases", _biases(plt, results)), ("scale", _scale(plt, results, titles))):
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})  # equal figures, equal bytes
        plt.close(figure)
        drawn.append(f"{name}.png")
    return drawn


def _averaged(curves: list[Curve]) -> tuple[list[float], list[float]]:
    """Task loss gained and nats lost at each point, means over seeds."""
    gained = [mean(curve.points[0].task - curve.points[i].task for curve in curves)
              for i in range(len(curves[0].points))]
    return gained, [mean(curve.points[i].lost for curve in curves) for i in range(len(curves[0].points))]


def _pareto(plt, results: Results, titles: dict[str, str]):
    """Per size: task gained against languages lost along each learning rate, bars over seeds at the end."""
    columns = min(len(results.sizes), 2)
    rows = -(-len(results.sizes) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(4.9 * columns, 3.3 * rows + 0.8), squeeze=False)
    for axes, size in zip(panels.flat, results.sizes):
        for method in results.methods:
            for mark, rate in zip(MARKS, results.rates(size, method)):
                curves = results.of(size, method, rate=rate)
                gained, lost = _averaged(curves)
                axes.plot(gained, lost, color=COLOURS[method], marker=mark, markersize=3, linewidth=1, alpha=0.75)
                axes.errorbar(gained[-1], lost[-1], color=COLOURS[method], marker=mark, markersize=7, capsize=2,
                              xerr=spread([curve.points[0].task - curve.end.task for curve in curves]),
                              yerr=spread([curve.end.lost for curve in curves]), linestyle="none",
                              label=f"{titles[method]}, {rate:g}")
        task = results.common_task(size)
        axes.axvline(mean(curve.points[0].task for curve in results.curves if curve.size == size) - task,
                     color="#999999", linewidth=0.8, linestyle="--")
        axes.axhline(0, color="#999999", linewidth=0.6)
        axes.set_title(f"size {size}, {results.bases[size]['weights'] / 1e6:.2g} million weights")
        axes.set_xlabel("task gained: nats per token (right is better)")
        axes.set_ylabel("other languages lost (low is better)")
    for axes in panels.flat[len(results.sizes):]:
        axes.set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(results.methods), fontsize=8, frameon=False)
    return figure


def _languages(plt, results: Results, titles: dict[str, str]):
    """The largest size at equal task loss: nats lost per language."""
    size = results.sizes[-1]
    task = results.common_task(size)
    points = {method: [point for _, point in results.at_equal_task(size, method, task)] for method in results.methods}
    names = sorted(points["full"][0].per_language, key=lambda name: -mean(p.per_language[name] for p in points["full"]))
    figure, axes = plt.subplots(figsize=(10, 3.6))
    width = 0.8 / len(results.methods)
    for i, method in enumerate(results.methods):
        values = [[point.per_language[name] for point in points[method]] for name in names]
        axes.bar([x + (i - (len(results.methods) - 1) / 2) * width for x in range(len(names))],
                 [mean(each) for each in values], width, yerr=[spread(each) for each in values],
                 color=COLOURS[method], label=titles[method], error_kw={"linewidth": 0.7})
    axes.set_xticks(range(len(names)), names)
    axes.axhline(0, color="#999999", linewidth=0.6)
    axes.set_ylabel("nats per token lost")
    axes.set_title(f"size {size}, every method where it reaches task loss {task:.2f}")
    axes.legend(frameon=False)
    return figure


def _biases(plt, results: Results):
    """The largest size: mean |change| of each bias term and block at the end of the best learning rate."""
    size = results.sizes[-1]
    figure, panels = plt.subplots(1, len(results.methods), figsize=(3.6 * len(results.methods), 3.2), squeeze=False)
    for axes, method in zip(panels[0], results.methods):
        rate = results.best_rate(size, method)
        runs = [curve.bias_changes for curve in results.of(size, method, rate=rate)]
        terms = list(runs[0])
        table = [[mean(run[term][block] for run in runs) for block in range(len(runs[0][term]))] for term in terms]
        image = axes.imshow(table, cmap="viridis", aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                axes.text(x, y, f"{value:.1g}", ha="center", va="center", fontsize=6.5,
                          color="black" if value > 0.6 * max(map(max, table)) else "white")
        axes.set_xticks(range(len(table[0])), [str(block) for block in range(len(table[0]))])
        axes.set_yticks(range(len(terms)), terms)
        axes.set_title(f"{method}, rate {rate:g}")
        axes.set_xlabel("block")
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _scale(plt, results: Results, titles: dict[str, str]):
    """Over sizes: nats lost at equal task loss, and the lowest task loss of each method."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    weights = [results.bases[size]["weights"] for size in results.sizes]
    for method in results.methods:
        lost = [[point.lost for _, point in results.at_equal_task(size, method, results.common_task(size))]
                for size in results.sizes]
        task = [[results.best_task(size, method, seed) for seed in results.seeds] for size in results.sizes]
        for axes, values in ((left, lost), (right, task)):
            axes.errorbar(weights, [mean(each) for each in values], yerr=[spread(each) for each in values],
                          color=COLOURS[method], marker="o", capsize=2, label=titles[method])
    left.set_ylabel("nats per token lost at equal task loss")
    left.set_ylim(bottom=0)
    right.set_ylabel("lowest task loss reached")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(weights, [f"{size}\n{number / 1e6:.2g} M" for size, number in zip(results.sizes, weights)])
        axes.minorticks_off()
        axes.set_xlabel("weights")
    right.legend(frameon=False, fontsize=7.5)
    return figure
