"""diou_loss in Triton: giou_loss's kernels, by another measure."""

from ..giou_loss.triton_kernel import register
from .torch_eager import diou_loss as definition

diou_loss = register(definition)
