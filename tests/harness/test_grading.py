"""fourfold.grade: every candidate gets its verdict, whatever other candidates do to processes, workers and files."""

import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from one_run import one_run
from samples import sampled

import fourfold
from fourfold.cli.main import main
from fourfold.engine.profiles import is_full
from fourfold.engine.verdict import REWARDS, Finding, Outcome, Speed, Verdict
from fourfold.grading import driver, pool, static
from fourfold.grading import speed as speed_of_candidates
from fourfold.grading.candidates import Submission
from fourfold.grading.judging import Settings
from fourfold.grading.messages import Job, Reply
from fourfold.grading.results import ForgedLines, Graded, InUse, Results
from fourfold.grading.speed import median_with_interval, speeds_of
from fourfold.numerics.compare import Disagreement
from fourfold.operations.claims import Claims
from fourfold.operations.outcomes import Status
from fourfold.performance.timing import HostClock

ROOT = Path(__file__).parents[2]
# Few cases of one dtype, because these tests are about the handling of candidates.
QUICK: dict[str, Any] = {"examples": 2, "dtypes": ("float32",), "seed": 1}
ADD = "import torch\ndef vector_add(x, y):\n"
RIGHT = f"{ADD}    return torch.add(x, y)\n"
WRONG = f"{ADD}    return torch.sub(x, y)\n"
ENDS_ITS_WORKER = """
import os, signal, psutil
def vector_add(x, y):
    for each in psutil.Process().parents():
        if each.cmdline()[1:] == ["-"]:  # a worker gets its program on standard input, and forks the judge
            each.send_signal(signal.SIGKILL)
"""
RMS_NORM = """
import torch, fourfold
from fourfold import tensor, values
@fourfold.operation(x=tensor("rows cols"), eps=values(1e-6))
def rms(x, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
"""
PROBLEM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, 3)
    def forward(self, x):
        return torch.relu(self.layer(x))
size = 4096
def get_inputs():
    return [torch.rand(8, size)]
def get_init_inputs():
    return [size]
"""
SOLUTION = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, 3)
    def forward(self, x):
        return {result}
"""
CUDA = """
__global__ void add(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
"""

LAUNCHED = {"language": "cuda", "function": "add<<<ceil(numel / 256), 256>>>(x, y, out, numel)"}
OF_PROBLEM: dict[str, Any] = {"language": "kernelbench", "problem": PROBLEM, "sizes": {"size": 16}, "operation": ""}


# The workers are the same on a GPU, but judge these tests too slowly there.
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def add(name: str, body: str = "", **more: Any) -> dict[str, Any]:
    """Return a candidate for vector_add, with this body."""
    return {"id": name, "operation": "vector_add", "source": f"{ADD}    {body}\n", "seconds": 60, **more}


def grade_all(candidates: Sequence[Any], **more: Any) -> dict[str, Graded]:
    """Return the verdict on each candidate, by its id."""
    return {one.id: one for one in fourfold.grade(candidates, **{**QUICK, **more})}


def message(one: Graded) -> str:
    """Return the message of the first failure."""
    return one.failures[0][1].message if one.failures else "; ".join(one.shortcomings)


