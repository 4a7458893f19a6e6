"""Rows of strided tensors in Triton kernels: their offsets, loads and stores."""

import triton
import triton.language as tl

# Triton must not specialize on the number of rows: a kernel compiled for one row, or for a multiple of 16, might sum a
# row in another order, so that its result would depend on their number. An axis `inner` of 1 is a constant, which saves
# a division.
ANY_NUMBER_OF_ROWS = {"do_not_specialize": ["num_rows"], "do_not_specialize_on_alignment": ["inner"]}


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride):
    """Return the element offset of each row of ``[outer, inner, ...]``, in 64 bits."""
    outer = rows // inner
    return outer.to(tl.int64) * outer_stride + (rows - outer * inner).to(tl.int64) * inner_stride


@triton.jit
def load_tile(
    ptr, rows, columns, num_rows, cols, inner, outer_stride, inner_stride, column_stride, POLICY: tl.constexpr
):  # fmt: skip
    """Load some rows and columns of ``[outer, inner, cols]``, with 0 outside the tensor, by a policy of eviction."""
    at = row_offsets(rows, inner, outer_stride, inner_stride)[:, None]
    at += (columns.to(tl.int64) * column_stride)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < cols)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def load_whole_rows(ptr, rows, columns, num_rows, cols):
    """Load some rows and columns of a contiguous tensor ``[rows, cols]``, with 0 outside of it."""
    at = rows.to(tl.int64)[:, None] * cols + columns[None, :]
    return tl.load(ptr + at, mask=(rows < num_rows)[:, None] & (columns < cols)[None, :], other=0.0)


@triton.jit
def store_tile(ptr, rows, columns, num_rows, cols, values, MODIFIER: tl.constexpr):
    """Store some rows and columns of a contiguous tensor ``[rows, cols]``, with a modifier of caches."""
    at = rows.to(tl.int64)[:, None] * cols + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < cols)[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=mask, cache_modifier=MODIFIER)


@triton.jit
def load_parameter(ptr, columns, cols, stride, COMPUTE: tl.constexpr):
    """Load some columns of weight or bias. Every program reads the same data."""
    at = columns.to(tl.int64) * stride
    return tl.load(ptr + at, mask=columns < cols, other=0.0, eviction_policy="evict_last").to(COMPUTE)
