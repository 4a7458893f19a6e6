"""int8_matmul in Triton: see `fourfold.impls.scaled_matmul.torch_eager`."""

from ..scaled_matmul.torch_eager import unsupported as unsupported
from ..scaled_matmul.triton_kernel import depends_on_batch as depends_on_batch
from ..scaled_matmul.triton_kernel import int8_matmul as int8_matmul
