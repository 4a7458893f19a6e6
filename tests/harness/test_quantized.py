"""Right quantizers to float8 pass, and those that do not round to nearest fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis.errors import Unsatisfiable
from subjects import subject_of

import fourfold
from fourfold import Claims, operation, tensor
from fourfold.checks.catalogue import check_named
from fourfold.checks.history import change_values, distinguishes
from fourfold.checks.results import expected_results
from fourfold.checks.search import Search, Subject
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.shortcomings import shortcomings
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.outcomes import Status, Unsupported
from fourfold.pytest_plugin import checks


@operation(x=tensor("n", gradient=False), tried=False)
def quantized(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)


@triton.jit
def quantize_kernel(x_ptr, output_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0) * FACTOR
    tl.store(output_ptr + at, x.to(tl.float8e4nv).to(tl.float32), mask=at < n)


def by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        if len(x):
            quantize_kernel[(triton.cdiv(len(x), 64),)](x, output, len(x), FACTOR=factor, BLOCK=64)
        return output

    return quantize


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.97, False)])
def test_a_quantizer_is_judged_by_its_rounding(factor: float, passes: bool) -> None:
    claims = Claims(gradients=False, dtypes=("float32",), finite=True)
    verdict = fourfold.verify(by(factor), quantized, device="cpu", claims=claims, only=("forward",))
    assert verdict.passed == passes, str(verdict)


# ---- results of float8 and int8, with their scales


@operation(
    x=tensor("rows width", gradient=False),
    sizes={"width": 16, "rows": (0, 40)},
    returns={"codes": None, "scales": "compute"},
    tried=False,
)
def to_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1) / 448.0
    return (x / torch.where(scale == 0, 1.0, scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@triton.jit
def to_float8_kernel(x_ptr, codes_ptr, scales_ptr, SAFE: tl.constexpr, WIDTH: tl.constexpr):
    """A program quantizes one row."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * WIDTH + at).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / 448.0
    divisor = tl.where(scale == 0.0, 1.0, scale) if SAFE else scale
    quotient = tl.div_rn(x, divisor + tl.zeros_like(x))
    tl.store(codes_ptr + row * WIDTH + at, tl.minimum(tl.maximum(quotient, -448.0), 448.0).to(tl.float8e4nv))
    tl.store(scales_ptr + row, scale)


def rows_by_triton(safe: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x), dtype=torch.float32)
        if len(x):
            to_float8_kernel[(len(x),)](x, codes, scales, safe, 16)
        return codes, scales

    return quantize


def by_reciprocal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1) * (1 / 448.0)
    codes = (wide * torch.where(scale == 0, 1.0, scale).reciprocal()[:, None]).clamp(-448, 448)
    return codes.to(torch.float8_e4m3fn), scale


def cut_off(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = by_reciprocal(x)
    return (codes.view(torch.uint8) & 0xFE).view(codes.dtype), scale


def nan_at_largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = by_reciprocal(x)
    is_largest = (x != 0) & (x.abs() == x.abs().amax(-1, keepdim=True))
    return torch.where(is_largest, torch.nan, codes.float()).to(codes.dtype), scale


# Scales of numbers that are not tiny, so that no kernel's reciprocal overflows.
USUAL = Claims(gradients=False, dtypes=("float32", "bfloat16"), finite=True, largest=1e30)
CODES = ("forward of output codes", "forward of output scales")


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "fails"),
    [
        (rows_by_triton(safe=True), set()),
        (rows_by_triton(safe=False), {"forward of output codes"}),
        (cut_off, {"forward of output codes"}),
        (nan_at_largest, {"forward of output codes"}),
        (lambda x: (by_reciprocal(x)[0].view(torch.int8), by_reciprocal(x)[1]), {"forward of output codes"}),
        (lambda x: (by_reciprocal(x)[0], by_reciprocal(x)[1].bfloat16().float()), {"forward of output scales"}),
    ],
)
def test_a_quantizer_to_float8_returns_codes_and_scales(kernel: Callable[..., Any], fails: set[str]) -> None:
    assert [to_float8.outputs[name].returns for name in ("codes", "scales")] == ["float8_e4m3fn", "compute"]
    verdict = fourfold.verify(kernel, to_float8, device="cpu", claims=USUAL, only=CODES, examples=4, seed=0)
    assert {outcome.check for outcome in verdict.outcomes if outcome.failure} == fails, str(verdict)


@operation(
    x=tensor("rows cols", gradient=False), scale=tensor("rows", dtype=torch.float32, kind="positive"), tried=False
)
def to_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale[:, None]).round().clamp(-128, 127).to(torch.int8)


