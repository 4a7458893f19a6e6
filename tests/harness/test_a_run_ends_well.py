"""A run always ends with the table, the verdict and the exit code, whatever a candidate does or a folder is like."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from samples import sampled

from fourfold.candidates.integrity.escapes import Escape, convert_escapes
from fourfold.engine.cells import Candidate, Cell
from fourfold.engine.shortcomings import Coverage, shortcomings
from fourfold.operations.outcomes import Exclusion, Status
from fourfold.performance import report
from fourfold.pytest_plugin import rootdir
from fourfold.pytest_plugin.paths import file_to_write, folder_to_write

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "tests" / "operations"
FORWARD = OPERATIONS / "test_forward.py"


@dataclass(frozen=True)
class Ended:
    """The results of a run."""

    code: int
    output: str
    verdict: dict[str, Any] = field(default_factory=dict)

    def check(self, operation: str, check: str = "forward") -> dict[str, Any]:
        """Return the entry of one check in the verdict."""
        return next(
            entry
            for entry in self.verdict["checks"]
            if entry["operation"] == operation and entry["check"].startswith(check)
        )


def run(folder: Path, *arguments: str | Path, verdict: Path | None = None, **environment: str) -> Ended:
    """Run pytest from a folder."""
    inherited = warm.variables("TRITON_INT", "CI", COLUMNS="100", PYTHONPATH=str(ROOT))
    told = [] if verdict is None else [f"--verdict={verdict}"]
    done = warm.run("pytest", *arguments, *told, cwd=folder, env=inherited | environment)
    print(shlex.join(done.args), done.stdout, done.stderr)
    found = json.loads(verdict.read_text()) if verdict is not None and verdict.exists() else {}
    return Ended(done.returncode, done.stdout + done.stderr, found)


QUICK = ("--dtype", "float32", "--examples", "2", "--device", "cpu")


def write_file(path: Path, text: str) -> Path:
    """Write a file, and make its folder; return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- which cell a test is for


@pytest.mark.full
def test_tests_with_names_like_those_of_cells_are_not_taken_for_cells(tmp_path: Path) -> None:
    write_file(
        tmp_path / "test_mine.py",
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1], ids=['softmax-torch-float32'])\n"
        "def test_mine(n):\n"
        "    assert n == 1\n",
    )
    ended = run(tmp_path, "-p", "fourfold", "--device=cpu", "--rootdir", tmp_path, verdict=tmp_path / "verdict.json")
    assert ended.code == pytest.ExitCode.OK
    assert ended.verdict["checks"] == []
    assert "= verified =" not in ended.output


@pytest.mark.full
@pytest.mark.parametrize("workers", sampled([[], ["-n", "1"]], []), ids=["without_workers", "a_worker"])
def test_checks_are_told_by_their_operation_and_claim(workers: list[str], tmp_path: Path) -> None:
    tests = [OPERATIONS / "test_laws.py", FORWARD]
    selected = ["--op", "vector_add", "--backend", "torch", *QUICK, *workers]
    ended = run(ROOT, *tests, *selected, verdict=tmp_path / "verdict.json")
    assert ended.code == pytest.ExitCode.OK
    assert {(entry["operation"], entry["backend"], entry["dtype"]) for entry in ended.verdict["checks"]} == {
        ("vector_add", "torch", "float32")
    }
    checks = {entry["check"] for entry in ended.verdict["checks"]}
    assert checks > {"forward: output agrees with the oracle"}
    assert all(check.startswith(("forward: ", "laws: ")) and "float32" not in check for check in checks)


# ---- candidates and their neighbours

WRONG = """
from helper import applied

def softmax(x):
    return applied(x)

def softmax_in_another_way(x):
    from later import applied_later
    return applied_later(x)
"""
HELPER = """
import torch

def applied(x):
    return torch.softmax(x, -1).reshape(3, 4)
"""


