"""rowwise_scaled_matmul in torch: see `fourfold.impls.scaled_matmul.torch_eager`."""

from ..scaled_matmul.torch_eager import rowwise_scaled_matmul as rowwise_scaled_matmul
from ..scaled_matmul.torch_eager import unsupported as unsupported
