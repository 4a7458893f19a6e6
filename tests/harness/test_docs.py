"""README and docs: their commands and links work, and following "Adding an operation" adds one."""

import functools
import json
import os
import pydoc
import re
import shlex
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm

from fourfold.backends import BACKENDS
from fourfold.checks.records import operations
from fourfold.operations.registry import GROUP

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
TOUR = ROOT / "docs" / "adding_an_operation.md"
SKILL = ROOT / "skills" / "fourfold" / "SKILL.md"
# Pages with complete files, which are followed below.
FOLLOWED = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
MOST_WORDS, MOST_LINES_OF_TOUR, MOST_LINES_OF_SKILL = 900, 250, 50
# Files that a page asks its reader for.
OF_THE_READER = {"my_kernels.py", "softmax.cu"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def environment(**more: str) -> dict[str, str]:
    return warm.variables("TRITON_INT", **{"COLUMNS": "200", **more})


def run(*command: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True)


def python(*arguments: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, cwd=cwd, env=environment(**more))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text())


# ---- the README


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


def test_a_figure_that_changes_stands_in_one_place() -> None:
    amount = r"(?:\d[\d,.]*|half an|a quarter of an|ten|fifteen|twenty|thirty|forty|an?) (?:min|hour)"
    figures = {
        "the time of all tests": rf"(?:[Aa]ll tests|every test|whole run|verify every operation)[^.]*? {amount}",
        "the number of all tests": r"\d,?\d{3} tests",
        "the number of our mutants": r"\b[45],?\d{3}(?= mutants|\. Those| \|\n\|---)",
    }
    for figure, pattern in figures.items():
        found = [(name_of(page), each) for page in PAGES for each in re.findall(pattern, prose(page))]
        assert len(found) == 1, f"{figure}: {found}"


# ---- links


