"""Cells: one operation on one backend for one dtype, the selection that a run verifies, and its candidates."""

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fourfold import backends
from fourfold.backends import tuning
from fourfold.backends.cuda.compile import CudaError
from fourfold.backends.cuda.declarations import SUFFIXES
from fourfold.candidates.frames import own_frames
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.load import modules
from fourfold.candidates.load.calling import CannotBeCalled, as_operation
from fourfold.candidates.load.cuda_candidates import CudaCandidate
from fourfold.candidates.load.cuda_candidates import load as load_cuda
from fourfold.candidates.load.cuda_launches import Launch
from fourfold.candidates.process.client import CannotBeImported, UntrustedFunction, start
from fourfold.candidates.process.cuda_client import start as start_kernel
from fourfold.candidates.process.first_process import Unanswered
from fourfold.checks.outputs import requires_gradient
from fourfold.checks.records import operation_named, reference_of
from fourfold.checks.search import Subject
from fourfold.engine import profiles
from fourfold.inputs.constants import Constants, constants_of, file_constants
from fourfold.inputs.large_cases import LargeCases
from fourfold.instruments.hide_test_runner import out_of_sight
from fourfold.numerics.bounded import OPEN
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations import registry
from fourfold.operations.case import Case
from fourfold.operations.claims import Claims, claims_of
from fourfold.operations.outcomes import Exclusion, Unclaimed, Unsupported
from fourfold.operations.record import Operation
from fourfold.operations.registry import did_you_mean

# The backend of a user's implementation; a law relates it to torch's implementation of another operation.
CANDIDATE = "candidate"


class SelectionError(ValueError):
    """An option that names something unknown."""


@dataclass(frozen=True)
class Cell:
    """One operation on one backend for one dtype, by name."""

    operation: str
    backend: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation}-{self.backend}-{self.dtype}"


