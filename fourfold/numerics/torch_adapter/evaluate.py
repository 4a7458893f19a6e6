"""A plain torch function, evaluated with a running error bound, forward and backward.

The function is called with tensors that carry `Bounded` arrays. torch dispatches each of its operators to a rule, which
propagates the error through it: mostly the rule of a NumPy function, in `fourfold.numerics.steps`. An operator without
a rule is replaced by torch's own decomposition. Autograd works above the operators, so that the same rules bound the
gradients.

The tensors report the tested dtype, so that ``x.float()`` or ``torch.finfo(x.dtype)`` do what they do in production. A
cast between floating types changes no value: values are wide throughout.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fourfold.numerics.bounded import DOCUMENTED, Arithmetic, Bounded, lift, unspecified_where
from fourfold.numerics.dtypes import DTYPES, QUANTISED, DType, is_chosen, name_of

# These register the rules.
from fourfold.numerics.torch_adapter import along_axes, complex_numbers, networks, resampling  # noqa: F401
from fourfold.numerics.torch_adapter.integers import chosen_result
from fourfold.numerics.torch_adapter.tensors import Evaluation, NoTorchRule, rule

NO_DTYPES: Mapping[str, torch.dtype] = {}
__all__ = ["NoTorchRule", "backward_of", "forward_of", "rule"]


def _same_numbers(first: Arithmetic, second: Arithmetic) -> bool:
    """Return whether two arithmetics represent the same numbers."""
    common = {"contract": DOCUMENTED, "rounds_each_step": False}
    return replace(first, **common) == replace(second, **common)  # type: ignore[arg-type]


def dtype_of(bounded: Bounded) -> DType:
    """Return the tested dtype of an array: the one whose kernels, or whose results, have the array's arithmetic."""
    arithmetic = bounded.arithmetic
    for dtype in DTYPES.values():
        arithmetics = (dtype.arithmetic, dtype.arithmetic.storage)
        if any(a and _same_numbers(a, arithmetic) for a in arithmetics):
            return replace(dtype, arithmetic=arithmetic)
    raise ValueError(f"no dtype has the arithmetic {arithmetic}")


def evaluation_of(arguments: Sequence[Any]) -> Evaluation:
    """Return an evaluation in the arithmetic of the arguments, or in float32 if none has one."""
    bounded = (argument for argument in arguments if isinstance(argument, Bounded))
    first = next(bounded, None)
    return Evaluation(DTYPES["float32"] if first is None else dtype_of(first))


def tensor_of(argument: Any, evaluation: Evaluation, dtype: torch.dtype | None = None) -> Any:
    """Return an input as a tensor of a dtype, by default the tested one, and a parameter with its rounding."""
    if isinstance(argument, Bounded):
        return evaluation.wrap(argument, dtype or evaluation.dtype.torch)
    if isinstance(argument, np.ndarray):
        return torch.from_numpy(np.array(argument))
    return evaluation.numbers.parameter(argument)


