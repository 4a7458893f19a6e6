"""The record of rope: rotary position embedding of tokens at any positions, of pairs half apart or side by side."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from fourfold.oracles import rope as oracle
from hypothesis import strategies as st

from fourfold.inputs.arrays import GENERATORS, arrays, cotangent, layouts_for, leading_axes, repeat_first, sizes
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import Values, integers, tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, equals_exactly
from fourfold.operations.workloads import Make, tiled, whole


def angles(rng: np.random.Generator, count: int, half: int, dtype: DType, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Return cos and sin ``[count, half]`` of random angles, times a scale, as long contexts have it."""
    turn = rng.uniform(-np.pi, np.pi, (count, half))
    return {"cos": (scale * np.cos(turn)).astype(dtype.numpy), "sin": (scale * np.sin(turn)).astype(dtype.numpy)}


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw long sequences or many heads, rotated as a whole, in part or not at all, at given positions or in order."""
    dim = draw(sizes(min(elements, draw(st.sampled_from((8, 64, elements))))))
    heads = draw(sizes(min(elements // max(dim, 1), draw(st.sampled_from((4, elements)))), elements))
    batch = draw(leading_axes(draw(st.sampled_from((1, 1, 2, 3, 4)))))
    tokens = elements // max(dim * heads * int(np.prod(batch)), 1)
    shape = (*batch, draw(sizes(tokens, elements)) if tokens else 0, heads, dim)
    half = draw(st.sampled_from((dim // 2, dim // 2, dim // 4, 0)))
    x, rng = draw(arrays(dtype, shape)), draw(GENERATORS)
    given = draw(st.booleans())
    count = draw(sizes(elements)) + 1 if given else shape[-3] + draw(st.integers(0, 3))
    count = min(count, elements // max(half, 1)) if given else count
    half = min(half, elements // max(count, 1))
    inputs = {"x": x, **angles(rng, count, half, dtype, draw(st.sampled_from((1.0, 1.0, 1.25))))}
    if given:
        inputs["positions"] = rng.integers(0, count, shape[:-2])
    layouts = draw(layouts_for(*inputs, "grad_output"))
    # The axis of heads, or all that come before it, is repeated.
    inputs |= {name: repeat_first(inputs[name]) for name in inputs if layouts[name] == "expanded"}
    grad_output = cotangent(rng, shape, dtype)
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output)
    return Case(inputs, grad_output, {"interleaved": draw(st.booleans())}, layouts)


def tokens(
    *shape: int,
    half: int | None = None,
    interleaved: bool = False,
    given: bool = False,
    spare: int = 0,
    positions_of: int = 11,
    **layouts: str,
) -> Callable[[DType], Case]:
    """Return a case of random tokens ``[..., seq, heads, dim]``, in order or at positions that include the last."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(41)
        count = positions_of if given else shape[-3] + spare
        inputs = {"x": rng.normal(0, 2, shape).astype(dtype.numpy)}
        inputs |= angles(rng, count, shape[-1] // 2 if half is None else half, dtype)
        if given:
            inputs["positions"] = rng.integers(0, count, shape[:-2])
            inputs["positions"].flat[:1] = count - 1
        inputs |= {name: repeat_first(inputs[name]) for name in inputs if layouts.get(name) == "expanded"}
        grad_output = cotangent(rng, shape, dtype)
        if layouts.get("grad_output") == "expanded":
            grad_output = np.full_like(grad_output, -1.5)
        return Case(inputs, grad_output, {"interleaved": interleaved}, layouts)

    return make


def both_ways(name: str, *shape: int, **options: object) -> dict[str, Callable[[DType], Case]]:
    """Return the same named case of pairs half apart, and of neighbours."""
    make: Callable[..., Callable[[DType], Case]] = tokens
    return {f"{name}{what}": make(*shape, interleaved=bool(what), **options) for what in ("", "_interleaved")}


def special_pairs(dtype: DType) -> Case:
    """Pair infinities, NaN and zeros with each other, at angles whose sine or cosine is 0, and at others."""
    special = np.array([np.inf, -np.inf, np.nan, dtype.largest, 0.0, -0.0, dtype.smallest_subnormal, 1.0])
    x = np.stack([a.reshape(-1) for a in np.meshgrid(special, special)], -1).reshape(1, -1, 2).repeat(3, 0)
    table = np.array([[[1.0], [0.0], [0.5]], [[0.0], [-1.0], [0.25]]]).astype(dtype.numpy)
    return Case(
        {"x": x.astype(dtype.numpy), "cos": table[0], "sin": table[1]},
        np.linspace(-2, 3, x.size).reshape(x.shape).astype(dtype.numpy),
        {"interleaved": False},
    )


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_tokens": tokens(2, 0, 3, 8),
    "no_heads": tokens(2, 3, 0, 8),
    "no_columns": tokens(2, 3, 2, 0),
    "one_pair": tokens(1, 1, 2),
    **both_ways("heads_of_llama", 3, 32, 128, spare=5),
    **both_ways("at_given_positions", 3, 7, 3, 16, given=True),
    # The context of Llama 3.1 has 2^17 positions.
    **both_ways("at_positions_of_a_long_context", 2, 9, 1, 4, given=True, positions_of=131_073),
    # GPT-J and GPT-NeoX rotate a part of each head, Phi one that is no power of two.
    **both_ways("in_part", 3, 5, 3, 80, half=16),
    **both_ways("in_part_of_an_odd_dim", 5, 2, 37, half=9, given=True),
    "not_at_all": tokens(3, 2, 16, half=0),
    **both_ways("more_pairs_than_a_block", 2, 1, 4200, half=1050),
    "more_heads_than_a_block": tokens(2, 300, 8),
    "one_token_of_one_head": tokens(1, 1, 64, half=32, given=True),
    "many_tokens": tokens(700, 1, 4, half=1),
    # As a slice of q, k and v in one tensor, and as [batch, heads, seq, dim] with its axes swapped, are.
    **both_ways("heads_with_gaps", 2, 3, 4, 16, x="sliced_rows"),
    **both_ways("cut_from_wider", 2, 3, 4, 16, x="cut_from_wider", grad_output="cut_from_wider"),
    **both_ways("columns_with_gaps", 2, 3, 4, 16, x="sliced_columns", cos="sliced_columns"),
    "transposed": tokens(2, 3, 4, 16, x="transposed", grad_output="axes_reversed", given=True, positions="transposed"),
    "three_axes_of_samples": tokens(2, 3, 2, 3, 2, 8, x="axes_reversed", given=True),
    "one_token_for_all": tokens(2, 3, 2, 8, x="expanded", grad_output="expanded"),
    "positions_of_one_sample": tokens(3, 5, 2, 8, given=True, positions="expanded"),
    "misaligned": tokens(2, 3, 4, 16, x="misaligned", cos="misaligned", grad_output="misaligned"),
    "tables_with_gaps": tokens(2, 3, 4, 16, cos="sliced_rows", sin="transposed", given=True),
    "positions_with_gaps": tokens(2, 9, 2, 8, given=True, positions="sliced_columns"),
    "special_pairs": special_pairs,
}


