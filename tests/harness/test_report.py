"""The report is one self-contained page, shows all results, and escapes text."""

import html.parser
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from fourfold.cli.main import main
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.verdict import Finding, Outcome, Verdict
from fourfold.grading.results import Graded
from fourfold.operations.boundary import Boundary
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Status
from fourfold.performance import machine, profile, report
from fourfold.performance.charts import (
    BOTTOM,
    HEIGHT,
    LEAST_GAP,
    LEAST_HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    chart,
    quantity,
    sparkline,
)
from fourfold.performance.gate import Change
from fourfold.pytest_plugin.table import KINDS, Matrix, Tally

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "br", "input"}
SOURCE = f"import torch\n\n\ndef softmax(x):\n    raise KeyError(x.shape)  # {'long ' * 60}\n"


class Page(html.parser.HTMLParser):
    """A parser that checks the nesting of tags and collects the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("backend", "reproduces", "shown"), [("triton", True, True), ("triton", False, False), (CANDIDATE, False, True)]
)
def test_the_table_names_the_check_of_a_remark(backend: str, reproduces: bool, shown: bool) -> None:
    search = {"remarks": ["the case passes now"], "reproduces": reproduces, "boundary": Boundary().as_dict()}
    search |= {"warnings": [], "unreached": [], "constants": ""}
    made, cell = Matrix(), Cell("softmax", backend, "float32")
    made.add(cell, Outcome(check="forward", dtype="float32", outcome=Status.PASSED, search=search))
    assert (f"{cell}: forward: the case passes now" in made.lines()) == shown


def matrix() -> Matrix:
    made = Matrix()
    made.tallies[Cell("softmax", "torch", "float32")] = Tally(worst=0.25, examples=300, passed=9)
    made.tallies[Cell("softmax", "cuda", "float32")] = Tally(worst=9.0, examples=30, passed=3, failed=2)
    made.tallies[Cell("softmax", "triton", "bfloat16")] = Tally(skipped={"needs a <newer> Triton": 3})
    return made


def test_a_table_cuts_no_name_and_aligns_its_columns() -> None:
    one, other = Cell("a_very_long_name_of_an_operation", CANDIDATE, "float32"), Cell("tan", CANDIDATE, "float32")
    made = Matrix()
    made.tallies = {one: Tally(failed=12, kinds={*KINDS}), other: Tally(worst=0.5, examples=3, passed=1)}
    head, row, short, last, *_ = made.lines()
    assert head == "a_very_long_name_of_an_operation  float32"
    assert short == f"{'tan':<32}  float32"
    assert row.index("12 FAILED[1][2]") == last.index("0.50") == head.index("float32")
    table = str(verdict(Verdict)).splitlines()
    assert table[3].startswith(f"  law: {'shifting_' * 8}  ")
    assert table[3].index("unsupported") == table[1].index("float16")


def timed(contender: str, size: int, seconds: float, error: float | None = 0.5) -> dict[str, Any]:
    name = f"softmax-x{size}-float32-forward"
    return {
        "fullname": f"tests/benchmarks/test_speed.py::test_timed_call_is_right[{name}-{contender}]",
        "group": name,
        "median": seconds,
        "iqr": seconds / 50,
        "rounds": 40,
        "extra_info": {
            "operation": "softmax",
            "workload": f"x{size}",
            "dtype": "float32",
            "direction": "forward",
            "contender": contender,
            "bytes": size,
            "flops": 2 * size,
            "bytes_per_second": size / seconds,
            "flops_per_second": 2 * size / seconds,
            "fraction_of_ceiling": size / seconds / 1e12,
            "error_over_bound": error,
            "timed": "events, cold L2",
            "throttled": ["hardware slowdown"],
        },
    }


def measured() -> dict[str, Any]:
    benchmarks = [
        timed("torch", 10**6, 4e-6),
        timed("cuda", 10**6, 2e-6),
        timed("torch", 10**8, 3e-4),
        timed("cuda", 10**8, 1e-4, error=None),
    ]
    past = [
        {"datetime": "2026", "benchmarks": [{"fullname": b["fullname"], "stats": {"median": b["median"] * f}}]}
        for f in (1.5, 0.5)
        for b in benchmarks[:1]
    ]
    kernel = {
        "name": "softmax_kernel<float, 4>",
        "arch": "sm_90a",
        "registers": 40,
        "spill_store_bytes": 8,
        "spill_load_bytes": 8,
        "shared_bytes": 0,
        "instruction_counts": {"LDG": 3, "FFMA": 70},
    }
    return report.performance(
        benchmarks,
        {"device": "cuda", "gpu": "NVIDIA H200", "driver": ""},
        {"bytes_per_second": 1e12, "flops_per_second": {"float32": 1e13}, "launch_seconds": 2e-6},
        {"kernels": {"softmax-cuda-float32": [kernel]}},
        past,
        [Change(benchmarks[1]["fullname"], "slower", 1.05, 1.04, 1.06, 2)],
        ["a kernel is slower"],
    )


def verdict(kind: type[Verdict], **more: Any) -> Any:
    short = np.arange(4, dtype=np.float32)
    case = Case({"x": np.arange(120, dtype=np.float32).reshape(3, 40), "y": short}, short)
    failure = Finding(
        message=f"KeyError: {'1234567890' * 12}",
        frames='  File "/somewhere/kernel.py", line 5, in softmax\n    raise KeyError(x.shape)',
        cause="kernel.py:5: KeyError",
        counterexample=repr(case),
        arguments=case.arguments(),
        repeat=f"fourfold.verify(softmax, 'softmax', reproduce='{'A' * 200}')",
    )
    failed = Outcome(check="forward", dtype="float32", outcome=Status.FAILED, grade="wrong", worst=2.0, failure=failure)
    others = [
        Outcome(check=f"law: {'shifting_' * 8}", dtype="float16", outcome=status, examples=3)
        for status in Status
        if status is not Status.FAILED
    ]
    return kind(
        implementation="softmax",
        operation="softmax",
        device="cpu",
        claims="",
        outcomes=(failed, *others),
        shortcomings=(),
        warnings=(),
        versions={"torch": "2.14"},
        seed=1,
        seconds=2.0,
        file="/somewhere/kernel.py",
        source=SOURCE,
        **more,
    )


def contender_errors(largest: float | None, at: str) -> dict[str, Any]:
    """Return the errors of one contender, as in the JSON of accuracy."""
    return {"largest": largest, "mean": 0.25, "bits_lost": 0.3, "elements": 8, "at": at}


# What ncu has written of two benchmarks on an H200, without the columns that describe the machine.
PROFILE = Path(__file__).parent / "profile.csv"
LIMITS = [
    "| softmax x1000000 float32 forward | triton (0.50) | 2.816 | 1 | 32 | 1 | 3 | 4 | 1 | 0 | 4 | 0.01"
    " | latency: 0.01 waves |",
    "| softmax x1000000 float32 forward | triton (0.50) | 9.188e+04 | 3 | 128 | 0 | 8 | 96 | 18 | 0 | 24 | 3.89"
    " | L1 96% |",
]
OF_SOFTMAX = {"operation": "softmax", "result": "gradient of x", "dtype": "float16"}
ROWS = [
    {
        **OF_SOFTMAX,
        "kernel": "triton",
        "behind": None,
        "errors": {"triton": contender_errors(None, "long"), "torch": contender_errors(0.5, "a")},
    },
    {
        **OF_SOFTMAX,
        "kernel": "cuda",
        "behind": 2.04,
        "errors": {
            "cuda": contender_errors(2.0, "b"),
            "torch": contender_errors(0.5, "a"),
            "liger": contender_errors(5400.0, "c"),
        },
    },
]


def saved_results(folder: Path) -> list[Path]:
    """Write what verify, grade, bench and accuracy save; return the files."""
    part = measured()
    benchmarks = [
        {**one, "stats": {key: one[key] for key in ("median", "iqr", "rounds")}} for one in part["benchmarks"]
    ]
    saved = {
        "datetime": "2026-07-01T12:00:00+00:00",
        "commit_info": {"id": "0123456789abcdef", "dirty": True},
        "machine_info": {"fourfold": part["machine"]},
        **{name: part[name] for name in ("ceilings", "static")},
        "benchmarks": benchmarks,
    }
    moved = {"seconds": 2e-5, "bytes_per_second": 3e9, "flops_per_second": None, "ratio_to": {"torch": 0.5}}
    timing = {"benchmark": "softmax-small", "shapes": {"x": [32, 256]}, **moved, "change": None}
    one = verdict(Verdict)
    run = json.loads(one.json())
    for name in ("implementation", "operation", "seed", "seconds", "source", "file"):
        del run[name]
    (folder / "kernel.py").write_text(SOURCE)
    run["candidates"] = [f"ops.py:mine={folder}/kernel.py:softmax"]
    for check in run["checks"]:
        check |= {"operation": "mine", "backend": "candidate"}
    contents = {
        "verdict.json": one.json(),
        "run.json": json.dumps(run),
        "graded.jsonl": "".join(f"{verdict(Graded, id=name, stage='full').line()}\n" for name in ("a", "b")),
        "timings.json": json.dumps({"timings": [timing]}),
        "0001_a.json": json.dumps(saved),
        "accuracy.json": json.dumps({"device": "H100", "seed": 0, "rows": ROWS, "not_measured": {"x-liger: none": 3}}),
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return [folder / name for name in contents]


def failure(dtype: str, cause: str, check: str = "test_x") -> dict[str, Any]:
    return {
        "name": f"{check}[softmax-cuda-{dtype}]",
        "text": "\x1b[31moutput[0] is <nan> & wrong",
        "repeat": f"pytest {check}",
        "cell": {"operation": "softmax", "backend": "cuda", "dtype": dtype},
        "cause": cause,
    }


FAILURES = [failure("float32", "wrong: output is not right")]
ABOUT = {"date": "2026-07-01 12:00 UTC", "commit": "abc123-dirty", "device": "NVIDIA H200", "profile": "nightly"}


def test_page_shows_verification_and_speed_and_needs_no_network(tmp_path: Path) -> None:
    report.write(tmp_path, "verification", report.verification(matrix().tallies, FAILURES, ABOUT))
    alone = Page((tmp_path / "index.html").read_text())
    assert "0.25 300" in alone.text
    assert "operationbackendbfloat16float32softmax" in "".join(
        alone.text.split()
    )  # no column for a dtype that did not run
    assert all(f"{key} {value}" in alone.text for key, value in ABOUT.items())
    assert "Roofline" not in alone.text
    text = report.write(tmp_path, "performance", measured()).read_text()
    page = Page(text)
    for said in ("2 failed", "unsupported", "output[0] is <nan> & wrong", "pytest test_x", "+5.0%", "slower"):
        assert said in page.text
    for said in ("25.0%", "50.0%", "outside", "hardware slowdown", "softmax_kernel<float, 4>", "70 FFMA", "2 µs"):
        assert said in page.text
    assert not re.search(r"https?://|<script|\x1b", text)
    assert all(not attributes.get("src") for _, attributes in page.tags)
    names = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = {str(attributes["href"]) for tag, attributes in page.tags if tag == "a"}
    assert {link.removeprefix("#") for link in links} <= names
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_history_is_of_the_same_benchmark_and_ends_today(tmp_path: Path) -> None:
    text = report.write(tmp_path, "performance", measured()).read_text()
    assert text.count('class="spark"') == 1
    assert "3 runs, 6 µs to 4 µs" in text
    assert "+100.0%" in text


def test_each_kernel_stands_beside_its_fastest_peer_the_slowest_first(tmp_path: Path) -> None:
    part = measured()
    part["benchmarks"] += [timed("triton", 10**6, 8e-6), timed("compile", 10**6, 5e-6)]
    section = re.compile(r"Beside the peers(.*?)Roofline", re.DOTALL)
    (told,) = section.findall(Page(report.write(tmp_path, "performance", part).read_text()).text)
    assert re.findall(r"softmax x(\d+) float32 forward", told) == [str(10**6), str(10**8)]
    assert re.findall(r"(\d\.\d\d)\)", told) == ["0.50", "2.00", "3.00"]
    part["machine"]["device"] = "cpu"
    assert not section.findall(Page(report.write(tmp_path, "performance", part).read_text()).text)


def test_the_comparison_marks_the_same_code_where_its_time_differs(tmp_path: Path) -> None:
    part = measured()
    changes = [("moved", 1.2, 1.1, 1.3), ("still", 1.0, 0.9, 1.1)]
    part["verdicts"] = [vars(Change(f"t[{name}]", "same", *ratios, 0, "same code")) for name, *ratios in changes]
    text = Page(report.write(tmp_path, "performance", part).read_text()).text
    assert "moved: same code" in text
    assert "still" not in text


def test_a_run_of_nothing_makes_a_page_too(tmp_path: Path) -> None:
    nothing = report.performance(
        [], {"device": "cpu"}, measured()["ceilings"], {"kernels": {}, "error": "x"}, [], [], []
    )
    report.write(tmp_path, "verification", report.verification({}, [], {"device": "CPU"}))
    assert "not the kernels' speed" in Page(report.write(tmp_path, "performance", nothing).read_text()).text


@pytest.mark.parametrize("values", [[(1.0, 1.0)], [(1e-9, 1e12), (1e15, 1e-6)], [(5.0, 7.0), (5.1, 7.1), (4.9, 7.0)]])
def test_charts_stay_inside_of_their_frame(values: list[tuple[float, float]]) -> None:
    points = [Point(x, y, "<p>") for x, y in values]
    svg = chart({"a": points}, {"a": "c0"}, ("moved", "B"), ("time", "s"), "label", limits=[(points[0], points[-1])])
    Page(svg)
    assert svg.count("<circle") == len(points)
    assert "&lt;p&gt;" in svg
    for axis, most in (("x", WIDTH), ("y", HEIGHT)):
        places = [float(v) for v in re.findall(rf'\b(?:c?{axis}|{axis}[12])="([-\d.]+)"', svg)]
        assert places
        assert all(0 <= place <= most for place in places)
    assert 2 <= svg.count('text-anchor="middle"') <= 10


@pytest.mark.parametrize("decades", [0.2, 0.25, 0.3, 0.45, 0.7, 1, 1.3, 2, 3.1, 4, 6, 9, 15])
@pytest.mark.parametrize("start", [number / 10 for number in range(10)])
def test_labels_of_an_axis_lie_apart(start: float, decades: float) -> None:
    axis = Axis(start, start + decades, "s")
    for pixels, gap in ((WIDTH - LEFT - RIGHT, LEAST_GAP), (HEIGHT - TOP - BOTTOM, LEAST_HEIGHT)):
        ticks = axis.ticks(pixels, gap)
        places = [axis.share(tick) * pixels for tick in ticks]
        assert len(ticks) >= 2
        assert all(after - before >= gap for before, after in itertools.pairwise(places))
        assert all(0 <= place <= pixels for place in places)
        # A label has room for five characters.
        assert all(len(axis.label(tick)) <= 7 for tick in ticks)


def test_failures_of_one_cause_are_together_and_their_cells_lead_to_them(tmp_path: Path) -> None:
    found = [
        failure("float32", "wrong: output is not right"),
        failure("float32", "mine.py:3: ValueError", "test_y"),
        failure("float16", "mine.py:3: ValueError", "test_y"),
        {**failure("float32", "", "test_z"), "cell": None},
    ]
    content = report.verification(matrix().tallies, found, ABOUT)
    text = report.write(tmp_path, "verification", content).read_text()
    page = Page(text)
    (cell,) = re.findall(r'<td class="bad">(.*?)</td>', text)
    assert re.findall(r'href="#(.*?)"', cell) == ["cause-1", "cause-2"]
    of_first, of_second, of_third = re.split('<h3 id="cause-', text)[1:]
    assert "test_x[softmax-cuda-float32]" in of_first
    assert "test_y[softmax-cuda-float32]" in of_second
    assert "test_y[softmax-cuda-float16]" in of_second
    assert "2 failures: softmax cuda float32, softmax cuda float16" in page.text
    assert "test_z" in of_third
    assert len({attributes["id"] for _, attributes in page.tags if "id" in attributes}) == text.count(' id="')


def test_a_cause_is_the_line_that_raised_or_the_result_that_is_wrong_or_the_message_without_its_numbers() -> None:
    def cause(said: str, dtype: str = "float32", result: str = "", cause: str = "") -> str:
        return report.cause_of(Finding(message=f"softmax · cuda · {dtype} · cpu: {said}", cause=cause, result=result))

    value = "is 3, expected 0.5 within 2e-06 (error over bound 7; 3 of 8 elements are wrong)"
    there = f"on new tensors, output[] {value}"
    alike = {cause(f"output[3, 2] {value}", result="output"), cause(there, "float16", "output")}
    assert alike == {"wrong: output is not as expected"}
    assert cause(f"gradient of x[0] {value}", result="gradient of x") == "wrong: gradient of x is not as expected"
    numbers = {cause(f"{n} elements differ, the first by {x}") for n, x in ((3, -0.25), (12, "nan"), (7, "1e-30"))}
    assert numbers == {"wrong: N elements differ, the first by N"}
    assert cause(f"output[0] {value}", cause="mine.py:3: ValueError") == "mine.py:3: ValueError"
    assert report.cause_of(None) == ""


def test_headers_of_tables_say_what_they_are_of(tmp_path: Path) -> None:
    report.write(tmp_path, "verification", report.verification(matrix().tallies, FAILURES, ABOUT))
    page = Page(report.write(tmp_path, "performance", measured()).read_text())
    scopes = [attributes.get("scope") for tag, attributes in page.tags if tag == "th"]
    assert set(scopes) == {"col", "row", "rowgroup"}


def test_a_run_names_its_date_and_its_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert machine.run(tmp_path)["commit"] == ""
    (tmp_path / "kernel.py").write_text("")
    git("init")
    git("add", "kernel.py")
    git("commit", "-m", "first")
    first = machine.run(tmp_path)["commit"]
    assert re.fullmatch("[0-9a-f]{12}", first)
    (tmp_path / "kernel.py").write_text("1")
    assert machine.run(tmp_path)["commit"] == f"{first}-dirty"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", machine.run(tmp_path)["date"])


def test_quantities_have_the_prefix_that_fits() -> None:
    shown = [quantity(value, "s") for value in (1.0, 999e-6, 1e-3, 1.234e-5, 2e3, 0.0)]
    assert shown == ["1 s", "999 µs", "1 ms", "12.3 µs", "2 ks", "0 s"]


def test_sparkline_shows_a_few_per_cent_as_few() -> None:
    ys = [[float(y) for y in re.findall(r",([\d.]+)", sparkline(run))] for run in ([1.0, 1.01], [1.0, 2.0])]
    assert abs(ys[0][0] - ys[0][1]) < 4 < abs(ys[1][0] - ys[1][1])
    assert sparkline([1.0]) == ""


def test_verification_is_reported_with_its_counterexamples(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def wrong(x, y):\n    return x + y + 1\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    tests = "tests/operations/test_forward.py"
    options = ["--device=cpu", "--candidate", f"vector_add={tmp_path}/mine.py:wrong", "--dtype=float32", "--examples=1"]
    options += ["-p", "no:cacheprovider", f"--report={tmp_path / 'report'}"]
    done = warm.run("pytest", tests, *options, cwd=ROOT, env=environment)
    assert done.returncode == 1
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert "1 failed [1]" in page.text
    assert "[1] wrong: output is not as expected" in page.text
    assert "examples a check 1" in page.text
    assert "Named example" in page.text
    assert "pytest 'tests/operations/test_forward.py::test_output_agrees" in page.text


def test_saved_results_become_pages_with_an_index(tmp_path: Path) -> None:
    files = saved_results(tmp_path)
    assert main(["report", *map(str, files), "--out", str(tmp_path / "out")]) == 0
    index = Page((tmp_path / "out" / "index.html").read_text())
    links = [str(attributes["href"]) for tag, attributes in index.tags if tag == "a"]
    assert len(links) == len(files)
    texts = [(tmp_path / "out" / link).read_text() for link in links]
    assert all('<a href="../index.html">' in text for text in texts)
    own, of_run, graded, timings, benchmarks, accuracy = (Page(text).text for text in texts)
    for text in (own, of_run):
        assert "raise KeyError(x.shape)  # long" in text  # in the source alone
        assert "shifting_" in text
    assert "kernel.py:softmax as mine" in of_run
    assert "2 candidates" in graded
    assert "softmax-small32x25620 µs3 GB/s0.50" in timings.replace("\n", "")
    assert "date 2026-07-01 12:00 UTC; commit 0123456789ab-dirty" in benchmarks
    assert "softmax_kernel<float, 4>" in benchmarks
    assert "+infsoftmaxgradient of xfloat16tritoninf / 0.250.50 / 0.25long" in accuracy.replace("\n", "")
    *_, liger, _, _, _, missing = (tmp_path / "out" / "comparisons.md").read_text().splitlines()
    assert liger == "| +2.0 | softmax | gradient of x | float16 | cuda | 2.00 / 0.25 | 0.50 / 0.25 | 5.4e3 / 0.25 | b |"
    assert missing == "- x-liger: none (3)"


def test_the_accuracy_of_several_runs_is_one_table_of_each_device(tmp_path: Path) -> None:
    runs = {"a": ("H100", ROWS[1:]), "b": ("H200", ROWS), "c": ("H100", ROWS[:1])}
    for name, (device, rows) in runs.items():
        run = {"device": device, "seed": 0, "rows": rows, "not_measured": {"x-liger: none": 3}}
        (tmp_path / name).write_text(json.dumps(run))
    assert main(["report", *(str(tmp_path / name) for name in runs), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "comparisons.md").read_text().splitlines()
    first, second = (lines.index(f"## Accuracy: {device}") for device in ("H100", "H200"))
    table, other = ([line for line in part if line[0:1] == "|"] for part in (lines[first:second], lines[second:]))
    assert table == other
    assert lines[second - 2 : second] == ["- x-liger: none (6)", ""]


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("x = 1", "Expecting value"), ("{}", "nothing")])
def test_a_file_that_holds_no_result_is_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(file), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert f"error: {file}: expected what verify --json" in error
    assert said in error


def launch(nanoseconds: float = 1e4, waves: float = 8, occupancy: float = 50, **parts: float) -> profile.Launch:
    """Return what ncu measures of a launch, with the percentages of some parts of the GPU."""
    shares = {metric: parts.get(part.replace(" ", "_"), 5.0) for part, metric in profile.PARTS.items()}
    return {
        **shares,
        profile.TIME: nanoseconds,
        profile.WAVES: waves,
        profile.OCCUPANCY: occupancy,
        profile.REGISTERS: 32,
    }


@pytest.mark.parametrize(
    ("launches", "limit"),
    [
        ([launch(memory=91.6, L2=80)], "memory 92%"),
        ([launch(3e4, memory=90), launch(1e4, memory=10)], "memory 70%"),
        ([launch(memory=59.4, instructions=59.6)], "latency: 50% occupancy"),
        ([launch(instructions=88.4, tensor_cores=40)], "instructions 88%"),
        ([launch(instructions=88.4, tensor_cores=88.4)], "tensor cores 88%"),
        ([launch(2e3), launch(3e3)], "2 launches"),
        ([launch(2e3), launch(9e3, waves=0.3)], "latency: 0.30 waves"),
        ([launch(2e3, waves=1.1, occupancy=60)], "latency: 1.10 waves"),
        ([launch(waves=1.0, occupancy=12.4)], "latency: 12% occupancy"),
        ([launch(waves=0.0)], "latency: 0.00 waves"),
    ],
)
def test_the_limit_is_the_busiest_part_or_what_the_call_lacks(launches: list[profile.Launch], limit: str) -> None:
    assert [*profile.cells(launches)][-1] == limit


def test_slower_kernels_say_what_limits_them(tmp_path: Path) -> None:
    run, *_ = (file for file in saved_results(tmp_path) if file.name == "0001_a.json")
    saved, small = json.loads(run.read_text()), "softmax-small-bfloat16-forward"
    saved["benchmarks"] = [
        {**one, "group": group, "stats": {key: one[key] for key in ("median", "iqr", "rounds")}}
        for group in (small, "not-profiled", "level", "attention-full-float32-backward")
        for contender, seconds in (("library", 1e-5), ("triton", 1.01e-5 if group == "level" else 2e-5))
        for one in [timed(contender, 10**6, seconds)]
    ]
    run.write_text(json.dumps(saved))
    file, text = tmp_path / "profile.csv", PROFILE.read_text()
    (row,) = (line for line in text.splitlines() if small in line)
    file.write_text(f"{text}{row.replace(small, 'level')}\n")
    assert main(["report", str(run), str(file), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "comparisons.md").read_text().splitlines()
    assert lines[lines.index("## What limits the slower kernels") + 8 :] == LIMITS
    page = Page((tmp_path / "out" / "01-profile" / "index.html").read_text()).text
    assert "attention-full-float32-backward-triton9.188e+04" in page.replace("\n", "")


def test_the_documented_command_measures_what_the_report_needs() -> None:
    text = (ROOT / "docs" / "performance.md").read_text().replace("\\\n", "")
    assert f"--metrics {','.join(profile.METRICS)} " in text


def test_a_profile_of_calls_that_launch_nothing_is_empty(tmp_path: Path) -> None:
    (tmp_path / "profile.csv").write_text(
        "==PROF== Connected to process 7579 (/usr/bin/python3.12)\n==WARNING== No kernels were profiled.\n"
    )
    assert profile.read(tmp_path / "profile.csv") == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lts__throughput", "lts", "found no lts__throughput.avg.pct_of_peak_sustained_elapsed"),
        ("Start/Stop_Range", "Range", "found no Id:Domain:Start/Stop_Range"),
        ('"ns"', '"us"', "expected times in ns, as with --print-units base, found us"),
        ('"', "", "found no Id:Domain"),
    ],
)
def test_a_profile_that_lacks_something_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "profile.csv").write_text(PROFILE.read_text().replace(old, new))
    with pytest.raises(ValueError, match=said):
        profile.read(tmp_path / "profile.csv")
