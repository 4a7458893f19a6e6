"""The regression gate: decide in two stages whether a change made a benchmark slower.

A benchmark that launches the same compiled code as before in the same way is the same, without a clock: only the
others go through the stages.

The first stage compares the medians of two runs. A benchmark that may have changed by at least `WORTH_FINDING` is a
suspect. It is only a suspect, because the machine's speed also varies between runs. The second stage measures the
suspects again, with the baseline's code and today's in turns. Only a change that it confirms counts.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

# The smallest difference that the gate must find. The first stage passes a benchmark only if a difference this large
# is ruled out. The second stage says "same" if the whole interval is smaller than this.
WORTH_FINDING = math.log(1.02)
# A smaller difference is never reported, however significant it is.
LEAST = math.log(1.01)
# The addresses of code and data are fixed for a process's life, and make two identical copies differ in speed:
# on an H200 by up to 1.5% of the host's time, and by 0.06 us of a kernel's.
LEAST_OF_HOST = math.log(1.03)
LEAST_SECONDS = 0.1e-6
# The probability of one or more false "slower" or "faster" verdicts, over all benchmarks together.
FAMILY_LEVEL = 0.05
# One-sided 95%: the first stage misses a difference that is worth finding with probability 5%.
SCREEN_Z = 1.645
# The standard deviation of a run's log median where the history is shorter than `RUNS_FOR_A_SPREAD`.
ASSUMED_SPREAD = 0.02
LEAST_SPREAD = 0.001
RUNS_FOR_A_SPREAD = 4
EPOCHS = 20
TRIMMED = 0.05  # the share of the epochs that is cut off at either end
RESAMPLES = 20_000
FEWEST_TURNS, MOST_TURNS = 3, 40

SAME_CODE = "same code"

Round = Callable[[], float]


@dataclass(frozen=True)
class Change:
    """The gate's verdict on one benchmark.

    Attributes:
        name: the benchmark's full name.
        verdict: "faster", "same", "slower" or "ambiguous".
        ratio: today's time over the baseline's.
        low, high: the interval of the ratio. In stage 2 it has the level that corrects for all benchmarks.
        stage: 0 if the verdict comes from the compiled code, 1 if from the medians, 2 if the benchmark was measured
            again.
        reason: the reason why an ambiguous benchmark could not be measured again, or `SAME_CODE`, or "".
    """

    name: str
    verdict: str
    ratio: float
    low: float
    high: float
    stage: int
    reason: str = ""

    def __str__(self) -> str:
        return (
            f"{self.verdict:<9} {self.ratio - 1:+7.1%} ({self.low - 1:+6.1%} to {self.high - 1:+6.1%}) "
            f"{short_name(self.name)}"
            f"{f': {self.reason}' if self.reason else ''}"
        )


def short_name(name: str) -> str:
    """Return a benchmark's parameters, without the name of the test that times it."""
    return name.partition("[")[2].removesuffix("]") or name.rpartition("::")[2]


def run_spread(medians: Sequence[float]) -> float:
    """Estimate the standard deviation of a run's log median from the medians of past runs, in order.

    It uses differences between neighbouring runs, so a change of the code affects only one of them. It takes the
    median of those differences, so that one does not affect the result.
    """
    if len(medians) < RUNS_FOR_A_SPREAD:
        return ASSUMED_SPREAD
    logs = np.log(np.asarray(medians))
    deviation = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return max(deviation, LEAST_SPREAD)


def screen(name: str, new: float, old: float, spread: float) -> Change:
    """Run the first stage: "same" if a difference worth finding is ruled out, else "ambiguous".

    Args:
        name: the benchmark's full name.
        new: today's median, in seconds.
        old: the baseline's median, in seconds.
        spread: the standard deviation of a run's log median.
    """
    ratio, half = math.log(new / old), SCREEN_Z * math.sqrt(2) * spread
    is_same = abs(ratio) + half < WORTH_FINDING
    return Change(
        name, "same" if is_same else "ambiguous", math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half), 1
    )


def same_code_change(by_the_clock: Change) -> Change:
    """Return the verdict on a benchmark that launches what it did before, given what `screen` says of its medians."""
    return replace(by_the_clock, verdict="same", stage=0, reason=SAME_CODE)


def clock_differs(change: Change) -> bool:
    """Return whether a benchmark's medians differ by a ratio worth finding, and by more than runs normally do."""
    return abs(math.log(change.ratio)) >= WORTH_FINDING and (change.low > 1 or change.high < 1)


