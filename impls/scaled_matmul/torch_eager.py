"""scaled_matmul, rowwise_scaled_matmul and int8_matmul in torch operations: the baseline."""

import torch

from fourfold.backends.signature import one_of, signature, tensor

# Terms that share a scale of a, and of b, and columns of the result that share a scale of b.
BLOCK = 128
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The most products of two int8 numbers, of at most 2^14 each, whose sum int32 always holds.
MOST_TERMS = 2**17 - 1
# Kinds of scales: "whole" ones are often 0, those that "spread" differ by up to 2^24, and "tiny" ones are subnormal.
SCALES = ("positive", "positive", "constant", "whole", "spread", "tiny")
OF_A = {"dtype": torch.float32, "kind": SCALES, "special": True, "gradient": False}
OF_B = {**OF_A, "kind": SCALES[:-1]}


def unsupported(dtype: str, device: str) -> str | None:
    """Return why a dtype is unsupported: results have float32, the dtype of the sums, or a half type."""
    return "sums are kept in float32, so a result cannot have float64" if dtype == "float64" else None


@signature(
    a=tensor("m k", says="a must", dtype=FLOAT8),
    b=tensor("n k", says="b must", dtype=FLOAT8),
    scale_a=tensor("m k/128", **OF_A),
    scale_b=tensor("n/128 k/128", **OF_B),
    out_dtype=one_of(*OUT_DTYPES),
)
def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``a b^T`` of float8 matrices with a scale for each block of 128 terms, as in DeepSeek's models.

    ``c[i, j] = sum over blocks p of scale_a[i, p] scale_b[j // 128, p] sum over q in p of a[i, q] b[j, q]``, where
    block p holds the terms ``128 p <= q < 128 (p + 1)``, and the last one those that are left.

    Args:
        a: ``[m, k]`` of float8_e4m3fn or float8_e5m2, any strides.
        b: ``[n, k]`` of float8_e4m3fn or float8_e5m2 on the same device, any strides.
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


@signature(
    a=tensor("m k", says="a must", dtype=FLOAT8),
    b=tensor("n k", says="b must", dtype=FLOAT8),
    scale_a=tensor("m", **OF_A),
    scale_b=tensor("n", **OF_B),
    out_dtype=one_of(*OUT_DTYPES),
)
def rowwise_scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``a b^T`` of float8 matrices with a scale for each row of both.

    ``c[i, j] = scale_a[i] scale_b[j] sum over q of a[i, q] b[j, q]``. One scale of a whole tensor is such a vector with
    a stride of 0: ``scale.expand(m)``.

    Args:
        a: ``[m, k]`` of float8_e4m3fn or float8_e5m2, any strides.
        b: ``[n, k]`` of float8_e4m3fn or float8_e5m2 on the same device, any strides.
        scale_a: ``[m]`` of float32, any stride: of each row of a.
        scale_b: ``[n]`` of float32, any stride: of each row of b.
        out_dtype: that of the result: torch.float32, torch.bfloat16 or torch.float16.

    Returns:
        ``[m, n]`` of out_dtype, summed in float32 and rounded once; zeros if k is 0 and scales are finite. NaN in a or
        b, or a scale that is NaN, makes what it is multiplied with NaN, also where the other factor is 0. No gradient
        is promised; the kernels' backward raises NotImplementedError.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or out_dtype is no dtype.
        ValueError: a shape is wrong, devices differ, or a result cannot have out_dtype.

    Source: torch.nn.functional.scaled_mm, with ScalingType.RowWise and ScalingType.TensorWise.
    """
    with torch.autocast(a.device.type, enabled=False):
        sums = a.float() @ b.float().t()
        return (sums * (scale_a[:, None] * scale_b)).to(out_dtype)


@signature(
    a=tensor("m k", says="a must", dtype=torch.int8),
    b=tensor("n k", says="b must", dtype=torch.int8),
    scale_a=tensor("m", **OF_A),
    scale_b=tensor("n", **OF_B),
    out_dtype=one_of(*OUT_DTYPES),
)
def int8_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``a b^T`` of int8 matrices with a scale for each row of both.

    ``c[i, j] = scale_a[i] scale_b[j] sum over q of a[i, q] b[j, q]``.

    Args:
        a: ``[m, k]`` of int8, any strides.
        b: ``[n, k]`` of int8 on the same device, any strides.
        scale_a: ``[m]`` of float32, any stride: of each row of a.
        scale_b: ``[n]`` of float32, any stride: of each row of b.
        out_dtype: that of the result: torch.float32, torch.bfloat16 or torch.float16.

    Returns:
        ``[m, n]`` of out_dtype: the sum, rounded to float32, times the product of its scales; zeros if k is 0 and
        scales are finite. Kernels sum exactly in int32 if it holds every sum, for k below 2^17, and in float32
        otherwise. No gradient is promised; the kernels' backward raises NotImplementedError.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, or out_dtype is no dtype.
        ValueError: a shape is wrong, devices differ, or a result cannot have out_dtype.

    Source: Dettmers, Lewis, Belkada, Zettlemoyer, LLM.int8(), 2022, section 3.1.
    """
    # torch multiplies no integers on a GPU; float64 holds every sum.
    sums = (a.double() @ b.double().t()).float()
    return (sums * (scale_a[:, None] * scale_b)).to(out_dtype)