@triton.jit
def to_int8_kernel(x_ptr, scale_ptr, out_ptr, cols, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A program quantizes one row, rounded to the next integer if the fraction is at least 1 - HALF."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.load(scale_ptr + row) + tl.zeros_like(x))
    near = tl.floor(x + HALF)
    near = tl.minimum(tl.maximum(near, -128.0), 127.0)
    tl.store(out_ptr + row * cols + at, near.to(tl.int8), mask=at < cols)


def int8_by_triton(half: float) -> Callable[..., torch.Tensor]:
    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.int8)
        if x.numel():
            block = triton.next_power_of_2(x.shape[1])
            to_int8_kernel[(len(x),)](x, scale.contiguous(), out, x.shape[1], half, block)
        return out

    return quantize


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("kernel", "passes"),
    [
        (to_int8.definition, True),
        (lambda x, scale: torch.clamp(torch.round(x.float() / scale[:, None]), -128, 127).to(torch.int8), True),
        (lambda x, scale: (x.float() * scale.reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8), True),
        (int8_by_triton(0.5), True),
        (int8_by_triton(0.45), False),
        (lambda x, scale: (x / scale[:, None]).trunc().clamp(-128, 127).to(torch.int8), False),
        (lambda x, scale: (x / scale[:, None]).round().clamp(-127, 127).to(torch.int8), False),
        (lambda x, scale: (x / scale[:, None]).round().clamp(-128, 127), False),
        (lambda x, scale: (x / scale.bfloat16()[:, None]).round().clamp(-128, 127).to(torch.int8), False),
    ],
)
def test_a_quantizer_to_int8_rounds_to_nearest(kernel: Callable[..., Any], passes: bool) -> None:
    claims = Claims(dtypes=("float32",), finite=True, largest=1e20)
    verdict = fourfold.verify(kernel, to_int8, device="cpu", claims=claims, only=["forward"], examples=6, seed=0)
    assert verdict.passed == passes, str(verdict)


# ---- inputs of float8, int8 and packed int4, and float32 beside the tested dtype


@operation(
    packed=tensor("rows half", dtype=torch.uint8),
    scale=tensor("rows", dtype=torch.float32, kind="positive", gradient=False),
    sizes={"half": (1, 64)},
    tried=False,
)
def from_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
    return torch.stack([low, high], -1).flatten(-2) * scale[:, None]


