"""Planted faults in rope: in small kernels of Triton and CUDA C++, and in torch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.rope.arguments import check_rope
from fourfold.properties import rope as properties
from fourfold.properties.rope import tokens

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import next_power_of_2
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .steps import Implementation, differentiable


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    output_ptr,
    row_stride,
    seq,
    heads,
    dim,
    half,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FAULT: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program owns a head of a token.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    token = row // heads
    if FAULT == "positions_of_the_first_sample":
        token = token % seq
    position = tl.load(positions_ptr + token)
    column = tl.arange(0, BLOCK)
    apart = tl.maximum(half, 1)
    if FAULT == "pairs_across_the_whole_head":
        apart = tl.maximum(dim // 2, 1)
    if INTERLEAVED and FAULT != "neighbours_taken_for_halves":
        pair = column // 2
        is_second = column % 2 == 1
        partner = tl.where(is_second, column - 1, column + 1)
    else:
        pair = column % apart
        is_second = column >= apart
        partner = tl.where(is_second, column - apart, column + apart)
    turns = (pair < half) & (column < 2 * apart) & (column < dim)
    if INTERLEAVED:
        turns = turns & (column < 2 * half)
    mask = column < dim
    if FAULT == "rest_not_copied":
        mask = mask & turns
    if FAULT == "one_head_not_turned":
        turns = turns & (heads > 1)
    x = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0)
    other = tl.load(x_ptr + row * row_stride + partner, mask=turns, other=0.0).to(C)
    c = tl.load(cos_ptr + position * half + pair, mask=turns, other=0.0).to(C)
    s = tl.load(sin_ptr + position * half + pair, mask=turns, other=0.0).to(C)
    if FAULT == "tables_in_bfloat16":
        c, s = c.to(tl.bfloat16).to(C), s.to(tl.bfloat16).to(C)
    if BACK and FAULT != "backward_turns_forward":
        s = -s
    turned = x.to(C) * c + tl.where(is_second, other * s, -other * s)
    tl.store(output_ptr + row * dim + column, tl.where(turns, turned.to(x.dtype), x), mask=mask)


def every(x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return the position of each token, without gaps."""
    at = torch.arange(x.shape[-3], device=x.device) if positions is None else positions
    return at.expand(x.shape[:-2]).reshape(-1)


def in_triton(fault: str = "") -> Implementation:
    """Return rope in Triton for any dtype, with a fault."""

    def turn(back: bool, x: torch.Tensor, cos: Any, sin: Any, positions: Any, interleaved: bool) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if fault == "output_in_place" and x.is_contiguous():
            output = x.detach()
        if x.numel():
            dim, rows = x.shape[-1], x.numel() // x.shape[-1]
            flat = x if fault == "contiguous_assumed" else x.reshape(-1, dim)
            if flat.stride(-1) != 1:
                flat = flat.contiguous()
            step = dim if fault == "contiguous_assumed" else flat.stride(0)
            with triton_launch.on(x.device):
                rope_kernel[(rows,)](
                    *(flat, cos.contiguous(), sin.contiguous(), every(x, positions), output),
                    *(step, *x.shape[-3:], cos.shape[1]),
                    BACK=back,
                    INTERLEAVED=interleaved,
                    FAULT=fault,
                    C=triton_launch.COMPUTE[x.dtype],
                    BLOCK=next_power_of_2(dim),
                )
        return output

    def backward(grad: torch.Tensor, _: torch.Tensor, x: torch.Tensor, *tables: Any, **given: Any) -> tuple:
        return turn(True, grad, *tables, **given), None, None

    return of_passes(functools.partial(turn, False), backward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "rope_kernel")


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: Any, interleaved: bool) -> torch.Tensor:
    """Return the right result, in the dtype of x."""
    half, at = cos.shape[1], every(x, positions).view(x.shape[:-2])
    c, s = cos[at].unsqueeze(-2), sin[at].unsqueeze(-2)
    first, second = halves(x, half, interleaved)
    return joined(first * c - second * s, second * c + first * s, x[..., 2 * half :], interleaved)


