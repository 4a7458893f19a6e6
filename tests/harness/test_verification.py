"""fourfold.verify, assert_correct and suite: right functions are accepted, wrong ones rejected, refusals counted."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import warm

import fourfold
from fourfold import Claims, Verdict
from fourfold.candidates.load.calling import CannotBeCalled
from fourfold.checks.outputs import requires_gradient
from fourfold.checks.records import operations
from fourfold.declaration.inference import like
from fourfold.engine.exact_math import INEXACT
from fourfold.engine.failures import finding
from fourfold.numerics.bounded import NoRule
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case
from fourfold.operations.outcomes import BRIEFLY, NOT_MADE, Failure

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"examples": 6, "device": "cpu", "seed": 1}
ONE: dict[str, Any] = {**QUICK, "dtypes": ["float32"]}


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def without_maximum(x: torch.Tensor) -> torch.Tensor:
    powers = x.exp()
    return powers / powers.sum(-1, keepdim=True)


def of_contiguous(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous(), "x must be contiguous"
    return torch.softmax(x, -1)


def of_nothing(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"no kernel for {x.dtype}")


def forward_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.detach(), -1)


def with_rounded_steps(x: torch.Tensor) -> torch.Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp() if x.numel() else x
    return powers / powers.sum(-1, keepdim=True)


class WithRoundedProducts(torch.autograd.Function):
    """A softmax whose backward pass rounds products to the dtype before it sums them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad_output - (grad_output * y).sum(-1, keepdim=True))


class WithBackwardOfAnother(WithRoundedProducts):
    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * grad_output


def silent_about_strides(x: torch.Tensor) -> torch.Tensor:
    """Read the elements in the order in which they lie in memory."""
    flat = (
        x.as_strided([x.numel()], [1]) if x.untyped_storage().nbytes() >= x.numel() * x.element_size() else x.flatten()
    )
    return torch.softmax(flat.reshape(x.shape), -1)


