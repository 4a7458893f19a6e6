"""Compile a `.cu` file with the host's C++ compiler to a shared object that contains the kernels and the runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Sequence

from fourfold.backends.cuda.compile import (
    CompilationError,
    CudaError,
    cache_folder,
    check_headers,
    checksum,
    cuda_include_directories,
    demangle,
    digest,
    directory_lock,
    find_entry,
    load_or_compile,
    write_entry,
)
from fourfold.backends.cuda.declarations import host_compiler, own_include_directories, source_closure
from fourfold.backends.cuda.device_code import device_code, own_headers
from fourfold.backends.cuda.emulator import ptx
from fourfold.backends.launch import MAX_SHARED_BYTES
from fourfold.processes.files import write_atomically

HERE = pathlib.Path(__file__).resolve().parent

_COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    # __shared__ becomes thread_local. The option avoids a check for a dynamic constructor at each use.
    "-fno-extern-tls-init",
    "-U_FORTIFY_SOURCE",
    "-w",
]
_FAST = ["-O2"]
_CHECKED = [
    "-DFOURFOLD_CHECKED",
    "-O1",
    "-finline-small-functions",
    "-g1",  # a report needs only the lines of inlined calls
    "-fno-omit-frame-pointer",
    # A variable that has ended must not seem overwritten.
    "-fstack-reuse=none",
    # With a tail call, the caller of a check's hook would be missing from the report.
    "-fno-optimize-sibling-calls",
    # An uninitialised float is -1.7e38 in every run.
    "-ftrivial-auto-var-init=pattern",
    # Strict: the last member of a struct is not a flexible array.
    "-fsanitize=thread,bounds-strict,object-size,alignment,shift-exponent,integer-divide-by-zero,signed-integer-overflow"
    ",float-cast-overflow",
    "-fno-sanitize-recover=all",
    "--param=tsan-instrument-func-entry-exit=0",
]
# Records which lines ran: see `reached`.
_TRACED = [*_CHECKED, "-fsanitize-coverage=trace-pc"]
# The gap in bytes after each shared array, so that an overrun does not reach the next array.
_REDZONE_BYTES = 64
# A section of variables in the compiler's output, up to the head of the next section.
_THREAD_LOCAL_VARIABLES = re.compile(
    r"^\t\.section\t\.tbss.*\n(?:(?!\t\.(?:section|text|data|bss)\b).*\n)*", re.MULTILINE
)
# The compiler's output on kernels that do not compile, by the folder of the build and the name of the kernel.
_rejected: dict[tuple[pathlib.Path, str], str] = {}
# The checksums of the runtime's compiled files.
_CHECKSUMS = "checksums.json"


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """A `__shared__` variable: its offset from the runtime's anchor, and its size, or -1 if the launch sets it."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled shared object.

    Attributes:
        path: of the file.
        kernels: their names, in the order of their indices.
        shared: the shared arrays.
        source_files: the `.cu` file and its own headers.
        ptx: the files and lines of inline PTX.
    """

    path: pathlib.Path
    kernels: tuple[str, ...]
    shared: tuple[SharedArray, ...]
    source_files: frozenset[str]
    ptx: frozenset[tuple[str, int]]


@functools.cache
def unavailable_reason() -> str | None:
    """Return the reason why this machine cannot run CUDA C++ on its CPU, or None if it can."""
    compiler = host_compiler()
    for tool in (compiler, "readelf", "objcopy", "addr2line"):
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


def build(source: pathlib.Path, name: str, also: Collection[str], checked: bool, traced: bool = False) -> Built:
    """Return the shared object that contains a kernel, from the cache or freshly compiled.

    Args:
        source: the `.cu` file.
        name: the kernel, a C++ name expression.
        also: other kernels of the file. Those of the same types are compiled with it if it has to be compiled.
        checked: whether the build checks every access.
        traced: whether a checked build also records which of its instructions ran.

    Raises:
        CudaError: the compiler is missing. CompilationError: the compiler rejects the file.
    """
    if reason := unavailable_reason():
        raise CudaError(reason)
    closure = source_closure(source)
    check_headers(closure)
    options = _FAST if not checked else _TRACED if traced else _CHECKED
    runtime_key = digest(_command(), _compiler_version(), [p.read_text() for p in (*_runtime_files(), HERE / "ptx.py")])
    directory = cache_folder("cuda_on_cpu", digest(runtime_key, options, closure, _unit(source)))
    if output := _rejected.get((directory, name)):
        raise CompilationError(output)
    alike = [n for n in also if _types(n) == _types(name)]
    try:
        return load_or_compile(
            directory,
            name,
            alike,
            lambda name: _find(directory, name, closure),
            lambda names: _compile(source, names, options, directory, runtime_key),
        )
    except CompilationError as error:
        # An error without a place in the code may be due to the machine, for example to a lack of memory.
        if re.search(r":\d+:\d+: (?:fatal )?error: ", str(error)):
            _rejected[directory, name] = str(error)
        raise


def _types(name: str) -> frozenset[str]:
    """Return the floating-point types among a kernel's template arguments.

    The compiler takes about 0.3 s for each kernel, and a run seldom needs the kernels of all types.
    """
    return frozenset(re.findall(r"\b(?:__half|__nv_bfloat16|float|double)\b", name))


def source_line(built: Built, pcs: Sequence[int]) -> tuple[str, int] | None:
    """Map code addresses to the first place in the kernel's own files. Each address is one past its instruction.

    The caller of a function that wraps inline PTX says more than the line of the PTX.
    """
    if not pcs:
        return None
    command = ["addr2line", "-ie", str(built.path), *(hex(pc - 1) for pc in pcs)]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    ptx_position = None
    for frame in output.splitlines():  # of each address, from the innermost inlined function outwards
        # Such as "/my kernels/k.cu:12 (discriminator 3)".
        place = re.fullmatch(r"(.*):(\d+)(?: \(discriminator \d+\))?", frame)
        if place and os.path.realpath(place[1]) in built.source_files:
            position = os.path.realpath(place[1]), int(place[2])
            if position not in built.ptx:
                return position
            ptx_position = ptx_position or position
    return ptx_position


@functools.cache
def _compiler_version() -> str:
    return _run(host_compiler(), "-dumpfullversion").strip()


def _command(source: pathlib.Path | None = None) -> list[str]:
    own_folders = own_include_directories(source) if source else []
    directories = [HERE, HERE / "include", *own_folders, *cuda_include_directories()]
    return [host_compiler(), *_COMMON, *(f"-I{d}" for d in directories)]


@functools.cache
def _runtime_files() -> tuple[pathlib.Path, ...]:
    return tuple(sorted(p for p in HERE.rglob("*") if p.suffix in (".h", ".cuh", ".cpp")))


def _run(*command: str, refused: type[CudaError] = CudaError) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise refused(f"{' '.join(command)}\n{process.stderr}")
    return process.stdout


def _find(directory: pathlib.Path, name: str, closure: Collection[str]) -> Built | None:
    if entry := find_entry(directory, ".so", "kernels", name):
        path, description = entry
        shared = tuple(SharedArray(*row) for row in description["shared"])
        files = frozenset(os.path.realpath(file) for file in closure)
        places = frozenset((os.path.realpath(file), line) for file, line in description["ptx"])
        return Built(path, tuple(description["kernels"]), shared, files, places)
    return None


def _compile(source: pathlib.Path, names: list[str], options: list[str], directory: pathlib.Path, runtime: str) -> None:
    command = _command(source)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        unit, library = pathlib.Path(scratch, "unit.o"), pathlib.Path(scratch, "kernels.so")
        assembly = unit.with_suffix(".s")
        table = "\n".join(f"    FOURFOLD_KERNEL({name})," for name in names)
        code = unit.with_suffix(".cpp")
        for name, header in own_headers(str(source), source_closure(source)).items():
            # Found before the header itself: the folder of the including file is searched first.
            code.parent.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            code.parent.joinpath(name).write_text(header)
        entries = f"const fourfold::Entry fourfold_kernels[] = {{\n{table}\n}};\n"
        code.write_text(f"{_unit(source)}\n{entries}const bool fourfold_has_ptx = false;\n")
        unknown = ""
        try:
            try:
                compiled, places = _translate_ptx(source, code, [*command, *options])
            except ptx.UnknownInstruction as error:
                # No kernel for the CPU may reach it.
                compiled, places, unknown = code, [], f"inline PTX that is not emulated on the CPU: {error}\n"
            _run(*command, *options, "-S", str(compiled), "-o", str(assembly), refused=CompilationError)
            if options is not _FAST:
                assembly.write_text(_insert_redzones(assembly.read_text()))
            _run(host_compiler(), "-c", str(assembly), "-o", str(unit), refused=CompilationError)
        except CompilationError as error:
            raise CompilationError(unknown + _compiler_message(source, str(error), code)) from None
        if options is not _FAST:
            copies = ("memcpy", "memmove", "memset")
            _run("objcopy", *(f"--redefine-sym={name}=fourfold_{name}" for name in copies), str(unit))
        dynamic = [mangled for mangled, section, _, _ in _thread_local_symbols(unit) if section == "UND"]
        storage = pathlib.Path(scratch, "dynamic.s")
        # In CUDA, all `extern __shared__` arrays of a kernel share the same memory.
        labels = "".join(f".hidden {n}\n.globl {n}\n.type {n},@object\n{n}:\n" for n in dynamic)
        storage.write_text(
            f'.section .tbss,"awT",@nobits\n.balign 1024\n{_start(source, bool(places))}{labels}'
            f".zero {MAX_SHARED_BYTES if dynamic else 0}\n"
            '.section .note.GNU-stack,"",@progbits\n'
        )
        objects = [str(unit), str(storage), *_runtime_objects(runtime)]
        _run(host_compiler(), "-shared", *objects, "-o", str(library))
        symbols = _thread_local_symbols(library)
        anchor = next(offset for mangled, _, offset, _ in symbols if mangled.endswith("6anchorE"))
        # The dynamic arrays share their memory, so keep the first of them only.
        excluded = (*dynamic[1:], "__tls_guard")
        arrays = _distinct(s for s in symbols if s[0] not in excluded and "8fourfold" not in s[0])
        demangled = [demangle(symbol[0]) or symbol[0] for symbol in arrays]
        # Reduce kernel(float*)::tile to tile, and the compiler's "guard variable for ..." to an empty name.
        names_in_source = ["" if d.startswith("guard variable") else d.rpartition("::")[2] for d in demangled]
        shared = [
            (variable, offset - anchor, -1 if mangled in dynamic else size)
            for variable, (mangled, _, offset, size) in zip(names_in_source, arrays, strict=True)
        ]
        target = directory / f"{digest(names)}.so"
        os.replace(library, target)
        write_entry(target, {"kernels": names, "shared": shared, "ptx": places})


def _translate_ptx(
    source: pathlib.Path, unit: pathlib.Path, command: list[str]
) -> tuple[pathlib.Path, list[tuple[str, int]]]:
    """Return a unit with its inline PTX translated, and the places of the PTX; a unit without any is unchanged.

    Raises:
        UnknownInstruction: it has an instruction that is not emulated.
    """
    closure = source_closure(source)
    if not ptx.has_inline_ptx(closure.values()):
        return unit, []
    code = unit.read_text().replace('#include "device.h"', '#include "device.h"\n#include "ptx.h"', 1)
    unit_with_ptx = unit.with_name("with_ptx.cpp")
    unit_with_ptx.write_text(code.replace("fourfold_has_ptx = false", "fourfold_has_ptx = true"))
    preprocessed = _run(*command, f"-D{ptx.HOPPER}", "-E", str(unit_with_ptx), refused=CompilationError)
    text, places = ptx.translate(preprocessed, closure)
    if not ptx.is_asynchronous(text):
        text = text.replace("fourfold_has_ptx = true", "fourfold_has_ptx = false")
    translated = unit_with_ptx.with_suffix(".ii")
    translated.write_text(text)
    return translated, places


def _start(source: pathlib.Path, has_ptx: bool) -> str:
    """Return the assembly before the dynamic shared array, which sets its alignment.

    A GPU guarantees only 16 bytes to an array without an alignment of its own. Copies and wgmma need more, so there the
    emulation offers no more; elsewhere the array starts at a multiple of 1024.
    """
    aligned = re.compile(r"\bextern\b[^;]*\b(?:__align__|alignas|aligned)\b")
    texts = source_closure(source).values()
    return ".zero 16\n" if has_ptx and not any(map(aligned.search, texts)) else ""


def _insert_redzones(assembly: str) -> str:
    """Return the compiler's output with a gap after each thread-local variable: shared arrays are compiled as such."""
    return _THREAD_LOCAL_VARIABLES.sub(
        lambda section: re.sub(r"^\t\.zero\t.*", rf"\g<0>\n\t.zero\t{_REDZONE_BYTES}", section[0], flags=re.MULTILINE),
        assembly,
    )


