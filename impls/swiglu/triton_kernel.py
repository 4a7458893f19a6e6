"""swiglu in Triton."""

import triton
import triton.language as tl

from ..triton_elementwise import elementwise
from .torch_eager import swiglu as definition


@triton.jit
def sigmoids(x):
    """Return sigmoid(x) and sigmoid(-x), each to all its digits."""
    power = tl.exp(-tl.abs(x))
    larger = 1.0 / (1.0 + power)
    return tl.where(x < 0, power * larger, larger), tl.where(x < 0, larger, power * larger)


@triton.jit
def swiglu_forward(gate, up):
    share, _ = sigmoids(gate)
    return gate * share * up


@triton.jit
def swiglu_backward(grad_output, gate, up):
    share, rest = sigmoids(gate)
    return grad_output * (up * (share * (1.0 + gate * rest))), grad_output * (gate * share)


swiglu = elementwise(definition, swiglu_forward, swiglu_backward)
