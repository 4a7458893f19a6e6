"""The rules of torch's operators along axes: sums, extremes, products of matrices and distances."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fourfold.numerics.bounded import RULES as NUMPY_RULES
from fourfold.numerics.bounded import Bounded, Comparison, NoRule
from fourfold.numerics.steps.along_axes import (
    cumsum,
    largest,
    matrix_product,
    total,
    var,
)
from fourfold.numerics.steps.elementwise import add, divide, multiply, sqrt, subtract, units
from fourfold.numerics.torch_adapter.elementwise import aten, axes, lift_operand, scaled, sign, to_the_power
from fourfold.numerics.torch_adapter.moves import index_add
from fourfold.numerics.torch_adapter.orders import amax, amin
from fourfold.numerics.torch_adapter.tensors import (
    Payload,
    arithmetic,
    current,
)

Array = np.ndarray

# Sums, variances and norms.


def count_of_ties(a: Comparison, dims: Any, keepdim: bool) -> Any:
    """Return the number of true elements.

    In a backward pass, where extremes share a gradient, the effective count may be as low as one.
    """
    count = np.sum(a.outcome, axis=dims, keepdims=keepdim)
    error = np.sum(a.uncertain, axis=dims, keepdims=keepdim).astype(np.float64)
    evaluation = current()
    if not evaluation.backward:
        return Bounded(count.astype(np.float64), error, a.arithmetic) if error.any() else count
    count = count.astype(np.float64)
    limit = np.maximum(np.sum(a.outcome & ~a.uncertain, axis=dims, keepdims=keepdim), np.minimum(count, 1))
    if evaluation.contract.ties:
        error, limit = error + np.maximum(count - 1, 0), np.minimum(count, 1)
    return Bounded(count, error, a.arithmetic, np.where(error > 0, np.maximum(limit, count - error), count))


@aten("sum.default", "sum.dim_IntList")
def sum_along(a: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the sum in any order that `summation_growth` admits."""
    if isinstance(a, Comparison) or (isinstance(a, np.ndarray) and a.dtype == bool):
        truth = a if isinstance(a, Comparison) else Comparison(a, np.zeros_like(a), arithmetic())
        return count_of_ties(truth, axes(dim), keepdim)
    return total(lift_operand(a), axes(dim), keepdims=keepdim)


def numpy_along(function: Any, lift: Callable[[Any], Payload] = lift_operand) -> Callable[..., Any]:
    """Return the rule of an operator that is a function of NumPy along axes."""
    compute = NUMPY_RULES[function].compute
    return lambda a, dim=None, keepdim=False: compute(lift(a), axes(dim), keepdims=keepdim)


def lift_truth(a: Any) -> Payload:
    """Return a comparison unchanged, and numbers lifted."""
    return a if isinstance(a, Comparison) else lift_operand(a)


mean_along = aten("mean.default", "mean.dim")(numpy_along(np.mean))
product = aten("prod.default", "prod.dim_int")(numpy_along(np.prod))
aten("any.default", "any.dim", "any.dims")(numpy_along(np.any, lift_truth))
aten("all.default", "all.dim", "all.dims")(numpy_along(np.all, lift_truth))


