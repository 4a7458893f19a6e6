"""Accuracy: the rounding errors of kernels beside those of torch and of other libraries, in ulp, on the same cases.

    fourfold accuracy --op softmax --device cuda

The verification says whether each error is within its bound. This says how large the errors are: a kernel may be right
and still less exact than torch's.

An error is the distance from the oracle's result, which is computed in a wider type. Its unit is the ulp: the spacing
of the numbers of the result's dtype at the exact value. Rounding alone costs up to 0.5. Elements whose exact value is
not finite or past the largest number, and elements without a finite bound, are not counted. At ties the derivative
counts that the oracle documents, which is torch's.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fourfold.checks.outputs import select_output
from fourfold.checks.results import expected_results, named_results
from fourfold.checks.search import Subject, generated_cases
from fourfold.engine.cells import CANDIDATE, Cell, Selection
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.refusals import has_lost_device, reason
from fourfold.performance.peers import COMPILED, LIBRARY, peers
from fourfold.performance.timings import OWN, PEERS
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection, Ended

# torch's own: the definition in torch, and the kernel of torch or torchvision where there is one.
OF_TORCH = ("torch", LIBRARY)
# Errors in ulp that rounding to the dtype costs anyway. Smaller ones are no advantage.
OF_ROUNDING = 0.5
EXPLANATION = (
    "In each cell: the largest and the mean error in ulp of the result's dtype. Rounding alone costs up to 0.50."
    " bits: by how many bits the largest error, or the mean, is larger than torch's."
)
ELEMENTS = 2048  # of the inputs of a generated case


@dataclass(frozen=True)
class Errors:
    """The errors of a contender in ulp.

    Attributes:
        elements: how many results were looked at.
        largest: the largest error; infinite where a finite result is infinite or NaN.
        total: the sum of all errors.
        bits: the sum of the bits that are lost, log2(1 + error). Its mean hardly depends on a few large errors.
        case: the case of the largest error.
    """

    elements: int = 0
    largest: float = 0.0
    total: float = 0.0
    bits: float = 0.0
    case: str = ""

    @classmethod
    def of(cls, ulps: np.ndarray, case: str) -> "Errors":
        """Return the statistics of one case's errors."""
        if not ulps.size:
            return cls()
        return cls(ulps.size, float(ulps.max()), float(ulps.sum()), float(np.log2(1 + ulps).sum()), case)

    def __add__(self, other: "Errors") -> "Errors":
        larger = self if self.largest >= other.largest and self.elements else other
        total, bits = self.total + other.total, self.bits + other.bits
        return Errors(self.elements + other.elements, larger.largest, total, bits, larger.case)

    @property
    def mean(self) -> float:
        """The mean error."""
        return self.total / max(self.elements, 1)

    @property
    def bits_lost(self) -> float:
        """The bits that an element loses on average."""
        return self.bits / max(self.elements, 1)

    def behind(self, other: "Errors") -> float:
        """Return by how many bits these errors are larger, the largest or the mean, whichever is farther behind."""
        with np.errstate(divide="ignore"):
            largest, peer_largest = (float(np.log2(max(errors.largest, OF_ROUNDING))) for errors in (self, other))
        pairs = ((largest, peer_largest), (self.bits_lost, other.bits_lost))
        return max(0.0 if a == b else a - b for a, b in pairs)


@dataclass
class AccuracyResult:
    """One output or gradient of an operation in one dtype: the errors of all contenders by case, and their refusals."""

    operation: str
    result: str
    dtype: str
    errors: dict[str, dict[str, Errors]] = field(default_factory=dict)

    def errors_of(self, contender: str, cases: Iterable[str] | None = None) -> Errors:
        """Return the errors of a contender in these cases; in all that it answered, if None."""
        by_case = self.errors[contender]
        return sum((by_case[case] for case in (by_case if cases is None else cases)), Errors())

    def behind(self, contender: str, peer: str) -> float:
        """Return by how many bits a contender is less exact than a peer, in the cases that both answered."""
        shared = [case for case in self.errors[contender] if case in self.errors[peer]]
        return self.errors_of(contender, shared).behind(self.errors_of(peer, shared))


