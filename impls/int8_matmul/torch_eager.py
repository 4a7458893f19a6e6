"""int8_matmul in torch: see `fourfold.impls.scaled_matmul.torch_eager`."""

from ..scaled_matmul.torch_eager import int8_matmul as int8_matmul
from ..scaled_matmul.torch_eager import unsupported as unsupported
