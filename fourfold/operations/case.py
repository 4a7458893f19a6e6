"""A case: the inputs of one call, rounded to the tested dtype, with their memory layouts and a cotangent."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from fourfold.numerics.dtypes import DType
from fourfold.operations.layouts import layout

# Show a larger array by its shape and range. The command that repeats a case still rebuilds it in full.
SHOWN_ELEMENTS = 64
# The part of such an array that a table shows.
SHOWN_ROWS, SHOWN_COLUMNS = 4, 6


def is_floating(array: np.ndarray) -> bool:
    """Return whether an array holds floating-point numbers, including bfloat16, and not integers or booleans."""
    return array.dtype.kind not in "biu"


def scale(array: np.ndarray, factor: float) -> np.ndarray:
    """Return floating-point numbers times a factor, rounded to their dtype."""
    wide: Any = np.longdouble if array.dtype == np.float64 else np.float64
    return (array.astype(wide) * factor).astype(array.dtype)


def show(array: np.ndarray) -> str:
    """Return an array as text from which it can be rebuilt, or only its shape and range if it is long."""
    if array.size == 0:
        return f"zeros({list(array.shape)}, {array.dtype.name})"
    if array.size <= SHOWN_ELEMENTS:
        return f"array({array.tolist()}, {array.dtype.name})"
    return f"<{array.dtype.name}{list(array.shape)}, {extent_of(array)}>"


def extent_of(array: np.ndarray) -> str:
    """Return the range of an array's finite numbers, and the number of the others, as text."""
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    extent = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
    special = array.size - finite.size
    return f"{extent}{f', {special} not finite' if special else ''}"