def load(path: Path, source: str) -> ModuleType:
    """Return a module from its source; Triton reads a kernel's source from the file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{abs(hash(str(path)))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checks_that(verdict: Verdict, outcome: str) -> set[str]:
    return {o.check for o in verdict.outcomes if o.outcome == outcome}


@pytest.mark.full
def test_a_right_function_passes_every_check() -> None:
    verdict = fourfold.verify(softmax, "softmax", **QUICK)
    assert verdict.passed, str(verdict)
    assert verdict
    assert verdict.grade == "exact"
    assert 0.5 < verdict.worst <= 1
    assert not verdict.refusals
    assert {o.dtype for o in verdict.outcomes} == {"float16", "bfloat16", "float32", "float64"}
    assert {"forward", "backward", "gradcheck", "memory", "history", "bad input"} <= checks_that(verdict, "passed")
    assert verdict.summary.startswith("softmax as softmax on cpu: right, exact")


def test_failures_of_one_result_have_one_cause_whatever_their_words() -> None:
    wrong = [Failure(words, "output", 2.0) for words in ("output[0] is 1", "the gradient of x is 1")]
    assert {finding(each, Path(), "").cause for each in (*wrong, ExceptionGroup("", wrong))} == {"output is wrong"}
    of_none = "the call changed its input grad_output"
    assert finding(Failure(of_none), Path(), "").cause == of_none


def test_a_wrong_function_is_rejected_with_its_distinct_failures_in_text_json_and_a_page() -> None:
    laws = [f"law: {law.__name__.replace('_', ' ')}" for law in operations()["softmax"].laws]
    verdict = fourfold.verify(without_maximum, "softmax", only=["forward", "backward", *laws], **ONE)
    assert not verdict.passed
    assert verdict.grade == "wrong"
    # The output, its gradient, and laws: many checks fail by each.
    assert 1 <= len(verdict.failures) <= 3 < sum(o.outcome == "failed" for o in verdict.outcomes)
    first, failure = verdict.failures[0]
    assert first.check == "forward"
    assert "is nan, expected" in failure.message
    assert failure.counterexample.startswith("Case(x=")
    told = json.loads(verdict.json())
    assert (told["passed"], told["grade"]) == (False, "wrong")
    assert told["worst_error_over_bound"] > 1
    assert told["checks"][0]["counterexample"] == failure.counterexample
    assert {"torch", "numpy"} <= told["versions"].keys()
    page = verdict.html(back="../index.html")
    assert "<h1>without_maximum as softmax</h1>" in page
    assert "<pre>Case(x=array([[1000.0," in page
    assert "<pre>fourfold.verify(without_maximum, &#39;softmax&#39;" in page
    assert '<a href="../index.html">' in page
    assert '<a href="../index.html">' not in verdict.html()
    # The body shows this file.
    assert page.partition("</head>")[0].count("prefers-color-scheme: dark") == 1
    with pytest.raises(AssertionError, match="WRONG"):
        fourfold.assert_correct(without_maximum, "softmax", only=["forward"], **ONE)


def test_a_brief_search_begins_with_cases_without_an_axis_of_one_element() -> None:
    @fourfold.operation(x=fourfold.tensor("... cols"))
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_for_one_row_or_column(x: torch.Tensor) -> torch.Tensor:
        return (2 if 1 in x.shape else 3) * x

    forward, backward = fourfold.verify(
        right_for_one_row_or_column, doubled, only=["forward", "backward"], **ONE
    ).outcomes
    assert forward.outcome == backward.outcome == "failed"
    assert backward.examples == 0 < forward.examples


def test_a_failure_is_repeated_by_its_blob() -> None:
    def wrong_for_three_axes(x: torch.Tensor) -> torch.Tensor:
        # The named cases of three axes have 8 columns or thousands, and the large ones have two axes.
        return torch.softmax(x, -1) * (2 if x.ndim == 3 and x.shape[-1] not in (0, 8) and x.shape[-1] < 99 else 1)

    options: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "only": ["forward"]}
    ((_, failure),) = fourfold.verify(wrong_for_three_axes, "softmax", examples=60, **options).failures
    assert failure.blob
    again = fourfold.verify(wrong_for_three_axes, "softmax", reproduce=failure.blob, **options)
    assert [f.counterexample for _, f in again.failures] == [failure.counterexample]
    repaired = fourfold.verify(lambda x: torch.softmax(x, -1), "softmax", reproduce=failure.blob, **options)
    assert repaired.passed, str(repaired)
    assert f"forward, float32: the case to reproduce passes now: {failure.counterexample}" in str(repaired)


def test_an_exception_of_its_own_is_a_refusal_with_its_reason() -> None:
    verdict = fourfold.verify(of_contiguous, "softmax", only=["forward", "memory"], **ONE)
    assert verdict.passed, str(verdict)
    assert set(verdict.refusals) == {"AssertionError: x must be contiguous"}
    assert "right wherever it accepts" in verdict.summary
    assert "refused" in str(verdict)
    strict = fourfold.verify(of_contiguous, "softmax", refusals=False, only=["forward"], **ONE)
    assert not strict.passed
    ((_, failure),) = strict.failures
    assert "x must be contiguous" in failure.message
    assert "in of_contiguous" in failure.frames
    assert "fourfold/checks" not in failure.frames


def test_what_is_claimed_is_not_tried_and_so_not_refused() -> None:
    options: dict[str, Any] = {"claims": Claims(contiguous=True), "only": ["forward", "backward", "memory"], **ONE}
    verdict = fourfold.verify(of_contiguous, "softmax", **options)
    assert verdict.passed, str(verdict)
    assert not verdict.refusals
    assert "contiguous=True" in verdict.summary


def test_the_product_of_the_leading_axes_may_be_claimed() -> None:
    def of_few_rows(x: torch.Tensor) -> torch.Tensor:
        if math.prod(x.shape[:-1]) > 40:
            raise ValueError("x must have at most 40 rows")
        return torch.softmax(x, -1)

    options: dict[str, Any] = {"only": ["forward"], "dtypes": ["float32"], "device": "cpu"}
    assert fourfold.verify(of_few_rows, "softmax", **options).refusals
    verdict = fourfold.verify(of_few_rows, "softmax", claims=Claims(sizes={"...": (0, 40)}), **options)
    assert verdict.passed
    assert not verdict.refusals


def test_who_refuses_everything_has_not_passed_and_is_soon_asked_no_more() -> None:
    verdict = fourfold.verify(of_nothing, "softmax", only=["forward"], **ONE)
    assert len(operations()["softmax"].examples) + 10 < verdict.refusals.total()
    assert verdict.refusals.total() <= len(operations()["softmax"].examples) + 50
    assert not verdict.passed
    assert "nothing was verified: refused all" in verdict.summary
    assert "no kernel for torch.float32" in verdict.summary


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_who_needs_a_gpu_is_told_that_there_is_none() -> None:
    verdict = fourfold.verify(lambda x: torch.softmax(x.cuda(), -1), "softmax", **ONE)
    assert not verdict.passed
    assert "it asks for a GPU, and there is none here" in verdict.summary


@pytest.mark.full
def test_a_forward_pass_alone_must_be_claimed() -> None:
    verdict = fourfold.verify(forward_alone, "softmax", **ONE)
    assert not verdict.passed
    assert "Claims(gradients=False)" in verdict.summary
    assert fourfold.verify(forward_alone, "softmax", claims=Claims(gradients=False), **ONE).passed


@pytest.mark.parametrize(
    ("after", "makes", "expected"),
    [(softmax, 1, True), (forward_alone, 1, False), (forward_alone, 3, False), (of_nothing, 3, True)],
)
def test_the_first_example_that_is_not_refused_tells_whether_there_are_gradients(
    after: Callable[..., torch.Tensor], makes: int, expected: bool
) -> None:
    noted: list[Case] = []

    def implementation(x: torch.Tensor) -> torch.Tensor:
        assert len(noted) >= makes, "one of the first examples"
        return after(x)

    operation = operations()["softmax"]
    assert requires_gradient(implementation, operation, DTYPES["float32"], "cpu", noted.append) is expected
    assert len(noted) == makes or (after is of_nothing and makes < len(noted) <= len(operation.examples))


@pytest.mark.parametrize("before", [False, True])
def test_torchs_own_products_are_exact_while_something_is_verified_and_then_as_before(before: bool) -> None:
    seen: set[bool] = set()

    def looking(x: torch.Tensor) -> torch.Tensor:
        seen.update(getattr(owner, name) for owner, name in INEXACT)
        return torch.softmax(x, -1)

    kept = [getattr(owner, name) for owner, name in INEXACT]
    try:
        for owner, name in INEXACT:
            setattr(owner, name, before)
        assert fourfold.verify(looking, "softmax", only=["forward"], **ONE).passed
        assert seen == {False}
        assert {getattr(owner, name) for owner, name in INEXACT} == {before}
    finally:
        for (owner, name), value in zip(INEXACT, kept):
            setattr(owner, name, value)


def equal_rows(dtype: DType) -> Case:
    """Return equal numbers and cotangents: the gradient is 0, and in bfloat16 all products round to the same side.

    This length and cotangent have the largest gradient in torch: 4.3 times the error of rounding the softmax.
    """
    return Case({"x": np.zeros((4, 230), dtype.numpy)}, np.full((4, 230), 1.8515625, dtype.numpy))


@pytest.mark.full
def test_storage_accuracy_is_told_and_must_be_claimed() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtypes": ["bfloat16", "float32"], "only": ["forward", "backward"]}
    softmax = replace(operations()["softmax"], examples={"equal rows": equal_rows})
    long_rows = {"cols": (100, 400)}
    verdict = fourfold.verify(WithRoundedProducts, softmax, claims=Claims(sizes=long_rows), **options)
    assert not verdict.passed
    assert verdict.grade == "storage"
    assert {o.dtype for o in verdict.outcomes if o.grade != "exact"} == {"bfloat16"}
    ((_, failure),) = verdict.failures
    assert "storage accuracy" in failure.message
    # The case is the one that was not exact, not the last one of the second check.
    assert re.search(r"with x(\[.*?\])", failure.message)[1] in failure.counterexample
    claimed = fourfold.verify(WithRoundedProducts, softmax, claims=Claims(accuracy="storage"), **options)
    assert claimed.passed, str(claimed)
    assert claimed.grade == "storage"


@pytest.mark.parametrize("strict_errors", [False, True])
def test_strict_errors_leave_the_grade_as_it_is(strict_errors: bool) -> None:
    claims = Claims(accuracy="storage", gradients=False)
    options: dict[str, Any] = {**QUICK, "dtypes": ["bfloat16"], "only": ["forward", "bad input"], "claims": claims}
    verdict = fourfold.verify(with_rounded_steps, "softmax", strict_errors=strict_errors, **options)
    assert {o.grade for o in verdict.outcomes if o.check == "forward"} == {"storage"}
    assert checks_that(verdict, "failed") == ({"bad input"} if strict_errors else set())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("strict_errors", [False, True])
def test_strict_errors_leave_gradients_where_an_input_is_nan_as_they_are(strict_errors: bool) -> None:
    def without_gradients_of_nan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isnan(), x.detach(), x) + y

    options: dict[str, Any] = {**ONE, "examples": 50, "only": ["backward"]}
    verdict = fourfold.verify(without_gradients_of_nan, "vector_add", strict_errors=strict_errors, **options)
    assert verdict.passed, str(verdict)


@pytest.mark.full
def test_what_is_shown_is_wrong_by_the_bounds_of_every_grade() -> None:
    def imprecise_and_wrong_for_129(x: torch.Tensor) -> torch.Tensor:
        return with_rounded_steps(x) * (1.5 if x.shape[-1] == 129 else 1)

    claims = Claims(gradients=False, finite=True, sizes={"cols": (100, 200)})
    options: dict[str, Any] = {**QUICK, "dtypes": ["bfloat16"], "only": ["forward"], "claims": claims}
    ((_, failure),) = fourfold.verify(imprecise_and_wrong_for_129, "softmax", **options).failures
    assert "129]" in failure.counterexample


def test_who_takes_nothing_but_empty_tensors_refuses_everything() -> None:
    def of_no_elements(x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            raise ValueError("x must be empty")
        return x.clone()

    verdict = fourfold.verify(of_no_elements, "softmax", only=["forward", "history"], **ONE | {"examples": 25})
    assert verdict.refusals.total() <= len(operations()["softmax"].examples) + 150
    assert not verdict.passed
    assert not checks_that(verdict, "failed")
    assert "refused all" in verdict.summary


def test_what_is_wrong_is_wrong_in_every_grade() -> None:
    claims = Claims(accuracy="storage")
    options: dict[str, Any] = {**QUICK, "dtypes": ["bfloat16"], "only": ["forward", "backward"]}
    verdict = fourfold.verify(WithBackwardOfAnother, "softmax", claims=claims, **options)
    assert verdict.grade == "wrong"
    assert "forward" in checks_that(verdict, "passed")
    assert "backward" in checks_that(verdict, "failed")


@pytest.mark.full
def test_a_number_that_torch_rounds_to_half_precision_is_storage_accuracy() -> None:
    """On the CPU torch rounds 0.7 to float16 when it subtracts it from a float16 number."""

    @fourfold.operation(x=fourfold.tensor("... cols"))
    def less(x: torch.Tensor) -> torch.Tensor:
        return x - 0.7

    options: dict[str, Any] = {**QUICK, "dtypes": ["float16", "bfloat16"], "only": ["forward"]}
    assert fourfold.verify(lambda x: x - 0.7, less, **options).grade == "storage"
    assert fourfold.verify(lambda x: x - 0.71, less, **options).grade == "wrong"


def test_a_sum_in_half_precision_is_worse_than_storage_accuracy() -> None:
    def summed_one_by_one(x: torch.Tensor) -> torch.Tensor:
        powers = (x - x.amax(-1, keepdim=True)).exp() if x.numel() else x
        total = torch.zeros_like(powers.sum(-1, keepdim=True))
        for column in range(x.shape[-1]):
            total = total + powers[..., column : column + 1]
        return powers / total

    long_rows = {"claims": Claims(accuracy="storage", gradients=False, sizes={"cols": (1024, 4096)})}
    verdict = fourfold.verify(summed_one_by_one, "softmax", dtypes=["bfloat16"], only=["forward"], **QUICK, **long_rows)
    assert verdict.grade == "wrong"


def test_bad_input_that_gives_a_result_is_a_warning_unless_errors_are_strict() -> None:
    verdict = fourfold.verify(without_maximum, "softmax", only=["bad input"], **ONE)
    assert any("x_of_int64" in warning for warning in verdict.warnings)
    assert not checks_that(verdict, "failed")
    strict = fourfold.verify(without_maximum, "softmax", only=["bad input"], strict_errors=True, **ONE)
    assert checks_that(strict, "failed") == {"bad input"}


@pytest.mark.full
def test_a_silently_wrong_result_outside_of_the_claims_is_told_once() -> None:
    verdict = fourfold.verify(silent_about_strides, "softmax", claims=Claims(contiguous=True, gradients=False), **ONE)
    assert verdict.passed, str(verdict)
    assert sum("outside of its claims" in warning for warning in verdict.warnings) == 1
    honest = fourfold.verify(of_contiguous, "softmax", claims=Claims(contiguous=True), **ONE)
    assert not any("outside of its claims" in warning for warning in honest.warnings)


@pytest.mark.full
def test_claims_stand_at_the_function_or_are_given() -> None:
    marked = fourfold.claims(gradients=False, dtypes=("float32",))(lambda x: torch.softmax(x.detach(), -1))
    verdict = fourfold.verify(marked, "softmax", **QUICK)
    assert verdict.passed, str(verdict)
    assert {o.dtype for o in verdict.outcomes} == {"float32"}


KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols)
    tl.store(out_ptr + row, tl.sum(x, axis=0))

def sums(x):
    x = x.contiguous()
    out = x.new_empty(x.shape[:-1])
    if out.numel():
        kernel[(out.numel(),)](x, out, x.shape[-1], BLOCK=triton.next_power_of_2(max(x.shape[-1], 1)))
    return out
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (lambda x: torch.special.bessel_j0(x), "bessel_j0.default has no running-error rule"),
        (lambda x: ((x * 0.3).exp() + 0.1).view(torch.int32), "the bits of a number depend on rounding errors"),
        (lambda x: (((x + 0.1) * 3 - (x + 0.1) * 3) * 1e30 * 1e30).exp(), "none of them could have failed"),
    ],
)
def test_a_definition_that_no_rule_covers_says_nothing_of_the_kernel(
    definition: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    operation = like(lambda x: definition(x), [torch.ones(3, 3)], name="of_no_rule")
    claims = Claims(finite=True, largest=1e3, gradients=False)
    verdict = fourfold.verify(definition, operation, only=["forward"], claims=claims, **ONE)
    assert verdict.kind == "undecided", str(verdict)
    assert says in str(verdict)
    wrong = fourfold.verify(lambda x: 2 * x, like(lambda x: 3 * x, [torch.ones(3, 3)]), only=["forward"], **ONE)
    assert wrong.kind == "wrong", str(wrong)


def test_a_case_whose_order_depends_on_rounding_is_not_reached() -> None:
    @fourfold.operation(x=fourfold.tensor("rows 4"), bias=fourfold.tensor("4", gradient=False))
    def ordered(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, (x + bias).argsort(dim=-1, stable=True))

    def kernel(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, (x.double() + bias.double()).argsort(dim=-1, stable=True))

    verdict = fourfold.verify(kernel, ordered, only=["forward"], **ONE)
    assert verdict.passed, str(verdict)
    assert "not reached: the order of numbers depends on rounding errors" in str(verdict)


def test_a_kernel_without_gradients_needs_none_of_the_definition() -> None:
    operation = like(softmax, [torch.ones(3, 4)])

    def no_rule(*args: Any, **kwargs: Any) -> Any:
        raise NoRule("the gradient has no rule")

    given = replace(operation, backward=no_rule)
    options = {**ONE, "only": ["history", "memory", "many calls", "threads"]}
    verdict = fourfold.verify(softmax, given, claims=Claims(gradients=False), **options)
    assert verdict.passed, str(verdict)
    assert fourfold.verify(softmax, given, **{**ONE, "only": ["backward"]}).kind == "undecided"
    doubled = fourfold.verify(lambda x: 2 * softmax(x), given, **{**ONE, "only": ["backward", "forward"]})
    assert doubled.kind == "wrong", str(doubled)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("are_zero", [False, True])
def test_undefined_lanes_are_zero_where_that_is_claimed(are_zero: bool, tmp_path: Path) -> None:
    @fourfold.operation(x=fourfold.tensor("... cols"))
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    module = load(tmp_path / "sums.py", KERNEL)
    claims = Claims(gradients=False, undefined_lanes_are_zero=are_zero)
    verdict = fourfold.verify(module.sums, total, claims=claims, only=["forward"], **ONE)
    assert verdict.passed == are_zero, str(verdict)


ASSEMBLY = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    asm = "{.reg .b32 now; mov.u32 now, %clock; add.f32 $0, $1, $1;}"
    y = tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + at, y, mask=at < n)

def twice(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        kernel[(triton.cdiv(out.numel(), 64),)](x, out, out.numel(), BLOCK=64)
    return out
"""