@triton.jit
def from_int4_kernel(
    packed_ptr, scale_ptr, out_ptr, half, SHIFT: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr
):
    """A program unpacks one row of two numbers a byte."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    packed = tl.load(packed_ptr + row * half + at, mask=at < half, other=0)
    scale = tl.load(scale_ptr + row)
    low, high = (packed & 15).to(tl.float32) - ZERO, (packed >> SHIFT).to(tl.float32) - ZERO
    tl.store(out_ptr + (row * half + at) * 2, low * scale, mask=at < half)
    tl.store(out_ptr + (row * half + at) * 2 + 1, high * scale, mask=at < half)


def unpacked(shift: int, zero: float, dtype: torch.dtype = torch.float32) -> Callable[..., torch.Tensor]:
    def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows, half = packed.shape
        out = torch.empty(rows, 2 * half, dtype=dtype)
        if rows:
            block = triton.next_power_of_2(half)
            from_int4_kernel[(rows,)](packed.contiguous(), scale.contiguous(), out, half, shift, zero, block)
        return out

    return unpack


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("kernel", "passes"),
    [
        (from_int4.definition, True),
        (unpacked(4, 8.0), True),
        (unpacked(3, 8.0), False),
        (unpacked(4, 7.0), False),
        (lambda packed, scale: from_int4(packed.view(torch.int8), scale), False),
    ],
)
def test_packed_integers_are_taken_apart(kernel: Callable[..., Any], passes: bool) -> None:
    cases = [make(DTYPES["float32"]) for make in from_int4.examples.values()]
    assert {case["packed"].dtype.name for case in cases} == {"uint8"}
    assert max(int(case["packed"].max(initial=0)) for case in cases) == 255
    checks = ["forward", "memory"]
    claims = Claims(dtypes=("float32",))
    verdict = fourfold.verify(kernel, from_int4, device="cpu", claims=claims, only=checks, examples=4, seed=0)
    assert verdict.passed == passes, str(verdict)


@operation(
    q=tensor("rows cols", dtype="float8_e5m2"), scale=tensor("cols", dtype="float32"), returns="float32", tried=False
)
def from_float8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale


@pytest.mark.full
def test_a_float8_input_is_exact_and_its_scale_has_a_gradient_of_its_own_dtype() -> None:
    assert from_float8.differentiable == ("scale",)
    checks = ["forward", "backward", "memory", "sharing", "modes", "bad input"]
    verdict = fourfold.verify(
        from_float8.definition, from_float8, device="cpu", dtypes=["bfloat16"], only=checks, examples=4, seed=0
    )
    assert {outcome.outcome for outcome in verdict.outcomes} == {"passed"}, str(verdict)
    for wrong in (
        lambda q, scale: q.float() * scale.bfloat16(),
        lambda q, scale: (q.float() * scale).bfloat16().float(),
        lambda q, scale: q.to(torch.float8_e4m3fn).float() * scale,
    ):
        verdict = fourfold.verify(
            wrong, from_float8, device="cpu", dtypes=["bfloat16"], only=["forward"], examples=4, seed=0
        )
        assert not verdict.passed, str(verdict)


@operation(x=tensor("rows cols"), weight=tensor("cols", dtype=torch.float32), sizes={"cols": (1, 64)}, tried=False)
def scaled_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def in_half_of_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute in the dtype of the weight, as a kernel may."""
    return in_float32(x.float(), weight).to(x.dtype)


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@operation(q=tensor("rows cols", dtype=FLOAT8), scale=tensor("cols", dtype="float32"), returns="float32", tried=False)
def from_either(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale


@pytest.mark.parametrize("read_as", FLOAT8)
def test_a_kernel_of_both_types_of_float8_is_called_with_both(read_as: str) -> None:
    """A kernel that takes one type for the other is found."""

    def kernel(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q.view(getattr(torch, read_as)).float() * scale

    options = {"device": "cpu", "dtypes": ["float32"], "only": ["forward"], "seed": 0}
    assert fourfold.verify(from_either.definition, from_either, **options).passed
    [other] = set(FLOAT8) - {read_as}
    verdict = fourfold.verify(kernel, from_either, **options)
    assert not verdict.passed
    assert other in str(verdict)


@pytest.mark.full
def test_a_weight_of_float32_beside_half_data_has_a_gradient_of_float32() -> None:
    case = scaled_rows.examples["ordinary"](DTYPES["bfloat16"])
    assert [case[name].dtype.name for name in ("x", "weight")] == ["bfloat16", "float32"]
    checks = ["forward", "backward", "single gradients", "graph", "interleaving"]
    right = fourfold.verify(in_float32, scaled_rows, device="cpu", dtypes=["bfloat16"], only=checks, examples=4, seed=0)
    assert right.passed, str(right)
    checks = ["forward", "backward", "gradcheck"]
    usual = Claims(dtypes=("float64",), finite=True, largest=1e15)
    wide = fourfold.verify(in_half_of_float64, scaled_rows, device="cpu", claims=usual, only=checks, examples=4, seed=0)
    assert [outcome.outcome for outcome in wide.outcomes] == ["passed", "passed", "unsupported"], str(wide)
    coarse = fourfold.verify(
        lambda x, weight: in_float32(x, weight.bfloat16().float()),
        scaled_rows,
        device="cpu",
        dtypes=["bfloat16"],
        only=["backward"],
        examples=4,
        seed=0,
    )
    assert not coarse.passed


@operation(x=tensor("rows 16", gradient=False))
def codes_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return float8 codes, which scaling x by a power of 2 does not change."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x / torch.where(largest == 0, 1.0, largest) * 448).to(torch.float8_e4m3fn).to(x.dtype)


def test_other_numbers_are_drawn_anew_where_scaled_ones_change_no_result() -> None:
    subject = subject_of(codes_of_blocks, codes_of_blocks)
    case = codes_of_blocks.examples["ordinary"](DTYPES["float32"])
    expected, of_other = (expected_results(subject, each) for each in (case, change_values(subject, case)))
    assert distinguishes(subject, of_other, expected)


def test_a_check_without_a_useful_case_is_no_failure_under_pytest_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws_nothing(subject: Subject, search: Search) -> None:
        raise Unsatisfiable("no case")

    monkeypatch.setattr(checks, "check_named", lambda name: replace(check_named(name), run=draws_nothing))
    with pytest.raises(Unsupported) as caught:
        checks.check_test("threads")(subject_of(codes_of_blocks, codes_of_blocks), Search(examples=1))
    cell = Cell("codes_of_blocks", CANDIDATE, "float32")
    assert caught.value.exclusion is not None
    assert shortcomings({cell: [Status.PASSED, caught.value.exclusion]}, [], [], [cell.operation], False) == []
