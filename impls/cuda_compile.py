"""What every way of compiling a `.cu` file shares, and NVRTC: to a cubin for any architecture, with no GPU or driver.

`impls.cuda_launch` compiles through here for the GPU at hand, `compile_ahead_of_time` for architectures that are not.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

IMPLS = pathlib.Path(__file__).resolve().parent


class CudaError(RuntimeError):
    """A CUDA C++ file does not compile, or the driver refuses something. The message holds the compiler's output."""


class CompilationError(CudaError):
    """A compiler refuses a CUDA C++ file. The message holds what it has to say."""


def cache_directory() -> pathlib.Path:
    """Where compiled kernels are kept: $FOURFOLD_CACHE, else $XDG_CACHE_HOME/fourfold, else ~/.cache/fourfold.

    Where that cannot be written to, a directory under the system's temporary one takes its place.
    """
    base = os.environ.get("FOURFOLD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fourfold"
    )
    path = pathlib.Path(base)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        # The user's number in the name: another user's directory of this name could not be written to, or trusted.
        fallback = pathlib.Path(tempfile.gettempdir(), f"fourfold-{os.getuid()}")
        fallback.mkdir(mode=0o700, exist_ok=True)
        return fallback


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Holds a directory's lock, so that of processes that need the same kernel one compiles and the rest wait."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that other processes see either whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def digest(*parts: object) -> str:
    """A short hash of some values' representations."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def own_include_directories(source: pathlib.Path) -> list[pathlib.Path]:
    """Where a `.cu` file's own headers are looked for: beside it, and in `impls/`."""
    return [source.parent, IMPLS]


def source_closure(source: pathlib.Path) -> dict[str, str]:
    """The text of a `.cu` file and of every header that it includes in quotes, directly or through others, by path."""
    texts: dict[str, str] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if str(path) in texts:
            continue
        texts[str(path)] = text = path.read_text()
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE):
            candidates = (d / name for d in (path.parent, *own_include_directories(source)))
            pending += [c.resolve() for c in candidates if c.is_file()][:1]
    return texts


