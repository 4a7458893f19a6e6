"""The plugin: pytest's and pytest-benchmark's hooks, by which measurements become benchmarks and are recorded."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from impls.cuda_compile import CudaError
from properties.cells import CANDIDATE, Selection
from properties.performance import machine, sources, static
from properties.performance.gated import Gated, Record
from properties.performance.measurement import Bench, Measurement, measurements, ratios

# Timed where no --dtype is given: what models are trained in.
DTYPES_TIMED = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}


def add_options(parser: pytest.Parser) -> None:
    """Those of the gate."""
    group = parser.getgroup("fourfold", "verification of kernels")
    group.addoption(
        "--perf-gate",
        action="store_true",
        help="after --benchmark-compare: measure what seems to have changed again, in turns, and fail if it is slower",
    )
    group.addoption(
        "--perf-gate-seconds", type=float, default=4.0, metavar="S", help="for each benchmark that is measured again"
    )


class Performance:
    """pytest's and pytest-benchmark's hooks."""

    def __init__(self, config: pytest.Config, selection: Selection, device: str) -> None:
        self.config, self.selection, self.device = config, selection, device
        self.bench = Bench(selection, device)
        self.timed: dict[str, Measurement] = {}
        self.medians: dict[str, float] = {}
        self.record: Record | None = None
        self.gated: Gated | None = None
        if config.getoption("perf_gate") and not config.getoption("benchmark_compare"):
            raise pytest.UsageError("--perf-gate decides after a comparison: it needs --benchmark-compare")
        self.running = bool(config.getoption("benchmark_only", False))
        if self.running and device == "cpu":
            # One thread, as the interpreter and the emulation have; and the emulation without its checks, which the
            # tests make and which would be most of the time.
            torch.set_num_threads(1)
            os.environ.setdefault("FOURFOLD_CUDA_ON_CPU", "fast")

    @property
    def dtypes(self) -> Sequence[str]:
        """Those that are timed."""
        return self.config.getoption("dtype") or DTYPES_TIMED[self.device]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that take a measurement, and do not say which, run for every one of the selected cells."""
        if "measurement" not in metafunc.fixturenames or hasattr(metafunc.module, "pytest_generate_tests"):
            return
        dtypes, with_peers = self.dtypes, not self.config.getoption("backend")
        parametrize(metafunc, measurements(self.selection, self.device, dtypes, with_peers))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Benchmarks are run by --benchmark-only, and nothing else is then."""
        others = [item for item in items if is_benchmark(item) != self.running]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if is_benchmark(item) == self.running]

    def time(self, benchmark: Any, measurement: Measurement) -> None:
        """Time a measurement within the limits that pytest-benchmark's options set; skip what cannot run here."""
        if reason := self.bench.unsupported(measurement):
            pytest.skip(reason)
        least, most = (self.config.getoption(f"benchmark_{name}") for name in ("min_rounds", "max_time"))
        self.bench.time(benchmark, measurement, least, float(most))
        self.timed[benchmark.fullname] = measurement

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """What times depend on, and of the processor only what stays."""
        cpu = machine_info.get("cpu", {})
        machine_info["cpu"] = {key: cpu[key] for key in ("arch", "brand_raw", "count") if key in cpu}
        machine_info["fourfold"] = machine.machine(self.device, cpu)

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, benchmarksession: Any, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Refuse another machine's times; keep those that are comparable, and all that came before."""
        identity = machine_info["fourfold"]
        if reason := machine.incomparable(identity, compared_benchmark["machine_info"].get("fourfold", {})):
            raise pytest.UsageError(f"--benchmark-compare: {reason}")
        runs = [run for _, run in benchmarksession.storage.load()]
        own = [run for run in runs if not machine.incomparable(identity, run["machine_info"].get("fourfold", {}))]
        self.record = Record(compared_benchmark, own, identity)

    def pytest_benchmark_group_stats(self, benchmarks: Sequence[Mapping[str, Any]]) -> None:
        """Keep today's medians."""
        self.medians = {one["fullname"]: one["median"] for one in benchmarks if one["path"] is None}

    @cached_property
    def static(self) -> dict[str, Any]:
        """What the kernels that were timed need; or why that is not known."""
        try:
            cells = dict.fromkeys(m.cell for m in self.timed.values() if m.cell and m.cell.backend != CANDIDATE)
            return {"kernels": static.metrics(cells, self.device)}
        except (static.StaticError, CudaError) as error:
            return {"kernels": {}, "error": str(error)}

    @cached_property
    def sources(self) -> dict[str, bytes]:
        """Today's code."""
        return sources.collected({op: candidate.place for op, candidate in self.selection.candidates.items()})

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Ratios, which are known when all have run; the ceilings, what kernels need, and where their sources are."""
        ratios(output_json["benchmarks"])
        for one in output_json["benchmarks"]:
            one["params"] = {name: str(value) for name, value in (one["params"] or {}).items()}
        output_json["ceilings"] = self.bench.ceilings.as_dict()
        output_json["static"] = self.static
        output_json["sources"] = {
            "sha256": sources.digest(self.sources),
            "candidates": {op: candidate.function for op, candidate in self.selection.candidates.items()},
        }
        for directory in self.record_directories():
            sources.save(directory / "sources", self.sources)

    def record_directories(self) -> list[Path]:
        """Where pytest-benchmark's options say that times are kept."""
        options = self.config.option
        found = []
        if options.benchmark_storage.startswith("file://"):
            found.append(Path(options.benchmark_storage.removeprefix("file://")))
        if options.benchmark_json:
            found.append(Path(options.benchmark_json.name).parent)
        if isinstance(options.benchmark_compare, str) and Path(options.benchmark_compare).is_file():
            found.append(Path(options.benchmark_compare).parent)
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare, and measure again what may have changed."""
        if not self.running or not self.config.getoption("benchmark_compare"):
            return
        gating = self.config.getoption("perf_gate")
        if self.record is None:
            if gating and not session.exitstatus:
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        self.gated = Gated.of(self, self.record, terminal.write_line if gating else None)
        if gating and self.gated.slower and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What the comparison came to, after pytest-benchmark's tables."""
        if not self.running or not self.config.getoption("benchmark_compare"):
            return
        terminalreporter.section("compared with the baseline", sep="=")
        if self.gated is None:
            terminalreporter.line("there is no baseline: record one with --benchmark-autosave")
        else:
            for line in self.gated.lines():
                terminalreporter.line(line, red="is slower" in line)


def parametrize(metafunc: pytest.Metafunc, timed: Iterable[Measurement]) -> None:
    """A test for each measurement, of its group and by its clock."""
    marked = [pytest.param(m, id=str(m), marks=pytest.mark.benchmark(group=m.group, timer=m.clock)) for m in timed]
    metafunc.parametrize("measurement", marked)


def is_benchmark(item: pytest.Item) -> bool:
    """Whether a test takes pytest-benchmark's fixture, by itself or through another."""
    return "benchmark" in getattr(item, "fixturenames", ())
