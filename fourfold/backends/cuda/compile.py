"""Shared parts of compiling a `.cu` file (cache, includes), and NVRTC, which needs neither a GPU nor a driver.

`fourfold.backends.cuda.launch` uses this module for the present GPU, and `compile_ahead_of_time` for any architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from fourfold.backends.cuda.declarations import own_include_directories, source_closure
from fourfold.backends.cuda.device_code import needs_torch, nvrtc_source
from fourfold.backends.cuda.machine_code import code_sha256
from fourfold.processes.family import temporary_folder
from fourfold.processes.files import write_atomically

Entry = TypeVar("Entry")


class CudaError(RuntimeError):
    """A CUDA C++ file does not compile, or the driver refuses something. The message contains the compiler's output."""


class CompilationError(CudaError):
    """The compiler rejects a CUDA C++ file. The message contains its output."""


# The free space that a cache's folder must have: more than one kernel, or a baseline, takes.
_ROOM_BYTES = 64 << 20


def cache_directory() -> pathlib.Path:
    """Return the folder of compiled kernels: $FOURFOLD_CACHE, else $XDG_CACHE_HOME/fourfold, else ~/.cache/fourfold.

    If it is not writable, a folder in the system's temporary one is used instead.
    """
    base = os.environ.get("FOURFOLD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fourfold"
    )
    # The user's number in the name: a directory that another user made must not be trusted.
    fallback = pathlib.Path(tempfile.gettempdir(), f"fourfold-{os.getuid()}")
    if _usable(path := pathlib.Path(base)):
        return path
    if _usable(fallback, mode=0o700) and fallback.stat().st_uid == os.getuid():
        return fallback
    return _cache_of_this_process()


def cache_folder(*names: str) -> pathlib.Path:
    """Return an existing folder of the cache, or one private to this process if another user owns the folder."""
    folder = cache_directory().joinpath(*names)
    if not _usable(folder):
        folder = _cache_of_this_process().joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _usable(folder: pathlib.Path, mode: int = 0o777) -> bool:
    """Return whether a folder exists or can be created, and accepts new files."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free >= _ROOM_BYTES
    except OSError:
        return False


@functools.cache
def _cache_of_this_process() -> pathlib.Path:
    return temporary_folder("fourfold-cache-")


@contextlib.contextmanager
def directory_lock(directory: pathlib.Path) -> Iterator[None]:
    """Hold a directory's lock, so that one of several processes compiles a kernel and the others wait.

    If locking is impossible, each process compiles: each replaces the others' files as a whole.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(directory / "lock", "w")), fcntl.LOCK_EX)
        yield


