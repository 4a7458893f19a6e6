"""Planted faults in the state between calls: statistics between kernels and passes, buffers, counters, modes.

All compute softmax in several launches, in torch, Triton and CUDA C++. Each is right for a few successive calls with
their backward passes, in one thread, with gradients recorded.
"""

import dataclasses
import functools
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fourfold.impls.softmax.torch_eager import softmax as softmax_in_torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.signature import signature_of
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.graph import place_in_the_graph_does_not_matter
from fourfold.checks.interleaving import backward_passes_may_interleave
from fourfold.checks.many_calls import each_of_many_calls_is_alike
from fourfold.checks.modes import modes_do_not_matter
from fourfold.checks.search import Search, Subject
from fourfold.checks.threads import threads_do_not_matter

from .planted import Check, Fault, Implementation

Tensor = torch.Tensor
# The faults of kernels; all other faults are in their callers.
IN_KERNELS = ("no_maximum", "counter_of_8_bits", "statistics_overwritten")
SLOTS = 8  # of a ring of results


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


class Kernels(NamedTuple):
    """The launches; the last argument is the fault.

    Attributes:
        statistics: of ``x [rows, cols]`` to ``statistics [2, rows]``; counts calls in ``calls [1]``.
        output: of x and statistics to ``y [rows, cols]``.
        gradient: of the cotangent, x and statistics to ``grad_x [rows, cols]``.
    """

    statistics: Callable[[Tensor, Tensor, Tensor, str], None]
    output: Callable[[Tensor, Tensor, Tensor, Tensor, str], None]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, str], None]


class _Buffers:
    """Memory that a wrapper keeps from call to call, if that is its fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.calls = torch.zeros(1, dtype=torch.int32)
        self.random = random.Random(2)  # the first wrong call is the 171st
        self._of_thread = threading.local()
        self._kept: dict[Any, Any] = {}

    def statistics(self, rows: Tensor) -> Tensor:
        """Return the statistics of a call, or with some faults those of an earlier call."""
        shape = (2, rows.shape[0])
        if self.fault in ("statistics_in_one_workspace", "statistics_in_a_scratch"):
            return self._kept.setdefault((rows.shape, rows.device), rows.new_empty(shape))
        if self.fault == "statistics_of_the_thread":
            return self.of_thread(rows)
        return rows.new_empty(shape)

    def of_thread(self, rows: Tensor) -> Tensor:
        """Return the workspace of the running thread."""
        return self._of_thread.__dict__.setdefault((rows.shape, rows.device), rows.new_ones((2, rows.shape[0])))

    def output(self, x: Tensor) -> Tensor:
        """Return memory for a result, or with the fault one of a ring's slots."""
        if self.fault != "ring_of_results":
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        slots = self._kept.setdefault(
            x.shape, [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(SLOTS)]
        )
        slots.append(slots.pop(0))
        return slots[-1].detach()

    def counter(self, device: torch.device) -> Tensor:
        self.calls = self.calls.to(device)
        return self.calls


def softmax(kernels: Kernels, fault: str = "") -> Implementation:
    """Return softmax of float32 by such kernels, with a fault."""
    buffers = _Buffers(fault)
    in_kernels = fault if fault in IN_KERNELS and fault != "no_maximum" else ""

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, 1)

    class Wired(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fast: bool, leaf: Tensor | None) -> Tensor:
            rows, y = as_rows(x), buffers.output(x)
            statistics, calls = buffers.statistics(rows), buffers.counter(x.device)
            if y.numel():
                kernels.statistics(rows, statistics, calls, "no_maximum" if fast else in_kernels)
                kernels.output(rows, statistics, calls, as_rows(y), in_kernels)
            if fault == "wrong_once_in_two_hundred" and buffers.random.random() < 1 / 200:
                y *= 1.5
            ctx.save_for_backward(x)
            ctx.statistics = statistics.clone() if fault == "statistics_in_a_scratch" else statistics
            ctx.leaf = leaf
            return y

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            (x,) = ctx.saved_tensors
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            rows, statistics = as_rows(x), ctx.statistics
            if fault == "statistics_of_the_thread":
                statistics = buffers.of_thread(rows)
            if x.numel():
                kernels.gradient(as_rows(grad_output), rows, statistics, as_rows(grad_x), in_kernels)
            if fault == "gradient_of_leaves_alone" and not ctx.leaf.is_leaf:
                grad_x.zero_()
            if fault == "accumulated_by_itself" and ctx.leaf.is_leaf:
                ctx.leaf.grad = grad_x.clone() if ctx.leaf.grad is None else ctx.leaf.grad + grad_x
            return grad_x, None, None

    def implementation(x: Tensor) -> Tensor:
        signature_of(softmax_in_torch).check(x)
        fast = fault == "no_maximum" and not torch.is_grad_enabled()
        leaf = x if fault in ("gradient_of_leaves_alone", "accumulated_by_itself") else None
        if fault == "gradients_always":
            with torch.enable_grad():
                return Wired.apply(x, fast, leaf)
        return Wired.apply(x, fast, leaf)

    return implementation


