"""The record of paged_attention: one query of each sequence, over keys and values that lie in pages of a cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import paged_attention as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import FEW_ELEMENTS, GENERATORS, layouts_for, repeat_first, sizes, values
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, equals_exactly, only
from fourfold.operations.workloads import Make, Workload, whole

from . import attention

Cache = Callable[[np.random.Generator, tuple[int, ...]], Any]
INPUTS = ("q", "k_cache", "v_cache")


def forward(q: Any, k_cache: Any, v_cache: Any, page_table: np.ndarray, lengths: np.ndarray, scale: float) -> Any:
    """Return the oracle's output, with what the record of attention leaves open."""
    return oracle.forward(q, k_cache, v_cache, page_table, lengths, scale, attend=attention.forward)


# ---- cases


def in_use(case: Case) -> np.ndarray:
    """Return a mask of the used entries of the page table."""
    return np.arange(case["page_table"].shape[1]) * case["k_cache"].shape[1] < case["lengths"][:, None]


def used_tokens(case: Case) -> np.ndarray:
    """Return a mask of the tokens in the cache that belong to a sequence, ``[pages, page_size, 1, 1]``."""
    pages, page_size = case["k_cache"].shape[:2]
    found = np.zeros((pages, page_size), dtype=bool)
    for table, length in zip(case["page_table"], case["lengths"].tolist()):
        tokens = np.arange(length)
        found[table[tokens // page_size], tokens % page_size] = True
    return found[..., None, None]


def replace_unused(case: Case, number: float, entry: int) -> Case:
    """Replace all that no sequence uses: tails of pages, other pages, entries of the table."""
    there, caches = used_tokens(case), {name: case[name] for name in INPUTS[1:]}
    others = {name: np.where(there, x, np.array(number, x.dtype)) for name, x in caches.items()}
    table = np.where(in_use(case), case["page_table"], np.int32(entry))
    return case.with_inputs(page_table=table, **others)


def case_of(
    rng: np.random.Generator,
    lengths: Sequence[int],
    page_size: int,
    heads: tuple[int, int],
    columns: int,
    dtype: DType,
    more: tuple[int, int] = (1, 2),
    kinds: Sequence[str] = ("normal",) * 3,
    scale: float = 0.25,
    layouts: Mapping[str, str] | None = None,
) -> Case:
    """Return a case of sequences whose pages lie in any order; unused numbers are NaN, and -1 in the table.

    Args:
        rng: the source of the numbers.
        lengths: the tokens of each sequence.
        page_size: the tokens of a page.
        heads: of queries and of keys.
        columns: the numbers of a head.
        dtype: of the tensors.
        more: entries of the table, and pages, that no sequence needs.
        kinds: of the numbers of q, k_cache and v_cache.
        scale: of the scores.
        layouts: of the inputs.
    """
    counts = [-(-length // page_size) for length in lengths]
    table = np.full((len(lengths), max(counts, default=0) + more[0]), -1, np.int32)
    pages = sum(counts) + more[1]
    table[np.arange(table.shape[1]) < np.array(counts, int)[:, None]] = rng.permutation(pages)[: sum(counts)]
    shapes = (len(lengths), heads[0], columns), *2 * ((pages, page_size, heads[1], columns),)
    inputs = {name: values(rng, shape, dtype, kind) for name, shape, kind in zip(INPUTS, shapes, kinds)}
    inputs |= {"page_table": table, "lengths": np.array(lengths, np.int32)}
    case = Case(inputs, np.zeros(shapes[0], dtype.numpy), {"scale": scale})
    return replace(replace_unused(case, np.nan, -1), layouts=layouts or {})


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw up to three sequences of up to 40 tokens, some numbers not finite; heads that share keys, or not."""
    few, rng = elements <= FEW_ELEMENTS, draw(GENERATORS)
    columns = draw(st.integers(1, 2) if few else sizes(33, elements).map(lambda n: min(max(n, 1), elements)))
    count = min(draw(st.sampled_from((1, 2, 3, 0) if few else (1, 1, 2, 2, 3, 3, 0))), elements // columns)
    # The elements are room for the heads of all sequences, and for the heads of all tokens of a cache.
    most = elements // (max(count, 1) * columns)
    kv_heads = min(draw(st.sampled_from((1, 1, 2) if few else (1, 1, 2, 3))), most)
    heads = kv_heads * min(draw(st.sampled_from((1,) if few else (1, 2, 4, 17))), most // kv_heads)
    room = elements // (kv_heads * columns)
    page_size = min(draw(st.sampled_from((1, 2, 3, 4, 8, 16))), room)
    pages = room // page_size
    longest = min(40, pages // max(count, 1) * page_size)
    lengths = [draw(st.integers(0, longest)) if few else int(rng.integers(longest + 1)) for _ in range(count)]
    spare = pages - sum(-(-length // page_size) for length in lengths)
    kinds = [draw(st.sampled_from(attention.KINDS)) for _ in INPUTS]
    # A half type has no 1.3.
    scale = draw(st.sampled_from((0.25, 1.0, 1.3)))
    more = draw(st.integers(0, 2)), min(draw(st.integers(0, 2)), spare)
    case = case_of(rng, lengths, page_size, (heads, kv_heads), columns, dtype, more, kinds, scale)
    if draw(st.integers(0, 7)) == 7:
        name = draw(st.sampled_from(INPUTS))
        array = case[name].copy()
        if array.size:
            array.flat[rng.integers(array.size)] = rng.choice((np.nan, np.inf, -np.inf, -0.0))
        case = case.with_inputs(**{name: array})
    layouts = draw(layouts_for(*case.inputs))
    # Of equal lengths those with fewer pages in the table would be wrong.
    layouts |= {name: "contiguous" for name in ("page_table", "lengths") if layouts[name] == "expanded"}
    expanded = {name: repeat_first(case[name]) for name in INPUTS if layouts[name] == "expanded"}
    return replace(case.with_inputs(**expanded), layouts=layouts)


def sequences(
    *lengths: int, page_size: int = 4, heads: tuple[int, int] = (1, 1), columns: int = 8, **given: Any
) -> Callable[[DType], Case]:
    """Return a named case: see `case_of`. `given` may have layouts, by input, beside arguments of it."""
    layouts = {name: given.pop(name) for name in (*INPUTS, "page_table", "lengths") if name in given}

    def make(dtype: DType) -> Case:
        case = case_of(np.random.default_rng(39), lengths, page_size, heads, columns, dtype, layouts=layouts, **given)
        expanded = {name: repeat_first(case[name]) for name in INPUTS if layouts.get(name) == "expanded"}
        return replace(case.with_inputs(**expanded), layouts=layouts)

    return make


def changed(make: Callable[[DType], Case], change: Callable[[Case], Case]) -> Callable[[DType], Case]:
    """Return a named case with a change."""
    return lambda dtype: change(make(dtype))


def rising_scores(case: Case) -> Case:
    """Give each token of a page a larger score than those before it, so that the running maximum changes."""
    steps = np.linspace(-8, 8, case["k_cache"].shape[1]).astype(case["q"].dtype)
    k_cache = np.broadcast_to(steps[:, None, None], case["k_cache"].shape).copy()
    return case.with_inputs(q=np.full_like(case["q"], 2), k_cache=k_cache)


def large_scores(case: Case) -> Case:
    """Give all tokens scores of about 400, which differ by ordinary numbers."""
    q, k_cache = np.full_like(case["q"], 8), 8 + case["k_cache"] / 16
    return case.with_inputs(q=q, k_cache=k_cache.astype(q.dtype))


def scores_of_minus_infinity(case: Case) -> Case:
    """Give the tokens of the first page scores of minus infinity."""
    q, k_cache = np.ones_like(case["q"]), case["k_cache"].copy()
    k_cache[case["page_table"][0, 0]] = -np.inf
    return case.with_inputs(q=q, k_cache=k_cache)


LONG: Mapping[str, Any] = {"page_size": 16, "heads": (2, 1), "columns": 4}
examples: Mapping[str, Callable[[DType], Case]] = {
    "no_sequences": sequences(),
    "no_tokens": sequences(0, 0, heads=(4, 2)),
    "no_pages": sequences(0, 0, more=(0, 0)),
    "no_heads": sequences(3, 5, heads=(0, 0)),
    "one_token": sequences(1, page_size=1, columns=1, more=(0, 0)),
    # A page that is full, tails of all sizes, and a sequence without tokens among others.
    "tails_of_pages": sequences(1, 2, 0, 3, 4, 5, 8, 11, heads=(4, 2), columns=16),
    "pages_of_one_token": sequences(7, 3, page_size=1, heads=(2, 1)),
    "a_page_longer_than_a_block": sequences(70, 131, page_size=150, columns=5),
    "heads_in_groups": sequences(9, 20, heads=(6, 3), columns=12),
    "more_heads_in_a_group_than_a_tile": sequences(9, 6, heads=(34, 2), columns=4),
    "more_heads_in_a_group_than_two_tiles": sequences(5, heads=(65, 1), columns=2),
    "head_of_64_columns": sequences(21, 40, page_size=16, heads=(4, 1), columns=64),
    "columns_past_128": sequences(17, columns=129),
    "most_columns": sequences(3, 17, columns=256),
    # More tokens than a split has at least, in several splits. In the second case the last splits have no tokens of a
    # short sequence, and one sequence ends with a split.
    "splits": sequences(300, 17, **LONG),
    "splits_without_tokens": sequences(1, 0, 64, 65, 129, 700, **LONG),
    "one_split_more_than_a_block": sequences(257, 256, 255, more=(0, 1), **LONG),
    "scores_that_rise": changed(sequences(40, 300, more=(1, 0), **LONG), rising_scores),
    # Exponentials of such scores overflow, and so do those of their sum; and the first block of tokens has no weight.
    "large_scores_in_splits": changed(sequences(300, 200, scale=1.3, **LONG), large_scores),
    "minus_infinity_before_others": changed(sequences(150, page_size=64, columns=4), scores_of_minus_infinity),
    "entries_past_the_end_are_large": changed(
        sequences(3, 9), lambda case: replace_unused(case, np.nan, np.iinfo(np.int32).max)
    ),
    "infinities_past_the_end": changed(sequences(6, 7, 1), lambda case: replace_unused(case, np.inf, 0)),
    "one_page_of_two_sequences": changed(
        sequences(4, 4, more=(0, 0)), lambda case: case.with_inputs(page_table=np.zeros_like(case["page_table"]))
    ),
    "caches_are_parts_of_one": sequences(
        9, 6, heads=(4, 2), columns=16, k_cache="cut_from_wider", v_cache="sliced_rows"
    ),
    "transposed": sequences(9, 6, heads=(4, 2), columns=16, k_cache="transposed", v_cache="axes_reversed"),
    "misaligned": sequences(9, 6, heads=(4, 2), columns=16, q="misaligned", k_cache="misaligned"),
    "integers_with_gaps": sequences(9, 6, page_table="sliced_columns", lengths="sliced_columns"),
}


# ---- laws


def equal_values_are_the_output(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The weights of a query sum to 1: if all values are equal, the output is that value; 0 without tokens."""
    arrays = [case["q"], np.where(used_tokens(case), case["k_cache"], 0)]
    if all((abs(x.astype(np.float64)) < 2.0**6).all() for x in arrays):
        output = evaluate(case.with_inputs(v_cache=np.full_like(case["v_cache"], 1.5))).output
        there = np.broadcast_to(case["lengths"][:, None, None] > 0, output.shape)
        yield equal_where(there, output, Bounded.exact(np.full(output.shape, dtype.wide(1.5)), output.arithmetic))
        yield equals_exactly(only(~there, output), 0)


def pages_may_lie_anywhere(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """If the pages of a cache and the entries of the table are moved, the result has the same bits."""
    order = np.random.default_rng(case["k_cache"].size).permutation(len(case["k_cache"]))
    table = np.where(in_use(case), case["page_table"], 0)
    table = np.argsort(order).astype(np.int32)[table] if len(order) else table
    moved = {name: case[name][order] for name in INPUTS[1:]}
    there = evaluate(case.with_inputs(page_table=table, **moved))
    yield equals_exactly(evaluate(case).output, there.output.value)


def what_lies_past_the_end_does_not_matter(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Other tails of pages, unused pages and unused entries of the table do not change the bits of the result."""
    here, there = (evaluate(replace_unused(case, *others)) for others in ((1.0, 0), (np.inf, -7)))
    yield equals_exactly(here.output, there.output.value)


def pages_may_be_halved(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Splitting each page into two changes nothing."""
    (pages, page_size, *rest), table = case["k_cache"].shape, case["page_table"]
    if page_size % 2 == 0:
        first = 2 * np.where(in_use(case), table, 0)
        halves = np.stack([first, first + 1], axis=-1).reshape(len(table), 2 * table.shape[1])
        caches = {name: case[name].reshape(2 * pages, page_size // 2, *rest) for name in INPUTS[1:]}
        yield Relation(evaluate(case).output, evaluate(case.with_inputs(page_table=halves, **caches)).output)


def heads_of_a_group_share_their_keys(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With a copy of its keys and values for each head nothing changes."""
    heads, kv_heads = case["q"].shape[1], case["k_cache"].shape[2]
    if heads > kv_heads:
        copies = {name: np.repeat(case[name], heads // kv_heads, axis=2) for name in INPUTS[1:]}
        yield Relation(evaluate(case).output, evaluate(case.with_inputs(**copies)).output)


# ---- the record

ARGUMENTS = arguments_of("paged_attention", {"heads": 6, "head_size": 4, "kv_heads": 3})


def _integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _wrong_integers() -> Iterator[Any]:
    """Return calls with lengths and pages out of their range; only the CPU checks these without waiting."""
    sequences, entries = ARGUMENTS.good["page_table"].shape
    pages, page_size = ARGUMENTS.good["k_cache"].shape[:2]
    for what, length in {"below_0": -1, "past_the_table": entries * page_size + 1, "far_away": 2**31 - 1}.items():
        wrong = _integers(*[length] * sequences)
        yield ARGUMENTS.wrong(f"lengths_{what}", ValueError, "lengths", {"lengths": wrong}, devices=("cpu",))
    for what, page in {"below_0": -1, "past_the_pages": pages, "far_away": 2**31 - 1}.items():
        changes = {"page_table": torch.full((sequences, entries), page, dtype=torch.int32)}
        changes["lengths"] = _integers(*[page_size + 1] * sequences)
        yield ARGUMENTS.wrong(f"pages_{what}", ValueError, "page_table", changes, devices=("cpu",))


def _caches(*shape: int) -> dict[str, torch.Tensor]:
    return {"k_cache": torch.ones(shape), "v_cache": torch.ones(shape)}


def _wrong_sizes() -> Iterator[Any]:
    pages, page_size, kv_heads, columns = ARGUMENTS.good["k_cache"].shape
    sequences, heads, _ = ARGUMENTS.good["q"].shape
    for what, count in {"heads_no_multiple": 4, "no_heads_of_keys": 0}.items():
        yield ARGUMENTS.wrong(what, ValueError, "k_cache", _caches(pages, page_size, count, columns))
    yield ARGUMENTS.wrong("no_tokens_in_a_page", ValueError, "k_cache", _caches(pages, 0, kv_heads, columns))
    for what, count in {"no_columns": 0, "too_many_columns": 257}.items():
        changes = {"q": torch.ones(sequences, heads, count), **_caches(pages, page_size, kv_heads, count)}
        yield ARGUMENTS.wrong(what, ValueError, "q", changes)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Keys and values of all tokens are read once, beside q, the table and the output; products count for each head."""
    tokens, q, k = int(case["lengths"].sum()), case["q"], case["k_cache"]
    moved = 2 * tokens * k.shape[2] * k.shape[3] * k.itemsize + 2 * q.nbytes + case["page_table"].nbytes
    return Cost(moved + case["lengths"].nbytes, 4 * tokens * q.shape[1] * q.shape[2]), Cost(0, 0)


def other_integers(case: Case) -> dict[str, np.ndarray]:
    """Return a token less of each sequence that has several, and the pages of each sequence in reverse order."""
    table, used = case["page_table"].copy(), in_use(case)
    for row, there in zip(table, used):
        row[there] = row[there][::-1]
    return {"page_table": table, "lengths": case["lengths"] - (case["lengths"] > 1).astype(np.int32)}


def repeat_first_tokens(make: Callable[[DType], Case], times: int, sequences: int) -> Make:
    """Return a workload that repeats a case, with own pages each; the oracle evaluates `sequences` of them."""

    def made(dtype: DType) -> Workload:
        part = make(dtype)
        pages = len(part["k_cache"])
        tables = [np.where(in_use(part), part["page_table"] + n * pages, -1) for n in range(times)]
        inputs = {name: np.concatenate([x] * times) for name, x in part.inputs.items()}
        inputs["page_table"] = np.concatenate(tables).astype(np.int32)
        case = replace(part, inputs=inputs, grad_output=np.concatenate([part.grad_output] * times))
        first = {n: x if n in INPUTS[1:] else x[:sequences] for n, x in part.inputs.items()}
        return Workload(case=case, part=replace(part, inputs=first, grad_output=part.grad_output[:sequences]))

    return made


def serving_sequences(*lengths: int, page_size: int = 16) -> Callable[[DType], Case]:
    """Return sequences of a model with 32 heads of 128 columns, 8 of them of keys."""
    return sequences(*lengths, page_size=page_size, heads=(32, 8), columns=128, scale=128**-0.5)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {
        "small": whole(sequences(70, 33, page_size=16, heads=(4, 1), columns=32)),
        "ragged": whole(sequences(13, 5, 0, 21, heads=(2, 2), columns=20)),
    },
    "cuda": {
        "small": whole(serving_sequences(200, 131)),
        # 16 sequences of 8k tokens, and 16 of 32k: of the caches in half types 0.5 and 2 GiB are read.
        "large": repeat_first_tokens(serving_sequences(8192), 16, 1),
        "long": repeat_first_tokens(serving_sequences(32768, page_size=256), 16, 1),
        "batch": repeat_first_tokens(serving_sequences(8192, page_size=64), 64, 1),
        "ragged": repeat_first_tokens(serving_sequences(8000, 1301, 4097, 350), 8, 4),
    },
}


def of_sizes(given: Mapping[str, int]) -> Callable[[DType], Case]:
    """Return a case of chosen sizes; each sequence has one and a half pages, and two heads share their keys."""

    def make(dtype: DType) -> Case:
        count, page_size = given["sequences"], given["page_size"]
        rng, shape = np.random.default_rng(7), (given["pages"], page_size, 1, given["head_size"])
        caches = {name: values(rng, shape, dtype, "normal") for name in INPUTS[1:]}
        # The last page is among them.
        table = given["pages"] - 1 - np.arange(2 * count, dtype=np.int64).reshape(count, 2) % given["pages"]
        inputs = {"q": values(rng, (count, 2, given["head_size"]), dtype, "normal"), **caches}
        inputs |= {"page_table": table.astype(np.int32), "lengths": np.full(count, page_size * 3 // 2, np.int32)}
        return Case(inputs, np.zeros_like(inputs["q"]), {"scale": 0.25})

    return make


operation = Operation(
    name="paged_attention",
    forward=forward,
    backward=lambda *_, **__: (),
    differentiable=(),
    cases=cases,
    examples=examples,
    # No input but q is batched: pages belong to any sequence.
    batched={},
    laws=(
        equal_values_are_the_output,
        pages_may_lie_anywhere,
        what_lies_past_the_end_does_not_matter,
        pages_may_be_halved,
        heads_of_a_group_share_their_keys,
    ),
    errors=(*ARGUMENTS.errors, *_wrong_sizes(), *_wrong_integers()),
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    other_integers=other_integers,
    sized=Sized(
        {"sequences": 2, "pages": 3, "page_size": 4, "head_size": 4},
        of_sizes,
        allows=lambda given: min(given.values()) > 0 and given["head_size"] <= attention.MOST_COLUMNS,
        # Kernels compute the scores of two heads and of tiles of 64 tokens.
        largest=lambda given: 2.0 * given["sequences"] * max(2 * given["page_size"], 64),
    ),
    source="Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023",
)
