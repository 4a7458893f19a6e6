"""Call an implementation on a case, and distinguish its own exceptions from others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from fourfold.backends.launch import explain_launch
from fourfold.instruments.line_recorder import recorder
from fourfold.instruments.tampering import nothing_else_changes
from fourfold.numerics.dtypes import DType
from fourfold.operations.blame import blame_of, mark, recorded_blame
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.record import Operation
from fourfold.operations.refusals import escape_of, is_order


@contextlib.contextmanager
def blame_implementation() -> Iterator[None]:
    """Mark the exceptions raised inside with who is to blame, unless they are marked already.

    The lines of the implementation that run inside are recorded.

    Raises:
        Escape: the implementation raised an exception that makes a test runner or a check skip a case.
    """
    try:
        with recorder.record_call():
            yield
    except NotReached as error:
        if not error.is_of_this_package:
            raise escape_of(error) from None
        raise
    except Exception as error:
        if recorded_blame(error) is None:
            if is_order(error):
                raise escape_of(error) from None
            explained = explain_launch(error)
            mark(explained, blame_of(explained))
            if explained is not error:
                raise explained from None
        raise


def gradients_of(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], grad_output: torch.Tensor, retain_graph: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of an implementation's output, and mark exceptions of its backward pass."""
    # The gradient of an input that the output does not depend on is 0.
    if isinstance(output, torch.Tensor) and not output.requires_grad:
        return tuple(map(torch.zeros_like, inputs))
    with blame_implementation():
        return torch.autograd.grad(output, inputs, grad_output, retain_graph=retain_graph, materialize_grads=True)


def evaluate_tensors(
    implementation: Callable[..., torch.Tensor],
    operation: Operation,
    case: Case,
    dtype: DType,
    device: str,
    gradients: bool = True,
    place: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    watch: AbstractContextManager | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Call an implementation on a case; return its output, the gradients and the tensors it was called with.

    `place` may copy each of these tensors to another place in memory. `watch` is a context that is entered only
    around the call and its backward.
    """
    tensors = {name: place(name, tensor) for name, tensor in case.tensors(dtype, device).items()}
    differentiable = operation.differentiable_in(case) if gradients else ()
    for name in differentiable:
        tensors[name].requires_grad_()
    grad_output = place("grad_output", case.tensor("grad_output", dtype, device)) if differentiable else torch.empty(0)
    gradients_by_name: dict[str, torch.Tensor] = {}
    with nothing_else_changes(case), watch or contextlib.nullcontext():
        with blame_implementation():
            output = implementation(**tensors, **case.parameters)
        if differentiable and isinstance(output, torch.Tensor):
            grads = gradients_of(output, [tensors[name] for name in differentiable], grad_output)
            gradients_by_name = dict(zip(differentiable, grads, strict=True))
    return output, gradients_by_name, tensors
