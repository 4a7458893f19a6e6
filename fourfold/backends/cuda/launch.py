"""Compile and launch CUDA C++ kernels: with NVRTC and cuda-core on a GPU, with the host's compiler on the CPU.

forward = CudaKernel(Path(__file__).parent / "cuda_kernel.cu", "giou_forward_kernel<float>")
forward.launch(blocks, 256, boxes1, boxes2, out, num_boxes, eps)
"""

from __future__ import annotations

import contextlib
import functools
import operator
import pathlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fourfold.backends import known_calls, launch_records
from fourfold.backends.cuda import declarations
from fourfold.backends.cuda.compile import CudaError, compile_kernels, demangle
from fourfold.backends.cuda.emulator.launcher import CpuKernel, mode
from fourfold.backends.cuda.parameters import Argument, KernelParameter, LoadedKernel
from fourfold.backends.launch import check_block, check_grid, check_shared_bytes
from fourfold.compat import torch_internals
from fourfold.operations.blame import Lack

if TYPE_CHECKING:
    from cuda.core import LaunchConfig

__all__ = ["CPP_TYPES", "CudaError", "CudaKernel"]

Size = int | tuple[int, ...]
Index = tuple[int, int, int]

# The C++ element type of each dtype, for the template arguments of kernels.
CPP_TYPES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
# The argument types of a repeatable launch; a tensor's address is replaced each time.
_REPEATABLE = (torch.Tensor, int, float, type(None))
_ON_CPU = -1  # Tensor.get_device() of a CPU tensor

# By source file: when one kernel of a file has to be compiled, the file's other live kernels are compiled with it.
_kernels_by_source: dict[pathlib.Path, weakref.WeakSet[CudaKernel]] = {}
_compiling = threading.RLock()
# Inside `compiling_only`: the names of the kernels that may be compiled together with a needed one.
_companions: frozenset[str] | None = None
# Per thread: the devices whose context it has already set.
_thread = threading.local()
_streams: dict[tuple[int, int], Any] = {}


def known_kernels(source: pathlib.Path) -> set[str]:
    """Return the names of a file's `CudaKernel` objects that are alive."""
    return {kernel.name for kernel in _kernels_by_source.get(source, ())}


def emulated_kernels() -> list[CudaKernel]:
    """Return the live `CudaKernel` objects that have been launched on the CPU."""
    return [kernel for kernels in _kernels_by_source.values() for kernel in kernels if kernel._on_cpu]


@contextlib.contextmanager
def compiling_only(names: Collection[str]) -> Iterator[None]:
    """Compile a needed kernel together with the named kernels of its file instead of all of them.

    Use it for code that runs once, such as a mutant: compiling its other kernels would be wasted time.
    """
    global _companions
    before, _companions = _companions, frozenset(names)
    try:
        yield
    finally:
        _companions = before


def _kernel_names(source: pathlib.Path) -> set[str]:
    """Return the names of the kernels to compile when one of the file's kernels has to be compiled."""
    alive = known_kernels(source)
    return alive if _companions is None else alive & _companions


