"""Rows of strided tensors in Triton."""

import triton
import triton.language as tl

# A kernel compiled anew for one row, or for a multiple of 16, might sum a row in another order than for other numbers:
# a row would depend on how many there are.
NUMBERS_OF_ROWS = ["num_rows", "inner"]


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """Element offset of each row of ``[outer, inner, ...]``, in 64 bits."""
    outer = rows // inner
    return outer.to(tl.int64) * outer_stride + (rows - outer * inner).to(tl.int64) * inner_stride
