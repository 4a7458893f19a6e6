"""The comparison of a run with a recorded run: the common benchmarks, their verdicts and the kernels' resources."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.candidates.load.calling import as_operation
from fourfold.checks.records import reference_of
from fourfold.performance import code_identity, gate, machine, static
from fourfold.performance.drift import Drift, drifts, unchanged_runs
from fourfold.performance.gate import Change
from fourfold.performance.measurement import Measurement
from fourfold.performance.peers import Function
from fourfold.performance.sources import Baseline, SourceError
from fourfold.performance.timed_run import TimedRun

SHOWN = 10


@dataclass(frozen=True)
class BaselineHistory:
    """The baseline and this machine's earlier runs.

    Attributes:
        baseline: pytest-benchmark's JSON of the run to compare with.
        history: the same of every earlier run on this machine.
        machine: this machine, as `machine.machine` describes it.
    """

    baseline: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    machine: Mapping[str, str]

    @property
    def medians(self) -> dict[str, float]:
        """The baseline's median seconds, by benchmark."""
        return _medians(self.baseline)

    @cached_property
    def former(self) -> list[dict[str, float]]:
        """The same of every earlier run, oldest first."""
        return list(map(_medians, self.history))

    @cached_property
    def keys(self) -> dict[str, str | None]:
        """The baseline's `code_identity.key`, by benchmark."""
        return _keys(self.baseline)

    def runs(self, today: Mapping[str, float]) -> list[Mapping[str, float]]:
        """Return the medians of all runs, oldest first; today's, which may be kept already, are the last."""
        return [*(self.former[place] for place in self._former_runs(today)), today]

    def unchanged(self, today: Mapping[str, float], keys: Mapping[str, str | None]) -> dict[str, int]:
        """Return how many of the last runs had today's code, by benchmark, given today's medians and keys."""
        indices = self._former_runs(today)
        return {
            name: unchanged_runs([*(self._former_keys[i].get(name) for i in indices if name in self.former[i]), key])
            for name, key in keys.items()
        }

    def _former_runs(self, today: Mapping[str, float]) -> list[int]:
        """Return the places of the runs in the history that are not today's."""
        runs = enumerate(self.former)
        return [place for place, run in runs if any(run.get(name) != median for name, median in today.items())]

    @cached_property
    def _former_keys(self) -> list[dict[str, str | None]]:
        return list(map(_keys, self.history))

    def spread(self, name: str) -> float:
        """Estimate the standard deviation of a run's log median from the history of one benchmark."""
        return gate.run_spread([run[name] for run in self.former if name in run])


def _medians(run: Mapping[str, Any]) -> dict[str, float]:
    return {entry["fullname"]: entry["stats"]["median"] for entry in run["benchmarks"]}


def _keys(run: Mapping[str, Any]) -> dict[str, str | None]:
    info = run["machine_info"].get("fourfold", {})
    return {
        entry["fullname"]: code_identity.key(entry.get("extra_info", {}).get("launched"), info)
        for entry in run["benchmarks"]
    }


