"""Compiled kernels are compared with those of another revision: equal code is found, and differences are counted."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from subjects import KERNEL

from fourfold.backends import module
from fourfold.backends.cuda.declarations import source_closure
from fourfold.checks.records import operations
from fourfold.cli import resources
from fourfold.cli.main import main
from fourfold.cli.resources import (
    CellResources,
    _used_files,
    changed_operations,
    compare,
    implementations,
    lines,
    unpack,
)
from fourfold.engine.cells import Cell
from fourfold.performance.static import pair_kernels

OPTIONS = ["--op=vector_add", "--dtype=float32"]


def kernel(code: str, **changes: Any) -> dict[str, Any]:
    return {**KERNEL, "code_sha256": code, **changes}


def told(now: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]]) -> list[str]:
    return [str(pair) for pair in pair_kernels(now, then)]


# ---- pairs of kernels


def test_variants_of_the_same_code_belong_together_in_whichever_order() -> None:
    assert told([kernel("a"), kernel("b"), kernel("c")], [kernel("c"), kernel("a"), kernel("b")]) == [
        "k for sm_90a: the same code",
        "k for sm_90a, variant 2: the same code",
        "k for sm_90a, variant 3: the same code",
    ]
    # A new kernel comes first, and does not take another kernel's partner.
    new = told([kernel("new"), kernel("a"), kernel("b")], [kernel("a"), kernel("b")])
    assert new == [
        "k for sm_90a is new",
        "k for sm_90a, variant 2: the same code",
        "k for sm_90a, variant 3: the same code",
    ]
    gone = told([kernel("b")], [kernel("a"), kernel("b")])
    assert gone == ["k for sm_90a: the same code", "k for sm_90a, variant 2 is no more"]


def test_kernels_of_other_names_and_architectures_are_no_pair() -> None:
    assert told([kernel("a")], [kernel("a", name="l")]) == ["k for sm_90a is new", "l for sm_90a is no more"]
    assert told([kernel("a")], [kernel("a", arch="sm_80")]) == ["k for sm_90a is new", "k for sm_80 is no more"]


def test_what_differs_is_counted() -> None:
    other = kernel("b", registers=72, spill_load_bytes=8, instruction_counts={"LDG": 4, "FFMA": 5, "STL": 7, "BAR": 2})
    assert told([other], [KERNEL]) == [
        "k for sm_90a: 72 registers, was 64; 8 bytes of spilled loads, was 0; 18 instructions, was 13:"
        " +7 STL, -3 FFMA, +1 BAR"
    ]
    assert told([kernel("b")], [KERNEL]) == [
        "k for sm_90a: the same instructions in another order or on other operands"
    ]
    many = kernel("b", instruction_counts={f"I{n}": n for n in range(1, 21)})
    assert told([many], [kernel("a", instruction_counts={})])[0].endswith("+9 I9, and 8 kinds more")


# ---- which operations are concerned


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Commit a copy of this library's kernels to a new repository; return the folder of kernels."""
    folder = tmp_path / "impls"
    shutil.copytree(implementations(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    commit(folder, "init")
    return folder


def commit(folder: Path, *before: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (*([before] if before else []), ("add", "-A"), (*who, "commit", "-q", "-m", "kernels")):
        subprocess.run(["git", *arguments], cwd=folder.parent, check=True, capture_output=True)


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_an_operation_is_concerned_by_its_files_and_by_those_that_it_uses(repository: Path) -> None:
    known, base = list(operations()), repository.parent / "base"
    unpack("HEAD", repository, base)
    assert changed_operations(repository, base / "impls", known) == []
    (repository / "softmax" / "triton_kernel.py").write_text("")
    # A file that another one mentions only in a comment counts as used.
    assert changed_operations(repository, base / "impls", known) == [
        "attention",
        "attention_with_lse",
        "cross_entropy",
        "paged_attention",
        "softmax",
    ]
    (repository / "giou_loss" / "cuda_kernel.cu").write_text("")
    concerned = changed_operations(repository, base / "impls", known)
    assert {"softmax", "giou_loss", "diou_loss", "ciou_loss"} <= set(concerned)
    assert not {"vector_add", "matmul", "cumsum"} & set(concerned)
    (repository / "rows.cuh").unlink()
    assert "layer_norm" in changed_operations(repository, base / "impls", known)


@pytest.mark.parametrize("operation", operations())
def test_files_that_an_operation_includes_or_imports_are_known(operation: str) -> None:
    folder = implementations()
    known = _used_files(folder, operation)
    kernels = module(operation, "cuda").KERNELS
    included = {Path(file).relative_to(folder) for each in kernels for file in source_closure(each.source)}
    assert included
    assert set(map(str, included)) <= known.keys()
    pending, seen = [file for file in known if file.startswith(f"{operation}/")], set[str]()
    while pending:
        file = pending.pop()
        seen.add(file)
        if file.endswith(".py"):
            for other in re.findall(r"^from \.\.([\w.]+) import", (folder / file).read_text(), re.MULTILINE):
                path = folder / other.replace(".", "/")
                name = f"{path.relative_to(folder)}{'/__init__' if path.is_dir() else ''}.py"
                assert name in known
                pending += [name] if name not in seen else []


# ---- the command


@pytest.mark.full
def test_a_changed_kernel_is_found_and_the_others_have_the_same_code(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources, "implementations", lambda: repository)
    assert main(["resources", *OPTIONS, "--base=HEAD"]) == 0
    assert "operations with other files than HEAD: none" in capsys.readouterr().out
    # The base's strided kernels in CUDA C++, and its flat one in Triton, do not add y: today's need more instructions.
    cuda, triton = repository / "elementwise.cuh", repository / "triton_elementwise.py"
    today = {cuda: cuda.read_text(), triton: triton.read_text()}
    replace_once(cuda, "results[k] = Of()(", "results[k] = ")
    y = "C(b[plane * b_outer_stride + line * b_middle_stride + column * b_inner_stride])"
    replace_once(cuda, f",\n{30 * ' '}{y})", "")
    replace_once(triton, "of(a, b).to(", "a.to(")
    commit(repository)
    for path, text in today.items():
        path.write_text(text)
    assert main(["resources", *OPTIONS, "--base=HEAD"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"operations with other files than HEAD: .*\bvector_add\n", said)
    assert "vector_add-cuda-float32: 2 of 4 kernels have the same code" in said
    assert re.search(
        r"^  binary_strided_kernel<added, float, unsigned, 4> for sm_90a: .*instructions, was .*FADD", said, re.M
    )
    assert re.search(r"^vector_add-triton-float32: [12] of 3 kernels have the same code", said, re.M)
    assert re.search(r"^  vector_add_forward_kernel for sm_90.*FADD", said, re.M)
    assert re.search(r"^worse: vector_add-cuda-float32: .* instructions, after", said, re.M)
    assert main(["resources", *OPTIONS, "--backend=cuda", "--base=HEAD", "--strict"]) == 1


def test_what_was_written_is_compared_with_what_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, written = [*OPTIONS, "--backend=cuda"], tmp_path / "kernels.json"
    assert main(["resources", *options, f"--json={written}"]) == 0
    assert "binary_kernel<added, float, 4, 4> for sm_90a: " in capsys.readouterr().out
    assert main(["resources", *options, f"--against={written}", "--strict"]) == 0
    assert capsys.readouterr().out == "4 of 4 kernels have the same code\n"
    content = json.loads(written.read_text())
    content["compilers"]["nvidia-cuda-nvrtc"] = "1.0"
    first, *_ = content["kernels"]["vector_add-cuda-float32"]
    first |= {"registers": first["registers"] - 1, "code_sha256": "another"}
    written.write_text(json.dumps(content))
    assert main(["resources", *options, f"--against={written}"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^nvidia-cuda-nvrtc is .*, was 1.0$", said, re.M)
    now = first["registers"] + 1
    assert f"{first['name']} for sm_90a: {now} registers, was {now - 1}; the same instructions in another order" in said
    assert said.endswith("3 of 4 kernels have the same code\n")


def test_kernels_whose_base_does_not_compile_are_not_called_new() -> None:
    failing, added = "softmax-cuda-float32", "swiglu-cuda-float32"
    error = f"{failing}: the file includes a header that does not exist"
    new, old = CellResources({failing: [kernel("x")], added: [kernel("x")]}, {}), CellResources({}, {failing: error})
    compared = compare(new, old)
    assert [(cell, pair.new, pair.old) for cell, pair in compared] == [(added, kernel("x"), None)]
    assert f"not compared, the base does not compile: {error}" in lines(compared, new, old)


@pytest.mark.full
def test_a_kernel_that_does_not_compile_is_told(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("vector_add", "cuda", "float32"), Cell("vector_add", "triton", "float32")]
    replace_once(repository / "vector_add" / "cuda_kernel.cu", "return x + y", "return x + nothing")
    replace_once(repository / "vector_add" / "triton_kernel.py", "return x + y", "return x + nothing")
    found = CellResources.of(cells, "90", 2, repository.parent)
    assert found.kernels == {}
    assert found.errors.keys() == {"vector_add-cuda-float32", "vector_add-triton-float32"}
    none = CellResources({}, {})
    said = "\n".join(lines([], found, none))
    assert re.findall(r"^does not compile: vector_add-(\w+)-float32: ", said, re.M) == ["cuda", "triton"]
    assert sum(line.startswith("not compared, the base") for line in lines([], none, found)) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--base=nothing"], "--base nothing: "),
        (["--base=--output=file"], "does not begin with a hyphen"),
        (["--against=nowhere.json"], "--against nowhere.json: FileNotFoundError"),
        (["--op=nothing"], "--op nothing: there are"),
        (["--base=HEAD", "--against=nowhere.json"], "not allowed with"),
    ],
)
def test_what_is_not_there_to_compare_with_is_told(
    options: list[str], said: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources, "implementations", lambda: repository)
    with pytest.raises(SystemExit) as exit_code:
        main(["resources", *OPTIONS, *options])
    assert exit_code.value.code == 2
    assert said in capsys.readouterr().err


def test_figures_of_another_architecture_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "kernels.json"
    written.write_text(json.dumps({"arch": "80", "compilers": {}, "kernels": {}}))
    with pytest.raises(SystemExit):
        main(["resources", *OPTIONS, f"--against={written}"])
    assert "it is of --arch 80" in capsys.readouterr().err
