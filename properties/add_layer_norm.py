"""The record of add_layer_norm: a residual is added to x, and the sum is normalized over the last axis.

As of add_rms_norm, it is left open whether the sum is rounded to the dtype before it is normalized.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import add_layer_norm as oracle
from hypothesis import strategies as st

from fourfold.declaration import definition
from fourfold.inputs.arrays import cotangent, values
from fourfold.numerics.bounded import Bounded, stored, unspecified_where
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import positive, tensor
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.workloads import Make, tiled, whole

from . import layer_norm
from .add_rms_norm import admissible, joint, nothing_is_added_to_nothing, of_both_cotangents

INPUTS = ("x", "residual", "weight", "bias")

# ---- what is right


def of_y(**arguments: Any) -> Any:
    """The norm of the sum, which may be rounded."""
    return oracle.forward(**arguments, stored=stored, norm=layer_norm.forward)[0]


def of_both(**arguments: Any) -> Any:
    """y and h, side by side."""
    return np.concatenate(oracle.forward(**arguments, stored=stored, norm=layer_norm.forward), axis=-1)


def backward_of_y(grad_y: Any, x: Any, residual: Any, **others: Any) -> tuple[Any, ...]:
    """The gradients where h is not used. x and residual have the same."""
    of_sum, *rest = layer_norm.backward(grad_y, stored(x + residual), **others)
    return of_sum, of_sum, *rest


def backward_of_h(grad_h: Any, x: Any, residual: Any, **others: Any) -> tuple[Any, ...]:
    """The cotangent itself; unspecified where the norm's gradient of a cotangent of zeros is no number."""
    if not isinstance(x, Bounded):
        return grad_h, grad_h
    zeros = Bounded.exact(np.zeros(grad_h.shape), x.arithmetic)
    through_norm, *_ = backward_of_y(zeros, x, residual, **others)
    of_sum = unspecified_where(grad_h, ~np.isfinite(through_norm.value) | np.isinf(through_norm.error))
    return of_sum, of_sum


def backward_of_both(grad_outputs: Any, **arguments: Any) -> tuple[Any, ...]:
    """The sums of both outputs' gradients."""
    cols = arguments["x"].shape[-1]
    grads = grad_outputs[..., :cols], grad_outputs[..., cols:]
    return oracle.backward(*grads, **arguments, stored=stored, norm=layer_norm.backward)


# ---- cases


@st.composite
def smooth(draw: st.DrawFn, dtype: DType) -> Case:
    """Those of layer_norm, as the sum of two."""
    case = draw(layer_norm.smooth(dtype))
    half = (case["x"] / 2).astype(dtype.numpy)
    inputs = {"x": half, "residual": case["x"] - half, "weight": case["weight"], "bias": case["bias"]}
    return replace(case, inputs=inputs)


def rows(*shape: int, **layouts: str) -> Callable[[DType], Case]:
    """A named case of random rows."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(59)
        shapes = zip(INPUTS, (shape, shape, shape[-1:], shape[-1:]))
        inputs = {name: values(rng, of, dtype, "normal") for name, of in shapes}
        return Case(inputs, cotangent(rng, shape, dtype), {"eps": 1e-5}, layouts)

    return make


# ---- laws


def the_summands_may_change_places(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """add_layer_norm(residual, x) = add_layer_norm(x, residual)."""
    there = evaluate(case.with_inputs(x=case["residual"], residual=case["x"]))
    yield Relation(evaluate(case).output, there.output)


def y_is_the_norm_of_the_sum(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """Where the sum is a number of the dtype, y and its gradients are those of layer_norm."""
    with np.errstate(all="ignore"):
        sums = (case["x"].astype(dtype.wide) + case["residual"].astype(dtype.wide)).astype(dtype.numpy)
    alone = Case({"x": sums, **{name: case[name] for name in INPUTS[2:]}}, case.grad_output, case.parameters)
    here = evaluate(case.with_inputs(x=sums, residual=np.zeros_like(sums)))
    there = evaluate(alone, "layer_norm")
    yield Relation(here.output, there.output)
    for name in INPUTS:
        yield Relation(here.gradients[name], there.gradients["x" if name == "residual" else name])


# ---- the record

EPS = positive(*layer_norm.EPS)
ARGUMENTS = Arguments(
    x=tensor("... cols"), residual=tensor("... cols"), weight=tensor("cols"), bias=tensor("cols"), eps=EPS
)


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads all inputs and writes both outputs; backward reads both cotangents and the sum."""
    x, parameters = case["x"], case["weight"].nbytes
    return Cost(4 * x.nbytes + 2 * parameters, 9 * x.size), Cost(4 * x.nbytes + 3 * parameters, 15 * x.size)


def _workloads(cotangents: Callable[[Any], Any]) -> Mapping[str, Mapping[str, Make]]:
    def of(*shape: int) -> Callable[[DType], Case]:
        return cotangents(rows(*shape))

    return {
        "cpu": {"small": whole(of(32, 256)), "ragged": whole(of(17, 1001))},
        "cuda": {
            "small": whole(of(128, 256)),
            "large": tiled(of(256, 4096), 128, *INPUTS[:2]),
            "ragged": tiled(of(33, 1001), 256, *INPUTS[:2]),
        },
    }


@definition.operation(
    x=tensor("... cols"),
    residual=tensor("... cols"),
    weight=tensor("cols"),
    bias=tensor("cols"),
    eps=EPS,
    returns={"y": None, "h": None},
    batched={"x": 1, "residual": 1},
    errors=ARGUMENTS.errors,
    source="Ba, Kiros, Hinton, Layer Normalization, 2016",
)
def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and h."""
    h = x + residual
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias, h


ALONE: dict[str, Any] = {"smooth": smooth, "cost": cost, "workloads": _workloads(lambda make: make)}
_h = add_layer_norm.outputs["h"]
operation = replace(
    add_layer_norm,
    forward=of_both,
    backward=backward_of_both,
    batched={},
    smooth=joint(smooth),
    cost=cost,
    workloads=_workloads(of_both_cotangents),
    admissible=admissible,
    outputs={
        "y": replace(
            add_layer_norm.outputs["y"],
            forward=of_y,
            backward=backward_of_y,
            laws=(the_summands_may_change_places, y_is_the_norm_of_the_sum),
            **ALONE,
        ),
        "h": replace(
            _h,
            forward=lambda x, residual, **others: x + residual,
            backward=backward_of_h,
            differentiable=INPUTS[:2],
            laws=(the_summands_may_change_places, nothing_is_added_to_nothing),
            **ALONE,
        ),
    },
)
