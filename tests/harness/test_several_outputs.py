"""Definitions whose result has another dtype than their inputs, or that return several results."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from samples import sampled
from subjects import subject_of

import fourfold
from fourfold import backends, operation, result, tensor, verify
from fourfold.checks import catalogue
from fourfold.checks.catalogue import checks_of
from fourfold.checks.outputs import select_output
from fourfold.checks.records import operations
from fourfold.engine.verdict import Verdict
from fourfold.inputs.large_cases import LargeCases
from fourfold.numerics.bounded import OPEN, Bounded
from fourfold.numerics.compare import Disagreement, compare, expectation
from fourfold.numerics.dtypes import DTYPES, INTEGERS, returned
from fourfold.numerics.torch_adapter.evaluate import backward_of
from fourfold.operations.case import Case
from fourfold.operations.claims import NO_CLAIMS, Claims
from fourfold.operations.outputs import parts_of, row_of
from fourfold.operations.record import reference, reference_gradients

BFLOAT16 = "bfloat16"


@operation(x=tensor("rows cols"), sizes={"cols": (1, 64), "rows": (0, 8)}, returns="compute")
def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return x.logsumexp(-1)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise TypeError("x must be of a floating-point dtype")
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return wide.logsumexp(-1)


@operation(
    x=tensor("rows cols"),
    residual=tensor("rows cols"),
    sizes={"cols": (1, 64), "rows": (0, 8)},
    returns={"y": None, "total": None, "scale": result("compute", gradient=False)},
    batched={"x": 1, "residual": 1},
)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    scale = torch.rsqrt(total.square().mean(-1) + 1e-6)
    return total * scale[..., None], total, scale


def fused(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(wide) + residual.to(wide)
    scale = torch.rsqrt(total.square().mean(-1) + 1e-6)
    return (total * scale[..., None]).to(x.dtype), total.to(x.dtype), scale.detach()


class _Twice(torch.autograd.Function):
    """A function that returns 2 x and 3 x, and whose gradient ignores the second output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        first, second = grads
        alone = not bool(first.any()) or not bool(second.any())
        return 2 * first + 3 * second if alone else 2 * first


def failed(verdict: Verdict) -> set[str]:
    return {outcome.check for outcome in verdict.outcomes if outcome.failure is not None}


@pytest.mark.parametrize("dtype", sampled(DTYPES, "bfloat16"))
def test_a_result_of_the_declared_dtype_passes(dtype: str) -> None:
    only = ["forward", "backward", "memory", "history", "repeatability"]
    verdict = verify(in_float32, logsumexp, only=only, dtypes=[dtype], examples=2, seed=0, device="cpu")
    assert verdict.passed, verdict
    assert {*only} <= {outcome.check for outcome in verdict.outcomes if outcome.outcome == "passed"}


def test_a_result_of_another_dtype_fails() -> None:
    options = {"dtypes": [BFLOAT16], "only": ["forward"], "examples": 3, "device": "cpu"}
    verdict = verify(lambda x: in_float32(x).to(x.dtype), logsumexp, **options)
    assert "has dtype torch.bfloat16, expected torch.float32" in str(verdict)


def test_a_wide_result_of_half_inputs_is_held_to_its_own_digits() -> None:
    """A result that is rounded to the inputs' dtype in between fails, though it is right for a result of that dtype."""
    rounded = verify(
        lambda x: in_float32(x).to(x.dtype).float(), logsumexp, dtypes=[BFLOAT16], only=["forward"], device="cpu"
    )
    assert not rounded.passed
    case = logsumexp.examples["rows_1"](DTYPES[BFLOAT16])
    assert case.grad_output.dtype == np.float32
    assert reference(logsumexp, case, DTYPES[BFLOAT16]).error.max() < 1e-4


def test_dtypes_of_results_follow_the_tested_one() -> None:
    names = {name: returned(dtype, "compute").name for name, dtype in DTYPES.items()}
    assert names == {"float16": "float32", BFLOAT16: "float32", "float32": "float32", "float64": "float64"}
    assert returned(DTYPES["float64"], "float32").name == "float32"
    assert returned(DTYPES["float16"], None) is DTYPES["float16"]


