"""Merge the axes of strided tensors, so that a kernel walks through as few of them as possible."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


def merge_axes(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[list[int]]]:
    """Merge the axes that every tensor traverses with one stride.

    Args:
        tensors: of one shape, without empty axes. An axis merges with the next if, in every tensor, one step along it
            is as long as the whole of the next.

    Returns:
        The sizes of the merged axes, in order, and for each tensor its strides along them, in elements.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis, size in enumerate(tensors[0].shape):
        if size == 1:
            continue
        steps = [tensor.stride(axis) for tensor in tensors]
        if sizes and all(along[-1] == size * step for along, step in zip(strides, steps)):
            sizes[-1] *= size
            for along, step in zip(strides, steps):
                along[-1] = step
        else:
            sizes.append(size)
            for along, step in zip(strides, steps):
                along.append(step)
    return sizes, strides


def merge_into_two(tensors: Sequence[torch.Tensor]) -> tuple[int, list[list[int]]] | None:
    """Merge the axes of tensors into two: see `merge_axes`.

    Returns:
        The size of the second axis, and for each tensor its strides along both. If all axes merge into one, the second
        has size 1, so that kernels need not divide by it. None if more than two axes are left.
    """
    sizes, strides = merge_axes(tensors)
    if len(sizes) > 2:
        return None
    return sizes[1] if len(sizes) == 2 else 1, [along + [0] * (2 - len(along)) for along in strides]


class Walk(NamedTuple):
    """A traversal of tensors element by element, in the memory order of an output.

    Attributes:
        tensors: the inputs, for their addresses.
        sizes: of three axes; unneeded ones have size 1.
        strides: along these axes, of one tensor after another.
    """

    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def walk(output: torch.Tensor, *inputs: torch.Tensor) -> Walk:
    """Return the traversal of `inputs` in the memory order of `output`.

    Args:
        output: not empty, without gaps or overlap.
        inputs: of the same shape.
    """
    order = sorted(range(output.ndim), key=output.stride, reverse=True)
    output, *tensors = (tensor.permute(order) for tensor in (output, *inputs))
    sizes, (_, *strides) = merge_axes((output, *tensors))
    if len(sizes) > 3:
        # Inputs with four axes in different orders are rare enough to be copied to the order of the output.
        tensors = [tensor.contiguous() for tensor in tensors]
        sizes, (_, *strides) = merge_axes((output, *tensors))
    missing = 3 - len(sizes)
    steps = tuple(step for along in strides for step in ([0] * missing + along))
    return Walk(tuple(tensors), (*[1] * missing, *sizes), steps)


class Rows(NamedTuple):
    """A tensor ``[..., cols]`` as ``[outer, inner, cols]``, and its strides in elements."""

    tensor: torch.Tensor
    outer_stride: int
    inner_stride: int
    column_stride: int


def as_rows(*tensors: torch.Tensor) -> tuple[int, list[Rows]]:
    """View tensors ``[..., cols]`` of the same leading axes as ``[outer, inner, cols]``.

    Args:
        tensors: not empty, with at least one axis. They are copied if their leading axes do not merge into two.

    Returns:
        The size of the axis `inner`, 1 if the leading axes merge into one, and for each tensor its `Rows`.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return 1, [Rows(tensor, tensor.shape[-1], 0, 1) for tensor in tensors]
    merged = merge_into_two([tensor.select(-1, 0) for tensor in tensors])
    if merged is None:
        # Leading axes that merge into no fewer than three are rare, so copying is good enough.
        return as_rows(*(tensor.contiguous() for tensor in tensors))
    inner, strides = merged
    return inner, [
        Rows(tensor, outer_stride, inner_stride, tensor.stride(-1) if tensor.shape[-1] > 1 else 1)
        for tensor, (outer_stride, inner_stride) in zip(tensors, strides)
    ]
