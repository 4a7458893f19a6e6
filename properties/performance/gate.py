"""The gate: whether a change made something slower, in two stages.

First, the medians of two runs are compared, and what may have changed by as much as is worth finding is suspect:
runs apart in time differ by what the machine did meanwhile. Then suspects are measured again, the baseline's code and
today's in turns, and only what that confirms counts.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

# A difference that is worth finding. In the first stage nothing may hide it; in the second it makes "same".
WORTH_FINDING = math.log(1.02)
# Less than this is nobody's concern, however certain it is.
LEAST = math.log(1.01)
# Where code and what it keeps lie in memory stays for as long as a process lives, and makes two that are alike differ:
# on an H200 by up to 1.5% of the host's time, and 0.06 us of a kernel's.
LEAST_OF_HOST = math.log(1.03)
LEAST_SECONDS = 0.1e-6
# Of all benchmarks together: the chance that any is called slower or faster which is not.
FAMILY_LEVEL = 0.05
# One-sided 95%: the chance that the first stage lets a difference pass that is worth finding.
SCREEN_Z = 1.645
# Of a run's median, where the history is too short to say.
ASSUMED_SPREAD = 0.02
LEAST_SPREAD = 0.001
RUNS_FOR_A_SPREAD = 4
EPOCHS = 20
TRIMMED = 0.05  # of the epochs, at either end
RESAMPLES = 20_000
FEWEST_TURNS, MOST_TURNS = 3, 40

Round = Callable[[], float]


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one benchmark.

    Attributes:
        name: of the benchmark.
        verdict: "faster", "same", "slower" or "ambiguous".
        ratio: of today's time to the baseline's.
        low, high: its interval; at the family's level where it was measured again.
        stage: 1 where the medians said enough, 2 where it was measured again.
        why: it is ambiguous without having been measured again.
    """

    name: str
    verdict: str
    ratio: float
    low: float
    high: float
    stage: int
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.verdict:<9} {self.ratio - 1:+7.1%} ({self.low - 1:+6.1%} to {self.high - 1:+6.1%}) "
            f"{short_name(self.name)}"
            f"{f': {self.why}' if self.why else ''}"
        )


def short_name(name: str) -> str:
    """Of a benchmark: what it is of, without the test that times it."""
    return name.partition("[")[2].removesuffix("]") or name.rpartition("::")[2]


def run_spread(medians: Sequence[float]) -> float:
    """The standard deviation of a run's log median, from the medians of past runs in order.

    Of differences between neighbours, so that a change of the code counts once, and by their median, so that it does
    not count at all.
    """
    if len(medians) < RUNS_FOR_A_SPREAD:
        return ASSUMED_SPREAD
    logs = np.log(np.asarray(medians))
    deviation = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return max(deviation, LEAST_SPREAD)


def screened(name: str, now: float, then: float, spread: float) -> Verdict:
    """The first stage: "same" where a difference worth finding would have shown, else "ambiguous".

    Args:
        name: of the benchmark.
        now: its median today.
        then: the baseline's.
        spread: standard deviation of a run's log median.
    """
    ratio, half = math.log(now / then), SCREEN_Z * math.sqrt(2) * spread
    same = abs(ratio) + half < WORTH_FINDING
    return Verdict(
        name, "same" if same else "ambiguous", math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half), 1
    )


