"""Rows of strided tensors in Triton."""

import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """Element offset of each row of ``[outer, inner, ...]``, in 64 bits."""
    outer = rows // inner
    return outer.to(tl.int64) * outer_stride + (rows - outer * inner).to(tl.int64) * inner_stride
