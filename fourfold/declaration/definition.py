"""Make the record of an operation from its definition, a function of torch tensors, and its declared arguments.

@fourfold.operation(x=tensor("... cols"), weight=tensor("cols"), eps=values(1e-6, 1e-5))
def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
"""

import dataclasses
import functools
import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from hypothesis import strategies as st

from fourfold.declaration import defaults, named_cases
from fourfold.declaration.cases import FEW_TO_TRY, Declaration
from fourfold.numerics.bounded import HangsOnRounding
from fourfold.numerics.dtypes import DTYPES, is_chosen
from fourfold.operations.arguments import (
    Output,
    Place,
    TensorInput,
    TensorList,
    Values,
    lengths,
    offsets,
    result,
    tensor,
    values,
)
from fourfold.operations.case import Case
from fourfold.operations.outputs import alone, concatenate_outputs, functional, list_of, pack_lists
from fourfold.operations.record import FOLLOWS, Operation, reference, reference_gradients

__all__ = ["DefinedOperation", "lengths", "offsets", "operation", "result", "tensor", "values"]

# The number of named examples on which a definition is tried. Later ones have longer axes.
FEW_NAMED = 40
# The most kinds of examples for which its rounding errors are bounded. Kinds differ in the values of parameters, in the
# axes without elements, and in whether all numbers are finite.
MOST_KINDS = 8
_FIELDS = {field.name for field in dataclasses.fields(Operation)}
# Fields that follow from the arguments and cannot be given.
_OF_ARGUMENTS = {"axes", "differentiable", "dtypes", "ordinary", "outputs", "lists", "changed"}
# Fields that may be given for an operation with several outputs. They hold for each output.
OF_EACH_OUTPUT = {"name", "source", "examples", "batched", "errors", "lists", "mutates"}


