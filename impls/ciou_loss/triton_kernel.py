"""ciou_loss in Triton: giou_loss's kernels, by another measure."""

from ..giou_loss.triton_kernel import register
from .torch_eager import ciou_loss as definition

ciou_loss = register(definition)
