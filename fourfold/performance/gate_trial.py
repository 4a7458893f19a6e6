"""A trial of the gate on this machine: its verdicts on unchanged code and on planted slowdowns.

Each benchmark is compared with itself, loaded a second time from its sources. Each CUDA C++ kernel is also compared
with a slower copy of itself. In both copies every thread first waits for a length that it reads from memory, so the
length can change without compiling again. A search by measurement finds the length that gives the requested slowdown.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fourfold.performance import gate, sources
from fourfold.performance.calls import HOST
from fourfold.performance.gate import Change, Round
from fourfold.performance.gated import load
from fourfold.performance.sources import Baseline
from fourfold.performance.timed_run import TimedRun

UNCHANGED = 0.0
# The allowed distance of the measured from the requested log ratio, as a share of the requested one. The search stops
# within NEAR. If it never gets there, it accepts the nearest length within FAR.
NEAR, FAR = 0.1, 0.5
MOST_STEPS = 20
# A lower estimate of the time of one clock cycle or one loop iteration.
SECONDS_OF_A_STEP = 0.5e-9
CALIBRATION_EPOCHS, CALIBRATION_SECONDS = 3, 0.1

# %d is an address. On a GPU a thread waits by the clock, in the emulation by counting.
WAIT = """
    {
        const long long fourfold_wait = *reinterpret_cast<const volatile long long*>(%dULL);
#ifdef __CUDA_ARCH__
        const long long fourfold_begun = clock64();
        while (clock64() - fourfold_begun < fourfold_wait) {}
#else
        for (volatile long long i = 0; i < fourfold_wait; i = i + 1) {}
#endif
    }
"""


def add_waits(source: str, address: int) -> str:
    """Return CUDA C++ in which each kernel first waits for the length that is stored at `address`."""
    parts, end = [], 0
    for kernel in re.finditer(r"\b__global__\b", source):
        depth, position = 0, kernel.end()
        while depth or source[position] not in "{;":
            depth += {"(": 1, ")": -1}.get(source[position], 0)
            position += 1
        if source[position] == "{":
            parts += [source[end : position + 1], WAIT % address]
            end = position + 1
    return "".join([*parts, source[end:]])


@dataclass(frozen=True)
class GateTrial:
    """The gate's verdicts by planted slowdown; `UNCHANGED` is the key of unchanged code."""

    changes: Mapping[float, Sequence[Change]]
    not_planted: Mapping[str, Sequence[str]]  # by benchmark: the slowdowns that could not be planted, or the error
    left: int = 0  # the number of benchmarks that were not tried because the trial was stopped

    @property
    def false_alarms(self) -> list[Change]:
        """The changes of unchanged code whose verdict is "slower" or "faster"."""
        return [change for change in self.changes[UNCHANGED] if change.verdict in ("slower", "faster")]

    def lines(self) -> Iterator[str]:
        """Yield the summary for the terminal."""
        yield f"unchanged: {len(self.false_alarms)} false alarms of {len(self.changes[UNCHANGED])}"
        if self.left:
            yield f"stopped: {self.left} benchmarks were not tried"
        for slowdown, changes in self.changes.items():
            if slowdown == UNCHANGED or not changes:
                continue
            slower = sum(change.verdict == "slower" for change in changes)
            measured = sorted(change.ratio - 1 for change in changes)
            yield (
                f"planted {100 * slowdown:g}%, measured {measured[0]:+.1%} to {measured[-1]:+.1%}:"
                f" {slower} of {len(changes)} called slower"
            )
        for name, slowdowns in self.not_planted.items():
            yield f"not planted: {', '.join(slowdowns)} in {gate.short_name(name)}"
        for slowdown, changes in self.changes.items():
            for change in changes:
                if (change.verdict == "slower") != (slowdown != UNCHANGED) or change.verdict == "faster":
                    yield f"{100 * slowdown:g}% planted, said: {change}"


@dataclass(frozen=True)
class Waits:
    """Two copies of today's code that wait in each kernel: `reference` for no time, `slowed` for a chosen length."""

    reference: Baseline
    slowed: Baseline
    lengths: torch.Tensor

    @classmethod
    def of(cls, device: str, directory: Path) -> Waits:
        """Make the copies from today's sources, with their archives in `directory`."""
        lengths = torch.zeros(2, dtype=torch.int64, device=device)
        today = sources.read_sources({})
        # Another process may use the same address and so have the same archive. The random bytes keep the copies apart,
        # so that neither process removes the other's.
        unique = {"trial": uuid.uuid4().bytes}

        def copy(length: torch.Tensor) -> Baseline:
            files = {
                name: add_waits(text.decode(), length.data_ptr()).encode() if name.endswith((".cu", ".cuh")) else text
                for name, text in today.items()
            }
            return Baseline(sources.save(directory, files | unique))

        return cls(copy(lengths[0]), copy(lengths[1]), lengths)

    def wait(self, length: int) -> None:
        """Set the wait of `slowed`'s kernels from the next launch on."""
        self.lengths[1] = length


