"""Compiles a `.cu` file with the host's C++ compiler into a shared object that holds kernels and their runtime."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence

from impls.cuda_compile import (
    CompilationError,
    CudaError,
    cache_directory,
    cuda_include_directories,
    digest,
    locked,
    own_include_directories,
    source_closure,
    write_atomically,
)

HERE = pathlib.Path(__file__).resolve().parent

_COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    # __shared__ becomes thread_local: without a constructor's guard at each use.
    "-fno-extern-tls-init",
    "-U_FORTIFY_SOURCE",
    "-w",
]
_FAST = ["-O2"]
_CHECKED = [
    "-DFOURFOLD_CHECKED",
    "-O1",
    "-finline-small-functions",
    "-g",
    "-fno-omit-frame-pointer",
    # A hook called by a jump would take its caller's place in the report.
    "-fno-optimize-sibling-calls",
    # A float that nothing was assigned to is -1.7e38, every time.
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=thread,bounds,object-size,alignment,shift-exponent,integer-divide-by-zero,signed-integer-overflow"
    ",float-cast-overflow",
    "-fno-sanitize-recover=all",
    "--param=tsan-instrument-func-entry-exit=0",
]
# The most dynamic shared memory that a block can have on any GPU so far.
_DYNAMIC_SHARED_BYTES = 232448


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """A `__shared__` variable: its offset from the runtime's anchor, and its size, or -1 where a launch sets it."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled shared object, the names of its kernels by index, and its shared arrays."""

    path: pathlib.Path
    kernels: tuple[str, ...]
    shared: tuple[SharedArray, ...]
    source_files: frozenset[str]


@functools.cache
def unavailable_reason() -> str | None:
    """Why this machine cannot run CUDA C++ on its CPU, or None where it can."""
    compiler = _compiler()
    for tool in (compiler, "readelf", "objcopy", "addr2line", "c++filt"):
        if shutil.which(tool) is None:
            return f"CUDA C++ on the CPU needs {tool}, which is not installed"
    if "Free Software Foundation" not in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout:
        return f"CUDA C++ on the CPU needs g++; {compiler} is another compiler"
    if int(_compiler_version().split(".")[0]) < 12:
        return f"CUDA C++ on the CPU needs g++ 12 or later; {compiler} is {_compiler_version()}"
    try:
        directories = cuda_include_directories()
    except CudaError as error:
        return str(error)
    headers = {"vector_functions.h": "runtime", "cuda_fp16.h": "runtime", "crt/host_defines.h": "crt"}
    for header, package in headers.items():
        if not any((d / header).is_file() for d in directories):
            return f"CUDA C++ on the CPU needs NVIDIA's {header}: install nvidia-cuda-{package}"
    return None


def build(source: pathlib.Path, name: str, also: Collection[str], checked: bool) -> Built:
    """The shared object that holds a kernel, from the cache or compiled now.

    Args:
        source: the `.cu` file.
        name: the kernel, a C++ name expression.
        also: other kernels of the file, to be compiled along with it if it has to be compiled.
        checked: whether every access is looked at.

    Raises:
        CudaError: the compiler is missing; CompilationError: it refuses the file.
    """
    if reason := unavailable_reason():
        raise CudaError(reason)
    closure = source_closure(source)
    options = _CHECKED if checked else _FAST
    runtime_key = digest(_command(), _compiler_version(), [p.read_text() for p in _runtime_files()])
    directory = cache_directory() / "cuda_on_cpu" / digest(runtime_key, options, closure)
    if built := _find(directory, name, closure):
        return built
    with locked(directory):
        if built := _find(directory, name, closure):
            return built
        missing = sorted({name, *(n for n in also if not _find(directory, n, closure))})
        try:
            _compile(source, missing, options, directory, runtime_key)
        except CudaError:
            # Perhaps it is one of the others that does not compile.
            if missing == [name]:
                raise
            _compile(source, [name], options, directory, runtime_key)
        built = _find(directory, name, closure)
        assert built is not None
        return built


def source_line(built: Built, pcs: Sequence[int]) -> tuple[str, int] | None:
    """The first place in the kernel's own files that the code before some addresses comes from."""
    if not pcs:
        return None
    command = ["addr2line", "-ie", str(built.path), *(hex(pc - 1) for pc in pcs)]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    for frame in output.splitlines():  # of each address, from the innermost inlined function outwards
        file, _, line = frame.partition(" ")[0].rpartition(":")
        if line.isdigit() and os.path.realpath(file) in built.source_files:
            return os.path.realpath(file), int(line)
    return None


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


@functools.cache
def _compiler_version() -> str:
    return _run(_compiler(), "-dumpfullversion").strip()


