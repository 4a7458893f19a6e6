"""A memory arena: every tensor of a call lies between redzones, and what it does not hold is poison.

A kernel that writes outside of its tensors leaves a mark in a redzone. One that reads outside of them, or that leaves
an element of its result unwritten, gives another result under another poison: a call is made twice, under each of
`POISONS`. It takes no GPU and no sanitizer, and holds for any implementation, on any device.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from properties.dispatch import UNWRITTEN, WRITTEN, InsideOperators
from properties.dtypes import differing

# More than a block of any kernel writes at once, and a multiple of every alignment that an allocator gives.
REDZONE_BYTES = 1 << 14
# The first spoils what is computed from it; the second does not look strange, and so is not dropped as a NaN may be.
POISONS = (float("nan"), 1.0)


def poison_of(poison: float, dtype: torch.dtype) -> float | int:
    """The poison for a type; an integer that is read astray must not lead far, as an offset does."""
    return poison if dtype.is_floating_point else int(poison == poison)


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor's storage with its redzones, and what it held at first."""

    name: str
    buffer: torch.Tensor
    given: torch.Tensor | None  # a copy of the buffer of an input, all of which must stay as it was

    def places(self, poison: float) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What must not have changed: where it is, what it is now and what it was."""
        zone = REDZONE_BYTES // self.buffer.element_size()
        if self.given is None:
            untouched = torch.full_like(self.buffer[:zone], poison_of(poison, self.buffer.dtype))
            yield f"before {self.name}", self.buffer[:zone], untouched
            yield f"past the end of {self.name}", self.buffer[-zone:], untouched
        else:
            places = {"before": slice(zone), "past the end of": slice(-zone, None), "inside": slice(zone, -zone)}
            for where, place in places.items():
                yield f"{where} {self.name}", self.buffer[place], self.given[place]


class Arena(InsideOperators):
    """Within it, tensors that torch allocates lie between redzones, and hold poison where they are not written at once.

    Args:
        poison: one of `POISONS`.
    """

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison
        self._unseen = False
        self._held: list[_Held] = []

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an input, of the same strides, with poison in its gaps and around it. It must stay as it is."""
        span = tensor.untyped_storage().nbytes() // tensor.element_size()
        with self._allocating_for_itself():
            buffer, placed = self._between(tensor, span, tensor.storage_offset())
            # What stride 0 repeats is written once.
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
            placed[once].copy_(tensor[once])
            self._held.append(_Held(f"its input {name}", buffer, buffer.clone()))
        return placed

    def trespasses(self) -> Iterator[str]:
        """What was written that should not have been; to be asked when the calls are done."""
        with self._allocating_for_itself():
            places = [place for held in self._held for place in held.places(self.poison)]
            changed = differing((now, before) for _, now, before in places)
        for (where, _, _), count in zip(places, changed):
            if count:
                yield f"wrote {count} elements {where}"

    @contextlib.contextmanager
    def _allocating_for_itself(self) -> Iterator[None]:
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def _between(self, tensor: torch.Tensor, span: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        zone = REDZONE_BYTES // tensor.element_size()
        poison = poison_of(self.poison, tensor.dtype)
        buffer = torch.full((span + 2 * zone,), poison, dtype=tensor.dtype, device=tensor.device)
        return buffer, buffer.as_strided(tensor.shape, tensor.stride(), zone + offset)

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Put what torch allocates between redzones."""
        result = operator(*args, **kwargs)
        written = operator.overloadpacket in WRITTEN
        if self._unseen or not (written or operator.overloadpacket in UNWRITTEN):
            return result
        if result.device.type not in ("cpu", "cuda") or not result.numel():
            return result
        span = 1 + sum((size - 1) * stride for size, stride in zip(result.shape, result.stride()))
        buffer, placed = self._between(result, span, 0)
        self._held.append(_Held(f"a tensor {list(result.shape)} that it allocated", buffer, None))
        return placed.copy_(result) if written else placed
