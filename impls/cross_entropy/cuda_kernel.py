"""cross_entropy in CUDA C++: forward reads the logits once, backward once more."""

from pathlib import Path
from typing import NamedTuple

import torch

from fourfold.backends import workspace
from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import FEW_ELEMENTS, cdiv, reciprocal

from .operators import Reduced, register_cross_entropy

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
# Vectors that each thread of a row loads at once; the most threads of a row, by how many vectors each has; and threads
# of the sum of all losses.
IN_FLIGHT = 4
MOST_THREADS, REDUCE_THREADS = {1: 256, IN_FLIGHT: 128}, 512
# Shared memory of a warp by which its lanes exchange vectors that are shifted into place.
EXCHANGED_BYTES = 33 * 16


class Access(NamedTuple):
    """How a kernel reads rows.

    Attributes:
        vectors: whether columns are adjacent, so that 16 bytes are moved at once, else single elements.
        shifted: whether a row may begin or end between two multiples of 16 bytes.
    """

    vectors: bool
    shifted: bool = False


ACCESSES = (Access(False), Access(True), Access(True, shifted=True))


def _kernels(name: str, further: str = "") -> dict[tuple[torch.dtype, Access], CudaKernel]:
    return {
        (dtype, access): CudaKernel(
            SOURCE,
            f"cross_entropy_{name}_kernel<{cpp}, {16 // dtype.itemsize if access.vectors else 1}, "
            f"{str(access.shifted).lower()}{further}>",
        )
        for dtype, cpp in CPP_TYPES.items()
        for access in ACCESSES
    }


# Those of forward by whether they reduce the losses.
FORWARD = {reduced: _kernels("forward", f", {str(reduced).lower()}") for reduced in (False, True)}
BACKWARD = _kernels("backward")
REDUCE = {dtype: CudaKernel(SOURCE, f"cross_entropy_reduce_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
KERNELS = tuple(kernel for group in (*FORWARD.values(), BACKWARD, REDUCE) for kernel in group.values())


def access_of(logits: torch.Tensor) -> Access:
    """Return the access by which rows of logits are read."""
    rows, classes = logits.shape
    size = logits.element_size()
    steps = (logits.data_ptr(), classes * size, logits.stride(0) * size if rows > 1 else 0)
    shifted = any(step % 16 for step in steps)
    # The number of a vector that is shifted is an int.
    vectors = (logits.stride(1) == 1 or classes == 1) and not (shifted and classes >= 2**31)
    return Access(vectors, vectors and shifted)


def plan(logits: torch.Tensor, vectors: int = IN_FLIGHT) -> tuple[Access, tuple[int, int], int, int]:
    """Return the access, threads of a row and rows of a block, classes that a block loads at once, shared bytes.

    A row has a thread for each `vectors` of its vectors, 1 or IN_FLIGHT, but at most MOST_THREADS.
    """
    access = access_of(logits)
    width = 16 // logits.element_size() if access.vectors else 1
    threads = min(cdiv(logits.shape[1], width * vectors * WARP) * WARP, MOST_THREADS[vectors])
    together = 4 if threads == WARP else 1
    shared = threads // WARP * together * EXCHANGED_BYTES if access.shifted else 0
    return access, (threads, together), threads * width * IN_FLIGHT, shared


def _row_arguments(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments by which both kernels find the target and the logits of a row."""
    (row_stride, class_stride), classes, wide = logits.stride(), logits.shape[1], target.dtype == torch.int64
    return wide, target, target.stride(0), ignore_index, logits, row_stride, classes, class_stride


def _shares(classes: int, label_smoothing: float) -> tuple[float, float]:
    """Return the share of the target in the loss of a row, and the share of each class, which the target has, too."""
    return 1 - label_smoothing, label_smoothing / classes


def launch_forward(
    losses: torch.Tensor,
    statistics: torch.Tensor,
    reduced: Reduced | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Write losses, of the dtype of logits or of statistics, statistics and what is reduced. There must be rows."""
    (rows, classes), rounded = logits.shape, losses.dtype == logits.dtype
    access, block, _, shared = plan(logits)
    blocks = cdiv(rows, block[1])
    written, rest = (losses if rounded else None, None if rounded else losses, statistics), (None, None)
    if reduced is not None:
        written = (reduced.output, losses, statistics)
        rest = reduced.scale if len(reduced.scale) else None, workspace.counter(logits.device) if blocks > 1 else None
    arguments = (*_row_arguments(logits, target, ignore_index), *written, *_shares(classes, label_smoothing), *rest)
    FORWARD[reduced is not None][logits.dtype, access].launch(blocks, block, rows, *arguments, shared_bytes=shared)


def launch_reduce(reduced: Reduced, losses: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    """Write the sum of losses, or their mean and its reciprocal count."""
    output, scale = reduced
    integers = (losses.shape[0], target.stride(0), target.dtype == torch.int64, ignore_index)
    REDUCE[output.dtype].launch(1, REDUCE_THREADS, losses, target, output, scale if len(scale) else None, *integers)


def launch_backward(
    grad_logits: torch.Tensor,
    grad_output: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Write the gradient of logits. There must be rows."""
    rows, classes = logits.shape
    vectors = 1 if logits.numel() <= FEW_ELEMENTS[logits.device.type] else IN_FLIGHT
    access, block, columns, shared = plan(logits, vectors)
    pieces = cdiv(classes, columns)
    given = (statistics, grad_output, grad_output.stride(0) if grad_output.ndim else 0, scale if len(scale) else None)
    sizes, shares = (rows, pieces, reciprocal(pieces)), _shares(classes, label_smoothing)
    arguments = (*sizes, *_row_arguments(logits, target, ignore_index), *given, grad_logits, *shares)
    BACKWARD[logits.dtype, access].launch(cdiv(rows, block[1]) * pieces, block, *arguments, shared_bytes=shared)


cross_entropy = register_cross_entropy("cuda", launch_forward, launch_reduce, launch_backward)
