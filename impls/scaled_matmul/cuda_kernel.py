"""scaled_matmul in CUDA C++."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv
from fourfold.backends.tuning import Configuration, Tuner

from .arguments import OUT_DTYPES, check_scaled_matmul
from .arguments import unsupported as unsupported
from .operators import LITTLE_WORK, extent_class, read_by_vectors, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _tiles(name: str, m: int, n: int, threads: int, *dtypes: torch.dtype, on_cpu: bool = True) -> Configuration:
    kernels = {
        dtype: CudaKernel(SOURCE, f"scaled_matmul_kernel<{CPP_TYPES[dtype]}, {m}, {n}, {threads}>") for dtype in dtypes
    }
    options = {"kernels": kernels, "tile": (m, n), "threads": threads}
    if on_cpu:
        return Configuration(name, options, frozenset(dtypes))
    return Configuration(name, options, frozenset(dtypes), _is_gpu, "a GPU; the CPU, which takes long, runs bfloat16")


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
    (m, k), n = a.shape, b.shape[0]
    vectors = read_by_vectors(a), read_by_vectors(b)
    strides = *a.stride(), *b.stride(), *scale_a.stride(), *scale_b.stride()

    def run(configuration: Configuration) -> None:
        rows, columns = configuration.options["tile"]
        configuration.options["kernels"][output.dtype].launch(
            cdiv(m, rows) * cdiv(n, columns),
            configuration.options["threads"],
            a.view(torch.uint8),
            b.view(torch.uint8),
            scale_a,
            scale_b,
            output,
            m,
            n,
            k,
            *strides,
            *vectors,
        )

    def default() -> Configuration:
        if m <= SKINNY.options["tile"][0]:
            return SKINNY
        return SMALL if not a.is_cuda or m * n <= 512 * 512 else LARGE[output.dtype]

    kind = (str(output.dtype), extent_class(m), extent_class(n), extent_class(k), vectors)
    run(
        TUNER.choose(
            a.device,
            kind,
            lambda configuration: configuration.serves(output.dtype, a.device),
            default,
            run,
            worthwhile=m * n * k >= LITTLE_WORK,
        )
    )


scaled_matmul_operator = register("cuda", _launch)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply float8 matrices with scales: see `fourfold.impls.scaled_matmul.torch_eager.scaled_matmul`."""
    check_scaled_matmul(a, b, scale_a, scale_b, out_dtype)
    return scaled_matmul_operator(a, b, scale_a, scale_b, out_dtype)
