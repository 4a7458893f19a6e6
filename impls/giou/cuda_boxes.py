"""How the CUDA C++ kernels of the GIoU family are told where boxes lie."""

import torch

from impls.launch import cdiv

BLOCK = 256  # threads; as in boxes.cuh
PACKED = (0, 4, 1, 0, 4, 1)  # strides of two packed tensors [1, num_rows, 4]


def blocks_of_pairs(num_rows: int, dtype: torch.dtype) -> int:
    """Blocks whose threads end with their PAIRS of boxes.cuh."""
    return cdiv(num_rows, BLOCK * (2 if dtype.itemsize == 2 else 1))


def addressing(num_rows: int, *tensors: torch.Tensor) -> tuple[int, ...]:
    """Inner, and the strides of tensors ``[outer, inner, ...]`` of num_rows rows.

    Inner is given as num_rows, which spares the kernel a division, where in each tensor one stride leads through all.
    """
    inner = num_rows
    strides: tuple[int, ...] = ()
    for tensor in tensors:
        stride = tensor.stride()
        strides += stride
        outer, rows = tensor.shape[:2]
        if outer > 1 and stride[0] != rows * stride[1]:
            inner = rows
    return inner, *strides


def packed(boxes1: torch.Tensor, boxes2: torch.Tensor) -> bool:
    """Whether the boxes of both lie one after another, at multiples of the size of their vector loads."""
    return (
        boxes1.is_contiguous()
        and boxes2.is_contiguous()
        and (boxes1.data_ptr() | boxes2.data_ptr()) % min(4 * boxes1.element_size(), 16) == 0
    )
