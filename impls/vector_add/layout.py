"""How vector_add walks through its tensors."""

from typing import NamedTuple

import torch

from impls.strides import merged_axes


class Walk(NamedTuple):
    """The tensors, in the order of the output's memory, and x's and y's strides along up to three axes."""

    x: torch.Tensor
    y: torch.Tensor
    sizes: tuple[int, int, int]
    x_strides: tuple[int, int, int]
    y_strides: tuple[int, int, int]


def walk(x: torch.Tensor, y: torch.Tensor, output: torch.Tensor) -> Walk:
    """The way through x and y as the output's memory goes on, element by element.

    Args:
        x: not empty.
        y: the same shape.
        output: the same shape, without gaps or overlap.
    """
    order = sorted(range(output.ndim), key=output.stride, reverse=True)
    x, y, output = x.permute(order), y.permute(order), output.permute(order)
    sizes, (x_strides, y_strides, _) = merged_axes((x, y, output))
    if len(sizes) > 3:
        # Four axes that x and y pass in orders of their own are rare enough to be copied, into the order of the output.
        x, y = x.contiguous(), y.contiguous()
        sizes, (x_strides, y_strides, _) = merged_axes((x, y, output))
    missing = [1] * (3 - len(sizes))
    no_step = [0] * len(missing)
    return Walk(x, y, (*missing, *sizes), (*no_step, *x_strides), (*no_step, *y_strides))  # type: ignore[arg-type]
