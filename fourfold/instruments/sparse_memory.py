"""Tensors whose elements lie so far apart that offsets need more than 32 bits. Only touched pages take memory."""

import fcntl
import functools
import mmap
import os
import time
from typing import Self
from weakref import WeakValueDictionary

import torch

from fourfold.operations.axes import SHORTEST_AXIS
from fourfold.operations.not_reached import NotReached

# The storage has at least this many elements before and after the tensor's first one. An offset of 2^31 or more that
# wraps around in 32 bits stays inside of it.
SIDE = 2**31
MAP_NORESERVE = 0x4000  # Linux's value; Python 3.13 added mmap.MAP_NORESERVE
POISON = float("nan")


# The number of checks whether other processes on a GPU released memory, and the seconds between two.
LOOKS, PAUSE = 120, 0.5
# One part in this number of a GPU's memory is enough for most cases.
PART = 8


def others_hold_the_memory(error: Exception) -> NotReached | None:
    """Return a NotReached if a GPU is out of memory because other processes hold it, or None for other errors."""
    message = str(error).lower().replace("_", " ")
    if "out of memory" not in message or not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    foreign = total - free - reserved
    if free > total // PART or foreign < reserved:
        return None
    return NotReached("other processes hold the GPU's memory", lasts=True)


def wait_for_room(device: torch.device, size: int) -> None:
    """Wait until a GPU has `size` bytes free.

    Raises:
        NotReached: the GPU has less memory in total, or less free memory in all `LOOKS` checks.
    """
    for _ in range(LOOKS):
        free, total = torch.cuda.mem_get_info(device)
        if free >= size:
            return
        if total < size:
            break
        time.sleep(PAUSE)
    raise NotReached(f"{device} has no {size / 2**30:.1f} GiB free", lasts=total >= size)


def room_needed(elements: int, like: torch.Tensor) -> int:
    """Return the bytes of GPU memory that `_storage` takes at once; 0 if only touched pages take memory."""
    return 0 if like.device.type == "cpu" or _has_managed_memory(like.device) else elements * like.element_size()


def _storage(elements: int, like: torch.Tensor) -> torch.Tensor:
    """Allocate uninitialised elements of the dtype and device of `like`; untouched pages take no memory if possible."""
    if like.device.type != "cpu":
        if _has_managed_memory(like.device):
            return torch.as_tensor(_Managed(elements * like.element_size()), device=like.device).view(like.dtype)
        wait_for_room(like.device, elements * like.element_size())
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    try:
        pages = _Pages.of(elements * like.element_size())
    except OSError as error:
        raise NotReached(f"no {elements * like.element_size() >> 30} GiB of addresses: {error}") from error
    storage = torch.frombuffer(pages, dtype=like.dtype)
    _pages[storage.data_ptr()] = pages
    return storage


@functools.cache
def _has_managed_memory(gpu: torch.device) -> bool:
    """Return whether a page of managed memory takes memory only from the first time it is touched."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    error, value = driver.cuDeviceGetAttribute(attribute, gpu.index)
    return error == driver.CUresult.CUDA_SUCCESS and bool(value)


class _Managed:
    """Managed memory of the current GPU, as an object that torch takes for an array of bytes.

    Raises:
        NotReached: the driver cannot reserve the addresses.
    """

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
        error, address = driver.cuMemAllocManaged(size, flags)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise NotReached(f"no {size >> 30} GiB of managed memory: {error.name}")
        self._free = functools.partial(driver.cuMemFree, address)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (int(address), False),
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free()


class _Pages(mmap.mmap):
    """Memory of a file without a name, which another process can share. No process can make it shorter."""

    file: int

    @classmethod
    def of(cls, size: int) -> Self:
        """Reserve `size` bytes lazily."""
        file = os.memfd_create("far_apart", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pages = cls(file, size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
            pages.file = file
        except BaseException:
            os.close(file)
            raise
        return pages

    def __del__(self) -> None:
        os.close(self.file)


# By the address of the memory.
_pages: "WeakValueDictionary[int, _Pages]" = WeakValueDictionary()


def file_of(address: int) -> int | None:
    """Return the descriptor of the file that holds the storage at an address, or None if there is no such file."""
    pages = _pages.get(address)
    return None if pages is None else pages.file


def map_shared(file: int, size: int) -> torch.Tensor:
    """Map such a file of another process, and return its bytes."""
    return torch.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED | MAP_NORESERVE), dtype=torch.uint8)


def axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes along which `laid_out` can lay a tensor out.

    A shorter axis would need a stride of 2^31, itself a 64-bit number, so that a kernel's products are 64-bit, too.
    """
    return [axis for axis, size in enumerate(tensor.shape) if size >= SHORTEST_AXIS and tensor.numel()]


def spread(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Copy a tensor so that the last element of an axis lies 2^31 elements or more after the first.

    The stride of the axis still fits into 32 bits. The other axes lie as in a contiguous tensor. NaN stands where an
    offset that wraps around in 32 bits leads.

    Raises:
        NotReached: the device lacks the memory, or the range of addresses.
    """
    strides = list(torch.empty(tensor.movedim(axis, 0).shape[1:], device="meta").stride())
    inner = 1 + sum((n - 1) * s for n, s in zip(tensor.movedim(axis, 0).shape[1:], strides))
    stride = max(-(-SIDE // (tensor.shape[axis] - 1)), inner)
    strides.insert(axis, stride)
    reach = (tensor.shape[axis] - 1) * stride + inner
    storage = _storage(SIDE + reach, tensor)
    placed = storage.as_strided(tensor.shape, strides, SIDE).copy_(tensor)
    far = tensor.select(axis, -1)
    offset = SIDE + (tensor.shape[axis] - 1) * stride - 2 * SIDE
    other_strides = [s for i, s in enumerate(strides) if i != axis]
    if tensor.dtype.is_floating_point:  # integers may be offsets, and poison among them would lead out of memory
        storage.as_strided(far.shape, other_strides, offset).fill_(POISON)
    return placed
