"""Planted faults in add_rms_norm: in torch, and in small kernels of Triton and CUDA C++ whose gradients are torch's."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from fourfold.impls.add_rms_norm.arguments import check_add_rms_norm
from fourfold.properties import add_rms_norm as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.launch import next_power_of_2
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.memory import memory_is_respected
from fourfold.checks.outputs import of_all, outputs_fit
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .far_apart import far_apart
from .planted import GRADIENT, OUTPUT, UNWRITTEN, Check, Fault, kernel_faults, law, named
from .planted_cuda import Planted
from .planted_rms_norm import of_weight, of_x, root_of
from .steps import Implementation, in_compute_dtype

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor]
THREADS = 64


class Wired(torch.autograd.Function):
    """add_rms_norm from a forward and a backward pass, of which either may be wrong."""

    @staticmethod
    def forward(ctx: Any, passes: tuple[Callable, Callable], eps: float, *tensors: Tensor) -> Outputs:
        y, residual_out = passes[0](*tensors, eps)
        ctx.save_for_backward(*tensors)
        ctx.backward, ctx.eps = passes[1], eps
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_residual_out: Tensor) -> tuple:
        x, residual, weight = ctx.saved_tensors
        wide = [in_compute_dtype(each) for each in (grad_y, grad_residual_out, x + residual, x, weight)]
        gradients = ctx.backward(*wide, ctx.eps)
        return (None, None, *(gradient.to(x.dtype) for gradient in gradients))


def through_norm(grad_y: Tensor, total: Tensor, weight: Tensor, eps: float) -> Tensor:
    root = root_of(total, eps)
    return of_x(grad_y, weight, total / root, root)


def right_gradients(grad_y: Tensor, grad_sum: Tensor, total: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple:
    both = through_norm(grad_y, total, weight, eps) + grad_sum
    return both, both, of_weight(grad_y, total / root_of(total, eps), both)


def right(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    residual_out = x + residual
    return norm_of(residual_out, weight, eps), residual_out


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = in_compute_dtype(x)
    return (wide / root_of(wide, eps) * in_compute_dtype(weight)).to(x.dtype)


def of_passes(
    forward: Callable[..., Outputs] = right,
    backward: Callable[..., tuple] = right_gradients,
    validate: Callable[..., None] = check_add_rms_norm,
) -> Implementation:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Outputs:
        validate(x, residual, weight, eps)
        return Wired.apply((forward, backward), eps, x, residual, weight)

    return add_rms_norm  # type: ignore[return-value]


def norm_of_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    return norm_of(x, weight, eps), x + residual


def root_of_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    wide = in_compute_dtype(x)
    return ((wide + residual) / root_of(wide, eps) * weight).to(x.dtype), x + residual


def both_normalized(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    """The residual is another name of x, which is then normalized in place: see conch in docs/public_kernels.md."""
    y = norm_of(x + residual, weight, eps)
    return y, y.clone()


def x_added_to_itself(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    return right(x, x, weight, eps)


def truncated(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    """The sum loses its last bits, as bfloat16 is the upper half of float32."""
    bits = (x.float() + residual.float()).view(torch.int32) & -65536
    return right(x, residual, weight, eps)[0], bits.view(torch.float32).to(x.dtype)


def residual_overwritten(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    found = right(x, residual, weight, eps)
    if 0 not in residual.stride():
        residual.detach().copy_(found[1])
    return found


def residual_out_is_the_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    return right(x, residual, weight, eps)[0], residual.clone()


def magnitudes(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    y, residual_out = right(x, residual, weight, eps)
    return y.abs(), residual_out


def of_all_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    residual_out = x + residual
    if not residual_out.numel():
        return right(x, residual, weight, eps)
    return residual_out / (residual_out.square().mean() + eps).sqrt() * weight, residual_out


def residual_counts_half(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
    return right(x, residual, weight, eps)[0], x + residual / 2


def cotangents_added_before_the_norm(grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple:
    return right_gradients(grad_y + grad_sum, torch.zeros_like(grad_sum), *rest)


def skip_left_out(grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple:
    return right_gradients(grad_y, torch.zeros_like(grad_sum), *rest)


def skip_counted_twice(grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple:
    return right_gradients(grad_y, 2 * grad_sum, *rest)


def no_residual_without_its_output(grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple:
    of_sum, of_residual, of_weight = right_gradients(grad_y, grad_sum, *rest)
    return of_sum, of_residual * bool(grad_sum.any()), of_weight


def residual_passed_by_the_norm(grad_y: Tensor, grad_sum: Tensor, *rest: Any) -> tuple:
    of_sum, _, of_weight = right_gradients(grad_y, grad_sum, *rest)
    return of_sum, grad_sum, of_weight


def weight_of_x_alone(grad_y: Tensor, grad_sum: Tensor, total: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple:
    both, _, _ = right_gradients(grad_y, grad_sum, total, x, weight, eps)
    return both, both, of_weight(grad_y, x / root_of(total, eps), both)


def mean_left_out(grad_y: Tensor, grad_sum: Tensor, total: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple:
    root = root_of(total, eps)
    both = grad_y * weight / root + grad_sum
    return both, both, of_weight(grad_y, total / root, both)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, cols, x_row_stride, x_col_stride, residual_row_stride,
    residual_col_stride, weight_stride, eps, FAULT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program owns one row.
    row = tl.program_id(0).to(tl.int64)
    if FAULT == "offsets_in_32_bits":
        row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < cols
    if FAULT == "row_stride_of_x":
        residual_row_stride = x_row_stride
    if FAULT == "columns_adjacent":
        residual_col_stride = 1
    x = tl.load(x_ptr + row * x_row_stride + at * x_col_stride, mask=mask, other=0.0).to(C)
    residual = tl.load(residual_ptr + row * residual_row_stride + at * residual_col_stride, mask=mask, other=0.0).to(C)
    if FAULT == "residual_past_the_end":
        residual = tl.where(mask, residual, 1.0)
    total = x + residual
    if FAULT == "sum_in_float16":
        total = total.to(tl.float16).to(C)
    squared = x if FAULT == "variance_of_x" else total
    rstd = tl.rsqrt(tl.sum(squared * squared, axis=0) / tl.full((), cols, C) + tl.full((), eps, C))
    weight = tl.load(weight_ptr + at * weight_stride, mask=mask, other=0.0).to(C)
    y = total * rstd * weight
    tl.store(y_ptr + row * cols + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if FAULT == "normalized_is_stored_as_the_sum":
        total = total * rstd
    tl.store(sum_ptr + row * cols + at, total.to(sum_ptr.dtype.element_ty), mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return add_rms_norm in Triton for any dtype, with a fault. It normalizes the sum before that is rounded."""

    def forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
        y, residual_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        if y.numel():
            flat_x, flat_residual = (each.reshape(-1, x.shape[-1]) for each in (x, residual))
            with triton_launch.on(x.device):
                add_rms_norm_kernel[(len(flat_x),)](
                    *(flat_x, flat_residual, weight, y, residual_out, x.shape[-1]),
                    *(*flat_x.stride(), *flat_residual.stride(), *weight.stride(), eps),
                    FAULT=fault,
                    C=triton_launch.COMPUTE[x.dtype],
                    BLOCK=next_power_of_2(x.shape[-1]),
                )
        return y, residual_out

    return of_passes(forward)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "add_rms_norm_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return add_rms_norm in CUDA C++ for float32, with a fault."""

    def forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Outputs:
        y, residual_out = (torch.empty(x.shape, device=x.device) for _ in range(2))
        if y.numel():
            flat_x, flat_residual = (each.reshape(-1, x.shape[-1]) for each in (x, residual))
            sizes = (len(flat_x), x.shape[-1], *flat_x.stride(), *flat_residual.stride(), eps)
            given = (flat_x, flat_residual, weight.contiguous(), y, residual_out)
            KERNELS.launch("add_rms_norm_kernel", fault, len(flat_x), THREADS, *given, *sizes)
        return y, residual_out

    return of_passes(forward)


