"""The check that the gradients agree with numerical differentiation of the implementation's own output."""

import torch
from torch.autograd.gradcheck import GradcheckError

from fourfold.checks.search import OUTPUT, Search, Subject
from fourfold.instruments.evaluation import by_the_implementation
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unsupported
from fourfold.operations.record import computed_in


def gradcheck(subject: Subject, search: Search) -> None:
    """Check that the implementation passes torch.autograd.gradcheck, in float64, away from ties."""
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

        try:
            # The whole Jacobian for the first case, then its product with random vectors, at the cost of two calls.
            with by_the_implementation():
                torch.autograd.gradcheck(weighted, points, fast_mode=search.ran > 0)
        except GradcheckError as error:
            raise Failure(f"{subject}: gradcheck: {error}", OUTPUT) from error
        search.saw(Agreement(0.0, weights.numel(), 0))

    search.for_all(f"gradcheck {subject}", subject.operation.smooth(subject.dtype), body)
    search.must_have_seen_something(subject, "gradcheck")