def anchors(page: Path) -> set[str]:
    """Return the valid fragments of links: headings as GitHub spells them, and explicit ids."""
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return {*plain, *re.findall(r'<a id="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        place, _, anchor = link.partition("#")
        if place.startswith(("http://", "https://")):
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_linked_from_the_readme_or_the_index() -> None:
    ways_in = [README, ROOT / "docs" / "README.md"]
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in ways_in for link in LINK.findall(prose(page))
    }
    assert not set(PAGES[1:]) - linked


# ---- commands


def commands() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language == "sh" and page not in FOLLOWED:
                yield from ((page, line) for line in block.splitlines())


COMMANDS = list(commands())


def programs(line: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the programs that a line runs one after another: the variables set for each, and its words."""
    for part in line.split("&&"):
        words = shlex.split(part)
        count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
        yield dict(word.split("=", 1) for word in words[:count]), words[count:]


@functools.cache
def help_of(*module: str) -> str:
    done = python(*module, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


def options_of(text: str) -> set[str]:
    return set(OPTION.findall(text))


def check_candidate(text: str) -> None:
    operation, _, kernel = text.partition("=")
    place, _, _ = kernel.partition("<<<")[0].rpartition(":")
    assert operation in operations()
    assert place in OF_THE_READER or (ROOT / (place.replace(".", "/") + ".py")).is_file()


def check_words(words: list[str], known: set[str]) -> None:
    """Require that every option is known, and every named path, operation and kernel exists."""
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
    for word, after in zip(words, [*words[1:], ""]):
        if word == "--candidate":
            check_candidate(after)
        elif word in ("--op", "--as"):
            assert after in operations()
        elif word.startswith(("tests/", "docs/")):
            assert (ROOT / word).exists()


def check_pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[:3] == ["pip", "install", "-e"]
    assert words[3] == "." or words[3].removeprefix(".[").removesuffix("]") in known["optional-dependencies"]
    assert words[4:] in ([], ["-c", ".ci/floors.txt"])


def check_fourfold(words: list[str]) -> None:
    if len(words) == 2:
        assert words[1] in help_of("fourfold")
        return
    known = options_of(help_of("fourfold", words[1]))
    check_words(words, known | (options_of(help_of("pytest")) if words[1] == "verify" else set()))
    for word in words[2:]:
        if ":" in word and "=" not in word:
            assert word.partition(":")[0] in OF_THE_READER


def check_python(words: list[str]) -> None:
    if words[1] != "-m":
        module = words[1].removesuffix(".py").replace("/", ".")
        check_words(words[1:], options_of(help_of(module)))
        return
    assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file() or (ROOT / words[2].replace(".", "/")).is_dir()


def check_nightly(words: list[str]) -> None:
    known = re.search(r"^all=\((.*)\)$", (ROOT / words[0]).read_text(), re.MULTILINE)
    assert known
    assert set(words[1:]) <= set(known[1].split())


def check_script(words: list[str]) -> None:
    check_words(words, set(re.findall(r'"(--[a-z]+)"', (ROOT / words[0]).read_text())))


def check_tool(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    assert any(requirement.startswith(words[0]) for requirement in known)


CHECKS = {
    "pip": check_pip,
    "pytest": lambda words: check_words(words, options_of(help_of("pytest"))),
    "fourfold": check_fourfold,
    "python": check_python,
    ".ci/nightly": check_nightly,
    ".ci/record": check_script,
    ".ci/host_times": check_script,
    "ruff": check_tool,
    "mypy": check_tool,
}


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{name_of(page)}: {line}" for page, line in COMMANDS])
def test_a_command_names_options_and_files_that_exist(page: Path, line: str) -> None:
    for _, words in programs(line):
        if "my_distance" not in words:  # of the tour, which is followed below
            CHECKS[words[0]](words)


# The tests of operations: collecting them takes seconds, and each names a check.
CHEAP = [line for _, line in COMMANDS if line.startswith("pytest tests/operations/")]


@pytest.mark.parametrize("line", CHEAP)
def test_a_cheap_command_finds_its_tests(line: str) -> None:
    done = python(*shlex.split(line), "--collect-only", "-q", "-p", "no:cacheprovider", "--device=cpu")
    assert done.returncode == 0, done.stdout
    assert "::test_" in done.stdout


# ---- the skill


def test_the_skill_is_of_one_screen_and_says_what_exists() -> None:
    text = SKILL.read_text()
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", text)
    assert head
    assert head[1] == SKILL.parent.name
    assert len(head[2]) <= 1024  # the part of a skill that agents read before they use it
    assert len(text.splitlines()) <= MOST_LINES_OF_SKILL
    assert "Never report a kernel as done before `fourfold verify` passes" in text
    known = help_of("fourfold")
    named = re.findall(r"`fourfold ([a-z]+)([^`]*)`", text)
    assert {"verify", "sanitize", "bench", "explain", "mcp", "list"} <= {name for name, _ in named}
    for name, words in named:
        assert name in known
        assert options_of(words) <= options_of(help_of("fourfold", name))
    assert options_of(text) - {"--compare", "--save"} <= options_of(help_of("fourfold", "verify"))


# ---- options and variables


def test_every_option_is_described_and_no_other() -> None:
    described = options_of(prose(ROOT / "docs" / "options.md"))
    of_plugin = options_of(help_of("pytest").partition("verification of kernels:")[2].partition("\n\n")[0])
    own = options_of(help_of("fourfold.mutation"))
    own |= {
        each for name in ("accuracy", "resources", "list", "init") for each in options_of(help_of("fourfold", name))
    }
    assert {"--op", "--candidate", "--report"} <= of_plugin
    assert of_plugin | own - {"--help"} <= described
    others = {each for name in ("verify", "report", "bench") for each in options_of(help_of("fourfold", name))}
    of_commands = own | others | options_of(help_of("pytest"))
    assert described <= of_commands | {"--benchmark"}


def test_every_variable_is_described() -> None:
    files = [*(ROOT / "fourfold").rglob("*.py"), ROOT / "conftest.py"]
    read = {name for path in files for name in re.findall(r"""["'](FOURFOLD_[A-Z_]+)["']""", path.read_text())}
    read |= set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / ".ci" / "nightly").read_text())) - {"PYTHON"}
    assert {"FOURFOLD_CACHE", "FOURFOLD_OPERATIONS", "SANITIZERS"} <= read
    described = set(re.findall(r"^\| `([A-Z_]+)`", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE))
    assert read <= described


# ---- the README's words are CI's


def test_the_readmes_commands_are_one_that_installs_and_one_that_tests() -> None:
    done = run(str(ROOT / ".ci" / "readme_commands"))
    blocks = [block for language, block in FENCE.findall(README.read_text()) if language == "sh"]
    assert done.stdout == "".join(blocks[:2])
    install, test = done.stdout.splitlines()
    assert install.startswith("pip install")
    assert test.startswith("pytest")


def copied_ci(folder: Path, readme: str) -> Path:
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "README.md").write_text(readme)
    return folder / ".ci"


def test_a_readme_without_commands_is_an_error(tmp_path: Path) -> None:
    ci = copied_ci(tmp_path, "# Fourfold\n\n```sh\npip install -e .\n```\n\n```\npytest\n```\n")
    done = run(str(ci / "readme_commands"))
    assert done.returncode
    assert "no two sh blocks" in done.stderr


