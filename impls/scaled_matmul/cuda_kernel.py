"""scaled_matmul, rowwise_scaled_matmul and int8_matmul in CUDA C++.

There is a portable kernel, and one for Hopper with wgmma and the copy engine (TMA).

The one for Hopper multiplies a copy of b in float16. Where there are few tiles, several blocks of the portable kernel
share each, as in matmul.
"""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.cuda.tensor_map import swizzled_map
from fourfold.backends.launch import cdiv, is_hopper_or_emulated, multiprocessors
from fourfold.backends.tuning import Configuration, Tuner, anywhere, on_gpu

from ..matmul.cuda_kernel import SOURCE as MATMUL_SOURCE
from ..matmul.operators import LITTLE_WORK, one_axis_dense, run_fastest
from .operators import read_by_vectors, register, scale_strides_of
from .torch_eager import BLOCK, FLOAT8, MOST_TERMS, OUT_DTYPES
from .torch_eager import unsupported as unsupported

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
HOPPER_SOURCE = SOURCE.with_name("cuda_kernel_hopper.cu")
THREADS = 256
# For the Hopper kernel: the threads of a block, and the elements of a 128-byte line. A stage has 128 lines.
HOPPER_THREADS, LINE = 384, 64
# The numbers of the types of quantised numbers in quantised.cuh.
INT8 = (torch.int8,)
TYPES = {dtype: number for number, dtype in enumerate((*FLOAT8, *INT8))}
# What has scales and is multiplied, and how it is summed: the last template arguments of the kernels. Those of one type
# alone take a tenth less time. The sums of many int8 numbers are of float32.
SUMS = {
    "blocks of e4m3": "BLOCKS, E4M3, float",
    "blocks": "BLOCKS, EITHER_FLOAT8, float",
    "rows of e4m3": "ROWS, E4M3, float",
    "rows": "ROWS, EITHER_FLOAT8, float",
    "integers": "ROWS, INT8, int",
    "many integers": "ROWS, INT8, float",
}


def _tiles(
    name: str, m: int, n: int, threads: int, *dtypes: torch.dtype, on_cpu: bool = True, parts: int = 1
) -> Configuration:
    def kernel(dtype: torch.dtype, sums: str) -> CudaKernel:
        # Sums over parts of the terms are added after: those of int32 without scales, others in float32.
        result, of_sums = ("float" if parts > 1 else CPP_TYPES[dtype]), SUMS[sums]
        if parts > 1 and sums == "integers":
            result, of_sums = "int", "NOTHING, INT8, int"
        return CudaKernel(SOURCE, f"scaled_matmul_kernel<{result}, {m}, {n}, {threads}, {of_sums}>")

    kernels = {(dtype, sums): kernel(dtype, sums) for dtype in dtypes for sums in SUMS}
    options = {"kernels": kernels, "tile": (m, n), "threads": threads, "parts": parts}
    name += f"_in_{parts}_parts" if parts > 1 else ""
    needs = "a GPU; the CPU, which takes long, runs bfloat16"
    return Configuration(name, options, frozenset(dtypes), anywhere if on_cpu else on_gpu, needs)


SKINNY, SMALL = _tiles("16x32", 16, 32, 32, *OUT_DTYPES), _tiles("32x32", 32, 32, 64, *OUT_DTYPES)
LARGE = {
    dtype: _tiles(f"128x128_{str(dtype).removeprefix('torch.')}", 128, 128, 256, dtype, on_cpu=dtype == torch.bfloat16)
    for dtype in OUT_DTYPES
}
IN_PARTS = (
    _tiles("64x64", 64, 64, 256, *OUT_DTYPES, on_cpu=False, parts=8),
    _tiles("64x64", 64, 64, 256, *OUT_DTYPES, parts=4),
)


def _hopper(blocks: int) -> Configuration:
    stages = 14
    kernels = {
        (dtype, sums, type_of_a): CudaKernel(
            HOPPER_SOURCE,
            f"scaled_matmul_hopper_kernel<{CPP_TYPES[dtype]}, {blocks}, {stages}, {TYPES[type_of_a]}, {of_sums}>",
        )
        for dtype in OUT_DTYPES
        for sums, types, of_sums in (
            ("blocks", FLOAT8, "false, float"),
            ("rows", FLOAT8, "true, float"),
            ("integers", INT8, "true, int"),
            ("many integers", INT8, "true, float"),
        )
        for type_of_a in types
    }
    # With the barriers, and room to align the start.
    shared_bytes = stages * (BLOCK * LINE * 2 + 2 * 8) + 1024
    return Configuration(
        f"hopper_{BLOCK}x{blocks * BLOCK}",
        {"kernels": kernels, "blocks": blocks, "shared_bytes": shared_bytes},
        runs_on=is_hopper_or_emulated,
        needs="compute capability 9.0: wgmma and TMA",
    )


