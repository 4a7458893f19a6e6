"""CUDA C++ on the CPU: correct kernels give right numbers, and each planted fault is reported with its line."""

import ctypes
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from subjects import cache_with_runtime

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import CompilationError
from fourfold.backends.cuda.emulator import build
from fourfold.backends.cuda.emulator.faults import FAULTS
from fourfold.backends.cuda.launch import CudaError, CudaKernel, emulated_kernels
from fourfold.backends.launch import ImpossibleLaunch
from fourfold.operations.blame import ImpossibleGrid
from fourfold.operations.refusals import is_fault

HERE = pathlib.Path(__file__).resolve().parent
CONTROLS = HERE / "cuda" / "controls.cu"
PLANTED = HERE / "cuda" / "faults.cu"

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or ""
)

# The first launch compiles all kernel objects that exist by then in one unit, so create all of them here.
KERNELS = {
    name: CudaKernel(CONTROLS, name)
    for name in (
        *(f"softmax<{type_}>" for type_ in ("float", "double", "__half", "__nv_bfloat16")),
        *("matmul<float, 16>", "matmul<double, 8>"),
        *("two_stage_sum<false>", "two_stage_sum<true>", "last_warp_sums", "passes_on"),
        *(f"atomic_sum<{type_}>" for type_ in ("float", "double", "__half", "__nv_bfloat16", "unsigned long long")),
        *("atomics", "warp_intrinsics", "syncs_ever_fewer_lanes", "reverses_in_dynamic_shared", "doubles_rows"),
        *("adds_vectors", "mathematics", "pairs<__half, __half2>", "pairs<__nv_bfloat16, __nv_bfloat162>"),
        *("tensor_cores<__half>", "tensor_cores<__nv_bfloat16>", "takes_a_struct"),
    )
}
ORDERS = ["forward", "reverse", 1, 2]


class Planted(NamedTuple):
    """A kernel of faults.cu, as its comments describe it."""

    fault: type[cuda_on_cpu.KernelFault]
    lines: set[int]
    says: str
    launch: dict[str, list[float]]


def planted_faults() -> dict[str, Planted]:
    kernels: dict[str, Planted] = {}
    launch: dict[str, list[float]] = {}
    for number, line in enumerate(PLANTED.read_text().splitlines(), 1):
        if line.startswith("// launch:"):
            words = re.findall(r"([a-z]+)((?: [\d.]+)*)", line.removeprefix("// launch:"))
            launch = {word: [float(n) for n in numbers.split()] for word, numbers in words}
        elif kernel := re.match(r"__global__ void (\w+)", line):
            name = kernel[1]
            launch, described = {}, launch
        elif mark := re.search(r"// FAULT: (\w+)(?:: (.*))?$", line):
            fault = next(f for f in FAULTS if f.__name__ == mark[1])
            planted = kernels.setdefault(name, Planted(fault, set(), mark[2] or "", described))
            assert planted.fault is fault, f"{name} is marked with two faults"
            planted.lines.add(number)
    return kernels


FAULTY = planted_faults()
FAULTY_KERNELS = {name: CudaKernel(PLANTED, name) for name in FAULTY}


