"""The plugin: pytest's and pytest-benchmark's hooks, by which measurements become benchmarks and are recorded."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.plugin import get_cpu_info

from impls.cuda_compile import CudaError
from properties.cells import CANDIDATE, Selection
from properties.matrix import Matrix
from properties.performance import gate, machine, report, sources, static
from properties.performance.gated import Gated, Record
from properties.performance.measurement import Bench, Measurement, measurements, ratios
from properties.performance.timing import HostClock
from properties.performance.trial import Trial, slowdowns, trial

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
    group.addoption(
        "--perf-gate-trial",
        action="store_true",
        help="try the gate on what was timed: how often it accuses unchanged code, and finds a planted slowdown",
    )
    group.addoption(
        "--perf-gate-slowdowns",
        type=slowdowns,
        default=slowdowns("1,2,5,10"),
        metavar="PERCENT[,PERCENT...]",
        help="that a trial plants (1,2,5,10); 0 for none",
    )
    group.addoption("--report", type=Path, metavar="DIR", help="write DIR/index.html, of this run and of others there")


class Performance:
    """pytest's and pytest-benchmark's hooks."""

    def __init__(self, config: pytest.Config, selection: Selection, device: str, matrix: Matrix) -> None:
        self.config, self.selection, self.device, self.matrix = config, selection, device, matrix
        self.bench = Bench(selection, device)
        self.timed: dict[str, Measurement] = {}
        self.benchmarks: list[Mapping[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self.failed: set[str] = set()
        self.record: Record | None = None
        self.gated: Gated | None = None
        self.trial: Trial | None = None
        self.page: Path | None = None
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
        """Keep today's, but those whose result was wrong: it has no time."""
        self.benchmarks = [one for one in benchmarks if one["path"] is None and one["fullname"] not in self.failed]

    @property
    def medians(self) -> dict[str, float]:
        """Today's, by benchmark."""
        return {one["fullname"]: one["median"] for one in self.benchmarks}

    @property
    def least_differences(self) -> dict[str, float]:
        """The log ratio from which on the gate minds, by benchmark."""
        medians = self.medians
        return {
            name: gate.least_difference(medians[name], isinstance(measurement.clock, HostClock))
            for name, measurement in self.timed.items()
            if name in medians
        }

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
        if written := options.benchmark_json:
            # Before pytest-benchmark 5.3 it is the file that was opened there.
            found.append(Path(written if isinstance(written, str | Path) else written.name).parent)
        if isinstance(options.benchmark_compare, str) and Path(options.benchmark_compare).is_file():
            found.append(Path(options.benchmark_compare).parent)
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare, and measure again what may have changed."""
        if self.running and self.config.getoption("benchmark_compare"):
            self.compare(session)
        if self.running and self.config.getoption("perf_gate_trial"):
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            self.trial = trial(self, terminal.write_line)
            if self.trial.false_alarms and not session.exitstatus:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.getoption("report") and not hasattr(self.config, "workerinput"):
            self.report(self.config.getoption("report"))

    def compare(self, session: pytest.Session) -> None:
        """Hold the run against the baseline; with --perf-gate it fails where something is slower."""
        gating = self.config.getoption("perf_gate")
        if self.record is None:
            if gating and not session.exitstatus:
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        self.gated = Gated.of(self, self.record, terminal.write_line if gating else None)
        if gating and self.gated.slower and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what failed."""
        if report.failed:
            self.failed.add(report.nodeid)
            repeat = "\n".join(text for title, text in report.sections if title == "repeat with")
            self.failures.append({"name": report.nodeid, "text": report.longreprtext, "repeat": repeat})

    def report(self, directory: Path) -> None:
        """Leave what this run knows in the report's folder, and make its page anew."""
        if self.running:
            runs = (json.loads(path.read_text()) for path in self.recorded())
            here = machine.machine(self.device, get_cpu_info())
            content = report.performance(
                self.benchmarks,
                here,
                self.bench.ceilings.as_dict(),
                self.static,
                [run for run in runs if not machine.incomparable(here, run["machine_info"].get("fourfold", {}))],
                self.gated.verdicts if self.gated else [],
                list(self.gated.lines()) if self.gated else [],
            )
            self.page = report.write(directory, "performance", content)
        else:
            about = f"{'GPU' if self.device == 'cuda' else 'CPU'}, torch {torch.__version__}"
            if self.device == "cuda":
                about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
            content = report.verification(self.matrix, self.failures, about)
            self.page = report.write(directory, "verification", content)

    def recorded(self) -> list[Path]:
        """The records of former runs, oldest first: this one's, if it is kept, is the last and not among them."""
        options = self.config.option
        kept = options.benchmark_autosave or options.benchmark_save
        if not options.benchmark_storage.startswith("file://"):
            return []
        found = sorted(Path(options.benchmark_storage.removeprefix("file://")).glob("*/[0-9][0-9][0-9][0-9]_*.json"))
        return found[:-1] if kept else found

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What the comparison came to, after pytest-benchmark's tables; and where the report is."""
        if self.page is not None:
            terminalreporter.line(f"report: {self.page}")
        if self.trial is not None:
            terminalreporter.section("trial of the gate", sep="=")
            for line in self.trial.lines():
                terminalreporter.line(line)
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
