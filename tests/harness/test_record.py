"""`.ci/record` and `.ci/host_times`, which record the times of all operations on GPUs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "record"


def load_script(path: Path = SCRIPT) -> Any:
    loader = SourceFileLoader(path.name, str(path))
    module = module_from_spec(spec_from_loader(path.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def reports_of(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that write reports, which then write none."""
    reports: list[list[str]] = []

    def run(command: list[str]) -> Any:
        reports.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    return reports


def test_a_process_without_time_is_killed_with_those_that_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)  # who reads it waits for the writer
    program = f"import os, pathlib, signal; pathlib.Path({str(began)!r}).write_text(str(os.getpid())); signal.pause()"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"]
    wait, started = subprocess.Popen.wait, []

    def time_out(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        started.append(psutil.Process(int(began.read_text())))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_out)
    assert load_script().status_within(1, command, tmp_path / "log", {**os.environ}) is None
    assert len(started) == 1
    with contextlib.suppress(psutil.NoSuchProcess):
        assert started[0].status() == psutil.STATUS_ZOMBIE


def test_each_gpu_runs_as_many_tasks_at_once_as_it_is_named() -> None:
    running, most, lock = {"0": 0, "1": 0}, {"0": 0, "1": 0}, threading.Lock()
    full = threading.Barrier(3)

    def run(task: int, gpu: str) -> bool:
        with lock:
            running[gpu] += 1
            most[gpu] = max(most[gpu], running[gpu])
        full.wait(60)  # until three run at once
        with lock:
            running[gpu] -= 1
        return task % 2 == 0

    assert load_script().share(range(6), ["0", "0", "1"], run) == [True, False] * 3
    assert most == {"0": 2, "1": 1}


def test_an_unknown_operation_is_named_before_anything_runs(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    run = subprocess.run([sys.executable, SCRIPT, folder, "softmax", "sofmax"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "sofmax" in run.stderr
    assert not folder.exists()


def test_what_has_no_time_left_is_recorded_by_the_same_command_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script()
    commands: list[list[str]] = []
    now = [0.0]

    def run(seconds: float, command: list[str], log: Path, environment: dict[str, str]) -> int | None:
        commands.append(command)
        log.touch()
        if "softmax" in command:
            now[0] += seconds
            return None
        Path(command[-1].partition("=")[2]).write_text("{}")
        return 0

    def timed() -> list[str]:
        names = [command[command.index("--op") + 1] for command in commands]
        assert reports.pop()[3] == "report"
        commands.clear()
        return names

    reports = reports_of(script, monkeypatch)
    monkeypatch.setattr(script, "status_within", run)
    monkeypatch.setattr(script, "clock", lambda: now[0])
    operations = ["vector_add", "softmax", "swiglu"]
    options = ["--device", "cpu", "--step", "time", "--minutes", "5"]
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), *operations, *options])
    assert script.main() == 1
    assert timed() == ["vector_add", "softmax"]
    assert script.main() == 1
    assert timed() == ["swiglu", "softmax"]
    assert script.main() == 1
    assert timed() == ["softmax"]


def test_what_waits_for_the_host_or_fails_beside_others_is_timed_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script()
    names, options = list[str](), ["--device=cpu", "--step=time"]

    def run(seconds: float, command: list[str], *rest: Any) -> int:
        names.append(command[command.index("--op") + 1])
        if names in (["softmax"], ["softmax", "swiglu"]):
            return 1
        Path(command[-1].partition("=")[2]).write_text("{}")
        return 0

    reports_of(script, monkeypatch)
    monkeypatch.setattr(script, "status_within", run)
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "nms", "softmax", "swiglu", *options])
    assert script.main() == 0
    assert names == ["softmax", "swiglu", "nms", "softmax", "swiglu"]


def test_the_slower_kernels_are_profiled_and_no_step_repeats_what_the_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script()
    medians = {"torch": 1.0, "triton": 1.1, "cuda": 0.9}
    benchmarks = [
        {
            "fullname": f"tests/b.py::test[small-forward-{name}]",
            "group": "small-forward",
            "stats": {"median": median},
            "extra_info": {"contender": name, "operation": "swiglu", "workload": "small", "dtype": "float32"}
            | {"direction": "forward", "shapes": {}, "error_over_bound": 0.5},
        }
        for name, median in medians.items()
    ]
    commands: list[list[str]] = []

    def run(seconds: float, command: list[str], *rest: Any) -> int:
        commands.append(command)
        if (json_file := next((word for word in command if word.startswith("--benchmark-json=")), None)) is not None:
            Path(json_file.partition("=")[2]).write_text(json.dumps({"benchmarks": benchmarks}))
        if "ncu" in command:
            Path(command[command.index("--log-file") + 1]).write_text('"ID"')
        return 0

    reports = reports_of(script, monkeypatch)
    monkeypatch.setattr(script, "status_within", run)
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    monkeypatch.setattr(script, "gpus_here", lambda: ["0"])
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "swiglu"])
    assert script.main() == 0
    (profiled,) = [command for command in commands if "ncu" in command]
    assert [word for word in profiled if word.startswith("tests/")] == ["tests/b.py::test[small-forward-triton]"]
    assert str(tmp_path / "swiglu.csv") in reports.pop()
    commands.clear()
    assert script.main() == 0
    assert not commands
    assert reports.pop()[3] == "report"


def host_times(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    script = load_script(SCRIPT.with_name("host_times"))
    monkeypatch.setattr(sys, "argv", ["host_times", *words, "--device", "cpu", "--seconds", "0"])
    return script


def test_the_table_of_the_host_has_a_time_of_each_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = host_times(monkeypatch, "vector_add", "softmax")
    monkeypatch.setattr(script, "CALLS", 1)
    assert script.main() == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = {row.split(" | ")[0]: row.strip("| ").split(" | ")[1:] for row in rows}
    assert [*cells] == ["| vector_add", "| softmax"]
    assert [len([float(time) for time in times if time.strip()]) for times in cells.values()] == [4, 6]


def test_a_call_that_fails_is_reported_beside_the_times_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = host_times(monkeypatch, "vector_add", "softmax")
    calls = {
        "vector_add": {("vector_add", "triton", False): lambda: 1 / 0, ("vector_add", "cuda", False): lambda: None},
        "softmax": {("softmax", "triton", False): lambda: None},
    }
    monkeypatch.setattr(script, "calls_of", lambda name, device: calls[name])
    assert script.main() == 1
    report = capsys.readouterr()
    assert report.err == "vector_add triton False ZeroDivisionError: division by zero\n"
    assert [[bool(time.strip()) for time in row.split(" | ")[1:3]] for row in report.out.splitlines()[2:]] == [
        [False, True],
        [True, False],
    ]
