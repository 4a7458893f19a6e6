"""paged_attention in CUDA C++: the tokens of a sequence are split over blocks; on tensor cores for half types."""

from pathlib import Path

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import cdiv

from .operators import Call, register
from .operators import depends_on_batch as depends_on_batch

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# By the size of an element: warps of a block, and stages, as in the source. Tokens of a step, and heads of a tile.
WARPS, STAGES = {2: 4, 4: 2, 8: 1}, {2: 3, 4: 3, 8: 2}
KEYS = HEADS = 16
COLUMNS = {128: "128", 256: "256"}  # of a head, at most
SPLIT = CudaKernel.instances(SOURCE, "paged_attention_split_kernel<{T}, {}>", COLUMNS)
MERGE = CudaKernel.instances(SOURCE, "paged_attention_merge_kernel<{T}{}>", {"": ""})
KERNELS = (*SPLIT.values(), *MERGE.values())


def _launch(call: Call) -> None:
    _, page_size, pages_per_sequence, heads, _, columns = call.sizes
    size, dtype = call.q.element_size(), call.q.dtype
    line, warps = cdiv(columns, 16) * 16 + 16 // size, WARPS[size]
    elements = HEADS * line + warps * HEADS * (KEYS + 16 // size) + warps * STAGES[size] * 2 * KEYS * line
    SPLIT[dtype, next(most for most in COLUMNS if columns <= most)].launch(
        call.blocks(HEADS),
        warps * 32,
        *call[:9],
        *call.sizes,
        *call.strides,
        call.splits,
        call.has_whole_vectors,
        call.scale,
        shared_bytes=elements * size,
    )
    if call.splits > 1:
        MERGE[dtype, ""].launch(
            len(call.q) * heads,
            128,
            call.lengths,
            call.sums,
            call.largest,
            call.totals,
            call.output,
            pages_per_sequence * page_size,
            heads,
            columns,
            call.splits,
        )


# Long pipelines, as far as all multiprocessors have the two blocks that fit.
paged_attention = register("cuda", _launch, least_tokens=1024, resident=2)
