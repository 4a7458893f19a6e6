"""Planted faults in matmul, in torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from fourfold.impls.matmul.arguments import check_matmul
from fourfold.properties import matmul as matmul_properties

from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .planted import Check, Fault, law
from .steps import Implementation, in_compute_dtype

Tensor = torch.Tensor
BLOCK = 32


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in the compute dtype and round once."""
    return in_compute_dtype(a) @ in_compute_dtype(b)


def activate(x: Tensor, activation: str, slope: float) -> Tensor:
    if activation == "relu":
        return torch.where(x <= 0, 0, x)
    return torch.where(x > 0, x, x * slope) if activation == "leaky_relu" else x


def through(grad: Tensor, y: Tensor, activation: str, slope: float) -> Tensor:
    if activation == "relu":
        return torch.where(y <= 0, 0, grad)
    return torch.where(y > 0, grad, grad * slope) if activation == "leaky_relu" else grad


def through_any_where_flat(grad: Tensor, y: Tensor, activation: str, slope: float) -> Tensor:
    """Let the gradient through where y >= 0, which with slope 0 is everywhere, instead of where the product was > 0."""
    return grad if activation == "leaky_relu" and slope == 0 else through(grad, y, activation, slope)


def matmul(
    product: Callable[[Tensor, Tensor], Tensor] = multiply,
    act: Callable[[Tensor, str, float], Tensor] = activate,
    grad_of_act: Callable[[Tensor, Tensor, str, float], Tensor] = through,
    grads: Callable[[Tensor, Tensor, Tensor], tuple] | None = None,
    check: Callable[..., None] = check_matmul,
    fused: Callable[[Tensor, Tensor, str, float], Tensor] | None = None,
) -> Implementation:
    """Return matmul with some steps changed, or with another forward pass that includes the activation."""

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, activation: str, slope: float) -> Tensor:
            if fused is not None:
                output = fused(a, b, activation, slope)
            else:
                output = act(product(a, b), activation, slope).to(a.dtype)
            ctx.save_for_backward(a, b, output)
            ctx.how = activation, slope
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:
            a, b, output = ctx.saved_tensors
            grad = grad_of_act(grad_output, output, *ctx.how)
            if grads is not None:
                return *(g.to(a.dtype) for g in grads(grad, a, b)), None, None
            return product(grad, b.t()).to(a.dtype), product(a.t(), grad).to(b.dtype), None, None

    def implementation(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = 0.01) -> Tensor:
        check(a, b, activation, negative_slope)
        return Wired.apply(a, b, activation, negative_slope)

    return implementation