@dataclass(frozen=True, kw_only=True, repr=False)
class DefinedOperation(Operation):
    """An operation made from a definition. A call of it calls the definition.

    Attributes:
        definition: a function of torch tensors that returns one tensor or a tuple of several.
        declaration: the declaration of its arguments.
        own_examples: the examples that were given in addition to those that follow from the declaration.
        has_own_cases: whether a strategy of cases was given. The declaration may not describe all of its constraints.
        has_own_workloads: whether workloads were given. They stay as they are on fewer sizes.
    """

    definition: Callable[..., Any]
    declaration: Declaration
    own_examples: Mapping[str, named_cases.Make]
    has_own_cases: bool = False
    has_own_workloads: bool = False

    def __post_init__(self) -> None:
        # `inspect.signature` and `help` then show the definition's. The instance is frozen, so plain assignment fails.
        object.__setattr__(self, "__signature__", inspect.signature(self.definition))
        object.__setattr__(self, "__doc__", self.definition.__doc__)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the definition."""
        return self.definition(*arguments, **keywords)

    def redraw_numbers(self, case: Case, scaled_alone: bool = True) -> Case:
        """Return a case of the same shapes, layouts and parameters with other numbers that the declaration allows.

        Integers and numbers limited to a range, such as probabilities, are drawn again, and all others unless
        `scaled_alone`: see `Declaration.redraw`.
        """
        integers, scaled = not self.has_own_cases, super().redraw_numbers(case)
        return self.declaration.redraw(case, scaled, integers, scaled_alone)

    def allows(self, case: Case) -> bool:
        """Return whether each tied parameter of a case has one of its choices for the sizes of the case."""
        return self.declaration.allows(case)

    def of_sizes(self, limits: Mapping[str, tuple[int, int] | int]) -> Self:
        """Return the operation on fewer sizes. Its drawn and its named cases keep to them; given examples stay.

        Args:
            limits: by the name of an axis, the least and the largest size, or a divisor of all sizes.

        Raises:
            ValueError: no size of an axis is left, or there is no such axis.
        """
        if not limits or self.cases != self.declaration.cases:
            return self
        fewer = self.declaration.within(limits)
        smooth = fewer.smooth if self.smooth == self.declaration.smooth else self.smooth
        examples = named_cases.join_cases(fewer, self.own_examples)
        sized = named_cases.sized_cases(fewer)
        workloads = self.workloads if self.has_own_workloads else FOLLOWS
        changes: dict[str, Any] = {"examples": examples, "declaration": fewer, "sized": sized, "workloads": workloads}
        return defaults.complete(dataclasses.replace(self, cases=fewer.cases, smooth=smooth, **changes))  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<operation {self.name}, defined in {self.source}>"


class DefinitionError(ValueError):
    """An error in a definition that cannot be evaluated with an error bound for its declared arguments."""


def operation(
    *misplaced: Any,
    sizes: Mapping[str, Any] | None = None,
    returns: str | torch.dtype | Mapping[str, str | torch.dtype | Output | None] | None = None,
    mutates: str | Sequence[str] = (),
    tried: bool = True,
    **declarations: Any,
) -> Callable[[Callable[..., Any]], DefinedOperation]:
    """Return a decorator that makes the record of an operation from its definition.

    Args:
        sizes: the sizes that an axis may have, by its name: a pair of the least and the largest (None: any), a range, a
            list of sizes, or one size. ``"..."`` stands for the product of all leading axes.
        returns: the dtype of the result, as `result` takes it. For a definition that returns a tuple, the names of the
            outputs in order, each with its dtype or a `result`.
        mutates: the names of the tensors that a kernel changes in place. The definition may do so, too, or return their
            new values in this order. What it returns beside them is named by `returns`. There are no gradients.
        tried: whether to evaluate the definition for a few named examples immediately, so that its errors surface here.
        declarations: the declaration of each argument of the definition, by its name: `tensor`, `tensors`, `lengths`,
            `offsets`, `values`, `tied`, `divisors`, or a Hypothesis strategy of a parameter. An argument with a default
            may be left out; it is then not passed.
            Also fields of `fourfold.operations.record.Operation`, such as laws, errors, forward and backward. They
            replace the fields that follow from the declaration. `examples` are added to those that follow, unless
            `cases` is given, too. Each example is a function from the dtype to a case, or a mapping of arguments.

    Returns:
        A decorator. It returns an `Operation` that can be called like the definition.

    Raises:
        TypeError: the definition is no function in Python. An argument of it is not declared and has no default, or it
            has no argument of a declared name, or `mutates` names an argument that cannot be changed. The decorator
            raises it.
        ValueError: the definition does not accept such tensors, or does not return one tensor, or not as many as
            `returns` names, or another kind of numbers than `returns` says.
        DefinitionError: the definition raises an error where its rounding errors are bounded, because it is random,
            works in place, or calls an operator without a rule. The message names the line.
    """
    if misplaced:
        raise TypeError('operation: declare each argument by its name: @fourfold.operation(x=tensor("... cols"))')
    mutated = (mutates,) if isinstance(mutates, str) else tuple(mutates)
    for field in _OF_ARGUMENTS:
        if field in declarations and not _is_declared(declarations[field]):
            raise TypeError(f"operation: {field} follows from the declarations of the arguments")
    arguments = {name: value for name, value in declarations.items() if _is_declared(value)}
    fields = {name: value for name, value in declarations.items() if name not in arguments}
    for name, value in fields.items():
        if name not in _FIELDS:
            expected = (
                "tensor(...), tensors(...), values(...), tied(...), lengths(...), offsets(...) or a Hypothesis strategy"
            )
            raise TypeError(f"operation: {name} must be {expected}, not {value!r}")

    lists = tuple(name for name, value in arguments.items() if isinstance(value, TensorList))
    if lists:
        fields["lists"] = lists

    def decorate(definition: Callable[..., Any]) -> DefinedOperation:
        signature_of(definition)
        if not hasattr(definition, "__name__"):
            raise TypeError(NO_FUNCTION.format(type(definition).__name__))
        evaluated = pack_lists(definition, lists)
        if mutated:
            record = _in_place_operation(evaluated, arguments, fields, sizes or {}, returns, mutated)
        elif isinstance(returns, Mapping):
            record = _multiple_outputs(evaluated, arguments, fields, sizes or {}, returns)
        else:
            record = _make_operation(evaluated, arguments, {**fields, "returns": Output(returns).dtype}, sizes or {})
        record = dataclasses.replace(record, definition=definition)
        if tried and not {"forward", "backward"} & fields.keys():
            _try(record)
        return record

    return decorate


NO_FUNCTION = (
    "operation: a definition is a function in Python, and {} is none: write one that calls it, such as"
    " `def softmax(x): return torch.softmax(x, -1)`, and declare its arguments by their names"
)


def signature_of(definition: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a definition.

    Raises:
        TypeError: it is a builtin function, such as torch.softmax, which has none.
    """
    try:
        return inspect.signature(definition)
    except ValueError:
        raise TypeError(NO_FUNCTION.format(getattr(definition, "__name__", definition))) from None


