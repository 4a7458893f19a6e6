"""Errors are measured in ulp, beside torch and other libraries on the same cases, and the less exact come first."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import warm

from fourfold import backends
from fourfold.checks.records import operations
from fourfold.cli.accuracy import lines
from fourfold.engine.cells import Selection
from fourfold.numerics.bounded import Bounded, OneOf
from fourfold.numerics.dtypes import DTYPES
from fourfold.performance import accuracy
from fourfold.performance.accuracy import Accuracy, Errors, MeasuredCases, errors_in_ulp, measure, measure_in_children
from fourfold.processes.child import Child
from fourfold.processes.messages import Connection

ROOT = Path(__file__).parents[2]
RIGHT = "import torch\n\n\ndef add(x, y):\n    return x + y\n"
# The output is too small by a part in 1024. Its gradients are exact.
IMPRECISE = RIGHT.replace("x + y", "x + y - ((x + y) / 1024).detach()")


def exactly(*numbers: float, dtype: str = "float32") -> Bounded:
    return Bounded.exact(np.array(numbers, DTYPES[dtype].wide), DTYPES[dtype].arithmetic)


def measure_file(folder: Path, text: str, dtype: str = "float32", op: str = "vector_add", seed: int = 0) -> Accuracy:
    """Return the accuracy of a candidate's file."""
    file = folder / f"kernel_{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    selection = Selection.of(operations(), [f"{op}={file}:add"], [op], [], [dtype])

    def start(connection: Connection, progress: MeasuredCases) -> Child:
        def work() -> None:
            for found in measure(selection, "cpu", 5, seed, progress, connection.send):
                connection.send(found)

        return Child.fork(work, printed=True)

    return measure_in_children(start, lambda line: None)


# ---- the unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1.0, 1.5, -3.0, 0.0])
def test_the_next_number_is_one_ulp_away(dtype: str, number: float) -> None:
    of = DTYPES[dtype]
    one = torch.tensor([number], dtype=of.torch)
    after = torch.nextafter(one, torch.tensor([math.copysign(math.inf, number)], dtype=of.torch))
    for neighbour, ulps in ((one, 0.0), (after, 1.0)):
        assert errors_in_ulp(of.array(neighbour), exactly(number, dtype=dtype), of).tolist() == [ulps]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_costs_half_an_ulp_at_the_most_and_nearly_that(dtype: str) -> None:
    of, exact = DTYPES[dtype], np.random.default_rng(1).standard_normal(4000) * np.logspace(-3, 3, 4000)
    rounded = of.array(torch.from_numpy(exact).to(of.torch))
    found = errors_in_ulp(rounded, exactly(*exact, dtype=dtype), of)
    assert 0.49 < found.max() <= 0.5
    assert 0.23 < found.mean() < 0.27


def test_what_has_no_exact_value_is_not_counted_and_what_is_missing_counts_infinitely() -> None:
    expected = exactly(math.nan, math.inf, 1e39, 1.0, 2.0, 3.0)
    expected.error[4] = math.inf
    actual = np.array([0.0, 0.0, math.inf, math.nan, 7.0, math.inf])
    assert errors_in_ulp(actual, expected, DTYPES["float32"]).tolist() == [math.inf, math.inf]


def test_of_several_right_results_the_nearest_counts() -> None:
    chosen = OneOf(np.array([1.0, 2.0]), DTYPES["float32"].arithmetic, lambda actual: actual[::1].copy())
    assert errors_in_ulp(np.array([2.0, 1.0]), chosen, DTYPES["float32"]).tolist() == [0.0, 0.0]


# ---- the table


def test_errors_of_cases_add_up_and_the_case_of_the_largest_is_kept() -> None:
    both = Errors.of(np.array([0.5, 3.0]), "first") + Errors.of(np.array([1.0]), "second") + Errors()
    assert (both.elements, both.largest, both.case) == (3, 3.0, "first")
    assert both.mean == pytest.approx(1.5)
    assert both.bits_lost == pytest.approx((math.log2(1.5) + 2 + 1) / 3)