def alternate(
    pair: Callable[[], tuple[Round, Round]],
    seconds: float,
    rng: np.random.Generator,
    epochs: int = EPOCHS,
    now: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Log ratios of today's time to the baseline's, one an epoch, from rounds in turns.

    An epoch has tensors of its own, for where they lie in memory makes a difference that lasts. In each turn both
    are measured twice, in the order A B B A or B A A B, so that a drift of the machine cancels.

    Args:
        pair: gives a round of the baseline and one of today's code, warmed up, on new tensors.
        seconds: that all epochs may take together.
        rng: chooses the order.
        epochs: how many.
        now: the host's time.
    """
    ratios = []
    for _ in range(epochs):
        then_round, now_round = pair()
        turns: list[float] = []
        begun = now()
        while len(turns) < FEWEST_TURNS or (len(turns) < MOST_TURNS and now() - begun < seconds / epochs):
            inner, outer = (then_round, now_round) if rng.random() < 0.5 else (now_round, then_round)
            first, second, third, fourth = outer(), inner(), inner(), outer()
            difference = (math.log(first) + math.log(fourth) - math.log(second) - math.log(third)) / 2
            turns.append(difference if outer is now_round else -difference)
        ratios.append(statistics.median(turns))
    return np.array(ratios)


@functools.cache
def _resamples(count: int) -> np.ndarray:
    """Which of so many values are in each resample, in order."""
    return np.sort(np.random.default_rng(0).integers(0, count, (RESAMPLES, count)))


def trimmed_mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean along the last axis without some values at either end, and its standard error (Tukey, McLaughlin, 1963).

    Args:
        values: sorted along that axis; at least two.
    """
    count = values.shape[-1]
    cut = int(TRIMMED * count)
    inner = values[..., cut : count - cut]
    winsorized = np.clip(values, inner[..., :1], inner[..., -1:])
    share = inner.shape[-1] / count
    return inner.mean(axis=-1), winsorized.std(axis=-1, ddof=1) / (share * math.sqrt(count))


@dataclass(frozen=True)
class Estimate:
    """A log ratio and its bootstrap: how far resamples' trimmed means lie from it, in their own standard errors.

    Trimmed, as an epoch in which something else ran beside one of the two would hide what all others say.
    """

    mean: float
    error: float
    studentized: np.ndarray = field(repr=False)  # sorted

    @classmethod
    def of(cls, ratios: np.ndarray) -> "Estimate":
        """From one log ratio an epoch (Efron and Tibshirani, An Introduction to the Bootstrap, section 12.5)."""
        ordered = np.sort(ratios)
        mean, error = map(float, trimmed_mean(ordered))
        means, errors = trimmed_mean(ordered[_resamples(len(ordered))])
        # A resample of one value over and over says nothing of how it would vary.
        kept = errors > 1e-3 * error
        return cls(mean, error, np.sort((means[kept] - mean) / errors[kept]))

    @property
    def p_value(self) -> float:
        """Of no difference, against either."""
        if not self.error or not len(self.studentized):
            return float(self.mean == 0)
        t = self.mean / self.error
        count = len(self.studentized)
        above = count - int(np.searchsorted(self.studentized, t, side="left"))
        below = int(np.searchsorted(self.studentized, t, side="right"))
        return min(1.0, 2 * (min(above, below) + 1) / (count + 1))

    def interval(self, level: float) -> tuple[float, float]:
        """That misses the true mean with the chance `level`."""
        if not self.error or not len(self.studentized):
            return self.mean, self.mean
        low, high = np.quantile(self.studentized, (level / 2, 1 - level / 2))
        return self.mean - float(high) * self.error, self.mean - float(low) * self.error


def least_difference(seconds: float, of_host: bool) -> float:
    """The log ratio from which on a difference is somebody's concern.

    Args:
        seconds: that a call takes.
        of_host: whether they are the host's.
    """
    return LEAST_OF_HOST if of_host else max(LEAST, math.log1p(LEAST_SECONDS / seconds))


def decided(
    measured: Mapping[str, np.ndarray], benchmarks: int, least_of: Mapping[str, float] = MappingProxyType({})
) -> list[Verdict]:
    """The second stage's verdicts, corrected for the number of benchmarks by Holm's procedure.

    Args:
        measured: the log ratios of each suspect.
        benchmarks: how many were compared in all, suspect or not.
        least_of: each one's `least_difference`; `LEAST` of those that are not there.
    """
    estimates = {name: Estimate.of(ratios) for name, ratios in measured.items()}
    verdicts = []
    rejecting = True
    for rank, (name, estimate) in enumerate(sorted(estimates.items(), key=lambda pair: pair[1].p_value)):
        level = FAMILY_LEVEL / (benchmarks - rank)
        rejecting &= estimate.p_value <= level
        low, high = estimate.interval(level)
        least = least_of.get(name, LEAST)
        worth_finding = max(least, WORTH_FINDING)
        if rejecting and abs(estimate.mean) >= least:
            verdict = "slower" if estimate.mean > 0 else "faster"
        elif low > -worth_finding and high < worth_finding:
            verdict = "same"
        else:
            verdict = "ambiguous"
        verdicts.append(Verdict(name, verdict, math.exp(estimate.mean), math.exp(low), math.exp(high), 2))
    return verdicts


def unconfirmed(verdict: Verdict, why: str) -> Verdict:
    """A suspect that could not be measured again."""
    return replace(verdict, verdict="ambiguous", why=why)


def matched(now: Iterable[str], then: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Benchmarks of both runs, those that only the baseline has, and those that only today's run has."""
    today, before = dict.fromkeys(now), dict.fromkeys(then)
    return (
        [name for name in today if name in before],
        [name for name in before if name not in today],
        [name for name in today if name not in before],
    )
