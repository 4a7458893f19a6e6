"""Two Triton kernels for softmax over the last axis: one that is right, and one with a common mistake.

`fourfold tour` verifies both. Nothing here imports Fourfold: your kernel need not import it either.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_forward_kernel(
    x_ptr,  # [rows, cols]
    output_ptr,  # [rows, cols]
    cols,
    SUBTRACT_MAXIMUM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row.
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)
    mask = col < cols
    x = tl.load(x_ptr + row * cols + col, mask=mask, other=-float("inf")).to(COMPUTE)
    if SUBTRACT_MAXIMUM:
        x = x - tl.max(x, axis=0)
    terms = tl.exp(x)
    tl.store(output_ptr + row * cols + col, terms / tl.sum(terms, axis=0), mask=mask)


@triton.jit
def softmax_backward_kernel(
    grad_output_ptr,  # [rows, cols]
    output_ptr,  # [rows, cols]
    grad_x_ptr,  # [rows, cols]
    cols,
    COMPUTE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    # One program owns one row: grad_x = y (g - sum(g y)).
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)
    mask = col < cols
    grad = tl.load(grad_output_ptr + row * cols + col, mask=mask, other=0.0).to(COMPUTE)
    output = tl.load(output_ptr + row * cols + col, mask=mask, other=0.0).to(COMPUTE)
    inner = tl.sum(grad * output, axis=0)
    tl.store(grad_x_ptr + row * cols + col, output * (grad - inner), mask=mask)


def computed_in(x: torch.Tensor) -> tl.dtype:
    """Return float64 for float64, and float32 for narrower types."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


class Softmax(torch.autograd.Function):
    """The kernels as one differentiable function of a tensor of any shape and strides."""

    @staticmethod
    def forward(ctx, x, subtract_maximum):  # type: ignore[no-untyped-def]
        """Launch one program a row."""
        x = x.contiguous()
        output = torch.empty_like(x)
        if x.numel():
            cols = x.shape[-1]
            block = triton.next_power_of_2(cols)
            softmax_forward_kernel[(x.numel() // cols,)](x, output, cols, subtract_maximum, computed_in(x), block)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        """Launch one program a row."""
        (output,) = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_x = torch.empty_like(output)
        if output.numel():
            cols = output.shape[-1]
            block = triton.next_power_of_2(cols)
            softmax_backward_kernel[(output.numel() // cols,)](
                grad_output, output, grad_x, cols, computed_in(output), block
            )
        return grad_x, None


def _checked(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, not {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError("x must have at least one axis")
    return x


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x - max(x)) / sum(exp(x - max(x))) over the last axis."""
    return Softmax.apply(_checked(x), True)


def softmax_without_maximum(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) / sum(exp(x)): the same in exact arithmetic, but exp(x) overflows where x is above 88."""
    return Softmax.apply(_checked(x), False)