@pytest.mark.full
@pytest.mark.parametrize("untrusted", [False, True])
def test_what_the_interpreter_lacks_is_no_fault_of_the_kernel(untrusted: bool, tmp_path: Path) -> None:
    @fourfold.operation(x=fourfold.tensor("... cols"))
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    (tmp_path / "twice.py").write_text(ASSEMBLY)
    claims = Claims(gradients=False)
    given: Any = f"{tmp_path / 'twice.py'}:twice" if untrusted else load(tmp_path / "twice.py", ASSEMBLY).twice
    verdict = fourfold.verify(given, twice, claims=claims, untrusted=untrusted, only=["forward"], **ONE)
    assert not verdict.passed
    assert not verdict.failures, str(verdict)
    assert not verdict.refusals
    assert verdict.kind == "undecided"
    assert verdict.outcomes[0].outcome == "not reached"
    assert "not seen, as it is interpreted or emulated here" in str(verdict)


BY_NAME = """
import torch
import triton
import triton.language as tl
from LIBRARY import tanh

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tanh(tl.load(x_ptr + at, mask=at < n, other=0.0)), mask=at < n)

def own_tanh(x):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out

import fourfold

if __name__ == "__main__":
    tanh_of = fourfold.operation(x=fourfold.tensor("cols"))(lambda x: torch.tanh(x))
    claims = fourfold.Claims(dtypes=("float32",), gradients=False, contiguous=True)
    verdict = fourfold.verify(own_tanh, tanh_of, claims=claims, device="cpu", only=["forward"], examples=3)
    print(verdict)
    raise SystemExit(not verdict.passed or bool(verdict.refusals))
"""


