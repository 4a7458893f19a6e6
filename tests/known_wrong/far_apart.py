"""Rows so far apart that their offsets need more than 32 bits, without using that much memory."""

import tempfile
from collections.abc import Callable

import numpy as np
import torch
from fourfold.properties.boxes import box_pairs

from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

ROWS_TO_2_31 = 8


def rows_far_apart(values: torch.Tensor) -> torch.Tensor:
    """Return the values with a row stride such that row 8 begins 2^31 elements after row 0.

    Row 0 also begins 2^31 elements into the storage, so an offset that wraps around to a negative number still lands
    in the storage, on zeros. On the CPU the storage is a sparse file: only the pages that are written take memory.
    """
    count = 2**32 + values[0].numel()
    if values.device.type == "cpu":
        with tempfile.TemporaryFile() as file:
            words = np.memmap(file, dtype=f"u{values.element_size()}", mode="w+", shape=(count,))
        storage = torch.from_numpy(words).view(values.dtype)
    else:
        storage = torch.zeros(count, dtype=values.dtype, device=values.device)
    view = storage[2**31 :].as_strided(values.shape, (2**31 // ROWS_TO_2_31, *values[0].stride()))
    return view.copy_(values)


class FarApart(Case):
    """A case whose first input has its rows far apart."""

    def tensor(self, name: str, dtype: DType, device: str) -> torch.Tensor:
        tensor = super().tensor(name, dtype, device)
        return rows_far_apart(tensor) if name == next(iter(self.inputs)) else tensor


def far_apart(make: Callable[[DType], Case]) -> dict[str, Callable[[DType], Case]]:
    """Return one named example: a case of nine rows, the last at offset 2^31."""

    def example(dtype: DType) -> Case:
        case = make(dtype)
        return FarApart(case.inputs, case.grad_output, case.parameters)

    return {"rows_2_28_elements_apart": example}


def pairs_far_apart(dtype: DType) -> Case:
    """Return nine pairs; the last has the offset 2^31."""
    boxes1, boxes2 = box_pairs(np.random.default_rng(6), ROWS_TO_2_31 + 1, ("overlapping",), dtype)
    return FarApart({"boxes1": boxes1, "boxes2": boxes2}, np.ones(ROWS_TO_2_31 + 1, dtype=dtype.numpy), {"eps": 1e-5})
