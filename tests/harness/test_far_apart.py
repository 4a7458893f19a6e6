"""Waiting for memory for tensors with elements far apart, on a GPU that other processes use too."""

from collections.abc import Iterator

import pytest
import torch

from fourfold.core import far_apart

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