@functools.cache
def cuda_include_directories() -> tuple[pathlib.Path, ...]:
    """The directories of NVIDIA's headers, of pip's wheels, conda or a toolkit.

    Where the wheels lack those of nvidia-cuda-crt, a toolkit's directory comes last and fills the gap.

    Raises:
        CudaError: no headers are found.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise CudaError("NVIDIA's headers cannot be found without the package cuda-pathfinder") from error
    found = [find_nvidia_header_directory(library) for library in ("cudart", "cccl")]
    if found[0] is None:
        packages = "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl"
        raise CudaError(f"NVIDIA's headers are missing: install {packages}, or a CUDA toolkit")
    directories = [pathlib.Path(directory) for directory in found if directory]
    if not any((directory / "crt").is_dir() for directory in directories):
        nvcc = shutil.which("nvcc")
        beside_nvcc = nvcc and os.path.dirname(os.path.dirname(nvcc))
        homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), beside_nvcc, "/usr/local/cuda")
        toolkits = (pathlib.Path(home, "include") for home in homes if home)
        directories += [directory for directory in toolkits if (directory / "crt").is_dir()][:1]
    return tuple(directories)


@dataclasses.dataclass(frozen=True)
class CompiledKernels:
    """A cubin, the mangled name of each of its kernels by C++ name expression, and what the compiler said."""

    path: pathlib.Path
    lowered_names: Mapping[str, str]
    log: str


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What one kernel needs on one architecture.

    Attributes:
        name: the C++ name expression.
        arch: "sm_90a", say.
        registers: of a thread.
        spill_store_bytes, spill_load_bytes: code that moves registers to memory and back, for want of registers.
        stack_bytes: of a thread: spilled registers and local arrays that are not in registers.
        shared_bytes: static shared memory that the kernel declares, of a block.
        constant_bytes: of bank 0: the parameters and what the driver puts before them.
        code_sha256: of its machine code. (A cubin also says when it was compiled.)
        instruction_counts: how often each opcode, without its modifiers, is in the code: LDG, FFMA, HMMA, BAR.
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
    """How every `.cu` file is compiled for a GPU: exact arithmetic but for contraction to fma, which is nvcc's default.

    Args:
        source: the `.cu` file.
        arch: "sm_80", "sm_90a", "sm_100a", "sm_120" and so on.
    """
    directories = [*own_include_directories(source), *cuda_include_directories()]
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--generate-line-info",
        "--ptxas-options=-v",
        # nvcc knows these without a header.
        "--define-macro=INFINITY=__int_as_float(0x7f800000)",
        "--define-macro=NAN=__int_as_float(0x7fffffff)",
        *(f"--include-path={directory}" for directory in directories),
    ]


def compile_kernels(source: pathlib.Path, name: str, also: Collection[str], arch: str) -> CompiledKernels:
    """The cubin that holds a kernel, from the cache or compiled now. Needs neither a GPU nor a driver.

    Args:
        source: the `.cu` file.
        name: the kernel, a C++ name expression.
        also: other kernels of the file, to be compiled along with it if it has to be compiled.
        arch: "sm_90a", say.

    Raises:
        CudaError: NVRTC is missing, or refuses the file; with its output.
    """
    options = nvrtc_options(source, arch)
    directory = cache_directory() / "cuda" / digest(_nvrtc_version(), options, source_closure(source))
    if found := _find(directory, name):
        return found
    with locked(directory):
        if found := _find(directory, name):
            return found
        missing = sorted({name, *(n for n in also if not _find(directory, n))})
        try:
            return _compile(source, missing, options, directory)
        except CudaError:
            # Perhaps it is one of the others that does not compile.
            if missing == [name]:
                raise
        return _compile(source, [name], options, directory)


def compile_ahead_of_time(source: pathlib.Path, names: Sequence[str], arch: str) -> dict[str, KernelResources]:
    """Compiles kernels for an architecture that need not be present, and says what they need there.

    Args:
        source: the `.cu` file.
        names: kernels, C++ name expressions.
        arch: "sm_80", "sm_90a", "sm_100a", "sm_120" and so on.

    Returns:
        The resources of each kernel, by name.

    Raises:
        CudaError: NVRTC or cuobjdump is missing, or the file does not compile; with the compiler's output.
    """
    source = pathlib.Path(source).resolve()
    resources = {}
    for name in names:
        compiled = compile_kernels(source, name, names, arch)
        lowered = compiled.lowered_names[name]
        dumped = _dumped(compiled.path)
        said = compiled.log.partition(f"Compiling entry function '{lowered}'")[2].partition("Compiling entry")[0]
        # Functions that it calls have properties of their own.
        properties = said.partition(f"Function properties for {lowered}\n")[2].partition("Function properties")[0]
        resources[name] = KernelResources(
            name=name,
            arch=arch,
            registers=_number(r"Used (\d+) registers", said),
            spill_store_bytes=_number(r"(\d+) bytes spill stores", properties),
            spill_load_bytes=_number(r"(\d+) bytes spill loads", properties),
            stack_bytes=_number(r"(\d+) bytes stack frame", properties),
            shared_bytes=_number(r"(\d+) bytes smem", said, 0),
            constant_bytes=dumped[lowered].usage["CONSTANT[0]"],
            code_sha256=dumped[lowered].code_sha256,
            instruction_counts=MappingProxyType(dumped[lowered].instructions),
        )
    return resources


def _number(pattern: str, text: str, default: int | None = None) -> int:
    if found := re.search(pattern, text):
        return int(found[1])
    if default is None:
        raise CudaError(f"the compiler's output has nothing like {pattern!r}:\n{text}")
    return default


@dataclasses.dataclass(frozen=True)
class _Dumped:
    """What a cubin itself says of one kernel."""

    usage: Mapping[str, int]  # REG, STACK, SHARED, CONSTANT[0] and so on
    code_sha256: str
    instructions: Counter[str]
    local_store_bytes: int
    local_load_bytes: int


@functools.lru_cache(maxsize=256)
def _dumped(cubin: pathlib.Path) -> dict[str, _Dumped]:
    """What a cubin says of its kernels, by mangled name."""
    from cuda.pathfinder import find_nvidia_binary_utility

    cuobjdump = find_nvidia_binary_utility("cuobjdump")
    if cuobjdump is None:
        raise CudaError("cuobjdump is missing: install nvidia-cuda-cuobjdump")
    command = [cuobjdump, "--dump-resource-usage", "--dump-sass", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CudaError(f"{' '.join(command)}\n{done.stderr}")
    usages = {
        name: {key: int(size) for key, size in re.findall(r"(\S+?):(\d+)", line)}
        for name, line in re.findall(r"Function (\S+):\n(.*)", done.stdout)
    }
    kernels = {}
    for function in done.stdout.split("Function : ")[1:]:
        opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][A-Z0-9_]*)(\S*)", function, re.MULTILINE)
        name = function.split(maxsplit=1)[0]
        if name in usages:
            kernels[name] = _Dumped(
                usage=usages[name],
                code_sha256=hashlib.sha256(function.encode()).hexdigest(),
                instructions=Counter(code for code, _ in opcodes),
                local_store_bytes=_local_bytes("STL", opcodes),
                local_load_bytes=_local_bytes("LDL", opcodes),
            )
    return kernels


def _local_bytes(opcode: str, opcodes: Sequence[tuple[str, str]]) -> int:
    """Bytes that a thread moves to or from its own memory, each instruction counted once."""
    widths = (re.search(r"\.(\d+)", modifiers) for code, modifiers in opcodes if code == opcode)
    return sum(int(width[1]) // 8 if width else 4 for width in widths)


def resources_of_cubin(cubin: pathlib.Path, name: str, arch: str) -> KernelResources:
    """What a kernel needs by its compiled code alone; what it moves to memory of its own counts as spilled.

    Args:
        cubin: the compiled code.
        name: the kernel's mangled name.
        arch: what it was compiled for.

    Raises:
        CudaError: cuobjdump is missing or refuses the file, or there is no such kernel.
    """
    dumped = _dumped(cubin)
    if name not in dumped:
        raise CudaError(f"{cubin.name} has no kernel {name}")
    kernel = dumped[name]
    return KernelResources(
        name=name,
        arch=arch,
        registers=kernel.usage["REG"],
        spill_store_bytes=kernel.local_store_bytes,
        spill_load_bytes=kernel.local_load_bytes,
        stack_bytes=kernel.usage["STACK"],
        shared_bytes=kernel.usage["SHARED"],
        constant_bytes=kernel.usage["CONSTANT[0]"],
        code_sha256=kernel.code_sha256,
        instruction_counts=MappingProxyType(kernel.instructions),
    )


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CudaError("compiling for a GPU needs the package cuda-bindings") from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of one of NVRTC's functions, less the status that comes first."""
    if result[0].value:
        raise CudaError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    try:
        major, minor = _checked(_nvrtc().nvrtcVersion())
    except CudaError:
        raise
    except Exception as error:  # of cuda-pathfinder, in a version's own words
        raise CudaError(f"NVRTC is missing: install nvidia-cuda-nvrtc ({error})") from error
    return major, minor


