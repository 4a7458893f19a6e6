"""Waiting for memory for tensors with elements far apart, on a GPU that other processes use too."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from fourfold.checks.catalogue import operations
from fourfold.checks.search import Search, Subject, Unsupported
from fourfold.checks.standard import STANDARD
from fourfold.core import far_apart
from fourfold.core.dtypes import DTYPES

GPU = torch.device("cuda", 0)


def told(monkeypatch: pytest.MonkeyPatch, free: Iterator[int]) -> list[float]:
    """Make torch report these numbers of free bytes out of 100. Return the list of sleeps, which take no time."""
    clock = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 100))
    monkeypatch.setattr(far_apart.time, "sleep", sleep)
    monkeypatch.setattr(far_apart.time, "monotonic", lambda: clock[0])
    return slept


def test_others_may_give_back_what_they_have_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = told(monkeypatch, iter((10, 10, 60)))
    far_apart.wait_for_room(GPU, 50)
    assert len(slept) == 2


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = told(monkeypatch, iter([10] * 1000))
    with pytest.raises(far_apart.NoRoom, match="cuda:0 has no"):
        far_apart.wait_for_room(GPU, 50)
    assert far_apart.PATIENCE <= sum(slept) < 2 * far_apart.PATIENCE


def test_nobody_waits_for_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = told(monkeypatch, iter([90]))
    with pytest.raises(far_apart.NoRoom):
        far_apart.wait_for_room(GPU, 101)
    assert not slept


@pytest.mark.parametrize(
    ("free", "own", "is_lacking"),
    [(5, 10, True), (5, 80, False), (60, 10, False)],
    ids=["others_hold_it", "it_holds_all_itself", "it_asks_for_too_much"],
)
@pytest.mark.parametrize("named", [True, False])
def test_memory_that_other_processes_hold_accuses_no_kernel(
    free: int, own: int, is_lacking: bool, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    calls = []

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    operation = operations()["vector_add"] if named else dataclasses.replace(operations()["vector_add"], examples={})
    given = Subject(
        operation=operation,
        backend="candidate",
        dtype=DTYPES["float32"],
        device="cpu",
        implementation=add,
        sibling=lambda name: (operation, add),
    )
    forward = next(check for check in STANDARD if check.name == "forward")
    raises, says = (Unsupported, "other processes hold") if is_lacking else (torch.OutOfMemoryError, "out of memory")
    with pytest.raises(raises, match=says):
        forward.judge(given, Search(examples=5))
    assert len(calls) <= 2 or not is_lacking  # no smaller case is looked for
