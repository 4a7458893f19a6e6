"""Triton's compiler checks, without a GPU, the kernels that its interpreter has run."""

import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from samples import sampled
from triton.language.target_info import current_target

import fourfold
from fourfold import tensor
from fourfold.backends.triton import front_end
from fourfold.candidates.load import modules
from fourfold.operations.outcomes import Kind, Status

NUMBER, CONSTANT = 3, tl.constexpr(3)
SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def twice(x, REFUSED: tl.constexpr):
    if REFUSED:
        return (lambda y: y * 2)(x)
    return x * 2


@triton.jit
def double_kernel(x_ptr, y_ptr, n, REFUSED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, twice(x, REFUSED), mask=at < n)


def double(x, refused=False):
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), refused, 64)
    return y


def refused(x):
    return double(x, True)
"""


@fourfold.operation(x=tensor("rows cols", gradient=False))
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@triton.constexpr_function
def is_at_least(capability: int) -> bool:
    if triton.knobs.runtime.interpret:
        return True
    if capability == 0:
        raise ValueError("there is no GPU")
    if capability == -1:
        name = "utils"  # Triton looks up what the text names ahead
        return getattr(triton.runtime.driver.active, name) is not None
    return current_target().arch >= capability


@triton.jit
def kernel(output_ptr, n, KIND: tl.constexpr):
    for i in range(n):
        if KIND == "break" and i == n:
            break
        if KIND == "return" and i == n:
            return
        if KIND == "number":
            tl.store(output_ptr + i, NUMBER)
        elif KIND == "dict":
            tl.store(output_ptr + i, {"a": 3}["a"])
        elif KIND == "attribute":
            tl.store(output_ptr + i, tl.full((), i, tl.int64).handle.data.size)
        else:
            tl.store(output_ptr + i, CONSTANT)
    tl.static_assert(KIND != "newest architecture" or is_at_least(100))
    tl.static_assert(KIND != "no architecture" or is_at_least(1000))
    tl.static_assert(KIND != "asks" or is_at_least(0))
    tl.static_assert(KIND != "asks the driver" or is_at_least(-1))
    tl.store(output_ptr, min(n, 3) + output_ptr.to(tl.int64, bitcast=True) * 0)


REFUSED = {
    "break": ("unsupported AST node type: Break", "break"),
    "return": ("Cannot have `return` statements inside", 'if KIND == "return" and i == n:'),
    "number": ("Cannot access global variable NUMBER", "tl.store(output_ptr + i, NUMBER)"),
    "dict": ("unsupported AST node type: Dict", 'tl.store(output_ptr + i, {"a": 3}["a"])'),
    "attribute": ("has no attribute 'data'", "tl.store(output_ptr + i, tl.full((), i, tl.int64).handle.data.size)"),
    "no architecture": ("", 'tl.static_assert(KIND != "no architecture" or is_at_least(1000))'),
}


def test_the_compiler_is_asked_about_each_kernel_and_its_constants() -> None:
    front_end.forget_launches()
    for kind in (*REFUSED, "constant", "newest architecture"):
        for n in (2, 3):
            kernel[(1,)](torch.zeros(n, dtype=torch.int64), n, KIND=kind)
    found = front_end.answer()
    lines = Path(__file__).read_text().splitlines()
    assert (found.accepted, found.unknown) == (2, [])
    for (reason, text), refusal in zip(REFUSED.values(), found.refused, strict=True):
        assert refusal.kernel == "kernel"
        assert reason in refusal.reason
        assert refusal.text == text == lines[refusal.line - 1].strip()
        assert Path(refusal.file) == Path(__file__)
    kernel[(1,)](torch.zeros(2, dtype=torch.int64), 2, KIND="constant")  # it is interpreted here as before


@pytest.mark.parametrize(
    ("kind", "reason"), [("asks", "there is no GPU"), ("asks the driver", "has no attribute 'utils'")]
)
def test_an_exception_of_a_function_that_the_compiler_calls_is_no_refusal(kind: str, reason: str) -> None:
    front_end.forget_launches()
    kernel[(1,)](torch.zeros(2, dtype=torch.int64), 2, KIND=kind)
    found = front_end.answer()
    assert (found.accepted, found.refused) == (0, [])
    assert reason in found.unknown[0]


@pytest.mark.parametrize("untrusted", sampled([False, True], True))
def test_a_refused_kernel_fails_a_check_of_its_own(untrusted: bool, tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(SOURCE)
    options = {"device": "cpu", "only": ["compiler"], "dtypes": ["float32"], "examples": 1}
    given = {name: f"{file}:{name}" for name in ("double", "refused")}
    if not untrusted:
        given = {name: getattr(modules.load_file(file), name) for name in given}
    right, wrong = (fourfold.verify(each, doubled, untrusted=untrusted, **options) for each in given.values())
    assert [outcome.outcome for outcome in right.outcomes] == [Status.PASSED]
    assert [outcome.outcome for outcome in wrong.outcomes] == [Status.FAILED]
    ((outcome, failure),) = wrong.failures
    assert (outcome.check, failure.kind) == ("compiler", Kind.WRONG)
    assert failure.counterexample is None, "the compiler refuses a kernel, and no case"
    at = 1 + SOURCE.splitlines().index("        return (lambda y: y * 2)(x)")
    assert f"double_kernel ({os.path.realpath(file)}:{at}): unsupported AST node type: Lambda" in failure.message
    assert f"line {at}, in double_kernel\n    return (lambda y: y * 2)(x)" in failure.frames
