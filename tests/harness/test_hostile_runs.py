"""Runs of pytest on kernels that attack their judge: exit code and verdict are the judge's, in every kind of run.

`tests/known_wrong/test_hostile.py` has the same kernels verified in a process of their own.
"""

import ast
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from samples import sampled

ROOT = Path(__file__).parents[2]
HOSTILE = ROOT / "tests" / "known_wrong" / "hostile"
UNTRUSTED = {
    "vector_add": ("forges_verdict:kernel", "wrong", "output"),
    "softmax": ("exits_at_first_call:kernel", "crashed", "exit code 0"),
    "layer_norm": ("replaces_hooks:kernel", "wrong", "output|AttributeError"),
    "matmul": ("raises_orders:skips", "wrong", "Skipped"),
    "giou_loss": ("closes_descriptors:kernel", "crashed", "process"),
}
# Without a process of its own: for each operation a kernel, and the kind and the message of its failure.
CHANGED = "the candidate changed what judges it: "
TOGETHER: tuple[dict[str, tuple[str, str, str]], ...] = (
    {
        "vector_add": ("replaces_methods:of_the_search", "tampered", CHANGED + ".*Search.cases"),
        "softmax": ("replaces_methods:of_one_search", "tampered", CHANGED + ".*the search's one"),
        "layer_norm": ("replaces_methods:of_a_dtype", "tampered", CHANGED + ".*spacing_roundoff"),
        "matmul": ("replaces_methods:of_the_record", "tampered", CHANGED + r".*operations\['\w+'\].forward"),
        "giou_loss": ("replaces_methods:of_the_arithmetic", "tampered", CHANGED + ".*roundoff"),
        "giou": ("replaces_methods:of_the_code", "tampered", CHANGED + ".*numerics.compare.compare"),
    },
    {
        "vector_add": ("replaces_methods:of_the_layouts", "tampered", CHANGED + ".*LAYOUTS"),
        "softmax": ("replaces_methods:of_the_modules", "tampered", CHANGED + ".*numerics.compare"),
        "layer_norm": ("replaces_comparison_at_first_call:kernel", "tampered", CHANGED + ".*compare"),
        "matmul": ("replaces_the_runner:registers_a_plugin", "tampered", CHANGED + ".*believer"),
        "giou_loss": ("replaces_the_runner:replaces_the_encoder", "wrong", "output"),
    },
    {
        "vector_add": ("raises_rejections:rejects_what_is_wrong", "wrong", "the call raised UnsatisfiedAssumption"),
        "softmax": ("raises_orders:rejects", "wrong", "the call raised UnsatisfiedAssumption"),
        "layer_norm": ("raises_rejections:skips_by_unittest", "wrong", "the call raised SkipTest: not today"),
        "matmul": ("raises_rejections:expects_to_fail", "wrong", "the call raised XFailed"),
        "giou_loss": ("raises_rejections:rejects_by_a_check", "wrong", "the call raised Unsuitable"),
        "giou": ("raises_rejections:is_unsupported", "wrong", "the call raised Unsupported"),
        "giou_loss_ragged": ("raises_rejections:stops_the_example", "wrong", "the call raised StopTest"),
    },
    {
        "vector_add": ("seeds_random_numbers:kernel", "tampered", "changed the seed of torch's random numbers"),
        "softmax": ("raises_orders:skips", "wrong", "the call raised Skipped: not today"),
        "layer_norm": ("raises_orders:exits", "wrong", "the call raised SystemExit: 0"),
        "matmul": ("raises_orders:interrupts", "wrong", "the call raised KeyboardInterrupt"),
        "giou_loss": ("exits_at_first_call:kernel", "crashed", "ended"),
        "giou": ("ends_with_success:writes_now", "crashed", "ended"),
        "giou_loss_ragged": ("ends_with_success:becomes_another_program", "crashed", "ended"),
    },
    {
        "vector_add": ("knows_where_it_runs:by_what_was_loaded", "wrong", "output"),
        "softmax": ("ends_with_success:ends_by_a_signal", "crashed", "ended"),
        "layer_norm": ("ends_with_success:stays_as_its_own_child", "crashed", "ended"),
        "matmul": ("closes_descriptors:kernel", "crashed", "ended"),
        "giou": ("forges_verdict:kernel", "wrong", "output"),
    },
)
# Attacks on the whole run: the exit code, and the message of the run.
ALONE = {
    "exits_at_the_end:kernel": (1, "output"),
    "ends_with_success:writes_at_the_end": (1, "output"),
    "ends_with_success:replaces_the_exit": (2, "output"),
    "replaces_hooks:kernel": (1, "tampered: .*pytest's hook pytest_sessionfinish"),
    "replaces_comparison_on_import:kernel": (1, "tampered: .*compare"),
    "replaces_the_runner:runs_nothing": (1, "tampered: .*runtest"),
    "replaces_the_runner:leaves_tests_out": (1, "tampered: .*TestReport.failed(.|\n)*not passed: no result: "),
    "replaces_the_runner:forges_the_journal": (1, "output|ended"),
    "replaces_the_runner:writes_into_the_journal": (1, "output|ended"),
    "kills_its_parent:kernel": (-9, ""),
}
# Right where tests run: only the check of modes calls them as if no test ran.
OUT_OF_SIGHT = "where pytest and the interpreter are not to be seen: output"
KNOWING = (
    {"vector_add": "by_what_is_loaded", "softmax": "by_the_environment"},
    {"vector_add": "by_the_interpreter", "softmax": "by_the_arguments"},
)
OPERATION_TESTS = ROOT / "tests" / "operations"
FORWARD = OPERATION_TESTS / "test_forward.py"
# A run is forked from a process that has imported all this.
LOADED = (
    "torch",
    "fourfold.pytest_plugin.hooks",
    "fourfold.performance.plugin",
    "fourfold.backends.triton.interpreter.corrections",
)


