"""The rules of complex numbers: a pair of real tensors with errors. Definitions of rotary embeddings use them.

There are rules of products, sums, magnitudes, conjugates, and of all operators that move elements.
"""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.compat.torch_internals import wrapper_tensor
from fourfold.numerics.torch_adapter.moves import MOVES, VIEWS
from fourfold.numerics.torch_adapter.tensors import COMPLEX, Evaluation, NoTorchRule, current, iter_tensors, whole


class ComplexTensor(torch.Tensor):
    """A tensor of complex numbers, made of the tensors of their real and imaginary parts."""

    parts: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(real: torch.Tensor, imaginary: torch.Tensor) -> "ComplexTensor":
        """Return a tensor of two parts, which have the same shape and strides."""
        dtype = torch.complex128 if real.dtype == torch.float64 else torch.complex64
        place = tuple(real.shape), real.stride(), int(real.storage_offset())
        self = wrapper_tensor(ComplexTensor, *place, dtype)
        self.parts = real, imaginary
        return self

    def __repr__(self, **_: Any) -> str:
        return f"ComplexTensor{self.parts}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return current().call(func, args, kwargs or {})


def pair_numbers(argument: Any) -> Any:
    """Return an argument of an operator, where a complex number or a tensor without errors becomes a pair, too."""
    if isinstance(argument, list | tuple):
        return [pair_numbers(item) for item in argument]
    if isinstance(argument, complex):
        argument = torch.tensor(argument, dtype=torch.complex128)
    if not isinstance(argument, torch.Tensor) or not argument.is_complex() or isinstance(argument, ComplexTensor):
        return argument
    return ComplexTensor.of(*torch.view_as_real(argument.resolve_conj()).movedim(-1, 0).contiguous())


def select_part(argument: Any, place: int) -> Any:
    """Return the real parts of an argument, place 0, or the imaginary ones, place 1; real arguments stay."""
    if isinstance(argument, list | tuple):
        return [select_part(item, place) for item in argument]
    return argument.parts[place] if isinstance(argument, ComplexTensor) else argument


def apply_to_parts(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an operator to the real and to the imaginary parts."""
    kwargs = {name: option for name, option in kwargs.items() if name != "dtype"}
    real, imaginary = (func(*select_part(args, place), **kwargs) for place in (0, 1))
    if isinstance(real, torch.Tensor):
        return ComplexTensor.of(real, imaginary)
    return type(real)(map(ComplexTensor.of, real, imaginary))


def multiply(a: Any, b: Any) -> ComplexTensor:
    """Return a b; a real factor multiplies both parts."""
    for number, factor in ((a, b), (b, a)):
        if not isinstance(factor, ComplexTensor):
            return ComplexTensor.of(*(part * factor for part in number.parts))
    (a, b), (c, d) = a.parts, b.parts
    return ComplexTensor.of(a * c - b * d, a * d + b * c)


def conjugate(a: ComplexTensor) -> ComplexTensor:
    """Return the conjugate."""
    return ComplexTensor.of(a.parts[0].clone(), -a.parts[1])


def magnitude(a: ComplexTensor) -> torch.Tensor:
    """Return |a|."""
    return torch.hypot(*a.parts)


def sign(a: ComplexTensor) -> ComplexTensor:
    """Return a / |a|, and 0 for 0, as the derivative of the magnitude."""
    size = magnitude(a)
    return ComplexTensor.of(*(torch.where(size == 0, 0.0, part / size) for part in a.parts))


RULES: dict[str, Callable[..., Any]] = {
    "mul.Tensor": multiply,
    "mul.Scalar": multiply,
    "_conj.default": conjugate,
    "conj_physical.default": conjugate,
    "abs.default": magnitude,
    "sgn.default": sign,
    "view_as_real.default": lambda a: torch.stack(a.parts, -1),
}
# Operators that torch applies to each part: moves, sums, and those of the gradients of moves.
BY_PART = {
    *VIEWS.split(),
    *MOVES.split(),
    *("add.Tensor", "sub.Tensor", "neg.default", "sum.default", "sum.dim_IntList"),
    *("new_zeros.default", "zeros_like.default", "index_put.default", "_unsafe_index_put.default"),
}


@whole("view_as_complex.default")
def view_as_complex(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> ComplexTensor:
    """Return the pairs of the last axis as complex numbers."""
    with evaluation:
        real, imaginary = (part.clone(memory_format=torch.contiguous_format) for part in args[0].unbind(-1))
    return ComplexTensor.of(real, imaginary)


@whole("complex.default", "polar.default")
def from_parts(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> ComplexTensor:
    """Return complex numbers from their real and imaginary parts, or from magnitudes and angles."""
    with evaluation:
        a, b = (part.contiguous() for part in torch.broadcast_tensors(*args))
        return ComplexTensor.of(a * b.cos(), a * b.sin()) if "polar" in str(func) else ComplexTensor.of(a, b)


def evaluate_complex(evaluation: Evaluation, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator of complex numbers by its rule.

    Raises:
        NoTorchRule: there is none.
    """
    name, args = str(func).removeprefix("aten."), pair_numbers(args)
    with evaluation:
        if name in RULES:
            return RULES[name](*args)
        if name in BY_PART and not any(tensor.is_floating_point() for tensor in iter_tensors(args)):
            return apply_to_parts(func, args, kwargs)
    raise NoTorchRule(func, "has no running-error rule for complex numbers: compute their real and imaginary parts")


COMPLEX.append(evaluate_complex)
