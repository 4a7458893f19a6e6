"""The rules of torch's interpolations, and of operators whose gradients go back to the elements that they repeat.

An interpolation along an axis gives each place of the result the elements around one position of the input, its taps,
with weights that are a continuous function of the distance. So an error of the position is one of the weights, and no
choice of a tap hangs on rounding. Of several axes, one follows another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.steps.along_axes import total
from fourfold.numerics.steps.elementwise import divide, multiply
from fourfold.numerics.torch_adapter.elementwise import aten, lift_operand
from fourfold.numerics.torch_adapter.moves import add_at, element_numbers

Array = np.ndarray
# Of weights by a polynomial: roundings, and the steepest slope.
STEPS, SLOPE = 16, 1.5


def linear_weight(distance: Array) -> Array:
    """Return the weight of an element in linear interpolation."""
    return np.maximum(1 - distance, 0)


def cubic_weight(distance: Array) -> Array:
    """Return the weight of an element in cubic convolution with a = -0.75, as torch interpolates images.

    Source: Keys, Cubic convolution interpolation for digital image processing, 1981.
    """
    a, d = -0.75, distance
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, (((d - 5) * d + 8) * d - 4) * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


@dataclass(frozen=True)
class Taps:
    """Along one axis: the elements of the input that each place of the result takes, and their weights.

    Attributes:
        places: the indices along the axis, ``[result, taps]``.
        weights: ``[result, taps]``.
        mask: which taps a kernel may take, ``[result, taps]``.
        size: the length of the axis of the input.
    """

    places: Array
    weights: Bounded
    mask: Array
    size: int

    def share(self, a: Bounded) -> Bounded:
        """Return numbers ``[..., result, taps]`` times the weights.

        A kernel may skip an element of weight 0, or multiply it: of an infinity or NaN nothing is known then.
        """
        doubtful = self.mask & (self.weights.value == 0) & ~np.isfinite(a.value)
        shares = multiply(a.rearrange(lambda part: np.where(doubtful | ~self.mask, 0, part)), self.weights)
        return Bounded(shares.value, np.where(doubtful, np.inf, shares.error), shares.arithmetic)

    def gather(self, a: Bounded, axis: int) -> Bounded:
        """Return the weighted sum of the taps of each place of the result."""
        rows = a.rearrange(lambda part: np.moveaxis(part, axis, -1)[..., self.places])
        return total(self.share(rows), -1).rearrange(lambda part: np.moveaxis(part, -1, axis))

    def spread(self, grad: Bounded, axis: int) -> Bounded:
        """Return the gradient of the input of `gather`."""
        rows = grad.rearrange(lambda part: np.moveaxis(part, axis, -1)[..., None])
        shape = (*rows.shape[:-2], self.size)
        result = add_back(self.share(rows), element_numbers(shape).numpy()[..., self.places], shape)
        return result.rearrange(lambda part: np.moveaxis(part, -1, axis))


def add_back(items: Bounded, places: Array, shape: Sequence[int]) -> Bounded:
    """Return a tensor of `shape` with each item added at its place, counted along the flattened tensor."""
    return add_at(Bounded.exact(np.zeros(tuple(shape), items.dtype), items.arithmetic), places, items)


def interpolation_taps(size: int, result: int, corners: bool, scale: float | None, cubic: bool) -> Taps:
    """Return the taps of an interpolation along an axis of `size`; beyond its ends the last elements are repeated."""
    if corners:
        position = np.arange(result) * ((size - 1) / (result - 1) if result > 1 else 0.0)
    else:
        position = (np.arange(result) + 0.5) * (1 / scale if scale else size / max(result, 1)) - 0.5
    reach = 2 if cubic else 1
    near = np.floor(position).astype(np.int64)[:, None] + np.arange(-reach, reach + 2)
    distance = abs(position[:, None] - near)
    weight = (cubic_weight if cubic else linear_weight)(distance)
    arithmetic = lift_operand(0.0).arithmetic
    error = SLOPE * 4 * arithmetic.roundoff * (abs(position) + 1)[:, None] + STEPS * arithmetic.roundoff
    weights = Bounded(weight, np.where(distance < reach + error, error, 0), arithmetic)
    return Taps(np.clip(near, 0, size - 1), weights, np.ones(near.shape, dtype=bool), size)


def adaptive_taps(size: int, result: int) -> Taps:
    """Return the taps of an average of about equal parts of an axis of `size`."""
    start, end = np.arange(result) * size // result, -(-(np.arange(result) + 1) * size // result)
    near = start[:, None] + np.arange(max(end - start, default=0))
    inside = near < end[:, None]
    weights = divide(lift_operand(inside.astype(np.float64)), lift_operand((end - start)[:, None].astype(np.float64)))
    return Taps(np.minimum(near, size - 1), weights, inside, size)


def along_spatial_axes(a: Any, taps: Sequence[Taps], step: Callable[[Taps, Bounded, int], Bounded]) -> Bounded:
    """Apply a step of `Taps` to the last axes, one after another."""
    a = lift_operand(a)
    for axis, axis_taps in enumerate(taps, a.ndim - len(taps)):
        a = step(axis_taps, a, axis)
    return a


def register_interpolation(name: str, cubic: bool) -> None:
    """Register the rules of an interpolation and of its gradient."""

    def taps(sizes: Sequence[int], results: Sequence[int], corners: bool, scales: Sequence[Any]) -> list[Taps]:
        sizes = sizes[-len(results) :]
        # torch copies an input of the size that is wanted, whatever the scale is.
        scales = [None] * len(results) if not scales or list(sizes) == list(results) else scales
        axes = zip(sizes, results, scales)
        return [interpolation_taps(size, result, corners, scale, cubic) for size, result, scale in axes]

    @aten(f"upsample_{name}.default")
    def forward(a: Any, results: Sequence[int], corners: bool, *scales: Any) -> Bounded:
        return along_spatial_axes(a, taps(lift_operand(a).shape, results, corners, scales), Taps.gather)

    @aten(f"upsample_{name}_backward.default")
    def backward(grad: Any, results: Sequence[int], sizes: Sequence[int], corners: bool, *scales: Any) -> Bounded:
        return along_spatial_axes(grad, taps(sizes, results, corners, scales), Taps.spread)


for _name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d"):
    register_interpolation(_name, cubic=_name == "bicubic2d")


def adaptive_average_backward(axes: int) -> Callable[[Any, Any], Bounded]:
    """Return the rule of the gradient of averages of about equal parts of each of the last axes."""

    def rule(grad: Any, a: Any) -> Bounded:
        sizes = zip(lift_operand(a).shape[-axes:], lift_operand(grad).shape[-axes:])
        return along_spatial_axes(grad, [adaptive_taps(size, result) for size, result in sizes], Taps.spread)

    return rule


aten("_adaptive_avg_pool2d_backward.default")(adaptive_average_backward(2))
aten("_adaptive_avg_pool3d_backward.default")(adaptive_average_backward(3))

# Operators that repeat elements. What they make of the elements' numbers says where each gradient goes.


def repetition_backward(operator: Any, grad: Any, shape: Sequence[int], *arguments: Any) -> Bounded:
    """Return the gradient of a tensor of `shape` whose elements an operator repeats."""
    places = operator(element_numbers(shape).double(), *arguments).long().numpy()
    return add_back(lift_operand(grad), places, shape)


def register_nearest_backward(nearest: Any) -> None:
    """Register the rule of the gradient of an interpolation that takes the nearest element."""

    @aten(f"{nearest.__name__.split('.')[0]}_backward.default")
    def nearest_backward(grad: Any, results: Sequence[int], sizes: Sequence[int], *scales: Any) -> Bounded:
        return repetition_backward(nearest, grad, sizes, results, *scales)


def register_edges_backward(edges: Any) -> None:
    """Register the rule of the gradient of a padding that repeats the elements at the edges."""

    @aten(f"{edges.__name__.split('.')[0]}_backward.default")
    def edges_backward(grad: Any, a: Any, widths: Sequence[int]) -> Bounded:
        return repetition_backward(edges, grad, lift_operand(a).shape, widths)


for _axes in (1, 2, 3):
    register_nearest_backward(getattr(torch.ops.aten, f"upsample_nearest{_axes}d").default)
    register_nearest_backward(getattr(torch.ops.aten, f"_upsample_nearest_exact{_axes}d").default)
    register_edges_backward(getattr(torch.ops.aten, f"replication_pad{_axes}d").default)
