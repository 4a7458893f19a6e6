"""Workloads: the cases for timing. Each timed result is compared with the oracle, regardless of its size."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import expectation
from fourfold.numerics.dtypes import DType
from fourfold.numerics.steps.along_axes import summation_growth
from fourfold.operations.case import Case


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A case to time, and the smaller case that it repeats. The oracle evaluates only the smaller one.

    Attributes:
        case: the case to time.
        part: the smaller case. Its results are the leading slices, along each axis, of the case's results.
        sums: for results that sum over the repetitions, by name, the sum of the factors' magnitudes and their number.
    """

    case: Case
    part: Case
    sums: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    _tensors: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)

    def expected(self, name: str, reference: Bounded, dtype: DType) -> Bounded:
        """Return the part's result of a name, with the bound of the case's result."""
        if name in self.sums:
            total, terms = self.sums[name]
            magnitude = np.where(np.isfinite(reference.value), abs(reference.value), 0) + reference.error
            growth = summation_growth(terms) * dtype.arithmetic.roundoff
            reference = reference.within(total * (reference.error + growth * magnitude))
        return expectation(reference, dtype)

    def tensor(self, name: str, dtype: DType, device: str) -> torch.Tensor:
        """Return a new tensor of an input of the case, or "grad_output". Send the values to the device only once."""
        key = name, dtype.name, device
        if key not in self._tensors:
            self._tensors[key] = self.case.tensor(name, dtype, device)
        like = self._tensors[key]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(like)


Make = Callable[[DType], Workload]


def whole(make: Callable[[DType], Case]) -> Make:
    """Return a workload that is small enough for the oracle to evaluate the whole case."""

    def make_workload(dtype: DType) -> Workload:
        case = make(dtype)
        return Workload(case=case, part=case)

    return make_workload


@dataclass(frozen=True)
class Tiled:
    """A workload that repeats a case along the first axis of some inputs, and along the last of others.

    The cotangent of each repetition is the case's cotangent times a factor. The factors sum to 1, so that a gradient
    that sums over the repetitions equals the case's own. A result that is a mean over all rows equals the case's, and
    each repetition gets its share of the gradient. An input named "offsets", or "..._offsets", is continued over the
    repetitions.

    Attributes:
        make: returns the case for a dtype.
        times: the number of repetitions, a power of 2, at least 4.
        names: the inputs to repeat along their first axis. The result then repeats along its first axis, too.
        across: the inputs to repeat along their last axis. The result then repeats along its last axis, too. All
            other inputs are the same for all repetitions.
    """

    make: Callable[[DType], Case]
    times: int
    names: tuple[str, ...]
    across: tuple[str, ...] = ()

    def __call__(self, dtype: DType) -> Workload:
        """Return the workload for a dtype."""
        part, factors = self.make(dtype), self._factors()
        inputs = dict(part.inputs)
        for name in self.names:
            inputs[name] = self._repeat(part.inputs[name], 0)
        for name in self.across:
            inputs[name] = self._repeat(inputs[name], -1)
        for name in inputs:
            if name == "offsets" or name.endswith("_offsets"):
                counts = np.tile(np.diff(part.inputs[name]), self.times)
                inputs[name] = np.concatenate([[0], np.cumsum(counts)]).astype(part.inputs[name].dtype)
        if part.grad_output.ndim == 0:
            share = (part.grad_output / np.array(self.times, dtype=dtype.numpy)).astype(part.grad_output.dtype)
            return Workload(case=replace(part, inputs=inputs), part=replace(part, grad_output=share))
        grad_output = self._weigh(part.grad_output, 0) if self.names else part.grad_output
        if self.across:
            grad_output = self._weigh(grad_output, -1)
        case = replace(part, inputs=inputs, grad_output=grad_output)
        # Each repetition's sum has the part's error; to add them up, in any order, rounds once more for each.
        total = float(abs(factors).sum())
        axes = [repeated for repeated in (self.names, self.across) if repeated]
        sums = {}
        for name in inputs:
            if summed := sum(name not in repeated for repeated in axes):
                sums[name] = total**summed, self.times**summed
        return Workload(case=case, part=part, sums=sums)

    def _factors(self) -> np.ndarray:
        return np.array([1.0, 0.5, 0.5, -1.0, *[1.0, -1.0] * (self.times // 2 - 2)])

    def _repeat(self, array: np.ndarray, axis: int) -> np.ndarray:
        repetitions = [1] * array.ndim
        repetitions[axis] = self.times
        return np.tile(array, repetitions)

    def _weigh(self, array: np.ndarray, axis: int) -> np.ndarray:
        factors = self._factors()
        weighed = {factor: array * np.array(factor, dtype=array.dtype) for factor in {*factors}}
        return np.concatenate([weighed[factor] for factor in factors], axis)


def tiled(make: Callable[[DType], Case], times: int, *names: str, across: Collection[str] = ()) -> Tiled:
    """Return a workload that repeats a case: see `Tiled`."""
    return Tiled(make, times, names, tuple(across))