def test_failures_of_one_cause_are_shown_once_and_repeated_from_the_same_folder(tmp_path: Path) -> None:
    write_file(tmp_path / "my kernels" / "softmax.py", WRONG)
    helper = write_file(tmp_path / "my kernels" / "helper.py", HELPER)
    candidate = ["--candidate", "softmax=my kernels/softmax.py:softmax"]
    options, tests = [*QUICK, "--no-refusals"], [FORWARD, OPERATIONS / "test_laws.py"]
    ended = run(tmp_path, *tests, *candidate, *options, verdict=tmp_path / "verdict.json")
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    failed = [entry for entry in ended.verdict["checks"] if entry["outcome"] == "failed"]
    assert len(failed) > 5
    # The author's own frames appear once.
    line = 1 + HELPER.splitlines().index("    return torch.softmax(x, -1).reshape(3, 4)")
    assert ended.output.count(f'File "{helper}", line {line}, in applied') == 1
    assert "RuntimeError: shape '[3, 4]' is invalid" in ended.output
    for of_the_harness in (
        "Subject(",
        "fourfold/operations",
        "fourfold/engine",
        "fourfold/checks",
        "@reproduce_failure",
    ):
        assert of_the_harness not in ended.output
    # All others refer to it, each with its case and the command that repeats it.
    assert ended.output.count("\nsame cause as ") == len(failed) - 1
    assert len(ended.output.splitlines()) < 15 * len(failed)
    for entry in failed:
        assert entry["counterexample"].startswith("Case(x=")
        assert entry["repeat"] in ended.output
        assert "RuntimeError" in entry["message"]
    command = shlex.split(ended.check("softmax")["repeat"])[1:]
    again = run(tmp_path, *command, "--examples=2", verdict=tmp_path / "again.json")
    assert again.code == pytest.ExitCode.TESTS_FAILED
    assert again.verdict["counts"] == {"passed": 0, "failed": 1, "unsupported": 0}


@pytest.mark.full
def test_repeating_from_within_the_clone_names_the_test_from_there(tmp_path: Path) -> None:
    wrong = write_file(tmp_path / "wrong.py", "def add(x, y):\n    return x - y\n")
    candidate = f"vector_add={wrong}:add"
    verdict = tmp_path / "verdict.json"
    ended = run(ROOT / "tests", FORWARD, "--candidate", candidate, *QUICK, "-n", "1", verdict=verdict)
    test = "operations/test_forward.py::test_output_agrees_with_the_oracle[vector_add-candidate-float32]"
    assert shlex.split(ended.check("vector_add")["repeat"])[:2] == ["pytest", test]


def test_candidates_import_what_is_in_their_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number in (1, 2):
        folder = tmp_path / str(number)
        write_file(folder / "kernels.py", "from beside import number\n\ndef add(x, y):\n    return x + y * number()\n")
        write_file(
            folder / "beside.py", f"def number():\n    import later_{number}\n    return later_{number}.number\n"
        )
        write_file(folder / f"later_{number}.py", f"number = {number}\n")
    one, two = (Candidate("vector_add", str(tmp_path / str(n) / "kernels.py"), "add").load() for n in (1, 2))
    x = torch.ones(())
    assert (one(x, x).item(), two(x, x).item()) == (2.0, 3.0)


# ---- runs that lack something


@pytest.mark.full
def test_backend_that_is_asked_for_and_cannot_run_does_not_pass(tmp_path: Path) -> None:
    without = {"CXX": str(tmp_path / "no g++")}
    asked = run(ROOT, FORWARD, "--op=vector_add", "--backend=cuda", *QUICK, verdict=tmp_path / "v.json", **without)
    assert asked.code == pytest.ExitCode.TESTS_FAILED
    assert not asked.verdict["passed"]
    told = "not passed: nothing of --backend cuda can be verified here: 1 check of 1 cell unsupported"
    assert f"{told} (vector_add cuda float32)" in asked.output
    # A plain run leaves out what this machine cannot do, and says so.
    plain = run(ROOT, FORWARD, "-k", "vector_add and float32", "--examples=2", "--device=cpu", **without)
    assert plain.code == pytest.ExitCode.OK
    assert "unsupported[1]" in plain.output
    assert "not passed" not in plain.output


