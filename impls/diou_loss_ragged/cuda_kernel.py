"""diou_loss_ragged in CUDA C++: giou_loss_ragged's kernels, by another measure."""

from ..giou_loss_ragged.cuda_kernel import register
from .torch_eager import diou_loss_ragged as definition

diou_loss_ragged, KERNELS = register(definition)
