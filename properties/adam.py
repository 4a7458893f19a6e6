"""The record of adam: one step in place, whose outputs are the new values of param, m and v."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fourfold.oracles import adam as oracle

from fourfold.declaration import definition
from fourfold.inputs.arrays import cotangent, values
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.arguments import Values, not_negative, tensor
from fourfold.operations.arguments import values as values_of
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.outputs import side_by_side
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.relations import equals_exactly
from fourfold.operations.workloads import Make, tiled, whole

CHANGED = ("param", "m", "v")
DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1}


def below_1(*choices: float) -> Values:
    """Return a number from 0 to below 1."""
    within = not_negative(*choices)
    return replace(within, out_of_range={**within.out_of_range, "one": 1.0}, range=None)


STEP = values_of(
    *(1, 2, 1000),
    out_of_range={"zero": 0, "negative": -1},
    of_another_type={"a_string": "1", "a_bool": True, "no_whole_number": 1.5, "none": None},
)
NUMBERS: dict[str, Any] = {
    "lr": not_negative(1e-3, 0.5),
    "beta1": below_1(0.9, 0.5),
    "beta2": below_1(0.999, 0.75),
    "eps": not_negative(1e-8, 0.125),
    "weight_decay": replace(not_negative(0.0, 0.25), out_of_range=not_negative(0.25).out_of_range),
    "step": STEP,
}
TENSORS: dict[str, Any] = {
    "param": tensor("..."),
    "grad": tensor("..."),
    "m": tensor("...", dtype="float32"),
    "v": tensor("...", dtype="float32", kind="positive"),
}
ARGUMENTS = Arguments(**TENSORS, **NUMBERS)


def step_of(*shape: int, **parameters: Any) -> Callable[[DType], Case]:
    """Return a named case of random numbers, as after some steps."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(71)
        param, grad = (values(rng, shape, dtype, "normal") for _ in range(2))
        m, v = (values(rng, shape, DTYPES["float32"], kind) for kind in ("normal", "positive"))
        inputs = {"param": param, "grad": grad, "m": m, "v": v}
        return Case(inputs, cotangent(rng, shape, dtype), {**DEFAULTS, **parameters})

    return make


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


def _workload(times: int, *shape: int) -> Make:
    return tiled(step_of(*shape), times, *TENSORS)


WORKLOADS: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(step_of(1 << 14)), "ragged": whole(step_of(7, 1001))},
    "cuda": {
        "small": whole(step_of(1 << 14)),
        "large": _workload(512, 1 << 18),
        "ragged": _workload(512, 33, 1001),
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
    **TENSORS,
    **NUMBERS,
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
COMMON: dict[str, Any] = {"cost": cost, "workloads": WORKLOADS, "batched": dict.fromkeys(TENSORS, 0)}
operation = replace(
    adam,
    forward=_concatenated_outputs,
    outputs={
        name: replace(of, forward=_new(place), laws=LAWS[name], **COMMON)
        for place, (name, of) in enumerate(adam.outputs.items())
    },
    **COMMON,
)
