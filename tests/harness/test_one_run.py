"""Results that one worker computes for all."""

from pathlib import Path

import one_run
import pytest


def test_workers_compute_a_result_once_for_each_set_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "_folders", [tmp_path])
    computed = []

    def squares(count: int, power: int = 2) -> list[int]:
        computed.append((count, power))
        return [number**power for number in range(count)]

    # Each worker decorates the function itself.
    for worker in [one_run.one_run(squares) for _ in range(2)]:
        assert worker(3) == [0, 1, 4]
        assert worker(3, power=3) == [0, 1, 8]
    assert computed == [(3, 2), (3, 3)]


def test_a_result_that_raises_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_run, "_folders", [tmp_path])
    attempts = []

    def second_time() -> int:
        attempts.append(None)
        return 6 // (len(attempts) - 1)

    result = one_run.one_run(second_time)
    with pytest.raises(ZeroDivisionError):
        result()
    assert result() == 6
