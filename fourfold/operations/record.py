"""The record of an operation: all information for its verification, independent of any backend."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import numpy as np
from hypothesis.strategies import SearchStrategy

from fourfold.numerics.bounded import Arithmetic, Bounded, lift
from fourfold.numerics.dtypes import DTYPES, DType, is_chosen, returned
from fourfold.operations import axes as notation
from fourfold.operations.axes import SHORTEST_AXIS
from fourfold.operations.case import Case, is_floating, scale
from fourfold.operations.declared_errors import DeclaredError
from fourfold.operations.refusals import blame_definition
from fourfold.operations.workloads import Make

# Marks a field whose value follows from the record's other fields: see `fourfold.declaration.defaults`.
FOLLOWS: Any = None


class Result:
    """The results of one evaluation for a law: the output and the gradients of the inputs, each with its bound."""

    def __init__(self, output: Callable[[], Bounded], gradients: Callable[[], Mapping[str, Bounded]]):
        self._output, self._gradients = output, gradients

    @cached_property
    def output(self) -> Bounded:
        """Return the output of the call; compute it on first access."""
        return self._output()

    @cached_property
    def gradients(self) -> Mapping[str, Bounded]:
        """Return the gradients under the case's cotangent; compute them on first access."""
        return self._gradients()


class Evaluate(Protocol):
    """The type of functions that run the implementation under test, or another operation of its backend, on a case."""

    def __call__(self, case: Case, operation: str | None = None, documented: bool = False) -> Result:
        """Return the output and the gradients for `case`.

        Args:
            case: the arguments of the call.
            operation: the name of another operation of the same backend; None for the one under test.
            documented: exclude the choice of a derivative at ties from the bounds, so that they cover rounding
                alone. Laws that hold for every choice at ties set it.
        """


@dataclass(frozen=True)
class Relation:
    """Two results that are equal by a law, within the sum of their bounds.

    Attributes:
        exact: whether this library's own implementations give the same numbers, without any error.
    """

    actual: Bounded
    expected: Bounded
    exact: bool = False


# A law is a function whose name is a sentence. It yields the relations that hold for a case, and none if it does not
# apply to the case.
Law = Callable[[Evaluate, Case, DType], Iterable[Relation]]


@dataclass(frozen=True)
class Cost:
    """The least work of one call: bytes, each moved once, and floating-point operations."""

    bytes: int
    flops: int


def no_integers(case: Case) -> dict[str, np.ndarray]:
    """Return no inputs: no other valid integers, or numbers other than scaled ones, are known."""
    return {}