def checksum(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_entry(path: pathlib.Path, description: Mapping[str, Any]) -> None:
    """Make a file in a cache's folder an entry: write its checksum and a description beside it."""
    content = json.dumps({**description, "sha256": checksum(path)})
    write_atomically(path.with_suffix(".json"), content.encode())


def find_entry(
    directory: pathlib.Path, suffix: str, key: str, name: str
) -> tuple[pathlib.Path, Mapping[str, Any]] | None:
    """Return an entry of a cache's folder and its description, or None if it is missing or damaged.

    Args:
        directory: the folder.
        suffix: of the entries' files.
        key: the key of the description that is searched.
        name: the name that its value must contain.
    """
    for manifest in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the errors of a truncated file
            description = json.loads(manifest.read_text())
            path = manifest.with_suffix(suffix)
            if name in description[key] and description["sha256"] == checksum(path):
                return path, description
    return None


def load_or_compile(
    directory: pathlib.Path,
    name: str,
    also: Collection[str],
    find: Callable[[str], Entry | None],
    compile_names: Callable[[list[str]], object],
) -> Entry:
    """Return the entry of a kernel in a cache's folder; compile it first if it is missing.

    Args:
        directory: the folder.
        name: the kernel, a C++ name expression.
        also: other kernels of the file, to compile together with it if it has to be compiled.
        find: returns the entry of a kernel, or None.
        compile_names: compiles kernels into the folder.

    Raises:
        CudaError: the kernel does not compile.
    """
    if path := find(name):
        return path
    with directory_lock(directory):
        if path := find(name):
            return path
        missing = sorted({name, *(n for n in also if not find(n))})
        try:
            compile_names(missing)
        except CudaError:
            # The error may lie in one of the other kernels, so compile this one alone.
            if missing == [name]:
                raise
            compile_names([name])
        compiled = find(name)
        assert compiled is not None
        return compiled


def demangle(name: str) -> str | None:
    """Return the C++ name of a symbol, or None for a plain one."""
    if not name.startswith("_Z"):
        return None
    try:
        function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if status.value or not text:
        return None
    try:
        return ctypes.string_at(text).decode()
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(text)


def digest(*parts: object) -> str:
    """Return a short hash of the values' representations."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def check_headers(texts: Mapping[str, str]) -> None:
    """Check that a `.cu` file, whose texts `source_closure` gives, is device code, and no extension of torch.

    Raises:
        CompilationError: it includes headers of torch. The message says what to do.
    """
    for path, text in texts.items():
        if header := needs_torch(text):
            raise CompilationError(
                f"{pathlib.Path(path).name} includes {header}, and Fourfold compiles device code without torch's"
                " headers. Either move the __global__ functions to a .cu file that does not include them, or compile"
                " the file with torch.utils.cpp_extension.load or load_inline on a GPU and name the Python function"
            )


@functools.cache
def cuda_include_directories() -> tuple[pathlib.Path, ...]:
    """Return the folders of NVIDIA's headers, from pip's wheels, conda or a toolkit.

    If the wheels lack the headers of nvidia-cuda-crt, a toolkit's folder comes last and supplies them.

    Raises:
        CudaError: the headers are missing.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise CudaError("NVIDIA's headers cannot be found without the package cuda-pathfinder") from error
    headers = [find_nvidia_header_directory(library) for library in ("cudart", "cccl")]
    if headers[0] is None:
        packages = "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl"
        raise CudaError(f"NVIDIA's headers are missing: install {packages}, or a CUDA toolkit")
    directories = [pathlib.Path(directory) for directory in headers if directory]
    if not any((directory / "crt").is_dir() for directory in directories):
        nvcc = shutil.which("nvcc")
        beside_nvcc = nvcc and os.path.dirname(os.path.dirname(nvcc))
        homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), beside_nvcc, "/usr/local/cuda")
        toolkits = (pathlib.Path(home, "include") for home in homes if home)
        directories += [directory for directory in toolkits if (directory / "crt").is_dir()][:1]
    return tuple(directories)


@dataclasses.dataclass(frozen=True)
class CompiledKernels:
    """A cubin, its kernels' mangled names by C++ name expression, and the compiler's log."""

    path: pathlib.Path
    lowered_names: Mapping[str, str]
    log: str


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """The resources that one kernel needs on one architecture.

    Attributes:
        name: the C++ name expression.
        arch: such as "sm_90a".
        registers: per thread.
        spill_store_bytes, spill_load_bytes: bytes moved to and from memory for lack of registers. Each instruction
            counts once.
        stack_bytes: per thread, for spilled registers and for local arrays outside registers.
        shared_bytes: static shared memory per block.
        constant_bytes: of bank 0: the parameters and what the driver puts before them.
        code_sha256: hash of the machine code, constants and data, as `machine_code.code_sha256` makes it.
        instruction_counts: how often each opcode, without its modifiers, occurs in the code: LDG, FFMA, HMMA, BAR.
    """

    name: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    constant_bytes: int
    code_sha256: str
    instruction_counts: Mapping[str, int]


def nvrtc_options(source: pathlib.Path, arch: str) -> list[str]:
    """Return NVRTC's options for every `.cu` file. Arithmetic is exact, except for contraction to fma, nvcc's default.

    Args:
        source: the `.cu` file.
        arch: such as "sm_80", "sm_90a", "sm_100a", "sm_120".
    """
    directories = [*own_include_directories(source), *cuda_include_directories()]
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--generate-line-info",
        "--ptxas-options=-v",
        # nvcc defines these two without a header, NVRTC does not.
        "--define-macro=INFINITY=__int_as_float(0x7f800000)",
        "--define-macro=NAN=__int_as_float(0x7fffffff)",
        *(f"--include-path={directory}" for directory in directories),
    ]


