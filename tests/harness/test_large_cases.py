"""Large cases: the constants of a source, the sizes that come from them, their cost, and their report."""

import math
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from declared_operations import DECLARED
from hypothesis.errors import Unsatisfiable
from subjects import subject_of

import fourfold
from fourfold import Claims, tensor
from fourfold.checks.records import operations
from fourfold.checks.search import Search
from fourfold.declaration.reductions import law_of
from fourfold.inputs.constants import Constant, Constants, file_constants
from fourfold.inputs.large_cases import LargeCases
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.claims import NO_CLAIMS
from fourfold.operations.outcomes import Unsuitable

FLOAT32 = DTYPES["float32"]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_dot_", ".")).write_text(textwrap.dedent(text))
    return folder / next(iter(files)).replace("_dot_", ".")


def sizes(found: Constants) -> dict[int, int]:
    return {int(constant.value): constant.line for constant in found.sizes}


def test_constants_are_those_that_the_implementation_reaches(tmp_path: Path) -> None:
    kernel_py = """
        from beside import helper
        TILE = 1 << 12
        ROWS = TILE // 64
        UNUSED = 999

        def kernel(x):
            "A docstring of 555."
            if x.shape[-1] == 777:
                return helper(x, num_warps=16)
            return launch(x, BLOCK=TILE, ROWS=ROWS)

        def launch(x, BLOCK, ROWS):
            return x.to(tl.int16)

        def another(x):
            return x[:333]
    """
    beside = "def helper(x, LIMIT=65535):\n    return x\n\ndef other(x):\n    return 444\n"
    file = written(tmp_path, kernel_dot_py=kernel_py, beside_dot_py=beside)
    found = file_constants(file, "kernel")
    assert sizes(found) == {12: 3, 64: 4, 777: 9, 4096: 3, 32768: 14, 65535: 1}
    assert {constant.file for constant in found.sizes} == {"kernel.py", "beside.py"}


def test_constants_of_a_file_are_all_where_the_function_is_not_there(tmp_path: Path) -> None:
    assert sizes(file_constants(written(tmp_path, of_dot_py="A = 123\n"), "elsewhere")) == {123: 1}


def test_constants_of_cuda_are_those_of_the_file_and_its_headers(tmp_path: Path) -> None:
    of_cu = """\
        #include "tile.cuh"
        // 888 in a comment
        constexpr int MANY = 1 << 13, HEX = 0x200;
        __global__ void kernel(const float* x, int n) {
            unsigned short count = 0;
            if (n > 5000 && x[0] > 88.5f) count = 2 * 300u;
        }
    """
    file = written(tmp_path, of_dot_cu=of_cu, tile_dot_cuh="#define TILE 48\n")
    found = file_constants(file)
    assert sizes(found) == {13: 3, 48: 1, 300: 6, 512: 3, 600: 6, 5000: 6, 8192: 3, 65536: 5}
    assert [constant.value for constant in found.values] == [88.5, 5000.0]


def test_a_python_file_has_the_constants_of_its_cuda_source(tmp_path: Path) -> None:
    of_py = 'SOURCE = "kernel.cu"\n\ndef run(x):\n    return load(SOURCE)\n'
    assert sizes(file_constants(written(tmp_path, of_dot_py=of_py, kernel_dot_cu="int n = 321;\n"), "run")) == {321: 1}


def test_the_second_and_third_axis_of_a_grid_count_as_their_limit(tmp_path: Path) -> None:
    of_py = """\
        def kernel(x):
            row = tl.program_id(1) + tl.num_programs(axis=2)

        def along_x(x):
            return tl.program_id(0) + tl.program_id(axis=0) + tl.program_id(x)
    """
    file = written(tmp_path, of_dot_py=of_py, of_dot_cu="int row = blockIdx.y;", x_dot_cu="int row = blockIdx.x;")
    assert sizes(file_constants(file, "kernel")) == {65535: 2}
    assert sizes(file_constants(file, "along_x")) == {}
    assert sizes(file_constants(tmp_path / "of.cu")) == {65535: 1}
    assert sizes(file_constants(tmp_path / "x.cu")) == {}


def test_a_source_that_cannot_be_read_has_no_constants(tmp_path: Path) -> None:
    assert file_constants(written(tmp_path, of_dot_py="def broken(:\n"), "broken") == Constants()


def test_integers_of_a_fixed_range_lie_at_and_next_to_constants() -> None:
    @fourfold.operation(x=tensor("rows"), table=tensor("4096"), at=tensor("rows", dtype="int64", low=8, high=4096))
    def looked_up(x, table, at):
        return x + table[at]

    constants = Constants(sizes=(Constant(8, "of.py", 1), Constant(512, "of.py", 3)))
    case = dict(LargeCases(looked_up, NO_CLAIMS, FLOAT32, constants).cases(25, False))["numbers_of_the_source"]
    assert {8, 9, 511, 512, 513} <= set(case["at"].tolist())
    assert case["at"].min() >= 8


