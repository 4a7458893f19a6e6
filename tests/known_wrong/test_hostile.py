"""Kernels in `hostile/` that attack their judge: none passes, and the judge says what it did."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.api.verify import verify
from fourfold.backends.cuda.declarations import kernels
from fourfold.backends.cuda.emulator import unavailable_reason
from fourfold.candidates.process import client
from fourfold.candidates.process.first_process import Crashed, Unanswered
from fourfold.candidates.process.session import Session
from fourfold.checks.forward import forward_agrees
from fourfold.checks.records import operations
from fourfold.checks.search import Search
from fourfold.engine.cells import Candidate, Selection, SelectionError
from fourfold.engine.failures import kind_of
from fourfold.engine.verdict import Verdict
from fourfold.operations.limits import CALL_SECONDS
from fourfold.operations.outcomes import Failure, Kind

CRASHED, TAMPERED, TIMED_OUT, WRONG = Kind.CRASHED, Kind.TAMPERED, Kind.TIMED_OUT, Kind.WRONG
HOSTILE = Path(__file__).with_name("hostile")
# The time limit for a call of a kernel that never returns.
SECONDS = 0.1
OUT_OF_TURN = "crashed: the candidate's process answered out of turn: "
EXITED = "crashed: the candidate's process ended with exit code 0"
NOT_ZERO = r"output\[.*\] is [01]\.0, expected"
# By file and function: the kind and the message of the first failure.
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
    "loops:kernel": (TIMED_OUT, r"timed out: the candidate did not answer within 0.1 s"),
    "closes_descriptors:kernel": (CRASHED, "crashed: the candidate's process"),
    "leaves_a_thread:kernel": (WRONG, NOT_ZERO),
    "forks:kernel": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_memory_that_is_not_there": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_negative_strides": (CRASHED, OUT_OF_TURN),
    "forges_answers:nothing": (CRASHED, OUT_OF_TURN + r"expected tuple, got \[\]"),
    "forges_answers:no_json": (CRASHED, OUT_OF_TURN + "a message that is no JSON"),
    "forges_answers:too_long": (CRASHED, OUT_OF_TURN),
    "forges_answers:of_another_kind": (CRASHED, OUT_OF_TURN + "the answer Done to CallFunction"),
    "forges_answers:of_another_question": (CRASHED, OUT_OF_TURN + "an answer to question 99"),
    "kills_its_parent:kernel": (CRASHED, "crashed: .* it is called no more|crashed: the candidate's process"),
    "ends_with_success:writes_at_the_end": (WRONG, NOT_ZERO),
    "ends_with_success:writes_now": (CRASHED, EXITED),
    "ends_with_success:becomes_another_program": (CRASHED, EXITED),
    "ends_with_success:ends_by_a_signal": (CRASHED, EXITED),
    "ends_with_success:stays_as_its_own_child": (WRONG, NOT_ZERO),
    "ends_with_success:replaces_the_exit": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_loaded_judge": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_command_line": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_first_environment": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_an_empty_folder": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_names_of_folders": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_search": (WRONG, NOT_ZERO),
    "replaces_methods:of_one_search": (WRONG, NOT_ZERO),
    "replaces_methods:of_a_dtype": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_record": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_arithmetic": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_code": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_modules": (WRONG, NOT_ZERO),
    "replaces_methods:of_the_layouts": (WRONG, r"output\[.*\] is .*, expected|setStorage"),
    "replaces_the_runner:runs_nothing": (WRONG, NOT_ZERO),
    "replaces_the_runner:registers_a_plugin": (WRONG, NOT_ZERO),
    "replaces_the_runner:leaves_tests_out": (WRONG, NOT_ZERO),
    "replaces_the_runner:replaces_the_encoder": (WRONG, f"out of turn|{NOT_ZERO}"),
    "replaces_the_runner:forges_the_journal": (WRONG, NOT_ZERO),
    "replaces_the_runner:writes_into_the_journal": (WRONG, NOT_ZERO),
    "raises_orders:rejects": (WRONG, "the call raised UnsatisfiedAssumption"),
    "raises_rejections:skips_by_unittest": (WRONG, "the call raised SkipTest: not today"),
    "raises_rejections:expects_to_fail": (WRONG, "the call raised XFailed"),
    "raises_rejections:rejects_by_a_check": (WRONG, "the call raised Unsuitable"),
    "raises_rejections:is_unsupported": (WRONG, "the call raised Unsupported: refused all cases"),
    "raises_rejections:stops_the_example": (WRONG, "the call raised StopTest"),
    "raises_rejections:rejects_what_is_wrong": (WRONG, "the call raised UnsatisfiedAssumption"),
    "knows_where_it_runs:by_what_is_loaded": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_what_was_loaded": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_environment": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_interpreter": (WRONG, NOT_ZERO),
    "knows_where_it_runs:by_the_arguments": (WRONG, NOT_ZERO),
    "seeds_random_numbers:kernel": (TAMPERED, "changed the seed of torch's random numbers"),
}


def verdict_on(hostile: str, **options: Any) -> Verdict:
    file, _, function = hostile.partition(":")
    given: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 2, "only": ["forward"], "seed": 1}
    return verify(f"{HOSTILE / file}.py:{function}", "vector_add", untrusted=True, **{**given, **options})


@pytest.fixture
def patient_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow an import more time than a call, as a busy machine needs."""
    load = client.UntrustedFunction._load

    def patiently(self: client.UntrustedFunction, session: Session) -> None:
        seconds, self.seconds = self.seconds, CALL_SECONDS
        try:
            load(self, session)
        finally:
            self.seconds = seconds

    monkeypatch.setattr(client.UntrustedFunction, "_load", patiently)