def compile_kernels(
    source: pathlib.Path, name: str, also: Collection[str], arch: str, reproducible: bool = False
) -> CompiledKernels:
    """Return the cubin that contains a kernel, from the cache or freshly compiled. Needs neither a GPU nor a driver.

    Args:
        source: the `.cu` file.
        name: the kernel, a C++ name expression.
        also: other kernels of the file, to compile together with it if it has to be compiled.
        arch: such as "sm_90a".
        reproducible: whether the cubin must contain the kernel and `also` alone, whatever was compiled before. The code
            and the shared memory of a kernel depend on the kernels that are compiled together with it.

    Raises:
        CudaError: NVRTC is missing or rejects the file. The message contains its output.
    """
    options, texts = nvrtc_options(source, arch), source_closure(source)
    check_headers(texts)
    prepared = nvrtc_source(str(source), texts)
    changed = [] if prepared == (texts[str(source)], {}) else [prepared]
    names = [sorted({name, *also})] if reproducible else []
    directory = cache_folder("cuda", digest(_nvrtc_version(), options, texts, *changed, *names))
    return load_or_compile(
        directory,
        name,
        also,
        lambda name: _find(directory, name),
        lambda names: _compile(source, names, options, directory),
    )


def kernel_log(compiled: CompiledKernels, name: str) -> str:
    """Return the part of the compiler's log about one kernel."""
    start = compiled.log.partition(f"Compiling entry function '{compiled.lowered_names[name]}'")[2]
    return start.partition("Compiling entry")[0]


def static_shared_bytes(log: str) -> int:
    """Return the static shared memory of a kernel in bytes, from the part of the compiler's log about it."""
    return _number(r"(\d+) bytes smem", log, 0)


def compile_ahead_of_time(source: pathlib.Path, names: Sequence[str], arch: str) -> dict[str, KernelResources]:
    """Compile kernels for an architecture, present or not, and return the resources that they need on it.

    Args:
        source: the `.cu` file.
        names: C++ name expressions of kernels, which are compiled together.
        arch: such as "sm_80", "sm_90a", "sm_100a", "sm_120".

    Returns:
        The resources of each kernel, by name.

    Raises:
        CudaError: NVRTC or cuobjdump is missing, or the file does not compile. The message contains the output.
    """
    source = pathlib.Path(source).resolve()
    resources = {}
    for name in names:
        compiled = compile_kernels(source, name, names, arch, reproducible=True)
        lowered, log = compiled.lowered_names[name], kernel_log(compiled, name)
        # The functions that a kernel calls have properties of their own, listed after the kernel's.
        properties = log.partition(f"Function properties for {lowered}\n")[2].partition("Function properties")[0]
        resources[name] = dataclasses.replace(
            resources_of_cubin(compiled.path, lowered, arch),
            name=name,
            spill_store_bytes=_number(r"(\d+) bytes spill stores", properties),
            spill_load_bytes=_number(r"(\d+) bytes spill loads", properties),
            stack_bytes=_number(r"(\d+) bytes stack frame", properties),
            shared_bytes=static_shared_bytes(log),
        )
    return resources


def _number(pattern: str, text: str, default: int | None = None) -> int:
    if match := re.search(pattern, text):
        return int(match[1])
    if default is None:
        raise CudaError(f"the compiler's output has no match for {pattern!r}:\n{text}")
    return default


