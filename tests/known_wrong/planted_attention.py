"""Planted faults in attention: in small kernels of Triton and CUDA C++, and in torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.attention.arguments import check_attention, scale_of
from fourfold.properties import attention as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import next_power_of_2
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees

from .planted import GRADIENT, OUTPUT, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
BLOCK = 16  # keys at a time
LEFT = r"left side.* is .*expected"


def sequences(q: Tensor, k: Tensor, q_offsets: Any, k_offsets: Any) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence."""
    ends_q = [0, len(q)] if q_offsets is None else q_offsets.tolist()
    ends_k = k_offsets.tolist() if k_offsets is not None else ends_q if q_offsets is not None else [0, len(k)]
    for at in range(len(ends_q) - 1):
        yield slice(ends_q[at], ends_q[at + 1]), slice(ends_k[at], ends_k[at + 1])


def visible(queries: int, keys: int, causal: bool, fault: str, device: torch.device) -> Tensor:
    """Return which keys each query sees."""
    query, key = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    if not causal:
        return (query >= 0) & (key >= 0)
    shift = {"causal_at_the_top_left": 0, "causal_late_by_one": keys - queries + 1}.get(fault, keys - queries)
    return key <= query + shift


def weights_of(q: Tensor, k: Tensor, seen: Tensor, scale: float, fault: str) -> Tensor:
    """Return the weights ``[heads, queries, keys]``."""
    scores = q @ k.transpose(-1, -2) * scale
    if fault == "scores_clamped":
        scores = scores.clamp(max=2)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if fault == "last_of_an_odd_number_of_keys_dropped" and k.shape[1] % 2:
        weights = weights * (torch.arange(k.shape[1], device=k.device) < k.shape[1] - 1)
    if fault == "padded_keys_counted":
        padding = -k.shape[1] % BLOCK
        zeros = scores.new_zeros(*scores.shape[:-1], padding)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), zeros], -1).softmax(-1)[..., : k.shape[1]]
    return weights if fault == "rows_without_keys_are_nan" else weights.masked_fill(~seen, 0)


def heads_of_keys(k: Tensor, heads: int, fault: str) -> Tensor:
    """Return the head of k for each head of q."""
    group = heads // k.shape[1] if k.shape[1] else 1
    head = torch.arange(heads, device=k.device)
    return head % max(k.shape[1], 1) if fault == "heads_by_modulo" else head // group


def of_each(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Any, k_offsets: Any, causal: bool, fault: str
) -> Iterator[tuple[slice, slice, Tensor, list[Tensor]]]:
    """Yield each sequence: its rows, what is visible, and q, k and v ``[heads, tokens, columns]`` in compute dtype."""
    heads = heads_of_keys(k, q.shape[1], fault)
    for queries, keys in sequences(q, k, q_offsets, k_offsets):
        if fault == "first_key_of_a_sequence_is_that_before" and keys.start and keys.stop > keys.start:
            keys = slice(keys.start - 1, keys.stop - 1)
        seen = visible(queries.stop - queries.start, keys.stop - keys.start, causal, fault, q.device)
        parts = [in_compute_dtype(x).transpose(0, 1) for x in (q[queries], k[keys][:, heads], v[keys][:, heads])]
        yield queries, keys, seen, parts


