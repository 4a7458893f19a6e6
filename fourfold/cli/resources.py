"""``fourfold resources``: the resources of compiled kernels, beside those of another revision. It needs no GPU.

    fourfold resources --base origin/main

Kernels whose machine code is the same are as fast as before. Of the others it says what differs: registers, spills,
shared memory, and how many instructions of each kind.
"""

import argparse
import importlib
import importlib.metadata
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fourfold
from fourfold.checks.records import operations
from fourfold.engine.cells import Cell, Selection, SelectionError
from fourfold.operations import registry
from fourfold.performance import machine
from fourfold.performance.static import Kernels, Pair, StaticError, kernels_of, pair_kernels

BACKENDS = ("triton", "cuda")
ARCHITECTURES = {"80": (8, 0), "90": (9, 0), "100": (10, 0)}


class NoBase(Exception):
    """There is nothing to compare with."""


@dataclass(frozen=True)
class CellResources:
    """The resources of some cells' kernels.

    Attributes:
        kernels: by the name of the cell.
        errors: the reason why a cell's kernels do not compile, by the name of the cell.
        compilers: versions that differ from today's, by name.
    """

    kernels: Kernels
    errors: Mapping[str, str]
    compilers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, cells: Sequence[Cell], arch: str, jobs: int, folder: Path | None = None) -> "CellResources":
        """Compile the kernels of cells, of the library or of ``folder/impls``, several at a time."""

        def compile_one(cell: Cell) -> list[dict[str, Any]] | str:
            try:
                return kernels_of(cell, *ARCHITECTURES[arch], folder)
            except StaticError as error:
                return str(error)

        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            results = dict(zip(map(str, cells), pool.map(compile_one, cells)))
        return cls(
            {cell: kernels for cell, kernels in results.items() if not isinstance(kernels, str)},
            {cell: error for cell, error in results.items() if isinstance(error, str)},
        )


def command(options: argparse.Namespace) -> int:
    """Run ``fourfold resources``; return 1 if a kernel does not compile, or with --strict needs more."""
    try:
        selection = Selection.of(operations(), [], options.op, options.backend or BACKENDS, options.dtype)
        old = load_resources(options.against, options.arch) if options.against is not None else None
        with tempfile.TemporaryDirectory() as directory:
            cells, base = list(selection.cells), Path(directory)
            if options.base is not None:
                unpack(options.base, implementations(), base)
                changed = changed_operations(
                    implementations(), base / "impls", dict.fromkeys(cell.operation for cell in cells)
                )
                cells = [cell for cell in cells if cell.operation in changed]
                print(f"operations with other files than {options.base}: {', '.join(changed) or 'none'}", flush=True)
                # A new operation has nothing to be compared with.
                common = [cell for cell in cells if (base / "impls" / cell.operation).is_dir()]
                old = CellResources.of(common, options.arch, options.jobs, base)
            new = CellResources.of(cells, options.arch, options.jobs)
    except (SelectionError, NoBase) as error:
        options.error(str(error))
    if options.json is not None:
        content = {**machine.run(Path.cwd()), "compilers": compilers(), "arch": options.arch}
        options.json.write_text(json.dumps({**content, "kernels": new.kernels}, indent=1) + "\n")
    if old is None:
        for line in needs(new):
            print(line)
        return 1 if new.errors else 0
    compared = compare(new, old)
    for line in lines(compared, new, old):
        print(line)
    return 1 if new.errors or (options.strict and any(pair.worse for _, pair in compared)) else 0


def compilers() -> dict[str, str]:
    """Return the versions of the compilers, by name."""
    return {name: importlib.metadata.version(name) for name in ("triton", "nvidia-cuda-nvrtc")}


