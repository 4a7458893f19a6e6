"""The oracles agree with finite differences, torch's autograd of independent formulas, laws and values by hand."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from drawing import collect
from fourfold.oracles import ciou_loss, ciou_loss_ragged, diou, diou_loss, giou, giou_loss, giou_loss_ragged
from fourfold.properties.boxes import explicit_pairs, pairs_without_ties
from hypothesis import strategies as st
from samples import sampled

from fourfold.checks.laws import hold
from fourfold.checks.records import operations
from fourfold.numerics.bounded import Arithmetic, Bounded
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.numerics.steps.along_axes import total
from fourfold.operations.case import Case
from fourfold.operations.record import Result, reference, reference_gradients

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = operations()
DIFFERENTIABLE = [name for name, operation in OPERATIONS.items() if operation.differentiable]
FLOAT64 = DTYPES["float64"]
LONGDOUBLE = np.finfo(np.longdouble)

few = hypothesis.settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def arithmetic_of(wide: type) -> Arithmetic:
    """Return the arithmetic in which an oracle computes."""
    info = np.finfo(wide)
    return Arithmetic(info.eps / 2, info.max, info.tiny)


ON_LONGDOUBLE = arithmetic_of(np.longdouble)
# The step h that balances truncation (h^2) with cancellation (roundoff / h).
STEP = np.ldexp(np.longdouble(1), int(np.rint(np.log2(LONGDOUBLE.eps) / 3)))


def directional(operation: Any, case: Case, name: str, place: tuple[int, ...], step: np.longdouble) -> Bounded:
    """Return the central difference of sum(grad_output * forward) in one coordinate, with its roundoff."""
    grad_output = Bounded.exact(case.grad_output.astype(np.longdouble), ON_LONGDOUBLE)
    values, at = [], []
    for side in (step, -step):
        inputs = {}
        for key, array in case.inputs.items():
            if np.issubdtype(array.dtype, np.integer):
                inputs[key] = array
                continue
            moved = array.astype(np.longdouble)
            if key == name:
                moved[place] += side
                at.append(moved[place])
            inputs[key] = Bounded.exact(moved, ON_LONGDOUBLE)
        values.append(total(grad_output * operation.forward(**inputs, **case.parameters)))
    return (values[0] - values[1]) / Bounded.exact(np.asarray(at[0] - at[1]), ON_LONGDOUBLE)


@pytest.mark.parametrize("name", sampled(DIFFERENTIABLE, "softmax", "giou", "cross_entropy"))
@hypothesis.settings(few, max_examples=10)
@hypothesis.given(data=st.data())
def test_backward_is_the_slope_of_forward(name: str, data: st.DataObject) -> None:
    operation = OPERATIONS[name]
    case = data.draw(operation.smooth(FLOAT64))
    wide = replace(FLOAT64, wide=np.longdouble, arithmetic=ON_LONGDOUBLE)
    analytic = reference_gradients(operation, case, wide)
    largest = max(float(abs(gradient.value).max(initial=0)) for gradient in analytic.values())
    for key, gradient in analytic.items():
        for place in np.ndindex(gradient.shape):
            near, far = (directional(operation, case, key, place, STEP * factor) for factor in (1, 2))
            # D(2h) - D(h) is three times the leading term of D(h)'s truncation error.
            truncation = abs(far.value - near.value)
            allowed = truncation + near.error + far.error + gradient.error[place]
            assert abs(near.value - gradient.value[place]) <= allowed, (key, place)
            # A large tolerance would prove nothing: half of the digits must be certain.
            assert allowed <= np.sqrt(LONGDOUBLE.eps) * max(largest, 1)


@pytest.mark.full(but=6)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_smooth_cases_have_gradients_to_speak_of(name: str) -> None:
    operation = OPERATIONS[name]
    gradients = [reference_gradients(operation, case, FLOAT64) for case in collect(operation.smooth(FLOAT64), 25)]
    found = [abs(gradient.value).max(initial=0) for each in gradients for gradient in each.values()]
    assert np.median(found) > np.sqrt(np.finfo(np.float64).eps)


def by_pairs(first: torch.Tensor, second: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(least=torch.minimum(first, second), most=torch.maximum(first, second))


def by_reduction(first: torch.Tensor, second: torch.Tensor) -> SimpleNamespace:
    both = torch.stack([first, second])
    return SimpleNamespace(least=both.amin(0), most=both.amax(0))


def clamped(x: torch.Tensor, least: float) -> torch.Tensor:
    """Return max(x, least) with the documented gradient at the limit. torch's own depends on its version."""
    return torch.where(x >= least, x, x.detach().clamp(min=least))


