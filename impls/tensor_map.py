"""Tensor maps: what the copy engine (TMA) of GPUs of compute capability 9.0 and later is told of a matrix."""

import functools
from typing import Any

import torch


class _Described:
    """A matrix of 16-bit elements by its address: a map that is kept must not keep the tensor."""

    def __init__(self, address: int, rows: int, columns: int, row_stride: int) -> None:
        # The engine moves bits, so both half types are the same to it.
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "data": (address, False),
            "shape": (rows, columns),
            "strides": (2 * row_stride, 2),
        }


@functools.lru_cache(maxsize=4096)
def _encoded(device: int, address: int, rows: int, columns: int, row_stride: int, box: tuple[int, int]) -> Any:
    # A map says where a matrix is and how it is laid out, so one made for the same can never be stale.
    import cuda.core
    from cuda.core.utils import StridedMemoryView

    options = cuda.core.TensorMapDescriptorOptions(box_dim=box)
    # The enumerations have no public name.
    options.swizzle = type(options.swizzle).SWIZZLE_128B
    options.l2_promotion = type(options.l2_promotion).L2_256B
    with torch.cuda.device(device):
        # Autograd's threads start with no context, which torch's own calls do not need.
        cuda.core.Device(device).set_current()
        view = StridedMemoryView.from_any_interface(_Described(address, rows, columns, row_stride), stream_ptr=-1)
        return view.as_tensor_map(options=options)


def swizzled_map(matrix: torch.Tensor, box: tuple[int, int]) -> Any:
    """The map of a matrix for copies of boxes into shared memory, swizzled by 128 bytes; zeros outside of the matrix.

    It is passed to `impls.cuda_launch.CudaKernel.launch` for a parameter `const __grid_constant__ TensorMap`, a struct
    of 128 bytes aligned to 64, and holds for whatever lies at the matrix's address.

    Args:
        matrix: ``[rows, columns]`` of a half type on a GPU, not empty, its address and rows apart by multiples of 16
            bytes, the elements of a row next to each other.
        box: rows, at most 256, and columns, 64, of a copy.
    """
    rows, columns = matrix.shape
    return _encoded(matrix.get_device(), matrix.data_ptr(), rows, columns, matrix.stride(0), box)
