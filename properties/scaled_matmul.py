"""The record of scaled_matmul: a product of float8 matrices with a float32 scale for each block of them."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from fourfold.oracles import scaled_matmul as oracle
from fourfold.oracles.scaled_matmul import BLOCK, ORDERS, blocks
from hypothesis import strategies as st

from fourfold.inputs.arrays import FEW_ELEMENTS, SEEDS, cotangent, layouts_for, random_size, repeat_first, values
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DTYPES, QUANTISED, DType
from fourfold.numerics.steps.orders import either_formula
from fourfold.operations.arguments import Values, tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Sized
from fourfold.operations.relations import equal_where, only
from fourfold.operations.workloads import Make, Workload, whole

E4M3, FLOAT32 = QUANTISED["float8_e4m3fn"], DTYPES["float32"]
# Kinds of quantised numbers: "codes" are all finite numbers of the type, as often as one another.
KINDS = ("normal", "normal", "codes", "codes", "whole", "constant", "offset", "huge", "tiny")
# Kinds of scales. Those "apart" differ by up to 2^40 from block to block; the "tiny" ones are subnormal numbers.
SCALES = ("ones", "powers_of_2", "of_rows", "of_rows", "apart", "some_zero", "tiny")
# Between these, and with the numbers of float8, no product of a term with its scales leaves float32's normal range,
# whichever factors are multiplied first.
LEAST_SCALE, LARGEST_SCALE = 2.0**-40, 2.0**40
# A tile's rows and columns at most, the sides of matrices none of which is long.
MODEST = 40

# ---- the right results


def forward(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any = None) -> Any:
    """Return the oracle's result, with a bound on the error of each order in which sums and scales are multiplied.

    A scale may be multiplied with a sum, with the other scale, or with each number before it is summed. All of these
    round alike, unless one of them leaves the range of normal numbers on the way. Where a scale is infinite, sums of
    scaled numbers may be NaN though the scaled sum is infinite: nothing is known of such a result.
    """
    found = oracle.forward(a, b, scale_a, scale_b)
    if not isinstance(found, Bounded):
        return found
    orders = ORDERS[1:] if _is_extreme(scale_a.value) or _is_extreme(scale_b.value) else ("dequantised",)
    others = (oracle.forward(a, b, scale_a, scale_b, order=order) for order in orders)
    return functools.reduce(either_formula, others, found)


def _is_extreme(scale: np.ndarray) -> bool:
    size = abs(scale[np.isfinite(scale) & (scale != 0)])
    return bool(((size < LEAST_SCALE) | (size > LARGEST_SCALE)).any())


# ---- cases


def random_float8(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return random float8 numbers of one of `KINDS`."""
    return rng.choice(finite_numbers(), shape) if kind == "codes" else values(rng, shape, E4M3, kind)


def finite_numbers() -> np.ndarray:
    """Return all 254 numbers of float8_e4m3fn, in the order of their bits, zeros of both signs included."""
    codes: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return codes[np.isfinite(codes.astype(np.float32))]


