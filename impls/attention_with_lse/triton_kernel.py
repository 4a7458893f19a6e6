"""attention_with_lse in Triton: see `fourfold.impls.attention.torch_eager`."""

from ..attention.triton_kernel import attention_with_lse as attention_with_lse
from ..attention.triton_kernel import depends_on_batch as depends_on_batch
