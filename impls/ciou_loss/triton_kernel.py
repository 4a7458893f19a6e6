"""ciou_loss in Triton: giou_loss's kernels, by another measure."""

import torch

from ..giou.arguments import check_giou_loss
from ..giou_loss.triton_kernel import register

ciou_loss_operator = register("ciou")


def ciou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean CIoU loss of a padded batch: see `fourfold.impls.ciou_loss.torch_eager.ciou_loss`."""
    check_giou_loss(pred, target, eps)
    return ciou_loss_operator(pred, target, eps)[0]
