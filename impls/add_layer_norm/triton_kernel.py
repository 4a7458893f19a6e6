"""add_layer_norm in Triton: the kernels of vector_add and of layer_norm."""

from ..layer_norm.triton_kernel import _backward, _forward
from ..vector_add.triton_kernel import vector_add
from .operators import register

add_layer_norm = register("triton", vector_add, _forward, _backward)
