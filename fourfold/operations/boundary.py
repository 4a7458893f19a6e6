"""Boundary: the claim that separates an implementation's refused cases from its accepted ones."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fourfold.numerics.dtypes import DType
from fourfold.operations.axes import indexed_axis
from fourfold.operations.case import Case
from fourfold.operations.claims import Claims
from fourfold.operations.record import Operation, sizes_of

# Traits of a case, which claims restrict. The trait of an axis's size is this prefix and the axis's name.
DTYPE, RANK, SIZE = "dtype", "rank", "size of "
# Claims about layouts. The claim that excludes fewer cases comes first.
LAYOUTS = {"aligned": Claims(aligned=True), "contiguous": Claims(contiguous=True)}


def traits_of(operation: Operation | None, case: Case, dtype: DType | None) -> dict[str, Any]:
    """Return the traits of a case."""
    layouts = {name: layout for name, layout in case.layouts.items() if layout != "contiguous"}
    traits: dict[str, Any] = {name: claims.adapt(case).layouts == layouts for name, claims in LAYOUTS.items()}
    if case.inputs:
        traits[RANK] = next(iter(case.inputs.values())).ndim
    if dtype is not None:
        traits[DTYPE] = dtype.name
    if operation is not None:
        with contextlib.suppress(ValueError):
            traits |= {
                f"{SIZE}{axis}": size for axis, size in sizes_of(operation, case).items() if axis == indexed_axis(axis)
            }
    return traits


@dataclass
class Boundary:
    """The values of each trait among the refused and among the accepted cases."""

    refused: dict[str, set[Any]] = field(default_factory=dict)
    taken: dict[str, set[Any]] = field(default_factory=dict)

    def add(self, traits: Mapping[str, Any], refused: bool) -> None:
        """Add the traits of a case."""
        for name, value in traits.items():
            (self.refused if refused else self.taken).setdefault(name, set()).add(value)

    def update(self, other: "Boundary") -> None:
        """Add the cases of another boundary."""
        for values_of, added in ((self.refused, other.refused), (self.taken, other.taken)):
            for name, values in added.items():
                values_of.setdefault(name, set()).update(values)

    def as_dict(self) -> dict[str, dict[str, list[Any]]]:
        """Return the boundary as a dictionary for JSON."""
        parts = {"refused": self.refused, "taken": self.taken}
        return {name: {trait: sorted(values) for trait, values in part.items()} for name, part in parts.items()}

    @classmethod
    def of(cls, data: Mapping[str, Mapping[str, Collection[Any]]]) -> Self:
        """Return the boundary from the result of `as_dict`."""
        refused, valid = ({trait: set(values) for trait, values in data[name].items()} for name in ("refused", "taken"))
        return cls(refused, valid)

    def claim(self) -> str:
        """Return, as text, a claim that excludes every refused case and not all others; "" if there is none."""
        return next(self._claims(), "")

    def _claims(self) -> Iterator[str]:
        for name, claim in ((DTYPE, "dtypes"), (RANK, "ranks")):
            refused, valid = self.refused.get(name), self.taken.get(name)
            if refused and valid and not refused & valid:
                yield f"{claim}={tuple(sorted(valid))}"
        for name in LAYOUTS:
            if self.refused.get(name) == {False} and True in self.taken.get(name, ()):
                yield f"{name}=True"
        for name in self.refused:
            if name.startswith(SIZE) and name in self.taken:
                yield from _size_claims(name.removeprefix(SIZE), self.refused[name], self.taken[name])


def _size_claims(axis: str, refused: set[int], valid: set[int]) -> Iterator[str]:
    """Yield claims about the sizes of an axis."""
    limits = min(valid), max(valid)
    if all(not limits[0] <= size <= limits[1] for size in refused):
        yield f"sizes={{{axis!r}: {limits}}}"
    divisor = math.gcd(*valid)
    if divisor > 1 and all(size % divisor for size in refused):
        yield f"sizes={{{axis!r}: {divisor}}}"
