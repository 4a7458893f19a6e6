"""Planted faults in softmax and vector_add, in torch."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fourfold.impls.softmax.torch_eager import softmax as softmax_in_torch
from fourfold.impls.vector_add.torch_eager import vector_add as definition
from fourfold.properties import softmax as softmax_properties
from fourfold.properties import vector_add as vector_add_properties

from fourfold.backends.signature import signature_of
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.saved_tensors import backward_is_of_the_call
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .planted import Check, Fault, law
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor

CHECK = signature_of(softmax_in_torch).check


check_vector_add = signature_of(definition).check


def wire(
    names: tuple[str, ...],
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple],
    check: Callable[..., None],
) -> Implementation:
    """Make an implementation from a forward pass on the inputs and a backward pass on grad_output and the output."""

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            output = forward(*tensors)
            ctx.save_for_backward(output)
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:
            return backward(grad_output, *ctx.saved_tensors)

    def implementation(**tensors: Any) -> Tensor:
        ordered = [tensors[name] for name in names]
        check(*ordered)
        return Wired.apply(*ordered)

    return implementation


def largest(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(())


def quotient(terms: Tensor) -> Tensor:
    return terms / terms.sum(-1, keepdim=True)


def right(x: Tensor) -> Tensor:
    return quotient((x - largest(x)).exp())


def gradient(grad: Tensor, y: Tensor) -> Tensor:
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def softmax(
    forward: Callable[[Tensor], Tensor] = right,
    backward: Callable[[Tensor, Tensor], Tensor] = gradient,
    check: Callable[..., None] = CHECK,
    compute: Callable[[Tensor], Tensor] = in_compute_dtype,
) -> Implementation:
    """Return softmax with some steps changed."""
    return wire(
        ("x",),
        lambda x: forward(compute(x)).to(x.dtype),
        lambda grad, y: (backward(compute(grad), compute(y)).to(y.dtype),),
        check,
    )


def output_kept_unguarded() -> Implementation:
    """Keep the output for backward without save_for_backward, so autograd cannot detect a change to it."""
    return differentiable(
        ("x",),
        right,
        lambda grad, y, x: (gradient(grad, y),),
        lambda x: CHECK(x),
        guarded=False,
    )


def last_column_forgotten(x: Tensor) -> Tensor:
    terms = (x - largest(x)).exp()
    return terms / terms[..., :-1].sum(-1, keepdim=True) if x.shape[-1] > 1 else quotient(terms)


def tail_of_16_forgotten(x: Tensor) -> Tensor:
    terms = (x - largest(x)).exp()
    cols = x.shape[-1]
    return terms / terms[..., : cols - cols % 16 if cols > 16 else cols].sum(-1, keepdim=True)


def padded_with_zeros(x: Tensor) -> Tensor:
    """Pad with 0 instead of -inf, as a masked load does."""
    wide = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16))
    return right(wide)[..., : x.shape[-1]]


def summed_in_bfloat16(x: Tensor) -> Tensor:
    terms = (x - largest(x)).exp()
    total = terms.new_zeros((*terms.shape[:-1], 1), dtype=torch.bfloat16)
    for block in terms.bfloat16().split(64, -1):
        total += block.sum(-1, keepdim=True)
    return terms / total.to(terms.dtype)


def online_without_rescaling(x: Tensor) -> Tensor:
    """Do not rescale the sum of earlier blocks when the maximum rises."""
    if x.shape[-1] <= 4096:
        return right(x)
    total = 0
    for start in range(0, x.shape[-1], 4096):
        seen = largest(x[..., : start + 4096])
        total = total + (x[..., start : start + 4096] - seen).exp().nan_to_num(0).sum(-1, keepdim=True)
    return (x - largest(x)).exp() / total


def nan_dropped(x: Tensor) -> Tensor:
    return right(torch.where(x.isnan(), -torch.inf, x))


def nothing_for_masked_rows(x: Tensor) -> Tensor:
    return torch.where((x == -torch.inf).all(-1, keepdim=True), 0, right(x))


def largest_of_all_rows(x: Tensor) -> Tensor:
    return quotient((x - x.max()).exp()) if x.numel() else right(x)


def vector_add(
    forward: Callable[[Tensor, Tensor], Tensor] = torch.add,
    backward: Callable[[Tensor], tuple] = lambda grad: (grad, grad),
    check: Callable[..., None] = check_vector_add,
) -> Implementation:
    """Return vector_add with some steps changed."""
    return wire(("x", "y"), forward, lambda grad, _: backward(grad), check)


def tail_of_1024_unwritten(x: Tensor, y: Tensor) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    full = x.numel() - x.numel() % 1024 if x.numel() > 1024 else x.numel()
    output.view(-1)[:full] = (x + y).reshape(-1)[:full]
    return output


def memory_order(x: Tensor, y: Tensor) -> Tensor:
    """Read both inputs in the order of x's memory, whatever y's order is."""
    order = sorted(range(x.ndim), key=y.stride, reverse=True)
    return x + y.permute(order).reshape(x.shape)


def twice_rounded(x: Tensor, y: Tensor) -> Tensor:
    return (x.float().bfloat16() + y.float().bfloat16()).to(x.dtype)


def cotangent_of_zeros(dtype: DType) -> Case:
    """Return a case with a grad_output of 0, whose gradient is 0 with or without the sum."""
    return Case({"x": np.eye(3).astype(dtype.numpy)}, np.zeros((3, 3), dtype=dtype.numpy))


def zeros_added(dtype: DType) -> Case:
    """Return a case of zeros, for which sum and difference agree."""
    zeros = np.zeros(3, dtype=dtype.numpy)
    return Case({"x": zeros, "y": zeros}, np.arange(3).astype(dtype.numpy))


def _faults() -> tuple[Fault, ...]:
    forward, backward = forward_agrees, backward_agrees
    left = r"left side.* is .*expected"
    laws = softmax_properties

    def no_sum(grad: Tensor, y: Tensor) -> Tensor:
        return y * grad

    def fault(operation: str, name: str, check: Check, make: Callable, says: str, right_on: Any, **more: Any) -> Fault:
        return Fault(name=name, operation=operation, check=check, make=make, says=says, right_on=right_on, **more)

    of, adding = functools.partial(fault, "softmax"), functools.partial(fault, "vector_add")
    forgotten = functools.partial(softmax, last_column_forgotten)
    zeros = functools.partial(softmax, padded_with_zeros)
    without_sum = functools.partial(softmax, backward=no_sum)
    output, slope = r"output.* is .*expected", r"gradient of x.* is .*expected"
    return (
        of("no_maximum", forward, lambda: softmax(lambda x: quotient(x.exp())), output, "two_columns"),
        of("last_column_forgotten", forward, forgotten, output, "cols_1"),
        of("last_column_forgotten", law(laws.rows_sum_to_one), forgotten, left, "cols_1"),
        of("last_column_forgotten", law(laws.entries_lie_between_zero_and_one), forgotten, left, "cols_1"),
        of("last_column_forgotten", law(laws.columns_may_change_places), forgotten, left, "cols_1"),
        of("tail_of_16_forgotten", forward, lambda: softmax(tail_of_16_forgotten), output, "long_row"),
        of("padded_with_zeros", forward, zeros, output, "long_row"),
        of("padded_with_zeros", law(laws.adding_a_number_to_a_row_changes_nothing), zeros, left, "long_row"),
        of("padded_with_zeros", law(laws.masked_columns_add_nothing), zeros, left, None),
        of("summed_in_bfloat16", forward, lambda: softmax(summed_in_bfloat16), output, "two_columns", dtype="bfloat16"),
        of("computed_in_half", forward, lambda: softmax(compute=lambda x: x), output, "cols_1", dtype="bfloat16"),
        of("online_without_rescaling", forward, lambda: softmax(online_without_rescaling), output, "two_columns"),
        of("nan_dropped", forward, lambda: softmax(nan_dropped), output, "two_columns"),
        of("masked_rows_zero", forward, lambda: softmax(nothing_for_masked_rows), output, "two_columns"),
        of("largest_of_all_rows", forward, lambda: softmax(largest_of_all_rows), output, "two_columns"),
        of(
            "largest_of_all_rows",
            law(laws.a_row_does_not_see_the_others),
            lambda: softmax(largest_of_all_rows),
            left,
            "two_columns",
        ),
        of("first_axis", forward, lambda: softmax(lambda x: x.softmax(0)), output, "without_leading_axes"),
        of("sum_left_out", backward, without_sum, slope, cotangent_of_zeros),
        of("sum_left_out", law(laws.gradients_of_a_row_sum_to_zero), without_sum, left, None),
        of("sum_left_out", law(laws.a_constant_cotangent_gives_no_gradient), without_sum, left, None),
        of("no_gradient", backward, lambda: softmax(backward=lambda g, y: y * 0), slope, "cols_1"),
        of(
            "mean_for_sum",
            backward,
            lambda: softmax(backward=lambda g, y: y * (g - (g * y).mean(-1, keepdim=True))),
            slope,
            "cols_1",
        ),
        of("output_kept_unguarded", backward_is_of_the_call, output_kept_unguarded, "after the output was", None),
        of(
            "scalars_accepted",
            declared_errors_are_raised,
            lambda: softmax(check=lambda x: None),
            "in place of|was raised",
            None,
        ),
        adding(
            "tail_unwritten", forward, lambda: vector_add(tail_of_1024_unwritten), output, "one_element", poisoned=True
        ),
        adding("memory_order_of_x", forward, lambda: vector_add(memory_order), output, "one_element"),
        adding("twice_rounded", forward, lambda: vector_add(twice_rounded), output, zeros_added),
        adding(
            "broadcasts",
            declared_errors_are_raised,
            lambda: vector_add(check=lambda x, y: None),
            "in place of|was raised",
            None,
        ),
        adding(
            "difference",
            law(vector_add_properties.a_number_and_its_negative_cancel),
            lambda: vector_add(torch.sub),
            left,
            zeros_added,
        ),
        adding(
            "difference",
            law(vector_add_properties.the_order_of_the_terms_does_not_matter),
            lambda: vector_add(torch.sub),
            left,
            zeros_added,
        ),
        adding(
            "twice_rounded",
            law(vector_add_properties.adding_zero_changes_nothing),
            lambda: vector_add(twice_rounded),
            left,
            zeros_added,
        ),
        adding(
            "gradient_halved",
            law(vector_add_properties.gradients_are_the_cotangent),
            lambda: vector_add(backward=lambda g: (g, g / 2)),
            left,
            None,
        ),
        adding(
            "gradient_of_y_left_out",
            backward,
            lambda: vector_add(backward=lambda g: (g, g * 0)),
            "gradient of y",
            None,
        ),
    )


FAULTS = _faults()