def _command(source: pathlib.Path | None = None) -> list[str]:
    own = own_include_directories(source) if source else []
    directories = [HERE, HERE / "include", *own, *cuda_include_directories()]
    return [_compiler(), *_COMMON, *(f"-I{d}" for d in directories)]


@functools.cache
def _runtime_files() -> tuple[pathlib.Path, ...]:
    return tuple(sorted(p for p in HERE.rglob("*") if p.suffix in (".h", ".cpp")))


def _run(*command: str, refused: type[CudaError] = CudaError) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise refused(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _find(directory: pathlib.Path, name: str, closure: Collection[str]) -> Built | None:
    for manifest in sorted(directory.glob("*.json")):
        content = json.loads(manifest.read_text())
        if name in content["kernels"]:
            shared = tuple(SharedArray(*row) for row in content["shared"])
            files = frozenset(os.path.realpath(file) for file in closure)
            return Built(manifest.with_suffix(".so"), tuple(content["kernels"]), shared, files)
    return None


def _compile(source: pathlib.Path, names: list[str], options: list[str], directory: pathlib.Path, runtime: str) -> None:
    command = _command(source)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        unit, library = pathlib.Path(scratch, "unit.o"), pathlib.Path(scratch, "kernels.so")
        table = "\n".join(f"    FOURFOLD_KERNEL({name})," for name in names)
        text = (
            f'#include "device.h"\n#include "{source}"\nconst fourfold::Entry fourfold_kernels[] = {{\n{table}\n}};\n'
        )
        unit.with_suffix(".cpp").write_text(text)
        _run(*command, *options, "-c", str(unit.with_suffix(".cpp")), "-o", str(unit), refused=CompilationError)
        if options is _CHECKED:
            copies = ("memcpy", "memmove", "memset")
            _run("objcopy", *(f"--redefine-sym={name}=fourfold_{name}" for name in copies), str(unit))
        dynamic = [mangled for mangled, section, _, _ in _thread_local_symbols(unit) if section == "UND"]
        storage = pathlib.Path(scratch, "dynamic.s")
        # All `extern __shared__` arrays are the same memory.
        labels = "".join(f".hidden {n}\n.globl {n}\n.type {n},@object\n{n}:\n" for n in dynamic)
        storage.write_text(
            f'.section .tbss,"awT",@nobits\n.balign 1024\n{labels}.zero {_DYNAMIC_SHARED_BYTES if dynamic else 0}\n'
            '.section .note.GNU-stack,"",@progbits\n'
        )
        objects = [str(unit), str(storage), *_runtime_objects(runtime)]
        _run(_compiler(), "-shared", *objects, "-o", str(library))
        symbols = _thread_local_symbols(library)
        anchor = next(offset for mangled, _, offset, _ in symbols if mangled.endswith("6anchorE"))
        # The dynamic arrays share one place: one of them will do.
        others = (*dynamic[1:], "__tls_guard")
        arrays = [symbol for symbol in symbols if symbol[0] not in others and "8fourfold" not in symbol[0]]
        # Given no name, c++filt would wait for some on its input.
        demangled = _run("c++filt", *(symbol[0] for symbol in arrays)).splitlines() if arrays else []
        # From kernel(float*)::tile, tile; and nothing from a compiler's "guard variable for" that.
        names_in_source = ["" if d.startswith("guard variable") else d.rpartition("::")[2] for d in demangled]
        shared = [
            (variable, offset - anchor, -1 if mangled in dynamic else size)
            for variable, (mangled, _, offset, size) in zip(names_in_source, arrays, strict=True)
        ]
        stem = digest(names)
        os.replace(library, directory / f"{stem}.so")
        write_atomically(directory / f"{stem}.json", json.dumps({"kernels": names, "shared": shared}).encode())


def _runtime_objects(key: str) -> list[str]:
    directory = cache_directory() / "cuda_on_cpu" / key
    objects = [directory / f"{source.stem}.o" for source in _runtime_files() if source.suffix == ".cpp"]
    if not all(o.exists() for o in objects):
        with locked(directory), tempfile.TemporaryDirectory(dir=directory) as scratch:
            for target in objects:
                made = pathlib.Path(scratch, target.name)
                code = HERE / f"{target.stem}.cpp"
                _run(*_command(), "-O2", "-fno-omit-frame-pointer", "-c", str(code), "-o", str(made))
                os.replace(made, target)
    return [str(o) for o in objects]


def _thread_local_symbols(file: pathlib.Path) -> list[tuple[str, str, int, int]]:
    """(mangled name, section, offset, size) of each."""
    rows = (line.split() for line in _run("readelf", "-sW", str(file)).splitlines())
    return sorted({(r[7], r[6], int(r[1], 16), int(r[2], 0)) for r in rows if len(r) == 8 and r[3] == "TLS"})