@pytest.mark.full(but=6)
@pytest.mark.usefixtures("patient_import")
@pytest.mark.parametrize("hostile", FAILS)
def test_hostile_kernel_does_not_pass_and_its_judge_says_why(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_COSTLY", 2)
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


DIFFERS = "differs between a call in this process and one in another process|raised RuntimeError in another process"
# Kernels that are right in each judged process, by function: kind and message of the failure in a plain process.
ELSEWHERE = {
    "by_its_ancestors": (WRONG, DIFFERS),
    "by_its_callers": (WRONG, DIFFERS),
    "by_its_importers": (WRONG, DIFFERS),
    "by_its_program": (WRONG, DIFFERS),
    "by_its_folders": (WRONG, DIFFERS),
    "by_its_limits": (WRONG, DIFFERS),
    "by_the_callers_of_its_gradient": (WRONG, DIFFERS),
    "to_die_elsewhere": (CRASHED, "crashed: the candidate's process"),
}


@pytest.mark.full(but=3)
@pytest.mark.parametrize("function", ELSEWHERE)
def test_kernel_that_recognises_a_judged_process_fails_in_a_plain_one(function: str) -> None:
    kind, says = ELSEWHERE[function]
    verdict = verdict_on(f"knows_where_it_runs:{function}", only=["repeatability"], first_failure=True)
    (outcome,) = verdict.outcomes
    assert outcome.failure is not None, f"{function} {outcome.outcome}"
    assert outcome.failure.kind == kind
    assert re.search(says, outcome.failure.message), outcome.failure.message


def test_every_hostile_kernel_is_tried() -> None:
    tried = {name.partition(":")[0] for name in (*FAILS, *REFUSES, "exits_on_import:kernel")}
    assert {path.stem for path in HOSTILE.glob("*.py")} == {*tried, "zeros"}


REFUSES = {"eats_memory:kernel": "RuntimeError"}


@pytest.mark.parametrize("hostile", REFUSES)
def test_kernel_that_refuses_every_case_does_not_pass(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 2 << 30)
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


@pytest.mark.usefixtures("patient_import")
def test_kernel_that_never_returns_is_called_a_few_times_at_most() -> None:
    verdict = verdict_on("loops:kernel", call_seconds=SECONDS, only=())
    messages = [outcome.failure.message for outcome in verdict.outcomes if outcome.failure]
    assert len(messages) > client.MOST_COSTLY
    assert messages[-1] == "timed out: 3 calls took longer than 0.1 s, or ended every candidate; it is called no more"


# ---- kernels of `.cu` files

# By kernel: the kind and the message of the failure.
ATTACKS = {
    "exits": (CRASHED, EXITED),
    "ends_with_success": (CRASHED, EXITED),
    "kills_its_process": (CRASHED, "crashed: the candidate's process died of SIGKILL"),
    "overwrites_memory": (CRASHED, "crashed: the candidate's process died of SIGSEGV"),
    "runs_python": (WRONG, r"output\[.*\] is 0\.0, expected"),
}
needs_a_compiler = pytest.mark.skipif(unavailable_reason() is not None, reason=unavailable_reason() or "")


def kernel_of(file: str, kernel: str) -> Selection:
    """Return a selection of a kernel of a `.cu` file in its own process."""
    launch = f"vector_add={HOSTILE / file}:{kernel}<<<(n + 63) / 64, 64>>>"
    return Selection.of(operations(), [launch], [], [], ["float32"], call_seconds=60)


@pytest.mark.full(but=2)
@needs_a_compiler
@pytest.mark.parametrize("kernel", ATTACKS)
def test_compiled_code_that_attacks_its_process_does_not_reach_the_judge(kernel: str) -> None:
    kind, says = ATTACKS[kernel]
    selection = kernel_of("attacks.cu", kernel)
    subject = selection.subject(selection.cells[0], "cpu")
    with pytest.raises((Failure, Unanswered)) as caught:
        forward_agrees(subject, Search(examples=2))
    assert kind_of(caught.value, frames=()) == kind
    assert re.search(says, str(caught.value))


@needs_a_compiler
def test_every_attack_of_compiled_code_is_tried() -> None:
    assert {each.name for each in kernels((HOSTILE / "attacks.cu").read_text())} == set(ATTACKS)


@needs_a_compiler
def test_compiled_code_that_ends_the_process_on_loading_is_named() -> None:
    selection = kernel_of("exits_on_load.cu", "add")
    with pytest.raises(SelectionError, match=rf"^--candidate .*exits_on_load\.cu: {EXITED}"):
        selection.unsupported(selection.cells[0], "cpu")


# ---- the judge's process


def test_judge_never_imports_the_candidate() -> None:
    before = set(sys.modules)
    verdict_on("exits_at_the_end:kernel")
    assert not [name for name in set(sys.modules) - before if "exits_at_the_end" in name]