@aten("var.correction")
def variance(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Bounded:
    """Return the mean of the squared deviations, with ``n - correction`` for n."""
    return var(lift_operand(a), axes(dim), correction=1 if correction is None else correction, keepdims=keepdim)


@aten("var.default", "var.dim")
def unbiased_variance(a: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Bounded:
    """Return the variance with n - 1, or n."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return variance(a, dim, correction=int(unbiased), keepdim=keepdim)


@aten("std.correction")
def deviation(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Bounded:
    """Return the square root of the variance."""
    return sqrt(variance(a, dim, correction=correction, keepdim=keepdim))


@aten("var_mean.correction")
def variance_and_mean(a: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple:
    """Return the variance and the mean."""
    return variance(a, dim, correction=correction, keepdim=keepdim), mean_along(a, dim, keepdim)


@aten("var_mean.default", "var_mean.dim")
def unbiased_variance_and_mean(a: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> tuple:
    """Return the variance with n - 1, or n, and the mean."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return variance_and_mean(a, dim, correction=int(unbiased), keepdim=keepdim)


@aten("cumsum.default")
def partial_sums(a: Any, dim: int) -> Bounded:
    """Return each partial sum in any order."""
    a = lift_operand(a)
    return cumsum(a, dim) if a.ndim else a


def prefix_rule(function: Callable[[Bounded, int], Bounded]) -> Callable[[Any, int], Bounded]:
    """Return the rule of a function along an axis that is applied to all elements up to each one."""

    def rule(a: Any, dim: int) -> Bounded:
        a = lift_operand(a)
        if not a.size or not a.ndim:
            return a
        rows = a.rearrange(lambda part: np.moveaxis(part, dim, 0))
        return NUMPY_RULES[np.stack].compute([function(rows[: i + 1], 0) for i in range(len(rows))], dim)

    return rule


aten("cumprod.default")(prefix_rule(product))


@aten("dist.default")
def distance(a: Any, b: Any, p: Any = 2) -> Bounded:
    """Return the norm of the difference."""
    return norm(subtract(lift_operand(a), lift_operand(b)), p)


def row_differences(a: Any, b: Any) -> Bounded:
    """Return the differences of each row of `a` and each row of `b`."""
    a, b = lift_operand(a), lift_operand(b)
    return subtract(a[..., :, None, :], b[..., None, :, :])


@aten("_cdist_forward.default")
def distances(a: Any, b: Any, p: float, mode: Any = None) -> Bounded:
    """Return the norm of the difference of each row of `a` and each row of `b`."""
    return norm(row_differences(a, b), p, -1)


@aten("_pdist_forward.default")
def distances_within(a: Any, p: float = 2) -> Bounded:
    """Return the distance of each row and each later one."""
    first, second = np.triu_indices(len(a), 1)
    return norm(subtract(lift_operand(a)[first], lift_operand(a)[second]), p, -1)


def slope_of_norm(difference: Bounded, length: Bounded, grad: Bounded, p: float) -> Bounded:
    """Return the gradient of a norm along the last axis.

    For p = 2 the gradient at a vector of 0 has any direction and length <= 1.

    Raises:
        NoRule: p is neither 1 nor 2.
    """
    grad, length = grad[..., None], length[..., None]
    if p == 1:
        return multiply(grad, sign(difference))
    if p != 2:
        raise NoRule(f"the gradient of a distance has no running-error rule for p = {p}, only for 1 and 2")
    at_zero = (length.value == 0) & (length.error == 0)
    divisor = Bounded(np.where(at_zero, 1, length.value), length.error, length.arithmetic, length.limit)
    slope = divide(difference, divisor)
    if current().contract.ties:
        slope.error = np.where(at_zero, 1.0, slope.error)
    return multiply(grad, slope)


@aten("_cdist_backward.default")
def distances_backward(grad: Any, a: Any, b: Any, p: float, norm: Any) -> Bounded:
    """Return the gradient of the rows of `a`: that of each distance, summed over the rows of `b`."""
    return total(slope_of_norm(row_differences(a, b), lift_operand(norm), lift_operand(grad), p), -2)


@aten("_pdist_backward.default")
def distances_within_backward(grad: Any, a: Any, p: float, norm: Any) -> Bounded:
    """Return the gradient of each row: that of its distances, with either sign."""
    a = lift_operand(a)
    first, second = np.triu_indices(len(a), 1)
    slope = slope_of_norm(subtract(a[first], a[second]), lift_operand(norm), lift_operand(grad), p)
    empty = Bounded.exact(np.zeros(a.shape, a.dtype), a.arithmetic)
    slopes = NUMPY_RULES[np.concatenate].compute([slope, -slope])
    return index_add(empty, 0, np.concatenate([first, second]), slopes)


@aten("linalg_vector_norm.default")
def norm(a: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Bounded:
    """Return (sum |a|^p)^(1 / p), with the largest and the smallest |a| for infinite p."""
    size = abs(lift_operand(a))
    if math.isinf(ord):
        return (amax if ord > 0 else amin)(size, dim, keepdim)
    if ord == 0:
        return sum_along(size != 0.0, dim, keepdim)
    powers = total(to_the_power(size, ord), axes(dim), keepdims=keepdim)
    return powers if ord == 1 else to_the_power(powers, 1 / ord)


@aten("logsumexp.default")
def logsumexp(a: Any, dim: Any, keepdim: bool = False) -> Bounded:
    """Return m + log(sum(e^(a - m))) with the maximum m, or without m where it is infinite.

    Any number near the maximum serves as m. Its error does not change the result, and is omitted.
    """
    a, dims = lift_operand(a), axes(dim)
    top = largest(a, dims, keepdims=True)
    finite = Bounded.exact(np.where(np.isfinite(top.value), top.value, 0), a.arithmetic)
    powers = total(np.exp(subtract(a, finite)), dims, keepdims=True)
    powers.limit = np.where(np.isfinite(top.value), np.fmax(powers.least, 1 - units(2) * a.arithmetic.roundoff), 0)
    result = add(finite, np.log(powers))
    return result if keepdim else result.rearrange(lambda part: np.squeeze(part, dims))


aten("logcumsumexp.default")(prefix_rule(logsumexp))

# Products of matrices.


@aten("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def matmul(a: Any, b: Any) -> Bounded:
    """Return a @ b."""
    return matrix_product(lift_operand(a), lift_operand(b))


@aten("addmm.default", "baddbmm.default", "addmv.default")
def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Bounded:
    """Return beta bias + alpha a @ b."""
    product = scaled(matmul(a, b), alpha)
    return product if beta == 0 else add(scaled(bias, beta), product)
