"""The floating-point types under test: how they round, and the arithmetic in which their kernels compute."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from properties.running_error import Arithmetic


@dataclass(frozen=True)
class DType:
    """A tensor type, the arithmetic its kernels compute in, and the wider type of its reference."""

    name: str
    numpy: np.dtype
    torch: torch.dtype
    wide: type  # of the oracle: at least twice as exact as the arithmetic, or the widest there is
    roundoff: float
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    arithmetic: Arithmetic

    def __str__(self) -> str:
        return self.name

    @property
    def overflow(self) -> Any:
        """The least number that rounds to infinity: half a unit in the last place past the largest."""
        half_a_unit = np.ldexp(self.wide(self.roundoff), np.frexp(self.largest)[1] - 1)
        return self.wide(self.largest) + half_a_unit

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """A tensor's values, exactly, in the wide type."""
        (tensor,) = on_host(tensor)
        tensor = tensor.contiguous()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return tensor.numpy().astype(self.wide)

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The same of several by name, for which a GPU is waited for once."""
        return dict(zip(tensors, map(self.array, on_host(*tensors.values()))))

    def tensor(self, array: np.ndarray, device: str) -> torch.Tensor:
        """A contiguous tensor of an array that already has this type, or of integers as they are."""
        array = np.array(array, order="C")
        # The array may go before the device has it: what is not pinned is copied once more before `to` returns.
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device, non_blocking=True)
        return torch.from_numpy(array).to(device, non_blocking=True)

    def spacing_roundoff(self, magnitude: np.ndarray) -> np.ndarray:
        """Largest error of rounding a number of this magnitude to the type."""
        return np.maximum(magnitude * self.roundoff, self.smallest_subnormal / 2)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bit patterns: NaN equals itself, and -0 differs from 0."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


# A process that waits for a GPU which others use too waits for its turn, and so for longer than most calls take: what
# is wanted of it is asked for at once.
def on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors on the CPU; a GPU is waited for once."""
    copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def differing(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Of each pair of tensors, how many elements differ in any bit: all, if the shapes do. A GPU is waited for once."""
    counts = [
        torch.count_nonzero(bits(one) != bits(other))
        if one.shape == other.shape
        else torch.tensor(max(one.numel(), other.numel(), 1), device=one.device)
        for one, other in pairs
    ]
    return torch.stack(counts).tolist() if counts else []


def _dtype(name: str, numpy_type: type, wide: type, compute_type: type) -> DType:
    info, compute = ml_dtypes.finfo(numpy_type), np.finfo(compute_type)
    storage = Arithmetic(float(info.eps) / 2, float(info.max), float(info.smallest_normal))
    arithmetic = Arithmetic(
        float(compute.eps) / 2,
        float(compute.max),
        float(compute.tiny),
        storage if numpy_type is not compute_type else None,
    )
    return DType(
        name=name,
        numpy=np.dtype(numpy_type),
        torch=getattr(torch, name),
        wide=wide,
        roundoff=float(info.eps) / 2,
        largest=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        arithmetic=arithmetic,
    )


DTYPES = {
    dtype.name: dtype
    for dtype in (
        _dtype("float16", np.float16, np.float64, np.float32),
        _dtype("bfloat16", ml_dtypes.bfloat16, np.float64, np.float32),
        _dtype("float32", np.float32, np.float64, np.float32),
        _dtype("float64", np.float64, np.longdouble, np.float64),
    )
}
