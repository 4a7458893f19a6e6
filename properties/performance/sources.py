"""The sources of a recorded run: kept with its times, and loaded again beside today's to be measured against them."""

import hashlib
import importlib
import importlib.util
import io
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from impls.backends import MODULES
from impls.cuda_compile import IMPLS, cache_directory, locked

SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp"}


class SourceError(Exception):
    """A recorded run's sources are not there, or cannot be loaded."""


def collected(candidates: Mapping[str, str]) -> dict[str, bytes]:
    """The text of `impls` by path, and of the candidates' files.

    Args:
        candidates: the file of each candidate by operation; one that is given as a module is not kept.
    """
    files = {
        f"impls/{path.relative_to(IMPLS).as_posix()}": path.read_bytes()
        for path in sorted(IMPLS.rglob("*"))
        if path.suffix in SUFFIXES
    }
    files |= {f"candidates/{op}.py": Path(f).read_bytes() for op, f in candidates.items() if f.endswith(".py")}
    return files


def digest(files: Mapping[str, bytes]) -> str:
    """Names the files by what they hold."""
    total = hashlib.sha256()
    for path, content in sorted(files.items()):
        total.update(f"{path}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def save(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Keep the files in a directory, once, under their digest."""
    path = directory / f"{digest(files)}.zip"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive:
            for name, content in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        path.write_bytes(held.getvalue())
    return path


class Baseline:
    """The implementations of a recorded run, as a package of another name in this process.

    Args:
        archive: what `save` wrote.

    Raises:
        SourceError: there is no such file, or it does not hold what its name says.
    """

    def __init__(self, archive: Path) -> None:
        if not archive.is_file():
            raise SourceError(f"its sources are not kept: there is no {archive.name} beside the record")
        with zipfile.ZipFile(archive) as held:
            files = {name: held.read(name) for name in held.namelist()}
        if digest(files) != archive.stem:
            raise SourceError(f"{archive.name} does not hold what its name says")
        self.package = f"impls_{archive.stem[:12]}"
        # In one place for good: compiled kernels are kept by the path of their source too.
        self.directory = cache_directory() / "baselines" / archive.stem
        with locked(self.directory):
            for name, content in files.items():
                path = self.directory / name.replace("impls/", f"{self.package}/", 1)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._renamed(name, content))

    def _renamed(self, name: str, content: bytes) -> bytes:
        if not name.endswith(".py") or name.startswith("candidates/"):
            return content
        text = re.sub(r"\bimpls\b", self.package, content.decode())
        if name == "impls/operators.py":
            # An operator is registered once in a process.
            text, found = re.subn(r'^NAMESPACE = "\w+"', f'NAMESPACE = "{self.package}"', text, flags=re.MULTILINE)
            if not found:
                raise SourceError("its operators have no namespace that could be changed")
        return text.encode()

    def load(self, operation: str, backend: str) -> Callable[..., Any]:
        """The public function of an operation on a backend, as it was.

        Raises:
            SourceError: there was none, or it no longer loads.
        """
        if str(self.directory) not in sys.path:
            sys.path.append(str(self.directory))
        try:
            return getattr(importlib.import_module(f"{self.package}.{operation}.{MODULES[backend]}"), operation)
        except Exception as error:
            raise SourceError(f"its {operation} on {backend} does not load: {type(error).__name__}: {error}") from error

    def candidate(self, operation: str, function: str) -> Callable[..., Any]:
        """A candidate's function, as it was.

        Raises:
            SourceError: its file was not kept, or no longer loads.
        """
        path = self.directory / "candidates" / f"{operation}.py"
        if not path.is_file():
            raise SourceError(f"the file of its candidate for {operation} is not kept")
        name = f"{self.package}_candidate_{operation}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            return getattr(module, function)
        except Exception as error:
            raise SourceError(
                f"its candidate for {operation} does not load: {type(error).__name__}: {error}"
            ) from error
