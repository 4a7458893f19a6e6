"""Elementwise operations on two tensors in Triton: their kernels, around functions of elements."""

import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fourfold.backends.elementwise import register_binary
from fourfold.backends.launch import FEW_ELEMENTS, cdiv
from fourfold.backends.triton import launch as triton_launch

# Elements of a program where there are strides: their addresses take registers. And where there are few elements.
STRIDED_BLOCK, FEW_BLOCK = 1024, 256


def of(*elements: Any) -> Any:
    """Stand for an operation's function of elements, which `specialized` puts in its place."""


@triton.jit
def binary_block(a_ptr, b_ptr, output_ptr, at, mask, COMPUTE: tl.constexpr):
    """Write of(a, b) at some places; a mask of None stands for all."""
    a = tl.load(a_ptr + at, mask=mask).to(COMPUTE)
    b = tl.load(b_ptr + at, mask=mask).to(COMPUTE)
    tl.store(output_ptr + at, of(a, b).to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def binary_kernel(
    a_ptr,  # [n]
    b_ptr,  # [n]
    output_ptr,  # [n]
    n,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,  # whether 16 does not divide n: only without a mask are 16 bytes loaded at once
):
    """Write of(a, b) of tensors that lie alike."""
    # One program owns BLOCK consecutive elements.
    start = tl.program_id(0).to(INDEX) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if RAGGED:
        if start + BLOCK <= n:
            binary_block(a_ptr, b_ptr, output_ptr, at, None, COMPUTE)
        else:
            binary_block(a_ptr, b_ptr, output_ptr, at, at < n, COMPUTE)
    else:
        binary_block(a_ptr, b_ptr, output_ptr, at, at < n, COMPUTE)


@triton.jit
def binary_strided_kernel(
    a_ptr,  # [outer, middle, inner], strided
    b_ptr,  # [outer, middle, inner], strided
    output_ptr,  # [outer * middle * inner]
    n,
    middle,
    inner,
    a_outer_stride,
    a_middle_stride,
    a_inner_stride,
    b_outer_stride,
    b_middle_stride,
    b_inner_stride,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write of(a, b) of tensors of any strides."""
    # One program owns BLOCK consecutive elements of the output.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    row = at // inner
    column = (at - row * inner).to(tl.int64)
    plane = row // middle
    row = (row - plane * middle).to(tl.int64)
    plane = plane.to(tl.int64)
    a_at = plane * a_outer_stride + row * a_middle_stride + column * a_inner_stride
    b_at = plane * b_outer_stride + row * b_middle_stride + column * b_inner_stride
    a = tl.load(a_ptr + a_at, mask=mask).to(COMPUTE)
    b = tl.load(b_ptr + b_at, mask=mask).to(COMPUTE)
    tl.store(output_ptr + at, of(a, b).to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def binary_gradients_block(
    grad_output_ptr,
    a_ptr,
    b_ptr,
    grad_a_ptr,
    grad_b_ptr,
    at,
    mask,
    NEEDS_A: tl.constexpr,
    NEEDS_B: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Write the gradients that are needed at some places; a mask of None stands for all."""
    grad_output = tl.load(grad_output_ptr + at, mask=mask).to(COMPUTE)
    a = tl.load(a_ptr + at, mask=mask).to(COMPUTE)
    b = tl.load(b_ptr + at, mask=mask).to(COMPUTE)
    grad_a, grad_b = of(grad_output, a, b)  # the compiler drops what only an unneeded gradient is made of
    if NEEDS_A:
        tl.store(grad_a_ptr + at, grad_a.to(grad_a_ptr.dtype.element_ty), mask=mask)
    if NEEDS_B:
        tl.store(grad_b_ptr + at, grad_b.to(grad_b_ptr.dtype.element_ty), mask=mask)


@triton.jit
def binary_gradients_kernel(
    grad_output_ptr,  # [n]
    a_ptr,  # [n]
    b_ptr,  # [n]
    grad_a_ptr,  # [n], or [0] if it is not needed
    grad_b_ptr,  # [n], or [0]
    n,
    NEEDS_A: tl.constexpr,
    NEEDS_B: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,  # as in binary_kernel
):
    """Write the gradients that are needed, of(grad_output, a, b)."""
    # One program owns BLOCK consecutive elements.
    start = tl.program_id(0).to(INDEX) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if RAGGED:
        if start + BLOCK <= n:
            binary_gradients_block(
                grad_output_ptr, a_ptr, b_ptr, grad_a_ptr, grad_b_ptr, at, None, NEEDS_A, NEEDS_B, COMPUTE
            )
        else:
            binary_gradients_block(
                grad_output_ptr, a_ptr, b_ptr, grad_a_ptr, grad_b_ptr, at, at < n, NEEDS_A, NEEDS_B, COMPUTE
            )
    else:
        binary_gradients_block(
            grad_output_ptr, a_ptr, b_ptr, grad_a_ptr, grad_b_ptr, at, at < n, NEEDS_A, NEEDS_B, COMPUTE
        )


def specialized(kernel: Any, function: Any, name: str) -> Any:
    """Return a kernel around a function of elements, in place of `of`.

    Args:
        kernel: one of this module.
        function: a `triton.jit` function of the elements that the kernel loads, and that returns the elements to store.
        name: the compiled kernel's name.
    """
    code = kernel.fn
    named = {name: code.__globals__.get(name) for name in code.__code__.co_names}
    around = {n: specialized(each, function, n) for n, each in named.items() if isinstance(each, type(kernel))}
    clone = types.FunctionType(code.__code__, {**code.__globals__, **around, "of": function}, code.__name__)
    clone.__annotations__, clone.__module__ = code.__annotations__, code.__module__
    found: Any = triton.jit(clone, repr=lambda _: name)
    if isinstance(found, triton.JITFunction):  # the interpreter's functions have their code's name
        found.__name__ = name
    return found


def block_of(x: torch.Tensor, usual: int) -> int:
    """Return the elements of a program for tensors like x."""
    return FEW_BLOCK if x.numel() <= FEW_ELEMENTS[x.device.type] else usual


def launch(kernel: Any, block: int, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...], **flags: bool) -> None:
    """Launch a kernel of this module with a program for each block of elements; the first size is their number."""
    options = {"COMPUTE": triton_launch.COMPUTE[tensors[0].dtype], "INDEX": triton_launch.index_type(sizes[0] + block)}
    triton_launch.launch(kernel, (cdiv(sizes[0], block),), tensors, sizes, **flags, **options, BLOCK=block)


def forward_launches(name: str, function: Any, block_bytes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the launches that `register_binary` takes, for tensors that lie alike and for any strides."""
    flat_kernel = specialized(binary_kernel, function, f"{name}_forward_kernel")
    strided_kernel = specialized(binary_strided_kernel, function, f"{name}_strided_kernel")

    def flat(a: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> None:
        block = block_of(a, block_bytes // a.element_size())
        launch(flat_kernel, block, (a, b, output), (a.numel(),), RAGGED=a.numel() % 16 != 0)

    def strided(a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, *sizes: int) -> None:
        launch(strided_kernel, STRIDED_BLOCK, (a, b, output), sizes)

    return flat, strided


def additive(
    definition: Callable[..., torch.Tensor], forward: Any, block_bytes: int = 4096
) -> Callable[..., torch.Tensor]:
    """Return an operation as `elementwise` does, whose gradients are both the cotangent, as for a sum."""
    return register_binary(definition, "triton", *forward_launches(definition.__name__, forward, block_bytes))


def elementwise(
    definition: Callable[..., torch.Tensor], forward: Any, backward: Any, block_bytes: int = 4096
) -> Callable[..., torch.Tensor]:
    """Return an elementwise operation on two tensors in Triton, with checked arguments.

    Args:
        definition: the operation in torch, with a signature.
        forward: a `triton.jit` function of two elements.
        backward: one of the cotangent's element and both inputs', which returns both gradients'.
        block_bytes: the bytes of one tensor that a program loads.
    """
    kernel = specialized(binary_gradients_kernel, backward, f"{definition.__name__}_backward_kernel")

    def gradients(*given: Any) -> None:
        *tensors, needs_a, needs_b = given
        sizes, block = (tensors[0].numel(),), block_of(tensors[0], block_bytes // tensors[0].element_size())
        launch(kernel, block, tuple(tensors), sizes, NEEDS_A=needs_a, NEEDS_B=needs_b, RAGGED=sizes[0] % 16 != 0)

    launches = forward_launches(definition.__name__, forward, block_bytes)
    return register_binary(definition, "triton", *launches, gradients)
