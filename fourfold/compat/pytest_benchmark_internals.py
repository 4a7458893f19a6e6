"""pytest-benchmark's private parts: its fixture's results, and what it keeps of former runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fourfold.compat import uses


@uses("pytest_benchmark.fixture.BenchmarkFixture().stats")
def median_of(benchmark: Any) -> float:
    """The median that the fixture has measured, in seconds, as soon as it has. The documentation has only a table."""
    return benchmark.stats["median"]


@uses("pytest_benchmark.fixture.BenchmarkFixture().has_error")
def discard(benchmark: Any) -> None:
    """Leave what was measured out of the record of the run, whatever becomes of the test."""
    benchmark.has_error = True


@uses("pytest_benchmark.fixture.BenchmarkFixture().fullname")
def name_of(benchmark: Any) -> str:
    """The name of a benchmark in records: that of its test."""
    return benchmark.fullname


@uses("pytest_benchmark.session.BenchmarkSession().storage.load")
def recorded_runs(session: Any) -> list[Mapping[str, Any]]:
    """The records of all former runs, oldest first, of the session that hooks are given."""
    return [run for _, run in session.storage.load()]


@uses("pytest_benchmark.session.BenchmarkSession.prepare_benchmarks giving 'path'")
def of_this_run(benchmarks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of what `pytest_benchmark_group_stats` is given: those of this run, without those that it is compared with."""
    return [one for one in benchmarks if one["path"] is None]


def processor(config: pytest.Config) -> Mapping[str, Any]:
    """What py-cpuinfo says of the processor, as pytest-benchmark records it."""
    return config.hook.pytest_benchmark_generate_machine_info(config=config).get("cpu", {})


@uses("pytest.Config().option.benchmark_json")
def json_file(config: pytest.Config) -> Path | None:
    """The file that ``--benchmark-json`` names. Before pytest-benchmark 5.3 the option's value is the file, opened."""
    given = config.getoption("--benchmark-json")
    return Path(given if isinstance(given, str | Path) else given.name) if given else None


@uses("pytest_benchmark.storage.file.FileStorage of file://FOLDER")
def storage_folder(config: pytest.Config) -> Path | None:
    """The folder that ``--benchmark-storage`` names; None where it names another kind of storage."""
    given = config.getoption("--benchmark-storage")
    return Path(given.removeprefix("file://")) if given.startswith("file://") else None


@uses("pytest_benchmark.storage.file.FileStorage.save to MACHINE/0001_NAME.json")
def recorded_files(folder: Path) -> list[Path]:
    """The records in such a folder, oldest first: ``MACHINE/0001_NAME.json``."""
    return sorted(folder.glob("*/[0-9][0-9][0-9][0-9]_*.json"))
