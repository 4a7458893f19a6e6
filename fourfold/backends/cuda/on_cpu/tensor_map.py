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
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("box_rows", ctypes.c_uint32),
        ("box_columns", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 72),
    ]


class TensorMapOnCpu:
    """The map of a matrix of 16-bit elements, with a swizzle of 128 bytes. It does not keep the matrix alive.

    Args:
        address: of the first element.
        rows, columns: of the matrix, neither of them 0.
        row_stride: elements from a row to the next.
        box: rows and columns of one copy.

    Raises:
        CudaError: a driver would refuse this map too: something is no multiple of 16 bytes, or the box is too large.
    """

    def __init__(self, address: int, rows: int, columns: int, row_stride: int, box: tuple[int, int]) -> None:
        row_bytes = row_stride * _ELEMENT_BYTES
        wrong = {
            f"an address that is not a multiple of 16: {address:#x}": address % 16,
            f"a distance of rows that is not a multiple of 16 bytes: {row_bytes}": row_bytes % 16,
            f"an empty matrix: {rows} x {columns}": min(rows, columns) < 1,
            f"a box of {box[0]} rows; 1 to 256 are possible": not 1 <= box[0] <= 256,
            f"a box of {box[1]} columns; 8 to 64 are possible, in multiples of 8": not 8 <= box[1] <= 64 or box[1] % 8,
        }
        for what, holds in wrong.items():
            if holds:
                raise CudaError(f"no tensor map can be encoded for {what}")
        # A parameter of a kernel is aligned to 64 bytes.
        self._room = ctypes.create_string_buffer(ctypes.sizeof(_Map) + 64)
        self.address = (ctypes.addressof(self._room) + 63) // 64 * 64
        swizzle = int(box[1] * _ELEMENT_BYTES == _LINE_BYTES)
        packed = _Map(_MARK, address, rows, columns, row_bytes, *box, _ELEMENT_BYTES, swizzle)
        ctypes.memmove(self.address, ctypes.addressof(packed), ctypes.sizeof(_Map))
