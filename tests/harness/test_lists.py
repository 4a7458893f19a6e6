"""Arguments that are lists of tensors: of any number, each tensor of its own sizes, also changed in place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from drawing import collect
from subjects import subject_of

import fourfold
from fourfold import Claims, operation, tensor, tensors, values
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.outputs import together
from fourfold.checks.search import Search
from fourfold.declaration.definition import DefinedOperation
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.outputs import WrongOutputs
from fourfold.operations.record import sizes_of

FLOAT32 = DTYPES["float32"]


@operation(xs=tensors("rows cols[i]", count=(0, 3)), sizes={"rows": (0, 5), "cols[i]": (0, 40)}, tried=False)
def concat(xs: Any) -> Any:
    return torch.cat(xs, -1)


@operation(xs=tensors("n[i]"), scale=tensor(""), sizes={"n[i]": (0, 40)}, tried=False)
def squares(xs: Any, scale: Any) -> Any:
    return scale * sum((x.square().sum() for x in xs), torch.zeros(()))


@operation(
    params=tensors("n[i]"),
    grads=tensors("n[i]"),
    m=tensors("n[i]", dtype=torch.float32),
    lr=values(1e-3, 0.1),
    sizes={"n[i]": (0, 40)},
    mutates=("params", "m"),
    tried=False,
)
def momentum_(params: Any, grads: Any, m: Any, lr: float = 1e-3) -> Any:
    m = [0.9 * a + g for a, g in zip(m, grads)]
    return [p - lr * a for p, a in zip(params, m)], m


CASES: dict[str, list[Case]] = {}


def cases_of(made: DefinedOperation) -> list[Case]:
    if made.name not in CASES:
        named = [make(FLOAT32) for make in made.examples.values()]
        CASES[made.name] = [*named, *collect(made.cases(FLOAT32, 64), 12)]
    return CASES[made.name]


def agrees(made: DefinedOperation, kernel: Callable[..., Any], check: Callable[..., None] = forward_agrees) -> None:
    claims = Claims(finite=True, largest=1e4)
    subject = together(subject_of(claims.restrict(made), kernel, FLOAT32, claims=claims))
    check(subject, Search(examples=3, seed=0, shrinks=False, seeks_claims=False))


# ---- cases


def counts_of(made: DefinedOperation, name: str) -> set[int]:
    return {sum(each.startswith(f"{name}[") for each in case.inputs) for case in cases_of(made)}


def test_lists_have_no_tensor_one_and_several_and_each_its_own_sizes() -> None:
    assert counts_of(squares, "xs") == {0, 1, 2, 3, 4}
    assert counts_of(momentum_, "grads") == {0, 1, 2, 3, 4}
    found = [sizes_of(squares, case) for case in cases_of(squares)]
    assert any(sizes.get("n[0]") == 0 < sizes.get("n[1]", 0) for sizes in found)
    assert any(len(set(sizes.values())) > 2 for sizes in found)
    for case in cases_of(momentum_):
        assert len({sum(name.startswith(each) for name in case.inputs) for each in ("params[", "grads[", "m[")}) == 1
        sizes_of(momentum_, case)  # raises where a gradient has another size than its parameter


def test_a_list_that_the_definition_does_not_take_empty_is_never_empty() -> None:
    assert counts_of(concat, "xs") == {1, 2, 3}
    assert all(len({array.shape[0] for array in case.inputs.values()}) == 1 for case in cases_of(concat))


def test_claimed_sizes_are_those_of_each_tensor() -> None:
    only = Claims(sizes={"cols[i]": 8}).restrict(concat)
    found = [array.shape[1] for case in collect(only.cases(FLOAT32, 64), 12) for array in case.inputs.values()]
    assert {size % 8 for size in found} == {0}
    assert max(found) > 8


def test_an_example_gives_a_list() -> None:
    given = {"own": {"xs": [[[1.0]], [[2.0, 3.0]]]}}
    made = operation(xs=tensors("rows cols[i]"), examples=given)(concat.definition)
    case = made.examples["own"](FLOAT32)
    assert {name: array.shape for name, array in case.inputs.items()} == {"xs[0]": (1, 1), "xs[1]": (1, 2)}
    with pytest.raises(ValueError, match="must give xs, of at most 2 tensors"):
        operation(xs=tensors("rows cols[i]", count=(1, 2)), examples={"many": {"xs": [[[1.0]]] * 3}})(
            concat.definition
        ).examples["many"](FLOAT32)


# ---- kernels


@triton.jit
def copy_kernel(x_ptr, out_ptr, begin, cols, width, BLOCK: tl.constexpr):
    """A program copies one row of a tensor to its place in the result."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * cols + at, mask=at < cols)
    tl.store(out_ptr + tl.program_id(0) * width + begin + at, x, mask=at < cols)


