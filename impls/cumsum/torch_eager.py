"""cumsum in torch operations: the baseline."""

import torch

from fourfold.backends.signature import claims, flag, offsets, signature, tensor


# On a GPU torch.cumsum adds the parts of one long row in an order that varies: see its documentation.
@claims(deterministic=False)
@signature(
    x=tensor("... n"),
    offsets=offsets("segments", total="n", dtype=("int64", "int32"), optional=True),
    exclusive=flag(),
    reverse=flag(),
)
def cumsum(
    x: torch.Tensor, offsets: torch.Tensor | None = None, exclusive: bool = False, reverse: bool = False
) -> torch.Tensor:
    """Return the sums along the last axis, of all elements up to each one, in every segment by itself.

    Args:
        x: ``[..., n]``; float16, bfloat16, float32 or float64, any strides.
        offsets: int32 or int64 ``[segments + 1]``, rising from 0 to n, on the device of x: in each row the segment i
            begins at ``offsets[i]`` and ends before ``offsets[i + 1]``. Segments may be empty. By default all is one.
        exclusive: whether a sum leaves out the element itself; the first one is 0 then.
        reverse: whether sums begin at the end of the segment.

    Returns:
        ``[..., n]`` of the same dtype, rounded once; half types are summed in float32. Nothing is subtracted: an
        infinity or NaN reaches no other segment, and no sum before it. It is NaN for invalid offsets on a GPU.

    Raises:
        TypeError: x is no floating-point tensor, offsets no int32 or int64 one, or exclusive or reverse no bool.
        ValueError: a shape is wrong, devices differ, or offsets on the CPU do not rise from 0 to n.

    Source: G. E. Blelloch, Prefix Sums and Their Applications, 1990.
    """
    n, wide = x.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))
    place = torch.arange(n, device=x.device)
    begins = torch.zeros_like(place)
    if offsets is not None:
        at = offsets.to(place.dtype).contiguous()
        last = at.shape[0] - 2
        begins = at[(torch.searchsorted(at, place, right=True) - 1).clamp(0, max(last, 0))]
        fits = (at[0] == 0) & (at[-1] == n) & (at.diff() >= 0).all()
        if reverse:
            ends = at[torch.searchsorted(at, place, right=True).clamp(0, last + 1)]
            begins = (n - ends).flip(0)
    sums = wide.flip(-1) if reverse else wide
    if exclusive:
        sums = torch.where(place > begins, sums.roll(1, -1), 0)
    sums = sums.cumsum(-1) if offsets is None else _sums_of_segments(sums, place, begins)
    sums = (sums.flip(-1) if reverse else sums).to(x.dtype)
    return sums if offsets is None else sums.masked_fill(~fits, torch.nan)


def _sums_of_segments(sums: torch.Tensor, place: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Sum by doubling: add to each sum of 1, 2, 4 and so on elements the one before it, within the segment."""
    step = 1
    while step < len(place):
        before = torch.nn.functional.pad(sums[..., :-step], (step, 0))
        sums = torch.where(place - step >= begins, sums + before, sums)
        step *= 2
    return sums
