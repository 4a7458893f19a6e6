"""Waiting for memory for tensors with elements far apart, on a GPU that other processes use too."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from subjects import subject_of

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.checks.catalogue import STANDARD
from fourfold.checks.records import operations
from fourfold.checks.search import AGAIN, Search
from fourfold.instruments import sparse_memory
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import Unsupported
from fourfold.operations.refusals import Escape, Refusals

GPU = torch.device("cuda", 0)
REFUSALS = Refusals()


def fake_free_memory(monkeypatch: pytest.MonkeyPatch, free: Iterator[int]) -> list[float]:
    """Make torch report these numbers of free bytes out of 100. Return the list of sleeps, which take no time."""
    slept: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (next(free), 100))
    monkeypatch.setattr(sparse_memory.time, "sleep", slept.append)
    return slept


def test_others_may_give_back_what_they_have_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = fake_free_memory(monkeypatch, iter((10, 10, 60)))
    sparse_memory.wait_for_room(GPU, 50)
    assert len(slept) == 2


@pytest.mark.parametrize(("free", "wanted", "looks"), [(10, 50, sparse_memory.LOOKS), (90, 101, 0)])
def test_nobody_waits_for_ever_or_for_more_than_there_is(
    free: int, wanted: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = fake_free_memory(monkeypatch, iter([free] * 1000))
    with pytest.raises(NotReached, match="cuda:0 has no" if looks else None):
        sparse_memory.wait_for_room(GPU, wanted)
    assert len(slept) == looks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Simulate a GPU of 100 bytes without sleep: each look gets the next number of free bytes, or the last one."""
    gpu = SimpleNamespace(free=[5], own=10, looks=0)

    def mem_get_info(device: object = None) -> tuple[int, int]:
        gpu.looks += 1
        return gpu.free.pop(0) if len(gpu.free) > 1 else gpu.free[0], 100

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: gpu.own)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    about = SimpleNamespace(total_memory=100, uuid="none")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(sparse_memory.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    return gpu


def outcome_of(add: Callable[..., torch.Tensor], named: bool = True, refusals: Refusals | None = REFUSALS) -> Search:
    """Return the search of a check of vector_add's forward pass. Nothing is refused."""
    operation = operations()["vector_add"] if named else dataclasses.replace(operations()["vector_add"], examples={})
    given = subject_of(operation, add)
    search = Search(examples=5, refusals=refusals)
    next(check for check in STANDARD if check.name == "forward").judge(given, search)
    assert not REFUSALS.total
    return search


def lacking(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize("named", [True, False])
def test_memory_that_other_processes_hold_accuses_no_kernel(gpu: SimpleNamespace, named: bool) -> None:
    with pytest.raises(Unsupported, match=r"not reached: .* GiB free: 1 cases, the smallest with x \["):
        outcome_of(lacking, named)
    assert gpu.looks == 1 + sparse_memory.LOOKS  # one case has waited, and no other


@pytest.mark.parametrize(("free", "own"), [(5, 80), (60, 10)], ids=["it_holds_all_itself", "it_asks_for_too_much"])
def test_a_kernel_that_takes_the_memory_is_accused(gpu: SimpleNamespace, free: int, own: int) -> None:
    gpu.free, gpu.own = [free], own
    with pytest.raises(torch.OutOfMemoryError):
        outcome_of(lacking, refusals=None)


def test_a_case_runs_when_others_have_released_memory(gpu: SimpleNamespace) -> None:
    gpu.free, failing = [5, 5, 5, 60], [1]
    search = outcome_of(lambda x, y: lacking(x, y) if failing and failing.pop() else x + y)
    assert not search.unreached.total
    assert gpu.looks == 4
    assert search.ran >= 10


def test_others_that_never_release_enough_do_not_keep_a_case_for_ever(gpu: SimpleNamespace) -> None:
    gpu.free = [5, 60] * 10
    with pytest.raises(Unsupported, match="not reached: other processes hold the GPU's memory"):
        outcome_of(lacking)
    assert gpu.looks == 2 * AGAIN + 1


def test_what_was_verified_before_memory_was_lacking_stands(gpu: SimpleNamespace) -> None:
    left = [1] * 5
    search = outcome_of(lambda x, y: x + y if left and left.pop() else lacking(x, y))
    (line,) = search.unreached.lines()
    assert re.fullmatch(r"not reached: cuda:0 has no .* GiB free: 1 cases, the smallest with x \[.*\], y \[.*\]", line)
    assert search.ran == 5


@pytest.mark.usefixtures("gpu")
def test_a_case_that_is_too_large_is_left_out_alone() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            if x.numel() > 1000:
                sparse_memory.wait_for_room(GPU, 101)
        except Exception:
            return x
        return x + y

    search = outcome_of(add)
    (line,) = search.unreached.lines()
    assert search.unreached.total > 1
    assert line.startswith("not reached: cuda:0 has no")
    assert search.ran >= 5


def test_a_kernel_cannot_have_a_case_left_out() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotReached("no memory")

    with pytest.raises((Escape, Unsupported), match="the call raised NotReached") as raised:
        outcome_of(add)
    assert raised.type is Escape  # pytest would skip a test by the other


def test_outside_of_a_search_a_call_that_is_not_reached_is_no_escape() -> None:
    with pytest.raises(NotReached), convert_escapes():
        raise NotReached("no memory")


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else -psutil.Process().memory_info().rss


def test_only_touched_memory_is_taken(device: str) -> None:
    given = torch.arange(30.0, device=device).reshape(10, 3)
    sparse_memory.spread(given, 0)  # what a first use takes
    free = free_bytes(device)
    many = [sparse_memory.spread(given, 0) for _ in range(8)]  # 128 GiB of addresses
    assert free - free_bytes(device) < 1 << 30
    assert all(torch.equal(each, given) for each in many)
    assert {each.stride(0) for each in many} == {-(-sparse_memory.SIDE // 9)}
    assert not sparse_memory.room_needed(2 * sparse_memory.SIDE, given)
