"""Planted faults: kernels that leave their work to torch, all of it or where it is hard."""

import numpy as np
import torch

from properties import checks
from properties.case import Case
from properties.dtypes import DType

from .planted import Fault


class NamedSoftmax(torch.autograd.Function):
    """torch's, whose name a look at the backward's graph does not show."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        result = torch.softmax(x, -1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_output: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad_output, result, -1, result.dtype)


def whole_vectors_alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A kernel for whole vectors, and torch for what they leave over."""
    from impls.vector_add.triton_kernel import vector_add

    return vector_add(x, y) if x.numel() % 8 == 0 else x + y


def thirty_two(dtype: DType) -> Case:
    """Whole vectors of every type."""
    x, y, grad_output = np.random.default_rng(0).normal(size=(3, 32)).astype(dtype.numpy)
    return Case({"x": x, "y": y}, grad_output)


FAULTS = (
    Fault(
        name="softmax_of_torch_under_another_name",
        operation="softmax",
        make=lambda: lambda x: NamedSoftmax.apply(x),
        check=checks.nothing_is_left_to_torch,
        says=r"leaves to torch .*: aten\._softmax, aten\._softmax_backward_data",
        right_on=None,
        search=10,
    ),
    Fault(
        name="torch_for_what_whole_vectors_leave_over",
        operation="vector_add",
        make=lambda: whole_vectors_alone,
        check=checks.nothing_is_left_to_torch,
        says=r"leaves to torch .*: aten\.add",
        right_on=thirty_two,
        search=10,
    ),
)