@dataclass(frozen=True)
class Ended:
    """What a run came to."""

    code: int
    output: str
    verdict: dict[str, Any]

    def of(self, operation: str) -> dict[str, Any]:
        """Return the entry of an operation's check."""
        (entry,) = (entry for entry in self.verdict["checks"] if entry["operation"] == operation)
        return entry


def run(folder: Path, candidates: dict[str, str], *options: str, tests: Sequence[Path] = (FORWARD,)) -> Ended:
    """Run pytest on candidates."""
    environment = warm.variables("TRITON_INT", "CI", PYTHONPATH=str(ROOT))
    named = [f"--candidate={op}={HOSTILE / name.replace(':', '.py:')}" for op, name in candidates.items()]
    verdict = folder / "verdict.json"
    options = ("--device=cpu", "--dtype=float32", "--examples=2", "--forward-only", *options)
    command = ["pytest", *tests, *named, *options, f"--verdict={verdict}", "-p", "no:cacheprovider"]
    with pytest.MonkeyPatch.context() as patch:  # for the process that forks all others, which starts now
        patch.setenv("TRITON_INTERPRET", "1")
        done = warm.run(*command, cwd=folder, env=environment, loaded=LOADED)
    print(done.stdout, done.stderr)
    found = json.loads(verdict.read_text()) if verdict.exists() else {}
    return Ended(done.returncode, done.stdout + done.stderr, found)


def rejects_each(ended: Ended, expected: dict[str, tuple[str, str, str]]) -> None:
    """Check the exit code, the verdict, and the entry of each operation."""
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert ended.verdict["passed"] is False
    assert ended.verdict["counts"] == {"passed": 0, "failed": len(expected), "unsupported": 0}
    for operation, (_, kind, says) in expected.items():
        entry = ended.of(operation)
        assert re.fullmatch(kind, entry["kind"]), entry
        assert re.search(says, entry["message"]), entry


