"""The page about public kernels is written from results, and a folder of packages contains their Python files."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fourfold.operations.claims import Claims
from tests.public_kernels import page, releases
from tests.public_kernels.judgements import JUDGEMENTS
from tests.public_kernels.kernels import KERNELS

CLAIMING = next(kernel for kernel in KERNELS if kernel.claims != Claims())
FAILURE = (
    "forward, float32: softmax · f · float32 · cpu: output[0] is 1.0, expected 2.0\nwith x[1] strides [1]\nat Case()"
)


def result(**more: Any) -> dict[str, Any]:
    about = {"kernel": CLAIMING.name, "claimed": "none", "device": "cpu", "claims": "", "versions": {}}
    found = {"passed": True, "grade": "exact", "refusals": {}, "failures": []}
    return {**about, **found, "versions": {"torch": "2.11", "triton": "3.6"}, **more}


def results(folder: Path, *given: dict[str, Any]) -> page.Results:
    (folder / "verdicts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in given))
    return page.read_results(*folder.glob("verdicts*.jsonl"))


def test_every_kernel_is_judged_and_stands_on_the_page() -> None:
    assert set(JUDGEMENTS) == {kernel.name for kernel in KERNELS}
    text = page.PAGE.read_text()
    for kernel in KERNELS:
        assert f"\n| {kernel.name} | " in text
        assert JUDGEMENTS[kernel.name] in text


def test_there_are_thirty_kernels_of_eight_projects() -> None:
    assert len(KERNELS) >= 30
    assert len({kernel.project for kernel in KERNELS}) >= 8


def test_a_row_has_a_result_in_the_column_of_its_device_and_claims(tmp_path: Path) -> None:
    own = {"claimed": "own", "claims": str(CLAIMING.claims)}
    found = results(
        tmp_path,
        result(refusals={"why": 2}, passed=False, grade="wrong", failures=[FAILURE]),
        result(device="cuda", grade="storage"),
        result(**own),
        result(**own, device="cuda", passed=False, refusals={"why": 7}),
    )
    cells = page.row(CLAIMING, found).split(" | ")
    assert cells[1:3] == ["failed, wrong, 2 refused", "passed, storage"]
    assert cells[4:6] == ["passed, exact", "refused all: 7"]


def test_results_of_other_claims_and_of_no_run_are_not_shown(tmp_path: Path) -> None:
    assert page.outcome_cell(None) == page.NOT_RUN
    assert not results(tmp_path, result(claimed="own", claims="ranks=(9,)"))
    assert "not finished within 9 seconds" in page.outcome_cell({"error": "not finished within 9 seconds"})


def test_a_counterexample_is_its_message_and_its_shapes(tmp_path: Path) -> None:
    found = results(tmp_path, result(passed=False, failures=[FAILURE]))
    (line,) = page.counterexamples(KERNELS, found)
    assert line == (
        f"- **{CLAIMING.name}**, without claims, forward, float32:\n  output[0] is 1.0, expected 2.0;\n"
        "  with x[1] strides [1]\n"
    )


def test_the_page_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    found = results(tmp_path, result())
    text = page.PAGE.read_text()
    once = page.write_page(text, found)
    assert "On the CPU 0 ran in both ways: 1 pass without claims" in once
    assert page.write_page(once, found) == once
    assert once.partition("<!-- count -->")[0] == text.partition("<!-- count -->")[0]
    with pytest.raises(ValueError, match="0 parts named table"):
        page.write_page(text.replace("<!-- table -->", ""), found)


def test_what_is_kept_of_results_gives_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "KEPT", tmp_path / "kept.jsonl")
    own = {"claimed": "own", "claims": str(CLAIMING.claims)}
    found = results(
        tmp_path,
        result(refusals={"why": 2}, passed=False, grade="wrong", failures=[FAILURE, "backward: other"]),
        {**result(**own), "error": "not finished within 9 seconds"},
    )
    page.keep(found)
    kept = page.read_results(page.KEPT)
    assert page.row(CLAIMING, kept) == page.row(CLAIMING, found)
    assert list(page.counterexamples(KERNELS, kept)) == list(page.counterexamples(KERNELS, found))
    # An unfinished run does not replace a finished one.
    (tmp_path / "verdicts.jsonl").write_text(json.dumps({**result(), "error": "not finished within 9 seconds"}))
    assert page.all_results(tmp_path)[CLAIMING.name, "none", "cpu"]["grade"] == "wrong"


def test_the_page_is_that_of_the_kept_results() -> None:
    text = page.PAGE.read_text()
    assert page.write_page(text, page.read_results(page.KEPT)) == text


def test_a_folder_has_no_compiled_libraries(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in ("a/kernels.py", "a/tuned.yaml", "a/_C.so", "a/lib.so.3", "a/data.bin", "a-1.dist-info/METADATA"):
            wheel.writestr(name, "")
    releases.extract(tmp_path / "a.whl", tmp_path / "files")
    found = {path.relative_to(tmp_path / "files").as_posix() for path in (tmp_path / "files").rglob("*.*")}
    assert {"a/kernels.py", "a/tuned.yaml"} <= found
    assert not {name for name in found if ".so" in name or name.endswith(".bin")}
