"""rowwise_scaled_matmul in CUDA C++: see `fourfold.impls.scaled_matmul.torch_eager`."""

from ..scaled_matmul.cuda_kernel import TO_FLOAT16, kernels_of
from ..scaled_matmul.cuda_kernel import rowwise_scaled_matmul as rowwise_scaled_matmul
from ..scaled_matmul.torch_eager import unsupported as unsupported

KERNELS = (*kernels_of("rows of e4m3", "rows"), *TO_FLOAT16.values())