# ---- torch


def _statistics(x: Tensor, statistics: Tensor, calls: Tensor, fault: str) -> None:
    calls.copy_((calls + 1) % 256)
    most = torch.zeros_like(x[:, :1]) if fault == "no_maximum" else x.amax(-1, keepdim=True)
    statistics[0] = most[:, 0]
    statistics[1] = (x - most).exp().sum(-1)


def _output(x: Tensor, statistics: Tensor, calls: Tensor, y: Tensor, fault: str) -> None:
    y.copy_((x - statistics[0, :, None]).exp() / statistics[1, :, None])
    if fault == "counter_of_8_bits" and not calls.item():
        y.zero_()


def _gradient(grad: Tensor, x: Tensor, statistics: Tensor, grad_x: Tensor, fault: str) -> None:
    y = (x - statistics[0, :, None]).exp() / statistics[1, :, None]
    total = (grad * y).sum(-1)
    grad_x.copy_(y * (grad - total[:, None]))
    if fault == "statistics_overwritten":
        statistics[1] = total


IN_TORCH = Kernels(_statistics, _output, _gradient)

# ---- Triton


@triton.jit
def statistics_kernel(
    x_ptr, statistics_ptr, calls_ptr, rows, cols, row_stride, col_stride, FAULT: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns one row: its largest number, and the sum of its exponentials.
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(calls_ptr, (tl.load(calls_ptr) + 1) & 255)
    at = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=-float("inf"))
    most = tl.max(x, axis=0)
    if FAULT == "no_maximum":
        most = tl.full((), 0.0, tl.float32)
    tl.store(statistics_ptr + row, most)
    tl.store(statistics_ptr + rows + row, tl.sum(tl.where(at < cols, tl.exp(x - most), 0.0), axis=0))


@triton.jit
def output_kernel(
    x_ptr, statistics_ptr, calls_ptr, y_ptr, rows, cols, row_stride, col_stride,
    FAULT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row of y.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=0.0)
    y = tl.exp(x - tl.load(statistics_ptr + row)) / tl.load(statistics_ptr + rows + row)
    if FAULT == "counter_of_8_bits":
        y = tl.where(tl.load(calls_ptr) > 0, y, 0.0)
    tl.store(y_ptr + row * cols + at, y, mask=at < cols)


@triton.jit
def gradient_kernel(
    grad_output_ptr, x_ptr, statistics_ptr, grad_x_ptr, rows, cols,
    grad_row_stride, grad_col_stride, row_stride, col_stride, FAULT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row of grad_x.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK).to(tl.int64)
    mask = at < cols
    x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0)
    grad = tl.load(grad_output_ptr + row * grad_row_stride + at * grad_col_stride, mask=mask, other=0.0)
    y = tl.exp(x - tl.load(statistics_ptr + row)) / tl.load(statistics_ptr + rows + row)
    total = tl.sum(tl.where(mask, grad * y, 0.0), axis=0)
    if FAULT == "statistics_overwritten":
        tl.store(statistics_ptr + rows + row, total)
    tl.store(grad_x_ptr + row * cols + at, y * (grad - total), mask=mask)


