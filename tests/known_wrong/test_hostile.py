"""Kernels that attack what judges them, each in `hostile/`: none passes, and the judge says what it did."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.running import untrusted
from fourfold.running.candidate_session import Crashed
from fourfold.running.cells import Candidate, SelectionError
from fourfold.running.findings import CRASHED, TIMED_OUT, WRONG, Verdict
from fourfold.running.verification import verify

ROOT = Path(__file__).parents[2]
HOSTILE = Path(__file__).with_name("hostile")
# Of processor time and by the clock the same, as a loop takes all of a core that it gets.
SECONDS = 0.5
OUT_OF_TURN = "crashed: the candidate's process answered out of turn: "
EXITED = "crashed: the candidate's process ended with exit code 0"
NOT_ZERO = r"output\[.*\] is [01]\.0, expected"
# By file and function: what the first failure is, and says.
FAILS = {
    "exits_at_first_call:kernel": (CRASHED, EXITED),
    "exits_at_the_end:kernel": (WRONG, NOT_ZERO),
    "replaces_comparison_on_import:kernel": (WRONG, NOT_ZERO),
    "replaces_comparison_at_first_call:kernel": (WRONG, NOT_ZERO),
    "searches_for_arrays:kernel": (WRONG, NOT_ZERO),
    "replaces_hooks:kernel": (WRONG, f"AttributeError|{NOT_ZERO}"),
    "raises_orders:skips": (WRONG, "the call raised Skipped: not today"),
    "raises_orders:exits": (WRONG, "the call raised SystemExit: 0"),
    "raises_orders:interrupts": (WRONG, "the call raised KeyboardInterrupt"),
    "forges_verdict:kernel": (WRONG, NOT_ZERO),
    "loops:kernel": (TIMED_OUT, r"timed out: the candidate did not answer within 0.5 s"),
    "closes_descriptors:kernel": (CRASHED, "crashed: the candidate's process"),
    "leaves_a_thread:kernel": (WRONG, NOT_ZERO),
    "forks:kernel": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_memory_that_is_not_there": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_negative_strides": (CRASHED, OUT_OF_TURN),
    "forges_answers:nothing": (CRASHED, OUT_OF_TURN + "a list in place of a message"),
    "forges_answers:no_json": (CRASHED, OUT_OF_TURN + "a message that is no JSON"),
    "forges_answers:too_long": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_another_question": (CRASHED, OUT_OF_TURN + "an answer to question 99"),
    "kills_its_parent:kernel": (CRASHED, "crashed: .* it is called no more|crashed: the candidate's process"),
}


def verdict_on(hostile: str, **options: Any) -> Verdict:
    file, _, function = hostile.partition(":")
    given: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 2, "only": ["forward"], "seed": 1}
    return verify(f"{HOSTILE / file}.py:{function}", "vector_add", untrusted=True, **{**given, **options})


@pytest.mark.parametrize("hostile", FAILS)
def test_hostile_kernel_does_not_pass_and_its_judge_says_why(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_COSTLY", 2)
    kind, says = FAILS[hostile]
    verdict = verdict_on(hostile, call_seconds=SECONDS if kind == TIMED_OUT else 60)
    assert not verdict.passed
    (outcome,) = verdict.outcomes
    assert outcome.outcome == "failed"
    assert outcome.failure is not None
    assert outcome.failure.kind == kind
    assert re.search(says, outcome.failure.message), outcome.failure.message
    assert outcome.failure.counterexample
    if kind != WRONG:
        assert kind.upper() in str(verdict)


def test_every_hostile_kernel_is_tried() -> None:
    tried = {name.partition(":")[0] for name in (*FAILS, *REFUSES, "exits_on_import:kernel")}
    assert {path.stem for path in HOSTILE.glob("*.py")} == tried


REFUSES = {"raises_orders:rejects": "UnsatisfiedAssumption", "eats_memory:kernel": "RuntimeError"}


@pytest.mark.parametrize("hostile", REFUSES)
def test_kernel_that_refuses_every_case_does_not_pass(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_BYTES", 2 << 30)
    verdict = verdict_on(hostile)
    assert not verdict.passed
    assert [outcome.outcome for outcome in verdict.outcomes] == ["refused"]
    assert any(reason.startswith(REFUSES[hostile]) for reason in verdict.refusals)


def test_kernel_that_ends_the_process_on_import_is_named() -> None:
    with pytest.raises(Crashed, match=f"^{EXITED}"):
        verdict_on("exits_on_import:kernel")
    file = HOSTILE / "exits_on_import.py"
    with pytest.raises(SelectionError, match=f"^--candidate {re.escape(str(file))}: {EXITED}"):
        Candidate("vector_add", str(file), "kernel", call_seconds=60).load()


def test_kernel_that_never_returns_is_called_a_few_times_at_most() -> None:
    verdict = verdict_on("loops:kernel", call_seconds=0.1, only=())
    messages = [outcome.failure.message for outcome in verdict.outcomes if outcome.failure]
    assert len(messages) > untrusted.MOST_COSTLY
    assert messages[-1] == "timed out: 3 calls took longer than 0.1 s, or ended every candidate; it is called no more"


# ---- runs of pytest

CANDIDATES = {
    "vector_add": "forges_verdict:kernel",
    "softmax": "exits_at_first_call:kernel",
    "layer_norm": "replaces_hooks:kernel",
    "matmul": "raises_orders:skips",
    "giou_loss": "closes_descriptors:kernel",
}
KINDS = {"vector_add": "wrong", "softmax": "crashed", "layer_norm": "wrong", "matmul": "wrong", "giou_loss": "crashed"}


def run(folder: Path, candidates: dict[str, str], *options: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the output and the verdict of a run."""
    foreign = ("PYTEST_", "TRITON_INT", "CI")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    named = [f"--candidate={op}={HOSTILE / name.replace(':', '.py:')}" for op, name in candidates.items()]
    verdict = folder / "verdict.json"
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "operations" / "test_forward.py"), *named]
    command += ["--untrusted", "--device=cpu", "--dtype=float32", "--examples=2", f"--verdict={verdict}", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "FOURFOLD_OPERATIONS": "fourfold.properties"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    return done.returncode, done.stdout, json.loads(verdict.read_text()) if verdict.exists() else {}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["without_workers", "workers"])
def test_exit_code_and_verdict_are_the_judges(workers: list[str], tmp_path: Path) -> None:
    code, output, verdict = run(tmp_path, CANDIDATES, *workers)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert not verdict["passed"]
    assert verdict["counts"] == {"passed": 0, "failed": len(CANDIDATES), "unsupported": 0}
    assert {entry["operation"]: entry["kind"] for entry in verdict["checks"]} == KINDS
    assert all("--untrusted" in entry["repeat"] for entry in verdict["checks"])
    assert "crashed: the process that ran the kernel died" in output
    assert "takes over" not in output


# ---- the judge's process


def test_judge_never_imports_the_candidate() -> None:
    before = set(sys.modules)
    verdict_on("exits_at_the_end:kernel")
    assert not [name for name in set(sys.modules) - before if "exits_at_the_end" in name]
