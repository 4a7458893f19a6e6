"""Compare the key of a launch with Triton's own: the key must distinguish all launches that Triton compiles separately.

Triton's rules are queried from Triton itself, for arguments of every kind. If a version has a rule that the key does
not cover, the code compiled for one launch must not serve another.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# A key of a kernel, a device, tensors, scalars and options; None for a launch that is left to Triton.
Key = Callable[[Any, int, tuple[Any, ...], tuple[Any, ...], Mapping[str, Any]], Hashable]

_POWERS = (3, 4, 5, 6, 7, 8, 10, 15, 16, 20, 24, 30, 31, 32, 33, 53, 62, 63)
INTEGERS = (
    *range(-2, 18),
    *(sign * (1 << power) + more for power in _POWERS for sign in (1, -1) for more in (-1, 0, 1, 16)),
    (1 << 64) - 1,
)
REALS = (0.0, 1.0, 0.5, 16.0, -1.0, 1e30, 1e300, 2.0**31, float("inf"), float("nan"))
# The values of scalar arguments, regardless of their use in a kernel.
NUMBERS = (*INTEGERS, *REALS, True, False, None)
CONSTANTS = (*range(4), 16, 32, -1, True, False, 1.0, 0.5, None, "ieee", tl.float32, tl.float64, tl.int32, (1, 2))
OPTIONS = {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), "maxnreg": (64, 128, None)}
DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
# The starts of tensors, in bytes past a multiple of 256.
STARTS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 128)


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["unaligned"])
def probe_kernel(  # type: ignore[no-untyped-def]
    pointer, other_pointer, real, number, plain, unaligned, double: tl.float64, wide: tl.int64, CONSTANT: tl.constexpr
):
    """Never run or compiled: Triton is only asked for its key."""


def key_collisions(key: Key, device: int) -> list[str]:
    """Describe pairs of launches that share a key although Triton compiles for each; return none if the key is right.

    Args:
        key: of a launch.
        device: the current GPU's number.
    """
    collisions: list[str] = []
    first_launches: dict[Hashable, tuple[str, str]] = {}
    try:
        *_, binder = probe_kernel.device_caches[device]
        for description, tensors, scalars, options in _launches():
            launch_key = key(probe_kernel, device, tensors, scalars, options)
            if launch_key is None:
                continue
            try:
                _, specialisation, launch_options = binder(*tensors, *scalars, **options)
            except (TypeError, KeyError, OverflowError):
                continue  # Triton has no such argument
            compiled_for = f"{specialisation} {launch_options}"
            first, compiled_first = first_launches.setdefault(launch_key, (description, compiled_for))
            if compiled_first != compiled_for:
                collisions.append(f"{first} and {description}: {compiled_first} and {compiled_for}")
    except Exception as error:
        collisions.append(
            f"Triton {triton.__version__} does not say what it specialises: {type(error).__name__}: {error}"
        )
    return collisions


def _launches() -> Iterator[tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]:
    """Yield launches of the probe: description, tensors, scalars and options; one argument takes each kind in turn."""
    usual = _tensor(torch.float32, 0)
    scalars = {"real": 0.5, "number": 2, "plain": 2, "unaligned": 2, "double": 0.5, "wide": 2}
    for description, tensor in _tensors():
        yield f"pointer = {description}", (tensor, usual), tuple(scalars.values()), {"CONSTANT": 2}
        yield f"other_pointer = {description}", (usual, tensor), tuple(scalars.values()), {"CONSTANT": 2}
    for name in scalars:
        for value in NUMBERS:
            yield f"{name} = {value!r}", (usual, usual), tuple({**scalars, name: value}.values()), {"CONSTANT": 2}
    for value in INTEGERS:
        # NaN is neither above nor below a limit.
        beside = {**scalars, "real": float("nan"), "number": value}
        yield f"real = nan, number = {value}", (usual, usual), tuple(beside.values()), {"CONSTANT": 2}
    for name, values in {"CONSTANT": CONSTANTS, **OPTIONS}.items():
        for value in values:
            options = {"CONSTANT": 2, name: value}
            yield f"{name} = {value!r}", (usual, usual), tuple(scalars.values()), options


def _tensor(dtype: torch.dtype, start: int, count: int = 64) -> torch.Tensor:
    """Return a tensor of `count` bytes that begins `start` bytes past a multiple of 256."""
    room = torch.zeros(count + 512, dtype=torch.uint8)
    first = -room.data_ptr() % 256 + start
    return room[first : first + count].view(dtype)


def _tensors() -> Iterator[tuple[str, torch.Tensor | TensorDescriptor | None]]:
    """Yield tensors of every kind with a description."""
    for name in DTYPES:
        dtype = getattr(torch, name)
        for start in STARTS:
            if start % dtype.itemsize == 0:
                yield f"{name}, {start} bytes past a multiple of 256", _tensor(dtype, start)
    usual = _tensor(torch.float32, 0)
    yield "of one element", usual[:1]
    yield "of none", usual[:0]
    yield "without axes", usual[0]
    yield "strided", usual[::2]
    yield "expanded", usual[:1].expand(4, 16)
    yield "transposed", usual.view(4, 4).t()
    yield "a parameter", torch.nn.Parameter(usual)
    yield "of 2^31 bytes and more", torch.empty(1 << 32, dtype=torch.float32, device="meta")
    yield "none at all", None
    yield from _descriptors()


def _descriptors() -> Iterator[tuple[str, TensorDescriptor]]:
    """Yield descriptors of every kind with a description."""
    for name in DTYPES:
        dtype = getattr(torch, name)
        for block in ((16, 32), (32, 16), (64, 128)):
            for start in (0, 16):
                matrix = _tensor(dtype, start, 4096)[:1024].view(16, -1)
                yield f"a descriptor, {name}, {block}, {start} bytes", TensorDescriptor.from_tensor(matrix, list(block))
    usual = _tensor(torch.float32, 0, 4096)
    for sizes, strides in (((32, 32), (32, 1)), ((31, 30), (32, 1)), ((1, 1), (16, 1)), ((16, 7), (0, 1))):
        described = TensorDescriptor(usual, list(sizes), list(strides), [16, 32])
        yield f"a descriptor of {sizes}, strides {strides}", described
    for blocks in ([32], [1, 32], [16, 32], [1, 16, 32], [1, 1, 1, 16, 32]):
        ones, apart = [1] * len(blocks), [64] * (len(blocks) - 1) + [1]
        yield f"a descriptor with blocks {blocks}", TensorDescriptor(usual, ones, apart, blocks)
    padding = TensorDescriptor(usual, [32, 32], [32, 1], [16, 32], padding="nan")
    yield "a descriptor padded with nan", padding