def summed_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """Sum block after block of terms in a dtype of too low precision."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    for left, right in zip(a.split(16, 1), b.split(16, 0)):
        total += multiply(left, right).to(dtype)
    return in_compute_dtype(total)


def in_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Round the factors to TF32's 10 bits of mantissa."""
    bits = [(x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF for x in (a, b)]
    return bits[0].view(torch.float32) @ bits[1].view(torch.float32)


def tail_of_terms_forgotten(a: Tensor, b: Tensor) -> Tensor:
    whole = a.shape[1] - a.shape[1] % BLOCK if a.shape[1] > BLOCK else a.shape[1]
    return multiply(a[:, :whole], b[:whole])


def last_rows_of_the_last_block_repeated(a: Tensor, b: Tensor) -> Tensor:
    """Shift the last partial block of rows back to be whole, but store it at its unshifted place."""
    output = multiply(a, b)
    if a.shape[0] > BLOCK and a.shape[0] % BLOCK:
        begins = a.shape[0] - a.shape[0] % BLOCK
        output[begins:] = multiply(a[a.shape[0] - BLOCK :], b)[: a.shape[0] - begins]
    return output


def gap_read(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Multiply the gap behind the rows by 0 instead of masking it, although it may hold NaN."""
    behind = matrix.shape[0] > 1 and matrix.stride(1) == 1 and matrix.stride(0) > matrix.shape[1]
    return blocks + torch.nan if behind else blocks


def unmasked_terms(a: Tensor, b: Tensor) -> Tensor:
    return gap_read(a, multiply(a, b))


def contiguous_assumed(a: Tensor, b: Tensor) -> Tensor:
    """Ignore strides: read the memory of a transposed matrix as if it were contiguous."""
    if a.stride() == (1, a.shape[0]) and a.shape[0] > 1 and a.shape[1] > 1:
        a = a.t().reshape(a.shape)
    return multiply(a, b)


def zeros_skipped(a: Tensor, b: Tensor) -> Tensor:
    """Skip terms whose first factor is 0, so that 0 times infinity is 0."""
    wide_a, wide_b = in_compute_dtype(a), in_compute_dtype(b)
    if wide_b.isfinite().all():
        return wide_a @ wide_b
    terms = wide_a[:, :, None] * wide_b[None]
    return torch.where(wide_a[:, :, None] == 0, 0, terms).sum(1)


def empty_where_no_terms(a: Tensor, b: Tensor) -> Tensor:
    """Leave the result unwritten if k is 0."""
    if a.shape[1] == 0:
        return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return multiply(a, b)


def first_block_of_terms_doubled(a: Tensor, b: Tensor) -> Tensor:
    """Add the first block of terms twice if there is a second one, as a wrong pipeline does."""
    output = multiply(a, b)
    return output + multiply(a[:, :BLOCK], b[:BLOCK]) if a.shape[1] > BLOCK else output


def above_0(dtype: DType) -> Case:
    """Return a case with a positive product, which no activation changes."""
    return matmul_properties.example([[1, 2]], [[3], [0.5]], "relu")(dtype)


def _faults() -> tuple[Fault, ...]:
    forward, backward = forward_agrees, backward_agrees
    output, left = r"output.* is .*expected", r"left side.* is .*expected"
    laws = matmul_properties

    def of(name: str, check: Check, make: Callable, says: str, right_on: Any = "one_by_one", **more: Any) -> Fault:
        return Fault(name=name, operation="matmul", check=check, make=make, says=says, right_on=right_on, **more)

    tail = functools.partial(matmul, tail_of_terms_forgotten)
    doubled = functools.partial(matmul, first_block_of_terms_doubled)
    repeated = functools.partial(matmul, last_rows_of_the_last_block_repeated)
    swapped = functools.partial(matmul, grads=lambda g, a, b: (multiply(g, b.t()), multiply(g.t(), a).t() * 2))
    shifted = functools.partial(matmul, lambda a, b: multiply(a, b) + 0.25)
    always_leaky = functools.partial(
        matmul, act=lambda x, how, slope: activate(x, *(("leaky_relu", 0.5) if how == "relu" else (how, slope)))
    )
    in_bfloat16 = functools.partial(summed_in, torch.bfloat16)
    in_float16 = functools.partial(summed_in, torch.float16)
    return (
        of(
            "summed_in_bfloat16",
            forward,
            lambda: matmul(in_bfloat16),
            output,
            dtype="bfloat16",
            source="https://github.com/modular/modular/issues/7165",
        ),
        of(
            "slope_of_0_passes_every_gradient",
            backward,
            lambda: matmul(grad_of_act=through_any_where_flat),
            "gradient of",
            "outer_product",
            source="https://github.com/chainer/chainer/pull/5898",
        ),
        of("summed_in_float16", forward, lambda: matmul(in_float16), output, dtype="float16"),
        of("tf32_unasked", forward, lambda: matmul(in_tf32), output),
        of("tail_of_terms_forgotten", forward, tail, output),
        of("tail_of_terms_forgotten", law(laws.terms_may_be_summed_in_two_parts), tail, left),
        of("first_block_doubled", forward, doubled, output),
        of("first_block_doubled", law(laws.multiplying_by_the_identity_changes_nothing), doubled, left),
        of("last_block_repeated", forward, repeated, output),
        of("last_block_repeated", law(laws.rows_and_columns_stand_alone), repeated, left),
        of("gap_of_nan_read", forward, lambda: matmul(unmasked_terms), output),
        of("contiguous_assumed", forward, lambda: matmul(contiguous_assumed), output),
        of("zeros_skipped", forward, lambda: matmul(zeros_skipped), output),
        of("no_terms_unwritten", forward, lambda: matmul(empty_where_no_terms), output, poisoned=True),
        of("offset", law(laws.doubling_a_doubles_the_result), shifted, left, None),
        of("relu_leaks", forward, always_leaky, output),
        of("relu_leaks", law(laws.leaky_relu_of_slope_zero_is_relu), always_leaky, left, above_0),
        of(
            "slope_squared",
            law(laws.leaky_relu_of_slope_one_is_no_activation),
            lambda: matmul(act=lambda x, how, slope: activate(x, how, slope / 2)),
            left,
            "no_rows",
        ),
        of(
            "nan_is_0_to_relu",
            forward,
            lambda: matmul(
                act=lambda x, how, slope: torch.where(x > 0, x, 0) if how == "relu" else activate(x, how, slope)
            ),
            output,
        ),
        of(
            "relu_passes_gradient_at_0",
            backward,
            lambda: matmul(
                grad_of_act=lambda g, y, how, slope: (
                    torch.where(y < 0, 0, g) if how == "relu" else through(g, y, how, slope)
                )
            ),
            "gradient of",
        ),
        of(
            "activation_left_out_of_gradient",
            backward,
            lambda: matmul(grad_of_act=lambda g, *_: g),
            "gradient of",
            "outer_product",
        ),
        of("gradient_of_b_doubled", backward, swapped, "gradient of b", None),
        of("gradient_of_b_doubled", law(laws.transposing_swaps_the_factors), swapped, left, "no_terms"),
        of(
            "no_gradient",
            backward,
            lambda: matmul(grads=lambda g, a, b: (a * 0, b * 0)),
            "gradient of",
            None,
        ),
        of(
            "shapes_not_checked",
            declared_errors_are_raised,
            lambda: matmul(check=lambda *_: None),
            "in place of|was raised",
            None,
        ),
    )


FAULTS = _faults()
