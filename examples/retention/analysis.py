"""Figures of all runs, reduced: gains and losses against the base, curves, values at equal task loss.

Works on plain dictionaries as the jobs write them; imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ENGLISH = "en"


def mean(values) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds, of a sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Point:
    """A moment of a fine-tuning, against its base."""

    step: int
    task: float
    """held-out task loss, nats per token, mean over templates"""
    lost: float
    """mean over the other languages: nats per token more than the base"""
    english: float
    """the same of English text"""
    per_language: dict[str, float]
    """language -> nats per token more than the base, the other languages alone"""


@dataclass(frozen=True)
class Curve:
    """One fine-tuning from its base, the first point, to its end."""

    size: str
    method: str
    rate: float
    seed: int
    points: tuple[Point, ...]
    accuracy: dict[str, float]
    bias_changes: dict[str, list[float]]

    @property
    def end(self) -> Point:
        return self.points[-1]

    def at(self, task: float) -> Point | None:
        """Where this curve first reaches the task loss ``task``, linear between points; None if it does not."""
        for before, after in zip(self.points, self.points[1:]):
            if after.task <= task <= before.task and after.task < before.task:
                share = (before.task - task) / (before.task - after.task)

                def between(a: float, b: float, share: float = share) -> float:
                    return a + share * (b - a)

                return Point(after.step, task, between(before.lost, after.lost), between(before.english, after.english),
                             {name: between(before.per_language[name], after.per_language[name])
                              for name in before.per_language})
        return None


def _point(step: int, figures: dict, base: dict) -> Point:
    more = {name: loss - base["languages"][name] for name, loss in figures["languages"].items()}
    english = more.pop(ENGLISH)
    return Point(step, mean(figures["tasks"].values()), mean(more.values()), english, more)


@dataclass(frozen=True)
class Results:
    """All jobs of one experiment, by their names in results.json."""

    jobs: tuple[dict, ...]
    sizes: tuple[str, ...]
    """from the smallest"""
    methods: tuple[str, ...]

    @cached_property
    def bases(self) -> dict[str, dict]:
        """Size -> figures of its base."""
        return {job["size"]: job for job in self.jobs if job["method"] is None}

    @cached_property
    def curves(self) -> list[Curve]:
        made = []
        for job in self.jobs:
            if job["method"] is not None:
                base = self.bases[job["size"]]["points"][-1]
                points = (_point(0, base, base), *(_point(each["step"], each, base) for each in job["points"]))
                made.append(Curve(job["size"], job["method"], job["rate"], job["seed"], points, job["accuracy"],
                                  job["bias_changes"]))
        return made

    def of(self, size: str, method: str, *, rate: float | None = None, seed: int | None = None) -> list[Curve]:
        return [each for each in self.curves if each.size == size and each.method == method
                and rate in (None, each.rate) and seed in (None, each.seed)]

    def rates(self, size: str, method: str) -> list[float]:
        return sorted({each.rate for each in self.of(size, method)})

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({each.seed for each in self.curves})

    def best_task(self, size: str, method: str, seed: int) -> float:
        """The lowest task loss at any point of any learning rate."""
        return min(point.task for curve in self.of(size, method, seed=seed) for point in curve.points)

    def common_task(self, size: str) -> float:
        """The lowest task loss that every method reached with every seed."""
        return max(self.best_task(size, method, seed) for method in self.methods for seed in self.seeds)

    def at_equal_task(self, size: str, method: str, task: float) -> list[tuple[float, Point]]:
        """Per seed: the learning rate that loses least where it reaches ``task``, and that point."""
        chosen = []
        for seed in self.seeds:
            found = [(curve.rate, point) for curve in self.of(size, method, seed=seed) if (point := curve.at(task))]
            if found:
                chosen.append(min(found, key=lambda each: each[1].lost))
        return chosen

    def targets(self, size: str) -> list[float]:
        """Task losses to compare at: half the way from the base to the common one, 3/4, and that itself."""
        base, common = mean(self.bases[size]["points"][-1]["tasks"].values()), self.common_task(size)
        return [base + share * (common - base) for share in (0.5, 0.75, 1.0)]

    def best_rate(self, size: str, method: str) -> float:
        """The learning rate with the lowest task loss at the end, mean over seeds."""
        return min(self.rates(size, method),
                   key=lambda rate: mean(curve.end.task for curve in self.of(size, method, rate=rate)))


@dataclass(frozen=True)
class Comparison:
    """Full against another method at equal task loss, in nats lost by the other languages."""

    size: str
    method: str
    task: float
    full: list[float]
    other: list[float]

    @property
    def differences(self) -> list[float]:
        """Per seed, above 0 where the other method keeps more."""
        return [a - b for a, b in zip(self.full, self.other)]

    @property
    def verdict(self) -> str:
        """more, less or equal: what the other method keeps; unequal only when all seeds agree and the mean is
        above two standard errors."""
        each = self.differences
        error = spread(each) / len(each)**0.5
        if all(value > 0 for value in each) and mean(each) > 2 * error:
            return "more"
        if all(value < 0 for value in each) and -mean(each) > 2 * error:
            return "less"
        return "equal"


def compare(results: Results, size: str, method: str, task: float) -> Comparison:
    return Comparison(size, method, task, [point.lost for _, point in results.at_equal_task(size, "full", task)],
                      [point.lost for _, point in results.at_equal_task(size, method, task)])
