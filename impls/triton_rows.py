"""The offsets of rows in strided tensors, for Triton kernels."""

import triton
import triton.language as tl

# Triton must not specialize on these: a kernel compiled for one row, or for a multiple of 16, might sum a row in
# another order, so that a row's result would depend on the number of rows.
NUMBERS_OF_ROWS = ["num_rows", "inner"]


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """Return the element offset of each row of ``[outer, inner, ...]``, in 64 bits."""
    outer = rows // inner
    return outer.to(tl.int64) * outer_stride + (rows - outer * inner).to(tl.int64) * inner_stride
