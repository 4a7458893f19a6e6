"""An installed wheel works from any folder, adds one top-level name, and needs nothing of a clone."""

import asyncio
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm

import fourfold

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
    environment = warm.variables("FOURFOLD_OP", "PYTHONPATH")
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)


def test_one_top_level_name_is_added(installed: Path) -> None:
    packages = next((installed.parents[1] / "lib").glob("*/site-packages"))
    names = {path.name for path in packages.iterdir()} - {"dependencies.pth"}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fourfold"}


def test_operations_and_the_texts_of_the_commands_are_found_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    code = "import fourfold; from fourfold.checks.records import operations; from fourfold.cli import explain, tour\n"
    code += "assert 'forward' in explain.explanations(); print(fourfold.__file__, tour.example(), *operations())"
    done = run(installed, "-c", code, folder=tmp_path)
    assert not done.returncode, done.stderr
    file, example, *operations = done.stdout.split()
    assert all(Path(path).is_relative_to(installed.parents[1]) for path in (file, example))
    assert {"giou", "matmul", "softmax", "vector_add"} <= set(operations)


def test_other_suites_do_not_load_the_plugin(installed: Path, tmp_path: Path) -> None:
    # Without -p fourfold, an installed plugin must not add options to other test suites. `fourfold verify` loads it.
    plain = run(installed, "-m", "pytest", "--help", folder=tmp_path).stdout
    assert "--timeout" in plain
    assert "--candidate" not in plain


OPERATIONS = """
import fourfold


@fourfold.operation(x=fourfold.tensor("rows cols"), y=fourfold.tensor("rows cols"))
def total(x, y):
    return x + y
"""
PROJECT = """
[tool.pytest.ini_options]
pythonpath = ["source"]
filterwarnings = ["error"]

[tool.fourfold]
device = "cpu"
dtypes = ["float32"]
examples = 2
"""


