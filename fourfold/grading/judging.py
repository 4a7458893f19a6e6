"""The judge of one candidate: its stages, in a process that judges nothing else.

On the CPU the candidate runs in its own process, which this one calls: see `fourfold.candidates.process.client`. On a
GPU it runs in this process, which is forked for the candidate and ends after it.
"""

import contextlib
import copy
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.backends.cuda.compile import CudaError
from fourfold.candidates.frames import words
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.load import modules
from fourfold.candidates.load.calling import CannotBeCalled
from fourfold.candidates.load.cuda_candidates import CudaCandidate
from fourfold.candidates.load.cuda_launches import Launch
from fourfold.candidates.load.kernelbench_problems import KernelBenchProblem
from fourfold.candidates.process.client import CannotBeImported, UntrustedFunction
from fourfold.candidates.process.cuda_client import UntrustedKernel
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks import catalogue
from fourfold.checks.records import operations, reference_of
from fourfold.declaration import defaults
from fourfold.engine.verdict import MAY_BE_WRONG, Finding, Outcome, Verdict
from fourfold.engine.verification import CheckPlan, Trial, signature_of, verify_trial
from fourfold.grading import static
from fourfold.grading.candidates import CUDA, KERNELBENCH, Submission
from fourfold.grading.speed import speeds_of
from fourfold.numerics.compare import Disagreement
from fourfold.operations.claims import NO_CLAIMS
from fourfold.operations.limits import CALL_SECONDS
from fourfold.operations.outcomes import WRONG, Kind, Status
from fourfold.operations.outputs import pack_lists
from fourfold.operations.record import Operation

STATIC, SMOKE, FULL, SPEED = ("static", "smoke", "full", "speed")
# Generated cases of the smoke stage, in addition to the named ones.
SMOKE_EXAMPLES = 3
SMOKE_CHECKS = (catalogue.FORWARD, catalogue.BACKWARD.name)
# The share of a candidate's time after which no check begins.
PART_TO_BEGIN = 0.9
# The share of a candidate's time that one call may take.
PART_OF_A_CALL = 0.5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings for all candidates of a run.

    Attributes:
        device: "cpu" or "cuda".
        examples: generated cases of a check.
        dtypes: the names of the dtypes to check; all claimed ones if empty.
        first_failure: whether the checks of a candidate stop once it is wrong.
        refusals, strict_errors, forbid_fallback: see `fourfold.verify`.
        forbid_imports: modules that a source must not import.
        speed: whether right candidates are timed relative to the reference.
    """

    device: str = "cpu"
    examples: int = 25
    dtypes: tuple[str, ...] = ()
    first_failure: bool = True
    refusals: bool = True
    strict_errors: bool = False
    forbid_fallback: bool = False
    forbid_imports: tuple[str, ...] = ()
    speed: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Settings":
        """Build settings from JSON."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a mapping for JSON."""
        return asdict(self)


class BadDefinition(Exception):
    """The definition or the problem of a candidate cannot be used."""


def judge(
    candidate: Submission,
    settings: Settings,
    seed: int,
    folder: Path,
    say: Callable[[str, str, str], object],
    gpu: str = "",
) -> tuple[str, Verdict]:
    """Run the stages on a candidate until it fails one.

    Args:
        candidate: the candidate to judge.
        settings: of the run.
        seed: of the generated cases.
        folder: an empty folder for this candidate.
        say: called with the stage, the check and the dtype before each check.
        gpu: the lock file of the GPU, which candidates share except while one is timed; "" for none.

    Returns:
        the last stage, and the verdict.
    """
    start = time.monotonic()
    say(STATIC, "", "")
    try:
        if forbidden := list(static.reaches(candidate, settings.forbid_imports)):
            return STATIC, failure_verdict(candidate, settings.device, seed, Kind.TAMPERED, "; ".join(forbidden))
    except static.Unparsable as error:
        return STATIC, failure_verdict(candidate, settings.device, seed, Kind.INVALID, f"it does not parse: {error}")
    try:
        with _trial(candidate, settings, folder) as (trial, reference):
            with _lock(gpu, fcntl.LOCK_SH):
                stage, verdict = _check(trial, candidate, settings, seed, start, say)
            if verdict.passed and settings.speed:
                say(SPEED, "", "")
                with _lock(gpu, fcntl.LOCK_EX):
                    return SPEED, _add_speeds(trial, reference, verdict, candidate)
            return stage, verdict
    except BadDefinition as error:
        return STATIC, failure_verdict(candidate, settings.device, seed, Kind.INVALID, str(error))
    except Unanswered as error:
        return SMOKE, failure_verdict(candidate, settings.device, seed, error.kind, str(error))
    except (CannotBeImported, CannotBeCalled, CudaError, LookupError, OSError, ValueError) as error:
        return SMOKE, failure_verdict(candidate, settings.device, seed, Kind.INVALID, words(error))
    except Escape as error:
        return SMOKE, failure_verdict(
            candidate, settings.device, seed, Kind.INVALID, f"it cannot be imported: {words(error)}"
        )
    except Exception as error:
        message = f"it cannot be imported: {type(error).__name__}: {words(error)}"
        return SMOKE, failure_verdict(candidate, settings.device, seed, Kind.INVALID, message)


