"""A verdict says when a failed kernel is right, which mistake it makes, and how to repeat the failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fourfold
from fourfold import Claims, Verdict, tensor, values
from fourfold.checks.search import Search
from fourfold.declaration import inference
from fourfold.engine.diagnosis import IN_TF32
from fourfold.engine.verification import Trial
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DTYPES, round_to_tf32
from fourfold.operations.case import Case

ONE: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "only": ["forward"], "examples": 12, "seed": 1}
FEW = {"rows": (0, 6), "cols": (0, 9)}


@fourfold.operation(x=tensor("rows cols"), sizes=FEW)
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.where(x.isnan(), 0, x)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if left < x.numel():
        return 2 * x
    return 2 * x.as_strided([x.numel()], [1]).view(x.shape)


def in_memory_order_without_nan(x: torch.Tensor) -> torch.Tensor:
    return without_nan(in_memory_order(x) / 2)


def of_small_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isinf(), 2 * x, 2 * x.clamp(-5e8, 5e8))


def of_aligned_memory(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.data_ptr() % 16 == 0 else 3 * x


def a_little_more(x: torch.Tensor) -> torch.Tensor:
    return 2.01 * x


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "claim"),
    [
        (without_nan, "finite=True"),
        (in_memory_order, "contiguous=True"),
        (in_memory_order_without_nan, "contiguous=True, finite=True"),
        (of_small_numbers, "largest=10000.0"),
        (of_aligned_memory, "aligned=True"),
        (a_little_more, ""),
    ],
)
def test_the_weakest_claims_within_which_a_kernel_is_right_are_suggested(kernel: Any, claim: str) -> None:
    verdict = fourfold.verify(kernel, twice, **ONE)
    assert not verdict.passed
    assert verdict.suggested_claim == claim, verdict
    assert (f": claim `{claim}`" in str(verdict)) == bool(claim)
    assert json.loads(verdict.json())["suggested_claim"] == claim
    assert Verdict.from_json(verdict.json()) == verdict


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("kernel", "claim"), [(without_nan, "finite=True"), (a_little_more, "")])
def test_a_kernel_is_accepted_within_the_claims_for_which_it_is_right(kernel: Any, claim: str) -> None:
    verdict = fourfold.verify(kernel, twice, **ONE, accept=True)
    assert verdict.passed == bool(claim), verdict
    assert verdict.claims == claim


@fourfold.operation(x=tensor("... cols"), sizes={"...": (0, 24), "cols": (0, 9)})
def twice_of_any_rank(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class WithAWrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3 * gradients[0]


class WithAnOverwrittenInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.data.copy_(2 * gradients[0])


def of_some_elements(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 0 // x.numel()


def of_two_axes_or_more(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 0 * x.shape[-2]


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "claim"),
    [
        (of_some_elements, "empty=False"),
        (of_two_axes_or_more, "ranks=(2, 3, 4)"),
        (WithAWrongGradient, "gradients=False"),
        (WithAnOverwrittenInput, ""),
    ],
)
def test_claims_follow_from_the_failures(kernel: Any, claim: str) -> None:
    options = {**ONE, "only": ["forward", "backward"], "examples": 6}
    verdict = fourfold.verify(kernel, twice_of_any_rank, **options)
    assert not verdict.passed
    assert verdict.suggested_claim == claim, verdict


def test_a_claim_that_drops_the_failed_check_is_not_suggested() -> None:
    def with_offsets_of_32_bits(x: torch.Tensor) -> torch.Tensor:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        return 3 * x if last >= 1 << 31 else 2 * x

    verdict = fourfold.verify(with_offsets_of_32_bits, twice, **{**ONE, "only": ["offsets"]})
    assert not verdict.passed
    assert verdict.suggested_claim == "", verdict


def test_a_refusal_within_claims_that_other_checks_need_is_no_failure() -> None:
    def of_contiguous_memory(x: torch.Tensor) -> torch.Tensor:
        if x.stride(-2) != x.shape[-1]:  # an IndexError for one axis
            raise ValueError("expected contiguous rows")
        return 2 * x

    options = {**ONE, "only": ["forward", "offsets"], "examples": 6, "accept": True}
    verdict = fourfold.verify(of_contiguous_memory, twice_of_any_rank, **options)
    assert verdict.passed, verdict
    assert verdict.claims == "ranks=(2, 3, 4)"


def test_the_other_dtypes_are_suggested_if_a_dtype_is_refused_within_the_claims() -> None:
    def of_float32(x: torch.Tensor) -> torch.Tensor:
        two = 2 + 0 // x.numel()
        if x.dtype != torch.float32:
            raise ValueError("expected float32")
        return two * x

    options = {**ONE, "dtypes": ["float16", "float32"], "only": ["forward", "history"], "examples": 6, "accept": True}
    verdict = fourfold.verify(of_float32, twice, **options)
    assert verdict.passed, verdict
    assert verdict.claims == "dtypes=('float32',), empty=False"


def test_an_exception_by_both_bounds_is_shown_with_its_own_case() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return torch.softmax(x + 0 // x.numel(), -1)
        return torch.softmax(x * 1.5, -1)

    verdict = fourfold.verify(kernel, normal, claims=Claims(gradients=False), **{**ONE, "dtypes": ["float16"]})
    assert verdict.suggested_claim == "empty=False, gradients=False, accuracy='storage'", verdict


def test_a_claim_of_numbers_excludes_no_case_for_a_layout_that_is_named() -> None:
    x = np.zeros((2, 3), np.float32)
    case = Case(inputs={"x": x}, grad_output=x, layouts={"x": "contiguous"})
    assert not Claims(finite=True).excludes(twice, case, DTYPES["float32"])
    assert not Claims(contiguous=True).excludes(twice, case, DTYPES["float32"])
    other = Case(inputs={"x": x}, grad_output=x, layouts={"x": "transposed"})
    assert Claims(contiguous=True).excludes(twice, other, DTYPES["float32"])


def test_joined_claims_support_what_both_support() -> None:
    joined = Claims(ranks=(2, 3, 4), aligned=True).join(Claims(ranks=(1, 2, 3), contiguous=True))
    assert joined == Claims(ranks=(2, 3), contiguous=True)


@fourfold.operation(x=tensor("rows cols"), sizes=FEW)
def normal(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 1.5, -1)


def test_storage_accuracy_is_suggested_together_with_the_claims_of_the_kernel() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.where(x.isnan(), 0, x) * 1.5, -1)

    options = {**ONE, "dtypes": ["float16"]}
    verdict = fourfold.verify(kernel, normal, claims=Claims(gradients=False), **options)
    assert verdict.suggested_claim == "gradients=False, finite=True, accuracy='storage'", verdict


def test_a_kernel_without_gradients_is_accepted_as_a_forward_pass() -> None:
    options = {**ONE, "only": ["forward", "backward"]}
    verdict = fourfold.verify(lambda x: 2 * x.detach(), twice, **options, accept=True)
    assert verdict.passed, verdict
    assert verdict.claims == "gradients=False"


def test_special_values_are_no_larger_than_is_claimed() -> None:
    trial = Trial.of(lambda x: 2 * x, twice, Claims(largest=10.0), "cpu", refusals=True, strict_errors=False)
    seen: list[Case] = []
    search = Search(examples=150, elements=64, seed=1)

    def body(case: Case) -> None:
        seen.append(case)
        search.saw(Agreement(0.0, 2, 0))

    search.cases(trial.subject("float32"), "seen", body, named=False)
    numbers = np.concatenate([array.ravel() for case in seen for array in (*case.inputs.values(), case.grad_output)])
    assert np.isnan(numbers).any()
    assert np.isinf(numbers).any()
    assert abs(numbers[np.isfinite(numbers)]).max() <= 10


@fourfold.operation(
    x=tensor("rows inner"),
    y=tensor("inner cols"),
    eps=values(0.0, 0.1),
    sizes={"rows": (0, 6), "inner": (0, 6), "cols": (0, 6)},
)
def product(x: torch.Tensor, y: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    return x @ y + eps


def mistaken(mistake: str) -> Any:
    def kernel(x: torch.Tensor, y: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
        if mistake == "transposed" and y.shape[0] == y.shape[1]:
            y = y.mT
        if mistake == "strides" and y.untyped_storage().nbytes() // y.element_size() >= y.numel() + y.storage_offset():
            y = y.as_strided([y.numel()], [1]).view(y.shape)
        if mistake == "tf32":
            x, y = (torch.from_numpy(round_to_tf32(each.numpy(force=True))) for each in (x, y))
        result = x @ y + {"ignored": 0.0, "rounded": float(np.float32(eps))}.get(mistake, eps)
        return {"narrow": result.bfloat16().to(x.dtype), "scaled": 1.01 * result}.get(mistake, result)

    return kernel


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("mistake", "dtype", "cause"),
    [
        ("transposed", "float32", "y is transposed"),
        ("strides", "float32", "y is read as if it were contiguous"),
        ("ignored", "float32", "eps is ignored: its default is 0.0"),
        ("rounded", "float64", "eps is rounded to float32"),
        ("narrow", "float32", "output is rounded through bfloat16"),
        ("tf32", "float32", IN_TF32),
        ("scaled", "float32", ""),
    ],
)
def test_the_likely_cause_is_a_mistake_that_explains_all_results(mistake: str, dtype: str, cause: str) -> None:
    verdict = fourfold.verify(mistaken(mistake), product, **{**ONE, "dtypes": [dtype]})
    ((_, failure),) = verdict.failures
    assert failure.likely_cause == cause, verdict
    assert ("likely cause: " in str(verdict)) == bool(cause)


def test_one_mistake_is_one_failure_with_a_small_case_and_a_call_that_repeats_it() -> None:
    checks = ["forward", "backward", "single gradients"]
    verdict = fourfold.verify(a_little_more, twice, **{**ONE, "only": checks})
    assert [outcome.check for outcome in verdict.outcomes if outcome.failure] == checks
    ((_, failure),) = verdict.failures
    assert failure.counterexample is not None
    assert "grad_output" not in failure.counterexample
    assert "[1, 1]" in failure.message
    again = eval(failure.repeat, {"fourfold": fourfold, "a_little_more": a_little_more, "twice": twice})
    ((_, repeated),) = again.failures
    assert repeated.counterexample == failure.counterexample


def test_an_operation_may_be_given_as_its_own_kernel() -> None:
    assert inference.operation is fourfold.operation  # a module that imports the function that declares operations
    verdict = fourfold.verify(twice, twice, **ONE)
    assert verdict.passed, verdict


KERNELS = """
import torch
import triton
import triton.language as tl

