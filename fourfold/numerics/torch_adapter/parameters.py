"""A definition's parameters: Python's numbers, which a kernel takes in its own arithmetic.

Where 1 - beta cancels, a kernel that computes it in float32 has few digits of it. So Python's arithmetic on parameters
bounds the error. torch passes only the value of a number on to its operators, which find the error by the value.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np

from fourfold.numerics.bounded import Arithmetic, Bounded, lift


class Numbers:
    """The numbers that a definition computes from its parameters, and the error of each in the tested arithmetic."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        # Nothing rounds parameters to the type in which tensors are stored.
        self.arithmetic = replace(arithmetic, rounds_each_step=False)
        self.errors: dict[float, float] = {}

    def parameter(self, argument: Any) -> Any:
        """Return a parameter; a number that the arithmetic rounds, or one of a tuple, carries the error."""
        if isinstance(argument, tuple):
            return tuple(map(self.parameter, argument))
        return self.number(lift(argument, self.arithmetic)) if isinstance(argument, float) else argument

    def number(self, bounded: Bounded) -> float:
        """Return a bounded number as one of Python's, whose error is kept.

        Adam's definition takes `math.sqrt` of one, and lerp's derivative its distance from 1: plain numbers, which have
        errors, too.
        """
        value, error = float(bounded.value), float(bounded.error)
        if not 0 < error < math.inf:
            return value
        images = {value: error, 1 - value: error}
        if value > error:
            images[math.sqrt(value)] = math.sqrt(value) - math.sqrt(value - error)
        for image, its_error in images.items():
            self.errors[abs(image)] = max(its_error, self.errors.get(abs(image), 0.0))
        return Number.of(value, self)

    def lift(self, operand: Any, arithmetic: Arithmetic) -> Bounded:
        """Convert an operand to `Bounded`: a number of a parameter with its error, another constant rounded once."""
        bounded = lift(operand, arithmetic)
        if isinstance(operand, float) and (error := self.errors.get(abs(float(operand)))):
            return Bounded(bounded.value, np.maximum(bounded.error, error), arithmetic)
        return bounded


class Number(float):
    """A number with an error in `Numbers`."""

    numbers: Numbers

    @classmethod
    def of(cls, value: float, numbers: Numbers) -> Self:
        """Return a number whose error is known."""
        number = cls(value)
        number.numbers = numbers
        return number


def _bounded_method(name: str) -> Callable[..., Any]:
    """Return a method of `Number` with the result of float's, and a bound on its error."""
    of_floats, of_bounded = getattr(float, name), getattr(Bounded, name)

    def method(self: Number, *other: Any) -> Any:
        value, numbers = of_floats(self, *other), self.numbers
        if not isinstance(value, float):  # NotImplemented for a tensor, a complex root of a negative number
            return value
        return numbers.number(of_bounded(*(numbers.lift(operand, numbers.arithmetic) for operand in (self, *other))))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Number, f"__{_name}__", _bounded_method(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _bounded_method(f"__r{_name}__"))
for _name in ("__neg__", "__pos__", "__abs__"):
    setattr(Number, _name, _bounded_method(_name))
