"""cross_entropy in CUDA C++: forward reads the logits once, backward once more."""

from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.launch import cdiv

from .arguments import check_cross_entropy
from .operators import register_cross_entropy

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
WARP = 32
# Threads of a row forward and backward, at most, and vectors that each loads at once.
MOST_THREADS, MOST_THREADS_BACKWARD = 512, 256
IN_FLIGHT = 4

FORWARD, BACKWARD = (
    {
        (dtype, width): CudaKernel(SOURCE, f"cross_entropy_{name}_kernel<{cpp}, {width}>")
        for dtype, cpp in CPP_TYPES.items()
        for width in (1, 16 // dtype.itemsize)
    }
    for name in ("forward", "backward")
)
REDUCE = {dtype: CudaKernel(SOURCE, f"cross_entropy_reduce_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
KERNELS = (*FORWARD.values(), *BACKWARD.values(), *REDUCE.values())


def width_of(logits: torch.Tensor) -> int:
    """Elements of a vector: 16 bytes' worth if each row lies in whole ones, else 1."""
    rows, classes = logits.shape
    size = logits.element_size()
    steps = (logits.data_ptr(), classes * size, logits.stride(0) * size if rows > 1 else 0)
    adjacent = logits.stride(1) == 1 or classes == 1
    return 16 // size if adjacent and not any(step % 16 for step in steps) else 1


def block_of(classes: int, width: int, most: int) -> tuple[int, int]:
    """Threads of a row, a multiple of a warp, and rows of a block."""
    threads = min(cdiv(classes, width * IN_FLIGHT * WARP) * WARP, most)
    return threads, 4 if threads == WARP else 1


def launch_forward(
    losses: torch.Tensor,
    statistics: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Write losses, of the dtype of logits or of statistics, and statistics. There must be rows."""
    (rows, classes), width = logits.shape, width_of(logits)
    block = block_of(classes, width, MOST_THREADS)
    rounded = losses.dtype == logits.dtype
    FORWARD[logits.dtype, width].launch(
        cdiv(rows, block[1]),
        block,
        logits,
        target,
        losses if rounded else None,
        None if rounded else losses,
        statistics,
        rows,
        classes,
        *logits.stride(),
        target.stride(0),
        target.dtype == torch.int64,
        ignore_index,
        label_smoothing,
    )


def launch_reduce(
    output: torch.Tensor, scale: torch.Tensor, losses: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> None:
    """Write the sum of losses, or their mean and its reciprocal count."""
    integers = (losses.shape[0], target.stride(0), target.dtype == torch.int64, ignore_index)
    REDUCE[output.dtype].launch(1, MOST_THREADS, losses, target, output, scale if len(scale) else None, *integers)


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
    (rows, classes), width = logits.shape, width_of(logits)
    threads, together = block_of(classes, width, MOST_THREADS_BACKWARD)
    pieces = cdiv(classes, threads * width * IN_FLIGHT)
    BACKWARD[logits.dtype, width].launch(
        cdiv(rows, together) * pieces,
        (threads, together),
        grad_output,
        logits,
        target,
        statistics,
        scale if len(scale) else None,
        grad_logits,
        rows,
        classes,
        pieces,
        grad_output.stride(0) if grad_output.ndim else 0,
        *logits.stride(),
        target.stride(0),
        target.dtype == torch.int64,
        ignore_index,
        label_smoothing,
    )


cross_entropy_operator = register_cross_entropy("cuda", launch_forward, launch_reduce, launch_backward)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """-sum(q log(softmax(logits))): see `fourfold.impls.cross_entropy.torch_eager.cross_entropy`."""
    check_cross_entropy(logits, target, ignore_index, label_smoothing, reduction)
    return cross_entropy_operator(logits, target, ignore_index, label_smoothing, reduction)[0]
