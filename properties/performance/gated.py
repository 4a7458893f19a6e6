"""A run held against a recorded one: which benchmarks both have, what became of each, and what its kernels need now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from properties.cells import CANDIDATE
from properties.performance import gate, machine, static
from properties.performance.gate import Verdict
from properties.performance.peers import Function
from properties.performance.sources import Baseline, SourceError

if TYPE_CHECKING:
    from properties.performance.measurement import Measurement
    from properties.performance.plugin import Performance

SHOWN = 10


@dataclass(frozen=True)
class Record:
    """The baseline, and the machine's history."""

    baseline: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    machine: Mapping[str, str]

    @property
    def medians(self) -> dict[str, float]:
        """The baseline's, by benchmark."""
        return {one["fullname"]: one["stats"]["median"] for one in self.baseline["benchmarks"]}

    def spread(self, name: str) -> float:
        """Of a run's log median, as the history has it."""
        runs = ({one["fullname"]: one for one in run["benchmarks"]} for run in self.history)
        return gate.run_spread([run[name]["stats"]["median"] for run in runs if name in run])


@dataclass(frozen=True)
class Gated:
    """What a comparison came to.

    Attributes:
        verdicts: of each benchmark of a cell that both runs have.
        kernels: the name of each benchmark's function.
        benchmarks: how many were compared.
        missing: benchmarks that only the baseline has.
        new: those that only today's run has.
        beside: how many of both runs are peers and rungs of ladders, and no matter of the gate.
        static: what kernels need more of than they did.
        changed: what else is not as it was: versions, above all.
        confirmed: whether suspects were measured again.
    """

    verdicts: Sequence[Verdict]
    kernels: Mapping[str, str]
    benchmarks: int
    missing: Sequence[str]
    new: Sequence[str]
    beside: int
    static: Sequence[str]
    changed: Mapping[str, tuple[str, str]]
    confirmed: bool

    @classmethod
    def of(cls, run: Performance, record: Record, say: Callable[[str], None] | None) -> Gated:
        """Compare a run with a record.

        Args:
            run: that has ended.
            record: the baseline.
            say: is told what is being measured; None where nothing is to be measured again.
        """
        then = record.medians
        common, missing, new = gate.matched(run.medians, then)
        own = [name for name in common if name in run.timed and run.timed[name].gated]
        verdicts = {name: gate.screened(name, run.medians[name], then[name], record.spread(name)) for name in own}
        suspects = [name for name, verdict in verdicts.items() if verdict.verdict != "same"]
        if say is not None and suspects:
            verdicts |= confirmed(run, record, [verdicts[name] for name in suspects], len(own), say)
        kernels = {name: _kernel(run.bench.implementation(run.timed[name])) for name in suspects}
        before = record.baseline.get("static", {}).get("kernels", {})
        worse = list(static.regressions(run.static["kernels"], before))
        if "error" in run.static:
            worse.append(f"what kernels need is not known: {run.static['error']}")
        was = record.baseline["machine_info"].get("fourfold", {})
        return cls(
            verdicts=list(verdicts.values()),
            kernels=kernels,
            benchmarks=len(common),
            missing=missing,
            new=new,
            beside=len(common) - len(own),
            static=worse,
            changed=machine.differences(record.machine, was),
            confirmed=say is not None,
        )

    @property
    def slower(self) -> list[Verdict]:
        """What was confirmed to be."""
        return [verdict for verdict in self.verdicts if verdict.verdict == "slower"]

    def lines(self) -> Iterator[str]:
        """For the terminal: the verdicts but those that the medians settled, and everything that is not as it was."""
        for key, (now, then) in self.changed.items():
            yield f"{key} is {now}, but was {then}"
        yield from _listed("missing: the baseline has them", self.missing)
        yield from _listed("new: the baseline does not have them", self.new)
        for worse in self.static:
            yield f"by its compiled code, {worse}"
        settled = sum(verdict.stage == 1 and verdict.verdict == "same" for verdict in self.verdicts)
        yield f"{settled} of {len(self.verdicts)} benchmarks: the same by their medians"
        if self.beside:
            yield f"{self.beside} of peers and ladders: recorded, and not for the gate"
        rest = [verdict for verdict in self.verdicts if verdict.stage != 1 or verdict.verdict != "same"]
        if rest and not self.confirmed:
            yield "the others may have changed; --perf-gate measures them again:"
        for verdict in sorted(rest, key=lambda verdict: -verdict.ratio):
            yield str(verdict)
        for verdict in self.slower:
            yield (
                f"{self.kernels[verdict.name]} is slower: {verdict.ratio - 1:+.1%} of its time, {verdict.low - 1:+.1%}"
                f" to {verdict.high - 1:+.1%} at {1 - gate.FAMILY_LEVEL:.0%} for all {len(self.verdicts)} benchmarks"
                f" together, in {verdict.name}"
            )


def confirmed(
    run: Performance, record: Record, suspects: Sequence[Verdict], benchmarks: int, say: Callable[[str], None]
) -> dict[str, Verdict]:
    """Measure suspects again, the baseline's code and today's in turns."""
    seconds = run.config.getoption("perf_gate_seconds")
    say("")
    say(f"{len(suspects)} of {benchmarks} may have changed; each is measured again for {seconds:g} s and more")
    recorded = record.baseline.get("sources", {})
    rng = np.random.default_rng(0)
    ratios: dict[str, np.ndarray] = {}
    verdicts: dict[str, Verdict] = {}
    baseline, why = None, "the record does not say of which sources it is"
    if recorded:
        for directory in run.record_directories():
            try:
                baseline = Baseline(directory / "sources" / f"{recorded['sha256']}.zip")
                break
            except SourceError as error:
                why = str(error)
    for position, suspect in enumerate(suspects, 1):
        say(f"[{position}/{len(suspects)}] {suspect.name}")
        if baseline is None:
            verdicts[suspect.name] = gate.unconfirmed(suspect, why)
            continue
        measurement = run.timed[suspect.name]
        try:
            former = loaded(baseline, measurement, recorded["candidates"])
            pair = run.bench.against(measurement, former, rng)
            ratios[suspect.name] = gate.alternate(pair, seconds, rng)
        except SourceError as error:
            verdicts[suspect.name] = gate.unconfirmed(suspect, str(error))
        except Exception as error:  # the baseline's code failed where today's did not
            verdicts[suspect.name] = gate.unconfirmed(suspect, f"{type(error).__name__}: {error}")
    return verdicts | {verdict.name: verdict for verdict in gate.decided(ratios, benchmarks, run.least_differences)}


def loaded(baseline: Baseline, measurement: Measurement, candidates: Mapping[str, str]) -> Function:
    """What a measurement times, as a baseline has it.

    Args:
        baseline: of a recorded run.
        measurement: of a cell.
        candidates: the name of each candidate's function by operation, in the baseline.

    Raises:
        SourceError: the baseline does not have it.
    """
    cell = measurement.cell
    assert cell is not None
    if cell.backend != CANDIDATE:
        return baseline.load(cell.operation, cell.backend)
    if cell.operation not in candidates:
        raise SourceError(f"its candidate for {cell.operation} is not kept")
    return baseline.candidate(cell.operation, candidates[cell.operation])


def _kernel(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{len(names)} {what}: {', '.join(map(gate.short_name, names[:SHOWN]))}{more}"
