"""The floating-point dtypes under test: how they round, and the arithmetic that their kernels compute in."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import ml_dtypes
import numpy as np
import torch

from fourfold.numerics.bounded import Arithmetic, Contract
from fourfold.numerics.steps import along_axes  # noqa: F401 - registers the rules

# One or several dtypes, each by its name or as torch's object.
Dtypes: TypeAlias = str | torch.dtype | Collection[str | torch.dtype]


@dataclass(frozen=True)
class DType:
    """A tensor dtype, the arithmetic that its kernels compute in, and the wider type of its reference."""

    name: str
    numpy: np.dtype
    torch: torch.dtype
    wide: type  # the oracle's: at least twice the digits of the arithmetic, or the widest type
    roundoff: float
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    arithmetic: Arithmetic

    def __str__(self) -> str:
        return self.name

    def with_contract(self, contract: Contract) -> Self:
        """Return the same dtype for kernels with another contract."""
        return replace(self, arithmetic=replace(self.arithmetic, contract=contract))

    @cached_property
    def with_rounded_steps(self) -> Self:
        """The same dtype with an arithmetic that rounds each intermediate to it, or this one if it always does."""
        if self.arithmetic.storage is None:
            return self
        return replace(self, arithmetic=replace(self.arithmetic, rounds_each_step=True))

    @property
    def overflow(self) -> Any:
        """The least number that rounds to infinity: half a unit in the last place past the largest."""
        half_a_unit = np.ldexp(self.wide(self.roundoff), np.frexp(self.largest)[1] - 1)
        return self.wide(self.largest) + half_a_unit

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """Return a tensor's exact values as an array of the wide type."""
        (tensor,) = host_copies(tensor)
        tensor = tensor.contiguous()
        if tensor.dtype.is_floating_point and tensor.dtype not in _OF_NUMPY:
            tensor = tensor.float()
        with np.errstate(invalid="ignore"):  # a signalling NaN, as memory that nothing has written may hold
            return tensor.numpy().astype(self.wide)

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Convert several tensors by name as `array` does, with one synchronization per GPU."""
        return dict(zip(tensors, map(self.array, host_copies(*tensors.values()))))

    def tensor(self, array: np.ndarray, device: str) -> torch.Tensor:
        """Copy an array of this dtype, of integers or of `dtype_of` to a contiguous tensor on a device."""
        array = np.array(array, order="C")
        # The array may be freed before the device has its data: `to` stages pageable memory before it returns.
        if array.dtype.name in ("bfloat16", *QUANTISED):  # a type of ml_dtypes, which torch takes as bits
            as_bits = torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
            return as_bits.view(getattr(torch, array.dtype.name)).to(device, non_blocking=True)
        return torch.from_numpy(array).to(device, non_blocking=True)

    def spacing_roundoff(self, magnitude: np.ndarray) -> np.ndarray:
        """Return the largest error of rounding numbers of these magnitudes to the dtype."""
        return np.maximum(magnitude * self.roundoff, self.smallest_subnormal / 2)


# A result dtype in place of a name: the dtype in which kernels compute.
COMPUTE = "compute"


def returned(dtype: DType, name: str | None) -> DType:
    """Return the dtype of a result where `dtype` is tested.

    Args:
        dtype: the tested dtype.
        name: the name of a dtype in `DTYPES`, `QUANTISED` or `INTEGERS`; "compute" for float64 if float64 is
            tested, and float32 otherwise; None for `dtype`.
    """
    if name is None:
        return dtype
    if name == COMPUTE:
        return dtype if dtype.arithmetic.storage is None else DTYPES["float32"]
    return dtype if name == dtype.name else {**DTYPES, **QUANTISED, **INTEGERS}[name]


def is_chosen(name: str | None) -> bool:
    """Return whether results of a dtype are chosen among few numbers, so that a definition says them exactly.

    These are integers, booleans and quantised numbers. No gradient flows through them.
    """
    return name in INTEGERS or name in QUANTISED


def name_of(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype that is given by its name or as torch's object."""
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: "Dtypes") -> tuple[str, ...]:
    """Return the names of one or several dtypes, each given by its name or as torch's object.

    Raises:
        TypeError: it is neither.
    """
    sequence = (dtypes,) if isinstance(dtypes, str | torch.dtype) else dtypes
    if not isinstance(sequence, Collection) or not all(isinstance(dtype, str | torch.dtype) for dtype in sequence):
        raise TypeError(f"expected a dtype, its name, or several of these, not {dtypes!r}")
    return tuple(map(name_of, sequence))


