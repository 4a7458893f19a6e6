"""One mutant's trial: the checks on a copy of the kernels that has its mistake, in a process of its own.

What is the same for all mutants is done once, before: the imports, the generated cases, the oracle's results. A trial
is a fork of the process that has them, which then imports the kernels. The first trial is of the kernels as they are:
they must pass, it says how long each check takes, and, of Triton kernels, which case runs which lines. A mutant is put
through the cases that run its own.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import hypothesis

import impls
from properties import ahead_of_time, checks
from properties.case import Case
from properties.cells import Candidate, Cell, Selection
from properties.checks import Failure, Search, Subject
from properties.comparison import Agreement
from properties.dtypes import DTYPES
from properties.mutation.mutant import Mutant
from properties.operation import operations, reference, reference_gradients

PACKAGE = pathlib.Path(impls.__file__).resolve().parent
# A trial that takes so many times as long as the kernels as they are, and some seconds, hangs.
TIMES_AS_LONG = 10.0
GRACE_SECONDS = 10.0
# C++ is compiled when a kernel is first launched.
COMPILING_SECONDS = {"cuda": 240.0}
# What a compiler has no code for is no mutant.
INVALID = ("CompilationError: ", "SyntaxError: ")
# What rejects most mutants, and most of the time at once.
QUICK = ("forward", "backward", "memory", "far apart")
C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}


class Given(Search):
    """A search in cases that are drawn already."""

    def __init__(self, cases: Mapping[str, Case], wanted: Callable[[str], bool]) -> None:
        # Each check is to run whatever it is put on, so that what it runs is seen.
        super().__init__(examples=len(cases), keeps=False)
        self.given, self.wanted = cases, wanted

    def cases(
        self,
        subject: Subject,
        check: str,
        body: Callable[[Case], None],
        **options: Any,
    ) -> None:
        """Those that are wanted, whichever it were to choose."""
        for name, case in self.given.items():
            if self.wanted(name):
                with _of_case(name), contextlib.suppress(hypothesis.errors.UnsatisfiedAssumption):
                    body(case)

    def for_all(
        self,
        name: str,
        strategy: Any,
        body: Callable[[Case], None],
        shrink: bool = True,
        examples: int | None = None,
        seed: str | None = None,
    ) -> None:
        """The same."""
        self.cases(None, name, body)  # type: ignore[arg-type]

    def saw(self, *agreements: Agreement) -> None:
        """Nothing that is shown."""
        self.ran += 1

    def must_have_seen_something(self, subject: Subject, check: str) -> None:
        """Not so: none of the cases may be wanted."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One check for one dtype.

    Attributes:
        name: of the check.
        check: it, on a subject and a search.
        dtype: the name of the type.
        cases: what it is given.
        configuration: of a kernel that has several, which is forced.
    """

    name: str
    check: Callable[[Subject, Search], None]
    dtype: str
    cases: Mapping[str, Case]
    configuration: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the kernels as they are came to.

    Attributes:
        seconds: of each step, in order.
        ran: by step and case the lines of each file that ran, or None where nobody looked.
        compiled: the C++ files of the kernels that were launched.
    """

    seconds: tuple[float, ...]
    ran: Mapping[tuple[int, str], Mapping[str, frozenset[int]]] | None
    compiled: frozenset[str] = frozenset()

    def reaches(self, mutant: Mutant, step: int, case: str) -> bool:
        """Whether a case of a step runs a mutant's lines."""
        if self.ran is None:
            return mutant.file in self.compiled
        lines = self.ran.get((step, case), {}).get(mutant.file, frozenset())
        return any(line in lines for line in range(mutant.lines[0], mutant.lines[1] + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a mutant came to.

    Attributes:
        status: "killed", "survived", "invalid" where there is no code for it, "not reached" where no case runs it.
        by: of the killed, the step and the case.
        why: the error.
        seconds: that it took.
    """

    status: str
    by: str = ""
    why: str = ""
    seconds: float = 0.0


class BaselineFailed(RuntimeError):
    """The kernels as they are do not pass."""


class Trials:
    """Trials of one operation on one backend, on the CPU.

    Args:
        operation: its name.
        backend: "triton", "cuda", or "candidate".
        candidate: the implementation, of a candidate.
        dtypes: in the order in which they are tried.
        examples: generated cases of each dtype, the same in every trial.
        directory: for the kernels' copies and what is compiled of them.
        quick: whether the checks that reject most are all.
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
        self.backend, self.candidate, self.dtypes = backend, candidate, tuple(dtypes)
        self.records = dict(operations())
        self.operation = self.records[operation]
        self.directory = directory
        drawn = {dtype: self._cases(dtype, examples) for dtype in dtypes}
        self.steps = tuple(step for step in self._steps(drawn) if not quick or step.name in QUICK)
        for dtype in dtypes:
            for case in drawn[dtype].values():
                # Said once, before the first fork, for all trials.
                reference(self.operation, case, DTYPES[dtype])
                reference_gradients(self.operation, case, DTYPES[dtype])

    # ---- what is the same for all

    def _cases(self, dtype: str, examples: int) -> dict[str, Case]:
        named = {name: make(DTYPES[dtype]) for name, make in self.operation.examples.items()}
        return {**named, **_drawn(self.operation.cases(DTYPES[dtype], 2048), examples)}

    def _steps(self, drawn: Mapping[str, Mapping[str, Case]]) -> Iterator[Step]:
        """What rejects most and costs least comes first."""

        def each(name: str, check: Callable, dtypes: Sequence[str], share: int = 1) -> Iterator[Step]:
            for dtype in dtypes:
                cases = dict(list(drawn[dtype].items())[::share])
                yield Step(name, check, dtype, cases)

        first, others, small = self.dtypes[:1], self.dtypes[1:], self.operation.cases
        yield from each("forward", checks.forward_agrees, first)
        yield from each("backward", checks.backward_agrees, first)
        yield from each("memory", checks.memory_is_respected, first)
        yield from each("forward", checks.forward_agrees, others)
        yield from each("backward", checks.backward_agrees, others)
        half = DTYPES["float16"]
        apart = {**self.operation.examples_for_offsets(half), **_drawn(small(half, 512), 8)}
        yield Step("offsets", checks.offsets_may_pass_32_bits, "float16", apart)
        yield from each("single gradients", checks.single_gradients_agree, first)
        yield from each("repeats", checks.repeats_bit_for_bit, first)
        for dtype in self.dtypes:
            if dtype == "float64":
                smooth = _drawn(self.operation.smooth(DTYPES[dtype]), 3)
                yield Step("gradcheck", checks.gradcheck, dtype, smooth)
        yield Step("errors", checks.declared_errors_are_raised, first[0], {})
        for name in self._configurations():
            for dtype in self.dtypes:
                yield Step(f"configuration {name}", checks.forward_agrees, dtype, drawn[dtype], name)
        for law in self.operation.laws:
            yield from each(law.__name__, functools.partial(checks.law_holds, law), first, share=3)
        if self.backend == "triton":
            yield Step("ahead of time", _compiles_ahead_of_time, "float16", {})

    def _configurations(self) -> list[str]:
        """Of a kernel that is tuned, learned in a process that is thrown away."""

        def ask(say: Callable[..., None]) -> None:
            self._implementation()
            tuning = importlib.import_module("impls.tuning")
            kernel = f"{self.operation.name}_{self.backend}"
            if kernel in tuning.kernels():
                import torch

                here = [c for c in tuning.configurations(kernel) if c.runs_on(torch.device("cpu"))]
                say(configurations=[configuration.name for configuration in here])

        told = list(self._fork(ask, lambda _: 60.0))
        return next((message["configurations"] for message in told if "configurations" in message), [])

    # ---- trials

    def baseline(self) -> Baseline:
        """The kernels as they are.

        Raises:
            BaselineFailed: with what a check said.
        """
        seconds: list[float] = []
        ran: dict[tuple[int, str], dict[str, frozenset[int]]] = {}

        def run(say: Callable[..., None]) -> None:
            for step in range(len(self.steps)):
                say(step=step)
                started = time.perf_counter()
                self._run(step, lambda _: True, say)
                say(seconds=time.perf_counter() - started)
            say(compiled=_compiled_files())

        compiled: list[str] = []
        for message in self._fork(run, lambda _: 1800.0):
            if "failed" in message:
                raise BaselineFailed(f"{message['by']}: {message['failed']}")
            if "ended" in message:
                raise BaselineFailed(message["ended"])
            if "seconds" in message:
                seconds.append(message["seconds"])
            compiled += message.get("compiled", ())
            if "lines" in message:
                ran[message["step"], message["case"]] = {
                    file: frozenset(lines) for file, lines in message["lines"].items()
                }
        looked = self.backend != "cuda"
        return Baseline(seconds=tuple(seconds), ran=ran if looked else None, compiled=frozenset(compiled))

    def outcome(self, mutant: Mutant, baseline: Baseline) -> Outcome:
        """Put a mutant through the checks, up to the first that rejects it."""
        reaching = {
            step: {case for case in self.steps[step].cases if baseline.reaches(mutant, step, case)}
            for step in range(len(self.steps))
        }
        if not any(reaching.values()):
            return Outcome(status="not reached")

        def run(say: Callable[..., None]) -> None:
            for step, cases in reaching.items():
                if cases or not self.steps[step].cases:
                    say(step=step)
                    self._run(step, cases.__contains__)

        def limit(step: int | None) -> float:
            of_step = 0.0 if step is None else baseline.seconds[step]
            return GRACE_SECONDS + TIMES_AS_LONG * of_step + COMPILING_SECONDS.get(self.backend, 0.0)

        started = time.perf_counter()
        outcome = Outcome(status="survived")
        for message in self._fork(run, limit, mutant):
            if "failed" in message:
                invalid = message["failed"].startswith(INVALID)
                outcome = Outcome(
                    status="invalid" if invalid else "killed", by=message["by"], why=message["failed"][:300]
                )
            elif "ended" in message:
                outcome = Outcome(status="killed", by=message["by"], why=message["ended"])
        return dataclasses.replace(outcome, seconds=round(time.perf_counter() - started, 2))

    # ---- in the process of a trial

    def _implementation(self) -> Callable[..., Any]:
        selection = self._selection()
        return selection.implementation(self.operation.name, self.backend)

    def _selection(self) -> Selection:
        candidates = {self.operation.name: self.candidate} if self.candidate else {}
        return Selection(operations=self.records, candidates=candidates, cells=(), narrowed=True)

    def _run(self, step: int, wanted: Callable[[str], bool], say: Callable[..., None] | None = None) -> None:
        """Run a step; of its cases the wanted, saying, if somebody listens, which lines each runs."""
        this = self.steps[step]
        subject = self._selection().subject(Cell(self.operation.name, self.backend, this.dtype), "cpu")
        _compile_only(this.dtype)
        tuning = importlib.import_module("impls.tuning")
        force: Any = contextlib.nullcontext()
        if this.configuration:
            force = tuning.forced(f"{self.operation.name}_{self.backend}", this.configuration)

        def traced(name: str, body: Callable[[Case], None], case: Case) -> None:
            with _of_case(name), _lines_that_run(self._places()) as lines:
                body(case)
            assert say is not None
            say(step=step, case=name, lines={file: sorted(found) for file, found in lines.items()})

        given = Given(this.cases, wanted)
        if say is not None and self.backend != "cuda":
            given.cases = functools.partial(_each, this.cases, traced)  # type: ignore[method-assign]
        with force:
            this.check(subject, given)

    def _places(self) -> dict[str, str]:
        """The names that mutants' files go by, by where they are in this process."""
        if self.candidate:
            return {str(pathlib.Path(self.candidate.place).resolve()): self.candidate.place}
        root = pathlib.Path(sys.modules["impls"].__file__ or "").resolve().parent
        return {str(path): str(path.relative_to(root)) for path in root.rglob("*.py")}

    def _fork(
        self,
        body: Callable[[Callable[..., None]], None],
        limit: Callable[[int | None], float],
        mutant: Mutant | None = None,
    ) -> Iterator[dict[str, Any]]:
        """What `body` says in a process of its own, and how that ended: "failed" of an exception, "ended" of a death.

        Args:
            body: is given the function by which it says something.
            limit: the seconds that a step may take, by its number.
            mutant: in place of its file.
        """
        place = self._prepare(mutant)
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                os.setsid()  # g++ ends with it
                with os.fdopen(write, "w") as pipe:
                    _child(pipe, body, place, self._candidate_of(mutant))
            finally:
                # Whatever a mutant has done to this process, nothing of the parent's must go on in it.
                os._exit(0)
        os.close(write)
        try:
            yield from self._listen(child, read, limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.close(read)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
            self._clear(mutant)

    def _listen(self, child: int, read: int, limit: Callable[[int | None], float]) -> Iterator[dict[str, Any]]:
        buffer, step, done, began = b"", None, False, time.perf_counter()
        while True:
            left = limit(step) - (time.perf_counter() - began)
            ready, _, _ = select.select([read], [], [], max(left, 0.0))
            chunk = os.read(read, 1 << 16) if ready else b""
            if not ready:
                yield {"ended": f"no end within {limit(step):.0f} s", "by": f"time limit in {self._name(step)}"}
                return
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "step" in message and "case" not in message:
                    step, began = message["step"], time.perf_counter()
                if "failed" in message:
                    message["by"] = f"{self._name(step)}{message['where']}"
                done |= "done" in message or "failed" in message
                yield message
        _, status = os.waitpid(child, 0)
        if not done:
            died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
            yield {"ended": f"the process died: {died}", "by": f"crash in {self._name(step)}"}

    def _name(self, step: int | None) -> str:
        return "import" if step is None else str(self.steps[step])

    # ---- the copy of the kernels

    def _prepare(self, mutant: Mutant | None) -> pathlib.Path:
        """A copy of the kernels, with the mutant's file; always in one place, so that what is compiled is found."""
        root = self.directory / "kernels"
        if not root.exists():
            shutil.copytree(PACKAGE, root / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None and self.candidate is None:
            _write(root / PACKAGE.name / mutant.file, mutant.text)
        if mutant is not None and self.candidate is not None:
            _write(self.directory / "candidate" / pathlib.Path(self.candidate.place).name, mutant.text)
        self._compiled = set(self._compiled_now())
        return root

    def _clear(self, mutant: Mutant | None) -> None:
        if mutant is None:
            return
        if self.candidate is None:
            shutil.copy2(PACKAGE / mutant.file, self.directory / "kernels" / PACKAGE.name / mutant.file)
        for path in self._compiled_now():
            if path not in self._compiled:
                shutil.rmtree(path, ignore_errors=True)

    def _compiled_now(self) -> list[pathlib.Path]:
        return list((self.directory / "cache" / "cuda_on_cpu").glob("*"))

    def _candidate_of(self, mutant: Mutant | None) -> Callable[[], None]:
        def take_its_place() -> None:
            os.environ["FOURFOLD_CACHE"] = str(self.directory / "cache")
            if self.candidate is not None and mutant is not None:
                path = pathlib.Path(self.candidate.place).resolve()
                sys.path.append(str(path.parent))
                changed = self.directory / "candidate" / path.name
                self.candidate = dataclasses.replace(self.candidate, place=str(changed))

        return take_its_place


@contextlib.contextmanager
def _of_case(name: str) -> Iterator[None]:
    """Notes of an error in which case it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {name}")
        raise


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _child(
    pipe: TextIO, body: Callable[[Callable[..., None]], None], kernels: pathlib.Path, prepare: Callable[[], None]
) -> None:
    def say(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    sys.dont_write_bytecode = True
    # Kernels are taken from the copy; those that the parent may have are forgotten.
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]:
        del sys.modules[name]
    sys.path.insert(0, str(kernels))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    prepare()
    try:
        body(say)
        say(done=True)
    except BaseException as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", []))
        root = error
        while root.__cause__ is not None and not isinstance(root, Failure):
            root = root.__cause__
        say(failed=f"{type(root).__name__}: {root}", where=notes)


def _compile_only(dtype: str) -> None:
    """Of a CUDA kernel's instances those for one dtype: a mutant is mostly rejected by the first."""
    launch = sys.modules.get("impls.cuda_launch")
    if launch is None:
        return

    def siblings(kernel: Any) -> set[str]:
        names = {other.name for other in launch._kernels_of[kernel.source]}
        return {name for name in names if C_TYPES[dtype] in name.replace("<", " ").replace(",", " ").split()}

    launch.CudaKernel._siblings = siblings


def _compiles_ahead_of_time(subject: Subject, search: Search) -> None:
    """A GPU's compiler takes the kernels of this process's copy, whose interpreter takes more."""
    copy = pathlib.Path(sys.modules["impls"].__file__ or "").parents[1]
    command = [*ahead_of_time.COMMAND, subject.operation.name, str(subject.dtype), "90"]
    changes = {"PYTHONPATH": str(PACKAGE.parent), "TRITON_CACHE_DIR": str(copy / "triton")}
    # Where it runs is where it imports from first.
    done = subprocess.run(
        command, cwd=copy, env={**ahead_of_time.environment(), **changes}, capture_output=True, text=True
    )
    if done.returncode:
        raise Failure(f"{subject}: {done.stderr.strip()[-300:]}")


def _compiled_files() -> list[str]:
    """The files of `impls` that the CUDA kernels which were launched here are made of."""
    launch = sys.modules.get("impls.cuda_launch")
    if launch is None:
        return []
    compilation = importlib.import_module("impls.cuda_compile")
    sources = [kernel.source for kernels in launch._kernels_of.values() for kernel in kernels if kernel._on_cpu]
    files = {file for source in sources for file in compilation.source_closure(source)}
    return sorted(str(pathlib.Path(file).relative_to(compilation.IMPLS)) for file in files)


@contextlib.contextmanager
def _lines_that_run(places: Mapping[str, str]) -> Iterator[dict[str, set[int]]]:
    """The lines that run within it, of some files."""
    ran: dict[str, set[int]] = {}

    def of_line(frame: Any, event: str, argument: Any) -> Any:
        ran[places[frame.f_code.co_filename]].add(frame.f_lineno)
        return of_line

    def of_call(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in places:
            return None
        ran.setdefault(places[frame.f_code.co_filename], set()).add(frame.f_lineno)
        return of_line

    former = sys.gettrace()
    sys.settrace(of_call)
    try:
        yield ran
    finally:
        sys.settrace(former)


def _each(
    cases: Mapping[str, Case],
    run: Callable[[str, Callable[[Case], None], Case], None],
    subject: Subject,
    check: str,
    body: Callable[[Case], None],
    **options: Any,
) -> None:
    """In place of `Search.cases`: these."""
    for name, case in cases.items():
        with contextlib.suppress(hypothesis.errors.UnsatisfiedAssumption):
            run(name, body, case)


def _drawn(strategy: Any, examples: int) -> dict[str, Case]:
    """Generated cases, always the same."""
    drawn: list[Case] = []

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return _numbered(drawn, "generated")


def _numbered(cases: Iterable[Case], kind: str = "case") -> dict[str, Case]:
    return {f"{kind} {i}": case for i, case in enumerate(cases)}
