"""Planted faults in vector_add: edits of its versions in torch, Triton and CUDA C++."""

import numpy as np
from fourfold.properties import vector_add as properties
from fourfold.properties.vector_add import random_case
from triton import InterpreterError

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.memory import memory_is_respected
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .far_apart import far_apart
from .planted import UNWRITTEN, Fault


def zeros_added(dtype: DType) -> Case:
    """Return a case of zeros, for which sum and difference agree."""
    zeros = np.zeros(3, dtype=dtype.numpy)
    return Case({"x": zeros, "y": zeros}, np.arange(3).astype(dtype.numpy))


# fmt: off
SUM = "return x + y => return"
TWICE = f"{SUM} (x.float().bfloat16() + y.float().bfloat16()).to(x.dtype)"
MEMORY = {"check": memory_is_respected, "says": UNWRITTEN}


def _torch_faults() -> tuple[Fault, ...]:
    of, one, zeros = Edits("vector_add", "torch"), {"right_on": "one_element"}, {"right_on": zeros_added}
    return (
        of("tail_unwritten", f"{SUM} torch.where(torch.arange(x.numel()).view(x.shape) < (x.numel() // 1024 or 1)"
           " * 1024, x + y, torch.empty_like(x))", poisoned=True, **one),
        of("memory_order_of_x", f"{SUM} x + y.permute(sorted(range(x.ndim), key=y.stride, reverse=True))"
           ".reshape(x.shape)", **one),
        of("twice_rounded", TWICE, **zeros),
        of("broadcasts", '@signature(x=tensor("..."), y=tensor("..."))\n => ', check=declared_errors_are_raised,
           says="in place of|was raised"),
        of.law(properties.a_number_and_its_negative_cancel, f"{SUM} x - y", name="difference", **zeros),
        of.law(properties.the_order_of_the_terms_does_not_matter, f"{SUM} x - y", name="difference", **zeros),
        of.law(properties.adding_zero_changes_nothing, TWICE, name="twice_rounded", **zeros),
        of.law(properties.gradients_are_the_cotangent, f"{SUM} x + y / 2 + y.detach() / 2", name="gradient_halved"),
        of.gradient("gradient_of_y_left_out", f"{SUM} x + y.detach() + 0 * y", says="gradient of y"),
    )


ASTRAY = {"raises": InterpreterError, "says": "OutOfBounds", "only_on": "cpu"}
BLOCK, GRID = "block_bytes=8192 => block_bytes=1024", "triton_elementwise.py: (cdiv(sizes[0], block),) =>"
STORE = "tl.store(output_ptr + at, of(a, b).to(output_ptr.dtype.element_ty)"
LAST = "binary_block(a_ptr, b_ptr, output_ptr, at, at < n, COMPUTE) =>2"
# Edits of any elementwise operation.
IN_TRITON = {
    "contiguous_assumed": "triton_elementwise.py: a_at = plane => a_at = at + 0 * plane",
    "offsets_in_32_bits": "triton_elementwise.py: (at - row * inner).to(tl.int64) => (at - row * inner)",
}
REST, A_AT = "elementwise.cuh: if (odd >= n || blockIdx.x < gridDim.x - 1) return;", "column * a_inner_stride] =>"
FLAT = "cuda_elementwise.py: whole(*tensors)].launch(grid, BLOCK, x.numel(), owned, *tensors)\n => whole(*tensors)]"
IN_CUDA = {
    "store_unmasked": f"{REST} => if (odd >= (n + 3) / 4 * 4) return;",
    "contiguous_assumed": f"elementwise.cuh: a[plane * a_outer_stride + line * a_middle_stride + {A_AT} a[i]",
    "offsets_in_32_bits": f"elementwise.cuh: {A_AT} int(column) * int(a_inner_stride)]",
    "last_block_dropped": f"{FLAT}.launch(max(grid - 1, 1), BLOCK, x.numel(), owned, *tensors)\n",
}


def _triton_faults() -> tuple[Fault, ...]:
    of, one = Edits("vector_add", "triton"), {"right_on": "one_element"}
    return (
        of("tail_dropped", BLOCK, f"{GRID} (max(sizes[0] // block, 1),)", **MEMORY, **one),
        of("last_element_masked", f"triton_elementwise.py: {LAST}"
           " binary_block(a_ptr, b_ptr, output_ptr, at, at < n - 1, COMPUTE)", **MEMORY),
        of("one_program", BLOCK, f"{GRID} (1,)", **MEMORY, **one),
        of("store_unmasked", BLOCK, f"triton_elementwise.py: {STORE}, mask=mask) =>2 {STORE})",
           check=memory_is_respected, says=r"wrote \d+ elements past the end", right_on="a_block"),
        of("contiguous_assumed", IN_TRITON["contiguous_assumed"], **ASTRAY, **one),
        of("offsets_in_32_bits", IN_TRITON["offsets_in_32_bits"], examples=far_apart(random_case(9)), **one),
        of("bfloat16_inside", "return x + y => return x.to(tl.bfloat16) + y.to(tl.bfloat16)", right_on=zeros_added),
    )


def _cuda_faults() -> tuple[Fault, ...]:
    of, one, block = Edits("vector_add", "cuda"), {"right_on": "one_element"}, {"right_on": "a_block"}
    out_of_bounds, leetcuda = cuda_on_cpu.OutOfBounds, "https://github.com/xlite-dev/LeetCUDA"
    return (
        of.stopped("store_unmasked", out_of_bounds, IN_CUDA["store_unmasked"], **block),
        of("tail_of_vectors_dropped", f"{REST} => return;", source=f"{leetcuda}/issues/295", **MEMORY, **block),
        of.stopped("vector_past_the_end", out_of_bounds, "elementwise.cuh: num_vectors = n / WIDTH; =>"
                   " num_vectors = (n + WIDTH - 1) / WIDTH;", source=f"{leetcuda}/pull/421", **block),
        of.stopped("vectors_misaligned", cuda_on_cpu.Misaligned,
                   "cuda_elementwise.py: all(tensor.data_ptr() % 16 == 0 for tensor in tensors) => True", **block),
        of("grid_limited", f"{FLAT}.launch(1, BLOCK, x.numel(), owned, *tensors)\n", **MEMORY, **one),
        of.stopped("contiguous_assumed", out_of_bounds, IN_CUDA["contiguous_assumed"], **one),
        of.stopped("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, IN_CUDA["offsets_in_32_bits"],
                   examples=far_apart(random_case(9)), **one),
        of("half_inside", "return x + y; => return C(__half(float(x + y)));", right_on=zeros_added),
        of.stopped("written_into_x", out_of_bounds, "elementwise.cuh: {a, b}, {output}, n =>"
                   " {a, b}, {const_cast<T*>(a)}, n"),
    )


# fmt: on
FAULTS = (*_torch_faults(), *_triton_faults(), *_cuda_faults())
