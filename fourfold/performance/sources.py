"""The sources of a recorded run, saved with its times, and loaded later beside today's sources for a comparison."""

import contextlib
import hashlib
import importlib
import io
import operator
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fourfold.backends import MODULES
from fourfold.backends.cuda.compile import cache_folder, directory_lock
from fourfold.operations import registry
from fourfold.processes.files import write_atomically

SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp"}
INSTALLED = "site-packages"


class SourceError(Exception):
    """The sources of a recorded run are missing or do not load."""


def read_sources(candidates: Iterable[Path]) -> dict[str, bytes]:
    """Return the contents of the kernels' files, of the backends that launch them and of the candidates, by path.

    Args:
        candidates: the file of each candidate. The loaded modules of its project are kept with it, and the CUDA C++ in
            its folder.
    """
    files = {
        f"{part.replace('.', '/')}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for part in ("fourfold.backends", "fourfold.compat", *registry.folders_of_implementations())
        for folder in map(Path, importlib.import_module(part).__path__[:1])
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES
    }
    for file, place in places(candidates).items():
        top = place.removesuffix(file.relative_to(_root(file)).as_posix())
        files |= {top + path.relative_to(_root(file)).as_posix(): path.read_bytes() for path in _project(file)}
    return files


def places(candidates: Iterable[Path]) -> dict[Path, str]:
    """Return the path of each candidate's file among the collected ones: ``candidates/0/package/module.py``."""
    numbers: dict[Path, int] = {}
    return {
        file: f"candidates/{numbers.setdefault(_root(file), len(numbers))}/{file.relative_to(_root(file)).as_posix()}"
        for file in candidates
    }


def _root(file: Path) -> Path:
    """Return the folder in which Python finds a file's module."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file())


def _project(file: Path) -> set[Path]:
    """Return a candidate's file, the loaded modules that Python finds in its `_root`, and the CUDA C++ beside it."""
    root, first = _root(file), file.relative_to(_root(file)).parts[0]
    module_files = {Path(path) for module in [*sys.modules.values()] if (path := getattr(module, "__file__", None))}
    project_files = {path for path in module_files if path.suffix in SUFFIXES and path.is_relative_to(root)}
    if root.name == INSTALLED:  # other packages lie there too
        project_files = {path for path in project_files if path.relative_to(root).parts[0] == first}
    neighbours = {path for path in file.parent.iterdir() if path.suffix in SUFFIXES - {".py"}}
    return {file, *neighbours, *(path for path in project_files if INSTALLED not in path.relative_to(root).parts)}


def digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the paths and contents."""
    total = hashlib.sha256()
    for path, content in sorted(files.items()):
        total.update(f"{path}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def save(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files as a zip archive named by their digest, unless it exists, and return its path."""
    path = directory / f"{digest(files)}.zip"
    try:
        _read_archive(path)
    except SourceError:  # it is not there yet, or damaged
        directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        write_atomically(path, buffer.getvalue())
    return path


def _read_archive(archive: Path) -> dict[str, bytes]:
    """Return the files that an archive holds.

    Raises:
        SourceError: there is no such archive, or it is damaged.
    """
    if not archive.is_file():
        raise SourceError(f"its sources are not kept: there is no {archive.name} beside the record")
    try:
        with zipfile.ZipFile(archive) as zip_file:
            files = {name: zip_file.read(name) for name in zip_file.namelist()}
    except Exception as error:  # zipfile raises many exceptions for what is no longer an archive
        raise SourceError(f"{archive} is damaged: {type(error).__name__}: {error}") from error
    if digest(files) != archive.stem:
        raise SourceError(f"{archive} does not hold what its name says")
    return files


class Baseline:
    """The implementations of a recorded run, loaded into this process as packages with another name.

    Args:
        archive: the path that `save` returned.

    Raises:
        SourceError: there is no such file, it is damaged, or it does not hold what its name says.
    """

    def __init__(self, archive: Path) -> None:
        files = _read_archive(archive)
        self.suffix = archive.stem[:12]
        tops = {name.partition("/")[0] for name in files} - {"candidates"}
        self._packages = re.compile(rf"\b(?:{'|'.join(sorted(tops))})(?=\.(?:backends|compat|impls)\b)")
        # In one place for good: compiled kernels are kept by the path of their source too.
        self.directory = cache_folder("baselines", archive.stem)
        with directory_lock(self.directory):
            for name, content in files.items():
                path = self.directory / re.sub(r"^(?!candidates/)\w+", rf"\g<0>_{self.suffix}", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                copy = self._rename(name, content)
                # Another process may be importing it.
                if not path.is_file() or path.read_bytes() != copy:
                    write_atomically(path, copy)

    def _rename(self, name: str, content: bytes) -> bytes:
        if not name.endswith(".py") or name.startswith("candidates/"):
            return content
        text = self._packages.sub(rf"\g<0>_{self.suffix}", content.decode())
        if name == "fourfold/backends/operators.py":
            # An operator can be registered only once in a process, so the copy needs its own namespace.
            assignment = f'NAMESPACE = "fourfold_{self.suffix}"'
            text, count = re.subn(r'^NAMESPACE = "\w+"', assignment, text, flags=re.MULTILINE)
            if not count:
                raise SourceError("its operators have no namespace that could be changed")
        return text.encode()

    def load(self, operation: str, backend: str) -> Callable[..., Any]:
        """Return the recorded implementation of an operation on a backend.

        Raises:
            SourceError: there was none, or it no longer loads.
        """
        if str(self.directory) not in sys.path:
            sys.path.append(str(self.directory))
        try:
            top, _, path = registry.implementations(operation).partition(".")
            module = importlib.import_module(f"{top}_{self.suffix}.{path}.{MODULES[backend]}")
            return getattr(module, operation)
        except Exception as error:
            raise SourceError(f"its {operation} on {backend} does not load: {type(error).__name__}: {error}") from error

    def candidate(self, place: str, function: str) -> Callable[..., Any]:
        """Return the recorded function of a candidate. The modules that it imports are the recorded ones too.

        Args:
            place: what `places` returned for its file.
            function: its name there.

        Raises:
            SourceError: its file was not kept, or no longer loads.
        """
        path = self.directory / place
        if path.suffix != ".py" or not path.is_file():
            raise SourceError(f"the file of its candidate {function} is not kept")
        root = self.directory.joinpath(*Path(place).parts[:2])
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        try:
            with _alone(root):
                return operator.attrgetter(function)(importlib.import_module(name))
        except Exception as error:
            raise SourceError(f"its candidate {function} does not load: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Import the modules of a folder again, whatever is loaded under their names; restore that afterwards."""
    tops = {path.stem for path in root.iterdir()}

    def hide() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in tops}

    modules = hide()
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        hide()
        sys.modules.update(modules)
