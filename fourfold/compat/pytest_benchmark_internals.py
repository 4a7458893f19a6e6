"""pytest-benchmark's private parts: its fixture's results, and its records of former runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fourfold.compat import uses


@uses("pytest_benchmark.fixture.BenchmarkFixture().stats")
def median_of(benchmark: Any) -> float:
    """Return the fixture's median in seconds, once measured. The documentation shows it only in a table."""
    return benchmark.stats["median"]


@uses("pytest_benchmark.fixture.BenchmarkFixture().has_error")
def discard(benchmark: Any) -> None:
    """Exclude the measurement from the record of the run, whatever the outcome of the test."""
    benchmark.has_error = True


@uses("pytest_benchmark.fixture.BenchmarkFixture().fullname")
def name_of(benchmark: Any) -> str:
    """Return the name of a benchmark in records, which is the name of its test."""
    return benchmark.fullname


@uses("pytest_benchmark.session.BenchmarkSession().storage.load")
def saved_runs(session: Any) -> list[Mapping[str, Any]]:
    """Return the records of all former runs, oldest first, from a hook's benchmark session."""
    return [run for _, run in session.storage.load()]


@uses("pytest_benchmark.session.BenchmarkSession.prepare_benchmarks giving 'path'")
def current_benchmarks(benchmarks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return this run's benchmarks among those passed to `pytest_benchmark_group_stats`.

    The others are those of the run that it is compared with.
    """
    return [entry for entry in benchmarks if entry["path"] is None]


@uses("pytest.Config()._benchmarksession.handle_loading")
def load_again(config: pytest.Config) -> None:
    """Pass the run of ``--benchmark-compare`` to the hooks once more, for a plugin that was not there at the start."""
    config._benchmarksession.handle_loading()  # type: ignore[attr-defined]


@uses("pytest.Config()._benchmarksession.performance_regressions by name_format and compare_fail")
def withdraw_regressions(config: pytest.Config, benchmarks: Iterable[Mapping[str, Any]]) -> set[str]:
    """Remove the regressions of some benchmarks from those of ``--benchmark-compare-fail``; return their full names.

    pytest-benchmark raises an exception for a regression after the run, and pytest prints its whole traceback.
    """
    session = config._benchmarksession  # type: ignore[attr-defined]
    names = {session.name_format(entry): entry["fullname"] for entry in benchmarks}
    failing = {names[name] for name, _ in session.performance_regressions if name in names}
    session.performance_regressions[:] = [r for r in session.performance_regressions if r[0] not in names]
    if not session.compared_mapping:  # else a traceback says that there is no baseline
        session.compare_fail = []
    return failing


def trim_processor(machine_info: dict[str, Any]) -> None:
    """Keep of the processor's description in a record what does not change between runs."""
    cpu = machine_info.get("cpu", {})
    machine_info["cpu"] = {key: cpu[key] for key in ("arch", "brand_raw", "count") if key in cpu}


def processor(config: pytest.Config) -> Mapping[str, Any]:
    """Return py-cpuinfo's description of the processor, as pytest-benchmark records it."""
    return config.hook.pytest_benchmark_generate_machine_info(config=config).get("cpu", {})


@uses("pytest.Config().option.benchmark_json")
def json_file(config: pytest.Config) -> Path | None:
    """Return the file of ``--benchmark-json``. Before pytest-benchmark 5.3 the option's value is an open file."""
    value = config.getoption("--benchmark-json")
    return Path(value if isinstance(value, str | Path) else value.name) if value else None


@uses("pytest_benchmark.storage.file.FileStorage of file://FOLDER")
def storage_folder(config: pytest.Config) -> Path | None:
    """Return the folder of ``--benchmark-storage``, or None if the storage is of another kind."""
    value = config.getoption("--benchmark-storage")
    return Path(value.removeprefix("file://")) if value.startswith("file://") else None


@uses("pytest_benchmark.storage.file.FileStorage.save to MACHINE/0001_NAME.json")
def saved_files(folder: Path) -> list[Path]:
    """Return the records in a storage folder, oldest first: ``MACHINE/0001_NAME.json``."""
    return sorted(folder.glob("*/[0-9][0-9][0-9][0-9]_*.json"))
