"""The last stage: the speed of a right kernel, relative to the reference in the same run."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fourfold.engine.cells import Selection
from fourfold.engine.verdict import Speed
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation
from fourfold.operations.workloads import Make, whole
from fourfold.performance import machine
from fourfold.performance.calls import cost_of
from fourfold.performance.measurement import Bench, Contender, Measurement, MeasuringError, achieved_rates, clock_for
from fourfold.performance.timing import one_round, plan_rounds

Function = Callable[..., torch.Tensor]
# The first claimed dtype of these is timed.
PREFERRED = ("bfloat16", "float16", "float32", "float64")
# Seconds for the pairs of rounds of one workload, and their number.
SECONDS, LEAST_PAIRS, MOST_PAIRS = 4.0, 20, 200


def speeds_of(
    candidate: Function, reference: Function, operation: Operation, claims: Claims, device: str, gradients: bool
) -> Iterator[Speed]:
    """Yield the speed of a candidate on each of the operation's workloads, or on its largest example if it has none.

    Rounds of the candidate and the reference alternate, so that a drifting clock affects both.

    Args:
        candidate: a function with the operation's arguments.
        reference: another one.
        operation: provides the workloads.
        claims: of the candidate.
        device: "cpu" or "cuda".
        gradients: whether forward and backward are timed together.

    Raises:
        Disagreement: a result of a timed call is wrong.
    """
    dtype = next(name for name in PREFERRED if name in (claims.dtypes or PREFERRED))
    bench = Bench(Selection(operations={}, candidates={}, cells=(), narrowed=True), device)
    for name, make in _workloads(operation, claims, dtype, device).items():
        direction = "both" if gradients else "forward"

        def measurement(f: Function, name: str = name, make: Make = make, direction: str = direction) -> Measurement:
            return Measurement(
                operation=operation,
                workload=name,
                make=make,
                dtype=dtype,
                direction=direction,
                of=Contender("candidate" if f is candidate else "reference", lambda: f),
                clock=clock_for(device, direction),
            )

        yield _speed(bench, measurement(candidate), measurement(reference))


def _workloads(operation: Operation, claims: Claims, dtype: str, device: str) -> Mapping[str, Make]:
    """Return the workloads within the claims, by name."""
    makers = operation.workloads.get(device) or {}
    claimed = {
        name: make
        for name, make in makers.items()
        if claims.outside(operation, make(DTYPES[dtype]).part, DTYPES[dtype]) is None
    }
    if claimed:
        return claimed
    examples = {name: make(DTYPES[dtype]) for name, make in operation.examples.items()}
    inside = [n for n, case in examples.items() if claims.outside(operation, case, DTYPES[dtype]) is None]
    largest = max(inside, key=lambda name: examples[name].elements, default=None)
    return {} if largest is None else {largest: whole(operation.examples[largest])}


def _speed(bench: Bench, candidate: Measurement, reference: Measurement) -> Speed:
    sides = []
    states = [machine.gpu_state(bench.device)]
    measurements = candidate, reference
    runnables = [bench.prepare(measurement, measurement.clock)[0] for measurement in measurements]
    if len({type(runnable) for runnable in runnables}) > 1:  # only one can be captured in a graph: time neither so
        runnables = [bench.prepare(measurement, measurement.clock, in_graph=False)[0] for measurement in measurements]
    for measurement, runnable in zip(measurements, runnables):
        clock = measurement.clock
        setup = bench.between_rounds(runnable, clock)
        plan = plan_rounds(clock, runnable, setup, LEAST_PAIRS, SECONDS / 4)
        sides.append((runnable, partial(one_round, clock, partial(runnable.run, plan.calls), setup)))
    (runnable, time_candidate), (_, time_reference) = sides
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(times) < LEAST_PAIRS or (len(times) < MOST_PAIRS and time.perf_counter() - start < SECONDS):
        times.append((time_candidate(), time_reference()))
    bench.worst_error(candidate, runnable)
    states.append(machine.gpu_state(bench.device))
    seconds, reference_seconds = (float(np.median(side)) for side in zip(*times))
    ratio, low, high = median_with_interval([b / a for a, b in times])
    cost = cost_of(candidate.operation, bench.workload(candidate), candidate.direction)
    error = ""
    try:
        achieved_rates(bench.ceilings, cost, candidate.dtype, seconds)
    except MeasuringError as impossible:
        error = str(impossible)
    return Speed(
        workload=candidate.workload,
        dtype=candidate.dtype,
        direction=candidate.direction,
        seconds=seconds,
        reference_seconds=reference_seconds,
        ratio=ratio,
        low=low,
        high=high,
        error=error,
        notes=tuple(_notes(states)),
    )


def median_with_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95% interval, by order statistics: no distribution is assumed."""
    values = sorted(samples)
    reach = 0.98 * math.sqrt(len(values))  # 1.96 standard deviations of a binomial with p = 1/2
    low = max(0, math.floor(len(values) / 2 - reach) - 1)
    high = min(len(values) - 1, math.ceil(len(values) / 2 + reach))
    return float(np.median(values)), values[low], values[high]


def _notes(states: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield what the GPU's own sensors reported during the measurement."""
    yield from (f"clocks were reduced: {reason}" for reason in machine.throttled(states))
    clocks = [state["sm_mhz"] for state in states if state and "sm_mhz" in state]
    if clocks:
        yield f"SM clock {min(clocks)} to {max(clocks)} MHz"
