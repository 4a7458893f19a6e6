"""The record of add_rms_norm: a residual is added to x, and the sum is normalized over the last axis.

y may be the norm of the returned sum, rounded to the dtype, or of the unrounded sum: vLLM and FlashInfer have kernels
of both kinds. So the bound has one rounding of the sum in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fourfold.oracles import add_rms_norm as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import Declared
from fourfold.inputs.arrays import GENERATORS, cotangent
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, stored, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Law, Operation, Relation, Sized
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, tiled, whole

from . import rms_norm
from .norms import gradient_of_weight_weighs_the_normalized_rows

INPUTS = ("x", "residual", "weight")

# ---- the right results


def total(x: Any, residual: Any) -> Any:
    """Return the sum that is normalized: rounded to the dtype of the inputs, or not."""
    return stored(x + residual)


def norm_output(x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> Any:
    """Return the oracle's norm of the sum. Where rms_norm leaves a row open to others, so does this."""
    y, _ = oracle.forward(x, residual, weight, eps, stored)
    infinite = rms_norm.rows_of_others_with_infinities(total(x, residual))
    return unspecified_where(y, infinite) if np.any(infinite) else y


def sum_output(x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> Any:
    """Return the sum, rounded once."""
    return x + residual


def backward_of_y(grad_y: Any, x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> tuple[Any, Any, Any]:
    """Return the gradients through the norm, where residual_out is not used. x and residual have the same."""
    grad_sum, grad_weight = rms_norm.backward(grad_y, total(x, residual), weight, eps)
    return grad_sum, grad_sum, grad_weight


def backward_of_sum(backward_of_y: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, Any]]:
    """Return the gradients through the sum, where y is not used, given those where the sum is not used."""

    def backward(grad_sum: Any, x: Any, residual: Any, **others: Any) -> tuple[Any, Any]:
        """Return the cotangent itself.

        Kernels may add a gradient through the norm, of a cotangent of zeros. Where a zero is multiplied by infinity or
        NaN, the gradient is unspecified.
        """
        if not isinstance(x, Bounded):
            return grad_sum, grad_sum
        zeros = Bounded.exact(np.zeros(grad_sum.shape), x.arithmetic)
        through_norm, *_ = backward_of_y(zeros, x, residual, **others)
        lost = ~np.isfinite(through_norm.value) | np.isinf(through_norm.error)
        return (unspecified_where(grad_sum, lost),) * 2

    return backward


def joined_outputs(x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> Any:
    """Return y and residual_out, side by side."""
    outputs = norm_output(x, residual, weight, eps), sum_output(x, residual, weight, eps)
    return np.concatenate(outputs, axis=-1)


def backward_of_both(grad_outputs: Any, x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> tuple[Any, Any, Any]:
    """Return the sum of both outputs' gradients. That through the norm may be rounded before the other is added."""
    cols = x.shape[-1]
    grad_y, grad_residual_out = grad_outputs[..., :cols], grad_outputs[..., cols:]
    if not isinstance(x, Bounded):
        return oracle.backward(grad_y, grad_residual_out, x, residual, weight, eps)
    through_norm, _, grad_weight = backward_of_y(grad_y, x, residual, weight, eps)
    grad_sum = stored(through_norm) + grad_residual_out
    return grad_sum, grad_sum, grad_weight


def admissible(case: Case, results: Mapping[str, np.ndarray]) -> str | None:
    """x and residual have the same gradient, to within the rounding of one."""
    of_x, of_residual = (results.get(f"gradient of {name}") for name in INPUTS[:2])
    if of_x is None or of_residual is None:
        return None
    same = (of_x == of_residual) | (np.isnan(of_x) & np.isnan(of_residual))
    return None if np.all(same) else "the gradients of x and of residual differ"


# ---- cases


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw one to three rows of two to five columns, whose sum is away from 0, where the slope changes fast."""
    rng = draw(GENERATORS)
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    sums, x = rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape), rng.normal(0, 1, shape)
    inputs = {"x": x, "residual": sums - x, "weight": rng.normal(0, 2, shape[1:])}
    inputs = {name: array.astype(dtype.numpy) for name, array in inputs.items()}
    return Case(inputs, cotangent(rng, shape, dtype), {"eps": 1e-6})


ADD_RMS_NORM = Declared("add_rms_norm", ("y", "residual_out"))
rows = ADD_RMS_NORM.example


def pair(
    make: Callable[[np.random.Generator, DType], Any], rows: Callable[..., Any] = rows, **given: Any
) -> Callable[[DType], Case]:
    """Return a named case of a given x and residual."""

    def part(place: int) -> Callable[[np.random.Generator, DType], Any]:
        return lambda rng, dtype: make(np.random.default_rng(53), dtype)[place]

    return rows(x=part(0), residual=part(1), **given)


def sums_not_finite(rng: np.random.Generator, dtype: DType) -> tuple[Any, Any]:
    """Return rows that are not finite, or whose sums are not, and one that is."""
    x = [[np.inf, 0.0, 1.0], [np.inf, 1.0, 2.0], [1.0, 2.0, np.nan], [1.0, 2.0, 3.0]]
    return x, [[1.0, 0.0, 1.0], [-np.inf, 1.0, 2.0], [1.0, 2.0, 3.0], [0.5, -np.inf, 1.0]]


def opposite(share: float) -> Callable[[DType], Case]:
    """Return a named case of a residual that is x times a negative number."""
    return pair(lambda rng, dtype: (x := rng.normal(0, 2, (3, 24)), -x * share))


def next_to_ties(rng: np.random.Generator, dtype: DType) -> tuple[Any, Any]:
    """Return numbers whose sums lie half way between two numbers of float16 or of bfloat16, or just beside that."""
    x = 1 + rng.integers(0, 64, (4, 40)) / 128
    return x, rng.choice([2.0**-8, 2.0**-9, 2.0**-11, 2.0**-12, 3 * 2.0**-11], (4, 40)) * rng.choice([-1, 1], (4, 40))


examples: Mapping[str, Callable[[DType], Case]] = {
    "residual_lies_otherwise": rows(33, cols=65, x="transposed", residual="misaligned"),
    "x_lies_otherwise": rows(9, cols=40, x="sliced_columns"),
    "sums_are_zero": opposite(1),
    "sums_are_far_smaller": opposite(1 + 2.0**-7),
    "residual_is_far_larger": rows(3, cols=24, residual=lambda rng, dtype: rng.normal(0, 3000, (3, 24))),
    "residual_is_zero": rows(residual=np.zeros((3, 24))),
    "x_is_zero": rows(x=np.zeros((3, 24))),
    "sums_next_to_ties": pair(next_to_ties),
    "eps_far_above_the_mean_square": pair(lambda rng, dtype: rng.normal(0, 0.01, (2, 3, 24)), eps=0.25),
    "one_large_entry": pair(
        lambda rng, dtype: (
            np.where(np.arange(40) == 7, 200.0, rng.normal(0, 0.1, (3, 40))),
            rng.normal(0, 0.1, (3, 40)),
        )
    ),
    "rows_not_finite": pair(sums_not_finite),
    "each_entry_in_turn_not_finite": rows(x=lambda rng, dtype: not_finite_in_turn(rng, 17, dtype)),
    # The sum overflows float16, and its square bfloat16 and float32.
    "sums_overflow": pair(lambda rng, dtype: np.full((2, 2, 24), dtype.largest * 0.75)),
    # A sum of bfloat16 in bfloat16 stops growing at 256.
    "long_row": rows(1, cols=4096),
    # More rows than blocks run at a time: each sums the gradients of several, and a second stage what they leave.
    "many_rows_of_whole_vectors": rows(300, cols=16),
    # Whole vectors, more than the registers of a block hold; and rows of which vectors are held in part.
    "rows_longer_than_registers": rows(3, cols=8200),
    "rows_of_whole_vectors_held_by_many_threads": rows(5, cols=2056),
    # Rows that begin between two multiples of 16 bytes, of more columns than a warp holds. Each block has several.
    "odd_rows_of_single_columns": rows(45, cols=1027),
    # Longer than the vectors that a block holds at once, along two axes that no single stride spans.
    "odd_rows_longer_than_registers": rows(1, cols=16501),
    "rows_longer_than_registers_along_two_axes": rows(
        2, 2, cols=16500, x="transposed", residual="transposed", weight="sliced_columns"
    ),
    "weight_strided": rows(4, cols=48, weight="sliced_columns"),
    "all_misaligned": rows(
        5, cols=64, x="misaligned", residual="misaligned", weight="misaligned", grad_output="misaligned"
    ),
    "cotangent_of_a_sum": rows(9, cols=40, grad_output=(-1.5, "expanded")),
}
# Of the sum alone, and of both cotangents at once: other sizes and numbers are those of y.
OF_SUMS = (
    *("no_rows", "no_cols", "without_leading_axes", "all_transposed", "residual_lies_otherwise"),
    *("x_lies_otherwise", "two_leading_axes_each_in_another_order", "sums_are_far_smaller", "residual_is_far_larger"),
    *("sums_next_to_ties", "rows_not_finite", "sums_overflow", "rows_longer_than_registers", "all_misaligned"),
    *("odd_rows_longer_than_registers", "cotangent_of_a_sum"),
)
OF_BOTH = (
    *("no_rows", "no_cols", "without_leading_axes", "all_sliced_columns", "all_transposed", "all_misaligned"),
    *("sums_are_far_smaller", "rows_not_finite", "many_rows_of_whole_vectors", "rows_longer_than_registers"),
    *("odd_rows_of_single_columns", "odd_rows_longer_than_registers", "rows_longer_than_registers_along_two_axes"),
    *("rows_of_whole_vectors_held_by_many_threads", "cotangent_of_a_sum"),
)


def add_second_cotangent(case: Case, dtype: DType) -> Case:
    """Return the case with a cotangent of residual_out beside that of y, as numbers of another order of magnitude."""
    given = case.grad_output
    other = np.flip(given, axis=0) if given.ndim > 1 else np.flip(given)
    return replace(case, grad_output=np.concatenate([given, (-other / 2).astype(given.dtype)], axis=-1))


def two_cotangents(make: Callable[[DType], Case]) -> Callable[[DType], Case]:
    """Return a named case with a cotangent of each output."""
    return lambda dtype: add_second_cotangent(make(dtype), dtype)


def add_cotangents(sized: Sized | None) -> Sized:
    """Return the cases of chosen sizes with a cotangent of each output."""
    assert sized is not None
    return replace(sized, make=lambda sizes: two_cotangents(sized.make(sizes)), varied=None)


def joint(strategy: Callable[..., st.SearchStrategy[Case]]) -> Callable[..., st.SearchStrategy[Case]]:
    """Return cases with a cotangent of each output."""

    def drawn(dtype: DType, *elements: int) -> st.SearchStrategy[Case]:
        return strategy(dtype, *elements).map(lambda case: add_second_cotangent(case, dtype))

    return drawn


def joint_record(y: Operation, of_sum: Operation, named: Sequence[str], **fields: Any) -> Operation:
    """Return the record of both outputs.

    Args:
        y: the record of y.
        of_sum: the record of the sum.
        named: the named cases that have a cotangent of each output.
        fields: the fields that follow from neither: forward, backward and workloads.
    """
    name, _, output = of_sum.name.partition(".")
    return replace(
        y,
        name=name,
        cases=joint(y.cases),
        smooth=joint(y.smooth),
        laws=(),  # each output has its own
        examples={case: two_cotangents(y.examples[case]) for case in named},
        sized=add_cotangents(y.sized),
        outputs={"y": y, output: of_sum},
        admissible=admissible,
        **fields,
    )


# ---- laws


def the_summands_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """f(residual, x) = f(x, residual), and their gradients are the same."""
    here, there = evaluate(case), evaluate(case.with_inputs(x=case["residual"], residual=case["x"]))
    yield Relation(here.output, there.output)
    for name, gradient in here.gradients.items():
        yield Relation(gradient, there.gradients[{"x": "residual", "residual": "x"}.get(name, name)])


def a_sign_goes_through(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """add_rms_norm(-x, -residual) = -add_rms_norm(x, residual)."""
    here, there = evaluate(case), evaluate(case.with_inputs(x=-case["x"], residual=-case["residual"]))
    yield Relation(-here.output, there.output)
    yield Relation(here.gradients["x"], there.gradients["x"])


def y_is_norm_of_the_sum(norm: str) -> Law:
    """Return a law."""

    def y_is_the_norm_of_the_sum(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        """Where the sum is a number of the dtype, y and its gradients are those of the norm."""
        with np.errstate(all="ignore"):
            sums = (case["x"].astype(dtype.wide) + case["residual"].astype(dtype.wide)).astype(dtype.numpy)
        inputs = {name: sums if name == "x" else x for name, x in case.inputs.items() if name != "residual"}
        here = evaluate(case.with_inputs(x=sums, residual=np.zeros_like(sums)))
        there = evaluate(Case(inputs, case.grad_output, case.parameters), norm)
        yield Relation(here.output, there.output)
        for name, gradient in here.gradients.items():
            yield Relation(gradient, there.gradients["x" if name == "residual" else name])

    return y_is_the_norm_of_the_sum


y_is_the_norm_of_the_sum = y_is_norm_of_the_sum("rms_norm")


def nothing_is_added_to_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With a residual of 0 residual_out is x."""
    output = evaluate(case.with_inputs(residual=np.zeros_like(case["residual"]))).output
    yield equals_exactly(output, case["x"].astype(dtype.wide))


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads x, residual and weight and writes both outputs.

    Backward reads both cotangents, the sum and weight, and writes one gradient, which x and residual share, and that of
    weight.
    """
    x, weight = case["x"], case["weight"].nbytes
    return Cost(4 * x.nbytes + weight, 5 * x.size), Cost(4 * x.nbytes + 2 * weight, 11 * x.size)


def workloads_of(rows: Callable[..., Any], cotangents: Callable[[Any], Any]) -> dict[str, dict[str, Make]]:
    """Return the workloads of rows, with the cotangents of one output or of both."""

    def of(*shape: int) -> Callable[[DType], Case]:
        return cotangents(rows(*shape[:-1], cols=shape[-1]))

    return {
        "cpu": {"small": whole(of(32, 256)), "ragged": whole(of(17, 1001))},
        "cuda": {
            "small": whole(of(128, 256)),
            "large": tiled(of(256, 4096), 128, *INPUTS[:2]),
            "short_rows": tiled(of(256, 1024), 128, *INPUTS[:2]),
            "long_rows": tiled(of(16, 16384), 1024, *INPUTS[:2]),
            "ragged": tiled(of(33, 1001), 256, *INPUTS[:2]),
        },
    }


_of_y = ADD_RMS_NORM.operation(
    oracle,
    name="add_rms_norm.y",
    forward=norm_output,
    backward=backward_of_y,
    examples=examples,
    smooth=smooth,
    laws=(
        the_summands_may_change_places,
        a_sign_goes_through,
        y_is_the_norm_of_the_sum,
        gradient_of_weight_weighs_the_normalized_rows,
    ),
    cost=cost,
    workloads=workloads_of(rows, lambda make: make),
)
_of_residual_out = replace(
    _of_y,
    name="add_rms_norm.residual_out",
    forward=sum_output,
    backward=backward_of_sum(backward_of_y),
    differentiable=INPUTS[:2],
    examples={name: _of_y.examples[name] for name in OF_SUMS},
    laws=(the_summands_may_change_places, nothing_is_added_to_nothing),
)
operation = joint_record(
    _of_y,
    _of_residual_out,
    OF_BOTH,
    forward=joined_outputs,
    backward=backward_of_both,
    workloads=workloads_of(rows, two_cotangents),
)