def _unit(source: pathlib.Path) -> str:
    """Return the compiled unit: the file, or the device code of the file and its headers."""
    texts = source_closure(source)
    text = texts[str(source)]
    device = device_code(text, *texts.values())
    as_it_is = device == text and not own_headers(str(source), texts)
    code = f'#include "{source}"' if as_it_is else f'#line 1 "{source}"\n{device}\n#line 1 "kernels"'
    return f'#include "device.h"\n{code}'


def _compiler_message(source: pathlib.Path, output: str, unit: pathlib.Path) -> str:
    """Return the compiler's output on a file, starting with the first error in the file itself."""
    lines = output.splitlines()[1:]  # the first line is the command
    errors = [line for line in lines if re.search(" [eE]rror: ", line)]  # the assembler's errors begin with a capital
    first = next((line for line in errors if line.startswith(f"{source}:")), errors[0] if errors else "")
    if "no matches converting function" in first or str(unit) in first:
        why = first.partition(" error: ")[2]
        first = f"{source}: there is no kernel of this name with these template arguments: {why}"
    return "\n".join([f"{source.name} does not compile for the CPU: {first.replace(str(source), source.name)}", *lines])


def _runtime_objects(key: str) -> list[str]:
    # A folder beside that of the kernels, so that it survives when mutation trials clear the latter.
    directory = cache_folder("cuda_on_cpu_runtime", key)
    objects = [directory / f"{source.stem}.o" for source in _runtime_files() if source.suffix == ".cpp"]
    if not _are_intact(directory, objects):
        with directory_lock(directory), tempfile.TemporaryDirectory(dir=directory) as scratch:
            for target in objects:
                output = pathlib.Path(scratch, target.name)
                code = HERE / f"{target.stem}.cpp"
                _run(*_command(), "-O3", "-fno-omit-frame-pointer", "-c", str(code), "-o", str(output))
                os.replace(output, target)
            write_atomically(directory / _CHECKSUMS, json.dumps({o.name: checksum(o) for o in objects}).encode())
    return [str(o) for o in objects]


def _are_intact(directory: pathlib.Path, objects: Sequence[pathlib.Path]) -> bool:
    """Return whether compiled files are unchanged since they were written."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / _CHECKSUMS).read_text()) == {o.name: checksum(o) for o in objects}
    return False


def _distinct(symbols: Iterable[tuple[str, str, int, int]]) -> list[tuple[str, str, int, int]]:
    """Return the first symbol at each offset.

    From g++ 13 on, a variable of a template whose argument is a lambda has a second name, an alias.
    """
    first: dict[int, tuple[str, str, int, int]] = {}
    for symbol in symbols:
        first.setdefault(symbol[2], symbol)
    return list(first.values())


def _thread_local_symbols(file: pathlib.Path) -> list[tuple[str, str, int, int]]:
    """Return the (mangled name, section, offset, size) of each thread-local symbol."""
    rows = (line.split() for line in _run("readelf", "-sW", str(file)).splitlines())
    return sorted({(r[7], r[6], int(r[1], 16), int(r[2], 0)) for r in rows if len(r) == 8 and r[3] == "TLS"})
