"""Planted faults in scaled_matmul: in small kernels of Triton and CUDA C++, and in torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.scaled_matmul.arguments import BLOCK, check_scaled_matmul
from fourfold.properties import scaled_matmul as properties
from fourfold.properties.scaled_matmul import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import cdiv
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation

Tensor = torch.Tensor
THREADS, TILE, STEP = 64, 32, 64


@triton.jit
def scaled_matmul_kernel(
    a_ptr,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    c_ptr,
    m,
    n,
    k,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
):
    # One program owns a tile [TILE, TILE] of the result.
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    a_rows = row * a_row_stride
    if FAULT == "offsets_in_32_bits":
        a_rows = row.to(tl.int32) * tl.cast(a_row_stride, tl.int32)
    blocks = tl.cdiv(k, BLOCK)
    total = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for step in range(tl.cdiv(k, STEP)):
        term = step * STEP + tl.arange(0, STEP)
        there = term < k
        if FAULT == "terms_unmasked":
            there = term >= 0
        a_ptrs = a_ptr + a_rows[:, None] + term.to(tl.int64)[None, :] * a_column_stride
        b_ptrs = b_ptr + column[None, :] * b_row_stride + term.to(tl.int64)[:, None] * b_column_stride
        a_bits = tl.load(a_ptrs, mask=(row < m)[:, None] & there[None, :], other=0).to(tl.int32)
        b_bits = tl.load(b_ptrs, mask=(column < n)[None, :] & there[:, None], other=0).to(tl.int32)
        a = ((a_bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        b = ((b_bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        if FAULT != "nan_is_480":
            a = tl.where((a_bits & 0x7F) == 0x7F, float("nan"), a)
            b = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b)
        if FAULT == "subnormal_is_0":
            a = tl.where((a_bits & 0x78) == 0, 0.0, a)
        if FAULT != "sign_dropped":
            a = tl.where((a_bits & 0x80) != 0, -a, a)
        b = tl.where((b_bits & 0x80) != 0, -b, b)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        last = (step + 1) * STEP >= k
        if FAULT == "last_scale_not_applied":
            last = k - step * STEP < STEP
        if (step + 1) * STEP % BLOCK == 0 or last:
            p = step * STEP // BLOCK
            if FAULT == "first_scale_of_all_blocks":
                p = 0
            if FAULT == "step_is_the_block":
                p = min(step, blocks - 1)
            of_columns = column // BLOCK
            if FAULT == "first_columns_scale":
                of_columns = column // BLOCK * 0
            scale_a = tl.load(scale_a_ptr + row * blocks + p, mask=row < m, other=0.0)
            scale_b = tl.load(scale_b_ptr + of_columns * blocks + p, mask=column < n, other=0.0)
            total += sums * (scale_a[:, None] * scale_b[None, :])
            sums = tl.zeros((TILE, TILE), tl.float32)
            if FAULT == "total_in_bfloat16":
                total = total.to(tl.bfloat16).to(tl.float32)
    c_ptrs = c_ptr + row[:, None] * n + column[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "scaled_matmul_kernel")


def checked(product: Callable[..., Tensor], check: Callable[..., None] = check_scaled_matmul) -> Implementation:
    def scaled_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        check(a, b, scale_a, scale_b, out_dtype)
        return product(a, b, scale_a, scale_b).to(out_dtype)

    return scaled_matmul


def in_triton(fault: str = "") -> Implementation:
    """Return scaled_matmul in Triton, with a fault."""

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[0]
        output = torch.empty((m, n), device=a.device)
        if output.numel():
            with triton_launch.on(a.device):
                scaled_matmul_kernel[(cdiv(m, TILE), cdiv(n, TILE))](
                    *(a.view(torch.uint8), b.view(torch.uint8), scale_a.contiguous(), scale_b.contiguous(), output),
                    *(m, n, k, *a.stride(), *b.stride()),
                    FAULT=fault,
                    BLOCK=BLOCK,
                    STEP=STEP,
                    TILE=TILE,
                )
        return output

    return checked(product)


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return scaled_matmul in CUDA C++, with a fault."""

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[0]
        output = torch.empty((m, n), device=a.device)
        if output.numel():
            tensors = a.view(torch.uint8), b.view(torch.uint8), scale_a.contiguous(), scale_b.contiguous(), output
            sizes = m, n, k, *a.stride(), *b.stride()
            KERNELS.launch("scaled_matmul_kernel", fault, cdiv(m * n, THREADS), THREADS, *tensors, *sizes)
        return output

    return checked(product)


