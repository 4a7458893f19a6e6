"""attention_with_lse in Triton: see `fourfold.impls.attention.torch_eager`."""

from ..attention.triton_kernel import attention_with_lse as attention_with_lse
