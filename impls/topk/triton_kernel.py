"""topk in Triton: collect the few numbers of each row that may be among the k results, and sort them."""

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import cdiv, next_power_of_2
from fourfold.backends.strides import Rows
from fourfold.backends.triton import launch as triton_launch

from ..triton_rows import ANY_NUMBER_OF_ROWS, row_offsets
from .operators import register

MOST_SORTED = 256  # of the results of a row, by the program that collects them
LEAST_PARTS = 32  # of a row
LEAST_GROUPS, MOST_GROUPS = 512, 4096  # of a row that has as many numbers
LONG = 16384  # numbers of a row that four warps own
LOADED = 8  # numbers of a group, at a time
EXACT_PER_WARP = 128  # numbers of a tile of a row that holds too many equal ones
ORDERED = COMPARED = 32  # of what is chosen in a row: what a program orders, and compares that with at a time
# Numbers of the gradient that a program writes at a time, and each of its warps; and programs for all multiprocessors.
LEAST_ZEROED, MOST_ZEROED, ZEROED_PER_WARP, FEW_PROGRAMS = 256, 4096, 1024, 256
SCATTERED = 256  # cotangents at a time
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
    return keys_of(tl.load(ptr + at.to(tl.int64) * stride, mask=at < n), LARGEST, BITS, KEY)


