"""torch's private parts: streams, dispatch, and settings of its compiler."""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from fourfold.compat import find, uses

# Parts of torch's message about a tensor that was modified after autograd saved it.
_WRITTEN_INTO = ("inplace operation", "modified inplace")


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@uses("torch._C._cuda_getCurrentRawStream", otherwise=_current_stream)
def current_stream(device: int) -> int:
    """Return the address of torch's current stream on a CUDA device.

    The public ``torch.cuda.current_stream(device).cuda_stream`` creates a Python object: 1.8 us instead of 0.1 per
    launch, on the host of an H200. It is the fallback if the private function is missing, as in a build without CUDA.
    """
    return torch._C._cuda_getCurrentRawStream(device)


@uses("torch._C._FunctionBase.apply", otherwise=lambda function: function.apply)
def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function's ``apply``, for calls that no transform watches, of tensors that none has wrapped.

    The public ``apply`` looks for such tensors first: 3 us in torch 2.11.
    """
    return super(torch.autograd.Function, function).apply


def _empty_on_current_gpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


@uses("torch._C._dynamo.guards._empty_strided_cuda", otherwise=_empty_on_current_gpu)
def empty_on_current_gpu(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the current CUDA device.

    Code written by torch's compiler allocates in this way. Sizes and strides must be plain tuples. The public
    ``torch.empty`` takes 5.7 us on the host of an H200.
    """
    return torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)


# The newest release whose guards of tensors and launcher were tried. Other arguments may end the process.
_NEWEST_TRIED = (2, 15)


def _is_tried() -> bool:
    """Return whether this release of torch is none that came after those that `tensors_match` and `launcher` know."""
    return tuple(map(int, torch.__version__.split(".")[:2])) <= _NEWEST_TRIED


def _always() -> bool:
    return True


@uses(
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
    otherwise=_always,
)
def calls_are_watched() -> bool:
    """Return whether a mode, a transform or forward-mode differentiation is active and must see every call.

    No public function says so. If one of the parts is missing the answer is True: a call then goes through the
    dispatcher, which is always right but slower.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _no_match(tensors: Sequence[torch.Tensor]) -> None:
    """Return None: tensors are compared one property after the other."""


@uses("torch._C._dynamo.guards.TensorGuards", otherwise=_no_match)
def tensors_match(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that takes as many tensors and returns whether each is like its example here.

    They are alike if their class, sizes, strides, dtype, device, conjugate and negative bits, and their need of a
    gradient are the same. Return None if this release of torch is not tried.
    """
    if not _is_tried():
        return None
    guards = find("torch._C._dynamo.guards.TensorGuards")
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _no_launcher(*_: Any) -> None:
    """Return None: cuda-core and Triton launch their kernels."""


@uses("torch._C._StaticCudaLauncher._launch_kernel", otherwise=_no_launcher)
def launcher(
    kernel: int, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, types: str
) -> Callable[[tuple[Any, ...], int], None] | None:
    """Return the function that launches a kernel with given arguments on a stream, or None if there is none for it.

    Code written by torch's compiler launches in this way: 3.2 us on the host of an H200, by cuda-core 3.5, by Triton 4.
    Where the driver has no room for a launch, other threads of Python wait with this one.

    Args:
        kernel: the driver's handle.
        grid: the number of blocks along three axes.
        block: the number of threads along three axes. Only the first may differ from 1.
        shared_bytes: of dynamic shared memory.
        types: a letter for each argument: b, h, i, l and B, H, I, K for signed and unsigned integers of 1, 2, 4 and 8
            bytes, f and d for floats of 4 and 8, O for an address.
    """
    threads, *others = block
    # The launcher counts threads in warps, and the blocks of a grid in 32 bits.
    if not _is_tried() or others != [1, 1] or threads % 32 or math.prod(grid) >= 2**31:
        return None
    launch = torch._C._StaticCudaLauncher._launch_kernel
    return functools.partial(launch, kernel, *grid, threads // 32, shared_bytes, types)


@uses(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
)
def dispatch_mode() -> Any:
    """Return the base class of modes that receive each dispatched operator in a method ``__torch_dispatch__``.

    torch's own notes on extending it tell users to derive from this class; it has no public name. torch keeps the
    method of a derived class from being compiled, and for that imports its compiler, which takes two seconds. Here it
    does not: nothing is compiled while such a mode is on.
    """

    def skips_compiler(cls: type) -> bool:
        return False

    base = find("torch.utils._python_dispatch.TorchDispatchMode")
    return type("DispatchMode", (base,), {"_should_skip_dynamo": classmethod(skips_compiler)})


@uses("torch._ops.OpOverload.namespace")
def namespace(operator: Any) -> str:
    """Return the library of an operator: "aten", or that of a custom operator. It is undocumented."""
    return operator.namespace


@uses("torch._ops.OpOverload.overloadpacket")
def overload_packet(operator: Any) -> Any:
    """Return ``torch.ops.aten.add`` for ``torch.ops.aten.add.Tensor``. It is undocumented."""
    return operator.overloadpacket


@uses("torch._ops.OpOverload().is_view")
def is_view(operator: Any) -> bool:
    """Return whether an operator's results share the memory of its arguments. It is undocumented."""
    return operator.is_view


@uses("torch._ops.OpOverload()._schema")
def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, in order. `inspect` cannot read an operator's signature."""
    return [argument.name for argument in operator._schema.arguments]


@uses("torch._ops.OpOverload()._schema")
@functools.cache
def mutated_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operator writes: their indices and names."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


@uses(
    "torch.cuda._DeviceGuard",
    "torch.cuda._exchange_device",
    "torch.cuda._maybe_exchange_device",
    "torch._C._dynamo.guards._empty_strided_cuda",
)
def replace_in_compiled_code(guard: Any) -> None:
    """Replace permanently the calls by which torch's compiled code selects a GPU and allocates memory.

    Args:
        guard: takes the device's number, and is a context manager.
    """
    torch.cuda._DeviceGuard = guard
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = _empty_on_current_gpu


@uses("torch.utils._device._device_constructors")
def constructors() -> set[Any]:
    """Return the functions that make tensors on torch's default device. They are undocumented."""
    return find("torch.utils._device._device_constructors")()


@uses("torch.utils._device.CURRENT_DEVICE")
def default_device() -> torch.device:
    """Return the last argument of ``torch.set_default_device``.

    The public ``torch.get_default_device()`` makes a tensor there, which needs a GPU.
    """
    return find("torch.utils._device.CURRENT_DEVICE") or torch.device("cpu")


@uses("torch._ops.OpOverload.redispatch", "torch._C.DispatchKey", "torch._C.DispatchKeySet")
def run_kernel(operator: Any, device_type: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator's implementation for "cpu" or "cuda", below autograd and below any mode.

    A mode that called the operator itself while active would recurse without end.
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device_type.upper()))
    return operator.redispatch(keys, *args, **kwargs)