@pytest.mark.parametrize(("name", "code"), [pytest.param("add", 0, marks=pytest.mark.full), ("subtract", 1)])
def test_a_kernel_in_its_authors_project_is_verified(installed: Path, tmp_path: Path, name: str, code: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "kernels.py").write_text(KERNELS)
    (source / "operations.py").write_text(OPERATIONS)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    words = [f"kernels:{name}", "--as", "source/operations.py:total", "-k", "output_agrees", "--json"]
    done = run(installed, "-m", "fourfold", "verify", *words, folder=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert [(check["operation"], check["dtype"]) for check in verdict["checks"]] == [("total", "float32")]
    assert (verdict["passed"], verdict["device"], verdict["examples_a_check"]) == (not code, "cpu", 2)
    assert " verified " in done.stderr
    assert f"rootdir: {tmp_path}\n" in done.stderr
    assert (tmp_path / ".pytest_cache").is_dir()
    assert not list(installed.parents[1].rglob(".pytest_cache"))


@pytest.mark.full
def test_a_kernel_in_its_authors_project_is_timed(installed: Path, tmp_path: Path) -> None:
    for name, text in {"kernels": KERNELS, "operations": OPERATIONS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    few = ["-k", "small and forward and not compile", "--benchmark-max-time=0.01", "--json"]
    done = run(
        installed, "-m", "fourfold", "bench", "kernels.py:add", "--as=operations.py:total", *few, folder=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["timings"]
    assert (row["benchmark"], row["ratio_to"].keys()) == ("total-small-float32-forward", {"torch"})
    assert not list(installed.parents[1].rglob(".benchmarks"))


CRASHING = """
import os
import signal
from pathlib import Path

def crash(x, y):
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(x, y):
    with Path(__file__).with_name("alive").open("w") as alive:
        print("begun", file=alive, flush=True)
        while True:
            pass
"""
FEW = ["--device=cpu", "--dtype=float32", "--examples=1", "-k=test_output_agrees"]


def answers(python: Path, folder: Path, *calls: tuple[str, dict[str, object]], seconds: int) -> list[dict[str, Any]]:
    """Return the answers to calls of tools by one client over standard input, with one server."""
    mcp = pytest.importorskip("mcp", reason="mcp is not installed: pip install 'fourfold[mcp]'")
    words = ["-m", "fourfold", "mcp", f"--seconds={seconds}"]
    environment = warm.variables("PYTHONPATH")

    async def ask() -> list[dict[str, Any]]:
        server = mcp.StdioServerParameters(command=str(python), args=words, cwd=folder, env=environment)
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            assert [tool.name for tool in tools] == ["verify", "sanitize", "bench", "explain"]
            found = [await session.call_tool(name, given) for name, given in calls]
            return [json.loads(answer.content[0].text) for answer in found]

    return asyncio.run(ask())


def test_a_crashing_kernel_leaves_the_server_of_tools_alive(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nimport signal\n\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "kernels.py").write_text(CRASHING)
    missing = {"kernel": "kernels.py:crsh", "operation": "vector_add"}
    calls = [("sanitize", {"script": "script.py"}), ("verify", missing), ("explain", {"topic": "crashed"})]
    crashed, misspelt, explained = answers(installed, tmp_path, *calls, seconds=600)
    assert (crashed["exit_code"], crashed["result"]) == (-signal.SIGSEGV, None)
    assert (misspelt["exit_code"], misspelt["result"]) == (2, None)
    assert "did you mean crash?" in misspelt["output"]
    assert "its process died" in explained["output"]


@pytest.mark.full
def test_the_tools_verify_sanitize_and_time_and_end_what_hangs(installed: Path, tmp_path: Path) -> None:
    reading = "import sys\nprint('reads', repr(sys.stdin.read()))"
    texts = {"kernels": KERNELS, "ill": CRASHING, "operations": OPERATIONS, "script": reading}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    add = {"kernel": "kernels.py:add", "operation": "operations.py:total"}
    few = ["-k", "small and forward and not compile", "--benchmark-max-time=0.01"]
    calls: list[tuple[str, dict[str, object]]] = [
        ("verify", {**add, "options": FEW}),
        ("verify", {**add, "kernel": "ill.py:crash", "options": FEW}),
        ("sanitize", {"script": "script.py"}),
        ("bench", {**add, "options": few}),
    ]
    verified, crashed, sanitized, timed = answers(installed, tmp_path, *calls, seconds=600)
    assert (verified["exit_code"], verified["result"]["passed"]) == (0, True)
    assert (crashed["exit_code"], crashed["result"]["kind"]) == (1, "crashed")
    schema = json.loads((ROOT / "docs" / "verdict.schema.json").read_text())
    for answer in (verified, crashed):
        pytest.importorskip("jsonschema", reason="jsonschema is not installed").validate(answer["result"], schema)
    assert (sanitized["exit_code"], sanitized["result"]["findings"]) == (0, [])
    assert "reads ''" in sanitized["output"]
    assert timed["result"]["timings"][0]["benchmark"] == "total-small-float32-forward"
    os.mkfifo(tmp_path / "alive")
    with os.fdopen(os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)) as alive:
        hang = {"kernel": "ill.py:hang", "operation": "operations.py:total", "options": FEW}
        (late,) = answers(installed, tmp_path, ("verify", hang), seconds=15)
        assert (late["exit_code"], late["output"]) == (None, "not done after 15 s")
        os.set_blocking(alive.fileno(), True)
        assert alive.read() in ("begun\n", "")  # it ends with the process that hung, if that had begun in time


@pytest.mark.full
def test_a_tool_ends_with_the_server_that_is_killed(installed: Path, tmp_path: Path) -> None:
    for name, text in {"ill": CRASHING, "operations": OPERATIONS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    os.mkfifo(tmp_path / "alive")
    words = ["verify", "ill.py:hang", "--as", "operations.py:total", *FEW]
    code = f"import asyncio; from fourfold.cli.mcp import answer; asyncio.run(answer(*{words}, seconds=600))"
    with (
        subprocess.Popen([installed, "-c", code], cwd=tmp_path, env=warm.variables("PYTHONPATH")) as server,
        (tmp_path / "alive").open() as alive,  # once the kernel runs
    ):
        server.kill()
        assert alive.read() == "begun\n"  # ends once no process has it open


SCRIPT = """
import torch
import triton
import triton.language as tl


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0)


fill[(1,)](torch.empty(5, device="cuda"), 5, BLOCK=8)
"""


@pytest.mark.full
def test_the_action_annotates_the_lines_that_fail_in_its_users_repository(installed: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("ruamel.yaml", reason="ruamel.yaml is not installed: pip install -e '.[dev]'")
    action = yaml.YAML(typ="safe").load(ROOT / "action.yml")
    for name, text in {"kernels": KERNELS, "operations": OPERATIONS, "script": SCRIPT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    fake = tmp_path / "fake" / "pip"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    inputs = {f"${{{{ inputs.{name} }}}}": given["default"] for name, given in action["inputs"].items()}
    inputs |= {"${{ inputs.kernel }}": "kernels.py:subtract", "${{ inputs.as }}": "operations.py:total"}
    inputs |= {"${{ inputs.options }}": " ".join(FEW[1:]), "${{ inputs.sanitize }}": "script.py"}
    kept = warm.variables("PYTHONPATH", GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(tmp_path))
    kept["PATH"] = os.pathsep.join([str(fake.parent), str(installed.parent), kept["PATH"]])
    done = {}
    for step in action["runs"]["steps"]:
        if "run" in step:
            environment = kept | {name: inputs[value] for name, value in step["env"].items()}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            done[step["name"]] = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done["install"].stdout.splitlines() == ["install --quiet fourfold"]
    assert (done["verify"].returncode, done["sanitize"].returncode) == (1, 1), done
    (annotated,) = re.findall(r"^::error file=kernels.py,line=7,title=(.*)$", done["verify"].stdout, re.MULTILINE)
    assert "forward%3A output agrees with the oracle" in annotated
    assert "%0ACase(x=" in annotated
    out_of_bounds = "::error file=script.py,line=10,title=out of bounds in fill::"
    assert out_of_bounds in done["sanitize"].stdout + done["sanitize"].stderr
    report = tmp_path / "fourfold-report"
    assert {path.name for path in report.iterdir()} >= {"index.html", "verdict.json", "sanitize-script.py.json"}


@pytest.mark.full
def test_the_public_interface_is_typed(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[dev]'")
    (tmp_path / "mine.py").write_text(
        "import fourfold\nfourfold.verify(abs, 'softmax', examples='many')\nfourfold.verify(abs, 'softmax').passed\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", installed, "--follow-imports=silent", "mine.py"]
    done = run(*command, folder=tmp_path)
    assert 'Argument "examples" to "verify" has incompatible type "str"; expected "int"' in done.stdout, done.stdout
    assert "Found 1 error" in done.stdout


def test_pyright_knows_each_name_of_the_public_interface(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed: pip install -e '.[dev]'")
    names = "\n".join(f"print(fourfold.{name})" for name in (*fourfold._PUBLIC, "__version__"))
    (tmp_path / "mine.py").write_text(f"# pyright: strict\nimport fourfold\n{names}\nfourfold.verify(0, 'softmax')\n")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", installed, "--level", "error", "mine.py"]
    done = run(*command, folder=tmp_path)
    assert 'Argument of type "Literal[0]" cannot be assigned to parameter "implementation"' in done.stdout, done.stdout
    assert "1 error," in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("git@github.com:some/fourfold.git", "https://github.com/some/fourfold/blob/HEAD/docs/a.md#b"),
        ("https://github.com/some/fourfold", "https://github.com/some/fourfold/blob/HEAD/docs/a.md#b"),
        ("/srv/fourfold.git", "docs/a.md#b"),
    ],
)
def test_the_package_has_the_addresses_of_its_repository(
    remote: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hatchling = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    hook = runpy.run_path(str(ROOT / ".ci" / "metadata.py"))["Addresses"]()
    hook.root = str(tmp_path)
    (tmp_path / "README.md").write_text("[a](docs/a.md#b) [c](https://c.org) [d](#d)\n")
    for words in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    metadata: dict[str, Any] = {}
    hook.update(metadata)
    assert metadata["readme"]["text"] == f"[a]({page}) [c](https://c.org) [d](#d)\n"
    home = {"https://github.com/some/fourfold"} if page.startswith("https") else set()
    assert {*metadata["urls"].values()} >= home
    assert bool(metadata["urls"]) == bool(home)
