"""The check that the gradients agree with numerical differentiation of the implementation's own output.

So do derivatives of the gradients, where the implementation gives any.
"""

import contextlib
from collections.abc import Callable

import torch
from torch.autograd.gradcheck import GradcheckError

from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.instruments.evaluation import blame_implementation
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unsupported
from fourfold.operations.record import computed_in

# The number of cases whose gradients are differentiated.
TWICE = 3
# How a message ends on an input that autograd takes for a constant.
NOT_RECORDED = (
    ", which is not in the graph that its backward pass records; torch.autograd.function.once_differentiable makes it"
    " refuse second derivatives"
)


def gradcheck(subject: Subject, search: Search) -> None:
    """Check that the implementation passes torch.autograd.gradcheck, in float64, away from ties.

    A gradient that autograd can differentiate passes it as well. The implementation may refuse that, as
    `once_differentiable` does, but a wrong second derivative is a failure. So is a graph from the cotangent to the
    gradient that lacks an input on which the gradient depends.
    """
    subject.needs_gradients()
    output_dtype = subject.dtype_of(OUTPUT)
    if output_dtype.roundoff > subject.dtype.roundoff:
        raise Unsupported(f"its output is {output_dtype}, too coarse for numerical differentiation")
    if computed_in(subject.operation, subject.dtype) is not subject.dtype:
        raise Unsupported("an input has another dtype, too coarse for numerical differentiation")

    def body(case: Case) -> None:
        names = subject.operation.differentiable_in(case)
        constants = {
            name: tensor for name, tensor in case.tensors(subject.dtype, subject.device).items() if name not in names
        }
        points = [case.tensor(name, subject.dtype, subject.device).requires_grad_() for name in names]
        weights = case.tensor("grad_output", subject.dtype, subject.device)

        def weighted_output(*tensors: torch.Tensor) -> torch.Tensor:
            output = subject.call(**dict(zip(names, tensors)), **constants, **case.parameters)
            return output * weights

        # The gradients are functions of the points and of the cotangent, as within a longer chain.
        variables, labels = [*points, weights.detach().clone().requires_grad_()], [*names, "the cotangent"]

        def gradients(point: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
            output = subject.call(**dict(zip(names, point)), **constants, **case.parameters)
            return torch.autograd.grad(output, point[:-1], point[-1], create_graph=True, allow_unused=True)

        def gradient(place: int, index: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
            return lambda point: gradients([*variables[:index], point, *variables[index + 1 :]])[place]

        def differentiable() -> list[tuple[int, int, bool]]:
            """Return the gradients that autograd differentiates, along what, and whether they depend on it there."""
            places: list[tuple[int, int, bool]] = []
            with contextlib.suppress(Exception):
                for place, gradient in enumerate(gradients(variables)):
                    if gradient is not None and gradient.requires_grad:
                        second = torch.autograd.grad(
                            gradient, variables, torch.ones_like(gradient), retain_graph=True, allow_unused=True
                        )
                        depends = [derivative is not None for derivative in second]
                        # The graph of `once_differentiable` ends in leaves of its own.
                        places += [(place, *dependence) for dependence in enumerate(depends) if any(depends)]
            return places

        # The whole Jacobian for the first case, then its product with random vectors, at the cost of two calls.
        _run_gradcheck(subject, weighted_output, points, "gradcheck", fast=search.ran > 0)
        for place, index, depends in differentiable() if search.ran < TWICE else ():
            title = f"gradcheck of the gradient of {names[place]} along {labels[index]}"
            title += "" if depends else NOT_RECORDED
            _run_gradcheck(subject, gradient(place, index), [variables[index]], title, fast=True)
        search.saw(Agreement(0.0, weights.numel(), 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)
    search.require_evidence(subject, "gradcheck")


def _run_gradcheck(
    subject: Subject, function: Callable[..., torch.Tensor | None], points: list[torch.Tensor], title: str, fast: bool
) -> None:
    try:
        with blame_implementation():
            torch.autograd.gradcheck(function, points, fast_mode=fast)
    except GradcheckError as error:
        raise Failure(f"{subject}: {title}: {error}", OUTPUT) from error
