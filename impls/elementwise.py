"""The launches of kernels that are made of elementwise.cuh."""

import torch

from fourfold.backends.launch import cdiv

# Threads of a block, and vectors of each argument that a thread has.
BLOCK, VECTORS = 256, 2
WIDTHS = {True: "{W}", False: "1"}  # elements of a vector, by whether all tensors begin at multiples of 16 bytes


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def blocks(*tensors: torch.Tensor) -> int:
    """The blocks for tensors of one size."""
    x = tensors[0]
    return cdiv(x.numel(), BLOCK * VECTORS * (16 // x.element_size() if aligned(*tensors) else 1))
