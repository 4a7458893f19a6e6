"""Planted faults in embedding: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import embedding as properties
from fourfold.properties.embedding import lookup

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected

from .edits import Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named

# fmt: off
GITHUB, PYTORCH = "https://github.com", "https://github.com/pytorch/pytorch"
ONE, OFTEN = lookup(1, 3, 1), {"examples": named(properties, "one_row_thousands_of_times")}
SOME = {"examples": named(properties, "each_row_some_times")}
FIFTH = {"examples": named(properties, "one_row_has_a_fifth")}
# More ids than each block reads: they are sorted.
SORTED = {"examples": named(properties, "few_rows_thousands_of_times")}
APART, PADDED = {"examples": far_apart(lookup(9, 5, 4))}, {"examples": named(properties, "padding_past_768_ids")}
ROWS, LOOKUP = "return torch.nn.functional.embedding( =>", "torch.where(known, ids, table.shape[0])"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("embedding", "torch")
    return (
        of.law(properties.rows_are_copied, f"{LOOKUP} => torch.where(known, ids, table.shape[0]).clamp(max=127)",
               name="ids_in_7_bits", examples={"many_rows": lookup(300, 4, 50)}),
        of.law(properties.rows_without_ids_have_no_gradient, "rows, padding_idx) => rows)", name="padding_ignored",
               source=f"{PYTORCH}/issues/3506"),
        of.law(properties.gradients_add_up_to_the_cotangents, f"{ROWS} rows = (rows + rows.detach()) / 2\n"
               "    return torch.nn.functional.embedding(",
               name="half_of_the_gradient"),
        # Scaling by 1/frequency, which torch does only on request.
        of.gradient("scaled_by_frequency", "rows, padding_idx) => rows, padding_idx, None, 2.0, True)"),
    )


CHOSEN = "cotangents(grad_output_ptr, chosen, terms < count, columns, dim)"
AT = "rows[:, None] * row_stride + columns * column_stride =>"


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("embedding", "triton")
    return (
        of("offsets_in_32_bits", "other=0).to(tl.int64) => other=0).to(tl.int32)", **APART,
           source=f"{GITHUB}/ROCm/ATOM/pull/2100"),
        of("contiguous_assumed", f"{AT} rows[:, None] * dim + columns", right_on=ONE),
        of("first_columns_alone", "for start in range(0, dim, BLOCK_COLS): => for start in range(0, 1):",
           check=memory_is_respected, says=UNWRITTEN, right_on=ONE),
        of.gradient("repeated_ids_written_over",
                    f"{CHOSEN} => {CHOSEN.replace('< count', '== count - 1')}", **SOME, right_on=ONE,
                    source=f"{GITHUB}/tenstorrent/tt-metal/issues/6232"),
        of.gradient("repeated_ids_added_once",
                    f"{CHOSEN} => {CHOSEN.replace('terms < count', 'terms == 0')}", **SOME, right_on=ONE,
                    source=f"{GITHUB}/JuliaGPU/CUDA.jl/issues/1019"),
        of.gradient("added_in_float16", f"sums += {CHOSEN}.to(COMPUTE) =>"
                    f" sums = (sums + {CHOSEN}).to(tl.float16).to(COMPUTE)", dtype="float16", **SOME,
                    source=f"{GITHUB}/apache/mxnet/issues/17703"),
        of.gradient("padding_ignored", " & (rows != padding_idx) =>",
                    source=f"{PYTORCH}/issues/26302", **SOME, right_on=ONE),
        of.gradient("ids_of_later_parts_dropped",
                    "cdiv(num_ids, parts * block_ids) => max(num_ids // parts // block_ids, 1)",
                    source=f"{PYTORCH}/pull/27731", **SORTED, right_on=ONE),
        of.gradient("added_up_too_early", "== PARTS - 1: => == 0:", **SORTED, right_on=ONE),
        of.gradient("row_0_is_padding", "padding = -1 if padding_idx is None => padding = 0 if padding_idx is None"),
    )


CHUNKS = "__ldcg(&chunks[i * dim + column_of<WIDTH>(j)])"


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("embedding", "cuda")
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "; at < num_ids; => ; at <= num_ids;"),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic,
                   "? row * row_stride => ? int(row) * int(row_stride)", **APART,
                   source=f"{PYTORCH}/issues/188467"),
        of.stopped("contiguous_assumed", cuda_on_cpu.OutOfBounds, " == row_stride % width == 0 => == 0",
                   "? row * row_stride => ? row * dim", right_on=ONE),
        of.gradient("first_ids_alone", "for (; first < end; first += 32) { => if (first < end) {", **FIFTH,
                    right_on=ONE),
        of.gradient("padding_ignored", "row == padding_idx ? begin : starts => starts", **SOME,
                    source=f"{PYTORCH}/issues/28716", right_on=ONE),
        of.gradient("added_in_the_dtype",
                    f"sums[j] += {CHUNKS}; => sums[j] = Compute<T>(T(sums[j] + {CHUNKS}));", dtype="bfloat16",
                    **SORTED, source=f"{GITHUB}/flagos-ai/FlagGems/pull/309"),
        of.gradient("parts_not_cleared", "            C parts[COLUMNS<WIDTH>] = {};\n =>",
                    "const T* from[PIECES]; => const T* from[PIECES];\n    C parts[COLUMNS<WIDTH>] = {};", **OFTEN),
        of.stopped("lower_rows_not_counted", cuda_on_cpu.Race, "row < first_row; => row < first_row - 1;",
                   check=backward_agrees, **SOME, right_on=ONE),
        of.stopped("earlier_lanes_not_counted", cuda_on_cpu.Race, "__popc(earlier) => 0", check=backward_agrees, **SOME,
                   right_on=ONE),
        of.stopped("added_up_too_early", cuda_on_cpu.Race, "== count - 1; => == 0;", check=backward_agrees, **OFTEN,
                   right_on=ONE),
        of.gradient("warps_of_a_chunk_not_added_up", "i = 1; i < SUM_WARPS; i++ => i = 1; i < 1; i++", **OFTEN,
                    right_on=ONE),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