def what_must_be_moved(case: Case) -> tuple[Cost, Cost]:
    """Return a forward cost of moving inputs and output, with an operation for each output element, and none backward.

    The backward pass may return the cotangent itself.
    """
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
        axes: the axes of variable size, as named in `Operation.axes`, and the size of each if another axis is long.
        make: returns a named case of ordinary numbers for the size of each of these axes.
        allows: returns whether the operation supports the sizes.
        largest: returns the approximate number of elements of the case's largest result that is larger than all inputs.
        varied: returns a named case for the sizes, the shape of ``...`` (None: one axis), and the parameters. Unless
            given, parameters replace those of `make`'s case, and the shapes must not depend on them.
        integers: the least and the largest number of each input of integers whose range is the same for all sizes.
        filling: returns the sizes of a call of about a number of elements, and odd ones if the second argument is True.
    """

    axes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], Callable[[DType], Case]]
    allows: Callable[[Mapping[str, int]], bool] = _is_not_empty
    largest: Callable[[Mapping[str, int]], float] = _nothing_larger
    varied: Callable[[Mapping[str, int], notation.Shape | None, Mapping[str, Any]], Callable[[DType], Case]] | None = (
        None
    )
    integers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    filling: Callable[[int, bool], Mapping[str, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as its users see it, independent of its implementations.

    Attributes:
        name: snake_case; also the module in `oracles` and `properties`, the folder in `impls` and the function there.
        forward: the oracle's forward. It takes the inputs and parameters by name; its running error gives the bound.
        backward: the oracle's backward. It takes the cotangent, then the arguments of `forward`, and returns the
            gradients of `differentiable`, in order, and None for an input that is None.
        differentiable: the names of the inputs that have a gradient.
        cases: strategy for a dtype and the most elements of each input.
        examples: named cases that are always run: known bugs of such kernels, declared behaviour.
        source: the place of the operation's definition.
        batched: inputs whose first axis is a batch, each with the number of its last axes that belong to one sample.
            The output has the same first axis. A sample's output and its gradients of these inputs depend on no other
            sample. Unless given, the operation has no batches.
        laws: relations between results that need no reference.
        smooth: strategy for the cases that gradcheck differentiates numerically, away from ties and clamps. Unless
            given, small cases of ordinary numbers, which are enough for operations without ties and clamps.
        errors: bad input and the required errors. Unless given, the errors that hold for any shapes. Errors of shapes
            and parameters follow from a declaration of the arguments: see `fourfold.operations.declared_errors`.
        cost: forward and backward cost of a case. Unless given, forward moves inputs and output, and the backward
            cost is unknown.
        workloads: the cases for timing, by name, on "cpu" and on "cuda". Unless given, the largest named examples.
        dtypes: the dtypes of floating-point inputs that keep them whatever dtype is tested, by name.
        axes: the notation of the axes of inputs, by name: see `fourfold.operations.axes`. Unless given, the
            axes are unknown.
        ordinary: inputs that get no special values beyond those from `cases`, because the operation is undefined
            outside of their range.
        ranges: the open intervals of numeric parameters, by name. The checks draw numbers far from those of `cases`.
        other_integers: returns other values of a case's integer inputs, by name, of the same shape and dtype, valid
            together with the other inputs. Unless given, integers stay the same.
        other_numbers: returns other values of a case's floating-point inputs, by name, of the same shape and dtype,
            with another result. Unless given, the values are scaled.
        returns: the dtype of the output: a name, "compute" for float64 of float64 inputs and float32 of all others,
            None for the tested dtype. Cotangents, if any, have the same dtype.
        length_varies: whether the length of the output depends on the inputs' numbers, like the number of kept boxes.
            `forward` then returns a `OneOf` of any length. There is no gradient; a case's cotangent has the length of
            the oracle's result for the inputs from `cases`. A CUDA graph cannot hold such a call.
        outputs: an operation for each of several outputs, by name, in the returned order. This record then describes
            all outputs that have gradients, joined in a row, or the only such output unchanged.
        mutates: the names of the inputs that a call changes in place. Their new values are the first `outputs`, or the
            only output. No input has a gradient.
        lists: the names of the arguments that are lists of tensors. Their tensors are inputs such as ``xs[0]``.
        changed: for one of several outputs, or for an only one, the input whose new value it is.
        admissible: for several outputs, a function of the case and of one call's results by name, including
            "gradient of x" for the gradients under the case's cotangent. It returns, in words, a contradiction between
            the results, beyond the requirements for each alone; None if there is none.
        sized: cases of chosen sizes, the source of large cases: see `fourfold.inputs.large_cases`. Unless given,
            there are none.
        reduction: "mean over batch" or "sum over batch", where batch is one of `axes`, or several separated by commas:
            the output is the mean, or the sum, of one term for each index along the axes. A law follows:
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
    dtypes: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    ordinary: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    other_integers: Callable[[Case], Mapping[str, np.ndarray]] = no_integers
    other_numbers: Callable[[Case], Mapping[str, np.ndarray]] = no_integers
    returns: str | None = None
    length_varies: bool = False
    outputs: Mapping[str, "Operation"] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    changed: str = ""
    admissible: Callable[[Case, Mapping[str, np.ndarray]], str | None] | None = None

    @property
    def joined_places(self) -> tuple[int, ...]:
        """Return the indices of the joined outputs.

        These are the outputs with gradients; if none has one, those of numbers that a kernel rounds; or the first one.
        """
        outputs = self.outputs.values()
        places = tuple(place for place, output in enumerate(outputs) if output.differentiable)
        return places or tuple(place for place, output in enumerate(outputs) if not is_chosen(output.returns)) or (0,)

    def result_dtype(self, dtype: DType) -> DType:
        """Return the dtype of the output if `dtype` is tested."""
        return returned(dtype, self.returns)

    def input_dtype(self, name: str, dtype: DType) -> DType:
        """Return the dtype of a floating-point input, and of its gradient, if `dtype` is tested."""
        return returned(dtype, self.dtypes.get(name))

    sized: Sized | None = None
    reduction: str = ""

    def differentiable_in(self, case: Case) -> tuple[str, ...]:
        """Return the names in `differentiable` of a case's inputs. An optional input may be absent."""
        return tuple(name for name in self.differentiable if name in case.inputs)

    def redraw_numbers(self, case: Case, scaled_alone: bool = True) -> Case:
        """Return a case of the same shapes, layouts and parameters with other valid numbers.

        Without `other_numbers`, integers stay the same, and each floating-point input is scaled by a factor of its
        own. The factors are positive powers of two, so that valid rows stay valid and boxes keep their shape.

        Args:
            case: the original case.
            scaled_alone: whether scaled numbers are enough. If not, a declared operation draws all of them again.
        """
        inputs, factor = {}, 0.5
        for name, array in case.inputs.items():
            floating = is_floating(array)
            inputs[name] = scale(array, factor) if floating else array
            factor = factor / 2 if floating else factor
        inputs |= self.other_numbers(case)
        return replace(case, inputs=inputs, grad_output=scale(case.grad_output, -0.5))

    def allows(self, case: Case) -> bool:
        """Return whether the parameters of a case may have their values there, where they depend on sizes."""
        return True

    def of_sizes(self, limits: Mapping[str, tuple[int, int] | int]) -> Self:
        """Return the operation on fewer sizes if it can draw such cases, else itself, and the caller filters cases.

        Args:
            limits: by the name of an axis, the least and the largest size, or a divisor of the sizes.
        """
        return self

    def examples_for_offsets(self, dtype: DType, limit: float = math.inf) -> dict[str, Case]:
        """Return named examples of at most `limit` elements whose offsets need steps that few cases need.

        These are the example with the most elements, which may need special kernels, and the smallest example with an
        input of three axes or more, none of them short.
        """

        def elements(name: str) -> int:
            return cases[name].elements

        named = {name: make(dtype) for name, make in self.examples.items()}
        cases = {name: case for name, case in named.items() if case.elements <= limit}
        deep = [
            name
            for name, case in cases.items()
            if any(array.ndim >= 3 and min(array.shape) >= SHORTEST_AXIS for array in case.inputs.values())
        ]
        names = [*sorted(cases, key=elements)[-1:], *sorted(deep, key=elements)[:1]]
        return {name: cases[name] for name in names}


