"""The trial of a mutant: run the checks on a mutated copy of the kernels, in a separate process.

The parent process does the work that all mutants share: the imports, the generated cases and the oracle's results.
Each trial is a fork of the parent, which then imports the kernels. The first trial runs the unmutated kernels. They
must pass. It records how long each check takes and, for Triton kernels, which lines each case runs. A mutant is
tried only with the cases that run its lines.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fourfold.backends.triton import takeover
from fourfold.checks import ahead_of_time, configurations
from fourfold.checks.catalogue import BACKWARD, BAD_INPUT, FORWARD, LAW, check_named
from fourfold.checks.outputs import select_output, together
from fourfold.checks.records import operations
from fourfold.checks.search import Search, Subject, generated_cases
from fourfold.engine.cells import Candidate, Cell, Selection
from fourfold.mutation.mutant import Mutant
from fourfold.numerics.compare import Agreement
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations import registry
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure, Unsupported
from fourfold.operations.record import reference, reference_gradients
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection, Ended

# A step hangs if it takes this many times as long as with the unmutated kernels, plus a grace time.
TIMES_AS_LONG = 10.0
GRACE_SECONDS = 10.0
# C++ is compiled when a kernel is first launched.
COMPILING_SECONDS = {"cuda": 240.0}
# The errors of a mutant that does not compile. It is invalid.
SEED = 1  # of the generated cases, which are always the same
INVALID = ("CompilationError", "SyntaxError")
# Held from the opening of a connection to the fork, so that no other trial's process keeps the connection open.
_forking = threading.Lock()


class KernelPackage(NamedTuple):
    """The package that holds an operation's kernels, ``mine.impls``, and its folder."""

    package: str
    folder: pathlib.Path

    @classmethod
    def of(cls, operation: str) -> "KernelPackage":
        """Return the kernels of an operation, wherever they were registered; any for one that a file declares."""
        try:
            package = registry.implementations(operation).rpartition(".")[0]
        except ModuleNotFoundError:
            package = registry.folders_of_implementations()[0]
        return cls(package, pathlib.Path(importlib.import_module(package).__path__[0]).resolve())

    def imported_folder(self) -> pathlib.Path:
        """Return the folder from which this process imported the kernels. In a trial it is the copy."""
        return pathlib.Path(sys.modules[self.package].__path__[0]).resolve()

    def take_from(self, folder: pathlib.Path) -> None:
        """Forget the imported kernels, so that later imports take the copy in `folder`."""
        for name in [name for name in sys.modules if name == self.package or name.startswith(f"{self.package}.")]:
            del sys.modules[name]
        importlib.import_module(self.package.rpartition(".")[0]).__path__.insert(0, str(folder))


