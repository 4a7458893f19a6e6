"""The layout of boxes, in the form that the CUDA C++ kernels of the GIoU family take."""

import torch

from fourfold.backends.launch import FEW_ELEMENTS, cdiv

BLOCK = 256  # threads per block, the same as in boxes.cuh


def blocks_of_pairs(num_rows: int, boxes: torch.Tensor) -> tuple[int, int]:
    """Return the blocks for a kernel whose threads own up to PAIRS pairs (see boxes.cuh), and how many: one of few."""
    owned = 2 if boxes.element_size() == 2 and num_rows > FEW_ELEMENTS[boxes.device.type] else 1
    return cdiv(num_rows, BLOCK * owned), owned


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