CANDIDATES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # id: the candidate, its kind, its last stage and its message
    "right": ({"source": RIGHT}, "right", "full", ""),
    "same": ({"source": RIGHT}, "right", "full", ""),
    "wrong": ({"source": WRONG}, "wrong", "smoke", "expected"),
    "wrong gradient": ({"source": f"{ADD}    return x + y.detach()\n"}, "wrong", "smoke", "gradient of y"),
    "refuses": ({"source": f"{ADD}    raise NotImplementedError('never')\n"}, "refused", "full", "refused all"),
    "claims in its source": (
        {
            "source": "import torch, fourfold\n@fourfold.claims(gradients=False, sizes={'n': (1, 1)})\n"
            "def vector_add(x, y):\n    return x.detach() + y.detach()\n"
        },
        "refused",
        "full",
        "no gradient",
    ),
    "does not parse": ({"source": "def vector_add(x, y:\n"}, "invalid", "static", "vector_add_kernel.py:1"),
    "right under a judge's names": (
        {
            "source": "import os\nNAMES = os.getcwd() + __file__ + __name__\n"
            f"{ADD}    return x + y if 'candidate' in NAMES else x - y\n"
        },
        "wrong",
        "smoke",
        "expected",
    ),
    "no function": ({"source": "x = 1\n"}, "invalid", "smoke", "no function vector_add"),
    "fails on import": ({"source": "1 / 0\n"}, "invalid", "smoke", "ZeroDivisionError"),
    "ends on import": ({"source": "raise SystemExit(0)\n"}, "invalid", "smoke", "SystemExit"),
    "other arguments": ({"source": "def vector_add(a): return a\n"}, "invalid", "smoke", "cannot be called as"),
    "unknown": ({"source": RIGHT, "operation": "vector_ad"}, "invalid", "static", "there is no 'vector_ad'"),
    "reaches": ({"source": f"from fourfold.oracles import vector_add\n{RIGHT}"}, "tampered", "static", "line 1"),
    "exits": ({"source": f"{ADD}    import os; os._exit(0)\n"}, "crashed", "smoke", "exit code 0"),
    "hangs": ({"source": f"{ADD}    import time; time.sleep(1000)\n", "seconds": 6}, "timed out", "smoke", "timed out"),
    "forks": (
        {"source": f"{ADD}    import os, time\n    while os.fork(): time.sleep(.01)\n    time.sleep(60)\n"},
        "crashed",
        "smoke",
        "processes",
    ),
    "fills the disk": (
        {
            "source": f"{ADD}    import os, time\n    for n in range(6):\n"
            "        file = os.open(f'{n}', os.O_CREAT | os.O_RDWR)\n"
            "        os.posix_fallocate(file, 0, 1 << 30)\n    time.sleep(60)\n"
        },
        "crashed",
        "smoke",
        "files take",
    ),
    "leaves a process": (
        {"source": f"import subprocess\nsubprocess.Popen(['sleep', '86399'], start_new_session=True)\n{RIGHT}"},
        "right",
        "full",
        "",
    ),
    "has a neighbour": ({"path": "mine.py"}, "right", "full", ""),
    "definition": (
        {
            "source": "def rms(x, eps):\n    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n",
            "operation": "rms",
            "definition": RMS_NORM,
            "claims": {"sizes": {"cols": [1, 64]}},
        },
        "right",
        "full",
        "",
    ),
    "a solution": ({"source": SOLUTION.format(result="self.layer(x).clamp(min=0)"), **OF_PROBLEM}, "right", "full", ""),
    "no solution": ({"source": SOLUTION.format(result="self.layer(x)"), **OF_PROBLEM}, "wrong", "smoke", "expected"),
    "in CUDA C++": ({"source": CUDA, **LAUNCHED}, "right", "full", ""),
    "in bad CUDA C++": (
        {"source": CUDA.replace("x[i]", "z[i]"), **LAUNCHED},
        "invalid",
        "smoke",
        "vector_add_kernel.cu:4",
    ),
    "in wrong CUDA C++": ({"source": CUDA.replace("if (i < n) ", ""), **LAUNCHED}, "wrong", "smoke", "OutOfBounds"),
}


# The candidates that the default profile grades: one for each way to end.
PLAIN = [
    "right",
    "same",
    "wrong",
    "right under a judge's names",
    "no function",
    "does not parse",
    "unknown",
    "reaches",
    "exits",
    "hangs",
]


@one_run
def verdicts_by_name() -> dict[str, Graded]:
    """Return the verdicts by one run with two workers."""
    with tempfile.TemporaryDirectory() as folder:
        return {one.id: one for one in fourfold.grade(write_candidates(Path(folder)), workers=2, **QUICK)}


@pytest.fixture
def verdicts() -> dict[str, Graded]:
    return verdicts_by_name()


def write_candidates(folder: Path) -> Path:
    """Return the file of the candidates, with the modules that these import beside it."""
    (folder / "neighbour.py").write_text("import torch\nadd = torch.add\n")
    (folder / "mine.py").write_text("from neighbour import add\ndef vector_add(x, y): return add(x, y)\n")
    names = CANDIDATES if is_full() else PLAIN
    given = [{**add(name), **CANDIDATES[name][0]} for name in names]
    for each in given:
        if "path" in each:
            del each["source"]
    file = folder / "candidates.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in given))
    return file


