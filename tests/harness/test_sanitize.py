"""``fourfold sanitize``: right scripts run silently without a GPU, wrong ones are reported where they are wrong.

Each script is written for a GPU and imports nothing of this project. The line that is wrong ends with ``# here``.
"""

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import warm
from one_run import one_run

from fourfold.backends.triton.sanitizer.races import Accesses, load_in_step, stamps_of, store_in_step

ROOT = Path(__file__).parents[2]
HEAD = """
import torch
import triton
import triton.language as tl
"""


class Wrong(NamedTuple):
    """A report: the kind, the access, the parameter, the first program, and the offset."""

    kind: str
    access: str
    parameter: str
    program: tuple[int, int, int]
    offset: int | None


RIGHT: dict[str, str] = {}
WRONG: dict[str, tuple[str, Wrong]] = {}

ADD = """
@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)

def launch(x, y):
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out
"""

RIGHT["names_of_the_gpu"] = (
    ADD
    + """
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
DEVICE = triton.runtime.driver.active.get_active_torch_device()
torch.cuda.manual_seed(0)
a = torch.rand(100, device=DEVICE)
b = torch.rand(100).to("cuda")
c = torch.rand(100).cuda()
d = torch.ones(100, device=torch.device("cuda"))
generator = torch.Generator(device="cuda").manual_seed(1)
e = torch.randn(100, device="cuda:0", generator=generator)
with torch.device("cuda"):
    f = torch.zeros(100)
assert all(x.is_cuda and x.device == DEVICE and x.device.type == "cuda" for x in (a, b, c, d, e, f))
host = a.cpu()
assert host.device.type == "cpu" and not host.is_cuda
host.zero_()
assert a.abs().sum() > 0, "a copy shares the memory"
assert c.cuda() is c
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0), torch.autocast("cuda", dtype=torch.bfloat16):
    torch.testing.assert_close(launch(a, b), a + b)
end.record()
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() >= 0
properties = torch.cuda.get_device_properties(0)
assert properties.multi_processor_count > 0 and torch.cuda.get_device_capability()[0] >= 8
assert triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"] > 0
assert triton.runtime.driver.active.get_current_target().backend == "cuda"
triton.testing.assert_close(launch(c, d), c + d)
"""
)
RIGHT["set_default_device"] = (
    ADD
    + """
torch.set_default_device("cuda")
x = torch.rand(70)
assert x.is_cuda and torch.nn.Linear(3, 4).weight.is_cuda
torch.testing.assert_close(launch(x, torch.ones(70)), x + 1)
"""
)
RIGHT["tuning_and_benchmarks"] = """
@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=2), triton.Config({"BLOCK": 64})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: "tl.constexpr"):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets))
    else:
        mask = offsets < n
        tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask, other=0.0), mask=mask)

def launch(x):
    out = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out

for n in (64, 65):
    x = torch.rand(n, device="cuda")
    torch.testing.assert_close(launch(x), 2 * x)

@triton.testing.perf_report(triton.testing.Benchmark(
    x_names=["n"], x_vals=[128, 1 << 40], line_arg="provider", line_vals=["triton", "torch"], line_names=["a", "b"],
    plot_name="p", args={}))
def benchmark(n, provider):
    x = torch.rand(n, device="cuda")
    ms, low, high = triton.testing.do_bench(lambda: launch(x), quantiles=[0.5, 0.2, 0.8])
    return ms

benchmark.run(print_data=True, save_path=".")

@torch.compile(mode="max-autotune")
def eager(x):
    return launch(x) + 1
eager(torch.rand(5, device="cuda"))
"""
RIGHT["autograd"] = (
    ADD
    + """
class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return launch(x, y)

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_cuda
        zeros = torch.zeros(gradient.shape, device="cuda")
        return launch(gradient.contiguous(), zeros), None

x = torch.rand(90, device="cuda", requires_grad=True)
Add.apply(x, torch.ones(90, device="cuda")).square().sum().backward()
torch.testing.assert_close(x.grad, 2 * (x + 1))
"""
)
RIGHT["views"] = """
@triton.jit
def scale(x_ptr, row, col, rows, cols, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    pointers = x_ptr + r * row + c * col
    mask = (r < rows) & (c < cols)
    tl.store(pointers, 2 * tl.load(pointers, mask=mask), mask=mask)

buffer = torch.rand(8, 10, device="cuda")
expected = 2 * buffer
scale[[1]](buffer[0], 10, 1, 8, 10, R=8, C=16)  # the first row, and strides that lead to all
torch.testing.assert_close(buffer, expected)
view = buffer[1:, 2:].t()
scale[(1, 1)](view, view.stride(0), view.stride(1), *view.shape, R=8, C=8)
"""
RIGHT["atomics_and_a_lock"] = """
@triton.jit
def count(x_ptr, bins_ptr, total_ptr, lock_ptr, sum_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.atomic_add(bins_ptr + x, 1)
    tl.atomic_max(total_ptr, tl.max(x))
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sum_ptr, tl.load(sum_ptr) + tl.sum(x))
    tl.atomic_xchg(lock_ptr, 0)

x = torch.randint(0, 7, (64,), device="cuda", dtype=torch.int32)
bins, total, lock, sums = (torch.zeros(n, device="cuda", dtype=torch.int32) for n in (7, 1, 1, 1))
count[(4,)](x, bins, total, lock, sums, BLOCK=16)
assert bins.tolist() == x.bincount(minlength=7).tolist() and sums.item() == x.sum().item()
"""
RIGHT["a_wait_for_a_later_program"] = """
@triton.jit
def chain(x_ptr, flags_ptr, out_ptr):
    pid = tl.program_id(0)
    last = tl.num_programs(0) - 1
    before = 0.0
    if pid < last:
        while tl.atomic_add(flags_ptr + pid + 1, 0) == 0:
            pass
        before = tl.load(out_ptr + pid + 1)
    tl.store(out_ptr + pid, before + tl.load(x_ptr + pid))
    tl.atomic_xchg(flags_ptr + pid, 1)

x, flags, out = torch.rand(5, device="cuda"), torch.zeros(5, dtype=torch.int32, device="cuda"), torch.empty(5).cuda()
chain[(5,)](x, flags, out)
torch.testing.assert_close(out, x.flip(0).cumsum(0).flip(0))
"""
RIGHT["a_long_loop_of_atomics"] = """
@triton.jit
def count(out_ptr, n):
    for _ in range(n):
        tl.atomic_add(out_ptr, 1)

out = torch.zeros(1, device="cuda", dtype=torch.int32)
count[(1,)](out, 1500)
assert out.item() == 1500
"""
RIGHT["addresses_as_integers"] = """
@triton.jit
def copy(table_ptr, sizes_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    source = tl.load(table_ptr + pid).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    mask = offsets < tl.load(sizes_ptr + pid)
    tl.store(out_ptr + pid * BLOCK + offsets, tl.load(source + offsets, mask=mask, other=0.0))

parts = [torch.rand(n, device="cuda", requires_grad=n == 8) for n in (5, 8, 3)]
table = torch.tensor([part.data_ptr() for part in parts], device="cuda")
sizes = torch.tensor([len(part) for part in parts], device="cuda", dtype=torch.int32)
out = torch.empty(3, 8, device="cuda")
copy[(3,)](table, sizes, out, BLOCK=8)
assert all(torch.equal(row[: len(part)], part) for row, part in zip(out, parts))
"""
RIGHT["two_bases_libdevice_and_hints"] = """
from triton.language.extra import libdevice

@triton.jit
def mixed(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK % 2 == 0)
    tl.assume(n > 0)
    offsets = tl.multiple_of(tl.arange(0, BLOCK), 8)
    pointers = tl.where(offsets < n, x_ptr + offsets, y_ptr + (offsets - n))
    out_ptr = tl.multiple_of(out_ptr, 4096)
    value = libdevice.tanh(tl.load(pointers)) + tl.math.exp(0.0) + tl.extra.cuda.libdevice.rsqrt(tl.load(pointers))
    if tl.program_id(0) == 0:
        tl.device_print("n", n)
    tl.store(out_ptr + offsets, value)

x, y, out = torch.rand(5, device="cuda"), torch.rand(11, device="cuda"), torch.empty(16, device="cuda")
compiled = mixed.warmup(x, y, out, 5, BLOCK=16, grid=(1,))
assert compiled.n_regs > 0 and compiled.metadata.shared >= 0
mixed[(1,)](x, y, out, 5, BLOCK=16)
both = torch.cat([x, y])
torch.testing.assert_close(out, torch.tanh(both) + 1 + both.rsqrt())
"""
BLOCKS = """
@triton.jit
def copy(x_ptr, out_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (m, n), (n, 1), (tl.program_id(0) * M, 0), (M, N), (1, 0))
    out = tl.make_block_ptr(out_ptr, (m, n), (n, 1), (tl.program_id(0) * M, 0), (M, N), (1, 0))
    for _ in range(0, n, N):
        tl.store(out, tl.load(x, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        x, out = tl.advance(x, (0, N)), tl.advance(out, (0, N))

x = torch.rand(7, 20, device="cuda")
out = torch.empty_like(x)
copy[(2,)](x, out, 7, 20, M=4, N=8)
assert torch.equal(x, out)
"""
RIGHT["block_pointers"] = BLOCKS
# Triton's tuner skips configurations that do not compile.
RIGHT["a_configuration_that_a_static_assertion_refuses"] = """
@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)

for n in range(60, 66):
    x = torch.ones(n, device="cuda")
    double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    assert (x >= 2).all()
"""
# The programs diverge after the sanitizer has run the stores of all of them.
RIGHT["in_place_and_different_afterwards"] = """
@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 2 * x)
    tl.store(out_ptr + offsets, x)
    for _ in range(tl.program_id(0) % 3):
        tl.store(out_ptr + offsets, tl.load(out_ptr + offsets) + 1)

x = torch.arange(160, dtype=torch.float32, device="cuda")
out = torch.empty_like(x)
scale[(10,)](x, out, 160, BLOCK=16)
assert torch.equal(x, 2 * torch.arange(160))
assert torch.equal(out, torch.arange(160) + torch.arange(10).repeat_interleave(16) % 3)
"""
# Triton 3.1 ran this kernel.
RIGHT["written_for_an_earlier_release"] = """
from triton.language.extra.cuda import libdevice

@triton.jit
def powers(x_ptr, out_ptr, BLOCK: tl.constexpr):
    shape = (BLOCK, )
    at = tl.arange(0, BLOCK)
    pointers = (x_ptr + at, )
    pointers += BLOCK
    tl.store(out_ptr + at, libdevice.pow(2.0, tl.load(pointers)) + tl.zeros(shape, tl.float32))

x, out = torch.arange(-8, 8, dtype=torch.int16, device="cuda"), torch.empty(8, device="cuda")
powers[(1,)](x, out, BLOCK=8)
assert torch.equal(out, 2.0 ** x[8:])
"""
RIGHT["descriptors"] = """
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def copy(x_desc, out_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    out = tl.make_tensor_descriptor(out_ptr, shape=[m, n], strides=[n, 1], block_shape=[M, N])
    row = tl.program_id(0) * M
    for col in range(0, n, N):
        out.store([row, col], x_desc.load([row, col]))

x = torch.rand(7, 20, device="cuda")
out = torch.empty_like(x)
copy[(2,)](TensorDescriptor.from_tensor(x, [4, 8]), out, 7, 20, M=4, N=8)
assert torch.equal(x, out)
"""