def length_for(slowdown: float, seconds: float, measured: Callable[[int], float], length: int = 1) -> int | None:
    """Search the length of the wait that makes a call slower by `slowdown`; None if the search fails.

    Args:
        slowdown: the requested slowdown; 0.02 for 2%.
        seconds: the time of a call without a wait.
        measured: takes a length; returns the log ratio of the call's time with that wait to its time without.
        length: the first length to try. Without a hint it must be small, because many threads may wait in sequence.
    """
    target = math.log1p(slowdown)
    low, high = (0, 0.0), (0, math.inf)  # a length and its log ratio; a length of 0 in `high` means none yet
    nearest, distance = 0, math.inf
    for _ in range(MOST_STEPS):
        ratio = measured(length)
        if abs(ratio - target) < distance:
            nearest, distance = length, abs(ratio - target)
        if ratio < target:
            low = length, max(ratio, 0.0)
        else:
            high = length, ratio
        # The wait alone is now longer than the call was, and still changes little: the call launches no kernel.
        without_effect = not high[0] and length * SECONDS_OF_A_STEP > seconds
        if distance <= NEAR * target or without_effect or 0 < high[0] <= low[0] + 1:
            break
        if not high[0]:
            length *= 4
        else:
            # Interpolate linearly between the two, but stay away from both ends.
            share = (target - low[1]) / (high[1] - low[1])
            length = low[0] + max(1, round((high[0] - low[0]) * min(max(share, 0.1), 0.9)))
    return nearest if distance <= FAR * target else None


def trial(run: TimedRun, seconds: float, planted: Sequence[float], say: Callable[[str], None]) -> GateTrial:
    """Try the gate on every benchmark of a run that is for the gate.

    Args:
        run: the finished run.
        seconds: the measuring time for each benchmark and slowdown.
        planted: the slowdowns to plant; 0.02 for 2%.
        say: prints a line of progress.
    """
    timed = [name for name, measurement in run.timed.items() if measurement.gated]
    ratios: dict[float, dict[str, np.ndarray]] = {slowdown: {} for slowdown in (UNCHANGED, *planted)}
    untried = 0
    not_planted: dict[str, list[str]] = {}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        unchanged = Baseline(sources.save(Path(directory), run.sources))
        waits = Waits.of(run.bench.device, Path(directory))
        try:
            for position, name in enumerate(timed, 1):
                say(f"[{position}/{len(timed)}] {name}")
                not_reached = not_planted.setdefault(name, [])
                try:
                    for slowdown, log_ratios in try_slowdowns(run, name, unchanged, waits, rng, seconds, planted):
                        if log_ratios is None:
                            not_reached.append(f"{100 * slowdown:g}%")
                        else:
                            ratios[slowdown][name] = log_ratios
                except Exception as error:  # one benchmark's error must not lose the results of the others
                    not_reached.append(f"{type(error).__name__}: {error}")
                except KeyboardInterrupt:
                    untried = len(timed) - position + 1
                    break
        finally:
            for copy in (waits.reference, waits.slowed):
                shutil.rmtree(copy.directory, ignore_errors=True)
    changes = {slowdown: gate.decide(logs, len(timed), run.least_differences) for slowdown, logs in ratios.items()}
    return GateTrial(changes, {name: not_reached for name, not_reached in not_planted.items() if not_reached}, untried)


def try_slowdowns(
    run: TimedRun,
    name: str,
    unchanged: Baseline,
    waits: Waits,
    rng: np.random.Generator,
    seconds: float,
    planted: Sequence[float],
) -> Iterator[tuple[float, np.ndarray | None]]:
    """Yield each slowdown with one benchmark's log ratios, or None if the slowdown could not be planted."""
    measurement = run.timed[name]
    pair = run.bench.against(measurement, load(unchanged, measurement, run.candidates), rng)
    yield UNCHANGED, gate.alternate(pair, seconds, rng)
    if measurement.contender != "cuda" or measurement.direction == HOST or not planted:
        return
    old, new = (load(side, measurement, {}) for side in (waits.reference, waits.slowed))
    pair = run.bench.against(measurement, old, rng, new)
    first = 1
    for slowdown in planted:
        length = length_for(slowdown, run.medians[name], partial(measure_wait, waits, pair, rng), first)
        if length is None:
            yield slowdown, None
            continue
        first = length  # the search for the next slowdown, usually a larger one, begins here
        waits.wait(length)
        yield slowdown, gate.alternate(pair, seconds, rng)


def measure_wait(waits: Waits, pair: Callable[[], tuple[Round, Round]], rng: np.random.Generator, length: int) -> float:
    """Measure the log ratio of the time with a wait of this length to the time without."""
    waits.wait(length)
    return float(np.median(gate.alternate(pair, CALIBRATION_SECONDS, rng, CALIBRATION_EPOCHS)))
