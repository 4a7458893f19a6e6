"""The record of an operation: everything that its verification needs to know, independent of any backend."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import numpy as np
from hypothesis.strategies import SearchStrategy

from fourfold.numerics.bounded import Arithmetic, Bounded, lift
from fourfold.numerics.dtypes import DType, returned
from fourfold.operations import axes as notation
from fourfold.operations.axes import SHORTEST_AXIS
from fourfold.operations.case import Case, is_floating, scaled
from fourfold.operations.declared_errors import DeclaredError
from fourfold.operations.refusals import by_the_definition
from fourfold.operations.workloads import Make

# Stands for what follows from a record's other fields: see `fourfold.declaration.defaults`.
FOLLOWS: Any = None


class Result:
    """The results of one evaluation for a law: the output and the gradients of the inputs, each with its bound."""

    def __init__(self, output: Callable[[], Bounded], gradients: Callable[[], Mapping[str, Bounded]]):
        self._output, self._gradients = output, gradients

    @cached_property
    def output(self) -> Bounded:
        """The output of the call; computed on first access."""
        return self._output()

    @cached_property
    def gradients(self) -> Mapping[str, Bounded]:
        """The gradients under the case's cotangent; computed on first access."""
        return self._gradients()


class Evaluate(Protocol):
    """Runs the implementation under test, or another operation of the same backend, on a case."""

    def __call__(self, case: Case, operation: str | None = None, documented_ties: bool = False) -> Result:
        """Return the output and the gradients for `case`.

        Args:
            case: the arguments of the call.
            operation: the name of another operation of the same backend; None for the one under test.
            documented_ties: leave the choice of a derivative at ties out of the bounds, so that they cover rounding
                alone. A law that holds for every choice at ties asks for it.
        """


@dataclass(frozen=True)
class Relation:
    """Two results that a law says are equal, within the sum of their bounds."""

    actual: Bounded
    expected: Bounded


# A law is a function whose name is a sentence. It yields the relations that hold for a case, and none if it does not
# apply to the case.
Law = Callable[[Evaluate, Case, DType], Iterable[Relation]]


@dataclass(frozen=True)
class Cost:
    """The least that one call must move and compute: bytes, each moved once, and floating-point operations."""

    bytes: int
    flops: int


def no_integers(case: Case) -> dict[str, np.ndarray]:
    """No input has other integers, or numbers that are not scaled, that are known to be valid."""
    return {}


def what_must_be_moved(case: Case) -> tuple[Cost, Cost]:
    """Inputs in and the output out, an operation for each of its elements; backward may hand the cotangent on."""
    output = case.grad_output
    return Cost(sum(array.nbytes for array in case.inputs.values()) + output.nbytes, output.size), Cost(0, 0)


def _is_not_empty(sizes: Mapping[str, int]) -> bool:
    return min(sizes.values(), default=1) > 0


def _nothing_larger(sizes: Mapping[str, int]) -> float:
    return 0.0


