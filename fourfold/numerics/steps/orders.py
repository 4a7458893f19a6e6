"""The bounds of kernels that take other steps than an oracle: factors in another order, or another formula.

A product has one value, but a step on the way to it may overflow or underflow in one order and not in another. Each
partial product of factors with the magnitudes s lies between ``prod(min(s, 1))`` and ``prod(max(s, 1))``, whatever the
order. So the result is unspecified where the latter may overflow. Where the former may be below the smallest normal
number, each product may lose a subnormal number's error, and the remaining factors multiply the loss by no more than
``prod(max(s, 1))``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fourfold.numerics.bounded import Arithmetic, Bounded, unspecified_where
from fourfold.numerics.steps.elementwise import REORDERING

Array = np.ndarray


def partial_products(
    low: Array, high: Array, multiply: Callable[..., Any], count: int | Array, arithmetic: Arithmetic, loss: float
) -> tuple[Array, Array, Array]:
    """Return what the partial products of factors reach and lose in any order, and where one may underflow.

    Args:
        low: the least magnitude of each factor.
        high: the largest magnitude of each factor. An infinity is given, and no step overflows to it.
        multiply: returns the products of an array of factors, such as numpy.prod along an axis.
        count: the number of factors of each product.
        arithmetic: the arithmetic of the kernels.
        loss: the largest error of a product below the smallest normal number.
    """
    farthest = multiply(np.maximum(np.where(np.isinf(high), 1, high), 1))
    underflows = multiply(np.clip(low, 0, 1)) < arithmetic.smallest_normal
    losses = np.where(underflows, count * loss * farthest, 0.0)
    return farthest * (1 + count * REORDERING * arithmetic.roundoff), losses, underflows


def magnitudes(factors: Sequence[Any], axis: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the least and the largest magnitude of each factor, along axes if there are any; a 0 loses nothing."""
    pairs = [(x.value, x.error) if isinstance(x, Bounded) else (np.asarray(x), np.zeros(())) for x in factors]
    parts = np.broadcast_arrays(*(part for pair in pairs for part in pair))
    size, error = abs(np.stack(parts[::2])), np.stack(parts[1::2])
    low, high = np.where((size == 0) & (error == 0), 1.0, size - error), size + error
    if not axis:
        return low, high
    axes = tuple(i % parts[0].ndim + 1 for i in axis)
    return np.min(low, axes, keepdims=True, initial=1.0), np.max(high, axes, keepdims=True, initial=0.0)


def any_order(result: Any, *products: Sequence[Any], axis: tuple[int, ...] = (), stored: bool = False) -> Any:
    """Return `result`, a sum of products, with the bound of kernels that multiply the factors of each in any order.

    Where a factor is NaN, so is the result in each order. An infinite factor gives NaN where another one may
    underflow to 0, or where another product is infinite, too: the result is then unspecified, unless the contract
    holds kernels to that of the oracle. A plain array is returned unchanged.

    Args:
        result: a sum of `products`.
        products: the factors of each product, as arrays or numbers that broadcast to `result`. A sum counts as two
            factors: its largest term, and the number of its terms.
        axis: axes of the factors, which are kept: any element along them may be a factor.
        stored: whether kernels that round each step to the dtype of the tensors keep partial products in it.
    """
    if not isinstance(result, Bounded):
        return result
    arithmetic = result.arithmetic
    range_of = (stored and arithmetic.rounds_each_step and arithmetic.storage) or arithmetic
    spacing = 2 * arithmetic.roundoff * arithmetic.smallest_normal
    reach: Array = np.zeros(())
    losses, infinities, is_nan, unspecified = reach, reach, reach > 0, reach > 0
    with np.errstate(all="ignore"):
        for factors in products:
            low, high = magnitudes(factors, axis)
            farthest, loss, underflows = partial_products(
                low, high, functools.partial(np.prod, axis=0), len(factors), arithmetic, spacing
            )
            infinite, zero = np.isinf(high).any(0), (high == 0).any(0)
            reach, losses, infinities = reach + farthest, losses + np.where(zero, 0.0, loss), infinities + infinite
            unspecified = unspecified | (infinite & (underflows | zero))
            is_nan = is_nan | np.isnan(high).any(0)
        unspecified = (unspecified | (infinities > 1)) & arithmetic.contract.nonfinite
        unknown = ((reach > range_of.largest) | unspecified) & ~is_nan
        result = Bounded(result.value, result.error + np.where(np.isfinite(losses), losses, 0.0), arithmetic)
    return unspecified_where(result, unknown)


def slopes_of_normalized(grad: Any, weight: Any, a: Any, inverse: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the products in the gradient of numbers that are normalized along axes of `count` elements.

    That is ``(g - sum(g) / count - n sum(g n) / count) inverse`` with ``g = grad weight`` and ``n = (a - mean)
    inverse``. Kernels may divide by the count last, and may multiply by the count first.
    """
    g = (count, grad, 1.0 if weight is None else weight)
    return [(*g, inverse), (*g, inverse), (*g, a, a, inverse, inverse, inverse)]


def either_formula(result: Any, other: Any) -> Any:
    """Return `result` with a bound that admits kernels that compute `other`, another formula of the same value.

    It is unspecified where only one of the two is NaN, or infinite.
    """
    if not isinstance(result, Bounded):
        return result
    first, second = result.value, other.value
    agree = (np.isfinite(first) & np.isfinite(second)) | (np.isnan(first) & np.isnan(second)) | (first == second)
    return result.within(np.where(agree, np.fmax(result.error, other.error), np.inf))
