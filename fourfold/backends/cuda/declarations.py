"""The declarations of a `.cu` file: its `__global__` functions, their templates, and their parameters' names and types.

A compiled kernel knows the types of its parameters, but not their names. These are read from the text.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# The suffixes of CUDA C++ files.
SUFFIXES = (".cu", ".cuh")
_OPENING, _CLOSING = "([{<", ")]}>"
# Attributes between `__global__` and a kernel's name that take arguments of their own.
_ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__", "__attribute__", "alignas"}
_QUALIFIERS = re.compile(r"\b(?:__restrict__|__restrict|restrict|__grid_constant__|volatile|struct)\b")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.MULTILINE)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
# The dtype of a pointer's elements, by their C++ type.
ELEMENTS = {
    **dict.fromkeys(("float", "float1", "float2", "float3", "float4"), torch.float32),
    **dict.fromkeys(("double", "double1", "double2", "double3", "double4"), torch.float64),
    **dict.fromkeys(("half", "__half", "half2", "__half2", "__half_raw"), torch.float16),
    **dict.fromkeys(("__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162"), torch.bfloat16),
}


class NoSuchKernel(LookupError):
    """A `.cu` file has no `__global__` function of this name."""


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter of a kernel.

    Attributes:
        name: "" if it has none.
        type: without `__restrict__`, and with aliases of the file replaced: "const float*", "int", "T*".
    """

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether it takes a tensor."""
        return self.type.endswith("*")

    @property
    def is_output(self) -> bool:
        """Whether it is a pointer that the kernel may write through."""
        return self.is_pointer and not re.search(r"\bconst\b", self.type)

    @property
    def element(self) -> str:
        """The type that a pointer points to, without const."""
        return re.sub(r"\bconst\b", "", self.type.removesuffix("*")).strip()


@dataclass(frozen=True)
class DeclaredKernel:
    """A `__global__` function.

    Attributes:
        name: without template arguments and namespace.
        parameters: in order.
        template: the names of its type template parameters, in order; None for a plain function.
        values: the names of its value template parameters without a default.
    """

    name: str
    parameters: tuple[DeclaredParameter, ...]
    template: tuple[str, ...] | None = None
    values: tuple[str, ...] = ()

    def position(self, position: int) -> str:
        """Return a parameter as an error names it: "argument 2 (cols)"."""
        named = self.parameters[position].name if position < len(self.parameters) else ""
        return f"argument {position}" + (f" ({named})" if named else "")


def base_name(expression: str) -> str:
    """Return a kernel's name without namespace and template arguments: "copy" of "mine::copy<float, 4>"."""
    return expression.partition("<")[0].rpartition("::")[2].strip()


def find_declaration(source: pathlib.Path, expression: str) -> DeclaredKernel | None:
    """Return the declaration of the kernel with this name expression, or None if the file does not show it."""
    try:
        found = _kernels_of_file(source)
    except OSError:
        return None
    return next((kernel for kernel in found if kernel.name == base_name(expression)), None)


def kernel_of(source: pathlib.Path, expression: str) -> DeclaredKernel:
    """Return the declaration of the kernel with this name expression.

    Raises:
        FileNotFoundError: the file does not exist.
        NoSuchKernel: the file has no such kernel; the message lists its kernels.
    """
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    declaration = find_declaration(source, expression)
    if declaration is None:
        names = ", ".join(kernel.name for kernel in _kernels_of_file(source))
        has = f"its kernels are {names}" if names else "it has no __global__ function"
        if not shutil.which(host_compiler()):
            has += f"; to find those that macros define, install {host_compiler()}"
        raise NoSuchKernel(f"{source.name} has no __global__ function {base_name(expression)}: {has}")
    return declaration


def own_include_directories(source: pathlib.Path) -> list[pathlib.Path]:
    """Return the search path of a `.cu` file's own headers: its folder, the folder above, and this library's impls/."""
    package = pathlib.Path(__file__).resolve().parents[2]
    # In a clone impls/ lies beside the package, in a wheel inside it.
    implementations = [folder for folder in (package / "impls", package.parent / "impls") if folder.is_dir()][:1]
    return [source.parent, source.parent.parent, *implementations]


def source_closure(source: pathlib.Path) -> dict[str, str]:
    """Map the path of a `.cu` file, and of every header that it includes in quotes, however deep, to its text."""
    texts: dict[str, str] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if str(path) in texts:
            continue
        texts[str(path)] = text = path.read_text(errors="replace")
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE):
            candidates = (d / name for d in (path.parent, *own_include_directories(source)))
            pending += [c.resolve() for c in candidates if c.is_file()][:1]
    return texts


def _kernels_of_file(source: pathlib.Path) -> tuple[DeclaredKernel, ...]:
    text, *headers = source_closure(source).values()
    return kernels(text, *headers)


@functools.lru_cache(maxsize=64)
def kernels(text: str, *headers: str) -> tuple[DeclaredKernel, ...]:
    """Return the `__global__` functions of a `.cu` file's text, in order; only the first of those with one name.

    Args:
        text: of the file.
        headers: texts of its own headers, which may define the macros that define its kernels.
    """
    code = strip_comments(text)
    aliases = _aliases(code)
    code = _expand(code, strip_comments("\n".join(headers)))
    by_name: dict[str, DeclaredKernel] = {}
    for match in re.finditer(r"\b__global__\b", code):
        if kernel := _kernel(code, match.start(), match.end(), aliases):
            by_name.setdefault(kernel.name, kernel)
    return tuple(by_name.values())


