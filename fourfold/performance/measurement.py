"""Measurements: the list of benchmarks, how each one runs, and what its record adds to pytest-benchmark's data."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fourfold.backends import tuning
from fourfold.backends.launch_records import Code
from fourfold.checks.outputs import requires_gradient
from fourfold.checks.records import reference_of
from fourfold.compat import pytest_benchmark_internals
from fourfold.engine.cells import CANDIDATE, Cell, Selection
from fourfold.numerics.compare import Disagreement
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.axes import LEADING
from fourfold.operations.claims import Claims, axes_of
from fourfold.operations.outcomes import Exclusion, Unsupported
from fourfold.operations.record import Cost, Operation
from fourfold.operations.workloads import Make, Workload, whole
from fourfold.performance import code_identity, machine
from fourfold.performance.calls import (
    DIRECTIONS,
    HOST,
    Call,
    Checkable,
    References,
    Replay,
    cost_of,
    directions_of,
    worst_error,
)
from fourfold.performance.ceilings import Ceilings, measure
from fourfold.performance.gate import Round
from fourfold.performance.peers import INSTALLED, Function, peers
from fourfold.performance.profile import mark
from fourfold.performance.timing import (
    GRAPH_BYTES,
    Clock,
    DeviceClock,
    HostClock,
    cuda_device,
    one_round,
    plan_rounds,
)

UNLIMITED = Claims()
# The most elements of a workload that is kept for the whole run.
SMALL = 2**20


Source = tuple[Path, str]  # the file of a candidate, and its name there


class Contender(NamedTuple):
    """An implementation that is timed.

    Attributes:
        name: the name of a backend, the candidate, a peer or a rung of a ladder.
        function: returns the implementation.
        cell: the verified cell that is timed; None for anything else, such as a peer, whose errors are only recorded.
        source: returns where a candidate is defined; None for anything else.
        claims: a candidate's.
        kernel: the name of a suite's candidate; else "".
    """

    name: str
    function: Callable[[], Function]
    cell: Cell | None = None
    source: Callable[[], Source] | None = None
    claims: Claims = UNLIMITED
    kernel: str = ""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark: a contender on a workload of an operation.

    Attributes:
        operation: the operation.
        workload: the workload's name.
        make: makes the workload.
        dtype: the dtype of the tensors.
        direction: one of `DIRECTIONS`, or "host": the time that a forward call takes the host of a GPU.
        of: the contender.
        clock: the timer for pytest-benchmark.
        kernel: the name of the suite's kernel, beside which the contender is timed; "" outside of a suite.
        in_ladder: whether this is a rung of a ladder, which may call the kernel in another way than its cell does.
    """

    operation: Operation
    workload: str
    make: Make
    dtype: str
    direction: str
    of: Contender
    clock: Clock
    kernel: str = ""
    in_ladder: bool = False

    @property
    def contender(self) -> str:
        """The name of the contender."""
        return self.of.name

    @property
    def cell(self) -> Cell | None:
        """The verified cell that is timed, if it is one."""
        return self.of.cell

    @property
    def gated(self) -> bool:
        """Whether the gate judges it: a cell's implementation, called in the cell's own way."""
        return self.cell is not None and not self.in_ladder

    @property
    def group(self) -> str:
        """The name of the group of measurements that are compared with each other."""
        return f"{self.kernel or self.operation.name}-{self.workload}-{self.dtype}-{self.direction}"

    @property
    def origin(self) -> str:
        """Return the candidate as ``FILE:FUNCTION``, from the folder of the run, which is another for each clone."""
        file, function = self.of.source() if self.of.source else (Path(), "")
        return f"{os.path.relpath(file)}:{function}"

    def __str__(self) -> str:
        return f"{self.group}-{self.contender}"


def clock_for(device: str, direction: str) -> Clock:
    """Return a host clock on the CPU and for the direction "host", else a device clock."""
    return DeviceClock() if device == "cuda" and direction != HOST else HostClock()