def whole(dtype: DType) -> Case:
    """Return a row of small whole numbers, which any dtype has."""
    x = np.arange(16.0)[None].astype(dtype.numpy)
    inputs = {"x": x, "residual": x[:, ::-1] * 2, "weight": np.ones(16, dtype.numpy)}
    return Case(inputs, np.ones((1, 16), dtype.numpy), {"eps": 1e-6})


def residual_of_zeros(dtype: DType) -> Case:
    """Return a row to which nothing is added."""
    return with_residual(dtype, 0.0)


def the_same_twice(dtype: DType) -> Case:
    """Return a row to which itself is added."""
    return with_residual(dtype, 1.0)


def with_residual(dtype: DType, share: float) -> Case:
    x = np.linspace(1, 3, 16)[None].astype(dtype.numpy)
    inputs = {"x": x, "residual": (share * x).astype(dtype.numpy), "weight": np.ones(16, dtype.numpy)}
    return Case(inputs, np.cos(4 * x).astype(dtype.numpy), {"eps": 1e-6})


def without_cotangent(dtype: DType) -> Case:
    """Return a row whose gradients are 0."""
    case = residual_of_zeros(dtype)
    return Case(case.inputs, 0 * case.grad_output, case.parameters)


def without_both_cotangents(dtype: DType) -> Case:
    """Return a row whose gradients are 0, under cotangents of both outputs."""
    return properties.with_both_cotangents(without_cotangent(dtype), dtype)


