"""Reproducible modules of torch: two processes make them of the same arguments, random numbers and weights.

`module` makes a function of an operation's arguments from a module whose weights are some of them.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.func import functional_call

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def make_module(kind: type[torch.nn.Module], init: Any, seed: int) -> torch.nn.Module:
    """Return a module without gradients, in training mode unless it chooses another.

    KernelBench compares freshly made models: their batch normalization uses the mean of the batch.

    Args:
        kind: its class.
        init: the arguments of the class, in order or by name.
        seed: of torch's random numbers while it is made.
    """
    torch.manual_seed(seed)
    model = kind(**init) if isinstance(init, Mapping) else kind(*init)
    return model.requires_grad_(False)


def freeze_running_statistics(model: torch.nn.Module) -> torch.nn.Module:
    """Keep calls from changing the running statistics of batch normalizations; return the module."""
    for layer in model.modules():
        if layer.training and getattr(layer, "track_running_stats", False):
            layer.track_running_stats = False
    return model


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return the module, with the given weights if its own have the same names."""
    if model.state_dict().keys() == weights.keys():
        model.load_state_dict(weights)
    return model


def keep(reference: torch.nn.Module, init: Any, seed: int, file: Path) -> None:
    """Write a file from which `like` makes a module like the reference.

    Raises:
        TypeError: the arguments of the class hold an object that cannot be sent to another process.
    """
    try:
        torch.save({"init": init, "seed": seed, "weights": reference.state_dict()}, file)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TypeError(f"get_init_inputs: what it gives cannot be sent to another process: {error}") from error


def like(kind: type[torch.nn.Module], file: Path) -> torch.nn.Module:
    """Return a module of this class like the one given to `keep`."""
    state = torch.load(file, weights_only=True)
    return load_weights(make_module(kind, state["init"], state["seed"]), state["weights"])


# ---- modules whose weights are arguments of an operation


class _LastModule(threading.local):
    """The module of the last call, for each thread: a call has its weights in the module until it returns."""

    model: torch.nn.Module
    like: Any = None


def module(make: Callable[..., torch.nn.Module], *, weights: Mapping[str, str] = NO_NAMES) -> Callable[..., Any]:
    """Return a function that takes an operation's arguments and calls a module, with some of them as its weights.

    Args:
        make: makes the module. Its arguments are named after arguments of the operation, and get those of the call:
            ``lambda weight, eps: MyNorm(len(weight), eps)``. Each thread keeps its module as long as calls have
            tensors of the same shapes there, and the same other values.
        weights: the names of the module's parameters or buffers, by those of the operation's arguments. An argument
            that is not named here is the weight of its own name, ``weight``, or the only one such as ``norm.weight``.
            All other arguments are those of the module's ``forward``.

    Raises:
        TypeError: `make` is no function, or an argument of a call is neither a weight nor one of ``forward``.
    """
    if not callable(make):
        raise TypeError(f"module takes a function that makes a module, not {type(make).__name__}")
    takes = inspect.signature(make).parameters
    last = _LastModule()

    def call(**arguments: Any) -> Any:
        values = {name: arguments[name] for name in takes if name in arguments}
        likeness = tuple((name, _likeness(value)) for name, value in values.items())
        if last.like != likeness:
            devices = [value.device for value in arguments.values() if isinstance(value, torch.Tensor)]
            last.model, last.like = make(**values).to(*devices[:1]), likeness
        return call_with_weights(last.model, arguments, weights, tuple(takes))

    return accept_any_arguments(call, make)


def function_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module, with the arguments named after its weights in place of these."""
    lock = threading.RLock()

    def call(**arguments: Any) -> Any:
        with lock:
            return call_with_weights(model, arguments)

    return accept_any_arguments(call, model)


def accept_any_arguments(call: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """Give a function the name of its target, and a signature that takes any arguments by name."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(call, attribute, getattr(target, attribute, getattr(type(target), attribute, None)))
    call.__wrapped__ = target  # type: ignore[attr-defined]
    arguments = inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)
    call.__signature__ = inspect.Signature([arguments])  # type: ignore[attr-defined]
    return call


def weight_of(model: torch.nn.Module, argument: str, weights: Mapping[str, str] = NO_NAMES) -> str | None:
    """Return the name of the parameter or buffer that an argument of an operation replaces; None if there is none."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    weight = weights.get(argument, argument)
    matches = [name for name in names if name.rpartition(".")[2] == weight]
    return weight if weight in names else matches[0] if len(matches) == 1 else None


def call_with_weights(
    model: torch.nn.Module,
    arguments: Mapping[str, Any],
    weights: Mapping[str, str] = NO_NAMES,
    parameters: Sequence[str] = (),
) -> Any:
    """Call a module with some arguments in place of its weights.

    Args:
        model: the module.
        arguments: the arguments of the call, by name.
        weights: as in `module`.
        parameters: the arguments that the module was made of. ``forward`` gets the tensors among them, and the
            parameters that it names.

    Raises:
        TypeError: ``forward`` does not take the other arguments.
    """
    weight_names = {name: weight_of(model, name, weights) for name in arguments}
    replaced = {weight: arguments[name] for name, weight in weight_names.items() if weight is not None}
    signature = inspect.signature(model.forward)
    inputs = {
        name: value
        for name, value in arguments.items()
        if weight_names[name] is None
        and (name not in parameters or name in signature.parameters or isinstance(value, torch.Tensor))
    }
    try:
        signature.bind(**inputs)
    except TypeError:
        try:
            signature.bind(*inputs.values())
        except TypeError as error:
            weight_list = ", ".join([*dict(model.named_parameters()), *dict(model.named_buffers())]) or "none"
            problem = f"{type(model).__name__}.forward{signature} cannot be called with {', '.join(inputs)}"
            raise TypeError(f"{problem}: {error}; its weights: {weight_list}") from None
        return functional_call(model, replaced, tuple(inputs.values()))
    return functional_call(model, replaced, (), inputs)


def _likeness(value: Any) -> Any:
    """Return the properties of an argument that a module may depend on: the shape, dtype and device of a tensor."""
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else repr(value)
