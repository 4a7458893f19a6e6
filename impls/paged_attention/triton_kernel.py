"""paged_attention in Triton: the tokens of each sequence are split over programs, and their results merged."""

import triton
import triton.language as tl

from fourfold.backends.launch import next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from ..attention.triton_kernel import product_of_rows
from .operators import Call, register
from .operators import depends_on_batch as depends_on_batch

MOST_HEADS = 64  # of a group, in one program
# A multiple of 16, or 1, makes no kernel of its own.
SIZES = ["pages", "page_size", "pages_per_sequence", "heads", "kv_heads", "columns", "splits"]
UNSPECIALIZED = [*SIZES, *(f"{cache}_{of}_stride" for cache in "kv" for of in ("page", "token", "head"))]


@triton.jit
def share_of(lengths_ptr, sequence, capacity, splits, BLOCK_K: tl.constexpr):
    """Return the length of a sequence, 0 for an invalid one, the tokens of a split, and whether the length is valid."""
    length = tl.load(lengths_ptr + sequence)
    fits = (length >= 0) & (length <= capacity)
    length = tl.where(fits, length, 0)
    return length, tl.cdiv(tl.cdiv(length, splits), BLOCK_K) * BLOCK_K, fits


@triton.jit(do_not_specialize=UNSPECIALIZED)
def paged_attention_split_kernel(
    q_ptr,  # [sequences, heads, columns]
    k_ptr,  # [pages, page_size, kv_heads, columns], strided
    v_ptr,  # [pages, page_size, kv_heads, columns], strided
    table_ptr,  # [sequences, pages_per_sequence]
    lengths_ptr,  # [sequences]
    output_ptr,  # [sequences, heads, columns]
    sums_ptr,  # [sequences, heads, splits, columns]; of no meaning unless SPLIT
    largest_ptr,  # [sequences, heads, splits]
    totals_ptr,  # [sequences, heads, splits]
    pages,
    page_size,
    pages_per_sequence,
    heads,
    kv_heads,
    columns,  # this and the strides are counted in vectors of WIDTH
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    splits,
    scale: tl.float64,  # else Triton rounds it to float32
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program owns up to BLOCK_H heads of one key head, and a split of the tokens of one sequence. Neighbours take
    # the other key heads of the same tokens, which lie beside them.
    group = heads // kv_heads
    tiles = tl.cdiv(group, BLOCK_H)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    rest = tl.program_id(0) // kv_heads
    in_group = rest % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    split = rest // tiles % splits
    sequence = (rest // tiles // splits).to(tl.int64)
    columns = columns * WIDTH
    scale = tl.full((), scale, COMPUTE)
    length, share, fits = share_of(lengths_ptr, sequence, pages_per_sequence * page_size, splits, BLOCK_K)
    begin = split * share
    end = tl.minimum(begin + share, length)
    column, head = tl.arange(0, BLOCK_D), kv_head * group + in_group
    own, among = in_group < group, column < columns
    row = sequence * heads + head
    q_at = q_ptr + row * columns
    k_ptr += kv_head * k_head_stride * WIDTH
    v_ptr += kv_head * v_head_stride * WIDTH
    table_ptr += sequence * pages_per_sequence
    if CHUNK == BLOCK_D:
        q = tl.load(q_at[:, None] + column[None, :], mask=own[:, None] & among[None, :], other=0.0)
    largest = tl.full((BLOCK_H,), -float("inf"), COMPUTE)
    total = tl.zeros((BLOCK_H,), COMPUTE)
    sums = tl.zeros((BLOCK_H, BLOCK_D), COMPUTE)
    for first in range(begin, end, BLOCK_K):
        token = first + tl.arange(0, BLOCK_K)
        there = token < end
        page = tl.load(table_ptr + token // page_size, mask=there, other=0).to(tl.int64)
        known = (page >= 0) & (page < pages)
        read = there & known
        slot = (token % page_size).to(tl.int64)
        k_at = k_ptr + page * k_page_stride * WIDTH + slot * k_token_stride * WIDTH
        if CHUNK == BLOCK_D:
            k = tl.load(k_at[None, :] + column[:, None], mask=read[None, :] & among[:, None], other=0.0)
            scores = tl.dot(q, k, out_dtype=COMPUTE, input_precision="ieee") * scale
        else:
            scores = product_of_rows(q_at, k_at, own, read, columns, COMPUTE, CHUNK) * scale
        scores = tl.where(known[None, :], scores, float("nan"))
        scores = tl.where(there[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        # Of scores that are all -inf, so that no difference of infinities is taken.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        terms = tl.exp(scores - base[:, None])
        shrunk = tl.exp(largest - base)
        total = total * shrunk + tl.sum(terms, axis=1)
        v_at = v_ptr + page * v_page_stride * WIDTH + slot * v_token_stride * WIDTH
        v = tl.load(v_at[:, None] + column[None, :], mask=read[:, None] & among[None, :], other=0.0)
        sums = tl.dot(terms.to(v.dtype), v, sums * shrunk[:, None], input_precision="ieee", out_dtype=COMPUTE)
        largest = larger
    if SPLIT:
        at, written = row * splits + split, own & (begin < end)
        tl.store(largest_ptr + at, largest, mask=written)
        tl.store(totals_ptr + at, total, mask=written)
        tl.store(sums_ptr + at[:, None] * columns + column[None, :], sums, mask=written[:, None] & among[None, :])
    else:
        output = tl.where(length > 0, sums / total[:, None], 0.0)
        output = tl.where(fits, output, float("nan")).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + row[:, None] * columns + column[None, :], output, mask=own[:, None] & among[None, :])


@triton.jit(do_not_specialize=["pages_per_sequence", "page_size", "heads", "columns", "splits"])
def paged_attention_merge_kernel(
    lengths_ptr,  # [sequences]
    sums_ptr,  # [sequences, heads, splits, columns]
    largest_ptr,  # [sequences, heads, splits]
    totals_ptr,  # [sequences, heads, splits]
    output_ptr,  # [sequences, heads, columns]
    pages_per_sequence,
    page_size,
    heads,
    columns,
    splits,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program owns one head of one sequence, and merges its splits in their order.
    row = tl.program_id(0).to(tl.int64)
    length, share, fits = share_of(lengths_ptr, row // heads, pages_per_sequence * page_size, splits, BLOCK_K)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    used, at = split * share < length, row * splits + split
    largest = tl.load(largest_ptr + at, mask=used, other=-float("inf"))
    top = tl.max(largest, axis=0)
    factors = tl.exp(largest - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(factors * tl.load(totals_ptr + at, mask=used, other=0.0), axis=0)
    sums_at = sums_ptr + at[:, None] * columns + column[None, :]
    sums = tl.load(sums_at, mask=used[:, None] & (column < columns)[None, :], other=0.0)
    output = tl.where(length > 0, tl.sum(factors[:, None] * sums, axis=0) / total, 0.0)
    output = tl.where(fits, output, float("nan")).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * columns + column, output, mask=column < columns)


def _launch(call: Call) -> None:
    _, page_size, pages_per_sequence, heads, kv_heads, columns = call.sizes
    half, width = call.q.element_size() == 2, 16 // call.q.element_size() if call.has_whole_vectors else 1
    block_d, block_h = max(16, next_power_of_2(columns)), max(16, min(next_power_of_2(heads // kv_heads), MOST_HEADS))
    block_k = 64 if half else 32
    triton_launch.launch(
        paged_attention_split_kernel,
        (call.blocks(block_h),),
        call[:9],
        (*call.sizes[:5], columns // width, *(n // width for n in call.strides), call.splits, call.scale),
        WIDTH=width,
        SPLIT=call.splits > 1,
        COMPUTE=triton_launch.COMPUTE[call.q.dtype],
        BLOCK_H=block_h,
        BLOCK_K=block_k,
        BLOCK_D=block_d,
        # Wider types are multiplied without tensor cores, and operands of a whole head would not fit into registers.
        CHUNK=block_d if half else 16,
        num_warps=4,
        num_stages=2 if half else 1,
    )
    if call.splits > 1:
        triton_launch.launch(
            paged_attention_merge_kernel,
            (len(call.q) * heads,),
            (call.lengths, call.sums, call.largest, call.totals, call.output),
            (pages_per_sequence, page_size, heads, columns, call.splits),
            BLOCK_K=block_k,
            SPLITS=next_power_of_2(call.splits),
            BLOCK_D=block_d,
        )


paged_attention = register("triton", _launch, resident=2)
