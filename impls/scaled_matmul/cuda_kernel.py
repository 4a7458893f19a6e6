"""scaled_matmul, rowwise_scaled_matmul and int8_matmul in CUDA C++.

There is a portable kernel, and two for Hopper with wgmma and the copy engine (TMA).

One of these multiplies a copy of b in float16, the other one int8 numbers if int32 holds every sum. Where there are few
tiles, several blocks of the portable kernel share each, as in matmul.
"""

from collections.abc import Iterator
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
INT8_SOURCE = SOURCE.with_name("cuda_kernel_int8_hopper.cu")
THREADS = 256
# For the Hopper kernels: the threads of a block, and the elements of 2 bytes of a 128-byte line.
HOPPER_THREADS, LINE = 384, 64
# The types of float8 numbers in quantised.cuh.
TYPES = dict(zip(FLOAT8, ("E4M3", "E5M2"), strict=True))
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


SKINNY, SMALL = _tiles("16x32", 16, 32, 64, *OUT_DTYPES), _tiles("32x32", 32, 32, 128, *OUT_DTYPES)
LARGE = {
    dtype: _tiles(f"128x128_{str(dtype).removeprefix('torch.')}", 128, 128, 256, dtype, on_cpu=dtype == torch.bfloat16)
    for dtype in OUT_DTYPES
}
IN_PARTS = (
    _tiles("64x64", 64, 64, 256, *OUT_DTYPES, on_cpu=False, parts=8),
    _tiles("64x64", 64, 64, 256, *OUT_DTYPES, parts=4),
)


def _hopper(blocks: int) -> Configuration:
    stages = 14  # of 128 lines
    kernels = {
        (dtype, scaled, type_of_a): CudaKernel(
            HOPPER_SOURCE,
            f"scaled_matmul_hopper_kernel<{CPP_TYPES[dtype]}, {blocks}, {stages}, {name}, {rowwise}>",
        )
        for dtype in OUT_DTYPES
        for scaled, rowwise in (("blocks", "false"), ("rows", "true"))
        for type_of_a, name in TYPES.items()
    }
    # With the barriers, and room to align the start.
    shared_bytes = stages * (BLOCK * LINE * 2 + 2 * 8) + 1024
    return Configuration(
        f"hopper_{BLOCK}x{blocks * BLOCK}",
        {"kernels": kernels, "blocks": blocks, "shared_bytes": shared_bytes},
        runs_on=is_hopper_or_emulated,
        needs="compute capability 9.0: wgmma and TMA",
    )


def _int8_hopper(columns: int, stages: int) -> Configuration:
    kernels = {
        dtype: CudaKernel(INT8_SOURCE, f"int8_matmul_hopper_kernel<{CPP_TYPES[dtype]}, {columns}, {stages}>")
        for dtype in OUT_DTYPES
    }
    # With the barriers, and room to align the start.
    shared_bytes = stages * ((BLOCK + columns) * LINE * 2 + 2 * 8) + 1024
    return Configuration(
        f"int8_hopper_{BLOCK}x{columns}",
        {"kernels": kernels, "columns": columns, "shared_bytes": shared_bytes},
        runs_on=is_hopper_or_emulated,
        needs="compute capability 9.0: wgmma and TMA",
    )


HOPPER = (_hopper(2), _hopper(1))
INT8_HOPPER = (_int8_hopper(256, 4), _int8_hopper(128, 7))
TO_FLOAT16 = {dtype: CudaKernel(SOURCE, f"to_float16_kernel<{name}>") for dtype, name in TYPES.items()}
SUM_OF_PARTS = {dtype: CudaKernel(MATMUL_SOURCE, f"sum_of_parts_kernel<{CPP_TYPES[dtype]}>") for dtype in OUT_DTYPES}
PORTABLE = (*LARGE.values(), SMALL, SKINNY, *IN_PARTS)
SCALED_SUM_OF_PARTS = {
    dtype: CudaKernel(SOURCE, f"scaled_sum_of_parts_kernel<{CPP_TYPES[dtype]}>") for dtype in OUT_DTYPES
}
# By the operation's name.
TUNERS = {
    name: Tuner(f"{name}_cuda", (*for_hopper, *PORTABLE), Path(__file__))
    for name, for_hopper in (
        ("scaled_matmul", HOPPER),
        ("rowwise_scaled_matmul", HOPPER),
        ("int8_matmul", INT8_HOPPER),
    )
}


