"""Planted faults in layer_norm, in small Triton and CUDA C++ kernels."""

from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from fourfold.impls.layer_norm.arguments import check_layer_norm
from fourfold.impls.layer_norm.operators import statistics_dtype
from fourfold.properties import layer_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.repeatability import repeats_bit_for_bit

from .far_apart import far_apart
from .planted import GRADIENT, Fault, kernel_faults
from .planted_cuda import Planted
from .planted_layer_norm import NAMES, one_row
from .steps import Implementation, differentiable

Tensor = torch.Tensor
# The rows per program in the partial sums of the gradients of weight and bias.
ROWS = 4


def wired(forward_launch: Callable, backward_launch: Callable) -> Implementation:
    """Make an implementation from launches on two axes, rows and cols.

    Args:
        forward_launch: takes ``(x, weight, bias, y, eps)`` with x [rows, cols]; returns mean and deviation [rows].
        backward_launch: takes ``(grad_output, x, weight, mean, deviation)``, the first two [rows, cols]; returns the
            gradients.
    """

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])

    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            forward_launch(as_rows(x), weight, bias, y, eps)
        return y

    def backward(grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple:
        if not x.numel():
            return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        rows = as_rows(x)
        mean, deviation = forward_launch(rows, weight, bias, torch.empty_like(y), eps)
        of_x, of_weight, of_bias = backward_launch(as_rows(grad), rows, weight, mean, deviation)
        return of_x.view(x.shape), of_weight, of_bias

    return differentiable(NAMES, forward, backward, check_layer_norm, eps=1e-5)


@triton.jit
def layer_norm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, deviation_ptr,
    cols, row_stride, col_stride, weight_stride, bias_stride, eps,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row. It reads the row three times, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    eps = tl.full((), eps, COMPUTE)
    num = tl.full((), cols, COMPUTE)
    end = cols
    if FAULT == "columns_past_a_block":
        end = tl.minimum(cols, BLOCK)
    total = tl.full((), 0.0, COMPUTE)
    squares = tl.full((), 0.0, COMPUTE)
    for start in range(0, end, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=0.0).to(COMPUTE)
        total += tl.sum(x, axis=0)
        squares += tl.sum(x * x, axis=0)
        if FAULT == "sum_in_half":
            total = total.to(tl.float16).to(COMPUTE)
    mean = total / num
    variance = squares / num - mean * mean
    if FAULT != "square_of_mean":
        squares = tl.full((), 0.0, COMPUTE)
        for start in range(0, end, BLOCK):
            at = start + lanes
            x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=0.0).to(COMPUTE)
            centred = x - mean
            if FAULT != "padding_in_the_variance":
                centred = tl.where(at < cols, centred, 0.0)
            squares += tl.sum(centred * centred, axis=0)
        variance = squares / num
    if FAULT == "variance_of_a_sample":
        variance = squares / tl.maximum(num - 1, 1)
    deviation = tl.sqrt(variance + eps)
    if FAULT == "eps_outside_the_root":
        deviation = tl.sqrt(variance) + eps
    if FAULT == "stride_dropped_in_last_pass":
        col_stride = 1
    if FAULT == "weight_contiguous_assumed":
        weight_stride, bias_stride = 1, 1
    for start in range(0, cols, BLOCK):
        at = start + lanes
        mask = at < cols
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        weight = tl.load(weight_ptr + at * weight_stride, mask=mask, other=0.0).to(COMPUTE)
        bias = tl.load(bias_ptr + at * bias_stride, mask=mask, other=0.0).to(COMPUTE)
        y = ((x - mean) / deviation * weight + bias).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * cols + at, y, mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(deviation_ptr + row, deviation)


