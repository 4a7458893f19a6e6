"""The process of untrusted candidates starts before torch is imported, and the child that runs the tests adopts it."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fourfold.candidates.process.first_process import (
    adopt_first_process,
    end_first_process,
    first_process,
    first_process_number,
)
from fourfold.processes.child import Child
from fourfold.pytest_plugin import early_start
from fourfold.pytest_plugin.early_start import needs_process, unfreeze

CANDIDATE = "--candidate=softmax=kernels.py:softmax"


@pytest.fixture
def process() -> Iterator[int]:
    """Yield the process id of a new first process, and end it afterwards."""
    end_first_process()
    first_process()
    number = first_process_number()
    assert number is not None
    yield number
    end_first_process()


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ([CANDIDATE, "--untrusted"], True),
        (["tests", "-x", "--candidate", "softmax=kernels.py:softmax", "--untrusted-where-possible"], True),
        ([CANDIDATE, "--untrusted", "--device=cpu", "-k", "forward"], True),
        ([CANDIDATE], False),
        (["--untrusted"], False),
        ([CANDIDATE, "--untrusted", "-n", "2"], True),
        ([CANDIDATE, "--untrusted-where-possible", "--device", "cuda"], False),
        (["--candidate=my.py:op=my.py:kernel", "--untrusted-where-possible"], False),
        (["--candidate=my.py:op=kernels.py:kernel", "--untrusted-where-possible"], True),
        ([CANDIDATE, "--untrusted", "--examples=many"], False),
    ],
)
def test_the_process_starts_early_only_for_a_run_that_needs_it(
    arguments: list[str], needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_start, "DRIVER", early_start.DRIVER / "missing")
    assert needs_process(arguments) == needed


def test_a_run_that_may_take_the_gpu_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "DRIVER", early_start.Path(__file__))
    assert not needs_process([CANDIDATE, "--untrusted-where-possible"])
    assert needs_process([CANDIDATE, "--untrusted-where-possible", "--device", "cpu"])


@pytest.mark.parametrize(("name", "adopts"), [("TMPDIR", True), ("HYPOTHESIS_PROFILE", True), ("KERNEL_MODE", False)])
def test_a_child_adopts_the_process_unless_variables_of_candidates_changed(
    process: int, name: str, adopts: bool
) -> None:
    def takes_it_over() -> int:
        os.environ[name] = "changed"
        adopt_first_process()
        first_process()
        return int(first_process_number() == process)

    child = Child.fork(takes_it_over, handles_exit=True)
    death = child.wait(60)
    assert death is not None
    assert death.code == adopts


def test_the_garbage_collector_leaves_out_what_pytest_collected_and_runs_during_tests() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000


@pytest.mark.parametrize(("binding", "frozen"), [("nanobind", False), ("pybind11_builtins", True)])
def test_what_tritons_library_would_report_is_collected(binding: str, frozen: bool) -> None:
    def count_frozen() -> int:
        metatype = type("metatype", (type,), {"__module__": binding})
        library = SimpleNamespace(ir=SimpleNamespace(builder=metatype("builder", (), {})))
        sys.modules["triton._C.libtriton"] = library  # type: ignore[assignment]
        unfreeze()
        return int(gc.get_freeze_count() > 0)

    death = Child.fork(count_frozen, handles_exit=True).wait(60)
    assert death is not None
    assert death.code == frozen


def test_what_gradients_need_is_imported_before_a_fork() -> None:
    program = """
import sys, torch
from fourfold.compat.torch_internals import import_for_gradients
import_for_gradients()
before = {*sys.modules}
x = torch.ones(3, requires_grad=True)
torch.autograd.grad(2 * x, [x], torch.ones(3))
late = {*sys.modules} - before
sys.exit(", ".join(late) if len(late) > 10 else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import fourfold.pytest_plugin.early_start", {"torch", "numpy"}),
        (
            'from fourfold.checks.records import operation_named\nassert operation_named("softmax").name == "softmax"',
            {"fourfold.properties.attention"},  # the record of another operation
        ),
    ],
)
def test_what_is_not_needed_is_not_imported(program: str, unwanted: set[str]) -> None:
    program += f"\nimport sys\nsys.exit(not {unwanted}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
