"""softmax in CUDA C++: what registers and shared memory hold of a row is read once, the rest of a longer one twice.

Of compute capability 9.0 on, the registers are those of up to eight blocks, which tell one another their sums.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from impls.cuda_launch import CPP_TYPES, CudaKernel
from impls.softmax.arguments import check_softmax
from impls.softmax.operators import define_softmax
from impls.strides import Rows, as_rows

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
# Threads of a block, by whether rows may be longer than registers hold.
MAX_THREADS = {False: 1024, True: 512}
# Most bytes of shared memory where it does not take all of a row.
CACHED_BEHIND = 160 * 1024
# Threads of a block that owns several rows.
ROWS_BLOCK = 128
# Of a row that blocks share: threads of each, so that two run at a time on a multiprocessor, one loads while the other
# stores, or else all there may be; and how many blocks, at most MAX_BLOCKS of the kernels.
SPLIT_THREADS = (512, 1024)
SPLIT_BLOCKS = (1, 2, 4, 8)


class Variant(NamedTuple):
    """Which of the kernels.

    Attributes:
        vectors: whether rows are moved in vectors of 16 bytes, else in single elements.
        excess: whether rows may be longer than registers hold.
        split: whether the blocks of a cluster may share a row; and half types stay in vectors, twice as many.
    """

    vectors: bool
    excess: bool
    split: bool


VARIANTS = (
    Variant(True, False, False),
    Variant(True, False, True),
    Variant(True, True, False),
    Variant(False, True, False),
)


def _kernels(name: str) -> dict[tuple[torch.dtype, Variant], CudaKernel]:
    kernels = {}
    for dtype, cpp in CPP_TYPES.items():
        for variant in VARIANTS:
            width = 16 // dtype.itemsize if variant.vectors else 1
            excess, split = (str(flag).lower() for flag in variant[1:])
            kernels[dtype, variant] = CudaKernel(SOURCE, f"{name}<{cpp}, {width}, {excess}, {split}>")
    return kernels


FORWARD = _kernels("softmax_forward_kernel")
BACKWARD = _kernels("softmax_backward_kernel")
KERNELS = (*FORWARD.values(), *BACKWARD.values())


class Plan(NamedTuple):
    """How a launch divides its rows.

    Attributes:
        variant: the kernel.
        threads: of a row; more than those of a block where the blocks of a cluster share it.
        block: threads of a block.
        num_shared: vectors of each tensor that a thread keeps in shared memory.
    """

    variant: Variant
    threads: int
    block: int
    num_shared: int = 0


def plan(cols: int, itemsize: int, vectors: bool, tensors: int, shared_bytes: int, clusters: bool) -> Plan:
    """How to divide rows of so many columns.

    Args:
        cols: at least 1.
        itemsize: bytes of an element.
        vectors: whether rows are moved in vectors of 16 bytes, else in single elements.
        tensors: that are read: 1 forward, 2 backward.
        shared_bytes: shared memory of a block.
        clusters: whether blocks may share a row.
    """
    width = 16 // itemsize if vectors else 1
    count = -(-cols // width)
    # As KEPT of the kernels.
    kept = (8 if itemsize == 8 else 32) // width // tensors
    excess = not vectors or count > MAX_THREADS[False] * kept
    plain = Variant(vectors, excess, False)
    if count <= 32 * kept:
        # A few vectors a thread, so that short rows keep all threads busy.
        threads = 1 << (-(-count // min(kept, 4)) - 1).bit_length()
        return Plan(plain, min(threads, 32), ROWS_BLOCK)
    if vectors and (excess or (itemsize == 2 and count > SPLIT_THREADS[0] * kept)):
        held = 2 * kept if itemsize == 2 else kept
        for most in SPLIT_THREADS:
            for blocks in SPLIT_BLOCKS if clusters else SPLIT_BLOCKS[:1]:
                block = -(-count // (32 * blocks * held)) * 32
                if block <= most:
                    return Plan(Variant(vectors, False, True), blocks * block, block)
    threads = min(-(-count // (32 * kept)) * 32, MAX_THREADS[excess])
    bytes_each = threads * width * itemsize * tensors
    if excess and vectors:
        kept *= 2
        # Half as many threads, if two such blocks have room for all of a row: one loads while the other stores.
        halved = -(-count // (threads // 2)) - kept
        if halved * (bytes_each // 2) <= shared_bytes // 2:
            return Plan(plain, threads // 2, threads // 2, max(halved, 0))
    needed = max(-(-count // threads) - kept, 0)
    room = shared_bytes // bytes_each
    # What is left of shared memory caches what is read again.
    return Plan(plain, threads, threads, needed if needed <= room else min(room, CACHED_BEHIND // bytes_each))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """What a block may have beside what the kernels declare; on the CPU so little that rows are read again early."""
    if device.type == "cpu":
        return 16 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 1024


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _in_vectors(cols: int, rows: Sequence[Rows], output: torch.Tensor) -> bool:
    """Whether every row of all tensors begins and ends at multiples of 16 bytes."""
    per_vector = 16 // output.element_size()
    steps = cols
    addresses = output.data_ptr()
    for tensor, outer_stride, inner_stride, column_stride in rows:
        if column_stride != 1:
            return False
        steps |= outer_stride | inner_stride
        addresses |= tensor.data_ptr()
    return steps % per_vector == 0 and addresses % 16 == 0


def launch(kernels: dict, rows: Sequence[Rows], inner: int, output: torch.Tensor, plan: Plan) -> None:
    """Run one of `FORWARD` or `BACKWARD` on tensors that are not empty."""
    cols = output.shape[-1]
    num_rows = output.numel() // cols
    blocks = max(plan.threads // plan.block, 1)
    kernels[output.dtype, plan.variant].launch(
        num_rows * blocks if plan.variant.split else -(-num_rows // (plan.block // plan.threads)),
        plan.block,
        *(row.tensor for row in rows),
        output,
        num_rows,
        cols,
        inner,
        *(stride for row in rows for stride in row[1:]),
        plan.threads,
        plan.num_shared,
        shared_bytes=plan.num_shared * plan.block * len(rows) * (16 if plan.variant.vectors else output.element_size()),
        cluster=blocks if blocks > 1 else None,
    )


def _run(kernels: dict, *tensors: torch.Tensor) -> torch.Tensor:
    given = tensors[0]
    output = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    if output.numel():
        cols, itemsize = given.shape[-1], given.element_size()
        inner, rows = as_rows(*tensors)
        vectors = _in_vectors(cols, rows, output)
        device = given.device
        chosen = plan(cols, itemsize, vectors, len(rows), _shared_bytes(device), _has_clusters(device))
        launch(kernels, rows, inner, output, chosen)
    return output


def _forward(x: torch.Tensor) -> torch.Tensor:
    return _run(FORWARD, x)


def _backward(grad_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _run(BACKWARD, grad_output, output)


softmax_operator = define_softmax("cuda", _forward, _backward)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last axis: see `impls.softmax.torch_eager.softmax`."""
    check_softmax(x)
    return softmax_operator(x)