def by_triton(xs: list[Any], wrong: bool = False) -> Any:
    rows, width = xs[0].shape[0], sum(x.shape[1] for x in xs)
    out, begin = torch.empty(rows, width, dtype=xs[0].dtype), 0
    for x in xs:
        if x.numel():
            block = triton.next_power_of_2(xs[0].shape[1] + 1 if wrong else x.shape[1])
            copy_kernel[(rows,)](x.contiguous(), out, begin, x.shape[1], width, BLOCK=block)
        begin += x.shape[1]
    return out


def test_a_right_concatenation_passes_and_one_with_room_for_the_first_tensor_fails() -> None:
    agrees(concat, by_triton)
    with pytest.raises(Failure, match="output"):
        agrees(concat, lambda xs: by_triton(xs, wrong=True))


def test_each_tensor_of_a_list_has_a_gradient() -> None:
    agrees(squares, squares.definition, backward_agrees)

    def wrong(xs: Any, scale: Any) -> Any:
        return squares.definition([*xs[:1], *(x.detach() for x in xs[1:])], scale)

    with pytest.raises(Failure, match=r"gradient of xs\[1\]"):
        agrees(squares, wrong, backward_agrees)


def one_by_one(params: Any, grads: Any, m: Any, lr: float = 1e-3) -> None:
    for param, grad, mean in zip(params, grads, m):
        mean.mul_(0.9).add_(grad)
        param.sub_(mean * lr)


def test_lists_changed_in_place_pass_and_fail() -> None:
    agrees(momentum_, one_by_one)
    with pytest.raises(Failure, match="output"):  # a kernel with room for the pointers of two tensors
        agrees(momentum_, lambda params, grads, m, lr=1e-3: one_by_one(params[:2], grads[:2], m[:2], lr))
    with pytest.raises(WrongOutputs, match=r"in place"):
        agrees(momentum_, lambda params, grads, m, lr=1e-3: momentum_.definition(params, grads, m, lr))


@operation(xs=tensors("n[i]", count=(0, 9)), sizes={"n[i]": (0, 40)}, mutates="xs", tried=False)
def double_(xs: Any) -> None:
    for x in xs:
        x.mul_(2)


def some_at_a_time(xs: list[Any], most: int, skips_empty: bool) -> None:
    """Double `most` tensors in each launch; a wrong kernel looks whether there are so many only after a full one."""
    launch: list[Any] = []
    for x in xs:
        launch.append(x)
        if len(launch) >= most and (x.numel() or not skips_empty):
            double_.definition(launch[:most])
            launch.clear()
    double_.definition(launch[:most])


@pytest.mark.parametrize("most", [3, 4])
def test_an_empty_tensor_that_ends_what_a_launch_takes_is_found(most: int) -> None:
    agrees(double_, lambda xs: some_at_a_time(xs, most, skips_empty=False))
    with pytest.raises(Failure, match="output"):
        agrees(double_, lambda xs: some_at_a_time(xs, most, skips_empty=True))


def test_a_kernel_that_fails_for_an_empty_list_fails() -> None:
    agrees(squares, squares.definition)
    with pytest.raises(IndexError):
        agrees(squares, lambda xs, scale: squares.definition([xs[0], *xs[1:]], scale))


FILE = """
import torch

def right(xs):
    return torch.cat(xs, -1)

def wrong(xs):
    return torch.cat(xs[::-1], -1)
"""


@pytest.mark.full
def test_lists_reach_a_kernel_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "cat.py").write_text(FILE)
    options: dict[str, Any] = {"only": ["forward", "backward", "threads"], "dtypes": ["float32"], "examples": 2}
    right = fourfold.verify(f"{tmp_path}/cat.py:right", concat, untrusted=True, device="cpu", **options)
    assert right.passed, right
    wrong = fourfold.verify(f"{tmp_path}/cat.py:wrong", concat, untrusted=True, device="cpu", **options)
    assert not wrong.passed
    assert "output" in str(wrong)


def test_a_case_shows_the_tensors_that_there_are() -> None:
    shown = repr(squares.examples["lists_of_1"](FLOAT32))
    assert "xs[0]=" in shown
    assert "xs[1]" not in shown
    assert np.prod(squares.examples["lists_of_0"](FLOAT32).grad_output.shape) == 1
