"""Cases of sizes at which an implementation's code in Python takes another way than for small ones.

Constants of the source say where that is, if they are there to be read. What is compared may be computed, too: an entry
of a table, the bytes of a row, a limit of the device. So a few small cases are run, and both sides of each comparison
are looked at. One grows with a size, the other does not, and from that follows the size at which they are equal.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fourfold.candidates.integrity.escapes import held
from fourfold.inputs.large_cases import LargeCases, Observed
from fourfold.instruments.size_comparisons import Compared
from fourfold.instruments.tampering import random_state_kept
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached


def cases_past_comparisons(
    large: LargeCases, implementation: Callable[..., Any], device: str
) -> Iterator[tuple[str, Case]]:
    """The cases, by name; none for an operation whose sizes cannot be chosen, or where nothing is compared.

    Args:
        large: says which small cases there are, and which comparisons.
        implementation: is called on the small cases.
        device: "cpu" or "cuda".
    """
    observed: list[Observed] = []
    for sizes, case in large.probes():
        arguments = {**case.tensors(large.dtype, device), **case.parameters}
        found: dict[int, tuple[float, float]] = {}
        with (
            contextlib.suppress(Exception, NotReached),
            held(),
            random_state_kept(),
        ):  # a failure is for the check to tell
            found = _compared(large, implementation, arguments)
        if not found and not observed:
            return
        observed.append((sizes, found))
    if observed:
        yield from large.past(observed)


def _compared(
    large: LargeCases, implementation: Callable[..., Any], arguments: dict[str, Any]
) -> dict[int, tuple[float, float]]:
    of_another_process = getattr(implementation, "compared", None)
    if of_another_process is not None:
        return of_another_process(large.constants.comparisons, arguments)
    with Compared(large.constants.comparisons) as compared, contextlib.suppress(Exception):
        implementation(**arguments)
    return compared.found