HOPPER = (_hopper(2), _hopper(1))
TO_FLOAT16 = {dtype: CudaKernel(SOURCE, f"to_float16_kernel<{number}>") for dtype, number in TYPES.items()}
SUM_OF_PARTS = {dtype: CudaKernel(MATMUL_SOURCE, f"sum_of_parts_kernel<{CPP_TYPES[dtype]}>") for dtype in OUT_DTYPES}
PORTABLE = (*LARGE.values(), SMALL, SKINNY, *IN_PARTS)
SCALED_SUM_OF_PARTS = {
    dtype: CudaKernel(SOURCE, f"scaled_sum_of_parts_kernel<{CPP_TYPES[dtype]}>") for dtype in OUT_DTYPES
}
TUNERS = {
    name: Tuner(f"{name}_cuda", (*HOPPER, *PORTABLE), Path(__file__))
    for name in ("scaled_matmul", "rowwise_scaled_matmul", "int8_matmul")
}


def kernels_of(sums: str, *types: torch.dtype) -> tuple[CudaKernel, ...]:
    """Return the kernels with these sums of these types, but for those of HOPPER, which compile for sm_90a only."""
    of_sums = (k for each in PORTABLE for (_, name), k in each.options["kernels"].items() if name == sums)
    return *{kernel.name: kernel for kernel in of_sums}.values(), *(TO_FLOAT16[dtype] for dtype in types)


KERNELS = kernels_of("blocks", *FLOAT8)


def _launch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, output: torch.Tensor
) -> None:
    (m, k), n, dtype = a.shape, b.shape[0], output.dtype
    if a.dtype == torch.int8:
        name, sums = "int8_matmul", "integers" if k <= MOST_TERMS else "many integers"
    else:
        name, sums = ("rowwise_scaled_matmul", "rows") if scale_a.ndim == 1 else ("scaled_matmul", "blocks")
    vectors = read_by_vectors(a), read_by_vectors(b)
    left, right, strides = a.view(torch.uint8), b.view(torch.uint8), (*a.stride(), *b.stride())
    scale_strides = scale_strides_of(scale_a, scale_b)

    def run_hopper(configuration: Configuration) -> None:
        blocks, terms = configuration.options["blocks"], cdiv(k, BLOCK) * BLOCK
        rows, columns = left, torch.empty((n, terms), dtype=torch.float16, device=a.device)
        if one_axis_dense(left) != 1 or k % 2:  # TMA takes neither such strides nor an odd number of bytes as float16
            rows = left.new_zeros((m, terms))
            rows[:, :k] = left
        TO_FLOAT16[b.dtype].launch(n, THREADS, right, columns, k, terms, *b.stride(), vectors[1])
        tiles = cdiv(m, BLOCK) * cdiv(n, blocks * BLOCK)
        configuration.options["kernels"][dtype, sums, a.dtype].launch(
            min(tiles, multiprocessors(a.device)),
            HOPPER_THREADS,
            *(swizzled_map(x, (BLOCK, LINE)) for x in (rows.view(torch.float16), columns)),
            scale_a,
            scale_b,
            output,
            m,
            n,
            terms,
            *scale_strides,
            shared_bytes=configuration.options["shared_bytes"],
        )

    def run(configuration: Configuration) -> None:
        options = configuration.options
        if configuration in HOPPER:
            return run_hopper(configuration)
        (rows, columns), threads, parts = options["tile"], options["threads"], options["parts"]
        kernel, blocks = options["kernels"][dtype, sums], cdiv(m, rows) * cdiv(n, columns) * parts
        of_parts = torch.int32 if sums == "integers" else torch.float32
        to = output if parts == 1 else torch.empty((parts, m, n), dtype=of_parts, device=a.device)
        are_e5m2 = (x.dtype == torch.float8_e5m2 for x in (a, b))
        numbers = m, n, k, *strides, *scale_strides, *vectors, *are_e5m2, parts
        kernel.launch(blocks, threads, left, right, scale_a, scale_b, to, *numbers)
        if parts > 1 and sums == "integers":
            numbers = m, n, parts, scale_a.stride(0), scale_b.stride(0)
            SCALED_SUM_OF_PARTS[dtype].launch(m * cdiv(n, THREADS), THREADS, to, scale_a, scale_b, output, *numbers)
        elif parts > 1:
            SUM_OF_PARTS[dtype].launch(cdiv(m * n, THREADS), THREADS, to, output, m * n, parts, 0, 0.0)
        return None

    def fits(configuration: Configuration) -> bool:
        least = BLOCK if configuration in HOPPER else (configuration.options["parts"] - 1) * BLOCK
        return configuration.serves(dtype, a.device) and k >= least

    def default() -> Configuration:
        if a.is_cuda and m * n > 512 * 512 and m * n * k >= LITTLE_WORK and fits(HOPPER[0]):
            return HOPPER[0]
        if a.is_cuda and m * n <= 512 * 512 and fits(IN_PARTS[0]):
            return IN_PARTS[0]
        if m <= SKINNY.options["tile"][0]:
            return SKINNY
        return SMALL if not a.is_cuda or m * n <= 512 * 512 else LARGE[dtype]

    kind = (str(dtype), vectors, str(a.dtype), str(b.dtype))
    run_fastest(TUNERS[name], a.device, (m, n, k), kind, fits, default, run)


scaled_matmul, rowwise_scaled_matmul, int8_matmul = register("cuda", _launch)
