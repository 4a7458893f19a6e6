"""Custom operators: they make a kernel's launch usable by autograd, torch.compile and CUDA graphs.

SWISH = Operator(schema="swish(Tensor x) -> Tensor output", fake=torch.empty_like, saves=("x",))
swish_operator = SWISH.register("triton", launch_forward, launch_backward)

Each backend of an operation registers a forward operator, which takes the public arguments and gives the output and
whatever backward needs, and a backward operator. Both are opaque to the compiler and have a fake, so that
``torch.compile(fullgraph=True)`` traces through them with static and dynamic shapes.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fourfold.backends import known_calls, tuning
from fourfold.backends.known_calls import public_results
from fourfold.compat import torch_internals

NAMESPACE = "fourfold"
# Library.impl costs about half as much per call as custom_op, and a small loss takes mostly call overhead.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# By a schema's types, the Python types that a launch accepts; the dispatcher converts or refuses others.
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": known_calls.TENSOR_TYPES,
    "Tensor?": (*known_calls.TENSOR_TYPES, type(None)),
    "float": (float,),
    "float?": (float, type(None)),
    "int": (int,),
    "int?": (int, type(None)),
    "int[]": (tuple,),  # a list cannot be part of the key of a known call
    "SymInt": (int,),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}


class _Launch(NamedTuple):
    """The implementation of an operator.

    Attributes:
        implementation: takes the operator's arguments.
        types: the types of its arguments, in order, for which it may be called without torch's dispatcher.
        tensors: the indices of the arguments that are tensors, or None.
        public: the index of the results that callers get, or None for all.
    """

    implementation: Callable[..., Any]
    types: frozenset[tuple[type, ...]]
    tensors: tuple[int, ...]
    public: int | slice | None

    def is_observed(self, arguments: tuple) -> bool:
        """Return whether torch.compile, a transform, a mode or an argument's type needs the dispatcher."""
        return (
            torch.compiler.is_compiling()
            or tuple(map(type, arguments)) not in self.types
            or torch_internals.calls_are_watched()
        )

    def find(self, arguments: tuple) -> known_calls.Found | None:
        """Return how to repeat the call: see `known_calls.Repeater.find`. Return None if it is observed.

        The implementation is a `known_calls.Repeater`.
        """
        if torch.compiler.is_compiling() or torch_internals.calls_are_watched():
            return None
        repeater: Any = self.implementation
        if (found := repeater.find_recent(arguments)) is not None:
            return found
        return repeater.find_kind(arguments) if tuple(map(type, arguments)) in self.types else None

    def needs_dispatcher(self, arguments: tuple) -> bool:
        """Return whether a call is observed, or a view needs the dispatcher."""
        if self.is_observed(arguments):
            return True
        for place in self.tensors:
            tensor = arguments[place]
            # With the negative bit, as of the imaginary part of a conjugate, it stores the negatives of its values.
            if tensor is not None and tensor.is_neg():
                return True
        return False