# ---- in torch


def summed(left: Tensor, right: Tensor) -> Tensor:
    return left.float() @ right.float().t()


def in_bfloat16(left: Tensor, right: Tensor) -> Tensor:
    """A sum of few terms at a time, each of which is rounded to bfloat16."""
    total = torch.zeros(len(left), len(right), dtype=torch.bfloat16, device=left.device)
    for a, b in zip(left.split(16, 1), right.split(16, 1)):
        total += summed(a, b).to(torch.bfloat16)
    return total.float()


def in_14_bits(left: Tensor, right: Tensor) -> Tensor:
    """As Hopper's tensor cores of float8: 32 products and the sum so far, aligned to the largest, keep 14 bits each."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for a, b in zip(left.split(32, 1), right.split(32, 1)):
        terms = torch.cat([a.double()[:, None] * b.double()[None], total[..., None]], -1)
        unit = torch.ldexp(torch.ones_like(total), torch.frexp(terms.abs().amax(-1)).exponent - 14)
        total = (torch.trunc(terms / unit[..., None])).sum(-1) * unit
    return total.float()


def in_blocks(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    add_up: Callable[[Tensor, Tensor], Tensor] = summed,
) -> Tensor:
    total = torch.zeros(len(a), len(b), device=a.device)
    of_columns = scale_b.repeat_interleave(BLOCK, 0)[: len(b)]
    for p, start in enumerate(range(0, a.shape[1], BLOCK)):
        terms = slice(start, start + BLOCK)
        total += add_up(a[:, terms], b[:, terms]) * (scale_a[:, p : p + 1] * of_columns[:, p])
    return total


def dequantised(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers times their scales are rounded to a dtype, and multiplied by a library. In float32 this is right."""
    of_terms = torch.arange(a.shape[1], device=a.device) // BLOCK
    left = (a.float() * scale_a[:, of_terms]).to(dtype)
    right = (b.float() * scale_b.repeat_interleave(BLOCK, 0)[: len(b)][:, of_terms]).to(dtype)
    return summed(left, right)


dequantised_to_bfloat16 = functools.partial(dequantised, dtype=torch.bfloat16)