def alternate(
    pair: Callable[[], tuple[Round, Round]],
    seconds: float,
    rng: np.random.Generator,
    epochs: int = EPOCHS,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Measure the baseline's code and today's in turns, and return one log ratio of today's time per epoch.

    Each epoch has new tensors, because their addresses make a lasting difference in speed. Each turn measures both
    sides twice, in the order A B B A or B A A B, so that a linear drift of the machine's speed cancels.

    Args:
        pair: makes a round of the baseline's code and one of today's, warmed up, on new tensors.
        seconds: the time for the turns of all epochs together.
        rng: chooses the order of each turn.
        epochs: the number of epochs.
        clock: the host's clock.
    """
    ratios = []
    for _ in range(epochs):
        then_round, now_round = pair()
        turns: list[float] = []
        start = clock()
        while len(turns) < FEWEST_TURNS or (len(turns) < MOST_TURNS and clock() - start < seconds / epochs):
            inner, outer = (then_round, now_round) if rng.random() < 0.5 else (now_round, then_round)
            first, second, third, fourth = outer(), inner(), inner(), outer()
            difference = (math.log(first) + math.log(fourth) - math.log(second) - math.log(third)) / 2
            turns.append(difference if outer is now_round else -difference)
        ratios.append(statistics.median(turns))
    return np.array(ratios)


@functools.cache
def _shares(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of `count` sorted values in a sample and its resamples, trimmed and winsorized.

    The first row is of the sample, which has each value once; the others are of its RESAMPLES resamples.
    """
    resampled = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    indices = np.sort(np.concatenate([np.arange(count)[None], resampled]))
    cut = int(TRIMMED * count)
    inner = indices[:, cut : count - cut]
    winsorized = np.clip(indices, inner[:, :1], inner[:, -1:])

    def shares(indices: np.ndarray) -> np.ndarray:
        return np.stack([(indices == value).mean(axis=-1) for value in range(count)], axis=-1)

    return shares(inner), shares(winsorized)


def trimmed_means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the trimmed means of a sample and its resamples, and their standard errors (Tukey and McLaughlin, 1963).

    Args:
        values: sorted, at least two.
    """
    count = len(values)
    inner, winsorized = _shares(count)
    # Deviations, because squares of the values would hide a small variance.
    center = values.mean()
    deviations = values - center
    variances = np.maximum(winsorized @ deviations**2 - (winsorized @ deviations) ** 2, 0) * count / (count - 1)
    share = 1 - 2 * int(TRIMMED * count) / count
    return center + inner @ deviations, np.sqrt(variances) / (share * math.sqrt(count))


@dataclass(frozen=True)
class Estimate:
    """A log ratio and its studentized bootstrap: each resample's distance from it, in that resample's standard errors.

    The mean is trimmed, so that an epoch that another program disturbed does not hide what the others show.
    """

    mean: float
    error: float
    studentized: np.ndarray = field(repr=False)  # sorted

    @classmethod
    def of(cls, ratios: np.ndarray) -> "Estimate":
        """Estimate from one log ratio per epoch (Efron, Tibshirani, An Introduction to the Bootstrap, section 12.5)."""
        means, errors = trimmed_means(np.sort(ratios))
        mean, error = float(means[0]), float(errors[0])
        # A resample that repeats one value has no standard error to divide by.
        nonzero = errors > 1e-3 * error
        nonzero[0] = False  # the sample itself
        return cls(mean, error, np.sort((means[nonzero] - mean) / errors[nonzero]))

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the hypothesis that there is no difference."""
        if not self.error or not len(self.studentized):
            return float(self.mean == 0)
        t = self.mean / self.error
        count = len(self.studentized)
        at_least = count - int(np.searchsorted(self.studentized, t, side="left"))
        at_most = int(np.searchsorted(self.studentized, t, side="right"))
        return min(1.0, 2 * (min(at_least, at_most) + 1) / (count + 1))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the confidence interval that misses the true mean with probability `level`."""
        if not self.error or not len(self.studentized):
            return self.mean, self.mean
        low, high = np.quantile(self.studentized, (level / 2, 1 - level / 2))
        return self.mean - float(high) * self.error, self.mean - float(low) * self.error


def least_difference(seconds: float, of_host: bool) -> float:
    """Return the smallest log ratio that the gate may report.

    Args:
        seconds: the time of one call.
        of_host: whether this is the host's time.
    """
    return LEAST_OF_HOST if of_host else max(LEAST, math.log1p(LEAST_SECONDS / seconds))


def decide(
    measured: Mapping[str, np.ndarray], benchmarks: int, least_of: Mapping[str, float] = MappingProxyType({})
) -> list[Change]:
    """Decide the second stage, corrected for the number of benchmarks by Holm's procedure.

    Args:
        measured: the log ratios of each suspect, by benchmark.
        benchmarks: the number of benchmarks that were compared, suspects or not.
        least_of: the `least_difference` of each benchmark; `LEAST` where it is missing.
    """
    estimates = {name: Estimate.of(ratios) for name, ratios in measured.items()}
    changes = []
    rejecting = True
    for rank, (name, estimate) in enumerate(sorted(estimates.items(), key=lambda pair: pair[1].p_value)):
        level = FAMILY_LEVEL / (benchmarks - rank)
        rejecting &= estimate.p_value <= level
        low, high = estimate.interval(level)
        smallest = least_of.get(name, LEAST)
        worth_finding = max(smallest, WORTH_FINDING)
        if rejecting and abs(estimate.mean) >= smallest:
            verdict = "slower" if estimate.mean > 0 else "faster"
        elif low > -worth_finding and high < worth_finding:
            verdict = "same"
        else:
            verdict = "ambiguous"
        changes.append(Change(name, verdict, math.exp(estimate.mean), math.exp(low), math.exp(high), 2))
    return changes


def unconfirmed(suspect: Change, reason: str) -> Change:
    """Return the "ambiguous" verdict of a suspect that could not be measured again."""
    return replace(suspect, verdict="ambiguous", reason=reason)


def match_benchmarks(new: Iterable[str], old: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the benchmarks of both runs, those of the baseline only, and those of today's run only."""
    new_names, old_names = dict.fromkeys(new), dict.fromkeys(old)
    return (
        [name for name in new_names if name in old_names],
        [name for name in old_names if name not in new_names],
        [name for name in new_names if name not in old_names],
    )