# Programs that stand for those of a virtual environment and record their calls. One fails.
FAKE_PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 9
mkdir -p "$3/bin"
for program in pip fourfold pytest; do
    cat > "$3/bin/$program" << 'END'
#!/bin/sh
echo "${0##*/} $* CI=$CI ${PIP_CONSTRAINT##*/}" >> "$LOG"
[ "$FAILING" != "${0##*/}" ]
END
    chmod +x "$3/bin/$program"
done
"""


def calls_of_ci(script: str, folder: Path, failing: str, *versions: str) -> tuple[int, list[str]]:
    """Return the exit code of a script of CI, and its calls with their environments."""
    ci = copied_ci(folder, README.read_text())
    fake = folder / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(FAKE_PYTHON)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    log = folder / "log"
    path = f"{fake.parent}:{os.environ['PATH']}"
    # CI itself sets PIP_CONSTRAINT where these tests run with the oldest versions.
    settings = {"PATH": path, "LOG": str(log), "FAILING": failing, "PIP_CONSTRAINT": ""}
    done = run(str(ci / script), *versions, cwd=folder, **settings)
    return done.returncode, log.read_text().splitlines()


@pytest.mark.parametrize("failing", ["", "fourfold", "pytest"])
def test_ci_runs_the_readmes_commands_with_the_versions_of_today_and_with_the_oldest(
    failing: str, tmp_path: Path
) -> None:
    code, calls = calls_of_ci("run", tmp_path, failing)
    *today, install, contract, operations, compiler = calls
    expected = [
        "pip install ray mcp jsonschema check-jsonschema zizmor basedpyright playwright CI=1 ",
        "pip install -e . CI=1 ",
        "fourfold tour CI=1 ",
        "pytest -n auto CI=1 ",
    ]
    assert today == expected[: 3 if failing == "fourfold" else 4]
    assert install == "pip install -e . CI=1 floors.txt"
    for call, least in ((contract, 10), (operations, 2), (compiler, 1)):
        given = re.fullmatch(r"pytest -n auto (.*) CI=1 floors\.txt", call)
        assert given
        paths = [word for word in given[1].split() if word.startswith("tests/")]
        assert len(paths) >= least
        assert all((ROOT / path).exists() for path in paths)
    assert bool(code) == bool(failing)


def test_each_release_of_torch_is_an_environment_of_its_own(tmp_path: Path) -> None:
    code, calls = calls_of_ci("versions", tmp_path, "", "2.12", "2.15")
    assert code == 0
    assert [call for call in calls if call.startswith("pip")] == [
        "pip install -e . CI=1 2.12.txt",
        "pip install -e . CI=1 2.15.txt",
    ]
    assert len(calls) == 8


def test_a_release_that_cannot_be_installed_fails_and_the_others_are_tried(tmp_path: Path) -> None:
    code, calls = calls_of_ci("versions", tmp_path, "pip", "2.12", "2.15")
    assert code == 1
    assert [call.split()[-1] for call in calls] == ["2.12.txt", "2.15.txt"]


# ---- the tutorial and the pages that say how to


@pytest.mark.full
@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
def test_who_follows_a_page_sees_what_it_says(page: Path, tmp_path: Path) -> None:
    seen, ran, block = "", 0, re.compile(f"(?:{FILE.pattern})|(?:{FENCE.pattern})", re.MULTILINE | re.DOTALL)
    for name, content, language, text in block.findall(page.read_text()):
        if name:
            (tmp_path / name).write_text(content)
        for line in text.splitlines() if language == "sh" else ():
            words = shlex.split(line.removeprefix("python -m ")) + ["--device=cpu"] * line.startswith("fourfold verify")
            done = python(*words, cwd=tmp_path, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
            seen, ran = done.stdout + done.stderr, ran + 1
        for line in text.splitlines() if not language else ():
            expected = ".*".join(map(re.escape, line.strip().split("...")))
            assert re.search(expected, seen), f"{line}\n\n{seen}"
    assert ran >= 2


def test_each_name_of_the_reference_is_documented() -> None:
    names = re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert names
    found = {name: pydoc.locate(name) for name in names}
    assert not [
        name
        for name, each in found.items()
        if not (vars(each).get("__doc__") if isinstance(each, type) else getattr(each, "__doc__", None))
    ]


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e '.[docs]'")
    done = python("mkdocs", "build", "--strict", "--site-dir", str(tmp_path), NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "index.html").read_text()
    source = (ROOT / "fourfold" / "__init__.py").read_text()
    public = re.findall(r'^    "(\w+)": "([\w.]+)",$', source, re.MULTILINE)
    assert len(public) > 20
    assert [name for name, module in public if f'id="{module}.{name}"' not in page] == []
    assert json.loads((tmp_path / "verdict.schema.json").read_text())["$id"]


# ---- the tour


def files_of_the_tour() -> dict[str, str]:
    found = FILE.findall(TOUR.read_text())
    assert len(found) == len(dict(found))
    return dict(found)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_tour_is_short() -> None:
    assert len(TOUR.read_text().splitlines()) <= MOST_LINES_OF_TOUR


def test_the_tours_tree_is_that_of_its_files() -> None:
    _, tree = next((language, block) for language, block in FENCE.findall(TOUR.read_text()) if "my_kernels/" in block)
    named = {f"my_kernels/{line.split()[0]}" for line in tree.splitlines()[1:]}
    assert named == set(files_of_the_tour())


def follow_the_tour(folder: Path, device: str, *options: str) -> list[dict[str, str]]:
    """Write its files and run its command; return the checks of the verdict, after asserting that none failed."""
    write(folder, files_of_the_tour())
    ((variables, words),) = (
        program for _, line in COMMANDS if "--op my_distance" in line for program in programs(line)
    )
    verdict = folder / "verdict.json"
    options = (*options, f"--device={device}", "--examples=3", f"--verdict={verdict}", "-p", "no:cacheprovider")
    done = python(*words, *options, **variables, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))
    assert done.returncode == 0, done.stdout
    told = json.loads(verdict.read_text())
    assert told["counts"]["failed"] == told["counts"]["unsupported"] == 0
    assert {check["backend"] for check in told["checks"]} == set(BACKENDS)
    return told["checks"]


@pytest.mark.full
def test_the_tour_adds_an_operation_that_passes_every_check(tmp_path: Path, device: str) -> None:
    checks = follow_the_tour(tmp_path, device, "--dtype=float32")
    seen = {(check["backend"], check["check"].partition(":")[0]) for check in checks}
    everywhere = {"forward", "backward", "memory", "history", "batch", "laws", "repeatability", "errors", "large"}
    assert seen >= {(backend, check) for backend in BACKENDS for check in everywhere}
    assert seen >= {(backend, check) for backend in ("triton", "cuda") for check in ("compiled", "ahead of time")}


@pytest.mark.full
def test_the_tours_kernels_are_right_in_half_precision_too(tmp_path: Path, device: str) -> None:
    checks = follow_the_tour(tmp_path, device, "--dtype=bfloat16", "-k", "with_the_oracle")
    assert {check["check"].partition(":")[0] for check in checks} == {"forward", "backward"}


@pytest.mark.full
def test_the_tours_record_is_sharp(tmp_path: Path) -> None:
    write(tmp_path, files_of_the_tour())
    ((variables, words),) = (
        program for _, line in COMMANDS if "test_specification.py" in line for program in programs(line)
    )
    places = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python(*words, "-p", "no:cacheprovider", "--device=cpu", **variables, PYTHONPATH=places)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b2 passed", done.stdout)


@pytest.mark.full
def test_in_this_library_pytest_asks_the_tours_operation_for_what_the_page_says(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for part in ("fourfold", "impls", "oracles", "properties", "tests"):
        shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / part, clone / part)
    page = TOUR.read_text()
    (line,) = [text for language, text in FENCE.findall(page) if language == "python" and text.count("\n") == 1]
    files = {name.removeprefix("my_kernels/"): text for name, text in files_of_the_tour().items()}
    record = files["properties/my_distance.py"]
    assert record.count("from ..oracles import my_distance as oracle\n") == 1
    files["properties/my_distance.py"] = record.replace("from ..oracles import my_distance as oracle\n", line)
    write(clone, {**files, "impls/my_distance/__init__.py": '"""my_distance."""\n'})
    of_operations = [f"tests/harness/test_{name}.py" for name in ("oracles", "strategies", "running_error", "imports")]
    only = "my_distance or every_operation or every_law"
    options = ["-q", "-rf", "-p", "no:cacheprovider", "--device=cpu", "-k", only]
    done = python("pytest", *of_operations, "tests/known_wrong", *options, cwd=clone, PYTHONPATH=str(clone))
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    asked = re.findall(r"^- `(test_\w+)`", page, re.MULTILINE)
    assert asked
    assert sorted(failed) == sorted(asked), done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30  # type: ignore[index]


def test_the_page_names_the_group_of_entry_points() -> None:
    assert f'[project.entry-points."{GROUP}"]' in TOUR.read_text()
