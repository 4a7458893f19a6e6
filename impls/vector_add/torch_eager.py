"""vector_add in torch operations: the baseline that people know."""

import torch

from impls.vector_add.arguments import check_vector_add


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, element by element.

    Args:
        x: ``[...]``; float16, bfloat16, float32 or float64, any strides.
        y: the same shape, dtype and device. Nothing is broadcast.

    Returns:
        ``[...]`` of the same dtype, rounded once. The gradient of both is the cotangent.

    Raises:
        TypeError: x and y are no floating-point tensors of one dtype.
        ValueError: shapes or devices differ.
    """
    check_vector_add(x, y)
    return x + y
