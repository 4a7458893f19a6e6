"""Which benchmarks there are, how each is run, and what is kept of it beside pytest-benchmark's own figures."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from properties.cells import CANDIDATE, Cell, Selection
from properties.comparison import Disagreement
from properties.dtypes import DTYPES
from properties.operation import Cost, Operation
from properties.performance import machine
from properties.performance.calls import DIRECTIONS, Call, Checkable, References, Replay, cost_of, worst_error
from properties.performance.ceilings import Ceilings, measured
from properties.performance.gate import Round
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
from properties.workloads import Make, Workload

HOST = "host"  # the direction of a benchmark of the host's time


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark: who does what on which workload.

    Attributes:
        operation: what is done.
        workload: the name of what it is done on.
        make: makes that.
        dtype: of its tensors.
        direction: one of `DIRECTIONS`, or "host": how long a forward call keeps the host of a GPU.
        contender: a backend, the candidate, a peer or a rung of a ladder.
        function: gives its implementation.
        clock: pytest-benchmark's timer.
        cell: what is verified elsewhere and timed here; None for what is but beside it, whose errors are recorded only.
        in_ladder: whether it stands in a ladder, where a kernel may be called in another way than by its cell.
    """

    operation: Operation
    workload: str
    make: Make
    dtype: str
    direction: str
    contender: str
    function: Callable[[], Function]
    clock: Clock
    cell: Cell | None = None
    in_ladder: bool = False

    @property
    def gated(self) -> bool:
        """Whether it is for the gate: a cell's kernel, called as it is."""
        return self.cell is not None and not self.in_ladder

    @property
    def group(self) -> str:
        """Those that are compared with each other."""
        return f"{self.operation.name}-{self.workload}-{self.dtype}-{self.direction}"

    def __str__(self) -> str:
        return f"{self.group}-{self.contender}"


def clock_for(device: str, direction: str) -> Clock:
    """The host's on the CPU and for the host's time; a GPU's for everything else."""
    return DeviceClock() if device == "cuda" and direction != HOST else HostClock()


def measurements(selection: Selection, device: str, dtypes: Sequence[str], with_peers: bool) -> Iterator[Measurement]:
    """All benchmarks of the selected cells, in groups.

    Args:
        selection: of cells.
        device: "cpu" or "cuda".
        dtypes: those that are timed.
        with_peers: whether peers are timed beside the cells.
    """
    pairs = dict.fromkeys((cell.operation, cell.dtype) for cell in selection.cells if cell.dtype in dtypes)
    for name, dtype in pairs:
        backends = [c.backend for c in selection.cells if (c.operation, c.dtype) == (name, dtype)]
        if with_peers and backends == [CANDIDATE]:
            backends.append("torch")
        cells = [Cell(name, backend, dtype) for backend in backends]
        contenders: list[tuple[str, Callable[[], Function], Cell | None]] = [
            (cell.backend, partial(selection.implementation, name, cell.backend), cell) for cell in cells
        ]
        if with_peers:
            contenders += [(peer, function, None) for peer, function in peers(name).items()]
        operation = selection.operations[name]
        for workload, make in operation.workloads[device].items():
            for direction in (*DIRECTIONS, *([HOST] if device == "cuda" else [])):
                for contender, function, cell in contenders:
                    yield Measurement(
                        operation=operation,
                        workload=workload,
                        make=make,
                        dtype=dtype,
                        direction=direction,
                        contender=contender,
                        function=function,
                        clock=clock_for(device, direction),
                        cell=cell,
                    )