def wide(case: Case, dtype: DType) -> dict[str, Any]:
    """Return the inputs of a case as exact `Bounded` arrays (integers and booleans unchanged), and its parameters.

    Kernels round an input of a wider dtype than their arithmetic once, when they read it.
    """

    def bounded(array: np.ndarray) -> Bounded:
        if array.dtype == np.float64 and dtype.arithmetic.roundoff > np.finfo(np.float64).eps:
            return lift(array, dtype.arithmetic)
        return Bounded.exact(array.astype(dtype.wide), dtype.arithmetic)

    arrays = {name: bounded(array) if is_floating(array) else array for name, array in case.inputs.items()}
    return {**arrays, **case.parameters}


def sizes_of(operation: Operation, case: Case, leading: bool = False) -> dict[str, int]:
    """Return the sizes of the named axes in a case, ``{"cols": 33}`` for example; empty without `axes`.

    With `leading`, return the product of the leading axes, by the name ``"..."``, too.

    Raises:
        ValueError: an input's shape does not fit its axes, or their sizes in other inputs.
    """
    axes = {name: notation.parse(text) for name, text in operation.axes.items()}
    extents, misfit = notation.sizes(axes, {name: array.shape for name, array in case.inputs.items()})
    if misfit:
        mismatch = f"{misfit} has shape {list(case[misfit].shape)}, where its axes are {operation.axes[misfit]!r}"
        raise ValueError(f"a case of {operation.name}: {mismatch} and {extents} is known of other axes")
    rows = extents.pop(notation.LEADING, None)
    return extents if rows is None or not leading else {**extents, notation.LEADING: math.prod(rows)}


# The oracles' results for cases that are still referenced: a mutation trial runs many kernels on the same cases.
_said: WeakKeyDictionary[Case, dict[tuple[Callable, str, Arithmetic], Any]] = WeakKeyDictionary()


def _once(oracle: Callable, case: Case, dtype: DType, ask: Callable[[], Any]) -> Any:
    answers = _said.setdefault(case, {})
    key = (oracle, dtype.name, dtype.arithmetic)
    if key not in answers:
        with blame_definition():
            answers[key] = ask()
    return answers[key]


def computed_in(operation: Operation, dtype: DType) -> DType:
    """Return a dtype with the arithmetic of kernels: that of float32 if an input is no wider whatever is tested."""
    of_inputs = [DTYPES[name].arithmetic for name in operation.dtypes.values() if name in DTYPES]
    coarse = max(of_inputs, key=lambda arithmetic: arithmetic.roundoff, default=dtype.arithmetic)
    if coarse.roundoff <= dtype.arithmetic.roundoff:
        return dtype
    return replace(dtype, arithmetic=replace(coarse, storage=None, contract=dtype.arithmetic.contract))


def reference(operation: Operation, case: Case, dtype: DType) -> Bounded:
    """Return the oracle's output with its running error."""
    dtype = computed_in(operation, dtype)
    return _once(operation.forward, case, dtype, lambda: operation.forward(**wide(case, dtype)))


def reference_gradients(operation: Operation, case: Case, dtype: DType) -> dict[str, Bounded]:
    """Return the oracle's gradients with their running error, by input."""
    dtype = computed_in(operation, dtype)

    def ask() -> dict[str, Bounded]:
        # Kernels round a cotangent of a wider dtype than their arithmetic once, when they read it.
        grad_output = lift(case.grad_output.astype(dtype.wide), dtype.arithmetic)
        gradients = operation.backward(grad_output, **wide(case, dtype))
        by_name = dict(zip(operation.differentiable, gradients, strict=True))
        return {name: by_name[name] for name in operation.differentiable_in(case)}

    return dict(_once(operation.backward, case, dtype, ask))
