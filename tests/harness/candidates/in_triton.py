"""Candidates that import only torch and Triton, as a user's file does."""

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if MASKED:
        x = tl.load(x_ptr + at, mask=mask)
        y = tl.load(y_ptr + at, mask=mask)
    else:
        x = tl.load(x_ptr + at)
        y = tl.load(y_ptr + at)
    tl.store(output_ptr + at, x + y, mask=mask)


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, y: torch.Tensor, masked: bool) -> torch.Tensor:
        x, y = x.contiguous(), y.contiguous()
        output = torch.empty_like(x)
        if output.numel():
            add_kernel[(triton.cdiv(output.numel(), BLOCK),)](x, y, output, output.numel(), BLOCK=BLOCK, MASKED=masked)
        return output

    @staticmethod
    def backward(ctx: object, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad_output, grad_output, None


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Add.apply(x, y, True)


def subtract(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Add.apply(x, -y, True)


def add_without_mask_on_its_loads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Add.apply(x, y, False)
