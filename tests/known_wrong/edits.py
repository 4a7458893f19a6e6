"""Planted faults that are edits of this library's own implementations, such as ``"+ eps => + 1e-5"``."""

import functools
import importlib
import itertools
import pathlib
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fourfold import backends
from fourfold.backends import operators, tuning
from fourfold.backends.cuda.compile import cache_folder, digest
from fourfold.checks.backward import backward_agrees
from fourfold.checks.bad_input import declared_errors_are_raised
from fourfold.checks.forward import forward_agrees
from fourfold.checks.laws import law_holds
from fourfold.mutation.trial import KernelPackage
from fourfold.operations.record import Law
from fourfold.processes.files import write_atomically

from .planted import GRADIENT, OUTPUT, Fault, Implementation

ARROW = re.compile(r"\s=>(\d*)(?:\s|$)")
FILE = re.compile(r"([\w/]+\.(?:py|cuh?)): ")
# Text of edits: row offsets of the Triton kernels in 32 bits; and `counted`, which rows of x by their number from 1.
OFFSETS_OF_ROWS = (
    "triton_rows.py: outer.to(tl.int64) * outer_stride + (rows - outer * inner).to(tl.int64) * inner_stride =>"
    " outer * outer_stride + (rows - outer * inner) * inner_stride"
)
FIRST_ROWS = (
    "    ones = torch.ones((*x.shape[:-1], 1), device=x.device)\n"
    "    number = ones.view(-1).cumsum(0).view(ones.shape)\n    counted = {}\n"
)
# The same mistakes in rows.cuh, the header that the CUDA kernels of rows share.
ROW_IN_32_BITS = "rows.cuh: return row * outer_stride; => return int(row) * int(outer_stride);"
BARRIER = "rows.cuh:         __syncthreads();\n        sum = add_half =>         sum = add_half"
FIRST_WARP = "rows.cuh: lane % 16 < blockDim.x / 32 ? parts => lane % 16 < 1 ? parts"
SIBLING = re.compile(r"from \.\.(\w+)\.cuda_kernel import")
_number = itertools.count()


class EditError(Exception):
    """An edit does not fit the text."""


def apply_edit(texts: dict[str, str], edit: str) -> dict[str, str]:
    """Return the texts that an edit changes, by file.

    Args:
        texts: the texts, by file.
        edit: ``"old => new"``, where old stands once in all texts together, or ``"old =>2 new"``, where it stands
            twice, and both are replaced.

    Raises:
        EditError: old stands in the texts more or less often.
    """
    arrow = ARROW.search(edit)
    if arrow is None:
        raise EditError(f"the edit has no arrow: {edit!r}")
    old, new, times = edit[: arrow.start()], edit[arrow.end() :], int(arrow[1] or 1)
    places = {file: text.count(old) for file, text in texts.items() if old in text}
    if sum(places.values()) != times:
        found = ", ".join(f"{count} in {file}" for file, count in places.items()) or "none"
        raise EditError(f"{old!r} must be found {times} times, not {found}")
    return {file: texts[file].replace(old, new) for file in places}


def inserted(line: str, *new: str) -> str:
    """Return the edit that writes new lines before one of a function."""
    return f"    {line} => " + "".join(f"    {each}\n" for each in new) + f"    {line}"


def wrapped(end: str, call: str, *body: str) -> str:
    """Return the edit that puts a function around an operation, whose module ends with a text.

    Args:
        end: the text.
        call: the function's name and arguments, such as ``"topk(x, k, largest=True)"``.
        body: its lines, in which `right` is the operation.
    """
    lines = f"right = {call.partition('(')[0]}", "", "", f"def {call}:", *(f"    {line}" for line in body)
    return f"{end} => {end}\n" + "\n".join(lines)


def edited(operation: str, backend: str, *edits: str) -> Implementation:
    """Return an operation's implementation on a backend with edits: see `changed_texts`."""
    folder, module = KernelPackage.of(operation).folder, backends.MODULES[backend]
    return getattr(_imported(folder, changed_texts(operation, backend, *edits), f"{operation}.{module}"), operation)