WRONG["no_mask_at_the_tail"] = (
    ADD.replace("x_ptr + offsets, mask=mask)", "x_ptr + offsets)  # here")
    + "launch(torch.rand(100, device='cuda'), torch.rand(100, device='cuda'))",
    Wrong("out of bounds", "load", "x_ptr", (1, 0, 0), 100),
)
WRONG["a_mask_that_includes_the_end"] = (
    ADD.replace("y_ptr + offsets, mask=mask)", "y_ptr + offsets, mask=offsets <= n)  # here")
    + "launch(torch.rand(100, device='cuda'), torch.rand(100, device='cuda'))",
    Wrong("out of bounds", "load", "y_ptr", (1, 0, 0), 100),
)
WRONG["the_memory_of_another_tensor"] = (
    """
@triton.jit
def shift(x_ptr, out_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets + n))  # here

buffer = torch.rand(1 << 20, device="cuda")
other = torch.empty(1 << 20, device="cuda")
shift[(1,)](buffer, other, n=1 << 20)
""",
    Wrong("out of bounds", "load", "x_ptr", (0, 0, 0), 1 << 20),
)
WRONG["a_wrong_stride"] = (
    """
@triton.jit
def rows(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=0.0)  # here
    tl.store(out_ptr + row, tl.sum(x))

x, out = torch.rand(4, 6, device="cuda"), torch.empty(4, device="cuda")
rows[(4,)](x, out, 8, 6, BLOCK=8)
""",
    Wrong("out of bounds", "load", "x_ptr", (3, 0, 0), 24),
)
WRONG["a_negative_offset"] = (
    """
@triton.jit
def difference(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets) - tl.load(x_ptr + offsets - 1)  # here
    tl.store(out_ptr + offsets, x)

difference[(2,)](torch.rand(32, device="cuda"), torch.empty(32, device="cuda"), BLOCK=16)
""",
    Wrong("out of bounds", "load", "x_ptr", (0, 0, 0), -1),
)
WRONG["a_store_outside"] = (
    ADD.replace("x + y, mask=mask)", "x + y)  # here")
    + "launch(torch.rand(100, device='cuda'), torch.rand(100, device='cuda'))",
    Wrong("out of bounds", "store", "out_ptr", (1, 0, 0), 100),
)
WRONG["an_atomic_outside"] = (
    """
@triton.jit
def count(x_ptr, bins_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(bins_ptr + tl.load(x_ptr + tl.arange(0, BLOCK)), 1)  # here

count[(1,)](torch.arange(8, device="cuda"), torch.zeros(7, dtype=torch.int32, device="cuda"), BLOCK=8)
""",
    Wrong("out of bounds", "atomic operation", "bins_ptr", (0, 0, 0), 7),
)
WRONG["a_block_pointer_without_boundary_check"] = (
    BLOCKS.replace(
        'boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))',
        "boundary_check=(1,)), boundary_check=(0, 1))  # here",
    ),
    Wrong("out of bounds", "load", "x_ptr", (1, 0, 0), 140),
)
WRONG["memory_that_nothing_has_written"] = (
    """
@triton.jit
def accumulate(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(out_ptr + offsets)  # here
    tl.store(out_ptr + offsets, total + tl.load(x_ptr + offsets))

x, out = torch.rand(32, device="cuda"), torch.empty(32, device="cuda")
out[:16] = 0
accumulate[(2,)](x, out, BLOCK=16)
""",
    Wrong("unwritten", "load", "out_ptr", (1, 0, 0), 16),
)
WRONG["what_a_kernel_left_unwritten"] = (
    ADD
    + """
x = torch.rand(100, device="cuda")
out = torch.empty(128, device="cuda")
add[(1,)](x, x, out, 50, BLOCK=64)

@triton.jit
def total(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))  # here

total[(1,)](out, torch.empty(1, device="cuda"), BLOCK=64)
""",
    Wrong("unwritten", "load", "x_ptr", (0, 0, 0), 50),
)
WRONG["two_programs_write_one_element"] = (
    """
@triton.jit
def rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n)
    tl.store(out_ptr + row // 2 * n + cols, x, mask=cols < n)  # here

x = torch.rand(4, 6, device="cuda")
rows[(4,)](x, torch.empty(4, 6, device="cuda"), 6, BLOCK=8)
""",
    Wrong("race", "store", "out_ptr", (1, 0, 0), 0),
)
WRONG["a_sum_without_an_atomic"] = (
    """
@triton.jit
def add_up(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    total = tl.load(out_ptr)  # here
    tl.store(out_ptr, total + tl.sum(x))

add_up[(2,)](torch.rand(32, device="cuda"), torch.zeros(1, device="cuda"), BLOCK=16)
""",
    Wrong("race", "load", "out_ptr", (1, 0, 0), 0),
)
WRONG["one_program_clears_what_others_add_to"] = (
    """
@triton.jit
def add_up(x_ptr, out_ptr, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(out_ptr, 0.0)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))))  # here

add_up[(2,)](torch.rand(32, device="cuda"), torch.ones(1, device="cuda"), BLOCK=16)
""",
    Wrong("race", "atomic operation", "out_ptr", (1, 0, 0), 0),
)
WRONG["two_values_in_one_store"] = (
    """
@triton.jit
def fold(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets // 2, tl.load(x_ptr + offsets))  # here

fold[(1,)](torch.rand(16, device="cuda"), torch.empty(8, device="cuda"), BLOCK=16)
""",
    Wrong("race", "store", "out_ptr", (0, 0, 0), 0),
)
WRONG["one_step_too_many"] = (
    """
@triton.jit
def add_up(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    step = 0
    while step <= n:
        total += tl.load(x_ptr + step + tl.arange(0, BLOCK))  # here
        step += BLOCK
    tl.store(out_ptr, tl.sum(total))

add_up[(1,)](torch.rand(64, device="cuda"), torch.empty(1, device="cuda"), 64, BLOCK=16)
""",
    Wrong("out of bounds", "load", "x_ptr", (0, 0, 0), 64),
)
WRONG["an_offset_past_32_bits"] = (
    """
@triton.jit
def last(x_ptr, out_ptr, row, stride):
    tl.store(out_ptr, tl.load(x_ptr + row * stride))  # here

x = torch.empty(3, 1 << 30, dtype=torch.int8, device="cuda")
x[2, 0] = 1
last[(1,)](x, torch.empty(1, dtype=torch.int8, device="cuda"), 2, x.stride(0))
""",
    Wrong("out of bounds", "load", "x_ptr", (0, 0, 0), -(1 << 31)),
)
WRONG["an_address_as_an_integer"] = (
    RIGHT["addresses_as_integers"].replace("mask=mask, other=0.0))", "mask=offsets < BLOCK))  # here"),
    Wrong("out of bounds", "load", "a tensor whose data_ptr() was taken", (0, 0, 0), 5),
)
# These are no errors: both programs leave the same value.
WARNED = """
@triton.jit
def mark(out_ptr):
    tl.store(out_ptr, 1)  # here

mark[(2,)](torch.zeros(1, device="cuda"))
"""
UNWRITTEN_TWICE = """
@triton.jit
def total(x_ptr, out_ptr, BLOCK: tl.constexpr):
    unused = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))  # here

total[(1,)](torch.empty(8, device="cuda"), torch.empty(1, device="cuda"), BLOCK=8)
"""
# In step, all programs store before any of them loads the next one's element.
NEIGHBOURS = """
@triton.jit
def next_element(x_ptr, out_ptr, n):
    tl.store(x_ptr + tl.program_id(0), 2 * tl.load(x_ptr + tl.program_id(0)))
    tl.store(out_ptr + tl.program_id(0), 1.0)
    if tl.program_id(0) + 1 < n:
        tl.store(x_ptr + tl.program_id(0), 3 * tl.load(out_ptr + tl.program_id(0) + 1), mask=tl.program_id(0) < 0)

x = torch.ones(8, device="cuda")
next_element[(8,)](x, torch.empty(8, device="cuda"), 8)
assert (x == 2).all()
"""
WAITS = """
@triton.jit
def wait(flag_ptr):
    while tl.atomic_cas(flag_ptr, 1, 1) == 0:
        pass

wait[(2,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
"""
FAILS = "def f():\n    raise ValueError('of the script')\nf()\n"
# Its time is up after its first finding, however long a busy machine takes.
ENDLESS = """
import signal, time
left, _ = signal.setitimer(signal.ITIMER_REAL, 0.01)
assert 0 < left <= 600
time.sleep(600)
"""
# Each script runs in its own process, which need not import torch and Triton again.
DRIVER = """
import os, pathlib, sys
import torch.distributed.tensor  # what torch.testing imports when it is first called, in a second
from fourfold.backends.triton.sanitizer import monitor as sanitizer
from fourfold.sanitize import absent_gpu
from fourfold.sanitize import command as sanitize

for path in map(pathlib.Path, sys.argv[1:]):
    if os.fork() == 0:
        output = os.open(path.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = sanitize.main("--json", str(path.with_suffix(".json")), str(path))
        sys.stdout.flush()
        os._exit(code)
    _, status = os.wait()
    path.with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))
"""


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return warm.variables("TRITON_", "CUDA_", **own)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fourfold", "sanitize", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def line_of(script: str) -> int:
    return next(i for i, line in enumerate((HEAD + script).splitlines(), 1) if line.endswith("# here"))


