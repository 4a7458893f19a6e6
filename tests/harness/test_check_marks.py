"""A test that is marked with a check takes the check's dtypes, devices and number of examples from the table."""

import itertools
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import warm

from fourfold.backends import BACKENDS
from fourfold.checks import catalogue
from fourfold.checks.catalogue import Check, check_named
from fourfold.checks.search import Search
from fourfold.engine.cells import Cell
from fourfold.engine.profiles import OWN_OPERATIONS
from fourfold.numerics.dtypes import DTYPES
from fourfold.pytest_plugin.hooks import (
    beyond_default,
    cells_for_check,
    default_cells,
    examples,
    spread,
    spread_outputs,
)

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "tests" / "operations"

SAMPLED = """
import pytest

@pytest.mark.full(but=2)
@pytest.mark.parametrize("n", range(5))
def test_sampled(n):
    pass
"""
DRAWS = """
import hypothesis, pytest
from hypothesis import strategies as st

@pytest.mark.full
def test_full():
    pass

@pytest.mark.full(but=2)
@pytest.mark.parametrize("n", range(5))
def test_sampled(n):
    pass

@hypothesis.given(st.integers())
def test_draws(n):
    with open("drawn.txt", "a") as file:
        print(n, file=file)
"""


def cells(*dtypes: str) -> list[Cell]:
    return [Cell("softmax", "triton", dtype) for dtype in dtypes]


def run(search: Search) -> None:
    raise NotImplementedError


ALL = Check(name="all", run=run)
ONE = Check(name="one", run=run, only="float64")
SOME = Check(name="some", run=run, dtypes=("float16", "float32"))
MOSTLY = Check(name="mostly", run=run, dtypes=("float16", "float32"), all_nightly=True)


@pytest.mark.parametrize(
    ("check", "selected", "expected"),
    [
        (ALL, tuple(DTYPES), tuple(DTYPES)),
        (ONE, tuple(DTYPES), ("float64",)),
        (ONE, ("float16",), ()),
        (SOME, tuple(DTYPES), ("float16", "float32")),
        (SOME, ("bfloat16",), ()),
        (MOSTLY, tuple(DTYPES), ("float16", "float32")),
        (MOSTLY, ("bfloat16", "float32"), ("float32",)),
        (MOSTLY, ("bfloat16", "float64"), ("bfloat16", "float64")),
    ],
)
def test_a_plain_run_looks_at_the_dtypes_of_a_check(
    check: Check, selected: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert cells_for_check(cells(*selected), check, nightly=False) == cells(*expected)


@pytest.mark.parametrize(("check", "most"), [(ALL, 4), (ONE, 1), (SOME, 2), (MOSTLY, 4)])
def test_the_nightly_profile_looks_at_all_dtypes_where_a_check_says_so(check: Check, most: int) -> None:
    assert len(cells_for_check(cells(*DTYPES), check, nightly=True)) == most


def test_a_backend_without_the_dtypes_of_a_check_is_looked_at_in_its_own() -> None:
    others = [Cell("softmax", "cuda", "bfloat16")]
    assert cells_for_check(cells("float32", "float64") + others, MOSTLY, nightly=False) == cells("float32") + others


def test_a_plain_run_takes_own_cells_in_few_dtypes_and_candidates_in_all() -> None:
    own, candidates = cells(*DTYPES), [Cell("softmax", "candidate", dtype) for dtype in DTYPES]
    assert default_cells(own + candidates, ("float32",)) == cells("float32") + candidates
    assert default_cells(own, ()) == own
    assert default_cells(cells("float16", "bfloat16"), ("float32",)) == cells("float16", "bfloat16")


def test_a_plain_run_takes_one_backend_of_some_operations() -> None:
    operations = [f"operation_{n}" for n in range(20 * OWN_OPERATIONS)]
    backends = ["torch", "triton", "cuda"]
    every = [Cell(op, backend, dtype) for op in operations for backend in backends for dtype in ("float16", "float32")]
    chosen = spread(every, "test_a", ())
    taken = Counter((cell.operation, cell.dtype) for cell in chosen)
    assert set(taken.values()) == {1}
    assert 10 <= len({cell.operation for cell in chosen}) == len(chosen) / 2 <= 30
    assert {cell.backend for cell in chosen} == set(backends)
    assert spread(every, "test_b", ()) != chosen
    left_out = chosen[0].operation
    assert spread([cell for cell in every if cell.operation != left_out], "test_a", ()) == [
        cell for cell in chosen if cell.operation != left_out
    ]
    assert [c for c in spread(every, "test_a", ("float32",)) if c.dtype == "float32"] == [
        c for c in every if c.dtype == "float32"
    ]


def test_a_plain_run_takes_one_output_of_an_operation() -> None:
    every = [
        (Cell(f"operation_{n}", "cuda", dtype), output)
        for n in range(30)
        for dtype in ("float16", "float32")
        for output in "yh"
    ]
    chosen = spread_outputs(every, "test_a", ())
    assert [*Counter((cell.operation, cell.dtype) for cell, _ in chosen).values()] == [1] * 60
    assert {output for _, output in chosen} == {"y", "h"}
    assert spread_outputs(every, "test_b", ()) != chosen
    assert spread_outputs(every[:20], "test_a", ()) == [pair for pair in chosen if pair in every[:20]]
    in_float32 = [pair for pair in every if pair[0].dtype == "float32"]
    assert [p for p in spread_outputs(every, "test_a", ("float32",)) if p in in_float32] == in_float32


@pytest.mark.parametrize("operation", [f"operation_{n}" for n in range(9)])
def test_a_plain_run_takes_an_only_operation(operation: str) -> None:
    assert spread([Cell(operation, "cuda", "float32")], "test_a", ()) == [Cell(operation, "cuda", "float32")]


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("arguments", "backends"),
    [
        (["tests/operations/test_threads.py"], 1),
        (["tests/operations/test_forward.py"], 3),
        (["tests/operations/test_threads.py", "--op=softmax"], 3),
        (["tests/operations/test_threads.py", "--hypothesis-profile=full"], 3),
        (
            [f"tests/operations/test_threads.py::test_threads_do_not_matter[softmax-{b}-float32]" for b in BACKENDS],
            3,
        ),
    ],
)
def test_all_backends_are_taken_if_any_is_asked_for(arguments: list[str], backends: int) -> None:
    command = ["pytest", *arguments, "--device=cpu", "--collect-only", "-q"]
    done = warm.run(*command, cwd=ROOT, env=os.environ)
    taken = Counter(operation for operation, _ in set(re.findall(r"\[(\w+)-(\w+)-float32\]", done.stdout)))
    assert set(taken.values()) == {backends}


