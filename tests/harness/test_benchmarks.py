"""Benchmarks check the results of the calls that they time, and device clocks exclude the host's time."""

import gc
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import warm
from fourfold.properties import adam, layer_norm, softmax, vector_add
from samples import sampled
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold import backends
from fourfold.checks.outputs import join_outputs
from fourfold.checks.records import operations
from fourfold.numerics.compare import Disagreement
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Operation
from fourfold.operations.workloads import Tiled, Workload, tiled, whole
from fourfold.performance import machine
from fourfold.performance.calls import (
    DIRECTIONS,
    Call,
    References,
    Replay,
    directions_of,
    require_memory_for_capture,
    worst_error,
)
from fourfold.performance.ceilings import Ceilings
from fourfold.performance.measurement import MeasuringError, achieved_rates, ratios
from fourfold.performance.peers import INSTALLED, peers
from fourfold.performance.profile import mark
from fourfold.performance.timing import (
    MOST_ROUNDS,
    USUAL_ROUNDS,
    DeviceClock,
    HostClock,
    cuda_device,
    enough_rounds,
    one_round,
    plan_rounds,
)
from fourfold.performance.timings import comparisons, markdown

ROOT = Path(__file__).parents[2]
FLOAT32 = DTYPES["float32"]


class SimulatedGpu:
    """A simulated device that works through its queue while the host continues."""

    def __init__(self, flush_seconds: float = 0.0, queue: int = 1000) -> None:
        self.host = self.free = 0.0
        self.flush_seconds = flush_seconds
        self.flushed = 0
        self.ends = deque([0.0] * queue, maxlen=queue)  # when each of the last `queue` items ends

    def enqueue(self, seconds: float, host_seconds: float = 1e-6) -> None:
        self.host = max(self.host + host_seconds, self.ends[0])  # the host waits for a full queue
        self.free = max(self.free, self.host) + seconds
        self.ends.append(self.free)

    def flush(self) -> None:
        self.flushed += 1
        self.enqueue(self.flush_seconds)

    def spin(self, seconds: float) -> None:
        self.enqueue(seconds)

    def record(self) -> float:
        self.enqueue(0.0)
        return self.free

    def passed(self, event: float) -> bool:
        return event <= self.host

    def seconds_between(self, start: float, end: float) -> float:
        self.host = max(self.host, end)
        return end - start


class Kernel:
    """A simulated kernel with given seconds on the device and for its launch on the host."""

    calls_per_run = 1

    def __init__(self, gpu: SimulatedGpu, seconds: float, launch_seconds: float) -> None:
        self.gpu, self.seconds, self.launch_seconds = gpu, seconds, launch_seconds

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.gpu.enqueue(self.seconds, self.launch_seconds)


def test_device_clock_gives_the_devices_time_and_not_the_hosts() -> None:
    gpu = SimulatedGpu()
    clock, kernel = DeviceClock(gpu), Kernel(gpu, 8e-6, launch_seconds=40e-6)
    kept_waiting = one_round(clock, lambda: kernel.run(1))
    clock.host_seconds = 40e-6
    assert kept_waiting > 40e-6  # without the busy wait, the clock measures the host
    assert one_round(clock, lambda: kernel.run(1)) == pytest.approx(8e-6)
    clock.calls, clock.host_seconds = 16, 16 * 40e-6
    assert one_round(clock, lambda: kernel.run(16)) == pytest.approx(8e-6)  # of a call


def test_rounds_of_a_host_that_is_slower_than_it_was_are_made_again() -> None:
    gpu = SimulatedGpu()
    clock, kernel = DeviceClock(gpu), Kernel(gpu, 8e-6, launch_seconds=500e-6)
    clock.host_seconds = 40e-6
    assert one_round(clock, lambda: kernel.run(1)) == pytest.approx(8e-6)
    assert clock.late_rounds == 3  # after waits of 80, 160 and 320 us
    assert not clock.late
    assert one_round(clock, lambda: kernel.run(1)) == pytest.approx(8e-6)
    assert clock.late_rounds == 3


def test_a_host_that_is_ever_slower_does_not_keep_a_round_for_good() -> None:
    gpu = SimulatedGpu()
    clock = DeviceClock(gpu)
    clock.host_seconds = 1e-6
    rounds = iter(range(1, 100))
    assert one_round(clock, lambda: gpu.enqueue(8e-6, 10.0 ** next(rounds))) > 1
    assert clock.late_rounds < 100


