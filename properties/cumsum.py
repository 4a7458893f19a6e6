"""The record of cumsum: sums along the last axis, of whole rows or of their segments, from either end."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from fourfold.oracles import cumsum as oracle
from hypothesis import strategies as st

from fourfold.declaration.drawing import reverse_offsets
from fourfold.inputs.arrays import (
    GENERATORS,
    KINDS,
    arrays,
    cotangent,
    layouts_for,
    repeat_first,
    rows_and_cols,
    values,
)
from fourfold.inputs.rows import row_examples
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import Values, integers, tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, exactly
from fourfold.operations.workloads import Make, tiled, whole

# Of sums of huge numbers nothing is known but the first few.
ROW_KINDS = tuple(kind for kind in KINDS if kind != "huge")


def cut(rng: np.random.Generator, n: int, segments: int) -> np.ndarray:
    """Return offsets of this many segments of n elements, some of them empty, most of them of any length."""
    within = rng.integers(0, n + 1, max(segments - 1, 0))
    return np.sort(np.concatenate([[0], np.where(rng.random(within.shape) < 0.1, 0, within), [n]]))


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw few long rows or many short ones, half of them in segments, summed from either end."""
    shape = draw(rows_and_cols(elements))
    inputs, rng = {"x": draw(arrays(dtype, shape, ROW_KINDS))}, draw(GENERATORS)
    if draw(st.booleans()):
        most = min(max(shape[-1], 2), elements // 2, 30)
        offsets = cut(rng, shape[-1], int(rng.integers(1, most + 1)))
        inputs["offsets"] = offsets.astype(draw(st.sampled_from((np.int64, np.int32))))
    layouts = draw(layouts_for(*inputs, "grad_output"))
    grad_output = cotangent(rng, shape, dtype)
    if layouts["x"] == "expanded":
        inputs["x"] = repeat_first(inputs["x"])
    if layouts["grad_output"] == "expanded":
        # Constant along the first or the last axis, as the backward pass of a sum over that axis makes it.
        grad_output = repeat_first(grad_output, draw(st.sampled_from((0, -1))))
    parameters = {"exclusive": draw(st.booleans()), "reverse": draw(st.booleans())}
    return Case(inputs, grad_output, parameters, layouts)


def example(
    of: Any, /, *ends: int, index: type = np.int64, exclusive: bool = False, reverse: bool = False, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of given rows, or of a function that makes them, and of segments with these ends, if any."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(43)
        given = np.asarray(of(rng, dtype) if callable(of) else of).astype(dtype.numpy)
        inputs = {"x": repeat_first(given) if layouts.get("x") == "expanded" else given}
        if ends:
            inputs["offsets"] = np.array(ends, dtype=index)
        grad_output = cotangent(rng, given.shape, dtype)
        if layouts.get("grad_output") == "expanded":
            grad_output = np.full_like(grad_output, -1.5)
        return Case(inputs, grad_output, {"exclusive": exclusive, "reverse": reverse}, layouts)

    return make


def rows(*shape: int, ends: tuple[int, ...] = (), kind: str = "normal", **options: Any) -> Callable[[DType], Case]:
    """Return a named case of random rows."""
    return example(lambda rng, dtype: values(rng, shape, dtype, kind), *ends, **options)


def four_directions(name: str, *shape: int, **options: Any) -> dict[str, Callable[[DType], Case]]:
    """Return the same named case four times: with and without the element itself, from the begin and from the end."""
    flags = {"": (False, False), "_exclusive": (True, False), "_reverse": (False, True), "_both": (True, True)}
    return {name + way: rows(*shape, exclusive=e, reverse=r, **options) for way, (e, r) in flags.items()}


def segments_of(count: int, length: int) -> tuple[int, ...]:
    """Return offsets of this many segments, every other one a bit shorter."""
    return (0, *np.cumsum([length - place % 2 for place in range(count)]).tolist())


examples: Mapping[str, Callable[[DType], Case]] = {
    **row_examples(rows),
    # One past a tile of each kernel, and several tiles with a tail: what one tile hands on to the next.
    **four_directions("several_tiles", 2, 2 * 2048 + 5),
    "alike": rows(3, 700, kind="constant"),
    **four_directions("segments", 3, 40, ends=(0, 0, 7, 8, 8, 33, 40, 40)),
    **four_directions("segments_of_several_tiles", 1, 4205, ends=(0, 3, 2100, 2100, 4200, 4205)),
    "no_segments_and_no_columns": rows(3, 0, ends=(0,)),
    "empty_segments_alone": rows(3, 0, ends=(0, 0, 0), index=np.int32),
    "one_segment": rows(2, 33, ends=(0, 33), index=np.int32),
    # More segments than programs take at once.
    "many_segments": rows(2, 75, ends=segments_of(30, 3)),
    "hundreds_of_segments": rows(1, 390, ends=segments_of(260, 2)),
    "offsets_strided": rows(5, 40, ends=(0, 7, 7, 33, 40), offsets="sliced_columns"),
    # A sum of bfloat16 in bfloat16 stops growing at 256, one of float16 in float16 at 2048.
    **four_directions("a_long_row", 1, 40_000),
    "a_long_row_of_ones": example(np.ones((1, 17000))),
    # What lies outside of a segment must not come into it, not even to be subtracted.
    "not_finite_beside_segments": example(
        [[1.0, np.inf, 2.0, 3.0, np.nan, 4.0, 5.0, -np.inf, 6.0]], 0, 2, 4, 5, 7, 9, exclusive=True
    ),
    "large_beside_small": example(np.where(np.arange(64) < 32, 3e4, 1.0)[None], reverse=True),
    "each_entry_in_turn_not_finite": example(lambda rng, dtype: not_finite_in_turn(rng, 17, dtype)),
    "cotangent_of_a_sum": rows(9, 40, grad_output="expanded"),
}


def inclusive_less_exclusive_is_the_element(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The sum up to an element, less that of those before it, is the element."""
    inclusive, exclusive = (evaluate(case.with_parameters(exclusive=e)).output for e in (False, True))
    finite = np.isfinite(inclusive.value) & np.isfinite(exclusive.value)
    yield equal_where(finite, inclusive - exclusive, exactly(case["x"].astype(dtype.wide), inclusive))


def from_the_end_is_the_mirror_image(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Reversed rows, summed from the other end, give the reversed sums."""
    mirrored = case.with_inputs(x=case["x"][..., ::-1]).with_parameters(reverse=not case.parameters["reverse"])
    if "offsets" in case.inputs:
        mirrored = mirrored.with_inputs(offsets=reverse_offsets(case["offsets"]))
    yield Relation(evaluate(mirrored).output[..., ::-1], evaluate(case).output)


def a_segment_does_not_see_the_others(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The sums of the longest segment are those of rows that hold nothing else."""
    if "offsets" not in case.inputs or not case["x"].shape[-1]:
        return
    longest = int(np.argmax(np.diff(case["offsets"])))
    part = slice(*case["offsets"][longest : longest + 2].tolist())
    alone = Case({"x": case["x"][..., part]}, case.grad_output[..., part], case.parameters)
    here, there = evaluate(case), evaluate(alone)
    yield Relation(here.output[..., part], there.output)
    yield Relation(here.gradients["x"][..., part], there.gradients["x"])


def gradients_are_sums_from_the_other_end(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient is the cotangent, summed from the other end."""
    back = case.with_inputs(x=case.grad_output).with_parameters(reverse=not case.parameters["reverse"])
    yield Relation(evaluate(case).gradients["x"], evaluate(back).output)


def segments_in_reverse(case: Case) -> dict[str, np.ndarray]:
    """Return the offsets of segments as long as the case's, in reverse order."""
    return {"offsets": reverse_offsets(case["offsets"])} if "offsets" in case.inputs else {}


FLAG = Values((False,), of_another_type={"a_string": "no", "a_number": 1, "none": None})
ARGUMENTS = Arguments(
    x=tensor("... n"), offsets=integers("segments+1", 0, 1, 1, 2, optional=True), exclusive=FLAG, reverse=FLAG
)
errors = (
    *ARGUMENTS.errors,
    ARGUMENTS.wrong("no_offsets", ValueError, "offsets", {"offsets": torch.ones(0, dtype=torch.int64)}),
    ARGUMENTS.wrong("no_segments", ValueError, "offsets", {"offsets": torch.zeros(1, dtype=torch.int64)}),
    # It would take a wait for a GPU to know of these.
    *(
        ARGUMENTS.wrong(f"offsets_{name}", ValueError, "offsets", {"offsets": torch.tensor(given)}, devices=("cpu",))
        for name, given in {
            "not_from_0": [1, 1, 2],
            "below_0": [-1, 1, 2],
            "not_to_the_end": [0, 1, 1],
            "past_the_end": [0, 1, 3],
            "that_fall": [0, 2, 1, 2],
        }.items()
    ),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Each pass reads as many bytes as x has, and the offsets, and writes as many as x has."""
    x = case["x"]
    each = Cost(sum(array.nbytes for array in case.inputs.values()) + x.nbytes, x.size)
    return each, each


def make_of_sizes(sizes: Mapping[str, int]) -> Callable[[DType], Case]:
    """Return a named case of chosen sizes, in three segments, one of them empty, if the length is no multiple of 3."""
    n = sizes["n"]
    return rows(sizes["..."], n, ends=(0, n // 3, n // 3, n) if n % 3 else ())


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, 256)), "ragged": whole(rows(17, 1001))},
    "cuda": {
        "small": whole(rows(128, 256)),
        "large": tiled(rows(256, 4096), 128, "x"),
        "long_rows": tiled(rows(4, 65536), 64, "x"),
        "longest_rows": tiled(rows(1, 1048576), 64, "x"),
        "segments": tiled(rows(20460, ends=segments_of(40, 512)), 512, "x"),
        "ragged": tiled(rows(33, 1001), 256, "x"),
    },
}

operation = Operation(
    name="cumsum",
    forward=oracle.forward,
    backward=oracle.backward,
    differentiable=("x",),
    cases=cases,
    examples=examples,
    batched={"x": 1},
    laws=(
        inclusive_less_exclusive_is_the_element,
        from_the_end_is_the_mirror_image,
        a_segment_does_not_see_the_others,
        gradients_are_sums_from_the_other_end,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    other_integers=segments_in_reverse,
    sized=Sized({"...": 2, "n": 4}, make_of_sizes),
    source="G. E. Blelloch, Prefix Sums and Their Applications, 1990",
)
