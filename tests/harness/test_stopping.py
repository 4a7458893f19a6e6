"""Ctrl-C, SIGTERM and SIGHUP end every process of a run and keep its finished results; SIGKILL ends every process."""

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, pidfd_send_signal

import psutil
import pytest
import warm

ROOT = Path(__file__).parents[2]
MARK = "FOURFOLD_STOPPED_BY"

# Right in float16; in float32 it never returns.
KERNELS = """
import ctypes
import os
import signal
import time

import torch


def happened(event):
    with open(os.environ["EVENTS"], "w") as events:
        events.write(event + "\\n")


def sleeps(x, y):
    if x.dtype == torch.float32:
        happened("inside")
        time.sleep(1000)
    return x + y


# Python's handlers cannot run.
def deaf(x, y):
    if x.dtype == torch.float32:
        happened("inside")
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.PyDLL(None).sleep(1000)
    return x + y

"""

# The kernel that `fourfold mutate` tries. The second mutant never returns.
MUTATED = """
import os
import time

import torch
import triton
import triton.language as tl

if "BLOCK " "- tl.arange" in open(__file__).read():
    with open(os.environ["EVENTS"], "w") as events:
        events.write("inside\\n")
    time.sleep(1000)


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(output_ptr + at, x + y, mask=at < n)


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        if not 0 < x.numel() < 64:
            return x + y
        output = torch.empty(x.shape, dtype=x.dtype)
        add_kernel[(1,)](x.contiguous(), y.contiguous(), output, x.numel(), BLOCK=64)
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), grad.clone()


def add(x, y):
    return Add.apply(x, y)
"""

# For the process that collects all results: report each one, and the next action of this process.
WITNESS = """
import os
import pytest

def happened(event):
    with open(os.environ["EVENTS"], "w") as events:
        events.write(event + "\\n")

@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        happened("finished")
"""

# A compiler that has a child, as g++ does, and never returns.
COMPILER = """#!/bin/sh
case "$*" in *--version*) exec g++ "$@" ;; esac
echo inside > $EVENTS
sleep 1000
"""


FILES = {"kernels.py": KERNELS, "mutated.py": MUTATED, "witness.py": WITNESS, "compiler": COMPILER}