def strip_comments(text: str) -> str:
    """Return the text with comments and quotations replaced by blanks; every other character keeps its place."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)


def device_macros(code: str) -> dict[str, str]:
    """Return the bodies of macros that stand for `__global__` or `__device__`, others of them or whole functions."""
    bodies = {name: body for name, body in _DEFINE.findall(code) if name not in ("__global__", "__device__")}
    marked, count = {"__global__", "__device__"}, 0
    while len(marked) > count:
        count = len(marked)
        marked |= {name for name, body in bodies.items() if marked & {*re.findall(r"\w+", body)}}
    return {name: body for name, body in bodies.items() if name in marked}


def _expand(code: str, headers: str) -> str:
    """Return the code with the `device_macros` replaced by what they stand for, if g++ is installed.

    Conditions are ignored: which of their branches is compiled depends on options.
    """
    compiler = shutil.which(host_compiler())
    defined, text = f"{headers}\n{code}", DIRECTIVE.sub("", code)
    macros = device_macros(defined)
    if not compiler or macros.keys().isdisjoint(re.findall(r"\w+", text)):
        return code
    definitions = "".join(f"{match[0]}\n" for match in _DEFINE.finditer(defined) if match[1] in macros)
    command = (compiler, "-E", "-P", "-w", "-x", "c++", "-")
    return subprocess.run(command, input=definitions + text, capture_output=True, text=True).stdout


def host_compiler() -> str:
    """Return the host's C++ compiler: $CXX, or g++."""
    return os.environ.get("CXX") or "g++"


def closing(code: str, start: int) -> int:
    """Return the position of the bracket that closes the one at `start`, or the end of the code."""
    opening = code[start]
    closes = _CLOSING[_OPENING.index(opening)]
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] == opening) - (code[at] == closes)
        if depth == 0:
            return at
    return len(code)


def _kernel(code: str, start: int, after: int, aliases: dict[str, str]) -> DeclaredKernel | None:
    """Return the kernel whose `__global__` lies at `start`."""
    at = after
    while match := re.compile(r"\s*(?:\b([A-Za-z_]\w*)\b|[*&:])").match(code, at):
        at = match.end()
        opens = re.compile(r"\s*\(").match(code, at)
        if not opens:
            continue
        end = closing(code, opens.end() - 1)
        if match[1] in _ATTRIBUTES:
            at = end + 1
            continue
        parts = split(code[opens.end() : end])
        parameters = tuple(_parameter(part, aliases) for part in parts if part != "void")
        types, values = _template(code, start)
        return DeclaredKernel(match[1] or "", parameters, types, values)
    return None


def split(text: str) -> list[str]:
    """Return the parts of a list at its outermost commas."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [part for part in (*parts, text[begin:].strip()) if part]


def _parameter(text: str, aliases: dict[str, str]) -> DeclaredParameter:
    text = _QUALIFIERS.sub(" ", text.partition("=")[0]).strip()
    array = re.search(r"\[[^\]]*\]\s*$", text)
    if array:
        text = text[: array.start()].strip()
    match = re.fullmatch(r"(.*[\s*&>])\s*([A-Za-z_]\w*)", text, re.DOTALL)
    type_, name = (match[1], match[2]) if match else (text, "")
    words = re.sub(r"\b[A-Za-z_]\w*\b", lambda word: aliases.get(word[0], word[0]), type_)
    # `float const*` and `float* const` are the same to a caller as `const float*` and `float*`.
    words = re.sub(r"\*\s*const\s*$", "*", words.strip())
    plain = " ".join(words.replace("*", " * ").split()).replace(" *", "*") + ("*" if array else "")
    return DeclaredParameter(name, plain)


def _template(code: str, start: int) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the template parameters, types and required values, of the function whose `__global__` is at `start`."""
    for match in re.finditer(r"\btemplate\s*<", code[:start]):
        end = closing(code, match.end() - 1)
        if end >= start or re.search(r"[;{}]", code[end:start]):
            continue
        types, values = [], []
        for part in split(code[match.end() : end]):
            declaration, default, _ = part.partition("=")
            name = (re.findall(r"[A-Za-z_]\w*", declaration) or [""])[-1]
            if re.match(r"(?:typename|class)\b", part):
                types.append(name)
            elif not default:
                values.append(name)
        return tuple(types), tuple(values)
    return None, ()


def _aliases(code: str) -> dict[str, str]:
    """Return the names that stand for one type: by typedef, using or #define."""
    patterns = (
        r"\btypedef\s+(?P<type>[\w:]+)\s+(?P<name>\w+)\s*;",
        r"\busing\s+(?P<name>\w+)\s*=\s*(?P<type>[\w:]+)\s*;",
        r"^[ \t]*#[ \t]*define[ \t]+(?P<name>\w+)[ \t]+(?P<type>[A-Za-z_]\w*)[ \t]*$",
    )
    direct = {match["name"]: match["type"] for p in patterns for match in re.finditer(p, code, re.MULTILINE)}
    return {name: list(_transitive_names(name, direct))[-1] for name in direct}


def _transitive_names(name: str, direct: dict[str, str]) -> Iterator[str]:
    seen: set[str] = set()
    while name in direct and name not in seen:
        seen.add(name)
        name = direct[name]
        yield name
