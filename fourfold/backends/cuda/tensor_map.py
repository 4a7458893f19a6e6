"""Tensor maps: the descriptors of tensors for the copy engine (TMA), from compute capability 9.0 on."""

import functools
from typing import Any

import torch

from fourfold.backends import known_calls, launch_records
from fourfold.backends.cuda.emulator.tensor_map import TensorMapOnCpu
from fourfold.compat import cuda_core_internals


class _Described:
    """A tensor of 16-bit elements, described by its address but not kept alive, so that a map can be cached."""

    def __init__(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        # TMA moves bits, so float16 and bfloat16 need no distinction.
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "data": (address, False),
            "shape": sizes,
            "strides": (*(2 * stride for stride in strides), 2),
        }


@functools.lru_cache(maxsize=4096)
def _encode(device: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], address: int) -> Any:
    # A map holds only an address and a layout, so a cached one is still right for another tensor with the same ones.
    import cuda.core
    from cuda.core.utils import StridedMemoryView

    with torch.cuda.device(device):
        # Autograd's threads start without a CUDA context. torch's own calls create one when needed, this one does not.
        cuda.core.Device(device).set_current()
        view = StridedMemoryView.from_any_interface(_Described(address, sizes, strides), stream_ptr=-1)
        return view.as_tensor_map(options=cuda_core_internals.swizzled_options(box))


def swizzled_map(tensor: torch.Tensor, box: tuple[int, ...]) -> Any:
    """Return the tensor map for copying boxes of a tensor into shared memory, with a swizzle of 128 bytes.

    A copy fills the elements outside the tensor with zeros. Pass the map to
    `fourfold.backends.cuda.launch.CudaKernel.launch` for a parameter `const __grid_constant__ TensorMap`, a struct of
    128 bytes aligned to 64. It stays valid for any tensor of the same layout at the same address.

    Args:
        tensor: ``[rows, columns]`` or ``[planes, rows, columns]`` of a half type, not empty. Its address and the
            strides of its rows and planes are multiples of 16 bytes, and the elements of a row are contiguous. The
            stride of planes is a multiple of the rows', and no shorter than all rows. The map of a tensor on the CPU is
            for the emulation.
        box: the sizes of one copy, one per axis of the tensor: at most 256 for all but the last, which is 64.
    """
    sizes, strides = tuple(tensor.shape), tensor.stride()[:-1]
    if tensor.is_cpu:
        return TensorMapOnCpu(tensor.data_ptr(), sizes, strides, box)
    encode = functools.partial(_encode, tensor.get_device(), sizes, strides, box)
    tensor_map = encode(tensor.data_ptr())
    if (recorder := known_calls.recorder()) is not None:
        recorder.record_map(tensor_map, tensor.data_ptr(), encode)
    if (record := launch_records.current) is not None:
        record.describe(tensor_map, f"map of boxes {box} of {record.forms([tensor])[0]}")
    return tensor_map
