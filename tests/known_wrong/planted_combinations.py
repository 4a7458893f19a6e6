"""Planted faults that need two conditions at once: layouts, alignments, long rows, special values, parameters, modes.

Each is right under every single condition. Others are wrong if inputs share their memory.
"""

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import fourfold
from fourfold import tensor, values
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.modes import modes_do_not_matter
from fourfold.checks.sharing import inputs_may_share_memory

from .edits import Edits, inserted
from .planted import Fault, Implementation
from .planted_state import as_a_candidate

Tensor = torch.Tensor
# The longest row that is computed at once.
BLOCK = 1024


def is_misaligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 != 0


def normalized(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the right layer_norm."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


# ---- alignment of one tensor among several, where all sizes are multiples of a vector


@fourfold.operation(x=tensor("... cols"), tried=False)
def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def masked_long_rows_are_zero(x: Tensor) -> Tensor:
    """Return 0 for a row of several blocks of -inf, though a row of a single block gives NaN."""
    masked = (x == -torch.inf).all(-1, keepdim=True) & (x.shape[-1] > BLOCK)
    return torch.where(masked, 0.0, x.softmax(-1))


@fourfold.operation(
    x=tensor("... cols"), weight=tensor("cols"), eps=values(1e-6, 1e-2), sizes={"cols": (1, None)}, tried=False
)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rms_weight_alone_misaligned(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Read all by vectors if the address of x alone allows it."""
    if x.numel() and x.shape[-1] % 8 == 0 and not is_misaligned(x) and is_misaligned(weight):
        weight = weight.roll(1)
    return rms_norm(x, weight, eps)


# ---- long rows and special values, parameters, modes


def rms_eps_of_long_rows(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Hard-code eps in the kernel for rows of several blocks."""
    return rms_norm(x, weight, 1e-6 if x.shape[-1] > BLOCK else eps)


# ---- Triton


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, y_offset, VECTORS: tl.constexpr, SIZE: tl.constexpr):
    # One program owns SIZE elements. By vectors, y is read from the multiple of four elements below its first one.
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    first = y_offset
    if VECTORS:
        first = (y_offset // 4) * 4
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + first + at, mask=at < n, other=0.0)
    tl.store(output_ptr + at, x + y, mask=at < n)


def one_pointer_in_triton(x: Tensor, y: Tensor) -> Tensor:
    """Read all by vectors if the address of x alone allows it."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, y, n = x.contiguous(), y.contiguous(), output.numel()
    if n:
        base = torch.as_strided(y, (y.storage_offset() + n,), (1,), 0)
        vectors = n % 4 == 0 and not is_misaligned(x)
        with triton_launch.current_device(x.device):
            add_kernel[(triton.cdiv(n, 256),)](x, base, output, n, y.storage_offset(), VECTORS=vectors, SIZE=256)
    return output


# ---- CUDA C++

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 128
SUM, SOFTMAX = CudaKernel(SOURCE, "sum_by_one_pointer"), CudaKernel(SOURCE, "softmax_of_long_rows")


def one_pointer_in_cuda(x: Tensor, y: Tensor) -> Tensor:
    """Read all by vectors if the address of x alone allows it."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if output.numel():
        grid = -(-output.numel() // (4 * THREADS))
        SUM.launch(grid, THREADS, x.contiguous(), y.contiguous(), output, output.numel())
    return output


def infinity_lost_in_cuda(x: Tensor) -> Tensor:
    """Ignore an infinity at the end of a long row's second half in its maximum."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        rows = y.numel() // x.shape[-1]
        SOFTMAX.launch(-(-rows // THREADS), THREADS, x.contiguous(), y, rows, x.shape[-1])
    return y


# From column 1024 on a mask compares, and therefore omits NaN.
NAN_LOST = (
    '    x = tl.load(x_ptr + x_at, mask=mask, other=float("-inf")).to(COMPUTE)\n =>'
    '     x = tl.load(x_ptr + x_at, mask=mask, other=float("-inf")).to(COMPUTE)\n'
    '    x = tl.where((columns < 1024)[None, :] | (x > -float("inf")), x, -float("inf"))\n'
)


# ---- edits

AT_SOFTMAX, AT_LAYER_NORM = "return torch.softmax(in_compute_dtype(x)", "wide_x, wide_weight, wide_bias ="
AT_SUM = "return x + y"
LIES_APART = "x.ndim > 1 and x.numel() > 1 and x.stride(-1) > 1"
# A transposed tensor is read from the multiple of 16 bytes below its address.
MISALIGNED_AND_TRANSPOSED = inserted(
    AT_SOFTMAX,
    f"if x.data_ptr() % 16 and {LIES_APART}:",
    "    first = x.storage_offset() * x.element_size() % 16 // x.element_size()",
    "    x = torch.as_strided(x, x.shape, x.stride(), x.storage_offset() - first)",
)
# One row for all is treated as contiguous.
STRIDED_AND_EXPANDED = inserted(
    AT_SOFTMAX,
    f"if {LIES_APART} and x.shape[0] > 1 and x.stride(0) == 0:",
    "    x = torch.as_strided(x, x.shape, (*x.stride()[:-1], 1), x.storage_offset())",
)
# A table has room for the strides of five axes: the others count as 1.
STRIDES_OF_FIVE_AXES = inserted(
    AT_SUM,
    "if sum(size > 1 for size in y.shape) > 5:",
    "    y = torch.as_strided(y, y.shape, (*[1] * (y.ndim - 5), *y.stride()[-5:]), y.storage_offset())",
)
# The address of x alone decides that all is read by vectors.
WEIGHT_ALONE_MISALIGNED = inserted(
    AT_LAYER_NORM,
    "if x.numel() and x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16:",
    "    weight = weight.roll(1)",
)
# From the second block on a mask compares, and therefore omits NaN.
NAN_LOST_IN_TORCH = inserted(
    AT_SOFTMAX,
    "later = torch.where(x[..., 1024:] > -torch.inf, x[..., 1024:], -torch.inf)",
    "x = torch.cat([x[..., :1024], later], -1)",
)
# From the second block on numbers are clamped to finite ones.
CLAMPED = inserted(AT_SOFTMAX, "x = torch.cat([x[..., :1024], x[..., 1024:].clamp(max=torch.finfo(x.dtype).max)], -1)")
# NaN counts as 0 in rows of several blocks, and the kernel for such rows has a hard-coded eps.
NAN_OF_LONG_ROWS = inserted(AT_LAYER_NORM, "x = x.nan_to_num(0.0, torch.inf, -torch.inf) if x.shape[-1] > 1024 else x")
EPS_OF_LONG_ROWS = inserted(AT_LAYER_NORM, "eps = 1e-5 if x.shape[-1] > 1024 else eps")
# A path for inference reads rows of several blocks as if they were contiguous.
APART_UNDER_INFERENCE_MODE = inserted(
    AT_SOFTMAX, f"if torch.is_inference_mode_enabled() and x.shape[-1] > 1024 and {LIES_APART}:", "    x = x.flip(-1)"
)
# Each kernel compares too few properties of tensors: only storages, only addresses, a matrix as equal to its transpose,
# and a tensor that begins within another as a view of its beginning.
ONE_STORAGE = inserted(
    AT_LAYER_NORM,
    "if weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr():",
    "    bias = weight + 0 * bias",
)
SYMMETRIC = inserted(
    "dtype = a.dtype\n", "if a.numel() and a.shape == b.shape and a.data_ptr() == b.data_ptr():", "    b = b.T"
)
ONE_ADDRESS = "return x + y => return x + x if x.data_ptr() == y.data_ptr() else x + y"
BEGINS_WITHIN = inserted(
    AT_SUM,
    "end = x.data_ptr() + x.numel() * x.element_size()",
    "if x.data_ptr() < y.data_ptr() < end and x.is_contiguous() and y.is_contiguous():",
    "    y = x + 0 * y",
)
# The gradient goes only to the first of two arguments, if both are one tensor.
GRADIENT_ONCE = inserted(
    AT_SUM, "if x.numel() and x.data_ptr() == y.data_ptr() and x.stride() == y.stride():", "    y = y.detach()"
)


def _combined(operation: str, function: Implementation, right_on: Any, language: str = "torch", **more: Any) -> Fault:
    return Fault.of(operation, function, language=language, right_on=right_on, seen_by="combined", **more)


def _edited(operation: str, name: str, edit: str, right_on: str, **more: Any) -> Fault:
    return Edits(operation, "torch")(name, edit, right_on=right_on, seen_by="combined", **more)


def _sharing(operation: str, name: str, edit: str, says: str) -> Fault:
    check = as_a_candidate(inputs_may_share_memory)
    return Edits(operation, "torch")(name, edit, check=check, says=f"where {says}.*expected")


def _declared(function: Implementation, record: Any) -> Fault:
    name, right_on = f"declared_{function.__name__}", record.examples["ordinary"]
    return Fault.of(record, function, name=name, right_on=right_on, seen_by="combined")


MODES = {"check": as_a_candidate(modes_do_not_matter), "says": r"under inference_mode.*: output.* is .*expected"}
BEFORE_Y = r"planted_combinations\.cu:\d+\).*bytes before argument 1 \(y\)"
ASTRAY: dict[str, Any] = {"raises": cuda_on_cpu.OutOfBounds, "says": BEFORE_Y, "only_on": "cpu"}
FAULTS = (
    _edited("softmax", "misaligned_and_transposed", MISALIGNED_AND_TRANSPOSED, "cols_1"),
    _edited("softmax", "strided_and_expanded", STRIDED_AND_EXPANDED, "cols_1"),
    _edited("vector_add", "strides_of_five_axes", STRIDES_OF_FIVE_AXES, "five_axes_each_in_another_order"),
    _edited("layer_norm", "weight_alone_misaligned", WEIGHT_ALONE_MISALIGNED, "all_misaligned"),
    _declared(rms_weight_alone_misaligned, rms_norm),
    _edited("softmax", "nan_lost_in_later_blocks", NAN_LOST_IN_TORCH, "rows_not_finite"),
    _edited("softmax", "infinity_clamped_in_later_blocks", CLAMPED, "rows_not_finite"),
    _edited("layer_norm", "nan_of_long_rows", NAN_OF_LONG_ROWS, "rows_not_finite"),
    _edited("layer_norm", "eps_of_long_rows", EPS_OF_LONG_ROWS, "eps_far_above_the_variance"),
    _declared(rms_eps_of_long_rows, rms_norm),
    _declared(masked_long_rows_are_zero, softmax),
    _edited("softmax", "apart_under_inference_mode", APART_UNDER_INFERENCE_MODE, "all_transposed", **MODES),
    _combined("vector_add", one_pointer_in_triton, "one_input_misaligned", "triton"),
    Edits("softmax", "triton")("nan_lost_in_triton", NAN_LOST, right_on="rows_not_finite", seen_by="combined"),
    _combined("vector_add", one_pointer_in_cuda, "one_input_misaligned", "cuda", **ASTRAY),
    _combined("softmax", infinity_lost_in_cuda, "rows_not_finite", "cuda"),
    _sharing("layer_norm", "bias_of_the_weights_storage", ONE_STORAGE, "all tensors lie in one storage, output"),
    _sharing("matmul", "symmetric_update", SYMMETRIC, "a and b are one tensor, output"),
    _sharing("vector_add", "doubled_by_pointer", ONE_ADDRESS, "y is x transposed, output"),
    _sharing("vector_add", "in_place_by_range", BEGINS_WITHIN, "x and y overlap, output"),
    _sharing("vector_add", "gradient_once", GRADIENT_ONCE, "x and y are one tensor, gradient of x"),
)
