"""A kernel that takes Triton's compiler too long is no failure, and is not compiled again. No GPU is needed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
import warm
from subjects import subject_of

from fourfold.backends.triton import compilation
from fourfold.backends.triton.compilation import ends_within
from fourfold.checks.ahead_of_time import environment
from fourfold.checks.records import operations
from fourfold.checks.search import Search
from fourfold.compat.triton_internals import Specialisation
from fourfold.numerics.compare import Agreement
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached

ROOT = Path(__file__).parents[2]
# With 4 warps, a block of 65,536 columns takes the assembler three seconds, and one of 1,024 a tenth of one.
KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, output_ptr, cols, BLOCK_COLS: tl.constexpr):
    # One program owns one row.
    col = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + tl.program_id(0) * cols + col, mask=col < cols, other=-float("inf")).to(tl.float32)
    terms = tl.exp(x - tl.max(x, axis=0))
    tl.store(output_ptr + tl.program_id(0) * cols + col, terms / tl.sum(terms, axis=0), mask=col < cols)


@triton.jit
def wrong_kernel(x_ptr, output_ptr, cols, BLOCK_COLS: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK_COLS), there_is_no_such_name)


def launch(kernel, cols, num_warps=4, dtype="float32"):
    try:
        x, block = torch.empty(2, cols, dtype=getattr(torch, dtype)), triton.next_power_of_2(cols)
        kernel[(2,)](x, x.clone(), cols, block, num_warps=num_warps)
    except Exception as error:  # as those do who would take another way
        return type(error).__name__
    return "launched"
"""
# Compile the given kernels, and print for each kernel and size the result and the number of children.
COMPILES = """
import contextlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import kernels
from fourfold.backends.triton.compilation import limit_compilation
from fourfold.compat.triton_internals import AbsentDriver, driver_replaced, launches_replaced
from fourfold.operations.not_reached import NotReached

forks, shipped = [], os.fork
os.fork = lambda: forks.append(1) or shipped()

def only_compile(shipped, kernel, *arguments, warmup, **options):
    return shipped(kernel, *arguments, warmup=True, **options)

found, limits = [], json.loads(sys.argv[3])
with driver_replaced(AbsentDriver(90)), launches_replaced(only_compile), limit_compilation("cuda", 0.9, **limits):
    for name, *given in json.loads(sys.argv[2]):
        before = len(forks)
        try:
            outcome = kernels.launch(getattr(kernels, name), *given)
        except NotReached as error:
            outcome = f"{error}{'' if error.is_of_this_package else ' says a kernel'}"
        found.append([outcome, len(forks) - before])
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # for the child that compiles ahead, if there is one
try:
    os.waitpid(-1, os.WNOHANG)
    found.append("a child is left")
except ChildProcessError:
    pass
print(json.dumps(found))
"""
TOO_LONG = "not reached: softmax_kernel with BLOCK_COLS=65536 takes its compiler more than 1 s"


def compiled(folder: Path, *wanted: tuple[Any, ...], **limits: Any) -> list[Any]:
    """Compile kernels in another process, each for columns, warps and a dtype; return an outcome for each."""
    (folder / "kernels.py").write_text(KERNELS)
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "FOURFOLD_CACHE": str(folder / "cache")}
    variables = {**environment(), **caches, "PYTHONPATH": str(ROOT)}
    return json.loads(warm.printed(COMPILES, folder, json.dumps(wanted), json.dumps(limits), env=variables))


@pytest.mark.full
def test_a_block_that_takes_too_long_is_not_reached_and_larger_ones_are_not_compiled(tmp_path: Path) -> None:
    small, long, longer, many_warps = (
        ("softmax_kernel", *each) for each in ((999, 4), (65000, 4), (262144, 2), (65000, 32))
    )
    assert compiled(tmp_path, small, long, longer, small, many_warps) == [
        ["launched", 1],
        [TOO_LONG, 1],
        [TOO_LONG, 0],
        ["launched", 0],
        ["launched", 1],
    ]
    # Another process, which finds in the caches the compiled and the abandoned kernels.
    assert compiled(tmp_path, longer, small, long) == [[TOO_LONG, 0], ["launched", 0], [TOO_LONG, 0]]


def test_other_dtypes_and_other_integers_are_compiled_ahead(tmp_path: Path) -> None:
    wanted = [("softmax_kernel", cols, 4, dtype) for dtype in ("float16", "float64") for cols in (33, 48)]
    # The first kernel, and a child for the other three of this block.
    expected = [["launched", 2], *[["launched", 0]] * 3]
    found = compiled(tmp_path, *wanted, dtypes=["float16", "float64"], cores=3)
    assert found == expected


def test_what_a_kernel_is_likely_to_be_compiled_for_next() -> None:
    words, types = [["tt.divisibility", 16]], {"x_ptr": "*fp16", "ids_ptr": "*i32", "scale": "fp32", "n": "i32"}
    first = Specialisation(types, {(4,): tl.float32, (5,): 64}, {(0,): words, (1,): [], (3,): []})
    other = first.with_other_integers()
    assert other is not None
    assert other.multiples == {(0,): words, (1,): [], (3,): words}
    assert other.with_other_integers() == first
    assert Specialisation({"x_ptr": "*fp16"}, {}, {(0,): words}).with_other_integers() is None
    assert first.dtype() == "float16"
    assert Specialisation({"x_ptr": "*fp16", "y_ptr": "*fp32"}, {}, {}).dtype() is None
    wide = first.with_dtype("float64")
    assert wide.types == {**types, "x_ptr": "*fp64"}
    assert wide.constants == {(4,): tl.float64, (5,): 64}
    assert wide.with_dtype("float16") == first


def test_what_does_not_compile_raises_as_ever(tmp_path: Path) -> None:
    assert compiled(tmp_path, ("wrong_kernel", 100, 4)) == [["CompilationError", 1]]


def test_the_exception_passes_through_a_backward_pass() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise NotReached("too long")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotReached, match="not reached: too long"):
        torch.autograd.grad(Identity.apply(x), [x], torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_small_examples_are_compiled_before_large_ones(device: str) -> None:
    operation = operations()["softmax"]
    given = subject_of(operation, torch.softmax, "float16", device=device)
    elements = list[int]()
    search = Search(examples=1)

    def body(case: Case) -> None:
        elements.append(case.elements)
        search.saw(Agreement(0.0, case.elements, 0))

    search.cases(given, "forward", body)
    named = elements[: len(operation.examples)]
    assert len(named) == len(operation.examples)
    assert (named == sorted(named)) == (device == "cuda")


def spin() -> None:
    while True:
        pass


def start_what_spins() -> None:
    subprocess.run([sys.executable, "-S", "-c", "while True: pass"], check=True)


def raise_something() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("work", "ends"),
    [(os.getpid, True), (raise_something, True), (spin, False), (start_what_spins, False), (signal.pause, False)],
)
def test_work_ends_within_its_limit(work: Callable[[], Any], ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "CLOCK", 1 if work is signal.pause else 600)
    assert ends_within(work, 1) == ends


def test_an_interrupted_wait_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, children = os.waitpid, list[int]()

    def interrupted(child: int, options: int) -> tuple[int, int]:
        children.append(child)
        if len(children) == 1:
            raise KeyboardInterrupt
        return wait(child, options)

    monkeypatch.setattr(os, "waitpid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ends_within(signal.pause, 600)
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)
