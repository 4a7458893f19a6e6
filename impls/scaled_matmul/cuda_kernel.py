"""scaled_matmul in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv
from fourfold.backends.tuning import Configuration, Tuner, anywhere, on_gpu

from ..matmul.operators import run_fastest
from .operators import read_by_vectors, register
from .torch_eager import OUT_DTYPES
from .torch_eager import unsupported as unsupported

SOURCE = Path(__file__).parent / "cuda_kernel.cu"


def _tiles(name: str, m: int, n: int, threads: int, *dtypes: torch.dtype, on_cpu: bool = True) -> Configuration:
    kernels = {
        dtype: CudaKernel(SOURCE, f"scaled_matmul_kernel<{CPP_TYPES[dtype]}, {m}, {n}, {threads}>") for dtype in dtypes
    }
    options = {"kernels": kernels, "tile": (m, n), "threads": threads}
    needs = "a GPU; the CPU, which takes long, runs bfloat16"
    return Configuration(name, options, frozenset(dtypes), anywhere if on_cpu else on_gpu, needs)


SKINNY, SMALL = _tiles("16x32", 16, 32, 32, *OUT_DTYPES), _tiles("32x32", 32, 32, 64, *OUT_DTYPES)
LARGE = {
    dtype: _tiles(f"128x128_{str(dtype).removeprefix('torch.')}", 128, 128, 256, dtype, on_cpu=dtype == torch.bfloat16)
    for dtype in OUT_DTYPES
}
ALL = (*LARGE.values(), SMALL, SKINNY)
KERNELS = tuple(kernel for each in ALL for kernel in each.options["kernels"].values())
TUNER = Tuner("scaled_matmul_cuda", ALL, Path(__file__))


def _launch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, output: torch.Tensor
) -> None:
    (m, k), n, dtype = a.shape, b.shape[0], output.dtype
    vectors = read_by_vectors(a), read_by_vectors(b)
    tensors = a.view(torch.uint8), b.view(torch.uint8), scale_a, scale_b, output
    strides = *a.stride(), *b.stride(), *scale_a.stride(), *scale_b.stride()

    def run(configuration: Configuration) -> None:
        (rows, columns), threads = configuration.options["tile"], configuration.options["threads"]
        kernel, blocks = configuration.options["kernels"][dtype], cdiv(m, rows) * cdiv(n, columns)
        kernel.launch(blocks, threads, *tensors, m, n, k, *strides, *vectors)

    def fits(configuration: Configuration) -> bool:
        return configuration.serves(dtype, a.device)

    def default() -> Configuration:
        if m <= SKINNY.options["tile"][0]:
            return SKINNY
        return SMALL if not a.is_cuda or m * n <= 512 * 512 else LARGE[dtype]

    run_fastest(TUNER, a.device, (m, n, k), (str(dtype), vectors), fits, default, run)


scaled_matmul = register("cuda", _launch)
