"""Drift: a benchmark that becomes slower little by little, over many runs, by steps that are too small for the gate.

Mann and Kendall's test asks whether the medians of the last runs rise. It counts the pairs of runs whose later one is
slower, and knows the distribution of that count if all orders are equally likely. Sen's slope, the median of the slopes
of all pairs, says by how much. Neither assumes a distribution of the noise, or is moved by single runs that are far
off.

Where a benchmark's compiled code has been the same all the time, a rise is the machine's: no such time is looked at.

A rise that one step between two runs explains better than a slope is no drift: the gate has judged it.

Source: H. B. Mann, Nonparametric Tests Against Trend, 1945; P. K. Sen, Estimates of the Regression Coefficient Based on
Kendall's Tau, 1968.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fourfold.performance.gate import short_name

# How many of the last runs are looked at. What happened before a drift began must not hide it, so each is tried, and
# all runs up to the most.
FEWEST, MOST = 8, 20
WINDOWS = (FEWEST, 12, 16, MOST)
# The probability of one or more false alarms, over all benchmarks and windows together.
LEVEL = 0.01
# The runs that a slope has at least: fewer are a step.
SLOPE_RUNS = 4


@dataclass(frozen=True)
class Drift:
    """A benchmark that has become slower over many runs.

    Attributes:
        name: the benchmark's full name.
        runs: the number of runs, up to today's.
        ratio: today's time over that of the first of these runs, by Sen's slope.
        low, high: its 95% interval.
        p: the probability of at least this many rises without a trend.
    """

    name: str
    runs: int
    ratio: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return (
            f"drifts    {self.ratio - 1:+7.1%} ({self.low - 1:+6.1%} to {self.high - 1:+6.1%}) over {self.runs} runs, "
            f"{self.ratio ** (1 / (self.runs - 1)) - 1:+.2%} each: {short_name(self.name)}"
        )


def drifts(
    runs: Sequence[Mapping[str, float]],
    least: Mapping[str, float],
    unchanged: Mapping[str, int] = MappingProxyType({}),
) -> list[Drift]:
    """Return the benchmarks that drift, by Holm's procedure at `LEVEL`, the strongest first.

    Args:
        runs: median seconds by benchmark of each run, oldest first; today's is the last.
        least: the smallest log ratio that is reported, by benchmark.
        unchanged: for a benchmark, how many of its last runs are known to have had the same compiled code. A drift
            needs at least this many runs.
    """
    with_medians = list[tuple[Drift, list[float]]]()
    for name in least:
        medians = [run[name] for run in runs if name in run][-MOST:]
        if len(medians) >= FEWEST:
            windows = {*(window for window in WINDOWS if window <= len(medians)), len(medians)}
            trends = [trend(name, medians[-window:]) for window in windows if window > unchanged.get(name, 0)]
            if not trends:
                continue
            drift = min(trends, key=lambda drift: drift.p)
            with_medians.append((drift, medians[-drift.runs :]))
    confirmed = []
    for place, (drift, medians) in enumerate(sorted(with_medians, key=lambda pair: pair[0].p)):
        if drift.p * (len(WINDOWS) + 1) * (len(with_medians) - place) > LEVEL:
            break
        if math.log(drift.ratio) >= least[drift.name] and not _is_step(np.log(medians)):
            confirmed.append(drift)
    return sorted(confirmed, key=lambda drift: -drift.ratio)


def unchanged_runs(keys: Sequence[str | None]) -> int:
    """Return how many runs, from the last one back, have the same key; 0 if the last one has none."""
    last, count = keys[-1] if keys else None, 0
    for key in reversed(keys):
        if last is None or key != last:
            break
        count += 1
    return count


def trend(name: str, medians: Sequence[float]) -> Drift:
    """Return the rise of a benchmark's medians, in order of their runs."""
    logs = np.log(medians)
    count = len(logs)
    first, second = np.triu_indices(count, 1)
    differences = logs[second] - logs[first]
    slopes = np.sort(differences / (second - first))
    rises = int((differences > 0).sum())
    # The order statistics of the slopes between which Sen's slope lies with 95%.
    reach = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = (round((len(slopes) + sign * reach) / 2) for sign in (-1, 1))
    slope, lowest, highest = (
        float(value) for value in (np.median(slopes), slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)])
    )
    ratio, lower, upper = (math.exp(slope_of_run * (count - 1)) for slope_of_run in (slope, lowest, highest))
    return Drift(name, count, ratio, lower, upper, rise_probability(count, rises))


def rise_probability(count: int, rises: int) -> float:
    """Return the probability that at least `rises` pairs of `count` numbers rise, if all orders are equally likely."""
    return float(sum(_orders_with_rises(count)[rises:])) / math.factorial(count)


@functools.cache
def _orders_with_rises(count: int) -> tuple[int, ...]:
    """Return the number of orders of `count` numbers that have 0, 1, 2, ... rising pairs: Mahonian numbers."""
    orders = [1]
    for length in range(2, count + 1):
        # The last number of an order rises over 0 to length - 1 of the others.
        orders = [sum(orders[max(0, k - length + 1) : k + 1]) for k in range(len(orders) + length - 1)]
    return tuple(orders)


def _is_step(logs: np.ndarray) -> bool:
    """Return whether two levels fit the medians better than one level with a slope after it, from any run on."""
    times, count = np.arange(len(logs)), len(logs)
    steps = [
        np.abs(logs[:place] - np.median(logs[:place])).sum() + np.abs(logs[place:] - np.median(logs[place:])).sum()
        for place in range(1, count)
    ]
    slopes = []
    for begin in range(count - SLOPE_RUNS):
        model = np.stack([np.ones(count), np.clip(times - begin, 0, None)], axis=1)
        slopes.append(np.abs(logs - model @ np.linalg.lstsq(model, logs, rcond=None)[0]).sum())
    return bool(min(steps) <= min(slopes))