def _of_torch(name: str, check: Check, says: str, output: str = "y", right_on: Any = None, **more: Any) -> Fault:
    passes = {key: more.pop(key) for key in ("forward", "backward", "validate") if key in more}
    make = functools.partial(of_passes, **passes)
    return Fault(
        name=name, operation="add_rms_norm", check=check, make=make, says=says, output=output, right_on=right_on, **more
    )


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("add_rms_norm", in_triton, in_cuda, output="y", right_on=residual_of_zeros)
    of_torch, sums, left = _of_torch, {"output": "residual_out"}, "left side.* is .*expected"
    backward_of_both = {"check": of_all(backward_agrees), "says": GRADIENT, "output": ""}
    nine, together = far_apart(properties.rows(9, 5)), {"right_on": without_both_cotangents, **backward_of_both}
    of_y = {"check": backward_agrees, "says": GRADIENT, "right_on": without_cotangent}
    zeros = properties.examples["sums_are_zero"]
    otherwise = named(properties, "residual_lies_otherwise")
    return (
        of_torch("norm_before_the_sum", forward_agrees, OUTPUT, right_on=residual_of_zeros, forward=norm_of_x),
        of_torch("root_before_the_sum", forward_agrees, OUTPUT, right_on=residual_of_zeros, forward=root_of_x),
        of_torch("both_normalized", forward_agrees, OUTPUT, forward=both_normalized, **sums),
        of_torch(
            "x_added_to_itself", forward_agrees, OUTPUT, forward=x_added_to_itself, right_on=the_same_twice,
            source="https://github.com/NVIDIA/FasterTransformer/pull/466", **sums,
        ),
        of_torch(
            "sum_truncated", forward_agrees, OUTPUT, forward=truncated, dtype="bfloat16", right_on=residual_of_zeros,
            source="https://github.com/ROCm/aiter/issues/5151", **sums,
        ),
        of_torch("residual_overwritten", forward_agrees, "changed its input residual", forward=residual_overwritten),
        of_torch(
            "residual_out_is_the_residual", forward_agrees, OUTPUT, forward=residual_out_is_the_residual, **sums
        ),
        of_torch(
            "cotangents_added_before_the_norm", backward=cotangents_added_before_the_norm,
            source="https://github.com/Dao-AILab/quack/pull/53", **together,
        ),
        of_torch(
            "skip_left_out", backward=skip_left_out, source="https://github.com/paiml/entrenar/issues/313",
            **{**of_y, **sums},
        ),
        of_torch("skip_counted_twice", backward=skip_counted_twice, **together),
        of_torch(
            "no_residual_without_its_output", backward=no_residual_without_its_output,
            source="https://github.com/Dao-AILab/quack/pull/52", **of_y,
        ),
        of_torch(
            "residual_passed_by_the_norm", outputs_fit, "gradients of x and of residual differ", "",
            right_on=without_both_cotangents, backward=residual_passed_by_the_norm,
        ),
        of_torch("weight_of_x_alone", backward=weight_of_x_alone, **of_y),
        of_torch("mean_left_out", backward=mean_left_out, **of_y),
        of_torch(
            "unchecked", declared_errors_are_raised, "in place of|was raised", validate=lambda *_: None
        ),
        of_torch("law", law(properties.the_summands_may_change_places), left, forward=root_of_x,
                 right_on=zeros),
        of_torch("law", law(properties.a_sign_goes_through), left, forward=magnitudes, right_on=zeros),
        of_torch("law", law(properties.y_is_the_norm_of_the_sum), left, forward=of_all_rows,
                 right_on=residual_of_zeros),
        of_torch("law", law(properties.the_gradient_of_weight_weighs_the_normalized_rows), left,
                 backward=weight_of_x_alone, right_on=residual_of_zeros),
        of_torch("sums_law", law(properties.the_summands_may_change_places), left, forward=residual_counts_half,
                 right_on=the_same_twice, **sums),
        of_torch("sums_law", law(properties.nothing_is_added_to_nothing), left, forward=residual_out_is_the_residual,
                 **sums),
        of_triton("variance_of_x"),
        of_triton(
            "row_stride_of_x", examples=otherwise, right_on=residual_of_zeros,
            source="https://github.com/NVIDIA/TensorRT-LLM/pull/14810",
        ),
        of_triton("columns_adjacent", examples={"columns_with_gaps": properties.examples["columns_with_gaps"]}),
        of_triton("residual_past_the_end"),
        of_triton("sum_in_float16", examples=named(properties, "residual_is_far_larger"), right_on=whole, **sums),
        of_triton("normalized_is_stored_as_the_sum", right_on=None, **sums),
        of_triton("offsets_in_32_bits", examples=nine, source="https://github.com/vllm-project/vllm/issues/43390"),
        of_cuda("variance_of_x"),
        of_cuda("row_stride_of_x", examples=otherwise),
        of_cuda("sum_never_stored_past_a_block", check=memory_is_respected, says=UNWRITTEN, **sums),
        of_cuda("barrier_missing", cuda_on_cpu.Race, right_on=None),
        of_cuda("tail_of_vectors_dropped", right_on="many_rows_of_whole_vectors"),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=nine),
    )  # fmt: skip


FAULTS = _faults()