@pytest.mark.full
@pytest.mark.parametrize("library", ["triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"])
def test_a_kernel_may_have_imported_a_function_of_libdevice_by_its_name(library: str, tmp_path: Path) -> None:
    script = tmp_path / "by_name.py"
    script.write_text(BY_NAME.replace("LIBRARY", library), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"dtypes": ("float8",)}, "dtypes"),
        ({"dtypes": "float32"}, "dtypes"),
        ({"accuracy": "good"}, "accuracy"),
        ({"sizes": {"cols": (9, 1)}}, "sizes"),
        ({"sizes": {"cols": 0}}, "sizes"),
        ({"speed": "high"}, "speed is no claim"),
        ({"contigous": True}, r"contigous is no claim: .*; did you mean contiguous\?"),
    ],
)
def test_claims_that_cannot_be_are_errors_that_name_them(claims: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Claims.of(claims)


def test_claims_are_read_as_they_are_written() -> None:
    written = 'contiguous=True, sizes={"cols": (1, 64)}, accuracy="storage"'
    assert Claims.parse(written) == Claims(contiguous=True, sizes={"cols": (1, 64)}, accuracy="storage")
    assert Claims.parse(str(Claims.parse(written))) == Claims.parse(written)
    with pytest.raises(ValueError, match="contiguous=True"):
        Claims.parse("contiguous")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtypes": ["float8"]}, "dtypes: there is no float8"),
        ({"dtypes": torch.int32}, "dtypes: there is no int32"),
        ({"dtypes": 32}, "dtypes: expected a dtype, its name, or several of these, not 32"),
        ({"only": ["speed"]}, "only: there is no check"),
        ({"only": "forwards"}, "only: there is no check 'forwards'.*did you mean forward?"),
        ({"claims": {}}, "claims: expected Claims, such as .*, not {}"),
        ({"claims": Claims(sizes={"columns": (1, 2)})}, "columns"),
    ],
)
def test_bad_options_are_errors_that_name_them(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError if options.get("claims") == {} else ValueError, match=says):
        fourfold.verify(softmax, "softmax", **{**QUICK, **options})


