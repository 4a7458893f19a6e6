"""Both sides of comparisons are recorded when the code runs, without any further call."""

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.backends.python_source import SizeComparison
from fourfold.candidates.load import modules
from fourfold.inputs.constants import file_constants
from fourfold.inputs.large_cases import PLACES, equal_at
from fourfold.instruments.size_comparisons import Compared

SOURCE = """
    import torch
    import triton

    CALLS = []
    TABLE = {"rows": [3, 40]}

    class Config:
        most = 77

        @property
        def counted(self):
            CALLS.append("property")
            return 5

    config = Config()

    def limit(x):
        CALLS.append("limit")
        return 1000 + len(CALLS)

    def sizes(x):
        if x.numel() * x.element_size() > TABLE["rows"][1]:
            return 1
        elif x.shape[0] <= config.most:
            return 2

    def calls(x):
        return 1 if x.shape[-1] < limit(x) else 2

    def chained(x):
        if 0 < len(x) < limit(x) + x.shape[1] and x.dtype.itemsize == 4:
            pass

    def again(x):
        rows = x.shape[0]
        while rows > 2:
            rows = rows - 1

    def changed(x):
        n = x.numel()
        n = 0 if n > 11 else -n

    def unknown(x):
        if config.counted == 5 or x.sum() > 3 or x.dtype == torch.float16 or CALLS.pop() == 2:
            pass

    @triton.jit
    def kernel(x_ptr, n):
        if n > 100:
            pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "compares.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def sides(file: Path, name: str) -> dict[str, tuple[float, float]]:
    """Return the sides of a function's comparisons, by the text of each."""
    comparisons = file_constants(file, name).comparisons
    function: Callable[..., Any] = getattr(modules.load_file(file), name)
    with Compared(comparisons) as compared:
        function(torch.zeros(3, 4))
    return {f"{comparisons[n].left} ? {comparisons[n].right}": both for n, both in compared.sides.items()}


def test_sizes_tables_and_attributes_are_evaluated(file: Path) -> None:
    found = sides(file, "sizes")
    assert found == {"x.numel() * x.element_size() ? TABLE['rows'][1]": (48, 40)}  # and the other is not reached


def test_a_function_that_is_compared_is_called_once(file: Path) -> None:
    assert sides(file, "calls") == {"x.shape[-1] ? limit(x)": (4, 1001)}
    assert modules.load_file(file).CALLS == ["limit"]


def test_each_pair_of_a_chain_and_each_part_of_a_condition_is_evaluated(file: Path) -> None:
    found = sides(file, "chained")
    assert found == {"0 ? len(x)": (0, 3), "len(x) ? limit(x) + x.shape[1]": (3, 1005), "x.dtype.itemsize ? 4": (4, 4)}


@pytest.mark.parametrize(("name", "expected"), [("again", {"rows ? 2": (3, 2)}), ("changed", {"n ? 11": (12, 11)})])
def test_what_counts_is_the_first_time_and_before_the_statement(name: str, expected: Any, file: Path) -> None:
    assert sides(file, name) == expected


def test_what_could_change_something_is_not_evaluated(file: Path) -> None:
    modules.load_file(file).CALLS[:] = [9]
    assert sides(file, "unknown") == {}
    assert modules.load_file(file).CALLS == [9, "property"]  # in the function's own evaluation, which ends there


def test_comparisons_within_kernels_are_left_out(file: Path) -> None:
    assert file_constants(file, "kernel").comparisons == ()


def test_a_trace_function_of_somebody_else_stays(file: Path) -> None:
    before, own = sys.gettrace(), lambda *_: None
    sys.settrace(own)
    try:
        assert sides(file, "sizes") == {}
        assert sys.gettrace() is own
    finally:
        sys.settrace(before)


def test_lines_are_those_of_statements(file: Path) -> None:
    (comparison,) = file_constants(file, "calls").comparisons
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "< limit(x)" in text)
    assert comparison == SizeComparison(os.path.realpath(file), line, "x.shape[-1]", "limit(x)")


def test_sides_meet_where_a_line_through_two_sizes_says() -> None:
    base, other = {"rows": 2, "cols": 3}, {"rows": 2, "cols": 13}
    # 4 rows cols against 500; cols against a number that grows as well; two constants; a size beyond all tried ones.
    here = {0: (24.0, 500.0), 1: (3.0, 10.0), 2: (3.0, 4.0), 3: (3.0, 1e12)}
    there = {0: (104.0, 500.0), 1: (13.0, 15.0), 2: (3.0, 4.0), 3: (13.0, 1e12)}
    assert list(equal_at([(base, here), (other, there)])) == [(0, "cols", 62), (1, "cols", 17)]
    assert PLACES > 62
