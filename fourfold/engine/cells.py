"""Cells: one operation on one backend for one dtype, which of them a run verifies, and the candidates among them."""

import contextlib
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
from fourfold.candidates.process.client import CannotBeImported, UntrustedFunction, started
from fourfold.candidates.process.cuda_client import started as started_kernel
from fourfold.candidates.process.session import Unanswered
from fourfold.checks.outputs import requires_gradient
from fourfold.checks.records import operations
from fourfold.checks.search import Subject
from fourfold.engine import profiles
from fourfold.inputs.constants import Constants, constants_in, constants_of
from fourfold.inputs.large_cases import LargeCases
from fourfold.instruments.hide_test_runner import out_of_sight
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations import registry
from fourfold.operations.case import Case
from fourfold.operations.claims import Claims, claims_of
from fourfold.operations.outcomes import UNCLAIMED
from fourfold.operations.record import Operation

# The backend of somebody's own implementation; what it is related to by a law is taken from torch.
CANDIDATE = "candidate"


class SelectionError(ValueError):
    """An option names something that there is not."""


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
    """Somebody's own implementation of an operation, as the command line names it.

    Attributes:
        operation: which operation it claims to be.
        place: a Python file, a `.cu` file or a module's name.
        function: its name there; of a kernel also its launch, as `fourfold.candidates.load.cuda_candidates` reads it.
        call_seconds: that a call may take, of one that runs in a process of its own; None for one that runs in this.
    """

    operation: str
    place: str
    function: str
    call_seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.operation}={self.place}:{self.function}"

    @classmethod
    def parse(cls, text: str, known: Iterable[str]) -> "Candidate":
        """``OP=FILE_OR_MODULE:FUNCTION``, or ``OP=FILE.cu:KERNEL<<<GRID, BLOCK>>>``.

        Raises:
            SelectionError: the text has another form, or the operation is unknown.
        """
        operation, equals, target = text.partition("=")
        if equals and (launch := cls._launch(target)):
            choose("--candidate", [operation], known)
            return cls(operation, launch.file, launch.launched)
        place, colon, function = target.rpartition(":")
        if not (equals and colon and place and function.isidentifier()):
            raise SelectionError(f"--candidate must be OP=FILE_OR_MODULE:FUNCTION, not {text!r}")
        choose("--candidate", [operation], known)
        return cls(operation, place, function)

    @staticmethod
    def _launch(target: str) -> Launch | None:
        try:
            return Launch.parse(target)
        except ValueError as error:
            raise SelectionError(f"--candidate {error}") from None

    @property
    def is_cuda(self) -> bool:
        """Whether it is a kernel of a `.cu` file."""
        return self.place.endswith(SUFFIXES)

    @property
    def of_cuda(self) -> CudaCandidate | None:
        """The kernel, where it is one of a `.cu` file; in a process of its own it is compiled there.

        Raises:
            SelectionError: there is no such file or kernel, or it is not clear how to launch it.
        """
        if not self.is_cuda:
            return None
        if self.call_seconds is not None:
            self._elsewhere(self.call_seconds)  # which finds out for which dtypes it compiles
        return self._read()

    def _read(self) -> CudaCandidate:
        target, reference = f"{self.place}:{self.function}", backends.load(self.operation, "torch")
        try:
            return load_cuda(target, self.operation, operations, reference, self.call_seconds is None)
        except (OSError, LookupError, ValueError, CudaError) as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None

    def load(self) -> Callable[..., Any]:
        """The function, to be called as the operation's own.

        Raises:
            SelectionError: there is no such file, module or function, it fails on import, or cannot be called so.
        """
        if self.call_seconds is not None:
            return self._elsewhere(self.call_seconds)
        if kernel := self.of_cuda:
            return kernel
        try:
            found = getattr(self._module(), self.function, None)
            if found is None:
                raise SelectionError(f"--candidate {self.place} has no function {self.function}")
            return as_operation(found, inspect.signature(backends.load(self.operation, "torch")), self.operation)
        except SelectionError:
            raise
        except CannotBeCalled as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None
        except (Exception, SystemExit, GeneratorExit) as error:
            at = [f" ({frame.filename}:{frame.lineno})" for frame in own_frames(error, self.file())[-1:]]
            raise SelectionError(f"--candidate {self.place}: {type(error).__name__}: {error}{''.join(at)}") from error

    def _elsewhere(self, call_seconds: float) -> UntrustedFunction:
        wanted = inspect.signature(backends.load(self.operation, "torch"))
        place = str(self.file()) if self.place.endswith(".py") else self.place
        kernel = self._read() if self.is_cuda else None
        try:
            if kernel is not None:
                return started_kernel(kernel, call_seconds, os.getpid())
            return started(place, self.function, wanted, self.operation, call_seconds, os.getpid())
        except CannotBeImported as error:
            raise SelectionError(f"--candidate {error}") from None
        except (CannotBeCalled, Unanswered) as error:
            raise SelectionError(f"--candidate {self.place}: {error}") from None
        except Exception as error:
            at = [f" ({frame.filename}:{frame.lineno})" for frame in own_frames(error, self.file())[-1:]]
            kind = "" if isinstance(error, Escape) else f"{type(error).__name__}: "
            raise SelectionError(f"--candidate {self.place}: {kind}{error}{''.join(at)}") from error

    def _module(self) -> ModuleType:
        with out_of_sight(interpreter=False):  # which Triton's decorators ask for
            return modules.of_file(self.file()) if self.place.endswith(".py") else importlib.import_module(self.place)

    def file(self) -> Path:
        """Where it is defined; of a module, once it is imported."""
        if self.is_cuda or self.place.endswith(".py"):
            return Path(self.place).resolve()
        if self.call_seconds is not None:
            return self._elsewhere(self.call_seconds).file
        return Path(getattr(sys.modules.get(self.place), "__file__", None) or os.devnull)


