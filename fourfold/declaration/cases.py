"""A declaration: a definition in torch, its arguments, and the cases that follow from both."""

import copy
import functools
import hashlib
import math
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from fourfold.declaration.drawing import SHARES, draw_array, draw_value, make_array, other_integers, share_rows
from fourfold.inputs.arrays import GENERATORS, cotangent, generators, layouts_for, leading_axes, repeat_first
from fourfold.inputs.extents import Extent, draw_sizes, extent
from fourfold.numerics.dtypes import DTYPES, INTEGERS, QUANTISED, DType, is_chosen, name_of, returned
from fourfold.operations import axes as notation
from fourfold.operations.arguments import LIMITED, Place, Ragged, TensorInput, TensorList, Values
from fourfold.operations.axes import LEADING, Shape
from fourfold.operations.case import Case
from fourfold.operations.layouts import writable
from fourfold.operations.refusals import blame_definition

# What torch says of an operator that has no derivative.
NO_DERIVATIVE = re.compile(r"not differentiable with respect to|derivative for \S+ is not implemented")
# The limit on an input's elements in a smooth case, as a multiple of the least. Numerical differentiation calls the
# definition once for each element.
FEW_ELEMENTS = 6
# The limit on the elements of an intermediate result, as a multiple of the limit on an input's.
INTERMEDIATE = 16
# The most elements of all inputs together for which the definition runs on numbers. Beyond it runs on shapes alone.
FEW_TO_TRY = 1 << 14
# The most outcomes that are kept.
MOST_OUTCOMES = 5000
# The draws that show both dtypes of an input which may have either.
SEEDS_OF_DTYPES = 16
# An optional input is left out of one case in `ABSENT`.
ABSENT = 4
# The number of tensors in a list of a named case, unless `count` allows only fewer.
USUAL_COUNT = 3
# Stands, among the arguments of a call without numbers, for a tensor of a list that is present.
PRESENT: Any = object()
# One case in `ALONE` has no leading axes.
ALONE = 16


class _Largest(TorchFunctionMode):
    """A recorder of the number of elements of the largest tensor that a torch function returns."""

    elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return result


