"""A process that is forked from a warm one behaves like a new process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

TELLS = """
import json, os, sys
print(json.dumps([sys.argv, sys.orig_argv, sys.path, os.getcwd(), sorted(os.environ.items()), __name__, sys.flags]))
print("torch" in sys.modules, "triton" in sys.modules, file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "elsewhere").mkdir()
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}elsewhere", "SAID": "so"}


def test_it_is_told_what_another_process_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    forked = warm.run("tells", "a b", "--c", cwd=tmp_path, env=environment)
    command = [sys.executable, "-m", "tells", "a b", "--c"]
    own = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert forked.args == command
    assert (forked.returncode, forked.stdout) == (own.returncode, own.stdout)
    assert own.returncode == 3
    assert (forked.stderr, own.stderr) == ("True False\n", "False False\n")


@pytest.mark.parametrize(
    ("ends", "code"), [("", 0), ("raise ValueError", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_it_ends_as_another_does(ends: str, code: int, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "ends.py").write_text(ends)
    assert warm.run("ends", cwd=tmp_path, env=environment).returncode == code


def test_it_is_ended_when_the_time_is_up_and_the_next_one_runs(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "ends.py").write_text("")
    connection, process = warm.server(warm.LOADED)
    warm.run("ends", cwd=tmp_path, env=environment)
    connection.settimeout(0.1)
    with pytest.raises(TimeoutError) as ended:
        warm.run("sleeps", cwd=tmp_path, env=environment)
    assert re.search(r'sleeps\.py", line 2 in <module>', "".join(ended.value.__notes__))
    assert process.returncode == -signal.SIGKILL
    assert warm.run("ends", cwd=tmp_path, env=environment).returncode == 0