class Result(NamedTuple):
    code: int
    findings: list[dict[str, Any]]
    printed: str


@one_run
def script_results() -> dict[str, Result]:
    with tempfile.TemporaryDirectory() as folder:
        return results_of(Path(folder))


def results_of(folder: Path) -> dict[str, Result]:
    scripts = {**RIGHT, **{name: script for name, (script, _) in WRONG.items()}, "warned": WARNED}
    scripts |= {"waits": WAITS, "unwritten_twice": UNWRITTEN_TWICE, "neighbours": NEIGHBOURS, "fails": FAILS}
    paths = {name: folder / f"{name}.py" for name in scripts}
    for name, path in paths.items():
        path.write_text(HEAD + scripts[name])
    variables = {**environment(), "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", DRIVER, *map(str, paths.values())], env=variables, check=True)
    return {
        name: Result(
            int(path.with_suffix(".code").read_text()),
            json.loads(path.with_suffix(".json").read_text())["findings"],
            path.with_suffix(".txt").read_text(),
        )
        for name, path in paths.items()
    }


@pytest.fixture
def results() -> dict[str, Result]:
    return script_results()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_runs_silently(name: str, results: dict[str, Result]) -> None:
    code, findings, printed = results[name]
    assert code == 0, printed
    assert findings == [], printed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_access_is_reported_where_it_is(name: str, results: dict[str, Result]) -> None:
    script, expected = WRONG[name]
    code, findings, printed = results[name]
    assert code == 1, printed
    found = findings[0]
    assert Path(found["file"]).stem == name
    assert found["line"] == line_of(script), printed
    assert Wrong(*(found[key] for key in Wrong._fields[:3]), tuple(found["program"]), found["offset"]) == expected
    # A race of loads and stores shows at both.
    assert {finding["kind"] for finding in findings} == {expected.kind}, printed


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("an_offset_past_32_bits", ["an offset of 32 bits has overflowed"]),
        ("waits", ["waits for what no other program does"]),
        ("fails", ["ValueError: of the script", "the script has failed; 0 errors"]),
    ],
)
def test_the_cause_is_printed(name: str, says: list[str], results: dict[str, Result]) -> None:
    code, _, printed = results[name]
    assert code == 1
    assert all(text in printed for text in says), printed
    assert name != "fails" or "fourfold/sanitize" not in printed


