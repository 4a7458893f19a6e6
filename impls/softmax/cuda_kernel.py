"""softmax in CUDA C++: the part of a row that registers and shared memory hold is read once, the rest twice.

From compute capability 9.0 on, up to sixteen blocks can share a row and exchange their sums.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import has_clusters
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import Rows, as_rows

from .operators import SOFTMAX
from .torch_eager import softmax as definition

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# Threads per block, by whether rows may be longer than registers hold.
MAX_THREADS = {False: 1024, True: 512}
# The most bytes of shared memory to use if it cannot hold all of a row.
CACHED_BEHIND = 160 * 1024
# Threads per block for blocks that own several rows, by whether their vectors are shifted into place.
ROWS_BLOCK = {False: 64, True: 128}
# The choices for a row that blocks share, each the most threads of a block and numbers of blocks. The first number that
# suffices is taken. With 512 threads two blocks fit on a multiprocessor: one loads while the other stores. The kernels
# have room for 16 blocks; every GPU that has clusters runs 8.
SPLITS = ((512, (1, 2, 4, 8, 16)), (1024, (8, 16)))
ON_EVERY_GPU, MOST_BLOCKS = 8, 16
# Of two or four blocks with more threads than this, twice as many with half as many threads take turns more smoothly.
HALVED_BLOCK = 384
# Shared memory of a warp by which its lanes exchange vectors that are shifted into place.
EXCHANGED_BYTES = 33 * 16


class Variant(NamedTuple):
    """A variant of the kernels.

    Attributes:
        vectors: whether rows are moved in 16-byte vectors, else in single elements.
        excess: whether rows may be longer than registers hold.
        split: whether the blocks of a cluster may share a row. Half types then stay packed, and a thread keeps twice as
            many.
        shifted: whether a row may begin or end between two multiples of 16 bytes. Its vectors are then shifted into
            place, and the same threads have the same columns, so that a row's result is the same wherever it begins.
    """

    vectors: bool
    excess: bool
    split: bool
    shifted: bool = False


VARIANTS = (
    *(
        Variant(True, *of, shifted)
        for of in ((False, False), (False, True), (True, False))
        for shifted in (False, True)
    ),
    Variant(False, True, False),
)


# The name of each in the kernels' names.
OPTIONS = {
    variant: ", ".join(["{W}" if variant.vectors else "1", *(str(option).lower() for option in variant[1:])])
    for variant in VARIANTS
}
FORWARD = CudaKernel.instances(SOURCE, "softmax_forward_kernel<{T}, {}>", OPTIONS)
BACKWARD = CudaKernel.instances(SOURCE, "softmax_backward_kernel<{T}, {}>", OPTIONS)
KERNELS = (*FORWARD.values(), *BACKWARD.values())


class Plan(NamedTuple):
    """How a launch divides its rows.

    Attributes:
        variant: which kernel to launch.
        threads: threads per row. More than `block` if the blocks of a cluster share a row.
        block: threads per block.
        num_shared: vectors of each tensor that a thread keeps in shared memory.
    """

    variant: Variant
    threads: int
    block: int
    num_shared: int = 0


def plan(
    cols: int, itemsize: int, vectors: bool, tensors: int, shared_bytes: int, most_blocks: int, shifted: bool = False
) -> Plan:
    """Choose how to divide rows of `cols` columns.

    Args:
        cols: at least 1.
        itemsize: bytes per element.
        vectors: whether rows are moved in 16-byte vectors, else in single elements.
        tensors: the number of tensors that are read: 1 forward, 2 backward.
        shared_bytes: shared memory per block.
        most_blocks: the number of blocks that may share a row.
        shifted: whether vectors have to be shifted into place. The lanes of a warp do this together, so that rows which
            have fewer threads are moved in single elements.
    """
    width = 16 // itemsize if vectors else 1
    count = -(-cols // width)
    # The same as KEPT of the kernels.
    kept = (8 if itemsize == 8 else 32) // width // tensors
    excess = not vectors or count > MAX_THREADS[False] * kept
    plain = Variant(vectors, excess, False, shifted)
    if count <= 32 * kept:
        # Few vectors per thread, so that short rows keep all threads busy.
        threads = 1 << (-(-count // min(kept, 4)) - 1).bit_length()
        if shifted and threads < 32:
            return plan(cols, itemsize, False, tensors, shared_bytes, most_blocks)
        return Plan(plain, min(threads, 32), ROWS_BLOCK[shifted])
    if vectors and (excess or (itemsize == 2 and count > SPLITS[0][0] * kept)):
        held = 2 * kept if itemsize == 2 else kept
        choices = [(most, blocks) for most, numbers in SPLITS for blocks in numbers if blocks <= most_blocks]
        block_of = {blocks: -(-count // (32 * blocks * held)) * 32 for _, blocks in choices}
        if (blocks := next((blocks for most, blocks in choices if block_of[blocks] <= most), None)) is not None:
            if blocks in (2, 4) and block_of[blocks] > HALVED_BLOCK:
                blocks *= 2
            block = block_of[blocks]
            return Plan(Variant(vectors, False, True, shifted), blocks * block, block)
    threads = min(-(-count // (32 * kept)) * 32, MAX_THREADS[excess])
    bytes_each = threads * width * itemsize * tensors
    if excess and vectors:
        kept *= 2
        # Halve the threads if two such blocks have room for all of a row. Then one block loads while the other stores.
        halved = -(-count // (threads // 2)) - kept
        if halved * (bytes_each // 2) <= shared_bytes // 2:
            return Plan(plain, threads // 2, threads // 2, max(halved, 0))
    needed = max(-(-count // threads) - kept, 0)
    room = shared_bytes // bytes_each
    # The shared memory that is left caches data that are read again.
    return Plan(plain, threads, threads, needed if needed <= room else min(room, CACHED_BEHIND // bytes_each))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return shared memory per block for vectors. It is small on the CPU, so that rows are read twice."""
    if device.type == "cpu":
        return 16 * 1024
    other = 1024 + MAX_THREADS[True] // 32 * EXCHANGED_BYTES  # what the kernels declare, and exchange
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - other