def test_tests_of_one_operation_and_dtype_are_neighbours() -> None:
    done = warm.run(
        *("pytest", "tests/operations/test_forward.py", "tests/operations/test_memory.py", "--collect-only", "-q"),
        *("--device=cpu", "--op=softmax", "--op=giou", "--backend=torch", "--backend=cuda"),
        cwd=ROOT,
        env=os.environ,
    )
    keys = re.findall(r"\[(\w+)-\w+-(\w+)\]", done.stdout)
    assert len(set(keys)) == 4  # of giou and softmax in two dtypes
    assert [key for key, _ in itertools.groupby(keys)] == list(dict.fromkeys(keys))


@pytest.mark.parametrize(
    ("number", "most", "kept"), [(5, 1, [2]), (5, 2, [1, 3]), (6, 3, [1, 3, 5]), (2, 3, [0, 1]), (9, 0, []), (0, 2, [])]
)
def test_the_default_profile_spreads_the_parameter_sets_that_it_keeps(number: int, most: int, kept: list[int]) -> None:
    class Item:
        def __init__(self, test: str, place: int, *marks: pytest.Mark) -> None:
            self.nodeid, self.marks = f"{test}[{place}]", marks

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [mark for mark in self.marks if mark.name == name]

    mark = pytest.mark.full(but=most).mark if most else pytest.mark.full.mark
    others = [Item("test_others", place) for place in range(3)]
    items = [*others, *(Item("test_some", place, mark) for place in range(number))]
    gone = beyond_default(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items if item not in gone and item not in others] == [
        f"test_some[{place}]" for place in kept
    ]
    assert not set(gone) & set(others)


def test_the_default_profile_takes_its_sample_of_the_tests_that_an_expression_selects(tmp_path: Path) -> None:
    tests = tmp_path / "test_sampled.py"
    tests.write_text(SAMPLED)
    done = warm.run("pytest", "-p", "fourfold", tests, "-k", "[0] or [4]", cwd=tmp_path, env=os.environ)
    assert "2 passed, 3 deselected" in done.stdout


@pytest.mark.full
def test_the_default_profile_draws_the_same_cases_in_every_run_and_leaves_marked_tests_out(tmp_path: Path) -> None:
    tests, drawn = tmp_path / "test_drawn.py", tmp_path / "drawn.txt"
    tests.write_text(DRAWS)

    def drawn_by(*options: str) -> tuple[str, str]:
        drawn.unlink(missing_ok=True)
        done = warm.run("pytest", "-p", "fourfold", tests, *options, cwd=tmp_path, env=os.environ)
        return done.stdout, drawn.read_text()

    (first, cases), (_, again) = drawn_by(), drawn_by()
    assert "3 passed, 4 deselected" in first
    assert cases == again
    output, others = drawn_by("--hypothesis-profile=full")
    assert "7 passed" in output
    assert others != cases


def test_each_check_of_the_table_has_one_test_in_the_operations_folder() -> None:
    marks = Counter(
        name
        for path in OPERATIONS.glob("test_*.py")
        for name in re.findall(r'\b(?:mark\.check|check_test)\("([^"]+)"\)', path.read_text())
    )
    assert marks == Counter(
        check.name
        for check in (
            *catalogue.STANDARD,
            catalogue.LAW,
            catalogue.CONFIGURATION,
            catalogue.TOGETHER,
            catalogue.BAD_INPUT,
        )
    )


def test_a_check_is_known_by_its_name() -> None:
    assert check_named("saved tensors").examples == 3


@pytest.mark.check("saved tensors")
def test_a_marked_test_runs_no_more_examples_than_its_check(search: Search, pytestconfig: pytest.Config) -> None:
    assert search.examples == min(3, examples(pytestconfig))