def one_scale_of_all(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The first scale of b stands for all of them, as of a tensor that has one."""
    return in_blocks(a, b, scale_a, scale_b[:1, :1].expand_as(scale_b))


def scales_transposed(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The memory of the scales of a is read column by column."""
    return in_blocks(a, b, scale_a.contiguous().view(scale_a.shape[::-1]).t(), scale_b)


def saturated(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """NaN becomes the largest number."""
    return in_blocks(*(x.float().nan_to_num(448.0).to(x.dtype) for x in (a, b)), scale_a, scale_b)


def scales_in_powers_of_2(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Scales of a are rounded up to powers of 2, which the next generation's tensor cores take."""
    fraction, exponent = torch.frexp(scale_a)
    power = torch.ldexp(torch.ones_like(scale_a), torch.where(fraction == 0.5, exponent - 1, exponent))
    return in_blocks(a, b, torch.where(scale_a > 0, power, scale_a), scale_b)


def offset(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return in_blocks(a, b, scale_a, scale_b) + 0.25


def last_block_twice(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """A pipeline that ends late adds the last of several blocks of terms twice."""
    total, begins = in_blocks(a, b, scale_a, scale_b), (a.shape[1] - 1) // BLOCK * BLOCK
    if begins > 0:
        total += in_blocks(a[:, begins:], b[:, begins:], scale_a[:, -1:], scale_b[:, -1:])
    return total


def _of_torch(name: str, product: Callable[..., Tensor], check: Check = forward_agrees, **more: Any) -> Fault:
    given = {"right_on": "no_terms", "says": OUTPUT, **more}
    make = functools.partial(checked, product)
    return Fault(name=name, operation="scaled_matmul", make=make, check=check, **given)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("scaled_matmul", in_triton, in_cuda, right_on="one_row")
    nine, nan = far_apart(rows(9, 5, 7)), named(properties, "nan_of_each_sign")
    left = {"says": "left side"}
    of_tiles, digits = (
        "https://github.com/mlc-ai/TIRx-kernels/pull/5",
        "https://github.com/deepseek-ai/DeepGEMM/issues/37",
    )
    return (
        of_triton("first_scale_of_all_blocks", source=of_tiles),
        of_triton("step_is_the_block", source="https://github.com/tile-ai/TileOPs/pull/1666", right_on="one_row"),
        of_triton(
            "last_scale_not_applied",
            examples={"half_a_block": rows(3, 5, 192)},
            source="https://github.com/pytorch/FBGEMM/issues/6159",
        ),
        of_triton("first_columns_scale"),
        of_triton("nan_is_480", examples=nan, source="https://github.com/ml-explore/mlx/pull/4164"),
        of_triton("subnormal_is_0", right_on="no_terms"),
        of_triton("sign_dropped", right_on="no_terms"),
        of_triton("total_in_bfloat16", right_on="no_terms"),
        of_triton("offsets_in_32_bits", examples=nine),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
        of_cuda("tail_of_terms_dropped", source="https://github.com/NVIDIA/cutlass/issues/3536"),
        of_cuda("scales_by_launch_coordinates", source="https://github.com/NVIDIA/cutlass/pull/3394"),
        of_cuda("each_half_begins_at_the_first_scale", source="https://github.com/NVIDIA/cutlass/pull/3615"),
        of_cuda("blocks_of_equal_width", source="https://github.com/vllm-project/vllm/pull/49596"),
        of_cuda("e5m2_misread", right_on="no_terms"),
        _of_torch("in_bfloat16", functools.partial(in_blocks, add_up=in_bfloat16), right_on="one_by_one"),
        _of_torch("in_14_bits", functools.partial(in_blocks, add_up=in_14_bits), right_on="one_by_one", source=digits),
        _of_torch("dequantised_to_bfloat16", dequantised_to_bfloat16),
        _of_torch("dequantised_to_bfloat16_for_bfloat16", dequantised_to_bfloat16, dtype="bfloat16"),
        _of_torch("one_scale_of_all", one_scale_of_all, right_on="one_row"),
        _of_torch("scales_transposed", scales_transposed, right_on="one_row"),
        _of_torch("saturated", saturated, right_on="one_row"),
        _of_torch("scales_in_powers_of_2", scales_in_powers_of_2),
        _of_torch("offset", offset, law(properties.a_power_of_2_goes_through), right_on=None, **left),
        _of_torch(
            "last_block_twice", last_block_twice, law(properties.blocks_of_terms_add_up), right_on="one_row", **left
        ),
        _of_torch(
            "scales_in_powers_of_2_by_its_law",
            scales_in_powers_of_2,
            law(properties.the_identity_gives_a_with_its_scales),
            right_on=rows(3, 5, 7, scale="ones"),
            **left,
        ),
        _of_torch(
            "first_scale_of_b_by_its_law",
            one_scale_of_all,
            law(properties.blocks_of_columns_stand_alone),
            right_on="one_row",
            **left,
        ),
        Fault(
            name="arguments_not_checked",
            operation="scaled_matmul",
            make=functools.partial(checked, in_blocks, lambda *_: None),
            check=declared_errors_are_raised,
            says="does not name|in place of|was raised",
            right_on=None,
        ),
    )


FAULTS = _faults()
