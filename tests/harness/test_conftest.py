"""conftest.py sets what must be set before Triton is imported, and before tests start processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_conftest_does_not_import_triton_which_takes_its_mode_from_the_environment() -> None:
    code = "import fourfold.pytest_plugin.hooks, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_processes_of_tests_keep_bytecode_even_where_python_is_told_not_to(tmp_path: Path) -> None:
    (tmp_path / "imported.py").touch()
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import imported'], check=True)"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    for first, kept in (("pass", False), ("import conftest", True)):
        subprocess.run([sys.executable, "-c", f"{first}; {child}"], cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / "__pycache__").exists() == kept
