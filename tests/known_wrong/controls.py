"""Controls: implementations that are right in unusual ways, which the checks must accept."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fourfold.impls.giou.arguments import check_giou_loss_ragged
from fourfold.impls.giou.torch_eager import in_compute_dtype, pairwise_giou
from fourfold.impls.giou_loss.torch_eager import concatenated_loss, looped_loss

from . import planted_diou_losses, planted_scaled_matmul
from .generic import with_torchs_gradient
from .planted import Implementation


@dataclass(frozen=True)
class Control:
    """A correct implementation of an operation, or of "operation.output", and the dtypes that it supports."""

    name: str
    operation: str
    make: Callable[[], Implementation]
    dtypes: tuple[str, ...] = ("float16", "float32")
    # The number of generated cases, and the maximum elements of a named one. A slow control gets few.
    examples: int = 50
    elements: int | None = None


def pairs_of_pairs(losses: torch.Tensor) -> torch.Tensor:
    while len(losses) > 1:
        if len(losses) % 2:
            losses = torch.cat([losses, losses.new_zeros(1)])
        losses = losses[::2] + losses[1::2]
    return losses.sum()


def compensated(losses: torch.Tensor) -> torch.Tensor:
    """Sum by Kahan's algorithm."""
    values = losses.cpu().numpy()
    total = lost = values.dtype.type(0)
    for value in values:
        term = value - lost
        partial = total + term
        lost = (partial - total) - term
        total = partial
    return torch.tensor(total).to(losses.device)


def one_term_after_another(losses: torch.Tensor) -> torch.Tensor:
    """Sum one by one in the dtype itself; torch's cumsum is wider inside."""
    if len(losses) == 0:
        return losses.sum()
    return torch.as_tensor(np.cumsum(losses.cpu().numpy())[-1], device=losses.device)


