"""attention in Triton: FlashAttention over packed sequences, without atomic operations."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fourfold.backends.launch import available_shared_memory, cdiv, multiprocessors, next_power_of_2
from fourfold.backends.triton import launch as triton_launch

from .operators import Call, has_whole_vectors, register

PROBES = tl.constexpr(128)  # offsets that a program looks at together
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
ROWS_OF_DELTA = 32
# Of a float32: the bits of a bfloat16, half its last one, and the least magnitude that bfloat16 rounds to infinity.
BFLOAT16, HALF_BFLOAT16, LEAST_TO_INFINITY = tl.constexpr(-0x10000), tl.constexpr(0x8000), tl.constexpr(0x7F7F8000)
SUMMED = 1024  # elements of a program that adds up the gradients of the heads that share keys
# Scales that float32 takes in base 2 as well.
LEAST_SCALE, MOST_SCALE = 1e-30, 1e30
# A multiple of 16, or 1, makes no kernel of its own.
UNSPECIALIZED = ["total_q", "total_k", "batch", "heads", "kv_heads", "columns", "q_token_stride", "q_head_stride"]
UNSPECIALIZED += ["k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "grad_token_stride"]
UNSPECIALIZED += ["grad_head_stride", "left", "right"]


@triton.jit
def place_of(
    tile,
    own_ptr,
    other_ptr,
    own_total,
    other_total,
    batch,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Return a tile's first row in its sequence, and begin and length of the sequence's own and other tokens.

    Invalid offsets are taken for one sequence without other tokens. The last result says whether they are valid.
    """
    fits = tl.full((), 1, tl.int32)
    begin = tl.full((), 0, tl.int64)
    length = tl.cast(own_total, tl.int64)
    other_begin = tl.full((), 0, tl.int64)
    other_length = tl.cast(other_total, tl.int64)
    first = tl.cast(tile, tl.int64) * ROWS
    if GIVEN:
        # The sequence of a tile is the last one whose first tile, `offsets[s] // ROWS + s`, is not after it.
        begun = tl.full((), 0, tl.int32)
        for start in range(0, batch, PROBES):
            sequences = (start + tl.arange(0, PROBES)).to(tl.int64)
            there = sequences < batch
            begins = tl.load(own_ptr + sequences, mask=there, other=0).to(tl.int64)
            ends = tl.load(own_ptr + sequences + 1, mask=there, other=0).to(tl.int64)
            other_begins = tl.load(other_ptr + sequences, mask=there, other=0)
            other_ends = tl.load(other_ptr + sequences + 1, mask=there, other=0)
            wrong = (ends < begins) | (other_ends < other_begins)
            wrong = wrong | ((sequences == 0) & ((begins != 0) | (other_begins != 0)))
            wrong = wrong | ((sequences == batch - 1) & ((ends != own_total) | (other_ends != other_total)))
            fits = tl.where(tl.max((there & wrong).to(tl.int32), axis=0) > 0, 0, fits)
            begun += tl.sum((there & (begins // ROWS + sequences <= tile)).to(tl.int32), axis=0)
        sequence = tl.maximum(begun - 1, 0).to(tl.int64)
        at = tl.load(own_ptr + sequence).to(tl.int64)
        end = tl.load(own_ptr + sequence + 1).to(tl.int64)
        other_at = tl.load(other_ptr + sequence).to(tl.int64)
        other_end = tl.load(other_ptr + sequence + 1).to(tl.int64)
        valid = fits != 0
        begin = tl.where(valid, at, begin)
        length = tl.where(valid, end - at, length)
        other_begin = tl.where(valid, other_at, other_begin)
        other_length = tl.where(valid, other_end - other_at, 0)
        first = tl.where(valid, (tile - (at // ROWS + sequence)) * ROWS, first)
    return first.to(INDEX), begin, length.to(INDEX), other_begin, other_length.to(INDEX), fits


@triton.jit
def split(x):
    """Return a float32 as three bfloat16: x is the first, plus the second / 128, plus the third / 128^2.

    So scaled, none of them underflows before x does. The first one of a finite number is finite.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) < LEAST_TO_INFINITY, bits + HALF_BFLOAT16, bits) & BFLOAT16
    first = bits.to(tl.float32, bitcast=True)
    rest = (x - first) * 128
    # As above: a cast, and its result as float32 again, take longer.
    second = ((rest.to(tl.int32, bitcast=True) + HALF_BFLOAT16) & BFLOAT16).to(tl.float32, bitcast=True)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), ((rest - second) * 128).to(tl.bfloat16)


@triton.jit
def add_product(sums, a, b):
    """Return sums + a b. Multiply float32 on tensor cores, as bfloat16, but without the products below 2^-25."""
    if a.dtype == tl.float32:
        a1, a2, a3 = split(a)
        b1, b2, b3 = split(b)
        small = tl.dot(a1, b3, tl.dot(a2, b2, tl.dot(a3, b1)))
        small = tl.dot(a1, b2, tl.dot(a2, b1, small * (1 / 128))) * (1 / 128)
        # Infinities have no rest.
        return sums + tl.dot(a1, b1, tl.where(small == small, small, 0.0))
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit
def product_of_rows(a_at, b_at, a_there, b_there, columns, COMPUTE: tl.constexpr, CHUNK: tl.constexpr):
    """Return a b^T of rows ``[m, columns]`` and ``[n, columns]`` that begin at pointers, some columns at a time."""
    sums = tl.zeros((a_at.shape[0], b_at.shape[0]), COMPUTE)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        among = column < columns
        a = tl.load(a_at[:, None] + column[None, :], mask=a_there[:, None] & among[None, :], other=0.0)
        b = tl.load(b_at[None, :] + column[:, None], mask=b_there[None, :] & among[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee", out_dtype=COMPUTE)
    return sums


@triton.jit
def are_visible(queries, keys, num_queries, num_keys, left, right, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which keys a query sees; the two are given along different axes. Of a causal window, right is 0."""
    visible = (queries < num_queries) & (keys < num_keys)
    if WINDOW:
        place = queries + (num_keys - num_queries)
        visible = visible & (keys >= place - left) & (keys <= place + right)
    elif CAUSAL:
        visible = visible & (keys <= queries + (num_keys - num_queries))
    return visible


@triton.jit
def has_keys(query, num_queries, num_keys, left, right, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return a mask of the queries that see a key."""
    sees = (query < num_queries) & (num_keys > 0)
    if WINDOW:
        place = query + num_keys - num_queries
        sees = sees & (place + right >= 0) & (place - left < num_keys)
    elif CAUSAL:
        sees = sees & (query + num_keys - num_queries >= 0)
    return sees


@triton.jit
def biased(scores, places, keys, origin, slope):
    """Return scores less their bias. What is converted lies near an origin, where it is exact, and along one axis."""
    return scores - slope * tl.abs((places - origin).to(scores.dtype) - (keys - origin).to(scores.dtype))


@triton.jit
def exponential(x, BASE_2: tl.constexpr):
    """Return 2^x or e^x."""
    if BASE_2:
        return tl.exp2(x)
    return tl.exp(x)


@triton.jit
def in_base(x, BASE_2: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the factor of an exponent of e, in base 2 if wanted, rounded once."""
    if BASE_2:
        x *= LOG2_E
    return tl.full((), x, COMPUTE)


@triton.jit
def key_tiles(
    first,
    num_queries,
    num_keys,
    left,
    right,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    INDEX: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return three keys: the first one that a tile of queries sees, the end of the tiles that all of these queries see,
    and the end of all keys that they see. With a window, the second is the first.
    """
    begin = tl.zeros((), INDEX)
    end = num_keys
    if WINDOW:
        place = first + num_keys - num_queries
        begin = (tl.maximum(place - left, 0) // KEYS * KEYS).to(INDEX)
        end = tl.minimum(end, place + QUERIES + right)
    elif CAUSAL:
        end = tl.minimum(end, first + QUERIES + num_keys - num_queries)
    end = tl.where(first < num_queries, end, 0).to(INDEX)
    whole = begin
    if not WINDOW:
        whole = end // KEYS * KEYS
        if CAUSAL:
            whole = tl.minimum(whole, tl.maximum(first + num_keys - num_queries + 1, 0) // KEYS * KEYS)
        whole = whole.to(INDEX)
    return begin, whole, end


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_kernel(
    q_ptr,  # [total_q, heads, columns], strided
    k_ptr,  # [total_k, kv_heads, columns], strided
    v_ptr,  # [total_k, kv_heads, columns], strided
    q_offsets_ptr,  # [batch + 1]; of no meaning unless GIVEN
    k_offsets_ptr,  # [batch + 1]
    slopes_ptr,  # [heads]; of no meaning unless BIAS
    output_ptr,  # [total_q, heads, columns]
    lse_ptr,  # [heads, total_q]
    total_q,
    total_k,
    batch,
    heads,
    kv_heads,
    columns,  # these and the strides are counted in vectors of WIDTH
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    scale: tl.float64,  # else Triton rounds it to float32
    left,  # how many keys a query sees before and after its place; of no meaning unless WINDOW
    right,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    BASE_2: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program owns BLOCK_Q queries of one sequence and head. Those that see most keys come first.
    tile = tl.num_programs(0) // heads - 1 - tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first, q_begin, num_queries, k_begin, num_keys, fits = place_of(
        tile, q_offsets_ptr, k_offsets_ptr, total_q, total_k, batch, GIVEN, BLOCK_Q, INDEX
    )
    columns = columns * WIDTH
    if BIAS:
        slope = in_base(tl.load(slopes_ptr + head), BASE_2, COMPUTE)
    scale = in_base(scale, BASE_2, COMPUTE)
    query = first + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_D)
    q_there, among = query < num_queries, column < columns
    kv_head = tl.cast(head // (heads // kv_heads), tl.int64)
    q_at = (
        q_ptr
        + tl.cast(head, tl.int64) * q_head_stride * WIDTH
        + (q_begin + query).to(tl.int64) * q_token_stride * WIDTH
    )
    k_ptr += kv_head * k_head_stride * WIDTH + k_begin * k_token_stride * WIDTH
    v_ptr += kv_head * v_head_stride * WIDTH + k_begin * v_token_stride * WIDTH
    if CHUNK == BLOCK_D:
        q = tl.load(q_at[:, None] + column[None, :], mask=q_there[:, None] & among[None, :], other=0.0)
    largest = tl.full((BLOCK_Q,), -float("inf"), COMPUTE)
    sums = tl.zeros((BLOCK_Q,), COMPUTE)
    output = tl.zeros((BLOCK_Q, BLOCK_D), COMPUTE)
    begin, whole, end = key_tiles(first, num_queries, num_keys, left, right, CAUSAL, WINDOW, INDEX, BLOCK_Q, BLOCK_K)
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        for start in range(whole if masked else begin, end if masked else whole, BLOCK_K):
            key = start + tl.arange(0, BLOCK_K)
            k_there = key < num_keys
            k_at = k_ptr + key.to(tl.int64) * (k_token_stride * WIDTH)
            v_at = v_ptr + key.to(tl.int64) * (v_token_stride * WIDTH)
            if masked:
                k_mask, v_mask = k_there[None, :] & among[:, None], k_there[:, None] & among[None, :]
            else:
                k_mask, v_mask = among[:, None], among[None, :]
            if CHUNK == BLOCK_D:
                k = tl.load(k_at[None, :] + column[:, None], mask=k_mask, other=0.0)
                scores = add_product(tl.zeros((BLOCK_Q, BLOCK_K), COMPUTE), q, k)
            else:
                scores = product_of_rows(q_at, k_at, q_there, k_there, columns, COMPUTE, CHUNK)
            factor = scale
            if BIAS or not BASE_2:
                # In base 2 the scale is positive. Else, and with a bias, the largest score depends on it.
                scores = scores * scale
                factor = 1.0
            if BIAS:
                scores = biased(scores, (query + num_keys - num_queries)[:, None], key[None, :], start, slope)
            if masked:
                visible = are_visible(query[:, None], key[None, :], num_queries, num_keys, left, right, CAUSAL, WINDOW)
                scores = tl.where(visible, scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1) * factor)
            # Of scores that are all -inf, so that no difference of infinities is taken.
            base = tl.where(larger == -float("inf"), 0.0, larger)
            terms = exponential(scores * factor - base[:, None], BASE_2)
            shrunk = exponential(largest - base, BASE_2)
            sums = sums * shrunk + tl.sum(terms, axis=1)
            v = tl.load(v_at[:, None] + column[None, :], mask=v_mask, other=0.0)
            output = add_product(output * shrunk[:, None], terms.to(v.dtype), v)
            largest = larger
    sees = has_keys(query, num_queries, num_keys, left, right, CAUSAL, WINDOW)
    output = tl.where(sees[:, None], output / sums[:, None], 0.0)
    output = tl.where(fits != 0, output, float("nan"))
    token = q_begin + query
    output_at = output_ptr + (token * heads + head)[:, None] * columns + column[None, :]
    tl.store(output_at, output.to(output_ptr.dtype.element_ty), mask=q_there[:, None] & among[None, :])
    base = tl.where(largest == -float("inf"), 0.0, largest)
    if BASE_2:
        base *= LN_2
    tl.store(lse_ptr + tl.cast(head, tl.int64) * total_q + token, base + tl.log(sums), mask=q_there)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_delta_kernel(
    grad_output_ptr,  # [total_q, heads, columns], strided
    grad_lse_ptr,  # [heads, total_q]; of no meaning unless LSE
    output_ptr,  # [total_q, heads, columns]
    delta_ptr,  # [heads, total_q]
    total_q,
    heads,
    columns,
    grad_token_stride,
    grad_head_stride,
    WIDTH: tl.constexpr,
    LSE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program owns BLOCK_ROWS rows, each a head of a token: delta is the sum of each row of dO * O, less the
    # cotangent of lse, whose gradient the weights are.
    columns = columns * WIDTH
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head, column = row // heads, row % heads, tl.arange(0, BLOCK_D)
    mask = (token < total_q)[:, None] & (column < columns)[None, :]
    grad_at = (token * (grad_token_stride * WIDTH) + head * (grad_head_stride * WIDTH))[:, None] + column[None, :]
    grad = tl.load(grad_output_ptr + grad_at, mask=mask, other=0.0).to(COMPUTE)
    output = tl.load(output_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(COMPUTE)
    delta = tl.sum(grad * output, axis=1)
    at = head * total_q + token
    if LSE:
        delta -= tl.load(grad_lse_ptr + at, mask=token < total_q, other=0.0)
    tl.store(delta_ptr + at, delta, mask=token < total_q)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_queries_backward_kernel(
    grad_output_ptr,  # [total_q, heads, columns], strided
    q_ptr,  # [total_q, heads, columns], strided
    k_ptr,  # [total_k, kv_heads, columns], strided
    v_ptr,  # [total_k, kv_heads, columns], strided
    q_offsets_ptr,  # [batch + 1]; of no meaning unless GIVEN
    k_offsets_ptr,  # [batch + 1]
    slopes_ptr,  # [heads]; of no meaning unless BIAS
    lse_ptr,  # [heads, total_q]
    delta_ptr,  # [heads, total_q]
    grad_q_ptr,  # [total_q, heads, columns]
    total_q,
    total_k,
    batch,
    heads,
    kv_heads,
    columns,  # these and the strides are counted in vectors of WIDTH
    grad_token_stride,
    grad_head_stride,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    scale: tl.float64,
    left,
    right,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    BASE_2: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program owns BLOCK_Q queries of one sequence and head, and goes through the keys that they see.
    tile = tl.num_programs(0) // heads - 1 - tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first, q_begin, num_queries, k_begin, num_keys, fits = place_of(
        tile, q_offsets_ptr, k_offsets_ptr, total_q, total_k, batch, GIVEN, BLOCK_Q, INDEX
    )
    columns = columns * WIDTH
    if BIAS:
        slope = in_base(tl.load(slopes_ptr + head), BASE_2, COMPUTE)
    score_scale = in_base(scale, BASE_2, COMPUTE)
    scale = tl.full((), scale, COMPUTE)
    query = first + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_D)
    q_there, among = query < num_queries, column < columns
    kv_head = tl.cast(head // (heads // kv_heads), tl.int64)
    token = (q_begin + query).to(tl.int64)
    q_at = q_ptr + tl.cast(head, tl.int64) * q_head_stride * WIDTH + token * q_token_stride * WIDTH
    grad_at = grad_output_ptr + tl.cast(head, tl.int64) * grad_head_stride * WIDTH + token * grad_token_stride * WIDTH
    k_ptr += kv_head * k_head_stride * WIDTH + k_begin * k_token_stride * WIDTH
    v_ptr += kv_head * v_head_stride * WIDTH + k_begin * v_token_stride * WIDTH
    if CHUNK == BLOCK_D:
        q = tl.load(q_at[:, None] + column[None, :], mask=q_there[:, None] & among[None, :], other=0.0)
        grad = tl.load(grad_at[:, None] + column[None, :], mask=q_there[:, None] & among[None, :], other=0.0)
    lse = tl.load(lse_ptr + tl.cast(head, tl.int64) * total_q + token, mask=q_there, other=0.0)
    delta = tl.load(delta_ptr + tl.cast(head, tl.int64) * total_q + token, mask=q_there, other=0.0)
    grad_q = tl.zeros((BLOCK_Q, BLOCK_D), COMPUTE)
    if BASE_2:
        lse *= LOG2_E
    begin, whole, end = key_tiles(first, num_queries, num_keys, left, right, CAUSAL, WINDOW, INDEX, BLOCK_Q, BLOCK_K)
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        for start in range(whole if masked else begin, end if masked else whole, BLOCK_K):
            key = start + tl.arange(0, BLOCK_K)
            k_there = key < num_keys
            k_at = k_ptr + key.to(tl.int64) * (k_token_stride * WIDTH)
            v_at = v_ptr + key.to(tl.int64) * (v_token_stride * WIDTH)
            if masked:
                k_mask, v_mask = k_there[:, None] & among[None, :], k_there[None, :] & among[:, None]
            else:
                k_mask, v_mask = among[None, :], among[:, None]
            k = tl.load(k_at[:, None] + column[None, :], mask=k_mask, other=0.0)
            if CHUNK == BLOCK_D:
                v = tl.load(v_at[None, :] + column[:, None], mask=v_mask, other=0.0)
                scores = add_product(tl.zeros((BLOCK_Q, BLOCK_K), COMPUTE), q, tl.trans(k)) * score_scale
                products = add_product(tl.zeros((BLOCK_Q, BLOCK_K), COMPUTE), grad, v)
            else:
                scores = product_of_rows(q_at, k_at, q_there, k_there, columns, COMPUTE, CHUNK) * score_scale
                products = product_of_rows(grad_at, v_at, q_there, k_there, columns, COMPUTE, CHUNK)
            if BIAS:
                scores = biased(scores, (query + num_keys - num_queries)[:, None], key[None, :], start, slope)
            grad_scores = exponential(scores - lse[:, None], BASE_2) * (products - delta[:, None])
            if masked:
                visible = are_visible(query[:, None], key[None, :], num_queries, num_keys, left, right, CAUSAL, WINDOW)
                grad_scores = tl.where(visible, grad_scores, 0.0)
            grad_q = add_product(grad_q, grad_scores.to(k.dtype), k)
    grad_q = tl.where(fits != 0, grad_q * scale, float("nan"))
    grad_q_at = grad_q_ptr + (token * heads + head)[:, None] * columns + column[None, :]
    tl.store(grad_q_at, grad_q.to(grad_q_ptr.dtype.element_ty), mask=q_there[:, None] & among[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_keys_backward_kernel(
    grad_output_ptr,  # [total_q, heads, columns], strided
    q_ptr,  # [total_q, heads, columns], strided
    k_ptr,  # [total_k, kv_heads, columns], strided
    v_ptr,  # [total_k, kv_heads, columns], strided
    q_offsets_ptr,  # [batch + 1]; of no meaning unless GIVEN
    k_offsets_ptr,  # [batch + 1]
    slopes_ptr,  # [heads]; of no meaning unless BIAS
    lse_ptr,  # [heads, total_q]
    delta_ptr,  # [heads, total_q]
    grad_k_ptr,  # [total_k, heads, columns]: of each head alone
    grad_v_ptr,  # [total_k, heads, columns]
    total_q,
    total_k,
    batch,
    heads,
    kv_heads,
    columns,  # these and the strides are counted in vectors of WIDTH
    grad_token_stride,
    grad_head_stride,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    scale: tl.float64,
    left,
    right,
    NEEDS_K: tl.constexpr,
    NEEDS_V: tl.constexpr,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    BASE_2: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # One program owns BLOCK_K keys of one sequence, and goes through the queries of one head that see them.
    tile = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first, k_begin, num_keys, q_begin, num_queries, fits = place_of(
        tile, k_offsets_ptr, q_offsets_ptr, total_k, total_q, batch, GIVEN, BLOCK_K, INDEX
    )
    columns = columns * WIDTH
    if BIAS:
        slope = in_base(tl.load(slopes_ptr + head), BASE_2, COMPUTE)
    score_scale = in_base(scale, BASE_2, COMPUTE)
    scale = tl.full((), scale, COMPUTE)
    key = first + tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_D)
    k_there, among = key < num_keys, column < columns
    token = (k_begin + key).to(tl.int64)
    head = tl.cast(head, tl.int64)
    kv_head = head // (heads // kv_heads)
    k_at = k_ptr + kv_head * k_head_stride * WIDTH + token * k_token_stride * WIDTH
    v_at = v_ptr + kv_head * v_head_stride * WIDTH + token * v_token_stride * WIDTH
    q_ptr += head * q_head_stride * WIDTH + q_begin * q_token_stride * WIDTH
    grad_output_ptr += head * grad_head_stride * WIDTH + q_begin * grad_token_stride * WIDTH
    lse_ptr += head * total_q + q_begin
    delta_ptr += head * total_q + q_begin
    if CHUNK == BLOCK_D:
        k = tl.load(k_at[:, None] + column[None, :], mask=k_there[:, None] & among[None, :], other=0.0)
        v = tl.load(v_at[:, None] + column[None, :], mask=k_there[:, None] & among[None, :], other=0.0)
    grad_k = tl.zeros((BLOCK_K, BLOCK_D), COMPUTE)
    grad_v = tl.zeros((BLOCK_K, BLOCK_D), COMPUTE)
    begin = tl.zeros((), INDEX)
    end = num_queries
    if WINDOW:
        diagonal = first + num_queries - num_keys
        begin = (tl.maximum(diagonal - right, 0) // BLOCK_Q * BLOCK_Q).to(INDEX)
        end = tl.minimum(end, diagonal + BLOCK_K + left)
    elif CAUSAL:
        begin = tl.maximum(first + num_queries - num_keys, 0) // BLOCK_Q * BLOCK_Q
    end = tl.where(first < num_keys, end, 0).to(INDEX)
    # Tiles of queries that all see all of the keys are not masked. They lie between those of the others.
    whole, whole_end = begin, end // BLOCK_Q * BLOCK_Q
    if WINDOW:
        whole = end
    elif CAUSAL:
        whole = tl.cdiv(tl.maximum(first + BLOCK_K - 1 + num_queries - num_keys, 0), BLOCK_Q) * BLOCK_Q
        whole = tl.minimum(whole, end).to(INDEX)
    whole_end = tl.maximum(whole_end, whole)
    before, after = tl.cdiv(whole - begin, BLOCK_Q), tl.cdiv(end - whole_end, BLOCK_Q)
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        for number in range(before + after if masked else (whole_end - whole) // BLOCK_Q):
            if masked:
                start = tl.where(number < before, begin + number * BLOCK_Q, whole_end).to(INDEX)
            else:
                start = whole + number * BLOCK_Q
            query = start + tl.arange(0, BLOCK_Q)
            q_there = query < num_queries
            q_at = q_ptr + query.to(tl.int64) * (q_token_stride * WIDTH)
            grad_at = grad_output_ptr + query.to(tl.int64) * (grad_token_stride * WIDTH)
            tile_mask = q_there[:, None] & among[None, :]
            q = tl.load(q_at[:, None] + column[None, :], mask=tile_mask, other=0.0)
            grad = tl.load(grad_at[:, None] + column[None, :], mask=tile_mask, other=0.0)
            lse = tl.load(lse_ptr + query, mask=q_there, other=0.0)
            delta = tl.load(delta_ptr + query, mask=q_there, other=0.0)
            if BASE_2:
                lse *= LOG2_E
            # [BLOCK_K, BLOCK_Q]: transposed, so that both products have the keys as rows.
            if CHUNK == BLOCK_D:
                scores = add_product(tl.zeros((BLOCK_K, BLOCK_Q), COMPUTE), k, tl.trans(q)) * score_scale
                products = add_product(tl.zeros((BLOCK_K, BLOCK_Q), COMPUTE), v, tl.trans(grad))
            else:
                scores = product_of_rows(k_at, q_at, k_there, q_there, columns, COMPUTE, CHUNK) * score_scale
                products = product_of_rows(v_at, grad_at, k_there, q_there, columns, COMPUTE, CHUNK)
            if BIAS:
                place = query + num_keys - num_queries
                scores = biased(scores, place[None, :], key[:, None], start + num_keys - num_queries, slope)
            weights = exponential(scores - lse[None, :], BASE_2)
            grad_scores = weights * (products - delta[None, :])
            if masked:
                visible = are_visible(query[None, :], key[:, None], num_queries, num_keys, left, right, CAUSAL, WINDOW)
                weights = tl.where(visible, weights, 0.0)
                grad_scores = tl.where(visible, grad_scores, 0.0)
            if NEEDS_V:
                grad_v = add_product(grad_v, weights.to(q.dtype), grad)
            if NEEDS_K:
                grad_k = add_product(grad_k, grad_scores.to(q.dtype), q)
    at = (token * heads + head)[:, None] * columns + column[None, :]
    mask = k_there[:, None] & among[None, :]
    if NEEDS_K:
        grad_k = tl.where(fits != 0, grad_k * scale, float("nan"))
        tl.store(grad_k_ptr + at, grad_k.to(grad_k_ptr.dtype.element_ty), mask=mask)
    if NEEDS_V:
        grad_v = tl.where(fits != 0, grad_v, float("nan"))
        tl.store(grad_v_ptr + at, grad_v.to(grad_v_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["elements", "group"])
def attention_sum_of_heads_kernel(
    of_heads_k_ptr,  # [tokens, heads, columns]
    of_heads_v_ptr,  # [tokens, heads, columns]
    grad_k_ptr,  # [tokens, kv_heads, columns]
    grad_v_ptr,  # [tokens, kv_heads, columns]
    elements,
    columns,
    group,
    NEEDS_K: tl.constexpr,
    NEEDS_V: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns BLOCK elements of both gradients, each the sum over the heads that share a head of keys.
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    first = (at // columns).to(tl.int64) * group * columns + at % columns
    sums_k = tl.zeros((BLOCK,), of_heads_k_ptr.dtype.element_ty)
    sums_v = tl.zeros((BLOCK,), of_heads_k_ptr.dtype.element_ty)
    for head in range(group):
        if NEEDS_K:
            sums_k += tl.load(of_heads_k_ptr + first + head * columns, mask=mask, other=0.0)
        if NEEDS_V:
            sums_v += tl.load(of_heads_v_ptr + first + head * columns, mask=mask, other=0.0)
    if NEEDS_K:
        tl.store(grad_k_ptr + at, sums_k.to(grad_k_ptr.dtype.element_ty), mask=mask)
    if NEEDS_V:
        tl.store(grad_v_ptr + at, sums_v.to(grad_v_ptr.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """The tiles of a kernel: queries, keys, and how many columns a product takes at a time; warps and stages."""

    queries: int
    keys: int
    chunk: int
    warps: int
    stages: int


def _tiles(call: Call, own_keys: bool, backward: bool) -> Tiles:
    """Return how a kernel whose programs own queries, or keys, is launched."""
    block_d = _block_d(call)
    split = call.q.dtype == torch.float32 and block_d <= 128
    if call.q.element_size() > 2 and not split:
        # These are multiplied without tensor cores, or operands of a whole head would not fit into registers.
        return Tiles(32, 32 if block_d <= 128 else 16, min(block_d, 16), 4, 1)
    # Each with the programs of a multiprocessor that it takes: smaller tiles share the work of few.
    if split:
        if block_d <= 64:
            first, last = [(64, 64, 4, 1, 2)] if backward else [(64, 64, 4, 1, 3), (32, 64, 4, 2, 3)], (16, 64, 4, 2, 0)
        elif backward:
            first, last = [(128, 32, 8, 1, 1)], (16, 32, 4, 1, 0)
        else:
            first, last = [(128, 64, 8, 2, 1), (32, 128, 8, 1, 1)], (16, 128, 8, 1, 0)
        choices = [*first, (64, 32, 4, 1, 4), (32, 32, 4, 1, 4), last]
    elif backward and block_d <= 128:
        choices = [(64, 64, 4, 2, 1), (16, 64, 4, 2, 0)]
    elif backward:
        choices = [(32, 32, 4, 2, 0)] if own_keys else [(64, 64, 4, 1, 0)]
    elif block_d <= 64:
        choices = [(128, 64, 4, 3, 3), (64, 64, 4, 3, 0)]
    elif block_d <= 128:
        choices = [(128, 128, 8, 3, 2), (128, 64, 8, 2, 2), (64, 64, 4, 3, 0), (64, 32, 4, 2, 0)]
    else:
        choices = [(128, 64, 8, 2, 0), (64, 32, 4, 2, 0)]
    # The first one whose rows fit into shared memory: its own ones, and those of a step, for each stage; of float32
    # the parts of own tiles and of one of a step, 6 bytes together, and 4 bytes in each further stage.
    total_q, total_k, _, heads, _ = call.sizes
    most, total = available_shared_memory(call.q.device) // block_d, total_k if own_keys else total_q

    def size(own: int, others: int, stages: int) -> int:
        if split:
            return 6 * ((1 + backward) * own + others) + 8 * (stages - 1) * others
        return 2 * (own + 2 * others * stages)

    fitting = (
        choice
        for choice in choices
        if size(choice[0], choice[1], choice[3]) <= most
        and call.tiles(total, choice[0]) * heads >= choice[4] * multiprocessors(call.q.device)
    )
    own, others, warps, stages, _ = next(fitting, choices[-1])
    return Tiles(others, own, block_d, warps, stages) if own_keys else Tiles(own, others, block_d, warps, stages)


def _block_d(call: Call) -> int:
    return max(16, next_power_of_2(call.q.shape[2]))


def _launch(
    kernel: object,
    call: Call,
    own_keys: bool,
    tensors: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
    **options: object,
) -> None:
    """Launch a kernel that is given some tensors, q, k, v, the offsets, slopes and the results."""
    tiles = _tiles(call, own_keys, bool(tensors))
    total_q, total_k, _, heads, _ = call.sizes
    total, own = (total_k, tiles.keys) if own_keys else (total_q, tiles.queries)
    width = 16 // call.q.element_size() if has_whole_vectors(*tensors, *call[:3]) else 1
    strides = (*(n for x in tensors for n in x.stride()[:2]), *call.strides)
    optional = tuple(call.q if x is None else x for x in (call.q_offsets, call.k_offsets, call.slopes))
    triton_launch.launch(
        kernel,
        (call.tiles(total, own) * heads,),
        (*tensors, *call[:3], *optional, *results),
        (
            *call.sizes,
            call.q.shape[2] // width,
            *(n // width for n in strides),
            call.scale,
            *call.window,
        ),
        WIDTH=width,
        GIVEN=call.q_offsets is not None,
        CAUSAL=call.causal,
        WINDOW=call.is_windowed,
        BIAS=call.slopes is not None,
        BASE_2=call.q.element_size() == 2 and LEAST_SCALE < call.scale < MOST_SCALE,
        COMPUTE=triton_launch.COMPUTE[call.q.dtype],
        INDEX=triton_launch.index_type((total_q + total_k) * (1 + call.is_windowed) + tiles.queries + tiles.keys),
        BLOCK_Q=tiles.queries,
        BLOCK_K=tiles.keys,
        BLOCK_D=_block_d(call),
        CHUNK=tiles.chunk,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **options,
    )


def _forward(call: Call, output: torch.Tensor, lse: torch.Tensor) -> None:
    _launch(attention_forward_kernel, call, False, (), (output, lse))


def _backward(
    call: Call,
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad_q: torch.Tensor | None,
    grad_k: torch.Tensor | None,
    grad_v: torch.Tensor | None,
) -> None:
    if delta.numel():
        _delta(grad_output, grad_lse, output, delta)
    if grad_q is not None and grad_q.numel():
        _launch(attention_queries_backward_kernel, call, False, (grad_output,), (lse, delta, grad_q))
    wanted = [x for x in (grad_k, grad_v) if x is not None and x.numel()]
    if wanted:
        needs = {"NEEDS_K": grad_k is not None, "NEEDS_V": grad_v is not None}
        results = tuple(wanted[0] if x is None else x for x in (grad_k, grad_v))
        (total_k, kv_heads, columns), heads = call.k.shape, call.q.shape[1]
        group = heads // kv_heads
        if group == 1:
            _launch(attention_keys_backward_kernel, call, True, (grad_output,), (lse, delta, *results), **needs)
            return
        # More programs, whose lengths differ less.
        each = [lse.new_empty((total_k, heads, columns)) for _ in wanted]
        of_heads = each[0], each[-1]
        _launch(attention_keys_backward_kernel, call, True, (grad_output,), (lse, delta, *of_heads), **needs)
        triton_launch.launch(
            attention_sum_of_heads_kernel,
            (cdiv(call.k.numel(), SUMMED),),
            (*of_heads, *results),
            (call.k.numel(), columns, group),
            INDEX=triton_launch.index_type(call.k.numel() + SUMMED),
            BLOCK=SUMMED,
            **needs,
        )


def _delta(grad_output: torch.Tensor, grad_lse: torch.Tensor | None, output: torch.Tensor, delta: torch.Tensor) -> None:
    total_q, heads, columns = output.shape
    width = 16 // output.element_size() if has_whole_vectors(grad_output, output) else 1
    triton_launch.launch(
        attention_delta_kernel,
        (cdiv(total_q * heads, ROWS_OF_DELTA),),
        (grad_output, delta if grad_lse is None else grad_lse, output, delta),
        (total_q, heads, *(n // width for n in (columns, *grad_output.stride()[:2]))),
        WIDTH=width,
        LSE=grad_lse is not None,
        COMPUTE=triton_launch.COMPUTE[output.dtype],
        BLOCK_ROWS=ROWS_OF_DELTA,
        BLOCK_D=next_power_of_2(columns),
    )


def depends_on_batch(dtype: str, device: str) -> str | None:
    """Return why a sample depends on its batch: all queries and heads together choose the tiles."""
    return None if dtype == "float64" else "the number of programs chooses the tiles, which order the sums"


attention, attention_with_lse = register("triton", _forward, _backward)