class Bench:
    """What the benchmarks of a run share: workloads, the oracle's results, the ceilings."""

    def __init__(self, selection: Selection, device: str) -> None:
        self.selection, self.device = selection, device
        self.references = References()
        self._workload: tuple[Any, Workload] | None = None
        self._functions: tuple[Any, dict[str, Function]] | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        """Measured when first asked for."""
        return measured(self.device)

    def workload(self, measurement: Measurement) -> Workload:
        """The latest is kept: a large one fills gigabytes."""
        key = measurement.operation.name, measurement.workload, measurement.dtype
        if self._workload is None or self._workload[0] != key:
            self._workload = None
            self._workload = key, measurement.make(DTYPES[measurement.dtype])
        return self._workload[1]

    def implementation(self, measurement: Measurement) -> Function:
        """What is timed; kept for all directions of a workload, as one may have been compiled."""
        key = measurement.operation.name, measurement.workload, measurement.dtype
        if self._functions is None or self._functions[0] != key:
            self._functions = key, {}
        functions = self._functions[1]
        if measurement.contender not in functions:
            functions[measurement.contender] = measurement.function()
        return functions[measurement.contender]

    def unsupported(self, measurement: Measurement) -> str | None:
        """Why it cannot run here, or None."""
        return self.selection.unsupported(measurement.cell, self.device) if measurement.cell else None

    def call(self, measurement: Measurement, implementation: Function | None = None) -> Call:
        """What a measurement times, on new tensors."""
        return Call(
            implementation or self.implementation(measurement),
            measurement.operation,
            self.workload(measurement),
            DTYPES[measurement.dtype],
            self.device,
            "forward" if measurement.direction == HOST else measurement.direction,
        )

    def prepared(
        self,
        measurement: Measurement,
        clock: Clock,
        implementation: Function | None = None,
        in_graph: bool | None = None,
    ) -> tuple[Checkable, str]:
        """A call, or the graph that replays it; and how it is timed.

        Args:
            measurement: what is timed.
            clock: by which; where it is a GPU's, it is told how to wait.
            implementation: in place of the measurement's own.
            in_graph: whether a GPU's call is replayed in a graph; None where it is to be if it is short.
        """
        implementation = implementation or self.implementation(measurement)
        call = self.call(measurement, implementation)
        if not isinstance(clock, DeviceClock):
            return call, "host, until the call returns" if self.device == "cuda" else "host"
        call.run(1)
        # For so long the host is busy with a call, which the device must be kept from finishing.
        clock.host_seconds = max(one_round(HostClock(), lambda: call.run(1), torch.cuda.synchronize) for _ in range(3))
        if in_graph is None:
            in_graph = min(one_round(clock, lambda: call.run(1), call.poison) for _ in range(5)) < GRAPH_SECONDS
        if not in_graph:
            return call, "events, cold L2"
        try:
            replay = Replay(lambda: self.call(measurement, implementation), cuda_device().cache_bytes)
        except RuntimeError as error:
            # Not every peer can be captured; the record says so.
            return call, f"events, cold L2; in no graph: {str(error).splitlines()[0]}"
        clock.cold = False
        return replay, f"graph of {replay.calls_per_run} calls, rotating buffers"

    def between_rounds(self, runnable: Checkable, clock: Clock) -> Callable[[], None]:
        """What comes before each round: former results are overwritten, and a GPU is idle where the host is timed."""

        def before() -> None:
            runnable.poison()
            if self.device == "cuda" and isinstance(clock, HostClock):
                torch.cuda.synchronize()

        return before

    def against(
        self, measurement: Measurement, former: Function, rng: np.random.Generator, today: Function | None = None
    ) -> Callable[[], tuple[Round, Round]]:
        """What gives a round of a former implementation and one of today's, on new tensors.

        Args:
            measurement: that has been timed, so that its clock knows how many calls make a round.
            former: the implementation that today's is held against.
            rng: chooses whose tensors are made first.
            today: in place of the measurement's own.
        """
        calls, was_replayed = measurement.clock.calls, getattr(measurement.clock, "cold", True) is False

        def side(implementation: Function) -> Round:
            clock = copy.copy(measurement.clock)
            runnable, _ = self.prepared(measurement, clock, implementation, was_replayed)
            runs = max(1, calls // runnable.calls_per_run) if isinstance(clock, HostClock) else 1
            clock.calls = runs * runnable.calls_per_run
            before = self.between_rounds(runnable, clock)
            timed = partial(one_round, clock, partial(runnable.run, runs), before)
            timed()
            return timed

        def pair() -> tuple[Round, Round]:
            newer = today or self.implementation(measurement)
            if rng.random() < 0.5:
                then = side(former)
                return then, side(newer)
            now = side(newer)
            return side(former), now

        return pair

    def worst_error(self, measurement: Measurement, runnable: Checkable) -> float:
        """The worst error over its bound of the results of the last round that was timed.

        Raises:
            Disagreement: they are not the oracle's.
        """
        workload, dtype = self.workload(measurement), DTYPES[measurement.dtype]
        gradients = runnable.results.keys() != {"output"}
        expected = self.references.of(measurement.operation, measurement.workload, workload, dtype, gradients)
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
        clock, workload = measurement.clock, self.workload(measurement)
        runnable, how = self.prepared(measurement, clock)
        before = self.between_rounds(runnable, clock)
        states = [machine.gpu_state(self.device)]
        rounds = plan_rounds(clock, runnable, before, least_rounds, most_seconds)
        benchmark.pedantic(runnable.run, args=(rounds.calls,), setup=before, rounds=rounds.rounds)
        states.append(machine.gpu_state(self.device))
        cost = cost_of(measurement.operation, workload, measurement.direction)
        seconds = benchmark.stats["median"]
        benchmark.extra_info |= {
            "operation": measurement.operation.name,
            "workload": measurement.workload,
            "dtype": measurement.dtype,
            "direction": measurement.direction,
            "contender": measurement.contender,
            "device": self.device,
            "shapes": {name: list(array.shape) for name, array in workload.case.inputs.items()},
            "timed": f"{how}, waiting for the host" if getattr(clock, "waits_for_host", False) else how,
            "late_rounds": getattr(clock, "late_rounds", 0),
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
            # What is but beside a cell may be less exact; the record says so.
            benchmark.extra_info["error_over_bound"] = None
            benchmark.extra_info["disagreement"] = str(disagreement)
            if measurement.cell is not None:
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
