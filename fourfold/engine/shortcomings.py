"""Reasons why a run does not pass although no check failed, as the summary and the exit code report them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.operations.outcomes import FORWARD_ONLY, NO_GRADIENTS, REFUSED_ALL, UNCLAIMED

# The report shows what a candidate refuses or does not claim, but that is no shortcoming.
_ACCEPTED = (FORWARD_ONLY, REFUSED_ALL, UNCLAIMED)
# The number of names in a line.
SHOWN = 8


@dataclass
class Coverage:
    """The checks of a cell that ran, and the reasons why others did not.

    Attributes:
        verified: the number that passed or failed.
        unsupported: the reason for each of the others.
        never: whether the whole cell cannot run here.
    """

    verified: int = 0
    unsupported: list[str] = field(default_factory=list)
    never: bool = False


def shortcomings(
    cells: Mapping[Cell, Coverage],
    operations: Sequence[str],
    backends: Sequence[str],
    candidates: Collection[str],
    forward_only: bool,
) -> Iterator[str]:
    """Yield a line for each reason why a run without a failed check does not pass.

    What the options name must be verified: if a backend cannot run here, a plain run leaves it out, but a run that
    asks for it does not pass.

    Args:
        cells: the coverage of each.
        operations: the names given by --op.
        backends: the names given by --backend.
        candidates: the operations named by --candidate.
        forward_only: whether --forward-only is given.
    """
    lines, told = [], set[Cell]()
    named = [("--op", "operation", name) for name in operations] + [("--backend", "backend", name) for name in backends]
    for option, kind, name in named:
        of = {cell: found for cell, found in cells.items() if getattr(cell, kind) == name}
        if of and all(found.never and not found.verified for found in of.values()):
            lines.append(f"nothing of {option} {name} can be verified here: {_spelled(of)}")
            told |= of.keys()
    rest = {cell: found for cell, found in cells.items() if cell not in told}
    if rest and (named or candidates) and not any(found.verified for found in cells.values()):
        lines.append(f"nothing was verified: {_spelled(rest)}")
    elif candidates:
        lines += _left_out(rest, forward_only)
    return (f"not passed: {line}" for line in lines)


def _left_out(cells: Mapping[Cell, Coverage], forward_only: bool) -> Iterator[str]:
    """Yield the checks that a run with candidates must not leave out; `forward_only` excuses those of gradients."""
    without = {cell: found for cell, found in cells.items() if FORWARD_ONLY in found.unsupported}
    if without and not forward_only:
        count = sum(found.unsupported.count(FORWARD_ONLY) for found in without.values())
        operations = listed(dict.fromkeys(cell.operation for cell in without if cell.backend == CANDIDATE))
        yield (
            f"{_counted(count, 'check')} of gradients, which the candidate for {operations} does not have"
            " (--forward-only accepts a candidate without)"
        )
    others = {
        cell: Coverage(unsupported=rest)
        for cell, found in cells.items()
        if (rest := [reason for reason in found.unsupported if not _is_accepted(reason, forward_only)])
        and not (forward_only and found.never)  # a kernel of a `.cu` file has the dtypes of its pointers
    }
    if others:
        yield f"what is verified with a candidate must be in full: {_spelled(others)}"


def _is_accepted(reason: str, forward_only: bool) -> bool:
    return reason.startswith(_ACCEPTED) or (forward_only and reason.endswith(NO_GRADIENTS))


def _spelled(cells: Mapping[Cell, Coverage]) -> str:
    checks = sum(len(found.unsupported) for found in cells.values())
    names = listed(f"{cell.operation} {cell.backend} {cell.dtype}" for cell in cells)
    return f"{_counted(checks, 'check')} of {_counted(len(cells), 'cell')} unsupported ({names})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def listed(names: Iterable[str]) -> str:
    """Join names with commas, at most `SHOWN` of them."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