def loss_by_sum(total: Callable[[torch.Tensor], torch.Tensor]) -> Implementation:
    """Return giou_loss by another sum of the losses, with torch's gradient."""

    def forward(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        valid = target[..., 3] > 0
        losses = 1 - pairwise_giou(in_compute_dtype(pred[valid]), in_compute_dtype(target[valid]), eps)
        return (total(losses) / max(len(losses), 1)).to(pred.dtype)

    return with_torchs_gradient("giou_loss", forward)


def summed_backwards(pred: torch.Tensor, targets: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    boxes = torch.cat([sample[: len(target)] for sample, target in zip(pred, targets, strict=True)])
    losses = 1 - pairwise_giou(boxes, torch.cat(list(targets)), eps)
    return one_term_after_another(losses.flip(0)) / len(losses)


def score_of_pairs(pairwise: Callable[..., torch.Tensor]) -> Implementation:
    """Return giou by another score of pairs, with torch's gradient."""

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        return pairwise(in_compute_dtype(boxes1), in_compute_dtype(boxes2), eps).to(boxes1.dtype)

    return with_torchs_gradient("giou", forward)


def wide_inside(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Compute in float64, with boxes and score in the given dtype."""
    return pairwise_giou(boxes1.double(), boxes2.double(), eps).to(boxes1.dtype)


def reciprocals(a: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
    """Multiply by reciprocals instead of dividing, two coordinates at a time."""
    # autograd's gradient of a reciprocal squares it, and the square underflows for boxes of 1e19.
    inner = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    intersection = inner.clamp(min=0).prod(-1)
    union = (b[..., 2:] - b[..., :2]).prod(-1) - intersection + (a[..., 2:] - a[..., :2]).prod(-1)
    union, hull = union.clamp(min=eps), outer.prod(-1).clamp(min=eps)
    return intersection * union.reciprocal() - (hull - union) * hull.reciprocal()


def no_difference_of_areas(a: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute I / U - 1 + U / C."""
    inner = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    intersection = inner.clamp(min=0).prod(-1)
    union = ((a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - intersection).clamp(min=eps)
    hull = outer.prod(-1).clamp(min=eps)
    # Infinite boxes must score NaN, as infinity over infinity does. Here U / C alone would be 0.
    return torch.where(hull.isinf(), torch.nan, intersection / union - 1 + union / hull)


def by_samples(reduce: Callable[..., torch.Tensor]) -> Implementation:
    """Compute the ragged loss from a list of the samples' targets."""

    def implementation(
        pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
    ) -> torch.Tensor:
        check_giou_loss_ragged(pred, target, offsets, eps)
        if len(target) == 0:
            return pred[:0].sum() + target.sum()
        a, b = (boxes.float() if boxes.element_size() == 2 else boxes for boxes in (pred, target))
        return reduce(a, b.split(offsets.diff().tolist()), eps).to(pred.dtype)

    return implementation


def torchs_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def torchs_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_without_infinities(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return NaN throughout a row with an infinity, as torch's own kernel does on a GPU."""
    known = torch.where(x.isinf().any(-1, keepdim=True), torch.nan, x)
    return torchs_rms_norm(known, weight, eps)


class RmsNormOfSums(torch.autograd.Function):
    """An rms_norm whose gradient divides by the number of columns last, as torch's own does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normal = x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(x, weight, normal)
        ctx.eps = eps
        return normal * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, normal = ctx.saved_tensors
        root = ((x * x).mean(-1, keepdim=True) + ctx.eps).sqrt()
        scaled, cols = grad * weight, x.shape[-1]
        grad_x = (cols * weight * grad - normal * (scaled * normal).sum(-1, keepdim=True)) * (1 / root / max(cols, 1))
        return grad_x, (grad * normal).sum_to_size(weight.shape), None


def rms_norm_of_sums(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return RmsNormOfSums.apply(x, weight, eps)


def torchs_cross_entropy(logits: torch.Tensor, target: torch.Tensor, **parameters: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, target.long(), **parameters)


CONTROLS = (
    Control("wide_inside", "giou", lambda: wide_inside, dtypes=("float16", "bfloat16", "float32")),
    Control("reciprocals", "giou", lambda: score_of_pairs(reciprocals)),
    Control("no_difference_of_areas", "giou", lambda: score_of_pairs(no_difference_of_areas)),
    Control("one_term_after_another", "giou_loss", lambda: loss_by_sum(one_term_after_another)),
    Control("pairs_of_pairs", "giou_loss", lambda: loss_by_sum(pairs_of_pairs)),
    Control("compensated", "giou_loss", lambda: loss_by_sum(compensated)),
    Control(
        "summed_backwards",
        "giou_loss_ragged",
        lambda: with_torchs_gradient("giou_loss_ragged", by_samples(summed_backwards)),
    ),
    Control("looped", "giou_loss_ragged", lambda: by_samples(looped_loss), dtypes=("float32",)),
    Control("concatenated", "giou_loss_ragged", lambda: by_samples(concatenated_loss)),
    # It scales before it subtracts.
    Control("torchs_own", "layer_norm", lambda: torchs_layer_norm, dtypes=("float32", "float64")),
    Control("torchs_own", "rms_norm", lambda: torchs_rms_norm, dtypes=("float32", "float64")),
    Control("of_sums", "rms_norm", lambda: rms_norm_of_sums, dtypes=("float32", "float64")),
    Control("not_of_infinities", "rms_norm", lambda: rms_norm_without_infinities),
    Control("torchs_own", "cross_entropy", lambda: torchs_cross_entropy, dtypes=("float32", "float64")),
    *(
        Control("as_torchvision", name, functools.partial(planted_diou_losses.as_torchvision, name))
        for name in planted_diou_losses.RECORDS
    ),
    # Numbers times scales, which are rounded before all of them are summed at once.
    Control(
        "dequantised",
        "scaled_matmul",
        functools.partial(planted_scaled_matmul.checked, planted_scaled_matmul.dequantised),
        dtypes=("float32",),
        examples=10,
        elements=3000,
    ),
)
