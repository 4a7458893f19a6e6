"""The device code of a `.cu` file, and the headers that NVRTC lacks.

Kernels often share a file with their launcher, a reference on the CPU and `main`. Neither NVRTC nor the host's C++
compiler can compile a launch `kernel<<<grid, block>>>(...)`. So functions of the host are removed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping

from fourfold.backends.cuda.declarations import DIRECTIVE, closing, device_macros, strip_comments

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_TORCH_HEADER = re.compile(r"(?:torch|ATen|c10|pybind11)/|Python\.h$")

_CONSTANTS = re.compile(r"\bM_(?:PI|E|SQRT2|SQRT1_2|2_SQRTPI|LOG2E|LN2)\b")


def _libcudacxx_header(name: str) -> str:
    return f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace ::cuda::std; }}\n"


_MATH = "#pragma once\n#define M_PI 3.14159265358979323846\n#define M_E 2.7182818284590452354\n" + (
    "#define M_SQRT2 1.41421356237309504880\n#define M_SQRT1_2 0.70710678118654752440\n"
    "#define M_2_SQRTPI 1.12837916709551257390\n#define M_LOG2E 1.4426950408889634074\n"
    "#define M_LN2 0.69314718055994530942\n"
)


# libcu++ defines these for NVRTC from CCCL 3.1 on. In C++17 a number may be written in base 16, and is then exact.
_LIMITS = {
    "FLT_MAX": "0x1.fffffep127f",
    "FLT_MIN": "0x1p-126f",
    "FLT_TRUE_MIN": "0x1p-149f",
    "FLT_EPSILON": "0x1p-23f",
    "FLT_DIG": "6",
    "FLT_MANT_DIG": "24",
    "DBL_MAX": "0x1.fffffffffffffp1023",
    "DBL_MIN": "0x1p-1022",
    "DBL_TRUE_MIN": "0x0.0000000000001p-1022",
    "DBL_EPSILON": "0x1p-52",
    "DBL_DIG": "15",
    "DBL_MANT_DIG": "53",
}
_FLOATS = _libcudacxx_header("cfloat") + "".join(
    f"#ifndef {name}\n#define {name} {value}\n#endif\n" for name, value in _LIMITS.items()
)
# NVRTC rejects the header of all of CUB, which has parts for the host.
_CUB_HEADERS = ("block/block_reduce", "block/block_scan", "block/block_load", "block/block_store", "warp/warp_reduce")
# Headers for the functions of the host beside a kernel, which itself can use nothing of them.
_HOST_HEADERS = (
    "stdlib.h cstdlib time.h ctime iostream fstream sstream iomanip vector string chrono random memory map functional"
    " numeric stdexcept cublas_v2.h curand.h cuda_runtime_api.h device_launch_parameters.h omp.h getopt.h unistd.h"
    " sys/time.h"
)
# NVRTC provides the functions of the C library without headers, and lacks the headers.
_HEADERS: Mapping[str, str] = {
    **dict.fromkeys(("float.h", "cfloat"), _FLOATS),
    **dict.fromkeys(("limits.h", "climits"), _libcudacxx_header("climits")),
    **dict.fromkeys(("math.h", "cmath"), _MATH),
    **dict.fromkeys(("stdint.h", "cstdint"), _libcudacxx_header("cstdint")),
    **{name: _libcudacxx_header(name) for name in ("limits", "type_traits", "utility", "algorithm", "cstddef")},
    **dict.fromkeys(("assert.h", "cassert", "stdio.h", "cstdio", "stddef.h", "string.h", "cstring"), "#pragma once\n"),
    "cub/cub.cuh": "#pragma once\n" + "".join(f"#include <cub/{name}.cuh>\n" for name in _CUB_HEADERS),
    **dict.fromkeys(_HOST_HEADERS.split(), "#pragma once\n"),
}


def include_names(text: str) -> list[str]:
    """Return the names of the headers that a text includes, in angle brackets or quotes."""
    return _INCLUDE.findall(text)


def needs_torch(text: str) -> str | None:
    """Return the first of torch's or Python's own headers that a text includes, or None."""
    return next((name for name in include_names(text) if _TORCH_HEADER.match(name)), None)


def nvrtc_source(source: str, texts: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the code that NVRTC compiles for a `.cu` file, and the text of the headers that it lacks, by name.

    Args:
        source: the file's path.
        texts: the text of the file and of its own headers, by path.
    """
    text = device_code(texts[source], *texts.values())
    names = [name for part in texts.values() for name in include_names(part) if name in _HEADERS]
    if _CONSTANTS.search(text) and "math.h" not in names:
        # nvcc includes <math.h> in every file.
        names.append("math.h")
        text = f'#include <math.h>\n#line 1 "{source}"\n{text}'
    return text, {name: _HEADERS[name] for name in names} | own_headers(source, texts)


def own_headers(source: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the text of a file's own headers without functions of the host, by the path from the file's folder.

    Args:
        source: the file's path.
        texts: the text of the file and of its own headers, by path.

    Returns:
        All headers in the folder, or nothing if no header has such functions.
    """
    device = {path: device_code(text, *texts.values()) for path, text in texts.items() if path != source}
    if all(text == texts[path] for path, text in device.items()):
        return {}
    folder = os.path.dirname(source)
    inside = {path: text for path, text in device.items() if path.startswith(f"{folder}/")}
    return {os.path.relpath(path, folder): f'#line 1 "{path}"\n{text}' for path, text in inside.items()}


@functools.lru_cache(maxsize=64)
def device_code(text: str, *texts: str) -> str:
    """Return a `.cu` file's text without the functions of the host; the lines keep their numbers.

    A function that is neither `__global__` nor `__device__` nor constexpr, nor marked by a macro, is removed: no kernel
    can call it.

    Args:
        text: of the file or of one of its own headers.
        texts: of all of them; each may define macros of another.
    """
    code, macros = strip_comments(text), device_macros(strip_comments("\n".join((text, *texts))))
    code = DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code)
    for start, end in _host_functions(code, macros):
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def _host_functions(code: str, macros: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each function that no kernel can call, outside of classes."""
    functions = "|".join(name for name, body in macros.items() if "{" in body)
    use_of_function = re.compile(rf"(?:{functions})\s*\(" if functions else r"(?!)")
    device_qualifier = re.compile(rf"\b(?:{'|'.join(('__global__', '__device__', 'constexpr', *macros))})\b")
    at = 0
    while match := re.compile(r"\s*").match(code, at):
        start = match.end()
        if use := use_of_function.match(code, start):
            at = closing(code, use.end() - 1) + 1
            continue
        ends = re.compile(r"[;{}]").search(code, start)
        if ends is None:
            return
        at = ends.end()
        if ends[0] != "{":
            continue
        head = code[start : ends.start()]
        if re.search(r"\bnamespace\b[\w\s:]*$|^\s*extern\s*$", head):
            continue  # its contents come next
        at = closing(code, ends.start()) + 1
        is_function = re.search(r"\)\s*(?:const|noexcept|override|->[^;{}]*)?\s*$", head)
        if is_function and not device_qualifier.search(head):
            yield start, at
