"""matmul in torch operations: the baseline that people know, and the meaning of ties and special values."""

import torch
import torch.nn.functional as F

from impls.matmul.arguments import check_matmul


def offsets_in_32_bits(dtype: str, device: str) -> str | None:
    """Why a matrix may not be larger than 32 bits count, or None."""
    if device == "cuda" or dtype in ("float32", "float64"):
        return "torch's libraries, MKL and cuBLAS, are wrong on some matrices whose rows or columns lie that far apart"
    return None


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> torch.Tensor:
    """activation(a @ b).

    Args:
        a: ``[m, k]``; float16, bfloat16, float32 or float64, any strides.
        b: ``[k, n]`` of the same dtype and device, any strides.
        activation: "none"; "relu", ``max(x, 0)``; or "leaky_relu", ``x where x > 0, else negative_slope x``.
        negative_slope: of leaky_relu; finite and not below 0.

    Returns:
        ``[m, n]`` of the same dtype. Half types are summed in float32, and float32 in full unless
        ``torch.backends.cuda.matmul`` allows tf32, or sums of parts in half types (which it does unless told). Without
        terms, where k is 0, zeros. At 0 relu has gradient 0 and leaky_relu negative_slope; NaN passes through both,
        and so does the gradient of relu there. Backward rounds the gradient of the product to the dtype before it
        multiplies; gradients of gradients are not promised.

    Raises:
        TypeError: a and b are no floating-point tensors of one dtype.
        ValueError: shapes or devices do not fit, the activation is unknown, or the slope negative or not finite.
    """
    check_matmul(a, b, activation, negative_slope)
    dtype = a.dtype
    if a.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        # On processors with AMX, oneDNN multiplies by what lies beyond a row's end: NaN there spoils the product
        # (https://github.com/uxlfoundation/oneDNN/issues/5717).
        a, b = a.float(), b.float()
    product = a @ b
    if activation == "relu":
        product = F.relu(product)
    elif activation == "leaky_relu":
        product = F.leaky_relu(product, negative_slope)
    return product.to(dtype)