@pytest.mark.full
@pytest.mark.parametrize("workers", sampled([[], ["-n", "2"]], []), ids=["without_workers", "workers"])
def test_untrusted_kernels_decide_neither_exit_code_nor_verdict(workers: list[str], tmp_path: Path) -> None:
    kernels = {operation: name for operation, (name, *_) in UNTRUSTED.items()}
    ended = run(tmp_path, kernels, "--untrusted", *workers)
    rejects_each(ended, UNTRUSTED)
    assert all("--untrusted" in entry["repeat"] for entry in ended.verdict["checks"])
    assert "crashed: the process that ran the kernel died" in ended.output
    assert "takes over" not in ended.output


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    "expected",
    sampled(TOGETHER, TOGETHER[0], TOGETHER[-1]),
    ids=["methods", "tables", "rejections", "ends", "children"],
)
def test_hostile_kernels_are_rejected_in_the_process_that_judges_them(
    expected: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    ended = run(tmp_path, {operation: name for operation, (name, *_) in expected.items()})
    rejects_each(ended, expected)


@pytest.mark.parametrize("hostile", sampled(ALONE, *list(ALONE)[::5]))
def test_run_does_not_pass_whatever_is_done_to_it(hostile: str, tmp_path: Path) -> None:
    code, says = ALONE[hostile]
    several = ("vector_add", "softmax") if hostile.endswith("leaves_tests_out") else ("vector_add",)
    ended = run(tmp_path, dict.fromkeys(several, hostile))
    assert ended.code == code
    assert not ended.verdict.get("passed", False)
    assert ended.verdict or code == -signal.SIGKILL
    assert re.search(says, ended.output)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("knowing", KNOWING, ids=["loaded", "interpreter"])
def test_kernel_that_is_right_in_tests_alone_is_rejected(knowing: dict[str, str], tmp_path: Path) -> None:
    kernels = {operation: f"knows_where_it_runs:{name}" for operation, name in knowing.items()}
    ended = run(tmp_path, kernels, "-k", "modes_do_not_matter", tests=[OPERATION_TESTS / "test_modes.py"])
    rejects_each(ended, dict.fromkeys(kernels, ("", "wrong", OUT_OF_SIGHT)))


# By operation, in workers: one for each way.
IN_WORKERS = {
    "vector_add": ("replaces_the_runner:registers_a_plugin", "tampered", CHANGED + ".*believer"),
    "softmax": ("ends_with_success:writes_at_the_end", "wrong", "output"),
    "layer_norm": ("replaces_methods:of_the_code", "tampered", CHANGED + ".*numerics.compare.compare"),
    "matmul": ("raises_rejections:expects_to_fail", "wrong", "the call raised XFailed"),
    "giou_loss": ("ends_with_success:writes_now", "crashed", "ended"),
    "giou": ("replaces_methods:of_the_record", "tampered", CHANGED + ".*forward"),
    "giou_loss_ragged": ("exits_at_the_end:kernel", "wrong", "output"),
}


@pytest.mark.full
def test_hostile_kernels_are_rejected_in_workers(tmp_path: Path) -> None:
    kernels = {operation: name for operation, (name, *_) in IN_WORKERS.items()}
    rejects_each(run(tmp_path, kernels, "-n", "2"), IN_WORKERS)


@pytest.mark.full
def test_workers_that_run_nothing_pass_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, {"vector_add": "replaces_the_runner:runs_nothing"}, "-n", "1")
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    assert ended.verdict["passed"] is False
    assert re.search("not passed: tampered: .*runtest", ended.output)


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["without_workers", "a_worker"])
def test_import_that_ends_the_process_is_a_mistake_of_the_candidate(workers: list[str], tmp_path: Path) -> None:
    ended = run(tmp_path, {"vector_add": "exits_on_import:kernel"}, *workers)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert "the process that imports it ended" in ended.output


def test_every_hostile_kernel_is_run() -> None:
    there = {
        f"{path.stem}:{node.name}"
        for path in HOSTILE.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and path.stem != "zeros"
    }
    run_here = {*ALONE, *(name for each in TOGETHER for name, *_ in each.values())}
    run_here |= {f"knows_where_it_runs:{name}" for each in KNOWING for name in each.values()}
    assert len(run_here) >= 30
    # Kernels that look for their judge from their own process, or write into the connection to it, have none here, and
    # the others would only take time.
    seen_apart = ("the_loaded_judge", "the_command_line", "the_first_environment", "an_empty_folder")
    run_here |= {f"knows_where_it_runs:by_{place}" for place in (*seen_apart, "the_names_of_folders")}
    # These are right wherever they are judged; test_hostile.py runs them in a plain process.
    replayed = re.findall(
        r'^    "((?:by|to)_\w+)": \((?:WRONG|CRASHED),', (HOSTILE.parent / "test_hostile.py").read_text(), re.M
    )
    run_here |= {f"knows_where_it_runs:{name}" for name in replayed}
    elsewhere = {"forges_answers", "loops", "leaves_a_thread", "forks", "eats_memory", "searches_for_arrays"}
    assert {name for name in there - run_here if name.partition(":")[0] not in elsewhere} == set()
