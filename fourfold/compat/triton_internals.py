"""Triton's private parts: launches that skip its lookup of compiled kernels, and compilation without a GPU."""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fourfold.compat import find, uses


class TritonParameter(NamedTuple):
    """A kernel's parameter, and whether one kernel serves all integers: else 1 and multiples of 16 have their own."""

    name: str
    is_constexpr: bool
    do_not_specialize: bool


class CompiledCode(NamedTuple):
    """A compiled kernel: its hash, its mangled name, its machine code and its PTX."""

    digest: str
    name: str
    cubin: bytes
    ptx: str


@uses(
    "triton.runtime.JITFunction().params",
    "triton.runtime.jit.KernelParam().name",
    "triton.runtime.jit.KernelParam().is_constexpr",
    "triton.runtime.jit.KernelParam().do_not_specialize",
)
def parameters(kernel: Any) -> list[TritonParameter]:
    """Return the parameters of a function under `triton.jit`, in order. Triton does not document them."""
    return [TritonParameter(p.name, p.is_constexpr, p.do_not_specialize) for p in kernel.params]


@uses("triton.compiler.CompiledKernel.__getitem__")
def launch_compiled(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], stream: int) -> None:
    """Launch the result of ``kernel[grid](...)`` again, on three axes and a stream.

    The public ``kernel[grid](...)`` looks up the compiled kernel at every launch, which takes some 15 us. If
    `KNOWS_LAUNCHES` is False it must be used instead.
    """
    kernel[grid](*arguments, stream=stream)


@uses("triton.knobs.HookChain().calls")
def hook_check() -> Callable[[], bool]:
    """Return the function that returns whether Triton has to describe a launch to a hook."""
    runtime = triton.knobs.runtime
    return lambda: bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@uses(
    "triton.compiler.CompiledKernel.__getitem__",
    "triton.compiler.CompiledKernel.run",
    "triton.compiler.CompiledKernel().function",
    "triton.compiler.CompiledKernel().packed_metadata",
)
def relauncher(kernel: Any, grid: tuple[int, ...]) -> Callable[[tuple[Any, ...], int], None]:
    """Return the function that launches the result of ``kernel[grid](...)`` again, with arguments on a stream.

    The grid has three axes. The function takes addresses in place of tensors. Where there are no hooks, it omits what
    Triton describes to them at each launch.
    """
    run, function, metadata, is_hooked = kernel.run, kernel.function, kernel.packed_metadata, hook_check()
    x, y, z = grid

    def relaunch(arguments: tuple[Any, ...], stream: int) -> None:
        if is_hooked():
            kernel[grid](*arguments, stream=stream)
        else:
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return relaunch


def _example(x: Any, n: Any, BLOCK: tl.constexpr) -> None:
    """Do nothing, as an example of a function under `triton.jit`."""


def _knows_launches() -> bool:
    expected = [
        TritonParameter("x", False, False),
        TritonParameter("n", False, True),
        TritonParameter("BLOCK", True, False),
    ]
    try:
        find("triton.compiler.CompiledKernel.__getitem__")
        return parameters(triton.JITFunction(_example, do_not_specialize=["n"])) == expected
    except Exception:  # any change of a release
        return False


# Whether Triton exposes what it compiles for, and can launch compiled kernels again.
KNOWS_LAUNCHES = _knows_launches()