def _find(directory: pathlib.Path, name: str) -> CompiledKernels | None:
    for manifest in sorted(directory.glob("*.json")):
        content = json.loads(manifest.read_text())
        if name in content["lowered_names"]:
            return CompiledKernels(manifest.with_suffix(".cubin"), content["lowered_names"], content["log"])
    return None


def _compile(source: pathlib.Path, names: list[str], options: list[str], directory: pathlib.Path) -> CompiledKernels:
    nvrtc = _nvrtc()
    if _nvrtc_version() >= (13, 0):
        # On all cores, to the same code. What a driver keeps of an earlier compilation comes without the log.
        options = [*options, "--split-compile=0", "--no-cache"]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), str(source).encode(), 0, None, None))
    try:
        for name in names:
            _checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        buffer = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.decode(errors="replace").rstrip("\0 \n")
        if status.value:
            arch = options[0].partition("=")[2]
            raise CompilationError(f"{source.name} does not compile for {arch} ({status.name}):\n{log}")
        lowered = {name: _checked(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in names}
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    path = directory / f"{digest(names)}.cubin"
    write_atomically(path, cubin)
    write_atomically(path.with_suffix(".json"), json.dumps({"lowered_names": lowered, "log": log}).encode())
    return CompiledKernels(path, lowered, log)