@dataclass(frozen=True)
class Remeasuring:
    """The settings of the second stage, which measures suspects again.

    Attributes:
        seconds: the minimum measuring time for each suspect.
        directories: the directories in which to look for the baseline's sources.
        say: prints a line of progress.
    """

    seconds: float
    directories: Sequence[Path]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Gated:
    """The result of a comparison.

    Attributes:
        changes: the verdict on each gated benchmark that both runs have.
        kernels: the name of each suspect's function, by benchmark.
        benchmarks: the number of benchmarks that both runs have.
        missing: the benchmarks that only the baseline has.
        new: the benchmarks that only today's run has.
        beside: the number of common benchmarks that the gate ignores: peers and rungs of ladders.
        static: the resources that kernels need more of than before.
        changed: the properties of the machine that changed, above all versions: now and then.
        confirmed: whether suspects were measured again.
        drifts: what becomes slower little by little.
        code: of each suspect, how the code that it launches differs from the baseline's, where both are recorded.
        machine_drifts: what becomes slower little by little, while its code is the same.
        on_gpu: whether the benchmarks ran on a GPU, where compiled code is recorded.
    """

    changes: Sequence[Change]
    kernels: Mapping[str, str]
    benchmarks: int
    missing: Sequence[str]
    new: Sequence[str]
    beside: int
    static: Sequence[str]
    changed: Mapping[str, tuple[str, str]]
    confirmed: bool
    drifts: Sequence[Drift] = ()
    code: Mapping[str, Sequence[str]] = field(default_factory=dict)
    machine_drifts: Sequence[Drift] = ()
    on_gpu: bool = True

    @classmethod
    def of(cls, run: TimedRun, record: BaselineHistory, settings: Remeasuring | None) -> Gated:
        """Compare a run with a record.

        Args:
            run: the finished run.
            record: the baseline and the history.
            settings: the settings for measuring suspects again; None to skip that.
        """
        medians = record.medians
        common, missing, new = gate.match_benchmarks(run.medians, medians)
        gated = [name for name in common if name in run.timed and run.timed[name].gated]
        launched = run.launched
        keys = {name: code_identity.key(launched.get(name), record.machine) for name in gated}
        changes = {name: gate.screen(name, run.medians[name], medians[name], record.spread(name)) for name in gated}
        same_code = [name for name in gated if keys[name] is not None and keys[name] == record.keys[name]]
        changes |= {name: gate.same_code_change(changes[name]) for name in same_code}
        suspects = [name for name, change in changes.items() if change.verdict != "same"]
        if settings is not None and suspects:
            changes |= confirm(run, record, [changes[name] for name in suspects], len(gated) - len(same_code), settings)
        kernels = {name: _kernel(run.bench.implementation(run.timed[name])) for name in suspects}
        on_gpu = record.machine.get("device") != "cpu"
        old_machine = record.baseline["machine_info"].get("fourfold", {})
        runs, least_differences = record.runs(run.medians), {name: run.least_differences[name] for name in gated}
        unchanged = record.unchanged(run.medians, keys)
        return cls(
            changes=list(changes.values()),
            kernels=kernels,
            benchmarks=len(common),
            missing=missing,
            new=new,
            beside=len(common) - len(gated),
            static=list(_worse_resources(run, record, common, on_gpu)),
            changed=machine.differences(record.machine, old_machine),
            confirmed=settings is not None,
            drifts=drifts(runs, least_differences, unchanged),
            code={name: lines for name in suspects if (lines := _differences(run, record, name))},
            machine_drifts=[drift for drift in drifts(runs, least_differences) if drift.runs <= unchanged[drift.name]],
            on_gpu=on_gpu,
        )

    @property
    def slower(self) -> list[Change]:
        """The changes whose verdict is "slower"."""
        return [change for change in self.changes if change.verdict == "slower"]

    def lines(self) -> Iterator[str]:
        """Yield the summary for the terminal: what differs, and each change that the medians did not settle."""
        for key, (new, old) in self.changed.items():
            yield f"{key} is {new}, but was {old}"
        yield from _list_names("missing: the baseline has them", self.missing)
        yield from _list_names("new: the baseline does not have them", self.new)
        for worse in self.static:
            yield f"by its compiled code, {worse}"
        by_code = [change for change in self.changes if change.stage == 0]
        if by_code:
            yield f"{len(by_code)} of {len(self.changes)} benchmarks: the same code, and so the same without a clock"
        yield from _clocks(by_code)
        if not self.on_gpu:
            yield "on the CPU no compiled code is compared: the clock alone decides"
        settled = sum(change.stage == 1 and change.verdict == "same" for change in self.changes)
        yield f"{settled} of {len(self.changes)} benchmarks: the same by their medians"
        if self.beside:
            yield f"{self.beside} of peers and ladders: recorded, and not for the gate"
        noteworthy = [change for change in self.changes if change.stage == 2 or change.verdict != "same"]
        if noteworthy and not self.confirmed:
            yield "the others may have changed; --perf-gate measures them again:"
        for change in sorted(noteworthy, key=lambda change: -change.ratio):
            yield str(change)
        yield from map(str, self.drifts)
        for drift in self.machine_drifts:
            yield f"{drift}: its code has been the same, so this is of the machine"
        count = len(self.changes) - len(by_code)
        for change in self.slower:
            yield (
                f"{self.kernels[change.name]} is slower: {change.ratio - 1:+.1%} of its time, {change.low - 1:+.1%}"
                f" to {change.high - 1:+.1%} at {1 - gate.FAMILY_LEVEL:.0%} for all {count} benchmarks"
                f" together, in {change.name}"
            )
            yield from (f"  {line}" for line in self.code.get(change.name, ()))