@contextlib.contextmanager
def use_simple_operators() -> Iterator[None]:
    """Make torch compute attention and recurrent layers by simple operators instead of fused ones."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    onednn, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.mkldnn.enabled = onednn


def result_of(definition: Callable[..., Any], tensors: dict[str, Any], evaluation: Evaluation) -> Any:
    """Return the result of a definition."""
    with use_simple_operators():
        try:
            return definition(**tensors)
        except TypeError:
            if evaluation.missing is None:
                raise
            raise evaluation.missing from None


def output_of(definition: Callable[..., torch.Tensor], tensors: dict[str, Any], evaluation: Evaluation) -> torch.Tensor:
    """Return the output of a definition, which must be one tensor."""
    output = result_of(definition, tensors, evaluation)
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"the definition must return a tensor, and returned {type(output).__name__}")
    if output.is_complex():
        advice = f"{name_of(output.dtype)}: take torch.view_as_real of it"
        raise TypeError(f"the definition must return real numbers, and returned {advice}")
    return output


def bounded_of(tensor: torch.Tensor, evaluation: Evaluation) -> Bounded:
    """Return the values of a tensor with their errors."""
    return lift(evaluation.unwrap(tensor), evaluation.dtype.arithmetic)


def gradient_of(tensor: torch.Tensor, evaluation: Evaluation) -> Bounded:
    """Return a gradient with its error.

    Where autograd computes NaN, for example from 0 times infinity, another formula may give a number.
    """
    grad = bounded_of(tensor, evaluation)
    unknown = np.isnan(grad.value) & evaluation.contract.nonfinite
    return Bounded(grad.value, np.where(unknown, np.inf, grad.error), grad.arithmetic)


def forward_of(
    definition: Callable[..., torch.Tensor], returns: str | None = None, dtypes: Mapping[str, torch.dtype] = NO_DTYPES
) -> Callable[..., Bounded]:
    """Return an `Operation.forward` that evaluates a definition in torch with a running error bound.

    Args:
        definition: takes the tensors and parameters of the operation by name, and returns one tensor.
        returns: the dtype of the result, if it is not the definition's. A result of float8 is rounded to it.
        dtypes: the dtypes of inputs that do not have the tested one, by name.

    Returns:
        A function of the same arguments: floating inputs as `Bounded`, integers as NumPy arrays, parameters as they
        are. It gives the output. Integers, booleans and quantised numbers are a `OneOf`.

    Raises:
        NoTorchRule: when called, if the definition runs an operator that has no rule.
        ValueError: when called, if a choice of the definition other than torch.where depends on rounding.
    """

    @functools.wraps(definition)
    def forward(**arguments: Any) -> Bounded:
        evaluation = evaluation_of(list(arguments.values()))
        with np.errstate(all="ignore"), torch.no_grad(), evaluation:
            tensors = {name: tensor_of(value, evaluation, dtypes.get(name)) for name, value in arguments.items()}
            output = output_of(definition, tensors, evaluation)
            if returns in QUANTISED and name_of(output.dtype) != returns:
                output = output.to(QUANTISED[returns].torch)
            if is_chosen(name_of(output.dtype)):
                return chosen_result(output, evaluation)
            return bounded_of(output, evaluation)

    return forward


def backward_of(
    definition: Callable[..., Any],
    differentiable: Sequence[str],
    places: Sequence[int] = (),
    dtypes: Mapping[str, torch.dtype] = NO_DTYPES,
) -> Callable[..., tuple[Bounded, ...]]:
    """Return an `Operation.backward` that differentiates a definition by autograd, with a running error bound.

    Args:
        definition: as in `forward_of`.
        differentiable: the names of the inputs that have a gradient.
        places: for a definition that returns several outputs, the position of the output with the cotangent, followed
            by those of the other outputs that have gradients. Their cotangents are zeros.
        dtypes: as in `forward_of`.

    Returns:
        A function of the cotangent, a `Bounded` of the output's shape, and of the arguments of `forward_of` by name. It
        returns the gradients in the order of `differentiable`: zeros for inputs that the output does not depend on.

    Raises:
        NoTorchRule: when called, if the definition or its derivative runs an operator that has no rule.
    """

    @functools.wraps(definition)
    def backward(grad_output: Bounded, **arguments: Any) -> tuple[Bounded, ...]:
        evaluation = evaluation_of([grad_output])
        with np.errstate(all="ignore"), torch.enable_grad(), evaluation:
            tensors = {name: tensor_of(argument, evaluation, dtypes.get(name)) for name, argument in arguments.items()}
            inputs = [tensors[name].requires_grad_() for name in differentiable]
            outputs = [output_of(definition, tensors, evaluation)] if not places else []
            if places:
                results = result_of(definition, tensors, evaluation)
                outputs = [results[place] for place in places]
            gradients: Sequence[Any] = [None] * len(inputs)
            # Zeros for the others: a kernel may multiply them by an infinity, and autograd shows where.
            zeros = (Bounded.exact(np.zeros(output.shape), evaluation.dtype.arithmetic) for output in outputs[1:])
            pairs = [
                (output, evaluation.wrap(cotangent, output.dtype))
                for output, cotangent in zip(outputs, (grad_output, *zeros))
                if output.requires_grad
            ]
            if pairs:
                evaluation.backward = True
                gradients = torch.autograd.grad(
                    [output for output, _ in pairs], inputs, [cotangent for _, cotangent in pairs], allow_unused=True
                )
            # A loss whose gradients are kept multiplies them by its cotangent, zeros by an infinity too.
            free = grad_output.value.size == 1 and not np.isfinite(grad_output.value).all()
            free = free and evaluation.contract.nonfinite
            return tuple(
                Bounded.exact(np.zeros_like(arguments[name].value), evaluation.dtype.arithmetic)
                if grad is None
                else unspecified_where(gradient_of(grad, evaluation), np.array(free))
                for name, grad in zip(differentiable, gradients)
            )

    return backward
