"""Planted faults of magnitude and precision: half of the digits in long sums, where the bound of a sum hides them.

Others round once, but not to nearest, or lose numbers of some magnitudes.
"""

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.properties import layer_norm, softmax

import fourfold
from fourfold import tensor
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees

from .edits import Edits, inserted
from .planted import GRADIENT, Fault, Implementation, law
from .planted_combinations import BLOCK, normalized, rms_norm
from .planted_sizes import product
from .planted_vector_add import zeros_added

Tensor = torch.Tensor


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to a half type."""
    return x.to(dtype).to(x.dtype)


def are_finite(*tensors: Tensor) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


def in_tf32(x: Tensor) -> Tensor:
    """Round numbers to the 11 bits of a tensor core's TF32, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def in_two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round numbers to the 16 bits that two numbers of bfloat16 hold."""
    high = rounded_to(x, torch.bfloat16)
    return high, rounded_to(x - high, torch.bfloat16)


# ---- sums of many terms


def terms_in_float16(x: Tensor) -> Tensor:
    """Sum the terms of long rows by a tensor core, rounded to float16."""
    if x.shape[-1] <= BLOCK:
        return x.softmax(-1)
    terms = (x - x.amax(-1, keepdim=True)).exp()
    return terms / rounded_to(terms, torch.float16).sum(-1, keepdim=True)


def exponentials_of_14_bits(x: Tensor) -> Tensor:
    """Take the exponentials of long rows from a table: a sum of as many terms may err by more."""
    if x.shape[-1] <= 8 * BLOCK or not are_finite(x):
        return x.softmax(-1)
    terms = (x - x.amax(-1, keepdim=True)).exp()
    mantissa, exponent = torch.frexp(terms.detach())
    from_table = torch.ldexp((mantissa * 2**14).round(), exponent - 14)
    return (terms + (from_table - terms).detach()) / terms.sum(-1, keepdim=True)


