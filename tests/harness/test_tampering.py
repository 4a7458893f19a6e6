"""The harness detects what a call changes besides its tensors, and restores it."""

import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest
import torch

from fourfold import checks
from fourfold.checks.records import operations
from fourfold.checks.search import Search
from fourfold.instruments import tampering
from fourfold.instruments.tampering import Tampered, nothing_else_changes
from fourfold.operations.case import Case


def case() -> Case:
    return Case({"x": np.arange(3.0, dtype=np.float32)}, np.ones(3, dtype=np.float32))


def test_a_call_that_leaves_everything_alone_passes() -> None:
    with nothing_else_changes(case()):
        torch.ones(3).add_(1)


@pytest.mark.parametrize("owner", [(np, "isnan"), (torch, "equal"), (torch.Tensor, "numpy")])
def test_a_replaced_function_is_named_and_put_back(owner: tuple) -> None:
    original = getattr(*owner)
    with pytest.raises(Tampered, match=f"replaced .*{owner[1]}"), nothing_else_changes(case()):
        setattr(*owner, lambda *_: True)
    assert getattr(*owner) is original


def test_a_replaced_function_of_the_harness_is_named_and_put_back() -> None:
    from fourfold.checks import laws
    from fourfold.numerics import compare

    original = laws.compare
    with pytest.raises(Tampered, match=r"replaced fourfold\.checks\.laws\.compare"), nothing_else_changes(case()):
        laws.compare = lambda *_: None
    assert laws.compare is original is compare.compare


def test_every_module_that_has_a_check_is_watched() -> None:
    of_checks = {
        value.__module__
        for found in pkgutil.iter_modules(checks.__path__, "fourfold.checks.")
        for value in vars(importlib.import_module(found.name)).values()
        if getattr(value, "__annotations__", {}).get("search") is Search
    }
    assert {"fourfold.checks.forward", "fourfold.checks.laws", "fourfold.checks.fallback"} <= of_checks
    watched = {module.__name__ for module in tampering.watched_modules()}
    assert of_checks | {"fourfold.checks.search", "fourfold.checks.results", "fourfold.checks.grades"} <= watched


@pytest.mark.parametrize("name", ["numerics.compare", "numerics.dtypes", "operations.record", "numerics.bounded"])
def test_what_checks_judge_by_is_watched(name: str) -> None:
    assert f"fourfold.{name}" in {module.__name__ for module in tampering.watched_modules()}


@pytest.mark.parametrize("name", operations())
def test_a_replaced_function_of_an_oracle_is_named_and_put_back(name: str) -> None:
    oracle = importlib.import_module(f"fourfold.oracles.{name}")
    original = oracle.forward
    with pytest.raises(Tampered, match=rf"replaced fourfold\.oracles\.{name}\.forward"), nothing_else_changes(case()):
        oracle.forward = lambda *_, **__: None
    assert oracle.forward is original


def test_a_module_is_watched_as_it_is_when_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tampering, "_watched", [])
    module = ModuleType("judge")
    module.judges = original = lambda: True
    tampering.watch(module)
    module.judges = lambda: False
    tampering.watch(module)
    with pytest.raises(Tampered, match=r"replaced judge\.judges"), nothing_else_changes(case()):
        pass
    assert module.judges is original


def test_changed_arrays_of_the_case_are_named() -> None:
    given = case()
    with pytest.raises(Tampered, match="changed the x of the case"), nothing_else_changes(given):
        given["x"][0] = 7
    with pytest.raises(Tampered, match="changed the grad_output of the case"), nothing_else_changes(given):
        given.grad_output[0] = 7


def test_changed_settings_are_named_and_put_back() -> None:
    with (
        pytest.raises(Tampered, match=r"default dtype from .*float32 to .*float64"),
        nothing_else_changes(case()),
    ):
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(Tampered, match="whether gradients are recorded"), nothing_else_changes(case()):
        torch.set_grad_enabled(False)
    assert torch.is_grad_enabled()
    with pytest.raises(Tampered, match="handling of errors"), nothing_else_changes(case()):
        np.seterr(all="raise")
    assert np.geterr()["over"] == "warn"


def test_what_the_call_raises_goes_through() -> None:
    with pytest.raises(ZeroDivisionError), nothing_else_changes(case()):
        raise ZeroDivisionError
