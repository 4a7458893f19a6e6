"""The operators of rope: the same on Triton and CUDA C++ except for the launches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends.signature import signature_of
from fourfold.backends.strides import merge_into_two

from .torch_eager import rope as definition

SIGNATURE = signature_of(definition)
ROPE = SIGNATURE.operator(
    lambda x, *_: x.new_empty(x.shape),
    saves=("cos", "sin", "positions", "interleaved"),
    gradients={"x": "grad_output"},
    repeats=True,
)


class Turn(NamedTuple):
    """What a kernel is launched with. The tokens of x are those of ``[outer, inner, heads, dim]``.

    Attributes:
        tensors: x, cos, sin, positions ``[tokens]`` or None, and the output, which has no gaps.
        sizes: tokens, seq, num_positions, heads, dim, half and inner.
        strides: four of x, two each of cos and sin, one of positions; in elements.
        interleaved: whether pairs are neighbours.
        back: whether to turn by the negative angles.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    interleaved: bool
    back: bool


def turn_of(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: Any, *how: bool) -> Turn:
    """Return what turns a tensor that is not empty; it is copied if its leading axes do not merge into two."""
    merged = merge_into_two([x[..., 0, 0]])
    if merged is None:
        return turn_of(x.contiguous(), cos, sin, positions, *how)
    inner, (steps,) = merged
    flat = None if positions is None else positions.reshape(-1)
    strides = (*steps, *x.stride()[-2:], *cos.stride(), *sin.stride(), 1 if flat is None else flat.stride(0))
    counts = x[..., 0, 0].numel(), x.shape[-3], cos.shape[0], *x.shape[-2:], cos.shape[1], inner
    return Turn((x, cos, sin, flat, x.new_empty(x.shape)), counts, strides, *how)


def register(backend: str, launch: Callable[[Turn], None]) -> Callable[..., Any]:
    """Register ``rope_<backend>`` with its gradient, the cotangent turned back; `launch` is given no empty tensor."""

    def run(back: bool, x: torch.Tensor, *tables: Any) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(x.shape)
        turn = turn_of(x, *tables, back)
        launch(turn)
        return turn.tensors[-1]

    return SIGNATURE.checked(ROPE.register(backend, functools.partial(run, False), functools.partial(run, True)))
