"""Pinned releases of public packages: downloaded, unpacked into a folder of the user's, and imported from there."""

import importlib.machinery
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

# The version of each package that the kernels come from, and of the packages that those import.
VERSIONS = {
    "conch-triton-kernels": "1.3",
    "einops": "0.8.2",
    "fla-core": "0.6.0",
    "flag-gems": "5.0.2",
    "flashnn": "0.1.1",
    "fvcore": "0.1.5.post20221221",
    "liger-kernel": "0.8.5",
    "pyyaml": "6.0.3",
    "rotary-embedding-torch": "0.9.1",
    "sqlalchemy": "2.1.9",
    "timm": "1.0.31",
    "torchtune": "0.6.1",
    "torchvision": "0.29.2",
}


def unpack(folder: Path, package: str) -> Path:
    """Return the folder of a package's files, which is downloaded unless it is there.

    Args:
        folder: where all packages lie, one folder each.
        package: its name, a key of `VERSIONS`.

    Returns:
        a folder to put on ``sys.path``.

    Raises:
        subprocess.CalledProcessError: pip has not found the release.
    """
    release = f"{package}=={VERSIONS[package]}"
    found = folder / release
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            archives, files = Path(partial, "archives"), Path(partial, "files")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
            subprocess.run([*command, "--dest", str(archives), release], check=True)
            for archive in archives.iterdir():
                extract(archive, files)
            files.rename(found)
    # A source archive has one folder, which holds all else.
    inner = [path for path in found.iterdir() if path.name.startswith(f"{package}-") and path.is_dir()]
    inner = [path for path in inner if path.suffix not in (".dist-info", ".data")]
    return inner[0] if inner else found


def extract(archive: Path, folder: Path) -> None:
    """Unpack what Python reads of a wheel or a source archive.

    Compiled libraries fit one version of Python or of torch, and no kernel here needs them: without them a folder
    serves every machine.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if is_read(name)])
    else:
        with tarfile.open(archive) as source:
            members = [member for member in source.getmembers() if is_read(member.name)]
            source.extractall(folder, members, filter="data")


def is_read(name: str) -> bool:
    """Return whether Python reads a file of a package: a module, a configuration, or what tells of its version."""
    return Path(name).suffix in (".py", ".yaml") or ".dist-info/" in name


def on_path(folder: Path, packages: Iterable[str]) -> None:
    """Put packages before all others on ``sys.path``."""
    sys.path[:0] = [str(unpack(folder, package)) for package in packages]


def stand_in(modules: Iterable[str]) -> None:
    """Let modules be imported that are not there. A kernel's file imports them, and the kernel does not use them."""
    for name in modules:
        sys.modules[name] = mock.MagicMock(name=name, __version__="0")


def without_init(names: Iterable[str]) -> None:
    """Let packages be imported whose own ``__init__`` is not run: it wants a GPU, or packages that no kernel needs."""
    for name in names:
        parent, _, last = name.rpartition(".")
        spec = _within(importlib.import_module(parent), name) if parent else importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ValueError(f"{name} is no package")
        module = types.ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        module.__spec__ = spec
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)


def _within(parent: types.ModuleType, name: str) -> importlib.machinery.ModuleSpec | None:
    return importlib.machinery.PathFinder.find_spec(name, parent.__path__)