@dataclass(frozen=True)
class Sized:
    """Cases of chosen sizes.

    Attributes:
        axes: the axes whose sizes can be chosen, as `Operation.axes` names them, and the size of each where another is
            long.
        make: makes a named case of ordinary numbers from the size of each of these axes.
        allows: whether the operation takes these sizes.
        largest: about how many elements the largest result of such a case has, that is larger than all inputs.
        varied: makes a named case from the sizes, what ``...`` stands for (None: one axis), and the parameters. Unless
            given, parameters are put in place of those that `make` takes, and the shapes must not depend on them.
    """

    axes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], Callable[[DType], Case]]
    allows: Callable[[Mapping[str, int]], bool] = _is_not_empty
    largest: Callable[[Mapping[str, int]], float] = _nothing_larger
    varied: Callable[[Mapping[str, int], notation.Shape | None, Mapping[str, Any]], Callable[[DType], Case]] | None = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as its users see it, independent of its implementations.

    Attributes:
        name: snake_case; also the module in `oracles` and `properties`, the folder in `impls` and the function there.
        forward: the oracle's forward. It takes the inputs and parameters by name; its running error gives the bound.
        backward: the oracle's backward. It takes the cotangent, then the arguments of `forward`, and returns the
            gradients of `differentiable`, in order, and None for an input that is None.
        differentiable: names of the inputs that have a gradient.
        cases: strategy for a dtype and a number of elements that inputs should stay within.
        examples: named cases that are always run: known bugs of such kernels, declared behaviour.
        source: where the operation is defined.
        batched: inputs whose first axis is a batch, each with the number of its last axes that belong to one sample.
            The output has the same first axis. Of a sample, the output and the gradients of these inputs depend on no
            other sample. Unless given, nothing is said of batches.
        laws: relations between results that need no reference.
        smooth: strategy for the cases that gradcheck may differentiate numerically: away from ties and clamps. Unless
            given, small cases of ordinary numbers, which do where there are neither.
        errors: bad input and what must come of it. Unless given, what holds for any shapes: see
            `fourfold.operations.declared_errors`, which shapes and parameters are refused follows where it is told of
            them.
        cost: forward and backward cost of a case. Unless given, forward moves inputs and output, and of backward
            nothing is known.
        workloads: the cases whose speed is recorded, by name, on "cpu" and on "cuda". Unless given, the largest named
            examples.
        axes: the notation of the axes of inputs, by name: see `fourfold.operations.axes`. Unless given, nothing is
            known.
        ordinary: inputs that are given no special values beyond those that `cases` draws, as the operation is not
            defined outside of their range.
        ranges: by name, parameters that may be any number between two, neither of which may be given. The checks draw
            numbers far from those of `cases`.
        other_integers: of a case, other values of the inputs that hold integers, by name: of the same shape and dtype,
            and valid beside the other inputs. Unless given, integers stay as they are.
        other_numbers: of a case, other values of its floating-point inputs, by name: of the same shape and dtype, and
            with another result. Unless given, they are scaled.
        returns: the dtype of the output: the name of one, "compute" for float64 of float64 inputs and float32 of all
            others, "int64" or "int32", None for the dtype that is tested. Cotangents have it too, where there are any.
        length_varies: whether the length of the output depends on the numbers of the inputs, as the number of boxes
            that are kept does. `forward` then returns a `OneOf` of any length. There is no gradient; a case's cotangent
            has the length of the oracle's result for the inputs as `cases` made them. A CUDA graph cannot hold such a
            call.
        outputs: where there are several, an operation for each of them, by name, in the order in which they are
            returned. This record is then that of all those that have gradients, `joined`, in a row; of one such
            output as it is.
        admissible: where there are several outputs, what is not admissible about those of one call together, and the
            gradients under the case's cotangent, beside what each must be for itself: a function of the case and of
            the results by name, "gradient of x" among them, that returns it in words; None where nothing is.
        sized: cases of chosen sizes, of which large ones are made: see `fourfold.inputs.large_cases`. Unless given,
            there are none.
        reduction: "mean over batch" or "sum over batch", where batch is one of `axes`, or several with commas between
            them: the output is the mean, or the sum, of terms that belong to one place of the axes each. A law follows:
            see `fourfold.declaration.reductions`.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple]
    differentiable: tuple[str, ...]
    cases: Callable[[DType, int], SearchStrategy[Case]]
    examples: Mapping[str, Callable[[DType], Case]]
    source: str
    batched: Mapping[str, int] = field(default_factory=dict)
    laws: tuple[Law, ...] = ()
    smooth: Callable[[DType], SearchStrategy[Case]] = FOLLOWS
    errors: tuple[DeclaredError, ...] = FOLLOWS
    cost: Callable[[Case], tuple[Cost, Cost]] = what_must_be_moved
    workloads: Mapping[str, Mapping[str, Make]] = FOLLOWS
    axes: Mapping[str, str] = field(default_factory=dict)
    ordinary: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    other_integers: Callable[[Case], Mapping[str, np.ndarray]] = no_integers
    other_numbers: Callable[[Case], Mapping[str, np.ndarray]] = no_integers
    returns: str | None = None
    length_varies: bool = False
    outputs: Mapping[str, "Operation"] = field(default_factory=dict)
    admissible: Callable[[Case, Mapping[str, np.ndarray]], str | None] | None = None

    @property
    def joined(self) -> tuple[int, ...]:
        """The places of the outputs that this record is of, where there are several: those that have gradients."""
        places = tuple(place for place, of in enumerate(self.outputs.values()) if of.differentiable)
        return places or tuple(range(len(self.outputs)))

    def result_dtype(self, dtype: DType) -> DType:
        """The dtype of the output where `dtype` is tested."""
        return returned(dtype, self.returns)

    sized: Sized | None = None
    reduction: str = ""

    def differentiable_in(self, case: Case) -> tuple[str, ...]:
        """The names in `differentiable` of the inputs that a case has: an input that may be None may be absent."""
        return tuple(name for name in self.differentiable if name in case.inputs)

    def with_other_numbers(self, case: Case) -> Case:
        """A case of the same shapes, layouts and parameters, whose numbers are others that the operation takes.

        Unless more is known of its inputs, integers stay, and each floating-point input is scaled by a factor of its
        own. The factors are positive powers of two, so that valid rows stay valid and boxes keep their shape.
        """
        inputs, factor = {}, 0.5
        for name, array in case.inputs.items():
            floating = is_floating(array)
            inputs[name] = scaled(array, factor) if floating else array
            factor = factor / 2 if floating else factor
        inputs |= self.other_numbers(case)
        return replace(case, inputs=inputs, grad_output=scaled(case.grad_output, -0.5))

    def of_sizes(self, limits: Mapping[str, tuple[int, int] | int]) -> Self:
        """The operation on fewer sizes, if it can draw them so; else itself, and the caller takes cases that fit.

        Args:
            limits: by the name of an axis, the least and the largest size, or a number of which sizes are multiples.
        """
        return self

    def examples_for_offsets(self, dtype: DType) -> dict[str, Case]:
        """Return named examples whose offsets are computed by steps that few cases take.

        These are the example with the most elements, which may need kernels of its own, and the smallest example with
        an input of three axes or more, none of them short.
        """

        def elements(name: str) -> int:
            return made[name].elements

        made = {name: make(dtype) for name, make in self.examples.items()}
        deep = [
            name
            for name, case in made.items()
            if any(array.ndim >= 3 and min(array.shape) >= SHORTEST_AXIS for array in case.inputs.values())
        ]
        names = [*sorted(made, key=elements)[-1:], *sorted(deep, key=elements)[:1]]
        return {name: made[name] for name in names}


