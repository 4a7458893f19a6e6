"""How kernels walk through tensors of any strides: axes that all of them pass as one are merged."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


def merged_axes(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[list[int]]]:
    """The sizes of as few axes as possible, in the tensors' order, and each tensor's strides along them.

    Args:
        tensors: of one shape, without empty axes. An axis merges with the next where in every tensor one step along it
            is as long as all of the next.
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


class Rows(NamedTuple):
    """A tensor ``[..., cols]`` as ``[outer, inner, cols]``, and its strides in elements."""

    tensor: torch.Tensor
    outer_stride: int
    inner_stride: int
    column_stride: int


def as_rows(*tensors: torch.Tensor) -> tuple[int, list[Rows]]:
    """How to walk through tensors of one shape ``[..., cols]`` row by row, and the number of rows of `inner`.

    Args:
        tensors: not empty, with at least one axis.
    """
    cols = tensors[0].shape[-1]
    if all(tensor.is_contiguous() for tensor in tensors):
        return tensors[0].numel() // cols, [Rows(tensor, 0, cols, 1) for tensor in tensors]
    sizes, strides = merged_axes([tensor.select(-1, 0) for tensor in tensors])
    if len(sizes) > 2:
        # Three leading axes that none of the tensors passes as two are rare enough to be copied.
        return as_rows(*(tensor.contiguous() for tensor in tensors))
    inner = sizes[-1] if sizes else 1
    found = []
    for tensor, along in zip(tensors, strides):
        outer_stride, inner_stride = [0] * (2 - len(along)) + along
        found.append(Rows(tensor, outer_stride, inner_stride, tensor.stride(-1) if cols > 1 else 1))
    return inner, found
