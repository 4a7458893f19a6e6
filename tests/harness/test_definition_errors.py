"""Errors of a definition: they are reported at the declaration, with the line, and never as the kernel's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fourfold
from fourfold.declaration.definition import DefinitionError, operation, tensor, values
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.claims import Claims


def grouped(x: torch.Tensor, groups: int = 1) -> torch.Tensor:
    return x.reshape(x.shape[0], groups, -1).mean(-1)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def by_a_mask(x: torch.Tensor) -> torch.Tensor:
    x = 2 * x
    x[x > 0] = 1.0
    return x


def random(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape)


def by_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def for_some_sizes(x: torch.Tensor) -> torch.Tensor:
    if len(x) % 4 == 3:
        raise ValueError(f"{len(x)} elements")
    return 2 * x


def without_a_rule(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(x)


WRONG: list[tuple[Callable[..., torch.Tensor], dict[str, Any], str]] = [
    (grouped, {"x": tensor("b c"), "groups": values(1, 2, 4), "sizes": {"c": (4, None)}}, "x.reshape("),
    (in_place, {"x": tensor("n")}, "x.mul_(2)"),
    (random, {"x": tensor("n")}, "torch.rand("),
    (by_a_number, {"x": tensor("n")}, "x.sum().item()"),
    (without_a_rule, {"x": tensor("n k"), "sizes": {"n": (1, 9), "k": (1, 9)}}, "torch.linalg.svdvals(x)"),
]


@pytest.mark.parametrize(("definition", "given", "line"), WRONG, ids=lambda row: getattr(row, "__name__", ""))
def test_a_definition_that_cannot_be_judged_by_is_told_with_its_line(
    definition: Callable[..., torch.Tensor], given: dict[str, Any], line: str
) -> None:
    with pytest.raises(DefinitionError, match=f"operation {definition.__name__}: ") as caught:
        operation(**given)(definition)
    assert f'File "{__file__}", line ' in str(caught.value)
    assert line in str(caught.value)


def test_what_a_definition_of_the_same_kind_may_do() -> None:
    def divided(x: torch.Tensor, groups: int = 1) -> torch.Tensor:
        return grouped(x, groups)

    def on_a_copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(2)

    def convolved(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, kernel)

    operation(x=tensor("b c"), groups=values(1, 2, 4), sizes={"c": range(4, 4096, 4)})(divided)
    operation(x=tensor("n", gradient=False))(on_a_copy)
    operation(x=tensor("n", gradient=False))(by_a_mask)
    sizes = {"c": (1, None), "h": (3, None), "w": (3, None)}
    found = operation(x=tensor("n c h w"), kernel=tensor("o c 3 3"), sizes=sizes)(convolved)
    assert any(0 in make(DTYPES["float32"])["x"].shape for make in found.examples.values())


def test_what_is_found_later_says_nothing_of_the_kernel() -> None:
    declared = operation(x=tensor("n k"), sizes={"n": (1, 9), "k": (1, 9)}, tried=False)(without_a_rule)
    options: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 4, "only": ["forward"]}
    verdict = fourfold.verify(torch.linalg.svdvals, declared, claims=Claims(gradients=False), **options)
    assert verdict.kind == "undecided"
    assert "CANNOT JUDGE" in verdict.summary
    assert "cannot judge: the definition, and not the kernel, raised: NoTorchRule" in str(verdict)


def test_a_size_that_the_definition_rejects_says_nothing_of_the_kernel() -> None:
    declared = operation(x=tensor("n"), sizes={"n": (1, None)}, tried=False)(for_some_sizes)
    verdict = fourfold.verify(for_some_sizes, declared, device="cpu", dtypes=["float32"], only=["forward"])
    assert verdict.kind == "undecided"
    message = r"cannot judge: the definition, and not the kernel, raised: ValueError: for_some_sizes\(x\[\d+\]\): "
    assert re.search(message, str(verdict)), str(verdict)
