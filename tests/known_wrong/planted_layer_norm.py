"""Planted faults in layer_norm, in torch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fourfold.impls.layer_norm.arguments import check_layer_norm
from fourfold.properties import layer_norm as properties

from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.checks.single_gradients import single_gradients_agree
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .planted import GRADIENT, OUTPUT, Fault, law
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
NAMES = ("x", "weight", "bias")


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def variance(x: Tensor, average: Tensor) -> Tensor:
    return mean((x - average).square())


def deviation(spread: Tensor, eps: float) -> Tensor:
    return (spread + eps).sqrt()


def gradient_of_x(inner: Tensor, normal: Tensor, root: Tensor) -> Tensor:
    return (inner - mean(inner) - normal * mean(inner * normal)) / root


def over_rows(terms: Tensor) -> Tensor:
    return terms.flatten(0, -2).sum(0) if terms.ndim > 1 else terms


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of layer_norm that a fault may replace."""

    compute: Callable = in_compute_dtype
    mean: Callable = mean
    variance: Callable = variance
    deviation: Callable = deviation
    output: Callable = lambda normal, weight, bias: normal * weight + bias
    # Steps of the gradient.
    gradient_of_x: Callable = gradient_of_x
    over_rows: Callable = over_rows
    of_weight: Callable = lambda grad, normal, root: grad * normal


def layer_norm(
    validate: Callable[..., None] = check_layer_norm, guarded: bool = True, **changes: Any
) -> Implementation:
    """Return layer_norm with some steps changed. The gradient uses the right steps of the output."""
    steps = Steps(**changes)

    def normalized(steps: Steps, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        average = steps.mean(x)
        root = steps.deviation(steps.variance(x, average), eps)
        return (x - average) / root, root

    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        normal, _ = normalized(steps, steps.compute(x), eps)
        return steps.output(normal, steps.compute(weight), steps.compute(bias)).to(x.dtype)

    def backward(grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple:
        normal, root = normalized(Steps(), in_compute_dtype(x), eps)
        grad = in_compute_dtype(grad)
        of_x = steps.gradient_of_x(grad * in_compute_dtype(weight), normal, root)
        of_weight, of_bias = steps.over_rows(steps.of_weight(grad, normal, root)), steps.over_rows(grad)
        return of_x.to(x.dtype), of_weight.to(x.dtype), of_bias.to(x.dtype)

    return differentiable(NAMES, forward, backward, validate, guarded, eps=1e-5)


def square_of_mean(x: Tensor, average: Tensor) -> Tensor:
    """Compute the variance as E[x^2] - E[x]^2, clamped at 0."""
    return (mean(x.square()) - average.square()).clamp(min=0)


def of_a_sample(x: Tensor, average: Tensor) -> Tensor:
    return (x - average).square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1)


def last_column_left_out(x: Tensor) -> Tensor:
    return x[..., :-1].mean(-1, keepdim=True) if x.shape[-1] > 1 else mean(x)


def over_whole_blocks(x: Tensor) -> Tensor:
    """Divide the sum over the columns by their number rounded up to a multiple of 16."""
    return x.sum(-1, keepdim=True) / (x.shape[-1] + -x.shape[-1] % 16 or 16)


def summed_in_bfloat16(x: Tensor) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], 1), dtype=torch.bfloat16)
    for block in x.bfloat16().split(64, -1):
        total = total + block.sum(-1, keepdim=True)
    return total.to(x.dtype) / max(x.shape[-1], 1)


def over_all(x: Tensor) -> Tensor:
    """Take one mean over all rows."""
    return x.mean() if x.numel() else mean(x)


def rows_past_256_left_out(terms: Tensor) -> Tensor:
    return over_rows(terms.flatten(0, -2)[:256] if terms.ndim > 1 else terms)


def first_rows_left_out(terms: Tensor) -> Tensor:
    return over_rows(terms.flatten(0, -2)[1:] if terms.ndim > 1 and len(terms.flatten(0, -2)) > 1 else terms)


def weighed_by_the_first(normal: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normal * weight.roll(1, 0) + bias


def nothing_for_parameters_together() -> Implementation:
    """Halve bias's gradient if weight and bias need gradients and x does not, as a fault in a kernel for that case."""
    whole = layer_norm()

    def implementation(**arguments: Any) -> Tensor:
        x, weight, bias = (arguments[name] for name in NAMES)
        if weight.requires_grad and bias.requires_grad and not x.requires_grad:
            arguments["bias"] = bias * 0.5 + bias.detach() * 0.5
        return whole(**arguments)

    return implementation


def one_row(dtype: DType) -> Case:
    """Return one row with equal weights."""
    x = np.linspace(-2, 3, 16).reshape(1, 16).astype(dtype.numpy)
    ones = np.ones(16, dtype=dtype.numpy)
    return Case({"x": x, "weight": ones, "bias": 0 * ones}, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-5})