def test_a_kernel_is_behind_by_its_largest_error_or_by_its_mean() -> None:
    small, large = Errors.of(np.array([0.5, 0.1]), ""), Errors.of(np.array([4.0, 0.1]), "")
    everywhere = Errors.of(np.array([0.5, 0.5]), "")
    assert large.behind(small) == pytest.approx(3.0)
    assert 0 < everywhere.behind(small) < 1
    assert small.behind(small) == 0
    # Unavoidable rounding is no advantage.
    assert Errors.of(np.array([0.4, 0.1]), "").behind(Errors.of(np.array([0.2, 0.1]), "")) < 0.3
    missing = Errors.of(np.array([math.inf]), "")
    assert missing.behind(small) == math.inf
    assert missing.behind(missing) == 0


# ---- what is measured


def test_an_imprecise_kernel_has_larger_errors_and_comes_first(tmp_path: Path) -> None:
    right, wrong = measure_file(tmp_path, RIGHT), measure_file(tmp_path, IMPRECISE)
    (of_right, *_), (first, *others) = right.rows(), wrong.rows()
    assert not any(row.is_behind for row in right.rows())
    assert of_right.errors["candidate"].largest <= 0.5
    assert (first.result, first.kernel) == ("output", "candidate")
    assert first.is_behind
    # A float32 has 24 digits, and the last 14 of them are wrong.
    assert 2**13 <= first.errors["candidate"].largest <= 2**14
    assert first.errors["torch"].largest <= 0.5
    assert {row.result for row in others} == {"gradient of x", "gradient of y"}
    table = list(lines(wrong))
    assert "candidate" in table[2]
    assert "output" in table[2]
    assert right.is_complete
    assert table[-1] == "1 of 3 results are less exact than torch's, 2 as exact or more"


def test_a_seed_gives_the_same_figures_and_another_one_others(tmp_path: Path) -> None:
    first, again, other = (measure_file(tmp_path, IMPRECISE, seed=seed).rows() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_cases_that_a_kernel_refuses_are_told_and_torch_is_compared_in_the_others(tmp_path: Path) -> None:
    refusing = IMPRECISE.replace("    return", "    if x.dim() > 1: raise ValueError('no rows')\n    return")
    found = measure_file(tmp_path, refusing)
    (first, *_) = found.rows()
    assert first.errors["candidate"].elements < first.errors["torch"].elements
    ((said, count),) = found.not_measured.items()
    assert "ValueError: no rows" in said
    assert count > 1
    assert any(line.startswith("not measured: vector_add-candidate-float32") for line in lines(found))
    # torch is exact only in the cases that the candidate refuses.
    (result,) = (each for each in found.results.values() if each.result == "output")
    answered = result.errors["candidate"]
    result.errors["torch"] = {
        case: answered.get(case, Errors.of(np.array([0.0]), case)) for case in result.errors["torch"]
    }
    assert result.behind("candidate", "torch") == result.behind("torch", "candidate") == 0


def test_a_result_of_another_shape_is_told(tmp_path: Path) -> None:
    found = measure_file(tmp_path, RIGHT.replace("x + y", "(x + y).detach().reshape(-1)[:0]"))
    assert any("another shape" in said for said in found.not_measured)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", "illegal memory access"),
        ("__import__('os').abort()", "the process has died of SIGABRT"),
    ],
)
def test_a_contender_that_ends_the_process_or_loses_the_gpu_takes_no_other_results_with_it(
    tmp_path: Path, ending: str, said: str
) -> None:
    right = {row.result: row for row in measure_file(tmp_path, RIGHT).rows()}
    found = measure_file(tmp_path, RIGHT.replace("    return", f"    if x.numel() > 1000: {ending}\n    return"))
    ((reason, count),) = found.not_measured.items()
    assert said in reason
    assert reason.startswith("vector_add-candidate-float32: ")
    assert count == 1
    assert not found.is_complete
    for row in found.rows():
        # torch has all cases, the candidate those before the one that it failed in.
        assert row.errors["torch"] == right[row.result].errors["torch"]
        assert 0 < row.errors["candidate"].elements < row.errors["torch"].elements


