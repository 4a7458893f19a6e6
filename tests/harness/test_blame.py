"""The blame for an exception: an intended refusal differs from a bug, and from a lack of the harness."""

import enum
import math
import operator
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import fourfold
from fourfold.backends.triton import takeover
from fourfold.candidates.load import modules
from fourfold.instruments.evaluation import blame_implementation
from fourfold.operations.blame import Blame, ImpossibleGrid, Lack, blame_of, recorded_blame
from fourfold.operations.claims import Claims
from fourfold.operations.refusals import is_refusal, reason

X = torch.zeros(8)
HALF = X.to(torch.bfloat16)


class Kind(enum.Enum):
    """A kind."""

    ONE = 1


def of_two(left: Any, right: Any) -> Any:
    return left


def stated() -> None:
    raise KeyError("no kernel for int8")


def asserted() -> None:
    assert X.ndim == 2


def asserted_with_a_message() -> None:
    assert X.ndim == 2, "x must have two axes"


def translated() -> None:
    try:
        operator.itemgetter("int8")({})
    except KeyError as error:
        raise ValueError("no kernel for int8") from error


def reraised() -> None:
    try:
        X.no_such_attribute  # noqa: B018
    except AttributeError:
        raise


def unbound() -> None:
    if X.ndim == 2:
        rows = 1
    print(rows)


def unpacked() -> None:
    _rows, _cols = X.shape


def recursive() -> None:
    recursive()


def lacking() -> None:
    raise Lack("the emulator has no clusters")


@triton.jit
def kernel_with_an_attribute(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, at.no_such_attribute)


@triton.jit
def kernel_with_a_function(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.no_such_function(1))


@triton.jit
def kernel_with_a_static_assertion(x, N: tl.constexpr):
    tl.static_assert(N == 4, "N must be 4")


@triton.jit
def kernel_of_odd_blocks(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, 3), 1.0)


@triton.jit
def kernel_of_assembly(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.inline_asm_elementwise("ld.f32 $0, [$1];", "=f,f", [tl.load(at)], tl.float32, True, 1))


ROWS: dict[Blame, dict[str, Callable[[], Any]]] = {
    Blame.REFUSAL: {
        "a raise statement": stated,
        "an assertion": asserted,
        "an assertion with a message": asserted_with_a_message,
        "a bug that is stated in other words": translated,
        "unpacking a shape": unpacked,
        "torch lacks the dtype": lambda: torch.linalg.svd(HALF.reshape(2, 4)),
        "torch lacks the dtype, by a method without arguments": lambda: HALF.numpy(),
        "NumPy lacks the dtype": lambda: np.asarray(HALF),
        "torch lacks the shape": lambda: X.view(3, 3),
        "an operator of torch": lambda: X @ torch.zeros(3),
        "torch's code in Python": lambda: F.pad(X, (1, 1), mode="none such"),
        "NumPy lacks the shape": lambda: np.zeros(8).reshape(3, 3),
        "torch's autograd": lambda: torch.autograd.grad(X.sum(), X),
        "a library is missing": lambda: __import__("no_such_library"),
        "an assertion of Triton's language": lambda: kernel_with_a_static_assertion[(1,)](X, 8),
        "what Triton compiles not": lambda: kernel_of_odd_blocks[(1,)](X, 8),
    },
    Blame.BUG: {
        "an attribute": lambda: X.no_such_attribute,
        "an attribute of a module": lambda: torch.nn.Module().no_such_attribute,
        "an attribute that is caught and raised again": reraised,
        "a name": lambda: no_such_name,  # type: ignore[name-defined]  # noqa: F821
        "a local name": unbound,
        "an index": lambda: (1, 2)[2],
        "an axis": lambda: X.sum(1),
        "a key": lambda: {}["int8"],
        "a division": lambda: 1 // 0,
        "a recursion": recursive,
        "an operator": lambda: None + X.ndim,  # type: ignore[operator]
        "an operator with a tensor": lambda: X @ 3,  # type: ignore[operator]
        "too few arguments": lambda: of_two(1),  # type: ignore[call-arg]
        "too few arguments of torch's": lambda: torch.softmax(X),  # type: ignore[call-overload]
        "too few arguments of a class": lambda: torch.nn.Linear(3),  # type: ignore[call-arg]
        "an argument that torch does not have": lambda: F.softmax(X, dimension=0),  # type: ignore[call-arg]
        "an argument of another type": lambda: F.softmax(None, 0),  # type: ignore[arg-type]
        "a number of Python's": lambda: math.sqrt(-1),
        "a value of Python's": lambda: int("eight"),
        "a member of an enumeration": lambda: Kind(2),
        "too few arguments of a kernel": lambda: kernel_of_odd_blocks[(1,)](X),
        "too many arguments of a kernel": lambda: kernel_of_odd_blocks[(1,)](X, 8, 8),
        "a name in a kernel": lambda: kernel_with_a_function[(1,)](X, 8),
        "a grid that no GPU takes": lambda: kernel_of_odd_blocks[(1, 65_536)](X, 8),
        "an attribute in a kernel": lambda: kernel_with_an_attribute[(1,)](X, 8),
    },
    Blame.LACK: {
        "what the emulator lacks": lacking,
        "what the interpreter lacks": lambda: kernel_of_assembly[(1,)](X, 8),
    },
}


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> None:
    takeover.interpret_kernels()