@dataclass(frozen=True)
class Candidate:
    """A user's implementation of an operation, as the command line names it.

    Attributes:
        operation: the operation that it claims to implement.
        place: a Python file, a `.cu` file or a module's name.
        function: its name there; for a kernel also its launch, as `fourfold.candidates.load.cuda_candidates` reads it.
        call_seconds: the time limit of a call, for a candidate in its own process; None for one in this process.
        declared: the operation's ``FILE_OR_MODULE:OPERATION``; "" for a known one.
    """

    operation: str
    place: str
    function: str
    call_seconds: float | None = None
    declared: str = ""

    def __str__(self) -> str:
        return f"{self.declared or self.operation}={self.place}:{self.function}"

    @classmethod
    def parse(cls, text: str, operations: Iterable[str]) -> "Candidate":
        """Parse ``OP=FILE_OR_MODULE:FUNCTION``, or ``OP=FILE.cu:KERNEL<<<GRID, BLOCK>>>``.

        OP is the name of a known operation, or ``FILE_OR_MODULE:OPERATION``.

        Raises:
            SelectionError: the text has another form, or the operation is unknown.
        """
        operation, equals, target = text.partition("=")
        launch = cls._launch(target) if equals else None
        place, function = (launch.file, launch.launched) if launch else target.rpartition(":")[::2]
        if not launch and not (place and function.isidentifier()):
            raise SelectionError(f"--candidate must be OP=FILE_OR_MODULE:FUNCTION, not {text!r}")
        function_name, name = operation if ":" in operation else "", operation_in(text)
        if not function_name:
            choose("--candidate", [name], operations)
        return cls(name, place, function, declared=function_name)

    @staticmethod
    def _launch(target: str) -> Launch | None:
        try:
            return Launch.parse(target)
        except ValueError as error:
            raise SelectionError(f"--candidate {error}") from None

    @functools.cached_property
    def record(self) -> Operation:
        """Return the operation.

        Raises:
            SelectionError: no file declares it.
        """
        try:
            return operation_named(self.declared or self.operation)
        except ValueError as error:
            raise SelectionError(f"--candidate {self}: {error}") from error

    @property
    def reference(self) -> Callable[..., Any]:
        """Return the operation as a function of torch."""
        return reference_of(self.record) if self.declared else backends.load(self.operation, "torch")

    @property
    def judges_itself(self) -> bool:
        """Return whether the candidate's own file declares its operation, so that the judge must import it."""
        return bool(self.declared) and Path(self.declared.rpartition(":")[0]).resolve() == Path(self.place).resolve()

    @property
    def is_cuda(self) -> bool:
        """Return whether the candidate is a kernel of a `.cu` file."""
        return self.place.endswith(SUFFIXES)

    @property
    def of_cuda(self) -> CudaCandidate | None:
        """Return the kernel of a `.cu` file, or None; an untrusted kernel is compiled in its own process.

        Raises:
            SelectionError: the file or the kernel does not exist, or its launch is ambiguous.
        """
        if not self.is_cuda:
            return None
        if self.call_seconds is not None:
            self._elsewhere(self.call_seconds)  # learns for which dtypes it compiles
        return self._read()

    def _read(self) -> CudaCandidate:
        try:
            return load_cuda(
                f"{self.place}:{self.function}", self.record, self.reference, here=self.call_seconds is None
            )
        except (OSError, LookupError, ValueError, CudaError) as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None

    def load(self) -> Callable[..., Any]:
        """Return the function, callable with the operation's own arguments.

        Raises:
            SelectionError: the file, module or function does not exist, fails on import, or cannot be called this way.
        """
        if self.call_seconds is not None:
            return self._elsewhere(self.call_seconds)
        if kernel := self.of_cuda:
            return kernel
        try:
            function = getattr(self._module(), self.function, None)
            if function is None:
                close = did_you_mean(self.function, vars(self._module()))
                raise SelectionError(f"--candidate {self.place} has no function {self.function}{close}")
            return as_operation(function, inspect.signature(self.reference), self.operation)
        except SelectionError:
            raise
        except CannotBeCalled as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None
        except (Exception, SystemExit, GeneratorExit) as error:
            line = [f" ({frame.filename}:{frame.lineno})" for frame in own_frames(error, self.file())[-1:]]
            raise SelectionError(f"--candidate {self.place}: {type(error).__name__}: {error}{''.join(line)}") from error

    def _elsewhere(self, call_seconds: float) -> UntrustedFunction:
        signature = inspect.signature(self.reference)
        place = str(self.file()) if self.place.endswith(".py") else self.place
        kernel = self._read() if self.is_cuda else None
        try:
            if kernel is not None:
                return start_kernel(kernel, call_seconds, os.getpid())
            return start(place, self.function, signature, self.operation, call_seconds, os.getpid(), self.record.lists)
        except CannotBeImported as error:
            raise SelectionError(f"--candidate {error}") from None
        except (CannotBeCalled, Unanswered) as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None
        except Exception as error:
            line = [f" ({frame.filename}:{frame.lineno})" for frame in own_frames(error, self.file())[-1:]]
            kind = "" if isinstance(error, Escape) else f"{type(error).__name__}: "
            raise SelectionError(f"--candidate {self.place}: {kind}{error}{''.join(line)}") from error

    def _module(self) -> ModuleType:
        with out_of_sight(interpreter=False):  # Triton's decorators need the interpreter
            return modules.load_file(self.file()) if self.place.endswith(".py") else importlib.import_module(self.place)

    def file(self) -> Path:
        """Return the file that defines the candidate; a module's is known once it is imported."""
        if self.is_cuda or self.place.endswith(".py"):
            return Path(self.place).resolve()
        if self.call_seconds is not None:
            return self._elsewhere(self.call_seconds).file
        return Path(getattr(sys.modules.get(self.place), "__file__", None) or os.devnull)


def operation_in(candidate: str) -> str:
    """Return the name of the operation in the text of a candidate, as in ``OP=FILE:FUNCTION``."""
    return candidate.partition("=")[0].rpartition(":")[2]