def test_segments_past_a_constant_have_rows() -> None:
    constants = Constants(sizes=(Constant(4096, "of.py", 3),))
    large = LargeCases(DECLARED["ragged_mean"], NO_CLAIMS, FLOAT32, constants)
    last = [np.flatnonzero(case["counts"]).max(initial=-1) for _, case in large.cases(25, False)]
    assert 4096 in last


@pytest.mark.parametrize("name", operations())
def test_sizes_are_those_around_a_constant_and_at_its_multiples(name: str) -> None:
    operation = operations()[name]
    constants = Constants(sizes=(Constant(321, "of.py", 3),))
    large = LargeCases(operation, NO_CLAIMS, FLOAT32, constants)
    assert operation.sized is not None
    for axis in operation.sized.axes:
        taken = {chosen.sizes[axis] for chosen in large.choose(25, False)}
        wanted = (320, 321, 322, 643)
        assert {size for size in wanted if operation.sized.allows({**operation.sized.axes, axis: size})} <= taken
    for made, case in large.cases(25, False):
        assert case.grad_output.size, made
        assert all(array.size for array in case.inputs.values())
    assert large.constants_line(25) == "sizes from constants of of.py: 321 (line 3)"


def test_other_axes_are_short_past_a_constant_above_two_bytes(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("def kernel(x):\n    return 2 * x if x.shape[-1] <= 100_000 else x\n")
    constants = file_constants(source, "kernel")
    assert {constant.value for constant in constants.sizes} >= {100_000}
    large = LargeCases(operations()["softmax"], NO_CLAIMS, FLOAT32, constants)
    assert 100_001 in {chosen.sizes["cols"] for chosen in large.choose(25, False)}


def test_large_cases_lie_within_the_claims() -> None:
    softmax = operations()["softmax"]
    constants = Constants(sizes=(Constant(64, "of.py", 1), Constant(2000, "of.py", 2)))
    claims = Claims(sizes={"cols": 64}, contiguous=True)
    cases = dict(LargeCases(claims.restrict(softmax), claims, FLOAT32, constants).cases(25, True))
    cols = {case["x"].shape[-1] for case in cases.values()}
    assert cols == {64, 192}
    few = Claims(sizes={"cols": (1, 1024)})
    cases = dict(LargeCases(few.restrict(softmax), few, FLOAT32, constants).cases(25, True))
    assert max(case["x"].shape[-1] for case in cases.values()) <= 1024
    rows = Claims(sizes={"...": (0, 65_535)})
    cases = dict(LargeCases(rows.restrict(softmax), rows, FLOAT32, constants).cases(25, True))
    assert max(math.prod(case["x"].shape[:-1]) for case in cases.values()) in range(1024, 65_536)


def test_a_constant_past_the_budget_is_asked_once_and_in_one_dtype() -> None:
    softmax = operations()["softmax"]
    constants = Constants(sizes=(Constant(60_000, "of.py", 1),))
    rows = "rows_60001"
    assert rows in [c.name for c in LargeCases(softmax, NO_CLAIMS, FLOAT32, constants).choose(25, True)]
    assert rows not in [c.name for c in LargeCases(softmax, NO_CLAIMS, FLOAT32, constants).choose(25, False)]
    assert rows not in [c.name for c in LargeCases(softmax, NO_CLAIMS, DTYPES["float16"], constants).choose(25, True)]
    nightly = LargeCases(softmax, NO_CLAIMS, FLOAT32, Constants()).choose(1000, False)
    assert {"rows_65537", "cols_65537", "rows_2051", "rows_257_cols_300"} <= {chosen.name for chosen in nightly}


def test_values_of_comparisons_are_among_the_numbers_of_a_case() -> None:
    softmax = operations()["softmax"]
    constants = Constants(values=(Constant(88.5, "of.py", 1),))
    case = dict(LargeCases(softmax, NO_CLAIMS, FLOAT32, constants).cases(25, False))["numbers_of_the_source"]
    assert {88.5, -88.5} <= set(case["x"].ravel().tolist())
    assert np.nextafter(np.float32(88.5), np.float32(np.inf)) in case["x"]


# ---- declared operations


@fourfold.operation(x=tensor("rows cols"), sizes={"cols": (1, 4096)}, reduction="mean over rows")
def mean_square(x):
    return x.square().sum(-1).mean()


@fourfold.operation(x=tensor("... cols"))
def pairs_of_columns(x):
    return (x[..., :, None] * x[..., None, :]).sum(-1)


def test_declared_operations_have_large_cases_that_are_affordable() -> None:
    constants = Constants(sizes=(Constant(600, "of.py", 1), Constant(5000, "of.py", 2)))
    taken = LargeCases(mean_square, NO_CLAIMS, FLOAT32, constants).choose(25, False)
    assert {"rows_257_cols_300", "cols_601", "rows_5001"} <= {chosen.name for chosen in taken}
    assert max(chosen.sizes["cols"] for chosen in taken) <= 4096
    # With this many columns the products of all pairs do not fit.
    few = LargeCases(pairs_of_columns, NO_CLAIMS, FLOAT32, constants).choose(1000, True)
    assert max(chosen.sizes["cols"] for chosen in few) < 601
    assert max(chosen.sizes["..."] for chosen in few) > 2048


def skips_a_number_of_rows(x):
    if len(x) == 4321:
        x = x[:100]
    return x.square().sum(-1).mean()


def wrong_at_a_value(x):
    return torch.where(x.abs() == 12.75, 0, x).square().sum(-1).mean()


def test_a_verdict_rejects_what_is_wrong_at_a_constant() -> None:
    options = {"only": ["forward"], "dtypes": ["float32"], "device": "cpu", "seed": 1}
    assert not fourfold.verify(wrong_at_a_value, mean_square, **options)
    assert fourfold.verify(lambda x: x.square().sum(-1).mean(), mean_square, **options)


def test_a_verdict_tells_the_constants() -> None:
    verdict = fourfold.verify(skips_a_number_of_rows, mean_square, only=["forward"], dtypes=["float32"], device="cpu")
    assert not verdict
    line = skips_a_number_of_rows.__code__.co_firstlineno + 1
    expected = f"sizes from constants of test_large_cases.py: 100 (line {line + 1}), 4321 (line {line})"
    assert expected in str(verdict).splitlines()


# ---- the law of a reduction


def test_a_mean_is_checked_by_its_law_and_another_count_is_rejected() -> None:
    (law,) = mean_square.laws
    assert law.__name__ == "a_repeated_batch_has_the_same_mean"
    name = "law: a repeated batch has the same mean"
    options = {"only": [name], "dtypes": ["float32"], "device": "cpu"}
    assert fourfold.verify(lambda x: x.square().sum(-1).mean(), mean_square, **options)
    assert not fourfold.verify(lambda x: x.square().sum() / (len(x) + 1), mean_square, **options)


@fourfold.operation(x=tensor("rows cols"), weight=tensor("cols"), reduction="sum over rows")
def weighted_sum(x, weight):
    return (x * weight).sum()


def test_a_sum_grows_with_its_batch_and_the_gradient_of_what_is_shared_too() -> None:
    options = {"dtypes": ["float32"], "device": "cpu"}
    options["only"] = ["law: a repeated batch has so many times the sum"]
    assert fourfold.verify(lambda x, weight: (x * weight).sum(), weighted_sum, **options)
    assert not fourfold.verify(lambda x, weight: (x * weight).mean(), weighted_sum, **options)


def test_offsets_are_continued_over_the_repetitions() -> None:
    ragged = operations()["giou_loss_ragged"]
    assert law_of(ragged) is not None
    case = ragged.examples["pred_and_target_strided"](FLOAT32)
    seen = []

    class Seen(Exception):
        pass

    def evaluate(case, **options):
        seen.append(case)
        if len(seen) == 2:
            raise Seen

    with pytest.raises(Seen):
        list(law_of(ragged)(evaluate, case, FLOAT32))
    assert seen[1]["offsets"].tolist() == [0, 2, 2, 5, 6, 8, 8, 11, 12, 14, 14, 17, 18]
    assert seen[1]["pred"].shape[0] == 12
    assert seen[1]["target"].shape[0] == 18


def test_all_axes_are_past_a_constant_together() -> None:
    large = LargeCases(operations()["matmul"], NO_CLAIMS, FLOAT32, Constants(sizes=(Constant(64, "of.py", 3),)))
    assert any(min(chosen.sizes[axis] for axis in "mnk") > 64 for chosen in large.choose(25, False))


def test_two_constants_meet_on_two_axes_in_both_ways() -> None:
    constants = Constants(sizes=(Constant(48, "of.py", 3), Constant(130, "of.py", 4)))
    large = LargeCases(operations()["softmax"], NO_CLAIMS, FLOAT32, constants)
    met = {tuple(chosen.sizes.values()) for chosen in large.choose(25, False)}
    assert {(49, 131), (131, 49)} <= met


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("dtype", "foreign", "long"), [("float16", True, False), ("float32", True, True), ("float16", False, True)]
)
def test_a_foreign_kernel_gets_long_named_cases_in_its_first_dtype(dtype: str, foreign: bool, long: bool) -> None:
    softmax = operations()["softmax"]
    large = LargeCases(softmax, NO_CLAIMS, DTYPES[dtype])
    subject = subject_of(softmax, torch.softmax, dtype, foreign=foreign, large=large)
    sizes = []

    def body(case: Case) -> None:
        sizes.append(case.inputs["x"].size)
        raise Unsuitable

    with pytest.raises(Unsatisfiable):
        Search(examples=1).cases(subject, "sizes", body)
    assert (max(sizes) > 65_536) == long
    assert max(sizes) >= 16_384
    of_offsets = softmax.examples_for_offsets(DTYPES[dtype], subject.most_named).values()
    assert (max(case.elements for case in of_offsets) > 65_536) == long
