"""The record of cross_entropy: of logits and classes, with ignored rows, smoothed labels and three reductions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import cross_entropy as oracle
from hypothesis import strategies as st

from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import GENERATORS, arrays, cotangent, layouts_for, repeat_first, sizes, values
from fourfold.inputs.special_values import not_finite_in_turn
from fourfold.numerics.bounded import Bounded, contract_of, scaling_allowance, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.numerics.steps.orders import any_order, either_formula
from fourfold.operations.arguments import KINDS
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Operation, Relation, Result, Sized
from fourfold.operations.relations import equal_where, equals, equals_exactly, only
from fourfold.operations.workloads import Make, tiled, whole

IGNORED = -100
REDUCTIONS = ("mean", "sum", "none")
SMOOTHINGS = (0.0, 0.1, 0.75)
# The difference of two huge numbers overflows, and then nothing is known of a row.
ROW_KINDS = tuple(kind for kind in KINDS if kind != "huge")


def logarithm_allowance(logits: Any) -> Any:
    """Return logits with the error of kernels that take them off a logarithm, which may be as large as they are."""
    scaled = scaling_allowance(logits)
    if scaled is logits:
        return logits
    return Bounded(logits.value, np.where(np.isfinite(logits.value), scaled.error, logits.error), logits.arithmetic)


def forward(
    logits: Any, target: Any, ignore_index: int = IGNORED, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Any:
    """Return the oracle's output. Somebody else's mean over no rows is unspecified: torch gives NaN, others 0."""
    output = oracle.forward(logarithm_allowance(logits), target, ignore_index, label_smoothing, reduction)
    contract = contract_of(output)
    if contract.nonfinite and reduction == "mean" and bool((target == ignore_index).all()):
        return unspecified_where(output, np.array(True))
    if contract.reassociation and output.arithmetic.rounds_each_step and label_smoothing:
        # torch sums logarithms over all classes before it divides by their number, which may overflow float16.
        kept = "none" if reduction == "none" else "sum"
        with np.errstate(all="ignore"):
            smooth = oracle.forward(logits.value, target, ignore_index, 1.0, kept)
        output = any_order(output, (logits.shape[1], smooth), stored=True)
    return output


def backward(
    grad_output: Any,
    logits: Any,
    target: Any,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Any]:
    """Return the oracle's gradient. A row whose cotangent is not finite is unspecified.

    There the order of the steps decides between an infinity and NaN. Somebody else's gradient of a row that is ignored
    is unspecified where the row is not finite: torch multiplies its NaN by 0.
    """
    arguments = logarithm_allowance(logits), target, ignore_index, label_smoothing, reduction
    (gradient,) = oracle.backward(grad_output, *arguments)
    if not isinstance(gradient, Bounded):
        return (gradient,)
    unknown = np.broadcast_to(~np.isfinite(grad_output.value), target.shape)
    contract = contract_of(gradient)
    if contract.nonfinite:
        unknown = unknown | ((target == ignore_index) & ~np.isfinite(logits.value).all(-1))
    if contract.reassociation and gradient.arithmetic.rounds_each_step:
        # Liger computes the gradient forward, and multiplies what it has stored by the cotangent.
        (stored,) = oracle.backward(np.ones_like(grad_output), *arguments)
        gradient = either_formula(gradient, stored * (grad_output[:, None] if reduction == "none" else grad_output))
    return (unspecified_where(gradient, np.broadcast_to(unknown[:, None], gradient.shape)),)


def parameters_of(smoothing: float = 0.0, reduction: str = "mean", ignore_index: int = IGNORED) -> dict[str, Any]:
    """Return the parameters of a case."""
    return {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}


def targets(rng: np.random.Generator, shape: tuple[int, int], ignored: float, ignore_index: int) -> np.ndarray:
    """Return random classes, with `ignore_index` in place of a share of them."""
    rows, classes = shape
    return np.where(rng.random(rows) < ignored, ignore_index, rng.integers(0, classes, rows))


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw few rows of many classes or many of few, sometimes masked; any share of the rows is ignored."""
    classes = max(draw(sizes(draw(st.sampled_from((elements // 2, 64, 16))))), 1)
    reduction = draw(st.sampled_from((*REDUCTIONS, "none", "none")))
    count = draw(sizes(elements // classes, elements))
    if count == 1 and reduction == "none" and 2 * classes <= elements:
        count = 2
    shape = count, classes
    logits = draw(arrays(dtype, shape, ROW_KINDS))
    rng = draw(GENERATORS)
    if draw(st.integers(0, 7)) == 7:
        # As decoding masks classes that may not come.
        logits = np.where(rng.random(shape) < draw(st.sampled_from((0.1, 0.9))), -np.inf, logits).astype(dtype.numpy)
    # Where it is a class, a call that leaves it out is valid too.
    ignore_index = draw(st.sampled_from((IGNORED, IGNORED, -1, classes - 1)))
    target = targets(rng, shape, draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))), ignore_index)
    layouts = draw(layouts_for("logits", "target", "grad_output"))
    if draw(st.integers(0, 7)) == 7:
        # As the backward pass of a sum over the rows makes it.
        layouts["grad_output"] = "expanded"
    if layouts["logits"] == "expanded":
        logits = repeat_first(logits)
    if layouts["target"] == "expanded":
        target = repeat_first(target)
    grad_output = cotangent(rng, shape[:1] if reduction == "none" else (), dtype)
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output)
    inputs = {"logits": logits, "target": target.astype(draw(st.sampled_from((np.int64, np.int32))))}
    parameters = parameters_of(draw(st.sampled_from(SMOOTHINGS)), reduction, ignore_index)
    return Case(inputs, grad_output, parameters, layouts)


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Draw two or three rows of two to four classes."""
    rng = draw(GENERATORS)
    shape = draw(st.integers(2, 3)), draw(st.integers(2, 4))
    reduction = draw(st.sampled_from((*REDUCTIONS, "none", "none")))
    # The first row counts, that the mean is one.
    target = np.append(rng.integers(0, shape[1], 1), targets(rng, (shape[0] - 1, shape[1]), 0.2, IGNORED))
    inputs = {"logits": values(rng, shape, dtype, "normal"), "target": target}
    grad_output = cotangent(rng, shape[:1] if reduction == "none" else (), dtype)
    return Case(inputs, grad_output, parameters_of(draw(st.sampled_from(SMOOTHINGS)), reduction))


def example(
    numbers: Any, *parameters: Any, ignored: float = 0.2, index: type = np.int64, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of given logits, or of a function that makes them, and of the `parameters_of` it."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(31)
        given: np.ndarray = np.asarray(numbers(rng) if callable(numbers) else numbers, np.float64).astype(dtype.numpy)
        named = parameters_of(*parameters)
        target: np.ndarray = targets(rng, given.shape, ignored, named["ignore_index"]).astype(index)
        shape = given.shape[:1] if named["reduction"] == "none" else ()
        cotangents = np.linspace(-1.5, 2, int(np.prod(shape))).reshape(shape).astype(dtype.numpy)
        return Case({"logits": given, "target": target}, cotangents, named, layouts)

    return make


def rows(*shape: int, given: tuple[Any, ...] = (), offset: float = 0.0, **options: Any) -> Callable[[DType], Case]:
    """Return a named case of random logits."""
    return example(lambda rng: offset + rng.normal(0, 2, shape), *given, **options)


def targets_of_the_edges(dtype: DType) -> Case:
    """Return targets of the first and the last class, on either side of a block of 4096."""
    case = rows(6, 4100, given=(0.1, "none"))(dtype)
    return replace(case, inputs={**case.inputs, "target": np.array([0, 4099, 4095, 4096, 2048, 1])})


examples: Mapping[str, Callable[[DType], Case]] = {
    "no_rows": rows(0, 5),
    "no_rows_summed": rows(0, 5, given=(0.0, "sum")),
    "no_rows_each": rows(0, 5, given=(0.1, "none")),
    "one_class": rows(5, 1, given=(0.1, "none")),
    "one_row": rows(1, 7, ignored=0),
    "two_classes": rows(9, 2, given=(0.0, "sum")),
    "all_rows_ignored": rows(4, 9, ignored=1.0),
    "all_rows_ignored_summed": rows(4, 9, given=(0.1, "sum"), ignored=1.0),
    # What ignored rows hold must not matter, and the divisor is the number of the others.
    "ignored_rows_not_finite": lambda dtype: fill_ignored_rows(rows(8, 17, given=(0.1,), ignored=0.5)(dtype)),
    "ignore_index_of_minus_one": rows(12, 5, given=(0.1, "mean", -1), ignored=0.3),
    "ignore_index_is_a_class": rows(12, 5, given=(0.1, "mean", 2), ignored=0.3),
    "int32_targets": rows(12, 33, given=(0.1, "sum"), index=np.int32),
    # The tail of a vector, of a warp and of a piece.
    "classes_not_a_multiple_of_16": rows(3, 15, given=(0.1, "none")),
    "one_past_a_warp": rows(3, 33, given=(0.0, "none")),
    "one_past_1024_classes": rows(3, 1025, given=(0.1,)),
    # More than a block has, and few enough that the last block reduces their losses; more than a warp has threads.
    "a_few_rows": rows(7, 40, given=(0.1,)),
    "a_few_rows_for_two_warps": rows(37, 40, given=(0.1,)),
    "many_rows": rows(1500, 3, given=(0.1,)),
    "many_rows_each": rows(700, 3, given=(0.0, "none")),
    "targets_of_the_edges": targets_of_the_edges,
    "rising": example(np.linspace(-40, 40, 3 * 5000).reshape(3, 5000), 0.1, "none"),
    "falling": example(np.linspace(40, -40, 3 * 5000).reshape(3, 5000), 0.1, "none"),
    "smoothed_by_one": rows(4, 9, given=(1.0, "none"), ignored=0),
    # A mean of logits and the logarithm of a sum of exponentials both lose the digits of such an offset.
    "large_offset": rows(4, 65, given=(0.1, "none"), offset=200),
    "certain": example(100 * np.eye(9), 0.0, "none"),
    "masked": example(
        lambda rng: np.where(rng.random((6, 200)) < 0.5, -np.inf, rng.normal(0, 2, (6, 200))), 0.0, "none"
    ),
    # Of the first pieces nothing is known but that they are -inf.
    "masked_up_to_the_last": example(
        lambda rng: np.where(np.arange(9000) < 8990, -np.inf, rng.normal(0, 2, (2, 9000))), 0.0, "none"
    ),
    "masked_as_a_whole_past_a_piece": example(
        lambda rng: np.where(np.arange(2)[:, None] < 1, -np.inf, rng.normal(0, 2, (2, 9000))), 0.1, "none", ignored=0
    ),
    "masked_as_a_whole": example([[-np.inf] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]], 0.1, "none", ignored=0),
    "each_entry_in_turn_not_finite": lambda dtype: example(
        lambda rng: not_finite_in_turn(rng, 17, dtype), 0.0, "none", ignored=0
    )(dtype),
    # The vocabularies of GPT-2 and of Llama 3.
    "vocabulary_of_50257": rows(2, 50257, given=(0.1,), ignored=0),
    # The class of an int32 target times a stride may pass 2^31.
    "vocabulary_of_128256": rows(1, 128256, ignored=0, index=np.int32),
    "misaligned": rows(5, 64, given=(0.1, "none"), logits="misaligned", target="misaligned", grad_output="misaligned"),
    "rows_with_gaps": rows(5, 64, given=(0.1, "none"), logits="sliced_rows"),
    "classes_with_gaps": rows(5, 32, given=(0.1, "none"), logits="sliced_columns"),
    "rows_one_element_too_wide": rows(5, 64, given=(0.1,), logits="cut_from_wider"),
    "transposed": rows(64, 40, given=(0.1, "none"), logits="transposed"),
    "targets_with_gaps": rows(9, 8, given=(0.1, "none"), target="sliced_columns", grad_output="sliced_columns"),
    "cotangent_of_a_sum": lambda dtype: constant_cotangent(rows(9, 40, given=(0.1, "none"))(dtype)),
}


def fill_ignored_rows(case: Case) -> Case:
    """Return the case with NaN and infinities in the rows that are ignored."""
    ignored = case["target"] == case.parameters["ignore_index"]
    logits = case["logits"].copy()
    logits[ignored] = np.resize(np.array([np.nan, np.inf, -np.inf]), logits[ignored].shape)
    return case.with_inputs(logits=logits)


def constant_cotangent(case: Case) -> Case:
    """Return the case with the same cotangent for every row, in one place of memory."""
    return replace(case, grad_output=np.full_like(case.grad_output, -1.5), layouts={"grad_output": "expanded"})


def adding_a_number_to_a_row_changes_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The losses of x + t are those of x, and so are the gradients, where adding t is exact in all rows."""
    x: np.ndarray = case["logits"].astype(dtype.wide)
    with np.errstate(invalid="ignore", over="ignore"):
        there = (x + 16).astype(dtype.numpy)
        if not (there.astype(dtype.wide) - 16 == x).all():
            return
    here, moved = evaluate(case), evaluate(case.with_inputs(logits=there))
    yield Relation(here.output, moved.output)
    yield Relation(here.gradients["logits"], moved.gradients["logits"])


def classes_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Reordering the classes, in logits and in target, reorders the gradient alone."""
    classes, ignored = case["logits"].shape[1], case["target"] == case.parameters["ignore_index"]
    order = np.random.default_rng(case["logits"].size).permutation(classes)
    # A class that marks ignored rows keeps its number, and so does none of them take it.
    if 0 <= case.parameters["ignore_index"] < classes:
        return
    place = np.argsort(order)
    target = np.where(ignored, case["target"], place[np.where(ignored, 0, case["target"])]).astype(case["target"].dtype)
    here, there = evaluate(case), evaluate(case.with_inputs(logits=case["logits"][:, order], target=target))
    yield Relation(here.output, there.output)
    yield Relation(here.gradients["logits"][:, order], there.gradients["logits"])


def gradients_of_a_row_sum_to_zero(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradient of a row sums to 0, because adding a number to a row changes nothing."""
    gradient = evaluate(case).gradients["logits"]
    finite = np.isfinite(gradient.value).all(-1, keepdims=True)
    yield equals(total(only(finite, gradient), axis=-1), 0)


def ignored_rows_add_nothing(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Without the ignored rows the sum and the mean are the same; and their gradient is 0, if finite."""
    counted = case["target"] != case.parameters["ignore_index"]
    finite = np.isfinite(case["logits"].astype(np.float64)).all(-1)
    here = evaluate(case)
    gradient = here.gradients["logits"]
    yield equals_exactly(only((finite & ~counted)[:, None], gradient), 0)
    if case.parameters["reduction"] == "none" or not counted.any():
        return
    fewer = evaluate(case.with_inputs(logits=case["logits"][counted], target=case["target"][counted]))
    yield Relation(here.output, fewer.output)
    yield Relation(gradient[counted], fewer.gradients["logits"])


def the_sum_is_that_of_the_losses(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The sum is that of the rows' losses; over the number of rows that count it is the mean. So are the gradients."""
    rows = case["target"].shape
    counted = int(np.count_nonzero(case["target"] != case.parameters["ignore_index"]))
    if not counted:
        return

    def reduced(reduction: str, *shape: int) -> Result:
        ones = np.ones(shape, dtype.numpy)
        return evaluate(replace(case.with_parameters(reduction=reduction), grad_output=ones, layouts={}))

    each, summed, mean = reduced("none", *rows), reduced("sum"), reduced("mean")
    yield Relation(summed.output, total(each.output, axis=0))
    yield Relation(summed.output, float(counted) * mean.output)
    yield Relation(summed.gradients["logits"], each.gradients["logits"])
    yield Relation(summed.gradients["logits"], float(counted) * mean.gradients["logits"])


def smoothing_mixes_in_the_mean_of_all_classes(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Losses smoothed by 1 do not depend on the target; those smoothed by s are interpolated towards them."""
    if not np.isfinite(case["logits"].astype(np.float64)).all() or case.parameters["label_smoothing"] != 0.0:
        return
    hard, all_alike, half = (evaluate(case.with_parameters(label_smoothing=s)).output for s in (0.0, 1.0, 0.5))
    where = np.isfinite(hard.value)
    yield equal_where(where, 2.0 * half, hard + all_alike)
    counted = case["target"] != case.parameters["ignore_index"]
    other = np.where(counted, (case["target"] + 1) % case["logits"].shape[1], case["target"])
    if ((other != case.parameters["ignore_index"]) == counted).all():
        moved = case.with_inputs(target=other.astype(case["target"].dtype)).with_parameters(label_smoothing=1.0)
        yield equal_where(where, all_alike, evaluate(moved).output)


def other_targets(case: Case) -> dict[str, np.ndarray]:
    """Return the next class of each row, and the first one after the last."""
    target = case["target"]
    other = np.where(target == case.parameters["ignore_index"], target, (target + 1) % case["logits"].shape[1])
    return {"target": other.astype(target.dtype)}


ARGUMENTS = arguments_of("cross_entropy")
errors = (
    *ARGUMENTS.errors,
    ARGUMENTS.wrong("no_classes", ValueError, "logits", {"logits": torch.ones(2, 0)}),
    # It would take a wait for a GPU to know of these.
    ARGUMENTS.wrong("past_the_classes", ValueError, "target", {"target": torch.tensor([0, 3])}, devices=("cpu",)),
    ARGUMENTS.wrong("negative", ValueError, "target", {"target": torch.tensor([-1, 0])}, devices=("cpu",)),
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads logits and target. Backward reads them again and writes a gradient."""
    logits, target = case["logits"], case["target"].nbytes
    return Cost(logits.nbytes + target, 4 * logits.size), Cost(2 * logits.nbytes + target, 4 * logits.size)


def make_of_sizes(sizes: Mapping[str, int], leading: Any = None, given: Mapping[str, Any] | None = None) -> Any:
    """Return a named case of chosen sizes and parameters."""
    named = {**parameters_of(0.1, "none"), **(given or {})}
    order = (named["label_smoothing"], named["reduction"], named["ignore_index"])
    return rows(sizes["rows"], sizes["classes"], given=order)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(rows(32, 256)), "ragged": whole(rows(17, 1001, given=(0.1,)))},
    "cuda": {
        "small": whole(rows(128, 1000)),
        "large": tiled(rows(16, 128256, ignored=0), 256, "logits", "target"),
        "gpt2": tiled(rows(16, 50257, ignored=0), 512, "logits", "target"),
        "llama2": tiled(rows(16, 32000, ignored=0), 2048, "logits", "target"),
        "ragged": tiled(rows(33, 1001, given=(0.1,)), 256, "logits", "target"),
    },
}

operation = Operation(
    name="cross_entropy",
    forward=forward,
    backward=backward,
    differentiable=("logits",),
    cases=cases,
    examples=examples,
    smooth=smooth,
    # Of losses that are not reduced.
    batched={"logits": 1, "target": 0},
    laws=(
        adding_a_number_to_a_row_changes_nothing,
        classes_may_change_places,
        gradients_of_a_row_sum_to_zero,
        ignored_rows_add_nothing,
        the_sum_is_that_of_the_losses,
        smoothing_mixes_in_the_mean_of_all_classes,
    ),
    errors=errors,
    cost=cost,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ranges=ARGUMENTS.ranges,
    other_integers=other_targets,
    sized=Sized({"rows": 3, "classes": 5}, make_of_sizes, varied=make_of_sizes),
    source="Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015, for the smoothing",
)
