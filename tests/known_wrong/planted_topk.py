"""Planted faults in topk: in small kernels of Triton and CUDA C++, and in torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.topk.arguments import check_topk
from fourfold.properties import topk as properties
from fourfold.properties.topk import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import next_power_of_2
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import outputs_fit

from .far_apart import far_apart
from .planted import GRADIENT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation

THREADS, LIMIT = 64, 256
Outputs = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    n,
    row_stride,
    k,
    LARGEST: tl.constexpr,
    FAULT: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns a row, and takes the best of what is left k times.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    left = column < n
    x = tl.load(x_ptr + row * row_stride + column, mask=left, other=0.0).to(C)
    if FAULT == "padded_with_zeros":
        left = column < BLOCK
    key = x if LARGEST else -x
    if FAULT == "compared_in_float16":
        key = key.to(tl.float16).to(C)
    whole = left
    for place in range(k):
        nans = (left & (key != key)).to(tl.int32)
        numbers = left & (key == key)
        if LARGEST:
            takes_nan = tl.max(nans, axis=0) > 0
        else:
            takes_nan = tl.max(numbers.to(tl.int32), axis=0) == 0
        best = tl.max(tl.where(numbers, key, -float("inf")), axis=0)
        found = numbers & (key == best)
        if FAULT != "nan_never_found":
            found = (takes_nan & (nans > 0)) | (found & (takes_nan == 0))
        if FAULT == "index_of_the_first_tie":
            found = whole & (key == best)
        if FAULT == "last_column_of_the_block":
            index = tl.max(tl.where(found | (column >= n) & (best == -float("inf")), column, -1), axis=0)
        else:
            index = tl.min(tl.where(found, column, BLOCK), axis=0)
        value = tl.sum(tl.where(column == index, x, 0.0), axis=0)
        if FAULT == "rounded_to_bfloat16":
            value = value.to(tl.bfloat16).to(C)
        at = k - 1 - place if FAULT == "the_smallest_first" else place
        tl.store(values_ptr + row * k + at, value.to(values_ptr.dtype.element_ty))
        tl.store(indices_ptr + row * k + at, index.to(tl.int64))
        if FAULT == "ties_left_out":
            left = left & (key != best)
        else:
            left = left & (column != index)


class Wired(torch.autograd.Function):
    """topk from a forward and a backward pass; its gradient goes to the chosen places unless a fault says otherwise."""

    @staticmethod
    def forward(ctx: Any, forward: Callable, backward: Callable, x: torch.Tensor, k: int, largest: bool) -> Outputs:
        values, indices = forward(x, k, largest)
        ctx.save_for_backward(x, indices)
        ctx.backward, ctx.largest = backward, largest
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
        x, indices = ctx.saved_tensors
        return None, None, ctx.backward(grad, x, indices, ctx.largest), None, None


def scattered(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, largest: bool) -> torch.Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format).scatter(-1, indices, grad)


def of_passes(forward: Callable[..., Outputs], backward: Callable[..., torch.Tensor] = scattered) -> Implementation:
    def topk(x: torch.Tensor, k: int, largest: bool = True) -> Outputs:
        check_topk(x, k, largest)
        return Wired.apply(forward, backward, x, k, largest)

    return topk  # type: ignore[return-value]


def empty(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values and indices, not written yet, and x as rows without gaps in them."""
    values = torch.empty((*x.shape[:-1], k), dtype=x.dtype, device=x.device)
    indices = torch.empty((*x.shape[:-1], k), dtype=torch.int64, device=x.device)
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x
    return values, indices, flat if flat.stride(-1) == 1 else flat.contiguous()


