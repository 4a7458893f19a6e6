"""Memory layouts: ways to arrange the same values, which expose a kernel that assumes one of them."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from fourfold.numerics.dtypes import bits

# Poison fills the parts of a storage that are no elements of the tensor. A kernel that reads a gap returns NaN. The
# integer is small: a kernel may use it as an offset, and a far one would end the process.
POISON = float("nan")
INTEGER_POISON = -1
Layout = Callable[[torch.Tensor], torch.Tensor]


def _holder(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    poison = POISON if like.dtype.is_floating_point else INTEGER_POISON
    return torch.full(shape, poison, dtype=like.dtype, device=like.device)


def contiguous(values: torch.Tensor) -> torch.Tensor:
    """Elements in row-major order, aligned by the allocator."""
    return values.clone(memory_format=torch.contiguous_format)


def misaligned(values: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into the storage, so that 16-byte loads are misaligned."""
    holder = _holder(values, (values.numel() + 2,))
    view = holder[1 : 1 + values.numel()].view(values.shape)
    return view.copy_(values)


def transposed(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """The first two axes swapped in memory. A tensor of fewer axes stays as it is."""
    return held(values.transpose(0, 1)).transpose(0, 1) if values.ndim > 1 else held(values)


def axes_reversed(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """All axes in reverse order in memory: for boxes, all x1 first, then all y1, and so on."""
    order = tuple(reversed(range(values.ndim)))
    return held(values.permute(order)).permute(order)


def sliced_rows(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """Every second row of a longer tensor, starting with its second, with gaps of poison between the rows."""
    if values.ndim < 1:
        return held(values)
    view = held(_holder(values, (2 * values.shape[0] + 1, *values.shape[1:])))[1::2]
    return view.copy_(values)


def sliced_columns(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """Every third column of a wider tensor, with gaps of poison between neighbouring elements."""
    if values.ndim < 1:
        return held(values)
    view = held(_holder(values, (*values.shape[:-1], 3 * values.shape[-1])))[..., ::3]
    return view.copy_(values)


def cut_from_wider(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """All columns but the last of a tensor one column wider, so that most rows are not aligned to 16 bytes."""
    if values.ndim < 1:
        return held(values)
    view = held(_holder(values, (*values.shape[:-1], values.shape[-1] + 1)))[..., : values.shape[-1]]
    return view.copy_(values)


def expanded(values: torch.Tensor, held: Layout = contiguous) -> torch.Tensor:
    """Stride 0 along each axis whose slices are all equal bit for bit."""
    kept = values
    for axis in range(values.ndim):
        first = kept.narrow(axis, 0, min(1, kept.shape[axis]))
        if kept.shape[axis] > 1 and torch.equal(bits(first.expand_as(kept)), bits(kept)):
            kept = first
    return held(kept).expand_as(values)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.__name__: layout
        for layout in (
            contiguous,
            misaligned,
            transposed,
            axes_reversed,
            sliced_rows,
            sliced_columns,
            cut_from_wider,
            expanded,
        )
    }
)
AND = "_and_"


def _composed(outer: Callable[..., torch.Tensor], held: Layout) -> tuple[str, Layout]:
    return f"{held.__name__}{AND}{outer.__name__}", functools.partial(outer, held=held)


# Two layouts at once: a view of one kind into memory that is arranged in another way.
COMPOSED: Mapping[str, Layout] = MappingProxyType(
    dict(
        (
            _composed(transposed, misaligned),
            _composed(expanded, sliced_columns),
            _composed(axes_reversed, sliced_rows),
            _composed(sliced_columns, misaligned),
            _composed(expanded, misaligned),
            _composed(cut_from_wider, transposed),
            _composed(transposed, cut_from_wider),
            _composed(expanded, transposed),
            _composed(axes_reversed, misaligned),
            _composed(sliced_rows, transposed),
        )
    )
)


def layout(name: str) -> Layout:
    """One of `LAYOUTS` or `COMPOSED`."""
    return LAYOUTS[name] if name in LAYOUTS else COMPOSED[name]


def parts(name: str) -> list[str]:
    """The layouts that one is composed of: itself, where it is one of `LAYOUTS`."""
    return name.split(AND)