@dataclass(frozen=True)
class Row:
    """A line of the table: a kernel's errors beside its peers'.

    Attributes:
        behind: by how many bits it is less exact than torch; None where torch has no result.
    """

    operation: str
    result: str
    dtype: str
    kernel: str
    behind: float | None
    errors: Mapping[str, Errors]

    @property
    def is_behind(self) -> bool:
        """Whether the kernel is less exact than torch, at the precision of the table."""
        return self.behind is not None and round(self.behind, 1) > 0

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with None in place of infinity."""
        errors = {
            name: {
                "largest": _finite(errors.largest),
                "mean": _finite(errors.mean),
                "bits_lost": _finite(errors.bits_lost),
                "elements": errors.elements,
                "at": errors.case,
            }
            for name, errors in self.errors.items()
        }
        behind = None if self.behind is None else _finite(self.behind)
        return {**asdict(replace(self, errors={})), "behind": behind, "errors": errors}

    @property
    def cells(self) -> dict[str, str]:
        """Return the texts of the row, by column: `FIRST`, then a column for each peer, then `LAST`."""
        return cells_of(self.as_dict())


FIRST, LAST = ("bits", "operation", "result", "dtype", "kernel", "largest / mean"), "largest at"


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a row that `Row.as_dict` has described; see `Row.cells`."""
    errors = dict(row["errors"])
    subject = errors.pop(row["kernel"])
    if row["behind"] is not None:
        behind = f"{round(row['behind'], 1) + 0.0:+.1f}"  # + 0.0 makes -0.0 a 0.0
    elif {*OF_TORCH} & {*errors}:
        behind = "+inf" if subject["largest"] is None else "-inf"
    else:
        behind = ""
    texts = (behind, row["operation"], row["result"], row["dtype"], row["kernel"], _format_errors(subject))
    return {
        **dict(zip(FIRST, texts)),
        **{name: _format_errors(peer) for name, peer in errors.items()},
        LAST: subject["at"],
    }


