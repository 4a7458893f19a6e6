"""The timed benchmarks of a run, which the gate compares with a baseline and a trial of the gate repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fourfold.engine.cells import CANDIDATE
from fourfold.performance import code_identity, gate, sources, static
from fourfold.performance.measurement import Bench, Measurement
from fourfold.performance.timing import HostClock


@dataclass
class TimedRun:
    """The benchmarks of a run; it grows during the run.

    Attributes:
        bench: makes workloads and times them.
        timed: the measurement of each benchmark, by its full name.
        benchmarks: pytest-benchmark's figures for each benchmark that did not fail.
    """

    bench: Bench
    timed: dict[str, Measurement] = field(default_factory=dict)
    benchmarks: Sequence[Mapping[str, Any]] = ()

    @property
    def medians(self) -> dict[str, float]:
        """The median seconds, by benchmark."""
        return {entry["fullname"]: entry["median"] for entry in self.benchmarks}

    @property
    def least_differences(self) -> dict[str, float]:
        """The smallest log ratio that the gate may report, by benchmark."""
        medians = self.medians
        return {
            name: gate.least_difference(medians[name], isinstance(measurement.clock, HostClock))
            for name, measurement in self.timed.items()
            if name in medians
        }

    @property
    def launched(self) -> dict[str, Mapping[str, Any]]:
        """The launches of each recorded benchmark, as `code_identity.describe` returns them."""
        return {entry["fullname"]: info for entry in self.benchmarks if (info := entry["extra_info"].get("launched"))}

    @cached_property
    def launched_kernels(self) -> dict[str, dict[str, Any]]:
        """The resources of the code that the benchmarks launched, by its hash."""
        return code_identity.resources(self.bench.codes)

    def static(self, benchmarks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the resources of the kernels of each cell.

        Args:
            benchmarks: those of the run, as in its record; on a GPU the kernels are the ones that they have launched.

        Returns:
            "kernels", by the cell's name; and "error", the reason if they do not compile on the CPU.
        """
        if self.bench.device == "cuda":
            return {"kernels": code_identity.kernels_by_cell(benchmarks, self.launched_kernels)}
        return self._compiled

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        try:
            cells = dict.fromkeys(m.cell for m in self.timed.values() if m.cell and m.cell.backend != CANDIDATE)
            return {"kernels": static.metrics(cells)}
        except static.StaticError as error:
            return {"kernels": {}, "error": str(error)}

    @cached_property
    def sources(self) -> dict[str, bytes]:
        """The contents of today's sources, by path."""
        return sources.read_sources(self._files.values())

    @property
    def candidates(self) -> dict[str, str]:
        """Return the path of each candidate's file among the sources, by its `Measurement.origin`."""
        places = sources.places(self._files.values())
        return {origin: places[file] for origin, file in self._files.items()}

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {m.origin: m.of.source()[0] for m in self.timed.values() if m.of.source is not None}
