"""The plugin: which benchmarks there are, how each is run, and what is kept of it beside pytest-benchmark's own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch

from properties.cells import CANDIDATE, Cell, Selection
from properties.comparison import Disagreement
from properties.dtypes import DTYPES
from properties.operation import Cost
from properties.performance import machine
from properties.performance.calls import DIRECTIONS, Call, Checkable, References, Replay, cost_of, worst_error
from properties.performance.ceilings import Ceilings, measured
from properties.performance.peers import Function, peers
from properties.performance.timing import (
    GRAPH_SECONDS,
    Clock,
    DeviceClock,
    HostClock,
    cuda_device,
    one_round,
    plan_rounds,
)
from properties.workloads import Workload

# Timed where no --dtype is given: what models are trained in.
DTYPES_TIMED = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}
HOST = "host"  # the direction of a benchmark of the host's time


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark: who does what on which workload.

    Attributes:
        contender: a backend, the candidate or a peer.
        direction: one of `DIRECTIONS`, or "host": how long a forward call keeps the host of a GPU.
        clock: pytest-benchmark's timer.
    """

    operation: str
    workload: str
    dtype: str
    direction: str
    contender: str
    clock: Clock = field(compare=False, repr=False)

    @property
    def group(self) -> str:
        """Those that are compared with each other."""
        return f"{self.operation}-{self.workload}-{self.dtype}-{self.direction}"

    def __str__(self) -> str:
        return f"{self.group}-{self.contender}"


def measurements(selection: Selection, device: str, dtypes: Sequence[str], with_peers: bool) -> Iterator[Measurement]:
    """All benchmarks of the selected cells, in groups.

    Args:
        selection: of cells.
        device: "cpu" or "cuda".
        dtypes: those that are timed.
        with_peers: whether peers are timed beside the cells.
    """
    pairs = dict.fromkeys((cell.operation, cell.dtype) for cell in selection.cells if cell.dtype in dtypes)
    for operation, dtype in pairs:
        contenders = [c.backend for c in selection.cells if (c.operation, c.dtype) == (operation, dtype)]
        if with_peers:
            contenders += ["torch"] if contenders == [CANDIDATE] else []
            contenders += peers(operation)
        for workload in selection.operations[operation].workloads[device]:
            for direction in (*DIRECTIONS, *([HOST] if device == "cuda" else [])):
                for contender in contenders:
                    clock: Clock = DeviceClock() if device == "cuda" and direction != HOST else HostClock()
                    yield Measurement(
                        operation=operation,
                        workload=workload,
                        dtype=dtype,
                        direction=direction,
                        contender=contender,
                        clock=clock,
                    )


