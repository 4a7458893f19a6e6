"""The record of attention: scaled dot product attention over packed sequences of different lengths."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from fourfold.oracles import attention as oracle
from hypothesis import strategies as st

from fourfold.declaration.drawing import reverse_offsets
from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import (
    FEW_ELEMENTS,
    GENERATORS,
    cotangent,
    explicit_arrays,
    layouts_for,
    repeat_first,
    sizes,
    values,
)
from fourfold.numerics.bounded import Bounded, stored, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, equals_exactly, only
from fourfold.operations.workloads import Make, Workload, tiled, whole

# The scores of "offset" queries and keys are far from 0, and those of "spread" ones far apart.
KINDS = ("normal", "normal", "normal", "whole", "constant", "offset", "spread", "huge", "tiny")
SCALES = (None, None, None, 0.25, 1.5)
# Of all keys, and of some.
WHOLE = (-1, -1)
WINDOWS = (WHOLE, WHOLE, WHOLE, (2, 0), (0, 3), (4, -1), (-1, 1), (0, 0))
MOST_COLUMNS = 256
Counts = Sequence[int]


def _not_finite(x: Any) -> np.ndarray:
    return ~np.isfinite(x.value)


def _hidden(visible: np.ndarray, x: Any) -> np.ndarray:
    """Return where weights, 0 if not `visible`, meet a number of x that is not finite: ``[..., rows, d]``.

    The weight of 0 makes NaN of it. A kernel that leaves out whole tiles of hidden keys does not.
    """
    return (~visible).astype(np.float64) @ _not_finite(x).astype(np.float64) > 0


def _all_below(q: Any, k: Any, visible: np.ndarray) -> np.ndarray:
    """Return the rows whose visible scores are all -inf, ``[..., queries, 1]``: softmax gives NaN, torch 0."""
    with np.errstate(all="ignore"):
        scores = q.value.astype(np.float64) @ np.swapaxes(k.value.astype(np.float64), -1, -2)
    return ((scores == -np.inf) | ~visible).all(-1, keepdims=True) & visible.any(-1, keepdims=True)


def _infinite(rows: Any, others: Any, visible: np.ndarray) -> np.ndarray:
    """Return a mask of the rows whose products with rows that they see may be infinite, ``[..., queries, 1]``.

    These are infinities of both signs, and the row sum of dO * O, which is that of the weights times these products, is
    NaN by one way and an infinity by the other.
    """
    of_others = np.isinf(others.value).any(-1)[..., None, :] & visible
    return (
        np.isinf(rows.value).any(-1, keepdims=True)
        | of_others.any(-1, keepdims=True)
        | products_overflow(rows, others, visible)
    )


def products_overflow(rows: Any, others: Any, visible: np.ndarray) -> np.ndarray:
    """Return the rows whose product with a row that they see may overflow, ``[..., queries, 1]``."""
    with np.errstate(all="ignore"):
        sizes = abs(rows.value).astype(np.longdouble) @ np.swapaxes(abs(others.value), -1, -2).astype(np.longdouble)
    return np.asarray(((sizes > rows.arithmetic.largest / 8) & visible).any(-1, keepdims=True))


def _overflows(v: Any, visible: np.ndarray) -> np.ndarray:
    """Return where sums of values with weights up to 1, as a kernel has them before it divides, may overflow."""
    sizes = np.where(np.isfinite(v.value), abs(v.value), 0).astype(v.value.dtype)
    with np.errstate(over="ignore"):
        return visible.astype(v.value.dtype) @ sizes > v.arithmetic.largest / 2


def open_places(
    grad: Any, q: Any, k: Any, v: Any, given: Mapping[str, Any], others: Callable[..., np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Return where the results of a call, by name, may be anything: see the functions above.

    `others` returns further rows of a sequence, ``[..., queries, 1]``, that are open.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    arrays = {"output": q, "q": q, "k": k, "v": k}
    found = {name: np.zeros(x.shape, dtype=bool) for name, x in arrays.items()}
    how = (given.get("q_offsets"), given.get("k_offsets"), given.get("causal", False), given.get("window", WHOLE))
    for queries, keys, visible, _ in oracle.sequences(q, k, *how):
        of_q, of_k, of_v = (oracle.group_heads(x, kv_heads) for x in (q[queries], k[keys], v[keys]))
        every = oracle.visible_by_head(visible, heads, kv_heads)
        below, hidden = _all_below(of_q, of_k, every), _hidden(every, of_v) | _overflows(of_v, every)
        if others is not None:
            below = below | others(of_q, of_k, of_v, every)
        found["output"][queries] = oracle.ungroup_heads(hidden | below, heads)
        if grad is None:
            continue
        of_grad = oracle.group_heads(grad[queries], kv_heads)
        rows = below | hidden.any(-1, keepdims=True) | _infinite(of_grad, of_v, every)
        found["q"][queries] = oracle.ungroup_heads(_hidden(every, of_k) | rows, heads)
        found["k"][keys] = np.swapaxes(_hidden(every.T, of_q) | rows.any((-2, -1), keepdims=True), 0, 1)
        found["v"][keys] = np.swapaxes(_hidden(every.T, of_grad) | below.any((-2, -1), keepdims=True), 0, 1)
    return found


def _is_open_somewhere(*arrays: Any) -> bool:
    """Return whether any number is not finite, or so large that a sum of products may overflow."""
    if not isinstance(arrays[0], Bounded):
        return False
    largest = (arrays[0].arithmetic.largest / 8 / max(*arrays[-1].shape, 1)) ** 0.5
    return any(not (abs(x.value) <= largest).all() for x in arrays)


def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """Return the oracle's output, whose weights are rounded to the dtype before they multiply.

    It is unspecified where a hidden key has a value that is not finite, and where all scores of a query are -inf.
    """
    output = oracle.forward(q, k, v, **given, stored=stored)
    if not _is_open_somewhere(q, k, v):
        return output
    return unspecified_where(output, open_places(None, q, k, v, given)["output"])


def backward(grad_output: Any, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, ...]:
    """Return the oracle's gradients, open in the same way."""
    gradients = oracle.backward(grad_output, q, k, v, **given, stored=stored)
    if not _is_open_somewhere(grad_output, q, k, v):
        return gradients
    places = open_places(grad_output, q, k, v, given)
    return tuple(unspecified_where(gradient, places[name]) for name, gradient in zip("qkv", gradients))