def _try(record: DefinedOperation) -> None:
    """Evaluate a definition, forward and backward, for named examples of each kind that it may treat differently.

    Raises:
        DefinitionError: the definition raises an error.
    """
    dtype, kinds = DTYPES["float32"], set[str]()
    for name, make in itertools.islice(record.examples.items(), FEW_NAMED):
        case, finite = None, True
        try:
            case = make(dtype)
            shapes = [tuple(size == 0 for size in array.shape) for array in case.inputs.values()]
            finite = all(np.isfinite(array.astype(np.float64)).all() for array in case.inputs.values())
            kind = repr((shapes, finite, sorted(case.parameters.items())))
            if case.elements <= FEW_TO_TRY and kind not in kinds and len(kinds) < MOST_KINDS:
                kinds.add(kind)
                for output in record.outputs.values() or (record,):
                    reference(output, case if not record.outputs else output.examples[name](dtype), dtype)
                    if output.differentiable:
                        reference_gradients(output, case if not record.outputs else output.examples[name](dtype), dtype)
        except Exception as error:
            if isinstance(error, HangsOnRounding) and not finite:
                continue  # numbers without an order: other cases have one
            innermost = error
            while innermost.__cause__ is not None and not isinstance(innermost.__cause__, AttributeError):
                innermost = innermost.__cause__  # type: ignore[assignment]
            case_text = f" at {case!r}" if case is not None else ""
            raise DefinitionError(
                f"operation {record.name}: its definition cannot be judged by, as for the named example {name} it"
                f" raised {type(innermost).__name__}: {innermost}{_find_line(error, record)}{case_text}"
            ) from error


def _find_line(error: BaseException | None, record: DefinedOperation) -> str:
    """Return the innermost line of the definition's file in the traceback of an exception or of its causes."""
    file, line = inspect.unwrap(record.definition).__code__.co_filename, ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                line = f'\n  File "{file}", line {frame.lineno}, in {frame.name}\n    {frame.line}\n'
        error = error.__cause__
    return line


def _is_declared(value: Any) -> bool:
    return isinstance(value, TensorInput | TensorList | Values | st.SearchStrategy)


def _multiple_outputs(
    definition: Callable[..., Any],
    declared: Mapping[str, Any],
    fields: Mapping[str, Any],
    sizes: Mapping[str, Any],
    returns: Mapping[str, str | torch.dtype | Output | None],
) -> DefinedOperation:
    """Return the record of all outputs in a row. Its `outputs` are the records of the single outputs."""
    from fourfold.numerics.torch_adapter.evaluate import backward_of

    own_fields = [name for name in fields if name not in OF_EACH_OUTPUT]
    if own_fields or any(map(callable, fields.get("examples", {}).values())):
        field = own_fields[0] if own_fields else "a function among the examples"
        raise TypeError(f"operation: {field} cannot be given of an operation with several outputs")
    names, whole = tuple(returns), fields.get("name") or definition.__name__
    outputs = {name: field if isinstance(field, Output) else Output(field) for name, field in returns.items()}
    if not names or any(not name.isidentifier() for name in names):
        raise TypeError(f"operation: returns must name each output by a word, not {list(names)}")
    dtypes = [
        declaration_of(whole, alone(definition, names, place), declared, sizes, output.dtype).result_dtype()
        for place, output in enumerate(outputs.values())
    ]
    are_chosen = [*map(is_chosen, dtypes)]
    places = [place for place, output in enumerate(outputs.values()) if output.gradient and not are_chosen[place]]

    def record_output(place: int, output: Output) -> DefinedOperation:
        inputs = declared if place in places else {name: _drop_gradient(field) for name, field in declared.items()}
        output_fields = {**fields, "name": f"{whole}.{names[place]}", "returns": output.dtype}
        order = [place, *(p for p in places if p != place)]
        gradients = functools.partial(backward_of, definition, places=order)
        return _make_operation(alone(definition, names, place), inputs, output_fields, sizes, gradients)

    records = {name: record_output(place, output) for place, (name, output) in enumerate(outputs.items())}
    shared = {name: field for name, field in fields.items() if name != "batched"} | {"name": whole}
    rounded = [place for place in range(len(names)) if not are_chosen[place]]
    joined = _make_operation(concatenate_outputs(definition, names, places or rounded or [0]), declared, shared, sizes)
    return dataclasses.replace(joined, definition=definition, outputs=records)


