"""Triton kernels that were made for a GPU before the CPU was requested run in the interpreter."""

from pathlib import Path

import pytest
import warm
from samples import sampled

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
import triton
import triton.language as tl


@triton.jit
def sum_and_largest(x):
    return tl.sum(x, axis=0) + tl.max(x, axis=0)


@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.softmax(x) + sum_and_largest(x) + x.sum() + tl.sigmoid(x) + tl.cdiv(n, 2)
    tl.store(y_ptr + at, y, mask=at < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.exp(tl.load(x_ptr + at, mask=at < n, other=0.0)), mask=at < n)


class Kernels:
    in_a_class = kernel


in_a_list = [kernel]


def with_closure():
    inner = kernel
    return lambda *args, **options: inner[(1,)](*args, **options)


in_a_closure = with_closure()

from fourfold.backends.triton.takeover import interpret_kernels

interpret_kernels()
x = torch.randn(100)
padded = torch.nn.functional.pad(x, (0, 28))
expected = padded.softmax(0)[:100] + x.sum() * 2 + padded.max() + x.sigmoid() + 50
assert type(kernel).__name__ == "InterpretedFunction"
assert kernel.src.startswith("def kernel(") and kernel.__globals__ is globals()  # as a generator of code reads it
launches = [kernel[(1,)], Kernels.in_a_class[(1,)], in_a_list[0][(1,)], in_a_closure]
for launch in launches:
    y = torch.empty(100)
    launch(x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, expected)
tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, y, 100)
torch.testing.assert_close(y, x.exp())
"""


def test_kernels_that_a_conftest_imports_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(SCRIPT.partition("from fourfold")[0])
    (tmp_path / "conftest.py").write_text("import kernels\n")
    (tmp_path / "test_it.py").write_text(
        "import torch\nfrom kernels import kernel\n\n\ndef test_it():\n"
        "    kernel[(1,)](torch.randn(100), torch.empty(100), 100, BLOCK=128)\n"
    )
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = warm.run("pytest", "-p", "fourfold", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("first", sampled(["", "import fourfold\n"], ""))
def test_kernels_of_every_kind_of_owner_are_replaced(first: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(first + SCRIPT)
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    warm.printed(script, env=environment)
