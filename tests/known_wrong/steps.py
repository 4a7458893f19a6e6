"""The GIoU family in torch, correct, with explicit gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fourfold.impls.giou.arguments import check_giou, check_giou_loss, check_giou_loss_ragged
from fourfold.impls.giou.torch_eager import in_compute_dtype, pairwise_giou

Implementation = Callable[..., torch.Tensor]
ARGUMENTS = {
    "giou": (("boxes1", "boxes2"), check_giou),
    "giou_loss": (("pred", "target"), check_giou_loss),
    "giou_loss_ragged": (("pred", "target", "offsets"), check_giou_loss_ragged),
}


def wire(
    operation: str,
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., tuple],
) -> Implementation:
    """Make the public function of an operation of the GIoU family from a forward and a backward pass.

    Args:
        operation: the operation's name, which determines the arguments.
        forward: takes ``(*tensors, eps)``; returns the output.
        backward: takes ``(grad_output, *tensors, eps)``; returns the gradients of the first two, None if not needed.
    """
    names, check = ARGUMENTS[operation]

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, eps: float, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            ctx.eps = eps
            return forward(*tensors, eps)

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gradients = backward(grad_output, *ctx.saved_tensors, ctx.eps)
            return (None, *gradients, *([None] * (len(names) - 2)))

    def implementation(eps: float = 1e-5, **tensors: Any) -> torch.Tensor:
        ordered = [tensors[name] for name in names]
        check(*ordered, eps)
        return Wired.apply(eps, *ordered)

    return implementation


def differentiable(
    names: tuple[str, ...],
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., tuple],
    check: Callable[..., None],
    guarded: bool = True,
    **defaults: Any,
) -> Implementation:
    """Make the public function of any operation from a forward and a backward pass.

    Args:
        names: the names of the tensors, in the order in which the passes take them.
        forward: takes ``(*tensors, **parameters)``; returns the output.
        backward: takes ``(grad_output, output, *tensors, **parameters)``; returns the gradients of the tensors.
        check: takes ``(*tensors, **parameters)``; raises for bad input.
        guarded: whether to use save_for_backward, with which autograd detects changes to saved tensors.
        defaults: the default values of the parameters.
    """

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parameters: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
            output = forward(*tensors, **parameters)
            if guarded:
                ctx.save_for_backward(output, *tensors)
            else:
                ctx.kept = tuple(tensor.detach() for tensor in (output, *tensors))
            ctx.parameters = parameters
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            saved = ctx.saved_tensors if guarded else ctx.kept
            return (None, *backward(grad_output, *saved, **ctx.parameters))

    def implementation(**arguments: Any) -> torch.Tensor:
        tensors = [arguments.pop(name) for name in names]
        parameters = {**defaults, **arguments}
        check(*tensors, **parameters)
        return Wired.apply(parameters, *tensors)

    return implementation


def padded_rows(pred: torch.Tensor, target: torch.Tensor) -> tuple[tuple, tuple]:
    valid = (target[..., 3] > 0).nonzero(as_tuple=True)
    return valid, valid


def ragged_rows(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> tuple[tuple, tuple]:
    row = torch.arange(len(target), device=target.device)
    sample = torch.searchsorted(offsets.long().contiguous(), row, right=True) - 1
    return (sample, row - offsets[sample]), (row,)


def one_term_after_another(losses: torch.Tensor) -> torch.Tensor:
    """Sum one by one in the dtype itself; torch's cumsum is wider inside."""
    if len(losses) == 0:
        return losses.sum()
    return torch.as_tensor(np.cumsum(losses.cpu().numpy())[-1], device=losses.device)


def score_gradients(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``sum(grad * pairwise_giou(a, b, eps))``."""
    lower, upper = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    width, height = (upper - lower).unbind(-1)
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    hull_width, hull_height = outer.unbind(-1)
    intersection = width.clamp(min=0) * height.clamp(min=0)
    raw_union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - intersection
    raw_hull = hull_width * hull_height
    union, hull = raw_union.clamp(min=eps), raw_hull.clamp(min=eps)
    zero = torch.zeros((), dtype=a.dtype, device=a.device)

    by_union = torch.where(raw_union >= eps, grad / hull - grad * (intersection / union) / union, zero)
    by_hull = torch.where(raw_hull >= eps, grad * ((hull - union) / hull) / hull - grad / hull, zero)
    by_intersection = grad / union - by_union
    by_width = torch.where(width >= 0, by_intersection * height.clamp(min=0), zero)
    by_height = torch.where(height >= 0, by_intersection * width.clamp(min=0), zero)

    def lesser(part: torch.Tensor, mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(mine == other, 0.5 * part, torch.where(mine > other, zero, part))

    def greater(part: torch.Tensor, mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(mine == other, 0.5 * part, torch.where(mine < other, zero, part))

    def along(lower: int, mine: torch.Tensor, other: torch.Tensor, side: Any, hull_side: Any, area: Any) -> tuple:
        first, last = mine[..., lower], mine[..., lower + 2]
        other_first, other_last = other[..., lower], other[..., lower + 2]
        return (
            -area - greater(side, first, other_first) - lesser(hull_side, first, other_first),
            area + lesser(side, last, other_last) + greater(hull_side, last, other_last),
        )

    def of(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        box_width, box_height = mine[..., 2] - mine[..., 0], mine[..., 3] - mine[..., 1]
        x1, x2 = along(0, mine, other, by_width, by_hull * hull_height, by_union * box_height)
        y1, y2 = along(1, mine, other, by_height, by_hull * hull_width, by_union * box_width)
        return torch.stack([x1, y1, x2, y2], -1)

    return of(a, b), of(b, a)


def giou(pairwise: Callable[..., torch.Tensor] = pairwise_giou) -> Implementation:
    """Return giou with its gradient written out, or with another forward pass in the compute dtype."""

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        return pairwise(in_compute_dtype(boxes1), in_compute_dtype(boxes2), eps).to(boxes1.dtype)

    def backward(grad: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> tuple:
        gradients = score_gradients(*map(in_compute_dtype, (grad, boxes1, boxes2)), eps)
        return tuple(g.to(boxes1.dtype) for g in gradients)

    return wire("giou", forward, backward)


def loss(operation: str, total: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> Implementation:
    """Return giou_loss or giou_loss_ragged with its gradient written out, or with another sum of the losses."""
    rows = ragged_rows if operation == "giou_loss_ragged" else padded_rows

    def forward(pred: torch.Tensor, target: torch.Tensor, *offsets: Any) -> torch.Tensor:
        pred_at, target_at = rows(pred, target, *offsets[:-1])
        losses = 1 - pairwise_giou(in_compute_dtype(pred[pred_at]), in_compute_dtype(target[target_at]), offsets[-1])
        return (total(losses) / max(len(losses), 1)).to(pred.dtype)

    def backward(grad_output: torch.Tensor, pred: torch.Tensor, target: torch.Tensor, *offsets: Any) -> tuple:
        pred_at, target_at = rows(pred, target, *offsets[:-1])
        a, b = in_compute_dtype(pred[pred_at]), in_compute_dtype(target[target_at])
        row = (-in_compute_dtype(grad_output) / max(len(a), 1)).expand(len(a))
        grad_a, grad_b = score_gradients(row, a, b, offsets[-1])
        grad_pred, grad_target = pred.new_zeros(pred.shape), target.new_zeros(target.shape)
        grad_pred[pred_at], grad_target[target_at] = grad_a.to(pred.dtype), grad_b.to(pred.dtype)
        return grad_pred, grad_target

    return wire(operation, forward, backward)
