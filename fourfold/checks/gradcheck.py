"""The check that the gradients agree with numerical differentiation of the implementation's own output.

So do derivatives of the gradients, where the implementation gives any.
"""

import contextlib
import itertools
from collections.abc import Callable

import torch
from torch.autograd.gradcheck import GradcheckError

from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.instruments.evaluation import by_the_implementation
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unsupported
from fourfold.operations.record import computed_in


def gradcheck(subject: Subject, search: Search) -> None:
    """Check that the implementation passes torch.autograd.gradcheck, in float64, away from ties.

    A gradient that autograd can differentiate passes it as well. The implementation may refuse that, as
    `once_differentiable` does, but a wrong second derivative is a failure.
    """
    subject.needs_gradients()
    kept = subject.dtype_of(OUTPUT)
    if kept.roundoff > subject.dtype.roundoff:
        raise Unsupported(f"its output is {kept}, too coarse for numerical differentiation")
    if computed_in(subject.operation, subject.dtype) is not subject.dtype:
        raise Unsupported("an input has another dtype, too coarse for numerical differentiation")

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        constants = {
            name: tensor for name, tensor in case.tensors(subject.dtype, subject.device).items() if name not in names
        }
        points = [case.tensor(name, subject.dtype, subject.device).requires_grad_() for name in names]
        weights = case.tensor("grad_output", subject.dtype, subject.device)

        def weighted(*tensors: torch.Tensor) -> torch.Tensor:
            output = subject.call(**dict(zip(names, tensors)), **constants, **case.parameters)
            return output * weights

        def gradient(of: int, along: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def gradient_at(point: torch.Tensor) -> torch.Tensor | None:
                others = [*points[:along], point, *points[along + 1 :]]
                output = subject.call(**dict(zip(names, others)), **constants, **case.parameters)
                return torch.autograd.grad(output, others[of], weights, create_graph=True, allow_unused=True)[0]

            return gradient_at

        # The whole Jacobian for the first case, then its product with random vectors, at the cost of two calls.
        _differentiated(subject, weighted, points, "gradcheck", fast=search.ran > 0)
        for of, along in itertools.product(range(len(names)), repeat=2):
            if _is_differentiable(gradient(of, along), points[along]):
                what = f"gradcheck of the gradient of {names[of]} along {names[along]}"
                _differentiated(subject, gradient(of, along), [points[along]], what, fast=True)
        search.saw(Agreement(0.0, weights.numel(), 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)
    search.must_have_seen_something(subject, "gradcheck")


def _differentiated(
    subject: Subject, function: Callable[..., torch.Tensor | None], points: list[torch.Tensor], what: str, fast: bool
) -> None:
    try:
        with by_the_implementation():
            torch.autograd.gradcheck(function, points, fast_mode=fast)
    except GradcheckError as error:
        raise Failure(f"{subject}: {what}: {error}", OUTPUT) from error


def _is_differentiable(gradient: Callable[[torch.Tensor], torch.Tensor | None], point: torch.Tensor) -> bool:
    """Return whether autograd gives a derivative of a gradient, instead of an error or nothing."""
    with contextlib.suppress(Exception):
        found = gradient(point)
        if found is not None and found.requires_grad:
            (derivative,) = torch.autograd.grad(found, point, torch.ones_like(found), allow_unused=True)
            return derivative is not None
    return False
