"""scaled_matmul in torch operations: the baseline."""

import torch

from fourfold.backends.signature import one_of, signature, tensor

# Terms that share a scale of a, and of b, and columns of the result that share a scale of b.
BLOCK = 128
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Kinds of scales: "whole" ones are often 0, those that "spread" differ by up to 2^24, and "tiny" ones are subnormal.
SCALES = ("positive", "positive", "constant", "whole", "spread", "tiny")


def unsupported(dtype: str, device: str) -> str | None:
    """Return why a dtype is unsupported: results have float32, the dtype of the sums, or a half type."""
    return "sums are kept in float32, so a result cannot have float64" if dtype == "float64" else None


@signature(
    a=tensor("m k", says="a must", dtype=torch.float8_e4m3fn),
    b=tensor("n k", says="b must", dtype=torch.float8_e4m3fn),
    scale_a=tensor("m k/128", dtype=torch.float32, kind=SCALES, special=True, gradient=False),
    scale_b=tensor("n/128 k/128", dtype=torch.float32, kind=SCALES[:-1], special=True, gradient=False),
    out_dtype=one_of(*OUT_DTYPES),
)
def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``a b^T`` of float8 matrices with a scale for each block of 128 terms, as in DeepSeek's models.

    ``c[i, j] = sum over blocks p of scale_a[i, p] scale_b[j // 128, p] sum over q in p of a[i, q] b[j, q]``, where
    block p holds the terms ``128 p <= q < 128 (p + 1)``, and the last one those that are left.

    Args:
        a: ``[m, k]`` of float8_e4m3fn, any strides.
        b: ``[n, k]`` of float8_e4m3fn on the same device, any strides.
        scale_a: ``[m, ceil(k / 128)]`` of float32, any strides: of each row, one for each block.
        scale_b: ``[ceil(n / 128), ceil(k / 128)]`` of float32, any strides: of each 128 columns, one for each block.
        out_dtype: that of the result: torch.float32, torch.bfloat16 or torch.float16.

    Returns:
        ``[m, n]`` of out_dtype, summed in float32 and rounded once; zeros if k is 0. NaN in a or b, or a scale that is
        NaN, makes what it is multiplied with NaN, also where the other factor is 0. No gradient is promised; the
        kernels' backward raises NotImplementedError.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or out_dtype is no dtype.
        ValueError: a shape is wrong, devices differ, or a result cannot have out_dtype.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3.2; https://github.com/deepseek-ai/DeepGEMM.
    """
    (m, k), n = a.shape, b.shape[0]
    total = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    # Autocast would round the numbers' sums to a half type.
    with torch.autocast(a.device.type, enabled=False):
        left, right = a.float(), b.float()
        scale_of_columns = scale_b.repeat_interleave(BLOCK, 0)[:n].t()
        for p, start in enumerate(range(0, k, BLOCK)):
            sums = left[:, start : start + BLOCK] @ right[:, start : start + BLOCK].t()
            total = total + sums * (scale_a[:, p : p + 1] * scale_of_columns[p])
    return total.to(out_dtype)
