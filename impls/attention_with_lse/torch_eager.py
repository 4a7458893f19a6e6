"""attention_with_lse in torch: see `fourfold.impls.attention.torch_eager`."""

from ..attention.torch_eager import attention_with_lse as attention_with_lse