def halves(case: Case, array: Bounded | np.ndarray) -> tuple:
    """Return the first and the second of each pair of an array of the shape of x, and what has no partner."""
    half = case["cos"].shape[1]
    if case.parameters["interleaved"]:
        return array[..., 0 : 2 * half : 2], array[..., 1 : 2 * half : 2], array[..., 2 * half :]
    return array[..., :half], array[..., half : 2 * half], array[..., 2 * half :]


def pairs_keep_their_length(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The squares of a finite pair sum to those of the input times cos^2 + sin^2."""
    output = evaluate(case).output

    def exact(array: np.ndarray) -> Bounded:
        return Bounded.exact(array.astype(dtype.wide), output.arithmetic)

    at = np.broadcast_to(np.arange(case["x"].shape[-3]), case["x"].shape[:-2])
    at = case.inputs.get("positions", at)
    c, s = (exact(case[name])[at][..., None, :] for name in ("cos", "sin"))
    first, second, _ = halves(case, output)
    was_first, was_second, _ = halves(case, exact(case["x"]))
    was = (was_first * was_first + was_second * was_second) * (c * c + s * s)
    yield equal_where(np.isfinite(was.value), first * first + second * second, was)


def what_has_no_partner_is_copied(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Past the pairs the output is x, and the gradient the cotangent, to the last bit."""
    here = evaluate(case)
    yield equals_exactly(halves(case, here.output)[2], halves(case, case["x"].astype(dtype.wide))[2])
    yield equals_exactly(halves(case, here.gradients["x"])[2], halves(case, case.grad_output.astype(dtype.wide))[2])


def gradients_turn_back(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient is the cotangent, turned by the negative angle."""
    back = evaluate(case.with_inputs(x=case.grad_output, sin=-case["sin"]))
    yield Relation(evaluate(case).gradients["x"], back.output)


def neighbours_and_halves_differ_by_their_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With its columns in the other order, x gives the output of the other kind of pairs, in that order."""
    half, interleaved = case["cos"].shape[1], case.parameters["interleaved"]
    pairs = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half)).T.reshape(-1)
    order = np.concatenate([pairs, np.arange(2 * half, case["x"].shape[-1])])
    other = case.with_inputs(x=case["x"][..., order]).with_parameters(interleaved=not interleaved)
    yield Relation(evaluate(case).output[..., order], evaluate(other).output)