def test_a_round_of_more_launches_than_a_stream_holds_is_timed_with_the_host() -> None:
    gpu = SimulatedGpu(queue=100)
    clock, kernel = DeviceClock(gpu), Kernel(gpu, 8e-6, launch_seconds=40e-6)
    clock.host_seconds = 200 * 40e-6
    seconds = [one_round(clock, lambda: kernel.run(200)) for _ in range(10)]
    assert clock.waits_for_host
    assert not clock.late
    assert seconds[1:] == pytest.approx([200 * 40e-6] * 9, rel=0.01)
    assert gpu.host < 10  # the clock stops doubling the wait


@pytest.mark.parametrize("cold", [True, False])
def test_device_clock_flushes_the_cache_before_each_round_unless_a_graph_is_replayed(cold: bool) -> None:
    gpu = SimulatedGpu(flush_seconds=1e-3)
    clock, kernel = DeviceClock(gpu), Kernel(gpu, 8e-6, launch_seconds=40e-6)
    clock.cold = cold
    seconds = [one_round(clock, lambda: kernel.run(1)) for _ in range(3)]
    assert not cold or seconds == pytest.approx([8e-6] * 3)
    assert gpu.flushed == 3 * cold


class Script:
    """Calls with scripted durations on a simulated host clock."""

    calls_per_run = 1

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.time, self.made = seconds, 0.0, 0

    def now(self) -> float:
        return self.time

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.time += self.seconds(self.made)
            self.made += 1


def planned(script: Script, least: int = 5, most_seconds: float = 1.0) -> tuple[int, int, float]:
    clock = HostClock(script.now)
    rounds = plan_rounds(clock, script, lambda: None, least, most_seconds, script.now)
    assert clock.calls == rounds.calls
    return rounds.calls, rounds.rounds, rounds.pilot_seconds


def test_warm_up_goes_on_while_calls_become_faster() -> None:
    calls, _, seconds = planned(Script(lambda call: 1e-3 * (100 if call == 0 else 5 - call if call < 4 else 1)))
    assert (calls, seconds) == (1, pytest.approx(1e-3))


def test_short_calls_are_timed_by_the_hundred() -> None:
    calls, _, seconds = planned(Script(lambda call: 1e-6))
    assert calls * 1e-6 >= 99e-6
    assert seconds == pytest.approx(1e-6)


def test_a_long_call_is_timed_as_often_as_asked_for_at_the_least() -> None:
    assert planned(Script(lambda call: 0.4), least=5)[1] == 5


def test_the_wider_the_spread_the_more_rounds() -> None:
    noisy, quiet = ([1 + spread * (i % 5) for i in range(10)] for spread in (0.05, 0.001))
    assert enough_rounds(quiet, 1e-3, 5, 10.0) == USUAL_ROUNDS
    assert USUAL_ROUNDS < enough_rounds(noisy, 1e-3, 5, 10.0) <= MOST_ROUNDS
    assert enough_rounds(noisy, 1e-3, 5, 0.1) == 100  # 0.1 s of rounds of 1 ms


def small(make: Callable[[DType], Case]) -> Workload:
    return whole(make)(FLOAT32)


def check(operation: str, workload: Workload, function: Callable[..., torch.Tensor], direction: str) -> float:
    record = operations()[operation]
    call = Call(function, record, workload, FLOAT32, "cpu", direction)
    call.run(2)
    call.poison()
    call.run(1)
    expected = References().of(record, "", workload, FLOAT32)
    return worst_error(call.results, expected, workload, FLOAT32, joined=len(record.joined_places) > 1)


@pytest.mark.parametrize("dtype", [DTYPES["bfloat16"], FLOAT32], ids=str)
def test_outputs_of_several_dtypes_are_compared_in_a_row(dtype: DType) -> None:
    record = operations()["adam"]
    work = tiled(adam.step_of(33, 1001), 4, *adam.ARGUMENTS.axes)(dtype)
    call = Call(backends.load("adam", "torch"), record, work, dtype, "cpu", "forward")
    call.run(1)
    expected = References().of(record, "", work, dtype, gradients=False)
    assert worst_error(call.results, expected, work, dtype, joined=True) <= 1
    wrong = call.results["output"].clone()
    wrong[:, 1001] += 1  # of the state m, which has float32
    with pytest.raises(Disagreement, match=r"output\[\d+, 1001\] is"):
        worst_error({"output": wrong}, expected, work, dtype, joined=True)


