"""The record of sigmoid_focal_loss: of logits and targets of one shape, reduced or not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import sigmoid_focal_loss as oracle
from hypothesis import strategies as st

from fourfold.inputs.arrays import GENERATORS, cotangent, repeat_first
from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.bounded import Bounded, contract_of, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import total
from fourfold.numerics.steps.orders import any_order, either_formula
from fourfold.numerics.torch_adapter.evaluate import backward_of, forward_of
from fourfold.operations.arguments import Values, not_negative, one_of, tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Evaluate, Operation, Relation, Result, Sized
from fourfold.operations.relations import equal_where, only
from fourfold.operations.workloads import Make, tiled, whole

REDUCTIONS = ("none", "mean", "sum")
LOGITS = Elementwise(logits="spread")


def torchvisions(
    logits: torch.Tensor, targets: torch.Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
) -> torch.Tensor:
    """Compute the loss as torchvision.ops.sigmoid_focal_loss does, whose steps other kernels may take."""
    p = torch.sigmoid(logits)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    losses = entropy * (1 - (p * targets + (1 - p) * (1 - targets))) ** gamma
    if alpha >= 0:
        losses = (alpha * targets + (1 - alpha) * (1 - targets)) * losses
    return losses if reduction == "none" else getattr(losses, reduction)()


def torchvision_allowance(found: Any, logits: Any, of_others: Callable[[], Bounded]) -> Any:
    """Return a bound, for other kernels at least that of torchvision's steps: 1 - (1 - p) loses the digits of p.

    Of infinite logits nothing is known there: 0 times infinity is NaN.
    """
    contract = contract_of(found)
    if contract.reassociation:
        found = either_formula(found, of_others())
    if not contract.nonfinite:
        return found
    infinite = np.isinf(logits.value)
    infinite = infinite if found.shape == infinite.shape else infinite.any()
    return unspecified_where(found, infinite)


def forward(logits: Any, targets: Any, **parameters: Any) -> Any:
    """Return the oracle's output."""
    arguments = {"logits": logits, "targets": targets, **parameters}
    return torchvision_allowance(oracle.forward(**arguments), logits, lambda: forward_of(torchvisions)(**arguments))


def backward(grad_output: Any, logits: Any, targets: Any, **parameters: Any) -> tuple[Any]:
    """Return the oracle's gradient, unspecified where the order of steps decides: for an infinite logit or cotangent.

    The cotangent may be multiplied by gamma and the cross entropy first. That is no more than the logit and 1, and
    multiplies 0 where the exponential of the logit underflows.
    """
    arguments = {"logits": logits, "targets": targets, **parameters}
    (grad,) = oracle.backward(grad_output, **arguments)
    if not isinstance(grad, Bounded):
        return (grad,)
    grad = torchvision_allowance(
        grad, logits, lambda: backward_of(torchvisions, ["logits"])(grad_output, **arguments)[0]
    )
    arithmetic = grad.arithmetic
    far = -np.log(2 * arithmetic.roundoff * arithmetic.smallest_normal)
    grad = any_order(grad, (grad_output, parameters.get("gamma", 2.0), np.fmin(abs(logits.value), far) + 1))
    return (unspecified_where(grad, np.isinf(logits.value) | ~np.isfinite(grad_output.value)),)


def labels(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, soft: float = 0.3) -> np.ndarray:
    """Return targets 0 and 1, and a share of them between."""
    mixed = np.where(rng.random(shape) < soft, rng.random(shape), rng.random(shape) < 0.4)
    return np.asarray(mixed).astype(dtype.numpy)


def case_of(
    logits: Case, rng: np.random.Generator, dtype: DType, soft: float, alpha: float, gamma: float, reduction: str
) -> Case:
    """Return a case with targets beside its logits, in the same layout, and a cotangent of the reduced loss."""
    targets, layouts = labels(rng, logits["logits"].shape, dtype, soft), dict(logits.layouts)
    layouts["targets"] = layouts.get("logits", "contiguous")
    if layouts["targets"] == "expanded":
        targets = repeat_first(targets)
    grad_output = logits.grad_output if reduction == "none" else cotangent(rng, (), dtype)
    parameters = {"alpha": alpha, "gamma": gamma, "reduction": reduction}
    return Case({**logits.inputs, "targets": targets}, grad_output, parameters, layouts)


