"""The emulation's descriptors of matrices for the copy engine (TMA)."""

import ctypes

from fourfold.backends.cuda.compile import CudaError

_MARK = 0x70616D726F736E74
_ELEMENT_BYTES = 2
_LINE_BYTES = 128


class _Map(ctypes.Structure):
    """`Map` of asynchronous.cpp, as long as a GPU's descriptor."""

    _fields_ = [
        ("mark", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_int64 * 3),
        ("plane_and_row_bytes", ctypes.c_int64 * 2),
        ("dimensions", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 3),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 48),
    ]


class TensorMapOnCpu:
    """The map of a tensor of 16-bit elements, with a swizzle of 128 bytes. It does not keep the tensor alive.

    Args:
        address: of the first element.
        sizes: ``(rows, columns)`` or ``(planes, rows, columns)``, none of them 0.
        strides: elements from a row to the next, or from a plane and from a row to the next.
        box: as many sizes, of one copy.

    Raises:
        CudaError: a driver would refuse this map too: something is no multiple of 16 bytes, or the box is too large.
    """

    def __init__(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> None:
        *lines, columns = box
        distances = [stride * _ELEMENT_BYTES for stride in strides]
        wrong = {
            f"an address that is not a multiple of 16: {address:#x}": address % 16,
            **{f"a distance of rows that is not a multiple of 16 bytes: {n}": n % 16 for n in distances},
            f"an empty matrix: {' x '.join(map(str, sizes))}": min(sizes) < 1,
            **{f"a box of {n} rows; 1 to 256 are possible": not 1 <= n <= 256 for n in lines},
            f"a box of {columns} columns; 8 to 64 are possible, in multiples of 8": not 8 <= columns <= 64
            or columns % 8,
        }
        for rule, holds in wrong.items():
            if holds:
                raise CudaError(f"no tensor map can be encoded for {rule}")
        # A parameter of a kernel is aligned to 64 bytes.
        self._room = ctypes.create_string_buffer(ctypes.sizeof(_Map) + 64)
        self.address = (ctypes.addressof(self._room) + 63) // 64 * 64
        swizzle = int(columns * _ELEMENT_BYTES == _LINE_BYTES)
        # A matrix is a tensor of one plane.
        packed = _Map(_MARK, address, element_bytes=_ELEMENT_BYTES, swizzle=swizzle, dimensions=len(sizes))
        packed.sizes[:] = (1, *sizes)[-3:]
        packed.plane_and_row_bytes[:] = (0, *distances)[-2:]
        packed.box[:] = (1, *box)[-3:]
        ctypes.memmove(self.address, ctypes.addressof(packed), ctypes.sizeof(_Map))