def test_one_dtype_and_the_checks_of_all_outputs_may_be_given_by_one_name() -> None:
    @fourfold.operation(x=fourfold.tensor("rows"), returns={"twice": None, "thrice": None})
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, 3 * x

    for dtypes in ("float32", torch.float32, [torch.float32]):
        verdict = fourfold.verify(both, both, only="forward", dtypes=dtypes, **QUICK)
        found = [(outcome.check, outcome.dtype) for outcome in verdict.outcomes]
        assert found == [("forward of output twice", "float32"), ("forward of output thrice", "float32")]


def test_a_suite_shows_one_wrong_result_once() -> None:
    suite = fourfold.suite(
        lambda x: x, "softmax", only=["forward", "repeatability", "sharing"], **QUICK, dtypes="float32"
    )
    with pytest.raises(pytest.fail.Exception, match=r"(?s)float32: softmax .*\nrepeat with"):
        suite().test_forward("float32")  # type: ignore[attr-defined]
    with pytest.raises(pytest.fail.Exception, match=r"float32: same cause as test_forward\[float32\]: [^\n]*\Z"):
        suite().test_sharing("float32")  # type: ignore[attr-defined]
    with pytest.raises(pytest.skip.Exception, match="looked at briefly"):
        suite().test_repeatability("float32")  # type: ignore[attr-defined]


