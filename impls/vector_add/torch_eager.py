"""vector_add in torch operations: the baseline."""

import torch

from .arguments import check_vector_add


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, elementwise.

    Args:
        x: ``[...]``; float16, bfloat16, float32 or float64, any strides.
        y: the same shape, dtype and device. Nothing is broadcast.

    Returns:
        ``[...]`` of the same dtype, rounded once. The gradient of x and of y is grad_output.

    Raises:
        TypeError: x or y is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices differ.
    """
    check_vector_add(x, y)
    return x + y