@pytest.fixture(params=sampled(["checked", "fast"], "checked"))
def mode(request, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", request.param)
    return request.param


@pytest.fixture(params=ORDERS)
def order(request):
    with cuda_on_cpu.schedule(request.param):
        yield request.param


def launch_planted(name):
    launch = FAULTY[name].launch
    storage = torch.full((4096,), -1.0)
    start = 1001 if "odd" in launch else 1000
    storage[start : start + 250] = torch.arange(1.0, 251.0)
    storage[2000:2250] = 0.0
    a, c = storage[start : start + 250], storage[2000:2250]
    if "strided" in launch:
        a, c = a.view(10, 25)[:, :3], c.view(10, 25)[:, :3]
    grid, block = (tuple(map(int, launch.get(word, default))) for word, default in (("grid", [1]), ("block", [256])))
    shared_bytes = int(launch.get("shared", [0])[0])
    FAULTY_KERNELS[name].launch(grid, block, None if "null" in launch else a, c, 250, shared_bytes=shared_bytes)


# ---- planted faults


@pytest.mark.full(but=16)
@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_found_at_its_line_in_any_order(name, monkeypatch):
    planted = FAULTY[name]
    if "seconds" in planted.launch:
        monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU_SECONDS", str(planted.launch["seconds"][0]))
    for order in ORDERS:
        with cuda_on_cpu.schedule(order), pytest.raises(cuda_on_cpu.KernelFault) as caught:
            launch_planted(name)
        fault = caught.value
        assert (type(fault), fault.kernel, fault.file) == (planted.fault, name, str(PLANTED)), order
        assert fault.line in planted.lines, f"{order}: {fault}"
        assert re.search(rf"\(faults\.cu:{fault.line}\), block \(.*: {planted.says}", str(fault))


def test_every_kind_of_fault_is_planted():
    assert {planted.fault for planted in FAULTY.values()} == set(FAULTS)


def test_a_fault_says_who_did_what_to_which_argument():
    with pytest.raises(cuda_on_cpu.OutOfBounds) as caught:
        launch_planted("writes_past_the_end")
    line = min(FAULTY["writes_past_the_end"].lines)
    assert str(caught.value) == (
        f"writes_past_the_end (faults.cu:{line}), block (0,0,0), thread (250,0,0): "
        "write of 4 bytes, just past the end of argument 1 (c), a float32 tensor of shape (250,)"
    )
    assert (caught.value.block, caught.value.thread) == ((0, 0, 0), (250, 0, 0))


def test_a_write_beyond_two_outputs_names_both(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(const float* in, float* a, float* c, int n) { a[n] = in[0] + c[0]; }")
    kernel, storage = CudaKernel(source, "k"), torch.zeros(1024)
    for gap, past_c in ((0, "just past"), (8, "32 bytes past")):
        with pytest.raises(cuda_on_cpu.OutOfBounds) as caught:
            kernel.launch(1, 1, storage[310:], storage[:100], storage[200:300], 300 + gap)
        assert (
            f"write of 4 bytes, {past_c} the end of argument 2 (c), a float32 tensor of shape (100,), "
            f"or {800 + 4 * gap} bytes past the end of argument 1 (a)" in str(caught.value)
        )


def test_a_write_beyond_a_tensor_names_no_shared_array(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text(
        "__global__ void k(long long* address, float* c, int n) {\n"
        "    __shared__ float tile[64];\n"
        "    tile[0] = 0;\n"
        "    address[0] = (long long)tile;\n"
        "    c[n] = 0;\n"
        "}"
    )
    kernel, address = CudaKernel(source, "k"), torch.zeros(1, dtype=torch.int64)
    kernel.launch(1, 1, address, torch.zeros(1), 0)
    # Nothing reads or writes this tensor: its memory belongs to others.
    c = torch.frombuffer((ctypes.c_float * 100).from_address(address.item() + 1024), dtype=torch.float32)
    with pytest.raises(cuda_on_cpu.OutOfBounds) as caught:
        kernel.launch(1, 1, address, c, 100)
    assert str(caught.value).endswith("just past the end of argument 1 (c), a float32 tensor of shape (100,)")


def test_a_race_names_both_lines():
    with pytest.raises(cuda_on_cpu.Race) as caught:
        launch_planted("overwrites_without_a_second_barrier")
    write, read = sorted(FAULTY["overwrites_without_a_second_barrier"].lines)
    assert caught.value.line == write
    assert f"read in line {read}, with no barrier between" in str(caught.value)


def test_a_fault_leaves_the_next_launch_working():
    for name in ("writes_past_the_end", "barrier_in_a_branch", "reads_what_was_not_written"):
        with pytest.raises(cuda_on_cpu.KernelFault):
            launch_planted(name)
    # The same library, launched with one block, is right: the race needs two blocks.
    a, c = torch.rand(250), torch.zeros(250)
    FAULTY_KERNELS["writes_where_another_block_does"].launch(1, 256, a, c, 250)
    torch.testing.assert_close(c, a)


def test_kernels_of_all_files_run_on_the_same_stacks(tmp_path):
    """A stack with a guard is two mappings, and Linux allows a process 65,530."""

    def reverses():
        x, y = torch.rand(1024, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
        KERNELS["reverses_in_dynamic_shared"].launch(1, 1024, x, y, 1024, shared_bytes=8192)
        assert torch.equal(y, x.flip(0))
        return len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float* c) { __syncthreads(); c[threadIdx.x] = threadIdx.x; }")
    mappings, c = reverses(), torch.zeros(1024)
    CudaKernel(source, "k").launch(1, 1024, c)
    assert torch.equal(c, torch.arange(1024.0))
    assert reverses() < mappings + 1024


def test_a_sum_that_starts_with_no_value_is_absurd_every_time(tmp_path):
    source = tmp_path / "sum.cu"
    source.write_text(
        "__global__ void k(const float* a, float* c, long long n) {\n"
        "    float sum;\n"
        "    for (long long i = 0; i < n; i++) sum += a[i];\n"
        "    c[threadIdx.x] = sum;\n"
        "}\n"
    )
    c = torch.zeros(64)
    CudaKernel(source, "k").launch(1, 64, torch.ones(9), c, 9)
    assert c.unique().numel() == 1
    assert c[0] < -1e37


# ---- correct kernels


DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "__half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
}


@pytest.mark.parametrize("type_", DTYPES)
def test_softmax_is_right(type_, mode, order):
    torch.manual_seed(0)
    x = torch.randn(5, 300, dtype=torch.float64).to(DTYPES[type_])
    y = torch.full_like(x, math.nan)
    KERNELS[f"softmax<{type_}>"].launch(5, 256, x, y, 300)
    torch.testing.assert_close(y, x.double().softmax(-1).to(x.dtype))


@given(st.integers(1, 6), st.integers(1, 700), st.sampled_from([32, 64, 256]), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_softmax_is_right_for_any_shape(rows, cols, block, seed):
    x = np.random.default_rng(seed).normal(size=(rows, cols)) * 5
    given_x, y = torch.from_numpy(x), torch.full((rows, cols), math.nan, dtype=torch.float64)
    with cuda_on_cpu.schedule(seed):
        KERNELS["softmax<double>"].launch(rows, block, given_x, y, cols)
    exponents = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(y.numpy(), exponents / exponents.sum(-1, keepdims=True), rtol=1e-12)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from(ORDERS))
@settings(max_examples=20, deadline=None)
def test_matmul_is_right_for_any_shape(m, n, k, order):
    random = np.random.default_rng(m * 1600 + n * 40 + k)
    a, b = random.normal(size=(m, k)), random.normal(size=(k, n))
    for name, dtype, tile, rtol in (("float, 16", torch.float32, 16, 1e-5), ("double, 8", torch.float64, 8, 1e-13)):
        c = torch.full((m, n), math.nan, dtype=dtype)
        given_a, given_b = torch.from_numpy(a).to(dtype), torch.from_numpy(b).to(dtype)
        with cuda_on_cpu.schedule(order):
            grid = (-(-n // tile), -(-m // tile))
            KERNELS[f"matmul<{name}>"].launch(grid, (tile, tile), given_a, given_b, c, m, n, k)
        np.testing.assert_allclose(c.double().numpy(), a @ b, rtol=0, atol=rtol * k * np.abs(a).max() * np.abs(b).max())


@pytest.mark.parametrize("fences", ["false", "true"])
def test_the_last_block_may_read_what_the_others_wrote(fences, mode, order):
    x, counter = torch.arange(1000, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # the kernel resets the counter for the next launch
        out, partial = torch.zeros(1), torch.full((7,), math.nan)
        KERNELS[f"two_stage_sum<{fences}>"].launch(7, 64, x, partial, counter, out, 1000)
        assert out.item() == 499500.0
        assert counter.item() == 0


@pytest.mark.parametrize(
    ("name", "grid", "block", "given", "expected"),
    [
        ("last_warp_sums", 1, 256, torch.arange(256.0), [255 * 128]),
        ("passes_on", 3, 1, torch.zeros(2, dtype=torch.int32), [1.0, 2.0, 3.0]),  # from flag to flag
        ("syncs_ever_fewer_lanes", 1, 64, torch.arange(64.0), [31 * 16, 32 * 32 + 31 * 16]),
    ],
)
def test_what_is_ordered_by_counters_flags_or_syncwarps_is_no_race(name, grid, block, given, expected, mode, order):
    out = torch.zeros(len(expected))
    KERNELS[name].launch(grid, block, given.clone(), out)
    assert out.tolist() == expected


@pytest.mark.full(but=3)
@pytest.mark.parametrize("type_", [*DTYPES, "unsigned long long"])
def test_atomic_sums_are_right(type_, mode, order):
    dtype = DTYPES.get(type_, torch.int64)
    x, out = torch.ones(200, dtype=dtype), torch.zeros(1, dtype=dtype)
    KERNELS[f"atomic_sum<{type_}>"].launch(2, 64, x, out, 200)
    assert out.item() == 200


def test_atomics_are_right(mode, order):
    x = torch.tensor([5, -3, 12, 7, 1, 30, -8, 2] * 5, dtype=torch.int32)
    out, wraps = torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    out[4] = -1
    wide, largest = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    KERNELS["atomics"].launch(2, 32, x, out, wraps, wide, largest, 40)
    values = x.tolist()
    expected = [sum(values), -sum(values), -8, 30, -1, 0, 0, 7]
    for value in values:
        expected[4], expected[5], expected[6] = expected[4] & value, expected[5] | value, expected[6] ^ value
    assert out.tolist() == expected
    assert wraps.tolist() == [0, 0]
    assert (wide.item(), largest.item()) == (40 << 33, 30.0)


def test_warp_intrinsics_are_right(mode, order):
    n = 64
    x = np.arange(n)
    lane, first = x % 32, x // 32 * 32
    rows = [
        first + 5,
        first + lane // 8 * 8 + (lane + 1) % 8,
        np.where(lane >= 3, x - 3, x),
        np.where(lane % 16 < 13, x + 3, x),
        first + (lane ^ 9),
        *(np.repeat([f(x[:32]), f(x[32:])], 32) for f in WARP_WIDE),
        np.array([sum(1 << j for j in range(32) if j % 4 == i % 4) for i in lane]),
        np.full(n, np.sum(x % 3 == 0)),
        np.ones(n),
        np.zeros(n),
        np.where(lane < 16, first + (lane ^ 1) + 16, 0),
        np.array([v.bit_count() for v in x.tolist()]),
        np.array([32 - v.bit_length() for v in x.tolist()]),
        np.array([(v & -v).bit_length() for v in x.tolist()]),
        np.array([int(f"{v:032b}"[::-1], 2) >> 1 for v in x.tolist()]),
        np.rint(x * 0.5),
        np.full(n, 32),
    ]
    out = torch.full((len(rows), n), -1, dtype=torch.int32)
    KERNELS["warp_intrinsics"].launch(1, n, torch.from_numpy(x).int(), out)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(out[i].numpy(), row.astype(np.int64).astype(np.int32), err_msg=f"row {i}")


WARP_WIDE = [
    lambda v: int(sum(1 << i for i, e in enumerate(v.tolist()) if e % 3 == 0)),
    lambda v: int(40 in v),
    lambda v: int(v.max() < 40),
    np.sum,
    np.min,
    np.max,
    np.bitwise_or.reduce,
]


@pytest.mark.parametrize("n", [1, 100, 6144])
def test_dynamic_shared_memory_is_as_large_as_asked(n, mode):
    x, y = torch.rand(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    KERNELS["reverses_in_dynamic_shared"].launch(1, 128, x, y, n, shared_bytes=8 * n)
    assert torch.equal(y, x.flip(0))


def test_a_view_with_gaps_may_be_read_and_written(mode, order):
    x, y = torch.rand(5, 8)[:, 1:4], torch.zeros(5, 11)
    KERNELS["doubles_rows"].launch(5, 32, x, y[:, 2:5], 3, 8, 11)
    torch.testing.assert_close(y[:, 2:5], 2 * x)
    assert y[:, :2].count_nonzero() + y[:, 5:].count_nonzero() == 0


def test_tensors_may_overlap():
    storage = torch.arange(40.0).view(5, 8)
    expected = storage.clone()
    expected[:, 4:] = 2 * storage[:, :4]
    KERNELS["doubles_rows"].launch(5, 32, storage[:, :4], storage[:, 4:], 4, 8, 8)
    assert torch.equal(storage, expected)
    KERNELS["doubles_rows"].launch(5, 32, storage, storage, 8, 8, 8)
    assert torch.equal(storage, 2 * expected)


def test_transposed_and_expanded_tensors_are_all_valid():
    x, y = torch.rand(4, 6).t(), torch.zeros(24)
    KERNELS["doubles_rows"].launch(1, 32, x, y, 24, 0, 0)
    assert torch.equal(y, 2 * x.t().flatten())
    KERNELS["doubles_rows"].launch(1, 32, torch.ones(1).expand(7), y, 1, 0, 0)
    assert y[0] == 2.0


def test_none_is_a_null_pointer_and_vectors_are_aligned(mode):
    x, shift, y = torch.rand(10, 4), torch.tensor([1.0, 2.0]), torch.zeros(10, 4)
    KERNELS["adds_vectors"].launch(1, 32, x, shift, y, 10)
    torch.testing.assert_close(y, x + shift.repeat(2))
    KERNELS["adds_vectors"].launch(1, 32, x, None, y, 10)
    assert torch.equal(y, x)


@pytest.mark.parametrize("negate", [False, True])
def test_mathematics_follow_cuda(negate, mode):
    x = torch.tensor([math.nan, 0.25, -2.0, math.inf, 3.0])
    out = torch.full((9, 5), -7.0)
    KERNELS["mathematics"].launch(1, 32, x, out, negate, 3.0, 5)
    a, table = x.abs(), torch.tensor([1.0, 10.0, 100.0, 1000.0, 1.0])
    expected = torch.stack(
        [
            torch.fmax(x, torch.tensor(0.5)),
            torch.fmin(x, torch.tensor(0.5)),
            torch.fmax(x, torch.tensor(0.5)) + torch.fmin(x, torch.tensor(-0.5)),
            torch.where(x.isfinite(), (a + 1.0).rsqrt(), -1.0),
            torch.exp(-a),
            torch.exp2(-a) + 10.75,
            (-table if negate else table) * 3.0,
            a,
            torch.nan_to_num(x.clamp(0.0, 1.0), 0.0),
        ]
    )
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("type_", ["__half, __half2", "__nv_bfloat16, __nv_bfloat162"])
def test_pairs_of_halves_compute_as_two(type_, mode, order):
    dtype = DTYPES[type_.split(",")[0]]
    x = (torch.arange(64.0) / 16 - 2).to(dtype).view(32, 2)
    y, singles, out = torch.ones_like(x), torch.arange(-16.0, 16.0).to(dtype), torch.zeros(32, dtype=dtype)
    KERNELS[f"pairs<{type_}>"].launch(1, 32, x, y, singles, out, 32)
    square = (x.float() ** 2).to(dtype).float()
    torch.testing.assert_close(y, ((x.float() ** 2 + 1).to(dtype).float() + square).to(dtype))
    neighbour = singles.view(16, 2).flip(1).flatten()
    torch.testing.assert_close(out, x.sum(-1) + singles.clamp(min=0) * 2 - 1 + neighbour)


@pytest.mark.parametrize("type_", ["__half", "__nv_bfloat16"])
def test_tensor_cores_multiply(type_, mode, order):
    dtype = DTYPES[type_]
    torch.manual_seed(0)
    a, b, c = torch.randn(32, 48).to(dtype), torch.randn(16, 48).to(dtype), torch.zeros(32, 16)
    KERNELS[f"tensor_cores<{type_}>"].launch((1, 2), 32, a, b, c, 32, 16, 48)
    expected = torch.nn.functional.leaky_relu(a.double() @ b.double().t(), 0.5)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-4)


def test_shared_memory_is_each_thread_of_pythons_own():
    expected = torch.rand(3, 100, dtype=torch.float64)
    results = [torch.zeros_like(expected) for _ in range(4)]

    def work(result):
        for _ in range(20):
            KERNELS["softmax<double>"].launch(3, 64, expected, result, 100)

    threads = [threading.Thread(target=work, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        torch.testing.assert_close(result, expected.softmax(-1))


# ---- schedules


def test_a_seed_gives_the_same_order_again():
    x = torch.rand(2000) * 1e4

    def total(order):
        out = torch.zeros(1)
        with cuda_on_cpu.schedule(order):
            KERNELS["atomic_sum<float>"].launch(8, 64, x, out, 2000)
        return out.item()

    # The rounding of an atomic sum depends on the order of its terms.
    assert len({total(seed) for seed in range(6)} | {total("forward"), total("reverse")}) > 3
    assert all(total(seed) == total(seed) for seed in range(6))


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", "quick")
    with pytest.raises(ValueError, match="'quick'"):
        KERNELS["last_warp_sums"].launch(1, 32, torch.zeros(32), torch.zeros(1))


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), r"takes 3 arguments, but 4 were given"),
        ((3, 4), r"takes 3 arguments, but 5 were given"),
    ],
)
def test_a_wrong_number_of_arguments_is_refused(arguments, message, mode):
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=re.escape("softmax<double> ") + message):
        KERNELS["softmax<double>"].launch(1, 32, x, x, 3, *arguments)


@pytest.mark.parametrize(
    ("x", "y", "cols", "message"),
    [
        (torch.zeros(4), torch.zeros(4), 4.0, r"argument 2 \(cols\) is long long.* in C\+\+, but float was given"),
        (torch.zeros(4), torch.zeros(4), True, r"argument 2 .*but bool was given"),
        (torch.zeros(4), torch.zeros(4), torch.zeros(4), r"argument 2 .*but a tensor of float32 was given"),
        (torch.zeros(4), torch.zeros(4), None, r"argument 2 .*but NoneType was given"),
        (torch.zeros(4), 0, 4, r"argument 1 \(y\) is float\* in C\+\+, but int was given"),
        (
            torch.zeros(4).double(),
            torch.zeros(4),
            4,
            r"argument 0 \(x\) is const float\*.* but a tensor of float64",
        ),
        (
            torch.zeros(4).half(),
            torch.zeros(4),
            4,
            r"argument 0 \(x\) is const float\*.* but a tensor of float16",
        ),
        (torch.zeros(4), torch.zeros(4), np.float64(4), r"argument 2 \(cols\) .*but float64 was given"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(x, y, cols, message, mode):
    with pytest.raises(TypeError, match=r"softmax<float>: " + message):
        KERNELS["softmax<float>"].launch(1, 32, x, y, cols)


def test_a_parameter_that_nothing_can_be_passed_to_is_explained():
    with pytest.raises(TypeError, match=r"argument 1 \(sizes\) is int2 in C\+\+.*kernels take pointers and numbers"):
        KERNELS["takes_a_struct"].launch(1, 1, torch.zeros(1), 3)


def test_an_integer_too_large_is_refused():
    with pytest.raises(OverflowError, match="long long"):
        KERNELS["softmax<float>"].launch(1, 32, torch.zeros(1), torch.zeros(1), 1 << 63)


NUMBERS = {
    "int": (-(2**31), 7, 2**31 - 1, np.int64(3)),
    "unsigned": (0, 2**32 - 1),
    "short": (-(2**15), 2**15 - 1),
    "unsigned char": (0, 255),
    "long long": (-(2**63), 2**63 - 1),
    "size_t": (0, 2**64 - 1),
    "float": (0.1, -3, math.inf, np.float32(2.5)),
    "double": (0.1, 5, 1e300),
    "__half": (0.1, 65504.0, -2),
    "__nv_bfloat16": (0.1, 3e38, -2),
    "bool": (True, False),
}
UNFIT = {
    "int": (2**31, 1.0, True),
    "unsigned": (-1, 2**32),
    "short": (2**15,),
    "unsigned char": (-1, 256),
    "long long": (2**63,),
    "size_t": (-1, 2**64),
    "float": (1e39, "1", True),
    "double": (None,),
    "__half": (70000.0,),
    "__nv_bfloat16": (3.4e38,),
    "bool": (1,),
}
TAKES = {type_: CudaKernel(CONTROLS, f"takes<{type_}>") for type_ in NUMBERS}


@pytest.mark.full(but=2)
@pytest.mark.parametrize(("type_", "number"), [(type_, n) for type_, ns in NUMBERS.items() for n in ns])
def test_a_number_arrives_as_the_declared_type(type_, number, mode):
    out = torch.zeros(1, dtype=torch.float64)
    TAKES[type_].launch(1, 1, out, number)
    rounded = {"float": torch.float32, "__half": torch.float16, "__nv_bfloat16": torch.bfloat16}
    expected = torch.tensor(number).to(rounded[type_]) if type_ in rounded else number
    assert out.item() == float(expected)


@pytest.mark.parametrize(("type_", "number"), [(type_, n) for type_, ns in UNFIT.items() for n in ns])
def test_a_number_that_does_not_fit_is_refused_by_the_name_of_its_parameter(type_, number, mode):
    with pytest.raises((TypeError, OverflowError), match=r"takes<.*argument 1 \(number\) is .* in C\+\+"):
        TAKES[type_].launch(1, 1, torch.zeros(1, dtype=torch.float64), number)


@pytest.mark.parametrize("block", [0, 1025, (32, 33), (-1,), (1, 1, 0), ()])
def test_a_block_that_is_not_possible_is_refused(block):
    with pytest.raises(ValueError, match=r"threads|dimensions"):
        KERNELS["last_warp_sums"].launch(1, block, torch.zeros(32), torch.zeros(1))


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "says"),
    [
        (1 << 31, 32, 0, "2,147,483,648 blocks along x; a GPU takes at most 2,147,483,647"),
        ((1, 65_536), 32, 0, "65,536 blocks along y; a GPU takes at most 65,535"),
        ((1, 1, 65_536), 32, 0, "65,536 blocks along z; a GPU takes at most 65,535"),
        (1, (1, 1, 65), 0, "65 threads along z; a GPU takes at most 64"),
        (1, 32, 232_449, "232,449 bytes of dynamic shared memory; a block has at most 232,448"),
    ],
)
def test_a_launch_that_every_gpu_refuses_is_refused(grid, block, shared_bytes, says, mode):
    with pytest.raises(ImpossibleGrid if "blocks" in says else ImpossibleLaunch, match=says) as caught:
        KERNELS["last_warp_sums"].launch(grid, block, torch.zeros(32), torch.zeros(1), shared_bytes=shared_bytes)
    assert not is_fault(caught.value)


def test_a_grid_may_be_as_large_as_a_gpu_takes():
    out = torch.zeros(1)
    for grid in ((1, 65_535), (1, 1, 65_535)):
        KERNELS["atomic_sum<float>"].launch(grid, 1, torch.ones(1), out, 0)


@pytest.mark.parametrize("grid", [0, (4, 0), (0, 4), (2, 3, 0)], ids=str)
def test_an_empty_grid_launches_nothing(grid, mode):
    kernel = CudaKernel(CONTROLS, "last_warp_sums")
    x, out = torch.ones(32), torch.full((1,), -1.0)
    kernel.launch(grid, 32, x, out)
    assert out.item() == -1
    assert kernel not in emulated_kernels()
    kernel.launch(1, 32, x, out)
    assert out.item() == 32
    assert kernel in emulated_kernels()


def test_tensors_on_no_device_are_refused():
    with pytest.raises(ValueError, match="no argument is a tensor"):
        KERNELS["last_warp_sums"].launch(1, 32, None, None)
    with pytest.raises(ValueError, match="argument 1 is on meta"):
        KERNELS["last_warp_sums"].launch(1, 32, torch.zeros(32), torch.zeros(1, device="meta"))


def test_a_cluster_on_the_cpu_is_refused():
    with pytest.raises(NotImplementedError, match="cluster"):
        KERNELS["last_warp_sums"].launch(2, 32, torch.zeros(32), torch.zeros(1), cluster=2)


# ---- compiling


def test_a_compile_error_shows_the_compilers_words(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void k(float* c) { c[0] = undeclared; }\n__global__ void fine(float* c) {}")
    with pytest.raises(CompilationError, match=r"broken\.cu:1.*undeclared"):
        CudaKernel(source, "k").launch(1, 1, torch.zeros(1))


def test_a_kernel_that_does_not_compile_leaves_the_others_of_its_file(tmp_path):
    source = tmp_path / "one_broken.cu"
    source.write_text("template <class T> __global__ void k(T* c) { c[0] = T(1) << 3; }\n")
    broken, fine = CudaKernel(source, "k<float>"), CudaKernel(source, "k<int>")
    c = torch.zeros(1, dtype=torch.int32)
    fine.launch(1, 1, c)
    assert c.item() == 8
    with pytest.raises(CudaError, match="operator<<"):
        broken.launch(1, 1, torch.zeros(1))


def test_a_changed_header_is_compiled_anew(tmp_path):
    source, header, nested = tmp_path / "k.cu", tmp_path / "outer.cuh", tmp_path / "inner.cuh"
    source.write_text('#include "outer.cuh"\n__global__ void k(float* c) { c[0] = VALUE; }')
    header.write_text('#include "inner.cuh"\n')
    c = torch.zeros(1)
    for value in (1.0, 2.0):
        nested.write_text(f"#define VALUE {value}\n")
        CudaKernel(source, "k").launch(1, 1, c)
        assert c.item() == value


@pytest.mark.full
def test_kernels_of_one_file_are_compiled_together_and_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CACHE", str(cache_with_runtime(tmp_path / "cache")))
    source = tmp_path / "k.cu"
    source.write_text("template <int N> __global__ void k(float* c) { c[0] = N; }")
    compiled = []
    compile_ = build._compile
    monkeypatch.setattr(build, "_compile", lambda *a: compiled.append(a[1]) or compile_(*a))
    kernels = [CudaKernel(source, f"k<{n}>") for n in range(3)]
    c = torch.zeros(1)
    for n in (2, 0, 1):
        kernels[n].launch(1, 1, c)
        assert c.item() == n
    CudaKernel(source, "k<1>").launch(1, 1, c)
    assert compiled == [["k<0>", "k<1>", "k<2>"]]


@pytest.mark.full
def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float* c) { c[threadIdx.x] = threadIdx.x; }")
    program = (
        "import pathlib, sys, torch\n"
        "from fourfold.backends.cuda.launch import CudaKernel\n"
        "c = torch.zeros(4)\n"
        "CudaKernel(pathlib.Path(sys.argv[1]), 'k').launch(1, 4, c)\n"
        "print(c.tolist())\n"
    )
    root = str(HERE.parents[1])
    environment = {**os.environ, "FOURFOLD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": root}
    command = [sys.executable, "-c", program, str(source)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [output.strip() for output in outputs] == ["[0.0, 1.0, 2.0, 3.0]"] * 3
    manifests = list((tmp_path / "cache" / "cuda_on_cpu").rglob("*.json"))
    assert [json.loads(manifest.read_text())["kernels"] for manifest in manifests] == [["k"]]
    assert not [path for path in (tmp_path / "cache").rglob("tmp*") if path.exists()]


def test_a_missing_compiler_is_a_reason(monkeypatch):
    build.unavailable_reason.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        assert "no-such-compiler" in cuda_on_cpu.unavailable_reason()
        with pytest.raises(CudaError, match="no-such-compiler"):
            cuda_on_cpu.CpuKernel(CONTROLS, "last_warp_sums", [], checked=True)
    finally:
        build.unavailable_reason.cache_clear()


SHIFTED = """
__global__ void shifted(const float* x, float* out) {
    __shared__ float tile[64], sum[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    sum[threadIdx.x] = 0;
    out[threadIdx.x] = sum[threadIdx.x] + tile[63 - threadIdx.x];
}
"""


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(["_A", "_z"], "_A"))  # before the variable and after it, as names are sorted
def test_a_shared_array_may_have_a_second_name(name, tmp_path, monkeypatch):
    """g++ 13 names a variable of a template whose argument is a lambda twice."""
    with_redzones = build._insert_redzones

    def with_alias(assembly):
        (tile,) = re.findall(r"^(_Z\w*tile\w*):$", assembly, re.MULTILINE)
        return with_redzones(f"{assembly}\t.weak {name}\n\t.hidden {name}\n\t.set {name},{tile}\n")

    monkeypatch.setattr(build, "_insert_redzones", with_alias)
    monkeypatch.setenv("FOURFOLD_CACHE", str(cache_with_runtime(tmp_path / "cache")))
    source = tmp_path / "k.cu"
    source.write_text(SHIFTED)
    x, out = torch.arange(64.0), torch.zeros(64)
    CudaKernel(source, "shifted").launch(1, 64, x, out)
    assert torch.equal(out, x.flip(0))


def test_a_file_that_does_not_compile_is_compiled_once_until_it_changes(tmp_path, monkeypatch):
    source, calls, compiled = tmp_path / "k.cu", [], build._compile

    def counted(*arguments):
        calls.append(arguments[1])
        return compiled(*arguments)

    monkeypatch.setattr(build, "_compile", counted)
    monkeypatch.setenv("FOURFOLD_CACHE", str(cache_with_runtime(tmp_path / "cache")))
    source.write_text('#include "missing.h"\n__global__ void k(float* c) { *c = 1; }')
    for _ in range(3):
        with pytest.raises(CompilationError, match=r"k\.cu:1:10: fatal error: missing\.h: No such file"):
            CudaKernel(source, "k").compile_for("cpu")
    assert calls == [["k"]]
    source.write_text("__global__ void k(float* c) { *c = 1; }")
    CudaKernel(source, "k").compile_for("cpu")
    assert calls == [["k"]] * 2
