"""Planted faults in attention: edits of its versions in torch, Triton and CUDA C++."""

import torch
from fourfold.properties import attention as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu

from .edits import Edits
from .planted import Fault, named

Tensor = torch.Tensor
MASKED = "https://github.com/robertknight/rten/pull/1321"
MODULO = "https://github.com/HazyResearch/HipKittens/pull/22"

SLOPES = {"examples": named(properties, "slopes"), "right_on": "causal"}


# fmt: off
WEIGHTS = "scores.softmax(-1).masked_fill(hidden, 0)"
BY_MODULO = (
    "q.reshape(total, kv_heads, group, columns).permute(1, 2, 0, 3) =>"
    " q.reshape(total, group, kv_heads, columns).permute(2, 1, 0, 3)",
    "group, total, columns).permute(2, 0, 1, 3) => group, total, columns).permute(2, 1, 0, 3)",
)
# The sum of exponentials is a constant to the gradient of one of both factors.
WITHOUT_DELTA = (
    "    return scores.softmax(-1) =>     of_q = q @ k.detach().transpose(1, 2) * factor\n"
    "    of_k = q.detach() @ k.transpose(1, 2) * factor\n"
    "    rest = {0}.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)\n"
    "    return (of_q + of_k - of_k.detach() - rest).exp()"
)
TOP_LEFT = (
    "token_k - (token_q + len(k) - len(q))[:, None] => token_k - token_q[:, None]",
    "(token_k - end_k) - (token_q - end_q)[:, None] => (token_k - first_k) - (token_q - first_q)[:, None]",
)


def _torch_faults() -> tuple[Fault, ...]:
    of, one, none = Edits("attention", "torch"), {"right_on": "one_token"}, {"right_on": "no_keys"}
    return (
        of("rows_without_keys_are_nan", f"{WEIGHTS} => scores.softmax(-1)", source=MASKED, **one),
        of("causal_at_the_top_left", *TOP_LEFT, source="https://github.com/NVIDIA/cutlass/issues/2336", **one),
        of("heads_by_modulo", *BY_MODULO, source=MODULO, **one),
        of.gradient("scale_left_out_of_dq", "q @ k.transpose => (q.detach() + (q - q.detach()) / factor)"
                    " @ k.transpose", source="https://github.com/NVIDIA/TransformerEngine/issues/1615", **none),
        of.gradient("delta_left_out_of_dq", WITHOUT_DELTA.format("of_k"),
                    examples=named(properties, "values_with_an_offset"), **none),
        of("window_wider_by_one", "ahead >= -left => ahead >= -left - 1",
           source="https://github.com/huggingface/transformers/issues/39408", right_on="causal"),
        of.law(properties.equal_values_are_the_output, "return scores.softmax(-1) => padding = scores.new_zeros("
               "*scores.shape[:-1], -k.shape[1] % 16)\n    return torch.cat([scores, padding], -1).softmax(-1)[...,"
               " : k.shape[1]]", name="padded_keys_counted", **none),
        of.law(properties.keys_may_change_places, f"{WEIGHTS} @ v => {WEIGHTS}[..., : k.shape[1] // 2 * 2]"
               " @ v[:, : k.shape[1] // 2 * 2]", name="last_of_an_odd_number_of_keys_dropped", **none),
        of.law(properties.a_constant_added_to_all_keys_changes_nothing, "q @ k.transpose(1, 2) * factor =>"
               " (q @ k.transpose(1, 2) * factor).clamp(max=2)", name="scores_clamped", **one),
        of.law(properties.sequences_stand_alone, "        queries, keys = (token_q =>"
               "         shift = ((first_k > 0) & (end_k > first_k)).to(end_k.dtype)\n"
               "        first_k, end_k = first_k - shift, end_k - shift\n        queries, keys = (token_q",
               name="first_key_of_a_sequence_is_that_before"),
        of.law(properties.heads_of_a_group_share_their_keys, *BY_MODULO, name="heads_by_modulo", source=MODULO),
        of.law(properties.the_future_does_not_matter, "0 if causal else => 1 if causal else", name="causal_late_by_one",
               **one),
        of("slopes_with_the_other_sign", "scores - slopes * => scores + slopes *", **SLOPES,
           source="https://github.com/meta-pytorch/attention-gym/pull/86"),
        of.law(properties.slopes_of_0_change_nothing, "else scores - slopes * => else scores / factor - slopes *",
               name="scores_with_slopes_not_scaled", **none),
        of.law(properties.slopes_are_a_column_of_a_causal_query, "slopes.to(wide) => slopes.to(wide).roll(1)",
               name="slopes_of_the_head_before", **one),
        of.law(properties.gradients_of_keys_sum_to_0, WITHOUT_DELTA.format("of_q"), name="delta_left_out_of_dk",
               right_on="no_queries"),
    )