def _has_whole_vectors(cols: int, rows: Sequence[Rows], output: torch.Tensor) -> tuple[bool, bool]:
    """Return whether columns are adjacent, so that vectors move rows, and whether these vectors need shifting.

    They do not if every row of all tensors begins and ends at multiples of 16 bytes.
    """
    per_vector = 16 // output.element_size()
    steps = cols
    addresses = output.data_ptr()
    for tensor, outer_stride, inner_stride, column_stride in rows:
        if column_stride != 1:
            return False, False
        steps |= outer_stride | inner_stride
        addresses |= tensor.data_ptr()
    return True, bool(steps % per_vector or addresses % 16)


def launch(kernels: dict, rows: Sequence[Rows], inner: int, output: torch.Tensor, plan: Plan) -> None:
    """Launch one of the kernels `FORWARD` or `BACKWARD` on tensors that are not empty."""
    cols = output.shape[-1]
    num_rows = output.numel() // cols
    blocks, together = max(plan.threads // plan.block, 1), max(plan.block // plan.threads, 1)
    kernels[output.dtype, plan.variant].launch(
        -(-num_rows // together) * blocks,
        (plan.block // together, together),
        num_rows,
        cols,
        inner,
        *(row.tensor for row in rows),
        *(row.outer_stride for row in rows),
        output,
        *(stride for row in rows for stride in row[2:]),
        plan.threads,
        plan.num_shared,
        shared_bytes=plan.num_shared * plan.block * len(rows) * (16 if plan.variant.vectors else output.element_size())
        + (plan.block // 32 * EXCHANGED_BYTES if plan.variant.shifted else 0),
        cluster=blocks if blocks > 1 else None,
    )


def _run(kernels: dict, *tensors: torch.Tensor) -> torch.Tensor:
    given = tensors[0]
    output = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    if output.numel():
        cols, itemsize = given.shape[-1], given.element_size()
        inner, rows = as_rows(*tensors)
        vectors, shifted = _has_whole_vectors(cols, rows, output)
        if shifted and cols >= 2**31:
            vectors = shifted = False  # the number of a vector that is shifted is an int
        device = given.device
        sizes = cols, itemsize, vectors, len(rows), _shared_bytes(device)
        chosen = plan(*sizes, MOST_BLOCKS if has_clusters(device) else 1, shifted)
        blocks = chosen.threads // chosen.block
        kernel = kernels[output.dtype, chosen.variant]
        if blocks > ON_EVERY_GPU and not kernel.resident_clusters(device, chosen.block, blocks):
            chosen = plan(*sizes, ON_EVERY_GPU, shifted)
        launch(kernels, rows, inner, output, chosen)
    return output


def _forward(x: torch.Tensor) -> torch.Tensor:
    return _run(FORWARD, x)


def _backward(grad_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _run(BACKWARD, grad_output, output)


softmax_operator = SOFTMAX.register("cuda", _forward, _backward)
softmax = signature_of(definition).checked(softmax_operator)