def in_triton(fault: str = "") -> Implementation:
    """Return topk in Triton for any dtype, with a fault."""

    def forward(x: torch.Tensor, k: int, largest: bool) -> Outputs:
        values, indices, flat = empty(x, k)
        if values.numel():
            n = x.shape[-1]
            n = min(n, LIMIT) if fault == "a_block_of_a_row" else n
            with triton_launch.on(x.device):
                topk_kernel[(len(flat),)](
                    *(flat, values, indices, n, flat.stride(0), k),
                    LARGEST=largest,
                    FAULT=fault,
                    C=triton_launch.COMPUTE[x.dtype],
                    BLOCK=next_power_of_2(n),
                )
        return values, indices

    return of_passes(forward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "topk_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return topk in CUDA C++ for float32, with a fault."""

    def forward(x: torch.Tensor, k: int, largest: bool) -> Outputs:
        values, indices, flat = empty(x, k)
        if values.numel():
            sizes = (len(flat), x.shape[-1], flat.stride(0), k, largest)
            KERNELS.launch("topk_kernel", fault, -(-len(flat) // THREADS), THREADS, flat, values, indices, *sizes)
        return values, indices

    return of_passes(forward)


def right(x: torch.Tensor, k: int, largest: bool) -> Outputs:
    values, indices = torch.topk(x, k, largest=largest)
    return values, indices


def in_order_of_places(x: torch.Tensor, k: int, largest: bool) -> Outputs:
    indices = right(x, k, largest)[1].sort(-1).values
    return x.gather(-1, indices), indices


def smallest_in_magnitude(x: torch.Tensor, k: int, largest: bool) -> Outputs:
    indices = right(x if largest else x.abs(), k, largest)[1]
    return x.gather(-1, indices), indices


def indices_of_32_bits(x: torch.Tensor, k: int, largest: bool) -> Outputs:
    values, indices = right(x, k, largest)
    return values, indices.int()


def to_every_tie(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, largest: bool) -> torch.Tensor:
    ties = x[..., None] == x.gather(-1, indices)[..., None, :]
    return torch.where(ties, grad[..., None, :], 0).sum(-1)


def divided_among_ties(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, largest: bool) -> torch.Tensor:
    ties = (x[..., None] == x.gather(-1, indices)[..., None, :]).to(x.dtype)
    return (ties * (grad[..., None, :] / ties.sum(-2, keepdim=True).clamp(min=1))).sum(-1)


def chosen_again(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor, largest: bool) -> torch.Tensor:
    """The gradient of a call that chooses again, and other ones of equal numbers."""
    return scattered(grad, x, x.shape[-1] - 1 - right(x.flip(-1), indices.shape[-1], largest)[1], largest)


def _of_torch(
    name: str,
    check: Check,
    says: str,
    output: str = "values",
    forward: Callable[..., Outputs] = right,
    backward: Callable[..., torch.Tensor] = scattered,
    **more: Any,
) -> Fault:
    make = functools.partial(of_passes, forward, backward)
    given = {"right_on": "one_column", **more}
    return Fault(name=name, operation="topk", make=make, check=check, says=says, output=output, **given)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("topk", in_triton, in_cuda, right_on="one_column", output="values")
    nine, of_indices = far_apart(rows(9, 5)), {"output": "indices"}
    nan, negative_nan = (named(properties, f"nan_is_{what}") for what in ("the_largest", "not_the_smallest"))
    gradient = {"check": backward_agrees, "says": GRADIENT}
    from_zero = "https://github.com/vllm-project/vllm/pull/42608"
    same_nan = "https://github.com/vllm-project/vllm/pull/39391"
    return (
        of_triton("index_of_the_first_tie", **of_indices),
        of_triton("ties_left_out", **of_indices),
        of_triton(
            "nan_never_found", examples=nan, source="https://github.com/sgl-project/sglang/pull/30079", **of_indices
        ),
        of_triton("padded_with_zeros", examples=named(properties, "below_zero"), right_on="the_largest_alone"),
        of_triton("last_column_of_the_block", examples=named(properties, "all_minus_infinity"), **of_indices),
        of_triton("compared_in_float16", examples=named(properties, "numbers_next_to_each_other")),
        of_triton("rounded_to_bfloat16", right_on="all_minus_infinity"),
        of_triton("the_smallest_first"),
        of_triton("a_block_of_a_row"),
        of_triton("offsets_in_32_bits", examples=nine, source="https://github.com/pytorch/pytorch/issues/95455"),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("last_block_dropped", check=memory_is_respected, says=UNWRITTEN, **of_indices),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
        of_cuda("ties_left_out", **of_indices),
        of_cuda("nan_never_chosen", examples=nan, source="https://github.com/pytorch/pytorch/issues/16762"),
        of_cuda("sign_of_nan_counts", examples=negative_nan, source="https://github.com/pytorch/pytorch/issues/117617"),
        of_cuda("best_begins_at_zero", source=from_zero, right_on="the_largest_alone", **of_indices),
        of_cuda("the_same_nan_every_time", examples=named(properties, "all_nan"), source=same_nan, **of_indices),
        _of_torch(
            "indices_of_32_bits", forward_agrees, "has dtype torch.int32", "indices", indices_of_32_bits, right_on=None
        ),
        _of_torch("to_every_tie", output="values", backward=to_every_tie, **gradient),
        _of_torch("divided_among_ties", output="values", backward=divided_among_ties, **gradient),
        _of_torch("chosen_again", outputs_fit, "gradient of x is not the cotangent", "", backward=chosen_again),
        _of_torch(
            "smallest_in_magnitude",
            law(properties.the_smallest_are_the_largest_negated),
            "left side",
            forward=smallest_in_magnitude,
        ),
        _of_torch(
            "in_order_of_places",
            law(properties.fewer_are_the_first_of_more),
            "left side",
            forward=in_order_of_places,
            right_on="all_alike",
        ),
        _of_torch(
            "to_every_tie_by_its_law",
            law(properties.each_cotangent_goes_to_one_place),
            "left side",
            backward=to_every_tie,
        ),
    )


FAULTS = _faults()
