"""The benchmark plugin: hooks of pytest and pytest-benchmark that turn measurements into benchmarks and record them."""

import contextlib
import gc
import json
import os
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from fourfold.compat import pytest_benchmark_internals, xdist_internals
from fourfold.engine.cells import Selection
from fourfold.instruments import gpu_locks
from fourfold.numerics.compare import Disagreement
from fourfold.performance import machine, report, sources
from fourfold.performance.gate_trial import GateTrial, trial
from fourfold.performance.gated import BaselineHistory, Gated, Remeasuring
from fourfold.performance.measurement import Bench, Measurement, measurements, ratios
from fourfold.performance.peers import COMPILED, INSTALLED, LIBRARY
from fourfold.performance.report import cause_of
from fourfold.performance.timed_run import TimedRun
from fourfold.performance.timings import CPU, Timing, comparisons, lines, timings
from fourfold.pytest_plugin.failures import DEVICE, REPEAT, SELECTION, reported_outcome
from fourfold.pytest_plugin.hooks import TABLE, examples, is_benchmark
from fourfold.pytest_plugin.identity import Identity
from fourfold.pytest_plugin.paths import folder_to_write
from fourfold.pytest_plugin.table import Matrix

# Timed without --dtype: the dtypes in which models are trained.
DTYPES_TIMED = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}


def pytest_configure(config: pytest.Config) -> None:
    """Register the hooks with the run's selection."""
    performance = Performance(config, config.stash[SELECTION], config.stash[DEVICE], config.stash[TABLE])
    config.pluginmanager.register(performance, "fourfold-performance")


def performance_of(config: pytest.Config, device: str) -> "Performance":
    """Return the hooks of a run that times on a device. Without ``-p fourfold``, the first benchmark registers them."""
    plugin = config.pluginmanager.getplugin("fourfold-performance")
    if plugin is None:
        empty = Selection(operations={}, candidates={}, cells=(), narrowed=True)
        plugin = Performance(config, empty, device, Matrix())
        config.pluginmanager.register(plugin, "fourfold-performance")
        if config.getoption("--benchmark-compare"):
            try:
                pytest_benchmark_internals.load_again(config)
            except pytest.UsageError as error:
                pytest.exit(str(error), pytest.ExitCode.USAGE_ERROR)
    if plugin.device != device:
        pytest.fail(f"this run times on {plugin.device}, and cannot time on {device} too", pytrace=False)
    return plugin


@pytest.fixture(scope="session")
def performance(pytestconfig: pytest.Config) -> "Performance":
    """Return the hooks of this run."""
    return pytestconfig.pluginmanager.getplugin("fourfold-performance")