def load_resources(path: Path, arch: str) -> CellResources:
    """Return the resources in a file written by --json.

    Raises:
        NoBase: the file cannot be read, or has other content, or kernels for another architecture.
    """
    try:
        content = json.loads(path.read_text())
        today = compilers()
        changed = {name: version for name, version in content["compilers"].items() if version != today.get(name)}
        if content["arch"] != arch:
            raise NoBase(f"--against {path}: it is of --arch {content['arch']}")
        return CellResources(content["kernels"], {}, changed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoBase(f"--against {path}: {type(error).__name__}: {error}") from error


# ---- the kernels of another revision


def implementations() -> Path:
    """Return the folder of this library's kernels. Those of other packages are not compared with another revision."""
    packages = (name for name in registry.folders_of_implementations() if name.partition(".")[0] == fourfold.__name__)
    (folder,) = importlib.import_module(next(packages)).__path__
    return Path(folder)


def unpack(revision: str, kernels: Path, folder: Path) -> None:
    """Write the kernels of a revision into ``folder/impls``.

    Raises:
        NoBase: there is no such revision, or it has no kernels.
    """
    if revision.startswith("-"):
        raise NoBase(f"--base {revision}: a revision does not begin with a hyphen")
    git = ["git", "-C", str(kernels.parent), "archive", "--format=tar", f"{revision}:./{kernels.name}"]
    process = subprocess.run(git, capture_output=True)
    if process.returncode:
        raise NoBase(f"--base {revision}: {process.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(process.stdout)) as archive:
        archive.extractall(folder / "impls", filter="data")


def changed_operations(new: Path, old: Path, names: Iterable[str]) -> list[str]:
    """Return the operations whose kernels, or files that these may use, differ between two folders of kernels.

    Args:
        new: the folder of today's kernels.
        old: that of the others.
        names: of operations.
    """
    return [name for name in names if _used_files(new, name) != _used_files(old, name)]


def _used_files(kernels: Path, operation: str) -> dict[str, bytes]:
    """Return the files that an operation's kernels may use: its folder, and all folders and files that these name."""
    files_of: dict[str, list[Path]] = {}
    for path in kernels.iterdir():
        files_of.setdefault(path.name.partition(".")[0], []).append(path)
    files: dict[str, bytes] = {}
    pending, reached = [operation], {operation}
    while pending:
        for path in files_of.get(pending.pop(), []):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.suffix == ".pyc" or not file.is_file():
                    continue
                files[str(file.relative_to(kernels))] = content = file.read_bytes()
                mentioned = set(re.findall(r"\w+", content.decode(errors="replace"))) & files_of.keys()
                pending += sorted(mentioned - reached)
                reached |= mentioned
    return files


# ---- reports


def compare(new: CellResources, old: CellResources) -> list[tuple[str, Pair]]:
    """Return the pairs of kernels of each cell that compiles on both sides, and of new cells."""
    cells = [cell for cell in new.kernels if cell not in old.errors]
    return [(cell, pair) for cell in cells for pair in pair_kernels(new.kernels[cell], old.kernels.get(cell, []))]


def lines(compared: Sequence[tuple[str, Pair]], new: CellResources, old: CellResources) -> Iterator[str]:
    """Yield the differences by cell, then the kernels that became worse, and the number of equal kernels."""
    yield from (f"{name} is {compilers()[name]}, was {version}" for name, version in old.compilers.items())
    for cell in dict.fromkeys(cell for cell, _ in compared):
        pairs = [pair for name, pair in compared if name == cell]
        unchanged = sum(pair.same for pair in pairs)
        if unchanged < len(pairs):
            yield f"{cell}: {unchanged} of {len(pairs)} kernels have the same code"
            yield from (f"  {pair}" for pair in pairs if not pair.same)
    yield from (f"worse: {cell}: {pair.name}: {worse}" for cell, pair in compared for worse in pair.worse)
    yield from (f"does not compile: {error}" for error in new.errors.values())
    yield from (f"not compared, the base does not compile: {error}" for error in old.errors.values())
    unchanged = sum(pair.same for _, pair in compared)
    yield f"{unchanged} of {len(compared)} kernels have the same code"


def needs(compiled: CellResources) -> Iterator[str]:
    """Yield the resources of each kernel."""
    for cell, kernels in compiled.kernels.items():
        yield cell
        for kernel in kernels:
            spills = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
            count = sum(kernel["instruction_counts"].values())
            yield (
                f"  {kernel['name']} for {kernel['arch']}: {kernel['registers']} registers, {spills} bytes of spills,"
                f" {kernel['shared_bytes']} bytes of shared memory, {count} instructions"
            )
    yield from (f"does not compile: {error}" for error in compiled.errors.values())
