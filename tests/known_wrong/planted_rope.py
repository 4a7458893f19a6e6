"""Planted faults in rope: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import rope as properties
from fourfold.properties.rope import tokens
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.operations.outcomes import Failure

from .edits import OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named

# fmt: off
TURNED = "-1 if interleaved else -2)\n    output ="
AS_HALVES = "    wide, (count =>     interleaved = False\n    wide, (count"


def _torch_faults() -> tuple[Fault, ...]:
    of, none = Edits("rope", "torch"), {"right_on": "not_at_all"}
    return (
        of("always_half_apart", AS_HALVES, **none),
        of("positions_of_a_short_context", "at.clamp(0, count - 1) => at.clamp(0, min(count, 65536) - 1)", **none),
        of.law(properties.gradients_turn_back, f"{TURNED} => -1 if interleaved else -2)\n"
               "    other = torch.stack((first * c + second * s, second * c - first * s), -1 if interleaved else -2)\n"
               "    turned = other - other.detach() + turned.detach()\n    output =", name="gradient_turned_forward",
               **none),
        of.law(properties.pairs_keep_their_length, "second * c + first * s => second * c - first * s",
               name="second_turned_the_other_way"),
        of.law(properties.what_has_no_partner_is_copied, "x[..., 2 * half :]), -1) => 0 * x[..., 2 * half :]), -1)",
               name="rest_left_out"),
        of.law(properties.positions_count_from_0, "torch.arange(x.shape[-3], device=x.device) =>"
               " (torch.arange(x.shape[-3], device=x.device) + 1) % max(count, 1)", name="default_counted_from_1",
               **none),
        of.law(properties.neighbours_and_halves_differ_by_their_places, AS_HALVES, name="always_half_apart_by_its_law",
               **none),
    )


TABLES = "        if BACK:\n            s = =>         c, s = {}\n        if BACK:\n            s ="


def _triton_faults() -> tuple[Fault, ...]:
    of, none = Edits("rope", "triton"), {"right_on": "not_at_all"}
    return (
        of("neighbours_taken_for_halves", "INTERLEAVED=turn.interleaved => INTERLEAVED=False", **none,
           source="https://github.com/vllm-project/vllm/issues/49290"),
        of("positions_of_the_first_sample", "positions_ptr + tokens.to( => positions_ptr + (tokens % seq).to(", **none,
           source="https://github.com/linkedin/Liger-Kernel/pull/477"),
        of("contiguous_assumed", "(rows - tokens * heads).to(tl.int64) * x_head_stride =>"
           " (rows - tokens * heads).to(tl.int64) * dim", examples=named(properties, "heads_with_gaps"), **none,
           raises=(Failure, InterpreterError), says="output|OutOfBounds",
           source="https://github.com/vllm-project/vllm/pull/17091"),
        of("rest_not_copied", "for piece in range(tl.cdiv(dim - 2 * half, BLOCK_PAIRS)): => for piece in range(0):",
           check=memory_is_respected, says=UNWRITTEN, right_on="one_pair"),
        of("pairs_across_the_whole_head", "tl.cast(half, tl.int64) * x_stride =>"
           " tl.cast(dim // 2, tl.int64) * x_stride",
           source="https://github.com/apple/coreai-models/issues/66", **none),
        of("tables_in_bfloat16", TABLES.format("c.to(tl.bfloat16).to(COMPUTE), s.to(tl.bfloat16).to(COMPUTE)"),
           source="https://github.com/KellerJordan/modded-nanogpt/issues/39", **none),
        of("one_head_not_turned", TABLES.format("tl.where(heads > 1, c, 1.0), tl.where(heads > 1, s, 0.0)"),
           source="https://github.com/linkedin/Liger-Kernel/issues/342", **none),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(tokens(9, 1, 4)), **none),
        of("output_in_place", "flat, x.new_empty(x.shape)) =>"
           " flat, x.detach() if x.is_contiguous() else x.new_empty(x.shape))", says="changed its input|memory",
           source="https://github.com/unslothai/unsloth/issues/5001"),
        of.gradient("backward_turns_forward", "BACK=turn.back => BACK=False", **none,
                    source="https://github.com/Dao-AILab/flash-attention/pull/569"),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, none, one = Edits("rope", "cuda"), {"right_on": "not_at_all"}, "T(fma(first, sine, second * c[j])) =>"
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "    if (token >= tokens) return;\n =>"),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS,
                   examples=far_apart(tokens(9, 1, 4)), **none),
        of("odd_column_dropped", "int column = dim - => int column = dim / 2 * 2 -",
           check=memory_is_respected, says=UNWRITTEN, **none),
        of("sign_of_sine", "back ? -1 : 1 => back ? 1 : -1", **none),
        of("updated_in_turn", f"{one} T(second * c[j] + (first * c[j] - second * sine) * sine)", **none),
        of("counted_from_1", "divided(token, seq, seq_reciprocal).rest; => (token % seq + 1) % num_positions;", **none),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
