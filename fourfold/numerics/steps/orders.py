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
    least: Array, most: Array, multiply: Callable[..., Any], count: int | Array, arithmetic: Arithmetic, loss: float
) -> tuple[Array, Array, Array]:
    """Return what the partial products of factors reach and lose in any order, and where one may underflow.

    Args:
        least: the least magnitude of each factor.
        most: the largest magnitude of each factor. An infinity is given, and no step overflows to it.
        multiply: returns the products of an array of factors, such as numpy.prod along an axis.
        count: the number of factors of each product.
        arithmetic: the arithmetic of the kernels.
        loss: the largest error of a product below the smallest normal number.
    """
    farthest = multiply(np.maximum(np.where(np.isinf(most), 1, most), 1))
    underflows = multiply(np.clip(least, 0, 1)) < arithmetic.smallest_normal
    lost = np.where(underflows, count * loss * farthest, 0.0)
    return farthest * (1 + count * REORDERING * arithmetic.roundoff), lost, underflows


def magnitudes(factors: Sequence[Any], axis: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the least and the largest magnitude of each factor, along axes if there are any; a 0 loses nothing."""
    pairs = [(x.value, x.error) if isinstance(x, Bounded) else (np.asarray(x), np.zeros(())) for x in factors]
    parts = np.broadcast_arrays(*(part for pair in pairs for part in pair))
    size, error = abs(np.stack(parts[::2])), np.stack(parts[1::2])
    least, most = np.where((size == 0) & (error == 0), 1.0, size - error), size + error
    if not axis:
        return least, most
    along = tuple(i % parts[0].ndim + 1 for i in axis)
    return np.min(least, along, keepdims=True, initial=1.0), np.max(most, along, keepdims=True, initial=0.0)


def any_order(result: Any, *products: Sequence[Any], axis: tuple[int, ...] = (), kept: bool = False) -> Any:
    """Return `result`, a sum of products, with the bound of kernels that multiply the factors of each in any order.

    Where a factor is NaN, so is the result in each order. An infinite factor gives NaN where another one may
    underflow to 0, or where another product is infinite, too: the result is then unspecified, unless the contract
    holds kernels to that of the oracle. A plain array is returned unchanged.

    Args:
        result: a sum of `products`.
        products: the factors of each product, as arrays or numbers that broadcast to `result`. A sum counts as two
            factors: its largest term, and the number of its terms.
        axis: axes of the factors, which are kept: any element along them may be a factor.
        kept: whether kernels that round each step to the dtype of the tensors keep partial products in it.
    """
    if not isinstance(result, Bounded):
        return result
    arithmetic = result.arithmetic
    range_of = (kept and arithmetic.rounds_each_step and arithmetic.storage) or arithmetic
    spacing = 2 * arithmetic.roundoff * arithmetic.smallest_normal
    reach: Array = np.zeros(())
    lost, infinities, spoiled, open_to_others = reach, reach, reach > 0, reach > 0
    with np.errstate(all="ignore"):
        for factors in products:
            least, most = magnitudes(factors, axis)
            farthest, loss, underflows = partial_products(
                least, most, functools.partial(np.prod, axis=0), len(factors), arithmetic, spacing
            )
            infinite, zero = np.isinf(most).any(0), (most == 0).any(0)
            reach, lost, infinities = reach + farthest, lost + np.where(zero, 0.0, loss), infinities + infinite
            open_to_others = open_to_others | (infinite & (underflows | zero))
            spoiled = spoiled | np.isnan(most).any(0)
        open_to_others = (open_to_others | (infinities > 1)) & arithmetic.contract.nonfinite
        unknown = ((reach > range_of.largest) | open_to_others) & ~spoiled
        result = Bounded(result.value, result.error + np.where(np.isfinite(lost), lost, 0.0), arithmetic)
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
    one, two = result.value, other.value
    alike = (np.isfinite(one) & np.isfinite(two)) | (np.isnan(one) & np.isnan(two)) | (one == two)
    return result.within(np.where(alike, np.fmax(result.error, other.error), np.inf))