def offsets_of(counts: Counts, dtype: type = np.int64) -> np.ndarray:
    """Return the offsets of sequences of these lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(dtype)


@st.composite
def matrices(draw: st.DrawFn, dtype: DType, shape: tuple[int, int, int], kinds: Sequence[str] = KINDS) -> np.ndarray:
    """Draw queries, keys or values, sometimes with one special value: each spoils a query, or all of a sequence."""
    rng = draw(GENERATORS)
    if int(np.prod(shape)) <= FEW_ELEMENTS and draw(st.booleans()):
        array = draw(explicit_arrays(dtype, shape))
    else:
        array = values(rng, shape, dtype, draw(st.sampled_from(kinds)))
    if array.size and draw(st.integers(0, 7)) == 7:
        array.flat[rng.integers(array.size)] = rng.choice((np.nan, np.inf, -np.inf, -0.0))
    return array


def slopes_of(heads: int) -> np.ndarray:
    """Return the slopes of ALiBi, ``2^(-8 / heads), 2^(-16 / heads), ...``: powers of two for 1, 2, 4 or 8 heads."""
    return np.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / max(heads, 1)), dtype=np.float32)


def random_slopes(rng: np.random.Generator, heads: int) -> np.ndarray:
    """Return random slopes: those of ALiBi, or of both signs, some of them 0 or large."""
    if rng.integers(2):
        return slopes_of(heads)
    return (rng.normal(0, 1, heads) * rng.choice((0, 0.25, 1, 16), heads)).astype(np.float32)


@st.composite
def counts_of_sequences(draw: st.DrawFn, most: int) -> tuple[list[int], list[int]]:
    """Draw the numbers of queries and of keys of up to three sequences: alike, or apart, or with none of either."""
    batch, rng = draw(st.integers(0, 3)), draw(GENERATORS)
    queries = rng.integers(0, most // max(batch, 1) + 1, batch)
    how = draw(st.sampled_from(("alike", "alike", "apart", "more_keys")))
    keys = rng.integers(0, most // max(batch, 1) + 1, batch)
    keys = queries if how == "alike" else np.maximum(keys, queries) if how == "more_keys" else keys
    return queries.tolist(), keys.tolist()


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw one sequence, or up to three packed ones, of up to 17 tokens; heads that share keys, or not."""
    few = elements <= FEW_ELEMENTS
    columns = draw(st.integers(1, 2) if few else sizes(17, elements).map(lambda n: max(n, 1)))
    kv_heads = draw(st.sampled_from((1, 1, 2) if few else (1, 1, 1, 2, 3, 0)))
    heads = kv_heads * draw(
        st.sampled_from((1,) if kv_heads == 3 or columns * kv_heads * 3 > elements else (1, 1, 2, 3))
    )
    most = min(17, elements // max(heads * columns, 1))
    packed: bool = draw(st.booleans())
    counts = draw(counts_of_sequences(most) if packed else st.tuples(*2 * [sizes(most).map(lambda n: [n])]))
    total_q, total_k = sum(counts[0]), sum(counts[1])
    inputs = {
        "q": draw(matrices(dtype, (total_q, heads, columns))),
        "k": draw(matrices(dtype, (total_k, kv_heads, columns))),
        "v": draw(matrices(dtype, (total_k, kv_heads, columns))),
    }
    if packed:
        kind = draw(st.sampled_from((np.int64, np.int32)))
        inputs["q_offsets"] = offsets_of(counts[0], kind)
        if counts[0] != counts[1] or draw(st.booleans()):
            inputs["k_offsets"] = offsets_of(counts[1], kind)
    rng = draw(GENERATORS)
    # A further choice of Hypothesis would leave fewer of the few cases with several tokens.
    window = WINDOWS[rng.integers(len(WINDOWS))]
    if rng.integers(3) == 0:
        inputs["slopes"] = random_slopes(rng, heads)
    layouts = draw(layouts_for(*inputs, "grad_output"))
    of_numbers = [name for name in inputs if layouts[name] == "expanded" and "offsets" not in name]
    inputs |= {name: repeat_first(inputs[name]) for name in of_numbers}
    grad_output = cotangent(rng, (total_q, heads, columns), dtype)
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output)
    parameters: dict[str, Any] = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from(SCALES))}
    return Case(inputs, grad_output, parameters | {"window": window}, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw two sequences of one to three tokens each."""
    rng, heads, causal = draw(GENERATORS), draw(st.sampled_from((1, 2))), draw(st.booleans())
    counts = rng.integers(1, 4, (2, 2)).tolist()
    return tokens(*counts, heads=(heads, 1), columns=2, causal=causal, size=1.0, numbers=rng)(dtype)


def tokens(
    queries: Counts | int,
    keys: Counts | int | None = None,
    *,
    heads: tuple[int, int] = (1, 1),
    columns: int = 8,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = WHOLE,
    slopes: Sequence[float] | np.ndarray | None = None,
    offset_dtype: type = np.int64,
    size: float = 1.5,
    numbers: np.random.Generator | None = None,
    **layouts: str,
) -> Callable[[DType], Case]:
    """Return a case of ordinary numbers: of one sequence where the numbers of queries and keys are no lists."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(29) if numbers is None else numbers
        counts = [[n] if isinstance(n, int) else list(n) for n in (queries, queries if keys is None else keys)]
        sides = {"q": (sum(counts[0]), heads[0]), "k": (sum(counts[1]), heads[1]), "v": (sum(counts[1]), heads[1])}
        inputs = {name: rng.normal(0, size, (*side, columns)).astype(dtype.numpy) for name, side in sides.items()}
        if not isinstance(queries, int):
            inputs |= {f"{name}_offsets": offsets_of(of, offset_dtype) for name, of in zip("qk", counts)}
        if slopes is not None:
            inputs["slopes"] = np.array(slopes, dtype=np.float32)
        grad_output = cotangent(rng, inputs["q"].shape, dtype)
        if layouts.get("grad_output") == "expanded":
            grad_output = np.full_like(grad_output, -1.5)
        inputs = {name: repeat_first(x) if layouts.get(name) == "expanded" else x for name, x in inputs.items()}
        return Case(inputs, grad_output, {"causal": causal, "scale": scale, "window": window}, layouts)

    return make


def without(name: str, case: Case) -> Case:
    """Return the case with None for an optional tensor."""
    return replace(case, inputs={each: x for each, x in case.inputs.items() if each != name})


def changed(make: Callable[[DType], Case], change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[DType], Case]:
    """Return a named case whose inputs, cotangent among them, are changed in place."""

    def made(dtype: DType) -> Case:
        case = make(dtype)
        arrays = {**case.inputs, "grad_output": case.grad_output}
        change(arrays)
        grad_output = arrays.pop("grad_output")
        return replace(case, inputs=arrays, grad_output=grad_output)

    return made


def nothing_finite_in_the_second(arrays: dict[str, np.ndarray]) -> None:
    """Put NaN and infinities into the second of three sequences: they must not affect the first and the third."""
    first_q, end_q, first_k, end_k = (arrays[name][i] for name in ("q_offsets", "k_offsets") for i in (1, 2))
    arrays["q"][first_q:end_q], arrays["grad_output"][first_q:end_q] = np.inf, np.nan
    arrays["k"][first_k:end_k], arrays["v"][first_k:end_k] = np.nan, np.inf


def scores_that_rise(arrays: dict[str, np.ndarray]) -> None:
    """Give each key a larger score than those before it, so that the running maximum changes at every step."""
    arrays["q"][:] = 2
    arrays["k"][:] = np.linspace(-8, 8, len(arrays["k"]))[:, None, None]


def scores_of_minus_infinity_first(arrays: dict[str, np.ndarray]) -> None:
    """Give the first keys, at least as many as a block of any kernel has, scores of -inf."""
    arrays["q"][:] = 1
    arrays["k"][:256, :, 0] = -np.inf


def scores_far_from_0(arrays: dict[str, np.ndarray]) -> None:
    """Set scores whose exponential overflows unless the maximum is subtracted, and others far below."""
    arrays["q"][:, ::2], arrays["q"][:, 1::2] = 16, -16
    arrays["k"][:] = 24 + np.arange(len(arrays["k"]))[:, None, None] % 4


def products_that_overflow(arrays: dict[str, np.ndarray]) -> None:
    """Let products of the cotangent and the values overflow where weights are small, and no row sum of dO * O."""
    scores_that_rise(arrays)
    arrays["v"][:], arrays["grad_output"][:] = 0, ml_dtypes.finfo(arrays["v"].dtype).max
    arrays["v"][-2] = 4


def values_with_an_offset(arrays: dict[str, np.ndarray]) -> None:
    """Give values and cotangents a mean: their products are large, and nearly all of them cancel in dq.

    With centered Gaussian numbers hardly anything cancels, and a mistake in the row sum of dO * O does not show.
    """
    arrays["v"][:] = arrays["v"] * 0.25 + 4
    arrays["grad_output"][:] = arrays["grad_output"] * 0.25 + 2


def one_special_in_turn(arrays: dict[str, np.ndarray]) -> None:
    """Make one number of q, k, v and the cotangent not finite, each in its own sequence."""
    special = [np.nan, np.inf, -np.inf]
    places = [(name, value) for name in ("q", "k", "v", "grad_output") for value in special]
    for i, (name, value) in enumerate(places):
        at = arrays["q_offsets" if name in ("q", "grad_output") else "k_offsets"][i]
        arrays[name][at + 1, 0, 1] = value


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_sequences": tokens([], []),
    "no_queries": tokens([0, 0], [3, 1], heads=(2, 1)),
    "no_keys": tokens(3, 0, heads=(2, 2)),
    "no_heads": tokens([2, 1], heads=(0, 0)),
    "one_token": tokens(1, columns=1),
    "products_that_overflow": changed(tokens(3, 8, columns=1), products_that_overflow),
    # Sequences as long as their keys, with fewer and with more keys than queries, with none of either.
    "causal": tokens([5, 4, 2, 3, 0], [5, 2, 6, 0, 4], heads=(4, 2), columns=12, causal=True),
    "not_causal": tokens([5, 4, 2, 3, 0], [5, 2, 6, 0, 4], heads=(4, 2), columns=12),
    "keys_like_queries": changed(
        tokens([4, 1, 0, 6], heads=(2, 1), causal=True, offset_dtype=np.int32), lambda arrays: arrays.pop("k_offsets")
    ),
    "heads_in_groups_causal": tokens([3, 5], [4, 7], heads=(6, 3), columns=5, causal=True),
    "heads_of_64_columns": tokens(20, heads=(2, 1), columns=64, causal=True),
    # Past blocks of queries and of keys by one, and at their end.
    # With queries that see no key, and past blocks of keys, and of queries, that none of a block sees.
    "window": tokens([5, 4, 2, 3, 0, 9], [5, 2, 6, 0, 4, 3], heads=(4, 2), columns=12, window=(2, 1)),
    "window_past_blocks": tokens([70, 3], [200, 5], heads=(2, 1), columns=8, causal=True, window=(20, -1)),
    "window_of_few_keys": tokens(150, 123, columns=4, window=(0, 9)),
    # Queries far before and behind the keys, and past blocks of both.
    "slopes": tokens([5, 4, 2, 3, 0, 9], [5, 2, 6, 0, 4, 3], heads=(4, 2), columns=12, slopes=(0.5, 0, -0.25, 4)),
    "slopes_causal_past_blocks": tokens([70, 3], [200, 5], heads=(2, 1), causal=True, slopes=slopes_of(2)),
    "slopes_in_a_window": tokens(
        [150, 20], [130, 40], heads=(3, 3), columns=4, window=(20, 9), slopes=(-1, 1e-3, 3), offset_dtype=np.int32
    ),
    "past_a_block": tokens(65, 65, columns=17),
    # The first query of a tile sees all keys of a tile but the last.
    "many_queries_causal": tokens(133, 67, columns=4, causal=True),
    # Past several blocks of keys, and after them a sequence that must not be known of.
    "many_keys_causal": changed(
        tokens([3, 2, 130], [290, 3, 150], heads=(2, 1), columns=40, causal=True), nothing_finite_in_the_second
    ),
    "many_sequences": tokens([1, 3, 0, 2] * 4, [2, 1, 1, 0] * 4, columns=4, causal=True),
    # A warp or a program looks at the offsets of some of them at a time.
    "sequences_past_128": tokens([0] * 127 + [1, 2, 3], [0] * 126 + [1, 2, 1, 3], columns=1),
    "columns_past_64": tokens(4, 6, columns=65, causal=True),
    "most_columns": tokens(1, 2, columns=256),
    "queries_as_part_of_qkv": tokens(
        [4, 5], heads=(2, 2), columns=16, q="sliced_rows", k="cut_from_wider", v="transposed"
    ),
    "misaligned": tokens(5, 6, columns=16, q="misaligned", k="misaligned", v="misaligned", grad_output="misaligned"),
    "offsets_with_gaps": tokens([2, 0, 3], [1, 4, 2], q_offsets="sliced_columns", k_offsets="sliced_rows"),
    "nothing_finite_in_another_sequence": changed(
        tokens([3, 4, 5], [4, 3, 6], heads=(2, 1), causal=True), nothing_finite_in_the_second
    ),
    "one_special_in_turn": changed(tokens([2] * 12, [3] * 12, columns=3), one_special_in_turn),
    "scores_that_rise": changed(tokens(3, 150, columns=4), scores_that_rise),
    "scores_of_minus_infinity_first": changed(tokens(2, 260, columns=4), scores_of_minus_infinity_first),
    "scores_far_from_0": changed(tokens(4, 40, heads=(2, 1), columns=8, scale=1.0), scores_far_from_0),
    "values_with_an_offset": changed(tokens(12, 20, columns=16, scale=0.125), values_with_an_offset),
}