def scales(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return random scales of one of `SCALES`."""
    drawn = np.exp(rng.normal(-3, 1, shape))
    if kind == "ones":
        drawn = np.ones(shape)
    elif kind == "powers_of_2":
        drawn = 2.0 ** rng.integers(-8, 9, shape)
    elif kind == "apart":
        drawn = drawn * 2.0 ** rng.integers(-20, 21, shape)
    elif kind == "some_zero":
        drawn = drawn * (rng.random(shape) < 0.6)
    elif kind == "tiny":
        drawn = np.rint(drawn * 100) * FLOAT32.smallest_subnormal
    return np.asarray(drawn).astype(np.float32)


def make_case(
    dtype: DType,
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    layouts: Mapping[str, str] | None = None,
) -> Case:
    """Return a case whose result has the tested dtype. Of the cotangent nothing but its shape counts."""
    inputs = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    shape = len(a), len(b)
    grad_output = cotangent(np.random.default_rng(shape), shape, dtype)
    return Case(inputs, grad_output, {"out_dtype": dtype.torch}, layouts or {})


def random_extents(rng: np.random.Generator, elements: int) -> tuple[int, int, int]:
    """Draw m, n and k such that neither a, b nor the result has more than `elements` elements."""
    longest = str(rng.choice(["none", "m", "n", "n", "k", "k", "k"]))
    if longest == "none":
        # Sometimes k is a multiple of 16, at which rows may be read by vectors.
        m, n, k = (random_size(rng, min(MODEST, int(elements**0.5))) for _ in range(3))
        return (m, n, -(-k // 16) * 16 if k > 8 and rng.random() < 0.5 else k)
    short = rng.integers(1, 4, 3)
    length = random_size(rng, elements // int(short.max()))
    m, n, k = (length if name == longest else int(size) for name, size in zip("mnk", short))
    return m, n, k


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw quantised matrices of any shapes that fit together, and scales of each kind."""
    rng = np.random.default_rng([draw(SEEDS) for _ in range(3)])
    if elements > FEW_ELEMENTS:
        m, n, k = random_extents(rng, elements)
    else:
        m, n, k = (draw(st.integers(0, int(elements**0.5))) for _ in range(3))
    a, b = (random_float8(rng, shape, draw(st.sampled_from(KINDS))) for shape in ((m, k), (n, k)))
    of_a, of_b = draw(st.sampled_from(SCALES)), draw(st.sampled_from(SCALES[:-1]))
    scale_a, scale_b = scales(rng, (m, blocks(k)), of_a), scales(rng, (blocks(n), blocks(k)), of_b)
    # Only one number, because each NaN spoils a row or a column of the result.
    if a.size and draw(st.integers(0, 7)) == 7:
        strange = (a, scale_a)[draw(st.integers(0, 1))]
        strange.flat[rng.integers(strange.size)] = draw(st.sampled_from((np.nan, np.inf, -np.inf, -0.0)))
    case = make_case(dtype, a, b, scale_a, scale_b)
    layouts = draw(layouts_for(*case.inputs, "grad_output"))
    arrays = {**case.inputs, "grad_output": case.grad_output}
    arrays |= {name: repeat_first(arrays[name]) for name, layout in layouts.items() if layout == "expanded"}
    return Case(arrays, arrays.pop("grad_output"), case.parameters, layouts)


def rows(
    m: int, n: int, k: int, kind: str = "normal", scale: str = "of_rows", **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of random numbers."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(m + 100 * n + 10000 * k)
        a, b = random_float8(rng, (m, k), kind), random_float8(rng, (n, k), kind)
        of_b = "of_rows" if scale == "tiny" else scale
        scale_a, scale_b = scales(rng, (m, blocks(k)), scale), scales(rng, (blocks(n), blocks(k)), of_b)
        return make_case(dtype, a, b, scale_a, scale_b, layouts)

    return make


def example(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Callable[[DType], Case]:
    """Return a named case of given numbers."""

    def make(dtype: DType) -> Case:
        left, right = (np.array(x, np.float32).astype(ml_dtypes.float8_e4m3fn) for x in (a, b))
        return make_case(dtype, left, right, np.array(scale_a, np.float32), np.array(scale_b, np.float32))

    return make


def every_finite_number(dtype: DType) -> Case:
    """Multiply each number of the type, in a and in b, by a few others: all other terms are 0, so nothing is summed."""
    numbers = finite_numbers()
    few: np.ndarray = np.array([1, -448, 2.0**-9, 1.875]).astype(ml_dtypes.float8_e4m3fn)
    a, b = np.zeros((127, 2), few.dtype), np.zeros((8, 2), few.dtype)
    a[:, 0], a[:, 1] = numbers[:127], numbers[127:]
    b[:4, 0], b[4:, 1] = few, few
    of_a, of_b = (np.full(shape, 2.0**-6, np.float32) for shape in ((127, 1), (1, 1)))
    return make_case(dtype, a, b, of_a, of_b)


def nan_of_each_sign(dtype: DType) -> Case:
    """Put NaN, with the bits 0x7f and 0xff, into separate rows of a and of b, and into the tail of a block."""
    rng = np.random.default_rng(5)
    a, b = random_float8(rng, (7, 131), "normal"), random_float8(rng, (6, 131), "normal")
    for matrix in (a, b):
        bits = matrix.view(np.uint8)
        bits[1, 0], bits[2, 130], bits[4, 64] = 0x7F, 0xFF, 0xFF
    return make_case(dtype, a, b, scales(rng, (7, 2), "of_rows"), scales(rng, (1, 2), "of_rows"))


def scales_not_finite(dtype: DType) -> Case:
    """Put NaN and infinities among the scales, also against rows of zeros; each affects only its own rows."""
    case = rows(9, 130, 131)(dtype)
    a, scale_a, scale_b = case["a"].copy(), case["scale_a"].copy(), case["scale_b"].copy()
    a[5] = 0
    scale_a[1, 0], scale_a[2, 1], scale_a[3, 0], scale_a[5, 1] = np.nan, np.inf, -np.inf, np.inf
    scale_b[1, 1] = np.nan
    return case.with_inputs(a=a, scale_a=scale_a, scale_b=scale_b)


def blocks_cancel(dtype: DType) -> Case:
    """Let the second block of terms cancel nearly all of the first: a half type keeps nothing of the difference."""
    rng = np.random.default_rng(9)
    half, b = random_float8(rng, (6, 128), "normal"), random_float8(rng, (5, 128), "normal")
    a, b = np.concatenate([half, -half], axis=1), np.concatenate([b, b], axis=1)
    scale = scales(rng, (6, 1), "of_rows")
    apart = np.concatenate([scale, scale * np.float32(1 - 2.0**-9)], axis=1)
    return make_case(dtype, a, b, apart, np.ones((1, 2), np.float32))


def sums_past_the_digits_of_a_half_type(dtype: DType) -> Case:
    """Sum thousands of positive terms: a sum of ones stops growing at 256 in bfloat16, and at 2048 in float16."""
    a, b = np.ones((2, 2100)), np.repeat([[1.0], [0.5], [1.75]], 2100, axis=1)
    return example(a, b, np.ones((2, 17)), np.ones((1, 17)))(dtype)


def terms_of_14_bits(dtype: DType) -> Case:
    """Sum terms of one sign to more digits than the float8 tensor cores of Hopper keep."""
    rng = np.random.default_rng(13)
    a, b = (rng.choice([1.125, 1.625, 1.875, 3.25, 0.01953125], (4, 128)) for _ in range(2))
    return example(a, b, np.ones((4, 1)), np.ones((1, 1)))(dtype)


examples: Mapping[str, Callable[[DType], Case]] = {
    "one_by_one": example([[3]], [[-2]], [[0.3]], [[0.7]]),
    "no_terms": rows(3, 2, 0),
    "no_rows": rows(0, 3, 5),
    "no_columns": rows(3, 0, 5),
    "one_row": rows(1, 40, 37),
    "one_column": rows(40, 1, 37),
    "outer_product": rows(33, 17, 1),
    # One past a block, which has a scale of its own then, and in the middle of one.
    "terms_past_a_block_by_one": rows(5, 9, 129),
    "columns_past_a_block_by_one": rows(9, 129, 16),
    "terms_and_columns_end_in_a_block": rows(7, 150, 200, scale="apart"),
    "three_blocks_each_way": rows(3, 260, 290, scale="apart"),
    "whole_blocks": rows(32, 128, 128),
    "rows_past_a_tile_by_one": rows(129, 9, 144),
    # More rows of tiles than one group of them has.
    "tiles_in_every_place": rows(270, 70, 16),
    "as_many_blocks_as_rows": rows(3, 9, 300, scale="apart"),
    "scales_in_columns": rows(9, 131, 140, scale_a="transposed", scale_b="transposed"),
    "columns_of_a_and_b_adjacent": rows(19, 23, 133, a="transposed", b="transposed"),
    "rows_apart_by_no_multiple_of_16_bytes": rows(9, 16, 144, a="cut_from_wider", b="cut_from_wider"),
    "gaps_of_nan_between_elements": rows(
        5, 7, 135, **dict.fromkeys(("a", "b", "scale_a", "scale_b"), "sliced_columns")
    ),
    "misaligned": rows(16, 16, 160, **dict.fromkeys(("a", "b", "scale_a", "scale_b"), "misaligned")),
    "every_finite_number": every_finite_number,
    "subnormal_numbers": rows(5, 6, 140, kind="tiny"),
    "huge_numbers": rows(5, 6, 140, kind="huge"),
    "negative_zero": example([[-0.0, 1], [1, -1]], [[1, -1], [-0.0, -1]], [[1], [2]], [[1]]),
    "scales_apart": rows(12, 20, 700, scale="apart"),
    "scales_of_zero": rows(12, 131, 140, scale="some_zero"),
    "subnormal_scales": rows(6, 5, 140, scale="tiny"),
    "nan_of_each_sign": nan_of_each_sign,
    "scales_not_finite": scales_not_finite,
    "blocks_cancel": blocks_cancel,
    "sums_past_the_digits_of_a_half_type": sums_past_the_digits_of_a_half_type,
    "terms_of_14_bits": terms_of_14_bits,
}

# ---- laws


def a_power_of_2_goes_through(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Doubling the scales of a doubles the result, where both are finite."""
    with np.errstate(over="ignore"):
        doubled = evaluate(case.with_inputs(scale_a=case["scale_a"] * np.float32(2))).output
    once = evaluate(case).output
    finite = np.isfinite(once.value) & np.isfinite(doubled.value)
    yield Relation(only(finite, doubled), only(finite, once) + only(finite, once))


def blocks_of_terms_add_up(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The result is that of the first blocks of terms plus that of the others, where both are finite."""
    half = (blocks(case["a"].shape[1]) + 1) // 2
    parts = []
    for terms, of_scales in (
        (slice(half * BLOCK), slice(half)),
        (slice(half * BLOCK, None), slice(half, None)),
    ):
        numbers = {name: case[name][:, terms] for name in ("a", "b")}
        numbers |= {name: case[name][:, of_scales] for name in ("scale_a", "scale_b")}
        parts.append(evaluate(case.with_inputs(**numbers)).output)
    finite = np.isfinite(parts[0].value) & np.isfinite(parts[1].value)
    yield Relation(only(finite, evaluate(case).output), only(finite, parts[0]) + only(finite, parts[1]))


def the_identity_gives_a_with_its_scales(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The product with the identity is a, each number with both scales of its block, in the rows without NaN.

    The scales of b are as they are for as many columns as a has, and 2 beyond these.
    """
    k = case["a"].shape[1]
    if not k:
        return
    given, wanted = case["scale_b"], (blocks(k), blocks(k))
    scale_b: np.ndarray = np.full(wanted, 2, np.float32)
    scale_b[: len(given)] = given[: len(scale_b)]
    identity = np.eye(k).astype(ml_dtypes.float8_e4m3fn)
    nothing: np.ndarray = np.zeros(case["a"].shape, dtype.numpy)
    square = replace(case.with_inputs(b=identity, scale_b=scale_b), grad_output=nothing)
    output, column = evaluate(square).output, np.arange(k) // BLOCK
    parts = (case["a"], case["scale_a"][:, column], scale_b[column, column][None])
    a, of_rows, of_columns = (Bounded.exact(x.astype(dtype.wide), dtype.arithmetic) for x in parts)
    expected = a * (of_rows * of_columns)
    finite = np.isfinite(a.value).all(axis=1, keepdims=True) & np.isfinite(case["scale_a"]).all(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = abs(of_rows.value * of_columns.value)
    usual = (
        (sizes < LARGEST_SCALE) & ((sizes > LEAST_SCALE) | (sizes == 0)) & np.logical_not(_is_extreme(case["scale_a"]))
    )
    columns_finite = np.isfinite(scale_b).all(axis=1)[column][None]
    yield equal_where(finite & usual & columns_finite, output, expected)


def blocks_of_columns_stand_alone(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Some rows, and the columns past their first block, are the same in a call without the others."""
    m, n = case.grad_output.shape
    first = m // 3
    begins = BLOCK if n > BLOCK else 0
    part = replace(
        case.with_inputs(
            a=case["a"][first:],
            scale_a=case["scale_a"][first:],
            b=case["b"][begins:],
            scale_b=case["scale_b"][begins // BLOCK :],
        ),
        grad_output=case.grad_output[first:, begins:],
    )
    yield Relation(evaluate(part).output, evaluate(case).output[first:, begins:])


# ---- the record

OUT_DTYPE = Values(
    (torch.float32,),
    out_of_range={"float64": torch.float64, "float8": torch.float8_e4m3fn, "integers": torch.int64},
    of_another_type={"a_string": "float32", "none": None, "a_number": 1},
)
ARGUMENTS = Arguments(
    {"m": 3, "k": 130, "n": 131, "k_blocks": 2, "n_blocks": 2},
    a=tensor("m k", says="a must", dtype=torch.float8_e4m3fn),
    b=tensor("n k", says="b must", dtype=torch.float8_e4m3fn),
    scale_a=tensor("m k_blocks", dtype=torch.float32),
    scale_b=tensor("n_blocks k_blocks", dtype=torch.float32),
    out_dtype=OUT_DTYPE,
)
errors = (
    *ARGUMENTS.errors,
    *(
        ARGUMENTS.wrong(f"{name}_of_{m}_by_{n}_blocks", ValueError, name, {name: torch.ones(m, n)})
        # Of another number of blocks of terms, of columns, and with the axes exchanged.
        for name, m, n in (
            ("scale_a", 3, 1),
            ("scale_a", 3, 3),
            ("scale_a", 2, 3),
            ("scale_b", 1, 2),
            ("scale_b", 3, 2),
        )
    ),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads all inputs once and writes the result. There is no backward.

    Operations are not counted: a device's ceilings are those of products of the result's dtype, and products of float8
    may be faster than these.
    """
    moved = sum(array.nbytes for array in case.inputs.values()) + case.grad_output.nbytes
    return Cost(moved, 0), Cost(0, 0)


def tile_blocks(m: int, n: int, k: int, times: int, across: int) -> Make:
    """Return a workload that repeats a case: its rows `times` times, and its columns, whole blocks, `across` times."""

    def make(dtype: DType) -> Workload:
        part = rows(m, n, k)(dtype)
        inputs = {name: np.tile(part[name], (times, 1)) for name in ("a", "scale_a")}
        inputs |= {name: np.tile(part[name], (across, 1)) for name in ("b", "scale_b")}
        nothing = np.tile(part.grad_output, (times, across))
        return Workload(case=replace(part, inputs=inputs, grad_output=nothing), part=part)

    return make


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(64, 64, 128)), "ragged": whole(rows(33, 150, 200))},
    "cuda": {
        "small": whole(rows(256, 256, 256)),
        "large": tile_blocks(64, 128, 4096, times=64, across=32),
        # As DeepSeek's layers have them: 4096 tokens, and 64 while tokens are generated.
        "tokens": tile_blocks(64, 128, 7168, times=64, across=16),
        "skinny": tile_blocks(64, 128, 7168, times=1, across=16),
        "ragged": whole(rows(65, 1003, 1001)),
    },
}

operation = Operation(
    name="scaled_matmul",
    forward=forward,
    backward=oracle.backward,
    differentiable=(),
    cases=cases,
    examples=examples,
    batched={"a": 1, "scale_a": 1},
    laws=(
        a_power_of_2_goes_through,
        blocks_of_terms_add_up,
        the_identity_gives_a_with_its_scales,
        blocks_of_columns_stand_alone,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    sized=Sized(
        {"m": 2, "n": 3, "k": 3},
        lambda sizes: rows(sizes["m"], sizes["n"], sizes["k"]),
        # Kernels compute whole tiles, in whole steps of terms.
        largest=lambda sizes: 1024 * blocks(4 * sizes["m"]) * blocks(4 * sizes["n"]) * blocks(2 * sizes["k"]),
    ),
    source="DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3.2; https://github.com/deepseek-ai/DeepGEMM",
)