def test_a_table_says_which_checks_looked_at_a_wrong_kernel_briefly(device: str) -> None:
    options = QUICK | {"only": ["forward", "repeatability"], "dtypes": "float32", "device": device}
    verdict = fourfold.verify(lambda x: x, "softmax", **options)
    text = str(verdict)
    word, reason = ("brief", BRIEFLY) if device == "cpu" else ("not made", NOT_MADE)
    assert re.search(rf"^  repeatability +{word}$", text, re.M)
    assert f"\n{word}: {reason}\n" in text
    assert "&lt;lambda&gt; as softmax" in verdict.html()


WAYS_TO_BE_OFF: dict[str, tuple[Callable[..., Any], str]] = {
    "tuple": (lambda x: (x.softmax(-1),), "output is a tuple, not a tensor"),
    "nothing": (lambda x: None, "output is a NoneType, not a tensor"),
    "dtype": (lambda x: x.softmax(-1).double(), "output has dtype torch.float64, expected torch.float32"),
    "shape": (lambda x: x.softmax(-1)[None], "output has shape"),
    "device": (lambda x: x.to("meta"), "output is on meta, expected on cpu"),
    "inputs": (lambda x: x.copy_(x.softmax(-1)), "the call changed its input x"),
}


@pytest.mark.parametrize("way", WAYS_TO_BE_OFF)
def test_a_result_that_is_off_is_named_in_a_line(way: str) -> None:
    function, says = WAYS_TO_BE_OFF[way]
    verdict = fourfold.verify(function, "softmax", only=["forward"], **ONE)
    ((_, failure),) = verdict.failures
    assert says in failure.message.splitlines()[0]


