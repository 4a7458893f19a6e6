"""Planted faults in vector_add, in small Triton and CUDA C++ kernels."""

from pathlib import Path

import torch
import triton
import triton.language as tl
from fourfold.impls.vector_add.torch_eager import vector_add as definition
from fourfold.properties.vector_add import random_case

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.signature import signature_of
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.memory import memory_is_respected

from .far_apart import far_apart
from .planted import UNWRITTEN, Fault, kernel_faults
from .planted_cuda import Planted
from .planted_softmax import zeros_added
from .steps import Implementation, differentiable

check_vector_add = signature_of(definition).check
BLOCK = 256


def wired(launch) -> Implementation:
    """Make vector_add from ``launch(x, y, output, n)``, which takes tensors of one axis."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if output.numel():
            launch(x.reshape(-1), y.reshape(-1), output, output.numel())
        return output

    return differentiable(("x", "y"), forward, lambda grad, *_: (grad, grad), check_vector_add)


@triton.jit
def vector_add_kernel(
    x_ptr, y_ptr, output_ptr, n, x_stride, y_stride, FAULT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    # One program owns BLOCK consecutive elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if FAULT == "offsets_in_32_bits":
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FAULT == "last_element_masked":
        mask = at < n - 1
    if FAULT == "contiguous_assumed":
        x_stride, y_stride = 1, 1
    x = tl.load(x_ptr + at * x_stride, mask=mask).to(COMPUTE)
    y = tl.load(y_ptr + at * y_stride, mask=mask).to(COMPUTE)
    total = (x + y).to(output_ptr.dtype.element_ty)
    if FAULT == "store_unmasked":
        tl.store(output_ptr + at, total)
    else:
        tl.store(output_ptr + at, total, mask=mask)


def in_triton(fault: str = "") -> Implementation:
    """Return vector_add in Triton for any dtype, with a fault."""

    def launch(x: torch.Tensor, y: torch.Tensor, output: torch.Tensor, n: int) -> None:
        # The fault launches only whole blocks, but at least one block.
        blocks = max(n // BLOCK, 1) if fault == "tail_dropped" else triton.cdiv(n, BLOCK)
        compute = tl.bfloat16 if fault == "bfloat16_inside" else triton_launch.COMPUTE[x.dtype]
        with triton_launch.on(x.device):
            vector_add_kernel[(1 if fault == "one_program" else blocks,)](
                x, y, output, n, *x.stride(), *y.stride(), FAULT=fault, COMPUTE=compute, BLOCK=BLOCK
            )

    return wired(launch)


KERNELS = Planted(Path(__file__).with_suffix(".cu"), "vector_add_kernel")


def in_cuda(fault: str = "NONE") -> Implementation:
    """Return vector_add in CUDA C++ for float32, with a fault."""

    def launch(x: torch.Tensor, y: torch.Tensor, output: torch.Tensor, n: int) -> None:
        # At most 4 blocks, so that threads of a long vector loop with the stride of the grid.
        blocks = min(-(-n // BLOCK), 4)
        KERNELS.launch("vector_add_kernel", fault, blocks, 64, x, y, output, n, *x.stride(), *y.stride())

    return wired(launch)


def _faults() -> tuple[Fault, ...]:
    of_triton, of_cuda = kernel_faults("vector_add", in_triton, in_cuda, right_on="one_element")

    memory = {"check": memory_is_respected, "says": UNWRITTEN}
    return (
        of_triton("tail_dropped", **memory),
        of_triton("last_element_masked", **memory | {"right_on": None}),
        of_triton("one_program", **memory),
        of_triton(
            "store_unmasked",
            check=memory_is_respected,
            says=r"wrote \d+ elements past the end",
            right_on="a_block",
        ),
        of_triton("contiguous_assumed"),
        of_triton("offsets_in_32_bits", examples=far_apart(random_case(9))),
        of_triton("bfloat16_inside", right_on=zeros_added),
        of_cuda("store_unmasked", cuda_on_cpu.OutOfBounds, right_on="a_block"),
        of_cuda(
            "tail_of_vectors_dropped",
            **memory,
            right_on="a_block",
            source="https://github.com/xlite-dev/LeetCUDA/issues/295",
        ),
        of_cuda(
            "vector_past_the_end",
            cuda_on_cpu.OutOfBounds,
            right_on="a_block",
            source="https://github.com/xlite-dev/LeetCUDA/pull/421",
        ),
        of_cuda("vectors_misaligned", cuda_on_cpu.Misaligned, right_on="a_block"),
        of_cuda("grid_limited", **memory),
        of_cuda("contiguous_assumed", cuda_on_cpu.OutOfBounds),
        of_cuda("offsets_in_32_bits", cuda_on_cpu.UndefinedArithmetic, examples=far_apart(random_case(9))),
        of_cuda("half_inside", right_on=zeros_added),
        of_cuda("written_into_x", cuda_on_cpu.OutOfBounds, right_on=None),
    )


FAULTS = _faults()
