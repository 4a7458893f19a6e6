"""The record of swiglu: two arrays of one shape, the gate and what it lets through."""

from typing import Any

from fourfold.oracles import swiglu as oracle

from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.steps.orders import any_order, either_formula
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
    """Return the oracle's gradients. For gate's, kernels may take 1 - sigmoid(gate), and multiply in any order."""
    grad_gate, grad_up = oracle.backward(grad_output, gate, up)
    share, rest = oracle.sigmoid(gate), oracle.sigmoid(-gate)
    grad_gate = either_formula(grad_gate, grad_output * (up * (share * (1 + gate * (1 - share)))))
    factors = grad_output, up, share
    return any_order(grad_gate, factors, (*factors, gate, rest), stored=True), grad_up


laws = (output_is_linear_in_up, a_gate_and_its_negative_add_up)
operation = PAIRS.operation("swiglu", oracle, special="special_pairs", backward=backward, laws=laws)