_launches: dict[Any, _Launch] = {}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operation as autograd and torch.compile see it, whatever computes it.

    Attributes:
        schema: ``"name(Tensor x, float eps) -> (Tensor output, Tensor mean)"``. No argument is mutated, none has a
            default, no result is a view of one.
        fake: takes the arguments, and gives empty results of the right shape, strides, dtype and device.
        saves: the arguments and results that backward takes after the cotangent, tensors before others.
        saves_if: for a saved tensor, a function of the arguments: backward takes None in its place where it is false.
        gradients: the arguments that have a gradient, each with the saved tensor of its shape and dtype, or with
            "grad_output", where the cotangent has these; unless given, every tensor argument, with itself. Arguments
            that have the same gradient stand together, as in ``{"x residual": "x"}``.
        cotangents: further results that are differentiable. Backward takes the cotangent of each, or None where it is
            not used, after that of the first result. An unused first result has a cotangent of zeros, or also None if
            it is named here as well.
        backward: where no kernel has to be launched for them, ``(ctx, grad_output)`` to a gradient for each argument,
            from what ``ctx.saved_tensors`` are.
        repeats: whether calls may be repeated as `fourfold.backends.known_calls` says: what they launch, and whether
            their arguments pass the checks, depends only on what is the same for calls of a kind and on the setting
            that `register` takes, and all of it is launched by `CudaKernel.launch` or
            `fourfold.backends.triton.launch.launch`.
        public: the index of the results that callers get: 0, ``slice(2)`` or, for all of them, None. The others are
            for backward alone.
    """

    schema: str
    fake: Callable[..., Any]
    saves: tuple[str, ...] = ()
    saves_if: Mapping[str, Callable[..., bool]] = field(default_factory=dict)
    gradients: Mapping[str, str] | None = None
    cotangents: tuple[str, ...] = ()
    backward: Callable[..., Any] | None = None
    repeats: bool = False
    public: int | slice | None = None

    def register(
        self,
        backend: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        setting: Callable[[], Hashable] = lambda: None,
    ) -> Callable[..., Any]:
        """Register ``name_backend``, and ``name_backend_backward``, for CPU and CUDA tensors.

        Args:
            backend: part of the operators' names.
            forward: takes the arguments, gives the results.
            backward: takes the first result's cotangent, those of `cotangents`, the saved tensors and, if several
                arguments have gradients, whether each is required; gives their gradients, contiguous and with the
                shapes of `empty_gradients`; unrequired ones have any content.
            setting: returns what the launches depend on beside the arguments, as torch's settings.

        Returns:
            What to call in place of `forward`, for the public results: see `differentiate`.

        Raises:
            ValueError: there is no backward, or `saves` has another order.
        """
        of_backend = self.schema.replace("(", f"_{backend}(", 1)
        operator = define(of_backend, forward, self.fake, self.repeats, setting, self.public)
        if backward is None:
            if self.backward is None:
                raise ValueError(f"{self._name} has no backward")
            return differentiate(operator, self.backward, self._save())
        schema = f"{self._name}_{backend}_backward{self._backward_schema()}"
        backward_operator = define(schema, backward, self.empty_gradients, self.repeats, setting)
        not_differentiable_twice(backward_operator)
        places = [[list(self._arguments).index(name) for name in names.split()] for names in self._gradient_arguments]
        further = [list(self._results).index(name) for name in self._further]
        gradients = _gradients(_direct_backward(backward_operator), places, len(self._arguments), further)
        return differentiate(operator, gradients, self._save())

    def empty_gradients(self, grad_output: torch.Tensor | None, *arguments: Any) -> Any:
        """Return uninitialised gradients, given the arguments of backward; one alone is no tuple."""
        arguments = arguments[len(self._further) :]
        tensors = {"grad_output": grad_output, **dict(zip(self.saves, arguments))}
        likes: list[Any] = [tensors[like] for like in self._gradient_arguments.values()]
        gradients = empty_gradients(likes, arguments[len(self.saves) :] or [True])
        return gradients[0] if len(gradients) == 1 else gradients

    @cached_property
    def _name(self) -> str:
        return self.schema.partition("(")[0]

    @cached_property
    def _arguments(self) -> dict[str, str]:
        return _types(self.schema.partition("(")[2].partition(" -> ")[0])

    @cached_property
    def _results(self) -> dict[str, str]:
        return _types(self.schema.partition(" -> ")[2])

    @cached_property
    def _gradient_arguments(self) -> Mapping[str, str]:
        """Return the arguments that have a gradient, each with the saved tensor of its shape."""
        tensors = {name: name for name, kind in self._arguments.items() if kind == "Tensor"}
        return tensors if self.gradients is None else self.gradients

    @cached_property
    def _first(self) -> str:
        return next(iter(self._results))

    @cached_property
    def _further(self) -> tuple[str, ...]:
        """Return the differentiable results after the first."""
        return tuple(name for name in self.cotangents if name != self._first)

    def _backward_schema(self) -> str:
        kinds = self._arguments | self._results
        saved = [f"{kinds[name]}{'?' if name in self.saves_if else ''} {name}" for name in self.saves]
        needs = [f"bool needs_{names.replace(' ', '_')}" for names in self._gradient_arguments]
        first = "Tensor? grad_output" if self._first in self.cotangents else "Tensor grad_output"
        parameters = [first, *(f"Tensor? grad_{name}" for name in self._further), *saved]
        if len(needs) == 1:
            return f"({', '.join(parameters)}) -> Tensor"
        return f"({', '.join([*parameters, *needs])}) -> ({', '.join(['Tensor'] * len(needs))})"

    def _save(self) -> Callable[..., None]:
        kinds = self._arguments | self._results
        tensors = [name for name in self.saves if kinds[name].startswith("Tensor")]
        constants = [name for name in self.saves if name not in tensors]
        if (order := (*tensors, *constants)) != self.saves:
            raise ValueError(f"{self._name} must save {', '.join(order)} in this order: tensors first")
        place = list(kinds).index
        keeps = [(place(name), self.saves_if.get(name)) for name in tensors]
        places_of_constants, cotangents = [place(name) for name in constants], self.cotangents
        several, zeros = len(self._results) > 1, self._first not in cotangents
        constant = [i for i, name in enumerate(self._results) if i and name not in self.cotangents]

        def save(ctx: Any, inputs: tuple, output: Any) -> None:
            values = (*inputs, *output) if several else (*inputs, output)
            if keeps:
                ctx.save_for_backward(*[values[i] if keep is None or keep(*inputs) else None for i, keep in keeps])
            if places_of_constants:
                ctx.constants = [values[i] for i in places_of_constants]
            if constant:
                ctx.mark_non_differentiable(*[output[i] for i in constant])
            if cotangents:  # the first result may be one that is not used
                ctx.first = (output[0].shape, output[0].dtype, output[0].device) if zeros else None

        return save


def _types(declared: str) -> dict[str, str]:
    """Return the types by name from ``"(Tensor(a!) x, float eps)"``, without marks of what is changed."""
    pairs = (part.split() for part in declared.strip("()").split(",") if part.strip())
    return {name: kind.partition("(")[0] for kind, name in pairs}


def _gradients(
    take: Callable[..., Any], places: list[list[int]], arguments: int, others: list[int]
) -> Callable[..., tuple]:
    """Return autograd's function: it returns a gradient for each argument, None except at `places`.

    Each of `places` holds the indices of the arguments that share a gradient, and `others` those of the further results
    whose cotangents it takes.
    """

    def backward(ctx: Any, *cotangents: Any) -> tuple[torch.Tensor | None, ...]:
        gradients: list[torch.Tensor | None] = [None] * arguments
        grad_output, further = cotangents[0], [cotangents[place] for place in others]
        if grad_output is None and ctx.first is not None:
            shape, dtype, device = ctx.first
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        needs_input_grad, single = ctx.needs_input_grad, len(places) == 1
        needed = () if single else [any(needs_input_grad[place] for place in shared) for shared in places]
        results = take(grad_output, *further, *ctx.saved_tensors, *getattr(ctx, "constants", ()), *needed)
        for shared, gradient in zip(places, (results,) if single else results):
            for place in shared:
                if needs_input_grad[place]:
                    gradients[place] = gradient
        return tuple(gradients)

    return backward


def empty_gradients(likes: Iterable[torch.Tensor], needs: Iterable[bool]) -> tuple[torch.Tensor, ...]:
    """Return contiguous and uninitialised gradients of tensors, of size 0 where not needed."""
    return tuple(
        torch.empty(like.shape if needed else (0,), dtype=like.dtype, device=like.device)
        for like, needed in zip(likes, needs)
    )


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    repeats: bool = False,
    setting: Callable[[], Hashable] = lambda: None,
    public: int | slice | None = None,
) -> Callable[..., Any]:
    """Register an operator for CPU and CUDA tensors.

    Args:
        schema: in the form that torch.library takes, ``"name(Tensor x, float eps) -> Tensor"``. The operator changes
            only arguments marked as ``Tensor(a!)``, and returns no view of one.
        implementation: runs the kernel.
        fake: returns uninitialised results of the right shape, dtype and device.
        repeats: whether known calls of it may be repeated: see `Operator`.
        setting: see `Operator.register`.
        public: the index of the results that `bypass_dispatcher` returns: see `Operator`.

    Returns:
        The operator, to be called in place of `implementation`.
    """
    name, _, arguments = schema.split(" -> ")[0].partition("(")
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    kinds = [_PYTHON_TYPES[kind] for kind in _types(arguments).values()]
    tensors = tuple(place for place, kind in enumerate(kinds) if kind[0] is torch.Tensor)
    if repeats:
        usable = tuning.nothing_forced
        implementation = known_calls.Repeater(implementation, tensors, usable, setting=setting, public=public)
    _launches[operator] = _Launch(implementation, frozenset(itertools.product(*kinds)), tensors, public)
    return operator


def implementation(operator: Any) -> Callable[..., Any] | None:
    """Return the implementation of an operator that `define` registered, or None for another operator."""
    launch = _launches.get(operator)
    return None if launch is None else launch.implementation


def differentiate(operator: Any, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """Register the gradient of an operator.

    Args:
        operator: the operator that `define` returned.
        backward: maps ``(ctx, *grad_outputs)`` to a gradient for each argument. Differentiating it again raises. Of
            several results, an unused one has None as its grad_output, but never all of them.
        save: ``(ctx, inputs, output)`` keeps what backward needs.

    Returns:
        The function to call in place of the operator: see `bypass_dispatcher`.
    """

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):
            ctx.set_materialize_grads(False)  # zeros for each result that is not used would take a launch
        save(ctx, inputs, output)

    def gradients(ctx: Any, *cotangents: Any) -> tuple:
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, *cotangents)

    torch.library.register_autograd(operator, gradients, setup_context=keep, lib=_library)
    implementation = _launches[operator].implementation

    def forward(ctx: Any, *given: Any) -> Any:
        *arguments, make, values = given
        output = implementation(*arguments) if make is None else make(values)
        keep(ctx, arguments, output)
        return output

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *cotangents: (*gradients(ctx, *cotangents), None, None)),
    }
    differentiated: Any = type(operator.name().partition("::")[2], (torch.autograd.Function,), methods)
    return bypass_dispatcher(operator, differentiated)


def bypass_dispatcher(operator: Any, differentiated: Any = None) -> Callable[..., Any]:
    """Return the function to call in place of an operator. It returns the public results.

    A call that only autograd observes bypasses torch's dispatcher, which would take about half of a small call's time.
    The function's `known` takes the arguments, makes a call of a known kind, whose arguments need no more checks, and
    returns None for any other call.

    Args:
        operator: the operator that `define` returned.
        differentiated: the `torch.autograd.Function` of the call. It takes the arguments, the function that makes the
            call and what this takes, or None for both. Without it, the dispatcher makes a call that autograd records.
    """
    launch = _launches[operator]
    implementation, _, tensors, public = launch
    direct = differentiated and torch_internals.direct_apply(differentiated)

    def call(*arguments: Any) -> Any:
        return public_results(all_results(arguments), public)

    def all_results(arguments: tuple) -> Any:
        if launch.needs_dispatcher(arguments):
            return operator(*arguments)
        for place in tensors:
            tensor = arguments[place]
            if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
                return differentiated.apply(*arguments, None, None) if differentiated else operator(*arguments)
        return implementation(*arguments)

    def known(arguments: tuple) -> Any:
        if (found := launch.find(arguments)) is None:
            return None
        actions, for_public, values, requires_grad = found
        if requires_grad and torch.is_grad_enabled():
            return direct and public_results(direct(*arguments, actions.repeat, values), public)
        return for_public.repeat(values)

    call.known = known if isinstance(implementation, known_calls.Repeater) else None  # type: ignore[attr-defined]
    return call


def is_observed(operator: Any, arguments: tuple) -> bool:
    """Return whether torch.compile, a transform, a mode or an argument's type needs torch's dispatcher for a call.

    Args:
        operator: the operator that `define` returned.
        arguments: of the call, in order.
    """
    return _launches[operator].is_observed(arguments)


def needs_dispatcher(operator: Any, arguments: tuple) -> bool:
    """Return whether a call is observed, or a view needs the dispatcher: see `is_observed`."""
    return _launches[operator].needs_dispatcher(arguments)


def _direct_backward(operator: Any) -> Callable[..., Any]:
    """Return autograd's replacement for a backward operator: it launches the kernel directly if nothing observes it.

    Autograd itself observes it if the gradients are to be differentiated.
    """
    launch = _launches[operator]
    implementation = launch.implementation
    repeats = isinstance(implementation, known_calls.Repeater)

    def call(grad_output: torch.Tensor | None, *saved: Any) -> Any:
        arguments = (grad_output, *saved)
        if torch.is_grad_enabled() or (grad_output is not None and torch_internals.is_without_memory(grad_output)):
            return operator(*arguments)
        if repeats and (found := launch.find(arguments)) is not None:
            actions, _, values, _ = found
            return actions.repeat(values)
        return operator(*arguments) if launch.needs_dispatcher(arguments) else implementation(*arguments)

    return call


def not_differentiable_twice(operator: Any) -> None:
    """Make a backward operator raise when its result is differentiated.

    That backward pass raises:
        NotImplementedError: naming the operator.
    """

    def backward(ctx: Any, *grad_outputs: Any) -> None:
        raise NotImplementedError(f"{operator} has no derivative: gradients of gradients are not implemented")

    torch.library.register_autograd(operator, backward, lib=_library)