class Bench:
    """What the benchmarks of a run share: workloads, the oracle's results, the ceilings."""

    def __init__(self, selection: Selection, device: str) -> None:
        self.selection, self.device = selection, device
        self.references = References()
        self._workload: tuple[Any, Workload] | None = None
        self._peer: tuple[Any, Function] | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        """Measured when first asked for."""
        return measured(self.device)

    def workload(self, operation: str, name: str, dtype: str) -> Workload:
        """The latest is kept: a large one fills gigabytes."""
        key = operation, name, dtype
        if self._workload is None or self._workload[0] != key:
            self._workload = None
            make = self.selection.operations[operation].workloads[self.device][name]
            self._workload = key, make(DTYPES[dtype])
        return self._workload[1]

    def implementation(self, measurement: Measurement) -> Function:
        """A backend's function, the candidate's or a peer's."""
        make = peers(measurement.operation).get(measurement.contender)
        if make is None:
            return self.selection.implementation(measurement.operation, measurement.contender)
        key = measurement.operation, measurement.workload, measurement.dtype, measurement.contender
        if self._peer is None or self._peer[0] != key:
            self._peer = key, make()  # compiled once for all directions
        return self._peer[1]

    def unsupported(self, measurement: Measurement) -> str | None:
        """Why it cannot run here, or None."""
        if measurement.contender in peers(measurement.operation):
            return None
        cell = Cell(measurement.operation, measurement.contender, measurement.dtype)
        return self.selection.unsupported(cell, self.device)

    def call(self, measurement: Measurement, implementation: Function | None = None) -> Call:
        """What a measurement times, on new tensors."""
        return Call(
            implementation or self.implementation(measurement),
            self.selection.operations[measurement.operation],
            self.workload(measurement.operation, measurement.workload, measurement.dtype),
            DTYPES[measurement.dtype],
            self.device,
            "forward" if measurement.direction == HOST else measurement.direction,
        )

    def prepared(self, measurement: Measurement) -> tuple[Checkable, str]:
        """A call, or the graph that replays it where it is short; and how it is timed."""
        clock, call = measurement.clock, self.call(measurement)
        if not isinstance(clock, DeviceClock):
            where = "host, until the call returns" if self.device == "cuda" else "host"
            return call, where
        call.run(1)
        # For so long the host is busy with a call, which the device must be kept from finishing.
        host = HostClock()
        clock.host_seconds = max(one_round(host, lambda: call.run(1), torch.cuda.synchronize) for _ in range(3))
        if min(one_round(clock, lambda: call.run(1), call.poison) for _ in range(5)) >= GRAPH_SECONDS:
            return call, "events, cold L2"
        implementation = self.implementation(measurement)
        try:
            replay = Replay(lambda: self.call(measurement, implementation), cuda_device().cache_bytes)
        except RuntimeError as error:
            # Not every peer can be captured; the record says so.
            return call, f"events, cold L2; in no graph: {str(error).splitlines()[0]}"
        clock.cold = False
        return replay, f"graph of {replay.calls_per_run} calls, rotating buffers"

    def worst_error(self, measurement: Measurement, runnable: Checkable) -> float:
        """The worst error over its bound of the results of the last round that was timed.

        Raises:
            Disagreement: they are not the oracle's.
        """
        operation, dtype = self.selection.operations[measurement.operation], DTYPES[measurement.dtype]
        workload = self.workload(measurement.operation, measurement.workload, measurement.dtype)
        expected = self.references.of(operation, measurement.workload, workload, dtype)
        return worst_error(runnable.results, expected, workload, dtype)

    def time(self, benchmark: Any, measurement: Measurement, least_rounds: int, most_seconds: float) -> None:
        """Time a measurement, hold the result of its last timed call to the oracle, and keep what is known of it.

        Args:
            benchmark: pytest-benchmark's fixture, whose timer is the measurement's clock.
            measurement: what is timed.
            least_rounds: rounds at the least.
            most_seconds: for all of them.

        Raises:
            Disagreement: the results of the call that was timed are wrong.
            MeasuringError: it took less than is possible.
        """
        operation, clock = self.selection.operations[measurement.operation], measurement.clock
        runnable, how = self.prepared(measurement)

        def before() -> None:
            runnable.poison()
            if self.device == "cuda" and isinstance(clock, HostClock):
                torch.cuda.synchronize()

        states = [machine.gpu_state(self.device)]
        rounds = plan_rounds(clock, runnable, before, least_rounds, most_seconds)
        benchmark.pedantic(runnable.run, args=(rounds.calls,), setup=before, rounds=rounds.rounds)
        states.append(machine.gpu_state(self.device))
        workload = self.workload(measurement.operation, measurement.workload, measurement.dtype)
        cost = cost_of(operation, workload, measurement.direction)
        seconds = benchmark.stats["median"]
        benchmark.extra_info |= {
            "operation": measurement.operation,
            "workload": measurement.workload,
            "dtype": measurement.dtype,
            "direction": measurement.direction,
            "contender": measurement.contender,
            "device": self.device,
            "shapes": {name: list(array.shape) for name, array in workload.case.inputs.items()},
            "timed": how,
            "calls_per_round": clock.calls,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "gpu_before": states[0],
            "gpu_after": states[1],
            "throttled": machine.throttled(states),
        }
        try:
            benchmark.extra_info["error_over_bound"] = self.worst_error(measurement, runnable)
        except Disagreement as disagreement:
            # A peer is not what is verified here; the record says that it is not within the bound.
            benchmark.extra_info["error_over_bound"] = None
            benchmark.extra_info["disagreement"] = str(disagreement)
            if measurement.contender not in peers(measurement.operation):
                benchmark.has_error = True
                raise
        if measurement.direction != HOST:
            try:
                benchmark.extra_info |= of_the_ceiling(self.ceilings, cost, measurement.dtype, seconds)
            except MeasuringError:
                benchmark.has_error = True
                raise


class MeasuringError(AssertionError):
    """A time that cannot be."""


def of_the_ceiling(ceilings: Ceilings, cost: Cost, dtype: str, seconds: float) -> dict[str, Any]:
    """What a time comes to, beside what the device can do.

    Args:
        ceilings: of the device.
        cost: the least that a call must do.
        dtype: of its tensors.
        seconds: that it took.

    Raises:
        MeasuringError: it is more than the device can do.
    """
    fraction = ceilings.least_seconds(cost, dtype) / seconds
    moved, computed = cost.bytes / seconds, cost.flops / seconds
    found = {
        "bytes_per_second": moved,
        "flops_per_second": computed,
        "fraction_of_ceiling": fraction if cost.bytes or cost.flops else None,
        "empty_launches": seconds / ceilings.launch_seconds,
    }
    if fraction > 1:
        raise MeasuringError(
            f"{seconds:.3g} s is {fraction:.0%} of what this device can do: {moved:.3g} bytes/s of at most"
            f" {ceilings.bytes_per_second:.3g}, {computed:.3g} flop/s of at most {ceilings.flops_per_second[dtype]:.3g}"
        )
    return found


def ratios(benchmarks: Sequence[Mapping[str, Any]]) -> None:
    """Add to each benchmark's extra_info its median over that of every other contender of its group."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in benchmarks:
        groups.setdefault(one["group"], []).append(one)
    for group in groups.values():
        medians = {one["extra_info"].get("contender"): one["stats"]["median"] for one in group}
        for one in group:
            own = one["extra_info"].get("contender")
            one["extra_info"]["ratio_to"] = {
                name: medians[own] / median for name, median in medians.items() if name != own and median
            }


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

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that take a measurement run for every one there is."""
        if "measurement" not in metafunc.fixturenames:
            return
        dtypes = self.config.getoption("dtype") or DTYPES_TIMED[self.device]
        with_peers = not self.config.getoption("backend")
        metafunc.parametrize(
            "measurement",
            [
                pytest.param(m, id=str(m), marks=pytest.mark.benchmark(group=m.group, timer=m.clock))
                for m in measurements(self.selection, self.device, dtypes, with_peers)
            ],
        )

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


def is_benchmark(item: pytest.Item) -> bool:
    """Whether a test takes pytest-benchmark's fixture, by itself or through another."""
    return "benchmark" in getattr(item, "fixturenames", ())
