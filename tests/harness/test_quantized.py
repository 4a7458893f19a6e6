"""Right quantizers to float8 pass, and those that do not round to nearest fail."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import fourfold
from fourfold import Claims, operation, tensor


@operation(x=tensor("n", gradient=False))
def quantized(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)


@triton.jit
def quantize_kernel(x_ptr, output_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0) * FACTOR
    tl.store(output_ptr + at, x.to(tl.float8e4nv).to(tl.float32), mask=at < n)


def by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        if len(x):
            quantize_kernel[(triton.cdiv(len(x), 64),)](x, output, len(x), FACTOR=factor, BLOCK=64)
        return output

    return quantize


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.97, False)])
def test_a_quantizer_is_judged_by_its_rounding(factor: float, passes: bool) -> None:
    claims = Claims(gradients=False, dtypes=("float32",), finite=True)
    verdict = fourfold.verify(by(factor), quantized, device="cpu", claims=claims, only=("forward",))
    assert verdict.passed == passes, str(verdict)
