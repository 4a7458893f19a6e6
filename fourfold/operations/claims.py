"""Claims: the limits that an implementation declares. Checks stay within them, and the verdict repeats them."""

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from fourfold.numerics.bounded import DOCUMENTED, Contract
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations import axes as notation
from fourfold.operations.case import Case, is_floating
from fourfold.operations.layouts import parts
from fourfold.operations.record import Operation, reference_gradients, sizes_of
from fourfold.operations.registry import did_you_mean

EXACT, STORAGE = "exact", "storage"
Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "__fourfold_claims__"


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The claims of an implementation. Each claim is a limit; by default there is none.

    Attributes:
        dtypes: the names of the supported dtypes, ``("float32",)`` for example; all if empty.
        contiguous: whether it supports contiguous tensors only.
        aligned: whether it supports only tensors whose memory begins at a multiple of 16 bytes.
        ranks: the supported numbers of axes of its first input; any if empty.
        sizes: by the name of an axis, the smallest and the largest size, ``{"cols": (1, 65536)}``, or a divisor of the
            sizes, ``{"cols": 64}``; ``"..."`` stands for the product of the leading axes.
        empty: False if it supports no tensors without elements.
        gradients: False for a forward pass alone.
        finite: whether it supports finite numbers only.
        largest: the largest supported magnitude of numbers; any if None.
        ties: False to exclude cases with ties, at which gradients are not unique.
        deterministic: False if two equal calls may give different bits.
        accuracy: "exact" for the rounding errors of float32 arithmetic (float64 for float64); "storage" for the errors
            if each intermediate is rounded to the dtype of the tensors.
        undefined_lanes_are_zero: a Triton load without ``other`` gives zeros where its mask is false. The language
            leaves these lanes undefined; the compiler for NVIDIA gives zeros.
        streams: False if it always launches on the default stream instead of torch's current stream, as
            ``<<<grid, block>>>`` does without a stream.
        autocast: False if it is not called under `torch.autocast`.

    Raises:
        ValueError: a claim has an invalid value. The message names the claim.
    """

    dtypes: Collection[str] = ()
    contiguous: bool = False
    aligned: bool = False
    ranks: Collection[int] = ()
    sizes: Mapping[str, tuple[int, int] | int] = field(default_factory=dict)
    empty: bool = True
    gradients: bool = True
    finite: bool = False
    largest: float | None = None
    ties: bool = True
    deterministic: bool = True
    accuracy: str = EXACT
    undefined_lanes_are_zero: bool = False
    streams: bool = True
    autocast: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.dtypes, str) or (unknown := [name for name in self.dtypes if name not in DTYPES]):
            names = self.dtypes if isinstance(self.dtypes, str) else unknown
            raise ValueError(f"Claims: dtypes must be some of {', '.join(DTYPES)}, not {names!r}")
        if self.accuracy not in (EXACT, STORAGE):
            raise ValueError(f"Claims: accuracy must be {EXACT!r} or {STORAGE!r}, not {self.accuracy!r}")
        for axis, limit in self.sizes.items():
            pair = isinstance(limit, tuple) and len(limit) == 2 and all(isinstance(size, int) for size in limit)
            if not (pair and limit[0] <= limit[1]) and not (isinstance(limit, int) and limit > 0):  # type: ignore[index]
                raise ValueError(f"Claims: sizes[{axis!r}] must be (smallest, largest) or a divisor, not {limit!r}")

    @classmethod
    def parse(cls, text: str) -> "Claims":
        """Return claims from the text between the parentheses: ``contiguous=True, sizes={"cols": (1, 1024)}``.

        Raises:
            ValueError: the text is not a list of keyword arguments, or names an unknown claim.
        """
        try:
            call = ast.parse(f"Claims({text})", mode="eval").body
            assert isinstance(call, ast.Call)
            assert not call.args
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        except (SyntaxError, ValueError, AssertionError):
            raise ValueError(
                f'claims must be as in contiguous=True, sizes={{"cols": (1, 1024)}}, not {text!r}'
            ) from None
        return cls.of(arguments)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Claims":
        """Return claims from names and values.

        Raises:
            ValueError: a name is unknown.
        """
        names = [f.name for f in fields(cls)]
        for name in arguments:
            if name not in names:
                raise ValueError(f"{name} is no claim: there are {', '.join(names)}{did_you_mean(name, names)}")
        return cls(**arguments)

    def __str__(self) -> str:
        default = NO_CLAIMS
        texts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)]
        return ", ".join(
            text for f, text in zip(fields(self), texts) if getattr(self, f.name) != getattr(default, f.name)
        )

    def describe(self) -> str:
        """Return, in words, the cases that the claims allow: "finite numbers up to 10000, contiguous tensors"."""
        numbers = f"{'finite ' * self.finite}numbers{'' if self.largest is None else f' up to {self.largest:g}'}"
        words = {
            numbers: numbers != "numbers",
            "contiguous tensors": self.contiguous,
            "aligned tensors": self.aligned and not self.contiguous,
            "tensors with elements": not self.empty,
            "the forward pass alone": not self.gradients,
            "storage accuracy": self.accuracy == STORAGE,
            "zeros in the undefined lanes of masked loads": self.undefined_lanes_are_zero,
        }
        rest = str(replace(self, **{name: getattr(NO_CLAIMS, name) for name in _DESCRIBED}))
        return ", ".join([*(word for word, holds in words.items() if holds), *filter(None, [rest])])

    def join(self, other: "Claims") -> "Claims":
        """Return these claims with those of `other` that are not the default, and the ranks and dtypes of both.

        Contiguous tensors are aligned.
        """
        values = {f.name: getattr(other, f.name) for f in fields(self)}
        values["aligned"] = not (self.contiguous or other.contiguous) and (self.aligned or other.aligned)
        values["ranks"] = tuple(rank for rank in self.ranks if rank in other.ranks) or other.ranks
        values["dtypes"] = tuple(name for name in self.dtypes if name in other.dtypes) or other.dtypes
        values_set = {n: v for n, v in values.items() if n == "aligned" or v != getattr(NO_CLAIMS, n)}
        return replace(self, **values_set)

    def excludes(self, operation: Operation, case: Case, dtype: DType) -> bool:
        """Return whether the claims exclude a case, by its numbers, its sizes or its layouts."""
        adapted = self.adapt(case).layouts
        has_changed = any(adapted.get(name, "contiguous") != layout for name, layout in case.layouts.items())
        return has_changed or self.outside(operation, case, dtype) is not None

    def outside(self, operation: Operation, case: Case, dtype: DType) -> str | None:
        """Return the reason why a case lies outside of the claims, or None. Ignore layouts: see `adapt`."""
        floating = {name: array for name, array in case.inputs.items() if is_floating(array)}
        first = next(iter(case.inputs.values()), None)
        if self.ranks and first is not None and first.ndim not in self.ranks:
            return f"{first.ndim} axes"
        if not self.empty:
            for name, array in {**case.inputs, "grad_output": case.grad_output}.items():
                if not array.size:
                    return f"{name} has no elements"
        if self.finite:
            for name, array in {**floating, "grad_output": case.grad_output}.items():
                if not np.isfinite(array.astype(np.float64)).all():
                    return f"{name} has numbers that are not finite"
        if self.largest is not None:
            for name, array in {**floating, "grad_output": case.grad_output}.items():
                magnitude = abs(array.astype(np.float64))
                if (np.where(np.isfinite(magnitude), magnitude, 0) > self.largest).any():
                    return f"{name} has numbers above {self.largest:g}"
        for axis, size in sizes_of(operation, case, leading=True).items():
            limit = self.sizes.get(notation.indexed_axis(axis))
            if isinstance(limit, tuple) and not limit[0] <= size <= limit[1]:
                return f"{axis} = {size}"
            if isinstance(limit, int) and size % limit:
                return f"{axis} = {size}"
        if not self.ties and _has_ties(operation, case, dtype):
            return "a tie"
        return None

    def adapt(self, case: Case) -> Case:
        """Return the case with only layouts that the claims allow."""
        if self.contiguous:
            return replace(case, layouts={})
        if self.aligned:
            layouts = {n: layout for n, layout in case.layouts.items() if not MISALIGNED & {*parts(layout)}}
            return replace(case, layouts=layouts)
        return case

    @property
    def _look_at_cases(self) -> bool:
        """Whether a case may lie outside of the claims."""
        limits = self.ranks or self.finite or self.largest is not None or self.sizes
        return bool(limits or not self.empty or not self.ties)

    def filter_cases(
        self, cases: st.SearchStrategy[Case], operation: Operation, dtype: DType
    ) -> st.SearchStrategy[Case]:
        """Return the strategy without the cases that lie outside of the claims."""
        if not self._look_at_cases:
            return cases
        return cases.filter(lambda case: self.outside(operation, case, dtype) is None)

    def restrict(self, operation: Operation) -> Operation:
        """Return the operation with only those cases and examples that lie within the claims.

        Raises:
            ValueError: sizes names an axis that the operation does not have, or no named example is left.
        """
        for axis in self.sizes:
            if axis not in (axes := axes_of(operation)):
                raise ValueError(
                    f"Claims: sizes names {axis}: the axes of {operation.name} are {', '.join(axes) or 'not named'}"
                )
        operation = operation.of_sizes(self.sizes)
        looks = self._look_at_cases
        if not looks and not self.contiguous and not self.aligned:
            return operation

        def restrict_cases(cases: Callable[..., st.SearchStrategy[Case]]) -> Callable[..., st.SearchStrategy[Case]]:
            return lambda dtype, *rest: self.filter_cases(cases(dtype, *rest).map(self.adapt), operation, dtype)

        probe = next(iter([DTYPES[name] for name in self.dtypes] or [DTYPES["float32"]]))
        examples = {
            name: (lambda dtype, make=make: self.adapt(make(dtype)))
            for name, make in operation.examples.items()
            if not looks or self.outside(operation, make(probe), probe) is None
        }
        return replace(
            operation,
            cases=restrict_cases(operation.cases),
            smooth=restrict_cases(operation.smooth),
            examples=examples,
            outputs={name: self.restrict(output) for name, output in operation.outputs.items()},
        )


NO_CLAIMS = Claims()
# The claims that `Claims.describe` puts into words.
_DESCRIBED = (
    "finite",
    "largest",
    "contiguous",
    "aligned",
    "empty",
    "gradients",
    "accuracy",
    "undefined_lanes_are_zero",
)
# Layouts whose memory does not begin at a multiple of 16 bytes.
MISALIGNED = {"misaligned", "sliced_rows", "sliced_columns", "cut_from_wider"}


def axes_of(operation: Operation) -> list[str]:
    """Return the names of an operation's axes."""
    axes = [axis for text in operation.axes.values() for axis in notation.parse(text)]
    leading = [notation.LEADING] if notation.LEADING in axes else []
    return list(dict.fromkeys([*leading, *map(notation.indexed_axis, notation.names(axes))]))


def _has_ties(operation: Operation, case: Case, dtype: DType) -> bool:
    """Return whether a gradient of the case may have any value between one-sided derivatives."""
    free = reference_gradients(operation, case, dtype.with_contract(Contract(ties=True)))
    exact = reference_gradients(operation, case, dtype.with_contract(DOCUMENTED))
    return any(bool((free[name].error > exact[name].error).any()) for name in free)


def claims(**arguments: Any) -> Callable[[Function], Function]:
    """Return a decorator that sets a function's `Claims`: ``@fourfold.claims(contiguous=True)``."""
    values = Claims.of(arguments)

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, values)
        return function

    return mark


def claims_of(function: Callable[..., Any], default: Claims | None = None) -> Claims:
    """Return the given claims; if there are none, those of a function's decorator, or `NO_CLAIMS`.

    Raises:
        TypeError: the argument is not a `Claims`.
    """
    if default is not None and not isinstance(default, Claims):
        raise TypeError(f"claims: expected Claims, such as fourfold.Claims(contiguous=True), not {default!r}")
    return getattr(function, _ATTRIBUTE, NO_CLAIMS) if default is None else default