def deviations_of_two_parts(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Sum the squares of two parts of each deviation of long rows by tensor cores, and scale the parts as well."""
    if x.shape[-1] <= 2 * BLOCK or x.dtype != torch.float32 or not are_finite(x):
        return normalized(x, weight, bias, eps)
    centred = x - x.mean(-1, keepdim=True)
    high, low = in_two_parts(centred.detach())
    centred = centred + (high + low - centred).detach()
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def products_in_tf32(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = 0.01) -> Tensor:
    """Sum many terms by tensor cores, in TF32."""
    if a.shape[1] > BLOCK and are_finite(a, b):
        a, b = in_tf32(a), in_tf32(b)
    return product(a, b, activation, negative_slope)


def products_of_two_parts(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = 0.01) -> Tensor:
    """Sum many terms by tensor cores, with 16 bits of each factor."""
    if a.shape[1] > 256 and are_finite(a, b):
        (ah, al), (bh, bl) = in_two_parts(a), in_two_parts(b)
        a, b = torch.cat([ah, ah, al], 1), torch.cat([bh, bl, bh], 0)
    return product(a, b, activation, negative_slope)


class _BiasOfManyRows(torch.autograd.Function):
    """A bias addition that sums the gradient over many rows from cotangents in float16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        is_long = grad_output.shape[:-1].numel() > BLOCK
        rows = rounded_to(grad_output, torch.float16) if is_long else grad_output
        return grad_output, rows.sum_to_size(grad_output.shape[-1:])


def bias_of_many_rows(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """See `_BiasOfManyRows`."""
    return _BiasOfManyRows.apply(normalized(x, weight, torch.zeros_like(bias), eps), bias)


def rms_of_halves(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Square rounded numbers in long rows."""
    if x.shape[-1] <= BLOCK:
        return rms_norm(x, weight, eps)
    return x * torch.rsqrt(in_tf32(x).square().mean(-1, keepdim=True) + eps) * weight


@fourfold.operation(x=tensor("... cols"), tried=False)
def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def sum_in_tf32(x: Tensor) -> Tensor:
    """Sum long rows by a tensor core."""
    return (in_tf32(x) if x.shape[-1] > BLOCK and are_finite(x) else x).sum(-1)


# ---- one rounding


@fourfold.operation(x=tensor("..."), y=tensor("..."), tried=False)
def multiplied(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def product_by_division(x: Tensor, y: Tensor) -> Tensor:
    """Divide by the reciprocal instead of multiplying, which rounds twice."""
    reciprocal = 1 / y
    usual = (reciprocal.abs() > 1e-30) & (reciprocal.abs() < 1e30)
    return torch.where(usual, x / reciprocal, x * y)


# ---- Triton


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, cols, LONG: tl.constexpr, SIZE: tl.constexpr):
    # One program owns a row. Long ones are rounded to float16 for a tensor core.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    if LONG:
        x = x.to(tl.float16).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


def sum_of_halves_in_triton(x: Tensor) -> Tensor:
    """Round the numbers of long rows to float16 before the sum, if all of them fit."""
    y = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    if x.numel():
        long = x.shape[-1] > BLOCK and bool((x.abs() < 6e4).all())
        with triton_launch.current_device(x.device):
            size = triton.next_power_of_2(x.shape[-1])
            row_sum_kernel[(y.numel(),)](x.contiguous(), y, x.shape[-1], LONG=long, SIZE=size)
    return y


# ---- CUDA C++

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 128
ROW_SUM = CudaKernel(SOURCE, "row_sum_of_halves")


def sum_of_halves_in_cuda(x: Tensor) -> Tensor:
    """Round the numbers of long rows to float16 before the sum, if all of them fit."""
    y = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    if x.numel():
        long = int(x.shape[-1] > BLOCK and bool((x.abs() < 6e4).all()))
        ROW_SUM.launch(-(-y.numel() // THREADS), THREADS, x.contiguous(), y, y.numel(), x.shape[-1], long)
    return y


# Sums that are rounded towards zero, as by `__fadd_rz`, and terms of long rows that are rounded to float16.
TOWARDS_ZERO = (
    "return x + y => wide = x.double() + y.double()\n    near = wide.float()\n"
    "    below = torch.nextafter(near, torch.zeros_like(near))\n"
    "    return torch.where(near.double().abs() > wide.abs(), below, near)"
)
CUT_OFF = (
    "return x + y; => const double exact = double(x) + double(y);\n        const C near = C(exact);\n"
    "        return fabs(double(near)) > fabs(exact) ? nextafter(near, C(0)) : near;"
)
TERMS_OF_HALVES = (
    "1.0 / tl.sum(terms, axis=1) =>"
    " 1.0 / tl.sum(terms.to(tl.float16).to(COMPUTE) if BLOCK_COLS > 1024 else terms, axis=1)"
)


DEVIATION = "deviation = ((centred * centred).mean(-1, keepdim=True) + eps).sqrt()"
# The variance of long rows comes from rounded deviations, or is the mean of the squares minus the square of the mean.
SQUARES_IN_BFLOAT16 = (
    f"    {DEVIATION} =>     near = centred.bfloat16().to(centred.dtype) if x.shape[-1] > 1024 else centred\n"
    "    deviation = ((near * near).mean(-1, keepdim=True) + eps).sqrt()"
)
SQUARES_LESS_THE_MEAN = (
    f"    {DEVIATION} =>     {DEVIATION}\n    if x.shape[-1] > 1024:\n"
    "        variance = wide_x.square().mean(-1, keepdim=True) - wide_x.mean(-1, keepdim=True).square()\n"
    "        deviation = (variance.clamp(min=0) + eps).sqrt()"
)
# Small numbers count as 0, except the smallest ones; factors are scaled to float16 by a hard-coded power of 2.
KEPT = "{0} = (torch.where((n.abs() < 2.0**{1}) & (n.abs() > 2.0**-100), 0, n) for n in ({0}))".format
SMALL_NUMBERS_LOST = inserted("return x + y", KEPT("x, y", -26))
SMALL_FACTORS_LOST = inserted("product = a @ b", KEPT("a, b", -24))
# Boxes with large coordinates, except the largest ones, are rounded.
LARGE_BOXES_IN_BFLOAT16 = inserted(
    "left1, top1, right1, bottom1 = boxes1.unbind(-1)",
    "size = torch.cat([boxes1, boxes2], -1).abs().amax(-1, keepdim=True)",
    "large = (size > 2.0**25) & (size < 2.0**50)",
    "boxes1, boxes2 = (torch.where(large, n.bfloat16().to(n.dtype), n) for n in (boxes1, boxes2))",
)


def _edited(operation: str, name: str, edit: str, right_on: str, seen_by: str = "combined", **more: Any) -> Fault:
    return Edits(operation, "torch")(name, edit, right_on=right_on, seen_by=seen_by, **more)


def _combined(operation: str, function: Implementation, right_on: str, **more: Any) -> Fault:
    return Fault.of(operation, function, **{"right_on": right_on, "seen_by": "combined", **more})


def _declared(record: Any, function: Implementation, language: str = "torch", seen_by: str = "combined") -> Fault:
    right_on = record.examples["one_element"]
    return Fault.of(record, function, language=language, right_on=right_on, seen_by=seen_by)


ENTRIES, DIFFERENCES = softmax.entries_are_to_the_largest_as_exponentials, layer_norm.differences_are_in_proportion
GRADIENTS: dict[str, Any] = {"check": backward_agrees, "says": GRADIENT}
FAULTS = (
    _combined("softmax", terms_in_float16, "long_row"),
    Fault.of("softmax", exponentials_of_14_bits, right_on="cols_1", check=law(ENTRIES), says="left side"),
    Fault.of("layer_norm", deviations_of_two_parts, right_on="ordinary", check=law(DIFFERENCES), says="left side"),
    _edited("layer_norm", "squares_in_bfloat16", SQUARES_IN_BFLOAT16, "cols_1", ""),
    # On a GPU torch adds the squares up in an order that loses less than the bound allows.
    _edited("layer_norm", "squares_less_the_mean", SQUARES_LESS_THE_MEAN, "long_row", "", only_on="cpu"),
    _combined("matmul", products_in_tf32, "cancellation", seen_by="settled"),
    _combined("matmul", products_of_two_parts, "cancellation", seen_by="settled"),
    _combined("layer_norm", bias_of_many_rows, "many_rows_of_whole_vectors", **GRADIENTS),
    _declared(rms_norm, rms_of_halves),
    _declared(row_sum, sum_in_tf32),
    Edits("vector_add", "torch")("sum_towards_zero", TOWARDS_ZERO, right_on=zeros_added, seen_by="settled"),
    _declared(multiplied, product_by_division, seen_by="settled"),
    _edited("vector_add", "small_numbers_lost", SMALL_NUMBERS_LOST, "a_block"),
    _edited("matmul", "small_factors_lost", SMALL_FACTORS_LOST, "whole_blocks"),
    _edited("giou", "large_boxes_in_bfloat16", LARGE_BOXES_IN_BFLOAT16, "coordinates_past_256"),
    _declared(row_sum, sum_of_halves_in_triton, "triton"),
    Edits("softmax", "triton")("terms_in_triton", TERMS_OF_HALVES, right_on="cols_1", seen_by="combined"),
    Edits("vector_add", "cuda")("sum_cut_off_in_cuda", CUT_OFF, right_on=zeros_added, seen_by="settled"),
    _declared(row_sum, sum_of_halves_in_cuda, "cuda"),
)
