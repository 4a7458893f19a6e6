"""A `__global__` function as a Python function of tensors: `cuda_kernel`."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fourfold.backends.cuda import declarations
from fourfold.backends.cuda.compile import CompilationError
from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel, Size
from fourfold.backends.cuda.parameters import short

# The names of dtypes in messages and on the command line.
DTYPES = {short(dtype): dtype for dtype in CPP_TYPES}
# The element types of tensors of integers.
INTEGERS = {
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.bool: "bool",
}
# float4 and the like are loaded in one access, which needs an address that is a multiple of its size.
ALIGNMENT = 16


class KernelInstances:
    """The instances of a kernel for each dtype: one of a plain function, several of a template.

    Args:
        source: the `.cu` file.
        name: a name expression: "softmax_kernel", "copy_kernel<float, 4>", or "copy_kernel<{T}, 4>", where {T} stands
            for the element type. A template with type parameters only needs no arguments.

    Raises:
        FileNotFoundError: the file does not exist.
        NoSuchKernel: the file has no such kernel.
        ValueError: the name lacks arguments for the template's parameters.
    """

    def __init__(self, source: pathlib.Path, name: str) -> None:
        self.source, self.declared = source, declarations.kernel_of(source, name)
        template = self.declared.template
        if template is not None and "<" not in name:
            if self.declared.values or not template:
                values = ", ".join(self.declared.values) or "parameters"
                example = f"{name}<{', '.join(['{T}'] * len(template) + ['...'])}>"
                raise ValueError(f"{name} is a template with {values} to be given: name it as {example!r}")
            name = f"{name}<{', '.join(['{T}'] * len(template))}>"
        self.name = name
        self._refused: dict[torch.dtype, str] = {}
        self._instances = {
            dtype: CudaKernel(source, name.replace("{T}", type_))
            for dtype, type_ in CPP_TYPES.items()
            if self.unsupported(dtype) is None
        }

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """Return the reason why there is no instance for tensors of a floating-point dtype, or None if there is one."""
        if "{T}" in self.name:
            return self._refused.get(dtype)
        dtypes = {self.element(parameter) for parameter in self.declared.parameters} - {None}
        if not dtypes or dtype in dtypes:
            return None
        pointers = " and ".join(sorted({p.type for p in self.declared.parameters if self.element(p)}))
        only = " and ".join(sorted(short(each) for each in dtypes if each))
        return f"{self.name} of {self.source.name} takes {pointers}: {only} only"

    def element(self, parameter: declarations.DeclaredParameter) -> torch.dtype | None:
        """Return the floating-point dtype of the tensors that a parameter takes, or None if it takes any."""
        if not parameter.is_pointer:
            return None
        types = self.declared.template or ()
        if parameter.element in types and "{T}" not in self.name:
            arguments = declarations.split(self.name.partition("<")[2].rpartition(">")[0])
            index = types.index(parameter.element)
            return declarations.ELEMENTS.get(arguments[index]) if index < len(arguments) else None
        return declarations.ELEMENTS.get(parameter.element)

    def compile_for(self, device: str) -> None:
        """Compile all instances for "cpu" or "cuda"; dtypes for which the template does not compile are refused.

        Raises:
            CompilationError: none compiles.
        """
        errors: dict[torch.dtype, CompilationError] = {}
        for dtype, kernel in self._instances.items():
            try:
                kernel.compile_for(device)
            except CompilationError as error:
                errors[dtype] = error
        if len(errors) == len(self._instances):
            raise next(iter(errors.values()))
        for dtype, refusal in errors.items():
            self.refuse(dtype, str(refusal).splitlines()[0])

    def refuse(self, dtype: torch.dtype, why: str) -> None:
        """Record why a dtype has no instance."""
        self._instances.pop(dtype, None)
        self._refused[dtype] = why

    @property
    def refusals(self) -> Mapping[torch.dtype, str]:
        """The dtypes for which the template does not compile, with the reasons."""
        return self._refused

    def of(self, dtype: torch.dtype) -> CudaKernel:
        """Return the instance for tensors of a dtype.

        Raises:
            TypeError: no instance takes tensors of the dtype.
        """
        if dtype in INTEGERS and dtype not in self._instances:
            self._instances[dtype] = CudaKernel(self.source, self.name.replace("{T}", INTEGERS[dtype]))
        kernel = self._instances.get(dtype)
        if kernel is None:
            why = self.unsupported(dtype) if dtype in CPP_TYPES else "it takes no tensors of this dtype"
            raise TypeError(f"there is no {self.name} for {short(dtype)}: {why}")
        return kernel

    def check(self, dtype: torch.dtype, arguments: tuple[Any, ...]) -> None:
        """Check that tensors have the element types of the pointers' declarations.

        Raises:
            TypeError: a tensor has another dtype.
        """
        for position, (parameter, argument) in enumerate(zip(self.declared.parameters, arguments)):
            if isinstance(argument, torch.Tensor):
                is_template_type = "{T}" in self.name and parameter.element in (self.declared.template or ())
                expected = dtype if is_template_type else self.element(parameter)
                if expected is not None and argument.dtype != expected:
                    place = self.declared.position(position)
                    raise TypeError(
                        f"{self.name}: {place} is {parameter.type} in C++ and takes {short(expected)},"
                        f" but a tensor of {short(argument.dtype)} was given"
                    )


def cuda_kernel(
    source: str | pathlib.Path,
    name: str,
    *,
    grid: Size | Callable[..., Size],
    block: Size | Callable[..., Size],
    arguments: Callable[..., tuple[Any, ...]],
    output: Callable[..., Any] | None = None,
    shared_bytes: int | Callable[..., int] = 0,
    contiguous: bool = True,
) -> Callable[..., Any]:
    """Return a Python function that launches a `__global__` function of a `.cu` file on tensors.

    softmax = fourfold.cuda_kernel(
        "softmax.cu", "softmax_kernel", grid=lambda x: len(x), block=256, arguments=lambda x, out: (x, out, *x.shape)
    )

    On a GPU NVRTC compiles the file; on the CPU g++ does, and every access is checked. The function has no gradient of
    its own: call it in the forward and backward of a `torch.autograd.Function`.

    Args:
        source: the file; a relative path begins at the folder of the calling file, or else at the current one.
        name: the kernel; see `KernelInstances`. Of a template the dtype of the first tensor chooses the instance.
        grid: the number of blocks, as one number or up to three, or a function that returns it.
        block: the threads of a block, in the same way.
        arguments: a function that returns the kernel's arguments, in order: tensors, numbers, None for a null pointer.
            The names of its parameters, without `out`, are those of the Python function.
        output: a function that returns a new tensor, or a tuple of them, for the result; by default it is of the first
            tensor's shape and dtype. It need not be initialised.
        shared_bytes: size of the `extern __shared__` array in bytes, or a function that returns it.
        contiguous: hand copies on in place of tensors that are not contiguous, or not aligned to 16 bytes.

    `grid`, `block`, `arguments`, `output` and `shared_bytes` are called with those of the function's arguments that
    their parameters name; all but `output` may also take `out`, the result.

    Returns:
        The function. It takes the tensors and numbers that `arguments` names, and returns the result.

    Raises:
        FileNotFoundError: there is no such file.
        LookupError: the file has no such kernel.
        ValueError: the template has parameters that the name does not give, or `arguments` names none.
    """
    caller = inspect.currentframe()
    calling_frame = caller.f_back if caller else None
    path = _source_path(calling_frame.f_globals.get("__file__") if calling_frame else None, pathlib.Path(source))
    kernels = KernelInstances(path, name)
    signature = inspect.signature(arguments)
    named = [p for p in signature.parameters.values() if p.name != "out" and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not named:
        raise ValueError(f"cuda_kernel: arguments of {name} must name the function's arguments, as lambda x, out: ...")
    launch_signature = inspect.Signature(named)

    def launch(*args: Any, **kwargs: Any) -> Any:
        bound = launch_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {key: plain(value) if contiguous else value for key, value in bound.arguments.items()}
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        if not tensors:
            raise TypeError(f"{name}: no argument is a tensor")
        # Indices may come before the numbers, whose dtype chooses the instance and is the result's.
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
        out = _apply(output, values) if output else torch.empty(first.shape, dtype=first.dtype, device=first.device)
        values["out"] = out
        passed = tuple(_apply(arguments, values))
        kernels.check(first.dtype, passed)
        sizes: list[Any] = [_apply(size, values) if callable(size) else size for size in (grid, block, shared_bytes)]
        blocks, threads, shared = sizes
        kernels.of(first.dtype).launch(blocks, threads, *passed, shared_bytes=shared)
        return out

    launch.__name__ = launch.__qualname__ = kernels.declared.name
    launch.__doc__ = f"{kernels.name} of {path.name}."
    launch.__signature__ = launch_signature  # type: ignore[attr-defined]
    # Its source is the calling file, which names the .cu file, and not this one.
    launch.__wrapped__ = arguments  # type: ignore[attr-defined]
    return launch


def _source_path(caller: str | None, source: pathlib.Path) -> pathlib.Path:
    beside = pathlib.Path(caller).resolve().parent / source if caller else source
    return (beside if beside.is_file() else source).resolve()


def plain(value: Any) -> Any:
    """Return a value; a tensor as kernels mostly expect it: contiguous, and aligned as an allocation is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().contiguous()
    return value.clone() if value.data_ptr() % ALIGNMENT else value


def _apply(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with the values that its parameters name."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**values)
    return function(**{p.name: values[p.name] for p in parameters if p.name in values})