def select_dtypes(dtypes: "Dtypes", accepted: Collection[str]) -> tuple[str, ...]:
    """Return the names of the dtypes in the argument `dtypes`.

    Raises:
        ValueError: a name is not that of a known dtype.
    """
    try:
        names = names_of(dtypes)
    except TypeError as error:
        raise ValueError(f"dtypes: {error}") from None
    if unknown := [name for name in names if name not in accepted]:
        raise ValueError(f"dtypes: there is no {unknown[0]}: there are {', '.join(accepted)}")
    return names


# The floating-point dtypes that torch converts to NumPy's.
_OF_NUMPY = frozenset((torch.float16, torch.float32, torch.float64))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bit patterns as integers: a NaN equals itself, and -0 differs from 0."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


# Processes that share a GPU take turns, so that one synchronization takes longer than most calls. All copies are
# therefore enqueued before a single synchronization.
def host_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy the tensors to the CPU with one synchronization per GPU."""
    copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def exact_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values in its own dtype, as `DType.tensor` takes them."""
    (tensor,) = host_copies(tensor)
    name = name_of(tensor.dtype)
    if name in ("bfloat16", *QUANTISED):  # a type of ml_dtypes, which torch gives as bits
        return bits(tensor).numpy().view({**DTYPES, **QUANTISED}[name].numpy)
    return tensor.contiguous().numpy()


def differing(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Count the elements of each pair that differ in any bit (all if the shapes differ).

    Pairs on one device cost one synchronization with the GPU. Pairs may lie on several devices.
    """
    counts = [
        torch.count_nonzero(bits(a) != bits(b))
        if a.shape == b.shape
        else torch.tensor(max(a.numel(), b.numel(), 1), device=a.device)
        for a, b in pairs
    ]
    if len({count.device for count in counts}) > 1:
        return [int(count) for count in counts]
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


# The dtypes of inputs that hold quantised numbers, whatever dtype is tested: no operation is tested for them.
# float8_e4m3fn has no infinity: its largest number is 448, and larger results become NaN.
QUANTISED = {
    dtype.name: dtype
    for dtype in (
        _dtype("float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.float64, np.float32),
        _dtype("float8_e5m2", ml_dtypes.float8_e5m2, np.float64, np.float32),
    )
}


def round_to_tf32(numbers: np.ndarray, nearest: bool = True) -> np.ndarray:
    """Return float32 numbers rounded to TF32, which has 10 bits of mantissa: to nearest, or towards 0."""
    bits = numbers.astype(np.float32, copy=False).view(np.uint32)
    down = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    up = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(numbers), up if nearest else down, numbers)


def dtype_of(dtype: np.dtype) -> DType:
    """Return the dtype of an array of floating-point numbers, which may differ from the tested one."""
    name = dtype.name
    return DTYPES[name] if name in DTYPES else QUANTISED[name]


def _integers(name: str) -> DType:
    """Return an integer dtype of results, or bool. They are compared exactly, in a type that holds them exactly."""
    numpy = np.dtype(name)
    largest = 1.0 if name == "bool" else float(np.iinfo(numpy).max)
    wide: type = np.longdouble if numpy.itemsize == 8 else np.float64
    arithmetic = DTYPES["float64"].arithmetic
    return DType(name, numpy, getattr(torch, name), wide, 0.0, largest, 0.0, 0.0, arithmetic)


# The integer dtypes of inputs and results, and bool: no operation is tested for them.
INTEGERS = {name: _integers(name) for name in ("int8", "uint8", "int16", "int32", "int64", "bool")}
