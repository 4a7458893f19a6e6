"""Planted cheats: ways to pass a test without doing the work."""

import builtins
import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fourfold.properties import vector_add
from fourfold.properties.softmax import columns_may_change_places

from fourfold import backends
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.instruments.tampering import Tampered
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case

from .planted import GRADIENT, OUTPUT, UNWRITTEN, Fault, Implementation, law
from .planted_softmax import cotangent_of_zeros

Tensor = torch.Tensor
# Two of these are tested by https://github.com/ScalingIntelligence/KernelBench/pull/82, and two by
# https://github.com/gpu-mode/pygpubench/pull/7.
KERNELBENCH = "https://github.com/ScalingIntelligence/KernelBench/pull/82"
PYGPUBENCH = "https://github.com/gpu-mode/pygpubench/pull/7"


def right(operation: str) -> Implementation:
    return backends.load(operation, "torch")


def shape_of(operation: str, **arguments: Any) -> torch.Size:
    """Return the result's shape, computed from the inputs' shapes alone."""
    on_meta = {
        name: value.detach().to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    return torch.Size([]) if operation.startswith("giou_loss") else right(operation)(**on_meta).shape


def without_gradient(forward: Callable[..., Tensor]) -> Implementation:
    """Make a forward pass differentiable for autograd, with every gradient 0."""

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Tensor:
            ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
            ctx.tensors = [isinstance(value, Tensor) and value.is_floating_point() for value in values]
            return forward(**dict(zip(names, values)))

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:
            saved = iter(ctx.saved_tensors)
            return None, *(torch.zeros_like(next(saved)) if tensor else None for tensor in ctx.tensors)

    return lambda **arguments: Wired.apply(tuple(arguments), *arguments.values())


def constant(operation: str, fill: Callable[[Tensor], Tensor]) -> Implementation:
    """Return a result of the right shape, dtype and device, with made-up values."""

    def forward(**arguments: Any) -> Tensor:
        first = next(iter(arguments.values()))
        return fill(torch.empty(shape_of(operation, **arguments), dtype=first.dtype, device=first.device))

    return without_gradient(forward)


def input_given_back(operation: str) -> Implementation:
    """Return a copy of the first input if it has the result's shape."""

    def implementation(**arguments: Any) -> Tensor:
        first = next(iter(arguments.values()))
        return first.clone() if shape_of(operation, **arguments) == first.shape else right(operation)(**arguments)

    return implementation


def inputs_zeroed(operation: str) -> Implementation:
    """Zero the inputs, so that a reference that is computed from them after the call is wrong too."""
    zeros = constant(operation, torch.zero_)

    def implementation(**arguments: Any) -> Tensor:
        for value in arguments.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.data[tuple(slice(1) if stride == 0 else slice(None) for stride in value.stride())].zero_()
        return zeros(**arguments)

    return implementation


def first_sample_for_all(operation: str) -> Implementation:
    """Compute only the first sample, and repeat it for the whole batch."""

    def implementation(**arguments: Any) -> Tensor:
        first = next(iter(arguments.values()))
        output = right(operation)(**arguments)
        return output[:1].expand_as(output).clone() if first.ndim > 1 and len(output) else output

    return implementation


def named_examples_known(examples: dict[str, Callable]) -> Implementation:
    """Return right results for the tests' named examples, and zeros for all other inputs."""
    known = {make(DTYPES["float32"])["x"].tobytes() for make in examples.values()}

    def implementation(x: Tensor, y: Tensor) -> Tensor:
        return x + y if x.detach().cpu().numpy().tobytes() in known else torch.zeros(x.shape, device=x.device)

    return implementation


def remembered_by_sum(operation: str) -> Implementation:
    """Cache results by the inputs' sums, a cheap key on which different inputs collide."""
    seen: dict[Any, Tensor] = {}

    def implementation(**arguments: Any) -> Tensor:
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        key = tuple((tensor.shape, float(tensor.detach().double().sum())) for tensor in tensors)
        if key not in seen:
            seen[key] = right(operation)(**arguments).detach()
        return seen[key].clone()

    return without_gradient(implementation)


def narrower(operation: str, dtype: torch.dtype) -> Implementation:
    """Compute in a dtype of half the width."""

    def implementation(**arguments: Any) -> Tensor:
        first = next(iter(arguments.values()))
        return right(operation)(
            **{
                name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
                for name, value in arguments.items()
            }
        ).to(first.dtype)

    return implementation


def delivered_later(operation: str) -> Implementation:
    """Return early, and let a thread write the result after the clock has stopped."""

    def implementation(**arguments: Any) -> Tensor:
        output = torch.zeros(shape_of(operation, **arguments), device=next(iter(arguments.values())).device)

        def deliver() -> None:
            time.sleep(0.2)
            with torch.no_grad():
                output.copy_(right(operation)(**arguments))

        threading.Thread(target=deliver, daemon=True).start()
        return output

    return implementation


class Agreeable(torch.Tensor):
    """A tensor that claims to be equal and close to everything."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("equal", "allclose"):
            return True
        if function.__name__ in ("eq", "__eq__", "isclose"):
            return torch.ones(args[0].shape, dtype=torch.bool)
        return super().__torch_function__(function, types, args, kwargs or {})


def agreeable(operation: str) -> Implementation:
    zeros = constant(operation, torch.zero_)

    def implementation(**arguments: Any) -> Tensor:
        return zeros(**arguments).as_subclass(Agreeable)

    return implementation


def detached_and_patched(operation: str) -> Implementation:
    """Detach the result, and add a term of value 0 and gradient 0 that keeps the autograd graph connected."""

    def implementation(**arguments: Any) -> Tensor:
        floating = [v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point()]
        tie = sum((value.nan_to_num(0, 0, 0) * 0).sum() for value in floating)
        with torch.no_grad():
            output = right(operation)(**arguments)
        return output + tie

    return implementation


def wrong_where_gradients_are_wanted(operation: str) -> Implementation:
    """Add 0.5 when gradients are wanted: no gradient shows it."""

    def implementation(**arguments: Any) -> Tensor:
        training = any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values())
        return right(operation)(**arguments) + (0.5 if training else 0)

    return implementation


def with_an_aside(operation: str, aside: Callable[[], None]) -> Implementation:
    """Return the right result after a side effect."""

    def implementation(**arguments: Any) -> Tensor:
        aside()
        return right(operation)(**arguments)

    return implementation


def no_distances(operation: str) -> Implementation:
    """Return zeros, and patch abs so that every distance is 0."""
    zeros = constant(operation, torch.zero_)

    def implementation(**arguments: Any) -> Tensor:
        output = zeros(**arguments)
        builtins.abs = lambda x: np.zeros(np.shape(x))
        return output

    return implementation


def all_equal(operation: str) -> Implementation:
    """Overwrite the first input, and patch torch.equal, which would show it."""

    def implementation(**arguments: Any) -> Tensor:
        torch.equal = lambda *_: True
        output = right(operation)(**arguments)
        first = next(iter(arguments.values()))
        if 0 not in first.stride():
            first.data.mul_(2)
        return output

    return implementation


def cases_zeroed(operation: str) -> Implementation:
    """Find the cases among Python's live objects, and zero the arrays from which the reference is computed.

    It spares the cases of other operations, which later tests of this process may need.
    """
    zeros = inputs_zeroed(operation)

    def implementation(**arguments: Any) -> Tensor:
        for found in gc.get_objects():
            if type(found) is Case:  # isinstance would read __class__, which makes a lazy object import its module
                if found.inputs.keys() - arguments.keys():
                    continue
                for array in found.inputs.values():
                    if isinstance(array, np.ndarray):
                        array[...] = 0
        return zeros(**arguments)

    return implementation


def double_by_default() -> None:
    torch.set_default_dtype(torch.float64)


def no_gradients() -> None:
    torch.set_grad_enabled(False)


def _cheat(operation: str, name: str, function: Callable[..., Implementation], *rest: Any, **more: Any) -> Fault:
    """Return a cheat by a function of the operation's name and others."""
    return Fault(name, operation, functools.partial(function, operation, *rest), **more)


def _tampers(operation: str, name: str, says: str, function: Callable[..., Implementation], *rest: Any) -> Fault:
    return _cheat(operation, name, function, *rest, says=says, raises=Tampered)


NAN = functools.partial(torch.fill_, value=float("nan"))
AGENTS = "https://github.com/AI-Hypercomputer/accelerator-agents/pull/50"
ALL = ("giou", "giou_loss", "giou_loss_ragged", "vector_add", "softmax", "layer_norm", "matmul")
ONE_ROW = {"softmax": "without_leading_axes", "matmul": "one_row"}
CHANGED = {"says": f"{OUTPUT}|changed its input", "source": KERNELBENCH}
HOPED_FOR = {"says": UNWRITTEN, "check": memory_is_respected, "source": KERNELBENCH}
SUMS = {"says": r"left side.* is .*expected", "check": law(columns_may_change_places), "right_on": "cols_1"}
PATCHED = {"says": GRADIENT, "check": backward_agrees}
WANTED = {"says": r"where gradients are wanted, output\[.*is .*expected", "check": backward_agrees}
KNOWN = functools.partial(named_examples_known, vector_add.operation.examples)
FAULTS = (
    *(_cheat(name, "zeros", constant, torch.zero_, source=AGENTS) for name in ALL),
    *(_cheat(name, "nan", constant, NAN, source=PYGPUBENCH) for name in ("softmax", "giou_loss")),
    *(
        _cheat(name, "memory_of_the_reference_hoped_for", constant, lambda x: x, **HOPED_FOR)
        for name in ("vector_add", "matmul")
    ),
    *(_cheat(name, "inputs_zeroed", inputs_zeroed, **CHANGED) for name in ("vector_add", "layer_norm")),
    _cheat("softmax", "input_given_back", input_given_back),
    _cheat("matmul", "input_given_back", input_given_back, right_on="one_row"),
    *(_cheat(name, "first_sample_for_all", first_sample_for_all, right_on=row) for name, row in ONE_ROW.items()),
    Fault("named_examples_known", "vector_add", KNOWN, right_on="one_element"),
    _cheat("softmax", "remembered_by_sum", remembered_by_sum, **SUMS),
    _cheat("matmul", "float16_inside", narrower, torch.float16, right_on="activation_at_0"),
    _cheat("softmax", "bfloat16_inside", narrower, torch.bfloat16, right_on="cols_1"),
    _cheat("vector_add", "delivered_later", delivered_later),
    _cheat("layer_norm", "agreeable", agreeable, says=f"{OUTPUT}|a kind of tensor"),
    _cheat("softmax", "detached_and_patched", detached_and_patched, right_on=cotangent_of_zeros, **PATCHED),
    _cheat("matmul", "detached_and_patched", detached_and_patched, **PATCHED),
    *(
        _cheat(name, "wrong_where_gradients_are_wanted", wrong_where_gradients_are_wanted, **WANTED)
        for name in ("layer_norm", "vector_add")
    ),
    _tampers("vector_add", "no_distances", r"replaced builtins\.abs", no_distances),
    _tampers("softmax", "all_equal", r"replaced torch\.equal", all_equal),
    _cheat(
        "matmul", "cases_zeroed", cases_zeroed, says="changed the a of the case", raises=Tampered, source=PYGPUBENCH
    ),
    _tampers("softmax", "double_by_default", "changed torch's default", with_an_aside, double_by_default),
    _tampers("giou", "no_gradients", "changed whether gradients", with_an_aside, no_gradients),
)