def changed_texts(operation: str, backend: str, *edits: str) -> dict[str, str]:
    """Return the files of an operation's implementation on a backend that edits change: see `apply_edit`.

    An edit applies to the files of the operation's folder for this backend, or to the one named before a colon,
    ``"rms_norm/triton_kernel.py: old => new"``.
    """
    folder = KernelPackage.of(operation).folder
    module = backends.MODULES[backend]
    own = [f"{operation}/{name}" for name in (f"{module}.py", "operators.py")]
    changed = _sources(folder, own[0], edits) if backend == "cuda" else {}
    own += sorted(changed.keys() - set(own))
    for edit in edits:
        named = FILE.match(edit)
        texts = {
            file: changed.get(file) or (folder / file).read_text()
            for file in ([named[1]] if named else own)
            if (folder / file).exists()
        }
        changed |= apply_edit(texts, edit[named.end() :] if named else edit)
    if any(file.endswith(".cuh") for file in changed):
        # A header is found beside the one that includes it.
        changed = {file.name: file.read_text() for file in folder.glob("*.cuh")} | changed
    return changed


def _sources(folder: pathlib.Path, module: str, edits: tuple[str, ...]) -> dict[str, str]:
    """Return the texts of the modules and sources that find each other, or their headers, beside themselves."""
    modules = [module, *(f"{of}/cuda_kernel.py" for of in SIBLING.findall((folder / module).read_text()))]
    named = [named[1] for edit in edits if (named := FILE.match(edit)) and "/" in named[1]]
    folders = sorted({str(pathlib.PurePath(file).parent) for file in (*modules, *named)})
    sources = [file.relative_to(folder) for of in folders for file in sorted((folder / of).glob("*.cu*"))]
    return {str(file): (folder / file).read_text() for file in (*modules, *sources)}


def _imported(original: pathlib.Path, changed: dict[str, str], module: str) -> types.ModuleType:
    """Import a module of the kernels with changed files, as another package, with operators of its own namespace."""
    name = f"fourfold_edited_{next(_number)}"
    # Stored like compiled kernels: a killed process would leave a temporary folder behind.
    copy = cache_folder("edited", digest(changed))
    for file, text in changed.items():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        if not (copy / file).exists():
            write_atomically(copy / file, text.encode())
    for part in {"", *(str(pathlib.PurePath(file).parent) for file in changed)} - {"."}:
        package = types.ModuleType(f"{name}.{part}".rstrip("."))
        package.__path__ = [str(copy / part), str(original / part)]
        sys.modules[package.__name__] = package
    kept = operators.NAMESPACE, operators._library, dict(tuning._kernels)
    operators.NAMESPACE, operators._library = name, torch.library.Library(name, "FRAGMENT")
    sys.modules[name].library = operators._library  # its operators live as long as the library
    try:
        return importlib.import_module(f"{name}.{module}")
    finally:
        operators.NAMESPACE, operators._library = kept[:2]
        tuning._kernels.clear()
        tuning._kernels.update(kept[2])


@dataclass(frozen=True)
class Edits:
    """The faults of one operation on one backend: each method takes a name and edits, and returns a `Fault`."""

    operation: str
    language: str

    def _fault(self, name: str, check: Callable, says: str, edits: tuple[str, ...], more: dict[str, Any]) -> Fault:
        make = functools.partial(edited, self.operation, self.language, *edits)
        return Fault(name, self.operation, make, language=self.language, **{"check": check, "says": says, **more})

    def __call__(self, name: str, *edits: str, **more: Any) -> Fault:
        """Return a fault of the output, unless `more` has another check."""
        return self._fault(name, forward_agrees, OUTPUT, edits, more)

    def gradient(self, name: str, *edits: str, **more: Any) -> Fault:
        """Return a fault of a gradient."""
        return self._fault(name, backward_agrees, GRADIENT, edits, more)

    def stopped(self, name: str, error: type[Exception], *edits: str, **more: Any) -> Fault:
        """Return a fault of the output that stops the checked build, which names the line."""
        fields = {"raises": error, "only_on": "cpu", **more}
        return self._fault(name, forward_agrees, r"\.cuh?:\d+\)", edits, fields)

    def law(self, law: Law, *edits: str, name: str = "law", **more: Any) -> Fault:
        """Return a fault that a law shows."""
        return self._fault(name, functools.partial(law_holds, law), r"left side.* is .*expected", edits, more)

    def unchecked(self, name: str, times: int = 1, **more: Any) -> Fault:
        """Return a fault of the checks of arguments: there are none. The file has `times` signatures."""
        edit = f"@signature( =>{times} @(lambda *_, **__: lambda function: function)("
        return self._fault(name, declared_errors_are_raised, "in place of|was raised|not name", (edit,), more)
