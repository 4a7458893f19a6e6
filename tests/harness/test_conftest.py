"""conftest.py sets what must be set before Triton is imported, and before tests start processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_conftest_does_not_import_triton_which_takes_its_mode_from_the_environment() -> None:
    load = "import fourfold.pytest_plugin.hooks, runpy, sys; runpy.run_path(sys.argv[1])"
    code = f"{load}; sys.exit('triton' in sys.modules)"
    for conftest in (ROOT / "conftest.py", ROOT / "tests" / "harness" / "conftest.py"):
        environment = os.environ | {"PYTHONPATH": str(conftest.parent)}
        assert subprocess.run([sys.executable, "-c", code, conftest], cwd=ROOT, env=environment).returncode == 0


def test_processes_of_tests_keep_bytecode_even_where_python_is_told_not_to(tmp_path: Path) -> None:
    (tmp_path / "imported.py").touch()
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import imported'], check=True)"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    for first, kept in (("pass", False), ("import conftest", True)):
        subprocess.run([sys.executable, "-c", f"{first}; {child}"], cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / "__pycache__").exists() == kept
