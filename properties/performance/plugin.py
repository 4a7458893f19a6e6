"""The plugin: pytest's and pytest-benchmark's hooks, by which measurements become benchmarks and are recorded."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from properties.cells import Selection
from properties.performance import machine
from properties.performance.measurement import Bench, Measurement, measurements, ratios

# Timed where no --dtype is given: what models are trained in.
DTYPES_TIMED = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}


class Performance:
    """pytest's and pytest-benchmark's hooks."""

    def __init__(self, config: pytest.Config, selection: Selection, device: str) -> None:
        self.config, self.selection, self.device = config, selection, device
        self.bench = Bench(selection, device)
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

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """What times depend on, and of the processor only what stays."""
        cpu = machine_info.get("cpu", {})
        machine_info["cpu"] = {key: cpu[key] for key in ("arch", "brand_raw", "count") if key in cpu}
        machine_info["fourfold"] = machine.machine(self.device, cpu)

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_compare_machine_info(
        self, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Refuse another machine's times."""
        then = compared_benchmark["machine_info"].get("fourfold", {})
        if reason := machine.incomparable(machine_info["fourfold"], then):
            raise pytest.UsageError(f"--benchmark-compare: {reason}")

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Ratios, which are known when all have run, and the ceilings."""
        ratios(output_json["benchmarks"])
        for one in output_json["benchmarks"]:
            one["params"] = {name: str(value) for name, value in (one["params"] or {}).items()}
        output_json["ceilings"] = self.bench.ceilings.as_dict()


def parametrize(metafunc: pytest.Metafunc, timed: Iterable[Measurement]) -> None:
    """A test for each measurement, of its group and by its clock."""
    marked = [pytest.param(m, id=str(m), marks=pytest.mark.benchmark(group=m.group, timer=m.clock)) for m in timed]
    metafunc.parametrize("measurement", marked)


def is_benchmark(item: pytest.Item) -> bool:
    """Whether a test takes pytest-benchmark's fixture, by itself or through another."""
    return "benchmark" in getattr(item, "fixturenames", ())