def test_a_narrow_result_is_not_differentiated_numerically() -> None:
    @operation(x=tensor("rows cols"), sizes={"cols": (1, 8), "rows": (1, 4)}, returns="float32")
    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    checks = ["forward", "backward", "gradcheck"]
    verdict = verify(lambda x: x.sum(-1).float(), narrow, dtypes=["float64"], only=checks, examples=4, device="cpu")
    assert verdict.passed, verdict
    (told,) = [outcome.reason for outcome in verdict.outcomes if outcome.check == "gradcheck"]
    assert told
    assert "too coarse" in told


def test_a_wide_cotangent_is_rounded_when_it_is_read() -> None:
    @operation(x=tensor("cols"), sizes={"cols": (1, 8)}, returns="float64")
    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    case = copied.examples["cols_1"](DTYPES["float32"])
    third = np.full_like(case.grad_output, 1 / 3)
    assert third.dtype == np.float64
    gradient = reference_gradients(copied, replace(case, grad_output=third), DTYPES["float32"])["x"]
    assert (gradient.error >= 2**-25 / 3).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", sampled(["float16", "float32", "float64"], "float32"))
def test_several_outputs_pass(dtype: str) -> None:
    verdict = verify(fused, add_rms_norm, dtypes=[dtype], examples=5, seed=1, device="cpu")
    assert verdict.passed, verdict
    checks = {outcome.check for outcome in verdict.outcomes if outcome.outcome == "passed"}
    wanted = {
        f"{check} of output {name}" for check in ("forward", "memory", "batch") for name in ("y", "total", "scale")
    }
    assert {*wanted, "backward of output y", "backward of output total", "backward of all outputs"} <= checks
    assert "backward of output scale" not in {outcome.check for outcome in verdict.outcomes}