@triton.jit
def layer_norm_backward_kernel(
    grad_output_ptr, x_ptr, weight_ptr, mean_ptr, deviation_ptr, grad_x_ptr, of_weight_ptr, of_bias_ptr,
    rows, cols, grad_row_stride, grad_col_stride, row_stride, col_stride, weight_stride,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns ROWS consecutive rows of at most BLOCK columns, and stores their share of both sums.
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK).to(tl.int64)
    mask = at < cols
    num = tl.full((), cols, COMPUTE)
    if FAULT == "grad_output_contiguous_assumed":
        grad_row_stride, grad_col_stride = cols, 1
    weight = tl.load(weight_ptr + at * weight_stride, mask=mask, other=0.0).to(COMPUTE)
    of_weight = tl.zeros((BLOCK,), COMPUTE)
    of_bias = tl.zeros((BLOCK,), COMPUTE)
    for row in range(program * ROWS, tl.minimum((program + 1) * ROWS, rows)):
        grad = tl.load(grad_output_ptr + row * grad_row_stride + at * grad_col_stride, mask=mask, other=0.0).to(COMPUTE)
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=mask, other=0.0).to(COMPUTE)
        mean, deviation = tl.load(mean_ptr + row), tl.load(deviation_ptr + row)
        normal = tl.where(mask, (x - mean) / deviation, 0.0)
        inner = grad * weight
        mean_grad = tl.sum(inner, axis=0) / num
        mean_product = tl.sum(inner * normal, axis=0) / num
        if FAULT == "mean_over_the_block":
            mean_grad = tl.sum(inner, axis=0) / BLOCK
        if FAULT == "product_left_out":
            mean_product = tl.full((), 0.0, COMPUTE)
        grad_x = ((inner - mean_grad - normal * mean_product) / deviation).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * cols + at, grad_x, mask=mask)
        of_weight += grad * normal
        of_bias += grad
    share = program * cols
    if FAULT == "shares_in_one_place":
        share = program * 0
    tl.store(of_weight_ptr + share + at, of_weight, mask=mask)
    tl.store(of_bias_ptr + share + at, of_bias, mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return layer_norm in Triton for any dtype, with a fault."""

    def forward_launch(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, cols = x.shape
        statistics = torch.empty((2, rows), dtype=statistics_dtype(x.dtype), device=x.device)
        with triton_launch.on(x.device):
            layer_norm_forward_kernel[(rows,)](
                x, weight, bias, y, *statistics, cols, *x.stride(), *weight.stride(), *bias.stride(), eps,
                FAULT=fault, COMPUTE=triton_launch.COMPUTE[x.dtype], BLOCK=1024,
            )  # fmt: skip
        return statistics[0], statistics[1]

    def backward_launch(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor) -> tuple:
        rows, cols = x.shape
        programs = triton.cdiv(rows, ROWS)
        grad_x = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        make = torch.zeros if fault == "shares_in_one_place" else torch.empty
        shares = make((2, programs, cols), dtype=mean.dtype, device=x.device)
        with triton_launch.on(x.device):
            layer_norm_backward_kernel[(programs,)](
                grad, x, weight, mean, deviation, grad_x, shares[0], shares[1], rows, cols,
                *grad.stride(), *x.stride(), *weight.stride(), FAULT=fault, COMPUTE=triton_launch.COMPUTE[x.dtype],
                ROWS=ROWS, BLOCK=triton.next_power_of_2(cols),
            )  # fmt: skip
        if fault == "share_of_last_rows_dropped" and programs > 1:
            shares = shares[:, : rows // ROWS]
        of_weight, of_bias = shares.sum(1).to(x.dtype)
        return grad_x, of_weight, of_bias

    return wired(forward_launch, backward_launch)


KERNELS = Planted(
    Path(__file__).parent / "planted_layer_norm.cu",
    "layer_norm_forward_kernel", "layer_norm_backward_kernel", "layer_norm_parameters_kernel",
)  # fmt: skip
THREADS = 64
SPREAD = ("ADDED_WITHOUT_ATOMICS", "ADDED_ATOMICALLY")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return layer_norm in CUDA C++ for float32, with a fault."""

    def forward_launch(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, cols = x.shape
        mean, deviation = torch.empty((2, rows), device=x.device)
        KERNELS.launch(
            "layer_norm_forward_kernel", fault, rows, THREADS,
            x, weight.contiguous(), bias.contiguous(), y, mean, deviation, cols, *x.stride(), eps,
        )  # fmt: skip
        return mean, deviation

    def backward_launch(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor) -> tuple:
        rows, cols = x.shape
        grad_x = torch.empty((rows, cols), device=x.device)
        strides = *grad.stride(), *x.stride()
        KERNELS.launch(
            "layer_norm_backward_kernel", fault, rows, THREADS,
            grad, x, weight.contiguous(), mean, deviation, grad_x, cols, *strides,
        )  # fmt: skip
        of_weight, of_bias = torch.zeros((2, cols), device=x.device)
        rows_of_block = 2 if fault in SPREAD else rows
        grid = -(-cols // THREADS), -(-rows // rows_of_block)
        KERNELS.launch(
            "layer_norm_parameters_kernel", fault, grid, THREADS,
            grad, x, mean, deviation, of_weight, of_bias, rows, cols, rows_of_block, *strides,
        )  # fmt: skip
        return grad_x, of_weight, of_bias

    return wired(forward_launch, backward_launch)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("layer_norm", in_triton, in_cuda, right_on="one_column")
    slope = {"check": backward_agrees, "says": GRADIENT}
    out_of_bounds, race = cuda_on_cpu.OutOfBounds, cuda_on_cpu.Race
    examples = properties.examples
    strided = {"columns_with_gaps": examples["columns_with_gaps"]}
    whole_block, a_warp_each = properties.rows(2, 1024), properties.rows(2, 64)
    return (
        of_triton("square_of_mean", right_on=one_row, source="https://github.com/pytorch/pytorch/pull/55044"),
        of_triton(
            "padding_in_the_variance", right_on=whole_block, source="https://github.com/triton-lang/triton/issues/9838"
        ),
        of_triton("columns_past_a_block", source="https://github.com/facebookresearch/xformers/issues/785"),
        of_triton("sum_in_half", right_on=one_row),
        of_triton("offsets_in_32_bits", examples=far_apart(properties.rows(9, 5))),
        of_triton("variance_of_a_sample"),
        of_triton("eps_outside_the_root", source="https://github.com/tracel-ai/burn/issues/2185"),
        of_triton(
            "stride_dropped_in_last_pass", examples=strided, source="https://github.com/ModelTC/LightLLM/issues/1467"
        ),
        of_triton(
            "weight_contiguous_assumed",
            examples={"weight_and_bias_strided": examples["weight_and_bias_strided"]},
        ),
        of_triton(
            "grad_output_contiguous_assumed",
            **slope,
            examples=strided,
            source="https://github.com/unslothai/unsloth/pull/10675",
        ),
        of_triton("mean_over_the_block", **slope, right_on=one_row),
        of_triton("product_left_out", **slope),
        of_triton(
            "share_of_last_rows_dropped",
            **slope,
            right_on="two_columns",
            source="https://github.com/BobMcDear/attorch/issues/18",
        ),
        of_triton("shares_in_one_place", **slope, right_on="two_columns"),
        of_cuda("square_of_mean", right_on=one_row, source="https://github.com/microsoft/onnxruntime/pull/31973"),
        of_cuda("variance_of_sample"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(properties.rows(9, 5))),
        of_cuda("eps_outside_the_root"),
        of_cuda("eps_typed_in", right_on=one_row),
        of_cuda("counts_taken_as_equal", right_on=a_warp_each),
        # NaN for one column of huge numbers: this repository's own kernels are held to a number there.
        of_cuda("empty_parts_merged", right_on=one_row, documented_ties=True),
        of_cuda("barrier_missing", race, right_on=None),
        of_cuda("first_warp_only", right_on="columns_not_a_multiple_of_16"),
        of_cuda("stride_dropped_in_second_pass", out_of_bounds),
        of_cuda("weight_of_first_columns", right_on="columns_not_a_multiple_of_16"),
        of_cuda("row_of_fixed_length", out_of_bounds),
        of_cuda("mean_of_gradient_left_out", **slope, right_on=None),
        of_cuda("grad_output_contiguous_assumed", out_of_bounds, check=backward_agrees),
        of_cuda("last_block_of_rows_dropped", **slope),
        of_cuda("first_block_of_rows_only", **slope),
        of_cuda("added_without_atomics", race, check=backward_agrees, right_on=one_row),
        of_cuda(
            "added_atomically",
            check=repeats_bit_for_bit,
            says=r"gradient of (weight|bias) differs between two calls",
            right_on=one_row,
            only_on_cpu=True,
            source="https://github.com/karpathy/llm.c/pull/445",
        ),
    )


FAULTS = _faults()
