"""A trial of the gate on this machine: what it says of code that has not changed, and of slowdowns that are planted.

Each benchmark is held against itself, loaded once more from its sources. And each CUDA C++ kernel against itself made
slower: in both, every thread waits first, for as long as a number in memory says that is changed without compiling
anew. How long it must be for a benchmark to become so much slower is found out by measuring.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from properties.performance import gate, sources
from properties.performance.gate import Round, Verdict
from properties.performance.gated import loaded
from properties.performance.measurement import HOST
from properties.performance.sources import Baseline

if TYPE_CHECKING:
    from properties.performance.plugin import Performance

UNCHANGED = 0.0
# How far what was measured may be from the log ratio that is to be planted, as a share of it: enough to stop there,
# and enough to be content with where nothing closer was found.
NEAR, FAR = 0.1, 0.5
MOST_STEPS = 20
# A cycle or an iteration is no shorter by much.
SECONDS_OF_A_STEP = 0.5e-9
CALIBRATION_EPOCHS, CALIBRATION_SECONDS = 3, 0.1

# %d is an address; the C++ that a GPU runs waits by its clock, the emulation by counting.
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


def with_waits(source: str, address: int) -> str:
    """CUDA C++ each of whose kernels begins by waiting for as long as the number at an address says."""
    parts, end = [], 0
    for kernel in re.finditer(r"\b__global__\b", source):
        depth, at = 0, kernel.end()
        while depth or source[at] not in "{;":
            depth += {"(": 1, ")": -1}.get(source[at], 0)
            at += 1
        if source[at] == "{":
            parts += [source[end : at + 1], WAIT % address]
            end = at + 1
    return "".join([*parts, source[end:]])


def slowdowns(text: str) -> tuple[float, ...]:
    """What an option's percentages stand for: "1,5" for 0.01 and 0.05, "0" for none."""
    try:
        percentages = [float(part) for part in text.split(",")]
    except ValueError:
        percentages = [math.nan]
    if not all(0 <= percentage < math.inf for percentage in percentages):
        raise argparse.ArgumentTypeError(f"percentages are wanted, as in 1,2,5,10 or 0, not {text!r}")
    return tuple(dict.fromkeys(percentage / 100 for percentage in percentages if percentage))


@dataclass(frozen=True)
class Trial:
    """What the gate said, by how much slower each benchmark had been made; `UNCHANGED` are those that had not."""

    verdicts: Mapping[float, Sequence[Verdict]]
    not_planted: Mapping[str, Sequence[str]]  # by benchmark: which, or why
    left: int = 0  # benchmarks that it was stopped before

    @property
    def false_alarms(self) -> list[Verdict]:
        """Of unchanged code that is called slower or faster."""
        return [verdict for verdict in self.verdicts[UNCHANGED] if verdict.verdict in ("slower", "faster")]

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield f"unchanged: {len(self.false_alarms)} false alarms of {len(self.verdicts[UNCHANGED])}"
        if self.left:
            yield f"stopped: {self.left} benchmarks were not tried"
        for slowdown, verdicts in self.verdicts.items():
            if slowdown == UNCHANGED or not verdicts:
                continue
            slower = sum(verdict.verdict == "slower" for verdict in verdicts)
            measured = sorted(verdict.ratio - 1 for verdict in verdicts)
            yield (
                f"planted {100 * slowdown:g}%, measured {measured[0]:+.1%} to {measured[-1]:+.1%}:"
                f" {slower} of {len(verdicts)} called slower"
            )
        for name, what in self.not_planted.items():
            yield f"not planted: {', '.join(what)} in {gate.short_name(name)}"
        for slowdown, verdicts in self.verdicts.items():
            for verdict in verdicts:
                if (verdict.verdict == "slower") != (slowdown != UNCHANGED) or verdict.verdict == "faster":
                    yield f"{100 * slowdown:g}% planted, said: {verdict}"


@dataclass(frozen=True)
class Waits:
    """Two copies of today's code whose kernels wait: the one never, the other as long as it is told."""

    then: Baseline
    now: Baseline
    lengths: torch.Tensor

    @classmethod
    def of(cls, device: str, directory: Path) -> Waits:
        """Made of today's sources, with their archives in a directory."""
        lengths = torch.zeros(2, dtype=torch.int64, device=device)
        today = sources.collected({})
        # An address may be another process' too, which must not have these removed, nor remove them.
        nobody_elses = {"trial": uuid.uuid4().bytes}

        def copy(length: torch.Tensor) -> Baseline:
            files = {
                name: with_waits(text.decode(), length.data_ptr()).encode() if name.endswith(".cu") else text
                for name, text in today.items()
            }
            return Baseline(sources.save(directory, files | nobody_elses))

        return cls(copy(lengths[0]), copy(lengths[1]), lengths)

    def wait(self, length: int) -> None:
        """From the next launch on."""
        self.lengths[1] = length