def wide(case: Case, dtype: DType) -> dict[str, Any]:
    """Return the inputs of a case as exact `Bounded` arrays (integers and booleans unchanged), and its parameters."""
    arrays = {
        name: Bounded.exact(array.astype(dtype.wide), dtype.arithmetic) if is_floating(array) else array
        for name, array in case.inputs.items()
    }
    return {**arrays, **case.parameters}


def sizes_of(operation: Operation, case: Case) -> dict[str, int]:
    """The sizes of the named axes in a case, such as ``{"cols": 33}``; none of an operation without `axes`.

    Raises:
        ValueError: an input's shape is not what its axes say, or not what other inputs say of their sizes.
    """
    known: dict[str, Any] = {}
    for name, written in operation.axes.items():
        if name in case.inputs and not notation.fits(notation.parse(written), case[name].shape, known):
            has = f"{name} has shape {list(case[name].shape)}, where its axes are {written!r}"
            raise ValueError(f"a case of {operation.name}: {has} and {known} is known of other axes")
    return {name: size for name, size in known.items() if name != notation.LEADING}


# The oracles' results for cases that are still referenced: a mutation trial runs many kernels on the same cases.
_said: WeakKeyDictionary[Case, dict[tuple[Callable, str, Arithmetic], Any]] = WeakKeyDictionary()


def _once(oracle: Callable, case: Case, dtype: DType, ask: Callable[[], Any]) -> Any:
    said = _said.setdefault(case, {})
    key = (oracle, dtype.name, dtype.arithmetic)
    if key not in said:
        with by_the_definition():
            said[key] = ask()
    return said[key]


def reference(operation: Operation, case: Case, dtype: DType) -> Bounded:
    """The oracle's output with its running error."""
    return _once(operation.forward, case, dtype, lambda: operation.forward(**wide(case, dtype)))


def reference_gradients(operation: Operation, case: Case, dtype: DType) -> dict[str, Bounded]:
    """The oracle's gradients with their running error."""

    def ask() -> dict[str, Bounded]:
        # A cotangent of a wider dtype than kernels compute in is rounded once when they read it.
        grad_output = lift(case.grad_output.astype(dtype.wide), dtype.arithmetic)
        gradients = operation.backward(grad_output, **wide(case, dtype))
        found = dict(zip(operation.differentiable, gradients, strict=True))
        return {name: found[name] for name in operation.differentiable_in(case)}

    return dict(_once(operation.backward, case, dtype, ask))
