"""Planted faults in rms_norm: in torch, and in small Triton and CUDA C++ kernels."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.impls.rms_norm.arguments import check_rms_norm
from fourfold.properties import rms_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.gradcheck import gradcheck
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, Fault, kernel_faults, law
from .planted_cuda import Planted
from .steps import Implementation, differentiable, in_compute_dtype

Tensor = torch.Tensor
NAMES = ("x", "weight")
# Rows of a program in the partial sums of weight's gradient.
ROWS = 4


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def root_of(x: Tensor, eps: float) -> Tensor:
    return (mean(x.square()) + eps).sqrt()


def of_x(grad: Tensor, weight: Tensor, normal: Tensor, root: Tensor) -> Tensor:
    inner = grad * weight
    return (inner - normal * mean(inner * normal)) / root


def rows_of(terms: Tensor) -> Tensor:
    return terms.flatten(0, -2) if terms.ndim > 1 else terms[None]


def of_weight(grad: Tensor, normal: Tensor, of_x: Tensor) -> Tensor:
    return rows_of(grad * normal).sum(0)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of rms_norm that a fault may replace."""

    compute: Callable = in_compute_dtype
    root: Callable = root_of
    output: Callable = lambda x, root, weight: x / root * weight
    # Steps of the gradient, which uses the right steps of the output.
    of_x: Callable = of_x
    of_weight: Callable = of_weight