@st.composite
def cases(draw: st.DrawFn, dtype: DType, elements: int) -> Case:
    """Draw logits of none to three axes, with hard targets, soft ones or both."""
    logits, soft = draw(LOGITS.cases(dtype, elements)), draw(st.sampled_from((0.0, 0.3, 1.0)))
    alpha, gamma = (
        draw(st.sampled_from((0.25, -1.0, -0.25, 0.75, 1.0))),
        draw(st.sampled_from((2.0, 0.0, 0.5, 1.0, 3.5))),
    )
    reduction = draw(st.sampled_from(("none", *REDUCTIONS)))
    return case_of(logits, draw(GENERATORS), dtype, soft, alpha, gamma, reduction)


def of(
    make: Callable[[DType], Case],
    reduction: str = "none",
    alpha: float = 0.25,
    gamma: float = 2.0,
    soft: float = 0.3,
    **layouts: str,
) -> Callable[[DType], Case]:
    """Return a named case of given logits."""

    def made(dtype: DType) -> Case:
        case = case_of(make(dtype), np.random.default_rng(34), dtype, soft, alpha, gamma, reduction)
        return replace(case, layouts={**case.layouts, **layouts})

    return made


def random_case(*shape: int, **given: Any) -> Callable[[DType], Case]:
    """Return a named case of random logits."""
    return of(LOGITS.random(*shape), **given)


def certain(dtype: DType) -> Case:
    """Return logits from 0 to beyond the underflow of their exponential, for and against both targets."""
    sizes = np.array([0, 0.5, 4, 15, 17, 40, 80, 90, 104, 600, 760, 20000])
    logits = np.concatenate([sizes, -sizes, sizes, -sizes]).astype(dtype.numpy)
    targets = np.repeat([0.0, 1.0], 2 * len(sizes)).astype(dtype.numpy)
    parameters = {"alpha": 0.25, "gamma": 0.125, "reduction": "none"}
    return Case({"logits": logits, "targets": targets}, np.linspace(-2, 3, len(logits)).astype(dtype.numpy), parameters)


examples: Mapping[str, Callable[[DType], Case]] = {
    **{name: of(make) for name, make in LOGITS.examples.items()},
    "no_elements_summed": random_case(0, reduction="sum"),
    "no_elements_averaged": random_case(0, 3, reduction="mean"),
    "one_number_averaged": random_case(reduction="mean"),
    "blocks_summed": random_case(3 * 4096 + 5, reduction="sum", alpha=-1.0),
    "blocks_averaged": random_case(33, 250, reduction="mean", gamma=0.5),
    "misaligned_and_averaged": random_case(1027, reduction="mean", logits="misaligned"),
    "targets_misaligned": random_case(1027, targets="misaligned"),
    "targets_transposed": random_case(33, 65, targets="transposed"),
    "targets_strided": random_case(33, 65, targets="sliced_columns", reduction="sum"),
    "cross_entropy": random_case(257, alpha=-1.0, gamma=0.0),
    # Any negative alpha leaves the weights out.
    "alpha_just_below_zero": random_case(257, alpha=-0.01),
    "alpha_far_below_zero": random_case(257, alpha=-3.0, reduction="mean"),
    "negatives_alone_weighted": random_case(64, alpha=0.0, soft=0.0),
    "certain": certain,
    "certain_cross_entropy": lambda dtype: certain(dtype).with_parameters(alpha=-1.0, gamma=0.0),
    "special_logits": of(LOGITS.special_numbers),
}


