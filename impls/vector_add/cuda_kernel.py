"""vector_add in CUDA C++."""

from ..cuda_elementwise import additive
from .torch_eager import vector_add as definition

vector_add, KERNELS = additive(definition, __file__, "added", vectors=4)