class Run:
    """A command that was started in a folder with the files above, and its events."""

    def __init__(self, folder: Path, *arguments: str | Path, **environment: str) -> None:
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / "compiler").chmod(0o755)
        os.mkfifo(folder / "events")
        self.verdict = folder / "verdict.json"
        # A reader and a writer, which never end.
        self._events = os.fdopen(os.open(folder / "events", os.O_RDWR), buffering=1)
        variables = warm.variables("TRITON_INT", "CI", "CXX") | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "COLUMNS": "100",
            "EVENTS": str(folder / "events"),
            "FOURFOLD_CACHE": str(folder / "cache"),
            MARK: str(folder),
            **environment,
        }
        self._thread = ThreadPoolExecutor(1)
        self._mark = str(folder)
        self.done: Future[subprocess.CompletedProcess[str]] = self._thread.submit(
            warm.run, *arguments, cwd=folder, env=variables
        )
        self.done.add_done_callback(lambda _: os.write(self._events.fileno(), b"ended\n"))

    def wait_for(self, *events: str) -> None:
        """Wait until all of these have happened."""
        wanted = set(events)
        while wanted:
            event = self._events.readline().strip()
            if event == "ended":
                done = self.done.result()
                pytest.fail(f"it ended before {wanted}: {done.returncode} {done.stdout} {done.stderr}")
            wanted.discard(event)

    def processes(self) -> list[psutil.Process]:
        """Return the process that was started, and then all others."""
        (first,) = psutil.Process(warm.server(warm.LOADED)[1].pid).children()
        others = first.children(recursive=True)
        known = {each.pid for each in (first, *others)}
        return [first, *others, *(each for each in self.marked() if each.pid not in known)]

    def marked(self) -> Iterator[psutil.Process]:
        """Yield the running processes that have inherited a variable."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def stop(self, *signals: int) -> subprocess.CompletedProcess[str]:
        """Send the signals to the started process; return its result after all processes have ended."""
        family = self.processes()
        handles = []
        for process in family:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                handles.append(os.pidfd_open(process.pid))
        started = time.monotonic()
        try:
            for number in signals:
                family[0].send_signal(number)
            for handle in handles:
                select.select([handle], [], [])  # until it has ended
            done = self.done.result()
        finally:
            for handle in handles:
                os.close(handle)
        print(f"{shlex.join(done.args)}: {len(family)} processes in {time.monotonic() - started:.2f} s")
        print(done.stdout, done.stderr)
        assert not [*self.marked()]
        return done

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in () if self.done.done() else self.processes():
            process.kill()
        self._thread.shutdown()
        self._events.close()


Started = Callable[..., Run]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Start a command in its own folder."""
    runs: list[Run] = []

    def start(*arguments: str | Path, **environment: str) -> Run:
        runs.append(Run(tmp_path, *arguments, **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


FORWARD = ROOT / "tests" / "operations" / "test_forward.py"
TESTS = ["pytest", FORWARD, "-p", "fourfold", "-p", "witness", "-p", "no:cacheprovider", "--verdict=verdict.json"]
CANDIDATE = ["--dtype=float16", "--dtype=float32", "--examples=2", "--device=cpu"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("options", "signals"),
    [
        pytest.param([], [SIGTERM], id="plain-SIGTERM"),
        pytest.param([], [SIGINT, SIGINT], id="plain-SIGINT_twice", marks=pytest.mark.full),
        pytest.param(["-n", "2"], [SIGTERM], id="workers-SIGTERM", marks=pytest.mark.full),
        pytest.param(["--untrusted"], [SIGHUP], id="untrusted-SIGHUP"),
    ],
)
def test_run_that_is_stopped_keeps_what_is_finished(options: list[str], signals: list[int], started: Started) -> None:
    run = started(*TESTS, "--candidate=vector_add=kernels.py:deaf", *CANDIDATE, *options)
    run.wait_for("finished", "inside")
    done = run.stop(*signals)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    verdict = json.loads(run.verdict.read_text())
    assert not verdict["passed"]
    assert verdict["counts"] == {"passed": 1, "failed": 0, "unsupported": 0}
    assert "= verified =" in done.stdout


@pytest.mark.full
def test_nothing_is_left_of_a_run_that_is_killed(started: Started) -> None:
    options = ["--candidate=vector_add=kernels.py:deaf", *CANDIDATE, "--untrusted", "-n", "1"]
    run = started(*TESTS, *options)
    run.wait_for("inside")
    assert run.stop(SIGKILL).returncode == -SIGKILL


PLAIN = """
import ctypes, os, signal

def kernel(x, y):
    if "TMPDIR" in os.environ:  # a process that is judged
        return x + y
    with open("events", "w") as events:
        events.write(str(os.getpid()))
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(1000)
"""


def test_plain_process_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    os.mkfifo(tmp_path / "events")
    tests = ["-m", "pytest", FORWARD.with_name("test_repeatability.py"), "-p", "fourfold", "-p", "no:cacheprovider"]
    options = ["--candidate=vector_add=plain.py:kernel", "--dtype=float32", "--device=cpu", "--untrusted"]
    # `warm` would kill its remaining processes.
    with subprocess.Popen([sys.executable, *tests, *options], cwd=tmp_path, env=warm.variables(), text=True) as run:
        plain = os.pidfd_open(int((tmp_path / "events").read_text()))
        try:
            run.kill()
            select.select([plain], [], [])  # until it has ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                pidfd_send_signal(plain, SIGKILL)
            os.close(plain)


@pytest.mark.full
def test_compilers_are_stopped(tmp_path: Path, started: Started) -> None:
    run = started(*TESTS, "--op=vector_add", "--backend=cuda", *CANDIDATE, CXX=str(tmp_path / "compiler"))
    run.wait_for("inside")
    assert run.stop(SIGTERM).returncode == pytest.ExitCode.INTERRUPTED


@pytest.mark.full
def test_verify_is_stopped(started: Started) -> None:
    kernel = ["verify", "kernels.py:sleeps", "--as=vector_add", "--verdict=verdict.json"]
    run = started("fourfold", *kernel, *CANDIDATE, "-k", "test_output_agrees", "-p", "witness")
    run.wait_for("finished", "inside")
    assert run.stop(SIGTERM).returncode == pytest.ExitCode.INTERRUPTED
    assert json.loads(run.verdict.read_text())["counts"]["passed"] == 1


@pytest.mark.full
def test_tour_is_stopped(started: Started) -> None:
    run = started("fourfold", "tour", PYTEST_ADDOPTS="-p witness")
    run.wait_for("finished")
    assert run.stop(SIGTERM).returncode == 128 + SIGTERM


@pytest.mark.full
def test_grading_that_is_stopped_keeps_what_is_finished(tmp_path: Path, started: Started) -> None:
    source = KERNELS
    lines = [{"id": name, "operation": "vector_add", "source": source, "function": name} for name in ("absent", "deaf")]
    (tmp_path / "candidates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--out", "results.jsonl", "--workers", "1", "--dtype", "float32", "--examples", "2"]
    run = started("fourfold", "grade", "candidates.jsonl", *options)
    run.wait_for("inside")
    done = run.stop(SIGTERM)
    assert done.returncode == 128 + SIGTERM
    results = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [result["id"] for result in results if "id" in result] == ["absent"]
    assert "the same command resumes: results.jsonl has the finished verdicts" in done.stderr


@pytest.mark.full
def test_mutation_that_is_stopped_keeps_what_is_finished(tmp_path: Path, started: Started) -> None:
    options = ["--candidate=vector_add=mutated.py:add", "--function=add_kernel", "--dtype=float32", "--examples=1"]
    run = started("fourfold.mutation", *options, "--quick", "--report=report.json")
    run.wait_for("inside")
    done = run.stop(SIGTERM)
    assert done.returncode == 128 + SIGTERM
    assert "mutants in" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["outcomes"]