def choose(option: str, selected: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that an option selects, in the order of `names`: all of them if the option is not given.

    Raises:
        SelectionError: a name is unknown.
    """
    names = list(names)
    for name in selected:
        if name not in names:
            raise SelectionError(f"{option} {name}: there are {', '.join(names)}{did_you_mean(name, names)}")
    return [name for name in names if name in selected or not selected]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cells and candidates that a run verifies.

    Attributes:
        operations: the known operations, by name; those of the candidates at least.
        candidates: by the name of the operation.
        cells: of the chosen operations, backends and dtypes, in order.
        narrowed: whether an option selected cells; the run then deselects tests that belong to no cell.
        claims: of the candidates; None for the claims that each declares by the decorator `fourfold.claims`.
        strict_errors: whether candidates must raise the declared errors.
    """

    operations: Mapping[str, Operation]
    candidates: Mapping[str, Candidate]
    cells: tuple[Cell, ...]
    narrowed: bool
    claims: Claims | None = None
    strict_errors: bool = False

    @classmethod
    def of(
        cls,
        operations: Mapping[str, Operation],
        candidates: Sequence[str],
        op: Sequence[str],
        backend: Sequence[str],
        dtype: Sequence[str],
        claims: Claims | None = None,
        strict_errors: bool = False,
        call_seconds: float | None = None,
    ) -> "Selection":
        """Build a selection from the options as given; with candidates and no other option, select only those.

        `call_seconds` is the time limit of a candidate's call.

        Raises:
            SelectionError: an option names something unknown.
        """
        parsed = [replace(Candidate.parse(text, operations), call_seconds=call_seconds) for text in candidates]
        by_operation = {candidate.operation: candidate for candidate in parsed}
        operations = {**operations, **{c.operation: c.record for c in parsed if c.declared}}
        if len(by_operation) < len(parsed):
            raise SelectionError("--candidate is given twice for one operation")
        backend_names = (*backends.BACKENDS, CANDIDATE) if parsed else backends.BACKENDS
        chosen_backends = choose("--backend", backend or ([CANDIDATE] if parsed else []), backend_names)
        cells = tuple(
            Cell(operation, backend_name, dtype_name)
            for operation in choose("--op", op, operations)
            for dtype_name in choose("--dtype", dtype, DTYPES)
            for backend_name in chosen_backends
            if backend_name != CANDIDATE or operation in by_operation
        )
        return cls(
            operations=operations,
            candidates=by_operation,
            cells=cells,
            narrowed=bool(candidates or op or backend or dtype),
            claims=claims,
            strict_errors=strict_errors,
        )

    def unsupported(self, cell: Cell, device: str) -> Unsupported | None:
        """Return why a cell cannot run on a device, or None."""
        if cell.backend != CANDIDATE:
            reason = backends.unsupported(cell.operation, cell.backend, cell.dtype, device)
        else:
            kernel = self.candidates[cell.operation].of_cuda
            reason = kernel.unsupported(cell.dtype, device) if kernel else None
            if not reason and cell.dtype not in (self.claims_of(cell).dtypes or DTYPES):
                return Unclaimed(cell.dtype, Exclusion.DTYPE)
        return Unsupported(reason, Exclusion.CELL) if reason else None

    def depends_on_batch(self, cell: Cell, device: str) -> str | None:
        """Return why the bits of a sample's result may depend on the batch around it, or None if they do not."""
        if cell.backend == CANDIDATE:
            return "nothing is claimed of it"
        return backends.depends_on_batch(cell.operation, cell.backend, cell.dtype, device)

    def offsets_in_32_bits(self, cell: Cell, device: str) -> str | None:
        """Return why a cell does not support offsets of 2^31 and more, or None if it does."""
        if cell.backend == CANDIDATE:
            return None
        return backends.offsets_in_32_bits(cell.operation, cell.backend, cell.dtype, device)

    def configurations(self, cell: Cell) -> list[tuning.Configuration]:
        """Return the configurations of a cell's kernel for its dtype; [] if the kernel is not tuned."""
        if cell.backend == CANDIDATE:
            return []
        with contextlib.suppress(ModuleNotFoundError):  # `unsupported` reports it
            backends.load(cell.operation, cell.backend)
        every = tuning.configurations(f"{cell.operation}_{cell.backend}")
        return [configuration for configuration in every if DTYPES[cell.dtype].torch in configuration.dtypes]

    def implementation(self, operation: str, backend: str) -> Callable[..., Any]:
        """Return the public function of an operation on a backend."""
        if backend == CANDIDATE:
            return self.candidates[operation].load()
        if backend == "torch" and operation in self.candidates:
            return self.candidates[operation].reference
        return backends.load(operation, backend)

    def origin(self, cell: Cell) -> Path:
        """Return the file of a candidate, or the folder of an operation's implementations."""
        if cell.backend == CANDIDATE:
            return self.candidates[cell.operation].file()
        with contextlib.suppress(ImportError, KeyError):
            return Path(importlib.import_module(registry.implementations(cell.operation)).__path__[0])
        return Path(os.devnull)

    def source(self, cell: Cell) -> tuple[Path, str]:
        """Return the file of a cell's implementation, and a candidate's name in it; "" for the library's own."""
        if cell.backend == CANDIDATE:
            candidate = self.candidates[cell.operation]
            candidate.load()  # a module has a file from then on
            return candidate.file(), candidate.function
        return Path(inspect.getfile(backends.module(cell.operation, cell.backend))), ""

    def subject(
        self, cell: Cell, device: str, note: Callable[[Case], None] = lambda case: None, gradients: bool = True
    ) -> Subject:
        """Return the subject of a cell's checks.

        Args:
            cell: the cell.
            device: "cpu" or "cuda".
            note: called with each case before a candidate runs on it.
            gradients: whether the check takes gradients, so that a candidate is called to learn whether it has any.
        """

        def sibling(name: str) -> tuple[Operation, Callable[..., Any]]:
            backend = "torch" if cell.backend == CANDIDATE else cell.backend
            return self.operations[name], self.implementation(name, backend)

        implementation = self.implementation(cell.operation, cell.backend)
        foreign = cell.backend == CANDIDATE
        claims = self.claims_of(cell)
        if device == "cpu":
            memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
            memory.undefined_lanes_are_zero(claims.undefined_lanes_are_zero)
        operation = claims.restrict(self._record(cell))
        dtype = DTYPES[cell.dtype].with_contract(OPEN) if foreign else DTYPES[cell.dtype]
        return Subject(
            operation=operation,
            backend=cell.backend,
            dtype=dtype,
            device=device,
            implementation=implementation,
            sibling=sibling,
            differentiable=not foreign or (gradients and claims.gradients and self._has_gradients(cell, device, note)),
            claims=claims,
            foreign=foreign,
            elsewhere=isinstance(implementation, UntrustedFunction),
            strict_errors=self.strict_errors or not foreign,
            depends_on_batch=self.depends_on_batch(cell, device),
            offsets_in_32_bits=self.offsets_in_32_bits(cell, device),
            large=LargeCases(
                operation,
                claims,
                dtype,
                self._constants(cell, implementation),
                share=profiles.share(is_own=not foreign),
                dear_limit=profiles.dear_limit(is_own=not foreign),
                every_nth=1 if foreign or profiles.is_full() else profiles.OWN_EVERY,
            ),
        )

    def claims_of(self, cell: Cell) -> Claims:
        """Return the claims of a cell's implementation: the run's, or else those in the candidate's source."""
        if cell.backend != CANDIDATE:
            return Claims()
        return self.claims or claims_of(self.implementation(cell.operation, cell.backend))

    def _constants(self, cell: Cell, implementation: Callable[..., Any]) -> Constants:
        """Return the constants in a cell's source."""
        if cell.backend != CANDIDATE:
            return constants_of(implementation)
        candidate = self.candidates[cell.operation]
        return file_constants(candidate.file(), "" if candidate.of_cuda else candidate.function)

    def _record(self, cell: Cell) -> Operation:
        """Return a cell's operation, narrowed to the parameters that a kernel of a `.cu` file takes."""
        operation = self.operations[cell.operation]
        kernel = self.candidates[cell.operation].of_cuda if cell.backend == CANDIDATE else None
        return kernel.narrow(operation) if kernel else operation

    def _has_gradients(self, cell: Cell, device: str, note: Callable[[Case], None]) -> bool:
        """Return whether a candidate's output requires a gradient if its inputs do."""
        if self.candidates[cell.operation].of_cuda:
            return False
        implementation = self.implementation(cell.operation, cell.backend)
        return requires_gradient(implementation, self.operations[cell.operation], DTYPES[cell.dtype], device, note)
