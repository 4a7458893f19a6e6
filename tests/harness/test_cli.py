"""The command ``fourfold``: its parser, its errors for misspelt words, the user's project, and the files of init."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import fourfold
from fourfold.api import progress
from fourfold.checks.records import operations
from fourfold.cli import verify
from fourfold.cli.listing import known_operations
from fourfold.cli.main import COMMANDS, main, parse
from fourfold.cli.pytest_command import configuration_of
from fourfold.cli.settings import BadSettings, ProjectSettings
from fourfold.cli.source import Source
from fourfold.cli.verify import command_of
from fourfold.engine.cells import Candidate, Selection, SelectionError

ROOT = Path(__file__).parents[2]
KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x_ptr, out_ptr, n, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * alpha, mask=at < n)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        out = torch.empty_like(x)
        _scale[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), alpha, BLOCK=64)
        return out


def fast_scale(x, alpha: float = 1.0):
    return _Scale.apply(x, alpha)


def my_softmax(x):
    return _scale[(1,)](x)


def softmax_backward(x):
    return _scale[(1,)](x)


def helper(x):
    return x
"""
OPERATIONS = """
import fourfold
from fourfold import tensor, values


@fourfold.operation(x=tensor("rows cols"), alpha=values(1.0, 0.5))
def scale(x, alpha=1.0):
    return x * alpha
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a project with kernels and an operation, in which the test runs."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "ops.py").write_text(OPERATIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


# ---- the parser

WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # to import it is an error
from fourfold.cli.main import COMMANDS, main

for words in [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), sys.argv[1:]]:
    try:
        main(words)
    except SystemExit as end:
        print(*words[:1], "ends with", end.code)
"""