class CudaKernel:
    """A `__global__` function of a `.cu` file, compiled at its first launch on a device.

    The file contains device code only. On the CPU it is compiled with CUDA_ON_CPU defined. Headers in quotes are
    searched for beside the file, in the folder above it, and among those of this library, such as elementwise.cuh.

    Args:
        source: the `.cu` file.
        name: a C++ name expression such as "giou_forward_kernel<float>" or "copy_kernel<__half, 4>".
    """

    def __init__(self, source: pathlib.Path, name: str) -> None:
        self.source = pathlib.Path(source).resolve()
        self.name = name
        self.launches_on_cpu = 0
        self._on_cpu: dict[str, CpuKernel] = {}
        self._on_gpu: dict[int, _GpuKernel] = {}
        self._resident_clusters: dict[tuple[torch.device, Size, Size, int], int] = {}
        # By the arguments' types: the positions of the tensors, and those of the Nones.
        self._pointers: dict[tuple[type, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        _kernels_by_source.setdefault(self.source, weakref.WeakSet()).add(self)

    @classmethod
    def instances(
        cls, source: pathlib.Path, name: str, options: Mapping[Any, str]
    ) -> dict[tuple[torch.dtype, Any], CudaKernel]:
        """Return the instances of a template, by dtype and option.

        Args:
            source: the `.cu` file.
            name: a name expression: "copy_kernel<{T}, {}>", where {} stands for an option, {T} for the element type and
                {W}, also in an option, for the number of elements in 16 bytes.
            options: the text for {}, by the key of the option.
        """
        return {
            (dtype, key): cls(source, name.format(option, T="{T}").format(T=T, W=16 // dtype.itemsize))
            for dtype, T in CPP_TYPES.items()
            for key, option in options.items()
        }

    def __repr__(self) -> str:
        return f"CudaKernel({self.source.name}, {self.name})"

    def launch(
        self, grid: Size, block: Size, *args: Argument, shared_bytes: int = 0, cluster: Size | None = None
    ) -> None:
        """Launch the kernel on the device of its tensors. On a GPU: on torch's current stream, asynchronously.

        After the first launch on a GPU, a launch neither allocates nor synchronizes, so a CUDA graph may capture it. On
        the CPU the kernel has finished when this returns.

        Args:
            grid: number of blocks, as one number or up to three. Nothing is launched if one of them is 0.
            block: threads per block, as one number or up to three.
            args: one for each parameter. A tensor is passed as a pointer to its first element, None as a null pointer,
                a number as the declared type: any integer type, float, double, a half type or bool. A tensor map of
                `fourfold.backends.cuda.tensor_map` is passed as a struct `TensorMap`. There are no other types.
            shared_bytes: size of the `extern __shared__` array, in bytes.
            cluster: blocks per cluster, as one number or up to three. Needs compute capability 9.0 or later. Not every
                GPU runs more than 8 together: see `resident_clusters`.

        Raises:
            TypeError: there are too few or too many arguments, or one does not fit the parameter's type, as a float
                does not fit an int.
            OverflowError: a number is out of the range of the parameter's type.
            ValueError: the tensors are on different devices, or the block, grid or cluster is not possible.
            CudaError: the file does not compile, or the driver refuses the launch.
            KernelFault: on the CPU, the kernel did something undefined.
            NotImplementedError: a cluster is requested on the CPU.
        """
        types = tuple(map(type, args))
        pointers = self._pointers.get(types)
        if pointers is None:
            pointers = self._pointers[types] = (
                tuple(i for i, argument in enumerate(args) if isinstance(argument, torch.Tensor)),
                tuple(i for i, argument in enumerate(args) if argument is None),
            )
        tensors, nulls = pointers
        if not tensors:
            raise ValueError(f"{self.name}: no argument is a tensor, so there is no device to run on")
        device = args[tensors[0]].get_device()  # type: ignore[union-attr]
        for i in tensors:
            if args[i].get_device() != device:  # type: ignore[union-attr]
                devices = ", ".join(f"argument {i} on {args[i].device}" for i in tensors)  # type: ignore[union-attr]
                raise ValueError(f"{self.name}: tensors on different devices: {devices}")
        if device == _ON_CPU:
            self._launch_on_cpu(grid, block, args, shared_bytes, cluster)
            return
        if torch.cuda.current_device() == device:
            self._launch_on_gpu(device, grid, block, args, types, tensors, nulls, shared_bytes, cluster)
            return
        with torch.cuda.device(device):
            # torch may have changed the thread's context, and cuda-core launches in the current one.
            _ready_devices().discard(device)
            self._launch_on_gpu(device, grid, block, args, types, tensors, nulls, shared_bytes, cluster)

    def resident_clusters(self, device: torch.device, block: Size, cluster: Size, shared_bytes: int = 0) -> int:
        """Return how many clusters of the kernel a GPU of compute capability 9.0 or later runs at once; 0 if none.

        A grid of more clusters ends with a second round. The number is less than the multiprocessors suggest, because
        a cluster lies within a group of them, and the groups of one GPU differ in size.

        Args:
            device: the GPU.
            block: threads per block.
            cluster: blocks per cluster.
            shared_bytes: size of the `extern __shared__` array, in bytes.

        Raises:
            ValueError: the device is no GPU.
            CudaError: the file does not compile, or the driver refuses the configuration.
        """
        if device.type != "cuda":
            raise ValueError(f"{self.name}: device must be a GPU to run clusters, not {device}")
        key = (device, block, cluster, shared_bytes)
        if key not in self._resident_clusters:
            index = torch.cuda.current_device() if device.index is None else device.index
            with torch.cuda.device(index):
                config = _config(self.name, cluster, block, shared_bytes, cluster)
                stream = _stream(index, torch_internals.current_stream(index))
                loaded = self._gpu_kernel(index)
                loaded.allow_shared_bytes(max(shared_bytes, loaded.allowed_shared_bytes))
                try:
                    most = loaded.handle.occupancy.max_active_clusters(config, stream=stream)
                except Exception as error:
                    raise CudaError(f"{self.name} cannot be launched in clusters of {cluster}: {error}") from error
            self._resident_clusters[key] = most
        return self._resident_clusters[key]

    def _gpu_kernel(self, device: int) -> _GpuKernel:
        kernel = self._on_gpu.get(device)
        if kernel is None:
            with _compiling:
                kernel = self._on_gpu[device] = _GpuKernel(self.source, self.name, _kernel_names(self.source), device)
        return kernel

    def _launch_on_cpu(
        self, grid: Size, block: Size, args: tuple[Argument, ...], shared_bytes: int, cluster: Size | None
    ) -> None:
        for i, argument in enumerate(args):
            if isinstance(argument, torch.Tensor) and not argument.is_cpu:
                raise ValueError(f"{self.name}: argument {i} is on {argument.device}, neither a GPU nor the CPU")
        if cluster is not None:
            raise Lack(f"{self.name}: clusters need a GPU: on the CPU the blocks run in sequence")
        blocks, threads = _geometry(self.name, grid, block)
        check_shared_bytes(self.name, shared_bytes)
        if 0 not in blocks:
            self.launches_on_cpu += 1
            self._cpu_kernel().launch(blocks, threads, shared_bytes, args)

    def _cpu_kernel(self) -> CpuKernel:
        how = mode()
        kernel = self._on_cpu.get(how)
        if kernel is None:
            with _compiling:
                kernel = self._on_cpu[how] = CpuKernel(
                    self.source, self.name, _kernel_names(self.source), how == "checked"
                )
        return kernel

    def compile_for(self, device: str) -> None:
        """Compile the kernel for "cpu" or for the current GPU, "cuda", and launch nothing.

        Raises:
            CudaError: the compiler is missing. CompilationError: the file does not compile.
        """
        if device == "cpu":
            self._cpu_kernel()
        else:
            compile_kernels(
                self.source,
                self.name,
                _kernel_names(self.source),
                architecture(*torch.cuda.get_device_capability()),
            )

    def _launch_on_gpu(
        self,
        device: int,
        grid: Size,
        block: Size,
        args: tuple[Argument, ...],
        types: tuple[type, ...],
        tensors: tuple[int, ...],
        nulls: tuple[int, ...],
        shared_bytes: int,
        cluster: Size | None,
    ) -> None:
        config = _config(self.name, grid, block, shared_bytes, cluster)
        if config is None:
            return
        core = _core()
        stream = _stream(device, torch_internals.current_stream(device))
        kernel = self._gpu_kernel(device)
        conversions = kernel.conversions.get(types)
        if conversions is None:
            conversions = kernel.conversions[types] = kernel.check(args)
        if shared_bytes > kernel.allowed_shared_bytes:
            kernel.allow_shared_bytes(shared_bytes)
        values: list[Any] = list(args)
        for i in tensors:
            values[i] = values[i].data_ptr()
        for i in nulls:
            values[i] = 0
        for i in conversions:
            values[i] = kernel.convert(i, values[i], for_gpu=True)
        try:
            core.launch(stream, config, kernel.handle, *values)
        except Exception as error:
            sizes = f"grid {grid}, block {block}, {shared_bytes} bytes of dynamic shared memory"
            raise CudaError(f"{self.name} cannot be launched with {sizes}: {error}") from error
        if (record := launch_records.current) is not None:
            blocks, threads = _geometry(self.name, grid, block)
            clusters = f", clusters of {_three(cluster)}" if cluster is not None else ""
            record.record_launch(kernel.code, f"grid {blocks}, block {threads}, {shared_bytes} bytes{clusters}", args)
        if (recorder := known_calls.recorder()) is not None:
            maps = [(i, *recorder.maps[id(x)][1:]) for i, x in enumerate(args) if id(x) in recorder.maps]
            if all(isinstance(x, _REPEATABLE) or id(x) in recorder.maps for x in args):
                numbers: list[tuple[int, int, Callable[[Any], Any]]] = [
                    (i, place, functools.partial(kernel.convert, i, for_gpu=True) if i in conversions else float)
                    for i, x in enumerate(args)
                    if (place := recorder.place_of_number(x)) is not None
                ]
                recorder.record_launch(_again(device, config, kernel, values, tensors, maps, numbers))
            else:
                recorder.refuse()


def _again(
    device: int,
    config: LaunchConfig,
    kernel: _GpuKernel,
    values: list[Any],
    tensors: tuple[int, ...],
    maps: list[tuple[int, int, Callable[[int], Any]]],
    numbers: list[tuple[int, int, Callable[[Any], Any]]],
) -> Callable[[known_calls.CallPlaces], known_calls.Launch]:
    """Return a launch for `known_calls`, of a kernel to which `values` were passed.

    `maps` holds the position of each tensor map among them, its address, and what makes such a map of another address.
    `numbers` holds the position of each number in which calls of a kind may differ, the place of its value, and its
    conversion.
    """
    launch = _launcher(config, kernel)

    def again(places: known_calls.CallPlaces) -> known_calls.Launch:
        at = {i: places.find_address(values[i]) for i in tensors if values[i]}
        at |= {i: places.find_address(address) for i, address, _ in maps} | {i: place for i, place, _ in numbers}
        constants = values if launch is None else [x.item() if isinstance(x, np.generic) else x for x in values]
        taken = [at[i] if i in at else places.add_constant(constant) for i, constant in enumerate(constants)]
        arguments = known_calls.arguments_at(taken, {i: convert for i, _, convert in (*maps, *numbers)})
        if launch is not None:
            return lambda values_of_call, stream: launch(arguments(values_of_call), stream)
        core = _core()

        def launch_again(values_of_call: Sequence[Any], stream: int) -> None:
            core.launch(_stream(device, stream), config, kernel.handle, *arguments(values_of_call))

        return launch_again

    return again


def _launcher(config: LaunchConfig, kernel: _GpuKernel) -> Callable[[tuple[Any, ...], int], None] | None:
    """Return torch's launcher of a kernel: see `torch_internals.launcher`. Return None if it cannot launch this one."""
    letters = [parameter.type_letter for parameter in kernel.parameters]
    if config.cluster is not None or None in letters:
        return None
    types = "".join(filter(None, letters))
    return torch_internals.launcher(int(kernel.handle.handle), config.grid, config.block, config.shmem_size, types)


class _GpuKernel(LoadedKernel):
    """One kernel loaded on one device."""

    def __init__(self, source: pathlib.Path, name: str, also: set[str], device: int) -> None:
        from cuda.bindings import driver

        # By the types of the arguments: the positions of the arguments that must be converted.
        self.conversions: dict[tuple[type, ...], tuple[int, ...]] = {}
        self._arch = architecture(*torch.cuda.get_device_capability(device))
        compiled = compile_kernels(source, name, also, self._arch)
        self._cubin, self._mangled = compiled.path, compiled.lowered_names[name]
        try:
            self.handle = _object_code(compiled.path).get_kernel(compiled.lowered_names[name])
            sizes = [parameter.size for parameter in self.handle.arguments_info]
        except Exception as error:
            raise CudaError(f"{name} cannot be loaded: {error}") from error
        declared = declarations.find_declaration(source, name)
        super().__init__(name, _parameters(compiled.lowered_names[name], sizes, declared), declared)
        self._shared_limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._device = _driver_result(driver.cuDeviceGet(device))
        if torch.cuda.get_device_capability(device) >= (9, 0):
            large = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._set(large, 1, "clusters of more than 8 blocks")
        self.allowed_shared_bytes = _driver_result(
            driver.cuKernelGetAttribute(self._shared_limit, self.handle.handle, self._device)
        )

    @functools.cached_property
    def code(self) -> launch_records.Code:
        """The compiled code that is launched."""
        return launch_records.Code(self.name, self._mangled, self._arch, self._cubin.read_bytes())

    def check(self, args: tuple[Argument, ...]) -> tuple[int, ...]:
        """Return the positions of the numbers that have to be converted.

        Raises:
            TypeError: the number or the types of the arguments do not fit the kernel.
        """
        self.check_count(len(args))
        for position, (parameter, argument) in enumerate(zip(self.parameters, args, strict=True)):
            if not parameter.takes(argument):
                raise self.mismatch(position, argument)
        return tuple(
            position
            for position, (parameter, argument) in enumerate(zip(self.parameters, args, strict=True))
            if parameter.kind in "iufheb" and type(argument) is not parameter.python_type
        )

    def allow_shared_bytes(self, shared_bytes: int) -> None:
        """Raise the kernel's limit of dynamic shared memory above the default."""
        self._set(self._shared_limit, shared_bytes, f"{shared_bytes} bytes of dynamic shared memory")
        self.allowed_shared_bytes = shared_bytes

    def _set(self, attribute: Any, value: int, meaning: str) -> None:
        from cuda.bindings import driver

        result = driver.cuKernelSetAttribute(attribute, value, self.handle.handle, self._device)
        if result[0].value:
            raise CudaError(f"{self.name}: {meaning} are refused: {result[0].name}")


def architecture(major: int, minor: int) -> str:
    """Return the name of a compute capability; 9.0 and 10.0 get the suffix "a" for wgmma and the like."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) in ((9, 0), (10, 0)) else "")


@functools.cache
def _core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise CudaError("CUDA C++ on a GPU needs the package cuda-core") from error
    return cuda.core


@functools.cache
def _object_code(cubin: pathlib.Path) -> Any:
    return _core().ObjectCode.from_cubin(cubin.read_bytes())


def _stream(device: int, handle: int) -> Any:
    """Return a stream of the current device, for a launch of this thread."""
    ready = _ready_devices()
    if device not in ready:
        # Autograd's threads start without a CUDA context. torch creates one when needed, cuda-core does not.
        _core().Device(device).set_current()
        ready.add(device)
    # The cache holds only a stream's handle, so a stream that torch has freed does no harm.
    stream = _streams.get((device, handle))
    if stream is None:
        stream = _streams[device, handle] = _core().Stream.from_handle(handle)
    return stream


def _ready_devices() -> set[int]:
    try:
        return _thread.ready
    except AttributeError:
        _thread.ready = set()
        return _thread.ready


def _driver_result(result: tuple[Any, ...]) -> Any:
    if result[0].value:
        raise CudaError(result[0].name)
    return result[1]


def _three(size: Size) -> Index:
    numbers = tuple(map(operator.index, size)) if isinstance(size, tuple) else (operator.index(size),)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"{size} has {len(numbers)} dimensions; 1 to 3 are possible")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


@functools.lru_cache(maxsize=4096)
def _geometry(name: str, grid: Size, block: Size) -> tuple[Index, Index]:
    blocks, threads = _three(grid), _three(block)
    if min(blocks) < 0:
        raise ValueError(f"{name}: a grid of {grid} has a negative number of blocks")
    check_grid(name, blocks)
    check_block(name, threads)
    return blocks, threads


@functools.lru_cache(maxsize=4096)
def _config(name: str, grid: Size, block: Size, shared_bytes: int, cluster: Size | None) -> LaunchConfig | None:
    """Return cuda-core's launch configuration, or None for an empty grid."""
    blocks, threads = _geometry(name, grid, block)
    if 0 in blocks:
        return None
    if cluster is None:
        return _core().LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes)
    shape = _three(cluster)
    if min(shape) < 1 or any(n % c for n, c in zip(blocks, shape, strict=True)):
        raise ValueError(f"{name}: a grid of {grid} blocks cannot be split into clusters of {cluster}")
    # cuda-core counts the grid in clusters.
    clusters = tuple(n // c for n, c in zip(blocks, shape, strict=True))
    return _core().LaunchConfig(grid=clusters, cluster=shape, block=threads, shmem_size=shared_bytes)


def _parameters(
    lowered_name: str, sizes: list[int], declared: declarations.DeclaredKernel | None = None
) -> list[KernelParameter]:
    """Return a kernel's parameters, read from its mangled name; for extern "C", from the file, or else the sizes."""
    types = _parameter_types(lowered_name)
    if types is None and declared is not None and declared.template is None:
        types = [parameter.type for parameter in declared.parameters]
    if types is None or len(types) != len(sizes):
        names = {1: "bool", 8: "any of 8 bytes"}
        types = [names.get(size, f"a type of {size} bytes") for size in sizes]
    return [KernelParameter.from_type(type_, size) for type_, size in zip(types, sizes, strict=True)]


def _parameter_types(lowered_name: str) -> list[str] | None:
    demangled = demangle(lowered_name)
    if demangled is None or not demangled.endswith(")"):
        return None
    types, depth, end = [], 0, len(demangled) - 1
    for at in range(end, -1, -1):
        character = demangled[at]
        depth += (character in ")>") - (character in "(<")
        if depth == 0 or (depth == 1 and character == ","):
            types.append(demangled[at + 1 : end].strip())
            end = at
        if depth == 0:
            break
    return [type_ for type_ in reversed(types) if type_]
