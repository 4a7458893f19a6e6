"""mbarriers, the copy engine (TMA) and wgmma on the CPU: right kernels are right, and inline PTX is translated.

What wrong kernels are told is in tests/known_wrong/planted_hopper.py.
"""

import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fourfold.backends.cuda import on_cpu as cuda_on_cpu
from fourfold.backends.cuda.compile import CompilationError, CudaError
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.cuda.on_cpu import ptx
from fourfold.backends.cuda.tensor_map import swizzled_map

SOURCE = pathlib.Path(__file__).parent / "cuda" / "asynchronous.cu"
KERNELS = {
    name: (CudaKernel(SOURCE, name), threads)
    for name, threads in (("pipeline", 128), ("pairs_of_warps", 128), ("one_lane_waits", 32))
}

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or ""
)


@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize("order", ["forward", "reverse", 1, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_right_kernel_is_right_in_any_order(name, order, mode, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", mode)
    kernel, threads = KERNELS[name]
    x = torch.arange(80 * 32).remainder(97).to(torch.float16).view(80, 32) / 16
    sums = torch.full((32,), torch.nan)
    with cuda_on_cpu.schedule(order):
        kernel.launch(1, threads, swizzled_map(x, (8, 32)), x, sums, 80)
    assert torch.equal(sums, x.float().sum(0))


def test_shared_memory_is_that_of_each_thread_of_pythons():
    """The threads wait for one another, so that each of them has memory of its own."""
    kernel, block = KERNELS["pipeline"]
    x = torch.arange(80 * 32).remainder(97).to(torch.float16).view(80, 32) / 16
    together = threading.Barrier(4)

    def sums_of_rows(_: int) -> torch.Tensor:
        together.wait()
        sums = torch.full((32,), torch.nan)
        kernel.launch(1, block, swizzled_map(x, (8, 32)), x, sums, 80)
        together.wait()
        return sums

    with ThreadPoolExecutor(4) as pool:
        for sums in pool.map(sums_of_rows, range(4)):
            assert torch.equal(sums, x.float().sum(0))


@pytest.mark.parametrize(
    ("rows", "columns", "start", "box", "says"),
    [
        (8, 32, 1, (8, 32), "an address that is not a multiple of 16"),
        (8, 31, 0, (8, 32), "a distance of rows that is not a multiple of 16 bytes: 62"),
        (8, 32, 0, (257, 32), "a box of 257 rows"),
        (8, 128, 0, (8, 128), "a box of 128 columns"),
    ],
)
def test_a_map_that_a_driver_refuses_is_refused(rows, columns, start, box, says):
    storage = torch.zeros(rows * columns + start, dtype=torch.float16)
    with pytest.raises(CudaError, match=says):
        swizzled_map(storage[start:].view(rows, columns), box)


def test_what_is_no_tensor_map_is_refused():
    kernel, threads = KERNELS["pipeline"]
    with pytest.raises(TypeError, match=r"argument 0 \(map\) is TensorMap in C\+\+, but int was given"):
        kernel.launch(1, threads, 3, torch.zeros(1, dtype=torch.float16), torch.zeros(32), 8)


def test_an_instruction_that_is_not_emulated_is_named(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text(
        '__global__ void k(float* c) {\n    unsigned r;\n    asm volatile("lop3.b32 %0, 1, 2, 3, 5;" : "=l"(r));\n'
        "    c[0] = r;\n}\n"
    )
    with pytest.raises(CompilationError, match=r"^inline PTX that is not emulated on the CPU: lop3\.b32"):
        CudaKernel(source, "k").launch(1, 1, torch.zeros(1))


def test_a_statement_of_several_lines_leaves_the_lines_after_it_where_they_were():
    unit = '# 1 "k.cu"\nvoid k() {\n    asm volatile(\n        "bar.sync 0;"\n        ::: "memory");\n    after();\n}\n'
    text, places = ptx.translated(unit, {"k.cu"})
    assert places == [("k.cu", 2)]
    assert text.splitlines().index("    after();") == unit.splitlines().index("    after();")
    assert "::fourfold::ptx::named_barrier(0, 0, true);" in text


def test_operands_labels_and_guards_are_translated():
    unit = '# 1 "k.cu"\nasm("{ .reg .pred p; again: setp.lt.s32 p, %1, %2; @!p bra again; mov.b32 %0, 7; }"'
    unit += ' : "=r"(x) : "r"(y), "n"(3));'
    text, _ = ptx.translated(unit, {"k.cu"})
    for part in (
        "__label__ again;",
        "auto&& fourfold_0 = (x);",
        "ptx_p = (int)(fourfold_1) < (int)(fourfold_2);",
        "if (!ptx_p) { goto again; }",
        "fourfold_0 = 7;",
    ):
        assert part in text


def test_other_files_keep_their_inline_assembly():
    unit = '# 1 "library.h"\nasm("cpuid");\n'
    assert ptx.translated(unit, {"k.cu"}) == (unit, [])