def measurements(
    selection: Selection, device: str, dtypes: Sequence[str], with_peers: bool, sizes: Sequence[Mapping[str, int]] = ()
) -> Iterator[Measurement]:
    """Yield all measurements of the selected cells, group by group.

    Args:
        selection: the selected cells.
        device: "cpu" or "cuda".
        dtypes: the dtypes to time.
        with_peers: whether to time peers too.
        sizes: as `workloads_of` takes them.

    Raises:
        ValueError: an operation does not allow the sizes: see `workloads_of`.
    """
    pairs = dict.fromkeys((cell.operation, cell.dtype) for cell in selection.cells if cell.dtype in dtypes)
    for name, dtype in pairs:
        operation = selection.operations[name]
        cells = [cell for cell in selection.cells if (cell.operation, cell.dtype) == (name, dtype)]
        only_candidate = with_peers and [cell.backend for cell in cells] == [CANDIDATE]
        contenders = [
            Contender(
                cell.backend,
                partial(selection.implementation, name, cell.backend),
                cell,
                partial(selection.source, cell) if cell.backend == CANDIDATE else None,
                selection.claims_of(cell),
            )
            for cell in cells
        ]
        if with_peers:
            contenders += peers_of(operation)[0 if only_candidate else 1 :]
        yield from measurements_of(operation, dtype, device, contenders, workloads_of(operation, device, sizes))


def peers_of(operation: Operation) -> list[Contender]:
    """Return the contenders beside which a kernel is timed: the operation in torch first, then `peers`."""
    reference = reference_of(operation)
    fallback = None if is_known(operation) else reference
    return [Contender("torch", lambda: reference), *starmap(Contender, peers(operation.name, fallback).items())]


def workloads_of(
    operation: Operation, device: str, sizes: Mapping[str, int] | Sequence[Mapping[str, int]] = ()
) -> Mapping[str, Make]:
    """Return the workloads of an operation, or one of each of the chosen sizes.

    Raises:
        ValueError: the operation has no cases of chosen sizes, or does not allow these.
    """
    choices = [sizes] if isinstance(sizes, Mapping) else sizes
    if not choices:
        return operation.workloads[device]
    sized = operation.sized
    if sized is None:
        raise ValueError(f"sizes: {operation.name} has no cases of chosen sizes; only a declared operation has")
    workloads = {}
    for choice in choices:
        shape = {LEADING if axis == "rows" and axis not in sized.axes else axis: size for axis, size in choice.items()}
        if unknown := shape.keys() - {*sized.axes, *axes_of(operation)}:
            axes = ", ".join(sized.axes)
            raise ValueError(f"sizes: {operation.name} has no axis {', '.join(sorted(unknown))}; there are {axes}")
        operation.of_sizes({axis: (size, size) for axis, size in shape.items()})  # raises an error that names the axis
        workloads["_".join(f"{axis}_{size}" for axis, size in choice.items())] = whole(
            sized.make({**sized.axes, **shape})
        )
    return workloads


def is_known(operation: Operation) -> bool:
    """Return whether an operation is one of this library's, not one that a user declares."""
    return reference_of(operation).__module__.partition(".")[0] == "fourfold"


def measurements_of(
    operation: Operation, dtype: str, device: str, contenders: Sequence[Contender], workloads: Mapping[str, Make]
) -> Iterator[Measurement]:
    """Yield the measurements of contenders that are compared with each other, group by group."""
    gradients = all(contender.claims.gradients for contender in contenders)
    kernel = next((contender.kernel for contender in contenders if contender.kernel), "")
    directions = directions_of(operation) if gradients else DIRECTIONS[:1]
    for workload, make in workloads.items():
        for direction in (*directions, *([HOST] if device == "cuda" else [])):
            for contender in contenders:
                yield Measurement(
                    operation=operation,
                    workload=workload,
                    make=make,
                    dtype=dtype,
                    direction=direction,
                    of=contender,
                    clock=clock_for(device, direction),
                    kernel=kernel,
                )


