"""Modules with their own weights, verified as operations that take the weights as arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from subjects import agrees

import fourfold
from fourfold import module, operation, tensor, values
from fourfold.candidates.load.calling import as_operation
from fourfold.checks.backward import backward_agrees
from fourfold.checks.forward import forward_agrees
from fourfold.checks.threads import threads_do_not_matter
from fourfold.engine.verification import signature_of
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.outcomes import Failure

FLOAT32 = DTYPES["float32"]


@operation(
    x=tensor("rows cols"),
    weight=tensor("cols"),
    eps=values(1e-6, 0.1),
    sizes={"rows": (0, 9), "cols": (1, 40)},
    tried=False,
)
def rms_norm(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@operation(
    x=tensor("rows cols"),
    weight=tensor("outs cols"),
    bias=tensor("outs", optional=True),
    sizes={"rows": (0, 9), "outs": (1, 40), "cols": (1, 40)},
    tried=False,
)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return torch.nn.functional.linear(x, weight, bias)


class Norm(torch.nn.Module):
    def __init__(self, cols: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(cols))

    def forward(self, hidden: Any) -> Any:
        return rms_norm.definition(hidden.float(), self.weight, self.eps).to(hidden.dtype)


class WithoutWeight(Norm):
    def forward(self, hidden: Any) -> Any:
        return rms_norm.definition(hidden, torch.ones_like(self.weight), self.eps)


class KeepsWeight(Norm):
    kept: Any = None

    def forward(self, hidden: Any) -> Any:
        self.kept = self.weight.detach().clone() if self.kept is None else self.kept
        return rms_norm.definition(hidden, self.kept, self.eps)


class Block(torch.nn.Module):
    def __init__(self, ins: int, outs: int, bias: bool) -> None:
        super().__init__()
        self.scale, self.linear = torch.nn.Parameter(torch.ones(1)), torch.nn.Linear(ins, outs, bias)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def check(made: Any, given: Any, *checks: Callable[..., None]) -> None:
    agrees(made, as_operation(given, signature_of(made), made.name), *checks, examples=3)


def test_a_module_is_made_for_the_arguments_of_a_call_and_has_its_weights_and_their_gradients() -> None:
    norm = module(lambda weight, eps=1e-6: Norm(len(weight), eps))
    check(rms_norm, norm, backward_agrees, threads_do_not_matter)


@pytest.mark.parametrize("kind", [WithoutWeight, KeepsWeight])
def test_a_module_that_does_not_use_its_weight_fails(kind: type[Norm]) -> None:
    with pytest.raises(Failure, match="output"):
        check(rms_norm, module(lambda weight, eps=1e-6: kind(len(weight), eps)), forward_agrees)


def test_eps_that_the_module_ignores_fails() -> None:
    with pytest.raises(Failure, match="output"):
        check(rms_norm, module(lambda weight, eps: Norm(len(weight))), forward_agrees)


def test_weights_of_inner_modules_are_found_by_their_last_name() -> None:
    def block(weight: Any, bias: Any = None) -> Any:
        return Block(weight.shape[1], weight.shape[0], bias is not None)

    named = module(block, weights={"weight": "linear.weight", "bias": "linear.bias"})
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    for found in (named, module(block)):
        assert torch.equal(found(x=x, weight=weight, bias=None), x @ weight.mT)


def test_an_instance_gets_the_weights_of_the_call() -> None:
    kernel = as_operation(torch.nn.Linear(3, 4), signature_of(linear), "linear")
    x, weight, bias = torch.randn(2, 3), torch.randn(5, 3), torch.randn(5)
    assert torch.allclose(kernel(x=x, weight=weight, bias=bias), x @ weight.mT + bias)


FILE = """
import torch
import fourfold

class Norm(torch.nn.Module):
    def __init__(self, cols, eps, wrong):
        super().__init__()
        self.eps, self.weight, self.wrong = eps, torch.nn.Parameter(torch.ones(cols)), wrong

    def forward(self, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale * (self.weight.detach() if self.wrong else self.weight)).to(x.dtype)

@fourfold.module
def right(weight, eps):
    return Norm(len(weight), eps, False)

@fourfold.module
def wrong(weight, eps):
    return Norm(len(weight), eps, True)
"""


@pytest.mark.full
def test_a_module_is_verified_in_a_process_of_its_own(tmp_path: Any) -> None:
    (tmp_path / "norms.py").write_text(FILE)
    options: dict[str, Any] = {"only": ["forward", "backward"], "dtypes": ["float32"], "examples": 2, "device": "cpu"}
    right = fourfold.verify(f"{tmp_path}/norms.py:right", rms_norm, untrusted=True, **options)
    assert right.passed, right
    wrong = fourfold.verify(f"{tmp_path}/norms.py:wrong", rms_norm, untrusted=True, **options)
    assert "gradient of weight" in str(wrong)
    assert not wrong.passed
