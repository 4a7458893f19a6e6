"""Cases that were not reached: for lack of memory or time, or of a feature of the interpreter or the emulator.

Such a case is no evidence about the implementation. It is neither a failure nor a refusal, and the verdict names it.
"""

import traceback
from dataclasses import dataclass, field
from pathlib import Path

from fourfold.operations.case import Case
from fourfold.operations.outcomes import Status

# The files that may raise `NotReached`. Code in any other file that raises it tries to skip a case.
_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = {
    str(_PACKAGE / source)
    for source in ("instruments/costs.py", "instruments/sparse_memory.py", "backends/triton/compilation.py")
}


class NotReached(BaseException):
    """An exception for a call that cannot be made here. An implementation's ``except Exception`` does not catch it.

    Attributes:
        lasts: whether other cases of the search would also wait in vain.
    """

    status, exclusion = Status.UNREACHED, None

    def __init__(self, reason: str, lasts: bool = False) -> None:
        super().__init__(reason)
        self.lasts = lasts

    def __str__(self) -> str:
        return f"not reached: {super().__str__()}"

    @property
    def is_of_this_package(self) -> bool:
        """Return whether this package raised the exception, and not an implementation."""
        *_, (frame, _) = traceback.walk_tb(self.__traceback__)
        return frame.f_code.co_filename in _SOURCES


@dataclass
class Unreached:
    """The unreached cases of a search: for each reason, the number of cases and the smallest case."""

    _by_reason: dict[str, tuple[int, Case]] = field(default_factory=dict)

    def add(self, reason: str, case: Case) -> None:
        """Count a case."""
        count, smallest = self._by_reason.get(reason, (0, case))
        self._by_reason[reason] = count + 1, min(smallest, case, key=lambda c: c.elements)

    @property
    def total(self) -> int:
        """Return the number of cases."""
        return sum(count for count, _ in self._by_reason.values())

    def lines(self) -> list[str]:
        """Return a line for each reason, with the sizes of the smallest case."""
        texts = []
        for reason, (count, smallest) in self._by_reason.items():
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in smallest.inputs.items())
            texts.append(f"{reason}: {count} cases, the smallest with {sizes}")
        return texts
