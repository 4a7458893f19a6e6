"""A kernel in its own folder is timed, saved and compared by the gate."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import warm

from fourfold.declaration.definition import operation, tensor
from fourfold.numerics.dtypes import DTYPES
from fourfold.performance.timings import INTENSE, lines, timings
from fourfold.pytest_plugin import rootdir

DECLARED = """
import fourfold
from fourfold import tensor

@fourfold.operation(x=tensor("rows cols"))
def doubled(x):
    return x + x
"""
KERNEL = """
from steps import step

def my_doubled(x):
    return step(x)

def inexact(x):
    return 2.0001 * x
"""
# The kernel's file never changes, only a module that it imports.
STEP = "def step(x):\n    return 2 * x\n"
SLOWER = "def step(x):\n    for _ in range(8):\n        y = 2 * x\n    return y\n"
TESTS = """
import fourfold
from declared import doubled
from kernel import inexact, my_doubled

TestSpeed = fourfold.benchmark_suite(my_doubled, doubled, device="cpu")
TestInexact = fourfold.benchmark_suite(inexact, doubled, device="cpu")
"""
FEW = "small and forward and not compile"
OWN = "def test_nothing():\n    pass\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"declared": DECLARED, "kernel": KERNEL, "steps": STEP, "test_speed": TESTS, "test_own": OWN}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Its own source files are written again within a second.
    own = {"CUDA_VISIBLE_DEVICES": "", "FOURFOLD_CACHE": str(project / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    return warm.run(*words, cwd=project, env=warm.variables("FOURFOLD_OP", COLUMNS="100", **own))


def benchmark(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    few = ["-k", FEW, "--benchmark-max-time=0.05", "-p", "no:cacheprovider"]
    return run(project, "pytest", "test_speed.py", "--benchmark-only", *few, *words)


def test_a_suite_is_saved_and_compared_by_the_gate(project: Path) -> None:
    done = benchmark(project, "--benchmark-save=before")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search(r"my_doubled-small-float32-forward +128x128 +\S+ .s +\S+ GB/s +\d+\.\d\d", done.stdout)
    assert "no GPU" in done.stdout
    # A wrong kernel has no time.
    wrong = "inexact-small-float32-forward-candidate: its result is wrong on this workload, so it has no time"
    assert wrong in done.stdout
    (record,) = project.glob(".benchmarks/*/0001_before.json")
    saved = json.loads(record.read_text())
    assert [one["param"].rpartition("-")[::2] for one in saved["benchmarks"]] == [
        ("my_doubled-small-float32-forward", "candidate"),
        ("my_doubled-small-float32-forward", "torch"),
        ("inexact-small-float32-forward", "torch"),
    ]
    # Unchanged code has a saved time that no call can reach, however fast or busy the machine is.
    for one in saved["benchmarks"]:
        one["stats"]["median"] = 1e-9
    record.write_text(json.dumps(saved))
    again = ["--benchmark-compare=0001", "--perf-gate-seconds=0.2", "--benchmark-compare-fail=median:5%"]
    done = benchmark(project, *again, "-k", f"my_doubled and {FEW}")
    assert done.returncode == 0, done.stdout
    assert "1 beyond --benchmark-compare-fail: not slower, measured in turns" in done.stdout
    assert not re.search("Traceback|PerformanceRegression", done.stdout + done.stderr)
    (project / "steps.py").write_text(SLOWER)
    done = benchmark(project, *again, "-k", f"my_doubled and {FEW}")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search(r"kernel\.my_doubled is slower: \+\d+\.\d%", done.stdout), done.stdout
    assert re.search(r"slower +\+\d+\.\d% \(\+", done.stdout), done.stdout
    assert not re.search("Traceback|PerformanceRegression", done.stdout + done.stderr)


def test_a_record_of_kernels_is_of_this_machine_before_a_suite_is_imported() -> None:
    processor = {"arch": "X86_64", "brand_raw": "EPYC", "count": 2}
    saved = {"machine_info": {"cpu": processor, "node": "a", "fourfold": {"device": "cpu"}}}
    here = {"cpu": {**processor, "flags": ["avx"]}, "node": "a"}
    rootdir.pytest_benchmark_compare_machine_info(here, saved)
    assert here == saved["machine_info"]
    elsewhere = {"cpu": {**processor, "count": 4}, "node": "a"}
    rootdir.pytest_benchmark_compare_machine_info(elsewhere, saved)
    assert elsewhere != saved["machine_info"]
    of_others = {"cpu": {**processor, "flags": ["avx"]}, "node": "a"}
    rootdir.pytest_benchmark_compare_machine_info(of_others, {"machine_info": {"cpu": {}}})
    assert "flags" in of_others["cpu"]


def test_a_run_with_no_benchmark_says_so(project: Path) -> None:
    done = run(project, "pytest", "test_own.py", "--benchmark-only")
    assert "--benchmark-only: no collected test is a benchmark" in done.stdout
    assert "fourfold.benchmark_suite(kernel, operation)" in done.stdout


@pytest.mark.full
def test_options_without_what_they_need_say_so(project: Path) -> None:
    done = run(project, "pytest", "-p", "fourfold", "test_own.py", "--benchmark-only")
    assert "--benchmark-only: no collected test is a benchmark" in done.stdout
    done = run(project, "pytest", "test_own.py", "--perf-gate")
    assert "--perf-gate decides after a comparison: it needs --benchmark-compare" in done.stderr
    compared = ["--benchmark-compare", "--benchmark-compare-fail=median:5%"]
    done = benchmark(project, *compared, "-k", f"my_doubled and {FEW}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there is no baseline" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    done = run(project, "pytest", "test_speed.py", "-rs")
    assert "a benchmark: pytest --benchmark-only times it" in done.stdout


@pytest.mark.full
def test_the_command_saves_and_compares(project: Path) -> None:
    command = ["fourfold.cli.main", "bench", "kernel.py:my_doubled", "--as", "declared.py:doubled"]
    few = ["--benchmark-max-time=0.05", "-k", FEW.replace("small and ", ""), "--sizes", "rows=8,cols=1000"]
    few += ["-q", "--device=cpu"]
    done = run(project, *command, *few, "--save", "before")
    assert done.returncode == 0, done.stdout
    assert re.search(r"doubled-rows_8_cols_1000-float32-forward +8x1000 ", done.stdout), done.stdout
    done = run(project, *command, *few, "--compare", "befor")
    assert done.returncode == 2
    assert "did you mean before?" in done.stderr
    (project / "steps.py").write_text(SLOWER)
    done = run(project, *command, *few, "--compare", "before", "--json", "--perf-gate-seconds=0.2")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["timings"]
    assert row["change"]["verdict"] == "slower"
    assert row["change"]["low"] > 1
    assert row["shapes"] == {"x": [8, 1000]}


def test_workloads_have_sizes_that_the_operation_has() -> None:
    @operation(x=tensor("rows cols"), sizes={"cols": (1, 64)})
    def negated(x):  # type: ignore[no-untyped-def]
        return -x

    made = negated.workloads["cuda"]
    shapes = {name: made[name](DTYPES["float32"]).case["x"].shape for name in made}
    assert shapes == {"small": (256, 64), "ragged": (16383, 63), "large": (1 << 17, 64)}


def test_a_rate_is_told_by_what_limits_it() -> None:
    info = {"contender": "candidate", "shapes": {"x": [4, 4]}, "bytes_per_second": 2e9, "flops_per_second": 2e9}
    one = {"fullname": "a", "group": "g", "median": 1e-5, "extra_info": info}
    peer = {"fullname": "b", "group": "g", "median": 2e-5, "extra_info": {"contender": "torch"}}
    (row,) = timings([one, peer])
    assert [*row.cells] == ["g", "4x4", "10 µs", "2 GB/s", "0.50", ""]
    info["flops_per_second"] = 2e9 * (INTENSE + 1)
    (row,) = timings([one, peer])
    assert "18 Gflop/s" in lines([row])[1]
