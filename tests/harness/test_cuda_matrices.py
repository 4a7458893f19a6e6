"""ldmatrix and mma.sync on the CPU: their results, and the errors of wrong uses."""

import pathlib

import pytest
import torch

from fourfold.backends.cuda import compile as cuda_compile
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.launch import CudaKernel

SOURCE = pathlib.Path(__file__).parent / "cuda" / "matrices.cu"
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
KERNELS = {
    (dtype, transposed): CudaKernel(SOURCE, f"product<{name}, {str(transposed).lower()}>")
    for dtype, name in TYPES.items()
    for transposed in (False, True)
}
# In the order of the file's enum.
MISTAKES = {
    "misaligned_row": cuda_on_cpu.Misaligned,
    "row_past_the_end": cuda_on_cpu.OutOfBounds,
    "one_lane_away": cuda_on_cpu.DivergentWarp,
    "read_before_the_barrier": (cuda_on_cpu.Race, cuda_on_cpu.UninitialisedShared),
}

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or ""
)


def whole(*shape: int) -> torch.Tensor:
    """Return whole numbers, whose products and sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(3)).float()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize(("dtype", "transposed"), KERNELS)
def test_product_of_a_warp_is_that_of_the_matrices(dtype, transposed, mode, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", mode)
    a, b = whole(16, 16), whole(16, 8)
    given = (b.t().contiguous() if transposed else b).to(dtype)
    d = torch.full((16, 8), torch.nan)
    KERNELS[dtype, transposed].launch(1, 32, a.to(dtype), given, d, 0)
    assert torch.equal(d, a @ b + 1)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_at_its_line(mistake, order):
    d = torch.zeros(16, 8)
    number = 1 + list(MISTAKES).index(mistake)
    with cuda_on_cpu.schedule(order), pytest.raises(MISTAKES[mistake], match=r"matrices\.cu:\d+"):
        KERNELS[torch.float16, False].launch(1, 32, whole(16, 16).half(), whole(16, 8).half(), d, number)


def test_a_gpu_takes_the_same_instructions():
    names = [kernel.name for kernel in KERNELS.values()]
    assert set(cuda_compile.compile_ahead_of_time(SOURCE, names, "sm_80")) == set(names)