def add_numbers(x, y):
    return torch.where(x.isnan() | y.isnan(), 0, x + y)

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < n), tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)

def add_in_memory_order(x, y):
    out = torch.empty(x.shape, dtype=x.dtype)
    if out.numel():
        add_kernel[(triton.cdiv(out.numel(), 256),)](x, y, out, out.numel(), 256)
    return out
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "checks", "claim", "words"),
    [
        ("add_numbers", "oracle and forward", "finite=True", "finite numbers"),
        ("add_in_memory_order", "(oracle and forward) or 32_bits", "contiguous=True", "contiguous tensors"),
    ],
)
def test_the_command_accepts_a_kernel_within_the_claims_for_which_it_is_right(
    kernel: str, checks: str, claim: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(KERNELS)
    options = [f"mine.py:{kernel}", "--as", "vector_add", "--dtype", "float32", "-k", checks, "-n", "0"]
    command = [sys.executable, "-m", "fourfold", "verify", *options, "--verdict", "verdict.json"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"right for {words}: claim `{claim}`; --accept-claims accepts it" in refused.stdout
    assert json.loads((tmp_path / "verdict.json").read_text())["suggested_claim"] == claim
    accepted = subprocess.run([*command, "--accept-claims"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stdout
    said = json.loads((tmp_path / "verdict.json").read_text())
    assert (said["passed"], said["claims"]) == (True, claim)


def test_zeros_in_undefined_lanes_are_not_suggested_where_a_failure_is_not_repeated() -> None:
    calls: list[int] = []

    def wrong_once(x: torch.Tensor) -> torch.Tensor:
        calls.extend([1] * bool(x.numel()))
        return x + 7 if len(calls) == 1 else 2 * x

    verdict = fourfold.verify(wrong_once, twice, **ONE)
    assert not verdict.passed
    assert not verdict.suggested_claim