def no_cotangent(dtype: DType) -> Case:
    """Return a case with a grad_output of 0, so that every gradient is 0."""
    case = one_row(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


def _faults() -> tuple[Fault, ...]:
    def of(
        name: str, check: Callable, says: str, right_on: Any = "one_column", dtype: str = "float32", **changes: Any
    ) -> Fault:
        make = functools.partial(layer_norm, **changes)
        return Fault(
            name=name, operation="layer_norm", check=check, make=make, says=says, right_on=right_on, dtype=dtype
        )

    forward, backward, left = forward_agrees, backward_agrees, r"left side.* is .*expected"
    no_mean = {"gradient_of_x": lambda inner, normal, root: (inner - normal * mean(inner * normal)) / root}
    no_product = {"gradient_of_x": lambda inner, normal, root: (inner - mean(inner)) / root}
    outside = {"deviation": lambda spread, eps: spread.sqrt() + eps}
    typed_in = {"deviation": lambda spread, eps: deviation(spread, 1e-5)}
    half_as_wide = {"variance": lambda x, average: variance(x, average) / 2}
    bias_doubled = {"output": lambda normal, weight, bias: normal * weight + 2 * bias}
    together = Fault(
        name="parameters_without_the_input",
        operation="layer_norm",
        check=single_gradients_agree,
        make=nothing_for_parameters_together,
        says="for weight and bias alone, gradient of bias",
        right_on=no_cotangent,
    )
    return (
        together,
        of("square_of_mean", forward, OUTPUT, "two_columns", variance=square_of_mean),
        of("variance_of_a_sample", forward, OUTPUT, variance=of_a_sample),
        of("eps_outside_the_root", forward, OUTPUT, **outside),
        of("eps_typed_in", forward, OUTPUT, "two_columns", **typed_in),
        of("last_column_not_in_the_mean", forward, OUTPUT, mean=last_column_left_out),
        of("mean_summed_in_bfloat16", forward, OUTPUT, "one_column", "bfloat16", mean=summed_in_bfloat16),
        of("computed_in_half", forward, OUTPUT, None, "float16", compute=lambda x: x),
        of("one_mean_for_all_rows", forward, OUTPUT, "one_row_without_leading_axes", mean=over_all),
        of("weight_of_the_next_column", forward, OUTPUT, output=weighed_by_the_first),
        of("mean_of_gradient_left_out", backward, GRADIENT, None, **no_mean),
        of("product_left_out", backward, GRADIENT, "one_column", **no_product),
        of("rows_past_256_left_out", backward, GRADIENT, "one_short_of_1024_columns", over_rows=rows_past_256_left_out),
        of(
            "weight_not_normalized",
            backward,
            GRADIENT,
            "one_column",
            of_weight=lambda grad, normal, root: grad * normal * root,
        ),
        of("no_gradient", backward, GRADIENT, "one_column", gradient_of_x=lambda inner, normal, root: 0 * inner),
        of("mean_of_gradient_left_out", gradcheck, "gradcheck: Jacobian mismatch", None, "float64", **no_mean),
        of(
            "shapes_not_checked",
            declared_errors_are_raised,
            "in place of|was raised",
            None,
            validate=lambda *_, **__: None,
        ),
        of("law", law(properties.adding_a_number_to_a_row_changes_nothing), left, one_row, mean=over_whole_blocks),
        of("law", law(properties.scaling_a_row_scales_the_deviation_alone), left, one_row, **typed_in),
        of("law", law(properties.constant_rows_give_the_bias), left, one_row, **bias_doubled),
        of("law", law(properties.columns_may_change_places), left, one_row, output=weighed_by_the_first),
        of("law", law(properties.normalized_rows_sum_to_zero), left, "one_column", mean=last_column_left_out),
        of("law", law(properties.normalized_rows_have_at_most_unit_mean_square), left, "one_column", **half_as_wide),
        of("law", law(properties.gradients_of_a_row_sum_to_zero), left, None, **no_mean),
        of(
            "law",
            law(properties.gradient_of_bias_is_the_sum_of_cotangents),
            left,
            one_row,
            over_rows=first_rows_left_out,
        ),
        of(
            "law",
            law(properties.gradient_of_weight_weighs_the_normalized_rows),
            left,
            one_row,
            over_rows=first_rows_left_out,
        ),
        of("law", law(properties.a_row_does_not_see_the_others), left, one_row, mean=over_all),
        of("law", law(properties.gradients_of_two_batches_add_up), left, one_row, over_rows=first_rows_left_out),
    )


FAULTS = _faults()