@pytest.mark.parametrize(
    ("function", "operation", "says"),
    [(lambda x, dim, mode: x, "softmax", r"softmax\(x"), (softmax, "soft_max", "layer_norm")],
)
def test_arguments_or_a_name_that_no_operation_has_are_errors_that_show_what_there_is(
    function: Callable[..., Any], operation: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fourfold.verify(function, operation, **QUICK)


def test_a_parameter_without_a_default_gets_the_operations() -> None:
    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias

    verdict = fourfold.verify(layer_norm, "layer_norm", claims=Claims(largest=1e4), only=["forward"], **ONE)
    assert verdict.passed, str(verdict)


IN_A_REPOSITORY = """
import torch
import triton
import triton.language as tl
import fourfold

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)

@fourfold.claims(gradients=False, contiguous=True)
def add(x, y):
    out = torch.empty_like(x)
    n = x.numel()
    if n:
        add_kernel[(triton.cdiv(n, 64),)](x, y, out, n, BLOCK=64)
    return out

def subtract(x, y):
    return add(x, -y)

TestAdd = fourfold.suite(add, "vector_add", examples=5, device="cpu")
TestSubtract = fourfold.suite(subtract, "vector_add", examples=5, device="cpu", dtypes=["float32"])
"""


@pytest.mark.full
def test_a_suite_in_a_foreign_repository_has_a_test_for_each_check_and_dtype(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(IN_A_REPOSITORY)
    # pytest-randomly shuffles the tests; each suite begins with its forward check nevertheless.
    (tmp_path / "conftest.py").write_text("def pytest_collection_modifyitems(items):\n    items.reverse()\n")
    # Triton is imported before Fourfold, and its kernels are made for a GPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INT"))}
    command = ["pytest", "-p", "no:cacheprovider", "-q", "-rA", str(tmp_path)]
    done = warm.run(*command, cwd=tmp_path, env={**kept, "PYTHONPATH": str(ROOT)})
    passed = {line.split("::", 1)[1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    failed = {line.split("::", 1)[1] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert {f"TestAdd::test_forward[{name}]" for name in ("float16", "bfloat16", "float32", "float64")} <= passed, (
        done.stdout
    )
    assert any(name.startswith("TestSubtract::test_forward[float32]") for name in failed)
    assert not any(name.startswith("TestAdd") for name in failed)
    assert done.stdout.count("TestSubtract::test_") > done.stdout.count(" same cause as test_forward[float32]: ") > 5
    assert "fourfold/checks" not in done.stdout


def test_the_first_failure_may_be_the_last() -> None:
    verdict = fourfold.verify(without_maximum, "softmax", first_failure=True, **QUICK)
    assert [(o.check, o.outcome) for o in verdict.outcomes] == [("forward", "failed")]
    assert verdict.kind == "wrong"
    assert fourfold.verify(softmax, "softmax", first_failure=True, only=["forward"], **ONE).kind == "right"


def test_what_is_only_imprecise_is_looked_at_further() -> None:
    options = {**QUICK, "dtypes": ["float16"], "first_failure": True}
    verdict = fourfold.verify(with_rounded_steps, "softmax", only=["forward", "repeatability"], **options)
    assert [o.check for o in verdict.outcomes] == ["forward", "repeatability"], str(verdict)
    assert verdict.kind == "imprecise"


@pytest.mark.full
def test_no_check_begins_after_the_time_is_up() -> None:
    verdict = fourfold.verify(softmax, "softmax", seconds=0.0, **ONE)
    assert not verdict.passed
    assert len(verdict.outcomes) + verdict.left_out == len(fourfold.verify(softmax, "softmax", **ONE).outcomes)
    assert verdict.left_out > 10
    assert f"{verdict.left_out} checks were not made within 0 s: " in str(verdict)
    assert verdict.kind == "timed out"


def test_what_is_left_to_torch_is_found_where_that_is_forbidden() -> None:
    options = {**ONE, "only": ["forward", "fallback"]}
    verdict = fourfold.verify(softmax, "softmax", forbid_fallback=True, **options)
    (failure,) = verdict.failures
    assert "computes with torch: aten._softmax" in failure[1].message
    with pytest.raises(ValueError, match="there is no check 'fallback'"):
        fourfold.verify(softmax, "softmax", **options)


def test_a_name_that_is_not_there_is_no_refusal() -> None:
    def mistaken(x: torch.Tensor) -> torch.Tensor:
        if x.ndim > 2:
            return no_such_name(x)  # type: ignore[name-defined]  # noqa: F821
        return torch.softmax(x, -1)

    verdict = fourfold.verify(mistaken, "softmax", only=["forward"], **ONE)
    assert verdict.kind == "wrong"
    assert "NameError: name 'no_such_name' is not defined" in str(verdict)


def test_a_kernel_of_triton_is_no_function_that_launches_it(tmp_path: Path) -> None:
    fourfold.verify(softmax, "softmax", only=["forward"], **ONE)
    kernel = load(tmp_path / "twice.py", ASSEMBLY).kernel
    with pytest.raises(CannotBeCalled, match="kernel is a Triton kernel: give the function that launches it"):
        fourfold.verify(kernel, "softmax", only=["forward"], **ONE)
