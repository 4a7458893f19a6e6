"""matmul in torch operations: the baseline, which also defines the results for ties and special values."""

import torch
import torch.nn.functional as F

from .arguments import check_matmul


def offsets_in_32_bits(dtype: str, device: str) -> str | None:
    """Say why a matrix cannot have offsets of 2^31 and more, or return None if it can."""
    if device == "cuda" or dtype in ("float32", "float64"):
        return "torch's libraries, MKL and cuBLAS, are wrong on some matrices whose rows or columns lie that far apart"
    return None


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> torch.Tensor:
    """Return activation(a @ b).

    Args:
        a: ``[m, k]``; float16, bfloat16, float32 or float64, any strides.
        b: ``[k, n]`` of the same dtype and device, any strides.
        activation: "none"; "relu", which is ``max(x, 0)``; or "leaky_relu", which is
            ``x where x > 0, else negative_slope x``.
        negative_slope: of leaky_relu, finite and at least 0.

    Returns:
        ``[m, n]`` of the same dtype. Half types are summed in float32, but ``torch.backends.cuda.matmul`` allows sums
        of parts in half types by default. float32 is summed in full precision unless it allows tf32. If k is 0, the
        result is 0. At 0 the gradient of relu is 0 and that of leaky_relu is negative_slope. NaN passes through both
        activations, and there the gradient of relu passes too. Backward rounds the gradient of the product to the dtype
        before it multiplies. Gradients of gradients are not promised.

    Raises:
        TypeError: an argument is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices do not fit, the activation is unknown, or the slope is negative or not finite.
    """
    check_matmul(a, b, activation, negative_slope)
    dtype = a.dtype
    if a.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        # With AMX, oneDNN multiplies by what lies beyond a row's end, and a NaN there spoils the product
        # (https://github.com/uxlfoundation/oneDNN/issues/5717).
        a, b = a.float(), b.float()
    product = a @ b
    if activation == "relu":
        product = F.relu(product)
    elif activation == "leaky_relu":
        product = F.leaky_relu(product, negative_slope)
    return product.to(dtype)