@triton.jit
def larger_or_nan(a, b):
    """Return the larger of two numbers, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_of_groups(
    ptr, n, stride, LARGEST: tl.constexpr, GROUPS: tl.constexpr, LOADED: tl.constexpr, WHOLE: tl.constexpr
):
    """Return the number of each group of a row that is chosen first. Groups take turns in the row."""
    # The lowest number: NaN is no larger than another, but the last of the smallest.
    last = float("-inf") if LARGEST else float("nan")
    double: tl.constexpr = ptr.dtype.element_ty == tl.float64
    groups = tl.arange(0, GROUPS)
    first = tl.full((GROUPS,), last, tl.float64 if double else tl.float32)
    ptrs = ptr + groups.to(tl.int64) * stride
    left = n
    for _ in range(tl.cdiv(n, GROUPS * LOADED)):
        for turn in tl.static_range(LOADED):
            x = tl.load(ptrs) if WHOLE else tl.load(ptrs, mask=groups < left - turn * GROUPS, other=last)
            x = x.to(first.dtype)
            first = larger_or_nan(first, x) if LARGEST else tl.minimum(first, x)
            ptrs += tl.cast(GROUPS, tl.int64) * stride
        left -= GROUPS * LOADED
    return first


@triton.jit
def reached_by_k(
    first, n, k, T: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr, KEY: tl.constexpr, PARTS: tl.constexpr
):
    """Return a number that k numbers of a row reach, and few others do: the k-th of the first ones of its parts."""
    parts = tl.arange(0, PARTS)
    first = tl.reshape(first, (first.shape[0] // PARTS, PARTS))
    first = tl.reduce(first, 0, larger_or_nan) if LARGEST else tl.min(first, axis=0)
    keys = tl.where(parts < n, keys_of(first.to(T), LARGEST, BITS, KEY), tl.zeros((PARTS,), KEY))
    in_order = tl.sort(keys, descending=True)
    kth = tl.max(tl.where(parts >= k - 1, in_order, tl.zeros_like(in_order)), axis=0)
    chosen = (keys >= kth) & (parts < n)
    # The last of them that is no NaN.
    if LARGEST:
        return tl.min(tl.where(chosen, first, float("inf")), axis=0)
    return tl.max(tl.where(chosen, first, float("-inf")), axis=0)


@triton.jit
def reaches(x, limit, LARGEST: tl.constexpr):
    """Return which numbers reach a limit. NaN reaches every one, as it may be the largest."""
    return ((x >= limit) if LARGEST else (x <= limit)) | (x != x)


@triton.jit
def select_exactly(
    ptr,
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
        equal += tl.sum(ties, axis=0)
        placed += tl.sum(taken.to(tl.int32), axis=0)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def topk_select_kernel(
    x_ptr,  # [outer, inner, n], strided
    chosen_ptr,  # [rows, MOST]
    counts_ptr,  # [rows]; unused where this kernel sorts
    values_ptr,  # [rows, k]; the next one where it does not
    indices_ptr,  # [rows, k]; the same
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
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOADED: tl.constexpr,
    MEMBERS: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT_TILE: tl.constexpr,
    PAIR: tl.constexpr,
    PLACE_BITS: tl.constexpr,
):
    # One program owns one row. Whatever comes before the k-th of its parts' first numbers is among the k wanted or few
    # others, which are at most MOST but in rows of many equal numbers. They lie in the groups whose first number does.
    row = tl.program_id(0).to(INDEX)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    chosen_ptr += row.to(tl.int64) * MOST
    count = tl.full((), MOST + 1, tl.int32)
    if PARTS > 0:
        first = first_of_groups(ptr, n, stride, LARGEST, GROUPS, LOADED, WHOLE)
        limit = reached_by_k(first, n, k, x_ptr.dtype.element_ty, LARGEST, BITS, KEY, PARTS)
        groups = tl.arange(0, GROUPS)
        taken = (reaches(first, limit, LARGEST) & (groups < n)).to(tl.int32)
        places = tl.cumsum(taken, axis=0) - 1
        count = tl.sum(taken, axis=0)
        tl.store(chosen_ptr + places, groups, mask=(taken > 0) & (places < MOST))
        tl.debug_barrier()
        if MEMBERS > 1:  # noqa: SIM102  (the compiler knows this one)
            if count <= MOST:
                slots = tl.arange(0, MOST)
                exist = slots < count
                group = tl.load(chosen_ptr + slots, mask=exist, other=0)
                tl.debug_barrier()
                count = tl.zeros((), tl.int32)
                for tile in range(tl.cdiv(n, GROUPS * MEMBERS)):
                    turns = (tile * MEMBERS + tl.arange(0, MEMBERS)).to(group.dtype)
                    at = group[:, None] + (turns * GROUPS)[None, :]
                    there = exist[:, None] & (at < n)
                    x = tl.load(ptr + at.to(tl.int64) * stride, mask=there, other=0.0).to(limit.dtype)
                    among = tl.reshape((reaches(x, limit, LARGEST) & there).to(tl.int32), (MOST * MEMBERS,))
                    to = count + tl.cumsum(among, axis=0) - 1
                    tl.store(chosen_ptr + to, tl.reshape(at, (MOST * MEMBERS,)), mask=(among > 0) & (to < MOST))
                    count += tl.sum(among, axis=0)
                tl.debug_barrier()
    if count > MOST:
        select_exactly(ptr, chosen_ptr, n, stride, k, LARGEST, BITS, KEY, EXACT_TILE)
        count = tl.cast(k, tl.int32)
        tl.debug_barrier()
    if PLACE_BITS == 0:
        tl.store(counts_ptr + row, count)
    else:
        # Of a key and its place one number, of which the largest comes first.
        slots = tl.arange(0, MOST)
        at = tl.load(chosen_ptr + slots, mask=slots < count, other=0)
        keys = keys_at(ptr, at, n, stride, LARGEST, BITS, KEY)
        last_place: tl.constexpr = (1 << PLACE_BITS) - 1
        pairs = (keys.to(PAIR) << PLACE_BITS) | (last_place - at).to(PAIR)
        pairs = tl.sort(tl.where(slots < count, pairs, tl.zeros_like(pairs)), descending=True)
        at = last_place - (pairs & last_place).to(tl.int64)
        results = row.to(tl.int64) * k + slots
        tl.store(values_ptr + results, tl.load(ptr + at * stride, mask=slots < k), mask=slots < k)
        tl.store(indices_ptr + results, at, mask=slots < k)


@triton.jit(**ANY_NUMBER_OF_ROWS)
def topk_order_kernel(
    x_ptr,  # [outer, inner, n], strided
    chosen_ptr,  # [rows, MOST]
    counts_ptr,  # [rows]
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
    MOST: tl.constexpr,
    ORDERED: tl.constexpr,
    COMPARED: tl.constexpr,
):
    # One program owns ORDERED of the chosen places of a row. Before each come those of larger keys, and of equal keys
    # those that are earlier in the row.
    row = tl.program_id(0).to(INDEX) // tl.cdiv(MOST, ORDERED)
    count = tl.load(counts_ptr + row)
    ptr = x_ptr + row_offsets(row, inner, outer_stride, inner_stride)
    chosen_ptr += row.to(tl.int64) * MOST
    to = row.to(tl.int64) * k
    first = (tl.program_id(0).to(tl.int64) - row.to(tl.int64) * tl.cdiv(MOST, ORDERED)) * ORDERED
    own = first + tl.arange(0, ORDERED)
    at = tl.load(chosen_ptr + own, mask=own < count, other=0)
    values = tl.load(ptr + at.to(tl.int64) * stride, mask=own < count, other=0.0)
    keys = keys_of(values, LARGEST, BITS, KEY)
    before = tl.zeros((ORDERED,), tl.int32)
    for tile in range(tl.where(first < count, tl.cdiv(count, COMPARED), 0)):
        other = tile * COMPARED + tl.arange(0, COMPARED)
        others = tl.load(chosen_ptr + other, mask=other < count, other=0)
        theirs = keys_at(ptr, others, n, stride, LARGEST, BITS, KEY)
        ahead = (theirs[None, :] == keys[:, None]) & (others[None, :] < at[:, None])
        ahead = (ahead | (theirs[None, :] > keys[:, None])) & (other < count)[None, :]
        before += tl.sum(ahead.to(tl.int32), axis=1)
    mask = (own < count) & (before < k)
    tl.store(values_ptr + to + before, values, mask=mask)
    tl.store(indices_ptr + to + before, at, mask=mask)


@triton.jit(do_not_specialize=["elements"])
def topk_backward_kernel(
    grad_values_ptr,  # [rows, k]
    indices_ptr,  # [rows, k]
    grad_x_ptr,  # [rows, n]
    elements,
    n,
    k,
    width,
    INDEX: tl.constexpr,
    ZEROED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # One program owns `width` numbers of grad_x: it writes zeros, and then the cotangents whose places lie there.
    begin = tl.program_id(0).to(INDEX) * width
    end = tl.minimum(begin + width, elements).to(INDEX)
    first = begin // n * k
    last = ((end - 1) // n + 1) * k
    for start in range(first, last, SLOTS):
        # Load before the zeros are written, so that both are waited for at once.
        slots = start + tl.arange(0, SLOTS)
        index = tl.load(indices_ptr + slots, mask=slots < last, other=0)
        grad = tl.load(grad_values_ptr + slots, mask=slots < last, other=0.0)
        if start == first:
            zeros = tl.zeros((ZEROED,), grad_x_ptr.dtype.element_ty)
            for zeroed in range(begin, begin + width, ZEROED):
                at = zeroed + tl.arange(0, ZEROED)
                if zeroed + ZEROED <= elements:  # without a mask in whole vectors
                    tl.store(grad_x_ptr + at, zeros)
                else:
                    tl.store(grad_x_ptr + at, zeros, mask=at < elements)
            tl.debug_barrier()
        at = (slots // k).to(tl.int64) * n + index
        tl.store(grad_x_ptr + at, grad, mask=(slots < last) & (at >= begin) & (at < end))


def _launch(
    values: torch.Tensor, indices: torch.Tensor, rows: Rows, sizes: tuple[int, int, int], largest: bool
) -> None:
    (num_rows, n, _), k, itemsize = sizes, values.shape[-1], values.element_size()
    few = k <= MOST_SORTED
    most = max(2 * next_power_of_2(k), LEAST_PARTS)
    length = max(next_power_of_2(n), LEAST_PARTS)
    groups = min(max(length * itemsize // 16, 4 * most, LEAST_GROUPS), length, MOST_GROUPS)
    short = itemsize == 2 and n <= 2**16
    members = cdiv(n, groups)
    loaded = min(next_power_of_2(members), LOADED)
    warps = 4 if n > LONG or not few else max(most // (256 if short else 128), 1)
    # Places of a tile past the end of the row fit in their type, too.
    place = torch.int32 if n < 2**30 else torch.int64
    chosen = indices.new_empty((num_rows, most), dtype=place)
    sorts = few and itemsize < 8 and place == torch.int32
    counts = chosen if sorts else indices.new_empty(num_rows, dtype=torch.int32)
    programs = num_rows if sorts else num_rows * cdiv(most, ORDERED)
    common = {
        "LARGEST": largest,
        "BITS": BITS[itemsize],
        "KEY": tl.uint64 if itemsize == 8 else tl.uint32,
        "INDEX": triton_launch.index_type(programs),
        "MOST": most,
    }
    tensors, scalars = (rows.tensor, chosen, counts, values, indices), (*sizes, *rows[1:], k)
    triton_launch.launch(
        topk_select_kernel,
        (num_rows,),
        tensors,
        scalars,
        **common,
        PARTS=min(most, groups) if few else 0,
        GROUPS=groups,
        LOADED=loaded,
        MEMBERS=loaded,
        WHOLE=n % (groups * loaded) == 0,
        EXACT_TILE=EXACT_PER_WARP * warps,
        PAIR=tl.uint32 if short else tl.uint64,
        PLACE_BITS=(16 if short else 31) if sorts else 0,
        num_warps=warps,
    )
    if not sorts:
        tiles = {"ORDERED": ORDERED, "COMPARED": COMPARED}
        triton_launch.launch(topk_order_kernel, (programs,), tensors, scalars, **common, **tiles, num_warps=1)


def _launch_backward(grad_x: torch.Tensor, grad_values: torch.Tensor, indices: torch.Tensor) -> None:
    elements, n, k = grad_x.numel(), grad_x.shape[-1], indices.shape[-1]
    zeroed = min(max(next_power_of_2(elements // FEW_PROGRAMS), LEAST_ZEROED), MOST_ZEROED)
    # Each program reads all k places of its rows. Together they read no more of them than the rows have numbers.
    width = cdiv(max(zeroed, min(k, n)), zeroed) * zeroed
    triton_launch.launch(
        topk_backward_kernel,
        (cdiv(elements, width),),
        (grad_values, indices, grad_x),
        (elements, n, k, width),
        INDEX=triton_launch.index_type(elements + width),
        ZEROED=zeroed,
        SLOTS=min(next_power_of_2((width // n + 2) * k), SCATTERED),
        num_warps=max(zeroed // ZEROED_PER_WARP, 1),
    )


topk = register("triton", _launch, _launch_backward)
