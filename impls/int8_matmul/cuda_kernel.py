"""int8_matmul in CUDA C++: see `fourfold.impls.scaled_matmul.torch_eager`."""

from ..scaled_matmul.cuda_kernel import SCALED_SUM_OF_PARTS, kernels_of
from ..scaled_matmul.cuda_kernel import int8_matmul as int8_matmul
from ..scaled_matmul.torch_eager import unsupported as unsupported

KERNELS = (*kernels_of("integers", "many integers"), *SCALED_SUM_OF_PARTS.values())
