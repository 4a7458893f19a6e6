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
SEVERAL = {"examples": named(properties, "rows_of_several_blocks")}
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


AMONG = "among = terms < ends[:, None] => among ="
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
                    f"{AMONG} (terms < ends[:, None]) & (terms == ends[:, None] - 1)", **SORTED, right_on=ONE,
                    source=f"{GITHUB}/tenstorrent/tt-metal/issues/6232"),
        of.gradient("repeated_ids_added_once",
                    f"{AMONG} (terms < ends[:, None]) & (terms == begins[:, None])", **SORTED, right_on=ONE,
                    source=f"{GITHUB}/JuliaGPU/CUDA.jl/issues/1019"),
        of.gradient("added_in_float16", "sums += tl.load(from_ptr, mask => sums = (sums + tl.load(from_ptr, mask",
                    "inside[None, None, :], other=0.0).to(COMPUTE) =>"
                    " inside[None, None, :], other=0.0)).to(tl.float16).to(COMPUTE)", dtype="float16", **SORTED,
                    source=f"{GITHUB}/apache/mxnet/issues/17703"),
        of.gradient("padding_ignored", "mask=there & (rows != padding_idx) => mask=there",
                    source=f"{PYTORCH}/issues/26302", **SORTED, right_on=ONE),
        of.gradient("an_id_dropped", f"{AMONG} terms < ends[:, None] - (ends - begins > 768).to(tl.int64)[:, None]",
                    source=f"{PYTORCH}/pull/27731", **SORTED, right_on=ONE),
        of.gradient("places_of_tiles", "at.to(tl.int64) * ROWS => (at - at % BLOCK_IDS).to(tl.int64) * ROWS", **SOME,
                    right_on=ONE),
        of.gradient("row_0_is_padding", "padding = -1 if padding_idx is None => padding = 0 if padding_idx is None"),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("embedding", "cuda")
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "at < num_ids; at += step => at <= num_ids; at += step"),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic,
                   "table + row * row_stride => table + int(row) * int(row_stride)", **APART,
                   source=f"{PYTORCH}/issues/188467"),
        of.stopped("contiguous_assumed", cuda_on_cpu.OutOfBounds, " == row_stride % width == 0 => == 0",
                   "take<WIDTH>(table + row * row_stride => take<WIDTH>(table + row * dim", right_on=ONE),
        of.gradient("last_run_dropped", "first < end; first += => first < begin + RUN; first +=", **SORTED,
                    right_on=ONE),
        of.gradient("padding_ignored", "row == padding_idx || column >= dim => column >= dim", **SORTED,
                    source=f"{PYTORCH}/issues/28716", right_on=ONE),
        of.gradient("added_in_the_dtype", "parts[j] += terms[j]; => parts[j] = C(T(parts[j] + terms[j]));",
                    dtype="bfloat16", **SORTED, source=f"{GITHUB}/flagos-ai/FlagGems/pull/309"),
        of.gradient("parts_not_cleared", "        C parts[WIDTH] = {};\n =>",
                    "C sums[WIDTH] = {}; => C sums[WIDTH] = {}, parts[WIDTH] = {};", **OFTEN),
        of.stopped("lower_rows_not_counted", cuda_on_cpu.Race, "row < first_row; => row < first_row - 1;",
                   check=backward_agrees, **SEVERAL, right_on=ONE),
        of.stopped("earlier_lanes_not_counted", cuda_on_cpu.Race, "__popc(earlier) => 0", check=backward_agrees, **SOME,
                   right_on=ONE),
        of.gradient("threads_of_a_row_not_added_up", "if (threadIdx.y) return; => return;", **OFTEN, right_on=ONE),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
