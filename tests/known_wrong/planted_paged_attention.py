"""Planted faults in paged_attention: edits of its versions in torch, Triton and CUDA C++."""

from fourfold.properties import paged_attention as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .far_apart import far_apart
from .planted import Fault, named


def nine_pages(dtype: DType) -> Case:
    """Return a case of nine pages in use, whose first input is the cache of keys."""
    case = properties.sequences(36, more=(0, 0))(dtype)
    first = {"k_cache": case["k_cache"]}
    return Case({**first, **case.inputs}, case.grad_output, case.parameters)


# fmt: off
GITHUB = "https://github.com"
VLLM, FLASH_ATTENTION = f"{GITHUB}/vllm-project/vllm", f"{GITHUB}/Dao-AILab/flash-attention"
ONE, APART = {"right_on": "one_token"}, {"examples": far_apart(nine_pages)}
EMPTY = {"source": f"{GITHUB}/flashinfer-ai/flashinfer/pull/363", **ONE}
UNWRITTEN_SPLITS = {"source": f"{GITHUB}/ROCm/aiter/pull/4420", "poisoned": True, **ONE,
                    "examples": named(properties, "splits_without_tokens")}
PAST_THE_TABLE = {"source": f"{GITHUB}/vllm-project/flash-attention/pull/42"}
TABLE = "x[table.where(known, 0)].flatten(1, 2) =>"
THERE = "there, known = tokens < lengths[:, None], =>"


def _torch_faults() -> tuple[Fault, ...]:
    of = Edits("paged_attention", "torch")
    return (
        of("a_sequence_without_tokens_is_nan", "softmax(-1).masked_fill(absent, 0) => softmax(-1)", **EMPTY),
        of("length_in_whole_pages",
           f"{THERE} there, known = tokens < (lengths[:, None] + page_size - 1) // page_size * page_size,",
           source=f"{GITHUB}/pegainfer-project/pegainfer/issues/291", **ONE),
        of.law(properties.equal_values_are_the_output, "-torch.inf).softmax(-1) => 0).softmax(-1)",
               name="tokens_past_the_end_counted", source=f"{GITHUB}/flashinfer-ai/flashinfer/pull/5090", **ONE),
        of.law(properties.pages_may_lie_anywhere,
               f"{TABLE} x[(table[:, :1] + torch.arange(table.shape[1])).clamp(0, pages - 1)].flatten(1, 2)",
               name="pages_taken_for_neighbours", source=f"{GITHUB}/hw-native-sys/pypto/pull/470", **ONE),
        of.law(properties.what_lies_past_the_end_does_not_matter, "k, v = (x.where(there[..., None, None], 0) => "
               "k, v = (x", name="nan_past_the_end", source=f"{VLLM}/pull/936", **ONE),
        of.law(properties.pages_may_be_halved, f"{THERE} there, known = (tokens < lengths[:, None])"
               " & ((tokens % page_size < 3) | (page_size < 4)),", name="three_tokens_of_a_page",
               right_on=properties.sequences(3, page_size=2)),
        of.law(properties.heads_of_a_group_share_their_keys,
               ".reshape(len(q), kv_heads, -1, columns) @ => .reshape(len(q), -1, kv_heads, columns).transpose(1, 2) @",
               "(weights @ v.transpose(1, 2)).reshape => (weights @ v.transpose(1, 2)).transpose(1, 2).reshape",
               name="heads_by_modulo", source=f"{GITHUB}/HazyResearch/HipKittens/pull/22",
               right_on=properties.sequences(3, heads=(2, 1))),
    )


AT = "tl.load(table_ptr + token // page_size, mask=there, other=0)"


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("paged_attention", "triton")
    return (
        of("offsets_in_32_bits", f"{AT}.to(tl.int64) => {AT}", source=f"{VLLM}/issues/47671", **APART),
        of("nan_past_the_end", "there = token < end => there = token < end\n"
           "        in_page = token < tl.cdiv(end, page_size) * page_size",
           f"{AT} => {AT.replace('there', 'in_page')}", "read = there & known => read = in_page & known",
           source=f"{VLLM}/issues/47305", **ONE),
        of("a_sequence_without_tokens_is_nan", "tl.where(length > 0, sums / total[:, None], 0.0) =>"
           " sums / total[:, None]", **EMPTY),
        of("splits_that_were_not_written_are_merged", "used, at = split * share < length, =>"
           " used, at = split < splits,", **UNWRITTEN_SPLITS),
        of("splits_not_rescaled", "tl.exp(largest - tl.where(top == -float(\"inf\"), 0.0, top)) =>"
           " tl.where(used, 1.0, 0.0)", examples=named(properties, "scores_that_rise"), **ONE),
        of("first_tile_of_heads_alone", "in_group = rest % tiles * BLOCK_H + => in_group = rest % tiles * 0 +",
           examples=named(properties, "more_heads_in_a_group_than_two_tiles"), says="never written|expected", **ONE,
           source=f"{GITHUB}/FlashML-org/FreeToken/pull/177"),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of = Edits("paged_attention", "cuda")
    return (
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic,
                   "page * k_page_stride => page * int(k_page_stride)", **APART,
                   source=f"{GITHUB}/vllm-project/vllm-xpu-kernels/pull/445"),
        of("nan_past_the_end", "if (token >= end) => if (token >= (end + page_size - 1) / page_size * page_size)",
           source=f"{FLASH_ATTENTION}/issues/1745", **ONE),
        of("a_sequence_without_tokens_is_nan", "share.length ? sum / total : Compute<T>(0) => sum / total", **EMPTY),
        of("keys_of_the_first_head_alone", "k += kv_head * => k += kv_head / kv_heads *",
           source=f"{GITHUB}/PSAL-POSTECH/ONNXim/pull/34", **ONE),
        of.stopped("table_read_past_the_end", cuda_on_cpu.OutOfBounds, "        if (token >= end) return -1;\n =>",
                   **PAST_THE_TABLE),
        of.stopped("heads_past_the_group", cuda_on_cpu.OutOfBounds, "rows = int(min(group - tile * 16, 16ll)) =>"
                   " rows = 16", source=f"{GITHUB}/FlashML-org/FreeToken/pull/177"),
        of.stopped("copies_awaited_one_step_late", cuda_on_cpu.Race, "wait_for_copies<AHEAD - 1>(); =>"
                   " wait_for_copies<AHEAD>();"),
        of.stopped("barrier_of_weights_missing", cuda_on_cpu.Race, "sums.scale(shrunk);\n        __syncwarp(); =>"
                   " sums.scale(shrunk);"),
        of("splits_that_were_not_written_are_merged", "int((share.length + share.tokens - 1) / share.tokens) : 0; =>"
           " int(splits) : 0;", **UNWRITTEN_SPLITS),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
