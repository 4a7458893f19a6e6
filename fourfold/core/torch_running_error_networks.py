"""The rules of torch's operators for neural networks: softmax, normalizations, convolutions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fourfold.core.running_error import Bounded
from fourfold.core.running_error_arrays import total
from fourfold.core.running_error_rules import add, divide, maximum, multiply, reciprocal, sqrt, subtract
from fourfold.core.torch_running_error_rules import aten, lifted

# Softmax.


def from_the_largest(a: Bounded, dim: int) -> Bounded:
    """a less the largest along an axis. What follows is the same for any number near it: its error is left out."""
    top = np.max(a.value, axis=dim, keepdims=True, initial=-np.inf)
    return subtract(a, Bounded.exact(top, a.arithmetic))


@aten("_softmax.default", "_safe_softmax.default")
def softmax(a: Any, dim: int, half_to_float: Any = False, *, dtype: Any = None) -> Bounded:
    """exp(a - m) / sum(exp(a - m)) with the maximum m."""
    a = lifted(a)
    if not a.ndim:
        return softmax(a.reshape(1), 0).reshape(())
    powers = np.exp(from_the_largest(a, dim))
    return divide(powers, total(powers, dim, keepdims=True))


@aten("_softmax_backward_data.default")
def softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any = None) -> Bounded:
    """y (g - sum(g y))."""
    grad, output = lifted(grad), lifted(output)
    if not output.ndim:
        return multiply(grad, lifted(0.0))
    return multiply(output, subtract(grad, total(multiply(grad, output), dim, keepdims=True)))


@aten("_log_softmax.default")
def log_softmax(a: Any, dim: int, half_to_float: bool = False) -> Bounded:
    """(a - m) - log(sum(exp(a - m))) with the maximum m."""
    a = lifted(a)
    if not a.ndim:
        return log_softmax(a.reshape(1), 0).reshape(())
    centred = from_the_largest(a, dim)
    return subtract(centred, np.log(total(np.exp(centred), dim, keepdims=True)))


@aten("_log_softmax_backward_data.default")
def log_softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any = None) -> Bounded:
    """g - exp(y) sum(g)."""
    grad, output = lifted(grad), lifted(output)
    if not output.ndim:
        return multiply(grad, lifted(0.0))
    return subtract(grad, multiply(np.exp(output), total(grad, dim, keepdims=True)))


# Normalizations.


def average(a: Bounded, along: tuple[int, ...]) -> Bounded:
    """The mean along axes, which are kept; of no elements it is 0."""
    count = math.prod(a.shape[i] for i in along)
    return divide(total(a, along, keepdims=True), lifted(max(count, 1)))


def normalized(a: Bounded, along: tuple[int, ...], eps: float) -> tuple[Bounded, Bounded, Bounded]:
    """(a - mean) / deviation, the mean, and 1 / deviation, along axes that are kept.

    The deviation is sqrt(variance + eps), with the variance the mean of the squared deviations from the mean.
    """
    mean = average(a, along)
    centred = subtract(a, mean)
    deviation = sqrt(maximum(add(average(multiply(centred, centred), along), lifted(eps)), lifted(eps)))
    return divide(centred, deviation), mean, reciprocal(deviation)


def scaled_and_shifted(a: Bounded, weight: Any, bias: Any) -> Bounded:
    """a weight + bias, each of which may be missing."""
    a = a if weight is None else multiply(a, lifted(weight))
    return a if bias is None else add(a, lifted(bias))


def of_normalized(grad: Bounded, normal: Bounded, inverse: Bounded, along: tuple[int, ...]) -> Bounded:
    """The gradient of what was normalized: (g - mean(g) - n mean(g n)) / deviation."""
    share = multiply(normal, average(multiply(grad, normal), along))
    return multiply(subtract(subtract(grad, average(grad, along)), share), inverse)


def last(a: Bounded, count: int) -> tuple[int, ...]:
    """The last `count` axes."""
    return tuple(range(a.ndim - count, a.ndim))


@aten("native_layer_norm.default")
def layer_norm(a: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Bounded, ...]:
    """The last axes normalized, then weight and bias."""
    a = lifted(a)
    normal, mean, inverse = normalized(a, last(a, len(shape)), eps)
    return scaled_and_shifted(normal, weight, bias), mean, inverse


@aten("native_layer_norm_backward.default")
def layer_norm_backward(
    grad: Any, a: Any, shape: Sequence[int], mean: Any, inverse: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> tuple[Any, ...]:
    """The gradients of the input, weight and bias."""
    grad, a = lifted(grad), lifted(a)
    along, rows = last(a, len(shape)), tuple(range(a.ndim - len(shape)))
    normal = multiply(subtract(a, lifted(mean)), lifted(inverse))
    scaled = grad if weight is None else multiply(grad, lifted(weight))
    return (
        of_normalized(scaled, normal, lifted(inverse), along) if mask[0] else None,
        total(multiply(grad, normal), rows) if mask[1] else None,
        total(grad, rows) if mask[2] else None,
    )