@uses("triton.runtime.JITFunction.run")
def failed_launch(error: BaseException) -> tuple[str, tuple[int, ...]] | None:
    """Return the kernel's name and the grid of the launch on a GPU that raised an exception; None for any other."""
    code = getattr(triton.JITFunction.run, "__code__", None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        grid = frame.f_locals.get("grid")
        if frame.f_code is code and isinstance(grid, tuple | list):
            return frame.f_locals["self"].__name__, tuple(grid)
    return None


@uses("triton.runtime.JITFunction.run")
@contextlib.contextmanager
def launches_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run` in place of every launch of a kernel.

    Args:
        run: takes Triton's own function, the kernel, the launch's arguments, and by name `grid`, `warmup` and the
            options. Triton's function takes the same except itself, compiles without launching if `warmup` is True, and
            returns the compiled kernel. No public hook can prevent a launch.
    """
    shipped = triton.JITFunction.run

    def replace_attribute(kernel: Any, *arguments: Any, **options: Any) -> Any:
        return run(shipped, kernel, *arguments, **options)

    triton.JITFunction.run = replace_attribute
    try:
        yield
    finally:
        triton.JITFunction.run = shipped


class NotKept(BaseException):
    """Triton's cache on disk lacks the wanted kernel, which would have to be compiled."""


class Compilation(NamedTuple):
    """A kernel that Triton is about to compile, or to load from its cache on disk.

    Attributes:
        kernel: its name.
        digest: of the kernel's source and of the functions that it calls.
        sizes: the integers among its constants, by name.
        num_warps: of a program.
        load: loads it from the cache, and raises `NotKept` if it is missing.
        run: compiles it if it is missing, and loads it.
        specialisation: what Triton compiles it for, apart from its options; empty where this is unknown.
        run_as: compiles the kernel for something else if the cache lacks that, and loads it.
    """

    kernel: str
    digest: str
    sizes: dict[str, int]
    num_warps: int
    load: Callable[[], Any]
    run: Callable[[], Any]
    specialisation: "Specialisation"
    run_as: Callable[["Specialisation"], Any]


@dataclass(frozen=True)
class Specialisation:
    """What Triton compiles a kernel for.

    Attributes:
        types: the type of each argument, by name, as "*fp16", "i32" and "constexpr".
        constants: the constants by their place among the arguments.
        multiples: by the place of an argument, Triton's words for a multiple of 16, or nothing for another number.
    """

    types: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    multiples: Mapping[tuple[int, ...], Any]

    @property
    def name(self) -> str:
        """Return a name, equal for equal specialisations."""
        return repr([sorted(self.types.items()), sorted(self.constants.items()), sorted(self.multiples.items())])

    def with_other_integers(self) -> "Specialisation | None":
        """Return it for integers that are multiples of 16, or for others if some are; None if it has no integers."""
        places = [(place,) for place, kind in enumerate(self.types.values()) if kind == "i32"]
        words = [word for place, word in self.multiples.items() if word and place not in places]
        if not places or not words:
            return None
        word = [] if any(self.multiples.get(place) for place in places) else words[0]
        return replace(self, multiples={**self.multiples, **dict.fromkeys(places, word)})

    def dtype(self) -> str | None:
        """Return the floating-point dtype of the tensors, or None if they have none, or several."""
        kinds = {kind[1:] for kind in self.types.values() if kind.startswith("*")} & FLOATS.keys()
        return FLOATS[kinds.pop()] if len(kinds) == 1 else None

    def with_dtype(self, dtype: str) -> "Specialisation":
        """Return it for tensors of another floating-point dtype, and for computation in float64 if that is the dtype.

        Args:
            dtype: the name of the dtype, as "float16".
        """
        short = next(short for short, name in FLOATS.items() if name == dtype)
        types = {
            name: f"*{short}" if kind.startswith("*") and kind[1:] in FLOATS else kind
            for name, kind in self.types.items()
        }
        wide, narrow = (tl.float64, tl.float32) if dtype == "float64" else (tl.float32, tl.float64)
        constants = {
            place: wide if isinstance(value, tl.dtype) and value == narrow else value
            for place, value in self.constants.items()
        }
        return replace(self, types=types, constants=constants)


# Triton's names of floating-point dtypes, and torch's.
FLOATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


_loading = threading.local()


@contextlib.contextmanager
def _unchanged_value(compilation: Callable[[Compilation], Any]) -> Iterator[None]:
    """Leave Triton's compilation unchanged."""
    yield


@uses(
    "triton.runtime.JITFunction._do_compile",
    "triton.runtime.JITFunction().cache_key",
    "triton.backends.nvidia.compiler.CUDABackend.add_stages",
    otherwise=_unchanged_value,
)
@contextlib.contextmanager
def compilations_replaced(compilation: Callable[[Compilation], Any]) -> Iterator[None]:
    """Call `compilation` to compile or load each kernel that is new in this process.

    Triton's public hooks cannot tell whether the cache holds a kernel. Triton asks its backend for the stages of a
    compilation only if the cache does not.
    """
    shipped, backend = triton.JITFunction._do_compile, find("triton.backends.nvidia.compiler.CUDABackend")
    stages = backend.add_stages

    def run(kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *rest: Any) -> Any:
        def compile_or_load() -> Any:
            return shipped(kernel, key, signature, device, constants, options, *rest)

        def load() -> Any:
            _loading.now = True
            try:
                return compile_or_load()
            finally:
                _loading.now = False

        def run_as(other_form: Specialisation) -> Any:
            attributes = (other_form.multiples, *rest[1:])
            return shipped(kernel, key, other_form.types, device, other_form.constants, options, *attributes)

        names = [parameter.name for parameter in parameters(kernel)]
        sizes = {names[path[0]]: value for path, value in constants.items() if type(value) is int}
        warps = getattr(options, "num_warps", 1)
        plain = all(isinstance(kind, str) for kind in signature.values())  # the type of a tuple is a tuple
        multiples = rest[0] if rest and isinstance(rest[0], Mapping) else {}
        form = Specialisation(signature if plain else {}, constants, multiples)
        request = Compilation(kernel.__name__, kernel.cache_key, sizes, warps, load, compile_or_load, form, run_as)
        return compilation(request)

    def add_stages(*arguments: Any, **keywords: Any) -> Any:
        if getattr(_loading, "now", False):
            raise NotKept
        return stages(*arguments, **keywords)

    triton.JITFunction._do_compile, backend.add_stages = run, add_stages
    try:
        yield
    finally:
        triton.JITFunction._do_compile, backend.add_stages = shipped, stages


@uses("triton.backends.compiler.GPUTarget")
class AbsentDriver:
    """The driver of an absent GPU, with the answers that Triton needs to compile for it.

    Args:
        capability: the GPU's compute capability, for example 90.
    """

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the target of compilation."""
        return self.target

    def get_current_device(self) -> int:
        """Return the architecture as the device: Triton stores compiled kernels by device."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


@uses("triton.runtime.driver._active", "triton.runtime.driver.set_active")
@contextlib.contextmanager
def driver_replaced(replacement: Any) -> Iterator[None]:
    """Make Triton use another driver than that of the GPU.

    The public ``driver.active`` searches for a GPU and raises if there is none: it cannot return the driver to restore.
    """
    former = driver._active
    driver.set_active(replacement)
    try:
        yield
    finally:
        driver.set_active(former)


class AcceptedByFrontEnd(BaseException):
    """Triton's front end has compiled a kernel to Triton's own intermediate representation."""


class _Nothing:
    """A cache of compiled kernels that keeps nothing."""

    def __init__(self, key: str) -> None:
        pass

    def get_file(self, filename: str) -> None:
        """Return None: there is no file."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Return the path of no file."""
        return ""

    def get_group(self, filename: str) -> None:
        """Return None: there are no files."""

    def put_group(self, filename: str, group: Mapping[str, str]) -> None:
        """Keep nothing."""


@uses("triton.backends.nvidia.compiler.CUDABackend.add_stages", "triton.runtime.cache.triton_key")
def stop_after_front_end() -> None:
    """Let every compilation of this process end after the front end, with `AcceptedByFrontEnd`, and leave no file.

    What follows depends on a GPU's architecture, takes most of the time, and refuses nothing that the language allows.
    """
    backend, cache = find("triton.backends.nvidia.compiler.CUDABackend"), find("triton.runtime.cache")
    shipped = backend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        def accept(*_: Any) -> None:
            raise AcceptedByFrontEnd

        shipped(self, stages, *arguments, **keywords)
        _, second, *_ = stages
        stages[second] = accept

    backend.add_stages = add_stages
    triton.knobs.cache.manager_class = _Nothing
    cache.triton_key = lambda: ""  # otherwise it reads every file of Triton, for a second


@uses(
    "triton.compiler.CompiledKernel().hash",
    "triton.compiler.CompiledKernel().metadata",
    "triton.compiler.CompiledKernel().asm",
)
def code_of(compiled: Any) -> CompiledCode:
    """Return the code that a launch compiled, or a call of Triton's function under `launches_replaced`."""
    return CompiledCode(compiled.hash, compiled.metadata.name, compiled.asm["cubin"], compiled.asm["ptx"])


class Shape(NamedTuple):
    """The launch parameters of a compiled kernel, apart from the grid.

    Attributes:
        threads: of a program.
        shared_bytes: of dynamic shared memory.
        blocks_per_program: those of a cluster.
        options: the driver options that the kernel was compiled with.
        arch: the architecture, such as "sm_90".
    """

    threads: int
    shared_bytes: int
    blocks_per_program: int
    options: tuple[str, ...]
    arch: str


@uses("triton.compiler.CompiledKernel().metadata")
def shape_of(compiled: Any) -> Shape:
    """Return the launch parameters of a compiled kernel."""
    data = compiled.metadata
    options = [name for name in ("launch_cooperative_grid", "launch_pdl") if getattr(data, name, False)]
    threads = data.num_warps * data.target.warp_size
    return Shape(threads, data.shared, getattr(data, "num_ctas", 1), tuple(options), f"sm_{data.target.arch}")


# The letters of `torch_internals.launcher`, by the types in the signature of a kernel.
_LETTERS = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
_LETTERS |= {"u1": "I", "u8": "B", "u16": "H", "u32": "I", "u64": "K"}


class EntryPoint(NamedTuple):
    """A compiled kernel as the driver launches it.

    Attributes:
        handle: the driver's.
        passed: the places of the arguments that are passed among all of them. Two null addresses follow.
        types: the letters of all that is passed, for `torch_internals.launcher`.
    """

    handle: int
    passed: tuple[int, ...]
    types: str


@uses(
    "triton.compiler.ASTSource().signature",
    "triton.compiler.CompiledKernel().function",
    "triton.compiler.CompiledKernel().metadata",
)
def entry_of(compiled: Any) -> EntryPoint | None:
    """Return how to launch a compiled kernel without Triton. Return None if it takes more than numbers and addresses.

    The driver launches it without clusters and further options.
    """
    data, shape, signature = compiled.metadata, shape_of(compiled), list(compiled.src.signature.values())
    passed = tuple(place for place, kind in enumerate(signature) if kind != "constexpr")
    letters = ["O" if str(signature[place]).startswith("*") else _LETTERS.get(signature[place]) for place in passed]
    scratch = getattr(data, "global_scratch_size", 0) or getattr(data, "profile_scratch_size", 0)
    if None in letters or scratch or shape.blocks_per_program != 1 or shape.options:
        return None
    return EntryPoint(compiled.function, passed, "".join(filter(None, letters)) + "OO")


@uses("triton._C.libtriton.nvidia.cublas.CublasLt")
def replace_cublas(replacement: type) -> None:
    """Replace Triton's own calls of cuBLAS permanently by a class: they need the library, and a GPU."""
    find("triton._C.libtriton").nvidia.cublas.CublasLt = replacement