@contextlib.contextmanager
def _lock(file: str, operation: int) -> Iterator[None]:
    """Lock a file inside the block: shared with others, or exclusively."""
    if not file:
        yield
        return
    with open(file, "a") as lock:
        fcntl.flock(lock, operation)
        yield


def _check(
    trial: Trial,
    candidate: Submission,
    settings: Settings,
    seed: int,
    start: float,
    say: Callable[[str, str, str], object],
) -> tuple[str, Verdict]:
    """Run a few cases of the checks that most often fail, then all checks.

    On a GPU a brief plan with the smallest cases comes first: Triton compiles for each kind of size, which takes the
    most time.
    """
    dtypes = [name for name in settings.dtypes if name in (trial.claims.dtypes or settings.dtypes)]
    planned = trial.plan_checks(dtypes, ())
    brief = CheckPlan(
        dtypes=[dtype for _, dtype in planned if dtype == "float32"][:1] or [dtype for _, dtype in planned][:1],
        only={check.name for check, _ in planned if catalogue.parts_of(check.name)[0] in SMOKE_CHECKS},
        examples=SMOKE_EXAMPLES,
        seed=seed,
        first_failure=True,
        seconds=PART_TO_BEGIN * candidate.seconds,
        on_check=lambda check, dtype: say(SMOKE, check, dtype),
    )
    for plan in (replace(brief, brief=True), brief) if settings.device == "cuda" else (brief,):
        verdict = verify_trial(trial, plan)
        if settings.first_failure and verdict.kind not in (Kind.RIGHT, *MAY_BE_WRONG) and verdict.failures:
            return SMOKE, verdict
    full_plan = CheckPlan(
        dtypes=dtypes,
        examples=settings.examples,
        seed=seed,
        first_failure=settings.first_failure,
        seconds=PART_TO_BEGIN * candidate.seconds - (time.monotonic() - start),
        forbid_fallback=settings.forbid_fallback,
        on_check=lambda check, dtype: say(FULL, check, dtype),
    )
    return FULL, verify_trial(trial, full_plan)


def _add_speeds(trial: Trial, reference: Callable[..., Any], verdict: Verdict, candidate: Submission) -> Verdict:
    """Add the speeds to a right verdict. If a timed call gives another result, the verdict becomes wrong.

    A call that changes its arguments is not timed: the next one would begin with other values.
    """
    if trial.operation.mutates:
        names = " and ".join(trial.operation.mutates)
        return replace(verdict, warnings=(*verdict.warnings, f"not timed: each call changes {names}"))
    gradients = trial.claims.gradients and bool(trial.operation.differentiable)
    implementation, trusted = (pack_lists(f, trial.operation.lists) for f in (trial.implementation, reference))
    arguments = implementation, trusted, trial.operation, trial.claims, trial.device, gradients
    try:
        with trial.settings():
            return replace(verdict, speeds=tuple(speeds_of(*arguments)))
    except Disagreement as error:
        message = f"a result of a timed call is wrong: {error}"
        failure = failure_verdict(candidate, trial.device, verdict.seed, Kind.WRONG, message)
        return replace(verdict, outcomes=(*verdict.outcomes, *failure.outcomes))
    except Exception as error:
        return replace(verdict, warnings=(*verdict.warnings, f"not timed: {type(error).__name__}: {words(error)}"))


