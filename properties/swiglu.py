"""The record of swiglu: two arrays of one shape, the gate and what it lets through."""

from typing import Any

import numpy as np
from fourfold.oracles import swiglu as oracle

from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.bounded import in_other_steps, values_of
from fourfold.operations.relations import law, linear_in

PAIRS = Elementwise(gate="spread", up="normal")
random_case = PAIRS.random
output_is_linear_in_up = linear_in("up")
# silu(x) - silu(-x) = x, times up.
a_gate_and_its_negative_add_up = law(
    "a_gate_and_its_negative_add_up",
    lambda output, case, x: (output(case) - output(case.with_inputs(gate=-case["gate"])), x["gate"] * x["up"]),
)


def backward(grad_output: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    """The oracle's gradients. For gate's, kernels may take 1 - sigmoid(gate), and multiply in any order."""
    grad_gate, grad_up = oracle.backward(grad_output, gate, up)
    grad, x, y = values_of(grad_output, gate, up)
    with np.errstate(all="ignore"):
        product, share, rest = abs(grad * y), oracle.sigmoid(x), oracle.sigmoid(-x)
        reach, slope = product * np.maximum(abs(x), 1), product * share * abs(x)
    # 1 - share is 0 where rest is below a quarter of a roundoff.
    return in_other_steps(grad_gate, reach, lambda u: np.where(rest < u / 4, rest, 4 * u) * slope), grad_up


laws = (output_is_linear_in_up, a_gate_and_its_negative_add_up)
operation = PAIRS.operation("swiglu", oracle, special="special_pairs", backward=backward, laws=laws)