CUDA, TRITON = Cell("softmax", "cuda", "float32"), Cell("softmax", "triton", "float32")
OWN = Cell("softmax", "candidate", "float32")
RAN, NEVER, NO_ROOM = [Status.PASSED, Status.FAILED], [Exclusion.CELL], [Status.UNREACHED]


@pytest.mark.parametrize(
    ("cells", "operations", "backends", "candidates", "forward_only", "says"),
    [
        ({CUDA: NEVER, TRITON: RAN}, [], [], [], False, []),
        ({CUDA: NEVER}, [], [], [], False, []),
        ({CUDA: NEVER, TRITON: RAN}, ["softmax"], [], [], False, []),
        ({CUDA: NEVER, TRITON: RAN}, [], ["triton", "cuda"], [], False, ["nothing of --backend cuda"]),
        ({CUDA: NEVER}, ["softmax"], [], [], False, ["nothing of --op softmax"]),
        ({TRITON: NO_ROOM}, [], ["triton"], [], False, ["nothing was verified: 1 check of 1 cell unsupported"]),
        ({TRITON: NO_ROOM, CUDA: RAN}, [], ["triton", "cuda"], [], False, []),
        ({OWN: RAN}, [], [], ["softmax"], False, []),
        ({OWN: NO_ROOM}, [], [], ["softmax"], True, ["nothing was verified"]),
        ({OWN: [*RAN, *NO_ROOM]}, [], [], ["softmax"], False, ["what is verified with a candidate must be in full"]),
        ({OWN: [*RAN, Exclusion.FORWARD_ONLY]}, [], [], ["softmax"], False, ["1 check of gradients"]),
        ({OWN: [*RAN, Exclusion.FORWARD_ONLY]}, [], [], ["softmax"], True, []),
        ({OWN: [*RAN, Exclusion.NO_GRADIENTS]}, [], [], ["softmax"], False, ["what is verified with a candidate"]),
        ({OWN: [*RAN, Exclusion.NO_GRADIENTS]}, [], [], ["softmax"], True, []),
        ({OWN: [*RAN, Exclusion.UNCLAIMED, Status.REFUSED]}, [], [], ["softmax"], False, []),
    ],
)
def test_what_an_option_names_must_be_verified(
    cells: Coverage,
    operations: list[str],
    backends: list[str],
    candidates: list[str],
    forward_only: bool,
    says: list[str],
) -> None:
    lines = shortcomings(cells, operations, backends, candidates, forward_only)
    assert len(lines) == len(says)
    assert all(line.startswith(start) for line, start in zip(lines, says))


# ---- paths


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a user's suite, and a file and a folder outside of it that a former run left."""
    write_file(tmp_path / "elsewhere" / "verdict.json", "{}")
    (tmp_path / "elsewhere" / "report").mkdir()
    write_file(tmp_path / "mine" / "test_mine.py", "def test_mine():\n    pass\n")
    return tmp_path / "mine"


def test_paths_that_cannot_be_written_are_named_before_the_run(tmp_path: Path) -> None:
    file, folder = write_file(tmp_path / "file", ""), tmp_path
    for wrong, says in ((Path(), "a folder"), (Path("file", "below"), "takes no files")):
        with pytest.raises(pytest.UsageError, match=rf"^--verdict {wrong}: .*{says}"):
            file_to_write("--verdict", wrong, folder)
    with pytest.raises(pytest.UsageError, match=r"^--verdict /dev/null: no plain file"):
        file_to_write("--verdict", Path(os.devnull), folder)
    for wrong, says in ((Path("file"), "a file"), (Path("file", "a", "b"), "takes no files")):
        with pytest.raises(pytest.UsageError, match=rf"^--report {wrong}: .*{says}"):
            folder_to_write("--report", wrong, folder)
    assert file_to_write("--verdict", Path("new", "er", "verdict.json"), folder).parent.is_dir()
    assert file_to_write("--verdict", file, folder) == file
    # The report's folder is created at the end: see `folder_to_write`.
    assert not folder_to_write("--report", Path("newest", "report"), folder).exists()
    assert os.listdir(folder / "newest") == []