AMONG = "q_there, among = query < num_queries, column < columns\n    kv_head = {}\n    q_at = (".format(
    "tl.cast(head // (heads // kv_heads), tl.int64)")
THERE = "k_mask, v_mask = k_there[None, :] & among[:, None], k_there[:, None]"


def _triton_faults() -> tuple[Fault, ...]:
    of, one = Edits("attention", "triton"), {"right_on": "one_token"}
    return (
        of("rows_without_keys_are_nan",
           "tl.where(sees[:, None], output / sums[:, None], 0.0) => output / sums[:, None]",
           source=MASKED, **one),
        of("keys_of_the_next_sequence_read", f"{THERE} => {THERE.replace('k_there', '(k_begin + key < total_k)')}",
           examples=named(properties, "nothing_finite_in_another_sequence"),
           source="https://github.com/tile-ai/tilelang/pull/2010", **one),
        of("columns_of_the_first_block_alone",
           f"{AMONG} => {AMONG.replace('column < columns', '(column < columns) & (column < 16)')}",
           source="https://github.com/triton-lang/triton/issues/621", **one),
        of("first_block_of_the_window_skipped", "begin = (tl.maximum(place - left, 0) // KEYS =>"
           " begin = (tl.cdiv(tl.maximum(place - left, 0), KEYS)", right_on="causal"),
        of.gradient("window_left_out_of_backward", "left, right, CAUSAL, WINDOW)\n                weights = =>"
                    " left, right, CAUSAL, False)\n                weights =",
                    source="https://github.com/ROCm/aiter/pull/3742", right_on="causal"),
        of("distance_from_the_first_key", "(query + num_keys - num_queries)[:, None], key[None, :], start, slope =>2"
           " query[:, None], key[None, :], start, slope", **SLOPES,
           source="https://github.com/keras-team/keras-hub/issues/2861"),
        of.gradient("slopes_left_out_of_dk", "            if BIAS:\n                place = => "
                    "            if False:\n                place =", **SLOPES),
        of("output_not_rescaled", "output = add_product(output * shrunk[:, None], => output = add_product(output,",
           examples=named(properties, "scores_that_rise"), **one),
        of("masked_scores_may_all_be_infinite",
           'base = tl.where(larger == -float("inf"), 0.0, larger) => base = larger',
           examples=named(properties, "scores_of_minus_infinity_first"),
           source="https://github.com/flashinfer-ai/flashinfer/pull/4401", **one),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, one, github = Edits("attention", "cuda"), {"right_on": "one_token"}, "https://github.com"
    return (
        of("causal_at_the_top_left", "const int shift = place.other_length - place.length, =>2 const int shift = 0,",
           source=f"{github}/Dao-AILab/flash-attention/issues/282", **one),
        of("heads_by_modulo", "head / (heads / kv_heads) * k_head_stride => head % kv_heads * k_head_stride",
           source=MODULO, **one),
        of("padded_keys_counted", "past, n, e) : -C( => past, n, e) : key >= place.other_length ? C(0) : -C(",
           source=f"{github}/flashinfer-ai/flashinfer/pull/5090"),
        of("slope_of_the_head_of_keys", "C(slopes[head]) : C(0); =>2 C(slopes[head / (heads / kv_heads)]) : C(0);",
           **SLOPES, source=f"{github}/vllm-project/vllm/issues/9136"),
        of("bias_before_the_scale", "product * scale - slope * distance(past, n, e) =>"
           " (product - slope * distance(past, n, e)) * scale", **SLOPES),
        of.gradient("slopes_left_out_of_dk", "visible ? exponential<T>(score - of_lse =>"
                    " visible ? exponential<T>((OF_KEYS ? scores.at[n][e] * scale : score) - of_lse", **SLOPES),
        of("window_on_the_other_side", "key >= limit - 1 - left => key >= limit - 1 + left", right_on="causal",
           source=f"{github}/huggingface/transformers/pull/41228"),
        of.stopped("copies_not_awaited", cuda_on_cpu.Race, "        wait_for_copies<0>();\n =>"),
        of.stopped("last_block_unmasked", cuda_on_cpu.OutOfBounds,
                   "const int there = end - start, used = rounded(there) =>"
                   " const int there = KEYS, used = rounded(there)"),
        of.stopped("values_not_awaited", cuda_on_cpu.Race, "        wait_for_copies<1>();\n =>"),
        of.stopped("other_warps_maximum_not_awaited", cuda_on_cpu.Race, "= numbers[i];\n    __syncthreads(); =>"
                   " = numbers[i];"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