def a_logit_and_its_negative_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The loss of -x and 1 - t with 1 - alpha is that of x and t with alpha, and the gradient is its negative."""
    t: np.ndarray = case["targets"].astype(dtype.wide)
    rest, alpha = (1 - t).astype(dtype.numpy), case.parameters["alpha"]
    exact = rest.astype(dtype.wide) == 1 - t
    turned = case.with_inputs(logits=-case["logits"], targets=rest)
    here, there = evaluate(case), evaluate(turned.with_parameters(alpha=alpha if alpha < 0 else 1 - alpha))
    if case.parameters["reduction"] == "none":
        yield equal_where(exact, here.output, there.output)
    yield equal_where(exact, here.gradients["logits"], -there.gradients["logits"])


def cross_entropies_of_both_answers_differ_by_the_logit(
    evaluate: Evaluate, case: Case, dtype: DType
) -> Iterator[Relation]:
    """With gamma 0 and no weights, the loss of target 0 minus that of target 1 is the logit."""
    shape = case["logits"].shape
    plain = case.with_parameters(alpha=-1.0, gamma=0.0, reduction="none")
    plain = replace(plain, grad_output=np.ones(shape, dtype.numpy), layouts={})
    no, yes = (evaluate(plain.with_inputs(targets=np.full(shape, t, dtype.numpy))).output for t in (0, 1))
    x: np.ndarray = case["logits"].astype(dtype.wide)
    finite = np.isfinite(x)
    yield Relation(only(finite, no - yes), Bounded.exact(np.where(finite, x, 0), no.arithmetic))


def weights_scale_the_losses(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Losses are those without weights times alpha t + (1 - alpha) (1 - t)."""
    alpha = case.parameters["alpha"]
    if alpha >= 0 and case.parameters["reduction"] == "none":
        plain = evaluate(case.with_parameters(alpha=-1.0)).output
        weight = Bounded.exact(case["targets"].astype(dtype.wide), plain.arithmetic)
        yield Relation(evaluate(case).output, plain * (alpha * weight + (1 - alpha) * (1 - weight)))


def the_sum_is_that_of_the_losses(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The sum is that of the losses, and the mean times their number. So are the gradients."""
    count = case["logits"].size
    if not count:
        return

    def reduced(reduction: str, *shape: int) -> Result:
        ones = np.ones(shape, dtype.numpy)
        return evaluate(replace(case.with_parameters(reduction=reduction), grad_output=ones, layouts={}))

    each, summed, mean = reduced("none", *case["logits"].shape), reduced("sum"), reduced("mean")
    yield Relation(summed.output, total(each.output.reshape(-1), axis=0))
    yield Relation(summed.output, float(count) * mean.output)
    yield Relation(summed.gradients["logits"], each.gradients["logits"])
    yield Relation(summed.gradients["logits"], float(count) * mean.gradients["logits"])


ARGUMENTS = Arguments(
    logits=tensor("..."),
    targets=tensor("..."),
    alpha=Values(
        (0.25,),
        out_of_range={"above_one": 1.5, "not_a_number": np.nan, "infinite": np.inf, "lowest": -np.inf},
        of_another_type={"a_string": "0.25", "none": None},
        range=(0.0, 1.0),
    ),
    gamma=replace(not_negative(2.0), range=(0.0, 8.0)),
    reduction=one_of(*REDUCTIONS),
)


def make_of_sizes(sizes: Mapping[str, int], leading: Any = None, given: Mapping[str, Any] | None = None) -> Any:
    """Return a named case of chosen sizes and parameters."""
    return random_case(*((sizes["..."],) if leading is None else leading), **(given or {}))


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(random_case(1 << 14)), "ragged": whole(random_case(7, 1001, reduction="mean"))},
    "cuda": {
        "small": whole(random_case(1 << 14)),
        "large": tiled(random_case(1 << 18, soft=0.0), 1024, "logits", "targets"),
        "averaged": tiled(random_case(1 << 18, soft=0.0, reduction="mean"), 1024, "logits", "targets"),
        "ragged": tiled(random_case(33, 1001), 512, "logits", "targets"),
    },
}

operation = Operation(
    name="sigmoid_focal_loss",
    forward=forward,
    backward=backward,
    differentiable=("logits",),
    cases=cases,
    examples=examples,
    # Of losses that are not reduced.
    batched={"logits": 0, "targets": 0},
    laws=(
        a_logit_and_its_negative_change_places,
        cross_entropies_of_both_answers_differ_by_the_logit,
        weights_scale_the_losses,
        the_sum_is_that_of_the_losses,
    ),
    errors=ARGUMENTS.errors,
    workloads=workloads,
    axes=ARGUMENTS.axes,
    ordinary=("targets",),
    ranges=ARGUMENTS.ranges,
    sized=Sized({"...": 1}, make_of_sizes, varied=make_of_sizes),
    source="Lin et al., Focal Loss for Dense Object Detection, ICCV 2017",
)