def _in_place_operation(
    definition: Callable[..., Any],
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
    sizes: Mapping[str, Any],
    returns: Any,
    mutates: tuple[str, ...],
) -> DefinedOperation:
    """Return the record of an operation that changes arguments in place."""
    name = fields.get("name") or definition.__name__
    if returns is not None and not isinstance(returns, Mapping):
        raise TypeError(f"{name}: returns must name each output that is returned beside {' and '.join(mutates)}")
    for argument in mutates:
        tensor = arguments.get(argument)
        tensor = tensor.tensor if isinstance(tensor, TensorList) else tensor
        if not isinstance(tensor, TensorInput):
            raise TypeError(f"{name}: mutates names {argument}, which is not declared to be a tensor")
        if tensor.optional or len(tensor.dtypes) > 1:
            problem = "be None" if tensor.optional else f"have the dtypes {' and '.join(tensor.dtypes)}"
            raise TypeError(f"{name}: {argument} may {problem}, and so cannot be changed in place")
        if argument in (returns or {}):
            raise TypeError(f"{name}: returns names {argument}, which mutates names already")
    inputs = {argument: _drop_gradient(value) for argument, value in arguments.items()}
    tensors = {argument: getattr(inputs[argument], "tensor", inputs[argument]) for argument in mutates}
    new = {argument: result(*tensor.dtypes, gradient=False) for argument, tensor in tensors.items()}
    outputs = {**new, **(returns or {})}
    fields = {**fields, "mutates": mutates}
    function = functional(definition, mutates, tuple(returns or ()))
    if len(outputs) > 1:
        record = _multiple_outputs(function, inputs, fields, sizes, outputs)
        outputs_of_all = {
            output: dataclasses.replace(record_of_output, changed=output if output in mutates else "")
            for output, record_of_output in record.outputs.items()
        }
        return dataclasses.replace(record, definition=definition, outputs=outputs_of_all)
    ((argument, value),) = new.items()
    record = _make_operation(function, inputs, {**fields, "changed": argument, "returns": value.dtype}, sizes)
    return dataclasses.replace(record, definition=definition)


def _drop_gradient(value: Any) -> Any:
    if isinstance(value, TensorList):
        return dataclasses.replace(value, tensor=_drop_gradient(value.tensor))
    return dataclasses.replace(value, gradient=False) if isinstance(value, TensorInput) else value


def _make_operation(
    definition: Callable[..., Any],
    arguments: Mapping[str, Any],
    fields: Mapping[str, Any],
    sizes: Mapping[str, Any],
    gradients: Callable[..., Callable] | None = None,
) -> DefinedOperation:
    name = fields.get("name") or definition.__name__
    declaration = declaration_of(name, definition, arguments, sizes, fields.get("returns"), fields.get("mutates", ()))
    return build_operation(definition, declaration, fields, gradients)


def build_operation(
    definition: Callable[..., Any],
    declaration: Declaration,
    fields: Mapping[str, Any],
    gradients: Callable[..., Callable] | None = None,
) -> DefinedOperation:
    """Return the record of a declared definition.

    Args:
        definition: the definition, which returns one tensor.
        declaration: its declaration.
        fields: fields of the record in place of those that follow from the declaration.
        gradients: returns the definition's backward; by default, that of its only output.
    """
    own_cases, own_examples = fields.get("cases"), fields.get("examples")
    follow = own_cases is None or own_examples is None
    if follow:
        declaration.learn()
    makers = {
        key: value if callable(value) else _example(declaration, value) for key, value in (own_examples or {}).items()
    }
    examples = named_cases.join_cases(declaration, makers) if follow else makers
    fields = {**fields, "returns": declaration.returns}
    record: dict[str, Any] = {
        "name": declaration.name,
        "differentiable": declaration.differentiable,
        "cases": declaration.cases,
        "source": _place(definition),
        "smooth": declaration.smooth if own_cases is None else FOLLOWS,
        "sized": named_cases.sized_cases(declaration) if own_cases is None else None,
        "dtypes": declaration.dtypes,
        "axes": {argument: " ".join(tensor.axes) for argument, tensor in declaration.tensors.items()},
        "other_integers": declaration.other_integers,
        "ordinary": tuple(argument for argument, tensor in declaration.tensors.items() if not tensor.special),
    }
    record |= {**fields, "examples": examples}
    if "forward" not in record or "backward" not in record:
        record = _oracle(definition, declaration, gradients) | record
    defined = DefinedOperation(
        definition=definition,
        declaration=declaration,
        own_examples=makers,
        has_own_cases=own_cases is not None,
        has_own_workloads="workloads" in fields,
        **record,
    )
    if defined.errors is FOLLOWS:
        defined = dataclasses.replace(defined, errors=_errors(defined, declaration))
    return defaults.complete(defined)  # type: ignore[return-value]


