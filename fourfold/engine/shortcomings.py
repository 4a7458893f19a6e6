"""Reasons why a run does not pass although no check failed, as the summary and the exit code report them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.operations.outcomes import Exclusion, Status

# The checks of each cell: the exclusion of each, or else its status.
Coverage = Mapping[Cell, Sequence[Exclusion | Status]]
# The checks that verified something.
_VERIFIED = (Status.PASSED, Status.FAILED)
# The exclusions of a whole cell.
_NEVER = (Exclusion.CELL, Exclusion.DTYPE)
# The report shows what a candidate refuses or does not claim, and what says nothing of it. That is no shortcoming.
_EXCUSED = (Exclusion.FORWARD_ONLY, Exclusion.UNCLAIMED, Exclusion.NO_COMPILER, Exclusion.NO_CASE, Exclusion.DTYPE)
_ACCEPTED = (*_VERIFIED, *_EXCUSED, Status.REFUSED)
# The number of names in a line.
SHOWN = 8


def shortcomings(
    cells: Coverage, operations: Sequence[str], backends: Sequence[str], candidates: Collection[str], forward_only: bool
) -> list[str]:
    """Return a line for each reason why a run without a failed check does not pass.

    What the options name must be verified: if a backend cannot run here, a plain run leaves it out, but a run that
    asks for it does not pass.

    Args:
        cells: the checks of each.
        operations: the names given by --op.
        backends: the names given by --backend.
        candidates: the operations named by --candidate.
        forward_only: whether --forward-only is given.
    """
    lines, reported = [], set[Cell]()
    options = [("--op", "operation", name) for name in operations]
    options += [("--backend", "backend", name) for name in backends]
    for option, kind, name in options:
        coverage = {cell: checks for cell, checks in cells.items() if getattr(cell, kind) == name}
        if coverage and all(
            _has_any(checks, _NEVER) and not _has_any(checks, _VERIFIED) for checks in coverage.values()
        ):
            lines.append(f"nothing of {option} {name} can be verified here: {_count_unsupported(coverage)}")
            reported |= coverage.keys()
    unreported = {cell: checks for cell, checks in cells.items() if cell not in reported}
    if unreported and (options or candidates) and not any(_has_any(checks, _VERIFIED) for checks in cells.values()):
        lines.append(f"nothing was verified: {_count_unsupported(unreported)}")
    elif candidates:
        lines += _unjustified_omissions(unreported, forward_only)
    return lines


def _unjustified_omissions(cells: Coverage, forward_only: bool) -> Iterator[str]:
    """Yield the checks that a run with candidates must not leave out; `forward_only` excuses those of gradients."""
    counts = {cell: count for cell, checks in cells.items() if (count := checks.count(Exclusion.FORWARD_ONLY))}
    if counts and not forward_only:
        operations = join_names(dict.fromkeys(cell.operation for cell in counts if cell.backend == CANDIDATE))
        yield (
            f"{_count(sum(counts.values()), 'check')} of gradients, which the candidate for {operations} does not"
            " have (--forward-only accepts a candidate without)"
        )
    accepted = (*_ACCEPTED, Exclusion.NO_GRADIENTS) if forward_only else _ACCEPTED
    by_cell = {
        cell: unjustified
        for cell, checks in cells.items()
        if (unjustified := [check for check in checks if check not in accepted])
        and not (forward_only and _has_any(checks, _NEVER))  # a kernel of a `.cu` file has the dtypes of its pointers
    }
    if by_cell:
        yield f"what is verified with a candidate must be in full: {_count_unsupported(by_cell)}"


def _has_any(checks: Sequence[Exclusion | Status], accepted: Collection[Exclusion | Status]) -> bool:
    return any(check in accepted for check in checks)


def _count_unsupported(cells: Coverage) -> str:
    unsupported = sum(check not in _VERIFIED for checks in cells.values() for check in checks)
    names = join_names(f"{cell.operation} {cell.backend} {cell.dtype}" for cell in cells)
    return f"{_count(unsupported, 'check')} of {_count(len(cells), 'cell')} unsupported ({names})"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def join_names(names: Iterable[str]) -> str:
    """Join names with commas, at most `SHOWN` of them."""
    names = list(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
