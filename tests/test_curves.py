"""Curves of the page of compare_runs, by geometry; the page itself is in test_compare_runs.py."""

import math
import os
import xml.etree.ElementTree as ElementTree

import pytest

from megatron import curves
from megatron.errors import RunError


def test_gaps_single_values_and_logarithmic_axes():
    drawn = ElementTree.fromstring(curves.chart("t", [("a", [
        (1, 1.0), (2, 10.0), (3, math.nan), (4, 100.0), (5, math.inf), (6, None), (7, 1000.0), (8, 1.0)])]))
    lines = [polyline.get("points").split() for polyline in drawn.iter("polyline")]
    assert [len(points) for points in lines] == [2, 2]
    (dot,) = drawn.iter("circle")
    one, ten = (float(point.split(",")[1]) for point in lines[0])
    assert float(dot.get("cy")) == pytest.approx(2 * ten - one, abs=0.2), "equal factors, equal distances"
    assert [text.text for text in drawn.iter("text") if text.get("class") == "y"] == ["1", "10", "100", "1000"]
    assert curves.log_ticks(0.9, 66.0) == [1, 2, 5, 10, 20, 50]
    assert "logarithmic" in "".join(drawn.itertext())
    for odd in ([(5, 0.0)], [(5, -2.0), (6, -2.0)], [(1, 1e-300), (2, 1e300)], [(1, math.nan)], []):
        assert "nan" not in curves.chart("t", [("a", odd)])
    assert "No run reports a finite value" in curves.chart("t", [("a", [(1, math.nan)])])


def test_long_curves_are_thinned_and_keep_their_spikes():
    series = [(i, 2.0) for i in range(1, 1 + 50_000)]
    series[31_337] = (31_338, 9.0)
    series[777] = (778, 0.5)
    kept = curves.thinned(series)
    assert len(kept) <= curves.MOST_POINTS and kept == sorted(kept)
    assert (31_338, 9.0) in kept and (778, 0.5) in kept and set(kept) <= set(series)
    assert curves.thinned(series[:curves.MOST_POINTS]) == series[:curves.MOST_POINTS]

    def drawn(series):
        svg = ElementTree.fromstring(curves.chart("t", [("a", series)]))
        return [len(line.get("points").split()) for line in svg.iter("polyline")]
    assert drawn(series) == [len(kept)]
    gap = [(10, math.nan)]
    assert drawn(series[:9] + gap + series[10:1900]) == [9, 1890], "few enough: gaps thin nothing"
    # in proportion, 800 and 199 stretches; a flat one's lowest and highest are one point, a spike's are two
    assert drawn(series[:40_000] + [(40_001, None)] + series[40_001:]) == [802, 199]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    page = tmp_path / "x.html"
    curves.write_page(page, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="x.html cannot be written: No space left"):
        curves.write_page(page, "new")
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
