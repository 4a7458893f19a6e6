"""Planted faults: kernels that leave all of the work, or the hard part, to torch."""

from typing import Any

import numpy as np
import torch

from fourfold.checks.fallback import nothing_is_left_to_torch
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .planted import Fault, Implementation


class NamedSoftmax(torch.autograd.Function):
    """torch's softmax in an autograd.Function, so that the autograd graph does not show torch's name."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_output: torch.Tensor) -> torch.Tensor:
        (x,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            result = torch.softmax(x, -1)
        return torch.autograd.grad(result, x, grad_output)[0]


def softmax_of_torch_under_another_name(x: torch.Tensor) -> torch.Tensor:
    return NamedSoftmax.apply(x)


def torch_for_what_whole_vectors_leave_over(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Use a kernel for whole vectors, and torch for the remaining elements."""
    from fourfold.impls.vector_add.triton_kernel import vector_add

    return vector_add(x, y) if x.numel() % 8 == 0 else x + y


def thirty_two(dtype: DType) -> Case:
    """Return 32 elements, which are whole vectors of every dtype."""
    x, y, grad_output = np.random.default_rng(0).normal(size=(3, 32)).astype(dtype.numpy)
    return Case({"x": x, "y": y}, grad_output)


def _left(function: Implementation, operation: str, says: str, **more: Any) -> Fault:
    said = rf"computes with torch: {says}"
    return Fault.of(operation, function, check=nothing_is_left_to_torch, says=said, search=10, **more)


FAULTS = (
    _left(softmax_of_torch_under_another_name, "softmax", r"aten\._softmax, aten\._softmax_backward_data"),
    _left(torch_for_what_whole_vectors_leave_over, "vector_add", r"aten\.add", right_on=thirty_two),
)
