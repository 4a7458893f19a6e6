"""The command line: candidates of every kind, the verdict file, and runs that survive crashing or hanging kernels."""

import faulthandler
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from samples import sampled

from fourfold.checks.records import operations
from fourfold.engine.cells import Candidate, Selection, SelectionError
from fourfold.operations.outcomes import BRIEFLY, NOT_MADE
from fourfold.pytest_plugin.black_box import BlackBox

ROOT = Path(__file__).parents[2]
CANDIDATES = Path(__file__).parent / "candidates"
# A time limit that no test reaches: kernels that never return say when it is over.
SECONDS = 600


def verify(folder: Path, *options: str, test: str = "") -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run pytest on the operations and return the process and the contents of the verdict file.

    Args:
        folder: of the file.
        *options: of pytest.
        test: the file of tests; all if empty.
    """
    verdict = folder / "verdict.json"
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    more = {"FOURFOLD_CUDA_ON_CPU_SECONDS": "0.02", "COLUMNS": "100", "PYTHONPATH": path}
    environment = warm.variables("TRITON_INT", **more)
    command = ["pytest", f"tests/operations/{test}", "--dtype", "float32", "--examples", "3"]
    command += ["-p", "no:cacheprovider", "--verdict", str(verdict), *options]
    done = warm.run(*command, cwd=ROOT, env=environment)
    return done, json.loads(verdict.read_text()) if verdict.exists() else {}


def by_cell(verdict: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(check["operation"], check["backend"]): check for check in verdict["checks"]}


# ---- Triton kernels that import nothing of this project


@pytest.mark.full
@pytest.mark.parametrize("name", ["add", "add_without_mask_on_its_loads"])
def test_verdict_on_a_triton_candidate_does_not_depend_on_what_else_is_loaded(
    name: str, tmp_path: Path, device: str
) -> None:
    options = [f"--candidate=vector_add={CANDIDATES / 'in_triton.py'}:{name}", f"--device={device}"]
    done, verdict = verify(tmp_path, *options, test="test_forward.py")
    print(done.stdout)
    # A GPU reads past the end without an error.
    right = name == "add" or device == "cuda"
    assert verdict["counts"] == {"passed": int(right), "failed": int(not right), "unsupported": 0}
    assert right or "OutOfBounds" in verdict["checks"][0]["message"]


@pytest.mark.full
def test_a_candidate_with_a_wrong_output_is_looked_at_briefly_by_the_other_checks(tmp_path: Path, device: str) -> None:
    options = [f"--candidate=vector_add={CANDIDATES / 'in_triton.py'}:subtract", f"--device={device}"]
    done, verdict = verify(tmp_path, *options, "--examples=25")
    print(done.stdout)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    first, *others = verdict["checks"]
    assert first["check"].startswith("forward")
    assert first["outcome"] == "failed"
    # On a GPU, where each case may need a compilation, they are not made.
    assert {check["outcome"] for check in others} == ({"failed", "unsupported"} if device == "cpu" else {"unsupported"})
    briefly = [check for check in others if check["outcome"] == "unsupported"]
    assert {check["reason"] for check in briefly} == {BRIEFLY if device == "cpu" else NOT_MADE}
    looked = [check for check in others if not check["check"].startswith("errors")]
    assert max(check.get("examples", 0) for check in looked) <= 10
    # The result is shown with its case once, at the first check; the others that it fails refer to that one.
    of_one_cause = [check for check in others if check.get("cause") == first["cause"]]
    assert len(of_one_cause) > 3 or device == "cuda"
    assert done.stdout.count(f"same cause as {first['test']}: ") == len(of_one_cause)
    assert not any(f"{check['test']} failed: " in done.stdout for check in of_one_cause)


@pytest.mark.full
def test_a_plain_run_verifies_laws_in_float32_and_in_what_else_is_selected(tmp_path: Path) -> None:
    def dtypes(*options: str) -> set[str]:
        command = ["pytest", "tests/operations/test_laws.py", "--op=vector_add", "--collect-only", "-q"]
        done = warm.run(*command, *options, cwd=ROOT, env=os.environ)
        return set(re.findall(r"-(float\d+|bfloat16)-", done.stdout))

    assert dtypes() == {"float32"}
    assert dtypes("--dtype=bfloat16") == {"bfloat16"}
    assert dtypes("--hypothesis-profile=nightly") == {"float16", "bfloat16", "float32", "float64"}


# ---- refusals and claims

ADD_OF_CONTIGUOUS = """
import torch


def add(x, y):
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError("x and y must be contiguous")
    return x + y