def test_wrong_path_ends_the_run_before_it_begins(project: Path) -> None:
    ended = run(project, "-p", "fourfold", "--report", "test_mine.py")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --report test_mine.py: a file has this name" in ended.output


def test_folders_that_are_missing_are_made(project: Path) -> None:
    ended = run(project, "-p", "fourfold", "--report", "a/b/report", verdict=project / "c" / "d" / "verdict.json")
    assert ended.code == pytest.ExitCode.OK
    assert ended.verdict["passed"]
    assert (project / "a" / "b" / "report" / "index.html").is_file()


@pytest.mark.full
def test_what_can_no_longer_be_written_leaves_the_table(tmp_path: Path) -> None:
    beside = write_file(
        tmp_path / "test_beside.py",
        "import pathlib\n"
        "def test_takes_the_names(cell):\n"
        "    pathlib.Path('report').write_text('')\n"
        "    pathlib.Path('verdict.json').mkdir()\n",
    )
    selected = ["--op=vector_add", "--backend=torch", *QUICK]
    ended = run(tmp_path, beside, "-p", "fourfold", "--report=report", "--verdict=verdict.json", *selected)
    assert ended.code == pytest.ExitCode.INTERNAL_ERROR
    assert "= verified =" in ended.output
    assert "--report" in ended.output.partition("= verified =")[2]
    assert f"--verdict {tmp_path / 'verdict.json'} is not written: " in ended.output
    assert "INTERNALERROR" not in ended.output


def test_page_is_made_without_the_part_that_is_damaged(tmp_path: Path) -> None:
    write_file(tmp_path / "performance.json", '{"machine": ')
    page = report.write(tmp_path, "verification", {"about": "a machine", "cells": [], "failures": []})
    assert "a machine" in page.read_text()


INSTALLED = "[pytest11]\nfourfold.pytest_plugin.rootdir = fourfold.pytest_plugin.rootdir\n"


@pytest.mark.full
@pytest.mark.parametrize("variable", [False, True], ids=["arguments", "PYTEST_ADDOPTS"])
def test_command_works_again_when_its_files_are_there_in_a_suite_that_loads_the_plugin(
    variable: bool, project: Path
) -> None:
    write_file(project / "pytest.ini", "[pytest]\n")
    write_file(project / "conftest.py", "pytest_plugins = ['fourfold']\n")
    site = project.parent / "site"
    write_file(site / "fourfold-0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: fourfold\nVersion: 0\n")
    write_file(site / "fourfold-0.dist-info" / "entry_points.txt", INSTALLED)
    verdict, folder = project.parent / "elsewhere" / "verdict.json", project.parent / "elsewhere" / "report"
    arguments = ["--verdict", str(verdict), "--report", str(folder), "--device", "cpu"]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    if variable:
        environment["PYTEST_ADDOPTS"] = shlex.join(arguments)
    ended = run(project, *([] if variable else arguments), **environment)
    assert ended.code == pytest.ExitCode.OK
    assert f"rootdir: {project}\n" in ended.output
    assert json.loads(verdict.read_text())["passed"]
    assert (folder / "index.html").is_file()
    assert "warning" not in ended.output


@pytest.mark.full
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["without_workers", "a_worker"])
def test_command_works_again_when_its_files_are_there_with_the_plugin_as_an_option(
    workers: list[str], project: Path
) -> None:
    folder = project.parent / "elsewhere" / "report"
    ended = run(project, "-p", "fourfold", "--report", folder, *workers)
    assert ended.code == pytest.ExitCode.OK
    assert f"rootdir: {project}\n" in ended.output
    assert "1 passed" in ended.output
    assert (folder / "index.html").is_file()


def test_arguments_that_mislead_are_written_in_one(tmp_path: Path) -> None:
    write_file(tmp_path / "there", "")
    given = ["--verdict", "there", "there", "--report", "not there", "--other", "there", "--op", "softmax"]
    better = ["--verdict=there", "there", "--report", "not there", "--other", "there", "--op", "softmax"]
    assert rootdir.join_options(given, tmp_path) == better
    assert rootdir.join_options(better, tmp_path) == better


