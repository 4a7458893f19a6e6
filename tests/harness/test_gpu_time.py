"""The time of a GPU belongs to one run of benchmarks at a time, which first computes what needs no GPU."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.checks.records import operations
from fourfold.compat import dynamo_internals
from fourfold.instruments import gpu_locks
from fourfold.operations.record import Operation
from fourfold.performance.measurement import SMALL, Bench, Measurement, measurements_of, peers_of
from fourfold.performance.plugin import Performance
from fourfold.pytest_plugin.table import Matrix


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that selects the current GPU by its uuid."""
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def select(uuid: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=uuid))

    select("first")
    return select


def test_a_gpu_is_taken_when_its_holder_releases_it(gpu: Callable[[str], None]) -> None:
    waits, taken = threading.Event(), threading.Event()

    def take() -> None:
        with gpu_locks.alone(waits.set):
            taken.set()

    with gpu_locks.alone(lambda: pytest.fail("it was free")):
        other = threading.Thread(target=take)
        other.start()
        assert waits.wait(60)
        assert not taken.is_set()
    other.join(60)
    assert taken.is_set()


def test_another_gpu_is_free(gpu: Callable[[str], None]) -> None:
    with gpu_locks.alone(lambda: pytest.fail("it was free")):
        gpu("second")
        with gpu_locks.alone(lambda: pytest.fail("it was free")):
            pass


@pytest.mark.parametrize("reserved", [0, 1])
def test_a_run_ends_its_work_and_frees_its_memory_before_it_releases_the_gpu(
    reserved: int, gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)  # 0: there may be no context to wait for
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("end"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("free"))
    with gpu_locks.alone(lambda: pytest.fail("it was free")):
        assert not events
    assert events == ["end", "free"] * reserved


def measurements_on(device: str, **changes: Any) -> list[Measurement]:
    softmax: Operation = operations()["softmax"]
    workloads = {"small": softmax.workloads["cpu"]["small"]} | changes
    return [*measurements_of(softmax, "float32", device, peers_of(softmax), workloads)]


def test_the_oracle_is_evaluated_ahead_and_its_errors_are_left_to_the_benchmarks() -> None:
    def broken(dtype: object) -> Any:
        raise RuntimeError("cannot make the case")

    timed, selection = measurements_on("cpu", broken=broken), SimpleNamespace()
    bench: Any = Bench(selection, "cpu")  # type: ignore[arg-type]
    bench.compute_ahead(timed)
    names = {(workload, gradients) for _, workload, _, gradients in bench.references._results}
    assert names == {("small", False), ("small", True)}
    with pytest.raises(RuntimeError, match="cannot make the case"):
        bench.workload(next(measurement for measurement in timed if measurement.workload == "broken"))


def hooks_on_a_gpu(events: list[str], monkeypatch: pytest.MonkeyPatch, **options: bool) -> Performance:
    """Return the hooks of a run on a simulated GPU, which skip each benchmark and add what happens to `events`."""

    @contextlib.contextmanager
    def alone(wait: object) -> Iterator[None]:
        events.append("taken")
        yield
        events.append("released")

    def skip(bench: Bench, measurement: Measurement) -> str:
        events.append("benchmark")
        return "it is not timed"

    monkeypatch.setattr(gpu_locks, "alone", alone)
    monkeypatch.setattr(Bench, "compute_ahead", lambda bench, timed: events.extend(str(one) for one in timed))
    monkeypatch.setattr(Bench, "unsupported", skip)
    monkeypatch.setattr("fourfold.performance.machine.toolchain", dict)
    given = {"--benchmark-only": True, "--benchmark-min-rounds": 1, "--benchmark-max-time": 1.0, **options}
    config: Any = SimpleNamespace(
        getoption=lambda name, default=None: given.get(name, default),
        pluginmanager=SimpleNamespace(getplugin=lambda name: None),
    )
    selection: Any = SimpleNamespace()
    return Performance(config, selection, "cuda", Matrix())


def test_a_run_takes_the_gpu_before_its_first_benchmark_and_releases_it_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    performance, measurement = hooks_on_a_gpu(events, monkeypatch), measurements_on("cuda")[0]
    item = SimpleNamespace(callspec=SimpleNamespace(params={"measurement": measurement}))
    session: Any = SimpleNamespace(config=performance.config, items=[item, SimpleNamespace()])
    loop = performance.pytest_runtestloop(session)
    next(loop)
    assert events == [str(measurement), "taken"]
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="it is not timed"):
            performance.time(None, measurement)
    with pytest.raises(StopIteration):
        loop.send(None)
    assert events == [str(measurement), "taken", "benchmark", "benchmark", "released"]


