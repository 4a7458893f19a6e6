"""Tensor maps: the descriptors of matrices for the copy engine (TMA), from compute capability 9.0 on."""

import functools
from typing import Any

import torch

from fourfold.backends.cuda.on_cpu.tensor_map import TensorMapOnCpu
from fourfold.compat import cuda_core_internals


class _Described:
    """A matrix of 16-bit elements, given by its address. It does not keep the tensor alive, so a map can be cached."""

    def __init__(self, address: int, rows: int, columns: int, row_stride: int) -> None:
        # TMA moves bits, so float16 and bfloat16 need no distinction.
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "data": (address, False),
            "shape": (rows, columns),
            "strides": (2 * row_stride, 2),
        }


@functools.lru_cache(maxsize=4096)
def _encoded(device: int, address: int, rows: int, columns: int, row_stride: int, box: tuple[int, int]) -> Any:
    # A map holds only an address and a layout, so a cached one is still right for another tensor with the same ones.
    import cuda.core
    from cuda.core.utils import StridedMemoryView

    with torch.cuda.device(device):
        # Autograd's threads start without a CUDA context. torch's own calls create one when needed, this one does not.
        cuda.core.Device(device).set_current()
        view = StridedMemoryView.from_any_interface(_Described(address, rows, columns, row_stride), stream_ptr=-1)
        return view.as_tensor_map(options=cuda_core_internals.swizzled_options(box))


def swizzled_map(matrix: torch.Tensor, box: tuple[int, int]) -> Any:
    """Return the tensor map for copying boxes of a matrix into shared memory, with a swizzle of 128 bytes.

    A copy fills whatever lies outside the matrix with zeros. Pass the map to
    `fourfold.backends.cuda.launch.CudaKernel.launch` for a parameter `const __grid_constant__ TensorMap`, a struct of
    128 bytes aligned to 64. It stays valid for any matrix of the same layout at the same address.

    Args:
        matrix: ``[rows, columns]`` of a half type, not empty. Its address and its row stride are multiples of 16 bytes,
            and the elements of a row are contiguous. Of a matrix on the CPU the map is for the emulation.
        box: rows, at most 256, and columns, 64, of one copy.
    """
    rows, columns = matrix.shape
    if matrix.is_cpu:
        return TensorMapOnCpu(matrix.data_ptr(), rows, columns, matrix.stride(0), box)
    return _encoded(matrix.get_device(), matrix.data_ptr(), rows, columns, matrix.stride(0), box)