def choose(option: str, wanted: Sequence[str], known: Iterable[str]) -> list[str]:
    """What an option selects: everything where it is not given, and the named otherwise, in the order of `known`.

    Raises:
        SelectionError: a name is unknown.
    """
    known = list(known)
    for name in wanted:
        if name not in known:
            raise SelectionError(f"{option} {name}: there are {', '.join(known)}")
    return [name for name in known if name in wanted or not wanted]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a run verifies.

    Attributes:
        operations: all there are, by name.
        candidates: by the name of the operation.
        cells: of the chosen operations, backends and dtypes, in order.
        narrowed: whether an option chose; a run then has no interest in tests that belong to no cell.
        claims: of the candidates; None for what each says of itself by the decorator `fourfold.claims`.
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
        """From the options as given; with candidates and nothing else, only those.

        `call_seconds` is that of the candidates.

        Raises:
            SelectionError: an option names something that there is not.
        """
        parsed = [replace(Candidate.parse(text, operations), call_seconds=call_seconds) for text in candidates]
        by_operation = {candidate.operation: candidate for candidate in parsed}
        if len(by_operation) < len(parsed):
            raise SelectionError("--candidate is given twice for one operation")
        known = (*backends.BACKENDS, CANDIDATE) if parsed else backends.BACKENDS
        chosen_backends = choose("--backend", backend or ([CANDIDATE] if parsed else []), known)
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

    def unsupported(self, cell: Cell, device: str) -> str | None:
        """Why a cell cannot run on a device, or None."""
        if cell.backend == CANDIDATE:
            kernel = self.candidates[cell.operation].of_cuda
            if kernel and (reason := kernel.unsupported(cell.dtype, device)):
                return reason
            claimed = self._claims(cell).dtypes
            return f"{UNCLAIMED} {cell.dtype}" if claimed and cell.dtype not in claimed else None
        return backends.unsupported(cell.operation, cell.backend, cell.dtype, device)

    def depends_on_batch(self, cell: Cell, device: str) -> str | None:
        """Why the bits of a sample's result may depend on the batch around it, or None where they do not."""
        if cell.backend == CANDIDATE:
            return "nothing is claimed of it"
        return backends.depends_on_batch(cell.operation, cell.backend, cell.dtype, device)

    def offsets_in_32_bits(self, cell: Cell, device: str) -> str | None:
        """Why offsets of 2^31 and more are too large for a cell, or None."""
        if cell.backend == CANDIDATE:
            return None
        return backends.offsets_in_32_bits(cell.operation, cell.backend, cell.dtype, device)

    def configurations(self, cell: Cell) -> list[tuning.Configuration]:
        """The configurations of a cell's kernel that are for its dtype; none where the kernel is not tuned."""
        kernel = f"{cell.operation}_{cell.backend}"
        if cell.backend == CANDIDATE:
            return []
        with contextlib.suppress(ModuleNotFoundError):  # `unsupported` says so
            backends.load(cell.operation, cell.backend)
        if kernel not in tuning.kernels():
            return []
        return [each for each in tuning.configurations(kernel) if DTYPES[cell.dtype].torch in each.dtypes]

    def implementation(self, operation: str, backend: str) -> Callable[..., Any]:
        """The public function of an operation on a backend."""
        if backend == CANDIDATE:
            return self.candidates[operation].load()
        return backends.load(operation, backend)

    def origin(self, cell: Cell) -> Path:
        """The file that holds a candidate, or the folder of an operation's implementations."""
        if cell.backend == CANDIDATE:
            return self.candidates[cell.operation].file()
        with contextlib.suppress(ImportError, KeyError):
            return Path(importlib.import_module(registry.implementations(cell.operation)).__path__[0])
        return Path(os.devnull)

    def source(self, cell: Cell) -> tuple[Path, str]:
        """The file of a cell's implementation, and the name of a candidate there; "" for all of the library's own."""
        if cell.backend == CANDIDATE:
            candidate = self.candidates[cell.operation]
            candidate.load()  # a module has a file from then on
            return candidate.file(), candidate.function
        return Path(inspect.getfile(inspect.unwrap(self.implementation(cell.operation, cell.backend)))), ""

    def subject(self, cell: Cell, device: str, note: Callable[[Case], None] = lambda case: None) -> Subject:
        """What the checks take; `note` is told of a case before a candidate is run on it."""

        def sibling(name: str) -> tuple[Operation, Callable[..., Any]]:
            backend = "torch" if cell.backend == CANDIDATE else cell.backend
            return self.operations[name], self.implementation(name, backend)

        implementation = self.implementation(cell.operation, cell.backend)
        foreign = cell.backend == CANDIDATE
        claims = self._claims(cell)
        if device == "cpu":
            memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
            memory.undefined_lanes_are_zero(claims.undefined_lanes_are_zero)
        operation = claims.restricted(self._record(cell))
        dtype = DTYPES[cell.dtype].with_free_ties if foreign else DTYPES[cell.dtype]
        return Subject(
            operation=operation,
            backend=cell.backend,
            dtype=dtype,
            device=device,
            implementation=implementation,
            sibling=sibling,
            differentiable=not foreign or (claims.gradients and self._has_gradients(cell, device, note)),
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
                share=profiles.share(own=not foreign),
                every=1 if foreign or profiles.is_full() else profiles.OWN_EVERY,
            ),
        )

    def _claims(self, cell: Cell) -> Claims:
        """What is claimed of a cell's implementation: by the run, or else by the source of a candidate."""
        if cell.backend != CANDIDATE:
            return Claims()
        return self.claims or claims_of(self.implementation(cell.operation, cell.backend))

    def _constants(self, cell: Cell, implementation: Callable[..., Any]) -> Constants:
        """The constants of a cell's source."""
        if cell.backend != CANDIDATE:
            return constants_of(implementation)
        candidate = self.candidates[cell.operation]
        return constants_in(candidate.file(), "" if candidate.of_cuda else candidate.function)

    def _record(self, cell: Cell) -> Operation:
        """What a cell is verified as: a kernel of a `.cu` file may take fewer parameters than the operation has."""
        operation = self.operations[cell.operation]
        kernel = self.candidates[cell.operation].of_cuda if cell.backend == CANDIDATE else None
        return kernel.narrowed(operation) if kernel else operation

    def _has_gradients(self, cell: Cell, device: str, note: Callable[[Case], None]) -> bool:
        """Whether a candidate claims to: its output requires a gradient where its inputs do."""
        if self.candidates[cell.operation].of_cuda:
            return False
        implementation = self.implementation(cell.operation, cell.backend)
        return requires_gradient(implementation, self.operations[cell.operation], DTYPES[cell.dtype], device, note)
