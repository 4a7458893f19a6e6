"""Launches of the kernels of planted.cu, and of other files whose kernels take the mistake as an argument."""

import re
from pathlib import Path

import torch

from fourfold.backends.cuda.launch import CudaKernel

from .steps import Implementation, loss, wire


class Planted:
    """The kernels of one file. Their last argument is a value of the file's enum of faults.

    Args:
        source: the ``.cu`` file.
        names: the names of its kernels.
    """

    def __init__(self, source: Path, *names: str) -> None:
        listed = re.search(r"enum \w*Fault \{(.*?)\}", source.read_text(), re.DOTALL)
        assert listed is not None
        self.faults = {name: number for number, name in enumerate(re.findall(r"\w+", listed[1]))}
        self.kernels = {name: CudaKernel(source, name) for name in names}

    def launch(self, kernel: str, fault: str, grid: int | tuple, block: int | tuple, *args: object) -> None:
        """Launch a kernel with one of its faults."""
        self.kernels[kernel].launch(grid, block, *args, self.faults[fault])


SOURCE = Path(__file__).parent / "planted.cu"
FORWARD_FAULTS = ("NONE", "STORE_UNMASKED", "LOAD_UNMASKED", "OFFSETS_IN_32_BITS", "CONTIGUOUS_ASSUMED", "NAN_DROPPED")
BACKWARD_FAULTS = ("NONE", "CONTIGUOUS_ASSUMED")
LOSS_FAULTS = ("NONE", "BARRIER_MISSING", "IDLE_WARPS_UNWRITTEN", "ATOMIC_SUM")
FORWARD = {fault: CudaKernel(SOURCE, f"giou_forward_kernel<{fault}>") for fault in FORWARD_FAULTS}
BACKWARD = {fault: CudaKernel(SOURCE, f"giou_backward_kernel<{fault}>") for fault in BACKWARD_FAULTS}
LOSS = {fault: CudaKernel(SOURCE, f"giou_loss_forward_kernel<{fault}>") for fault in LOSS_FAULTS}
THREADS = 64
LOSS_BLOCKS = 16


def giou(forward_fault: str = "NONE", backward_fault: str = "NONE") -> Implementation:
    """Return giou of float32 boxes with a fault."""

    def forward(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> torch.Tensor:
        rows1, rows2 = boxes1.reshape(-1, 4), boxes2.reshape(-1, 4)
        output = torch.empty(boxes1.shape[:-1], device=boxes1.device)
        n = output.numel()
        strides = (*rows1.stride(), *rows2.stride())
        FORWARD[forward_fault].launch(-(-n // THREADS), THREADS, rows1, rows2, output, n, *strides, eps)
        return output

    def backward(grad_output: torch.Tensor, boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float) -> tuple:
        grads, rows1, rows2 = grad_output.reshape(-1), boxes1.reshape(-1, 4), boxes2.reshape(-1, 4)
        grad_boxes1, grad_boxes2 = (torch.empty(boxes1.shape, device=boxes1.device) for _ in range(2))
        n = grads.numel()
        strides = (*grads.stride(), *rows1.stride(), *rows2.stride())
        BACKWARD[backward_fault].launch(
            -(-n // THREADS), THREADS, grads, rows1, rows2, grad_boxes1, grad_boxes2, n, *strides, eps
        )
        return grad_boxes1, grad_boxes2

    return wire("giou", forward, backward)


def giou_loss(fault: str = "NONE") -> Implementation:
    """Return giou_loss of float32 boxes, summed in shared memory; its gradient does not come from CUDA."""
    blocks = 1 if fault == "ATOMIC_SUM" else LOSS_BLOCKS

    def forward(pred: torch.Tensor, target: torch.Tensor, eps: float) -> torch.Tensor:
        sums = torch.zeros(blocks, device=pred.device)
        rows = pred.shape[0] * pred.shape[1]
        if rows:
            LOSS[fault].launch(LOSS_BLOCKS, THREADS, pred.contiguous(), target.contiguous(), sums, rows, eps)
        return sums.sum() / (target[..., 3] > 0).sum().clamp(min=1)

    right = loss("giou_loss")

    def backward(grad_output: torch.Tensor, pred: torch.Tensor, target: torch.Tensor, eps: float) -> tuple:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (pred, target)]
            return torch.autograd.grad(right(pred=leaves[0], target=leaves[1], eps=eps), leaves, grad_output)

    return wire("giou_loss", forward, backward)
