"""Planted faults in cumsum: in small kernels of Triton and CUDA C++, and in torch."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.cumsum.arguments import check_cumsum
from fourfold.properties import cumsum as properties
from fourfold.properties.cumsum import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation, differentiable

BLOCK = 64


@triton.jit
def cumsum_kernel(
    x_ptr,
    offsets_ptr,
    output_ptr,
    n,
    row_stride,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    FAULT: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns a segment of a row, one tile after another.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    begin = tl.load(offsets_ptr + tl.program_id(1))
    end = tl.load(offsets_ptr + tl.program_id(1) + 1)
    first = begin
    if FAULT == "segments_by_subtraction":
        first = begin * 0
    carry = tl.zeros((), C)
    before_segment = tl.zeros((), C)
    for tile in range(tl.cdiv(end - first, BLOCK)):
        place = first + tile * BLOCK + tl.arange(0, BLOCK)
        column = place
        if REVERSE:
            column = begin + end - 1 - place
            if FAULT == "reversed_within_tiles":
                column = begin + tile * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
        inside = (column >= first) & (column < end)
        x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(C)
        sums = carry + tl.cumsum(x, axis=0)
        if FAULT == "summed_in_the_dtype":
            sums = sums.to(output_ptr.dtype.element_ty).to(C)
        if FAULT == "segments_by_subtraction":
            before_segment += tl.sum(tl.where(column < begin, x, 0.0), axis=0)
            sums = sums - before_segment
        if EXCLUSIVE and FAULT != "inclusive_always":
            if FAULT == "exclusive_by_subtraction":
                sums = sums - x
            else:
                # Shift by one: the sum of what is at lower places.
                at = tl.arange(0, BLOCK)
                earlier = column + 1 if REVERSE else column - 1
                inside_before = (earlier >= begin) & (earlier < end) & (at > 0)
                shifted = tl.load(x_ptr + row * row_stride + earlier, mask=inside_before, other=0.0).to(C)
                sums = carry - before_segment + tl.cumsum(shifted, axis=0)
        tl.store(output_ptr + row * n + column, sums.to(output_ptr.dtype.element_ty), mask=inside & (column >= begin))
        total = tl.sum(x, axis=0)
        if FAULT == "summed_in_the_dtype":
            carry = (carry + total).to(output_ptr.dtype.element_ty).to(C)
        elif FAULT == "carry_of_one_tile":
            carry = total
        elif FAULT != "carry_lost":
            carry += total


def ends_of(x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the offsets, or those of one segment: int64, without gaps."""
    ends = torch.tensor([0, x.shape[-1]], device=x.device) if offsets is None else offsets
    return ends.to(torch.int64).contiguous()


def in_triton(fault: str = "") -> Implementation:
    """Return cumsum in Triton for any dtype, with a fault."""

    def run(back: bool, x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            flat, ends = x.reshape(-1, x.shape[-1]), ends_of(x, offsets)
            flat = flat if flat.stride(-1) == 1 else flat.contiguous()
            backward = back and fault != "backward_from_the_same_end"
            with triton_launch.on(x.device):
                cumsum_kernel[(len(flat), len(ends) - 1)](
                    *(flat, ends, output, x.shape[-1], flat.stride(0)),
                    EXCLUSIVE=exclusive,
                    REVERSE=reverse != backward,
                    FAULT=fault,
                    C=triton_launch.COMPUTE[x.dtype],
                    BLOCK=BLOCK,
                )
        return output

    return of_passes(functools.partial(run, False), lambda grad, _, x, **given: (run(True, grad, **given),))


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "cumsum_kernel")


