"""topk in Triton: in a row the key of the k-th is found two bits at a time; what is chosen is ordered by counting."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import Rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import NUMBERS_OF_ROWS, row_offsets
from .arguments import check_topk
from .operators import register

SHORT = 64  # columns of a row that is ordered as a whole
MOST_COLS = 8192  # of a tile; a row of one tile lies in registers
ORDERED, COMPARED = 32, 64  # of what is chosen in a row: what a program orders, and compares that with at a time
SCATTERED = 1024
BITS = {2: tl.uint16, 4: tl.uint32, 8: tl.uint64}  # by the bytes of a number


@triton.jit
def keys_of(x, LARGEST: tl.constexpr, BITS: tl.constexpr, KEY: tl.constexpr):
    """Return unsigned keys in whose falling order numbers are chosen: NaN is above all numbers, and -0 is 0."""
    every = (tl.full((), 1, KEY) << (BITS.primitive_bitwidth - 1)) * 2 - 1
    sign = every - every // 2
    bits = tl.where(x == 0, tl.zeros_like(x), x).to(BITS, bitcast=True).to(KEY)
    keys = tl.where(bits >= sign, every - bits, bits + sign)
    keys = tl.where(x == x, keys, every)
    if LARGEST:
        return keys
    return every - keys


@triton.jit
def keys_at(ptr, at, n, stride, LARGEST: tl.constexpr, BITS: tl.constexpr, KEY: tl.constexpr):
    """Return the keys at some places of a row; of no meaning past its end."""
    return keys_of(tl.load(ptr + at * stride, mask=at < n), LARGEST, BITS, KEY)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def topk_select_kernel(
    x_ptr,  # [outer, inner, n], strided
    chosen_ptr,  # [rows, k]
    num_rows,
    n,
    inner,
    outer_stride,
    inner_stride,
    stride,
    k,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    KEY: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    # One program owns one row, and writes which places are chosen, in rising order.
    row = tl.program_id(0).to(INDEX)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    keys = keys_at(ptr, columns, n, stride, LARGEST, BITS, KEY)
    digits = tl.arange(0, 4).to(KEY)
    limit = tl.zeros((1,), KEY)  # the largest key that k keys reach, from its first bits on
    for step in range(BITS.primitive_bitwidth // 2):
        shift = tl.cast(BITS.primitive_bitwidth - 2 - 2 * step, KEY)
        reached = tl.zeros((4,), tl.int64)
        for tile in range(tl.cdiv(n, BLOCK)):
            at = tile * BLOCK + columns
            if not ONE_TILE:
                keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
            reach = (keys[None, :] >= (limit + (digits << shift))[:, None]) & (at < n)[None, :]
            reached += tl.sum(reach.to(tl.int32), axis=1)
        limit += tl.cast(tl.sum((reached >= k).to(tl.int32), axis=0) - 1, KEY) << shift
    above = tl.zeros((), tl.int64)
    for tile in range(tl.cdiv(n, BLOCK)):
        at = tile * BLOCK + columns
        if not ONE_TILE:
            keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        above += tl.sum(((keys > limit) & (at < n)).to(tl.int32), axis=0)
    # Of the places whose key is that of the k-th, the first ones fill what is left.
    equal, placed = tl.zeros((), tl.int64), tl.cast(row, tl.int64) * k
    for tile in range(tl.cdiv(n, BLOCK)):
        at = tile * BLOCK + columns
        if not ONE_TILE:
            keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        ties = ((keys == limit) & (at < n)).to(tl.int32)
        taken = (ties > 0) & (equal + tl.cumsum(ties, axis=0) <= k - above)
        taken |= (keys > limit) & (at < n)
        places = placed + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(chosen_ptr + places, at.to(chosen_ptr.dtype.element_ty), mask=taken)
        equal += tl.sum(ties, axis=0)
        placed += tl.sum(taken.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def topk_order_kernel(
    x_ptr,  # [outer, inner, n], strided
    chosen_ptr,  # [rows, count]; of no meaning where all n places of a row are
    values_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    num_rows,
    n,
    inner,
    outer_stride,
    inner_stride,
    stride,
    k,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    KEY: tl.constexpr,
    INDEX: tl.constexpr,
    ALL: tl.constexpr,
    ORDERED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    # One program owns ORDERED of the chosen places of a row. Before each come those of larger keys, and equal ones that
    # were chosen before.
    count = n if ALL else k
    row = tl.program_id(0).to(INDEX) // tl.cdiv(count, ORDERED)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    begin = row.to(tl.int64) * k
    first = (tl.program_id(0).to(tl.int64) - row.to(tl.int64) * tl.cdiv(count, ORDERED)) * ORDERED
    own = first + tl.arange(0, ORDERED)
    at = own if ALL else tl.load(chosen_ptr + begin + own, mask=own < k, other=0)
    values = tl.load(ptr + at * stride, mask=own < count, other=0.0)
    keys = keys_of(values, LARGEST, BITS, KEY)
    before = tl.zeros((ORDERED,), tl.int64)
    for tile in range(tl.cdiv(count, COMPARED)):
        other = tile * COMPARED + tl.arange(0, COMPARED).to(tl.int64)
        others = other if ALL else tl.load(chosen_ptr + begin + other, mask=other < k, other=0)
        theirs = keys_at(ptr, others, n, stride, LARGEST, BITS, KEY)
        ahead = (theirs[None, :] == keys[:, None]) & (other[None, :] < own[:, None])
        ahead |= theirs[None, :] > keys[:, None]
        before += tl.sum((ahead & (other < count)[None, :]).to(tl.int32), axis=1)
    mask = (own < count) & (before < k)
    tl.store(values_ptr + begin + before, values, mask=mask)
    tl.store(indices_ptr + begin + before, at, mask=mask)


@triton.jit
def topk_backward_kernel(
    grad_values_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    grad_x_ptr,  # [rows, n], of zeros
    elements,
    n,
    k,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK cotangents.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_values_ptr + at, mask=at < elements, other=0.0)
    index = tl.load(indices_ptr + at, mask=at < elements, other=0)
    tl.store(grad_x_ptr + at // k * n + index, grad, mask=at < elements)


def _launch(
    values: torch.Tensor,
    indices: torch.Tensor,
    chosen: torch.Tensor,
    rows: Rows,
    sizes: tuple[int, int, int],
    largest: bool,
) -> None:
    (num_rows, n, _), k = sizes, values.shape[-1]
    programs = num_rows * cdiv(k if n > SHORT else n, ORDERED)
    block, itemsize = min(next_power_of_2(n), MOST_COLS), values.element_size()
    common = {
        "LARGEST": largest,
        "BITS": BITS[itemsize],
        "KEY": tl.uint64 if itemsize == 8 else tl.uint32,
        "INDEX": triton_launch.index_type(programs),
    }
    scalars = (*sizes, *rows[1:], k)
    if n > SHORT:
        tile = {"BLOCK": block, "ONE_TILE": n <= block, "num_warps": min(max(block // 512, 1), 16)}
        triton_launch.launch(topk_select_kernel, (num_rows,), (rows.tensor, chosen), scalars, **common, **tile)
    tensors, tiles = (rows.tensor, chosen, values, indices), {"ORDERED": ORDERED, "COMPARED": COMPARED}
    triton_launch.launch(
        topk_order_kernel, (programs,), tensors, scalars, ALL=n <= SHORT, **common, **tiles, num_warps=2
    )


def _launch_backward(grad_x: torch.Tensor, grad_values: torch.Tensor, indices: torch.Tensor) -> None:
    elements, n, k = indices.numel(), grad_x.shape[-1], indices.shape[-1]
    tensors = (grad_values, indices, grad_x)
    triton_launch.launch(topk_backward_kernel, (cdiv(elements, SCATTERED),), tensors, (elements, n, k), BLOCK=SCATTERED)


topk_operator = register("triton", _launch, _launch_backward)


def topk(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest, or smallest, numbers along the last axis: see `fourfold.impls.topk.torch_eager.topk`."""
    check_topk(x, k, largest)
    return topk_operator(x, k, largest)
