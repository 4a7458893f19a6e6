"""Kernels that change their arguments in place: right ones pass, and those that write elsewhere or not at all fail."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fourfold
from fourfold import Claims, operation, tensor, values
from fourfold.engine.verdict import Verdict
from fourfold.engine.verification import Trial
from fourfold.grading import judging
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.record import reference

B1, B2, EPS = 0.9, 0.999, 1e-8
FLOAT32 = tensor("n", dtype=torch.float32)


def checked(kernel: Any, record: Any, *only: str, examples: int = 3, **options: Any) -> Verdict:
    claims = Claims(dtypes=options.pop("dtypes", ("float32",)), finite=True, largest=1e6)
    return fourfold.verify(kernel, record, device="cpu", claims=claims, only=only, examples=examples, seed=0, **options)


@operation(
    param=tensor("n"),
    grad=tensor("n"),
    m=FLOAT32,
    v=tensor("n", dtype=torch.float32, kind="positive"),
    weight_decay=values(0.0, 0.1),
    step=values(1, 7),
    sizes={"n": (0, 40)},
    mutates=("param", "m", "v"),
    tried=False,
)
def adam_(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> Any:
    g = grad.float() + weight_decay * param
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    return param - 0.01 * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS), m, v


FORWARD = tuple(f"forward of output {name}" for name in ("param", "m", "v"))


def by_torch(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> None:
    g = grad.float() + weight_decay * param.float()
    m.mul_(B1).add_(g, alpha=1 - B1)
    v.mul_(B2).addcmul_(g, g, value=1 - B2)
    param.copy_(param.float() - 0.01 * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS))


@triton.jit
def adam_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, n, last, s_p, s_g, s_m, s_v, decay, c1, c2, B1: tl.constexpr, B2: tl.constexpr,
    EPS: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program updates one block of the parameter and of both moments where they are."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    p = tl.load(p_ptr + at * s_p, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at * s_g, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at * s_m, mask=inside, other=0.0)
    v = tl.load(v_ptr + at * s_v, mask=inside, other=0.0)
    if not DECOUPLED:
        g += decay * p
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    if DECOUPLED:
        p -= 0.01 * decay * p
    p -= 0.01 * (m / c1) / (tl.sqrt_rn(v / c2) + EPS)
    tl.store(p_ptr + at * s_p, p, mask=at < last)
    tl.store(m_ptr + at * s_m, m, mask=inside)
    tl.store(v_ptr + at * s_v, v, mask=inside)


def by_triton(decoupled: bool = False, last: Callable[[int], int] = lambda n: n, unit: bool = False) -> Any:
    def step_(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> Any:
        n = len(param)
        strides = (1, 1, 1, 1) if unit else [each.stride(0) for each in (param, grad, m, v)]
        if n:
            adam_kernel[(triton.cdiv(n, 16),)](
                param, grad, m, v, n, last(n), *strides, weight_decay, 1 - B1**step, 1 - B2**step, B1, B2, EPS,
                decoupled, 16,
            )  # fmt: skip
        return param, m, v

    return step_


@pytest.mark.full
def test_a_right_optimizer_passes() -> None:
    assert list(adam_.outputs) == ["param", "m", "v"]
    assert [adam_.outputs[name].returns for name in ("param", "m", "v")] == [None, "float32", "float32"]
    assert adam_.differentiable == ()
    for right, only in ((by_torch, (*FORWARD, "memory of output m")), (by_triton(), FORWARD)):
        verdict = checked(right, adam_, *only, examples=2)
        assert verdict.passed, verdict
        assert {outcome.outcome for outcome in verdict.outcomes} == {"passed"}
    assert checked(by_torch, adam_, *FORWARD, dtypes=("bfloat16",)).passed


def writes_nothing(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> None:
    return None


def returns_new_tensors(*arguments: Any, **named: Any) -> Any:
    return adam_(*arguments, **named)


def writes_the_gradient(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> None:
    by_torch(param, grad, m, v, weight_decay, step)
    grad.zero_()


def exchanges_the_memory(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> Any:
    new = adam_(param, grad, m, v, weight_decay, step)
    for old, tensor_ in zip((param, m, v), new):
        old.data = tensor_.to(old.dtype)
    return param


def works_on_contiguous_copies(param: Any, grad: Any, m: Any, v: Any, weight_decay: float = 0.0, step: int = 1) -> Any:
    by_torch(param.contiguous(), grad, m, v, weight_decay, step)


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("wrong", "fails", "reason"),
    [
        (writes_nothing, FORWARD, "the call has written nothing new into param"),
        (returns_new_tensors, FORWARD, "the call changes param and m and v in place, and must return nothing"),
        (writes_the_gradient, FORWARD, "the call changed its input grad"),
        (exchanges_the_memory, FORWARD, "the call gives param other memory"),
        (works_on_contiguous_copies, FORWARD[:1], "the call has written nothing new into param"),
        (by_triton(decoupled=True), FORWARD, "output["),
        (by_triton(last=lambda n: n - n % 16), FORWARD[:1], "output["),
        (by_triton(unit=True), FORWARD, "output["),
    ],
)
def test_a_wrong_optimizer_is_rejected(wrong: Any, fails: Sequence[str], reason: str) -> None:
    verdict = checked(wrong, adam_, *FORWARD)
    assert [outcome.check for outcome in verdict.outcomes if outcome.failure] == [*fails], verdict
    assert reason in str(verdict)


@operation(x=tensor("... n"), slope=values(0.5, 0.01), mutates="x", tried=False)
def leaky_relu_(x: torch.Tensor, slope: float = 0.5) -> None:
    x.copy_(torch.where(x > 0, x, x * slope))


@operation(x=tensor("... n"), slope=values(0.5, 0.01), mutates=["x"], tried=False)
def leaky_relu(x: torch.Tensor, slope: float = 0.5) -> torch.Tensor:
    return torch.where(x > 0, x, x * slope)


def test_a_definition_may_work_in_place_or_return_the_new_values() -> None:
    for make, other in zip(leaky_relu_.examples.values(), leaky_relu.examples.values(), strict=True):
        case = make(DTYPES["float32"])
        found = reference(leaky_relu_, case, DTYPES["float32"])
        wanted = reference(leaky_relu, other(DTYPES["float32"]), DTYPES["float32"])
        assert np.array_equal(found.value, wanted.value, equal_nan=True)
        assert np.array_equal(found.error, wanted.error)
        assert not any("expanded" in layout for name, layout in case.layouts.items() if name == "x")


def test_a_right_kernel_passes_every_check() -> None:
    verdict = checked(lambda x, slope: torch.nn.functional.leaky_relu_(x, slope), leaky_relu_)
    assert verdict.passed, verdict
    made = {outcome.check for outcome in verdict.outcomes if outcome.outcome == "passed"}
    kinds = {"forward", "memory", "sharing", "history", "many calls", "modes", "threads", "offsets", "repeatability"}
    assert {*kinds, "defaults", "autocast", "bad input"} <= made


@triton.jit
def leaky_relu_kernel(
    x_ptr, rows, cols, s_row, s_col, slope, TIMES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program changes one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    for _ in range(TIMES):
        x = tl.load(x_ptr + row * s_row + at * s_col, mask=at < cols, other=0.0)
        tl.store(x_ptr + row * s_row + at * s_col, tl.where(x > 0, x, x * slope), mask=(at < cols) | WHOLE)


def changed(times: int = 1, whole: bool = False) -> Callable[..., Any]:
    def relu_(x: torch.Tensor, slope: float = 0.5) -> torch.Tensor:
        if x.ndim != 2:
            raise ValueError("x must have two axes")
        if x.numel():
            block = triton.next_power_of_2(x.shape[1])
            leaky_relu_kernel[(len(x),)](x, *x.shape, *x.stride(), slope, times, whole, block)
        return x

    return relu_


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("kernel", "check", "reason"),
    [
        (changed(), "forward", ""),
        (lambda x, slope: torch.nn.functional.leaky_relu_(x, slope), "forward", ""),
        (lambda x, slope: x.view(-1).mul_(1.0) if x.numel() == 1 else None, "forward", "["),
        (changed(times=2), "forward", "output["),
        (lambda x, slope: torch.nn.functional.leaky_relu(x, slope), "forward", "must return nothing or x"),
        (lambda x, slope: (x.mul_(2), x.clone()), "forward", "not a new tensor"),
        (
            lambda x, slope: (x.copy_(leaky_relu(x, slope)), 7)[1],
            "forward",
            "must return nothing or x, not int",
        ),
        (changed(whole=True), "memory", ""),
    ],
)
def test_one_argument_is_changed_in_place(kernel: Any, check: str, reason: str) -> None:
    """The kernel writes twice, like a tuner that restores nothing, or into other memory, or returns other things."""
    verdict = checked(kernel, leaky_relu_, check)
    assert verdict.passed == (not reason and check == "forward"), verdict
    assert reason in str(verdict)


# ---- with results of their own, and integers


@operation(
    x=tensor("rows cols"),
    residual=tensor("rows cols"),
    sizes={"cols": (1, 64), "rows": (0, 16)},
    mutates="residual",
    returns={"y": None},
    tried=False,
)
def add_norm_(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    residual.add_(x)
    return residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6)


def normalized(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual.add_(x)
    return residual, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "fails"),
    [
        (normalized, []),
        (lambda x, residual: normalized(x, residual)[1], []),
        (lambda x, residual: normalized(x, residual.clone())[1], ["forward of output residual"]),
        (lambda x, residual: None, ["forward of output residual", "forward of output y"]),
        (lambda x, residual: (residual, normalized(x, residual)[1] * 1.01), ["forward of output y"]),
    ],
)
def test_a_call_may_return_other_outputs_beside_what_it_changes(kernel: Any, fails: list[str]) -> None:
    verdict = checked(kernel, add_norm_, "forward of output residual", "forward of output y")
    assert [outcome.check for outcome in verdict.outcomes if outcome.failure] == fails, verdict


SLOTS = 40


def different_slots(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.permutation(SLOTS)[: shape[0]].astype(dtype)


@operation(
    cache=tensor("slots dim", dtype=torch.int8),
    keys=tensor("tokens dim", dtype=torch.int8),
    slots=tensor("tokens", dtype="int64", make=different_slots),
    sizes={"slots": SLOTS, "tokens": (0, SLOTS), "dim": (1, 64)},
    mutates="cache",
    tried=False,
)
def write_keys_(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    cache[slots] = keys


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "passes"),
    [
        (lambda cache, keys, slots: cache.index_copy_(0, slots, keys), True),
        (lambda cache, keys, slots: cache.scatter_(0, slots[:, None].expand_as(keys), keys), True),
        (lambda cache, keys, slots: cache.index_copy_(0, slots.sort()[0], keys), False),
        (lambda cache, keys, slots: cache.zero_().index_copy_(0, slots, keys), False),
        (lambda cache, keys, slots: [cache[slots].copy_(keys)][1:] or None, False),
    ],
)
def test_integers_are_changed_in_place(kernel: Any, passes: bool) -> None:
    verdict = checked(kernel, write_keys_, "forward")
    assert verdict.passed == passes, verdict


def test_a_kernel_in_a_process_of_its_own_changes_the_same_memory(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(
        "import torch\n"
        "def right(x, slope=0.5):\n    torch.nn.functional.leaky_relu_(x, slope)\n"
        "def wrong(x, slope=0.5):\n    torch.nn.functional.leaky_relu_(x.contiguous(), slope)\n"
    )
    checks = ("forward", "memory", "history", "threads")
    right = checked(f"{file}:right", leaky_relu_, *checks, untrusted=True)
    assert right.passed, right
    wrong = checked(f"{file}:wrong", leaky_relu_, "forward", untrusted=True)
    assert "the call has written nothing new into x" in str(wrong)


@operation(x=tensor("rows n"), out=tensor("rows n"), mutates="out", sizes={"rows": (0, 9), "n": (0, 40)}, tried=False)
def doubled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("kernel", "passes"),
    [
        (lambda x, out: torch.mul(x, 2, out=out), True),
        (lambda x, out: out.copy_(x + x), True),
        (lambda x, out: out.mul_(0).add_(x, alpha=2), False),
        (lambda x, out: out.view(-1)[:-1].copy_((2 * x).reshape(-1)[:-1]) and None, False),
        (lambda x, out: x.mul_(2), False),
    ],
)
def test_a_result_may_be_written_into_an_argument(kernel: Any, passes: bool) -> None:
    """The former values of the argument do not matter: a kernel that adds to them, or multiplies NaN by 0, is wrong."""
    verdict = fourfold.verify(kernel, doubled, device="cpu", only=["forward"], dtypes=["float32"], examples=3, seed=0)
    assert verdict.passed == passes, verdict


def test_a_kernel_that_works_in_place_is_not_timed() -> None:
    """A second call on the same tensors has another result, which is right."""
    kernel = changed()
    trial = Trial.of(kernel, leaky_relu_, None, "cpu", refusals=True, strict_errors=False)
    timed = judging._add_speeds(trial, leaky_relu_, checked(kernel, leaky_relu_, "forward"), None)  # type: ignore[arg-type]
    assert timed.passed
    assert timed.warnings == ("not timed: each call changes x",)