class Performance:
    """The hooks of pytest and pytest-benchmark, and what they share during a run."""

    def __init__(self, config: pytest.Config, selection: Selection, device: str, matrix: Matrix) -> None:
        self.config, self.selection, self.device, self.matrix = config, selection, device, matrix
        self.run = TimedRun(Bench(selection, device, self._lend_gpu))
        self.failures: list[dict[str, Any]] = []
        self.failed: set[str] = set()
        self.record: BaselineHistory | None = None
        self.gated: Gated | None = None
        self.trial: GateTrial | None = None
        self.page: Path | None = None
        self.broken: list[str] = []
        self.directory: Path | None = None
        self.regressed: set[str] = set()
        # What the plugin of verification adds is not known in a run without it.
        self.timings: Path | None = config.getoption("timings", None)
        if config.getoption("report", None) and not xdist_internals.is_worker(config):
            self.directory = folder_to_write("--report", config.getoption("report"), config.invocation_params.dir)
        self.running = bool(config.getoption("--benchmark-only", False))
        self.warming_up = bool(config.getoption("warm_up", False))
        self._gpu: contextlib.ExitStack | None = None  # closed, it lets other runs have the GPU's time
        self._has_waited = False
        if self.running and device == "cpu":
            # Use one thread, as the interpreter and the emulation do. Turn off the emulation's checks: the tests make
            # them, and here they would take most of the time.
            torch.set_num_threads(1)
            os.environ.setdefault("FOURFOLD_CUDA_ON_CPU", "fast")
        elif self.running:
            os.environ.update(machine.toolchain())

    @property
    def dtypes(self) -> Sequence[str]:
        """The dtypes to time."""
        return self.config.getoption("dtype") or DTYPES_TIMED[self.device]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests that take a measurement, unless their module does, with those of the selected cells."""
        if not {"measurement", "performance"} <= {*metafunc.fixturenames} or hasattr(
            metafunc.module, "pytest_generate_tests"
        ):
            return
        dtypes, with_peers = self.dtypes, not self.config.getoption("backend")
        try:
            timed = [*measurements(self.selection, self.device, dtypes, with_peers, self.config.getoption("sizes"))]
        except ValueError as error:
            raise pytest.UsageError(f"--{error}") from error
        parametrize(metafunc, timed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Run only benchmarks with --benchmark-only, and only other tests without it."""
        deselected = [item for item in items if is_benchmark(item) != self.running]
        if deselected:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if is_benchmark(item) == self.running]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Compute what needs no GPU, then take the GPU's time for all benchmarks. Lend it while nothing runs on it."""
        times = self.running and not self.warming_up and not session.config.getoption("collectonly")
        if times and self.device == "cuda":
            of_tests = (item.callspec.params.get("measurement") for item in session.items if hasattr(item, "callspec"))
            if timed := [one for one in of_tests if isinstance(one, Measurement)]:
                self.run.bench.compute_ahead(timed)
                self._take_gpu()  # not within a test, whose time is limited
        try:
            return (yield)
        finally:
            self._release_gpu()

    def _take_gpu(self) -> None:
        """Wait until no other run of benchmarks uses the GPU."""
        if self.device != "cuda" or self._gpu is not None:
            return
        self._gpu = contextlib.ExitStack()
        self._gpu.enter_context(gpu_locks.alone(self._say_waiting))

    def _say_waiting(self) -> None:
        """Print once that another run has the GPU."""
        if not self._has_waited:
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line("waiting for the benchmarks of another process on this GPU")
        self._has_waited = True

    def _release_gpu(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    @contextlib.contextmanager
    def _lend_gpu(self) -> Iterator[None]:
        """Let another run have the GPU's time, unless this one captures a graph or cannot free much of its memory."""
        lends = self._gpu is not None and not torch.cuda.is_current_stream_capturing()
        if lends:
            torch.cuda.empty_cache()
            # A graph keeps what its kernels use, which `torch.cuda.memory_allocated` does not count.
            lends = torch.cuda.memory_reserved() < gpu_locks.LITTLE
        if lends:
            self._release_gpu()
        try:
            yield
        finally:
            if lends:
                self._take_gpu()

    @contextlib.contextmanager
    def _hold_gpu(self) -> Iterator[None]:
        """Take the GPU's time, unless this run has it, and release it afterwards."""
        takes = self._gpu is None
        self._take_gpu()
        try:
            yield
        finally:
            if takes:
                self._release_gpu()

    @contextlib.contextmanager
    def _share_gpu(self) -> Iterator[None]:
        """Lend the GPU while torch.compile compiles, but hold it while it times kernels to choose the fastest.

        It caches its choice, so that a wrong one would remain.
        """
        if self.device != "cuda":
            yield
            return
        from fourfold.compat import dynamo_internals  # late: it imports torch's compiler

        with (
            dynamo_internals.around_compilation(self._lend_gpu),
            dynamo_internals.around_measurements(self._hold_gpu),
        ):
            yield

    def time(self, benchmark: Any, measurement: Measurement) -> None:
        """Time a measurement within the limits of pytest-benchmark's options; skip it if it cannot run here."""
        if not self.warming_up:
            self._take_gpu()
        if reason := self.run.bench.unsupported(measurement):
            pytest.skip(str(reason))
        min_rounds, max_seconds = (self.config.getoption(f"--benchmark-{name}") for name in ("min-rounds", "max-time"))
        refusal = ""
        try:
            self.run.bench.implementation(measurement)  # resets torch's compiler, also what observes it
            with self._share_gpu():
                if self.warming_up:
                    self.run.bench.warm_up(measurement)
                    pytest.skip("--warm-up: called, not timed")
                self.run.bench.time(benchmark, measurement, min_rounds, float(max_seconds))
        except Disagreement as disagreement:
            pytest.fail(
                f"{measurement}: its result is wrong on this workload, so it has no time: {disagreement}", pytrace=False
            )
        except Exception as error:
            # torch may lack the kernel, or the memory for it. Any other exception is an error.
            absent = measurement.contender == LIBRARY and isinstance(error, NotImplementedError)
            absent |= measurement.contender in (LIBRARY, COMPILED) and isinstance(error, torch.OutOfMemoryError)
            if measurement.contender not in INSTALLED and not absent:
                raise
            refusal = f"{measurement.contender} does not take it: {type(error).__name__}: {error}"
        if refusal:
            gc.collect()  # the exception's frames may hold all of a GPU's memory, which other runs would lack
            pytest.skip(refusal)
        self.run.timed[pytest_benchmark_internals.name_of(benchmark)] = measurement

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Record what times depend on, and of the processor only what does not change between runs."""
        machine_info["fourfold"] = machine.machine(self.device, machine_info.get("cpu", {}))
        pytest_benchmark_internals.trim_processor(machine_info)

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, benchmarksession: Any, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Refuse another machine's times; keep the baseline and all earlier runs of this machine."""
        identity = machine_info["fourfold"]
        if reason := machine.incomparable(identity, compared_benchmark["machine_info"].get("fourfold", {})):
            raise pytest.UsageError(f"--benchmark-compare: {reason}")
        runs = pytest_benchmark_internals.saved_runs(benchmarksession)
        history = [run for run in runs if not machine.incomparable(identity, run["machine_info"].get("fourfold", {}))]
        self.record = BaselineHistory(compared_benchmark, history, identity)

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config, benchmarks: list[Mapping[str, Any]]) -> None:
        """Keep today's, but those whose result was wrong; decide in place of --benchmark-compare-fail about them."""
        today = pytest_benchmark_internals.current_benchmarks(benchmarks)
        self.run.benchmarks = [entry for entry in today if entry["fullname"] not in self.failed]
        timed = [entry for entry in benchmarks if entry["fullname"] in self.run.timed]
        self.regressed = pytest_benchmark_internals.withdraw_regressions(config, timed)
        if self.run.candidates:  # they have a table of their own
            benchmarks[:] = [entry for entry in benchmarks if entry["fullname"] not in self.run.timed]

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add the ratios, the ceilings, the kernels' resources and the digest of the sources; save the sources."""
        ratios(output_json["benchmarks"])
        for entry in output_json["benchmarks"]:
            entry["params"] = {name: str(value) for name, value in (entry["params"] or {}).items()}
        output_json["ceilings"] = self.run.bench.ceilings.as_dict()
        output_json["static"] = self.run.static(output_json["benchmarks"])
        output_json["launched_kernels"] = self.run.launched_kernels
        output_json["sources"] = {
            "sha256": sources.digest(self.run.sources),
            "candidates": self.run.candidates,
        }
        for directory in self.record_directories():
            sources.save(directory / "sources", self.run.sources)

    def record_directories(self) -> list[Path]:
        """Return the folders of recorded times, from pytest-benchmark's options."""
        compared = self.config.getoption("--benchmark-compare")
        folders = [pytest_benchmark_internals.storage_folder(self.config)]
        if output := pytest_benchmark_internals.json_file(self.config):
            folders.append(output.parent)
        if isinstance(compared, str) and Path(compared).is_file():
            folders.append(Path(compared).parent)
        return [folder for folder in folders if folder is not None]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare, and measure again what may have changed; whatever fails of it, the tables are still to come."""
        if self.running and self.config.getoption("--benchmark-compare"):
            with self._record_crash("--benchmark-compare", session):
                self.compare(session)
        if self.running and self.config.getoption("perf_gate_trial"):
            with self._record_crash("--perf-gate-trial", session):
                self.try_gate(session)
        self._release_gpu()
        if self.timings is not None:
            with self._record_crash(f"--timings {self.timings}", session):
                self.timings.write_text(json.dumps({"timings": [asdict(row) for row in self.rows()]}, indent=1) + "\n")
        if self.directory is not None:
            with self._record_crash(f"--report {self.directory}", session):
                self.report(self.directory)

    @contextlib.contextmanager
    def _record_crash(self, option: str, session: pytest.Session) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            frames = "".join(traceback.format_tb(error.__traceback__))
            self.broken.append(f"{option} has failed: {type(error).__name__}: {error}\n{frames}".rstrip())
            session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR

    def try_gate(self, session: pytest.Session) -> None:
        """Put the gate on trial; the run fails where it raises a false alarm."""
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        seconds, planted = (self.config.getoption(f"perf_gate_{name}") for name in ("seconds", "slowdowns"))
        self._take_gpu()
        self.trial = trial(self.run, seconds, planted, terminal.write_line)
        if self.trial.false_alarms and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def compare(self, session: pytest.Session) -> None:
        """Compare the run with the baseline; fail the run if a benchmark is slower or drifts.

        It takes --perf-gate. With --benchmark-compare-fail alone, a benchmark must exceed its limit too.
        """
        by_gate = self.config.getoption("perf_gate")
        gating = by_gate or bool(self.config.getoption("--benchmark-compare-fail"))
        if self.record is None:
            if gating and not session.exitstatus:
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        seconds = self.config.getoption("perf_gate_seconds")
        if gating:
            self._take_gpu()
        settings = Remeasuring(seconds, self.record_directories(), terminal.write_line) if gating else None
        self.gated = Gated.of(self.run, self.record, settings)
        slower = [change for change in self.gated.slower if by_gate or change.name in self.regressed]
        if (slower or (by_gate and self.gated.drifts)) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the failures for the report."""
        if report.failed:
            self.failed.add(report.nodeid)
            repeat = "\n".join(text for title, text in report.sections if title == REPEAT)
            identity = Identity.of_report(report)
            self.failures.append(
                {
                    "name": report.nodeid,
                    "text": report.longreprtext,
                    "repeat": repeat,
                    "cell": vars(identity.cell) if identity else None,
                    "cause": cause_of(reported_outcome(report).failure),
                }
            )

    def report(self, directory: Path) -> None:
        """Write this run's part into the report's folder, and render the page again."""
        of_run = machine.run(self.config.rootpath)
        if self.running:
            runs = (run for path in self.earlier_records() if (run := report.read(path)))
            host = machine.machine(self.device, pytest_benchmark_internals.processor(self.config))
            content = report.performance(
                self.run.benchmarks,
                {**of_run, **host},
                self.run.bench.ceilings.as_dict(),
                self.run.static(self.run.benchmarks),
                [run for run in runs if not machine.incomparable(host, run["machine_info"].get("fourfold", {}))],
                self.gated.changes if self.gated else [],
                list(self.gated.lines()) if self.gated else [],
            )
            self.page = report.write(directory, "performance", content)
        else:
            summary = {
                **of_run,
                "device": torch.cuda.get_device_name() if self.device == "cuda" else "CPU",
                "profile": hypothesis.settings.get_current_profile_name(),
                "examples a check": str(examples(self.config)),
                **machine.versions(),
            }
            content = report.verification(self.matrix.tallies, self.failures, summary)
            self.page = report.write(directory, "verification", content)

    def rows(self) -> list[Timing]:
        """Return the timings of the user's kernels."""
        return timings(self.run.benchmarks, self.gated.changes if self.gated else ())

    def earlier_records(self) -> list[Path]:
        """Return the records of former runs, oldest first, without that of this run."""
        folder = pytest_benchmark_internals.storage_folder(self.config)
        if folder is None:
            return []
        records = pytest_benchmark_internals.saved_files(folder)
        saves = self.config.getoption("--benchmark-autosave") or self.config.getoption("--benchmark-save")
        return records[:-1] if saves else records

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the path of the report, the trial of the gate and the comparison after pytest-benchmark's tables."""
        if self.page is not None:
            terminalreporter.line(f"report: {self.page}")
        for line in self.broken:
            terminalreporter.line(line, red=True)
        if self.trial is not None:
            terminalreporter.section("trial of the gate", sep="=")
            for line in self.trial.lines():
                terminalreporter.line(line)
        if self.running and self.device == "cuda" and (rows := comparisons(self.run.benchmarks)):
            terminalreporter.section("times as fast as the fastest peer", sep="=")
            for row in rows:
                terminalreporter.line(str(row))
        if timed := self.rows():
            terminalreporter.section("timings", sep="=")
            for line in lines(timed):
                terminalreporter.line(line)
            if self.device == "cpu":
                terminalreporter.line(CPU)
        if not self.running or not self.config.getoption("--benchmark-compare"):
            return
        terminalreporter.section("compared with the baseline", sep="=")
        if self.gated is None:
            terminalreporter.line("there is no baseline: record one with --benchmark-autosave")
        else:
            for line in self.gated.lines():
                terminalreporter.line(line, red="is slower" in line)
            unconfirmed = self.regressed & {change.name for change in self.gated.changes if change.verdict != "slower"}
            if unconfirmed:
                terminalreporter.line(
                    f"{len(unconfirmed)} beyond --benchmark-compare-fail: not slower, measured in turns"
                )


def parametrize(metafunc: pytest.Metafunc, timed: Iterable[Measurement]) -> None:
    """Make one test for each measurement, with its group and its clock."""
    metafunc.parametrize("measurement", parameter_sets(timed))


def parameter_sets(timed: Iterable[Measurement]) -> list[Any]:
    """Return measurements as the parameters of a test."""
    return [pytest.param(m, id=str(m), marks=pytest.mark.benchmark(group=m.group, timer=m.clock)) for m in timed]
