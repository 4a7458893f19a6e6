"""The rules of torch's operators for neural networks: softmax, normalizations, convolutions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import IN_GRADIENTS, Bounded, scaling_allowance
from fourfold.numerics.steps.along_axes import matrix_product, mean, number_of_terms, total
from fourfold.numerics.steps.elementwise import (
    DIVISION,
    EXPONENTIAL,
    REORDERING,
    add,
    divide,
    exp,
    maximum,
    multiply,
    reciprocal,
    set_least,
    sqrt,
    subtract,
)
from fourfold.numerics.steps.orders import any_order, either_formula, slopes_of_normalized
from fourfold.numerics.torch_adapter.along_axes import logsumexp
from fourfold.numerics.torch_adapter.elementwise import aten, lift_operand
from fourfold.numerics.torch_adapter.moves import add_at, element_numbers, pad
from fourfold.numerics.torch_adapter.orders import amax
from fourfold.numerics.torch_adapter.resampling import adaptive_taps
from fourfold.numerics.torch_adapter.tensors import BoundedTensor, Evaluation, Places, ViewedStorage, whole

# Softmax.


def subtract_largest(a: Bounded, dim: int) -> Bounded:
    """Return a minus the largest element along an axis.

    Any number near the maximum leads to the same result, so its error is omitted.
    """
    top = np.max(a.value, axis=dim, keepdims=True, initial=-np.inf)
    return subtract(a, Bounded.exact(top, a.arithmetic))


def clamp_error(a: Bounded, limit: float) -> Any:
    """Return the error of a number that is computed between 0 and `limit`, except for roundings."""
    slack = limit * SLACK * a.arithmetic.roundoff + a.arithmetic.smallest_normal
    farthest = np.maximum(a.value, limit - a.value) + slack
    return np.where(np.isnan(a.value), a.error, np.fmin(a.error, farthest))


# The roundings of an exponential and of a quotient.
SLACK = REORDERING * (EXPONENTIAL + DIVISION)


def powers_of(centred: Bounded) -> Bounded:
    """Return the exponentials of numbers whose computed maximum is 0: they are computed between 0 and 1."""
    powers = exp(centred)
    error = np.where(np.isfinite(centred.error), clamp_error(powers, 1.0), powers.error)
    return set_least(Bounded(powers.value, error, powers.arithmetic), 0.0)


def sum_of(powers: Bounded, dim: int) -> Bounded:
    """Return the sum of powers, one of which is 1."""
    result = total(powers, dim, keepdims=True)
    return set_least(result, np.where(result.value >= 1, 1 - SLACK * result.arithmetic.roundoff, -np.inf))


@aten("_safe_softmax.default")
def safe_softmax(a: Any, dim: int, *, dtype: Any = None) -> Bounded:
    """Return the softmax, with zeros for rows of -inf only, which attention masks produce."""
    a = lift_operand(a)
    masked = np.all(np.isneginf(a.value) & (a.error == 0), axis=dim, keepdims=True)
    result = softmax(a, dim)
    return Bounded(np.where(masked, 0, result.value), np.where(masked, 0, result.error), a.arithmetic)


@aten("_softmax.default")
def softmax(a: Any, dim: int, half_to_float: bool = False) -> Bounded:
    """Return exp(a - m) / sum(exp(a - m)) with the maximum m."""
    a = lift_operand(a)
    if not a.ndim:
        return softmax(a.reshape(1), 0).reshape(())
    powers = powers_of(subtract_largest(a, dim))
    result = divide(powers, sum_of(powers, dim))
    # The result lies between 0 and 1 whatever the errors of the exponents, unless one may have overflowed, which makes
    # the whole row NaN.
    unknown = np.isinf(powers.error).any(axis=dim, keepdims=True)
    return Bounded(result.value, np.where(unknown, np.inf, clamp_error(result, 1.0)), a.arithmetic)


@aten("_softmax_backward_data.default")
def softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any = None) -> Bounded:
    """Return y (g - sum(g y))."""
    grad, output = lift_operand(grad), lift_operand(output)
    if not output.ndim:
        return multiply(grad, lift_operand(0.0))
    return multiply(output, subtract(grad, total(multiply(grad, output), dim, keepdims=True)))


@aten("_log_softmax.default")
def log_softmax(a: Any, dim: int, half_to_float: bool = False) -> Bounded:
    """Return (a - m) - log(sum(exp(a - m))) with the maximum m.

    Other kernels subtract the sum's logarithm and m together, as one number.
    """
    a = lift_operand(a)
    if not a.ndim:
        return log_softmax(a.reshape(1), 0).reshape(())
    centred = subtract_largest(a, dim)
    result = subtract(centred, np.log(sum_of(powers_of(centred), dim)))
    return (
        either_formula(result, subtract(a, logsumexp(a, dim, True)))
        if result.arithmetic.contract.reassociation
        else result
    )


@aten("_log_softmax_backward_data.default")
def log_softmax_backward(grad: Any, output: Any, dim: int, input_dtype: Any = None) -> Bounded:
    """Return g - exp(y) sum(g)."""
    grad, output = lift_operand(grad), lift_operand(output)
    if not output.ndim:
        return multiply(grad, lift_operand(0.0))
    return subtract(grad, multiply(np.exp(output), total(grad, dim, keepdims=True)))


# Normalizations. Of numbers `a`, `normal` is (a - mean) inverse, and `inverse` 1 / deviation; `grad` is the gradient of
# the result, and `along` the axes of means and sums. A weight or bias that is None is left out.


def normalize(a: Bounded, dims: tuple[int, ...], eps: float) -> tuple[Bounded, Bounded, Bounded]:
    """Return (a - mean) / deviation, the mean, and 1 / deviation, along axes that are kept.

    The deviation is sqrt(variance + eps), where the variance is the mean of the squared deviations from the mean.
    """
    a = scaling_allowance(a)
    middle = mean(a, dims, keepdims=True)
    deviations = subtract(a, middle)
    variance = mean(multiply(deviations, deviations), dims, keepdims=True)
    deviation = sqrt(maximum(add(variance, lift_operand(eps)), lift_operand(eps)))
    normal, inverse = divide(deviations, deviation), reciprocal(deviation)
    return reassociation_bound(normal, (a, inverse), (middle, inverse)), middle, inverse


def scale_and_shift(a: Bounded, weight: Any, bias: Any) -> Bounded:
    """Return a weight + bias, where either may be missing."""
    a = a if weight is None else multiply(a, lift_operand(weight))
    return a if bias is None else add(a, lift_operand(bias))


def reassociation_bound(result: Bounded, *products: Sequence[Any], axis: tuple[int, ...] = ()) -> Bounded:
    """Return `result` with the bound of `any_order`, unless kernels must use this library's order."""
    return any_order(result, *products, axis=axis) if result.arithmetic.contract.reassociation else result