def test_several_outputs_are_not_repeated_along_the_axis_that_joins_them() -> None:
    work = tiled(adam.step_of(33), 4, *adam.ARGUMENTS.axes)(FLOAT32)
    with pytest.raises(ValueError, match="workload: several outputs can be repeated along their first of two"):
        Call(backends.load("adam", "torch"), operations()["adam"], work, FLOAT32, "cpu", "forward")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_of_several_right_results_each_may_be_timed(direction: str) -> None:
    """topk may take any of equal numbers, and then their gradient goes to any."""

    def last_of_ties(x: torch.Tensor, k: int, largest: bool = True) -> torch.Tensor:
        order = x.flip(-1).argsort(dim=-1, descending=largest, stable=True)[..., :k]
        return x.gather(-1, x.shape[-1] - 1 - order)

    rng = np.random.default_rng(3)
    x = rng.integers(0, 4, (4, 30)).astype(np.float32)
    case = Case({"x": x}, rng.normal(size=(4, 8)).astype(np.float32), {"k": 8, "largest": True})
    record = operations()["topk"].outputs["values"]
    ties = tiled(lambda _: case, 4, "x")(FLOAT32)
    call = Call(last_of_ties, record, ties, FLOAT32, "cpu", direction)
    call.run(1)
    expected = References().of(record, "", ties, FLOAT32)
    assert worst_error(call.results, expected, ties, FLOAT32) == 0
    for result in call.results.values():
        result.detach()[0, :2] += 1
    with pytest.raises(Disagreement, match=r"\[0, [01]\] is"):
        worst_error(call.results, expected, ties, FLOAT32)


def modest(operation: Operation, wanted: tuple[str, ...] = ()) -> Callable[[DType], Case]:
    """Return the smallest example with a batch axis, finite numbers and 3 elements along each axis, if there is any.

    Of the optional inputs it has exactly the requested ones.
    """

    def elements(name: str) -> int:
        return sum(array.size for array in made[name].inputs.values())

    def serves(case: Case) -> bool:
        arrays = case.inputs.values()
        batched = {name: axes for name, axes in operation.batched.items() if name in case.inputs}
        samples = optional & {*case.inputs} == optional & {*wanted}
        samples = samples and all(case[name].ndim > axes for name, axes in batched.items())
        given = (*arrays, case.grad_output)
        finite = samples and all(np.isfinite(array.astype(np.float64)).all() for array in given)
        numbers = min(array.size for array in arrays if not np.issubdtype(array.dtype, np.integer))
        return finite and not case.layouts and numbers >= 15 and all(min(a.shape, default=0) >= 3 for a in arrays)

    made = {name: make(FLOAT32) for name, make in operation.examples.items()}
    optional = {name for case in made.values() for name in operation.axes if name not in case.inputs}
    return operation.examples[min([name for name, case in made.items() if serves(case)] or made, key=elements)]


def repeated_ways(operation: Operation) -> dict[str, Tiled]:
    """Return the `Tiled` of each of the operation's ways to repeat a case, for a modest case.

    Several outputs are repeated for the workload's case, because they need two axes.
    """
    ways = {(make.names, make.across): make for make in operation.workloads["cuda"].values() if isinstance(make, Tiled)}
    several = len(operation.joined_places) > 1
    return {
        "_".join((*names, *(f"across_{name}" for name in across))): Tiled(
            of.make if several else modest(operation, names), 8, names, across
        )
        for (names, across), of in ways.items()
    }


REPEATED = {
    f"{name}-{way}": (name, tiled) for name, of in operations().items() for way, tiled in repeated_ways(of).items()
}


@pytest.mark.full(but=18)
@pytest.mark.parametrize(
    ("way", "direction"), [(way, to) for way, (name, _) in REPEATED.items() for to in directions_of(operations()[name])]
)
def test_a_repeated_workload_has_the_results_of_its_part(way: str, direction: str) -> None:
    operation, make = REPEATED[way]
    workload = make(FLOAT32)
    assert sum(a.size for a in workload.case.inputs.values()) > 2 * sum(a.size for a in workload.part.inputs.values())
    function = join_outputs(backends.load(operation, "torch"), operations()[operation])
    assert check(operation, workload, function, direction) <= 1


def test_products_are_repeated_along_both_axes_and_losses_along_samples() -> None:
    assert {
        "matmul-a",
        "matmul-a_across_b",
        "matmul-across_b",
        "giou_loss-pred_target",
        "layer_norm-x",
    } <= REPEATED.keys()


