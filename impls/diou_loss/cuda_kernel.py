"""diou_loss in CUDA C++: giou_loss's kernels, by another measure."""

from ..giou_loss.cuda_kernel import register
from .torch_eager import diou_loss as definition

diou_loss, KERNELS = register(definition)