@pytest.mark.parametrize(
    ("held", "capturing", "during"),
    [
        (0, False, ["released", "compiled", "taken"]),
        (gpu_locks.LITTLE, False, ["compiled"]),  # another run would miss the memory
        (0, True, ["compiled"]),
    ],
)
def test_a_run_lends_the_gpu_while_torch_compile_compiles(
    held: int, capturing: bool, during: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def implementation(bench: Bench, measurement: Measurement) -> None:
        if not made:  # it is cached
            torch.compiler.reset()
        made.append(measurement)

    def compile_by_torch(bench: Bench, benchmark: Any, measurement: Measurement, *limits: float) -> None:
        bench.implementation(measurement)
        for function in (lambda x: x + 1, lambda x: x + 2):
            torch.compile(function, backend=lambda graph, inputs: events.append("compiled") or graph)(torch.ones(1))

    events, made = list[str](), list[Measurement]()
    performance, measurement = hooks_on_a_gpu(events, monkeypatch), measurements_on("cuda")[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    memory = [held, 2 * gpu_locks.LITTLE]  # a graph's, which is no longer allocated, and what can be freed
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(memory))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory.__delitem__(slice(1, None)))
    monkeypatch.setattr(Bench, "unsupported", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "implementation", implementation)
    monkeypatch.setattr(Bench, "time", compile_by_torch)
    for _ in range(2):
        performance.time(SimpleNamespace(fullname="softmax"), measurement)
    assert events == ["taken", *during * 4]


def test_a_peer_that_runs_out_of_memory_frees_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(bench: Bench, *arguments: object) -> None:
        held = torch.ones(1)
        results.append(weakref.ref(held))
        try:
            raise torch.OutOfMemoryError("too much")
        except torch.OutOfMemoryError as error:
            kept = error  # which keeps this frame, and that keeps it
            raise kept from None

    results = list[weakref.ref[torch.Tensor]]()
    performance = hooks_on_a_gpu([], monkeypatch)
    (compiled, *_) = [one for one in measurements_on("cuda") if one.contender == "compile"]
    monkeypatch.setattr(Bench, "unsupported", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "implementation", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "time", run_out_of_memory)
    with pytest.raises(pytest.skip.Exception, match="compile does not take it: OutOfMemoryError: too much"):
        performance.time(None, compiled)
    assert [result() for result in results] == [None]


def test_only_small_workloads_are_kept() -> None:
    made: list[str] = []
    small, *_ = measurements_on("cpu")

    def make(name: str, elements: int) -> Measurement:
        workload = SimpleNamespace(case=SimpleNamespace(elements=elements))
        return replace(small, workload=name, make=lambda dtype: made.append(name) or workload)  # type: ignore[func-returns-value, arg-type, return-value]

    bench = Bench(SimpleNamespace(), "cpu")  # type: ignore[arg-type]
    timed = [make("small", SMALL), make("large", SMALL + 1), make("larger", SMALL + 2)]
    for measurement in [*timed, *reversed(timed)]:
        bench.workload(measurement)
    assert made == ["small", "large", "larger", "large"]


def test_a_run_lends_the_gpu_while_it_makes_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    made = measurements_on("cuda")[0]
    performance = hooks_on_a_gpu(events, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    performance._take_gpu()
    for _ in range(2):
        performance.run.bench.workload(replace(made, make=lambda dtype: events.append("made") or made.make(dtype)))  # type: ignore[func-returns-value]
    assert events == ["taken", "released", "made", "taken"]


@pytest.mark.parametrize(
    ("warms_up", "expected"),
    [
        (False, "taken released compiled taken measured released taken measured"),
        (True, "compiled taken measured released taken measured released"),
    ],
)
def test_torch_compile_measures_alone_though_it_compiles_beside_other_runs(
    warms_up: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_by_inductor(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        events.append("compiled")
        dynamo_internals.benchmarker.benchmark_gpu(lambda: None)
        return graph

    def compile_by_torch(bench: Bench, *arguments: object) -> None:
        torch.compile(lambda x: x + 1, backend=compile_by_inductor)(torch.ones(1))
        dynamo_internals.benchmarker.benchmark_gpu(lambda: None)  # the tuner's, in the first call

    def measure(benchmarker: object, call: object) -> float:
        events.append("measured")
        return 1.0

    events: list[str] = []
    measurement = measurements_on("cuda")[0]
    performance = hooks_on_a_gpu(events, monkeypatch, warm_up=warms_up)
    monkeypatch.setattr(type(dynamo_internals.benchmarker), "benchmark_gpu", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Bench, "unsupported", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "implementation", lambda bench, measurement: torch.compiler.reset())
    monkeypatch.setattr(Bench, "time", compile_by_torch)
    monkeypatch.setattr(Bench, "warm_up", compile_by_torch)
    with pytest.raises(pytest.skip.Exception) if warms_up else contextlib.nullcontext():
        performance.time(SimpleNamespace(fullname="softmax"), measurement)
    assert " ".join(events) == expected


def test_a_warm_up_makes_each_call_beside_other_runs_and_times_none(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    performance, measurement = hooks_on_a_gpu(events, monkeypatch, warm_up=True), measurements_on("cuda")[0]
    monkeypatch.setattr(Bench, "unsupported", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "implementation", lambda bench, measurement: None)
    monkeypatch.setattr(Bench, "warm_up", lambda bench, measurement: events.append("call"))
    item = SimpleNamespace(callspec=SimpleNamespace(params={"measurement": measurement}))
    loop = performance.pytest_runtestloop(SimpleNamespace(config=performance.config, items=[item]))  # type: ignore[arg-type]
    next(loop)
    with pytest.raises(pytest.skip.Exception, match="called, not timed"):
        performance.time(None, measurement)
    assert events == ["call"]


def test_a_benchmark_whose_hooks_come_late_takes_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    performance = hooks_on_a_gpu(events, monkeypatch)
    with pytest.raises(pytest.skip.Exception, match="it is not timed"):
        performance.time(None, measurements_on("cuda")[0])
    assert events == ["taken", "benchmark"]
