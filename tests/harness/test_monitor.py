"""Live sampling: the findings of a monitor, its effects on a run, and the files that it writes."""

import itertools
import math
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import warm
from declared_operations import DECLARED, cross_entropy, embedding, rms_norm
from subjects import subject_of

import fourfold
from fourfold.checks.forward import forward_agrees
from fourfold.checks.search import Search
from fourfold.monitoring import judge
from fourfold.monitoring.monitor import CREDIT, DRAWS, MOST_PASSED, LiveMonitor, NotMonitored, WrongResult
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.case_file import BadCaseFile, CaseFile
from fourfold.operations.claims import Claims
from fourfold.operations.layouts import LAYOUTS, closest
from fourfold.operations.outcomes import Failure

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
# The functions of Python and of C of a call that passes: the monitor, its question for torch.compile, and the kernel.
PASSING = ["__call__", "is_dynamo_compiling", "kernel"]
Make = Callable[..., LiveMonitor]
WEIGHT = torch.linspace(-2, 3, 8)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a monitor with a clock, which is closed at the end."""
    made: list[LiveMonitor] = []

    def make(kernel: Any, operation: Any = rms_norm, clock: Any = time.perf_counter, **options: Any) -> LiveMonitor:
        usual = {"folder": tmp_path / "cases", "seed": 0, "budget": math.inf}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", clock)
            made.append(fourfold.monitor(kernel, operation, **{**usual, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def right(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def wrong_for_seven_rows(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return right(x, weight, eps) * (1.01 if len(x) == 7 else 1)


def wrong_for_large_numbers(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return right(x.clamp(-1000, 1000), weight, eps)


def findings(found: LiveMonitor) -> dict[str, int]:
    """Close a monitor; return its counts that are not zero."""
    found.close(SECONDS)
    return {name: found.counts[name] for name in ("judged", "wrong", "imprecise", "refused", "dropped", "errors")}


def only(**counts: int) -> dict[str, int]:
    return {**dict.fromkeys(("judged", "wrong", "imprecise", "refused", "dropped", "errors"), 0), **counts}


# ---- what it finds


@pytest.mark.filterwarnings("ignore::fourfold.monitoring.monitor.WrongResult")
def test_a_kernel_that_is_wrong_for_rare_shapes_is_found_without_any_sample(monitor: Make) -> None:
    failures: list[Any] = []
    found = monitor(wrong_for_seven_rows, rate=0.0, on_failure=failures.append)
    for rows in [4, 4, 7, 4]:
        found(torch.randn(rows, 8), WEIGHT)
    assert findings(found) == only(judged=2, wrong=1)
    ((message, case, path),) = [(each.message, each.case, each.path) for each in failures]
    assert "output[" in message
    assert case["x"].shape == (7, 8)
    assert CaseFile.read(path).message == message
    assert found.counts["unusual"] == 2
    assert "4 calls" in found.summary()


@pytest.mark.filterwarnings("ignore::fourfold.monitoring.monitor.WrongResult")
def test_a_random_call_with_unusual_numbers_is_judged_though_it_is_not_sampled(monitor: Make) -> None:
    found = monitor(wrong_for_large_numbers, rate=1e-12)
    # Only the draws decide: every call is looked at, and none is sampled.
    found._next_drawn, found._draw = 0, lambda first: 0  # type: ignore[method-assign]
    found._random = lambda: 0.5  # type: ignore[method-assign]
    for scale in [1, 1, 1e6, 1e6]:
        found(scale * torch.linspace(-2, 1, 32).reshape(4, 8), WEIGHT)
    assert DRAWS > 2
    assert findings(found) == only(judged=2, wrong=1)


def test_a_wrong_result_is_one_warning_and_files_up_to_their_limit(monitor: Make, tmp_path: Path) -> None:
    found = monitor(lambda x, weight, eps=1e-6: x, rate=1.0, files=2)

    def run() -> dict[str, int]:
        for rows in (3, 4, 5):
            found(torch.randn(rows, 8), WEIGHT)
        return findings(found)

    with pytest.warns(WrongResult, match="fourfold verify KERNEL --as rms_norm --case ") as told:
        counts = run()
    assert counts == only(judged=3, wrong=3)
    assert len(told) == 1
    assert len([*(tmp_path / "cases").iterdir()]) == 2


@pytest.mark.filterwarnings("ignore::fourfold.monitoring.monitor.WrongResult")
@pytest.mark.parametrize("right_one", [True, False])
def test_a_kernel_that_works_in_place_is_compared(monitor: Make, right_one: bool) -> None:
    @fourfold.operation(x=fourfold.tensor("n"), y=fourfold.tensor("n"), mutates="x", tried=False)
    def add_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y if right_one else -y)

    found = monitor(kernel, add_, rate=1.0)
    x = torch.ones(5)
    for _ in range(3):
        assert found(x, torch.full((5,), 2.0)) is x
    assert x.tolist() == [7.0 if right_one else -5.0] * 5
    assert findings(found) == only(judged=3, wrong=0 if right_one else 3)


@pytest.mark.parametrize("name", DECLARED)
def test_no_right_kernel_is_accused(monitor: Make, name: str) -> None:
    operation = DECLARED[name]
    # Storage accuracy is that of torch's own functions.
    found = monitor(operation.definition, operation, rate=1.0, most_calls=1000)
    for make in [*operation.examples.values()][:10]:
        for dtype in (DTYPES["float32"], DTYPES["bfloat16"]):
            case = make(dtype)
            if case.elements <= 1000:
                found(**case.tensors(dtype, "cpu"), **case.parameters)
    counts = findings(found)
    assert counts == only(judged=found.counts["calls"], imprecise=counts["imprecise"])


def test_calls_outside_of_the_operation_and_the_claims_are_refused(monitor: Make) -> None:
    found = monitor(lambda ids, table: table.new_zeros(*ids.shape, table.shape[1]), embedding, rate=1.0)
    found(torch.tensor([5]), torch.zeros(5, 2))
    found(torch.tensor([4]), torch.zeros(5, 2, 1))
    assert findings(found) == only(refused=2)
    assert "numbers outside of 0 to 4" in found.summary()
    found = monitor(lambda logits, target, reduction="mean": logits.sum(), cross_entropy, rate=1.0)
    found(torch.zeros(1, 3), torch.tensor([7]))
    assert findings(found) == only(refused=1)
    found = monitor(lambda x, weight, eps=1e-6: x, claims=Claims(finite=True), rate=1.0)
    found(torch.full((2, 8), torch.nan), WEIGHT)
    found(torch.zeros(2, 8, dtype=torch.float16), WEIGHT)
    assert findings(found) == only(refused=2)


# ---- its effects on a run


def test_a_run_notices_nothing(monitor: Make, recwarn: pytest.WarningsRecorder) -> None:
    states = torch.get_rng_state(), np.random.get_state()
    returned: list[Any] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        returned.append(right(x, weight, eps))
        return returned[-1]

    found = monitor(kernel, rate=0.01)
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    for call in range(2000):
        assert found(x, weight=WEIGHT) is returned[call]
    counts = findings(found)
    assert counts == only(judged=counts["judged"], dropped=counts["dropped"])
    assert 5 < found.counts["sampled"] < 50
    assert found.counts["judged"] > 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert all(map(np.array_equal, states[1][1:2], np.random.get_state()[1:2]))
    assert not [each for each in recwarn if issubclass(each.category, WrongResult | NotMonitored)]


def test_a_share_of_the_calls_is_drawn_and_a_quarter_of_them_sampled(monitor: Make) -> None:
    found = monitor(right, rate=0.02)
    x, drawn = torch.ones(4, 8), Counter[str]()
    found._reason(found._clock(), (x, WEIGHT), {})
    for _ in range(20_000):
        found._calls += 1
        drawn[found._reason(found._clock(), (x, WEIGHT), {})] += 1
    assert sum(drawn.values()) - drawn[""] == pytest.approx(DRAWS * 400, rel=0.15)
    assert drawn["sampled"] == pytest.approx(400, rel=0.2)


class Clock:
    """A clock of a simulated run."""

    now, readings = 1000.0, 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now


def simulate(found: LiveMonitor, clock: Clock, calls: int, *, look: float = 5e-4, call: float = 1e-3) -> list[int]:
    """Make calls, and looks at them, that take some seconds on a clock; return the numbers of the calls looked at."""
    looked_at: list[int] = []
    is_unusual = found._is_unusual

    def take_time(*given: Any) -> bool:
        looked_at.append(found._calls)
        clock.now += look
        return is_unusual(*given)

    found._is_unusual = take_time  # type: ignore[method-assign]
    found._record = lambda *given: None  # type: ignore[method-assign]
    x = torch.ones(4, 8)
    for _ in range(calls):
        found(x, WEIGHT)
        clock.now += call
    return looked_at


@pytest.mark.parametrize(("rate", "look"), [(0.0, 5e-4), (0.0, 1e-2), (0.001, 5e-4), (0.05, 5e-4), (1.0, 5e-4)])
def test_looks_stay_within_the_budget_and_leave_enough_for_the_sample(monitor: Make, rate: float, look: float) -> None:
    clock = Clock()
    found = monitor(right, rate=rate, budget=0.01, clock=clock)
    looked_at = simulate(found, clock, 20_000, look=look)
    assert clock.readings < 10_000  # most calls pass without one
    seconds = clock.now - found._began
    assert found.spent == pytest.approx(look * len(looked_at))
    assert 0.005 * seconds < found.spent <= 0.01 * (seconds + CREDIT) + look
    assert f"{len(looked_at)} looked at" in found.summary()
    assert f"; {found.spent / seconds:.2%} of the time" in found.summary()
    affordable = 0.01 * 1e-3 / look  # the share of the calls that the budget allows to look at
    drawn = min(DRAWS * rate, affordable)
    # The credit that looks leave is spent on drawn calls alone.
    left = (clock.now - found._paid_at) / CREDIT
    assert left < 0.1 if drawn == affordable else left > 0.499 - look / 0.01


def test_looks_recur_with_no_layer_of_a_model(monitor: Make) -> None:
    clock = Clock()
    late = simulate(monitor(right, rate=0.0, budget=0.01, clock=clock), clock, 30_000)[100:]
    assert len({later - call for call, later in itertools.pairwise(late)}) > MOST_PASSED / 2
    layers = Counter(call % 32 for call in late)
    assert len(layers) == 32
    assert max(layers.values()) < 2.5 * len(late) / 32


@pytest.mark.filterwarnings("ignore::fourfold.monitoring.monitor.WrongResult")
def test_a_new_size_is_seen_at_the_first_look_that_the_budget_allows(
    monitor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.thread_time", lambda: 0.0)  # the thread would charge real time to this clock
    clock = Clock()
    found = monitor(wrong_for_seven_rows, rate=0.0, budget=0.001, clock=clock)
    found(torch.ones(4, 8), WEIGHT)
    found._charge(CREDIT, clock.now)
    for _ in range(5 * MOST_PASSED):
        found(torch.ones(7, 8), WEIGHT)
    assert found.counts["looked at"] == 1
    clock.now += 2000 * CREDIT
    for _ in range(2 * MOST_PASSED):
        found(torch.ones(7, 8), WEIGHT)
    assert findings(found) == only(judged=2, wrong=1)


def test_the_time_of_the_monitors_thread_is_charged(monitor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 1.25))
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    found = monitor(right, rate=1.0, clock=Clock())
    found(torch.ones(4, 8), WEIGHT)
    found.close(SECONDS)
    assert found.spent == 0.25


def test_every_change_of_an_argument_is_unusual_once(monitor: Make) -> None:
    found = monitor(right, rate=0.0)
    x = torch.ones(4, 8)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, WEIGHT), {}),
        ((x.T.contiguous().T, WEIGHT), {}),
        ((x.double(), WEIGHT), {}),
        ((x[:3], WEIGHT), {}),
        ((x[:3], WEIGHT, 1e-6), {}),
        ((x[:3], WEIGHT, 1e-5), {}),
        ((x[:3], WEIGHT, None), {}),
        ((x[:3], WEIGHT, x), {}),
        ((x[:3], WEIGHT), {"eps": 1e-6}),
        ((x[:3],), {"weight": WEIGHT}),
        (([x, x[:3]], WEIGHT), {}),
        (([x, x[:2]], WEIGHT), {}),
    ]
    for args, named in calls:
        assert [found._reason(found._clock(), args, named) for _ in range(3)] == ["unusual", "", ""]
    for args, named in calls:
        assert found._reason(found._clock(), args, named) == ""


def test_a_call_that_passes_makes_no_other_function_call(monitor: Make) -> None:
    def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x

    functions: list[str] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            functions.append(frame.f_code.co_name if event == "call" else argument.__name__)

    found = monitor(kernel, rate=0.0, budget=1e-9)
    found._record = lambda *given: None  # type: ignore[method-assign]
    x = torch.ones(4, 8)
    found(x, WEIGHT, 1e-6)
    found._next = found._calls + 2
    sys.setprofile(count)
    try:
        found(x, WEIGHT, 1e-6)
    finally:
        sys.setprofile(None)
    assert functions[: len(PASSING)] == PASSING
    assert functions[len(PASSING) :] == ["setprofile"]


def test_an_exception_of_the_kernel_is_the_runs_and_leaves_no_record(monitor: Make) -> None:
    def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        raise OSError("of the kernel")

    found = monitor(kernel, rate=1.0)
    with pytest.raises(OSError, match="of the kernel"):
        found(torch.ones(4, 8), WEIGHT)
    assert findings(found) == only()
    assert found._bytes == 0


def test_records_beyond_the_queue_and_the_bytes_are_dropped(monitor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def wait(self: Any, content: bytes) -> dict[str, str]:
        busy.set()
        go_on.wait(SECONDS)
        return {"status": "right", "message": "", "cause": ""}

    monkeypatch.setattr(judge.JudgeProcess, "judge", wait)
    found = monitor(right, rate=1.0, most_calls=1, most_bytes=5000)
    found(torch.ones(4, 8), WEIGHT)
    assert busy.wait(SECONDS)
    for _ in range(3):
        found(torch.ones(4, 8), WEIGHT)
    assert found.counts["dropped"] == 2
    go_on.set()
    assert findings(found) == only(judged=2, dropped=2)
    large = monitor(right, rate=1.0, most_bytes=5000)
    large(torch.ones(400, 8), WEIGHT)
    assert findings(large) == only(dropped=1)


def test_a_judge_that_dies_is_counted_and_started_again(monitor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "judgement", lambda subject, case: os.kill(os.getpid(), 9))
    found = monitor(right, rate=1.0)
    found(torch.ones(4, 8), WEIGHT)
    while not found.counts["errors"]:
        found._thread.join(0.01)
    monkeypatch.undo()
    found(torch.ones(4, 8), WEIGHT)
    assert findings(found) == only(judged=1, errors=1)


def test_under_torch_compile_calls_pass_through_and_a_warning_says_so(monitor: Make) -> None:
    found = monitor(right, rate=1.0)
    compiled = torch.compile(lambda x: found(x, WEIGHT) * 2, backend="eager", fullgraph=True)
    x = torch.randn(4, 8)
    with pytest.warns(NotMonitored, match=r"torch\.compile"):
        assert torch.equal(compiled(x), right(x, WEIGHT) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), right(x, WEIGHT) * 2)
        assert torch.equal(torch.compile(lambda x: found(x, WEIGHT), backend="eager")(x), right(x, WEIGHT))
    assert findings(found) == only()


def test_while_a_graph_is_captured_calls_pass_through(monitor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = monitor(right, rate=1.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(NotMonitored, match="CUDA graphs"):
        found(torch.ones(4, 8), WEIGHT)
    assert found.counts["passed over"] == 1
    assert findings(found) == only()


def test_after_its_end_it_is_the_kernel(monitor: Make) -> None:
    with monitor(right, rate=1.0) as found:
        pass
    assert torch.equal(found(torch.ones(4, 8), WEIGHT), right(torch.ones(4, 8), WEIGHT))
    assert findings(found) == only()
    assert not found._thread.is_alive()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rate must be between 0 and 1, not 2"):
        fourfold.monitor(right, rms_norm, rate=2)
    for budget in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"budget must be above 0, not {budget}"):
            fourfold.monitor(right, rms_norm, budget=budget)
    with pytest.raises(TypeError, match="kernel must be a function, not 3"):
        fourfold.monitor(3, rms_norm)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operation: there is no 'softmux'"):
        fourfold.monitor(right, "softmux")


# ---- the files


def a_file(**parameters: Any) -> CaseFile:
    x = np.linspace(-2, 2, 6 * 9 * 11).astype(np.float32).reshape(6, 9, 11)
    x[4, 7, 5] = 2345.678
    inputs = {"x": x, "weight": np.linspace(1, 2, 11, dtype=np.float32)}
    return CaseFile(operation="rms_norm", dtype="float32", case=Case(inputs, np.zeros(()), {"eps": 1e-6, **parameters}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_holds_all_of_a_case(dtype: str) -> None:
    x = np.array([[1.5, np.nan], [-0.0, np.inf]]).astype(DTYPES[dtype].numpy)
    case = Case({"x": x, "ids": np.array([3])}, x, {"a": (1, (2.5, None)), "b": [True, "c"]}, {"x": "transposed"})
    found = CaseFile.decode(CaseFile(operation="o", dtype=dtype, case=case, results={"returned": x}).encode())
    assert found.case.digest == case.digest
    assert repr(found.case.parameters) == repr(case.parameters)
    assert found.results["returned"].tobytes() == x.tobytes()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    content, path = a_file().encode(), tmp_path / "x.case.npz"
    middle = len(content) // 2
    damaged = bytes([*content[:middle], content[middle] ^ 255, *content[middle + 1 :]])
    for text in (b"", content[:-500], content[500:], damaged, b"no archive"):
        path.write_bytes(text)
        with pytest.raises(BadCaseFile, match=r"x\.case\.npz: expected a file that fourfold.monitor wrote"):
            CaseFile.read(path)
    with pytest.raises(BadCaseFile, match="No such file"):
        CaseFile.read(tmp_path / "y.case.npz")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_tensor_is_recognised(name: str) -> None:
    tensor = LAYOUTS[name](torch.arange(45.0).reshape(3, 3, 5) if name != "expanded" else torch.ones(4, 5))
    assert closest(tensor) == name


def test_a_case_from_a_file_is_made_as_small_as_its_mistake() -> None:
    subject = subject_of(rms_norm, wrong_for_large_numbers)
    search = Search(examples=25, case=a_file().case, seed=0)
    with pytest.raises(Failure, match=r"output\[0, 0, 0\]"):
        forward_agrees(subject, search)
    assert search.failing is not None
    assert search.failing["x"].shape == (1, 1, 2)
    assert np.abs(search.failing["x"]).max() == 2048
    right_one = Search(examples=25, case=a_file().case, seed=0)
    forward_agrees(subject_of(rms_norm, rms_norm.definition), right_one)
    assert right_one.ran == 1


@pytest.mark.full
def test_fourfold_verify_repeats_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.case.npz").write_bytes(a_file().encode())
    (tmp_path / "b.case.npz").write_bytes(a_file().encode()[:-99])
    (tmp_path / "kernels.py").write_text(
        "import torch\n\n\ndef kernel(x, weight, eps=1e-6):\n"
        "    return torch.nn.functional.rms_norm(x.clamp(-1000, 1000), x.shape[-1:], weight, eps)\n"
    )

    def verify(file: str, operation: str = "rms_norm") -> Any:
        command = ["fourfold", "verify", "kernels.py:kernel", "--as", operation, "--case", file, "-k", "test_output"]
        return warm.run(*command, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})

    done = verify("a.case.npz")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "x[1, 1, 2]" in done.stdout
    assert "--case a.case.npz" in done.stdout
    assert "case b.case.npz: expected a file that fourfold.monitor wrote" in verify("b.case.npz").stderr
    assert "--case a.case.npz: expected a kernel of rms_norm, found softmax" in verify("a.case.npz", "softmax").stderr
