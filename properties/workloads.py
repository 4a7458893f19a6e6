"""Workloads: the cases whose speed is recorded, each held to the oracle when it is timed, however large."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from properties.case import Case
from properties.comparison import expectation
from properties.dtypes import DType
from properties.running_error import Bounded


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A case to be timed, and a smaller one of which it is a repetition, so that the oracle has to evaluate only that.

    Attributes:
        case: what is timed.
        part: its results are the beginnings, along each axis, of the case's results.
        sums: what results that sum over the repetitions add to the part's bound, as a multiple of it, by their names.
    """

    case: Case
    part: Case
    sums: Mapping[str, float] = field(default_factory=dict)
    _tensors: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)

    def expected(self, name: str, reference: Bounded, dtype: DType) -> Bounded:
        """The part's result of that name, with the bound that the case's has."""
        error = reference.error * self.sums.get(name, 1.0)
        return expectation(Bounded(reference.value, error, reference.arithmetic), dtype)

    def tensor(self, name: str, dtype: DType, device: str) -> torch.Tensor:
        """One input of the case, or "grad_output": a new tensor each time, whose values go to the device but once."""
        key = name, dtype.name, device
        if key not in self._tensors:
            self._tensors[key] = self.case.tensor(name, dtype, device)
        kept = self._tensors[key]
        return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device).copy_(kept)


Make = Callable[[DType], Workload]


def whole(make: Callable[[DType], Case]) -> Make:
    """A workload small enough for the oracle to evaluate it as it is."""

    def made(dtype: DType) -> Workload:
        case = make(dtype)
        return Workload(case=case, part=case)

    return made


def tiled(make: Callable[[DType], Case], times: int, *names: str, across: Collection[str] = ()) -> Make:
    """A workload that repeats a case along the first axis of some inputs, and along the last of others.

    The cotangent of each repetition is that of the case times a factor; the factors' sum is 1, so that a gradient
    that sums over the repetitions is the case's own. Where the result is a mean over all rows, it is the case's, and
    each repetition has its share of the gradient. An input "offsets" is continued.

    Args:
        make: the case, for a dtype.
        times: a power of 2, at least 4.
        names: the inputs to be repeated along their first axis, as is the result.
        across: those to be repeated along their last, as is the result then. All others are the same everywhere.
    """
    factors = np.array([1.0, 0.5, 0.5, -1.0, *[1.0, -1.0] * (times // 2 - 2)])

    def repeated(array: np.ndarray, axis: int) -> np.ndarray:
        repetitions = [1] * array.ndim
        repetitions[axis] = times
        return np.tile(array, repetitions)

    def weighted(array: np.ndarray, axis: int) -> np.ndarray:
        along = np.repeat(factors, array.shape[axis]).astype(array.dtype)
        return repeated(array, axis) * (along if axis == -1 else along.reshape(-1, *[1] * (array.ndim - 1)))

    def made(dtype: DType) -> Workload:
        part = make(dtype)
        inputs = dict(part.inputs)
        for name in names:
            inputs[name] = repeated(inputs[name], 0)
        for name in across:
            inputs[name] = repeated(inputs[name], -1)
        if "offsets" in inputs:
            counts = np.tile(np.diff(inputs["offsets"]), times)
            inputs["offsets"] = np.concatenate([[0], np.cumsum(counts)]).astype(inputs["offsets"].dtype)
        if part.grad_output.ndim == 0:
            share = (part.grad_output / np.array(times, dtype=dtype.numpy)).astype(dtype.numpy)
            return Workload(case=replace(part, inputs=inputs), part=replace(part, grad_output=share))
        grad_output = weighted(part.grad_output, 0)
        if across:
            grad_output = weighted(grad_output, -1)
        case = replace(part, inputs=inputs, grad_output=grad_output.astype(dtype.numpy))
        # Each repetition's sum has the part's error; together they have the sum of these.
        total = float(abs(factors).sum())
        sums = {n: (1 if n in names else total) * (1 if n in across or not across else total) for n in inputs}
        return Workload(case=case, part=part, sums=sums)

    return made