"""
ADD = ["-k", "test_output_agrees or test_gradients_agree"]


@pytest.mark.full
def test_a_refusal_is_counted_and_no_failure_unless_an_option_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ADD_OF_CONTIGUOUS)
    candidate = f"--candidate=vector_add={tmp_path / 'mine.py'}:add"
    done, verdict = verify(tmp_path, candidate, *ADD)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert set(verdict["checks"][0]["refusals"]) == {"ValueError: x and y must be contiguous"}
    assert re.search(r"refused \d+ of \d+ cases: ValueError: x and y must be contiguous", done.stdout)
    assert re.search(r"refused \d+% of the cases: the claim `contiguous=True` leaves out all of them", done.stdout)
    assert verdict["checks"][0]["suggested_claim"] == "contiguous=True"
    assert 0 < verdict["checks"][0]["refused_share"] < 1
    done, verdict = verify(tmp_path, candidate, "--no-refusals", *ADD)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "--no-refusals" in verdict["checks"][0]["repeat"]


@pytest.mark.full
def test_what_a_candidate_claims_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ADD_OF_CONTIGUOUS)
    candidate = f"--candidate=vector_add={tmp_path / 'mine.py'}:add"
    done, verdict = verify(tmp_path, candidate, "--claims=contiguous=True", "--no-refusals", *ADD)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert verdict["counts"]["failed"] == verdict["counts"]["unsupported"] == 0
    done, _ = verify(tmp_path, candidate, "--claims=contiguous")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "claims must be as in contiguous=True" in done.stderr


# ---- kernels that crash or hang

ILL = {
    "vector_add": ("crash", r"died of: Segmentation fault"),
    "softmax": ("leave", r"ended without a word: it called exit"),
    "layer_norm": ("loop", rf"Timeout \(?>{SECONDS}.0s"),
    "giou": ("hang", r"had to be ended: it did not come back within 0:00:00.1"),
    "matmul": ("wait_for_itself", rf"Timeout \(?>{SECONDS}.0s"),
    "giou_loss": ("spin", r"the launch has not ended within its time limit|had to be ended"),
    "giou_loss_ragged": ("write_far_away", r"OutOfBounds.*ill\.cu:|lost the device"),
}


@pytest.mark.full
@pytest.mark.parametrize("workers", sampled([[], ["-n", "2"]], []), ids=["one_after_another", "two_workers"])
def test_kernels_that_do_not_come_back_fail_alone(workers: list[str], tmp_path: Path, device: str) -> None:
    candidates = [f"--candidate={op}={CANDIDATES / 'ill.py'}:{name}" for op, (name, _) in ILL.items()]
    options = [
        *candidates,
        *(f"--op={op}" for op in ILL),
        "--backend=candidate",
        "--backend=torch",
        f"--timeout={SECONDS}",
        f"--device={device}",
        "-ptime_limits",
    ]
    done, verdict = verify(tmp_path, *options, *workers, test="test_forward.py")
    print(done.stdout, done.stderr)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert not verdict["passed"]
    assert verdict["counts"] == {"passed": len(ILL), "failed": len(ILL), "unsupported": 0}
    checks = by_cell(verdict)
    for operation, (name, says) in ILL.items():
        assert checks[operation, "torch"]["outcome"] == "passed"
        failed = checks[operation, "candidate"]
        assert re.search(says, failed["message"]), failed
        assert failed["repeat"].endswith(f"--candidate {operation}={CANDIDATES / 'ill.py'}:{name}")
    # After a crash the harness still knows the case and the line in the candidate.
    assert checks["vector_add", "candidate"]["counterexample"].startswith("Case(x=")
    assert "in crash" in checks["vector_add", "candidate"]["message"]
    assert "in hang" in checks["giou", "candidate"]["message"]


@pytest.mark.parametrize(("limit", "ended_after"), [(0.5, 1.0), (600, 630)])
def test_what_does_not_heed_a_time_limit_is_ended_some_time_after_it(
    limit: float, ended_after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_: list[tuple[float, bool]] = []
    monkeypatch.setattr(faulthandler, "enable", lambda *_, **__: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda after, exit, file: set_.append((after, exit)))
    box = BlackBox(tmp_path)
    box.open()
    box.expect_within(limit)
    assert set_ == [(ended_after, True)]


# ---- candidates


@pytest.mark.parametrize("name", ["Softmax", "softmax_module", "Sum", "sum_of_two", "without_gradients"])
def test_modules_and_functions_with_other_names_for_the_arguments_are_candidates(name: str) -> None:
    x, y = torch.randn(2, 7)
    operation, given, right = ("vector_add", {"y": y, "x": x}, x + y)
    if name.startswith(("Soft", "soft")):
        operation, given, right = ("softmax", {"x": x}, torch.softmax(x, -1))
    candidate = Candidate(operation, str(CANDIDATES / "well.py"), name).load()
    assert torch.equal(candidate(**given), right)


@pytest.mark.parametrize("strict_errors", [False, True])
def test_strict_errors_are_for_candidates_and_leave_them_somebody_elses(device: str, strict_errors: bool) -> None:
    candidate = f"vector_add={CANDIDATES / 'well.py'}:Sum"
    backends = ["torch", "candidate"]
    chosen = Selection.of(operations(), [candidate], ["vector_add"], backends, ["float32"], None, strict_errors)
    own, others = (chosen.subject(cell, device) for cell in chosen.cells)
    assert (own.foreign, own.strict_errors) == (False, True)
    assert (others.foreign, others.strict_errors) == (True, strict_errors)


def test_candidate_that_cannot_be_called_as_the_operation_is_refused() -> None:
    candidate = Candidate("vector_add", str(CANDIDATES / "well.py"), "too_few")
    with pytest.raises(SelectionError, match=r"too_few\(x.*cannot be called as vector_add\(x"):
        candidate.load()


@pytest.mark.full
def test_candidate_without_gradients_is_told_apart(tmp_path: Path, device: str) -> None:
    candidate = f"--candidate=vector_add={CANDIDATES / 'well.py'}:without_gradients"
    done, verdict = verify(tmp_path, candidate, f"--device={device}")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert verdict["counts"]["failed"] == 0
    unsupported = {check["check"].partition(":")[0] for check in verdict["checks"] if check["outcome"] == "unsupported"}
    assert unsupported >= {"backward"}
    assert unsupported.isdisjoint({"forward", "memory", "errors", "repeatability"})
    assert "forward only" in done.stdout
    _, _, closing = done.stdout.partition("= verified =")
    assert re.search(r"not passed: \d+ checks of gradients, which the candidate for vector_add does not have", closing)
    assert "(--forward-only accepts a candidate without)" in closing
    done, verdict = verify(tmp_path, candidate, "--forward-only", f"--device={device}")
    assert done.returncode == pytest.ExitCode.OK
    assert verdict["passed"]
    assert "not passed" not in done.stdout


def test_candidate_with_gradients_passes_every_check_and_its_verdict_says_so(tmp_path: Path, device: str) -> None:
    done, verdict = verify(tmp_path, f"--candidate=vector_add={CANDIDATES / 'well.py'}:Sum", f"--device={device}")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert verdict["passed"]
    others = [check["check"] for check in verdict["checks"] if check["outcome"] != "passed"]
    assert others == ["compiler: the compiler accepts the kernels"] * (device == "cpu")  # it has no Triton kernel
    assert verdict["counts"]["failed"] == 0
    checks = {check["check"]: check for check in verdict["checks"]}
    laws = {f"laws: {law.__name__.replace('_', ' ')}" for law in operations()["vector_add"].laws}
    assert set(checks) > {"forward: output agrees with the oracle", "backward: gradients agree with the oracle"} | laws
    assert 0 < checks["forward: output agrees with the oracle"]["worst_error_over_bound"] <= 1
    assert not any("fallback" in check for check in checks)


def test_first_call_of_a_candidate_is_compared(tmp_path: Path) -> None:
    kernel = "def add(x, y, seen=[]):\n    seen += [1] * bool(x.numel())\n    return x + y + (len(seen) == 1)\n"
    (tmp_path / "kernels.py").write_text(kernel)
    candidate = f"--candidate=vector_add={tmp_path / 'kernels.py'}:add"
    _, verdict = verify(tmp_path, candidate, "--device=cpu", test="test_forward.py")
    assert verdict["counts"]["failed"] == 1


@pytest.mark.full
def test_fallback_to_torch_is_forbidden_on_demand(tmp_path: Path, device: str) -> None:
    options = ["--forbid-fallback", f"--device={device}"]
    done, verdict = verify(
        tmp_path, f"--candidate=vector_add={CANDIDATES / 'well.py'}:Sum", *options, test="test_fallback.py"
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (check,) = verdict["checks"]
    assert check["message"].endswith("computes with torch: aten.add")


def test_failed_check_has_its_counterexample_in_the_verdict(tmp_path: Path, device: str) -> None:
    published = "--candidate=giou=tests.known_wrong.published:giou_without_clamp"
    _, verdict = verify(tmp_path, published, f"--device={device}", test="test_forward.py")
    (check,) = verdict["checks"]
    assert check["message"].startswith(f"giou · candidate · float32 · {device}: output[0] is 0.1111111")
    assert check["counterexample"].startswith("Case(boxes1=array([[0.0, 0.0, 1.0, 1.0]], float32), boxes2=")


FORWARD_ALONE = """
import fourfold
import torch


@fourfold.claims(gradients=False, dtypes=("float32",))
def softmax(x):
    return torch.softmax(x.detach(), -1)


@fourfold.claims(dtypes=("float32",))
def without_the_claim(x):
    return torch.softmax(x.detach(), -1)
"""


@pytest.mark.parametrize("untrusted", sampled([[], ["--untrusted"]], ["--untrusted"]), ids=["trusted", "untrusted"])
@pytest.mark.parametrize(
    ("function", "passes"), [("softmax", True), pytest.param("without_the_claim", False, marks=pytest.mark.full)]
)
def test_claims_of_the_source_are_heard(function: str, passes: bool, untrusted: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FORWARD_ALONE)
    candidate = f"--candidate=softmax={tmp_path / 'mine.py'}:{function}"
    options = ["tests/operations/test_backward.py", "--dtype=float64", "--device=cpu", *untrusted]
    done, verdict = verify(tmp_path, candidate, *options, test="test_forward.py")
    assert (done.returncode == pytest.ExitCode.OK) is passes, done.stdout
    reasons = {check["reason"] for check in verdict["checks"] if check["outcome"] == "unsupported"}
    assert "not claimed: float64" in reasons
    assert ("not claimed: gradients" in reasons) is passes