@uses(
    "torch.ops.aten._to_copy",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._reshape_copy",
    "torch.ops.aten._unsafe_view",
)
def copying_operators() -> set[Any]:
    """Return the operators that only move values, among those that torch's public functions are decomposed into."""
    aten = torch.ops.aten
    return {aten._to_copy, aten._local_scalar_dense, aten._reshape_copy, aten._unsafe_view}


@uses("torch._int_mm")
def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two int8 matrices, summed in int32. No public function of torch multiplies so on a GPU."""
    return torch._int_mm(a, b)


@uses("torch.cuda._sleep")
def keep_stream_busy(cycles: int) -> None:
    """Enqueue a wait of `cycles` GPU cycles on the current stream.

    No public function does: an event waits for other work, and the duration of work is not under control.
    """
    torch.cuda._sleep(cycles)


@uses("torch.autograd.grad saying 'inplace operation'; 'modified inplace' of a custom Function's view")
def says_written_into(error: RuntimeError) -> bool:
    """Return whether autograd raised because a saved tensor or a view was modified; its error has no class."""
    return any(words in str(error) for words in _WRITTEN_INTO)


@uses("torch.Tensor._version")
def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes into a tensor or a view of it. torch's notes on autograd mention it."""
    return tensor._version


def _imaginary_part(tensor: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(tensor), tensor).conj().imag


def _never(tensor: torch.Tensor) -> bool:
    return False


@uses("torch.Tensor._is_zerotensor", otherwise=_never)
def is_without_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is known to be zeros and has no memory, like some cotangents from autograd.

    No public interface says so. If the part is missing, such a tensor has the address 0.
    """
    return tensor._is_zerotensor()


@uses("torch.Tensor._is_view", otherwise=_never)
def shares_a_base(tensor: torch.Tensor) -> bool:
    """Return whether autograd treats a tensor as a view of another. No public interface says so."""
    return tensor._is_view()


@uses("torch._neg_view", otherwise=_imaginary_part)
def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the negatives of a tensor as a view of it: the same memory, with the negative bit.

    The public way, the imaginary part of a complex conjugate, has other strides, and there are no such views of
    bfloat16.
    """
    return torch._neg_view(tensor)


@uses("torch.fx.experimental._config.use_duck_shape")
def sizes_are_their_own() -> AbstractContextManager:
    """Keep torch.compile from assuming that sizes equal in one call are equal in all."""
    return find("torch.fx.experimental._config").patch(use_duck_shape=False)


@uses("torch.Tensor._make_wrapper_subclass")
def wrapper_tensor(cls: type, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> Any:
    """Return a tensor of a subclass without memory, whose operators go to the class's ``__torch_dispatch__``.

    torch's notes on extending it create such tensors in this way; there is no public function.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, storage_offset=offset, dtype=dtype)


def _documented_decompositions() -> dict[str, Callable[..., Any]]:
    return {str(operator): function for operator, function in torch.export.default_decompositions().items()}


@functools.cache
@uses("torch._decomp.decomposition_table", otherwise=_documented_decompositions)
def decompositions() -> dict[str, Callable[..., Any]]:
    """Return torch's functions that compute an operator by simpler ones, by the operator's full name.

    The documented ``torch.export.default_decompositions`` omits some, for example those of interpolation and of
    pooling.
    """
    table = find("torch._decomp.decomposition_table")
    return {str(operator): function for operator, function in table.items()}


def import_for_gradients() -> None:
    """Import what torch imports at the first gradient, in half a second, for all processes that this one forks."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