def test_the_same_value_stored_twice_is_a_warning(results: dict[str, Result]) -> None:
    code, findings, printed = results["warned"]
    assert code == 0
    assert [(found["warning"], found["line"]) for found in findings] == [(True, line_of(WARNED))]
    assert "0 errors and 1 warning in 1 launches of 1 kernels, 2 programs" in printed


def test_an_unused_load_hides_no_later_one(results: dict[str, Result]) -> None:
    line = line_of(UNWRITTEN_TWICE)
    assert [found["line"] for found in results["unwritten_twice"].findings] == [line - 1, line]


def test_a_suspected_launch_starts_from_the_memory_before_it(results: dict[str, Result]) -> None:
    _, findings, printed = results["neighbours"]
    assert {found["kind"] for found in findings} == {"unwritten", "race"}, printed
    assert "the script has failed" not in printed


def test_programs_in_step_race_where_two_touch_one_element_and_one_of_them_stores() -> None:
    generator, seen = np.random.default_rng(0), set()
    for _ in range(400):
        accesses, known, may_race, races = Accesses(6 * 4, 4), [], False, False
        while not may_race and not races and len(known) < 40:
            programs = np.sort(generator.integers(0, 3, generator.integers(1, 4)))
            places, stores = generator.integers(0, 6, len(programs)), generator.random() < 0.3
            known += [(place, program, stores) for place, program in zip(places, programs)]
            stamps = stamps_of(programs)
            if stores:
                may_race = store_in_step(accesses, places, stamps, generator.random(len(places)) < 0.5)
            else:
                may_race = load_in_step(accesses, places, stamps)
            races = any(a[0] == b[0] and a[1] != b[1] and (a[2] or b[2]) for a in known for b in known)
        assert may_race == races, known
        seen.add((len(known) > 5, known[-1][2]))
    assert len(seen) == 4