def test_plugin_of_every_run_imports_next_to_nothing() -> None:
    heavy = "{'torch', 'numpy', 'hypothesis'}"
    code = f"import fourfold.pytest_plugin.rootdir, sys; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("ci", ["", "1"], ids=["plain", "ci"])
def test_folder_that_must_not_be_written_to_is_no_failure_and_no_noise(ci: str, tmp_path: Path) -> None:
    write_file(tmp_path / ".hypothesis", "")
    cache = write_file(tmp_path / "file", "") / "cache"
    selected = ["--op=vector_add", "--backend=torch", *QUICK]
    ended = run(tmp_path, FORWARD, *selected, "-o", f"cache_dir={cache}", **({"CI": ci} if ci else {}))
    assert ended.code == pytest.ExitCode.OK
    assert "arning" not in ended.output


# ---- candidates that do not return

ENDS = """
import os, signal, sys, threading, time
import torch

def exits(x, y):
    sys.exit(0)

def interrupts(x):
    raise KeyboardInterrupt

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pred, target, eps=1e-5):
        return (pred * target).sum()

    @staticmethod
    def backward(ctx, grad_output):
        raise GeneratorExit("for good")

def skips(a, b, activation="none", negative_slope=0.01):
    import pytest
    pytest.skip("not today")

def is_interrupted(x, y):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)

def spin():
    while True:
        time.sleep(0.01)

def leaves_a_thread(x, y):
    threading.Thread(target=spin).start()
    return x + y
"""


@pytest.mark.full
def test_orders_to_end_fail_the_check_and_end_nothing(tmp_path: Path) -> None:
    ends = write_file(tmp_path / "ends.py", ENDS)
    names = {"vector_add": "exits", "softmax": "interrupts", "giou_loss": "Backward", "matmul": "skips"}
    candidates = [f"--candidate={operation}={ends}:{name}" for operation, name in names.items()]
    tests = [FORWARD, OPERATIONS / "test_errors.py", OPERATIONS / "test_backward.py"]
    options = [*candidates, *QUICK, "--forward-only", "--strict-errors"]
    ended = run(ROOT, *tests, *options, verdict=tmp_path / "verdict.json")
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert "another takes over" not in ended.output.lower()
    for operation, raised in (("vector_add", "SystemExit: 0"), ("softmax", "KeyboardInterrupt"), ("matmul", "Skipped")):
        failed = ended.check(operation)
        assert failed["outcome"] == "failed"
        assert failed["message"].startswith(f"the call raised {raised}")
        assert failed["counterexample"].startswith("Case(")
        assert f"the call raised {raised}" in ended.check(operation, "errors")["message"]
    assert ended.check("giou_loss", "backward")["message"] == "the call raised GeneratorExit: for good"
    assert ended.verdict["counts"]["unsupported"] == 0


# A plugin that interrupts the end of the run immediately.
INTERRUPTS = """
import math, os, signal
from fourfold.candidates.integrity import escapes

escapes.ONE_INTERRUPT = math.inf

def pytest_keyboard_interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    print("interrupted twice")
"""


@pytest.mark.parametrize("twice", sampled([False, True], True))
def test_ctrl_c_ends_the_run_in_the_midst_of_a_call(twice: bool, tmp_path: Path) -> None:
    ends = write_file(tmp_path / "ends.py", ENDS)
    write_file(tmp_path / "interrupts.py", INTERRUPTS)
    plugin = ["-p", "interrupts"] if twice else []
    path = os.pathsep.join(map(str, (ROOT, tmp_path)))
    ended = run(ROOT, FORWARD, f"--candidate=vector_add={ends}:is_interrupted", *QUICK, *plugin, PYTHONPATH=path)
    assert ("interrupted twice" in ended.output) == twice
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert "takes over" not in ended.output
    assert "Traceback" not in ended.output
    assert "KeyboardInterrupt !!!" in ended.output


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), BaseException("other")])
def test_orders_to_end_are_errors(raised: BaseException) -> None:
    with pytest.raises(Escape, match=f"^the call raised {type(raised).__name__}"), convert_escapes():
        raise raised