@pytest.mark.parametrize("parts", [1, 4, 8])
def test_repetitions_may_be_summed_in_any_order(parts: int) -> None:
    """In one repetition a row has one cotangent, and its gradient no error: only sums over repetitions are rounded."""

    class InParts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(ids)
            return table[ids]

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
            ids = ctx.saved_tensors[0]
            sums = grad_output.new_zeros(parts, 64, 8)
            for place, row in enumerate(ids.tolist()):
                sums[place // len(ids.unique()) % parts, row] += grad_output[place]
            return sums.sum(0), None

    rng = np.random.default_rng(5)
    inputs = {"table": rng.normal(size=(64, 8)).astype(np.float32), "ids": rng.permutation(64)}
    case = Case(inputs, rng.normal(size=(64, 8)).astype(np.float32), {"padding_idx": None})
    work = tiled(lambda _: case, 32, "ids")(FLOAT32)
    assert check("embedding", work, lambda table, ids, padding_idx: InParts.apply(table, ids), "backward") <= 1


def test_a_gradient_that_leaves_rows_out_is_found_in_a_repeated_workload() -> None:
    whole_norm = backends.load("layer_norm", "torch")

    def without_last_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.cat([whole_norm(x[:-3], weight, bias, eps), whole_norm(x[-3:], weight.detach(), bias, eps)])

    with pytest.raises(Disagreement, match="weight"):
        check("layer_norm", tiled(layer_norm.rows(3, cols=33), 8, "x")(FLOAT32), without_last_rows, "backward")


def test_a_call_that_writes_nothing_does_not_find_the_former_result() -> None:
    kept: list[torch.Tensor] = []

    def lazy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(x + y)
        return kept[0]

    with pytest.raises(Disagreement, match="output"):
        check("vector_add", small(vector_add.random_case(9)), lazy, "forward")


@pytest.mark.full(but=4)
@pytest.mark.parametrize(
    "backend", sampled(["torch", "cuda"], "torch")
)  # Triton's interpreter itself makes reference cycles
@pytest.mark.parametrize(
    ("operation", "direction"),
    [
        pytest.param(name, direction, marks=() if name in ("vector_add", "topk", "rope") else pytest.mark.full)
        for name, record in sorted(operations().items())
        for direction in directions_of(record)
    ],
)
def test_tensors_of_a_call_go_with_it(operation: str, backend: str, direction: str) -> None:
    # A reference cycle could hold gigabytes for long: Python's collector counts objects, and these are few.
    gc.collect()
    gc.disable()
    try:
        record = operations()[operation]
        call = Call(
            join_outputs(backends.load(operation, backend), record),
            record,
            small(modest(record)),
            FLOAT32,
            "cpu",
            direction,
        )
        call.run(2)
        held = [StorageWeakRef(t.untyped_storage()) for t in (*call.tensors.values(), *call.results.values())]
        del call
        assert all(storage.expired() for storage in held)
    finally:
        gc.enable()


def test_results_that_are_inputs_are_not_overwritten() -> None:
    # The gradient of a sum is grad_output itself.
    assert check("vector_add", small(vector_add.random_case(9)), backends.load("vector_add", "torch"), "both") <= 1


def test_no_result_is_no_agreement() -> None:
    with pytest.raises(Disagreement, match="no result"):
        worst_error({}, {}, small(vector_add.random_case(9)), FLOAT32)


def test_the_call_to_profile_is_alone_in_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    def counted(**inputs: torch.Tensor) -> torch.Tensor:
        events.append("call")
        if len(events) > 4:
            raise MemoryError
        return backends.load("vector_add", "torch")(**inputs)

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: events.append(name) or 7)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", events.append)
    record = operations()["vector_add"]
    call = Call(counted, record, small(vector_add.random_case(9)), FLOAT32, "cpu", "both")
    mark(call, "vector_add-triton")
    with pytest.raises(MemoryError):
        mark(call, "failing")
    assert events == ["vector_add-triton", "call", 7, "failing", "call", 7]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_a_replayed_graph_leaves_the_results_of_its_calls(backend: str, direction: str) -> None:
    record, workload = operations()["softmax"], small(softmax.rows(64, cols=256))
    function = backends.load("softmax", backend)
    replay = Replay(lambda: Call(function, record, workload, FLOAT32, "cuda", direction), cuda_device().cache_bytes)
    expected = References().of(record, "", workload, FLOAT32)
    assert replay.calls_per_run > 1
    replay.poison()
    with pytest.raises(Disagreement):
        worst_error(replay.results, expected, workload, FLOAT32)
    replay.run(1)
    assert worst_error(replay.results, expected, workload, FLOAT32) <= 1


@pytest.mark.parametrize("free", [1, 3])
def test_a_capture_needs_free_memory_for_all_that_its_calls_allocate(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 << 30)
    require_memory_for_capture((1 + free) << 30)
    with pytest.raises(RuntimeError, match=f"allocate {free + 2}.0 GiB, and {free + 1}.0 GiB are free"):
        require_memory_for_capture((2 + free) << 30)


