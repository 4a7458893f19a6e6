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
TYPES = {dtype: number for number, dtype in enumerate((*FLOAT8, torch.int8))}
# How kernels sum, and their last template arguments: whether scales are of whole rows, and the type of the totals.
SUMS = {"blocks": "false, float", "rows": "true, float", "integers": "true, int"}


def _tiles(
    name: str, m: int, n: int, threads: int, *dtypes: torch.dtype, on_cpu: bool = True, parts: int = 1
) -> Configuration:
    # The sums over parts of the terms are in float32, and are added after.
    kernels = {
        (dtype, sums): CudaKernel(SOURCE, f"scaled_matmul_kernel<{result}, {m}, {n}, {threads}, {of_sums}>")
        for dtype in dtypes
        for result in ("float" if parts > 1 else CPP_TYPES[dtype],)
        for sums, of_sums in SUMS.items()
    }
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
        for sums, of_sums in SUMS.items()
        for type_of_a in TYPES
        if (type_of_a in FLOAT8 and sums != "integers") or (type_of_a == torch.int8 and sums != "blocks")
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
# The sums of parts are added in float32.
WHOLE = tuple(configuration for configuration in PORTABLE if configuration not in IN_PARTS)
TUNERS = {
    "blocks": Tuner("scaled_matmul_cuda", (*HOPPER, *PORTABLE), Path(__file__)),
    "rows": Tuner("rowwise_scaled_matmul_cuda", (*HOPPER, *PORTABLE), Path(__file__)),
    "integers": Tuner("int8_matmul_cuda", (*HOPPER, *WHOLE), Path(__file__)),
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
    sums = "blocks" if scale_a.ndim == 2 else "integers" if a.dtype == torch.int8 and k <= MOST_TERMS else "rows"
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
        to = output if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
        numbers = m, n, k, *strides, *scale_strides, *vectors, TYPES[a.dtype], TYPES[b.dtype], parts
        kernel.launch(blocks, threads, left, right, scale_a, scale_b, to, *numbers)
        if parts > 1:
            SUM_OF_PARTS[dtype].launch(cdiv(m * n, THREADS), THREADS, to, output, m * n, parts, 0, 0.0)
        return None

    def fits(configuration: Configuration) -> bool:
        least = BLOCK if configuration in HOPPER else (configuration.options["parts"] - 1) * BLOCK
        is_known = configuration in TUNERS[sums].configurations
        return is_known and k >= least and configuration.serves(dtype, a.device)

    def default() -> Configuration:
        if a.is_cuda and m * n > 512 * 512 and m * n * k >= LITTLE_WORK and fits(HOPPER[0]):
            return HOPPER[0]
        if a.is_cuda and m * n <= 512 * 512 and fits(IN_PARTS[0]):
            return IN_PARTS[0]
        if m <= SKINNY.options["tile"][0]:
            return SKINNY
        return SMALL if not a.is_cuda or m * n <= 512 * 512 else LARGE[dtype]

    kind = (str(dtype), vectors, str(a.dtype), str(b.dtype))
    run_fastest(TUNERS[sums], a.device, (m, n, k), kind, fits, default, run)


scaled_matmul, rowwise_scaled_matmul, int8_matmul = register("cuda", _launch)
