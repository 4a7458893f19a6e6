"""Planted faults in softmax, in small Triton and CUDA C++ kernels."""

from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from fourfold.impls.softmax.arguments import check_softmax
from fourfold.properties import softmax

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import GRADIENT, UNWRITTEN, Fault, kernel_faults
from .planted_cuda import Planted
from .steps import Implementation, differentiable

Launch = Callable[[torch.Tensor, torch.Tensor, int, int], None]


def wired(forward_launch: Launch, backward_launch: Callable) -> Implementation:
    """Make softmax from ``(x, y, rows, cols)`` and ``(grad_output, y, grad_x, rows, cols)``; y may not be strided."""

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            forward_launch(as_rows(x), y, *as_rows(x).shape)
        return y

    def backward(grad_output: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            backward_launch(as_rows(grad_output), y, grad_x, *as_rows(x).shape)
        return (grad_x,)

    return differentiable(("x",), forward, backward, check_softmax)


@triton.jit
def softmax_forward_kernel(
    x_ptr, y_ptr, cols, row_stride, col_stride, FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns one row. It reads the row twice, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    most = tl.full((), -float("inf"), COMPUTE)
    if FAULT == "maximum_from_a_finite_number":
        most = tl.full((), -5e4, COMPUTE)
    total = tl.full((), 0.0, COMPUTE)
    end = cols
    if FAULT == "columns_past_a_block":
        end = tl.minimum(cols, BLOCK)
    if FAULT == "contiguous_assumed":
        col_stride = 1
    for start in range(0, end, BLOCK):
        at = start + lanes
        mask = at < cols
        if FAULT == "other_is_zero":
            x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        else:
            x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=-float("inf")).to(COMPUTE)
        if FAULT == "maximum_of_magnitudes":
            highest = tl.maximum(most, tl.max(tl.where(mask, tl.abs(x), 0.0), axis=0))
        elif FAULT == "no_maximum":
            highest = tl.full((), 0.0, COMPUTE)
        else:
            highest = tl.maximum(most, tl.max(x, axis=0))
        # If all elements so far are -inf, the difference of two infinities would be NaN.
        base = highest
        if FAULT != "infinity_less_infinity":
            base = tl.where(highest == -float("inf"), 0.0, highest)
        part = tl.sum(tl.exp(x - base), axis=0)
        if FAULT == "sum_not_rescaled":
            total = total + part
        elif FAULT == "last_block_only":
            total = part
        else:
            total = total * tl.exp(most - base) + part
        if FAULT == "sum_in_half":
            total = total.to(tl.float16).to(COMPUTE)
        if FAULT != "maximum_not_kept" or start == 0:
            most = highest
    if FAULT == "no_maximum":
        most = tl.full((), 0.0, COMPUTE)
    for start in range(0, cols, BLOCK):
        at = start + lanes
        mask = at < cols
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        y = (tl.exp(x - most) / total).to(y_ptr.dtype.element_ty)
        if FAULT == "store_unmasked":
            tl.store(y_ptr + row * cols + at, y)
        else:
            tl.store(y_ptr + row * cols + at, y, mask=mask)


@triton.jit
def softmax_backward_kernel(
    grad_output_ptr, y_ptr, grad_x_ptr, cols, row_stride, col_stride,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row; y and grad_x are contiguous.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.full((), 0.0, COMPUTE)
    if FAULT == "grad_output_strided_as_y":
        row_stride, col_stride = cols, 1
    for start in range(0, cols, BLOCK):
        at = start + lanes
        mask = at < cols
        grad = tl.load(grad_output_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        y = tl.load(y_ptr + row * cols + at, mask=mask, other=0.0).to(COMPUTE)
        if FAULT == "sum_of_last_block":
            total = tl.sum(grad * y, axis=0)
        else:
            total += tl.sum(grad * y, axis=0)
    for start in range(0, cols, BLOCK):
        at = start + lanes
        mask = at < cols
        grad = tl.load(grad_output_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        y = tl.load(y_ptr + row * cols + at, mask=mask, other=0.0).to(COMPUTE)
        tl.store(grad_x_ptr + row * cols + at, (y * (grad - total)).to(grad_x_ptr.dtype.element_ty), mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return softmax in Triton for any dtype, with a fault."""

    def forward_launch(x: torch.Tensor, y: torch.Tensor, rows: int, cols: int) -> None:
        programs = min(rows, 4) if fault == "rows_past_the_grid" else rows
        with triton_launch.on(x.device):
            softmax_forward_kernel[(programs,)](
                x, y, cols, *x.stride(), FAULT=fault, COMPUTE=triton_launch.COMPUTE[x.dtype], BLOCK=1024
            )

    def backward_launch(grad_output: torch.Tensor, y: torch.Tensor, grad_x: torch.Tensor, rows: int, cols: int) -> None:
        with triton_launch.on(y.device):
            softmax_backward_kernel[(rows,)](
                grad_output, y, grad_x, cols, *grad_output.stride(),
                FAULT=fault, COMPUTE=triton_launch.COMPUTE[y.dtype], BLOCK=1024,
            )  # fmt: skip

    return wired(forward_launch, backward_launch)


KERNELS = Planted(Path(__file__).parent / "planted_softmax.cu", "softmax_forward_kernel", "softmax_backward_kernel")
THREADS = 64
BLOCKS = 64
BACKWARD = ("GRAD_OUTPUT_CONTIGUOUS_ASSUMED", "SUM_OF_FIRST_WARP")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return softmax in CUDA C++ for float32, with a fault."""
    forward_fault, backward_fault = ("NONE", fault) if fault in BACKWARD else (fault, "NONE")

    def forward_launch(x: torch.Tensor, y: torch.Tensor, rows: int, cols: int) -> None:
        KERNELS.launch(
            "softmax_forward_kernel", forward_fault, min(rows, BLOCKS), THREADS, x, y, rows, cols, *x.stride()
        )

    def backward_launch(grad_output: torch.Tensor, y: torch.Tensor, grad_x: torch.Tensor, rows: int, cols: int) -> None:
        strides = grad_output.stride()
        KERNELS.launch(
            "softmax_backward_kernel", backward_fault, min(rows, BLOCKS), THREADS,
            grad_output, y, grad_x, rows, cols, *strides,
        )  # fmt: skip

    return wired(forward_launch, backward_launch)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("softmax", in_triton, in_cuda, right_on="two_columns")
    written = {"check": memory_is_respected, "says": UNWRITTEN}
    slope = {"check": backward_agrees, "says": GRADIENT}
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    examples = softmax.examples
    return (
        of_triton("other_is_zero", right_on=whole_block),
        of_triton("columns_past_a_block", source="https://github.com/facebookresearch/xformers/issues/785"),
        of_triton("last_block_only"),
        of_triton("no_maximum"),
        of_triton("maximum_from_a_finite_number", source="https://github.com/flashinfer-ai/flashinfer/pull/4401"),
        of_triton("maximum_of_magnitudes", right_on="one_column"),
        of_triton("sum_not_rescaled"),
        of_triton("maximum_not_kept", source="https://github.com/KarhouTam/cuda-kernels/issues/1"),
        of_triton(
            "infinity_less_infinity",
            source="https://github.com/Dao-AILab/flash-attention/issues/1930",
            examples={"late_maximum": examples["late_maximum"]},
        ),
        of_triton("sum_in_half", right_on="equal_entries"),
        of_triton("contiguous_assumed", examples={"columns_with_gaps": examples["columns_with_gaps"]}),
        of_triton(
            "offsets_in_32_bits",
            examples=far_apart(softmax.random_rows(9, 5)),
            source="https://github.com/databricks/megablocks/pull/185",
        ),
        of_triton("rows_past_the_grid", **written),
        of_triton(
            "store_unmasked",
            check=memory_is_respected,
            says=r"wrote \d+ elements past the end",
            right_on=whole_block,
        ),
        of_triton("sum_of_last_block", **slope),
        of_triton(
            "grad_output_strided_as_y",
            **slope,
            examples={"columns_with_gaps": examples["columns_with_gaps"]},
            source="https://github.com/unslothai/unsloth/pull/10617",
        ),
        of_cuda("no_maximum"),
        of_cuda("maximum_from_zero"),
        of_cuda("maximum_of_magnitudes", right_on="one_column"),
        of_cuda(
            "maximum_of_own_columns", right_on="one_column", source="https://github.com/Infatoshi/cuda-course/issues/10"
        ),
        of_cuda("first_warp_only", right_on="columns_not_a_multiple_of_16"),
        of_cuda("barrier_missing", race, right_on=None, source="https://github.com/JustVugg/colibri/pull/1098"),
        of_cuda("buffer_used_again", race, right_on=None, source="https://github.com/ggml-org/llama.cpp/pull/26385"),
        of_cuda(
            "unwritten_slots_read",
            cuda_on_cpu.UninitialisedShared,
            right_on=None,
            source="https://github.com/RussWong/CUDATutorial/issues/6",
        ),
        of_cuda("shuffle_of_half_a_warp", cuda_on_cpu.DivergentWarp, right_on=None),
        of_cuda(
            "idle_threads_return",
            cuda_on_cpu.DivergentBarrier,
            right_on="one_past_1024_columns",
            source="https://github.com/karpathy/llm.c/issues/776",
        ),
        of_cuda(
            "barrier_in_a_branch", race, right_on=None, source="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/620"
        ),
        of_cuda("barrier_in_a_loop", cuda_on_cpu.DivergentBarrier, right_on=whole_block),
        of_cuda("row_of_fixed_length", out_of_bounds),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(softmax.random_rows(9, 5))),
        of_cuda("rows_past_the_grid", **written),
        of_cuda("contiguous_assumed", out_of_bounds),
        of_cuda("zero_where_nothing_is_left", source="https://github.com/pytorch/pytorch/pull/131060"),
        of_cuda("sum_in_half", right_on="equal_entries"),
        of_cuda("last_columns_dropped", **written),
        of_cuda("reciprocal_of_half", right_on="one_column"),
        of_cuda("grad_output_contiguous_assumed", out_of_bounds, check=backward_agrees),
        of_cuda("sum_of_first_warp", **slope, right_on="columns_not_a_multiple_of_16"),
    )


whole_block = softmax.random_rows(2, 1024)
FAULTS = _faults()