def positions_count_from_0(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Without positions each token is at its place in its sequence.

    A GPU's compiler may fuse other products in the kernel for no positions, which changes last bits.
    """
    shape = case["x"].shape[:-2]
    if case["cos"].shape[0] < shape[-1]:
        return
    given = case.with_inputs(positions=np.broadcast_to(np.arange(shape[-1]), shape).copy())
    absent = replace(case, inputs={name: array for name, array in case.inputs.items() if name != "positions"})
    yield Relation(evaluate(absent).output, evaluate(given).output)


def other_positions(case: Case) -> dict[str, np.ndarray]:
    """Return the next position of each token, and the first after the last."""
    if "positions" not in case.inputs:
        return {}
    return {"positions": (case["positions"] + 1) % max(case["cos"].shape[0], 1)}


ARGUMENTS = Arguments(
    {"dim": 26},
    x=tensor("... seq heads dim"),
    cos=tensor("positions half"),
    sin=tensor("positions half"),
    positions=integers("... seq", 0, 4, 6, optional=True),
    interleaved=Values((False,), of_another_type={"a_string": "neox", "a_number": 1, "none": None}),
)
errors = (
    *ARGUMENTS.errors,
    ARGUMENTS.wrong("two_axes", ValueError, "x", {"x": torch.ones(3, 26), "positions": None}),
    ARGUMENTS.wrong("more_pairs_than_columns", ValueError, "cos", {"x": torch.ones(8, 9, 3, 5, 21)}),
    ARGUMENTS.wrong("fewer_rows_than_tokens", ValueError, "cos", {"x": torch.ones(8, 3, 26), "positions": None}),
    # It would take a wait for a GPU to know of these.
    *(
        ARGUMENTS.wrong(name, ValueError, "positions", {"positions": torch.full((8, 9, 3), at)}, devices=("cpu",))
        for name, at in {"negative": -1, "past_the_rows": 7, "far_past_the_rows": 2**40}.items()
    ),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Each pass reads x or the cotangent, and the tables, and writes a tensor like x; a pair takes six operations."""
    x, half, heads = case["x"], case["cos"].shape[1], case["x"].shape[-2]
    others = sum(array.nbytes for name, array in case.inputs.items() if name != "x")
    each = Cost(2 * x.nbytes + others, 6 * half * heads * int(np.prod(x.shape[:-2])))
    return each, each


AXES = {"seq": 3, "heads": 2, "dim": 4, "positions": 11}


def largest(sizes: Mapping[str, int]) -> float:
    """Return the number of elements of x."""
    return 2.0 * sizes["seq"] * sizes["heads"] * sizes["dim"]


def make_of_sizes(sizes: Mapping[str, int]) -> Callable[[DType], Case]:
    """Return a case of chosen sizes, partly rotated; in order if sizes are multiples of 3, else at given positions."""
    dim, positions = sizes["dim"], sizes["positions"]
    given = bool(dim % 3) or positions != AXES["positions"]
    return tokens(2, sizes["seq"], sizes["heads"], dim, half=dim // 3, given=given, positions_of=positions)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(tokens(2, 16, 4, 64)), "ragged": whole(tokens(13, 3, 37, half=9, given=True))},
    "cuda": {
        "small": whole(tokens(2, 128, 8, 64)),
        # Queries of Llama 3, a decoding step of many sequences, and a part of each head.
        "large": tiled(tokens(1, 2048, 32, 128), 16, "x"),
        "interleaved": tiled(tokens(1, 2048, 32, 128, interleaved=True), 16, "x"),
        "positions": tiled(tokens(256, 32, 128, given=True), 64, "x", "positions"),
        "ragged": tiled(tokens(4, 33, 5, 100, half=25), 512, "x"),
    },
}

operation = Operation(
    name="rope",
    forward=oracle.forward,
    backward=oracle.backward,
    differentiable=("x",),
    cases=cases,
    examples=examples,
    batched={"x": 3, "positions": 1},
    laws=(
        pairs_keep_their_length,
        what_has_no_partner_is_copied,
        gradients_turn_back,
        neighbours_and_halves_differ_by_their_places,
        positions_count_from_0,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    other_integers=other_positions,
    sized=Sized(AXES, make_of_sizes, largest=largest),
    source="Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021",
)
