"""Tensors whose elements lie so far apart that their offsets need more than 32 bits, without that much memory."""

import mmap
import time

import torch

# Elements on either side of the first: an offset of 2^31 or more that wraps around in 32 bits still lands in here.
SIDE = 2**31
# Of an axis whose ends are that far apart, by a stride that 32 bits hold.
SHORTEST_AXIS = 3
MAP_NORESERVE = 0x4000  # Linux's; Python's own name for it came with 3.13
POISON = float("nan")


# Seconds in which the other processes on a GPU may give back what they have done with.
PATIENCE = 60.0


class NoRoom(MemoryError):
    """The device has no such range of addresses, or memory."""


def wait_for_room(device: torch.device, needed: int) -> None:
    """Return as soon as a GPU has so many bytes free.

    Raises:
        NoRoom: it never has as many, or not for as long as others may take.
    """
    end = time.monotonic() + PATIENCE
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if free >= needed:
            return
        if total < needed or time.monotonic() > end:
            raise NoRoom(f"{device} has no {needed / 2**30:.1f} GiB free")
        time.sleep(0.5)


def _storage(elements: int, like: torch.Tensor) -> torch.Tensor:
    """That many elements, uninitialised: on the CPU only the pages that are touched exist."""
    if like.device.type != "cpu":
        wait_for_room(like.device, elements * like.element_size())
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        pages = mmap.mmap(-1, elements * like.element_size(), flags=flags)
    except OSError as error:
        raise NoRoom(f"no {elements * like.element_size() >> 30} GiB of addresses: {error}") from error
    return torch.frombuffer(pages, dtype=like.dtype)


def axes(tensor: torch.Tensor) -> list[int]:
    """The axes along which `laid_out` can lay a tensor out.

    A stride of 2^31 itself needs 64 bits, and whoever multiplies by it has them.
    """
    return [axis for axis, size in enumerate(tensor.shape) if size >= SHORTEST_AXIS and tensor.numel()]


def laid_out(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values, the last of an axis 2^31 elements or more after the first, by a stride that 32 bits hold.

    The other axes lie as in a contiguous tensor. Where an offset that wraps around leads, there is NaN.

    Raises:
        NoRoom: the device has no such range of addresses.
    """
    strides = list(torch.empty(tensor.movedim(axis, 0).shape[1:], device="meta").stride())
    inner = 1 + sum((n - 1) * s for n, s in zip(tensor.movedim(axis, 0).shape[1:], strides))
    stride = max(-(-SIDE // (tensor.shape[axis] - 1)), inner)
    strides.insert(axis, stride)
    reach = (tensor.shape[axis] - 1) * stride + inner
    storage = _storage(SIDE + reach, tensor)
    placed = storage.as_strided(tensor.shape, strides, SIDE).copy_(tensor)
    far = tensor.select(axis, -1)
    wrapped = SIDE + (tensor.shape[axis] - 1) * stride - 2 * SIDE
    others = [s for i, s in enumerate(strides) if i != axis]
    if tensor.dtype.is_floating_point:  # an integer that is read astray must not lead far, as an offset does
        storage.as_strided(far.shape, others, wrapped).fill_(POISON)
    return placed
