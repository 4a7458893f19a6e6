"""Planted faults in softmax: edits of its version in Triton, and a small CUDA C++ kernel."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from fourfold.impls.softmax.torch_eager import softmax as softmax_in_torch
from fourfold.properties import softmax

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.signature import signature_of
from fourfold.checks.backward import backward_agrees
from fourfold.checks.memory import memory_is_respected

from .edits import OFFSETS_OF_ROWS, Edits
from .far_apart import far_apart
from .planted import GRADIENT, UNWRITTEN, Fault, cuda_fault, named
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

    return differentiable(("x",), forward, backward, signature_of(softmax_in_torch).check)


WHOLE_BLOCK = softmax.rows(2, cols=1024)
# fmt: off
LARGEST, TOTAL = "tl.max(x, axis=1)", "1.0 / tl.sum(terms, axis=1)"
RESCALED = "total = total * exponential(largest - reference) + tl.sum( =>"
STORE = "tl.store(output_ptr + output_at, output.to(output_ptr.dtype.element_ty)"


def _triton_faults() -> tuple[Fault, ...]:
    of, strided, two = Edits("softmax", "triton"), named(softmax, "all_sliced_columns"), {"right_on": "two_columns"}
    return (
        of("other_is_zero", 'other=float("-inf")).to(COMPUTE)\n    # => other=0.0).to(COMPUTE)\n    #',
           right_on=WHOLE_BLOCK),
        of("columns_past_a_block", f"{TOTAL} => 1.0 / tl.sum(tl.where((columns < 1024)[None, :], terms, 0.0), axis=1)",
           source="https://github.com/facebookresearch/xformers/issues/785", **two),
        of("last_block_only", f"{RESCALED} total = tl.sum(", **two),
        of("no_maximum", f"exponential(x - {LARGEST}[:, None]) => exponential(x)", **two),
        of("maximum_from_a_finite_number", f"{LARGEST} => tl.maximum({LARGEST}, -5e4)",
           source="https://github.com/flashinfer-ai/flashinfer/pull/4401", **two),
        of("maximum_of_magnitudes", f"{LARGEST} => tl.max(tl.where(mask, tl.abs(x), 0.0), axis=1)",
           right_on="cols_1"),
        of("sum_not_rescaled", f"{RESCALED} total = total + tl.sum(", **two),
        of("maximum_not_kept", "largest = new => largest = new if tile == 0 else largest",
           source="https://github.com/KarhouTam/cuda-kernels/issues/1", **two),
        of("infinity_less_infinity", 'reference = tl.where(new == float("-inf"), 0.0, new) => reference = new',
           source="https://github.com/Dao-AILab/flash-attention/issues/1930",
           examples=named(softmax, "late_maximum"), **two),
        of("sum_in_half", f"{TOTAL} => {TOTAL}.to(tl.float16).to(COMPUTE)", right_on="equal_entries"),
        of("contiguous_assumed", "[:, None] + (columns * x_column_stride)[None, :] => [:, None] + columns[None, :]",
           examples=strided, **two),
        of("offsets_in_32_bits", OFFSETS_OF_ROWS, examples=far_apart(softmax.rows(9, cols=5)),
           source="https://github.com/databricks/megablocks/pull/185", **two),
        of("rows_past_the_grid", "(cdiv(num_rows, by.block_rows),) => (min(cdiv(num_rows, by.block_rows), 4),)",
           check=memory_is_respected, says=UNWRITTEN, **two),
        of("store_unmasked", f"{STORE}, mask=mask) => {STORE})", check=memory_is_respected,
           says=r"wrote \d+ elements past the end", right_on=WHOLE_BLOCK),
        of.gradient("sum_of_last_block", "tl.sum(products + tl.sum( => tl.sum(0 * products + tl.sum(", **two),
        of.gradient("grad_output_strided_as_y", "(columns * grad_output_column_stride)[None, :] => columns[None, :]",
                    examples=strided, source="https://github.com/unslothai/unsloth/pull/10617", **two),
    )


# fmt: on
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


def _cuda_faults() -> tuple[Fault, ...]:
    of_cuda = functools.partial(cuda_fault, "softmax", in_cuda, right_on="two_columns")
    written = {"check": memory_is_respected, "says": UNWRITTEN}
    slope = {"check": backward_agrees, "says": GRADIENT}
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    return (
        of_cuda("no_maximum"),
        of_cuda("maximum_from_zero"),
        of_cuda("maximum_of_magnitudes", right_on="cols_1"),
        of_cuda(
            "maximum_of_own_columns", right_on="cols_1", source="https://github.com/Infatoshi/cuda-course/issues/10"
        ),
        of_cuda("first_warp_only", right_on="two_columns"),
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
            right_on="cols_1025",
            source="https://github.com/karpathy/llm.c/issues/776",
        ),
        of_cuda(
            "barrier_in_a_branch", race, right_on=None, source="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/620"
        ),
        of_cuda("barrier_in_a_loop", cuda_on_cpu.DivergentBarrier, right_on=WHOLE_BLOCK),
        of_cuda("row_of_fixed_length", out_of_bounds),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(softmax.rows(9, cols=5))),
        of_cuda("rows_past_the_grid", **written),
        of_cuda("contiguous_assumed", out_of_bounds, examples=named(softmax, "all_sliced_columns")),
        of_cuda("zero_where_nothing_is_left", source="https://github.com/pytorch/pytorch/pull/131060"),
        of_cuda("sum_in_half", right_on="equal_entries"),
        of_cuda("last_columns_dropped", **written),
        of_cuda("reciprocal_of_half", right_on="cols_1"),
        of_cuda(
            "grad_output_contiguous_assumed",
            out_of_bounds,
            check=backward_agrees,
            examples=named(softmax, "all_sliced_columns"),
        ),
        of_cuda("sum_of_first_warp", **slope, right_on="two_columns"),
    )


FAULTS = (*_triton_faults(), *_cuda_faults())
