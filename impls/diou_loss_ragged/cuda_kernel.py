"""diou_loss_ragged in CUDA C++: giou_loss_ragged's kernels, by another measure."""

import torch

from ..giou.arguments import check_giou_loss_ragged
from ..giou_loss_ragged.cuda_kernel import register

diou_loss_ragged_operator, KERNELS = register("diou")


def diou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Compute the DIoU loss of a ragged batch: see `fourfold.impls.diou_loss_ragged.torch_eager.diou_loss_ragged`."""
    check_giou_loss_ragged(pred, target, offsets, eps)
    return diou_loss_ragged_operator(pred, target, offsets, eps)
