"""attention_with_lse in CUDA C++: see `fourfold.impls.attention.torch_eager`."""

from ..attention.cuda_kernel import KERNELS as KERNELS
from ..attention.cuda_kernel import attention_with_lse as attention_with_lse