def _launched(kernel: Any, x: Tensor, *arguments: Any, fault: str) -> None:
    with triton_launch.current_device(x.device):
        kernel[(x.shape[0],)](*arguments, FAULT=fault, BLOCK=triton.next_power_of_2(x.shape[1]))


def _kernels(launch: Callable[..., None], statistics: Any, output: Any, gradient: Any) -> Kernels:
    """Return the launches of three kernels of rows, by a function of a kernel, x, its arguments and the fault."""
    return Kernels(
        lambda x, sums, calls, fault: launch(statistics, x, x, sums, calls, *x.shape, *x.stride(), fault=fault),
        lambda x, sums, calls, y, fault: launch(output, x, x, sums, calls, y, *x.shape, *x.stride(), fault=fault),
        lambda grad, x, sums, grad_x, fault: launch(
            gradient, x, grad, x, sums, grad_x, *x.shape, *grad.stride(), *x.stride(), fault=fault
        ),
    )


IN_TRITON = _kernels(_launched, statistics_kernel, output_kernel, gradient_kernel)

# ---- CUDA C++

KERNELS = Planted(Path(__file__).with_suffix(".cu"), "statistics_kernel", "output_kernel", "gradient_kernel")
THREADS = 64


def _cuda(name: str, x: Tensor, *arguments: Any, fault: str) -> None:
    KERNELS.launch(name, fault.upper() or "NONE", -(-x.shape[0] // THREADS), THREADS, *arguments)


IN_CUDA = _kernels(_cuda, *KERNELS.kernels)


def _as_a_candidate(check: Check, subject: Subject, search: Search) -> None:
    check(dataclasses.replace(subject, foreign=True), search)


def as_a_candidate(check: Check) -> Check:
    """Return a check of a foreign implementation, which may give other bits if they are as right."""
    return functools.partial(_as_a_candidate, check)


BY_LANGUAGE = {"torch": IN_TORCH, "triton": IN_TRITON, "cuda": IN_CUDA}
AGAIN = r"calls on the same tensors gave another output than the first"
EVERYWHERE: dict[str, tuple[Check, str]] = {
    "statistics_in_one_workspace": (
        backward_passes_may_interleave,
        r"backward of the first of several calls: gradient of x.* is .*expected",
    ),
    "statistics_overwritten": (
        backward_passes_may_interleave,
        r"a second backward pass of one call, with retain_graph: gradient of x.* is .*expected",
    ),
    "statistics_in_a_scratch": (threads_do_not_matter, r"where 4 threads call at once: "),
    "ring_of_results": (each_of_many_calls_is_alike, r"output of call \d+ of \d+ was changed by a later call"),
    "counter_of_8_bits": (each_of_many_calls_is_alike, AGAIN),
    "no_maximum": (as_a_candidate(modes_do_not_matter), r"under (no_grad|inference_mode).*: output.* is .*expected"),
}
IN_WRAPPERS: dict[str, tuple[Check, str]] = {
    "statistics_of_the_thread": (
        place_in_the_graph_does_not_matter,
        # On a GPU autograd runs every backward pass in a thread of its own.
        r"of a call of (a leaf in another thread|the result of another operation), gradient of x.* is .*expected",
    ),
    "gradient_of_leaves_alone": (
        place_in_the_graph_does_not_matter,
        r"of a call of the result of another operation, gradient of x.* is .*expected",
    ),
    "accumulated_by_itself": (
        place_in_the_graph_does_not_matter,
        r"torch.autograd.grad in another thread has written into the grad of x",
    ),
    "wrong_once_in_two_hundred": (each_of_many_calls_is_alike, AGAIN),
    "gradients_always": (modes_do_not_matter, "of inputs that require gradients: the output requires a gradient"),
}


def _fault(name: str, language: str, check: Check, says: str) -> Fault:
    make = functools.partial(softmax, BY_LANGUAGE[language], name)
    return Fault(name, "softmax", make, check=check, says=says, language=language)


FAULTS = (
    *(_fault(name, language, *expected) for name, expected in EVERYWHERE.items() for language in BY_LANGUAGE),
    *(_fault(name, "torch", *expected) for name, expected in IN_WRAPPERS.items()),
)