@pytest.mark.usefixtures("gpu")
def test_calls_that_allocate_more_than_the_free_memory_are_not_captured() -> None:
    """Freed tensors count: the sum of a call's temporary tensors exceeds the memory, though none is large."""
    captured = []

    def allocate_often(**inputs: torch.Tensor) -> torch.Tensor:
        captured.append(torch.cuda.is_current_stream_capturing())
        for _ in range(9):
            torch.empty(torch.cuda.mem_get_info()[1] // 8, dtype=torch.uint8, device="cuda")
        return backends.load("vector_add", "torch")(**inputs)

    record, workload = operations()["vector_add"], small(vector_add.random_case(9))
    with pytest.raises(RuntimeError, match="GiB are free"):
        Replay(lambda: Call(allocate_often, record, workload, FLOAT32, "cuda", "forward"), 0)
    assert captured == [False] * 2


@pytest.mark.usefixtures("gpu")
def test_device_clock_agrees_with_a_wait_of_known_length() -> None:
    clock = DeviceClock()
    clock.host_seconds = 1e-4
    waits = [1e-4, 1e-3]
    assert [one_round(clock, lambda w=w: clock.device.spin(w)) for w in waits] == pytest.approx(waits, rel=0.2)


CEILINGS = Ceilings(bytes_per_second=1e12, flops_per_second={"float32": 1e13}, launch_seconds=2e-6)


def test_a_time_is_a_share_of_the_ceiling() -> None:
    assert achieved_rates(CEILINGS, Cost(10**6, 10**6), "float32", 2e-6)["fraction_of_ceiling"] == pytest.approx(0.5)


def test_writes_may_still_be_in_a_cache() -> None:
    cached = replace(CEILINGS, cache_bytes=10**6)
    assert achieved_rates(cached, Cost(3 * 10**6, 0), "float32", 2.1e-6)["fraction_of_ceiling"] == pytest.approx(
        3 / 2.1
    )
    for ceilings, seconds in ((CEILINGS, 2.1e-6), (cached, 1.9e-6)):
        with pytest.raises(MeasuringError, match="of what this device can do"):
            achieved_rates(ceilings, Cost(3 * 10**6, 0), "float32", seconds)


def test_tensor_cores_may_multiply_parts_of_wider_numbers() -> None:
    ceilings = replace(CEILINGS, flops_per_second={"float16": 8e14, "float32": 5e13, "float64": 6e13})
    cost = Cost(0, 10**12)
    # Three pieces in bfloat16, and their six products: a right kernel, at 1.2 times torch.matmul's speed.
    assert achieved_rates(ceilings, cost, "float32", 1 / 60)["fraction_of_ceiling"] == pytest.approx(1.2)
    for dtype, least in (("float16", 1 / 800), ("float32", 1 / 400), ("float64", 1 / 60)):
        achieved_rates(ceilings, cost, dtype, least * 1.01)
        with pytest.raises(MeasuringError, match="101% of what this device can do"):
            achieved_rates(ceilings, cost, dtype, least / 1.01)


def test_each_kernel_stands_beside_its_fastest_peer_the_slowest_first() -> None:
    def timed(workload: str, who: str, median: float, **more: str) -> dict[str, object]:
        info: dict[str, object] = {"operation": "softmax", "workload": workload, "dtype": "float32"}
        info |= {"direction": "forward", "contender": who, "shapes": {"x": (8, 4)}, **more}
        return {"group": workload, "median": median, "extra_info": info}

    made = [timed("a", "torch", 3.0), timed("a", "liger", 2.0, disagreement="0.1"), timed("a", "cuda", 1.0)]
    made += [timed("a", "triton", 4.0), timed("b", "cuda", 1.0), timed("c", "library", 1.0), timed("c", "cuda", 4.0)]
    c, a = comparisons(made)  # b has no peer
    assert str(c) == " 0.25  softmax c float32 forward: cuda 0.25 beside library"
    assert str(a) == " 0.50  softmax a float32 forward: triton 0.50, cuda 2.00 beside liger, which is less exact"
    page = markdown([({"gpu": "H100", "cpu": "x", "torch": "2.11", "liger": "0.8.5"}, [c, a])]).splitlines()
    assert page[-10:] == [
        "torch 2.11, liger 0.8.5",
        "",
        "| operation | workloads | triton | cuda |",
        "|---|---|---|---|",
        "| softmax | 2 | 0 of 1, 0.50 | 1 of 2, 1.12 |",
        "",
        "| workload | shapes | torch | library | liger | triton | cuda |",
        "|---|---|---|---|---|---|---|",
        "| softmax c float32 forward | 8x4 |  | **1e+06** |  |  | 4e+06 (0.25) |",
        "| softmax a float32 forward | 8x4 | 3e+06 |  | **2e+06*** | 4e+06 (0.50) | 1e+06 (2.00) |",
    ]
    made = [timed("d", who, median, direction="host") for who, median in (("torch", 1e-5), ("cuda", 2e-5))]
    with_host = markdown([({"gpu": "H100", "cpu": "x", "torch": "2.11", "liger": "0.8.5"}, [*comparisons(made), c, a])])
    assert with_host.splitlines()[: len(page)] == page
    assert with_host.splitlines()[len(page) :] == [
        "",
        "The times of the host, until the call returns:",
        "",
        "| workload | shapes | torch | cuda |",
        "|---|---|---|---|",
        "| softmax d float32 host | 8x4 | **10** | 20 (0.50) |",
    ]


# The text of modules, after the import of torch.
PEER_PACKAGES = {
    "liger_kernel/ops/rms_norm.py": """
class LigerRMSNormFunction:
    def apply(x, weight, eps, offset, casting_mode, in_place):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
""",
    "liger_kernel/ops/fused_add_rms_norm.py": """
class LigerFusedAddRMSNormFunction:
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False, row_mode=None):
        assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
        S = X + R
        return torch.nn.functional.rms_norm(S, S.shape[-1:], W, eps), S
""",
    "liger_kernel/ops/softmax.py": """
class LigerSoftmaxFunction:
    def apply(x):
        return torch.softmax(x, -1)
""",
    "liger_kernel/ops/layer_norm.py": """
class LigerLayerNormFunction:
    def apply(x, weight, bias, eps):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
""",
    # These two overwrite their inputs, as Liger's do.
    "liger_kernel/ops/cross_entropy.py": """
def cross_entropy_forward(_input, target, weight, ignored, square_scale, smoothing, reduction, softcap, z_loss):
    given = _input.detach().clone().requires_grad_()
    options = dict(ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
    with torch.enable_grad():
        loss = torch.nn.functional.cross_entropy(given, target, weight, **options)
        total = loss.sum()
    if _input.requires_grad:
        _input.detach().copy_(*torch.autograd.grad(total, given))
    return loss.detach(), None, None, None, _input.detach()
def cross_entropy_backward(_input, grad_output):
    return _input.mul_(grad_output[..., None])
""",
    "liger_kernel/ops/swiglu.py": """
def swiglu_forward(a, b, gate_multiplier=1.0):
    return a, b, torch.nn.functional.silu(a) * b
def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    silu, sigmoid = torch.nn.functional.silu(a), torch.sigmoid(a)
    down = dc * silu
    a.copy_(dc * b * sigmoid * (1 + a * (1 - sigmoid)))
    b.copy_(down)
    return a, b
""",
    "liger_kernel/ops/experimental/embedding.py": """
class LigerEmbeddingFunction:
    def apply(embeddings, indices):
        return torch.nn.functional.embedding(indices, embeddings)
""",
    "flag_gems/ops/__init__.py": "from flag_gems.ops.softmax import softmax",
    "flag_gems/ops/softmax.py": """
def softmax(self, dim, half_to_float=False):
    return torch.softmax(self, dim)
def softmax_backward(grad_output, output, dim, input_dtype):
    return output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
""",
    "flag_gems/ops/layernorm.py": """
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return torch.ops.aten.native_layer_norm(input, normalized_shape, weight, bias, eps)
def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=None):
    assert input.dim() == 2
    given = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    return torch.ops.aten.native_layer_norm_backward(*given)
""",
    "flag_gems/ops/rms_norm.py": """
def rms_norm(x, normalized_shape, weight, eps=1e-5):
    return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)
""",
    "flag_gems/fused/cross_entropy_loss.py": """
def cross_entropy_loss(inp, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    options = dict(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return torch.nn.functional.cross_entropy(inp, target, weight, **options)
""",
    "flag_gems/fused/silu_and_mul.py": """
def silu_and_mul(A, B):
    return torch.nn.functional.silu(A) * B
""",
    "flag_gems/ops/topk.py": """
def topk(x, k, dim=-1, largest=True, sorted=True):
    return tuple(torch.topk(x, k, dim, largest, sorted))
""",
    "flag_gems/ops/cumsum.py": """
def cumsum(inp, dim=1, *, dtype=None):
    return torch.cumsum(inp, dim)
""",
    "flag_gems/ops/mm.py": """
def mm(a, b):
    return torch.mm(a, b)
""",
    # A function with the module's name, which the package's attribute then returns.
    "quack/__init__.py": "from quack.rmsnorm import rmsnorm",
    "quack/rmsnorm.py": """
def rmsnorm(x, weight, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
    assert x.dim() == 2 or residual is not None
    summed = x if residual is None else x + residual
    output = torch.nn.functional.rms_norm(summed, x.shape[-1:], weight, eps)
    return (output, summed) if prenorm else output
def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert weight.dtype == bias.dtype == torch.float32
    output, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return output, rstd, mean
def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    given = dout, x, x.shape[-1:], mean, rstd, weight, weight, [True] * 3
    return torch.ops.aten.native_layer_norm_backward(*given)
""",
    "quack/softmax.py": """
def softmax(x):
    return torch.softmax(x, -1)
""",
    "quack/topk.py": """
def topk(x, k, softmax=False):
    return tuple(torch.topk(x, k))
""",
    "quack/cross_entropy.py": """
def cross_entropy(x, target, ignore_index=-100, reduction="mean"):
    return torch.nn.functional.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)
""",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for the libraries, with the signatures of their functions."""
    for name, text in PEER_PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        for folder in Path(name).parents[:-1]:  # a package without this file would give way to an installed one
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / name).write_text(f"import torch\n{text}")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", "quack", "flag_gems")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_kernels_of_installed_libraries_are_peers() -> None:
    x, weight = torch.rand(2, 3, 4), torch.rand(4)
    expected = torch.nn.functional.rms_norm(x, (4,), weight, 1e-3)
    made = peers("rms_norm")
    assert {*INSTALLED} <= {*made}
    for name in INSTALLED:
        assert torch.equal(made[name]()(x, weight, eps=1e-3), expected)
    assert not {*INSTALLED} & {*peers("giou")}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("peer", ["torch", "library", "liger"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_output_of_a_peer_is_timed_and_compared(peer: str, direction: str) -> None:
    """Outputs are not joined within the timed call, and each is compared."""
    record, outputs = operations()["add_rms_norm"], []
    function = backends.load("add_rms_norm", "torch") if peer == "torch" else peers("add_rms_norm")[peer]()

    def kept(**arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs[:] = function(**arguments)
        return tuple(outputs)

    workload = record.workloads["cpu"]["ragged"](FLOAT32)
    call = Call(kept, record, workload, FLOAT32, "cpu", direction)
    call.run(2)
    expected = References().of(record, "", workload, FLOAT32)
    assert worst_error(call.results, expected, workload, FLOAT32) <= 1
    if direction != "backward":
        assert [*map(id, call.parts["output"])] == [*map(id, outputs)]
    for parts in call.parts.values():
        parts[-1].detach()[..., -1] += 1
        with pytest.raises(Disagreement):
            worst_error(call.results, expected, workload, FLOAT32)
        parts[-1].detach()[..., -1] -= 1
    given = call.arguments
    call.poison()
    assert not call.results
    assert {"grad_output 0", "grad_output 1"} <= {*given} or direction == "forward"
    assert not any(tensor.isnan().any() for tensor in given.values())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("library", "operation"), [(name, one) for name in INSTALLED for one in INSTALLED[name][1]])
def test_functions_of_libraries_compute_the_operation_again_and_again(library: str, operation: str) -> None:
    record = operations()[operation]
    workload = record.workloads["cpu"]["small"](FLOAT32)
    if operation == "matmul":
        workload = whole(lambda dtype: workload.case.with_parameters(activation="none"))(FLOAT32)
    function = peers(operation)[library]()
    for direction in DIRECTIONS:
        call = Call(function, record, workload, FLOAT32, "cpu", direction)
        call.run(3)
        expected = References().of(record, "", workload, FLOAT32)
        assert worst_error(call.results, expected, workload, FLOAT32, record.returns) <= 1


@pytest.mark.usefixtures("installed")
def test_what_flaggems_does_not_compute_is_refused() -> None:
    x = torch.rand(4, 4)
    cumsum, matmul = (peers(operation)["flaggems"]() for operation in ("cumsum", "matmul"))
    for call in (
        lambda: cumsum(x, torch.tensor([0, 4])),
        lambda: cumsum(x, exclusive=True),
        lambda: cumsum(x, reverse=True),
        lambda: matmul(x, x, "relu"),
    ):
        with pytest.raises(NotImplementedError, match="FlagGems"):
            call()


def test_ratios_are_taken_within_a_group() -> None:
    made = [
        {"group": group, "extra_info": {"contender": who}, "stats": {"median": median}}
        for group, who, median in (("a", "torch", 4.0), ("a", "cuda", 1.0), ("b", "torch", 9.0))
    ]
    ratios(made)
    assert [one["extra_info"]["ratio_to"] for one in made] == [{"cuda": 4.0}, {"torch": 0.25}, {}]  # type: ignore[index]


def test_every_operation_declares_workloads_for_either_device() -> None:
    for operation in operations().values():
        assert set(operation.workloads) == {"cpu", "cuda"}
        for named in operation.workloads.values():
            assert {"small", "ragged"} <= set(named)
        for make in operation.workloads["cpu"].values():
            forward, _ = operation.cost(make(FLOAT32).case)
            assert forward.bytes > 0


def test_state_of_a_gpu_says_what_its_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_supported(gpu: str, kind: int) -> int:
        raise machine.pynvml.NVMLError(machine.pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda gpu, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda gpu: 412_550,
        nvmlDeviceGetTemperature=not_supported,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x44,
    )
    assert set(vars(nvml)) <= set(dir(machine.pynvml))
    monkeypatch.setattr(machine, "_nvml", lambda: nvml)
    state = machine.state_of("GPU-1")
    assert (state["sm_mhz"], state["memory_mhz"], state["watts"]) == (1980, 3201, 412.55)
    assert "celsius" not in state
    assert state["unknown"] == "celsius: Not Supported"
    assert machine.throttled([None, state]) == ["software power cap", "hardware thermal slowdown"]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda gpu: 0x1
    assert machine.throttled([machine.state_of("GPU-1")]) == []


def test_state_of_a_gpu_is_unknown_without_its_driver() -> None:
    assert "unknown" in machine.state_of("GPU-that is not there")


def test_times_of_another_gpu_are_refused() -> None:
    here = {"device": "cuda", "gpu": "NVIDIA H200", "cpu": "x", "architecture": "x86_64", "torch": "2.11"}
    assert machine.incomparable(here, {**here, "torch": "2.13"}) is None
    assert "gpu is 'NVIDIA H200', but was 'NVIDIA L4'" in str(machine.incomparable(here, {**here, "gpu": "NVIDIA L4"}))
    assert "device" in str(machine.incomparable(here, {**here, "device": "cpu"}))
    assert machine.incomparable(here, {})


def run_pytest(*options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return warm.run("pytest", "tests/benchmarks", "-p", "no:cacheprovider", *options, cwd=cwd, env=warm.variables())


CANDIDATES = """
import torch
def right(x, y):
    return x + y
def wrong(x):
    return torch.softmax(x, -1) * (1 + 1e-3)
"""


def test_benchmarks_are_recorded_where_the_timed_call_is_right(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(CANDIDATES)
    record = tmp_path / "record.json"
    candidates = ["--candidate", f"vector_add={mine}:right", "--candidate", f"softmax={mine}:wrong"]
    options = ["--device=cpu", "--benchmark-only", "--benchmark-max-time=0.01", f"--benchmark-json={record}"]
    done = run_pytest(*options, *candidates, "--backend=candidate", "-k", "small", f"--report={tmp_path / 'report'}")
    assert "3 failed, 3 passed" in done.stdout
    assert "error over bound" in done.stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert "vector_add-small-float32-forward" in page
    assert "<svg" in page
    made = json.loads(record.read_text())
    assert (tmp_path / "sources" / f"{made['sources']['sha256']}.zip").is_file()
    # A wrong result is not recorded with a time.
    assert [one["param"] for one in made["benchmarks"]] == [
        f"vector_add-small-float32-{direction}-candidate" for direction in DIRECTIONS
    ]
    assert made["machine_info"]["fourfold"]["device"] == "cpu"
    forward = made["benchmarks"][0]
    assert forward["extra_info"]["bytes"] == 3 * 4 * (1 << 14)
    assert 0 < forward["extra_info"]["fraction_of_ceiling"] <= 1
    assert np.isclose(forward["extra_info"]["bytes_per_second"], 3 * 4 * (1 << 14) / forward["stats"]["median"])


def test_a_library_that_has_no_such_kernel_is_left_out_and_says_why() -> None:
    options = [
        "--device=cpu",
        "--benchmark-only",
        "--benchmark-max-time=0.01",
        "--op=scaled_matmul",
        "--dtype=bfloat16",
    ]
    done = run_pytest(*options, "-k", "small and library", "-rs")
    # Forward alone, as there is no gradient.
    assert "library does not take it: NotImplementedError: torch has no block-wise scales on the CPU" in done.stdout
    assert "1 skipped" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.full
def test_a_plain_run_leaves_benchmarks_out() -> None:
    done = run_pytest("--collect-only", "-q", "--op", "vector_add", "--device=cpu")
    assert "deselected" in done.stdout
    assert "test_timed_call_is_right" not in done.stdout
