"""The layout of boxes, in the form that the CUDA C++ kernels of the GIoU family take."""

import torch

from fourfold.backends.launch import cdiv

BLOCK = 256  # threads per block, the same as in boxes.cuh


def blocks_of_pairs(num_rows: int, dtype: torch.dtype) -> int:
    """Return the number of blocks for a kernel whose threads own PAIRS pairs each (see boxes.cuh)."""
    return cdiv(num_rows, BLOCK * (2 if dtype.itemsize == 2 else 1))


def looped_rows(dtype: torch.dtype) -> int:
    """Return the number of rows that a looping thread loads together: ROWS in boxes.cuh."""
    return 2 if dtype.itemsize == 8 else 4


def packed(boxes1: torch.Tensor, boxes2: torch.Tensor) -> bool:
    """Return whether both tensors are contiguous and aligned to the size of the kernel's vector loads."""
    return (
        boxes1.is_contiguous()
        and boxes2.is_contiguous()
        and (boxes1.data_ptr() | boxes2.data_ptr()) % min(4 * boxes1.element_size(), 16) == 0
    )
