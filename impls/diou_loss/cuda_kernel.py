"""diou_loss in CUDA C++: giou_loss's kernels, by another measure."""

import torch

from ..giou.arguments import check_giou_loss
from ..giou_loss.cuda_kernel import register

diou_loss_operator, KERNELS = register("diou")


def diou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return the mean DIoU loss of a padded batch: see `fourfold.impls.diou_loss.torch_eager.diou_loss`."""
    check_giou_loss(pred, target, eps)
    return diou_loss_operator(pred, target, eps)[0]
