"""conftest.py sets what must be set before Triton is imported."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_conftest_does_not_import_triton_which_takes_its_mode_from_the_environment() -> None:
    code = "import fourfold.running.plugin, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
