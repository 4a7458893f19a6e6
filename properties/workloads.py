"""Workloads: the cases whose speed is recorded, each held to the oracle when it is timed, however large."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from properties.case import Case
from properties.comparison import expectation
from properties.dtypes import DType
from properties.running_error import Bounded


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A case to be timed, and a smaller one of which it is a repetition, so that the oracle has to evaluate only that.

    Attributes:
        case: what is timed.
        part: its results are the beginnings, along the first axis, of the case's results.
        sums: what results that sum over the repetitions add to the part's bound, as a multiple of it.
    """

    case: Case
    part: Case
    sums: float = 1.0

    def expected(self, reference: Bounded, shape: tuple[int, ...], dtype: DType) -> Bounded:
        """The part's result with its bound, for a result of the case that has this shape."""
        summed = reference.shape == shape and self.sums > 1
        error = reference.error * self.sums if summed else reference.error
        return expectation(Bounded(reference.value, error, reference.arithmetic), dtype)


Make = Callable[[DType], Workload]


def whole(make: Callable[[DType], Case]) -> Make:
    """A workload small enough for the oracle to evaluate it as it is."""

    def made(dtype: DType) -> Workload:
        case = make(dtype)
        return Workload(case=case, part=case)

    return made


def tiled(make: Callable[[DType], Case], times: int, *names: str) -> Make:
    """A workload that repeats a case along the first axis of some inputs.

    The cotangent of each repetition is that of the case times a factor; the factors' sum is 1, so that a gradient
    that sums over the repetitions is the case's own. Where the result is a mean over all rows, it is the case's, and
    each repetition has its share of the gradient. An input "offsets" is continued.

    Args:
        make: the case, for a dtype.
        times: a power of 2, at least 4.
        names: the inputs to be repeated; others are the same for all repetitions.
    """
    factors = np.array([1.0, 0.5, 0.5, -1.0, *[1.0, -1.0] * (times // 2 - 2)])

    def made(dtype: DType) -> Workload:
        part = make(dtype)
        inputs = dict(part.inputs)
        for name in names:
            inputs[name] = np.tile(inputs[name], (times, *[1] * (inputs[name].ndim - 1)))
        if "offsets" in inputs:
            counts = np.tile(np.diff(inputs["offsets"]), times)
            inputs["offsets"] = np.concatenate([[0], np.cumsum(counts)]).astype(inputs["offsets"].dtype)
        if part.grad_output.ndim == 0:
            share = (part.grad_output / np.array(times, dtype=dtype.numpy)).astype(dtype.numpy)
            return Workload(case=replace(part, inputs=inputs), part=replace(part, grad_output=share))
        grad_output = np.concatenate([part.grad_output * np.array(f, dtype=dtype.numpy) for f in factors])
        case = replace(part, inputs=inputs, grad_output=grad_output.astype(dtype.numpy))
        # Each repetition's sum has the part's error; together they have the sum of these.
        return Workload(case=case, part=part, sums=float(abs(factors).sum()))

    return made