def test_a_process_that_dies_before_any_call_ends_the_run() -> None:
    found = measure_in_children(lambda connection, progress: Child.fork(os.abort, printed=True), lambda line: None)
    assert [*found.not_measured] == ["the process has died of SIGABRT"]
    assert not found.is_complete


def test_libraries_that_are_installed_stand_beside_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a GPU")

    def without() -> Callable[..., torch.Tensor]:
        raise ImportError("no such module")

    others = {
        "library": lambda: lambda x, y: (x.double() + y.double()).bfloat16().to(x.dtype),
        "liger": lambda: fails,
        "quack": without,
    }
    monkeypatch.setattr(accuracy, "peers", lambda operation: others)
    found = measure_file(tmp_path, RIGHT)
    (row,) = (row for row in found.rows() if row.result == "output")
    assert row.errors["library"].largest > 1000 * row.errors["candidate"].largest
    assert not row.is_behind
    assert {said.split(": ", 1)[1] for said in found.not_measured} == {
        "RuntimeError: needs a GPU",
        "ImportError: no such module",
    }


def test_indices_have_no_rounding_errors(tmp_path: Path) -> None:
    text = "import torch\n\n\ndef add(x, k, largest=True):\n    return tuple(torch.topk(x, k, -1, largest))\n"
    found = measure_file(tmp_path, text, op="topk")
    assert {(row.operation, row.result) for row in found.rows()} == {
        ("topk.values", "output"),
        ("topk.values", "gradient of x"),
    }
    assert all(row.errors["candidate"].largest == 0 for row in found.rows())


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_normalized_single_column_has_no_gradient_on_a_gpu_either(
    backend: str, dtype: torch.dtype, device: str
) -> None:
    rng = torch.Generator().manual_seed(2)
    x, grad_output = (torch.randn(300, 1, generator=rng, dtype=dtype).to(device) for _ in range(2))
    weight, bias = (torch.randn(1, generator=rng, dtype=dtype).to(device) for _ in range(2))
    output = backends.load("layer_norm", backend)(x.requires_grad_(), weight, bias)
    # A product of cotangent and weight, minus itself: if the two are fused, the product's rounding error remains.
    (gradient,) = torch.autograd.grad(output, x, grad_output)
    assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.full
def test_the_command_measures_every_kernel_and_writes_the_figures(tmp_path: Path) -> None:
    written = tmp_path / "accuracy.json"
    options = ["--op=vector_add", "--dtype=float16", "--examples=2", "--device=cpu", f"--json={written}"]
    done = warm.run("fourfold", "accuracy", *options, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    content = json.loads(written.read_text())
    assert content["seed"] == 0
    assert content["generated cases"] == 2
    assert {(row["kernel"], row["result"]) for row in content["rows"]} == {
        (kernel, result) for kernel in ("triton", "cuda") for result in ("output", "gradient of x", "gradient of y")
    }
    for row in content["rows"]:
        assert 0 <= row["errors"][row["kernel"]]["largest"] <= 0.5
        assert row["errors"][row["kernel"]]["elements"] > 100
        assert row["behind"] == 0
    assert "0 of 6 results are less exact than torch's" in done.stdout


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op=nothing"], "--op nothing: there are"),
        (["--candidate=softmax"], "--candidate must be"),
        (["--examples=-1"], "--examples"),
        (["--candidate=softmax=nowhere.py:f"], "nowhere.py"),
    ],
)
def test_an_option_that_names_nothing_is_told(options: list[str], said: str) -> None:
    done = warm.run("fourfold", "accuracy", "--device=cpu", *options, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 2
    assert said in done.stderr
