"""add_layer_norm in Triton: the kernels of layer_norm, of a sum."""

from ..layer_norm.triton_kernel import launch_backward, launch_forward
from .operators import register

add_layer_norm = register("triton", launch_forward, launch_backward)
