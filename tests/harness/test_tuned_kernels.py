"""Kernels of triton.autotune on a CPU: any configuration may run, and a first launch tries another one before it."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import fourfold
from fourfold import Claims, Verdict, operation, tensor
from fourfold.backends.triton.interpreter.tuning import fingerprint
from fourfold.declaration.definition import DefinedOperation

WITHOUT_GRADIENTS = Claims(gradients=False, dtypes=("float32",))
CONFIGURATIONS = [triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 256}, num_warps=8)]


@operation(x=tensor("rows cols", gradient=False), sizes={"cols": (1, 250)})
def row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def sum_kernel(x_ptr, output_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    tl.store(output_ptr + row, tl.sum(x, axis=0))


def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, 2 * x, mask=at < n)


def add_kernel(x_ptr, output_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.atomic_add(output_ptr, tl.sum(x, axis=0))


def tuned(kernel: Callable, configurations: list[triton.Config] = CONFIGURATIONS, **options: list[str]) -> Callable:
    return triton.autotune(configs=configurations, key=[], **options)(triton.jit(kernel))


def sums_by(kernel: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    def sums(x: torch.Tensor) -> torch.Tensor:
        x, output = x.contiguous(), x.new_empty(len(x))
        if len(x):
            kernel[(len(x),)](x, output, x.shape[1])
        return output

    return sums


def doubled_by(kernel: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    def double(x: torch.Tensor) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        if y.numel():
            kernel[lambda meta: (triton.cdiv(y.numel(), meta["BLOCK"]),)](y, y.numel())
        return y

    return double


def total_by(kernel: Callable, output_of: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    def total(x: torch.Tensor) -> torch.Tensor:
        x, output = x.contiguous(), output_of(x)
        if not x.numel():
            return output.zero_()
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, output, x.numel())
        return output

    return total


@operation(x=tensor("n", gradient=False))
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@operation(x=tensor("n", gradient=False))
def sum_of_all(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def verdict_on(function: Callable, operation: DefinedOperation) -> Verdict:
    claims = Claims(gradients=False, dtypes=("float32",), finite=True, largest=1e6, deterministic=False)
    return fourfold.verify(function, operation, device="cpu", claims=claims, only=("forward",))


def zeros(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(())


def empty(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((), 7.0)  # like memory that held something else


SHORT = [triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 16})]
RIGHT = {
    "sums": (row_sums, sums_by(tuned(sum_kernel))),
    "doubled_and_restored": (twice, doubled_by(tuned(double_kernel, restore_value=["x_ptr"]))),
    "added_to_what_is_reset": (sum_of_all, total_by(tuned(add_kernel, reset_to_zero=["output_ptr"]), zeros)),
}
WRONG = {
    "a_configuration_that_is_too_short": (row_sums, sums_by(tuned(sum_kernel, SHORT))),
    "doubled_by_each_trial": (twice, doubled_by(tuned(double_kernel))),
    "added_to_by_each_trial": (sum_of_all, total_by(tuned(add_kernel), zeros)),
    "reset_by_the_first_launch_alone": (sum_of_all, total_by(tuned(add_kernel, reset_to_zero=["output_ptr"]), empty)),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_tuned_kernel_passes_if_it_is_right(name: str) -> None:
    operation, function = {**RIGHT, **WRONG}[name]
    verdict = verdict_on(function, operation)
    assert verdict.passed == (name in RIGHT), str(verdict)


def test_the_fingerprint_of_a_launch_is_of_its_numbers_and_sizes_and_not_of_its_memory() -> None:
    one, same, longer = ({"x": torch.zeros(n), "n": n, "hook": object()} for n in (3, 3, 4))
    assert fingerprint(one) == fingerprint(same) != fingerprint(longer)