def sums_of(x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
    """Return the right sums, segment by segment."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for begin, end in itertools.pairwise(ends_of(x, offsets).tolist()):
        part = x[..., begin:end].flip(-1) if reverse else x[..., begin:end]
        if exclusive:
            part = torch.cat((torch.zeros_like(part[..., :1]), part[..., :-1]), -1)
        output[..., begin:end] = part.cumsum(-1).flip(-1) if reverse else part.cumsum(-1)
    return output


def gradient(grad: torch.Tensor, _: Any, x: Any, offsets: Any, exclusive: bool, reverse: bool) -> tuple[torch.Tensor]:
    return (sums_of(grad, offsets, exclusive, not reverse),)


def of_passes(forward: Callable[..., torch.Tensor], backward: Callable[..., tuple] = gradient) -> Implementation:
    return differentiable(("x",), forward, backward, check_cumsum, offsets=None, exclusive=False, reverse=False)


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return cumsum in CUDA C++ for float32, with a fault."""

    def forward(x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            flat, ends = x.reshape(-1, x.shape[-1]), ends_of(x, offsets)
            flat = flat if flat.stride(-1) == 1 else flat.contiguous()
            sizes = (x.shape[-1], flat.stride(0), exclusive, reverse)
            KERNELS.launch("cumsum_kernel", fault, (len(flat), len(ends) - 1), BLOCK, flat, ends, output, *sizes)
        return output

    return of_passes(forward)


def shifted_twice(x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
    output = sums_of(x, offsets, exclusive, reverse)
    return output.roll(-1 if reverse else 1, -1) if exclusive else output


def reverse_ignored(x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
    return sums_of(x, offsets, exclusive, False)


def segments_ignored(x: torch.Tensor, offsets: Any, exclusive: bool, reverse: bool) -> torch.Tensor:
    return sums_of(x, None, exclusive, reverse)


def gradient_from_the_same_end(grad: torch.Tensor, _: Any, x: Any, **given: Any) -> tuple[torch.Tensor]:
    return (sums_of(grad, **given),)


def _of_torch(formula: Callable[..., Any], check: Check = forward_agrees, says: str = OUTPUT) -> Fault:
    passes = (sums_of, formula) if formula is gradient_from_the_same_end else (formula,)
    right_on = {segments_ignored: "one_segment", gradient_from_the_same_end: None}.get(
        formula, "one_warp_and_one_column"
    )
    return Fault(
        name=formula.__name__,
        operation="cumsum",
        make=lambda: of_passes(*passes),
        check=check,
        says=says,
        right_on=None if check is not forward_agrees else right_on,
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("cumsum", in_triton, in_cuda, right_on="one_warp_and_one_column")
    nine = far_apart(rows(9, 5))
    leaking = named(properties, "not_finite_beside_segments")
    return (
        of_triton("carry_lost"),
        of_triton("carry_of_one_tile"),
        of_triton("inclusive_always"),
        of_triton("reversed_within_tiles"),
        of_triton("segments_by_subtraction", examples=leaking),
        of_triton("exclusive_by_subtraction", source="https://github.com/fla-org/flash-linear-attention/pull/1095"),
        of_triton("summed_in_the_dtype", dtype="float16", source="https://github.com/ml-explore/mlx/pull/3907"),
        of_triton("offsets_in_32_bits", examples=nine, source="https://github.com/pytorch/pytorch/issues/143486"),
        of_triton("backward_from_the_same_end", check=backward_agrees, says=GRADIENT, right_on=None),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
        of_cuda("last_column_dropped", check=memory_is_respected, says=UNWRITTEN, right_on=None),
        of_cuda("carry_lost"),
        of_cuda("warps_not_added", right_on="columns_not_a_multiple_of_16"),
        of_cuda("own_warp_added", right_on=None),
        _of_torch(reverse_ignored),
        _of_torch(segments_ignored),
        _of_torch(shifted_twice, law(properties.inclusive_less_exclusive_is_the_element), "left side"),
        _of_torch(gradient_from_the_same_end, law(properties.gradients_are_sums_from_the_other_end), "left side"),
        *(
            Fault(
                name=f"{formula.__name__}_by_its_law",
                operation="cumsum",
                make=functools.partial(of_passes, formula),
                check=law(held),
                says="left side",
                right_on=None,
            )
            for formula, held in (
                (reverse_ignored, properties.from_the_end_is_the_mirror_image),
                (segments_ignored, properties.a_segment_does_not_see_the_others),
            )
        ),
    )


FAULTS = _faults()
