"""A memory arena: it places every tensor of a call between redzones, and fills unused memory with poison.

A kernel that writes outside of its tensors changes a redzone. A kernel that reads outside of them, or leaves an
element of its result unwritten, gives another result under another poison. So each call is made twice, once for each
of `POISONS`. The arena needs no GPU and no sanitizer, and works for any implementation on any device.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fourfold.compat import torch_internals
from fourfold.instruments.operator_watch import UNWRITTEN, WRITTEN, InsideOperators
from fourfold.numerics.dtypes import differing

# More than one block of any kernel writes at once, and a multiple of every alignment that an allocator gives.
REDZONE_BYTES = 1 << 14
# NaN spoils every number computed from it. A kernel may drop NaN, as a maximum does, but not an ordinary 1.
POISONS = (float("nan"), 1.0)


def poison_of(poison: float, dtype: torch.dtype) -> float | int:
    """Return the poison for a dtype: 0 or 1 for integers, as kernels may use them as offsets, which must stay near."""
    return poison if dtype.is_floating_point else int(poison == poison)


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A tensor's storage with its redzones, and its first contents."""

    name: str
    buffer: torch.Tensor
    original: torch.Tensor | None  # for an input: a copy of the buffer, which must not change

    def places(self, poison: float) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each region that must not change: its description, its contents now, and its contents before."""
        zone = REDZONE_BYTES // self.buffer.element_size()
        if self.original is None:
            untouched = torch.full_like(self.buffer[:zone], poison_of(poison, self.buffer.dtype))
            yield f"before {self.name}", self.buffer[:zone], untouched
            yield f"past the end of {self.name}", self.buffer[-zone:], untouched
        else:
            places = {"before": slice(zone), "past the end of": slice(-zone, None), "inside": slice(zone, -zone)}
            for region, place in places.items():
                yield f"{region} {self.name}", self.buffer[place], self.original[place]


class Arena(InsideOperators):
    """A context in which torch allocates tensors between redzones, and uninitialised ones hold poison.

    Args:
        poison: one of `POISONS`.
    """

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison
        self._unseen = False
        self._guarded: list[_Guarded] = []
        self.seen_elsewhere: list[str] = []  # trespasses of a call in another process on its own allocations

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy an input with its strides, and with poison in its gaps and around it. The call must not change it."""
        span = tensor.untyped_storage().nbytes() // tensor.element_size()
        with self._allocating_for_itself():
            buffer, placed = self._add_redzones(tensor, span, tensor.storage_offset())
            # Along an axis of stride 0 only the first element is written.
            writable = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
            placed[writable].copy_(tensor[writable])
            self._guarded.append(_Guarded(f"its input {name}", buffer, buffer.clone()))
        return placed

    def trespasses(self) -> Iterator[str]:
        """Yield a description of each write outside of the results, when the calls are done."""
        with self._allocating_for_itself():
            places = [place for area in self._guarded for place in area.places(self.poison)]
            counts = differing((current, former) for _, current, former in places)
        for (description, _, _), count in zip(places, counts):
            if count:
                yield f"wrote {count} elements {description}"
        yield from self.seen_elsewhere

    @contextlib.contextmanager
    def _allocating_for_itself(self) -> Iterator[None]:
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def _add_redzones(self, tensor: torch.Tensor, span: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        zone = REDZONE_BYTES // tensor.element_size()
        poison = poison_of(self.poison, tensor.dtype)
        buffer = torch.full((span + 2 * zone,), poison, dtype=tensor.dtype, device=tensor.device)
        return buffer, buffer.as_strided(tensor.shape, tensor.stride(), zone + offset)

    def aten(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Move each tensor that torch allocates between redzones."""
        result = operator(*args, **kwargs)
        name = torch_internals.overload_packet(operator)
        is_written = name in WRITTEN
        if self._unseen or not (is_written or name in UNWRITTEN):
            return result
        if result.device.type not in ("cpu", "cuda") or not result.numel():
            return result
        span = 1 + sum((size - 1) * stride for size, stride in zip(result.shape, result.stride()))
        buffer, placed = self._add_redzones(result, span, 0)
        self._guarded.append(_Guarded(f"a tensor {list(result.shape)} that it allocated", buffer, None))
        return placed.copy_(result) if is_written else placed
