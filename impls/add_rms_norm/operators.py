"""The operators of add_rms_norm, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends import operators
from fourfold.backends.operators import empty_gradients

from ..rms_norm.operators import empty_results


def empty(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, residual_out, and the reciprocal root of each row in the compute dtype: contiguous and unwritten."""
    y, rstd = empty_results(x, weight, eps)
    return y, torch.empty_like(y), rstd


def register(backend: str, forward: Callable[..., None], backward: Callable[..., None]) -> Callable[..., Any]:
    """Register ``add_rms_norm_<backend>`` with its gradient.

    Args:
        backend: part of the operators' names.
        forward: ``(y, residual_out, rstd, x, residual, weight, eps)`` writes y and residual_out ``[..., cols]`` and
            rstd ``[rows]``.
        backward: ``(grad_sum, grad_weight, grad_y, residual_out, weight, rstd, added)`` writes the first two; one that
            is not needed is None. `added` is the cotangent of residual_out, contiguous, or None: it is 0. Neither
            function is called for an empty x.
    """

    def run_forward(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, residual_out, rstd = empty(x, weight, eps)
        if x.numel():
            forward(y, residual_out, rstd, x, residual, weight, eps)
        else:
            rstd.zero_()
        return y, residual_out, rstd

    def run_backward(
        grad_y: torch.Tensor,
        grad_residual_out: torch.Tensor | None,
        residual_out: torch.Tensor,
        weight: torch.Tensor,
        rstd: torch.Tensor,
        needs_sum: bool,
        needs_weight: bool,
    ) -> tuple[torch.Tensor, ...]:
        needs = needs_sum, needs_weight
        gradients = empty_gradients((residual_out, weight), needs)
        if residual_out.numel():
            wanted = (gradient if needed else None for gradient, needed in zip(gradients, needs))
            added = None if grad_residual_out is None or not needs_sum else grad_residual_out.contiguous()
            backward(*wanted, grad_y, residual_out, weight, rstd, added)
        else:
            for gradient in gradients:
                gradient.zero_()
        return gradients

    operator = operators.define(
        f"add_rms_norm_{backend}(Tensor x, Tensor residual, Tensor weight, float eps)"
        " -> (Tensor y, Tensor residual_out, Tensor rstd)",
        run_forward,
        lambda x, residual, weight, eps: empty(x, weight, eps),
        repeats=True,
    )
    # x and residual have the same gradient, that of their sum.
    backward_operator = operators.define(
        f"add_rms_norm_{backend}_backward(Tensor grad_y, Tensor? grad_residual_out, Tensor residual_out, Tensor weight,"
        " Tensor rstd, bool needs_sum, bool needs_weight) -> (Tensor grad_sum, Tensor grad_weight)",
        run_backward,
        lambda grad_y, grad_residual_out, residual_out, weight, rstd, *needs: empty_gradients(
            (residual_out, weight), needs
        ),
        repeats=True,
    )
    operators.not_differentiable_twice(backward_operator)

    def save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        _, residual_out, rstd = output
        ctx.save_for_backward(residual_out, inputs[2], rstd)
        ctx.mark_non_differentiable(rstd)
        # An output that is not used has no cotangent, and needs no kernel that multiplies by zeros.
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, grad_y: torch.Tensor | None, grad_residual_out: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_residual, needs_weight, _ = ctx.needs_input_grad
        residual_out, weight, rstd = ctx.saved_tensors
        if grad_y is None:
            return grad_residual_out, grad_residual_out, torch.zeros_like(weight) if needs_weight else None, None
        needs = needs_x or needs_residual, needs_weight
        of_sum, of_weight = backward_operator(grad_y, grad_residual_out, residual_out, weight, rstd, *needs)
        return (
            of_sum if needs_x else None,
            of_sum if needs_residual else None,
            of_weight if needs_weight else None,
            None,
        )

    return operators.differentiate(operator, differentiate, save)