def channel_scaling(normal: Bounded, a: Bounded, mean: Any, inverse: Bounded, weight: Any, bias: Any) -> Bounded:
    """Return `scale_and_shift` for weights and biases of channels.

    Other kernels compute a (weight inverse) + (bias - mean weight inverse).
    """
    result = scale_and_shift(normal, weight, bias)
    if weight is None:
        return result
    shift = [] if bias is None else [(bias,)]
    return reassociation_bound(result, (a, weight, inverse), (mean, weight, inverse), *shift)


def weight_gradient(
    grad: Bounded, normal: Bounded, a: Bounded, mean: Any, inverse: Bounded, dims: tuple[int, ...]
) -> Bounded:
    """Return the gradient of the weight: sum(g n).

    Other kernels compute (sum(g a) - mean sum(g)) inverse.
    """
    result, terms = total(multiply(grad, normal), dims, keepdims=True), number_of_terms(grad, dims)
    result = reassociation_bound(result, (terms, grad, a, inverse), (terms, grad, mean, inverse), axis=dims)
    return result.rearrange(lambda part: np.squeeze(part, dims))


def input_gradient(
    grad: Bounded,
    weight: Bounded | None,
    normal: Bounded,
    a: Bounded,
    inverse: Bounded,
    dims: tuple[int, ...],
) -> Bounded:
    """Return the gradient of the normalized input: (g - mean(g) - n mean(g n)) / deviation, with g = grad weight."""
    g = grad if weight is None else multiply(grad, weight)
    share = multiply(normal, mean(multiply(g, normal), dims, keepdims=True))
    result = multiply(subtract(subtract(g, mean(g, dims, keepdims=True)), share), inverse)
    return reassociation_bound(
        result, *slopes_of_normalized(grad, weight, a, inverse, number_of_terms(grad, dims)), axis=dims
    )


def last(a: Bounded, count: int) -> tuple[int, ...]:
    """Return the last `count` axes."""
    return tuple(range(a.ndim - count, a.ndim))