def rms_norm(validate: Callable[..., None] = check_rms_norm, **changes: Any) -> Implementation:
    """Return rms_norm with some steps changed."""
    steps = Steps(**changes)

    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = steps.compute(x)
        return steps.output(wide, steps.root(wide, eps), steps.compute(weight)).to(x.dtype)

    def backward(grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = in_compute_dtype(x)
        root = root_of(wide, eps)
        grad, normal = in_compute_dtype(grad), wide / root
        grad_x = steps.of_x(grad, in_compute_dtype(weight), normal, root)
        return grad_x.to(x.dtype), steps.of_weight(grad, normal, grad_x).to(x.dtype)

    return differentiable(NAMES, forward, backward, validate, eps=1e-6)


def scaled_by_the_largest(x: Tensor, eps: float) -> Tensor:
    """Divide by the largest magnitude, lest squares overflow, and add eps to the mean of the scaled squares."""
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(())
    return root_of(x / largest, eps) * largest


def over_all_but_the_last_column(x: Tensor, eps: float) -> Tensor:
    return root_of(x[..., :-1], eps) if x.shape[-1] > 1 else root_of(x, eps)


def of_all_rows(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean() + eps).sqrt() if x.numel() else root_of(x, eps)


def first_row_left_out(grad: Tensor, normal: Tensor, of_x: Tensor) -> Tensor:
    terms = rows_of(grad * normal)
    return terms[1:].sum(0) if len(terms) > 1 else terms.sum(0)


def summed_in_bfloat16(grad: Tensor, normal: Tensor, of_x: Tensor) -> Tensor:
    """Sum terms of bfloat16, tile by tile, in bfloat16."""
    terms = rows_of(grad * normal).bfloat16()
    total = terms.new_zeros(normal.shape[-1])
    for tile in terms.split(16):
        total = total + tile.sum(0)
    return total


def wired(forward_launch: Callable[..., Tensor], backward_launch: Callable[..., tuple]) -> Implementation:
    """Make an implementation from launches on two axes, rows and cols.

    Args:
        forward_launch: takes ``(x, weight, output, eps)`` with x [rows, cols]; returns rstd [rows].
        backward_launch: takes ``(grad_output, x, weight, rstd)``, the first two [rows, cols]; returns the gradients.
    """

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])

    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if output.numel():
            forward_launch(as_rows(x), weight, output, eps)
        return output

    def backward(grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not x.numel():
            return torch.zeros_like(x), torch.zeros_like(weight)
        rstd = forward_launch(as_rows(x), weight, torch.empty_like(output), eps)
        grad_x, grad_weight = backward_launch(as_rows(grad), as_rows(x), weight, rstd)
        return grad_x.view(x.shape), grad_weight

    return differentiable(NAMES, forward, backward, check_rms_norm, eps=1e-6)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, weight_ptr, output_ptr, rstd_ptr, cols, row_stride, col_stride, weight_stride, eps,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row. It reads the row twice, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    num = tl.full((), cols, COMPUTE)
    end = cols
    if FAULT == "columns_past_a_block":
        end = tl.minimum(cols, BLOCK)
    if FAULT == "columns_past_16_bits":
        end = cols % 65536
    squares = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, end, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=0.0).to(COMPUTE)
        if FAULT == "last_load_not_masked":
            x = tl.where(at < cols, x, 1.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / num + tl.full((), eps, COMPUTE))
    if FAULT == "eps_outside_the_root":
        rstd = 1 / (tl.sqrt(tl.sum(squares, axis=0) / num) + tl.full((), eps, COMPUTE))
    if FAULT == "rstd_in_half":
        rstd = rstd.to(tl.float16).to(COMPUTE)
    if FAULT == "stride_dropped_in_second_pass":
        col_stride = 1
    for start in range(0, cols, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row * row_stride + at * col_stride, mask=at < cols, other=0.0).to(COMPUTE)
        weight = tl.load(weight_ptr + at * weight_stride, mask=at < cols, other=0.0).to(COMPUTE)
        tl.store(output_ptr + row * cols + at, (x * rstd * weight).to(output_ptr.dtype.element_ty), mask=at < cols)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def rms_norm_backward_kernel(
    grad_output_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, partial_ptr, rows, cols,
    grad_row_stride, grad_col_stride, x_row_stride, x_col_stride, weight_stride,
    FAULT: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns ROWS consecutive rows, and sums weight's gradient over them.
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    mask = lanes < cols
    weight = tl.load(weight_ptr + lanes * weight_stride, mask=mask, other=0.0).to(COMPUTE)
    if FAULT == "grad_output_contiguous_assumed":
        grad_row_stride, grad_col_stride = cols, 1
    sums = tl.zeros((BLOCK,), COMPUTE)
    for k in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + k
        last = rows - 1
        here = mask & (row < rows)
        at = tl.minimum(row, last)
        if FAULT == "rows_past_the_end_repeated":
            # The last row is read again in place of those that there are not.
            here = mask
        x = tl.load(x_ptr + at * x_row_stride + lanes * x_col_stride, mask=here, other=0.0).to(COMPUTE)
        grad_at = at * grad_row_stride + lanes * grad_col_stride
        grad = tl.load(grad_output_ptr + grad_at, mask=here, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + at)
        normal = x * rstd
        inner = grad * weight
        product = tl.sum(inner * normal, axis=0) / tl.full((), cols, COMPUTE)
        if FAULT == "product_over_the_block":
            product = tl.sum(inner * normal, axis=0) / BLOCK
        grad_x = (inner - normal * product) * rstd
        tl.store(grad_x_ptr + at * cols + lanes, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask & (row < rows))
        sums += grad * normal
    tl.store(partial_ptr + tl.program_id(0) * cols + lanes, sums, mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return rms_norm in Triton for any dtype, with a fault."""

    def forward_launch(x: Tensor, weight: Tensor, output: Tensor, eps: float) -> Tensor:
        rows, cols = x.shape
        compute = triton_launch.COMPUTE[x.dtype]
        rstd = torch.empty(rows, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
        with triton_launch.on(x.device):
            rms_norm_forward_kernel[(rows,)](
                x, weight, output, rstd, cols, *x.stride(), *weight.stride(), eps,
                FAULT=fault, COMPUTE=compute, BLOCK=1024,
            )  # fmt: skip
        return rstd

    def backward_launch(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        rows, cols = x.shape
        programs = triton.cdiv(rows, ROWS)
        grad_x = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
        partial = torch.empty((programs, cols), dtype=rstd.dtype, device=x.device)
        with triton_launch.on(x.device):
            rms_norm_backward_kernel[(programs,)](
                grad, x, weight, rstd, grad_x, partial, rows, cols, *grad.stride(), *x.stride(), *weight.stride(),
                FAULT=fault, COMPUTE=triton_launch.COMPUTE[x.dtype], ROWS=ROWS, BLOCK=triton.next_power_of_2(cols),
            )  # fmt: skip
        if fault == "partials_in_bfloat16":
            partial = partial.bfloat16()
        return grad_x, partial.sum(0).to(x.dtype)

    return wired(forward_launch, backward_launch)


KERNELS = Planted(
    Path(__file__).with_suffix(".cu"), "rms_norm_forward_kernel", "rms_norm_backward_kernel", "rms_norm_weight_kernel"
)
THREADS = 64


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return rms_norm in CUDA C++ for float32, with a fault."""

    def forward_launch(x: Tensor, weight: Tensor, output: Tensor, eps: float) -> Tensor:
        rows, cols = x.shape
        rstd = torch.empty(rows, device=x.device)
        arguments = (x, weight.contiguous(), output, rstd, cols, *x.stride(), eps)
        KERNELS.launch("rms_norm_forward_kernel", fault, rows, THREADS, *arguments)
        return rstd

    def backward_launch(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        rows, cols = x.shape
        grad_x, grad_weight = (torch.empty(shape, device=x.device) for shape in ((rows, cols), (cols,)))
        strides = (*grad.stride(), *x.stride())
        arguments = (grad, x, weight.contiguous(), rstd, grad_x, cols, *strides)
        KERNELS.launch("rms_norm_backward_kernel", fault, rows, THREADS, *arguments)
        columns = -(-cols // THREADS)
        KERNELS.launch(
            "rms_norm_weight_kernel", fault, columns, THREADS, grad, x, rstd, grad_weight, rows, cols, *strides
        )
        return grad_x, grad_weight

    return wired(forward_launch, backward_launch)


def positive_rows(dtype: DType) -> Case:
    """Return two rows of positive numbers, under equal weights."""
    x = np.linspace(1, 3, 32).reshape(2, 16).astype(dtype.numpy)
    return Case({"x": x, "weight": np.ones(16, dtype.numpy)}, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-6})


def one_row(dtype: DType) -> Case:
    """Return the first of these rows."""
    case = positive_rows(dtype)
    return Case({**case.inputs, "x": case["x"][:1]}, case.grad_output[:1], case.parameters)


def without_cotangent(dtype: DType) -> Case:
    """Return one row whose gradients are 0."""
    case = one_row(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


def _of_torch() -> tuple[Fault, ...]:
    def of(
        name: str, check: Callable, says: str, right_on: Any = one_row, dtype: str = "float32", source: Any = None,
        **changes: Any,
    ) -> Fault:  # fmt: skip
        make = functools.partial(rms_norm, **changes)
        return Fault(
            name=name, operation="rms_norm", check=check, make=make, says=says, right_on=right_on, dtype=dtype,
            source=source,
        )  # fmt: skip

    def eps_typed_in(x: Tensor, eps: float) -> Tensor:
        return root_of(x, 1e-6)

    forward, backward, left = forward_agrees, backward_agrees, r"left side.* is .*expected"
    absolute = {"output": lambda x, root, weight: x.abs() / root * weight}
    roll = {"output": lambda x, root, weight: x / root * weight.roll(1, 0)}
    no_product = {"of_x": lambda grad, weight, normal, root: grad * weight / root}
    no_weight = {"of_x": lambda grad, weight, normal, root: of_x(grad, torch.ones_like(weight), normal, root)}
    return (
        of("eps_typed_in", forward, OUTPUT, root=eps_typed_in, source="https://github.com/apache/tvm/pull/15856"),
        of(
            "divided_by_the_reciprocal",
            forward,
            OUTPUT,
            None,
            output=lambda x, root, weight: x * root * weight,
            source="https://github.com/mosaicml/llm-foundry/pull/372",
        ),
        of(
            "eps_added_to_scaled_squares",
            forward,
            OUTPUT,
            root=scaled_by_the_largest,
            source="https://github.com/apple/coremltools/pull/2822",
        ),
        of(
            "root_in_bfloat16",
            forward,
            OUTPUT,
            "rows_of_zeros",
            "bfloat16",
            root=lambda x, eps: root_of(x, eps).bfloat16().to(x.dtype),
            source="https://github.com/amd/IRON/pull/139",
        ),
        of(
            "input_overwritten",
            forward,
            "was modified|changed",
            "rows_of_zeros",
            # A float32 input needs no conversion, and is no copy.
            output=lambda x, root, weight: x.div_(root) * weight,
            source="https://github.com/GeeeekExplorer/nano-vllm/issues/170",
        ),
        of("squares_in_half", forward, OUTPUT, "rows_of_zeros", "float16", compute=lambda x: x),
        of("root_of_all_rows", forward, OUTPUT, root=of_all_rows),
        of("weight_of_the_next_column", forward, OUTPUT, **roll),
        of("product_left_out", backward, GRADIENT, without_cotangent, **no_product),
        of("product_left_out", gradcheck, "gradcheck: Jacobian mismatch", None, "float64", **no_product),
        of(
            "weight_left_out",
            backward,
            GRADIENT,
            source="https://github.com/karpathy/llm.c/pull/763",
            **no_weight,
        ),
        of(
            "no_gradient",
            backward,
            GRADIENT,
            without_cotangent,
            of_x=lambda grad, weight, normal, root: 0 * grad,
            source="https://github.com/huggingface/candle/issues/2168",
        ),
        of(
            "cotangent_overwritten_by_gradient",
            backward,
            "gradient of weight",
            without_cotangent,
            of_weight=lambda grad, normal, of_x: of_weight(of_x, normal, of_x),
            source="https://github.com/unslothai/unsloth/pull/4550",
        ),
        of(
            "weight_summed_in_bfloat16",
            backward,
            "gradient of weight",
            without_cotangent,
            "bfloat16",
            of_weight=summed_in_bfloat16,
            source="https://github.com/linkedin/Liger-Kernel/pull/950",
        ),
        of("unchecked", declared_errors_are_raised, "in place of|was raised", None, validate=lambda *_, **__: None),
        of("law", law(properties.a_sign_goes_through), left, "rows_of_zeros", **absolute),
        of("law", law(properties.scaling_a_row_scales_the_deviation_alone), left, None, root=eps_typed_in),
        of("law", law(properties.columns_may_change_places), left, **roll),
        of("law", law(properties.normalized_rows_have_at_most_unit_mean_square), left, "one_column",
           root=over_all_but_the_last_column),
        of("law", law(properties.gradient_of_weight_weighs_the_normalized_rows), left, of_weight=first_row_left_out),
        of("law", law(properties.a_row_does_not_see_the_others), left, root=of_all_rows),
        of("law", law(properties.gradients_of_two_batches_add_up), left, of_weight=first_row_left_out),
    )  # fmt: skip


def _of_kernels() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("rms_norm", in_triton, in_cuda, right_on=one_row)
    slope = {"check": backward_agrees, "says": GRADIENT}
    strided = {"columns_with_gaps": properties.examples["columns_with_gaps"]}
    whole_block = properties.rows(4, 1024)
    apart = far_apart(properties.rows(9, 5))
    return (
        of_triton("eps_outside_the_root", right_on=None, source="https://github.com/tile-ai/tilelang/pull/1243"),
        of_triton("rstd_in_half", right_on="rows_of_zeros"),
        of_triton("last_load_not_masked", right_on=whole_block),
        of_triton("columns_past_a_block"),
        of_triton(
            "columns_past_16_bits",
            examples={"one_past_65536_columns": properties.examples["one_past_65536_columns"]},
        ),
        of_triton("offsets_in_32_bits", examples=apart),
        of_triton(
            "stride_dropped_in_second_pass", examples=strided, source="https://github.com/ModelTC/LightLLM/issues/1467"
        ),
        of_triton(
            "grad_output_contiguous_assumed",
            **slope,
            examples=strided,
            source="https://github.com/unslothai/unsloth/pull/10617",
        ),
        of_triton("rows_past_the_end_repeated", **slope, right_on=whole_block),
        of_triton("product_over_the_block", **slope),
        of_triton("partials_in_bfloat16", **slope, right_on=without_cotangent),
        of_cuda("eps_outside_the_root", right_on=None),
        of_cuda("barrier_missing", cuda_on_cpu.Race, right_on=None),
        of_cuda("first_warp_only", right_on=None),
        of_cuda("tail_of_vectors_dropped", right_on=one_row),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=apart),
        of_cuda("grad_output_contiguous_assumed", cuda_on_cpu.OutOfBounds, check=backward_agrees),
        of_cuda("mean_left_to_a_sum", **slope, right_on=without_cotangent),
        of_cuda("weight_never_written", **slope, right_on=None, source="https://github.com/paiml/trueno/pull/178"),
    )


FAULTS = (*_of_torch(), *_of_kernels())