@dataclass(frozen=True)
class OutputShape:
    """The shape and dtype of a definition's output, and the number of elements of its `largest` intermediate result."""

    shape: Shape
    largest: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """A call without the numbers of its tensors.

    Attributes:
        sizes: the sizes of the named axes.
        leading: the sizes of the axes that ``...`` stands for.
        counts: the number of rows of each sample of a ragged batch, by the name of the axis of all rows.
        parameters: the arguments that are not tensors, and None for each absent optional input.
    """

    sizes: Mapping[str, int]
    leading: Shape = ()
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Declaration:
    """The declaration of a definition.

    Args:
        name: the definition's name, for messages.
        definition: a function of torch tensors.
        tensors: its tensors, in the order of its signature.
        parameters: its declared parameters.
        defaults: the values of the parameters in named cases.
        sizes: the sizes that axes may have, as `extent` takes them.
        returns: the dtype of the definition's result: see `fourfold.numerics.dtypes.returned`.
        mutates: the names of the tensors that a call changes in place.
        lists: its lists of tensors, which `tensors` holds one by one.

    Raises:
        ValueError: an axis is named that no tensor has, or the definition does not accept the declared arguments.
    """

    def __init__(
        self,
        name: str,
        definition: Callable[..., Any],
        tensors: Mapping[str, TensorInput],
        parameters: Mapping[str, Values],
        defaults: Mapping[str, Any],
        sizes: Mapping[str, Any],
        returns: str | None = None,
        mutates: Sequence[str] = (),
        lists: Mapping[str, TensorList] = MappingProxyType({}),
    ) -> None:
        self.returns, self.mutates = returns, mutates
        self.name, self.definition = name, definition
        self.tensors, self.parameters, self.lists = tensors, parameters, lists
        self.counts = self._counts_of_lists()
        self.tensors_of_lists = {
            item: place for argument, items in lists.items() for place, item in enumerate(items.items(argument))
        }
        self.defaults = {**defaults, **self.list_arguments(min(USUAL_COUNT, self.counts[-1]))}
        self.optional = tuple(name for name, t in tensors.items() if t.optional)
        self.differentiable = tuple(name for name, t in tensors.items() if t.has_gradient)
        self.dtypes = {name: t.dtypes[0] for name, t in tensors.items() if t.dtypes and t.is_floating}
        self.ragged = {t.total: t for t in tensors.values() if isinstance(t, Ragged)}
        self._require_axes(sizes)
        self.allowed = {axis: extent(axis, sizes.get(notation.indexed_axis(axis), (0, None))) for axis in self.axes}
        self._on_meta = True  # whether the definition runs on tensors without numbers
        self._outcomes: dict[Any, OutputShape] = {}

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """All named axes in the order of the tensors, after ``...`` if a tensor has it."""
        names = dict.fromkeys(LEADING for tensor in self.tensors.values() if LEADING in tensor.axes)
        for tensor in self.tensors.values():
            names |= dict.fromkeys(notation.names(tensor.axes))
        return tuple(names)

    def _counts_of_lists(self) -> range:
        """Return the possible numbers of tensors in the lists; 0 alone if there are no lists.

        Raises:
            ValueError: two lists have other numbers of tensors, or an axis ``n[i]`` is not that of a list.
        """
        limits = {(tensors.least, tensors.most) for tensors in self.lists.values()}
        if len(limits) > 1:
            raise ValueError(f"{self.name}: {' and '.join(self.lists)} must have the same count")
        for name, tensor in self.tensors.items():
            if any("[i]" in axis for axis in tensor.axes):
                raise ValueError(
                    f"{self.name}: the axes {' '.join(tensor.axes)!r} of {name} are those of a list of tensors"
                )
        return range(min(limits)[0], min(limits)[1] + 1) if limits else range(1)

    def list_arguments(self, count: int) -> dict[str, Any]:
        """Return the arguments that make lists of `count` tensors: the later ones are None, as if they were absent."""
        return {name: None if place >= count else PRESENT for name, place in self.tensors_of_lists.items()}

    def _require_axes(self, sizes: Mapping[str, Any]) -> None:
        limits = [("sizes", axis) for axis in sizes]
        for name, tensor in self.tensors.items():
            limits += [(f"{field} of {name}", axis) for field, axis in tensor.limiting_axes.items()]
            if isinstance(tensor, Ragged) and tensor.samples != self.ragged[tensor.total].samples:
                raise ValueError(f"{name}: the rows of {tensor.total} belong to the samples of one axis only")
        for description, axis in limits:
            if axis not in (*self.axes, *map(notation.indexed_axis, self.axes)):
                raise ValueError(f"{description}: no tensor of {self.name} has an axis {axis!r}; there are {self.axes}")
        ragged = [name for name, tensor in self.tensors.items() if isinstance(tensor, Ragged)]
        for name, values in self.parameters.items():
            for tie in values.takes:
                if tie == LEADING or tie not in (*self.axes, *ragged):
                    names = ", ".join(name for name in (*self.axes, *ragged) if name != LEADING)
                    description = "is neither an axis nor the lengths or offsets of a ragged batch"
                    raise ValueError(f"{self.name}: {name} is tied to {tie}, which {description}; there are {names}")

    def learn(self) -> None:
        """Run the definition on few numbers, and find out which axes may be empty.

        Raises:
            ValueError: the definition does not accept the declared arguments.
        """
        tiny = {axis: self.allowed[axis].nearest(2 + place % 3) for place, axis in enumerate(self.axes)}

        def runs(sizes: Mapping[str, int], absent: str | None = None) -> None:
            leading = (sizes[LEADING],) if LEADING in sizes else ()
            plan = self.plan(sizes, leading, {**self.defaults, **({absent: None} if absent else {})})
            self._try_random_inputs(plan)

        for absent in (None, *self.optional):
            runs(tiny, absent)
        if self.lists and self.counts[0] == 0:
            try:
                self._try_random_inputs(self.plan(tiny, (tiny[LEADING],) if LEADING in tiny else (), self.empty_lists))
            except ValueError:
                self.counts = self.counts[1:]
        self.returns = self._result_dtype(tiny)
        if is_chosen(self.returns):
            self.differentiable = ()
        if not self._has_derivative(self.differentiable, tiny):
            self.differentiable = tuple(name for name in self.differentiable if self._has_derivative([name], tiny))
        for axis in self.axes:
            # The tensors of a list are alike, and some of them absent here.
            first = notation.item_axes([notation.indexed_axis(axis)], 0)[0]
            if axis != first:
                self.allowed[axis] = self.allowed[first]
            elif self.allowed[axis].nearest(0) == 0:
                try:
                    runs({**tiny, axis: 0})
                except ValueError:
                    self.allowed[axis] = self.allowed[axis].not_empty()

    def _has_derivative(self, names: Sequence[str], sizes: Mapping[str, int]) -> bool:
        """Return whether torch can differentiate the definition by inputs: not by running statistics, for example."""
        plan = self.plan(sizes, (sizes[LEADING],) if LEADING in sizes else (), self.defaults)
        inputs = self.make_inputs(plan, np.random.default_rng(0), DTYPES["float32"], {})
        tensors = self._tensors(DTYPES["float32"], inputs)
        for name in tensors.keys() & {*names}:
            tensors[name].requires_grad_()
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = self.definition(**tensors, **plan.parameters)
                if output.requires_grad:
                    output.sum().backward()
        except Exception as error:  # any other error is reported where the definition is tried
            return NO_DERIVATIVE.search(str(error)) is None
        return True

    @property
    def empty_lists(self) -> dict[str, Any]:
        """Return the arguments of a named case whose lists are empty."""
        return {**self.defaults, **self.list_arguments(0)}

    def result_dtype(self) -> str | None:
        """Return the name of the result's dtype, as `returned` takes it: see `fourfold.operation`.

        Raises:
            ValueError: the definition does not accept the declared arguments, or returns another kind of numbers than
                declared, or integers whose dtype follows an input of several dtypes or a parameter.
        """
        return self._result_dtype({axis: self.allowed[axis].nearest(2 + i % 3) for i, axis in enumerate(self.axes)})

    def _result_dtype(self, sizes: Mapping[str, int]) -> str | None:
        leading = (sizes[LEADING],) if LEADING in sizes else ()
        settings = [{}, *({name: value} for name, field in self.parameters.items() for value in field.choices)]
        plans = [self.plan(sizes, leading, {**self.defaults, **setting}) for setting in settings]
        may_choose = any(len(tensor.dtypes) > 1 for tensor in self.tensors.values())
        dtypes = dict.fromkeys(
            self.infer_shape(
                self.make_inputs(plan, np.random.default_rng(seed), DTYPES["float32"], {}), plan.parameters
            ).dtype
            for plan in plans
            for seed in range(SEEDS_OF_DTYPES if may_choose else 1)
        )
        if self.returns is None and len(dtypes) > 1 and any(map(is_chosen, dtypes)):
            raise ValueError(f"{self.name} returns {' or '.join(sorted(dtypes))}: `returns` must name one of them")
        returned = next(iter(dtypes))
        if self.returns is None:
            return returned if is_chosen(returned) else None
        kinds = [n if n == "bool" else "integers" if n in INTEGERS else "numbers" for n in (returned, self.returns)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"returns: {self.name} returns {returned}, not {self.returns}")
        return self.returns

    def within(self, limits: Mapping[str, tuple[int, int] | int]) -> Self:
        """Return the same declaration with fewer sizes: see `Extent.within`.

        Raises:
            ValueError: no size of an axis is left, or there is no such axis.
        """
        fewer = copy.copy(self)
        fewer.allowed = dict(self.allowed)
        for axis, limit in limits.items():
            limited = [name for name in self.axes if axis in (name, notation.indexed_axis(name))]
            extents = [self.allowed[name].within(limit) for name in limited]
            if not extents or None in extents:
                raise ValueError(f"sizes of {axis}: {self.name} has none within {limit}")
            fewer.allowed |= dict(zip(limited, extents))  # type: ignore[arg-type]
        return fewer

    # ---- calls without numbers

    def plan(
        self,
        sizes: Mapping[str, int],
        leading: Shape = (),
        parameters: Mapping[str, Any] | None = None,
        counts: Mapping[str, np.ndarray] | None = None,
    ) -> CallPlan:
        """Return a call of these sizes, made consistent: samples sum to their total, and every index has a target.

        `counts` are taken as they are. Without them, the samples share the rows equally.
        """
        fixed = dict(sizes)
        parameters = {name: value for name, value in (parameters or {}).items() if value is not PRESENT}
        shares: dict[str, np.ndarray] = dict(counts or {})
        for total, ragged in self.ragged.items():
            if total not in shares:
                cap = fixed[ragged.most] if ragged.most else None
                shares[total] = share_rows(np.random.default_rng(0), fixed[total], fixed[ragged.samples], cap, "equal")
            fixed[total], fixed[ragged.samples] = int(shares[total].sum()), len(shares[total])
        for name, tensor in self.tensors.items():
            if isinstance(tensor.high, str) and not tensor.also and parameters.get(name, name) is not None:
                empty = 0 in notation.shape(tensor.axes, fixed, leading)
                fixed[tensor.high] = max(fixed[tensor.high], 0 if empty else tensor.low + 1)
        plan = CallPlan(sizes=fixed, leading=leading, counts=shares, parameters=parameters)
        tied = {name: self.choices(name, plan) for name in parameters if self._is_tied(name)}
        places = {name: Place.choose(choices, parameters[name]) for name, choices in tied.items()}
        return replace(plan, parameters={**parameters, **places})

    def _is_tied(self, parameter: str) -> bool:
        return parameter in self.parameters and self.parameters[parameter].tied is not None

    def choices(self, parameter: str, plan: CallPlan) -> list[Any]:
        """Return the choices of a tied parameter in a call.

        Raises:
            ValueError: there is none. The message names the parameter.
        """
        ragged = {n: t.of_counts(plan.counts[t.total]) for n, t in self.tensors.items() if isinstance(t, Ragged)}
        return self._choices(parameter, plan.sizes, ragged)

    def _choices(self, parameter: str, sizes: Mapping[str, int], inputs: Mapping[str, np.ndarray]) -> list[Any]:
        tensors = {name: torch.from_numpy(array.copy()) for name, array in inputs.items() if array.dtype.kind == "i"}
        try:
            return self.parameters[parameter].of_call({**sizes, **tensors})
        except ValueError as error:
            raise ValueError(f"{self.name}: {parameter}: {error}") from error

    def allows(self, case: Case) -> bool:
        """Return whether each tied parameter of a case has one of its choices for the sizes of the case."""
        tied = [name for name in case.parameters if self._is_tied(name)]
        if not tied:
            return True
        sizes, misfit = self._sizes(case.inputs)
        return not misfit and all(
            case.parameters[name] in self._choices(name, sizes, case.inputs)
            for name in tied
            if {*self.parameters[name].takes} <= sizes.keys() | case.inputs.keys()
        )

    def shapes(self, plan: CallPlan) -> dict[str, Shape]:
        """Return the shapes of the inputs that are present in a call."""
        present = {name: tensor for name, tensor in self.tensors.items() if name not in plan.parameters}
        return {name: notation.shape(tensor.axes, plan.sizes, plan.leading) for name, tensor in present.items()}

    def make_inputs(
        self, plan: CallPlan, rng: np.random.Generator, dtype: DType, kinds: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Return the inputs of a call, filled with random numbers. `kinds` is as in `make_array`, by name."""
        inputs = {}
        for name, shape in self.shapes(plan).items():
            tensor = self.tensors[name]
            if isinstance(tensor, Ragged):
                inputs[name] = tensor.of_counts(plan.counts[tensor.total], int(rng.integers(2)))
            else:
                inputs[name] = make_array(tensor, rng, shape, dtype, plan.sizes, kinds.get(name, ""))
        return inputs

    def infer_shape(self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> OutputShape:
        """Return the output shape for inputs, from a run in float32: the tested dtype gives the same shape.

        Raises:
            ValueError: the definition raises an error, or does not return one tensor of real numbers.
        """
        with blame_definition():
            try:
                return _outcome(*self._evaluate(self._tensors(DTYPES["float32"], inputs), parameters))
            except Exception as error:
                texts = [f"{name}{list(array.shape)}" for name, array in inputs.items()]
                texts += [f"{name}={value!r}" for name, value in parameters.items()]
                raise ValueError(f"{self.name}({', '.join(texts)}): {type(error).__name__}: {error}") from error

    def _evaluate(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """Return the output, and the number of elements of the largest intermediate result."""
        with torch.no_grad(), _Largest() as largest, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as torch's about a variance of no numbers
            output = self.definition(**tensors, **parameters)
        if not isinstance(output, torch.Tensor) or name_of(output.dtype) not in {**DTYPES, **QUANTISED, **INTEGERS}:
            result = output.dtype if isinstance(output, torch.Tensor) else type(output).__name__
            hint = "; `returns` names several" if isinstance(output, tuple | list) else ""
            raise TypeError(f"a definition must return one tensor of real numbers, not {result}{hint}")
        return output, max(largest.elements, output.numel())

    def is_finite(self, case: Case) -> bool:
        """Return whether the definition's output for a case is free of NaN and infinities."""
        output, _ = self._evaluate(self._tensors(DTYPES["float64"], case.inputs), case.parameters)
        return bool(output.to(torch.float64).isfinite().all())  # float8 has no isfinite

    def _tensors(self, dtype: DType, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the inputs as tensors. Those of the tested dtype are converted to another one."""
        with np.errstate(over="ignore"):
            return {
                name: dtype.tensor(array if self.tensors[name].dtypes else array.astype(dtype.numpy), "cpu")
                for name, array in inputs.items()
            }

    def outcome(self, plan: CallPlan) -> OutputShape:
        """Return the output shape of a call: from a run without numbers or, if the definition needs them, with some.

        A call of few elements runs on numbers as well: to run without numbers torch imports 900 modules first.
        """
        shapes = self.shapes(plan)
        if not self._on_meta or sum(math.prod(shape) for shape in shapes.values()) <= FEW_TO_TRY:
            return self._try_random_inputs(plan)
        outcome = self._outcome_without_numbers(plan)
        if outcome is None:
            outcome = self._try_random_inputs(plan)
            self._on_meta = False  # it runs only on numbers
        return outcome

    def _outcome_without_numbers(self, plan: CallPlan) -> OutputShape | None:
        """Return the output shape of a call from a run without numbers, or None if the definition raises there."""
        shapes = self.shapes(plan)
        key = tuple(shapes.items()), repr(sorted(plan.parameters.items()))
        if key not in self._outcomes:
            dtypes = {name: self.tensors[name].dtypes for name in shapes}
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, (dtypes[name] or ("float32",))[0]), device="meta")
                for name, shape in shapes.items()
            }
            try:
                with torch.device("meta"):
                    self._outcomes[key] = _outcome(*self._evaluate(tensors, plan.parameters))
            except Exception:
                return None
        return self._outcomes[key]

    def output_shape(self, plan: CallPlan, inputs: Mapping[str, np.ndarray]) -> Shape:
        """Return the shape of a call's output. Every check makes the same cases: equal numbers are tried once."""
        is_small = sum(array.size for array in inputs.values()) <= FEW_TO_TRY
        if not is_small and self._on_meta:
            outcome = self._outcome_without_numbers(plan)
            if outcome is not None:
                return outcome.shape
        numbers = hashlib.blake2b(b"".join(array.tobytes() for array in inputs.values())).digest()
        kinds = tuple((name, array.shape, array.dtype.name) for name, array in inputs.items())
        key = numbers, kinds, repr(sorted(plan.parameters.items()))
        if key not in self._outcomes:
            if len(self._outcomes) >= MOST_OUTCOMES:
                self._outcomes.clear()
            self._outcomes[key] = self.infer_shape(inputs, plan.parameters)
            self._on_meta &= is_small  # without numbers, a larger call has just failed
        return self._outcomes[key].shape

    def _try_random_inputs(self, plan: CallPlan) -> OutputShape:
        return self.infer_shape(
            self.make_inputs(plan, np.random.default_rng(0), DTYPES["float32"], {}), plan.parameters
        )

    def smaller(self, plan: CallPlan, elements: int) -> CallPlan:
        """Return a plan with shorter axes, if possible, where intermediate results would be much larger than inputs."""
        sizes = dict(plan.sizes)
        while self.outcome(plan).largest > INTERMEDIATE * max(elements, 64):
            longest = max(sizes, key=lambda axis: sizes[axis] if self._shorter(axis, sizes[axis]) else -1)
            if not self._shorter(longest, sizes[longest]):
                break
            sizes[longest] = self.allowed[longest].nearest(sizes[longest] // 2)
            plan = self.plan(sizes, (sizes[LEADING],) if LEADING in sizes else (), plan.parameters)
        return plan

    def _shorter(self, axis: str, size: int) -> bool:
        return self.allowed[axis].nearest(size // 2) < size

    # ---- cases

    def cases(self, dtype: DType, elements: int) -> st.SearchStrategy[Case]:
        """Return a strategy of cases whose inputs have up to `elements` elements each."""
        return _cases(self, dtype, elements)

    def smooth(self, dtype: DType) -> st.SearchStrategy[Case]:
        """Return a strategy of cases of few elements and ordinary numbers, whose output is finite."""
        return _smooth(self, dtype).filter(self.is_finite)

    def least(self, allowed: Mapping[str, Extent]) -> int:
        """Return the number of elements of the largest floating-point input if each axis is as short as allowed."""
        sizes = {axis: allowed[axis].nearest(0) for axis in self.axes}
        leading = (sizes[LEADING],) if LEADING in sizes else ()
        floating = [tensor for tensor in self.tensors.values() if tensor.is_floating]
        return max((int(np.prod(notation.shape(t.axes, sizes, leading))) for t in floating), default=1)

    def other_integers(self, case: Case) -> dict[str, np.ndarray]:
        """Return other integers for a case, by input: see `fourfold.declaration.drawing.other_integers`."""
        integers = {name: other_integers(self.tensors[name], array) for name, array in case.inputs.items()}
        changed = {name: array for name, array in integers.items() if array is not None}
        if self.allows(replace(case, inputs={**case.inputs, **changed})):
            return changed
        return {name: array for name, array in changed.items() if not isinstance(self.tensors[name], Ragged)}

    def _make_constant(self, name: str, array: np.ndarray, place: int) -> np.ndarray:
        """Return an input for the layout "expanded": constant along its first or its last axis, depending on `place`.

        Lengths, offsets and arrays from the user's own function stay as they are. Probabilities are constant along the
        first axis only, because they sum to 1 along the last.
        """
        tensor = self.tensors[name]
        if isinstance(tensor, Ragged) or tensor.make is not None:
            return array
        if "probabilities" in tensor.kinds:
            return repeat_first(array) if array.ndim > 1 else array
        return repeat_first(array, -(place % 2))

    def case(
        self,
        plan: CallPlan,
        inputs: Mapping[str, np.ndarray],
        rng: np.random.Generator,
        dtype: DType,
        layouts: Mapping[str, str],
        grad_axis: int = 0,
    ) -> Case:
        """Return a case of a plan's numbers in some layouts. An "expanded" tensor is constant along one axis.

        A parameter that may be the tested dtype is: it is that of the result.
        """
        arrays, layouts = dict(inputs), writable(layouts, self.mutates)
        for place, (name, array) in enumerate(inputs.items()):
            if layouts.get(name) == "expanded":
                arrays[name] = self._make_constant(name, array, place)
        grad_output = cotangent(rng, self.output_shape(plan, arrays), self._cotangent_dtype(dtype))
        if layouts.get("grad_output") == "expanded":
            grad_output = repeat_first(grad_output, grad_axis)
        of_result = {name: dtype.torch for name, values in self.parameters.items() if dtype.torch in values.choices}
        return Case(arrays, grad_output, {**plan.parameters, **of_result}, layouts)

    def _cotangent_dtype(self, dtype: DType) -> DType:
        """Return the dtype of cotangents, which no kernel reads if the result has no gradient."""
        return dtype if is_chosen(self.returns) else returned(dtype, self.returns)

    def redraw(self, case: Case, scaled: Case, integers: bool, scaled_alone: bool = True) -> Case:
        """Return a case with other numbers that the declaration allows.

        Args:
            case: the original case.
            scaled: the same case with scaled floating-point numbers, which are valid where nothing limits them.
            integers: whether integers are drawn again, too. They are kept where the output would have another shape,
                and where they are the lengths or offsets of a ragged batch.
            scaled_alone: whether unlimited numbers are scaled instead of drawn again.
        """
        sizes, misfit = self._sizes(case.inputs)
        if misfit:
            return scaled
        rng = np.random.default_rng(zlib.crc32(b"".join(array.tobytes() for array in case.inputs.values())))

        def redraw_all(tensors: Mapping[str, TensorInput]) -> dict[str, np.ndarray]:
            return {name: self._redraw(name, case, sizes, rng) for name in tensors if name in case.inputs}

        floating = {name: tensor for name, tensor in self.tensors.items() if tensor.is_floating}
        # Scaled numbers mostly have the same order, signs and places, and so the same result of integers.
        redrawn = is_chosen(self.returns) or not scaled_alone
        kept_within = {name: t for name, t in floating.items() if redrawn or t.make is not None or has_range(t)}
        redrawn_case = replace(scaled, inputs={**scaled.inputs, **redraw_all(kept_within)})
        whole = {n: t for n, t in self.tensors.items() if not t.is_floating and not isinstance(t, Ragged)}
        if not integers or not whole:
            return redrawn_case
        with_integers = replace(redrawn_case, inputs={**redrawn_case.inputs, **redraw_all(whole)})
        try:
            shape = self.infer_shape(with_integers.inputs, case.parameters).shape
        except ValueError:
            return redrawn_case
        return with_integers if shape == case.grad_output.shape else redrawn_case

    def _flatten_lists(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with the tensors of lists one by one.

        Raises:
            ValueError: a list is left out, or has too many tensors.
        """
        flat = {name: value for name, value in arguments.items() if name not in self.lists}
        for name, tensor_list in self.lists.items():
            if len(items := arguments.get(name, [None] * (tensor_list.most + 1))) > tensor_list.most:
                raise ValueError(f"{self.name}: an example must give {name}, of at most {tensor_list.most} tensors")
            flat |= dict(zip(tensor_list.items(name), items))
        return flat

    def _sizes(self, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], str | None]:
        """Return the sizes of the axes of a call's inputs, and an input that does not fit them."""
        axes = {name: tensor.axes for name, tensor in self.tensors.items()}
        return notation.sizes(axes, {name: array.shape for name, array in inputs.items()})

    def _redraw(self, name: str, case: Case, sizes: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
        """Return another array for an input, in the same layout."""
        tensor, former = self.tensors[name], case[name]
        kind = str(rng.choice(tensor.kinds)) if tensor.is_floating else "any"
        dtype = DTYPES.get(former.dtype.name, DTYPES["float32"])
        own = replace(tensor, dtypes=(former.dtype.name,)) if tensor.dtypes else tensor
        array = make_array(own, rng, former.shape, dtype, sizes, kind).astype(former.dtype)
        if case.layouts.get(name) == "expanded":
            array = self._make_constant(name, array, list(case.inputs).index(name))
        return array

    def case_of(self, arguments: Mapping[str, Any], dtype: DType) -> Case:
        """Return the case of some arguments.

        Raises:
            ValueError: an argument is not declared or is left out, or shapes do not fit.
        """
        arguments = self._flatten_lists(arguments)
        if unknown := sorted(arguments.keys() - self.tensors.keys() - self.parameters.keys()):
            raise ValueError(f"{self.name} has no argument {unknown[0]} that is declared")
        inputs: dict[str, np.ndarray] = {}
        usual = {name: value for name, value in self.defaults.items() if name not in self.tensors_of_lists}
        parameters = {**usual, **{n: v for n, v in arguments.items() if n in self.parameters}}
        for name, tensor in self.tensors.items():
            if arguments.get(name) is None:
                if not tensor.optional and name not in self.tensors_of_lists:
                    raise ValueError(f"{self.name}: an example must give {name}")
                parameters[name] = None
                continue
            inputs[name] = np.array(arguments[name], np.float64 if tensor.is_floating else None).astype(
                tensor.dtype(dtype).numpy
            )
        sizes, misfit = self._sizes(inputs)
        if misfit:
            axes = " ".join(self.tensors[misfit].axes)
            raise ValueError(f"{self.name}: {misfit} of shape {list(inputs[misfit].shape)} is not {axes!r}")
        for name in self.parameters.keys() - arguments.keys():
            if self._is_tied(name):
                parameters[name] = Place.choose(self._choices(name, sizes, inputs), parameters[name])
        shape = self.infer_shape(inputs, parameters).shape
        cotangent_dtype = self._cotangent_dtype(dtype).numpy
        grad_output = np.linspace(-1.5, 2, int(np.prod(shape, dtype=np.int64))).reshape(shape).astype(cotangent_dtype)
        return Case(inputs, grad_output, parameters)


def _outcome(output: torch.Tensor, largest: int) -> OutputShape:
    return OutputShape(tuple(output.shape), largest, name_of(output.dtype))


@st.composite
def _absent(draw: st.DrawFn, declaration: Declaration) -> dict[str, Any]:
    """Draw the optional inputs, and those of lists, to leave out.

    At least one differentiable input stays, if there is one that does not belong to a list.
    """
    of_lists = declaration.list_arguments(draw(st.sampled_from(declaration.counts))) if declaration.lists else {}
    absent = {name for name in declaration.optional if draw(st.integers(1, ABSENT)) == ABSENT}
    if declaration.differentiable and absent >= set(declaration.differentiable):
        absent.discard(declaration.differentiable[0])
    return {**of_lists, **{name: None for name in declaration.tensors if name in absent}}


@st.composite
def _plans(draw: st.DrawFn, declaration: Declaration, allowed: Mapping[str, Extent], elements: int) -> CallPlan:
    parameters = {name: draw(draw_value(values)) for name, values in declaration.parameters.items()}
    parameters |= draw(_absent(declaration))
    tensors = [tensor.axes for tensor in declaration.tensors.values()]
    sizes = draw(draw_sizes(declaration.axes, tensors, allowed, elements))
    alone = LEADING in sizes and allowed[LEADING].nearest(1) == 1 and draw(st.integers(1, ALONE)) == ALONE
    if alone:
        sizes[LEADING] = 1
    leading: Shape = (sizes[LEADING],) if LEADING in sizes else ()
    plan = declaration.smaller(declaration.plan(sizes, leading, parameters), elements)
    counts = {}
    for total, ragged in declaration.ragged.items():
        cap = plan.sizes[ragged.most] if ragged.most else None
        rng, share = draw(GENERATORS), draw(st.sampled_from(SHARES))
        counts[total] = share_rows(rng, plan.sizes[total], plan.sizes[ragged.samples], cap, share)
    if leading:
        leading = () if alone else draw(leading_axes(plan.sizes[LEADING]))
    return declaration.plan(plan.sizes, leading, parameters, counts)


@st.composite
def _cases(draw: st.DrawFn, declaration: Declaration, dtype: DType, elements: int) -> Case:
    plan = draw(_plans(declaration, declaration.allowed, elements))
    inputs = {}
    for place, (name, shape) in enumerate(declaration.shapes(plan).items()):
        tensor = declaration.tensors[name]
        if isinstance(tensor, Ragged):
            inputs[name] = tensor.of_counts(plan.counts[tensor.total], draw(st.integers(0, 1)))
        else:
            inputs[name] = draw(draw_array(tensor, dtype, shape, plan.sizes, place))
    layouts = draw(layouts_for(*inputs, "grad_output"))
    # An expanded cotangent is constant along the first or the last axis, as after a sum over that axis.
    return declaration.case(plan, inputs, draw(generators(len(inputs))), dtype, layouts, draw(st.sampled_from((0, -1))))


@st.composite
def _smooth(draw: st.DrawFn, declaration: Declaration, dtype: DType) -> Case:
    allowed = {axis: extent.not_empty() for axis, extent in declaration.allowed.items()}
    plan, rng = draw(_plans(declaration, allowed, FEW_ELEMENTS * declaration.least(allowed))), draw(GENERATORS)
    kinds = {n: "normal" for n, t in declaration.tensors.items() if t.is_floating and not has_range(t)}
    return declaration.case(plan, declaration.make_inputs(plan, rng, dtype, kinds), rng, dtype, {})


def has_range(tensor: TensorInput) -> bool:
    """Return whether the numbers of a floating-point tensor are limited to a range."""
    return any(kind in LIMITED for kind in tensor.kinds)