def length_for(slowdown: float, seconds: float, measured: Callable[[int], float], length: int = 1) -> int | None:
    """How long kernels must wait for a call to take so much longer; None where that is not found.

    Args:
        slowdown: 0.02 for 2%.
        seconds: that a call takes.
        measured: the log ratio of the call's time to its time without waiting, by the length of the wait.
        length: to begin with; where nothing is known a low one, as many threads may wait one after another.
    """
    wanted = math.log1p(slowdown)
    low, high = (0, 0.0), (0, math.inf)  # lengths, and what they came to
    nearest, least = 0, math.inf
    for _ in range(MOST_STEPS):
        ratio = measured(length)
        if abs(ratio - wanted) < least:
            nearest, least = length, abs(ratio - wanted)
        if ratio < wanted:
            low = length, max(ratio, 0.0)
        else:
            high = length, ratio
        # Nobody has waited where it takes no longer than the wait alone: it launches no kernel.
        without_effect = not high[0] and length * SECONDS_OF_A_STEP > seconds
        if least <= NEAR * wanted or without_effect or 0 < high[0] <= low[0] + 1:
            break
        if not high[0]:
            length *= 4
        else:
            # Along the line between the two, and not too near to either.
            share = (wanted - low[1]) / (high[1] - low[1])
            length = low[0] + max(1, round((high[0] - low[0]) * min(max(share, 0.1), 0.9)))
    return nearest if least <= FAR * wanted else None


def trial(run: Performance, say: Callable[[str], None]) -> Trial:
    """Put the gate on trial with all that has been timed.

    Args:
        run: that has ended.
        say: is told what is being measured.
    """
    timed = [name for name, measurement in run.timed.items() if measurement.gated]
    planted = run.config.getoption("perf_gate_slowdowns")
    ratios: dict[float, dict[str, np.ndarray]] = {slowdown: {} for slowdown in (UNCHANGED, *planted)}
    left = 0
    not_planted: dict[str, list[str]] = {}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as made:
        unchanged = Baseline(sources.save(Path(made), run.sources))
        waits = Waits.of(run.device, Path(made))
        try:
            for position, name in enumerate(timed, 1):
                say(f"[{position}/{len(timed)}] {name}")
                missing = not_planted.setdefault(name, [])
                try:
                    for slowdown, found in tried(run, name, unchanged, waits, rng):
                        if found is None:
                            missing.append(f"{100 * slowdown:g}%")
                        else:
                            ratios[slowdown][name] = found
                except Exception as error:  # of one, which must not take the others' results with it
                    missing.append(f"{type(error).__name__}: {error}")
                except KeyboardInterrupt:
                    left = len(timed) - position + 1
                    break
        finally:
            for copy in (waits.then, waits.now):
                shutil.rmtree(copy.directory, ignore_errors=True)
    verdicts = {slowdown: gate.decided(of, len(timed), run.least_differences) for slowdown, of in ratios.items()}
    return Trial(verdicts, {name: missing for name, missing in not_planted.items() if missing}, left)


def tried(
    run: Performance, name: str, unchanged: Baseline, waits: Waits, rng: np.random.Generator
) -> Iterator[tuple[float, np.ndarray | None]]:
    """One benchmark's log ratios by how much slower it was made; None for those that it could not be made."""
    measurement, seconds = run.timed[name], run.config.getoption("perf_gate_seconds")
    candidates = {op: candidate.function for op, candidate in run.selection.candidates.items()}
    pair = run.bench.against(measurement, loaded(unchanged, measurement, candidates), rng)
    yield UNCHANGED, gate.alternate(pair, seconds, rng)
    planted = run.config.getoption("perf_gate_slowdowns")
    if measurement.contender != "cuda" or measurement.direction == HOST or not planted:
        return
    then, now = (loaded(side, measurement, {}) for side in (waits.then, waits.now))
    pair = run.bench.against(measurement, then, rng, now)
    first = 1
    for slowdown in planted:
        length = length_for(slowdown, run.medians[name], partial(measured, waits, pair, rng), first)
        if length is None:
            yield slowdown, None
            continue
        first = length  # of the next, which is as a rule a larger one
        waits.wait(length)
        yield slowdown, gate.alternate(pair, seconds, rng)


def measured(waits: Waits, pair: Callable[[], tuple[Round, Round]], rng: np.random.Generator, length: int) -> float:
    """The log ratio of the time with a wait of a length to that without."""
    waits.wait(length)
    return float(np.median(gate.alternate(pair, CALIBRATION_SECONDS, rng, CALIBRATION_EPOCHS)))