def kernels_of(*sums: str) -> Iterator[CudaKernel]:
    """Yield the portable kernels with some of `SUMS`. Those for Hopper compile for sm_90a only."""
    of_sums = [k for each in PORTABLE for (_, name), k in each.options["kernels"].items() if name in sums]
    yield from {kernel.name: kernel for kernel in of_sums}.values()


KERNELS = (*kernels_of("blocks of e4m3", "blocks"), *TO_FLOAT16.values())


def _as_halves(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of bytes as the copy engine takes it, in elements of 2: itself, or with zeros after each row."""
    rows, k = matrix.shape
    # TMA takes neither strides of other numbers than multiples of 16 bytes nor half of an element.
    if one_axis_dense(matrix) != 1 or k % 2:
        unpadded, matrix = matrix, matrix.new_zeros((rows, cdiv(k, BLOCK) * BLOCK))
        matrix[:, :k] = unpadded
    return matrix.view(torch.float16)


def _launch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, output: torch.Tensor
) -> None:
    (m, k), n, dtype = a.shape, b.shape[0], output.dtype
    scaled = "blocks" if scale_a.ndim == 2 else "rows"
    if a.dtype == torch.int8:
        name, sums = "int8_matmul", "integers" if k <= MOST_TERMS else "many integers"
    else:
        name = "scaled_matmul" if scaled == "blocks" else "rowwise_scaled_matmul"
        sums = f"{scaled} of e4m3" if a.dtype == b.dtype == torch.float8_e4m3fn else scaled
    vectors = read_by_vectors(a), read_by_vectors(b)
    left, right, strides = a.view(torch.uint8), b.view(torch.uint8), (*a.stride(), *b.stride())
    scale_strides = scale_strides_of(scale_a, scale_b)

    def run_hopper(configuration: Configuration) -> None:
        blocks, terms = configuration.options["blocks"], cdiv(k, BLOCK) * BLOCK
        rows, columns = _as_halves(left), torch.empty((n, terms), dtype=torch.float16, device=a.device)
        TO_FLOAT16[b.dtype].launch(n, THREADS, right, columns, k, terms, *b.stride(), vectors[1])
        tiles = cdiv(m, BLOCK) * cdiv(n, blocks * BLOCK)
        configuration.options["kernels"][dtype, scaled, a.dtype].launch(
            min(tiles, multiprocessors(a.device)),
            HOPPER_THREADS,
            *(swizzled_map(x, (BLOCK, LINE)) for x in (rows, columns)),
            scale_a,
            scale_b,
            output,
            m,
            n,
            terms,
            *scale_strides,
            shared_bytes=configuration.options["shared_bytes"],
        )

    def run_int8_hopper(configuration: Configuration) -> None:
        columns = configuration.options["columns"]
        halves_of_a, halves_of_b = _as_halves(left), _as_halves(right)  # the maps do not keep them alive
        configuration.options["kernels"][dtype].launch(
            min(cdiv(m, BLOCK) * cdiv(n, columns), multiprocessors(a.device)),
            HOPPER_THREADS,
            swizzled_map(halves_of_a, (BLOCK, LINE)),
            swizzled_map(halves_of_b, (columns, LINE)),
            scale_a,
            scale_b,
            output,
            m,
            n,
            k,
            scale_a.stride(0),
            scale_b.stride(0),
            shared_bytes=configuration.options["shared_bytes"],
        )

    def run(configuration: Configuration) -> None:
        options = configuration.options
        if configuration in HOPPER:
            return run_hopper(configuration)
        if configuration in INT8_HOPPER:
            return run_int8_hopper(configuration)
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
        # Those for Hopper, which have no parts, take a block of terms at least.
        least = (configuration.options.get("parts", 2) - 1) * BLOCK
        too_many = configuration in INT8_HOPPER and sums != "integers"
        return configuration.serves(dtype, a.device) and k >= least and not too_many

    def default() -> Configuration:
        hopper = TUNERS[name].configurations[0]
        if a.is_cuda and m * n > 512 * 512 and m * n * k >= LITTLE_WORK and fits(hopper):
            return hopper
        if a.is_cuda and m * n <= 512 * 512 and fits(IN_PARTS[0]):
            return IN_PARTS[0]
        if m <= SKINNY.options["tile"][0]:
            return SKINNY
        return SMALL if not a.is_cuda or m * n <= 512 * 512 else LARGE[dtype]

    kind = (str(dtype), vectors, str(a.dtype), str(b.dtype))
    run_fastest(TUNERS[name], a.device, (m, n, k), kind, fits, default, run)


scaled_matmul, rowwise_scaled_matmul, int8_matmul = register("cuda", _launch)