@pytest.mark.parametrize(
    ("blame", "call"),
    [pytest.param(blame, call, id=name) for blame, calls in ROWS.items() for name, call in calls.items()],
)
def test_blame_of_an_exception(blame: Blame, call: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as caught, blame_implementation():  # noqa: PT011 - any
        call()
    assert recorded_blame(caught.value) is blame
    assert is_refusal(caught.value) is (blame is Blame.REFUSAL)


def test_code_without_a_file_is_the_authors() -> None:
    scope: dict[str, Any] = {}
    exec("def kernel(x):\n    raise ValueError('x must be contiguous')", scope)
    exec("def bug(x):\n    return x.no_such_attribute", scope)
    for name, blame in (("kernel", Blame.REFUSAL), ("bug", Blame.BUG)):
        with pytest.raises((ValueError, AttributeError)) as caught:
            scope[name](X)
        assert blame_of(caught.value) is blame


def test_an_assertion_without_a_message_is_shown_by_its_statement(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("def kernel(x):\n    assert x.ndim == 2\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        runpy.run_path(str(tmp_path / "kernel.py"))["kernel"](X)
    assert reason(caught.value) == "AssertionError: assert x.ndim == 2"


@fourfold.operation(x=fourfold.tensor("... cols"), weight=fourfold.tensor("cols"))
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x * weight``."""
    return x * weight


FORWARD: dict[str, Any] = {
    "device": "cpu",
    "dtypes": ["float32"],
    "examples": 8,
    "claims": Claims(gradients=False),
    "only": ["forward"],
}


def test_a_bug_for_some_cases_is_a_failure_and_a_refusal_of_them_is_none() -> None:
    def mistaken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight if x.ndim == 1 else x.no_such_attribute * weight

    def of_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.ndim != 1:
            raise ValueError(f"x must have one axis, not {x.ndim}")
        return x * weight

    verdict = fourfold.verify(mistaken, scale, **FORWARD)
    assert verdict.kind == "wrong"
    assert not verdict.refusals
    ((_, failure),) = verdict.failures
    assert "has no attribute 'no_such_attribute'" in failure.message
    assert "in mistaken" in failure.frames
    assert fourfold.verify(of_rows, scale, **FORWARD).passed


def test_the_grid_of_a_launch_that_the_driver_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    monkeypatch.setattr(triton.JITFunction, "run", run)
    kernel = triton.JITFunction(of_two)
    says = r"of_two: a grid of \(1, 70000\) has 70,000 blocks along y; a GPU takes at most 65,535"
    with pytest.raises(ImpossibleGrid, match=says) as caught, blame_implementation():
        kernel[(1, 70_000)](1, 2)
    assert recorded_blame(caught.value) is Blame.BUG
    with pytest.raises(RuntimeError, match="invalid argument") as refused, blame_implementation():
        kernel[(1, 7)](1, 2)
    assert is_refusal(refused.value)


ROWS_ALONG_Y = """
import torch
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x_ptr, output_ptr):
    tl.store(output_ptr + tl.program_id(1), tl.load(x_ptr + tl.program_id(1)))

def copied(x):
    {check}
    x = x.contiguous()
    output = torch.empty_like(x)
    if x.numel():
        copy_kernel[(1, x.numel())](x, output)
    return output
"""


@fourfold.operation(
    x=fourfold.tensor("rows", gradient=False), examples={"many_rows": {"x": np.ones(65_536, np.float32)}}
)
def copy_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x."""
    return x * 1


@pytest.mark.parametrize("untrusted", [False, True])
def test_a_grid_past_a_limit_is_a_failure_unless_the_kernel_checks_the_size(untrusted: bool, tmp_path: Path) -> None:
    check = "if len(x) > 65_535: raise ValueError('x must have at most 65,535 rows')"
    found = []
    for name, line in {"unchecked": "pass", "checked": check}.items():
        path = tmp_path / f"{name}.py"
        path.write_text(ROWS_ALONG_Y.format(check=line))
        kernel = f"{path}:copied" if untrusted else modules.load_file(path).copied
        found.append(fourfold.verify(kernel, copy_of_rows, untrusted=untrusted, **FORWARD))
    unchecked, checked = found
    ((_, failure),) = unchecked.failures
    assert (
        "copy_kernel: a grid of (1, 65536, 1) has 65,536 blocks along y; a GPU takes at most 65,535" in failure.message
    )
    assert not unchecked.refusals
    assert checked.passed
    assert list(checked.refusals) == ["ValueError: x must have at most 65,535 rows"]


@fourfold.operation(x=fourfold.tensor("...", gradient=False))
def identity(x: torch.Tensor) -> torch.Tensor:
    """Return x."""
    return x * 1


OUT_OF_BOUNDS = """
import torch
import triton
import triton.language as tl

@triton.jit
def next_of(x_ptr, at):
    return tl.load(x_ptr + at + 1)

@triton.jit
def copy_kernel(x_ptr, output_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output_ptr + at, next_of(x_ptr, at), mask=at < n)

def copied(x):
    x = x.contiguous()
    output = torch.empty_like(x)
    if x.numel():
        copy_kernel[(triton.cdiv(x.numel(), 64),)](x, output, x.numel(), 64)
    return output
"""


@pytest.mark.parametrize("untrusted", [False, True])
def test_a_fault_of_a_triton_kernel_is_shown_at_its_lines(untrusted: bool, tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(OUT_OF_BOUNDS)
    place = f"{tmp_path / 'copies.py'}:copied"
    kernel = place if untrusted else modules.load_file(tmp_path / "copies.py").copied
    verdict = fourfold.verify(
        kernel, identity, untrusted=untrusted, device="cpu", seed=1, dtypes=["float32"], only=["forward"]
    )
    ((_, failure),) = verdict.failures
    assert failure.message.startswith("OutOfBounds: load of 4 bytes, 4 bytes outside of the memory of x_ptr")
    lines = [int(line) for line in re.findall(r'copies\.py", line (\d+)', failure.frames)]
    assert [OUT_OF_BOUNDS.splitlines()[line - 1].strip() for line in lines] == [
        "copy_kernel[(triton.cdiv(x.numel(), 64),)](x, output, x.numel(), 64)",
        "tl.store(output_ptr + at, next_of(x_ptr, at), mask=at < n)",
        "return tl.load(x_ptr + at + 1)",
    ]
