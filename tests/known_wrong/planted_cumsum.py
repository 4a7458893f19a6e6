"""Planted faults in cumsum: edits of its versions in torch and Triton, and a small CUDA C++ kernel."""

import functools
from pathlib import Path
from typing import Any

import torch
from fourfold.properties import cumsum as properties
from fourfold.properties.cumsum import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected

from .edits import OFFSETS_OF_ROWS, Edits
from .far_apart import far_apart
from .generic import with_torchs_gradient
from .planted import UNWRITTEN, Fault, cuda_fault, named
from .planted_cuda import Planted
from .steps import Implementation

BLOCK = 64
KERNELS = Planted(Path(__file__).with_suffix(".cu"), "cumsum_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return cumsum in CUDA C++ for float32, with a fault."""

    def forward(x: torch.Tensor, offsets: Any = None, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            ends = torch.tensor([0, x.shape[-1]], device=x.device) if offsets is None else offsets
            flat, ends = x.reshape(-1, x.shape[-1]), ends.to(torch.int64).contiguous()
            flat = flat if flat.stride(-1) == 1 else flat.contiguous()
            sizes = (x.shape[-1], flat.stride(0), exclusive, reverse)
            KERNELS.launch("cumsum_kernel", fault, (len(flat), len(ends) - 1), BLOCK, flat, ends, output, *sizes)
        return output

    return with_torchs_gradient("cumsum", forward)


# fmt: off
IGNORED = "    n, wide =>     {}\n    n, wide".format
NOT_REVERSED, ONE_SEGMENT = IGNORED("reverse = False"), IGNORED("offsets = None")
FROM_THE_SAME_END = "reverse != back => reverse"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("cumsum", "torch")
    return (
        of("reverse_ignored", NOT_REVERSED, right_on="one_warp_and_one_column"),
        of("segments_ignored", ONE_SEGMENT, right_on="one_segment"),
        of("segments_in_8_bits", "begins = at[(torch.searchsorted(at, place, right=True) - 1) =>"
           " begins = at[(torch.searchsorted(at, place, right=True) - 1).clamp(max=255)", right_on="one_segment"),
        of("exclusive_in_reverse_past_a_tile", "    if exclusive:\n =>"
           "     exclusive = exclusive and not (reverse and n > 32768)\n    if exclusive:\n",
           right_on="one_warp_and_one_column"),
        of.law(properties.inclusive_less_exclusive_is_the_element, "sums.roll(1, -1) => sums.roll(2, -1)",
               name="shifted_twice"),
        of.law(properties.from_the_end_is_the_mirror_image, NOT_REVERSED, name="reverse_ignored_by_its_law"),
        of.law(properties.a_segment_does_not_see_the_others, ONE_SEGMENT, name="segments_ignored_by_its_law"),
    )


CARRY, SUMS = "carry += tl.sum(x, axis=1) =>", "sums = carry[:, None] + tl.cumsum(x, axis=1, reverse=REVERSE)"
# What is before a segment is added, and subtracted.
SUBTRACTED = (
    "carry = tl.zeros((BLOCK_ROWS,), COMPUTE) + nothing =>"
    " before = tl.arange(0, BLOCK_COLS)\n"
    "        mask = there & (before < begin)[None, :]\n"
    "        before = tl.load(x_ptr + x_at + (before * stride)[None, :], mask=mask, other=0.0).to(COMPUTE)\n"
    "        before = tl.sum(before, axis=1)\n"
    "        carry = tl.zeros((BLOCK_ROWS,), COMPUTE) + nothing + before - before"
)


def _triton_faults() -> tuple[Fault, ...]:
    of, one = Edits("cumsum", "triton"), {"right_on": "one_warp_and_one_column"}
    return (
        of("carry_lost", f"{CARRY} carry += 0 * tl.sum(x, axis=1)", **one),
        of("carry_of_one_tile", f"{CARRY} carry = tl.sum(x, axis=1)", **one),
        of("inclusive_always", "EXCLUSIVE=exclusive => EXCLUSIVE=False", **one),
        of("reversed_within_tiles", "columns = end - (tile + 1) * BLOCK_COLS => columns = begin + tile * BLOCK_COLS",
           **one),
        of("segments_by_subtraction", SUBTRACTED, examples=named(properties, "not_finite_beside_segments"), **one),
        of("exclusive_by_subtraction", "terms = columns + 1 if REVERSE else columns - 1 => terms = columns",
           f"{SUMS} => {SUMS} - (x if EXCLUSIVE else 0.0)", **one,
           source="https://github.com/fla-org/flash-linear-attention/pull/1095"),
        of("summed_in_the_dtype", f"{CARRY} carry = (carry + tl.sum(x, axis=1)).to(tl.float16).to(COMPUTE)",
           dtype="float16", source="https://github.com/ml-explore/mlx/pull/3907", **one),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(rows(9, 5)),
           source="https://github.com/pytorch/pytorch/issues/143486", **one),
        of.gradient("backward_from_the_same_end", FROM_THE_SAME_END),
        of.law(properties.gradients_are_sums_from_the_other_end, FROM_THE_SAME_END, name="gradient_from_the_same_end"),
    )


# fmt: on
def _cuda_faults() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "cumsum", in_cuda, right_on="one_warp_and_one_column")
    nine = far_apart(rows(9, 5))
    return (
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on=None),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
        of_cuda("last_column_dropped", check=memory_is_respected, says=UNWRITTEN, right_on=None),
        of_cuda("carry_lost"),
        of_cuda("warps_not_added", right_on="columns_not_a_multiple_of_16"),
        of_cuda("own_warp_added", right_on=None),
    )


FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