class Bench:
    """The shared state of a run's benchmarks: workloads, the oracle's results and the ceilings.

    Args:
        selection: the selected cells.
        device: "cpu" or "cuda".
        lend: a context in which other runs may use the GPU.
    """

    def __init__(
        self,
        selection: Selection,
        device: str,
        lend: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.selection, self.device, self._lend = selection, device, lend
        self.references = References()
        self.codes: dict[str, Code] = {}  # what the timed calls launched, by its hash
        self._workloads: dict[Any, Workload] = {}
        self._functions: tuple[Any, dict[str, Function]] | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        """The device's ceilings, measured at first use."""
        return measure(self.device)

    def workload(self, measurement: Measurement) -> Workload:
        """Return a measurement's workload. Small ones are cached, and of the large ones, of gigabytes, the latest."""
        key = id(measurement.operation), measurement.workload, measurement.dtype
        if key not in self._workloads:
            self._workloads = {k: kept for k, kept in self._workloads.items() if kept.case.elements <= SMALL}
            with self._lend():
                self._workloads[key] = measurement.make(DTYPES[measurement.dtype])
        return self._workloads[key]

    def compute_ahead(self, timed: Sequence[Measurement]) -> None:
        """Import the peers' packages and compute the oracle's results: most of what a GPU would wait for.

        What raises does so again when it is needed, in the benchmark that needs it.
        """
        peers_of_packages = {one.contender: one.of for one in timed if one.contender in INSTALLED}
        for peer in peers_of_packages.values():
            with contextlib.suppress(Exception):
                peer.function()
        cases = {(id(one.operation), one.workload, one.dtype, one.direction): one for one in timed}
        for one in cases.values():
            with contextlib.suppress(Exception):
                workload, gradients = self.workload(one), one.direction not in ("forward", HOST)
                self.references.of(one.operation, one.workload, workload, DTYPES[one.dtype], gradients)

    def implementation(self, measurement: Measurement) -> Function:
        """Return a measurement's implementation, cached for all directions of a workload: it may have been compiled."""
        key = id(measurement.operation), measurement.kernel, measurement.workload, measurement.dtype
        if self._functions is None or self._functions[0] != key:
            self._functions = key, {}
        functions = self._functions[1]
        if measurement.contender not in functions:
            functions[measurement.contender] = measurement.of.function()
        return functions[measurement.contender]

    def unsupported(self, measurement: Measurement) -> Unsupported | None:
        """Return why a measurement cannot run here, or None."""
        cell = measurement.cell
        if cell is None:
            return None
        if not measurement.kernel and (reason := self.selection.unsupported(cell, self.device)):
            return reason
        workload, dtype = self.workload(measurement), DTYPES[measurement.dtype]
        if outside := measurement.of.claims.outside(measurement.operation, workload.part, dtype):
            return Unsupported(f"outside of the claims: {outside}", Exclusion.UNCLAIMED)
        forward = measurement.of.source is None or measurement.direction in ("forward", HOST)
        if forward or requires_gradient(self.implementation(measurement), measurement.operation, dtype, self.device):
            return None
        return Unsupported("the kernel's output has no gradient", Exclusion.FORWARD_ONLY)

    def call(self, measurement: Measurement, implementation: Function | None = None) -> Call:
        """Return the call that a measurement times, on new tensors."""
        return Call(
            implementation or self.implementation(measurement),
            measurement.operation,
            self.workload(measurement),
            DTYPES[measurement.dtype],
            self.device,
            "forward" if measurement.direction == HOST else measurement.direction,
        )

    def prepare(
        self,
        measurement: Measurement,
        clock: Clock,
        implementation: Function | None = None,
        in_graph: bool | None = None,
    ) -> tuple[Checkable, str]:
        """Return a warmed-up call, or a graph that replays it, and a description of how it is timed.

        Args:
            measurement: the measurement.
            clock: the clock; for a device clock this sets the host's time and whether the L2 cache is flushed.
            implementation: replaces the measurement's own.
            in_graph: whether to replay a GPU's call in a graph; with None, one of fewer bytes than `GRAPH_BYTES`.
        """
        implementation = implementation or self.implementation(measurement)
        call = self.call(measurement, implementation)
        if not isinstance(clock, DeviceClock):
            return call, "host, until the call returns" if self.device == "cuda" else "host"
        clock.cold = True
        call.run(1)
        # The time that the host needs to enqueue a call. The clock keeps the device busy for at least this long.
        clock.host_seconds = max(one_round(HostClock(), lambda: call.run(1), torch.cuda.synchronize) for _ in range(3))
        if measurement.operation.length_varies:
            in_graph = False  # the call waits for its result's length
        if in_graph is None:
            in_graph = call.bytes < GRAPH_BYTES
        if not in_graph:
            return call, "events, cold L2"
        try:
            replay = Replay(lambda: self.call(measurement, implementation), cuda_device().cache_bytes)
        except RuntimeError as error:
            # Some peers cannot be captured. The record says why.
            return call, f"events, cold L2; in no graph: {str(error).splitlines()[0]}"
        clock.cold = False
        return replay, f"graph of {replay.calls_per_run} calls, rotating buffers"

    def launched(self, measurement: Measurement, runnable: Checkable) -> dict[str, Any] | None:
        """Return what a warmed-up call of Triton, CUDA C++ or a candidate launches on a GPU, for the record."""
        backend = measurement.cell and measurement.cell.backend
        if backend not in ("triton", "cuda", CANDIDATE) or self.device != "cuda" or measurement.direction == HOST:
            return None
        record = code_identity.on_gpu(runnable.single_call)
        if backend == CANDIDATE:
            try:
                if not isinstance(runnable, Replay):
                    runnable = Replay(lambda: self.call(measurement, self.implementation(measurement)), 0)
                code_identity.refuse_unrecorded(record, runnable)
            except RuntimeError as error:  # a call that cannot be captured is judged by its time
                record.refuse(str(error).splitlines()[0])
        return code_identity.describe(record, self.workload(measurement), self.codes)

    def warm_up(self, measurement: Measurement) -> None:
        """Make a measurement's call, which compiles all that it needs; on a GPU once more, for a profiler."""
        with tuning.only_compile():
            call = self.call(measurement)
            call.run(1)
            if self.device == "cuda":
                mark(call, str(measurement))

    def between_rounds(self, runnable: Checkable, clock: Clock) -> Callable[[], None]:
        """Return what to do before each round: poison the results, and wait for the GPU if the host is timed."""

        def before() -> None:
            runnable.poison()
            if self.device == "cuda" and isinstance(clock, HostClock):
                torch.cuda.synchronize()

        return before

    def against(
        self, measurement: Measurement, former: Function, rng: np.random.Generator, today: Function | None = None
    ) -> Callable[[], tuple[Round, Round]]:
        """Return a function that makes a round of a former implementation and one of today's, on new tensors.

        Args:
            measurement: a measurement that was timed, so that its clock knows the number of calls per round.
            former: the baseline's implementation.
            rng: chooses whose tensors are made first.
            today: replaces the measurement's own implementation.
        """
        calls, was_replayed = measurement.clock.calls, getattr(measurement.clock, "cold", True) is False

        def side(implementation: Function) -> Round:
            clock = copy.copy(measurement.clock)
            runnable, _ = self.prepare(measurement, clock, implementation, was_replayed)
            runs = max(1, calls // runnable.calls_per_run) if isinstance(clock, HostClock) else 1
            clock.calls = runs * runnable.calls_per_run
            setup = self.between_rounds(runnable, clock)
            timed = partial(one_round, clock, partial(runnable.run, runs), setup)
            timed()
            return timed

        def pair() -> tuple[Round, Round]:
            newer = today or self.implementation(measurement)
            if rng.random() < 0.5:
                former_seconds = side(former)
                return former_seconds, side(newer)
            newer_seconds = side(newer)
            return side(former), newer_seconds

        return pair

    def worst_error(self, measurement: Measurement, runnable: Checkable) -> float:
        """Compare the results of the last call with the oracle's and return the worst error over its bound.

        Raises:
            Disagreement: a result is wrong.
        """
        workload, dtype = self.workload(measurement), DTYPES[measurement.dtype]
        if measurement.operation.mutates:  # a round makes several calls, each on what the one before has left
            runnable.poison()
            runnable.run(1)
        gradients = runnable.results.keys() != {"output"}
        expected = self.references.of(measurement.operation, measurement.workload, workload, dtype, gradients)
        operation = measurement.operation
        return worst_error(
            runnable.results, expected, workload, dtype, operation.returns, joined=len(operation.joined_places) > 1
        )

    def time(self, benchmark: Any, measurement: Measurement, least_rounds: int, most_seconds: float) -> None:
        """Time a measurement, compare the results of its last timed call with the oracle's, and fill in the record.

        Args:
            benchmark: pytest-benchmark's fixture, with the measurement's clock as its timer.
            measurement: the measurement.
            least_rounds: the minimum number of rounds.
            most_seconds: the maximum time of all rounds.

        Raises:
            Disagreement: the results of the timed call are wrong.
            MeasuringError: the time is shorter than the device's ceilings allow.
        """
        clock, workload = measurement.clock, self.workload(measurement)
        runnable, timed = self.prepare(measurement, clock)
        launched = self.launched(measurement, runnable)
        setup = self.between_rounds(runnable, clock)
        states = [machine.gpu_state(self.device)]
        rounds = plan_rounds(clock, runnable, setup, least_rounds, most_seconds)
        benchmark.pedantic(runnable.run, args=(rounds.calls,), setup=setup, rounds=rounds.rounds)
        states.append(machine.gpu_state(self.device))
        cost = cost_of(measurement.operation, workload, measurement.direction)
        seconds = pytest_benchmark_internals.median_of(benchmark)
        benchmark.extra_info |= {
            "operation": measurement.operation.name,
            "workload": measurement.workload,
            "dtype": measurement.dtype,
            "direction": measurement.direction,
            "contender": measurement.contender,
            "device": self.device,
            "shapes": {name: list(array.shape) for name, array in workload.case.inputs.items()},
            "timed": f"{timed}, waiting for the host" if getattr(clock, "waits_for_host", False) else timed,
            "late_rounds": getattr(clock, "late_rounds", 0),
            "calls_per_round": clock.calls,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "gpu_before": states[0],
            "gpu_after": states[1],
            "throttled": machine.throttled(states),
        }
        if launched is not None:
            waits = "its time includes the host's" if getattr(clock, "waits_for_host", False) else ""
            benchmark.extra_info["launched"] = {**launched, "unknown": launched["unknown"] or waits}
        try:
            benchmark.extra_info["error_over_bound"] = self.worst_error(measurement, runnable)
        except Disagreement as disagreement:
            # An implementation without a cell, such as a peer, may be less exact. The record says so.
            benchmark.extra_info["error_over_bound"] = None
            benchmark.extra_info["disagreement"] = str(disagreement)
            if measurement.cell is not None:
                pytest_benchmark_internals.discard(benchmark)
                raise
        if measurement.direction != HOST:
            try:
                benchmark.extra_info |= achieved_rates(self.ceilings, cost, measurement.dtype, seconds)
            except MeasuringError:
                pytest_benchmark_internals.discard(benchmark)
                raise


class MeasuringError(AssertionError):
    """A measured time is shorter than the device's ceilings allow."""


def achieved_rates(ceilings: Ceilings, cost: Cost, dtype: str, seconds: float) -> dict[str, Any]:
    """Convert a time to bytes per second, flop per second and the fraction of the ceiling.

    Args:
        ceilings: the device's ceilings.
        cost: the fewest bytes and flops that the call needs.
        dtype: the dtype of its tensors.
        seconds: the time of one call.

    Raises:
        MeasuringError: the call is faster than the ceilings allow.
    """
    bandwidth, flops = cost.bytes / seconds, cost.flops / seconds
    fraction = max(bandwidth / ceilings.bytes_per_second, flops / ceilings.flops_per_second[dtype])
    rates = {
        "bytes_per_second": bandwidth,
        "flops_per_second": flops,
        "fraction_of_ceiling": fraction if cost.bytes or cost.flops else None,
        "empty_launches": seconds / ceilings.launch_seconds,
    }
    moves = replace(cost, bytes=max(cost.bytes - ceilings.cache_bytes, 0))
    if ceilings.least_seconds(moves, dtype) > seconds:
        raise MeasuringError(
            f"{seconds:.3g} s is {ceilings.least_seconds(cost, dtype) / seconds:.0%} of what this device can do:"
            f" {bandwidth:.3g} bytes/s of at most {ceilings.bytes_per_second:.3g}, {flops:.3g} flop/s of at most"
            f" {ceilings.most_flops_per_second(dtype):.3g}"
        )
    return rates


def ratios(benchmarks: Sequence[Mapping[str, Any]]) -> None:
    """Add to each benchmark's extra_info the ratios of its median to those of its group's other contenders."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in benchmarks:
        groups.setdefault(entry["group"], []).append(entry)
    for group in groups.values():
        medians = {entry["extra_info"].get("contender"): entry["stats"]["median"] for entry in group}
        for entry in group:
            contender = entry["extra_info"].get("contender")
            entry["extra_info"]["ratio_to"] = {
                name: medians[contender] / median for name, median in medians.items() if name != contender and median
            }