def table(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return the head and the lines of a table of cells."""
    heads = [*FIRST, *(name for name in PEERS if any(name in row for row in rows)), LAST]
    return [heads, *([row.get(head, "") for head in heads] for row in rows)]


def merged(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return runs of ``fourfold accuracy``, which their JSON describes: one for each device, version and seed."""
    by_facts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        facts = {key: value for key, value in run.items() if key not in ("rows", "not_measured")}
        whole = by_facts.setdefault((*facts.items(),), {**facts, "rows": [], "not_measured": Counter()})
        whole["rows"] += run["rows"]
        whole["not_measured"].update(run["not_measured"])
    for whole in by_facts.values():
        whole["rows"].sort(key=lambda row: -float(cells_of(row)["bits"] or -math.inf))
    return [*by_facts.values()]


def markdown(run: Mapping[str, Any]) -> str:
    """Return the table of a run of ``fourfold accuracy``, which its JSON describes, as a section in Markdown."""
    heads, *rows = table([cells_of(row) for row in run["rows"]])
    facts = ", ".join(f"{key} {value}" for key, value in run.items() if key not in ("device", "rows", "not_measured"))
    lines = ["", f"## Accuracy: {run['device']}", "", facts, "", EXPLANATION, ""]
    lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    lines += ["", "Not measured:", "", *(f"- {cell} ({count})" for cell, count in run["not_measured"].items())]
    return "\n".join(lines) + "\n"


def _format_errors(errors: Mapping[str, Any]) -> str:
    if not errors["elements"]:
        return "no element"
    return " / ".join(_format_ulps(errors[name]) for name in ("largest", "mean"))


def _format_ulps(ulps: float | None) -> str:
    """Format a number with two digits after the point, or a large one with two significant digits; None is infinite."""
    if ulps is None:
        return "inf"
    return f"{ulps:.2f}" if ulps < 1000 else f"{ulps:.1e}".replace("e+0", "e").replace("e+", "e")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class CaseErrors:
    """The message with the errors of all contenders in one case.

    Attributes:
        group: the operation and the dtype.
        result_of: the operation, or one of its outputs, as "topk.values".
        case: the name of the case.
        errors: by contender and result.
        refusals: the reasons why contenders have no errors here.
    """

    group: str
    result_of: str
    case: str
    errors: dict[str, dict[str, Errors]]
    refusals: list[str]

    @property
    def key(self) -> tuple[str, str, str]:
        """The case among all of a run."""
        return self.group, self.result_of, self.case


@dataclass(frozen=True)
class ContenderCall:
    """The message that the call of a contender begins.

    Attributes:
        group: the operation and the dtype.
        contender: its name among those of the group.
        name: its name in `Accuracy.not_measured`.
        case: the name of the case.
    """

    group: str
    contender: str
    name: str
    case: str


@dataclass(frozen=True)
class DeviceLost:
    """The message that the last call has left the GPU unusable for its process."""

    reason: str


@dataclass
class MeasuredCases:
    """The cases that earlier processes of a run have measured, and the contenders that ended a process, by group."""

    done: set[tuple[str, str, str]] = field(default_factory=set)
    ended: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class Accuracy:
    """The measured accuracy of a run.

    Attributes:
        results: by operation or output, result and dtype.
        not_measured: the reasons why a contender lacks results of some or all cases, and the number of these.
        measured: the cases, and the contenders that ended a process.
    """

    results: dict[tuple[str, str, str], AccuracyResult] = field(default_factory=dict)
    not_measured: Counter[str] = field(default_factory=Counter)
    measured: MeasuredCases = field(default_factory=MeasuredCases)

    @property
    def is_complete(self) -> bool:
        """Whether a kernel has results, and none has ended a process."""
        return bool(self.rows()) and not {contender for _, contender in self.measured.ended} & {*OWN}

    def add(self, found: CaseErrors) -> None:
        """Add the errors of a case."""
        self.measured.done.add(found.key)
        self.not_measured.update(found.refusals)
        dtype = found.group.split()[-1]
        for contender, errors in found.errors.items():
            for result, case_errors in errors.items():
                key = (found.result_of, result, dtype)
                of_result = self.results.setdefault(key, AccuracyResult(*key))
                of_result.errors.setdefault(contender, {})[found.case] = case_errors

    def rows(self) -> list[Row]:
        """Return a row for each kernel and result, those first that are farthest behind torch."""
        rows = [
            self._row(result, kernel) for result in self.results.values() for kernel in OWN if result.errors.get(kernel)
        ]
        return sorted(rows, key=lambda row: -math.inf if row.behind is None else -row.behind)

    @staticmethod
    def _row(result: AccuracyResult, kernel: str) -> Row:
        torches = [name for name in OF_TORCH if result.errors.get(name)]
        behind = max((result.behind(kernel, name) for name in torches), default=None)
        peers = [name for name in PEERS if result.errors.get(name)]
        errors = {name: result.errors_of(name) for name in (kernel, *peers)}
        return Row(result.operation, result.result, result.dtype, kernel, behind, errors)


def ulp(value: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the spacing of a dtype's numbers at exact values: from a power of 2 to the next one it is the same.

    Around 0 it is the smallest subnormal number.
    """
    spacing = np.ldexp(dtype.wide(2 * dtype.roundoff), np.frexp(value)[1] - 1)
    return np.where(value == 0, dtype.smallest_subnormal, np.maximum(spacing, dtype.smallest_subnormal))


def errors_in_ulp(actual: np.ndarray, expected: Bounded, dtype: DType) -> np.ndarray:
    """Return the errors of the elements whose exact value is known, as a flat array.

    Args:
        actual: a result, held in the wide type.
        expected: the oracle's result.
        dtype: the result's dtype.
    """
    value = expected.nearest(actual)
    with np.errstate(all="ignore"):
        finite = np.isfinite(value) & (abs(value) + expected.settled <= dtype.largest)
        error = np.where(actual == value, 0.0, abs(actual - value) / ulp(value, dtype))
    return np.where(np.isnan(error), np.inf, error)[finite]


def measure_in_children(start: Callable[[Connection, MeasuredCases], Child], say: Callable[[str], None]) -> Accuracy:
    """Measure in a child process; where a contender ends it, or leaves the GPU unusable, go on without it in another.

    Args:
        start: starts a child that sends what `measure` yields and sends.
        say: prints each operation and dtype when it begins.
    """
    accuracy, group = Accuracy(), ""
    while True:
        connection, other_end = Connection.pair()
        with connection:
            child = start(other_end, accuracy.measured)
            other_end.close()
            call: ContenderCall | None = None
            cause = ""
            with contextlib.suppress(Ended):
                while not cause:
                    message = connection.receive(CaseErrors | ContenderCall | DeviceLost)
                    if isinstance(message, CaseErrors):
                        accuracy.add(message)
                    elif isinstance(message, DeviceLost):
                        cause = message.reason
                    else:
                        call = message
                        if call.group != group:
                            say(group := call.group)
            death = child.kill() if cause else child.wait()
        if not cause and death is not None:
            if death.code == 0:
                return accuracy
            cause = f"the process has {death}"
        if call is None or (call.group, call.contender) in accuracy.measured.ended:
            accuracy.not_measured[cause] += 1
            return accuracy
        accuracy.not_measured[f"{call.name}: {cause}; not called after {call.case}"] += 1
        accuracy.measured.ended.add((call.group, call.contender))


def measure(
    selection: Selection,
    device: str,
    examples: int,
    seed: int,
    progress: MeasuredCases | None = None,
    send: Callable[[ContenderCall | DeviceLost], None] = lambda message: None,
) -> Iterator[CaseErrors]:
    """Measure the errors of the selected cells, of torch and of the installed peers; yield them by case.

    Args:
        selection: the cells of kernels; torch is measured in any case.
        device: "cpu" or "cuda".
        examples: generated cases of each operation and dtype, beside the named ones.
        seed: of the generated cases.
        progress: the cases and contenders to leave out.
        send: receives a message before each call of a contender, and one after a call that has lost the GPU.
    """
    progress = progress or MeasuredCases()
    for name, dtype in dict.fromkeys((cell.operation, cell.dtype) for cell in selection.cells):
        group = f"{name} {dtype}"
        backends = [cell.backend for cell in selection.cells if (cell.operation, cell.dtype) == (name, dtype)]
        missing: Counter[str] = Counter()
        contenders = _subjects(selection, name, dtype, backends, device, missing)
        subjects = {key: subject for key, subject in contenders.items() if (group, key) not in progress.ended}
        unsupported = CaseErrors(group, "", "", {}, [*missing.elements()])
        if unsupported.key not in progress.done:
            yield unsupported
        outputs: Sequence[str] = tuple(selection.operations[name].outputs) or ("",)
        for output in outputs:
            selected = {key: select_output(subject, output) if output else subject for key, subject in subjects.items()}
            result_of = f"{name}.{output}" if output else name
            for found, case in _cases(selected, group, result_of, examples, seed):
                if found.key not in progress.done:
                    _measure(selected, found, case, send)
                    yield found


def _subjects(
    selection: Selection, name: str, dtype: str, backends: Sequence[str], device: str, missing: Counter[str]
) -> dict[str, Subject]:
    """Return all contenders by name: torch first, then the kernels, then the peers."""
    subjects: dict[str, Subject] = {}
    for backend in dict.fromkeys(("torch", *backends)):
        cell = Cell(name, backend, dtype)
        if refusal := selection.unsupported(cell, device):
            missing[f"{cell}: unsupported: {refusal}"] += 1
        else:
            subjects[backend] = selection.subject(cell, device)
    for peer, make in peers(name).items():
        if peer == COMPILED or "torch" not in subjects:
            continue
        try:
            subjects[peer] = replace(subjects["torch"], backend=peer, implementation=make())
        except Exception as error:  # a library that is installed, and does not work here
            missing[f"{name}-{peer}: {reason(error)}"] += 1
    return subjects


def _cases(
    subjects: Mapping[str, Subject], group: str, result_of: str, examples: int, seed: int
) -> Iterator[tuple[CaseErrors, Case]]:
    """Yield the cases of one output, each with a message to fill."""
    if not subjects:
        return
    first = next(iter(subjects.values()))
    # The cases lie within a candidate's claims.
    dtype, operation = first.dtype, subjects.get(CANDIDATE, first).operation
    if not operation.result_dtype(dtype).roundoff:
        return  # integers are right or wrong
    cases = {case: make(dtype) for case, make in operation.examples.items()}
    cases |= generated_cases(operation.cases(dtype, ELEMENTS), examples, seed)
    for name, case in cases.items():
        yield CaseErrors(group, result_of, name, {}, []), case


def _measure(
    subjects: Mapping[str, Subject], found: CaseErrors, case: Case, send: Callable[[ContenderCall | DeviceLost], None]
) -> None:
    """Measure all contenders in a case."""
    first = next(iter(subjects.values()))
    expected = expected_results(first, case)
    for contender, subject in subjects.items():
        name = f"{found.result_of}-{contender}-{first.dtype}"
        send(ContenderCall(found.group, contender, name, found.case))
        try:
            found.errors[contender] = _errors(subject, case, found.case, expected)
        except Exception as error:
            if has_lost_device(error):
                send(DeviceLost(reason(error)))
            found.refusals.append(f"{name}: {reason(error)}")


def _errors(subject: Subject, case: Case, name: str, expected: Mapping[str, Bounded]) -> dict[str, Errors]:
    """Return the errors of one call, by the name of the result.

    Raises:
        ValueError: a result has another shape.
        Exception: what the implementation raises.
    """
    output, gradients, _ = subject.evaluate(case)
    errors: dict[str, Errors] = {}
    for result, tensor in named_results(output, gradients).items():
        exact = expected[result]
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != exact.shape:
            raise ValueError(f"{result} has another shape than {list(exact.shape)}")
        dtype = subject.dtype_of(result)
        errors[result] = Errors.of(errors_in_ulp(dtype.array(tensor), exact, dtype), name)
    return errors
