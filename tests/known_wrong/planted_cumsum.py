"""Planted faults in cumsum: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import cumsum as properties
from fourfold.properties.cumsum import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected

from .edits import OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named

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


OF_WARP = "            if (other == warp) before[t] += totals[t];\n =>"
STORED = "if (exists(t, k)) tile_to[k] = =>"


def _cuda_faults() -> tuple[Fault, ...]:
    of, one = Edits("cumsum", "cuda"), {"right_on": "one_warp_and_one_column"}
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, f"{STORED} tile_to[k] ="),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(rows(9, 5)), **one),
        of("last_column_dropped", f"{STORED} if (exists(t, k) && here + low(t) + k < end - 1) tile_to[k] =",
           check=memory_is_respected, says=UNWRITTEN),
        of("carry_lost", "carry += totals[t]; =>", **one),
        of("warps_not_added", OF_WARP, right_on="columns_not_a_multiple_of_16"),
        of("own_warp_added",
           f"{OF_WARP}             if (other == warp) before[t] += totals[t] + parts[turn][t][warp];\n"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