@pytest.mark.parametrize("name", sampled(CANDIDATES, *PLAIN))
def test_each_candidate_gets_its_verdict(name: str, verdicts: Mapping[str, Graded]) -> None:
    _, kind, stage, says = CANDIDATES[name]
    one = verdicts[name]
    assert (one.kind, one.stage) == (kind, stage), str(one)
    assert says in message(one)
    assert one.passed == (kind == "right")
    assert one.reward() == REWARDS[kind]
    assert f"--id {shlex.quote(name)} --seed {QUICK['seed']}" in one.repeat


def test_a_judge_has_the_addresses_for_far_offsets(verdicts: Mapping[str, Graded]) -> None:
    statuses = {each.check: each.outcome for each in verdicts["right"].outcomes}
    assert statuses["offsets"] == Status.PASSED
    assert Status.UNREACHED not in statuses.values()


def test_the_same_source_is_judged_once(verdicts: Mapping[str, Graded]) -> None:
    assert {verdicts["right"].same_as, verdicts["same"].same_as} in ({"", "right"}, {"", "same"})


@pytest.mark.full
def test_nothing_of_a_candidate_is_left(verdicts: Mapping[str, Graded]) -> None:
    assert verdicts["leaves a process"].passed
    for each in psutil.process_iter(["cmdline"]):
        assert "86399" not in (each.info["cmdline"] or ())