@pytest.mark.parametrize("raised", [ValueError, pytest.fail.Exception, Escape])
def test_errors_and_time_limits_stay_what_they_are(raised: type[BaseException]) -> None:
    with pytest.raises(raised, match=r"^as it is$") as caught, convert_escapes():
        raise raised("as it is")
    assert type(caught.value) is raised


@pytest.mark.parametrize(
    "workers", sampled([[], ["-n", "0"], ["-n", "1"]], []), ids=["child", "one_process", "a_worker"]
)
def test_threads_that_are_left_behind_do_not_keep_the_run(workers: list[str], tmp_path: Path) -> None:
    ends = write_file(tmp_path / "ends.py", ENDS)
    candidate = f"--candidate=vector_add={ends}:leaves_a_thread"
    ended = run(ROOT, FORWARD, candidate, *QUICK, *workers, verdict=tmp_path / "verdict.json")
    assert ended.code == pytest.ExitCode.OK
    assert "= verified =" in ended.output
    assert ended.verdict["counts"] == {"passed": 1, "failed": 0, "unsupported": 0}
    line = 1 + ENDS.splitlines().index("        time.sleep(0.01)")
    left = "test_output_agrees_with_the_oracle[vector_add-candidate-float32] has left behind"
    assert f"{left}, at {ends}:{line} in spin" in ended.output


LOOPS = "import time_limits\ntime_limits.interrupt()\nx = 0\nwhile True:\n    x += 1\n"
# It ignores signals, and holds Python's lock.
HOLDS = (
    "import ctypes, signal, time_limits\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
    "time_limits.end()\n"
    "ctypes.PyDLL(None).sleep(1000)\n"
)


NOT_ENDED = "its import has not ended within 600 s, the time limit of a test: it was at {}:"
HAD_TO_BE_ENDED = "the process that imports it had to be ended: it did not come back within 0:00:00.1"


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("text", "says", "workers"),
    [
        pytest.param(LOOPS, NOT_ENDED, [], id="loops"),
        pytest.param(HOLDS, HAD_TO_BE_ENDED, [], id="holds"),
        pytest.param(HOLDS, HAD_TO_BE_ENDED, ["-n", "1"], id="holds_before_workers"),
        pytest.param("import os; os._exit(0)", "the process that imports it ended", [], id="leaves"),
        pytest.param("raise SystemExit", "SystemExit:  ({}:1)", ["-n", "1"], id="exits_before_workers"),
    ],
)
def test_import_that_does_not_come_back_is_a_mistake_of_the_candidate(
    text: str, says: str, workers: list[str], tmp_path: Path
) -> None:
    candidate = write_file(tmp_path / "candidate.py", text)
    limits = ["--timeout=600", "-p", "time_limits"]
    path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    ended = run(ROOT, FORWARD, f"--candidate=softmax={candidate}:f", *limits, *QUICK, *workers, PYTHONPATH=path)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --candidate" in ended.output
    assert str(candidate) in ended.output
    assert says.format(candidate) in ended.output


def test_results_from_before_a_death_are_reported_in_full(tmp_path: Path) -> None:
    """pytest shows the reason of a skipped test, and expects it in a tuple."""
    write_file(
        tmp_path / "test_mine.py",
        "import os, pytest\n"
        "def test_skips():\n"
        "    pytest.skip('without a reason')\n"
        "def test_dies():\n"
        "    os._exit(7)\n"
        "def test_passes():\n"
        "    pass\n",
    )
    ended = run(tmp_path, "-v", "-rs", "-p", "fourfold", "--device=cpu", "--rootdir", tmp_path, "test_mine.py")
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 1 skipped" in ended.output
    assert "SKIPPED [1] test_mine.py:3: without a reason" in ended.output