def declaration_of(
    name: str,
    definition: Callable[..., Any],
    declared: Mapping[str, Any],
    sizes: Mapping[str, Any],
    returns: str | None = None,
    mutates: Sequence[str] = (),
) -> Declaration:
    """Match the declared arguments with the definition's signature."""
    tensors: dict[str, TensorInput] = {}
    lists: dict[str, TensorList] = {}
    parameters: dict[str, Values] = {}
    default: dict[str, Any] = {}
    signature = signature_of(definition).parameters
    for argument in declared:
        if argument not in signature:
            raise TypeError(f"{name} has no argument {argument}, which is declared")
    for argument, parameter in signature.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: its argument {argument} cannot be given by its name")
        value = declared.get(argument)
        if value is None:
            if parameter.default is parameter.empty:
                raise TypeError(f"{name}: its argument {argument} is not declared, and has no default")
        elif isinstance(value, TensorInput):
            tensors[argument] = value
        elif isinstance(value, TensorList):
            lists[argument] = value
            tensors |= value.items(argument)
        else:
            parameters[argument] = spec = value if isinstance(value, Values) else Values((), value)
            usual = (Place(0.5),) if spec.tied is not None else spec.choices
            if parameter.default is parameter.empty and not usual:
                raise TypeError(f"{name}: {argument} needs a default or values, which named cases take")
            default[argument] = usual[0] if parameter.default is parameter.empty else parameter.default
    if not tensors:
        raise TypeError(f"{name}: none of its arguments is declared to be a tensor")
    return Declaration(name, definition, tensors, parameters, default, sizes, returns, mutates, lists)


def _example(declaration: Declaration, arguments: Mapping[str, Any] | named_cases.Example) -> named_cases.Make:
    if isinstance(arguments, named_cases.Example):
        return arguments.of(declaration)
    return lambda dtype: declaration.case_of(arguments, dtype)


def _place(definition: Callable[..., Any]) -> str:
    """Return the file and the line of a function, as a relative path if it lies in the current folder."""
    code = inspect.unwrap(definition).__code__
    path = os.path.relpath(code.co_filename) if os.path.exists(code.co_filename) else code.co_filename
    return f"{code.co_filename if path.startswith(os.pardir) else path}:{code.co_firstlineno}"


def _oracle(
    definition: Callable[..., Any],
    declaration: Declaration,
    gradients: Callable[..., Callable] | None,
) -> dict[str, Callable]:
    """Return forward and backward functions with a running error, derived from the definition."""
    from fourfold.numerics.torch_adapter.evaluate import backward_of, forward_of

    differentiated = gradients or functools.partial(backward_of, definition)
    dtypes = {name: getattr(torch, dtype) for name, dtype in declaration.dtypes.items()}

    def backward(grad_output: Any, **arguments: Any) -> tuple:
        """Return the gradients of the definition, None for an input that is None."""
        names = declaration.differentiable
        present = tuple(name for name in names if arguments.get(name) is not None)
        results = dict(zip(present, differentiated(present, dtypes=dtypes)(grad_output, **arguments), strict=True))
        return tuple(results.get(name) for name in names)

    return {"forward": forward_of(definition, declaration.returns, dtypes), "backward": backward}


def _errors(record: Operation, declaration: Declaration) -> tuple:
    """Return the errors that follow from arguments of any shapes. None is no error where an input may be None.

    Of the tensors of a list, only the first one is wrong, and the error must name the list.
    """
    may_be = {f"{name}_is_none" for name in (*declaration.optional, *declaration.tensors_of_lists)}
    later = {name for name, place in declaration.tensors_of_lists.items() if place}
    return tuple(
        dataclasses.replace(error, names=list_of(error.names))
        for error in defaults.errors(record.examples, record.dtypes)
        if error.name not in may_be and error.names not in later
    )
