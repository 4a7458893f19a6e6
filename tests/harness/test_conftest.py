"""What pytest is told: that what it has to know before Triton is imported is known by then."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_conftest_does_not_import_triton_which_takes_its_mode_from_the_environment() -> None:
    code = "import conftest, sys; assert 'conftest' in sys.modules; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
