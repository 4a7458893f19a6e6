"""Import rules: oracles and kernels do not import each other, the harness imports neither, its packages are ordered."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"fourfold": "fourfold", "impls": "fourfold.impls", "oracles": "fourfold.oracles"}
FOLDERS["properties"] = "fourfold.properties"
# Each package may import those named here, what these may import, and itself. A kernel needs only `backends`.
SIBLINGS = ("api", "grading", "monitoring", "mutation", "performance", "pytest_plugin", "sanitize")
BELOW: Mapping[str, tuple[str, ...]] = {
    "compat": (),
    "processes": ("compat",),
    "numerics": ("compat",),
    "operations": ("numerics",),
    "backends": ("operations", "processes"),
    "inputs": ("operations", "backends"),
    "declaration": ("inputs",),
    "instruments": ("operations", "backends"),
    "candidates": ("declaration", "instruments"),
    "checks": ("candidates",),
    "engine": ("checks",),
    **dict.fromkeys(SIBLINGS, ("engine",)),
    "cli": SIBLINGS,
}
# Imports against these directions, with the reason.
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("fourfold.operations.registry", "properties"): "the registry names the library's own records",
    ("fourfold.grading.speed", "performance"): "grading times right kernels with the clocks of the benchmarks",
    (
        "fourfold.performance.plugin",
        "pytest_plugin",
    ): "benchmarks are tests of a run: its selection, its table",
}
# A folder with more Python files is hard to read. `checks` has one module for each claim.
MOST_FILES, MANY_FILES = 22, ("checks",)
# Classes that are defined twice, because messages show the name as the kind of the fault.
SAME_NAMES = {"OutOfBounds"}
# The other modules of this project that the operations' folders may import.
OF_OPERATIONS = {
    "impls": {"backends", "compat"},
    "oracles": set(),
    "properties": {"numerics", "operations", "inputs", "declaration", "oracles"},
}
STRING = re.compile(r"^(?:fourfold|impls|oracles|properties|tests)(?:\.\w+)+$")


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


MODULES: Mapping[str, Path] = {
    module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file names, in an import at any depth or in a string that looks like its name."""
    name = module_name(path)
    yield from named_modules(path, name if path.name == "__init__.py" else name.rpartition(".")[0])


def named_modules(path: Path, package: str) -> Iterator[str]:
    """Yield every module that a file of a package names."""
    tree = ast.parse(path.read_text(encoding="utf-8"), path.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            # A name that is not a module is defined by `base` itself.
            yield from (name if name in MODULES else base for name in inner)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and STRING.match(node.value):
            yield node.value


@functools.cache
def project_modules(path: Path) -> set[str]:
    """Return the modules of this project that a file names."""
    return {name for name in imports(path) if name in MODULES} - {module_name(path)}


def all_imports() -> dict[str, set[str]]:
    """Return the modules of this project that each of them names.

    Tests call it, not this module: each process that collects tests would parse the project.
    """
    return {name: project_modules(path) for name, path in MODULES.items()}


def of_folder(name: str) -> list[str]:
    prefix = f"fourfold.{name}"
    return [module for module in MODULES if module == prefix or module.startswith(f"{prefix}.")]


def part(module: str) -> str:
    """Return the folder of a module, such as "core" or "impls"; "" for the package itself."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("module", of_folder("oracles"))
def test_oracles_import_numpy_and_no_more(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports(MODULES[module])}
    # ml_dtypes provides bfloat16 for NumPy.
    assert packages - sys.stdlib_module_names <= {"numpy", "ml_dtypes", "fourfold"}


@pytest.mark.parametrize("module", [name for folder in OF_OPERATIONS for name in of_folder(folder)])
def test_operations_import_no_more_of_the_harness_than_they_may(module: str) -> None:
    allowed = OF_OPERATIONS[part(module)] | {part(module)}
    assert {part(name) for name in project_modules(MODULES[module])} <= allowed


@pytest.mark.parametrize("module", of_folder("impls"))
def test_implementations_know_nothing_of_their_verification(module: str) -> None:
    packages = {name.partition(".")[0] for name in imports(MODULES[module])}
    assert not packages & {"tests", "conftest", "hypothesis", "pytest"}


def reachable(package: str) -> set[str]:
    """Return the packages that a package may import."""
    return {"", package}.union(*map(reachable, BELOW[package]))


def against_directions(package: str) -> set[tuple[str, str]]:
    """Return the modules of a package that import a module of another one that they may not, with that module."""
    allowed = reachable(package)
    return {
        (module, name)
        for module in of_folder(package)
        for name in project_modules(MODULES[module])
        if part(name) not in allowed
    }


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_those_below_it(package: str) -> None:
    assert {(a, b) for a, b in against_directions(package) if (a, part(b)) not in EXCEPTIONS} == set()


@pytest.mark.parametrize(("module", "package"), EXCEPTIONS)
def test_an_exception_is_still_needed(module: str, package: str) -> None:
    assert (module, package) in {(a, part(b)) for a, b in against_directions(part(module))}


def test_every_module_of_the_harness_belongs_to_a_package() -> None:
    outside = {name for name in MODULES if part(name) not in (*BELOW, *OF_OPERATIONS)}
    assert outside == {"fourfold", "fourfold.__main__"}


def test_folders_are_small() -> None:
    files = Counter(path.parent for path in MODULES.values() if path.is_relative_to(ROOT / "fourfold"))
    large = {folder.name: count for folder, count in files.items() if count > MOST_FILES}
    assert large.keys() <= set(MANY_FILES)


def test_one_name_is_one_class() -> None:
    names = Counter(
        node.name
        for module, path in MODULES.items()
        if part(module) not in OF_OPERATIONS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SAME_NAMES


def test_no_modules_import_one_another_in_a_circle() -> None:
    left = {name: set(names) for name, names in all_imports().items() if name != "fourfold"}
    for names in left.values():
        names.discard("fourfold")
    # A module that imports no remaining module, or that no remaining module imports, is in no cycle.
    while True:
        imported = set().union(*left.values())
        free = {name for name, names in left.items() if not names & left.keys() or name not in imported}
        if not free:
            break
        for name in free:
            del left[name]
    circles = {name: sorted(names & left.keys()) for name, names in left.items()}
    assert not circles


# A command that sets variables for its own process, so that nobody may import it.
COMMAND = "fourfold.mutation.__main__"
SURROUNDINGS = """
import importlib, os, sys

before = dict(os.environ)
for name in sys.stdin.read().split():
    importlib.import_module(name)
print(*{name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)})
"""


@pytest.mark.full
def test_an_import_changes_no_variable_of_the_environment() -> None:
    """A variable tells Triton whether to interpret: an import that sets it changes every kernel of a run."""
    imported = sorted(MODULES.keys() - {COMMAND})
    known = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", SURROUNDINGS]
    done = subprocess.run(command, input="\n".join(imported), capture_output=True, text=True, cwd=ROOT, env=known)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_nobody_imports_a_command_that_sets_variables() -> None:
    tests = set((ROOT / "tests").rglob("*.py")) - {Path(__file__)}
    assert not [path for path in tests if COMMAND in set(named_modules(path, "tests"))]
    assert not {name for name, names in all_imports().items() if COMMAND in names}
