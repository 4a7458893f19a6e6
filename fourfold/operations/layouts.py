"""Memory layouts: arrangements of the same values that expose a kernel which assumes one of them."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import torch

from fourfold.numerics.dtypes import bits

# Poison fills the gaps in a storage between the tensor's elements. A kernel that reads a gap returns NaN. The integer
# is small, because a kernel may use it as an offset, and a large offset would crash the process.
POISON = float("nan")
INTEGER_POISON = -1
Layout = Callable[[torch.Tensor], torch.Tensor]


def _holder(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    poison = POISON if like.dtype.is_floating_point else INTEGER_POISON
    return torch.full(shape, poison, dtype=like.dtype, device=like.device)


def contiguous(values: torch.Tensor) -> torch.Tensor:
    """Return the values in row-major order, aligned by the allocator."""
    return values.clone(memory_format=torch.contiguous_format)


def misaligned(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that starts one element into the storage, so that 16-byte loads are misaligned."""
    holder = _holder(values, (values.numel() + 2,))
    view = holder[1 : 1 + values.numel()].view(values.shape)
    return view.copy_(values)


def transposed(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return a tensor with its first two axes swapped in memory. A tensor of fewer axes keeps its order."""
    return inner(values.transpose(0, 1)).transpose(0, 1) if values.ndim > 1 else inner(values)


def axes_reversed(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return a tensor with its axes in reverse order in memory: for boxes, all x1 first, then all y1, and so on."""
    order = tuple(reversed(range(values.ndim)))
    return inner(values.permute(order)).permute(order)


def sliced_rows(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return every second row of a longer tensor, from its second row on, with gaps of poison between the rows."""
    if values.ndim < 1:
        return inner(values)
    view = inner(_holder(values, (2 * values.shape[0] + 1, *values.shape[1:])))[1::2]
    return view.copy_(values)


def sliced_columns(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return every third column of a wider tensor, with gaps of poison between neighbouring elements."""
    if values.ndim < 1:
        return inner(values)
    view = inner(_holder(values, (*values.shape[:-1], 3 * values.shape[-1])))[..., ::3]
    return view.copy_(values)


def cut_from_wider(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return all but the last column of a tensor one column wider, so that most rows are not aligned to 16 bytes."""
    if values.ndim < 1:
        return inner(values)
    view = inner(_holder(values, (*values.shape[:-1], values.shape[-1] + 1)))[..., : values.shape[-1]]
    return view.copy_(values)


def expanded(values: torch.Tensor, inner: Layout = contiguous) -> torch.Tensor:
    """Return a tensor with stride 0 along each axis whose slices are all equal bit for bit."""
    compact = values
    for axis in range(values.ndim):
        first = compact.narrow(axis, 0, min(1, compact.shape[axis]))
        if compact.shape[axis] > 1 and torch.equal(bits(first.expand_as(compact)), bits(compact)):
            compact = first
    return inner(compact).expand_as(values)


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


def _compose(outer: Callable[..., torch.Tensor], inner: Layout) -> tuple[str, Layout]:
    return f"{inner.__name__}{AND}{outer.__name__}", functools.partial(outer, inner=inner)


# Two layouts at once: a view of one kind into memory of another layout.
COMPOSED: Mapping[str, Layout] = MappingProxyType(
    dict(
        (
            _compose(transposed, misaligned),
            _compose(expanded, sliced_columns),
            _compose(axes_reversed, sliced_rows),
            _compose(sliced_columns, misaligned),
            _compose(expanded, misaligned),
            _compose(cut_from_wider, transposed),
            _compose(transposed, cut_from_wider),
            _compose(expanded, transposed),
            _compose(axes_reversed, misaligned),
            _compose(sliced_rows, transposed),
        )
    )
)


def layout(name: str) -> Layout:
    """Return the layout of a name, from `LAYOUTS` or `COMPOSED`."""
    return LAYOUTS[name] if name in LAYOUTS else COMPOSED[name]


def closest(tensor: torch.Tensor) -> str:
    """Return the name of the layout that is most like a tensor's, by its order of axes, gaps and alignment."""
    if any(stride == 0 for size, stride in zip(tensor.shape, tensor.stride()) if size > 1):
        return "expanded"
    shape = torch.Size(min(size, 3) for size in tensor.shape)
    probe = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)

    def differences(name: str) -> list[bool]:
        return [actual != expected for actual, expected in zip(_traits(tensor), _traits(layout(name)(probe)))]

    return min((*LAYOUTS, *COMPOSED), key=differences)


def _traits(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the order of a tensor's axes in memory, and whether it is contiguous, has gaps, is aligned to 16 bytes."""
    long = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    order = sorted(long, key=lambda axis: -tensor.stride(axis))
    dense = math.prod(tensor.shape) == 1 + sum((tensor.shape[axis] - 1) * tensor.stride(axis) for axis in long)
    unit = bool(order) and tensor.stride(order[-1]) == 1
    return order, tensor.is_contiguous(), unit, dense, tensor.data_ptr() % 16 == 0


def parts(name: str) -> list[str]:
    """Return the names of the layouts that compose a layout; for one of `LAYOUTS`, its own name."""
    return name.split(AND)


def writable(layouts: Mapping[str, str], targets: Collection[str]) -> dict[str, str]:
    """Return the layouts of tensors without those in which a written tensor has several elements at one place."""
    return {
        name: layout_name
        for name, layout_name in layouts.items()
        if name.partition("[")[0] not in targets or "expanded" not in parts(layout_name)
    }