def giou_in_torch(a: torch.Tensor, b: torch.Tensor, eps: float, extremes: Callable = by_pairs) -> torch.Tensor:
    """Compute giou corner by corner, with sides as vectors; it shares no line with any implementation."""
    low, high = extremes(a[..., :2], b[..., :2]), extremes(a[..., 2:], b[..., 2:])
    overlap = clamped(high.least - low.most, 0)
    side_a, side_b, side_hull = a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2], high.most - low.least
    shared = overlap[..., 0] * overlap[..., 1]
    covered = clamped(side_a[..., 0] * side_a[..., 1] + side_b[..., 0] * side_b[..., 1] - shared, eps)
    around = clamped(side_hull[..., 0] * side_hull[..., 1], eps)
    return shared / covered - (around - covered) / around


def allowed_gradient_error(a: np.ndarray, b: np.ndarray, grad_output: np.ndarray, eps: float) -> np.ndarray:
    """Return how far two float64 evaluations of the gradient may differ if they take the same branches.

    The inputs are small whole and half numbers: sides, areas, union and hull are exact, and only quotients round.
    """
    *_, shared, union, _, _, hull = giou.intersection_union_hull(a, b)
    union, hull = np.maximum(union, eps), np.maximum(hull, eps)
    sides = np.sum(abs(a[..., 2:] - a[..., :2]) + abs(b[..., 2:] - b[..., :2]), -1)
    reach = sides + np.ptp(np.concatenate([a[..., 0::2], b[..., 0::2]], -1), -1)
    reach = reach + np.ptp(np.concatenate([a[..., 1::2], b[..., 1::2]], -1), -1)
    magnitude = abs(grad_output) * reach * (1 / union + 2 * shared / union**2 + 2 / hull + 2 * union / hull**2)
    # The longest chain of roundings to a gradient: four quotients, their products and sums, and the sum of shares.
    steps = 16 * FLOAT64.roundoff
    return 2 * steps / (1 - steps) * magnitude[..., None]


