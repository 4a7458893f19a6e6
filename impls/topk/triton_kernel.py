"""topk in Triton: collect the few numbers of each row that may be among the k results, and order them by counting."""

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
MOST_EXACT = 1024  # of a tile of a row that holds too many equal numbers
LEAST_GROUPS = LEAST_CHOSEN = 64  # of a row
ORDERED = COMPARED = 32  # of what is chosen in a row: what a program orders, and compares that with at a time
SCATTERED = 1024
BITS = {2: tl.uint16, 4: tl.uint32, 8: tl.uint64}  # by the bytes of a number
KEYS = {2: torch.uint32, 4: torch.uint32, 8: torch.uint64}


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
    return keys_of(tl.load(ptr + at.to(tl.int64) * stride, mask=at < n), LARGEST, BITS, KEY)


@triton.jit
def kth_largest(keys, k, KEY: tl.constexpr, BITS: tl.constexpr):
    """Return the largest key that k of the keys reach."""
    digits, limit = tl.arange(0, 16).to(KEY), tl.zeros((1,), KEY)
    for step in range(BITS.primitive_bitwidth // 4):
        shift = tl.cast(BITS.primitive_bitwidth - 4 - 4 * step, KEY)
        reach = keys[None, :] >= (limit + (digits << shift))[:, None]
        reached = tl.sum(reach.to(tl.int32), axis=1)
        limit += tl.cast(tl.sum((reached >= k).to(tl.int32), axis=0) - 1, KEY) << shift
    return limit


@triton.jit
def select_exactly(
    ptr,
    keys_ptr,
    chosen_ptr,
    n,
    stride,
    k,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write which k places are chosen, in rising order. The key of the k-th is found two bits at a time."""
    columns = tl.arange(0, BLOCK).to(tl.int64)
    digits, limit = tl.arange(0, 4).to(KEY), tl.zeros((1,), KEY)
    for step in range(BITS.primitive_bitwidth // 2):
        shift = tl.cast(BITS.primitive_bitwidth - 2 - 2 * step, KEY)
        reached = tl.zeros((4,), tl.int64)
        for tile in range(tl.cdiv(n, BLOCK)):
            at = tile * BLOCK + columns
            keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
            reach = (keys[None, :] >= (limit + (digits << shift))[:, None]) & (at < n)[None, :]
            reached += tl.sum(reach.to(tl.int32), axis=1)
        limit += tl.cast(tl.sum((reached >= k).to(tl.int32), axis=0) - 1, KEY) << shift
    above = tl.zeros((), tl.int64)
    for tile in range(tl.cdiv(n, BLOCK)):
        at = tile * BLOCK + columns
        keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        above += tl.sum(((keys > limit) & (at < n)).to(tl.int32), axis=0)
    # The first places with the key of the k-th fill the remaining slots.
    equal, placed = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for tile in range(tl.cdiv(n, BLOCK)):
        at = tile * BLOCK + columns
        keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        ties = ((keys == limit) & (at < n)).to(tl.int32)
        taken = (ties > 0) & (equal + tl.cumsum(ties, axis=0) <= k - above)
        taken |= (keys > limit) & (at < n)
        places = placed + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(chosen_ptr + places, at, mask=taken)
        tl.store(keys_ptr + places, keys, mask=taken)
        equal += tl.sum(ties, axis=0)
        placed += tl.sum(taken.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def topk_select_kernel(
    x_ptr,  # [outer, inner, n], strided
    keys_ptr,  # [rows, MOST]
    chosen_ptr,  # [rows, MOST]
    counts_ptr,  # [rows]
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
    MOST: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SMALL_TILE: tl.constexpr,
):
    # One program owns one row. Whatever comes before the k-th of its groups' largest keys is among the k wanted or few
    # others, which are at most MOST but in rows of many equal numbers.
    row = tl.program_id(0).to(INDEX)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    begin = row.to(tl.int64) * MOST
    columns = tl.arange(0, MEMBERS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    columns = columns.to(tl.int32 if ONE_TILE else tl.int64)
    first = tl.zeros((GROUPS,), KEY)
    keys = keys_at(ptr, columns, n, stride, LARGEST, BITS, KEY)
    for tile in range(tl.cdiv(n, GROUPS * MEMBERS)):
        at = columns if ONE_TILE else tile * (GROUPS * MEMBERS) + columns
        if not ONE_TILE:
            keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        first = tl.maximum(first, tl.max(tl.where(at < n, keys, tl.zeros_like(keys)), axis=0))
    limit = kth_largest(first, k, KEY, BITS)
    tl.store(counts_ptr + row, 0)
    tl.debug_barrier()
    for tile in range(tl.cdiv(n, GROUPS * MEMBERS)):
        at = columns if ONE_TILE else tile * (GROUPS * MEMBERS) + columns
        if not ONE_TILE:
            keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        taken = (keys >= limit) & (at < n)
        # In whichever order: the chosen numbers are ordered later.
        places = tl.atomic_add(counts_ptr + row + tl.zeros_like(at), 1, mask=taken, sem="relaxed", scope="cta")
        taken &= places < MOST
        tl.store(chosen_ptr + begin + places, at, mask=taken)
        tl.store(keys_ptr + begin + places, keys, mask=taken)
    tl.debug_barrier()
    if tl.load(counts_ptr + row) > MOST:
        select_exactly(ptr, keys_ptr + begin, chosen_ptr + begin, n, stride, k, LARGEST, BITS, KEY, SMALL_TILE)
        tl.debug_barrier()
        tl.store(counts_ptr + row, tl.cast(k, tl.int32))


@triton.jit
def come_before(theirs, others, keys, at, exist, PACKED: tl.constexpr):
    """Return which keys at which other places come before each of the keys at their places, [keys, others]."""
    if PACKED:
        # Of both one number, and one comparison. Places are below 2^31.
        theirs = (theirs.to(tl.int64) << 31) + (0x7FFFFFFF - others)
        theirs = tl.where(exist, theirs, tl.full((), -1, tl.int64))
        return theirs[None, :] > ((keys.to(tl.int64) << 31) + (0x7FFFFFFF - at))[:, None]
    ahead = (theirs[None, :] == keys[:, None]) & (others[None, :] < at[:, None])
    return (ahead | (theirs[None, :] > keys[:, None])) & exist[None, :]


@triton.jit(do_not_specialize=NUMBERS_OF_ROWS)
def topk_order_kernel(
    x_ptr,  # [outer, inner, n], strided
    keys_ptr,  # [rows, MOST]; of no meaning where all n places of a row are chosen
    chosen_ptr,  # [rows, MOST]; the same
    counts_ptr,  # [rows]; the same
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
    MOST: tl.constexpr,
    PACKED: tl.constexpr,
    ORDERED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    # One program owns ORDERED of the chosen places of a row. Before each come those of larger keys, and of equal keys
    # those that are earlier in the row.
    row = tl.program_id(0).to(INDEX) // tl.cdiv(MOST, ORDERED)
    count = n if ALL else tl.load(counts_ptr + row)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    begin = row.to(tl.int64) * MOST
    to = row.to(tl.int64) * k
    first = (tl.program_id(0).to(tl.int64) - row.to(tl.int64) * tl.cdiv(MOST, ORDERED)) * ORDERED
    own = first + tl.arange(0, ORDERED)
    at = own if ALL else tl.load(chosen_ptr + begin + own, mask=own < count, other=0)
    values = tl.load(ptr + at.to(tl.int64) * stride, mask=own < count, other=0.0)
    keys = keys_of(values, LARGEST, BITS, KEY)
    before = tl.zeros((ORDERED,), tl.int32)
    for tile in range(tl.where(first < count, tl.cdiv(count, COMPARED), 0)):
        other = tile * COMPARED + tl.arange(0, COMPARED)
        if ALL:
            others = other.to(tl.int64)
            theirs = keys_at(ptr, others, n, stride, LARGEST, BITS, KEY)
        else:
            others = tl.load(chosen_ptr + begin + other, mask=other < count, other=0)
            theirs = tl.load(keys_ptr + begin + other, mask=other < count, other=0)
        before += tl.sum(come_before(theirs, others, keys, at, other < count, PACKED).to(tl.int32), axis=1)
    mask = (own < count) & (before < k)
    tl.store(values_ptr + to + before, values, mask=mask)
    tl.store(indices_ptr + to + before, at, mask=mask)


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
    values: torch.Tensor, indices: torch.Tensor, rows: Rows, sizes: tuple[int, int, int], largest: bool
) -> None:
    (num_rows, n, _), k = sizes, values.shape[-1]
    itemsize, short = values.element_size(), n <= SHORT
    most = SHORT if short else max(2 * next_power_of_2(k), LEAST_CHOSEN)
    programs = num_rows * cdiv(most, ORDERED)
    common = {
        "LARGEST": largest,
        "BITS": BITS[itemsize],
        "KEY": tl.uint64 if itemsize == 8 else tl.uint32,
        "INDEX": triton_launch.index_type(programs),
        "MOST": most,
    }
    scalars = (*sizes, *rows[1:], k)
    # Of a row that is ordered as a whole nothing is chosen.
    keys, chosen, counts, place = indices, indices, indices, torch.int32 if n < 2**31 else torch.int64
    if not short:
        keys, chosen = (indices.new_empty((num_rows, most), dtype=dtype) for dtype in (KEYS[itemsize], place))
        counts = indices.new_empty(num_rows, dtype=torch.int32)
        block = min(next_power_of_2(n), MOST_COLS)
        groups = min(max(next_power_of_2(2 * k), LEAST_GROUPS), block)
        tile = {"GROUPS": groups, "MEMBERS": block // groups, "SMALL_TILE": min(block, MOST_EXACT)}
        triton_launch.launch(
            topk_select_kernel,
            (num_rows,),
            (rows.tensor, keys, chosen, counts),
            scalars,
            ONE_TILE=n <= block,
            **common,
            **tile,
            num_warps=2 if block < MOST_COLS else 4,
        )
    triton_launch.launch(
        topk_order_kernel,
        (programs,),
        (rows.tensor, keys, chosen, counts, values, indices),
        scalars,
        ALL=short,
        PACKED=itemsize < 8 and place == torch.int32,
        ORDERED=ORDERED,
        COMPARED=COMPARED,
        **common,
        num_warps=1,
    )


def _launch_backward(grad_x: torch.Tensor, grad_values: torch.Tensor, indices: torch.Tensor) -> None:
    elements, n, k = indices.numel(), grad_x.shape[-1], indices.shape[-1]
    tensors = (grad_values, indices, grad_x)
    triton_launch.launch(topk_backward_kernel, (cdiv(elements, SCATTERED),), tensors, (elements, n, k), BLOCK=SCATTERED)


topk_operator = register("triton", _launch, _launch_backward)


def topk(x: torch.Tensor, k: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest, or smallest, numbers along the last axis: see `fourfold.impls.topk.torch_eager.topk`."""
    check_topk(x, k, largest)
    return topk_operator(x, k, largest)
