"""ciou_loss in CUDA C++: giou_loss's kernels, by another measure."""

import torch

from ..giou.arguments import check_giou_loss
from ..giou_loss.cuda_kernel import register

ciou_loss_operator, KERNELS = register("ciou")


def ciou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean CIoU loss of a padded batch: see `fourfold.impls.ciou_loss.torch_eager.ciou_loss`."""
    check_giou_loss(pred, target, eps)
    return ciou_loss_operator(pred, target, eps)[0]
