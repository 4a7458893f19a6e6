"""The action, the workflows and the hook that others use: their schemas, and their shell steps, which are run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main, parsed
from fourfold.engine import annotations

pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: pip install -e '.[dev]'")
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
# Writes down how it is called, and answers `gh issue list` with the number of an open issue, if there is one.
FAKE_GH = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1 $2" in "issue list") echo "$OPEN" ;; esac
"""


def read(name: str) -> Any:
    return YAML(typ="safe").load(ROOT / name)


def test_workflows_and_the_action_are_as_their_schemas_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.py").write_text(
        "import triton\n\n\n@triton.jit\ndef k(x):\n    pass\n\n\ndef f(x):\n    k[1](x)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["init", "kernels.py", "--as", "softmax"]) == 0
    workflows = [*(ROOT / ".github" / "workflows").iterdir(), tmp_path / ".github" / "workflows" / "fourfold.yml"]
    for schema, files in (("github-workflows", workflows), ("github-actions", [ROOT / "action.yml"])):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_hook_and_the_workflow_for_a_gpu_give_options_that_exist() -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    scripts = [
        hook["entry"],
        *(step.get("run", "") for step in read(".github/workflows/gpu.yml")["jobs"]["gpu"]["steps"]),
    ]
    calls = [shlex.split(line) for line in "\n".join(scripts).splitlines() if line.strip().startswith("fourfold ")]
    assert [name for _, name, *_ in calls] == ["verify", "verify", "bench", "bench"]
    for _, name, *words in calls:
        given = parsed(name, words)
        known = ("-x", "-q", "--device=cpu", "--device=cuda", "--report=fourfold-report")
        assert {*given.passed} <= {*known}


@pytest.mark.parametrize(("number", "called"), [("", "issue create"), ("12", "issue comment 12")])
def test_a_night_that_fails_opens_one_issue(number: str, called: str, tmp_path: Path) -> None:
    job = read(".github/workflows/nightly.yml")["jobs"]["report"]
    assert (job["needs"], job["if"]) == (["cpu", "gpu"], "${{ failure() }}")
    (step,) = job["steps"]
    (tmp_path / "gh").write_text(FAKE_GH)
    (tmp_path / "gh").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "OPEN": number,
        "RUN": "a/b",
    }
    subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, check=True)
    first, *_, last = (tmp_path / "log").read_text().splitlines()
    assert first.startswith("issue list --label nightly --state open")
    assert last.startswith(called)
    assert last.endswith("a/b")


def test_an_annotation_is_one_line_at_the_place_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    file = tmp_path / "a,b.py"
    failed: dict[str, Any] = {"check": "forward: x", "dtype": "float32", "outcome": "failed", "message": "100%\nwrong"}
    raised = {**failed, "cause": "y", "frames": f'File "{file}", line 3, in f\nFile "{file}", line 9, in g'}
    cuda = {**failed, "cause": "a,b.py:4: OutOfBounds"}
    lines = [*annotations.check_annotations([failed, failed, raised, cuda, {**failed, "outcome": "passed"}], file, 7)]
    assert lines[0] == "::error file=a%2Cb.py,line=7,title=forward%3A x%2C float32::100%25%0Awrong"
    assert [line.partition(",title")[0] for line in lines[1:]] == [f"::error file=a%2Cb.py,line={n}" for n in (9, 4)]
