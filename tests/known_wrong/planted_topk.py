"""Planted faults in topk: edits of its versions in torch, Triton and CUDA C++."""

import functools

from fourfold.properties import topk as properties
from fourfold.properties.topk import rows

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import outputs_fit

from .edits import OFFSETS_OF_ROWS, ROW_IN_32_BITS, Edits, wrapped
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, named

VALUES, INDICES = {"output": "values", "right_on": "one_column"}, {"output": "indices", "right_on": "one_column"}
APART = {"examples": far_apart(rows(9, 5))}
NAN, NEGATIVE_NAN = (named(properties, f"nan_is_{what}") for what in ("the_largest", "not_the_smallest"))

# fmt: off
RESULT = "sorted=True)\n    return values, indices => sorted=True)\n"
TO_TIES = (
    f"{RESULT}    ties = x[..., None, :] == values.detach()[..., None]\n"
    "    terms = (ties * (x - x.detach())[..., None, :] / {}).sum(-1)\n    return values.detach() + terms, indices"
)


def _torch_faults() -> tuple[Fault, ...]:
    of, law = Edits("topk", "torch"), functools.partial(Edits("topk", "torch").law, says="left side", **VALUES)
    return (
        of("indices_of_32_bits", f"{RESULT}    return values, indices.int()", says="has dtype torch.int32",
           output="indices"),
        of.gradient("to_every_tie", TO_TIES.format(1), **VALUES),
        of.gradient("divided_among_ties", TO_TIES.format("ties.sum(-1, keepdim=True).clamp(min=1)"), **VALUES),
        # The gradient goes to other indices of equal numbers.
        of("chosen_again",
           f"{RESULT}    again = x.shape[-1] - 1 - torch.topk(x.flip(-1), k, largest=largest).indices\n"
           "    return x.gather(-1, again), indices", check=outputs_fit, says="gradient of x is not the cotangent",
           right_on="one_column"),
        law(properties.the_smallest_are_the_largest_negated, "torch.topk(x, k, => torch.topk(x if largest else x.abs(),"
            " k,", f"{RESULT}    return x.gather(-1, indices), indices", name="smallest_in_magnitude"),
        law(properties.fewer_are_the_first_of_more, f"{RESULT}    indices = indices.sort(-1).values\n"
            "    return x.gather(-1, indices), indices", name="in_order_of_places", right_on="all_alike"),
        law(properties.each_cotangent_goes_to_one_place, TO_TIES.format(1), name="to_every_tie_by_its_law"),
    )


LOADED = "tl.load(ptr + at * stride, mask=slots < k"
FIRST_TIE = wrapped(
    "register(\"triton\", _launch, _launch_backward)",
    "topk(x, k, largest=True)",
    "values, indices = right(x, k, largest)",
    "if indices.numel():",
    "    first = (x.detach()[..., None, :] == values.detach()[..., None]).int().argmax(-1)",
    "    indices = torch.where(values.isnan(), indices, first)",
    "return values, indices",
)


def _triton_faults() -> tuple[Fault, ...]:
    of = Edits("topk", "triton")
    return (
        of("index_of_the_first_tie", FIRST_TIE, **INDICES),
        of("ties_left_out", "sorts = few and => sorts = False and",
           "others[None, :] < at[:, None] => others[None, :] != at[:, None]", **INDICES),
        of("nan_never_found", "tl.where(x == x, keys, every) => tl.where(x == x, keys, 0)", examples=NAN,
           source="https://github.com/sgl-project/sglang/pull/30079", **INDICES),
        of("nan_passed_over_by_a_group", ", propagate_nan=tl.PropagateNan.ALL =>",
           examples=named(properties, "whole_vectors_with_nan"), **VALUES),
        of("padded_with_the_first", "tl.sort(tl.where(slots < count, pairs, tl.zeros_like(pairs)), => tl.sort(pairs,",
           examples=named(properties, "below_zero"), **VALUES | {"right_on": "the_largest_alone"}),
        of("groups_not_read_again", "MEMBERS=loaded => MEMBERS=1", examples=named(properties, "whole_vectors"),
           **VALUES),
        of("last_column_of_the_block", "tl.store(indices_ptr + results, at, => tl.store(indices_ptr + results,"
           f' tl.where({LOADED}, other=0.0) == -float("inf"), PARTS - 1, at),',
           examples=named(properties, "all_minus_infinity"), **INDICES),
        of("compared_in_float16",
           "tl.zeros_like(x), x).to(BITS => tl.zeros_like(x), x.to(tl.float16).to(x.dtype)).to(BITS",
           examples=named(properties, "numbers_next_to_each_other"), **VALUES),
        of("rounded_to_bfloat16", f"{LOADED}), mask => {LOADED}).to(tl.bfloat16), mask",
           **VALUES | {"right_on": "all_minus_infinity"}),
        of("the_smallest_first", "results = row.to(tl.int64) * k + slots =>"
           " results = row.to(tl.int64) * k + k - 1 - slots", **VALUES),
        of("a_block_of_a_row", "    (num_rows, n, _), k, => "
           "    sizes = sizes[0], min(sizes[1], 256), sizes[2]\n    (num_rows, n, _), k,", **VALUES),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, source="https://github.com/pytorch/pytorch/issues/95455", **APART,
           **VALUES),
    )


IS_NAN, PLACE = "if (number != number) key = every; =>", "const long long at = places[place]; =>"


def _cuda_faults() -> tuple[Fault, ...]:
    of, pytorch = Edits("topk", "cuda"), "https://github.com/pytorch/pytorch/issues"
    return (
        of.stopped("store_unmasked", cuda_on_cpu.OutOfBounds, "place < k; place += blockDim.x) {\n        const =>"
                   " place < k + (blockIdx.x == gridDim.x - 1); place += blockDim.x) {\n        const",
                   output="values"),
        of("last_block_dropped", "FEW[dtype].launch(num_rows, => FEW[dtype].launch(max(num_rows - 1, 1),",
           check=memory_is_respected, says=UNWRITTEN, output="indices", right_on=rows(1, 5)),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, ROW_IN_32_BITS, **APART, **VALUES),
        of("index_of_the_first_tie", f"{PLACE} long long at = places[place];\n"
           "        for (int other = place - 1; other >= 0 && keys[other] == keys[place]; other--) at = places[other];",
           **INDICES),
        of("nan_never_chosen", f"{IS_NAN} if (number != number) key = 0;", examples=NAN, source=f"{pytorch}/16762",
           **VALUES),
        of("sign_of_nan_counts", IS_NAN, examples=NEGATIVE_NAN, source=f"{pytorch}/117617", **VALUES),
        of("best_begins_at_zero", "key_of(T(number), largest);\n        places => key_of(T(largest ? fmax(number, C(0))"
           " : number), largest);\n        places", source="https://github.com/vllm-project/vllm/pull/42608",
           **INDICES | {"right_on": "the_largest_alone"}),
        of("nan_passed_over_by_a_warp", "again = nan || => again =",
           examples=named(properties, "whole_vectors_with_nan"), **VALUES),
        of.stopped("ties_of_a_warp_in_one_place", cuda_on_cpu.Race,
                   "places[other] < places[own] => places[other] != places[own]", **INDICES),
        of.stopped("groups_of_a_warp_not_counted", cuda_on_cpu.Race,
                   "found += __popc(lanes); => found = max(found, __popc(lanes));", **VALUES),
        of("the_same_nan_every_time", f"{PLACE} const long long at = places[keys[place] == ~Key<T>(0) ? 0 : place];",
           examples=named(properties, "all_nan"), source="https://github.com/vllm-project/vllm/pull/39391", **INDICES),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