def in_torch(forward_fault: str = "", backward_fault: str = "") -> Implementation:
    """Return attention in torch, with explicit gradients, with a fault of either pass."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, **offsets: Any) -> Tensor:
        output = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for queries, _, seen, (a, b, c) in of_each(q, k, v, causal=causal, fault=forward_fault, **offsets):
            weights = weights_of(a, b, seen, scale_of(q, scale), forward_fault)
            output[queries] = (weights @ c).transpose(0, 1).to(q.dtype)
        return output

    def backward(
        grad: Tensor, output: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, **offsets: Any
    ) -> tuple:
        factor, heads = scale_of(q, scale), heads_of_keys(k, q.shape[1], "")
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for queries, keys, seen, (a, b, c) in of_each(q, k, v, causal=causal, fault="", **offsets):
            g = in_compute_dtype(grad[queries]).transpose(0, 1)
            weights = weights_of(a, b, seen, factor, "")
            delta = (g * (weights @ c)).sum(-1, keepdim=True)
            products = (g @ c.transpose(-1, -2)).masked_fill(~seen, 0)
            slopes, without = weights * (products - delta), weights * products
            slopes = slopes.masked_fill(~seen, 0)
            of_q = without if backward_fault == "delta_left_out_of_dq" else slopes
            of_k = without if backward_fault == "delta_left_out_of_dk" else slopes
            of_q = of_q if backward_fault == "scale_left_out_of_dq" else of_q * factor
            grads[0][queries] = (of_q @ b).transpose(0, 1).to(q.dtype)
            for at, part in ((1, of_k.transpose(-1, -2) @ a * factor), (2, weights.transpose(-1, -2) @ g)):
                summed = torch.zeros(k[keys].shape, dtype=part.dtype, device=k.device)
                grads[at][keys] = summed.index_add(1, heads, part.transpose(0, 1)).to(k.dtype)
        return tuple(grads)

    return wired(forward, backward)


def wired(forward: Callable[..., Tensor], backward: Callable[..., tuple] | None = None) -> Implementation:
    """Return the public function of a forward pass, with the right gradients unless others are given."""
    right = in_torch() if backward is None else None

    def written_out(grad: Tensor, _: Tensor, *tensors: Tensor, **given: Any) -> tuple:
        assert right is not None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            return torch.autograd.grad(right(**dict(zip("qkv", leaves)), **given), leaves, grad)

    names = ("q", "k", "v")
    defaults = {"q_offsets": None, "k_offsets": None, "causal": False, "scale": None}
    return differentiable(names, forward, backward or written_out, check_attention, **defaults)


def limits(q: Tensor, k: Tensor, q_offsets: Any, k_offsets: Any) -> list[Tensor]:
    """Return for each query where its keys begin and end, and how many of them it sees if causal."""
    found = torch.zeros(3, len(q), dtype=torch.int64)
    for queries, keys in sequences(q, k, q_offsets, k_offsets):
        count, length = queries.stop - queries.start, keys.stop - keys.start
        found[0, queries], found[1, queries] = keys.start, keys.stop
        found[2, queries] = (torch.arange(count) + 1 + length - count).clamp(0, length)
    return list(found.to(q.device))


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    begins_ptr,
    ends_ptr,
    seen_ptr,
    output_ptr,
    total_k,
    heads,
    kv_heads,
    columns,
    scale: tl.float64,
    CAUSAL: tl.constexpr,
    FAULT: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program owns a head of a query, and goes through its keys, BLOCK of them at a time.
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    kv_head = head // (heads // kv_heads)
    column = tl.arange(0, BLOCK_D)
    among = column < columns
    begin, end = tl.load(begins_ptr + token), tl.load(ends_ptr + token)
    count = end - begin
    if CAUSAL:
        count = tl.load(seen_ptr + token)
    if FAULT == "columns_of_the_first_block_alone":
        among = among & (column < 16)
    q = tl.load(q_ptr + row * columns + column, mask=among, other=0.0).to(C)
    factor = tl.full((), scale, C)
    largest = tl.full((), -float("inf"), C)
    total = tl.zeros((), C)
    output = tl.zeros((BLOCK_D,), C)
    for start in range(0, count, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = key < count
        if FAULT == "keys_of_the_next_sequence_read":
            there = (key < (count + BLOCK - 1) // BLOCK * BLOCK) & (begin + key < total_k)
        at = ((begin + key) * kv_heads + kv_head)[:, None] * columns + column[None, :]
        mask = there[:, None] & among[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0).to(C)
        v = tl.load(v_ptr + at, mask=mask, other=0.0).to(C)
        scores = tl.where(there, tl.sum(q[None, :] * k, axis=1) * factor, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=0))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        if FAULT == "masked_scores_may_all_be_infinite":
            base = larger
        terms = tl.exp(scores - base)
        shrunk = tl.exp(largest - base)
        total = total * shrunk + tl.sum(terms, axis=0)
        if FAULT == "output_not_rescaled":
            shrunk = tl.full((), 1.0, C)
        output = output * shrunk + tl.sum(terms[:, None] * v, axis=0)
        largest = larger
    result = tl.where(count > 0, output / total, 0.0)
    if FAULT == "rows_without_keys_are_nan":
        result = output / total
    tl.store(output_ptr + row * columns + column, result.to(output_ptr.dtype.element_ty), mask=column < columns)


def in_triton(fault: str = "") -> Implementation:
    """Return attention in Triton for any dtype, with a fault of the output."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, **offsets: Any) -> Tensor:
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if output.numel():
            with triton_launch.on(q.device):
                attention_kernel[(len(q) * q.shape[1],)](
                    *(x.contiguous() for x in (q, k, v)),
                    *limits(q, k, **offsets),
                    output,
                    *(len(k), q.shape[1], k.shape[1], q.shape[2], scale_of(q, scale)),
                    CAUSAL=causal,
                    FAULT=fault,
                    C=triton_launch.COMPUTE[q.dtype],
                    BLOCK=BLOCK,
                    BLOCK_D=next_power_of_2(q.shape[2]),
                )
        return output

    return wired(forward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "attention_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return attention in CUDA C++ for float32, with a fault of the output."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, **offsets: Any) -> Tensor:
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if output.numel():
            begins, ends, seen = limits(q, k, **offsets)
            if fault == "CAUSAL_AT_THE_TOP_LEFT":
                for queries, keys in sequences(q, k, **offsets):
                    places = torch.arange(1, queries.stop - queries.start + 1, device=q.device)
                    seen[queries] = places.clamp(0, keys.stop - keys.start)
            tensors = *(x.contiguous() for x in (q, k, v)), begins, ends, seen, output
            sizes = q.shape[1], k.shape[1], q.shape[2], causal, scale_of(q, scale)
            KERNELS.launch("attention_kernel", fault, len(q) * q.shape[1], q.shape[2], *tensors, *sizes)
        return output

    return wired(forward)