def _ordinary(case: Case) -> bool:
    """Return whether all numbers are finite, and their products far from the ends of the range."""
    arrays = [*(case[name] for name in "qkv"), case.grad_output]
    return all(np.isfinite(x.astype(np.float64)).all() and (abs(x.astype(np.float64)) < 2.0**6).all() for x in arrays)


def _sequences(case: Case, masked: bool = False) -> Iterator[oracle.Sequence]:
    """Yield a case's sequences, with or without its mask."""
    causal, window = case.parameters.get("causal", False), case.parameters.get("window", WHOLE)
    given = case.inputs.get("q_offsets"), case.inputs.get("k_offsets")
    return oracle.sequences(case["q"], case["k"], *given, *((causal, window) if masked else (False, WHOLE)))


def _has_keys(case: Case) -> np.ndarray:
    """Return a mask of the queries that see a key, ``[total_q, 1, 1]``."""
    found = np.zeros(case["q"].shape[0], dtype=bool)
    for each in _sequences(case, masked=True):
        found[each.queries] = each.visible.any(axis=-1)
    return found[:, None, None]


def equal_values_are_the_output(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The weights of a query sum to 1: where all values are alike, the output is that value; 0 without keys."""
    if not _ordinary(case):
        return
    there = _has_keys(case)
    output = evaluate(case.with_inputs(v=np.full_like(case["v"], 1.5))).output
    yield equal_where(there, output, Bounded.exact(np.full(output.shape, dtype.wide(1.5)), output.arithmetic))
    yield equals_exactly(only(~there, output), 0)


def keys_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Without a mask or slopes, reordering the keys and values of each sequence only reorders their gradients."""
    plain = without("slopes", case).with_parameters(causal=False, window=WHOLE)
    order, rng = np.arange(case["k"].shape[0]), np.random.default_rng(case["k"].size)
    for each in _sequences(case):
        order[each.keys] = rng.permutation(order[each.keys])
    here, there = evaluate(plain), evaluate(plain.with_inputs(k=case["k"][order], v=case["v"][order]))
    yield Relation(here.output, there.output)
    yield Relation(here.gradients["q"], there.gradients["q"])
    for name in "kv":
        yield Relation(here.gradients[name][order], there.gradients[name])


def a_constant_added_to_all_keys_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """It adds the same to all scores of a query: the output and the gradients of k and v do not change."""
    k: np.ndarray = case["k"].astype(dtype.wide)
    if not _ordinary(case) or not k.size:
        return
    moved = (k + 2).astype(dtype.numpy)
    if ((moved.astype(dtype.wide) - 2) != k).any():
        # Whole numbers can be moved without being rounded.
        case = case.with_inputs(k=np.rint(k).astype(dtype.numpy))
        moved = (np.rint(k) + 2).astype(dtype.numpy)
    here, there = evaluate(case), evaluate(case.with_inputs(k=moved))
    yield Relation(here.output, there.output)
    for name in "kv":
        yield Relation(here.gradients[name], there.gradients[name])


def sequences_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The last sequence of a batch has the same results by itself, without offsets."""
    if "q_offsets" not in case.inputs or len(case["q_offsets"]) < 2:
        return
    queries, keys, *_ = list(_sequences(case))[-1]
    alone = without("k_offsets", without("q_offsets", case))
    alone = alone.with_inputs(q=case["q"][queries], k=case["k"][keys], v=case["v"][keys])
    here, there = evaluate(case), evaluate(replace(alone, grad_output=case.grad_output[queries]))
    yield Relation(here.output[queries], there.output)
    yield Relation(here.gradients["q"][queries], there.gradients["q"])
    for name in "kv":
        yield Relation(here.gradients[name][keys], there.gradients[name])


def heads_of_a_group_share_their_keys(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With a copy of its keys and values for each head nothing changes, and the gradients of copies add up."""
    heads, kv_heads = case["q"].shape[1], case["k"].shape[1]
    if not heads or heads == kv_heads:
        return
    group = heads // kv_heads
    copies = {name: np.repeat(case[name], group, axis=1) for name in "kv"}
    here, there = evaluate(case), evaluate(case.with_inputs(**copies))
    yield Relation(here.output, there.output)
    yield Relation(here.gradients["q"], there.gradients["q"])
    for name in "kv":
        apart = there.gradients[name]
        parts = apart.reshape(apart.shape[0], kv_heads, group, apart.shape[2])
        total = np.sum(parts, axis=2)
        finite = np.isfinite(here.gradients[name].value) & np.isfinite(total.value)
        yield equal_where(finite, here.gradients[name], total)


def slopes_of_0_change_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """They give the results without slopes."""
    slopes = np.zeros(case["q"].shape[1], dtype=np.float32)
    here, there = evaluate(without("slopes", case)), evaluate(case.with_inputs(slopes=slopes))
    yield Relation(here.output, there.output)
    for name in "qkv":
        yield Relation(here.gradients[name], there.gradients[name])


def slopes_are_a_column_of_a_causal_query(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A causal query's bias is the place of each key times the slope, less a constant: a further column of q and k."""
    heads, columns = case["q"].shape[1:]
    if not _ordinary(case) or columns == MOST_COLUMNS:
        return
    # Powers of 2, so that no product is rounded.
    slopes = 2.0 ** -(np.arange(heads, dtype=np.float32) % 8)
    case = case.with_parameters(causal=True, scale=0.5)
    place = np.zeros((*case["k"].shape[:2], 1), dtype=dtype.numpy)
    for each in _sequences(case):
        place[each.keys] = np.arange(each.keys.stop - each.keys.start)[:, None, None]
    slope = np.broadcast_to(2 * slopes[:, None], (*case["q"].shape[:2], 1)).astype(dtype.numpy)
    more = {"q": slope, "k": place, "v": np.zeros_like(place)}
    wider = {name: np.concatenate([case[name], x], axis=-1) for name, x in more.items()}
    grad_output = np.concatenate([case.grad_output, np.zeros_like(slope)], axis=-1)
    here = evaluate(case.with_inputs(slopes=slopes))
    there = evaluate(replace(without("slopes", case).with_inputs(**wider), grad_output=grad_output))
    yield Relation(here.output, there.output[..., :columns])
    for name in "qkv":
        yield Relation(here.gradients[name], there.gradients[name][..., :columns])


def the_future_does_not_matter(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With a causal mask, the last key and value of a sequence affect only the last query."""
    causal = case.with_parameters(causal=True)
    others = np.ones(case["q"].shape[0], dtype=bool)
    k, v = case["k"].copy(), case["v"].copy()
    for queries, keys, *_ in _sequences(case):
        if queries.stop > queries.start and keys.stop > keys.start:
            others[queries.stop - 1] = False
            k[keys.stop - 1], v[keys.stop - 1] = -k[keys.stop - 1], 0.5
    where = others[:, None, None]
    here, there = evaluate(causal), evaluate(causal.with_inputs(k=k, v=v))
    yield equal_where(where, here.output, there.output)
    yield equal_where(where, here.gradients["q"], there.gradients["q"])


def gradients_of_keys_sum_to_0(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The weights of a query do not change where all scores do: under a constant q the gradients of k sum to 0."""
    if not _ordinary(case):
        return
    gradient = evaluate(case.with_inputs(q=np.full_like(case["q"], 0.5))).gradients["k"]
    for each in _sequences(case):
        total = np.sum(gradient[each.keys], axis=0)
        yield Relation(total, Bounded.exact(np.zeros_like(total.value), total.arithmetic))


ARGUMENTS = arguments_of(
    "attention", {"total_q": 5, "heads": 6, "head_size": 4, "total_k": 7, "kv_heads": 3, "batch": 2}
)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


errors = (
    *ARGUMENTS.errors,
    ARGUMENTS.wrong("heads_no_multiple", ValueError, "k", {"k": _ones(7, 4, 4), "v": _ones(7, 4, 4)}),
    ARGUMENTS.wrong("no_heads_of_keys", ValueError, "k", {"k": _ones(7, 0, 4), "v": _ones(7, 0, 4)}),
    ARGUMENTS.wrong("no_columns", ValueError, "q", {"q": _ones(5, 6, 0), "k": _ones(7, 3, 0), "v": _ones(7, 3, 0)}),
    ARGUMENTS.wrong(
        "too_many_columns", ValueError, "q", {"q": _ones(5, 6, 257), "k": _ones(7, 3, 257), "v": _ones(7, 3, 257)}
    ),
    ARGUMENTS.wrong("k_offsets_alone", ValueError, "q_offsets", {"q_offsets": None}),
    ARGUMENTS.wrong("slopes_with_a_gradient", ValueError, "slopes", {"slopes": torch.ones(6, requires_grad=True)}),
    ARGUMENTS.wrong("k_offsets_left_out", ValueError, "k_offsets", {"k_offsets": None}),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Count two products over the visible keys forward, and five backward, where the scores are computed again."""
    left, right = case.parameters.get("window", WHOLE)
    right = 0 if case.parameters.get("causal", False) else right
    pairs = sum(sum_within(queries, keys, left, right) for queries, keys in _lengths(case))
    q, k = case["q"].nbytes, case["k"].nbytes
    product = 2 * pairs * case["q"].shape[1] * case["q"].shape[2]
    return Cost(2 * q + 2 * k, 2 * product), Cost(4 * q + 4 * k, 5 * product)


def sum_within(queries: int, keys: int, left: int, right: int) -> int:
    """Return the number of pairs within a window of keys. A causal one ends at 0."""
    place = np.arange(queries) + keys - queries
    begins = np.maximum(place - left, 0) if left >= 0 else 0 * place
    ends = np.minimum(place + right + 1, keys) if right >= 0 else keys
    return int(np.maximum(ends - begins, 0).sum())


def _lengths(case: Case) -> Iterator[tuple[int, int]]:
    """Return the numbers of queries and keys of each sequence."""
    if "q_offsets" not in case.inputs:
        yield case["q"].shape[0], case["k"].shape[0]
        return
    ends_q = case["q_offsets"]
    yield from zip(np.diff(ends_q).tolist(), np.diff(case.inputs.get("k_offsets", ends_q)).tolist())


def other_offsets(case: Case) -> dict[str, np.ndarray]:
    """Return the offsets of the same sequences in reverse order."""
    return {name: reverse_offsets(case[name]) for name in ("q_offsets", "k_offsets") if name in case.inputs}


def begun(make: Callable[[DType], Case], queries: int, keys: int, heads: int, kv_heads: int) -> Make:
    """Return a workload of one sequence. The oracle evaluates the first queries and keys of its first heads.

    The cotangent is 0 past these queries, so that the first results are those of the part alone. A causal query must
    see none of the keys past the part.
    """

    def made(dtype: DType) -> Workload:
        case = make(dtype)
        grad_output = case.grad_output.copy()
        grad_output[queries:] = 0
        inputs = {"q": case["q"][:queries, :heads], "k": case["k"][:keys, :kv_heads], "v": case["v"][:keys, :kv_heads]}
        part = replace(case, inputs=inputs, grad_output=grad_output[:queries, :heads])
        return Workload(case=replace(case, grad_output=grad_output), part=part)

    return made


def uneven(batch: int, most: int) -> list[int]:
    """Return lengths of sequences, from about an eighth of the most on."""
    return [most - most * (7 * i % batch) * 7 // (8 * batch) for i in range(batch)]


BATCHED = ("q", "k", "v", "q_offsets", "k_offsets")
workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {
        "small": whole(tokens(32, heads=(2, 1), columns=32, causal=True)),
        "ragged": whole(tokens([13, 5, 21], [17, 5, 24], heads=(2, 1), columns=20)),
    },
    "cuda": {
        "small": whole(tokens(256, heads=(8, 2), columns=64, causal=True, size=1.0)),
        # A long prompt of a model with heads in groups, and the same where every token sees every other.
        "causal": begun(tokens(16384, heads=(4, 1), columns=128, causal=True, size=1.0), 256, 256, 4, 1),
        "full": begun(tokens(16384, heads=(4, 1), columns=128, size=1.0), 32, 16384, 4, 1),
        "window": begun(
            tokens(16384, heads=(4, 1), columns=128, causal=True, window=(1023, 0), size=1.0), 256, 256, 4, 1
        ),
        "batch": tiled(tokens([512], heads=(16, 4), columns=128, causal=True, size=1.0), 8, *BATCHED),
        "ragged": whole(tokens(uneven(8, 384), heads=(8, 2), columns=128, causal=True, size=1.0)),
    },
}


def of_sizes(given: Mapping[str, int]) -> Callable[[DType], Case]:
    """Return a named case of chosen sizes, causal where the head_size is odd; two heads share their keys."""
    columns = given["head_size"]
    return tokens(given["total_q"], given["total_k"], heads=(2, 1), columns=columns, causal=columns % 2 == 1, size=1.0)


sized = Sized(
    {"total_q": 2, "total_k": 3, "head_size": 4},
    of_sizes,
    allows=lambda given: min(given.values()) > 0 and given["head_size"] <= MOST_COLUMNS,
    # Kernels compute the scores of whole tiles.
    largest=lambda given: float(max(given["total_q"], 64)) * max(given["total_k"], 64),
)

operation = Operation(
    name="attention",
    forward=forward,
    backward=backward,
    differentiable=("q", "k", "v"),
    cases=cases,
    examples=examples,
    smooth=smooth,
    # No input is batched: sequences are as long as the offsets say.
    batched={},
    laws=(
        equal_values_are_the_output,
        keys_may_change_places,
        a_constant_added_to_all_keys_changes_nothing,
        sequences_stand_alone,
        heads_of_a_group_share_their_keys,
        slopes_of_0_change_nothing,
        slopes_are_a_column_of_a_causal_query,
        the_future_does_not_matter,
        gradients_of_keys_sum_to_0,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    # Of a larger scale the largest score takes all the weight, and hangs on rounding.
    ranges={"scale": (0.0, 4.0)},
    ordinary=("slopes",),  # they must be finite
    other_integers=other_offsets,
    sized=sized,
    source="Vaswani et al., Attention Is All You Need, 2017; Dao, FlashAttention-2, 2023: causal at the bottom right",
)
