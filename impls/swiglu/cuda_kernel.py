"""swiglu in CUDA C++."""

from ..cuda_elementwise import elementwise
from .torch_eager import swiglu as definition

swiglu, KERNELS = elementwise(definition, __file__, "swiglu_forward", "swiglu_backward", vectors=1)