@functools.lru_cache(maxsize=256)
def _resources(cubin: pathlib.Path, arch: str) -> dict[str, KernelResources]:
    """Return the resources of a cubin's kernels as cuobjdump reports them, by mangled name."""
    from cuda.pathfinder import find_nvidia_binary_utility

    cuobjdump = find_nvidia_binary_utility("cuobjdump")
    if cuobjdump is None:
        raise CudaError("cuobjdump is missing: install nvidia-cuda-cuobjdump")
    command = [cuobjdump, "--dump-resource-usage", "--dump-sass", str(cubin)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise CudaError(f"{' '.join(command)}\n{process.stderr}")
    usages = {
        name: {key: int(size) for key, size in re.findall(r"(\S+?):(\d+)", line)}
        for name, line in re.findall(r"Function (\S+):\n(.*)", process.stdout)
    }
    kernels, content = {}, cubin.read_bytes()
    for function in process.stdout.split("Function : ")[1:]:
        opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][A-Z0-9_]*)(\S*)", function, re.MULTILINE)
        name = function.split(maxsplit=1)[0]
        if name in usages:
            kernels[name] = KernelResources(
                name=name,
                arch=arch,
                registers=usages[name]["REG"],
                spill_store_bytes=_local_bytes("STL", opcodes),
                spill_load_bytes=_local_bytes("LDL", opcodes),
                stack_bytes=usages[name]["STACK"],
                shared_bytes=usages[name]["SHARED"],
                constant_bytes=usages[name]["CONSTANT[0]"],
                code_sha256=code_sha256(content, name),
                instruction_counts=MappingProxyType(Counter(code for code, _ in opcodes)),
            )
    return kernels


def _local_bytes(opcode: str, opcodes: Sequence[tuple[str, str]]) -> int:
    """Return the bytes that a thread moves to or from local memory, with each instruction counted once."""
    widths = (re.search(r"\.(\d+)", modifiers) for code, modifiers in opcodes if code == opcode)
    return sum(int(width[1]) // 8 if width else 4 for width in widths)


def resources_of_cubin(cubin: pathlib.Path, name: str, arch: str) -> KernelResources:
    """Return the resources of a kernel from its compiled code; all local memory traffic counts as spills.

    Args:
        cubin: the compiled code.
        name: the kernel's mangled name.
        arch: the architecture of the compiled code.

    Raises:
        CudaError: cuobjdump is missing or rejects the file, or the file has no such kernel.
    """
    kernels = _resources(cubin, arch)
    if name not in kernels:
        raise CudaError(f"{cubin.name} has no kernel {name}")
    return kernels[name]


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CudaError("compiling for a GPU needs the package cuda-bindings") from error
    return nvrtc


def _results(result: tuple[Any, ...]) -> Any:
    """Return the results of an NVRTC function, without the leading status."""
    if result[0].value:
        raise CudaError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    try:
        major, minor = _results(_nvrtc().nvrtcVersion())
    except CudaError:
        raise
    except Exception as error:  # cuda-pathfinder's error type differs between versions
        raise CudaError(f"NVRTC is missing: install nvidia-cuda-nvrtc ({error})") from error
    return major, minor


def _find(directory: pathlib.Path, name: str) -> CompiledKernels | None:
    if entry := find_entry(directory, ".cubin", "lowered_names", name):
        path, description = entry
        return CompiledKernels(path, description["lowered_names"], description["log"])
    return None


def _compile(source: pathlib.Path, names: list[str], options: list[str], directory: pathlib.Path) -> None:
    nvrtc = _nvrtc()
    if _nvrtc_version() >= (13, 0):
        # Split compilation uses all cores and gives the same code. A result from the driver's cache has no log.
        options = [*options, "--split-compile=0", "--no-cache"]
    text, headers = nvrtc_source(str(source), source_closure(source))
    contents, includes = ([part.encode() for part in parts] for parts in (headers.values(), headers))
    program = _results(nvrtc.nvrtcCreateProgram(text.encode(), str(source).encode(), len(headers), contents, includes))
    try:
        for name in names:
            _results(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        buffer = b" " * _results(nvrtc.nvrtcGetProgramLogSize(program))
        _results(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.decode(errors="replace").rstrip("\0 \n")
        if status.value:
            arch = options[0].partition("=")[2]
            raise CompilationError(f"{source.name} does not compile for {arch} ({status.name}):\n{log}")
        lowered = {name: _results(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in names}
        cubin = b" " * _results(nvrtc.nvrtcGetCUBINSize(program))
        _results(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    path = directory / f"{digest(names)}.cubin"
    write_atomically(path, cubin)
    write_entry(path, {"lowered_names": lowered, "log": log})