def torch_gradients(score: Callable, *leaves: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    tensors = [torch.tensor(leaf, requires_grad=True) for leaf in leaves]
    output = score(*tensors)
    gradients = torch.autograd.grad(output.sum(), tensors, materialize_grads=True)
    return output.detach().numpy(), [gradient.numpy() for gradient in gradients]


def assert_ties_as_in_torch(
    a: np.ndarray, b: np.ndarray, grad_output: np.ndarray, eps: float, extremes: Callable
) -> None:
    weights = torch.tensor(grad_output)
    _, expected = torch_gradients(lambda x, y: weights * giou_in_torch(x, y, eps, extremes), a, b)
    allowed = allowed_gradient_error(a, b, grad_output, eps)
    for actual, wanted in zip(giou.backward(grad_output, a, b, eps), expected):
        worst = np.argmax((abs(actual - wanted) - allowed).max(-1)) if len(a) else 0
        assert np.all(abs(actual - wanted) <= allowed), (a[worst], b[worst], actual[worst], wanted[worst])


def every_pair_on_a_grid(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    coordinates = np.stack(np.meshgrid(*[np.array(values)] * 8, indexing="ij"), -1).reshape(-1, 8)
    return coordinates[:, :4].copy(), coordinates[:, 4:].copy()


@pytest.mark.parametrize("extremes", [by_pairs, by_reduction])
@pytest.mark.parametrize("eps", [1e-5, 1.0, 2.0])
def test_every_tie_of_boxes_on_a_grid_is_shared_as_in_torch(eps: float, extremes: Callable) -> None:
    a, b = every_pair_on_a_grid([0.0, 1.0, 2.0, 3.0])
    _, _, _, union, _, _, hull = giou.intersection_union_hull(a, b)
    if eps >= 1:  # some case must lie exactly on the bound of each clamp
        assert (union == eps).any()
        assert (hull == eps).any()
    grad_output = np.random.default_rng(1).normal(0, 2, len(a))
    assert_ties_as_in_torch(a, b, grad_output, eps, extremes)


@few
@hypothesis.given(
    boxes=st.integers(0, 6).flatmap(lambda count: explicit_pairs(FLOAT64, count)),
    eps=st.sampled_from((1e-5, 0.25, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_ties_of_drawn_boxes_are_shared_as_in_torch(boxes: tuple, eps: float, seed: int) -> None:
    grad_output = np.random.default_rng(seed).normal(0, 2, len(boxes[0]))
    assert_ties_as_in_torch(*boxes, grad_output, eps, by_reduction)


def weighted_giou(weights: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return weights * giou_in_torch(a, b, 0.5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_nan_and_infinity_go_where_torch_takes_them() -> None:
    pairs = every_pair_on_a_grid([np.nan, np.inf, -np.inf, 0.0, 2.0])
    for a, b in zip(*(np.array_split(boxes, 10) for boxes in pairs)):  # all at once take 250 MB
        grad_output = np.random.default_rng(2).normal(0, 2, len(a))
        weighted = functools.partial(weighted_giou, torch.tensor(grad_output))
        expected, expected_gradients = torch_gradients(weighted, a, b)
        classes = [(grad_output * giou.forward(a, b, 0.5), expected)]
        classes += zip(giou.backward(grad_output, a, b, 0.5), expected_gradients)
        for actual, wanted in classes:
            special = ~np.isfinite(wanted)
            assert special.any()
            assert np.array_equal(np.isfinite(actual), ~special)
            assert np.array_equal(actual[special], wanted[special], equal_nan=True)


def looped(pred: torch.Tensor, targets: list[torch.Tensor], eps: float) -> torch.Tensor:
    """Compute the loss in a loop over samples and rows."""
    rows = [
        1 - giou_in_torch(pred[i, j], target[j], eps, by_reduction)
        for i, target in enumerate(targets)
        for j in range(len(target))
    ]
    return torch.stack(rows).mean() if rows else 0 * pred.sum()


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw pred and target with ties, each ``[batch, max_boxes, 4]``, and the number of boxes of each sample."""
    batch, max_boxes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pred, target = (boxes.reshape(batch, max_boxes, 4) for boxes in draw(explicit_pairs(FLOAT64, batch * max_boxes)))
    counts = draw(st.lists(st.integers(0, max_boxes), min_size=batch, max_size=batch))
    return pred, target, np.array(counts)


@pytest.mark.parametrize("ragged", [True, False])
@few
@hypothesis.given(batch=batches(), grad_output=st.sampled_from((-1.75, 0.0, 3.0)), eps=st.sampled_from((1e-5, 1.0)))
def test_losses_are_the_loops_over_samples_and_over_rows_with_positive_y2(
    ragged: bool, batch: tuple, grad_output: float, eps: float
) -> None:
    pred, target, counts = batch
    taken = np.arange(pred.shape[1]) < counts[:, None]
    sizes = counts.tolist()
    if ragged:
        oracle = giou_loss_ragged
        given: tuple = pred, target[taken], np.concatenate([[0], np.cumsum(counts)])
    else:
        target = np.where(taken[..., None], target, 0.0)  # rows with a drawn y2 <= 0 are padding too
        taken = target[..., 3] > 0
        oracle, given = giou_loss, (pred, target)
    value, (grad_pred, grad_target) = torch_gradients(
        lambda p, t: (
            grad_output * (looped(p, list(t.split(sizes)), eps) if ragged else looped(p[taken][None], [t[taken]], eps))
        ),
        *given[:2],
    )
    actual = oracle.backward(np.float64(grad_output), *given, eps)
    allowed = np.zeros(pred.shape)
    count = int(taken.sum())
    row = np.full(count, grad_output / max(count, 1))
    allowed[taken] = allowed_gradient_error(pred[taken], target[taken], row, eps)
    assert np.all(abs(actual[0] - grad_pred) <= allowed)
    assert np.all(abs(actual[1] - grad_target) <= (allowed[taken] if ragged else allowed))
    assert abs(grad_output * oracle.forward(*given, eps) - value) <= allowed_loss_error(
        pred[taken], target[taken], grad_output, eps
    )


def allowed_loss_error(a: np.ndarray, b: np.ndarray, grad_output: float, eps: float) -> float:
    """Return how far two float64 evaluations of the mean may differ if sides and areas are exact."""
    *_, shared, union, _, _, hull = giou.intersection_union_hull(a, b)
    union, hull = np.maximum(union, eps), np.maximum(hull, eps)
    magnitude = 1 + shared / union + (hull + union) / hull
    steps = (len(a) + 8) * FLOAT64.roundoff  # the sum's roundings, and those before and after it
    return abs(grad_output) * 2 * steps / (1 - steps) * float(np.mean(magnitude)) if len(a) else 0.0


# Of several outputs each has its laws.
RECORDS = {of.name: of for operation in OPERATIONS.values() for of in (operation.outputs.values() or [operation])}


def oracle_results(name: str, dtype: DType) -> Callable[..., Result]:
    def evaluate(case: Case, operation: str | None = None, documented: bool = False) -> Result:
        record = RECORDS[operation or name]
        return Result(lambda: reference(record, case, dtype), lambda: reference_gradients(record, case, dtype))

    return evaluate


# The oracle computes bfloat16 as it does float32.
@pytest.mark.full(but=4)
@pytest.mark.parametrize("dtype", sampled(["float32", "float64"], "float32"))
@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param(name, law, marks=() if name in ("softmax", "giou", "matmul") else pytest.mark.full)
        for name, operation in RECORDS.items()
        for law in operation.laws
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_oracles_keep_their_laws(name: str, law: Callable, dtype: str) -> None:
    # Use bounds in the oracle's arithmetic instead of the kernels': an oracle must not break a law even by less than
    # float32's rounding.
    held_to = replace(DTYPES[dtype], arithmetic=arithmetic_of(DTYPES[dtype].wide))
    operation, evaluate = RECORDS[name], oracle_results(name, held_to)
    compared = 0

    @hypothesis.settings(few, max_examples=10)
    @hypothesis.given(operation.cases(DTYPES[dtype], 512))
    def holds(case: Case) -> None:
        nonlocal compared
        compared += sum(agreement.elements - agreement.unspecified for agreement in hold(law, evaluate, case, held_to))

    for make in operation.examples.values():
        case = make(DTYPES[dtype])
        compared += sum(agreement.elements - agreement.unspecified for agreement in hold(law, evaluate, case, held_to))
    holds()
    assert compared > 0


UNIT = (0.0, 0.0, 1.0, 1.0)
PADDING = (0.0, 0.0, 0.0, 0.0)


def score(a: tuple, b: tuple, eps: float = 1e-5) -> float:
    return float(giou.forward(np.array(a, dtype=np.longdouble), np.array(b, dtype=np.longdouble), eps))


def slopes(a: tuple, b: tuple, eps: float = 1e-5) -> list[float]:
    """Return the gradient of the first box."""
    boxes = np.array([a, b], dtype=np.longdouble)
    return giou.backward(np.longdouble(1), boxes[0], boxes[1], eps)[0].astype(np.float64).tolist()


@pytest.mark.parametrize(
    ("a", "b", "eps", "expected"),
    [
        pytest.param(UNIT, UNIT, 1e-5, 1.0, id="identical"),
        pytest.param(UNIT, (2, 2, 3, 3), 1e-5, -7 / 9, id="apart_along_both_axes"),  # I=0 U=2 C=9
        pytest.param(UNIT, (2, 0, 3, 1), 1e-5, -1 / 3, id="apart_along_x"),  # I=0 U=2 C=3
        pytest.param(UNIT, (0, 3, 1, 4), 1e-5, -1 / 2, id="apart_along_y"),  # I=0 U=2 C=4
        pytest.param(UNIT, (1, 1, 2, 2), 1e-5, -1 / 2, id="touching_in_a_corner"),  # I=0 U=2 C=4
        pytest.param((0, 0, 2, 1), (1, 0, 3, 1), 1e-5, 1 / 3, id="half_covered"),  # I=1 U=3 C=3
        pytest.param((0, 0, 2, 2), (1, 1, 3, 3), 1e-5, 1 / 7 - 2 / 9, id="corner_covered"),  # I=1 U=7 C=9
        pytest.param((0, 0, 4, 4), (0, 1, 2, 3), 1e-5, 1 / 4, id="nested"),  # I=4 U=16 C=16
        pytest.param((3, 3, 3, 3), (3, 3, 3, 3), 1e-5, 0.0, id="one_point"),  # I=0, U and C clamped
        pytest.param((3, 3, 3, 3), (0, 0, 8, 8), 1e-5, 0.0, id="point_in_a_box"),  # I=0 U=64 C=64
        pytest.param(UNIT, UNIT, 4.0, 1 / 4, id="areas_below_eps"),  # I=1 U=4 C=4
        pytest.param((4, 4, 1, 1), (4, 4, 1, 1), 1e-5, 1.0, id="both_inverted"),  # I=0 U=18 C=9
        pytest.param((4, 0, 1, 1), (0, 0, 8, 8), 1e-5, -3 / 64, id="one_inverted"),  # I=0 U=64-3 C=64
    ],
)
def test_scores_are_those_computed_by_hand(a: tuple, b: tuple, eps: float, expected: float) -> None:
    assert score(a, b, eps) == pytest.approx(expected, rel=4 * FLOAT64.roundoff, abs=4 * FLOAT64.roundoff)


@pytest.mark.parametrize(
    ("a", "b", "eps", "expected"),
    [
        # I = 0 and stays 0, so the score is U / C - 1, and its slope dU / C - U dC / C^2 with U = 2, C = 9.
        pytest.param(UNIT, (2, 2, 3, 3), 1e-5, [-1 / 27, -1 / 27, 1 / 9, 1 / 9], id="apart_along_both_axes"),
        # Union and hull gain half of what a box gains in area. Identical boxes are at a maximum: every slope is 0.
        pytest.param(UNIT, UNIT, 1e-5, [0, 0, 0, 0], id="identical"),
        # Widths meet at 0, where the clamp passes: moving x2 adds 1 to I and 0 to U = 3, not 1 to U with C = 4. Below,
        # y1 ties in I, which is 0 along y, and in the hull: dU = -1, dC = -2/2, so -1/4 + 3/16.
        pytest.param(UNIT, (1, 0, 2, 2), 1e-5, [1 / 8, -1 / 16, 1 / 3, 1 / 4], id="touching_along_x"),
        # U = C = eps = 1, where both clamps pass: I = 1/4, dU = dC = -+1, so the shares of U / C cancel.
        pytest.param(UNIT, (0.25, 0.25, 0.75, 0.75), 1.0, [1 / 4, 1 / 4, -1 / 4, -1 / 4], id="areas_equal_to_eps"),
        # Below eps both are constant, and I does not move.
        pytest.param(UNIT, (0.25, 0.25, 0.75, 0.75), 1.5, [0, 0, 0, 0], id="areas_below_eps"),
    ],
)
def test_slopes_are_those_computed_by_hand(a: tuple, b: tuple, eps: float, expected: list[float]) -> None:
    assert slopes(a, b, eps) == pytest.approx(expected, rel=8 * FLOAT64.roundoff, abs=8 * FLOAT64.roundoff)


def test_losses_by_the_centres_distance_are_those_computed_by_hand() -> None:
    pred = np.array([[UNIT, UNIT], [UNIT, UNIT]], dtype=np.longdouble)
    target = np.array([[(2, 2, 3, 3), (1, 0, 3, 1)], [(0, 0, 2, 1), PADDING]], dtype=np.longdouble)
    # Of I / U the scores are 0, 0 and 1/2. Of the angles atan(w / h) those of the second and third target are atan(2).
    of_distance = np.array([8 / 18, 2.25 / 10, 0.25 / 5]) + np.array([1, 1, 1 / 2])
    v = 4 / np.pi**2 * (np.arctan(2) - np.pi / 4) ** 2
    of_aspect = np.array([0, v * v / (1 + v), v * v / (1 / 2 + v)])
    near = functools.partial(pytest.approx, rel=8 * FLOAT64.roundoff)
    assert float(diou_loss.forward(pred, target)) == near(of_distance.mean())
    assert float(ciou_loss.forward(pred, target)) == near((of_distance + of_aspect).mean())
    taken = target[[0, 0, 1], [0, 1, 0]]
    assert float(ciou_loss_ragged.forward(pred, taken, np.array([0, 2, 3]))) == near((of_distance + of_aspect).mean())
    # Of d^2 / c^2 = 8 / 18 at x1 = 0 of UNIT: d^2 falls by 2 dx = 4 times 1/2, and c^2 by 2 * 3.
    (of_pred, of_target) = diou_loss.backward(np.longdouble(3), pred, target)
    assert float(of_pred[0, 0, 0]) == near(-2 / 18 + 8 * 6 / 18**2)
    assert float(of_target[0, 0, 2]) == near(2 / 18 - 8 * 6 / 18**2)


def test_degenerate_boxes_have_an_aspect() -> None:
    point, line = np.full((1, 4), 3.0), np.array([[0.0, 1.0, 4.0, 1.0]])
    assert diou.score(point, point, 1e-5, aspect=True) == 0
    assert diou.score(line, line, 1e-5, aspect=True) == 0
    # A height of 0 counts as eps, and nothing is divided by 0.
    upright = diou.sides(line, 0.25)
    assert [float(side[0]) for side in upright] == [4, 0.25, 0]
    for gradient in diou.gradients(np.ones(1), point, line, 1e-5, aspect=True):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("aspect", [False, True])
def test_gradient_of_a_pair_is_the_slope_with_alpha_as_a_constant(aspect: bool) -> None:
    a, b = (boxes.astype(np.longdouble) for boxes in pairs_without_ties(np.random.default_rng(3), 200, FLOAT64))
    areas = giou.intersection_union_hull(a, b)
    alpha = diou.aspects(a, b, areas[2] / areas[3], 1e-5)[2]
    analytic = diou.gradients(np.ones(200, np.longdouble), a, b, 1e-5, aspect)
    for which, gradient in enumerate(analytic):
        for coordinate in range(4):
            ends = []
            for side in (STEP, -STEP):
                moved = [a.copy(), b.copy()]
                moved[which][:, coordinate] += side
                ends.append(diou.score(*moved, 1e-5, aspect, alpha))
            slope = (ends[0] - ends[1]) / (2 * STEP)
            assert abs(slope - gradient[:, coordinate]).max() < 1e-10
    if aspect:
        # Where sides have other ratios, alpha is no constant of the score: its slope is another one.
        assert np.median(alpha) > 1e-3


def test_a_target_below_zero_counts_in_the_ragged_loss_only() -> None:
    pred = np.array([[(-4.0, -4.0, -1.0, -1.0)]])
    below = np.array([[-4.0, -4.0, -1.0, -1.0]])
    apart = np.array([[-8.0, -4.0, -7.0, -1.0]])  # I=0 U=9+3 C=21
    assert giou_loss_ragged.forward(pred, below, np.array([0, 1])) == 0
    assert giou_loss_ragged.forward(pred, apart, np.array([0, 1])) == pytest.approx(
        1 + 9 / 21, rel=4 * FLOAT64.roundoff
    )
    assert giou_loss.forward(pred, apart[None]) == 0


def test_losses_without_boxes_are_zero() -> None:
    for shape in ((0, 3, 4), (3, 0, 4), (2, 2, 4)):
        pred, target = np.ones(shape), np.zeros(shape)
        assert giou_loss.forward(pred, target) == 0
        assert not any(gradient.any() for gradient in giou_loss.backward(np.float64(1), pred, target))
        offsets = np.zeros(shape[0] + 1, dtype=np.int32)
        assert giou_loss_ragged.forward(pred, np.zeros((0, 4)), offsets) == 0
        assert not giou_loss_ragged.backward(np.float64(1), pred, np.zeros((0, 4)), offsets)[0].any()


def test_every_operation_has_an_oracle_and_an_implementation_of_its_name() -> None:
    for name in OPERATIONS:
        assert (ROOT / "oracles" / f"{name}.py").is_file()
        assert (ROOT / "impls" / name / "torch_eager.py").is_file()
