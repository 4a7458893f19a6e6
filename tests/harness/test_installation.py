"""An installed wheel works from any folder, adds one top-level name, and needs nothing of a clone."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = """
import torch

def add(x, y):
    return x + y

def subtract(x, y):
    return x - y
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with this project by ``pip install .`` and this environment's packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # Python ignores .pth files in a folder that a .pth file adds, so an editable clone is not visible.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "hatchling" in done.stderr and done.returncode:
        pytest.skip("pip cannot fetch hatchling, which builds the wheel")
    assert not done.returncode, done.stderr
    return python


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FOURFOLD_OP"))}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)


def test_one_top_level_name_is_added(installed: Path) -> None:
    packages = next((installed.parents[1] / "lib").glob("*/site-packages"))
    names = {path.name for path in packages.iterdir()} - {"dependencies.pth"}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fourfold"}


def test_its_operations_are_found_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    code = "import fourfold; from fourfold.checks.records import operations; print(fourfold.__file__, *operations())"
    done = run(installed, "-c", code, folder=tmp_path)
    assert not done.returncode, done.stderr
    file, *operations = done.stdout.split()
    assert Path(file).is_relative_to(installed.parents[1])
    assert {"giou", "matmul", "softmax", "vector_add"} <= set(operations)


def test_the_plugin_is_loaded_by_name_and_by_nothing_else(installed: Path, tmp_path: Path) -> None:
    assert "--candidate" in run(installed, "-m", "pytest", "-p", "fourfold", "--help", folder=tmp_path).stdout
    # Without -p fourfold, an installed plugin must not add options to other test suites.
    assert "--candidate" not in run(installed, "-m", "pytest", "--help", folder=tmp_path).stdout


@pytest.mark.parametrize(("name", "code"), [pytest.param("add", 0, marks=pytest.mark.full), ("subtract", 1)])
def test_a_kernel_in_its_authors_folder_is_verified(installed: Path, tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    options = ["--dtype", "float32", "--examples", "2", "-k", "output_agrees", "--device", "cpu"]
    done = run(
        installed, "-m", "fourfold", "verify", f"kernels.py:{name}", "--as", "vector_add", *options, folder=tmp_path
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert " verified " in done.stdout