def failure_verdict(candidate: Submission, device: str, seed: int, kind: Kind, message: str) -> Verdict:
    """Return the verdict on a candidate that reached no check, or did not return from one."""
    finding = Finding(message=message, cause=message, kind=kind)
    return Verdict(
        implementation=candidate.function.partition("<<<")[0] or candidate.operation or "ModelNew",
        operation=candidate.operation or "KernelBench",
        device=device,
        claims="",
        outcomes=(Outcome(check="grading", dtype="", outcome=Status.FAILED, grade=WRONG, failure=finding),),
        shortcomings=(),
        warnings=(),
        versions={},
        seed=seed,
        seconds=0.0,
    )


# ---- the candidate and its reference


@contextlib.contextmanager
def _trial(candidate: Submission, settings: Settings, folder: Path) -> Iterator[tuple[Trial, Callable[..., Any]]]:
    """Provide the candidate, ready to be called, and the reference for its timing."""
    file = _file(candidate.path, candidate.source, folder / candidate.file_name)
    limits: dict[str, Any] = {
        "seconds": min(CALL_SECONDS, PART_OF_A_CALL * candidate.seconds),
        "most_bytes": candidate.bytes,
    }
    claims = candidate.stated_claims()
    implementation: Any
    reference: Callable[..., Any]
    if candidate.language == KERNELBENCH:
        problem = _problem(candidate, folder)
        record: Operation = problem.record
        claims = problem.claims if claims is None else claims
        reference = copy.deepcopy(problem.reference).to(settings.device)
        if settings.device == "cpu":
            implementation = problem.solution_elsewhere(file, folder, **limits)
        else:
            implementation = problem.solution(file).to("cuda")
    else:
        record = _record(candidate, folder)
        reference = reference_of(record)
        if candidate.language == CUDA:
            on_cpu = settings.device == "cpu"
            kernel = CudaCandidate(_launch(file, candidate.function), record, reference, here=not on_cpu)
            implementation = UntrustedKernel(kernel, **limits) if on_cpu else kernel
            record = kernel.narrow(record)
        elif settings.device == "cpu":
            implementation = UntrustedFunction(
                str(file),
                candidate.function or record.name,
                signature_of(record),
                record.name,
                lists=record.lists,
                **limits,
            )
        else:
            implementation = _function(file, candidate.function or record.name)
    own_process = limits["seconds"] if isinstance(implementation, UntrustedFunction) else None
    judged_by = settings.device, settings.refusals, settings.strict_errors
    # A claim in the candidate's own source would be rewarded for doing nothing.
    claims = NO_CLAIMS if claims is None else claims
    with Trial.of(implementation, record, claims, *judged_by, own_process) as trial:
        yield trial, reference


def _file(path: str, source: str, otherwise: Path) -> Path:
    """Return `path` if it exists with this text, or else a new file with the text."""
    if path:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if Path(path).read_text(encoding="utf-8") == source:
                return Path(path)
    otherwise.write_text(source, encoding="utf-8")
    return otherwise


def _function(file: Path, name: str) -> Any:
    value: Any = modules.load_file(file)
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise CannotBeImported(f"{file} has no function {name}")
    return value


def _launch(file: Path, text: str) -> Launch:
    launch = Launch.parse(f"{file}:{text}")
    if launch is None:
        raise CannotBeCalled(f"{text!r} is no launch of a kernel")
    return launch


def _problem(candidate: Submission, folder: Path) -> KernelBenchProblem:
    file = folder / "problem.py"
    file.write_text(candidate.problem, encoding="utf-8")
    try:
        return KernelBenchProblem.of(file, candidate.sizes)
    except Exception as error:
        raise BadDefinition(f"problem: {type(error).__name__}: {error}") from error


def _record(candidate: Submission, folder: Path) -> Operation:
    """Return the operation: a known one, or the one that the candidate's definition declares."""
    if not candidate.definition:
        records = operations()
        if candidate.operation not in records:
            raise BadDefinition(f"operation: there is no {candidate.operation!r}: there are {', '.join(records)}")
        return records[candidate.operation]
    file = folder / "definition.py"
    file.write_text(candidate.definition, encoding="utf-8")
    try:
        record = getattr(modules.load_file(file, anew=True), candidate.operation, None)
    except Exception as error:
        raise BadDefinition(f"definition: {type(error).__name__}: {error}") from error
    if not isinstance(record, Operation):
        raise BadDefinition(f"definition: it declares no operation {candidate.operation!r}, as by fourfold.operation")
    return defaults.complete(record)