def test_help_and_a_misspelt_function_need_no_torch(project: Path) -> None:
    words = ["verify", "kernels.py:fast_scal", "--as", "ops.py:scale"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert all(f"{name} ends with 0" in done.stdout for name in ("--help", "--version", *COMMANDS))
    assert f"fourfold {fourfold.__version__}" in done.stdout
    assert "verify ends with 2" in done.stdout
    assert "kernels.py has no function fast_scal; did you mean fast_scale?" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verfy"], "there is no command verfy; did you mean verify?"),
        (["verify", "kernels.py:my_softmax", "--as", "sofmax"], "there is no operation sofmax; did you mean softmax?"),
        (["verify", "kernel.py:f", "--as", "softmax"], "there is no file kernel.py; did you mean kernels.py?"),
        (["verify", "kernels.py:helper", "--as", "ops.py:scal"], "ops.py has no function scal; did you mean scale?"),
        (["verify", "kernels:fast_scal", "--as", "softmax"], "has no function fast_scal; did you mean fast_scale?"),
        (["verify", "kernels.py:helper", "--aas", "softmax"], "no such option: --aas; did you mean --as?"),
        (["verify", "helper", "--as", "softmax"], "expected FILE_OR_MODULE:FUNCTION"),
        (["verify"], "pyproject.toml has no [tool.fourfold.kernels]"),
        (["list", "--jsn"], "no such option: --jsn; did you mean --json?"),
        (["mutate", "--op", "sofmax"], "did you mean softmax?"),
        (["sanitize", "nothing.py"], "there is no file or folder nothing.py"),
        (["init", "ops.py"], "no function of ops.py launches a Triton kernel"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(
    words: list[str], said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(*words, capsys=capsys)


def test_each_known_operation_is_listed_with_its_arguments() -> None:
    rows = known_operations()
    assert [row["operation"] for row in rows if not row["arguments"]] == []
    assert {row["operation"] for row in rows} == {*operations()}


def test_pytest_names_the_option_that_was_meant(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = warm.run("pytest", "-p", "fourfold", "--devce=cpu", cwd=tmp_path, env=environment)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no such option: --devce; did you mean --device?" in done.stderr


def test_options_of_the_checks_and_of_pytest_go_to_pytest_wherever_they_stand(project: Path) -> None:
    words = [
        "--device",
        "cpu",
        "-k",
        "forward or memory",
        "kernels.py:helper",
        "--as",
        "ops.py:scale",
        "-x",
        "--durations=3",
    ]
    command = command_of(parse("verify", words))
    start = command.index("--candidate")
    passed = ["--device=cpu", "-kforward or memory", "-x", "--durations=3", "--untrusted-where-possible"]
    assert command[start:] == ["--candidate", "ops.py:scale=kernels.py:helper", *passed]


@pytest.mark.parametrize(
    ("cores", "words", "workers"),
    [
        (1, "", []),
        (2, "", ["-n2"]),
        (64, "--device cpu --claims finite=True --verdict v.json -q", ["-n4"]),
        (64, "-n 3", ["-n3"]),
        (64, "-x", []),
        (64, "-k forward", []),
        (64, "--dtype float32", []),
        (64, "--pdb", []),
        (64, "--device cuda", []),
    ],
)
def test_run_of_all_checks_has_a_worker_per_core(
    project: Path, monkeypatch: pytest.MonkeyPatch, cores: int, words: str, workers: list[str]
) -> None:
    monkeypatch.setattr(verify.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    command = command_of(parse("verify", ["kernels.py:helper", "--as", "softmax", *words.split()]))
    assert [word for word in command if word.startswith("-n")] == workers


# ---- the user's project


def test_the_checks_take_the_configuration_of_the_project(project: Path) -> None:
    words = ["kernels.py:helper", "--as", "softmax"]
    assert f"--rootdir={project}" in command_of(parse("verify", words))
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    command = command_of(parse("verify", words))
    assert command[command.index("-c") + 1] == str(project / "pyproject.toml")
    (project / "setup.cfg").write_text("[metadata]\n")
    below = project / "below"
    below.mkdir()
    assert configuration_of(below) == project / "pyproject.toml"


SETTINGS = """
[tool.fourfold]
device = "cpu"
dtypes = ["float32", "float16"]
examples = 3

[tool.fourfold.kernels."kernels.py:fast_scale"]
as = "ops.py:scale"
claims = "finite=True"
"""


def test_settings_hold_where_no_option_says_otherwise(project: Path) -> None:
    (project / "pyproject.toml").write_text(SETTINGS)
    assert ProjectSettings.of(project).kernels == {
        "kernels.py:fast_scale": {"as": "ops.py:scale", "claims": "finite=True"}
    }
    given = parse("verify", ["kernels.py:fast_scale", "--dtype", "float64"])
    assert given.passed == ["--device=cpu", "--examples=3", "--dtype=float64"]
    given = parse("accuracy", [])
    assert (given.device, given.dtype, given.examples) == ("cpu", ["float32", "float16"], 3)


SECOND_KERNEL = """
[tool.fourfold.kernels."kernels.py:my_softmax"]
as = "softmax"
"""
# A fake pytest that prints its candidate and its claims, and fails for the first kernel.
FAKE_PYTEST = """
import sys

words = sys.argv
print("verified", *(word for word in words if "kernels.py:" in word or word.startswith("--claims=")))
sys.exit(any("fast_scale" in word for word in words))
"""


def test_each_kernel_of_the_settings_is_verified_though_one_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "pyproject.toml").write_text(SETTINGS + SECOND_KERNEL)
    (project / "fake.py").write_text(FAKE_PYTEST)
    monkeypatch.setattr(verify, "pytest_command", lambda *words: [sys.executable, str(project / "fake.py"), *words])
    assert main(["verify"]) == 1
    expected = [
        "verified ops.py:scale=kernels.py:fast_scale --claims=finite=True",
        "verified softmax=kernels.py:my_softmax",
    ]
    assert capfd.readouterr().out.splitlines() == expected
    assert main(["verify", "--claims", "contiguous=True"]) == 1
    said = capfd.readouterr().out
    assert said.count("--claims=contiguous=True") == 2
    assert "finite" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.fourfold]\ndevise = 'cpu'", "not devise; did you mean device?"),
        ("[tool.fourfold]\ndtypes = 'float32'", "dtypes must be a list of strings, not 'float32'"),
        ("[tool.fourfold]\nexamples = true", "examples must be a number, not True"),
        ("[tool.fourfold.kernels.'k.py:f']\nclaim = ''", "not claim; did you mean claims?"),
        ("[tool.fourfold.kernels.k]\nas = 'softmax'", "expected FILE_OR_MODULE:FUNCTION, not 'k'"),
        ("[tool.fourfold", "pyproject.toml"),
    ],
)
def test_a_mistake_in_the_settings_is_named(text: str, said: str, project: Path) -> None:
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(BadSettings) as error:
        ProjectSettings.of(project)
    assert said in str(error.value)


# ---- operations that a file declares


def test_a_candidate_is_judged_by_an_operation_of_a_file(project: Path) -> None:
    candidate = f"{project / 'ops.py'}:scale={project / 'kernels.py'}:helper"
    selection = Selection.of({}, [candidate], [], [], ["float32"])
    assert [str(cell) for cell in selection.cells] == ["scale-candidate-float32"]
    assert selection.operations["scale"].name == "scale"
    assert str(selection.candidates["scale"]) == candidate
    assert not selection.candidates["scale"].judges_itself
    assert Candidate.parse("ops.py:scale=ops.py:scale", []).judges_itself
    with pytest.raises(SelectionError, match=r"declares no scal, as by fourfold.operation; did you mean scale\?"):
        Selection.of({}, [candidate.replace(":scale", ":scal")], [], [], [])


# ---- list and init


def test_kernels_and_operations_of_a_file_are_found_without_running_it(project: Path) -> None:
    assert Source.of(Path("kernels.py")).kernels() == ["fast_scale", "my_softmax", "softmax_backward"]
    assert Source.of(Path("ops.py")).operations() == ["scale"]


def test_init_writes_tests_and_a_workflow_and_replaces_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "kernels.py"]) == 0
    wrote = ["wrote test_kernels.py", "wrote .github/workflows/fourfold.yml"]
    assert capsys.readouterr().out.splitlines()[:2] == wrote
    text = (project / "test_kernels.py").read_text()
    ast.parse(text)
    assert 'TestMySoftmax = fourfold.suite(my_softmax, "softmax")' in text
    assert 'x=tensor("rows cols"), alpha=values(1.0)' in text
    assert "TestFastScale = fourfold.suite(fast_scale, fast_scale_in_torch)" in text
    assert "fourfold.suite(softmax_backward, softmax_backward_in_torch)" in text
    assert "pytest -n auto test_kernels.py" in (project / ".github/workflows/fourfold.yml").read_text()
    assert "is there already: --force replaces it" in error_of("init", "kernels.py", capsys=capsys)
    assert main(["init", "kernels.py:fast_scale", "--as", "ops.py:scale", "--force"]) == 0
    text = (project / "test_kernels.py").read_text()
    assert "from ops import scale" in text
    assert text.endswith("TestFastScale = fourfold.suite(fast_scale, scale)\n")


# ---- the public interface


def test_types_are_known_of_all_that_is_public() -> None:
    tree = ast.parse(Path(fourfold.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = {node.names[0].name: node.module for node in typed.body if isinstance(node, ast.ImportFrom)}
    assert imports == fourfold._PUBLIC
    assert (Path(fourfold.__file__).parent / "py.typed").is_file()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    with progress.display([("forward", "float32"), ("memory", "float32")]) as tell:
        tell("memory", "float32")
    assert ("memory, float32" in written.getvalue()) is terminal
    assert terminal or not written.getvalue()
