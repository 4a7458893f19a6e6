"""A long run estimates its remaining time."""

import os
import re
from pathlib import Path

import pytest
import warm

from fourfold.pytest_plugin import progress
from fourfold.pytest_plugin.progress import Progress, format_duration

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run(known: dict[str, float], taking: dict[str, float], of: int, workers: int = 1) -> tuple[Progress, list[str]]:
    """Run the first `of` tests one after another; return the progress and the printed lines."""
    clock = Clock()
    seen = Progress(known, workers, clock)
    seen.expect(taking)
    lines = []
    for name in list(taking)[:of]:
        clock.seconds += taking[name]
        seen.took(name, taking[name], failed=name.endswith("wrong"))
        lines.append(seen.finish(name))
    return seen, [line for line in lines if line]


def test_what_is_known_is_scaled_by_how_this_run_goes() -> None:
    seen, _ = run(known={"a": 1, "b": 2, "c": 10}, taking={"a": 2, "b": 4, "c": 20}, of=2)
    assert seen.seconds_left() == pytest.approx(20)


def test_what_is_not_known_takes_an_average() -> None:
    seen, _ = run(known={}, taking={"a": 2, "b": 4, "c": 9, "d": 9}, of=2)
    assert seen.seconds_left() == pytest.approx(6)


def test_workers_share_what_is_left() -> None:
    seen, _ = run(known={"c": 30}, taking={"a": 1, "b": 1, "c": 30}, of=2, workers=3)
    assert seen.seconds_left() == pytest.approx(10)


def test_a_line_is_told_now_and_then_and_not_at_the_end() -> None:
    taking = {f"tests/t.py::test_{i}[giou-torch-float32]": 10.0 for i in range(5)} | {"t.py::wrong": 20.0, "z": 30.0}
    _, lines = run(known={}, taking=taking, of=7)
    assert len(lines) == 2
    assert lines[0] == "[3 of 7 tests; 40 s to go; test_2[giou-torch-float32]]"
    assert lines[1] == f"[6 of 7 tests, 1 failed; {format_duration(70 / 6)} to go; wrong]"


def test_short_runs_say_nothing() -> None:
    assert run(known={}, taking={str(i): progress.SECONDS_BETWEEN / 10 for i in range(9)}, of=9)[1] == []


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (754, "12 min 34 s")])
def test_times_are_spelled_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_failure_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from fourfold.pytest_plugin.progress import ProgressReporter\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(ProgressReporter(config))\n"
    )
    (tmp_path / "test_two.py").write_text(
        "import os\ndef test_wrong():\n    assert 1 == 2, 'no'\ndef test_last():\n    os._exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run("pytest", "-p", "no:cacheprovider", tmp_path, cwd=ROOT, env=environment)
    assert done.returncode == 3
    assert re.search(r"^\[.*test_two\.py::test_wrong failed: AssertionError: no", done.stdout, re.MULTILINE), (
        done.stdout
    )