def _clocks(changes: Sequence[gate.Change]) -> Iterator[str]:
    """Return benchmarks of the same code whose times still differ, the largest difference first."""
    differing = sorted(filter(gate.clock_differs, changes), key=lambda change: -abs(math.log(change.ratio)))
    for change in differing[:SHOWN]:
        yield f"{change}; the difference is of the machine"
    if len(differing) > SHOWN:
        yield f"and {len(differing) - SHOWN} more benchmarks of the same code with another time"


def _worse_resources(run: TimedRun, record: BaselineHistory, common: Collection[str], on_gpu: bool) -> Iterator[str]:
    """Describe what the kernels of the common benchmarks need more of than the baseline's."""
    new, old = (
        [entry for entry in benchmarks if entry["fullname"] in common]
        for benchmarks in (run.benchmarks, record.baseline["benchmarks"])
    )
    resources = run.static(new)
    if on_gpu:
        former = code_identity.kernels_by_cell(old, record.baseline.get("launched_kernels", {}))
    else:
        former = record.baseline.get("static", {}).get("kernels", {})
    yield from static.regressions(resources["kernels"], former)
    if "error" in resources:
        yield f"what kernels need is not known: {resources['error']}"


def _differences(run: TimedRun, record: BaselineHistory, name: str) -> list[str]:
    (info,) = (entry.get("extra_info", {}) for entry in record.baseline["benchmarks"] if entry["fullname"] == name)
    launched = run.launched.get(name)
    if launched is None or "launched" not in info:
        return []
    former = record.baseline.get("launched_kernels", {})
    return list(code_identity.differences(launched, info["launched"], run.launched_kernels, former))


def confirm(
    run: TimedRun, record: BaselineHistory, suspects: Sequence[Change], benchmarks: int, settings: Remeasuring
) -> dict[str, Change]:
    """Measure suspects again, with the baseline's code and today's in turns, and return their verdicts by benchmark."""
    settings.say("")
    settings.say(
        f"{len(suspects)} of {benchmarks} may have changed; each is measured again for {settings.seconds:g} s and more"
    )
    sources = record.baseline.get("sources", {})
    rng = np.random.default_rng(0)
    ratios: dict[str, np.ndarray] = {}
    changes: dict[str, Change] = {}
    baseline, reason = _baseline(settings.directories, sources)
    for position, suspect in enumerate(suspects, 1):
        settings.say(f"[{position}/{len(suspects)}] {suspect.name}")
        if baseline is None:
            changes[suspect.name] = gate.unconfirmed(suspect, reason)
            continue
        measurement = run.timed[suspect.name]
        try:
            former = load(baseline, measurement, sources["candidates"])
            pair = run.bench.against(measurement, former, rng)
            ratios[suspect.name] = gate.alternate(pair, settings.seconds, rng)
        except SourceError as error:
            changes[suspect.name] = gate.unconfirmed(suspect, str(error))
        except Exception as error:  # the baseline's code failed where today's did not
            changes[suspect.name] = gate.unconfirmed(suspect, f"{type(error).__name__}: {error}")
    return changes | {change.name: change for change in gate.decide(ratios, benchmarks, run.least_differences)}


def _baseline(directories: Sequence[Path], sources: Mapping[str, Any]) -> tuple[Baseline | None, str]:
    """Return the sources of a record, from the first of some directories that has them; or why none has."""
    reasons = ["the record does not name the sources that it timed"]
    if sources:
        reasons = []
        for directory in directories:
            try:
                return Baseline(directory / "sources" / f"{sources['sha256']}.zip"), ""
            except SourceError as error:
                reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def load(baseline: Baseline, measurement: Measurement, candidates: Mapping[str, str]) -> Function:
    """Load the baseline's implementation of a measurement.

    Args:
        baseline: the sources of the recorded run.
        measurement: a measurement of a cell.
        candidates: the path of each candidate's file in the baseline, by its `Measurement.origin`.

    Raises:
        SourceError: the baseline does not have the implementation, or it does not load.
    """
    cell = measurement.cell
    assert cell is not None
    if measurement.of.source is None:
        return baseline.load(cell.operation, cell.backend)
    if measurement.origin not in candidates:
        raise SourceError(f"its candidate {measurement.origin} is not kept")
    operation, (_, function) = measurement.operation, measurement.of.source()
    former = baseline.candidate(candidates[measurement.origin], function)
    return as_operation(former, inspect.signature(reference_of(operation)), operation.name)


def _kernel(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _list_names(heading: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        omission = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{len(names)} {heading}: {', '.join(map(gate.short_name, names[:SHOWN]))}{omission}"