def halves(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = x[..., : 2 * half]
    return (pairs[..., ::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])


def joined(first: torch.Tensor, second: torch.Tensor, rest: torch.Tensor, interleaved: bool) -> torch.Tensor:
    pairs = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((pairs, rest), -1)


def turned_back(grad: torch.Tensor, _: Any, x: Any, cos: torch.Tensor, sin: torch.Tensor, **given: Any) -> tuple:
    return turned(grad, cos, -sin, **given), None, None


def of_passes(forward: Callable[..., torch.Tensor], backward: Callable[..., tuple] = turned_back) -> Implementation:
    return differentiable(("x", "cos", "sin"), forward, backward, check_rope, positions=None, interleaved=False)


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return rope in CUDA C++ for float32, with a fault."""

    def forward(x: torch.Tensor, cos: Any, sin: Any, positions: Any, interleaved: bool) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            (count, half), (heads, dim) = cos.shape, x.shape[-2:]
            rows = x.reshape(-1, dim)
            rows = rows if rows.stride(-1) == 1 else rows.contiguous()
            tensors = (rows, cos.contiguous(), sin.contiguous(), every(x, positions), output)
            sizes = (len(rows), rows.stride(0), heads, dim, half, count, interleaved)
            KERNELS.launch("rope_kernel", fault, len(rows), min(-(-dim // 32) * 32, 1024), *tensors, *sizes)
        return output

    return of_passes(forward)


def second_turned_the_other_way(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: Any, interleaved: bool
) -> torch.Tensor:
    half, at = cos.shape[1], every(x, positions).view(x.shape[:-2])
    c, s = cos[at].unsqueeze(-2), sin[at].unsqueeze(-2)
    first, second = halves(x, half, interleaved)
    return joined(first * c - second * s, second * c - first * s, x[..., 2 * half :], interleaved)


def rest_left_out(x: torch.Tensor, cos: torch.Tensor, *others: torch.Tensor, **given: Any) -> torch.Tensor:
    output = turned(x, cos, *others, **given)
    output[..., 2 * cos.shape[1] :] = 0
    return output


def always_half_apart(*tensors: torch.Tensor, positions: Any, interleaved: bool) -> torch.Tensor:
    return turned(*tensors, positions, False)


def default_counted_from_1(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: Any, interleaved: bool
) -> Any:
    if positions is None:
        positions = ((every(x, None) + 1) % max(len(cos), 1)).view(x.shape[:-2])
    return turned(x, cos, sin, positions, interleaved)


def gradient_turned_forward(grad: torch.Tensor, _: Any, x: Any, *tables: torch.Tensor, **given: Any) -> tuple:
    return turned(grad, *tables, **given), None, None


def _of_torch(formula: Callable[..., Any], check: Check = forward_agrees, says: str = OUTPUT) -> Fault:
    passes = (turned, formula) if formula is gradient_turned_forward else (formula,)
    return Fault(
        name=formula.__name__,
        operation="rope",
        make=lambda: of_passes(*passes),
        check=check,
        says=says,
        right_on=None if formula in (rest_left_out, second_turned_the_other_way) else "not_at_all",
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("rope", in_triton, in_cuda, right_on="not_at_all")
    nine = far_apart(tokens(9, 1, 4))
    return (
        of_triton("neighbours_taken_for_halves", source="https://github.com/vllm-project/vllm/issues/49290"),
        of_triton("positions_of_the_first_sample", source="https://github.com/linkedin/Liger-Kernel/pull/477"),
        of_triton(
            "contiguous_assumed",
            examples=named(properties, "heads_with_gaps"),
            source="https://github.com/vllm-project/vllm/pull/17091",
        ),
        of_triton("rest_not_copied", check=memory_is_respected, says=UNWRITTEN, right_on="one_pair"),
        of_triton("pairs_across_the_whole_head", source="https://github.com/apple/coreai-models/issues/66"),
        of_triton("tables_in_bfloat16", source="https://github.com/KellerJordan/modded-nanogpt/issues/39"),
        of_triton("one_head_not_turned", source="https://github.com/linkedin/Liger-Kernel/issues/342"),
        of_triton("offsets_in_32_bits", examples=nine),
        of_triton(
            "output_in_place",
            says="changed its input|memory",
            right_on=None,
            source="https://github.com/unslothai/unsloth/issues/5001",
        ),
        of_triton(
            "backward_turns_forward",
            check=backward_agrees,
            says=GRADIENT,
            source="https://github.com/Dao-AILab/flash-attention/pull/569",
        ),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
        of_cuda("odd_column_dropped", check=memory_is_respected, says=UNWRITTEN),
        of_cuda("sign_of_sine"),
        of_cuda("updated_in_turn"),
        of_cuda("counted_from_1"),
        _of_torch(always_half_apart),
        _of_torch(gradient_turned_forward, law(properties.gradients_turn_back), "left side"),
        _of_torch(second_turned_the_other_way, law(properties.pairs_keep_their_length), "left side"),
        _of_torch(rest_left_out, law(properties.what_has_no_partner_is_copied), "left side"),
        _of_torch(default_counted_from_1, law(properties.positions_count_from_0), "left side"),
        Fault(
            name="always_half_apart_by_its_law",
            operation="rope",
            make=lambda: of_passes(always_half_apart),
            check=law(properties.neighbours_and_halves_differ_by_their_places),
            says="left side",
            right_on="not_at_all",
        ),
    )


FAULTS = _faults()