def tabulate(name: str, array: np.ndarray, layout: str = "contiguous") -> dict[str, Any]:
    """Return an array as a table for people: its rows, or the first ones of a long array, and its range.

    Args:
        name: the argument's name.
        array: the values. The last axis gives the columns; all others together give the rows.
        layout: the layout of the tensor in memory.

    Returns:
        ``name``; ``type``, as float32[2, 3]; ``layout``, "" for a contiguous tensor; ``rows``, a list of texts each;
        and ``rest``, the range of an array that is shown in part, else "".
    """
    rows = array.reshape(-1, array.shape[-1] if array.ndim and array.size else 1)
    is_complete = array.size <= SHOWN_ELEMENTS
    part = rows if is_complete else rows[:SHOWN_ROWS, :SHOWN_COLUMNS]
    return {
        "name": name,
        "type": f"{array.dtype.name}{list(array.shape)}",
        "layout": "" if layout == "contiguous" else layout,
        "rows": [[f"{value:.9g}" if is_floating(array) else str(value) for value in row] for row in part.tolist()],
        "rest": "" if is_complete else extent_of(array),
    }


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """The arguments of one call.

    `inputs` maps parameter names to arrays. Floating-point arrays are already rounded to the tested dtype, so that
    oracle and kernel see the same numbers. `parameters` holds the keyword arguments that are not tensors.
    `grad_output` has the shape of the result. `layouts` maps the name of an input, or "grad_output", to one of
    `fourfold.operations.layouts.LAYOUTS` or `COMPOSED`.
    """

    inputs: Mapping[str, np.ndarray]
    grad_output: np.ndarray
    parameters: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Most NumPy functions turn an array without axes into a scalar: arithmetic, flip, an index.
        inputs = {name: np.asarray(array) for name, array in self.inputs.items()}
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "grad_output", np.asarray(self.grad_output))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.inputs[name]

    def __repr__(self) -> str:
        return self.describe()

    def describe(self, cotangent: bool = True) -> str:
        """Return the case as text; leave out the cotangent if it is of no use."""
        parts = [f"{name}={show(array)}" for name, array in self.inputs.items()]
        # The absent tensors of a list follow from the present ones.
        parts += [f"{name}={value!r}" for name, value in self.parameters.items() if "[" not in name]
        strided = {name: layout for name, layout in self.layouts.items() if layout != "contiguous"}
        if cotangent:
            parts.append(f"grad_output={show(self.grad_output)}")
        else:
            strided.pop("grad_output", None)
        if strided:
            parts.append(f"layouts={strided}")
        return "Case(" + ", ".join(parts) + ")"

    def arguments(self, cotangent: bool = True) -> tuple[dict[str, Any], ...]:
        """Return the arguments as tables: see `tabulate`. A parameter that is no tensor has one row of one column."""
        arrays = {**self.inputs, **({"grad_output": self.grad_output} if cotangent else {})}
        tables = [tabulate(name, array, self.layouts.get(name, "contiguous")) for name, array in arrays.items()]
        for name, value in self.parameters.items():
            if "[" not in name:
                tables.append(
                    {"name": name, "type": type(value).__name__, "layout": "", "rows": [[repr(value)]], "rest": ""}
                )
        return tuple(tables)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Without this method Hypothesis prints a dataclass field by field.
        printer.text(repr(self))

    @property
    def digest(self) -> bytes:
        """Return a digest of the arrays, parameters and layouts. Equal cases have equal digests."""
        digest = hashlib.sha256(repr((self.parameters, self.layouts)).encode())
        for name, array in {**self.inputs, "grad_output": self.grad_output}.items():
            digest.update(repr((name, array.dtype.name, array.shape)).encode())
            digest.update(array.tobytes())
        return digest.digest()

    def with_inputs(self, **inputs: np.ndarray) -> Self:
        """Return the case with some inputs replaced. The replaced inputs are contiguous."""
        layouts = {name: layout for name, layout in self.layouts.items() if name not in inputs}
        return replace(self, inputs={**self.inputs, **inputs}, layouts=layouts)

    def with_parameters(self, **parameters: Any) -> Self:
        """Return the case with some parameters replaced."""
        return replace(self, parameters={**self.parameters, **parameters})

    @property
    def elements(self) -> int:
        """Return the number of elements of all inputs together."""
        return sum(array.size for array in self.inputs.values())

    def tensor(self, name: str, dtype: DType, device: str) -> torch.Tensor:
        """Return one input, or "grad_output", as a tensor in its layout."""
        array = self.grad_output if name == "grad_output" else self.inputs[name]
        return layout(self.layouts.get(name, "contiguous"))(dtype.tensor(array, device))

    def tensors(self, dtype: DType, device: str) -> dict[str, torch.Tensor]:
        """Return all inputs as tensors in their layouts, by name."""
        return {name: self.tensor(name, dtype, device) for name in self.inputs}


class RecentCases:
    """A cache of recent cases. Equal cases become the same object, so that results cached by case are found again.

    Args:
        elements: the most elements of all cases together; the oldest cases are dropped first.
        most: the most elements of a case for which cached results are found again by `get_or_make`.
    """

    def __init__(self, elements: float, limit: float = math.inf) -> None:
        self.elements, self.most = elements, limit
        self._cases: OrderedDict[Hashable, Case] = OrderedDict()
        self._total = 0

    def same(self, case: Case) -> Case:
        """Return the equal recent case if there is one; otherwise add and return this case."""
        return case if case.elements > self.elements else self._keep(case.digest, lambda: case)

    def get_or_make(self, make: Callable[[DType], Case], dtype: DType) -> Case:
        """Return the recent case that `make` made for a dtype, if it is kept, or make it."""
        case = self._keep((make, dtype), lambda: make(dtype))
        return case if case.elements <= self.most else replace(case)

    def _keep(self, key: Hashable, make: Callable[[], Case]) -> Case:
        if key in self._cases:
            self._cases.move_to_end(key)
            return self._cases[key]
        case = make()
        self._cases[key] = case
        self._total += case.elements
        while self._total > self.elements:
            _, oldest = self._cases.popitem(last=False)
            self._total -= oldest.elements
        return case
