"""The benchmarks of a user's kernel, as a test class for pytest-benchmark in a repository of theirs."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.verification import Trial
from fourfold.numerics.dtypes import DTYPES, Dtypes, select_dtypes
from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation
from fourfold.performance.measurement import Contender, Measurement, measurements_of, peers_of, workloads_of
from fourfold.performance.plugin import DTYPES_TIMED, parameter_sets, performance_of

Sizes = Mapping[str, int] | Sequence[Mapping[str, int]]


def benchmark_suite(
    kernel: Callable[..., Any],
    operation: Operation | str,
    *,
    claims: Claims | None = None,
    device: str = "auto",
    dtypes: Dtypes = (),
    sizes: Sizes = (),
) -> type:
    """Return a test class that times a kernel beside torch and torch.compile, forward and backward.

    Assign it to a name that begins with Test: ``TestSpeed = fourfold.benchmark_suite(my_softmax, "softmax")``.
    ``pytest --benchmark-only`` runs it. ``--benchmark-save``, ``--benchmark-compare`` and ``--perf-gate`` then tell
    whether a change made the kernel slower. A kernel whose result is wrong on a timed case has no time.

    Args:
        kernel: see `fourfold.verify`.
        operation: see `fourfold.verify`.
        claims: see `fourfold.verify`.
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        dtypes: the dtypes to time, or their names; if empty float32 and, on a GPU, bfloat16, as far as the claims go.
        sizes: the size of each axis of a declared operation, as {"rows": 4096, "cols": 1024}, or several of these, in
            place of the operation's workloads. An axis without a size is short.

    Raises:
        ValueError: an argument is not as described above. The message names it.
        CannotBeCalled: the kernel cannot be called with the operation's arguments.
    """
    trial = Trial.of(kernel, operation, claims, device, refusals=True, strict_errors=False)
    measured = list(_measurements(trial, dtypes, workloads_of(trial.operation, trial.device, sizes)))

    def test_timed_call_is_right(self: Any, benchmark: Any, measurement: Measurement, request: Any) -> None:
        performance = performance_of(request.config, trial.device)
        if not performance.running:
            pytest.skip("a benchmark: pytest --benchmark-only times it")
        with trial.settings():
            performance.time(benchmark, measurement)

    source = inspect.currentframe()
    module = source.f_back.f_globals.get("__name__", __name__) if source and source.f_back else __name__
    test = pytest.mark.parametrize("measurement", parameter_sets(measured))(test_timed_call_is_right)
    namespace = {"__doc__": f"The speed of {trial.name} as {trial.operation.name}", "__module__": module}
    return type("TestSpeed", (), {"test_timed_call_is_right": test, **namespace})


def _measurements(trial: Trial, dtypes: Dtypes, workloads: Mapping[str, Any]) -> Iterator[Measurement]:
    claimed_dtypes, operation = trial.claims.dtypes or tuple(DTYPES), trial.operation
    dtype_names = select_dtypes(dtypes, DTYPES)
    for name in dtype_names:
        if name not in claimed_dtypes:
            raise ValueError(f"dtypes: {trial.name} does not take {name}: there are {', '.join(claimed_dtypes)}")
    usual = [name for name in DTYPES_TIMED[trial.device] if name in claimed_dtypes] or [*claimed_dtypes][:1]
    name = getattr(trial.original, "__qualname__", type(trial.original).__name__)
    for dtype in dtype_names or usual:
        cell = Cell(operation.name, CANDIDATE, dtype)
        candidate = Contender(
            CANDIDATE, lambda: trial.implementation, cell, lambda: (trial.origin, name), trial.claims, trial.name
        )
        yield from measurements_of(operation, dtype, trial.device, [candidate, *peers_of(operation)], workloads)
