"""The message of each error that bad input raises: `CALLS` has the input, and messages.json the message.

Other tests assert the class of an error, the argument that it names and its numbers; the wording is here alone. To
change a message, run ``python tests/harness/test_messages.py``, which writes the file, and read the difference.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fourfold
from fourfold import divisors, operation, philox, tensor, tensors, tied, values
from fourfold.backends.cuda import emulator
from fourfold.backends.operators import Operator
from fourfold.candidates.load.calling import as_operation
from fourfold.checks.catalogue import check_named
from fourfold.engine.cells import Candidate
from fourfold.engine.verdict import Verdict
from fourfold.engine.verification import signature_of
from fourfold.operations.claims import Claims
from fourfold.operations.record import Cost
from fourfold.performance.ceilings import Ceilings
from fourfold.performance.measurement import achieved_rates
from fourfold.performance.suite import benchmark_suite
from fourfold.pytest_plugin.options import slowdowns

FILE = Path(__file__).with_name("messages.json")
ROOT = Path(__file__).parents[2]
Call = Callable[[], Any]
CALLS: dict[str, Call] = {}


def calls(of: str, *rows: Call) -> None:
    """Add numbered calls, one for each row of bad input."""
    CALLS.update({f"{of} {number}": row for number, row in enumerate(rows, 1)})


def declared(definition: Callable[..., Any], **arguments: Any) -> Call:
    """Return a call that declares an operation."""
    return lambda: operation(**arguments)(definition)


# ---- a definition that is no function in Python

calls(
    "no function",
    lambda: operation(torch.softmax),
    declared(torch.relu, input=tensor("n")),
    declared(torch.nn.ReLU(), input=tensor("n")),
    lambda: fourfold.like(torch.softmax, [torch.ones(3), -1]),
    lambda: fourfold.verify(torch.relu, torch.relu),
)

# ---- arguments of a declaration

X = tensor("n")
INTEGERS: dict[str, Any] = {"dtype": ["int32", "int64"], "high": 3}
calls("axes", *(lambda axes=axes: tensor(axes) for axes in ("rows 2 * dim", "n*n", "dim*", "n[j]")))
calls(
    "tensor",
    lambda: tensor("n", dtype="float4"),
    lambda: tensor("n", dtype=torch.complex64),
    lambda: tensor("n", dtype=["float32", "int8"]),
    lambda: tensor("n", dtype="int8", high=200),
    lambda: tensor("n", dtype="uint8", low=-1),
    lambda: tensor("n", dtype="float32", high=3),
    lambda: tensor("n", dtype=torch.int16),
)
calls(
    "tensors",
    lambda: tensors("n[i]", count=(3, 2)),
    lambda: tensors("n[i]", count=4),
    lambda: tensors("n[i]", optional=True),
    declared(lambda x: x, x=tensor("n[i]")),
    declared(lambda xs, ys: sum(xs) + sum(ys), xs=tensors("n"), ys=tensors("n", count=(1, 2))),
)


def group_sums(x: Any, groups: int) -> Any:
    if len(x) % groups:
        raise ValueError("groups must divide channels")
    return x.unflatten(0, (groups, -1)).sum(-1)


def tied_to(groups: Callable[[], Any]) -> Call:
    """Return a call that declares a number of groups."""
    return lambda: operation(x=tensor("channels"), groups=groups())(group_sums)


calls(
    "tied",
    tied_to(lambda: divisors("chanels")),
    tied_to(lambda: tied(lambda x: 1)),
    tied_to(lambda: divisors("channels", 8)),
    tied_to(lambda: tied(lambda channels: 1 // 0)),
    tied_to(lambda: tied(lambda channels: 5)),
    tied_to(lambda: divisors("channels", 0)),
    tied_to(lambda: tied(3)),  # type: ignore[arg-type]
    tied_to(lambda: tied(lambda *channels: 1)),
)

# ---- contradictions of a declaration and its function

calls(
    "mutates",
    declared(lambda x: None, x=X, mutates="y"),
    declared(lambda x, k: None, x=X, k=values(1), mutates="k"),
    declared(lambda x, y: None, x=X, y=tensor("n", optional=True), mutates="y"),
    declared(lambda i: None, i=tensor("n", **INTEGERS), mutates="i"),
    declared(lambda x: x, x=X, mutates="x", returns="float32"),
    declared(lambda x: x, x=X, mutates="x", returns={"x": None}),
    declared(lambda x: (x, x + 1), x=X, mutates="x"),
    declared(lambda x: x.sum(), x=X, mutates="x"),
    declared(lambda x: None, x=X, mutates="x", returns={"y": None}),
)
BOTH = {"a": None, "b": None}
calls(
    "returns",
    declared(lambda x: x, x=X, returns="half"),
    declared(lambda x: x, x=X, returns=BOTH),
    declared(lambda x: (x,), x=X, returns={"a b": None}),
    declared(lambda x: (x, x), x=X),
    declared(lambda x: (x, x), x=X, returns=BOTH, laws=()),
    declared(lambda x: x + 1, x=X, returns="int64"),
    declared(lambda x: x > 0, x=X, returns="float32"),
    declared(lambda x: x > 0, x=X, returns="int64"),
    declared(lambda i: i + 1, i=tensor("n", **INTEGERS)),
    declared(lambda x, short: x.argsort().to(torch.int32 if short else torch.int64), x=X, short=values(False, True)),
)
REDUCTIONS = ("mean", "median over rows", "mean over batch")
calls("reduction", *(declared(lambda x: x.square().mean(), x=tensor("rows cols"), reduction=r) for r in REDUCTIONS))


# ---- modules and operators


class Norm(torch.nn.Module):
    def __init__(self, cols: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(cols))

    def forward(self, hidden: Any) -> Any:
        return hidden * self.weight


def scaled(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return x * weight + eps


def as_scaled(given: Any) -> Any:
    record = operation(x=tensor("rows cols"), weight=tensor("cols"), eps=values(1e-6), tried=False)(scaled)
    return as_operation(given, signature_of(record), "scaled")


calls(
    "module",
    lambda: as_scaled(Norm),
    lambda: as_scaled(Norm(4)),
    lambda: fourfold.module(lambda x: Norm(x.shape[-1]))(x=torch.ones(2, 3), gain=torch.ones(3)),
    lambda: fourfold.module(Norm(3).weight),  # type: ignore[arg-type]
)
calls(
    "operator",
    lambda: Operator(schema="f(Tensor x, float scale) -> Tensor y", fake=torch.clone, saves=("scale", "x"))._save(),
    lambda: Operator(schema="f(Tensor x) -> Tensor y", fake=torch.clone).register("cpu", torch.clone),
)
calls(
    "philox",
    lambda: philox(0, 3),  # type: ignore[arg-type]
    lambda: philox(0, torch.zeros(1)),
    lambda: philox(0.5, torch.arange(1)),  # type: ignore[arg-type]
    lambda: philox(0, torch.arange(1), torch.ones(1)),
)

# ---- settings


@operation(x=tensor("rows cols"), sizes={"cols": (1, 64)}, tried=False)
def negated(x: Any) -> Any:
    return -x


def graded(**settings: Any) -> Call:
    return lambda: fourfold.grade([], **settings)


calls(
    "grade",
    graded(gpus=2),
    graded(workers=0),
    graded(dtypes=("float31",)),
    graded(examples=0),
    graded(speed=True),
    graded(exampels=3),
    lambda: list(fourfold.grade([{"id": "a", "source": "x"}, {"id": "a", "source": "y", "operation": "softmax"}])),
)
calls(
    "benchmark_suite",
    lambda: benchmark_suite(negated, negated, device="cpu", sizes={"rows": 3, "cols": 65}),
    lambda: benchmark_suite(torch.add, "vector_add", device="cpu", sizes={"cols": 65}),
    lambda: benchmark_suite(negated, negated, device="cpu", dtypes=["float31"]),
    lambda: benchmark_suite(negated, negated, device="cpu", dtypes="float16", claims=Claims(dtypes=("float32",))),
)
CEILINGS = Ceilings(bytes_per_second=1e12, flops_per_second={"float32": 1e13}, launch_seconds=2e-6)
calls(
    "ceiling",
    lambda: achieved_rates(CEILINGS, Cost(10**6, 10**6), "float32", 0.8e-6),
    lambda: achieved_rates(CEILINGS, Cost(10**3, 10**8), "float32", 5e-6),
)
calls("planted", *(lambda text=text: slowdowns(text) for text in ("", "two", "1,", "-1", "nan", "inf")))


def in_order(order: Any) -> Call:
    def run() -> None:
        with emulator.schedule(order):
            pass

    return run


calls("schedule", *map(in_order, ("backward", True, 1.5, None)))
calls("check", lambda: check_named("sorcery"))

# ---- what is read

calls(
    "verdict",
    lambda: Verdict.from_json('{"schema_version": 2}'),
    lambda: Verdict.from_json("[]"),
)
MINE = SimpleNamespace(__file__="mine.py", kernel_fn=scaled, reference_fn=scaled)
calls(
    "contract",
    lambda: fourfold.verify_contract(MINE),
    lambda: fourfold.like(lambda x: x.abs(), [torch.zeros(2, dtype=torch.complex64)]),
)
CUDA = ROOT / "tests" / "harness" / "candidates" / "cuda"


def kernel(name: str, file: str) -> Call:
    options: dict[str, Any] = {"grid": 1, "block": 1, "arguments": lambda x, out: (x, out)}
    return lambda: fourfold.cuda_kernel(CUDA / file, name, **options)


calls("cuda_kernel", kernel("k", "softmax.cu"), kernel("k", "no.cu"), lambda: fourfold.cuda_colonel)
LAUNCHES = (
    "none.cu:k<<<rows, 64>>>",
    "softmax.cu:k<<<rows, 64>>>",
    "softmax.cu:softmax_kernel<<<rowz, 64>>>",
    "softmax.cu:softmax_kernel<<<rows / 0.5, 64>>>",
    "softmax.cu:softmax_kernel<<<rows, open>>>",
    "softmax.cu:softmax_kernel<<<rows.real, 64>>>",
    "softmax.cu:softmax_kernel<<<rows, 64>>>(x, y, rows, colz)",
    "softmax.cu:softmax_kernel<<<rows, 64>>>(x, y, rows)",
    "styles.cu:sum_by_cub<<<rows, 64>>>",
    "softmax.cu:softmax_kernel",
)
calls("launch", *(lambda k=k: Candidate.parse(f"softmax={CUDA}/{k}", ["softmax"]).load() for k in LAUNCHES))


# ---- the test


def message(call: Call) -> str:
    """Return the error that a call raises, in one line."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the file has its class
        call()
    return f"{type(caught.value).__name__}: {caught.value}".replace(f"{ROOT}/", "")


@pytest.mark.parametrize("name", CALLS)
def test_an_error_says_what_is_wrong(name: str) -> None:
    assert message(CALLS[name]) == json.loads(FILE.read_text())[name]


def test_every_message_is_of_a_call_and_has_one_line() -> None:
    messages = json.loads(FILE.read_text())
    assert list(messages) == list(CALLS)
    assert [text for text in messages.values() if len(text.splitlines()) != 1] == []


if __name__ == "__main__":
    found = {name: message(call) for name, call in CALLS.items()}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