@pytest.mark.full
def test_no_candidate_meets_another_and_a_lost_worker_costs_only_attempts() -> None:
    leaves = (
        f"{ADD}    import os\n    os.environ['LEFT'] = 'x'\n    torch.LEFT = 1\n    open('left', 'w')\n"
        "    return x + y\n"
    )
    looks = (
        f"{ADD}    import os\n    assert 'LEFT' not in os.environ\n    assert not hasattr(torch, 'LEFT')\n"
        "    assert not os.path.exists('left')\n    return x + y\n"
    )
    sources = {"leaves": leaves, "looks": looks, "kills": ENDS_ITS_WORKER, "right": RIGHT}
    found = grade_all([{**add(name), "source": source} for name, source in sources.items()], workers=1, refusals=False)
    assert found["looks"].passed, str(found["looks"])
    assert found["kills"].kind == "crashed"
    assert found["kills"].attempts == 3
    assert "lost 3 times: the worker died of SIGKILL" in message(found["kills"])
    assert found["right"].passed


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "no JSON"),
        ("3", "must be a mapping"),
        ('{"operation": "softmax", "source": "x"}', "id is missing"),
        ('{"id": "a", "operation": "softmax"}', "either source or path"),
        ('{"id": "a", "source": "x"}', "operation is missing"),
        ('{"id": "a", "operation": "softmax", "path": "missing.py"}', "path: .*missing.py cannot be read"),
        ('{"id": "a", "operation": "softmax", "source": "x", "language": "rust"}', "language must be one of torch"),
        ('{"id": "a", "operation": "softmax", "source": "x", "seconds": 0}', "seconds must be a number above 0"),
        ('{"id": "a", "operation": "softmax", "source": "x", "claim": {}}', "claim is no field of a candidate"),
        ('{"id": "a", "operation": "softmax", "source": "x", "claims": {"dtype": 1}}', "claims: dtype is no claim"),
        ('{"id": "a", "operation": "softmax", "source": "x", "language": "cuda"}', "function must be a launch"),
        ('{"id": "a", "source": "x", "language": "kernelbench"}', "problem is missing"),
    ],
)
def test_a_line_that_is_no_candidate_is_invalid_and_says_why(given: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "candidates.jsonl"
    file.write_text(f"\n{given}\n")
    (one,) = fourfold.grade(file, workers=1)
    assert one.kind == "invalid"
    assert re.search(says, message(one)), message(one)
    assert one.id in ("a", "line 2")


def test_a_source_is_read_without_being_run() -> None:
    def found(source: str, **more: Any) -> list[str]:
        candidate = Submission(id="a", operation="softmax", source=source)
        return list(static.reaches(replace(candidate, **more), ("subprocess",)))

    assert found("import torch\nfrom fourfold import claims\nimport properties\n") == []
    assert found("from fourfold.impls.giou.operators import as_rows\n") == []
    assert "line 2 imports fourfold.oracles.softmax" in found("import torch\nimport fourfold.oracles.softmax")[0]
    assert "torch_eager" in found("from fourfold.impls.softmax.torch_eager import softmax")[0]
    assert "fourfold.checks" in found("import importlib\nimportlib.import_module('fourfold.checks.forward')")[0]
    assert "which is forbidden" in found("import subprocess as s")[0]
    assert "uses Model" in found("def f(): return Model()", language="kernelbench")[0]
    assert found("class Model: pass\ndef f(): return Model()", language="kernelbench") == []
    with pytest.raises(static.Unparsable, match=r"softmax_kernel\.py:1"):
        found("def")


# ---- the file of results


def write(folder: Path, count: int) -> Path:
    """Write a file of `count` right candidates and a wrong one, with different texts; return it."""
    lines = [add(f"right {n}", f"return x + y  # {n}") for n in range(count)]
    file = folder / "candidates.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [*lines, add("wrong", "return x - y")]))
    return file


def run(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start ``fourfold grade`` with one worker and few cases."""
    given = ["--workers", "1", "--examples", "2", "--dtype", "float32", "--seed", "1"]
    text = [sys.executable, "-m", "fourfold", "grade", *map(str, arguments), *given]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes background processes ignore it

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(text, env=env, preexec_fn=heed_ctrl_c, **pipes)


def workers_of(process: int) -> list[psutil.Process]:
    """Return the workers that a run has started, and all their descendants."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).children(recursive=True)
    return []


@pytest.mark.full
def test_a_run_that_is_killed_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out, goes_on = write(tmp_path, 3), tmp_path / "results.jsonl", tmp_path / "goes_on"
    waits = f"import pathlib, time\n    while not pathlib.Path({str(goes_on)!r}).exists(): time.sleep(0.01)\n"
    lines = file.read_text().splitlines()
    lines[2] = json.dumps(add("right 2", f"{waits}    return x + y"))
    file.write_text("\n".join(lines))
    first = run(file, "--out", out)
    while first.poll() is None and not (out.is_file() and out.read_text().count("\n") >= 2):
        time.sleep(0.02)
    started = workers_of(first.pid)
    first.kill()
    first.communicate()
    before = out.read_text()
    assert before.count("\n") == 2
    _, left = psutil.wait_procs(started, timeout=30)
    assert not left, f"what a killed run had started goes on: {left}"
    goes_on.touch()
    with out.open("a") as lines:
        lines.write('{"id": "right 2", "kind": "ri')  # as if it had been in the middle of a line
    second = run(file, "--out", out, "--report", tmp_path / "report")
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert out.read_text().startswith(before)
    assert sorted(row["id"] for row in rows) == [*(f"right {n}" for n in range(3)), "wrong"]
    assert {row["id"]: row["kind"] for row in rows} == {**{f"right {n}": "right" for n in range(3)}, "wrong": "wrong"}
    assert "4 candidates" in said
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("data-kind=") == 4
    assert "expected" in page
    pages = [path.read_text() for path in (tmp_path / "report" / "candidates").iterdir()]
    assert len(pages) == 4
    assert all('<a href="../index.html">' in text for text in pages)
    assert all(text.count("prefers-color-scheme: dark") == 1 for text in (page, *pages))
    # A third run has nothing to do, and needs no worker for it.
    monkeypatch.setattr(driver, "Pool", lambda *_: pytest.fail("it starts workers"))
    assert len(list(fourfold.grade(file, out=out, workers=1, **QUICK))) == 4
    assert len(out.read_text().splitlines()) == 4


def test_a_changed_source_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(Stub):
        def judge(self, job: Job) -> Reply:
            text = verdict("wrong" if "-" in job.candidate.source else "").json()
            return Reply(verdict=text, stage="full", seconds=1.0, worker="here")

    monkeypatch.setattr(driver, "_pool_of", lambda *_: lambda: pool.Pool(lambda n: Answers(n, iter([False])), 1))
    out = tmp_path / "results.jsonl"
    for body, kind in (("return x - y", "wrong"), ("return x + y", "right"), ("return x + y", "right")):
        assert grade_all([add("a", body)], out=out)["a"].kind == kind
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["wrong", "right"]


@pytest.mark.full
def test_the_command_repeats_one_candidate_with_the_same_cases(
    verdicts: Mapping[str, Graded], capsys: pytest.CaptureFixture[str]
) -> None:
    options = shlex.split(verdicts["wrong"].repeat.removeprefix("fourfold "))
    folder = Path(options[1]).parent
    folder.mkdir()  # the run has removed it
    try:
        write_candidates(folder)
        assert main([*options, "--workers", "1"]) == 0
    finally:
        shutil.rmtree(folder)
    assert message(verdicts["wrong"]).splitlines()[0] in capsys.readouterr().out


def test_bad_arguments_of_the_command_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["grade", str(tmp_path / "missing.jsonl")])
    assert ended.value.code == 2
    file = write(tmp_path, 1)
    assert main(["grade", str(file), "--id", "nobody"]) == 2
    assert "there is no candidate nobody" in capsys.readouterr().err
    assert main(["grade", str(file), "--speed"]) == 2
    assert "speed needs gpus=1" in capsys.readouterr().err


def test_two_runs_do_not_write_into_one_file(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    with Results(out), pytest.raises(InUse, match="in use by another run"):
        Results(out)
    out.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: this is no verdict"):
        Results(out)


def seal_results(out: Path, *ids: str) -> None:
    with Results(out) as results:
        for name in ids:
            results.append(Graded.of(verdict("wrong"), id=name, key=name))


def test_forged_lines_are_named_and_no_results(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    seal_results(out, "a", "b", "c")
    first, second, third = out.read_text().splitlines()
    right = Graded.of(verdict(), id="d", key="d").line()
    reordered = json.dumps(dict(reversed(json.loads(third).items())), indent=None, separators=(",", ":"))
    lines = [first, second.replace('"reward": 0.0', '"reward": 1.0'), right, "no JSON", reordered]
    assert lines[1] != second
    out.write_text("".join(line + "\n" for line in lines))
    with (
        pytest.warns(ForgedLines, match=r"wrote line 2 \(id 'b'\), line 3 \(id 'd'\), line 4: not"),
        Results(out) as file,
    ):
        assert list(file.known) == ["a", "c"]


def test_a_forged_first_line_does_not_hide_the_results_after_it(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    seal_results(out, "a")
    out.write_text('{"id": "a", "kind": "right"}\n' + out.read_text() + '{"id": "b"')
    with pytest.warns(ForgedLines, match="wrote line 1: not"), Results(out) as file:
        assert list(file.known) == ["a"]
    text = '{"id": "a", "operation": "softmax"}\n{"id": "b"'
    out.write_text(text)
    with pytest.raises(ValueError, match="line 1: this is no verdict"):
        Results(out)
    assert out.read_text() == text


def test_a_line_that_another_writes_during_a_run_is_named(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    seal_results(out, "a")
    with pytest.warns(ForgedLines, match=r"wrote line 2 \(id 'b'\): not"), Results(out) as results:  # noqa: PT031
        with out.open("a") as other:
            other.write(Graded.of(verdict(), id="b", key="b").line() + "\n")
        results.append(Graded.of(verdict("wrong"), id="b", key="b"))
    with pytest.warns(ForgedLines), Results(out) as results:
        assert results.known["b"].kind == "wrong"


# ---- verdicts and rewards


def verdict(kind: str = "", speeds: tuple[Speed, ...] = (), **more: Any) -> Verdict:
    """Return a verdict with one failure of a kind, or a right one."""
    failure = Finding(message="it is", counterexample=None, frames="", cause="it", blob=None, kind=kind)
    outcome = "failed" if kind else "passed"
    made = Outcome(check="forward", dtype="float32", outcome=outcome, examples=9, failure=failure if kind else None)
    about = {"implementation": "f", "operation": "g", "device": "cpu", "claims": "", "outcomes": (made,)}
    about |= {"shortcomings": (), "warnings": (), "versions": {}, "seed": 1, "seconds": 1.0}
    return Verdict(**{**about, "speeds": speeds, **more})


def speed(low: float, high: float, error: str = "") -> Speed:
    times = {"seconds": 1.0, "reference_seconds": 1.0, "ratio": (low + high) / 2}
    return Speed(workload="w", dtype="float32", direction="forward", low=low, high=high, error=error, **times)


@pytest.mark.parametrize("kind", [kind for kind in REWARDS if kind not in ("right", "refused")])
def test_a_verdict_is_of_the_kind_of_its_gravest_failure(kind: str) -> None:
    assert verdict(kind).kind == kind
    assert verdict(kind).reward() == REWARDS[kind]
    assert verdict(kind).reward({kind: 7.5}) == 7.5
    assert verdict("imprecise").outcomes[0].failure is not None
    both = replace(verdict(kind), outcomes=(*verdict(kind).outcomes, *verdict("tampered").outcomes))
    assert both.kind == "tampered"


def test_what_no_check_rejects_is_right_refused_or_late() -> None:
    assert verdict().kind == "right"
    assert replace(verdict(), shortcomings=("nothing was verified",)).kind == "refused"
    assert replace(verdict(), shortcomings=("3 checks were not made",), left_out=3).kind == "timed out"
    with pytest.raises(ValueError, match="there is no verdict 'good'"):
        verdict().reward({"good": 1})


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([], 1.0),
        ([(0.9, 1.2)], 1.0),  # the interval holds 1: noise
        ([(2.0, 2.2)], 2.0),
        ([(0.25, 0.5)], 0.5),  # a slow one is right, too
        ([(0.8, 1 / math.sqrt(2))], 0.5),
        ([(100.0, 120.0)], 3.0),
        ([(2.0, 2.2), (0.9, 1.1)], 1.5),
    ],
)
def test_a_speed_counts_as_far_as_it_is_certain(speeds: list[tuple[float, float]], expected: float) -> None:
    assert verdict(speeds=tuple(speed(*ends) for ends in speeds)).reward() == pytest.approx(expected)


def test_what_is_refused_without_a_claim_costs_its_share() -> None:
    (outcome,) = verdict().outcomes
    some = replace(outcome, examples=30, refusals={"ValueError: no": 10})
    assert replace(verdict(), outcomes=(some,)).reward() == pytest.approx(0.75)
    assert replace(verdict(speeds=(speed(2.0, 2.2),)), outcomes=(some,)).reward() == pytest.approx(1.5)


def test_a_speed_that_no_machine_has_counts_nothing() -> None:
    assert verdict(speeds=(speed(50.0, 60.0, "beats the ceiling"),)).reward() == 1.0
    assert verdict("wrong", speeds=(speed(50.0, 60.0),)).reward() == 0.0


def test_a_verdict_comes_back_from_json(verdicts: Mapping[str, Graded]) -> None:
    for one in verdicts.values():
        assert Graded.from_json(one.line()) == one
    timed = verdict(speeds=(speed(1.0, 2.0),))
    assert Verdict.from_json(timed.json()) == timed


def test_medians_come_with_intervals_that_hold_them() -> None:
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        samples = torch.randn(51, generator=generator).add(3).tolist()
        _, low, high = median_with_interval(samples)
        held += low <= 3 <= high
    assert 0.93 <= held / 400 <= 1.0
    assert median_with_interval([2.0]) == (2.0, 2.0, 2.0)


def test_speed_is_measured_in_turns_and_its_results_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    record = fourfold.operation(x=fourfold.tensor("rows cols"))(softmax)
    seconds = 0.0  # by a clock that advances only in the calls
    monkeypatch.setattr(speed_of_candidates, "clock_for", lambda *_: HostClock(lambda: seconds))

    def slow(x: torch.Tensor) -> torch.Tensor:
        nonlocal seconds
        seconds += 3e-3
        return softmax(x)

    def fast(x: torch.Tensor) -> torch.Tensor:
        nonlocal seconds
        seconds += 1e-3
        return softmax(x)

    for found in speeds_of(slow, fast, record, Claims(), "cpu", False):
        assert (found.low, found.ratio, found.high) == pytest.approx((1 / 3, 1 / 3, 1 / 3)), str(found)
        assert (found.seconds, found.reference_seconds) == pytest.approx((3e-3, 1e-3))
    calls = iter(range(10**9))

    def wrong_later(x: torch.Tensor) -> torch.Tensor:
        return fast(x) if next(calls) < 5 else fast(x) + 1

    with pytest.raises(Disagreement):
        list(speeds_of(wrong_later, fast, record, Claims(), "cpu", False))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


# ---- the pool


class Stub:
    """A worker that answers at once, until it must be lost."""

    def __init__(self, number: int, fails: Iterator[bool]) -> None:
        self.end_reason, self.fails = "", fails
        if next(fails):
            raise pool.Lost("it does not start")

    def judge(self, job: Job) -> Reply:
        return Reply(worker=f"here, by {job.seed}")

    def close(self) -> None:
        pass


def test_a_place_whose_worker_never_starts_is_given_up() -> None:
    made = pool.Pool(lambda number: Stub(number, iter([True])), 2)
    events = [made.events.get() for _ in range(2)]
    made.close()
    assert all(event.task is None and "it does not start" in event.reason for event in events)


def test_a_worker_whose_gpu_is_gone_is_replaced_after_its_answer() -> None:
    workers: list[Stub] = []

    def make(number: int) -> Stub:
        workers.append(Stub(number, iter([False])))
        workers[-1].end_reason = "the GPU does not answer" if len(workers) == 1 else ""
        return workers[-1]

    made = pool.Pool(make, 1)
    for n in range(2):
        made.tasks.put(pool.Task(Job(Submission(id=str(n)), Settings(), n), str(n)))
    answers = [made.events.get().answer for _ in range(2)]
    made.close()
    assert answers == [Reply("here, by 0"), Reply("here, by 1")]
    assert len(workers) == 2


def test_what_a_worker_waits_for_ends_with_the_pool() -> None:
    """A place in a cluster that has lost a machine, for example. A remaining thread of Ray crashes the process."""
    told, begun = threading.Event(), threading.Event()

    def waits(number: int) -> Any:
        begun.set()
        told.wait()
        raise pool.Lost("no place")

    made = pool.Pool(waits, 1, told.set)
    begun.wait()
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


# ---- a cluster


CLUSTER = """
import json, subprocess, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster

file, out, *options = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0))
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
command = [sys.executable, "-m", "fourfold", "grade", file, "--out", out, "--ray", cluster.address, *options]

def judged():
    return Path(out).read_text().count(chr(10)) if Path(out).is_file() else 0

def until(count, driver):
    while judged() < count and driver.poll() is None:
        time.sleep(0.05)

first = subprocess.Popen(command)
until(2, first)
first.kill()
first.wait()
print("driver killed after", judged(), flush=True)
second = subprocess.Popen(command)
until(judged() + 2, second)
cluster.remove_node(nodes[0], allow_graceful=False)
cluster.add_node(num_cpus=1)
print("machine lost after", judged(), flush=True)
sys.exit(second.wait())
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'fourfold[ray]'")
def test_a_cluster_loses_its_driver_and_a_machine_and_no_candidate(tmp_path: Path) -> None:
    """Ray's utilities simulate three machines. The driver is killed, and a machine is lost."""
    expected = {f"right {n}": "right" for n in range(5)} | {"wrong": "wrong", "kills": "crashed"}
    expected |= {"hangs": "timed out", "forks": "crashed"}
    sources = {"wrong": WRONG, "kills": ENDS_ITS_WORKER}
    sources |= {name: CANDIDATES[name][0]["source"] for name in ("hangs", "forks")}
    given = [{**add(name), "source": sources.get(name, f"{RIGHT}# {name}")} for name in expected]
    given[-2]["seconds"] = 6
    file, out, script = tmp_path / "candidates.jsonl", tmp_path / "results.jsonl", tmp_path / "cluster.py"
    file.write_text("".join(json.dumps(each) + "\n" for each in given))
    script.write_text(CLUSTER)
    options = ["--examples", "2", "--dtype", "float32", "--seed", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_enable_metrics_collection": "0"}
    command = [sys.executable, script, file, out, *options]
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(expected), "one is judged twice, or lost"
    assert {row["id"]: row["kind"] for row in rows} == expected


def test_without_ray_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fourfold\[ray\]'"):
        fourfold.grade([], ray="auto")


@pytest.mark.full
def test_ctrl_c_ends_a_run_and_keeps_what_is_judged(tmp_path: Path) -> None:
    file, out = write(tmp_path, 6), tmp_path / "results.jsonl"
    process = run(file, "--out", out)
    while process.poll() is None and not (out.is_file() and out.read_text().count("\n") >= 1):
        time.sleep(0.02)
    started = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command resumes" in said
    assert not psutil.wait_procs(started, timeout=30)[1]
    assert all(json.loads(line)["kind"] for line in out.read_text().splitlines())