def swapped(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, total, scale = fused(x, residual)
    return total, y, scale


def of_the_input(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, _, scale = fused(x, residual)
    return y, x * 1, scale


def in_half(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, total, scale = fused(x, residual)
    return y, total, scale.half().to(scale.dtype)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("wrong", "checks"),
    [
        (swapped, {"forward of output y", "forward of output total"}),
        (of_the_input, {"forward of output total"}),
        (in_half, {"forward of output scale"}),
    ],
)
def test_each_output_is_compared(wrong: Callable[..., Any], checks: set[str]) -> None:
    each = [f"forward of output {name}" for name in ("y", "total", "scale")]
    verdict = verify(wrong, add_rms_norm, dtypes=["float32"], only=each, examples=4, seed=0, device="cpu")
    assert {check for check in failed(verdict) if check.startswith("forward")} == checks


@pytest.mark.parametrize("wrong", [lambda x, residual: x + residual, lambda x, residual: fused(x, residual)[:2]])
def test_too_few_outputs_fail_and_are_no_refusal(wrong: Callable[..., Any]) -> None:
    first = ["forward of output y"]
    verdict = verify(wrong, add_rms_norm, dtypes=["float32"], only=first, examples=3, seed=0, device="cpu")
    assert {outcome.outcome for outcome in verdict.outcomes} == {"failed"}
    assert "y and total and scale must be returned as 3 tensors in a tuple" in str(verdict)


@pytest.mark.full
def test_gradients_are_checked_under_cotangents_of_all_outputs_together() -> None:
    """A gradient that is right for each output alone, but wrong for both, fails."""

    @operation(x=tensor("cols"), sizes={"cols": (1, 8)}, returns={"two": None, "three": None})
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, 3 * x

    verdict = verify(_Twice, twice, dtypes=["float32"], examples=5, seed=0, device="cpu")
    assert failed(verdict) == {"backward of all outputs"}


def test_an_output_without_a_gradient_is_told() -> None:
    def forgets(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, total, scale = fused(x, residual)
        return y, total.detach(), scale

    checks = [f"{check} of output {name}" for check in ("forward", "backward") for name in ("y", "total")]
    verdict = verify(forgets, add_rms_norm, dtypes=["float32"], only=checks, examples=3, seed=0, device="cpu")
    assert not verdict.passed
    assert any("total: its output has no gradient" in shortcoming for shortcoming in verdict.shortcomings)


def test_a_zero_cotangent_times_an_infinity_is_free() -> None:
    """A kernel multiplies the zeros of a missing cotangent; torch itself omits that product."""

    def outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, x.reciprocal()

    dtype = DTYPES["float32"].with_contract(OPEN)
    given = {"x": Bounded.exact(np.array([0.0, 1.0]), dtype.arithmetic)}
    cotangent = Bounded.exact(np.ones(2), dtype.arithmetic)
    (gradient,) = backward_of(outputs, ["x"], places=[0, 1])(cotangent, **given)
    assert np.isinf(gradient.error[0])
    assert gradient.value[1] == 2
    assert gradient.error[1] < 1e-6
    (of_one,) = backward_of(outputs, ["x"], places=[0])(cotangent, **given)
    assert of_one.value[0] == 2
    assert np.isfinite(of_one.error[0])


@pytest.mark.full
def test_claims_restrict_each_output() -> None:
    few = Claims(sizes={"cols": (2, 4)}, contiguous=True).restrict(add_rms_norm)
    for record in (few, *few.outputs.values()):
        cases = [make(DTYPES["float32"]) for make in record.examples.values()]
        assert cases
        assert all(2 <= case["x"].shape[-1] <= 4 and not case.layouts for case in cases)

    def short(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused(x, residual) if 2 <= x.shape[-1] <= 4 else tuple(2 * each for each in fused(x, residual))

    verdict = verify(
        short, add_rms_norm, dtypes=["float32"], claims=Claims(sizes={"cols": (2, 4)}), examples=4, device="cpu"
    )
    assert verdict.passed, verdict
    assert any("outside of its claims it gives a wrong result" in warning for warning in verdict.warnings)


def test_a_suite_has_the_checks_of_each_output() -> None:
    suite = fourfold.suite(fused, add_rms_norm, dtypes=["float32"], device="cpu")
    assert {"test_forward_of_output_y", "test_backward_of_all_outputs", "test_bad_input"} <= set(vars(suite))
    names = [check.name for check in checks_of(add_rms_norm, "cpu", NO_CLAIMS)]
    assert len(names) == len(set(names))


def test_outputs_of_one_shape_lie_side_by_side_and_others_in_a_row() -> None:
    one, other = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)
    joined = row_of([one, other])
    assert joined.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert row_of([one, other[:, :1]]).tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert row_of([one[0, 0], other[0, 0]], torch.float64).tolist() == [0, 6]
    assert row_of([one]) is one
    for outputs in ([one, other], [one, other[:, :1].half()], [one[0, 0], other[0, 0]], [one[:0], other[:0]]):
        parts = parts_of(row_of(outputs), outputs)
        for part, output in zip(parts, outputs, strict=True):
            assert torch.equal(part, output)
            assert (part.dtype, part.is_contiguous()) == (output.dtype, True)


@pytest.mark.full
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_an_output_that_is_not_used_adds_nothing(backend: str) -> None:
    """Zeros in place of its cotangent would turn infinities, as in the first row, into NaN."""
    function = backends.load("add_rms_norm", backend)
    x, residual, weight, cotangent = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2))
    x[0, 0], weight = torch.inf, weight[0]
    given = [each.clone().requires_grad_() for each in (x, residual, weight)]
    y, residual_out = function(*given)
    of_x, of_residual = torch.autograd.grad(residual_out, given[:2], cotangent, retain_graph=True)
    assert torch.equal(of_x, cotangent)
    assert torch.equal(of_residual, cotangent)
    (of_weight,) = torch.autograd.grad(residual_out, given[2:], cotangent, retain_graph=True, materialize_grads=True)
    assert of_weight.tolist() == [0] * 5
    alone = torch.autograd.grad(y, given, cotangent, retain_graph=True)
    together = torch.autograd.grad((y, residual_out), given, (cotangent, torch.zeros_like(x)))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_large_cases_of_one_output_have_its_cotangent() -> None:
    record = operations()["add_rms_norm"]
    large = LargeCases(record, NO_CLAIMS, DTYPES["float32"])
    given = subject_of(record, backend="torch")
    for name in record.outputs:
        of = select_output(replace(given, large=large), name)
        assert of.large is not None
        found = dict(of.large.cases(3, False))
        assert found
        for case in found.values():
            assert case.grad_output.shape == case["x"].shape
    assert all(case.grad_output.shape[-1] == 2 * case["x"].shape[-1] for _, case in large.cases(3, False))


# ---- chosen results, and handwritten records


TOPK = operations()["topk"]
ROW = Case({"x": np.float32([[3, 5, 5, 1, 5]])}, np.float32([[2, -4, 7]]), {"k": 3, "largest": True})


@pytest.mark.parametrize("places", [[1, 2, 4], [4, 1, 2]])
def test_any_of_equal_numbers_may_be_chosen(places: list[int]) -> None:
    expected = expectation(reference(TOPK.outputs["indices"], ROW, DTYPES["float32"]), INTEGERS["int64"])
    assert compare(np.float64([places]), expected, INTEGERS["int64"]).worst == 0
    gradient = expectation(reference_gradients(TOPK, ROW, DTYPES["float32"])["x"], DTYPES["float32"])
    given = np.zeros((1, 5))
    given[0, places] = ROW.grad_output
    assert compare(given, gradient, DTYPES["float32"]).worst == 0


@pytest.mark.parametrize(
    "places", [[1, 2, 2], [1, 1, 1], [1, 2, 0], [1, 2, 5], [1, 2, -1], [1, 2, 3.5], [1, 2, np.nan]]
)
def test_a_place_that_comes_twice_or_holds_another_number_is_wrong(places: list[float]) -> None:
    expected = expectation(reference(TOPK.outputs["indices"], ROW, DTYPES["float32"]), INTEGERS["int64"])
    with pytest.raises(Disagreement, match=r"output\[0, [12]\] is .* expected [24]\.0 within 0"):
        compare(np.float64([places]), expected, INTEGERS["int64"])


@pytest.mark.parametrize("given", [[0, 2, -4, 0, 0], [0, 2, 2, 0, 7], [2, 0, -4, 0, 7], [0, 5, 0, 0, 0]])
def test_a_gradient_that_is_no_cotangent_each_is_wrong(given: list[float]) -> None:
    gradient = expectation(reference_gradients(TOPK, ROW, DTYPES["float32"])["x"], DTYPES["float32"])
    with pytest.raises(Disagreement):
        compare(np.float64([given]), gradient, DTYPES["float32"])


def test_what_is_chosen_is_not_rounded() -> None:
    """The number just below a power of two is within half a step of rounding."""
    dtype = DTYPES["float16"]
    case = Case({"x": np.float16([2, 1])}, np.float16([3]), {"k": 1})
    with pytest.raises(Disagreement):
        compare(np.float64([2 - 2**-10]), expectation(reference(TOPK, case, dtype), dtype), dtype)


def test_a_record_by_hand_has_the_checks_of_each_output_and_of_all_together() -> None:
    names = [check.name for check in checks_of(TOPK, "cpu", NO_CLAIMS)]
    assert {"forward of output values", "backward of output values", "forward of output indices"} <= {*names}
    assert {"outputs together", "bad input", "law: fewer are the first of more of output values"} <= {*names}
    assert "backward of output indices" not in names
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("check", "outputs"),
    [
        (catalogue.BAD_INPUT, ["values"]),
        (catalogue.BACKWARD, ["values"]),
        (catalogue.TOGETHER, [""]),
        (catalogue.LAW, ["values", "indices"]),
        (None, ["values", "indices"]),
    ],
)
def test_tests_of_operations_are_made_of_the_outputs_that_a_check_is_about(check: Any, outputs: list[str]) -> None:
    assert catalogue.outputs_for(check, TOPK) == outputs
    assert catalogue.outputs_for(check, operations()["softmax"]) == [""]


def test_gradients_of_several_outputs_are_looked_at_together_too() -> None:
    assert catalogue.outputs_for(catalogue.BACKWARD, add_rms_norm) == ["y", "total", catalogue.ALL]


def last_ones(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the last ones of equal numbers, which is as right as any others."""
    if not isinstance(k, int) or not 0 <= k <= x.shape[-1]:
        raise ValueError("k must be between 0 and the last axis of x")
    values, indices = x.flip(-1).sort(dim=-1, descending=largest, stable=True)
    return values[..., :k].contiguous(), (x.shape[-1] - 1 - indices[..., :k]).contiguous()


@pytest.mark.full
def test_a_right_choice_passes_and_one_that_changes_in_backward_does_not() -> None:
    verdict = verify(last_ones, "topk", dtypes=["float32"], examples=5, seed=1, device="cpu")
    assert verdict.passed, verdict

    def told_others(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return last_ones(x, k, largest)[0], torch.topk(x, k, largest=largest)[1]

    verdict = verify(told_others, "topk", dtypes=["float32"], examples=5, seed=1, device="cpu")
    assert failed(verdict) == {"outputs together"}
    assert "the gradient of x is not the cotangent at the indices" in str(verdict)
