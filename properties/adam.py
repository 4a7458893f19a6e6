"""The record of adam: one step in place, whose outputs are the new values of param, m and v."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import adam as oracle

from fourfold.declaration import definition
from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import cotangent, values
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.case import Case
from fourfold.operations.outputs import side_by_side
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, tiled, whole

CHANGED = ("param", "m", "v")
DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
ARGUMENTS = arguments_of("adam")


def step_of(*shape: int, **parameters: Any) -> Callable[[DType], Case]:
    """Return a named case of random numbers, as after some steps."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(71)
        param, grad = (values(rng, shape, dtype, "normal") for _ in range(2))
        m, v = (values(rng, shape, DTYPES["float32"], kind) for kind in ("normal", "positive"))
        inputs = {"param": param, "grad": grad, "m": m, "v": v}
        return Case(inputs, cotangent(rng, shape, dtype), {**DEFAULTS, **parameters})

    return make


def with_squares_of_0(examples: Mapping[str, Callable[[DType], Case]]) -> Mapping[str, Callable[[DType], Case]]:
    """Add a case whose roots are 0, so that m is divided by eps alone; no half type represents this eps."""

    def make(dtype: DType) -> Case:
        case = examples["ordinary"](dtype).with_parameters(eps=1e-3)
        return case.with_inputs(grad=np.zeros_like(case["grad"]), v=np.zeros_like(case["v"]))

    return {**examples, "squares_of_0": make}


# ---- laws


def nothing_moves_without_a_rate(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """With a learning rate of 0 param does not change, where grad is not out of range."""
    still = case.with_parameters(lr=0.0, eps=max(case.parameters["eps"], 1e-8))
    output = evaluate(still).output
    usual = np.isfinite(output.value)
    yield equals_exactly(output, np.where(usual, case["param"].astype(dtype.wide), output.value))


def a_sign_goes_through(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """If param, grad and m change their signs, so do the new param and m."""
    other = evaluate(case.with_inputs(**{name: -case[name] for name in ("param", "grad", "m")}))
    yield Relation(-evaluate(case).output, other.output)


def squares_have_no_sign(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The new v is the same for the negative grad, whatever param and m are."""
    zeros = np.zeros_like(case["param"])
    other = evaluate(case.with_inputs(param=zeros, grad=-case["grad"], m=np.zeros_like(case["m"])))
    yield Relation(evaluate(case).output, other.output)


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """A step reads four tensors, and writes three."""
    inputs = sum(array.nbytes for array in case.inputs.values())
    return Cost(2 * inputs - case["grad"].nbytes, 16 * case["param"].size), Cost(0, 0)


WORKLOADS: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(step_of(1 << 14)), "ragged": whole(step_of(7, 1001))},
    "cuda": {
        "small": whole(step_of(1 << 14)),
        # Of two axes: the outputs are joined along the last one, and repeated along the first.
        "large": tiled(step_of(1, 1 << 18), 512, *ARGUMENTS.axes),
        "ragged": tiled(step_of(33, 1001), 512, *ARGUMENTS.axes),
    },
}


def _new(place: int) -> Callable[..., Any]:
    return lambda **arguments: oracle.forward(**arguments)[place]


def _concatenated_outputs(**arguments: Any) -> Any:
    found = oracle.forward(**arguments)
    if side_by_side([each.shape for each in found]):
        return np.concatenate(found, axis=-1)
    return np.concatenate([each.reshape(-1) for each in found])


@definition.operation(
    **ARGUMENTS.declared,
    mutates=CHANGED,
    errors=ARGUMENTS.errors,
    source="Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2",
)
def adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
) -> tuple[torch.Tensor, ...]:
    """Return the new values of param, m and v."""
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    root = (v / (1 - beta2**step)).sqrt() + eps
    return (1 - lr * weight_decay) * param - lr / (1 - beta1**step) * m / root, m, v


LAWS = {
    "param": (nothing_moves_without_a_rate, a_sign_goes_through),
    "m": (a_sign_goes_through,),
    "v": (squares_have_no_sign,),
}
COMMON: dict[str, Any] = {"cost": cost, "workloads": WORKLOADS, "batched": dict.fromkeys(ARGUMENTS.axes, 0)}
operation = replace(
    adam,
    forward=_concatenated_outputs,
    outputs={
        name: replace(of, forward=_new(place), laws=LAWS[name], examples=with_squares_of_0(of.examples), **COMMON)
        for place, (name, of) in enumerate(adam.outputs.items())
    },
    examples=with_squares_of_0(adam.examples),
    **COMMON,
)