def test_the_command_runs_a_script_with_its_arguments_and_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text(HEAD + WRONG["no_mask_at_the_tail"][0].rpartition("\n")[0])
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import sys, torch
        from sibling import launch
        launch(*(torch.rand(int(sys.argv[1]), device="cuda") for _ in range(2)))
        """)
    )
    wrong = run(tmp_path, "--json", "findings.json", "script.py", "100")
    assert wrong.returncode == 1
    report = json.loads((tmp_path / "findings.json").read_text())
    assert report["kernels"] == ["add"]
    assert [finding["parameter"] for finding in report["findings"]] == ["x_ptr"]
    line = line_of(WRONG["no_mask_at_the_tail"][0])
    assert f"sibling.py:{line}: error: load at element 100 of x_ptr, a float32 tensor of shape [100]" in wrong.stderr
    assert "first in program (1, 0, 0) of a grid of (2, 1, 1), kernel add" in wrong.stderr


@pytest.mark.full
def test_every_configuration_runs_where_it_is_asked(tmp_path: Path) -> None:
    script = RIGHT["tuning_and_benchmarks"].replace('"BLOCK": 64', '"BLOCK": 48')
    (tmp_path / "tuned.py").write_text(HEAD + script)
    every = run(tmp_path, "--all-configs", "tuned.py")
    assert every.returncode == 1
    assert "power of 2" in every.stderr
    (tmp_path / "tuned.py").write_text(HEAD + RIGHT["tuning_and_benchmarks"])
    assert run(tmp_path, "--all-configs", "tuned.py").returncode == 0


def test_the_scripts_of_a_folder_run_on_their_own(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "endless.py").write_text("import beside\n" + HEAD + WRONG["a_store_outside"][0] + ENDLESS)
    (tmp_path / "fails.py").write_text("import triton.no_longer_there\n")
    done = run(tmp_path, "--timeout", "600", "--jobs", "2", "--json", "findings.json", ".")
    assert done.returncode == 1, done.stderr
    endless, fails = json.loads((tmp_path / "findings.json").read_text())["scripts"].values()
    assert endless["failure"] == "TimeIsUp: not done after 600 s"
    assert [(found["parameter"], found["offset"]) for found in endless["findings"]] == [("out_ptr", 100)]
    assert fails["failure"] == "ModuleNotFoundError: No module named 'triton.no_longer_there'"
    assert "2 scripts: 0 without a finding, 1 with errors, 2 failed, 1 launched no kernel" in done.stdout
    assert f"endless.py: failed: {endless['failure']}\nendless.py:" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["missing.py"], ["--unknown", "missing.py"], ["--jobs", "0", "."], ["."]])
def test_bad_usage_is_2(arguments: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert "fourfold sanitize" in done.stderr


@pytest.mark.full
def test_findings_in_a_run_of_pytest_are_printed(tmp_path: Path) -> None:
    script, _ = next(iter(WRONG.values()))
    (tmp_path / "wrong.py").write_text(HEAD + script)
    (tmp_path / "test_wrong.py").write_text("def test_it():\n    import wrong\n")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_wrong.py")
    assert done.returncode == 1, done.stdout
    assert f"wrong.py:{line_of(script)}" in done.stderr
