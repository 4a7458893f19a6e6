"""Accuracy: the rounding errors of kernels beside those of torch and of other libraries, in ulp, on the same cases.

    fourfold accuracy --op softmax --device cuda

The verification says whether each error is within its bound. This says how large the errors are: a kernel may be right
and still less exact than torch's.

An error is the distance from the oracle's result, which is computed in a wider type. Its unit is the ulp: the spacing
of the numbers of the result's dtype at the exact value. Rounding alone costs up to 0.5. Elements whose exact value is
not finite or past the largest number, and elements without a finite bound, are not counted. At ties the derivative
counts that the oracle documents, which is torch's.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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


@dataclass
class Accuracy:
    """The measured accuracy of a run.

    Attributes:
        results: of each output and gradient.
        not_measured: the reasons why a contender lacks results of some or all cases, and the number of these.
        device_error: the reason why the measurement stopped early: a kernel has left the GPU unusable.
    """

    results: list[AccuracyResult] = field(default_factory=list)
    not_measured: Counter[str] = field(default_factory=Counter)
    device_error: str = ""

    def rows(self) -> list[Row]:
        """Return a row for each kernel and result, those first that are farthest behind torch."""
        rows = [self._row(result, kernel) for result in self.results for kernel in OWN if result.errors.get(kernel)]
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


def measure(
    selection: Selection, device: str, examples: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Accuracy:
    """Measure the errors of the selected cells, of torch and of the installed peers.

    Args:
        selection: the cells of kernels; torch is measured in any case.
        device: "cpu" or "cuda".
        examples: generated cases of each operation and dtype, beside the named ones.
        seed: of the generated cases.
        say: prints each operation and dtype when it begins.
    """
    accuracy = Accuracy()
    for name, dtype in dict.fromkeys((cell.operation, cell.dtype) for cell in selection.cells):
        say(f"{name} {dtype}")
        cells = [cell for cell in selection.cells if (cell.operation, cell.dtype) == (name, dtype)]
        subjects = _subjects(selection, name, dtype, [cell.backend for cell in cells], device, accuracy.not_measured)
        outputs: Sequence[str] = tuple(selection.operations[name].outputs) or ("",)
        for output in outputs:
            selected = {key: select_output(subject, output) if output else subject for key, subject in subjects.items()}
            _measure(selected, f"{name}.{output}" if output else name, examples, seed, accuracy)
            if accuracy.device_error:
                return accuracy
    return accuracy


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


def _measure(subjects: Mapping[str, Subject], name: str, examples: int, seed: int, accuracy: Accuracy) -> None:
    """Measure all contenders on the cases of one output."""
    if not subjects:
        return
    first = next(iter(subjects.values()))
    # The cases lie within a candidate's claims.
    dtype, operation = first.dtype, subjects.get(CANDIDATE, first).operation
    if not operation.result_dtype(dtype).roundoff:
        return  # integers are right or wrong
    cases = {case: make(dtype) for case, make in operation.examples.items()}
    cases |= generated_cases(operation.cases(dtype, ELEMENTS), examples, seed)
    results: dict[str, AccuracyResult] = {}
    for case_name, case in cases.items():
        expected = expected_results(first, case)
        for contender, subject in subjects.items():
            try:
                errors = _errors(subject, case, case_name, expected)
            except Exception as error:
                line = f"{name}-{contender}-{dtype}: {reason(error)}"
                if has_lost_device(error):
                    accuracy.device_error = line
                    accuracy.results += results.values()
                    return
                accuracy.not_measured[line] += 1
                continue
            for result, case_errors in errors.items():
                of_result = results.setdefault(result, AccuracyResult(name, result, dtype.name))
                of_result.errors.setdefault(contender, {})[case_name] = case_errors
    accuracy.results += results.values()


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
