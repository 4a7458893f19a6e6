"""Cases of the sizes at which an implementation's Python code takes another branch than for small sizes.

Constants in the source give such sizes if the source spells them out. A compared value may be computed instead: an
entry of a table, the bytes of a row, a limit of the device. So a few small cases are run, and both sides of each
comparison are recorded. One side grows with a size, the other does not. From both follows the size at which they are
equal.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fourfold.candidates.integrity.escapes import convert_escapes
from fourfold.inputs.large_cases import LargeCases, Observed
from fourfold.instruments.size_comparisons import Compared
from fourfold.instruments.tampering import preserve_random_state
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached


def cases_past_comparisons(
    large: LargeCases, implementation: Callable[..., Any], device: str
) -> Iterator[tuple[str, Case]]:
    """Yield the cases, by name; none if the operation's sizes cannot be chosen, or if the code compares nothing.

    Args:
        large: the source of the small cases and of the comparisons.
        implementation: the function to call on the small cases.
        device: "cpu" or "cuda".
    """
    observations: list[Observed] = []
    for sizes, case in large.probes():
        arguments = {**case.tensors(large.dtype, device), **case.parameters}
        sides: dict[int, tuple[float, float]] = {}
        with (
            contextlib.suppress(Exception, NotReached),
            convert_escapes(),
            preserve_random_state(),
        ):  # the check reports a failure
            sides = _record_comparisons(large, implementation, arguments)
        if not sides and not observations:
            return
        observations.append((sizes, sides))
    if observations:
        yield from large.cases_past(observations)


def _record_comparisons(
    large: LargeCases, implementation: Callable[..., Any], arguments: dict[str, Any]
) -> dict[int, tuple[float, float]]:
    compare_elsewhere = getattr(implementation, "compare_sizes", None)
    if compare_elsewhere is not None:
        return compare_elsewhere(large.constants.comparisons, arguments)
    with Compared(large.constants.comparisons) as compared, contextlib.suppress(Exception):
        implementation(**arguments)
    return compared.sides
