"""The checks of state, modes, threads and parameters: what they accept, and their remarks beside the verdict."""

import itertools
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from declared_operations import cross_entropy
from subjects import subject_of

import fourfold
from fourfold import Claims, Verdict, lengths, offsets, tensor, values
from fourfold.checks import threads
from fourfold.checks.history import change_values
from fourfold.checks.many_calls import CONFIDENCE, excluded_rate
from fourfold.checks.parameters import equal_defaults
from fourfold.checks.search import Search
from fourfold.instruments import concurrent_calls, costs
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure

Tensor = torch.Tensor


@fourfold.operation(x=tensor("... cols"), eps=values(1e-6, 1e-2), scale=values(1.0, 2.0), sizes={"cols": (1, None)})
def rms(x, eps=1e-6, scale=1.0):
    return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


USUAL: dict[str, Any] = {"dtypes": ("float32",), "finite": True, "largest": 1e3}


def judged(implementation: Callable[..., Tensor], *only: str, **options: Any) -> Verdict:
    options = {"claims": Claims(**USUAL), "device": "cpu", **options}
    return fourfold.verify(implementation, rms, only=only, examples=10, seed=1, **options)


def test_first_call_is_compared() -> None:
    calls: list[Tensor] = []

    def wrong_at_first(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        calls.append(x)
        return rms(x, eps, scale) if len(calls) > 1 else x - 1

    assert not judged(wrong_at_first, "forward").passed


# ---- many calls


@pytest.mark.parametrize("calls", [1, 59, 400])
def test_excluded_rate_would_have_shown_with_the_confidence(calls: int) -> None:
    assert (1 - excluded_rate(calls)) ** calls == pytest.approx(1 - CONFIDENCE)


def test_verdict_says_how_many_calls_were_made_and_what_rate_they_exclude() -> None:
    verdict = judged(rms.definition, "many calls")
    assert verdict.passed, str(verdict)
    (outcome,) = verdict.outcomes
    (remark,) = outcome.remarks
    assert remark.startswith("no differing call in ")
    assert "is excluded with 95% confidence" in str(verdict)
    assert remark in verdict.json()


@pytest.mark.full(but=1)
@pytest.mark.parametrize("check", ["many calls", "memory", "history"])
def test_other_bits_are_no_failure_where_they_are_not_claimed(check: str) -> None:
    calls = itertools.count()

    def sometimes_rounded_otherwise(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        result = rms(x, eps, scale)
        return result if next(calls) % 3 else result * (1 + 2**-23)

    verdict = judged(sometimes_rounded_otherwise, check)
    assert not verdict.passed
    assert "depending on memory" not in str(verdict)
    verdict = judged(sometimes_rounded_otherwise, check, claims=Claims(**USUAL, deterministic=False))
    assert verdict.passed, str(verdict)
    if check == "many calls":
        assert "no wrong call" in str(verdict)


_former: list[Tensor] = []


class KeepsCotangents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        _former.append(grad_output)
        return grad_output.clone()


def keeps_its_results(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    _former.append(rms(x, eps, scale))
    return _former[-1].clone()


def keeps_cotangents(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    return rms(KeepsCotangents.apply(x), eps, scale)


def gives_views(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    """Return a view, which keeps its base alive."""
    whole = torch.stack([x.detach(), rms(x.detach(), eps, scale)])
    return rms(x, eps, scale) if x.requires_grad else whole[1]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("kernel", "count"), [(keeps_its_results, 400), (keeps_cotangents, 50), (gives_views, None)])
def test_memory_that_grows_with_each_call_is_found(kernel: Callable[..., Tensor], count: int | None) -> None:
    verdict = judged(kernel, "many calls")
    assert verdict.passed is (count is None)
    assert verdict.passed or f"400 calls on the same tensors have left {count} more tensors alive" in str(verdict)


def test_memory_that_was_not_given_is_told_though_other_bits_are_allowed() -> None:
    def with_unwritten(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        return rms(x, eps, scale) + torch.empty(1)[0].nan_to_num(0.0)

    assert not judged(with_unwritten, "memory", claims=Claims(**USUAL, deterministic=False)).passed


# ---- repeatability


def test_table_of_former_results_does_not_hide_that_calls_differ() -> None:
    factors: dict[bytes, float] = {}

    def as_before(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        values = x.detach().contiguous().numpy().tobytes()
        return rms(x, eps, scale) * factors.setdefault(values, 1 + random.getrandbits(16) * 2**-23)

    for _ in range(2):  # the second time the table holds the results of this process's calls
        random.seed(1)
        verdict = judged(as_before, "repeatability")
        assert "the output differs between calls in two new processes" in str(verdict)
    assert judged(rms.definition, "repeatability").passed


def test_calls_that_end_their_new_process_are_remarked() -> None:
    forks, forks_of_judge = list[int](), list[int]()
    os.register_at_fork(after_in_child=lambda: forks.append(1))

    def only_here(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        forks_of_judge[:] = forks_of_judge or [len(forks)]
        if len(forks) > forks_of_judge[0]:
            os._exit(1)
        return rms(x, eps, scale)

    verdict = judged(only_here, "repeatability")
    assert verdict.passed
    assert str(verdict).count("calls in new processes ended without a result, and were not compared") == 1


def test_table_of_former_gradients_does_not_hide_that_they_differ() -> None:
    factors: dict[bytes, float] = {}

    class AsBefore(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            values = grad_output.contiguous().numpy().tobytes()
            return grad_output * factors.setdefault(values, 1 + random.getrandbits(16) * 2**-23)

    def as_before(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        return rms(AsBefore.apply(x), eps, scale)

    def by_autotuning(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        fastest.setdefault(x.shape, random.random())
        return rms(x, eps, scale)

    fastest: dict[torch.Size, float] = {}
    assert "gradient of x differs between calls in two new processes" in str(judged(as_before, "repeatability"))
    assert judged(by_autotuning, "repeatability").passed


# ---- interleaving


def test_second_backward_pass_may_be_refused() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.arguments, ctx.passes = (eps, scale), 0
            return rms(x, eps, scale)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:
            ctx.passes += 1
            if ctx.passes > 1:
                raise RuntimeError("one pass only")
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return *torch.autograd.grad(rms(x, *ctx.arguments), [x], grad_output), None, None

    def once(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        return Once.apply(x, eps, scale)

    verdict = judged(once, "interleaving")
    assert verdict.passed, str(verdict)
    assert "RuntimeError: one pass only" in verdict.refusals


class OfTheLastSize(torch.autograd.Function):
    """A kernel whose backward pass takes the number of elements from the last call that had any."""

    size = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        OfTheLastSize.size = x.numel() or OfTheLastSize.size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * (OfTheLastSize.size / max(grad_output.numel(), 1))


def test_call_of_other_shapes_between_two_of_a_loss_is_not_empty() -> None:
    def of_the_last_size(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        return cross_entropy.definition(OfTheLastSize.apply(logits), target, reduction)

    options: dict[str, Any] = {"device": "cpu", "only": ["interleaving"], "examples": 2, "seed": 1}
    options["claims"] = Claims(**USUAL)
    assert "backward of a call of other shapes, made between others: gradient of logits" in str(
        fourfold.verify(of_the_last_size, cross_entropy, **options)
    )
    assert fourfold.verify(cross_entropy.definition, cross_entropy, **options).passed


# ---- gradcheck


class OfSavedRoots(torch.autograd.Function):
    """A kernel whose backward pass consists of torch's functions, and takes the reciprocal roots for constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:
        ctx.roots = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x)
        ctx.eps, ctx.scale = eps, scale
        return scale * x * ctx.roots

    @staticmethod
    def gradient(x: Tensor, roots: Tensor, g: Tensor) -> tuple[Tensor, None, None]:
        return roots * g - x * roots**3 * (g * x).mean(-1, keepdim=True), None, None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        return OfSavedRoots.gradient(*ctx.saved_tensors, ctx.roots, grad_output * ctx.scale)


class OfComputedRoots(OfSavedRoots):
    """A kernel whose backward pass computes the roots again."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        roots = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        return OfSavedRoots.gradient(x, roots, grad_output * ctx.scale)


class OfDetachedInput(OfSavedRoots):
    """A kernel whose backward pass takes `x` for a constant, too."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return OfSavedRoots.gradient(x.detach(), ctx.roots, grad_output * ctx.scale)


class OnceDifferentiable(OfDetachedInput):
    """The same, but it refuses to be differentiated twice."""

    backward = staticmethod(torch.autograd.function.once_differentiable(OfDetachedInput.backward))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (OfSavedRoots, "gradcheck of the gradient of x along x: "),
        (OfComputedRoots, ""),
        (OfDetachedInput, "gradient of x along x, which is not in the graph"),
        (OnceDifferentiable, ""),
    ],
)
def test_second_derivative_that_is_wrong_or_left_out_of_the_graph_is_found(function: Any, says: str) -> None:
    def kernel(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        return function.apply(x, eps, scale)

    verdict = judged(kernel, "gradcheck", claims=Claims(dtypes=("float64",)))
    assert verdict.passed is not bool(says), str(verdict)
    assert says in str(verdict)
    assert ("gradient of x along x" in str(verdict)) is bool(says)


# ---- modes


def test_other_kernel_where_gradients_are_wanted_is_right_for_a_candidate() -> None:
    def another_order(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        return rms(x, eps, scale) if torch.is_grad_enabled() else rms(x.flip(-1), eps, scale).flip(-1)

    verdict = judged(another_order, "modes", "many calls", "threads", "history")
    assert verdict.passed, str(verdict)


_results: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


def in_one_buffer_without_gradients(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    result = rms(x, eps, scale)
    return result if torch.is_grad_enabled() else _results.setdefault((x.shape, x.dtype), result).copy_(result)


def coarse_in_half_without_gradients(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    result = rms(x, eps, scale)
    return result * 1.1 if x.dtype is torch.bfloat16 and not torch.is_grad_enabled() else result


def of_the_default_dtype(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
    return rms(x, eps, scale) + torch.zeros(1)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("wrong", "check", "dtype", "says"),
    [
        (in_one_buffer_without_gradients, "many calls", "float32", "was changed by a later call"),
        (coarse_in_half_without_gradients, "modes", "bfloat16", r"under (no_grad|inference_mode, .*): output\["),
        (of_the_default_dtype, "modes", "float32", "where torch's default dtype is float64: output has dtype"),
    ],
)
def test_fault_of_one_mode_is_found(wrong: Callable[..., Tensor], check: str, dtype: str, says: str) -> None:
    assert re.search(says, str(judged(wrong, check, claims=Claims(**USUAL | {"dtypes": (dtype, "float64")}))))


def test_kernel_for_float32_alone_may_create_results_in_the_default_dtype() -> None:
    assert judged(of_the_default_dtype, "modes").passed


def test_results_rounded_as_autocast_rounds_are_right() -> None:
    def by_a_product(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        ones = x.new_ones(x.shape[-1], 1)
        return scale * x * torch.rsqrt(x.square() @ ones / x.shape[-1] + eps)

    verdict = judged(by_a_product, "autocast")
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_far_from_what_autocast_rounds_are_wrong(dtype: torch.dtype) -> None:
    def another(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        is_wrong = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is dtype
        return rms(x, eps, scale * 1.25 if is_wrong else scale)

    verdict = judged(another, "autocast")
    assert f"under autocast to {dtype}: ".replace("torch.", "") in str(verdict)


# ---- threads


def test_buffer_that_threads_share_without_gradients_is_found() -> None:
    scratch = torch.empty(0)

    def by_a_buffer(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        if x.requires_grad:
            return rms(x, eps, scale)
        scratch.resize_(x.shape).copy_(x)
        time.sleep(0)
        return rms(scratch.clone(), eps, scale)

    verdict = judged(by_a_buffer, "threads")
    assert f"where {threads.THREADS} threads call at once: output" in str(verdict)


def test_kernel_that_holds_a_lock_is_accepted() -> None:
    lock = threading.Lock()
    scratch = torch.empty(0)

    def locked(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        with lock:
            scratch.resize_(x.shape).copy_(x.detach())
            result = rms(x, eps, scale)
            return result + 0 * scratch.sum().nan_to_num(0, 0, 0)

    verdict = judged(locked, "threads")
    assert verdict.passed, str(verdict)


def test_threads_that_never_return_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent_calls, "PATIENCE", 0.05)
    ended, waiting = threading.Event(), []

    def waits(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            waiting.append(threading.current_thread())
            ended.wait()
        return rms(x, eps, scale)

    subject = subject_of(rms, waits)
    try:
        with pytest.raises(Failure, match="of 4 threads that call at once some never return"):
            threads.threads_do_not_matter(subject, Search(examples=1, brief=True))
    finally:
        ended.set()
        for thread in waiting:
            thread.join()


class Slow:
    """A fake thread that ends a call, or itself, each time its patience is over.

    Args:
        calls: the number of calls that it ends before it waits forever, or ends itself if `ends`.
    """

    def __init__(self, calls: int, ends: bool) -> None:
        self.left, self.ends, self.found = calls, ends, []

    def is_alive(self) -> bool:
        return bool(self.left) or not self.ends

    def join(self, patience: float) -> None:
        if self.left:
            self.left -= 1
            self.found.append(patience)


@pytest.mark.parametrize("last", [True, False])
def test_slow_threads_are_waited_for_as_long_as_they_end_calls(last: bool) -> None:
    slow = [Slow(calls=2, ends=True), Slow(calls=0, ends=True), Slow(calls=3, ends=last)]
    assert concurrent_calls._join_all(slow, [each.found for each in slow], 0.0) == last
    assert [each.left for each in slow] == [0, 0, 0]


# ---- the number of calls


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let seconds pass between any two looks at the clock."""
    for name in ("process_time", "thread_time"):
        ticks = itertools.count(step=2.0)
        monkeypatch.setattr(time, name, ticks.__next__)


@pytest.mark.usefixtures("busy")
def test_a_busy_machine_makes_as_many_calls() -> None:
    made: dict[str, int] = {}

    def counted(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        made[name] = made.get(name, 0) + 1
        return rms(x, eps, scale)

    for name in ("many calls", "threads"):
        verdict = judged(counted, name)
        assert verdict.passed, str(verdict)
    assert made["many calls"] > 400
    assert made["threads"] >= 4 * 10 * 4  # threads, calls of each, cases


def test_fewer_calls_are_made_of_what_calls_many_functions() -> None:
    def nothing() -> None:
        """Do nothing."""

    def interpreted(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        for _ in range(8000 // 2):
            nothing()
        return rms(x, eps, scale)

    found = [judged(interpreted, "many calls").outcomes[0].remarks[0].partition(":")[0] for _ in range(2)]
    assert found == ["no differing call in 200 (25 of them with a backward pass)"] * 2


@pytest.mark.parametrize("calls", [1, 100, 400])
def test_number_of_calls_changes_with_the_cost_in_steps(calls: int) -> None:
    cost = 1000 / calls
    assert {costs.calls_within(1000, cost * factor, 400) for factor in (0.51, 0.75, 1)} == {calls}
    assert costs.calls_within(1000, cost * 1.01, 400) == max(calls // 2, 1)


@pytest.mark.parametrize("check", ["many calls", "threads"])
def test_calls_that_take_too_long_are_not_reached(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_SECONDS", -1.0)
    verdict = judged(rms.definition, check)
    assert verdict.passed, str(verdict)
    assert re.search(r"not reached: \d+ calls take longer than -1 s: 1 cases, the smallest with x", str(verdict))
    wrong = itertools.count()
    assert not judged(lambda x, eps, scale: rms(x, eps, scale) + next(wrong), check).passed


# ---- parameters


def kernels_with_default(default: float) -> list[Callable[..., Tensor]]:
    """Return kernels that state this default of eps, each in another way."""

    def by_name(x: Tensor, eps: float = default, scale: float = 1.0) -> Tensor:
        return rms(x, eps, scale)

    def in_order(a: Tensor, epsilon: float = default, factor: float = 1.0) -> Tensor:
        return rms(a, epsilon, factor)

    class AsModule(torch.nn.Module):
        def forward(self, x: Tensor, eps: float = default, scale: float = 1.0) -> Tensor:
            return rms(x, eps, scale)

    def by_none(x: Tensor, eps: float | None = None, scale: float = 1.0) -> Tensor:
        return rms(x, default if eps is None else eps, scale)

    return [by_name, in_order, AsModule(), by_none]


def without_defaults(a: Tensor, epsilon: float, factor: float) -> Tensor:
    return rms(a, epsilon, factor)


def of_keywords(x: Tensor, **parameters: Any) -> Tensor:
    return rms(x, **parameters)


@pytest.mark.parametrize("right", [*kernels_with_default(1e-6), without_defaults, of_keywords])
def test_defaults_that_are_the_definitions_are_accepted(right: Callable[..., Tensor]) -> None:
    verdict = judged(right, "defaults")
    assert verdict.passed, str(verdict)
    assert verdict.examples >= 9  # each parameter alone, and both
    assert not verdict.refusals
    assert not verdict.warnings


@pytest.mark.parametrize(("wrong", "own"), zip(kernels_with_default(1e-3), ["0.001"] * 3 + ["None"]))
def test_default_that_gives_another_result_is_named_with_both_values(wrong: Callable[..., Tensor], own: str) -> None:
    verdict = judged(wrong, "defaults")
    assert f"with eps left out: its default is {own}, the definition's is 1e-06: output" in str(verdict)


@pytest.mark.parametrize(("default", "equal"), [((1, None), True), ((1, 2), False), ((1,), False), (1, False)])
def test_tuples_are_compared_by_their_elements(default: Any, equal: bool) -> None:
    assert equal_defaults(default, (1, None)) == equal


@pytest.mark.full
def test_default_that_no_case_tells_apart_is_a_warning() -> None:
    def nearly(x: Tensor, eps: float = 1e-6 * (1 + 2**-40), scale: float = 1.0) -> Tensor:
        return rms(x, eps, scale)

    verdict = judged(nearly, "defaults")
    assert verdict.passed, str(verdict)
    assert "no case showed a difference" in verdict.warnings[0]


def test_ranges_of_a_declared_operation_are_drawn_from() -> None:
    drawn = []

    def noted(x: Tensor, eps: float = 1e-6, scale: float = 1.0) -> Tensor:
        drawn.append(eps)
        return rms(x, eps, scale)

    ranged = fourfold.operation(
        x=tensor("... cols"), eps=values(1e-6), scale=values(1.0), sizes={"cols": (1, None)}, ranges={"eps": (0, 1)}
    )(rms.definition)
    verdict = fourfold.verify(noted, ranged, claims=Claims(**USUAL), device="cpu", only=("parameters",), seed=1)
    assert verdict.passed, str(verdict)
    assert all(0 < eps < 1 for eps in drawn)
    assert math.log10(max(drawn)) - math.log10(min(drawn)) > 4


# ---- integers


@fourfold.operation(
    x=tensor("total"),
    starts=offsets("batch", total="total"),
    counts=lengths("batch", total="total"),
    index=tensor("rows", dtype="int64", high="total"),
    made=tensor("rows", dtype="int64", make=lambda rng, shape, dtype: np.arange(*shape, dtype=dtype)),
    sizes={"total": (1, None), "rows": (2, None), "batch": (2, None)},
)
def picked(x, starts, counts, index, made):
    return x[index] + 0 * (starts.sum() + counts.sum() + made.sum())


def test_other_integers_are_as_valid() -> None:
    case = Case(
        inputs={
            "x": np.arange(6, dtype=np.float32),
            "starts": np.array([0, 1, 1, 6]),
            "counts": np.array([1, 0, 5]),
            "index": np.array([0, 5, 2]),
            "made": np.arange(3),
        },
        grad_output=np.ones(3, np.float32),
    )
    subject = subject_of(picked, picked.definition)
    other = change_values(subject, case)
    assert other["starts"].tolist() == [0, 5, 5, 6]
    assert other["counts"].tolist() == [5, 0, 1]
    assert other["index"].tolist() == [2, 5, 0]
    assert other["made"].tolist() == [0, 1, 2]  # of which nothing is known
    assert other["x"].tolist() == (case["x"] / 2).tolist()
