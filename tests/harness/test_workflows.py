"""The public action, workflows and hook: their schemas, and their shell steps, which the tests run."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main, parse
from fourfold.engine import annotations

pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: pip install -e '.[dev]'")
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
# Record the call, and answer `gh issue list` with the number of an open issue, if there is one.
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


def test_no_workflow_has_a_known_weakness() -> None:
    zizmor = Path(sysconfig.get_path("scripts"), "zizmor")
    if not zizmor.exists():
        pytest.skip("zizmor is not installed: pip install -e '.[dev]'")
    done = subprocess.run([zizmor, "--offline", "--no-progress", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_each_python_is_tested_checked_and_tried_before_a_release() -> None:
    stated = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    tests, release = (read(f".github/workflows/{name}.yml")["jobs"] for name in ("tests", "release"))
    for job in (tests["python"], release["try"]):
        assert job["strategy"]["matrix"]["python"] == stated
    steps = "\n".join(step["run"] for step in tests["python"]["steps"] if "run" in step)
    (own,) = re.findall(r"## Tests\n\n```sh\n(.*?)```", (ROOT / "docs" / "contributing.md").read_text(), re.DOTALL)
    assert {line.split()[0] for line in own.splitlines()} == {line.split()[0] for line in steps.splitlines()}
    assert (release["publish"]["needs"], release["try"]["needs"]) == ("try", "build")


@pytest.mark.parametrize(("tag", "code"), [("v0.1.0", 0), ("v0.2.0", 1)])
def test_a_tag_that_is_not_the_version_is_not_published(tag: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "fourfold").write_text("#!/bin/sh\necho fourfold 0.1.0\n")
    (tmp_path / "fourfold").chmod(0o755)
    steps = read(".github/workflows/release.yml")["jobs"]["try"]["steps"]
    (step,) = (step for step in steps if step.get("name") == "the tag is the version")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": tag}
    assert subprocess.run(["bash", "-e", "-c", step["run"]], env=environment).returncode == code


def test_the_hook_and_the_workflow_for_a_gpu_give_options_that_exist() -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    scripts = [
        hook["entry"],
        *(step.get("run", "") for step in read(".github/workflows/gpu.yml")["jobs"]["gpu"]["steps"]),
    ]
    calls = [shlex.split(line) for line in "\n".join(scripts).splitlines() if line.strip().startswith("fourfold ")]
    assert [name for _, name, *_ in calls] == ["verify", "verify", "bench", "bench"]
    for _, name, *words in calls:
        given = parse(name, words)
        known = ("-x", "-q", "--device=cpu", "--device=cuda", "--report=fourfold-report")
        assert {*given.passed} <= {*known}


# Record the call, one word in each line, and exit with the given code.
FAKE = """#!/bin/sh
{ echo "== $(basename "$0")"; printf '%s\\n' "$@"; } >> "$LOG"
for word in "$@"; do [ "$word" = wrong.py ] && exit 1; done
exit "${FAILS:-0}"
"""


def run_action(folder: Path, fails: int = 0, **inputs: str) -> tuple[list[int], list[list[str]]]:
    """Run the shell steps of the action with these inputs; return their exit codes and the commands they call."""
    action = read("action.yml")
    given = {name: of["default"] for name, of in action["inputs"].items()} | inputs
    for name in ("pip", "fourfold"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    (folder / "log").write_text("")
    codes = []
    for step in action["runs"]["steps"]:
        if step.get("name") == "sanitize":
            assert step["if"] == "${{ !cancelled() && inputs.sanitize != '' }}"
        if "run" in step and (step["name"] != "sanitize" or given["sanitize"]):
            named = {name: value.removeprefix("${{ inputs.").removesuffix(" }}") for name, value in step["env"].items()}
            environment = {
                **{name: given[value] for name, value in named.items()},
                "PATH": f"{folder}:{os.environ['PATH']}",
                "LOG": str(folder / "log"),
                "FAILS": str(fails),
            }
            shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            codes.append(subprocess.run(shell, env=environment, cwd=folder).returncode)
    called = (folder / "log").read_text().split("== ")[1:]
    return codes, [call.splitlines() for call in called]


def test_the_action_verifies_what_it_is_given_with_options_that_exist(tmp_path: Path) -> None:
    options = "--dtype float32 --claims contiguous=True"
    codes, calls = run_action(tmp_path, kernel="my kernels.py:f", options=options, report="out", **{"as": "ops.py:op"})
    assert codes == [0, 0]
    given = ["my kernels.py:f", "--as", "ops.py:op", "--verdict", "out/verdict.json", "--report", "out"]
    assert calls == [
        ["pip", "install", "--quiet", "fourfold"],
        ["fourfold", "verify", *given, "--device", "cpu", *options.split()],
    ]
    known = parse("verify", calls[1][2:])
    assert (known.kernel, known.operation) == ("my kernels.py:f", "ops.py:op")


def test_the_action_verifies_the_kernels_of_pyproject_if_it_is_given_none(tmp_path: Path) -> None:
    codes, (_, verify) = run_action(tmp_path, fails=1, install="fourfold -e .")
    assert codes == [1, 1]
    assert verify == ["fourfold", "verify", "--report", "fourfold-report", "--device", "cpu"]
    parse("verify", verify[2:])


def test_the_action_sanitizes_each_script_and_fails_for_any(tmp_path: Path) -> None:
    codes, (_, _, *calls) = run_action(tmp_path, sanitize="wrong.py dir/right.py")
    assert codes == [0, 0, 1]
    assert (tmp_path / "fourfold-report").is_dir()
    assert calls == [
        ["fourfold", "sanitize", "--json", f"fourfold-report/sanitize-{script}.json", path]
        for script, path in (("wrong.py", "wrong.py"), ("right.py", "dir/right.py"))
    ]
    assert run_action(tmp_path, sanitize="dir/right.py")[0] == [0, 0, 0]
    for call in calls:
        assert parse("sanitize", call[2:]).script in ("wrong.py", "dir/right.py")


def test_the_action_keeps_the_report_of_a_run_that_fails() -> None:
    action = read("action.yml")
    setup, *_, upload = action["runs"]["steps"]
    assert setup["with"]["python-version"] == "${{ inputs.python-version }}"
    assert upload["if"] == "${{ !cancelled() }}"
    assert {*upload["with"].values()} == {"${{ inputs.report }}"}
    used = str(action["runs"])
    assert all(f"inputs.{name} }}}}" in used for name in action["inputs"])


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