@aten("native_layer_norm.default")
def layer_norm(a: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Bounded, ...]:
    """Normalize the last axes, then apply weight and bias; return the result, the mean and 1 / deviation."""
    a = lift_operand(a)
    normal, mean, inverse = normalize(a, last(a, len(shape)), eps)
    return scale_and_shift(normal, weight, bias), mean, inverse


@aten("native_layer_norm_backward.default")
def layer_norm_backward(
    grad: Any, a: Any, shape: Sequence[int], mean: Any, inverse: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> tuple[Any, ...]:
    """Return the gradients of the input, weight and bias."""
    grad, a = lift_operand(grad), lift_operand(a)
    dims, rows = last(a, len(shape)), tuple(range(a.ndim - len(shape)))
    normal = multiply(subtract(scaling_allowance(a, IN_GRADIENTS), lift_operand(mean)), lift_operand(inverse))
    weight = None if weight is None else lift_operand(weight)
    return (
        input_gradient(grad, weight, normal, a, lift_operand(inverse), dims) if mask[0] else None,
        total(multiply(grad, normal), rows) if mask[1] else None,
        total(grad, rows) if mask[2] else None,
    )


def repeat_like(a: Bounded, like: Bounded) -> Bounded:
    """Repeat numbers of rows or channels for each element of `like`."""
    return a.rearrange(lambda part: np.broadcast_to(part, like.shape))


def reshape_to_channels(a: Any, like: Bounded) -> Any:
    """Reshape one number per channel to the second axis of `like`; return None for None."""
    return None if a is None else lift_operand(a).reshape(1, -1, *[1] * (like.ndim - 2))


@aten("native_group_norm.default")
def group_norm(
    a: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Bounded, ...]:
    """Normalize each sample's groups of channels, then apply each channel's weight and bias."""
    a = lift_operand(a)
    normal, mean, inverse = normalize(a.reshape(batch, groups, -1), (2,), eps)
    means, inverses = (repeat_like(x, normal).reshape(a.shape) for x in (mean, inverse))
    result = channel_scaling(
        normal.reshape(a.shape), a, means, inverses, reshape_to_channels(weight, a), reshape_to_channels(bias, a)
    )
    return result, mean.reshape(batch, groups), inverse.reshape(batch, groups)


@aten("native_group_norm_backward.default")
def group_norm_backward(
    grad: Any,
    a: Any,
    mean: Any,
    inverse: Any,
    weight: Any,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    mask: Any,
) -> tuple[Any, ...]:
    """Return the gradients of the input, weight and bias."""
    grad, a = lift_operand(grad), lift_operand(a)
    mean, inverse = (lift_operand(x).reshape(batch, groups, 1) for x in (mean, inverse))
    grouped = a.reshape(batch, groups, -1)
    normal = multiply(subtract(scaling_allowance(grouped, IN_GRADIENTS), mean), inverse)
    rows = (0, *range(2, a.ndim))
    if weight is not None:
        weight = repeat_like(reshape_to_channels(weight, a), a).reshape(grouped.shape)
    grad_groups = grad.reshape(batch, groups, -1)
    means, inverses = (repeat_like(x, grouped).reshape(a.shape) for x in (mean, inverse))
    return (
        input_gradient(grad_groups, weight, normal, grouped, inverse, (2,)).reshape(a.shape) if mask[0] else None,
        weight_gradient(grad, normal.reshape(a.shape), a, means, inverses, rows) if mask[1] else None,
        total(grad, rows) if mask[2] else None,
    )


def normalize_by_running(a: Bounded, mean: Any, variance: Any, eps: float) -> tuple[Bounded, Bounded]:
    """Return (a - mean) / deviation for each channel's given mean and variance, and 1 / deviation."""
    deviation = sqrt(add(reshape_to_channels(variance, a), lift_operand(eps)))
    return divide(subtract(scaling_allowance(a), reshape_to_channels(mean, a)), deviation), reciprocal(deviation)


@aten("native_batch_norm.default", "_native_batch_norm_legit_no_training.default", "_native_batch_norm_legit.no_stats")
def batch_norm(a: Any, weight: Any, bias: Any, *settings: Any) -> tuple[Bounded, ...]:
    """Normalize each channel by its own mean and variance, or by given ones; then apply weight and bias."""
    a = lift_operand(a)
    *statistics, _, eps = settings
    train = bool(statistics.pop()) if statistics and isinstance(statistics[-1], bool) else not statistics
    if not train:
        normal, inverse = normalize_by_running(a, statistics[0], statistics[1], eps)
        empty = Bounded.exact(np.zeros(0, a.dtype), a.arithmetic)
        mean, weight, bias = (reshape_to_channels(x, a) for x in (statistics[0], weight, bias))
        return channel_scaling(normal, a, mean, inverse, weight, bias), empty, empty
    normal, mean, inverse = normalize(a, (0, *range(2, a.ndim)), eps)
    result = channel_scaling(normal, a, mean, inverse, reshape_to_channels(weight, a), reshape_to_channels(bias, a))
    return result, mean.reshape(-1), inverse.reshape(-1)


@aten("native_batch_norm_backward.default")
def batch_norm_backward(
    grad: Any,
    a: Any,
    weight: Any,
    running_mean: Any,
    running_variance: Any,
    mean: Any,
    inverse: Any,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Return the gradients of the input, weight and bias."""
    grad, a = lift_operand(grad), lift_operand(a)
    dims = (0, *range(2, a.ndim))
    if train:
        mean, inverse = reshape_to_channels(mean, a), reshape_to_channels(inverse, a)
        normal = multiply(subtract(scaling_allowance(a, IN_GRADIENTS), mean), inverse)
    else:
        mean = reshape_to_channels(running_mean, a)
        normal, inverse = normalize_by_running(a, running_mean, running_variance, eps)
    weight = reshape_to_channels(weight, a)
    if train:
        grad_a = input_gradient(grad, weight, normal, a, inverse, dims)
    else:
        grad_a = reassociation_bound(
            scale_and_shift(multiply(grad, inverse), weight, None),
            (grad, 1.0 if weight is None else weight, inverse),
        )
    return (
        grad_a if mask[0] else None,
        weight_gradient(grad, normal, a, mean, inverse, dims) if mask[1] else None,
        total(grad, dims) if mask[2] else None,
    )


# Convolutions as products of matrices: each place of the output has a row of the elements under the kernel.


def windows(a: Bounded, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Bounded:
    """Return the elements under the kernel: ``[batch, channels, *places, *kernel]`` of ``[batch, channels, *size]``"""
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    spatial = tuple(range(2, a.ndim))
    steps = (
        slice(None),
        slice(None),
        *(slice(None, None, s) for s in stride),
        *(slice(None, None, d) for d in dilation),
    )
    return a.rearrange(lambda part: np.lib.stride_tricks.sliding_window_view(part, reach, spatial)[steps])


def pad_spatially(a: Bounded, widths: Sequence[tuple[int, int]]) -> Bounded:
    """Pad the spatial axes with zeros; negative widths cut elements off."""
    return pad(a, [width for pair in reversed(widths) for width in pair])


def dilate(a: Bounded, stride: Sequence[int]) -> Bounded:
    """Insert zeros between the elements of the spatial axes, so that they lie `stride` apart."""
    shape = (*a.shape[:2], *(max((size - 1) * step + 1, 0) for size, step in zip(a.shape[2:], stride)))
    result = Bounded.exact(np.zeros(shape, a.dtype), a.arithmetic)
    result[(..., *(slice(None, None, step) for step in stride))] = a
    return result


def group(a: Bounded, groups: int) -> Bounded:
    """Reshape the result of `windows` to ``[groups, batch * places, channels / groups * kernel]``."""
    spatial = (a.ndim - 2) // 2
    a = a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:])
    a = a.transpose(1, 0, *range(3, 3 + spatial), 2, *range(3 + spatial, 3 + 2 * spatial))
    # NumPy cannot infer a length of an array without elements, for example of an empty batch.
    return a.reshape(groups, math.prod(a.shape[1 : 2 + spatial]), math.prod(a.shape[2 + spatial :]))


def correlate(a: Bounded, weight: Bounded, stride: Sequence[int], dilation: Sequence[int], groups: int) -> Bounded:
    """Return the sums of products of the elements under the kernel and its weights, ``[out, in / groups, *kernel]``."""
    covered = windows(a, weight.shape[2:], stride, dilation)
    places = covered.shape[2 : a.ndim]
    weights = weight.reshape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:])).transpose(0, 2, 1)
    result = exclude_padding(matrix_product(group(covered, groups), weights))
    result = result.transpose(1, 0, 2).reshape(a.shape[0], *places, weight.shape[0])
    return result.rearrange(lambda part: np.moveaxis(part, -1, 1))


def exclude_padding(a: Bounded) -> Bounded:
    """Return products that are unknown where they are NaN: kernels skip the zeros of padding and dilation."""
    return Bounded(a.value, np.where(np.isnan(a.value), np.inf, a.error), a.arithmetic)


def transpose_kernel(weight: Bounded, groups: int) -> Bounded:
    """Return the kernel that propagates gradients back: reversed, with inputs and outputs exchanged in each group."""
    spatial = tuple(range(2, weight.ndim))
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    merged = grouped.reshape(groups * grouped.shape[1], *grouped.shape[2:])
    return merged.rearrange(lambda part: np.flip(part, spatial))


def scatter_windows(
    grad: Bounded,
    weight: Bounded,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    size: Sequence[int],
) -> Bounded:
    """Return the sum of contributions to each element of an input of `size` from the outputs that it affected."""
    spread = dilate(grad, stride)
    reach = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation)]
    widths = [(r - p, n + p - length) for r, p, n, length in zip(reach, padding, size, spread.shape[2:])]
    return correlate(
        pad_spatially(spread, widths), transpose_kernel(weight, groups), [1] * len(stride), dilation, groups
    )


@aten("convolution.default")
def convolution(
    a: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Bounded:
    """Return torch's convolution, or the transposed one, of any number of spatial axes."""
    a, weight = lift_operand(a), lift_operand(weight)
    if transposed:
        kernel = zip(a.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding)
        size = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, s, p, d, k, o in kernel]
        result = scatter_windows(a, weight, stride, padding, dilation, groups, size)
    else:
        result = correlate(pad_spatially(a, [(p, p) for p in padding]), weight, stride, dilation, groups)
    return result if bias is None else add(result, reshape_to_channels(bias, result))


@aten("convolution_backward.default")
def convolution_backward(
    grad: Any,
    a: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Return the gradients of the input, weight and bias."""
    grad, a, weight = lift_operand(grad), lift_operand(a), lift_operand(weight)
    widths = [(p, p) for p in padding]
    if transposed:
        grad_a = correlate(pad_spatially(grad, widths), weight, stride, dilation, groups) if mask[0] else None
        outer, inner = grad, a
    else:
        grad_a = scatter_windows(grad, weight, stride, padding, dilation, groups, a.shape[2:]) if mask[0] else None
        outer, inner = a, grad
    grad_weight = None
    if mask[1]:
        # One gradient for each pair of an outer and an inner channel, at each place of the kernel.
        covered = windows(pad_spatially(outer, widths), weight.shape[2:], stride, dilation)
        covered = covered[(slice(None), slice(None), *(slice(n) for n in inner.shape[2:]))]
        inner = group(columns(inner), groups).transpose(0, 2, 1)
        products = exclude_padding(matrix_product(inner, group(covered, groups)))
        grad_weight = products.reshape(weight.shape)
    return grad_a, grad_weight, total(grad, (0, *range(2, grad.ndim))) if mask[2] else None


def columns(a: Bounded) -> Bounded:
    """Return windows of one element each."""
    return a.reshape(*a.shape, *[1] * (a.ndim - 2))


# Averages of windows: convolutions of each single channel with ones.


def excess(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return by how much the last window of a pooling exceeds the padded axis, if its size is rounded up.

    A window that would begin in the padding on the right is left out.
    """
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    steps = -(-span // stride)
    if not ceil or steps * stride >= size + padding:
        return 0
    return max(steps * stride - span, 0)


class PoolingWindows:
    """The windows of a pooling, and the number of elements that each of them averages."""

    def __init__(self, a: Bounded, kernel: Any, stride: Any, padding: Any, ceil: bool, pads_count: bool, divisor: Any):
        self.axes = len(kernel)
        self.ones = Bounded.exact(np.ones((a.shape[-self.axes - 1], 1, *kernel), a.dtype), a.arithmetic)
        self.stride, self.padding = stride or kernel, list(padding) * (self.axes // len(padding))
        self.shape = (-1, *a.shape[-self.axes - 1 :])
        sizes = zip(a.shape[-self.axes :], kernel, self.stride, self.padding)
        self.excess = [(0, excess(size, k, step, p, 1, ceil)) for size, k, step, p in sizes]
        inside = Bounded.exact(np.ones((1, *self.shape[1:]), a.dtype), a.arithmetic)
        padded = pad_spatially(inside, [(p, p) for p in self.padding])
        counts = pad_spatially(padded.rearrange(np.ones_like) if pads_count else padded, self.excess)
        totals = windows(counts, kernel, self.stride, [1] * self.axes).value.sum(axis=tuple(range(-self.axes, 0)))
        self.count = np.full_like(totals, divisor) if divisor else totals


@aten("avg_pool2d.default", "avg_pool3d.default")
def average_pool(
    a: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Bounded:
    """Return the sum of the elements of each window, divided by their number."""
    a = lift_operand(a)
    pool = PoolingWindows(a, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    padded = pad_spatially(a.reshape(pool.shape), [(p, p + extra) for p, (_, extra) in zip(pool.padding, pool.excess)])
    sums = correlate(padded, pool.ones, pool.stride, [1] * pool.axes, len(pool.ones))
    result = divide(sums, lift_operand(pool.count))
    return result.reshape(*a.shape[: -pool.axes], *result.shape[2:])


@aten("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def average_pool_backward(
    grad: Any,
    a: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Bounded:
    """Return the gradient of the input: each element of a window receives its share."""
    grad, a = lift_operand(grad), lift_operand(a)
    pool = PoolingWindows(a, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    shares = divide(grad.reshape(-1, *grad.shape[-pool.axes - 1 :]), lift_operand(pool.count))
    size = a.shape[-pool.axes :]
    result = scatter_windows(shares, pool.ones, pool.stride, pool.padding, [1] * pool.axes, len(pool.ones), size)
    return result.reshape(a.shape)


# Extremes of windows.


def pooled_windows(
    a: Bounded, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, fill: float
) -> Bounded:
    """Return the elements of each window of the last axes, padded with a number: ``[..., *places, elements]``."""
    axes, stride = len(kernel), stride or kernel
    padding, dilation = (list(x) * (axes // len(x)) for x in (padding, dilation))
    images = math.prod(a.shape[:-axes])
    sizes = zip(a.shape[-axes:], kernel, stride, padding, dilation)
    widths = [(p, p + excess(size, k, step, p, d, ceil)) for size, k, step, p, d in sizes]
    padded = pad(a.reshape(images, 1, *a.shape[-axes:]), [width for pair in reversed(widths) for width in pair], fill)
    covered = windows(padded, kernel, stride, dilation)
    return covered.reshape(*a.shape[:-axes], *covered.shape[2 : 2 + axes], math.prod(kernel))


def adaptive_windows(a: Bounded, results: Sequence[int], fill: float) -> Bounded:
    """Return the elements of each of about equal parts of the last axes: ``[..., *places, elements]``."""
    count = len(results)
    taps_by_axis = [adaptive_taps(size, result) for size, result in zip(a.shape[-count:], results)]
    places, inside = (
        np.meshgrid(*(part.reshape(-1) for part in parts), indexing="ij")
        for parts in ([t.places for t in taps_by_axis], [t.mask for t in taps_by_axis])
    )
    lengths = [length for t in taps_by_axis for length in t.places.shape]
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]

    def by_place(part: np.ndarray) -> np.ndarray:
        part = part.reshape(*part.shape[:-count], *lengths)
        leading = part.ndim - 2 * count
        part = part.transpose(*range(leading), *(leading + axis for axis in order))
        return part.reshape(*part.shape[: leading + count], math.prod(part.shape[leading + count :]))

    mask = by_place(np.all(inside, axis=0))
    result = a.rearrange(lambda part: by_place(part[(..., *places)]))
    return Bounded(np.where(mask, result.value, fill), np.where(mask, result.error, 0), a.arithmetic)


@dataclass(frozen=True, eq=False)
class WindowPlaces(Places):
    """The place of each number in its window. The elements of a window lie along the last axis of `source`.

    Attributes:
        numbers: the place of each element of each window in the image, flattened; -1 for padding.
    """

    numbers: np.ndarray = field(kw_only=True)

    @property
    def outcome(self) -> np.ndarray:
        """The places in the image of the exact numbers."""
        return np.take_along_axis(self.numbers, self.index[..., None], -1)[..., 0]

    def certain(self) -> np.ndarray:
        """Return the places in the image; see `Places.certain`."""
        super().certain()
        return self.outcome

    def nearest(self, actual: np.ndarray) -> np.ndarray:
        """Return the right places that are nearest to those of `actual`: any of equal numbers of a window."""
        expected = self.outcome
        is_member = (self.numbers == actual[..., None]) & (self.numbers >= 0)
        values, errors = self.source.value, self.source.error
        top, top_error = self.values.value[..., None], self.values.error[..., None]
        equal = (abs(values - top) <= errors + top_error) | (values == top) | (np.isnan(values) & np.isnan(top))
        return np.where((is_member & equal).any(-1), actual, expected)

    def viewed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return a view of the places in the image.

        They stay the places in their windows in a copy, and without an axis of length 1, as in pooling along one axis.
        """
        name = str(func).split(".")[1]
        if name in ("detach", "alias", "clone"):
            return BoundedTensor.of(ViewedStorage(self), self, torch.int64)
        if name != "squeeze":
            return func(torch.from_numpy(self.certain()), *args[1:], **kwargs)
        index = func(torch.from_numpy(self.index), *args[1:], **kwargs)
        shape = (*index.shape, self.source.shape[-1])
        source, numbers = self.source.reshape(*shape), self.numbers.reshape(shape)
        places = WindowPlaces(index.numpy(), source, self.values.reshape(*index.shape), index.ndim, numbers=numbers)
        return BoundedTensor.of(ViewedStorage(places), places, torch.int64)


def pool_extremes(
    evaluation: Evaluation, a: torch.Tensor, axes: int, slide: Callable[[Bounded, float], Bounded]
) -> Any:
    """Return the largest number of each window, and its place.

    Args:
        evaluation: the evaluation that runs.
        a: the images.
        axes: the number of their axes.
        slide: returns the elements of each window of images, padded with a number.
    """
    elements = slide(lift_operand(evaluation.unwrap(a)), -np.inf)
    values, numbers = amax(elements, -1), element_numbers(a.shape[-axes:]).double().numpy()
    numbers = slide(Bounded.exact(np.broadcast_to(numbers, a.shape), elements.arithmetic), -1.0).value.astype(np.int64)
    first = np.argmax(np.where(numbers >= 0, elements.value, -np.inf), axis=-1)
    index = np.where(elements.value.max(-1, initial=-np.inf) == -np.inf, np.argmax(numbers >= 0, axis=-1), first)
    places = WindowPlaces(index, elements, values, elements.ndim - 1, numbers=numbers)
    return evaluation.wrap(values, a.dtype), BoundedTensor.of(ViewedStorage(places), places, torch.int64)


def pool_extremes_backward(evaluation: Evaluation, grad: torch.Tensor, a: torch.Tensor, axes: int, index: Any) -> Any:
    """Return the gradient of the input: each window's gradient at its largest element, or at any of equal ones."""
    places = index.payload
    spread = places.spread(lift_operand(evaluation.unwrap(grad)), evaluation.contract.ties)
    images = np.arange(math.prod(a.shape[:-axes])).reshape(*a.shape[:-axes], *[1] * (axes + 1))
    numbers = places.numbers + images * math.prod(a.shape[-axes:])
    inside, spread = places.numbers >= 0, spread.reshape(*numbers.shape)
    empty = Bounded.exact(np.zeros(tuple(a.shape), spread.dtype), spread.arithmetic)
    return evaluation.wrap(add_at(empty, numbers[inside], spread[inside]), grad.dtype)


@whole("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the largest number of each window and its place."""
    a, kernel, *arguments = args
    defaults: list[Any] = [[], [0], [1], False]
    stride, padding, dilation, ceil = arguments + defaults[len(arguments) :]

    def slide(part: Bounded, fill: float) -> Bounded:
        return pooled_windows(part, kernel, stride, padding, dilation, ceil, fill)

    return pool_extremes(evaluation, a, len(kernel), slide)


@whole("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the largest number of each of about equal parts, and its place."""
    a, results = args
    return pool_extremes(evaluation, a, len(results), lambda part, fill: adaptive_windows(part, results, fill))


@whole("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def max_pool_backward(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the gradient of the input of a pooling."""
    grad, a, kernel, *_, index = args
    return pool_extremes_backward(evaluation, grad, a, len(kernel), index)


@whole("adaptive_max_pool2d_backward.default", "adaptive_max_pool3d_backward.default")
def adaptive_max_pool_backward(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the gradient of the input of a pooling into about equal parts."""
    grad, a, index = args
    return pool_extremes_backward(evaluation, grad, a, 3 if "3d" in str(func) else 2, index)