def _of_torch(
    name: str, check: Check = forward_agrees, says: str = OUTPUT, right_on: Any = "one_token", **more: Any
) -> Fault:
    backward = name.endswith(("dq", "dk"))
    return Fault(
        name=name,
        operation="attention",
        make=lambda: in_torch("" if backward else name, name if backward else ""),
        check=check,
        says=says,
        right_on=right_on,
        **more,
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("attention", in_triton, in_cuda, right_on="one_token")
    flash, laws = "https://github.com/Dao-AILab/flash-attention", properties
    masked = "https://github.com/robertknight/rten/pull/1321"
    modulo = "https://github.com/HazyResearch/HipKittens/pull/22"
    padded = "https://github.com/flashinfer-ai/flashinfer/pull/5090"
    of_scale = "https://github.com/NVIDIA/TransformerEngine/issues/1615"
    return (
        of_triton("rows_without_keys_are_nan", source=masked),
        of_triton(
            "keys_of_the_next_sequence_read",
            examples=named(properties, "nothing_finite_in_another_sequence"),
            source="https://github.com/tile-ai/tilelang/pull/2010",
        ),
        of_triton("columns_of_the_first_block_alone", source="https://github.com/triton-lang/triton/issues/621"),
        of_triton("output_not_rescaled", examples=named(properties, "scores_that_rise")),
        of_triton(
            "masked_scores_may_all_be_infinite",
            examples={"scores_of_minus_infinity_first": scores_of_minus_infinity_first},
            source="https://github.com/flashinfer-ai/flashinfer/pull/4401",
        ),
        of_cuda("causal_at_the_top_left", source=f"{flash}/issues/282"),
        of_cuda("heads_by_modulo", source=modulo),
        of_cuda("padded_keys_counted", source=padded, right_on=None),
        of_cuda("last_block_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        _of_torch("rows_without_keys_are_nan", source=masked),
        _of_torch("causal_at_the_top_left", source="https://github.com/NVIDIA/cutlass/issues/2336"),
        _of_torch("heads_by_modulo", source=modulo),
        _of_torch("scale_left_out_of_dq", backward_agrees, GRADIENT, right_on="no_keys", source=of_scale),
        _of_torch(
            "delta_left_out_of_dq",
            backward_agrees,
            GRADIENT,
            right_on="no_keys",
            examples=named(properties, "values_with_an_offset"),
        ),
        _of_torch("padded_keys_counted", law(laws.equal_values_are_the_output), LEFT, right_on="no_keys"),
        _of_torch("last_of_an_odd_number_of_keys_dropped", law(laws.keys_may_change_places), LEFT, right_on="no_keys"),
        _of_torch("scores_clamped", law(laws.a_constant_added_to_all_keys_changes_nothing), LEFT),
        _of_torch("first_key_of_a_sequence_is_that_before", law(laws.sequences_stand_alone), LEFT, right_on=None),
        _of_torch("heads_by_modulo", law(laws.heads_of_a_group_share_their_keys), LEFT, right_on=None, source=modulo),
        _of_torch("causal_late_by_one", law(laws.the_future_does_not_matter), LEFT),
        _of_torch("delta_left_out_of_dk", law(laws.gradients_of_keys_sum_to_0), LEFT, right_on="no_queries"),
    )


def scores_of_minus_infinity_first(dtype: Any) -> Any:
    """Return a case in which all scores of the first block of keys are -inf, and those of the second are not."""

    def infinite(arrays: dict) -> None:
        arrays["q"][:] = 1
        arrays["k"][:BLOCK, :, 0] = -float("inf")

    return properties.changed(properties.tokens(2, BLOCK + 4, columns=4), infinite)(dtype)


FAULTS = _faults()
