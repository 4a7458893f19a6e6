"""mbarriers, copies and wgmma on the CPU: right kernels are right, and inline PTX is translated.

tests/known_wrong/planted_hopper.py has wrong kernels and their errors.
"""

import math
import pathlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import CompilationError, CudaError
from fourfold.backends.cuda.emulator import ptx
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.cuda.tensor_map import swizzled_map

SOURCE = pathlib.Path(__file__).parent / "cuda" / "asynchronous.cu"
COPIES = SOURCE.with_name("copies.cu")
KERNELS = {
    name: (CudaKernel(SOURCE, name), threads)
    for name, threads in (("pipeline", 128), ("pairs_of_warps", 128), ("one_lane_waits", 32))
}

BOX = CudaKernel(SOURCE, "box_of_planes")
POWERS = CudaKernel(SOURCE, "powers_of_two")
PRODUCTS = {
    (dtype, fault): CudaKernel(SOURCE, f"registers_times_shared<{cpp}, {fault}>")
    for dtype, cpp in ((torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16"))
    for fault in ("NONE", "NO_FENCE", "NO_FENCE_AGAIN")
}
INT8_PRODUCTS = {
    fault: CudaKernel(SOURCE, f"shared_times_shared<{fault}>")
    for fault in ("NONE", "NO_FENCE", "NO_WAIT", "NO_WAIT_FOR_GROUP", "DIVERGENT")
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
    """The threads wait for one another, so that each has its own memory."""
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


@pytest.mark.parametrize("box", [(1, 8, 64), (2, 3, 64), (3, 1, 8)])
@pytest.mark.parametrize("start", [(0, 0, 0), (1, 3, 40), (2, -2, -8), (-1, 9, 64), (4, 0, 0)])
def test_a_box_of_planes_holds_what_is_there_and_zeros(start, box):
    """Boxes reach past each end of each axis: zeros are loaded there, and nothing is stored."""
    x = torch.arange(1, 1 + 5 * 12 * 80).to(torch.bfloat16).view(5, 12, 80)[1:4, 1:11, 8:80]
    loaded = torch.full((7, 22, 200), 9, dtype=torch.bfloat16)
    stored = torch.full_like(x, 9)
    for plane, row, column in torch.cartesian_prod(*map(torch.arange, box)).tolist():
        at = plane + start[0], row + start[1], column + start[2]
        inside = all(0 <= place < size for place, size in zip(at, x.shape))
        loaded[plane, row, column] = x[at] if inside else 0
        if inside:
            stored[at] = x[at]
    for expected, to in ((loaded, (0, 0, 0)), (stored, start)):
        result = torch.full(expected.shape, 9, dtype=x.dtype)
        maps, size = (swizzled_map(x, box), swizzled_map(result, box)), 2 * math.prod(box)
        BOX.launch(1, 1, *maps, x, size, *start[::-1], *to[::-1], shared_bytes=size + 1024)
        assert torch.equal(result, expected)


def test_a_copy_has_as_many_dimensions_as_its_map():
    matrix = torch.zeros(8, 64, dtype=torch.float16)
    with pytest.raises(cuda_on_cpu.OutOfBounds, match="a bulk copy of 3 dimensions by the map of a tensor of 2"):
        BOX.launch(1, 1, *[swizzled_map(matrix, (8, 64))] * 2, matrix, 1024, 0, 0, 0, 0, 0, 0, shared_bytes=2048)


@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wgmma_takes_an_operand_from_registers(dtype, mode, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", mode)
    a = torch.arange(64 * 16).remainder(23).sub(11).to(dtype).view(64, 16)
    b = torch.arange(16 * 64).remainder(29).sub(14).to(dtype).view(16, 64)
    sums = torch.full((64, 64), torch.nan)
    PRODUCTS[dtype, "NONE"].launch(
        1, 128, swizzled_map(b, (16, 64)), a.view(torch.int32), sums, shared_bytes=16 * 128 + 1024
    )
    assert torch.equal(sums, 2 * (a.float() @ b.float()))


@pytest.mark.parametrize(("fault", "line"), [("NO_FENCE", "multiply(d, words, b, 0"), ("NO_FENCE_AGAIN", "multiply(d")])
def test_registers_of_an_operand_take_a_fence_as_well(fault, line):
    a, b = torch.zeros(64, 8, dtype=torch.int32), torch.zeros(16, 64, dtype=torch.float16)
    with pytest.raises(
        cuda_on_cpu.Race, match=r"takes registers that the threads have used, with no wgmma\.fence"
    ) as told:
        PRODUCTS[torch.float16, fault].launch(
            1, 128, swizzled_map(b, (16, 64)), a, torch.zeros(64, 64), shared_bytes=16 * 128 + 1024
        )
    number = int(re.search(r"asynchronous\.cu:(\d+)", str(told.value))[1])
    assert SOURCE.read_text().splitlines()[number - 1].strip().startswith(line)


def int8_product(
    a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor, add: bool = False, fault: str = "NONE"
) -> torch.Tensor:
    """Return the product of int8 matrices that a warpgroup computes, perhaps added to int32 sums."""
    maps, sums = (swizzled_map(x.view(torch.float16), (64, 64)) for x in (a, b)), sums.clone()
    INT8_PRODUCTS[fault].launch(1, 128, *maps, sums, int(add), shared_bytes=2 * 64 * 128 + 1024)
    return sums


@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize("add", [False, True])
def test_wgmma_multiplies_int8(add, mode, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", mode)
    a, b = torch.randint(-128, 128, (2, 64, 128), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    a[0], b[0] = -128, -128
    sums = torch.arange(64 * 64).view(64, 64).sub(2000).to(torch.int32)
    # int32 wraps around.
    sums[0, 0] = 2**31 - 1
    expected = a.long() @ b.long().t() + add * sums.long()
    assert torch.equal(int8_product(a, b, sums, add), expected.to(torch.int32))


@pytest.mark.parametrize(
    ("fault", "raises", "says"),
    [
        ("NO_FENCE", cuda_on_cpu.Race, r"takes registers that the threads have used, with no wgmma\.fence"),
        ("NO_WAIT", cuda_on_cpu.Race, r"wgmma reads shared address \d+ before the copy to it has landed"),
        ("DIVERGENT", cuda_on_cpu.DivergentWarp, "the threads of a warpgroup give wgmma different operands"),
    ],
)
def test_wgmma_of_int8_is_checked(fault, raises, says):
    zeros = torch.zeros((64, 128), dtype=torch.int8)
    with pytest.raises(raises, match=says):
        int8_product(zeros, zeros, torch.zeros((64, 64), dtype=torch.int32), fault=fault)


def test_sums_of_int8_are_wrong_until_they_are_waited_for():
    zeros = torch.zeros((64, 128), dtype=torch.int8)
    sums = torch.zeros((64, 64), dtype=torch.int32)
    assert (int8_product(zeros, zeros, sums, fault="NO_WAIT_FOR_GROUP") == -1).all()


def sums_ahead(
    folder: pathlib.Path, width: int, clocks: bool, fault: str = "NONE"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums that threads compute of rows that they copy ahead, and the right ones.

    With clocks, the unit also has asynchronous work of another kind.
    """
    text = COPIES.read_text()
    source = folder / COPIES.name
    source.write_text(text + '__global__ void other() { asm volatile("fence.proxy.async;" ::: "memory"); }\n' * clocks)
    x = torch.arange(5 * 64 * width).remainder(101).to(torch.float32).view(5, 64 * width)
    sums = torch.full((64 * width,), torch.nan)
    faults = re.search(r"enum Fault {(.*)}", text)[1].replace(" ", "").split(",")
    CudaKernel(source, f"sum_ahead<{4 * width}>").launch(1, 64, x, sums, 5, faults.index(fault))
    return sums, x.sum(0).roll(-1)


@pytest.mark.parametrize("mode", ["checked", "fast"])
@pytest.mark.parametrize("order", ["forward", "reverse", 1])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("clocks", [False, True])
def test_copies_of_threads_land_when_they_are_waited_for(clocks, width, order, mode, monkeypatch, tmp_path):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", mode)
    with cuda_on_cpu.schedule(order):
        sums, expected = sums_ahead(tmp_path, width, clocks)
    assert torch.equal(sums, expected)


NOT_LANDED = r"reads shared address \d+ before the copy to it has landed in line \d+: no wait for its group"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("NO_COMMIT", NOT_LANDED),
        ("NO_WAIT", NOT_LANDED),
        ("WAIT_FOR_OLDER", NOT_LANDED),
        ("WAIT_AFTER_BARRIER", None),
        ("NO_BARRIER", None),
        ("OVERWRITE", None),
    ],
)
@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("clocks", [False, True])
def test_copies_of_threads_are_awaited_by_all_that_read_them(clocks, order, fault, says, tmp_path):
    with cuda_on_cpu.schedule(order), pytest.raises(cuda_on_cpu.Race, match=says):
        sums_ahead(tmp_path, 4, clocks, fault)


def test_copies_that_nothing_waits_for_are_not_a_number_without_checks(monkeypatch, tmp_path):
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", "fast")
    assert sums_ahead(tmp_path, 1, False, "NO_WAIT")[0].isnan().all()


def test_a_copy_of_a_thread_reads_inside_of_the_tensor(tmp_path):
    with pytest.raises(cuda_on_cpu.OutOfBounds, match="read of 16 bytes"):
        sums_ahead(tmp_path, 4, False, "READ_PAST_THE_END")


def test_powers_of_two_are_0_in_the_place_of_subnormal_numbers():
    x = torch.tensor([0, 0.5, 127, 128, -126, -126.5, -1e9, 1e-40, torch.inf, -torch.inf, torch.nan])
    y = torch.full_like(x, 7)
    POWERS.launch(1, len(x), x, y)
    expected = torch.exp2(x)
    expected[expected < 2.0**-126] = 0
    assert torch.allclose(y, expected, rtol=1e-6, atol=0, equal_nan=True)


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
    text, places = ptx.translate(unit, {"k.cu"})
    assert places == [("k.cu", 2)]
    assert text.splitlines().index("    after();") == unit.splitlines().index("    after();")
    assert "::fourfold::ptx::named_barrier(0, 0, true);" in text


def test_operands_labels_and_guards_are_translated():
    unit = '# 1 "k.cu"\nasm("{ .reg .pred p; again: setp.lt.s32 p, %1, %2; @!p bra again; mov.b32 %0, 7; }"'
    unit += ' : "=r"(x) : "r"(y), "n"(3));'
    text, _ = ptx.translate(unit, {"k.cu"})
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
    assert ptx.translate(unit, {"k.cu"}) == (unit, [])