@dataclasses.dataclass(kw_only=True)
class FixedSearch(Search):
    """A search over cases that were drawn in advance.

    Attributes:
        named_cases: the cases, by name.
        selects: whether to run a case.
        context: a context for each case that runs, given its name.
    """

    named_cases: Mapping[str, Case]
    selects: Callable[[str], bool]
    context: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    # Keep no results: each check must really run, so that the trace sees the lines.
    keeps: bool = False

    def cases(
        self,
        subject: Subject,
        check: str,
        body: Callable[[Case], None],
        **options: Any,
    ) -> None:
        """Run the body on the requested cases, whatever the check's own strategy."""

        def run(name: str, case: Case) -> None:
            with self.context(name):
                body(case)

        for name, case in self.named_cases.items():
            if self.selects(name):
                with _note_case(name):
                    self._run_case(functools.partial(run, name), case)

    def for_all(self, name: str, strategy: Any, body: Callable[[Case], None], *limits: Any, **options: Any) -> None:
        """Do the same as `cases`."""
        self.cases(None, name, body)  # type: ignore[arg-type]

    def saw(self, *agreements: Agreement) -> None:
        """Count an agreement."""
        self.ran += 1

    def require_evidence(self, subject: Subject, check: str) -> None:
        """Skip the check of the base class: a mutant may need none of the cases."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One check for one dtype.

    Attributes:
        name: the check's name.
        check: the function, which takes a subject and a search.
        dtype: the dtype's name.
        cases: the cases, by name.
        quick: whether `--quick` runs it. The quick steps reject most mutants, usually at the first case.
        output: the verified output if there are several; "" for all that have gradients.
    """

    name: str
    check: Callable[[Subject, Search], object]
    dtype: str
    cases: Mapping[str, Case]
    quick: bool = False
    output: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmutated:
    """The result of the unmutated kernels.

    Attributes:
        seconds: the time of each step, in order.
        ran: the lines that ran, by (step, case) and file; None for CUDA C++, whose lines are not traced.
        compiled: for each step, the C++ files of the kernels that it launched.
        launched: for each step, the names of the C++ kernels that it was the first to launch.
    """

    seconds: tuple[float, ...]
    ran: Mapping[tuple[int, str], Mapping[str, frozenset[int]]] | None
    compiled: tuple[frozenset[str], ...] = ()
    launched: tuple[frozenset[str], ...] = ()

    def reaches(self, mutant: Mutant, step: int, case: str) -> bool:
        """Return whether a case of a step runs a mutant's lines, or may run them in C++."""
        if self.ran is None:
            return mutant.file in self.compiled[step]
        lines = self.ran.get((step, case), {}).get(mutant.file, frozenset())
        return any(line in lines for line in range(mutant.lines[0], mutant.lines[1] + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a mutant's trial.

    Attributes:
        status: "killed", "survived", "invalid" (it does not compile) or "not reached" (no case runs its lines).
        by: for a killed or invalid mutant, the step and the case.
        reason: the error.
        seconds: the time of the trial.
    """

    status: str
    by: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepBegun:
    """A trial's process begins a step."""

    step: int


@dataclasses.dataclass(frozen=True)
class CaseRan:
    """The lines that ran in a case of a step, by file."""

    step: int
    case: str
    lines: dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class StepPassed:
    """A passed step: its seconds, the C++ kernels that it launched first, and the files of all kernels."""

    seconds: float
    launched: list[str]
    compiled: list[str]


@dataclasses.dataclass(frozen=True)
class Configurations:
    """The names of a tuned kernel's configurations, each with the name of a dtype."""

    names: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A step failed: the error, its class, and the step and the case."""

    reason: str
    error: str
    by: str


@dataclasses.dataclass(frozen=True)
class Completed:
    """A trial's process did all its work."""


Progress = StepBegun | CaseRan | StepPassed | Configurations | Rejected | Completed
Say = Callable[[Progress], None]


class UnmutatedFailed(RuntimeError):
    """The unmutated kernels do not pass the checks."""


class Trials:
    """Trials of one operation on one backend, on the CPU.

    Args:
        operation: the operation's name.
        backend: "triton", "cuda" or "candidate".
        candidate: the candidate, if the backend is "candidate".
        dtypes: the dtypes, in the order of the steps.
        examples: the number of generated cases for each dtype; every trial gets the same cases.
        directory: the directory for the copies of the kernels and the compiled code.
        quick: whether to run only the quick steps.
    """

    def __init__(
        self,
        operation: str,
        backend: str,
        candidate: Candidate | None,
        dtypes: Sequence[str],
        examples: int,
        directory: pathlib.Path,
        quick: bool = False,
    ) -> None:
        takeover.interpret_kernels()  # with the bounds of memory, before a candidate is imported
        self.backend, self.candidate, self.dtypes = backend, candidate, tuple(dtypes)
        self.records = dict(operations()) | ({operation: candidate.record} if candidate else {})
        self.operation = self.records[operation]
        self.kernels = KernelPackage.of(operation)
        self.directory = directory
        cases = {dtype: self._cases(dtype, examples) for dtype in dtypes}
        self.steps = tuple(step for step in self._steps(cases) if step.quick or not quick)
        for dtype in dtypes:
            for case in cases[dtype].values():
                # Compute the oracle's results before the first fork, so that all trials share them.
                reference(self.operation, case, DTYPES[dtype])
                reference_gradients(self.operation, case, DTYPES[dtype])

    # ---- cases and steps, shared by all trials

    def _cases(self, dtype: str, examples: int) -> dict[str, Case]:
        named_cases = {name: make(DTYPES[dtype]) for name, make in self.operation.examples.items()}
        return {**named_cases, **generated_cases(self.operation.cases(DTYPES[dtype], 2048), examples, SEED)}

    def _steps(self, cases_by_dtype: Mapping[str, Mapping[str, Case]]) -> Iterator[Step]:
        """Yield the steps, with those first that reject most mutants for the least time."""

        def steps(name: str, dtypes: Sequence[str], quick: bool = False) -> Iterator[Step]:
            check = check_named(name)
            for dtype in dtypes if check.applies_to(self.operation) else ():
                yield Step(name, check.run, dtype, cases_by_dtype[dtype], quick=quick)

        first, other_dtypes, small = self.dtypes[:1], self.dtypes[1:], self.operation.cases
        forward = check_named(FORWARD).run
        for name in (FORWARD, BACKWARD.name, "memory"):
            yield from steps(name, first, quick=True)
        for name in (FORWARD, BACKWARD.name):
            yield from steps(name, other_dtypes, quick=True)
        for place, output in enumerate(self.operation.outputs):
            for dtype in self.dtypes if place not in self.operation.joined_places else ():
                yield Step(f"forward of {output}", forward, dtype, cases_by_dtype[dtype], quick=True, output=output)
        half = DTYPES["float16"]
        distant = {**self.operation.examples_for_offsets(half), **generated_cases(small(half, 512), 8, SEED)}
        yield Step("offsets", check_named("offsets").run, "float16", distant, quick=True)
        yield from steps("single gradients", first)
        yield from steps("repeatability", first)
        gradcheck = check_named("gradcheck")
        for dtype in gradcheck.of(self.dtypes) if gradcheck.applies_to(self.operation) else ():
            smooth = generated_cases(self.operation.smooth(DTYPES[dtype]), 3, SEED)
            yield Step(gradcheck.name, gradcheck.run, dtype, smooth)
        yield Step(BAD_INPUT.name, BAD_INPUT.run, first[0], {})
        for name, dtype in self._configurations():
            run = functools.partial(configurations.agrees_if_forced, name)
            yield Step(f"configuration {name}", run, dtype, cases_by_dtype[dtype])
        for law in self.operation.laws:
            cases = dict(list(cases_by_dtype[first[0]].items())[::3])
            yield Step(law.__name__, functools.partial(LAW.run, law), first[0], cases)
        if self.backend == "triton":
            yield Step("ahead of time", _compiles_ahead_of_time, "float16", {})

    def _configurations(self) -> list[tuple[str, str]]:
        """Return the configurations of a tuned kernel on the CPU, by dtype. A separate process imports the kernel."""

        def ask(say: Say) -> None:
            cells = [Cell(self.operation.name, self.backend, dtype) for dtype in self.dtypes]
            each = [(c, cell.dtype) for cell in cells for c in self._selection().configurations(cell)]
            say(Configurations([(c.name, dtype) for c, dtype in each if c.runs_on(torch.device("cpu"))]))

        messages = list(self._fork(ask, lambda _: 60.0))
        return next((message.names for message in messages if isinstance(message, Configurations)), [])

    # ---- trials

    def unmutated(self) -> Unmutated:
        """Run all steps on the unmutated kernels.

        Raises:
            UnmutatedFailed: a check fails; the message is the check's.
        """
        seconds: list[float] = []
        launched: list[frozenset[str]] = []
        compiled: list[frozenset[str]] = []
        lines_of: dict[tuple[int, str], dict[str, frozenset[int]]] = {}

        def run(say: Say) -> None:
            former: dict[Any, int] = {}
            for step in range(len(self.steps)):
                say(StepBegun(step))
                start = time.perf_counter()
                self._run(step, lambda _: True, say)
                seconds = time.perf_counter() - start
                launches = {kernel: kernel.launches_on_cpu for kernel in _launched_kernels()}
                launched = [kernel for kernel in launches if launches[kernel] > former.get(kernel, 0)]
                first = sorted({kernel.name for kernel in launches} - {kernel.name for kernel in former})
                say(StepPassed(seconds, first, _compiled_sources(self.kernels, launched)))
                former = launches

        for message in self._fork(run, lambda _: 1800.0):
            match message:
                case Rejected():
                    raise UnmutatedFailed(f"{message.by}: {message.reason}")
                case StepPassed():
                    seconds.append(message.seconds)
                    launched.append(frozenset(message.launched))
                    compiled.append(frozenset(message.compiled))
                case CaseRan():
                    lines_of[message.step, message.case] = {
                        file: frozenset(lines) for file, lines in message.lines.items()
                    }
        has_lines = self.backend != "cuda"
        return Unmutated(
            seconds=tuple(seconds),
            ran=lines_of if has_lines else None,
            compiled=tuple(compiled),
            launched=tuple(launched),
        )

    def outcome(self, mutant: Mutant, unmutated: Unmutated) -> TrialResult:
        """Run the steps on a mutant until one rejects it."""
        reaching = {
            step: {case for case in self.steps[step].cases if unmutated.reaches(mutant, step, case)}
            for step in range(len(self.steps))
        }
        if not any(reaching.values()):
            return TrialResult(status="not reached")

        def run(say: Say) -> None:
            for step, cases in reaching.items():
                if cases or not self.steps[step].cases:
                    say(StepBegun(step))
                    with self._compiling_only(unmutated.launched[step]):
                        self._run(step, cases.__contains__)

        def limit(step: int | None) -> float:
            expected_seconds = 0.0 if step is None else unmutated.seconds[step]
            return GRACE_SECONDS + TIMES_AS_LONG * expected_seconds + COMPILING_SECONDS.get(self.backend, 0.0)

        start = time.perf_counter()
        outcome = TrialResult(status="survived")
        for message in self._fork(run, limit, mutant):
            if isinstance(message, Rejected):
                status = "invalid" if message.error in INVALID else "killed"
                outcome = TrialResult(status=status, by=message.by, reason=message.reason[:300])
        return dataclasses.replace(outcome, seconds=round(time.perf_counter() - start, 2))

    # ---- in the child process of a trial

    def _selection(self) -> Selection:
        candidates = {self.operation.name: self.candidate} if self.candidate else {}
        return Selection(operations=self.records, candidates=candidates, cells=(), narrowed=True)

    def _run(self, step: int, is_wanted: Callable[[str], bool], say: Say | None = None) -> None:
        """Run a step on requested cases. With `say`, run Python kernels on all cases and report each case's lines."""
        plan = self.steps[step]
        selection, cell = self._selection(), Cell(self.operation.name, self.backend, plan.dtype)
        if selection.unsupported(cell, "cpu"):
            return
        subject = selection.subject(cell, "cpu")
        cases = _claimed_cases(subject, plan.cases)

        @contextlib.contextmanager
        def record(name: str) -> Iterator[None]:
            with _record_lines(self._places()) as lines:
                yield
            assert say is not None
            say(CaseRan(step, name, {file: sorted(executed) for file, executed in lines.items()}))

        search = FixedSearch(examples=len(cases), named_cases=cases, selects=is_wanted)
        if say is not None and self.backend != "cuda":
            search.context = record
        # What a candidate does not claim, as gradients, is not checked.
        with contextlib.suppress(*[Unsupported] * bool(self.candidate)):
            plan.check(select_output(subject, plan.output) if plan.output else together(subject), search)

    def _compiling_only(self, names: frozenset[str]) -> contextlib.AbstractContextManager[None]:
        """Compile a C++ kernel with only the named ones in this context: the first steps reject most mutants."""
        if self.backend != "cuda":
            return contextlib.nullcontext()
        # Import the module here: the child has forgotten the parent's.
        return importlib.import_module("fourfold.backends.cuda.launch").compiling_only(names)

    def _places(self) -> dict[str, str]:
        """Return the name of each file in the mutants, by its path in this process."""
        if self.candidate:
            return {str(pathlib.Path(self.candidate.place).resolve()): self.candidate.place}
        root = self.kernels.imported_folder()
        return {str(path): str(path.relative_to(root)) for path in root.rglob("*.py")}

    def _fork(
        self,
        body: Callable[[Say], None],
        limit: Callable[[int | None], float],
        mutant: Mutant | None = None,
    ) -> Iterator[Progress]:
        """Run `body` in a forked process and yield its messages; a timeout or a crash is `Rejected`, too.

        Args:
            body: takes the function `say`, which sends a message.
            limit: returns the time limit of a step in seconds; None stands for the time before the first step.
            mutant: the mutant whose text replaces its file; None for the unmutated kernels.
        """
        place = self._prepare(mutant)
        with _forking:
            end, peer = Connection.pair()
            with peer:
                work = functools.partial(_child, peer, body, self.kernels, place, self._use_candidate_copy(mutant))
                child = Child.fork(work, quiet=True)  # in a session of its own, so that killing it also ends g++
        with end:
            try:
                yield from self._listen(child, end, limit)
            finally:
                child.kill()
                self._clear(mutant)

    def _listen(self, child: Child, connection: Connection, limit: Callable[[int | None], float]) -> Iterator[Progress]:
        step, is_done = None, False
        connection.within(limit(step))
        while True:
            try:
                message = connection.receive(Progress)
            except TimeoutError:
                killer = f"time limit in {self._name(step)}"
                yield Rejected(f"no end within {limit(step):.0f} s", "", killer)
                return
            except Ended:
                break
            if isinstance(message, StepBegun):
                step = message.step
                connection.within(limit(step))
            elif isinstance(message, Rejected):
                message = dataclasses.replace(message, by=f"{self._name(step)}{message.by}")
            is_done |= isinstance(message, Completed | Rejected)
            yield message
        if not is_done:
            yield Rejected(f"the process {child.wait()}", "", f"crash in {self._name(step)}")

    def _name(self, step: int | None) -> str:
        return "import" if step is None else str(self.steps[step])

    # ---- the copy of the kernels

    def _prepare(self, mutant: Mutant | None) -> pathlib.Path:
        """Copy the kernels, write the mutant's file and return the folder. Its path is fixed, so caches stay valid."""
        root = self.directory / "kernels"
        if not root.exists():
            shutil.copytree(
                self.kernels.folder, root / self.kernels.folder.name, ignore=shutil.ignore_patterns("__pycache__")
            )
        if mutant is not None and self.candidate is None:
            _write(root / self.kernels.folder.name / mutant.file, mutant.text)
        if mutant is not None and self.candidate is not None:
            _write(self.directory / "candidate" / pathlib.Path(self.candidate.place).name, mutant.text)
        self._compiled = set(self._cache_entries())
        return root

    def _clear(self, mutant: Mutant | None) -> None:
        if mutant is None:
            return
        if self.candidate is None:
            folder = self.kernels.folder
            shutil.copy2(folder / mutant.file, self.directory / "kernels" / folder.name / mutant.file)
        for path in self._cache_entries():
            if path not in self._compiled:
                shutil.rmtree(path, ignore_errors=True)

    def _cache_entries(self) -> list[pathlib.Path]:
        return list((self.directory / "cache" / "cuda_on_cpu").glob("*"))

    def _use_candidate_copy(self, mutant: Mutant | None) -> Callable[[], None]:
        def use_copy() -> None:
            os.environ["FOURFOLD_CACHE"] = str(self.directory / "cache")
            if self.candidate is not None and mutant is not None:
                path = pathlib.Path(self.candidate.place).resolve()
                sys.path.append(str(path.parent))
                copy = self.directory / "candidate" / path.name
                self.candidate = dataclasses.replace(self.candidate, place=str(copy))

        return use_copy


@contextlib.contextmanager
def _note_case(name: str) -> Iterator[None]:
    """Add the case's name to an error's notes."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {name}")
        raise


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _child(
    connection: Connection,
    body: Callable[[Say], None],
    kernels: KernelPackage,
    copy: pathlib.Path,
    prepare: Callable[[], None],
) -> None:
    sys.dont_write_bytecode = True
    # Import the kernels from the copy, and forget any that the parent imported.
    kernels.take_from(copy)
    prepare()
    try:
        body(connection.send)
        connection.send(Completed())
    except BaseException as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", []))
        root = error
        while root.__cause__ is not None and not isinstance(root, Failure):
            root = root.__cause__
        connection.send(Rejected(f"{type(root).__name__}: {root}", type(root).__name__, notes))


def _compiles_ahead_of_time(subject: Subject, search: Search) -> None:
    """Check that Triton's compiler for a GPU accepts the kernels of the copy: the interpreter accepts more code."""
    copy = KernelPackage.of(subject.operation.name).imported_folder().parent
    command = [*ahead_of_time.COMMAND, subject.operation.name, str(subject.dtype), "90", "--kernels", str(copy)]
    changes = {"TRITON_CACHE_DIR": str(copy / "triton")}
    process = subprocess.run(command, env={**ahead_of_time.environment(), **changes}, capture_output=True, text=True)
    if process.returncode:
        raise Failure(f"{subject}: {process.stderr.strip()[-300:]}")


def _launched_kernels() -> list[Any]:
    """Return the CUDA kernels that this process launched on the CPU; none if the launcher was never imported."""
    launch = sys.modules.get("fourfold.backends.cuda.launch")
    return launch.emulated_kernels() if launch else []


def _compiled_sources(kernels: KernelPackage, launched: Iterable[Any]) -> list[str]:
    """Return the source files, relative to the kernels' package, of CUDA kernels that this process launched."""
    sources = {kernel.source for kernel in launched}
    if not sources:
        return []
    declarations = importlib.import_module("fourfold.backends.cuda.declarations")
    files = {file for source in sources for file in declarations.source_closure(source)}
    root = kernels.imported_folder()
    # A header of this library is no part of another package's kernels.
    return sorted(str(path.relative_to(root)) for path in map(pathlib.Path, files) if path.is_relative_to(root))


@contextlib.contextmanager
def _record_lines(places: Mapping[str, str]) -> Iterator[dict[str, set[int]]]:
    """Trace the context and collect the lines that run in some files, by the files' names in `places`."""
    executed: dict[str, set[int]] = {}

    def trace_line(frame: Any, event: str, argument: Any) -> Any:
        executed[places[frame.f_code.co_filename]].add(frame.f_lineno)
        return trace_line

    def trace_call(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in places:
            return None
        executed.setdefault(places[frame.f_code.co_filename], set()).add(frame.f_lineno)
        return trace_line

    former = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield executed
    finally:
        sys.settrace(former)


def _claimed_cases(subject: Subject, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the cases that an implementation claims to take, in the layouts that it claims."""
    claims, operation, dtype = subject.claims, subject.operation, subject.dtype
    claimed = {name: case for name, case in cases.items() if claims.outside(operation, case, dtype) is None}
    return {name: claims.adapt(case) for name, case in claimed.items()}
