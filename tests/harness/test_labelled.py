"""Labelled candidates, and the comparison of results with the labels."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.grading.candidates import Submission
from tests.grading.__main__ import check, kind_of, wilson, write
from tests.grading.labelled import DEADLY, RIGHT, WRONG, candidates
from tests.grading.public import UNKNOWN, on_cpu
from tests.grading.public import candidates as public


def row(name: str, kind: str, **more: Any) -> str:
    return json.dumps({"id": name, "kind": kind, "seconds": 1.0, **more}) + "\n"


def test_candidates_are_of_every_kind_and_complete() -> None:
    found = candidates(60, seed=0)
    names = [candidate["id"] for _, candidate in found]
    assert len(set(names)) == len(found) == 60
    kinds = {kind_of(name) for name in names}
    assert kinds - DEADLY.keys() == {"right", "hostile", "planted", "mutant"}
    assert kinds & DEADLY.keys()
    assert {label for label, _ in found} == {RIGHT, WRONG}
    assert all((label == RIGHT) == name.startswith("right") for (label, _), name in zip(found, names))
    for _, candidate in found:
        compile(Submission.of(candidate).source, candidate["id"], "exec")


def test_results_are_held_against_the_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, results = tmp_path / "candidates.jsonl", tmp_path / "results.jsonl"
    labels = {"good": RIGHT, "bad": WRONG, "mutant x triton 1: * to +, line 7": WRONG, "missing": RIGHT}
    write(file, [(label, {"id": name}) for name, label in labels.items()])
    unseen = [{"file": "candidate.py", "lines": "5-9", "condition": ""}]
    told = row("mutant x triton 1: * to +, line 7", "right", never_executed=unseen)
    results.write_text(row("good", "right") + row("bad", "wrong") + told)
    assert check(file, results) == 1  # the one that is missing
    refusing = row("bad", "right", refused_share=0.9)
    results.write_text(row("good", "right") + refusing + told + row("missing", "right"))
    assert check(file, results) == 0
    results.write_text(row("good", "timed out") + row("bad", "right") + told + row("missing", "right"))
    assert check(file, results) == 2
    said = capsys.readouterr().out
    assert "bad: labelled wrong, graded right" in said
    assert "right ones rejected: 1 of 2" in said
    assert "mutant: 0 of 1 as labelled" in said
    assert "mistake's line as never executed: 1" in said


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)


def test_published_kernels_come_with_their_verdicts(tmp_path: Path) -> None:
    run, problems = tmp_path / "runs" / "model_level1_run", tmp_path / "KernelBench" / "level1"
    run.mkdir(parents=True)
    problems.mkdir(parents=True)
    said = {"1": {"correctness": True}, "2": {"correctness": False, "metadata": {}}}
    said["3"] = {"correctness": False, "metadata": {"runtime_error": "CUDA out of memory"}}
    (run / "eval_results.json").write_text(json.dumps(said))
    for number in said:
        (run / f"level_1_problem_{number}_sample_0_kernel.py").write_text("class ModelNew: ...\n")
        (problems / f"{number}_Sum.py").write_text("class Model: ...\n")
    assert [label for label, _ in public(tmp_path)] == [RIGHT, WRONG]
    assert all(Submission.of(candidate).sizes == "small" for _, candidate in public(tmp_path))
    with pytest.raises(FileNotFoundError, match="is no checkout of"):
        list(public(tmp_path / "runs"))


def test_published_kernels_without_a_verdict_count_for_neither_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, problems = tmp_path / "runs" / "triton_model", tmp_path / "KernelBench" / "level2"
    run.mkdir(parents=True)
    problems.mkdir(parents=True)
    texts = {"9": "assert x.is_cuda", "10": "load_inline()"}
    for number, text in texts.items():
        source = f"@triton.jit\nclass ModelNew:\n    {text}\n"
        (run / f"level_2_problem_{number}_sample_0_kernel.py").write_text(source)
        (problems / f"{number}_Sum.py").write_text("class Model: ...\n")
    found = list(public(tmp_path))
    assert [(label, candidate["id"]) for label, candidate in found] == [
        (UNKNOWN, "triton_model level2 9_Sum"),
        (UNKNOWN, "triton_model level2 10_Sum"),
    ]
    ((_, first),) = on_cpu(iter(found))
    assert "assert x.is_cpu" in first["source"]
    file, results = tmp_path / "candidates.jsonl", tmp_path / "results.jsonl"
    write(file, found)
    results.write_text(row("triton_model level2 9_Sum", "wrong") + row("triton_model level2 10_Sum", "right"))
    assert check(file, results) == 0
    assert "wrong ones accepted: 0 of 0" in capsys.readouterr().out


def test_published_pairs_of_problem_and_solution_are_labelled_right(tmp_path: Path) -> None:
    for number, text in (("10", "class ModelNew: ...\n"), ("9", "device = 'cuda'\nclass ModelNew: ...\n"), ("8", "")):
        folder = tmp_path / "unpacked" / "a_gpu" / "1" / number
        folder.mkdir(parents=True)
        (folder / "custom_code.py").write_text(text)
        (folder / "ref_code.py").write_text("class Model: ...\n")
    found = list(public(tmp_path))
    assert [(label, candidate["id"]) for label, candidate in found] == [
        (RIGHT, "a_gpu level1 9"),
        (RIGHT, "a_gpu level1 10"),
    ]
    # Only Triton kernels are changed to accept tensors of the CPU: other code may handle them in its own way.
    assert [candidate["source"] for _, candidate in on_cpu(iter(found))] == [c["source"] for _, c in found]


def test_sources_include_what_is_there_and_do_not_import_the_reference() -> None:
    for _, candidate in candidates(300, seed=1):
        assert not re.search(r"^from \S*torch_eager import", candidate["source"], re.MULTILINE), candidate["id"]
        for file in re.findall(r'#include "(/[^"]+)"', candidate["source"]):
            assert Path(file).is_file(), candidate["id"]
