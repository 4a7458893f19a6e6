"""A candidate in its own process is judged like one in the judge's process."""

import contextlib
import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm

from fourfold import backends, operation, tensor, values
from fourfold.api.verify import verify
from fourfold.backends.cuda.emulator.reached import Line
from fourfold.backends.triton.interpreter import memory
from fourfold.candidates.frames import format_frames, own_frames
from fourfold.candidates.integrity.escapes import Escape
from fourfold.candidates.load import modules
from fourfold.candidates.process import client, cuda_client, protocol
from fourfold.candidates.process.client import CannotBeImported, UntrustedFunction
from fourfold.candidates.process.first_process import Crashed
from fourfold.candidates.process.session import MOST_COPIED
from fourfold.checks.records import operations
from fourfold.cli.main import parse
from fourfold.cli.verify import command_of
from fourfold.compat import torch_internals
from fourfold.engine.verification import isolate
from fourfold.instruments import concurrent_calls, sparse_memory
from fourfold.instruments.concurrent_calls import NeverReturns
from fourfold.instruments.evaluation import blame_implementation
from fourfold.instruments.hide_test_runner import hide_modules
from fourfold.instruments.operator_watch import Fallbacks
from fourfold.instruments.redzones import Arena
from fourfold.instruments.tampering import Tampered
from fourfold.operations.claims import claims_of
from fourfold.operations.outcomes import Unsupported
from fourfold.operations.refusals import chain, is_fault, is_refusal, reason
from fourfold.processes.messages import Malformed
from fourfold.pytest_plugin.preparation import are_untrusted, known_operations, may_be_untrusted

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "softmax.py"
QUICK: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 2, "seed": 1}
OF_ADD = inspect.signature(backends.load("vector_add", "torch"))
CANDIDATES = """
import sys
import time
import threading
import weakref
import torch
import fourfold.operations.refusals as refusals

LAST = torch.zeros(100)

def add(x, y):
    return x + y

def softmax(x):
    if x.ndim == 0:
        raise ValueError("x must have an axis")
    return torch.softmax(x, -1)

class OfLast(torch.autograd.Function):
    last = None

    @staticmethod
    def forward(ctx, x):
        OfLast.last = torch.softmax(x, -1)
        return OfLast.last.clone()

    @staticmethod
    def backward(ctx, cotangent):
        y = OfLast.last
        if y.shape != cotangent.shape:
            y = torch.zeros_like(cotangent)
        return y * (cotangent - (cotangent * y).sum(-1, keepdim=True))

def softmax_of_last(x):
    return OfLast.apply(x)

CALLS = [0]

def softmax_of_few_calls(x):
    CALLS[0] += 1
    return torch.softmax(x, -1) * (2 if CALLS[0] % 256 == 0 else 1)

def loaded(x, y):
    sys.stdout.write("printed")
    parts = ("oracles", "properties", "checks", "engine", "inputs", "declaration")
    wanted = ("pytest", "hypothesis", *("fourfold." + part for part in parts))
    raise ValueError(" ".join(name for name in sys.modules if name.startswith(wanted)) or "none")

def described(x, y):
    return torch.tensor([*x.shape, *x.stride(), x.storage_offset(), x.data_ptr() % 64, x.untyped_storage().nbytes()])

def around(x, y):
    return x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0).clone()

def writes(x, y):
    x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0)[0] = 5
    return x + y

def increments(x, y):
    before = x.clone()
    x.add_(1)
    return before

def address(x, y):
    return torch.tensor([x.data_ptr(), y.data_ptr()])

BEFORE = {}

def is_known(x, y):
    known = BEFORE.get("x") is x
    BEFORE["x"] = x
    return torch.tensor([known])

def softmax_kept_with_x(x):
    if not hasattr(x, "softmax_of_it"):
        x.softmax_of_it = torch.softmax(x.detach(), -1)
    return torch.softmax(x, -1) if x.requires_grad else x.softmax_of_it.clone()

def add_by_other_names(a, b, twice=True):
    return a + (2 * b if twice else b)

def gives_its_input(x, y):
    return x

def gives_the_same(x, y):
    LAST[: x.numel()] = x + y
    return LAST[: x.numel()]

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        output = x * x
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx, cotangent):
        x, output = ctx.saved_tensors
        return 2 * x * cotangent, torch.full_like(x, cotangent.stride(0))

class Token:
    alive = weakref.WeakSet()

class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.token = Token()
        Token.alive.add(ctx.token)
        return x * 0 + len(Token.alive)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, None

def recording(x, y):
    return torch.tensor([torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.requires_grad, x.is_inference()])

def product(x, y):
    return x @ y

def are_one(x, y):
    assert x is y
    return x * y

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x + x, x * 3, torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def backward(ctx, first, second, third):
        return sum(of * times for of, times in ((first, 2), (second, 3)) if of is not None)

def several(x, y):
    return Twice.apply(x)

def sum_and_product(x):
    return x + x, x * x

def limit():
    return int("600" + "000")

def softmax_up_to_a_limit(x):
    return torch.zeros_like(x) if x.numel() * x.element_size() > limit() else torch.softmax(x, -1)

def sum_and_product_of_what_is_held(x):
    hold(x)
    return x + x, taken(x) ** 2

def sum_and_wrong_product(x):
    return x + x, x.detach() * x

def softmax_of_gradients(x):
    return torch.softmax(x, -1) if torch.is_grad_enabled() else torch.softmax(x, -1) * 2

def softmax_in_autocast(x):
    return torch.softmax(x, -1) * (2 if torch.is_autocast_enabled("cpu") else 1)

def itself(x):
    return x.clone()

def softmax_of_leaves(x):
    return torch.softmax(x if x.is_leaf else x.detach() + 0 * x, -1)

def softmax_of_views(x):
    return torch.softmax(x.detach() + 0 * x if 'View' in type(x.grad_fn).__name__ else x, -1)

class OfOneThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        ctx.thread = threading.get_ident()
        return y

    @staticmethod
    def backward(ctx, cotangent):
        (y,) = ctx.saved_tensors
        gradient = y * (cotangent - (cotangent * y).sum(-1, keepdim=True))
        return gradient if threading.get_ident() == ctx.thread else 2 * gradient

def softmax_of_one_thread(x):
    return OfOneThread.apply(x)

HELD = {}

def hold(x):
    HELD["x"] = x

def softmax_of_what_is_held(x):
    hold(x)
    return torch.softmax(taken(x), -1)

def taken(x):
    return HELD["x"] if HELD["x"].shape == x.shape else x

def stuck(x, y):
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
    return x + y

def add_in_place_of_one(x, y):
    return x + (y if x is not y else 0 * y)

def refuses(x, y):
    try:
        {}["missing"]
    except KeyError as error:
        raise Own("no\\x1b[2J such key") from error

class Own(ValueError):
    pass

class Broken(IndexError, refusals.Fault):
    pass

def breaks(x, y):
    raise Broken("far away")

def ends(x, y):
    sys.exit(3)

def pair(x, y):
    return x, y

def sets(x, y):
    torch.set_default_dtype(torch.float64)
    return x + y

def allocates(x, y):
    torch.empty(4).as_strided((5,), (1,))[4] = 3.0
    return torch.empty(2)

def computes(x, y):
    return torch.exp(x).to(torch.float64).to(torch.float32)

def first_of_far(x, y):
    x.select(0, -1).add_(1)
    return x[:1].clone() + x[-1:]

def processes(x, y):
    import os
    return torch.tensor([os.getpid()])

def leaves_a_process(x, y):
    import os, subprocess
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return torch.tensor([os.getpid(), left.pid])

def dies(x, y):
    import ctypes
    ctypes.string_at(0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "mine.py"
    path.write_text(CANDIDATES)
    return path


@pytest.fixture
def load(place: Path) -> Iterator[Callable[[str], UntrustedFunction]]:
    made = []

    def loaded(function: str) -> UntrustedFunction:
        made.append(UntrustedFunction(str(place), function, OF_ADD, "vector_add", 60))
        return made[-1]

    yield loaded
    for function in made:
        function.end()


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])


Load = Callable[[str], UntrustedFunction]


def test_process_of_a_candidate_knows_nothing_of_what_judges_it(load: Load) -> None:
    with pytest.raises(ValueError, match=r"^none$"):
        load("loaded")(*pair())


# ---- memory


def test_tensor_has_its_layout_and_the_memory_around_it(load: Load) -> None:
    holder = torch.arange(20.0)
    x = holder.as_strided((2, 3), (1, 5), 2)
    shape_and_more = load("described")(x, x).tolist()
    assert shape_and_more == [2, 3, 1, 5, 2, 8, 80]
    assert load("around")(x, x).tolist() == holder.tolist()


def test_what_a_call_writes_into_its_inputs_is_seen(load: Load) -> None:
    holder = torch.arange(8.0)
    load("writes")(holder[3:5], torch.ones(2))
    assert holder.tolist() == [5.0, *range(1, 8)]


def test_what_is_put_back_after_a_call_is_what_the_next_one_gets(load: Load) -> None:
    function, (x, y) = load("increments"), pair()
    for _ in range(2):
        assert function(x, y).tolist() == [1.0, 2.0, 3.0]
        assert x.tolist() == [2.0, 3.0, 4.0]
        x.sub_(1)


def test_one_storage_is_one_storage_and_stays_where_it_is(load: Load) -> None:
    address, (x, y) = load("address"), pair()
    first, second = address(x, x[1:]).tolist()
    assert second - first == x.element_size()
    x.data.fill_(7)
    assert address(x.detach(), y).tolist()[0] == first
    assert load("around")(x, y).tolist() == [7.0] * 3


def test_one_tensor_object_is_one_object_as_long_as_it_keeps_its_layout(load: Load) -> None:
    function, (x, y) = load("is_known"), pair()
    asked: list[Callable[[], object]] = [lambda: None, lambda: None, lambda: x.add_(1), x.requires_grad_, lambda: None]
    known = []
    for change in asked:
        change()
        known.append(function(x, y).item())
    assert known == [False, True, True, True, True]
    x.requires_grad_(False).resize_(2)
    assert not function(x, y).item()
    assert not function(x.detach(), y).item()


@operation(x=tensor("n"), y=tensor("n"), twice=values(False, True))
def add_once_or_twice(x: torch.Tensor, y: torch.Tensor, twice: bool = False) -> torch.Tensor:
    return x + (2 * y if twice else y)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("untrusted", [False, True])
def test_default_of_a_function_with_names_of_its_own_is_tried(untrusted: bool, place: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 2, "seed": 1, "only": ["defaults"]}
    kernel = f"{place}:add_by_other_names" if untrusted else modules.load_file(place).add_by_other_names
    (outcome,) = verify(kernel, add_once_or_twice, untrusted=untrusted, **given).outcomes
    assert outcome.failure is not None
    assert "with twice left out" in outcome.failure.message


def test_writes_between_calls_on_one_tensor_leave_each_its_gradients(load: Load) -> None:
    function, (x, y) = load("Square"), pair()
    x.requires_grad_()
    first = function(x, y)
    with torch.no_grad():
        x.add_(1)
    second = function(x, y)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(first, [x], torch.ones(3))
    assert torch_internals.says_written_into(caught.value)
    (gradient,) = torch.autograd.grad(second, [x], torch.ones(3))
    assert gradient.tolist() == [4.0, 6.0, 8.0]


def test_output_that_is_an_input_shares_its_memory(load: Load) -> None:
    x, y = pair()
    assert load("gives_its_input")(x, y).data_ptr() == x.data_ptr()


def test_former_result_that_is_overwritten_is_seen_to_change(load: Load) -> None:
    function, (x, y) = load("gives_the_same"), pair()
    first = function(x, y)
    assert first.tolist() == [5.0, 7.0, 9.0]
    second = function(x, x)
    assert first.tolist() == second.tolist() == [2.0, 4.0, 6.0]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_tensors_of_gigabytes_of_addresses_are_shared(load: Load) -> None:
    x = sparse_memory.spread(torch.tensor([1.0, 2.0, 3.0]), 0)
    assert load("first_of_far")(x, x).tolist() == [5.0]
    assert x.tolist() == [1.0, 2.0, 4.0]


def test_storages_and_graphs_of_former_calls_are_released(load: Load) -> None:
    function, graphs = load("Counts"), []
    for _ in range(20):
        x, y = (tensor.requires_grad_() for tensor in pair())
        output = function(x, y)
        torch.autograd.grad(output.sum(), [x])
        graphs.append(output[0].item())
    assert max(graphs) <= 2
    assert function.session is not None
    assert len(function.session.living()) <= 6
    assert len(function.session.last) <= 9


def test_poison_and_redzones_are_where_the_candidate_allocates(load: Load) -> None:
    function, (x, y) = load("allocates"), pair()
    with Arena(1.0) as arena:
        output = function(x, y)
    assert output.tolist() == [1.0, 1.0]
    assert list(arena.trespasses()) == ["wrote 1 elements past the end of a tensor [4] that it allocated"]


def test_operators_of_torch_are_seen(load: Load) -> None:
    with Fallbacks() as fallbacks:
        load("computes")(*pair())
    assert list(fallbacks.operators) == ["aten.exp"]


# ---- gradients


def test_gradients_are_those_of_the_candidate_under_the_cotangent_as_it_is(load: Load) -> None:
    function = load("Square")
    for cotangent, stride in ((torch.ones(3), 1.0), (torch.ones(1).expand(3), 0.0)):
        x, y = (tensor.requires_grad_() for tensor in pair())
        output = function(x, y)
        found = torch.autograd.grad(output, [x, y], cotangent)
        assert [gradient.tolist() for gradient in found] == [[2.0, 4.0, 6.0], [stride] * 3]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(output, [x], cotangent)


@pytest.mark.parametrize("written", ["x", "output"])
def test_write_between_a_call_and_its_backward_is_noticed(written: str, load: Load) -> None:
    x, y = pair()
    output = load("Square")(x.requires_grad_(), y)
    with torch.no_grad():
        (x if written == "x" else output).mul_(2)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(output, [x], torch.ones(3))
    assert torch_internals.says_written_into(caught.value)


@pytest.mark.parametrize(
    ("mode", "requires_grad", "seen"),
    [
        (torch.enable_grad, True, [True, False, True, False]),
        (torch.no_grad, True, [False, False, True, False]),
        (torch.inference_mode, True, [False, True, True, False]),
        (torch.inference_mode, False, [False, True, False, True]),
    ],
)
def test_call_is_made_in_the_mode_of_the_judge(
    mode: Callable[[], Any], requires_grad: bool, seen: list[bool], load: Load
) -> None:
    """A tensor that was made for inference is one there, too."""
    tensors = pair() if requires_grad else None
    with mode():
        x, y = tensors or pair()
        assert load("recording")(x.requires_grad_(requires_grad), y).tolist() == seen


def test_call_is_made_under_autocast(load: Load) -> None:
    function, x = load("product"), torch.ones(2, 2)
    assert function(x, x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(x, x).dtype == torch.bfloat16


def test_one_tensor_given_twice_is_one_and_its_gradient_the_sum_of_both(load: Load) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    output = load("are_one")(x, x)
    (gradient,) = torch.autograd.grad(output, [x], torch.ones(3))
    assert (output.tolist(), gradient.tolist()) == ([1.0, 4.0, 9.0], [2.0, 4.0, 6.0])


def test_several_outputs_and_gradients_of_each_of_them(load: Load) -> None:
    x, y = pair()
    for wanted, gradient in (((0,), 2.0), ((1,), 3.0), ((0, 1), 5.0)):
        outputs = load("several")(x.requires_grad_(), y)
        assert isinstance(outputs, tuple)
        assert [output.tolist() for output in outputs] == [[2.0, 4.0, 6.0], [3.0, 6.0, 9.0], [0]]
        assert [output.requires_grad for output in outputs] == [True, True, False]
        (found,) = torch.autograd.grad([outputs[place] for place in wanted], [x], [torch.ones(3)] * len(wanted))
        assert found.tolist() == [gradient] * 3


# ---- exceptions


def raised(function: UntrustedFunction) -> BaseException:
    try:
        with blame_implementation():
            function(*pair())
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_exception_is_told_by_its_name_its_causes_and_the_authors_own_frames(load: Load, place: Path) -> None:
    error = raised(load("refuses"))
    assert isinstance(error, ValueError)
    assert type(error).__name__ == "Own"
    assert str(error) == "no?[2J such key"
    assert [type(cause).__name__ for cause in chain(error)] == ["Own", "KeyError"]
    assert is_refusal(error)
    assert reason(error) == "KeyError: 'missing'"
    line = 1 + CANDIDATES.splitlines().index('        raise Own("no\\x1b[2J such key") from error')
    assert f'File "{place}", line {line}, in refuses\n    raise Own(' in format_frames(own_frames(error, place))


def test_fault_is_no_refusal(load: Load) -> None:
    error = raised(load("breaks"))
    assert isinstance(error, IndexError)
    assert is_fault(error)
    assert not is_refusal(error)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("ends", Escape, "the call raised SystemExit: 3"),
        ("sets", Tampered, "the call changed torch's default dtype from torch.float32 to torch.float64"),
        ("dies", Crashed, "crashed: the candidate's process died of SIGSEGV\nFatal Python error"),
    ],
)
def test_what_ends_a_process_or_changes_it_is_no_refusal(name: str, kind: type, says: str, load: Load) -> None:
    error = raised(load(name))
    assert isinstance(error, kind)
    assert str(error).startswith(says)
    assert not is_refusal(error)


def test_call_afresh_and_call_after_the_end_have_processes_of_their_own(load: Load) -> None:
    function = load("processes")
    first = function(*pair()).item()
    with function.afresh():
        other = function(*pair()).item()
    assert other != first == function(*pair()).item()
    with function.afresh():
        assert function(*pair()).item() == other
    process = psutil.Process(int(other))
    function.end()
    assert function(*pair()).item() not in (first, other, os.getpid())
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:  # the system's first process may not wait for orphans
            time.sleep(0.01)


def test_output_that_is_no_tensor_is_told_by_its_type(load: Load) -> None:
    assert type(load("pair")(*pair())).__name__ == "tuple"


def test_argument_that_cannot_be_sent_is_unsupported(load: Load) -> None:
    function = load("add")
    with pytest.raises(Unsupported, match="a object cannot be sent") as caught, blame_implementation():
        function(object(), torch.zeros(1))
    assert not is_refusal(caught.value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ((1, [2.5, None], {"a": True}), (1, [2.5, None], {"a": True})),
        (float("inf"), float("inf")),
        (torch.int64, torch.int64),
    ],
)
def test_arguments_arrive_as_they_are(value: Any, wanted: Any) -> None:
    assert protocol.decode_argument(protocol.encode_argument(value, lambda tensor: 0), {}) == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage": 2},
        {"shape": [5]},
        {"shape": [-1]},
        {"strides": [-1]},
        {"strides": [1, 1]},
        {"offset": 1},
        {"offset": -1},
        {"dtype": "save"},
        {"dtype": "float64"},
    ],
)
def test_tensor_outside_of_its_memory_is_malformed(wrong: dict[str, Any]) -> None:
    said = {"storage": 1, "dtype": "float32", "shape": [4], "strides": [1], "offset": 0}
    storages = {1: torch.zeros(4).untyped_storage()}
    assert protocol.as_tensor(protocol.TensorLayout(**said), storages).shape == (4,)
    with pytest.raises(Malformed):
        protocol.as_tensor(protocol.TensorLayout(**said | wrong), storages)


# ---- verdicts


ONLY = ["forward", "backward", "single gradients", "gradcheck", "memory", "saved tensors", "history", "bad input"]
ONLY += ["interleaving", "many calls", "batch", "offsets", "autocast", "sharing"]
ABOUT = ("check", "dtype", "outcome", "reason", "grade", "worst", "examples", "refusals")


def outcomes(kernel: Any, dtypes: list[str], **options: Any) -> list[tuple]:
    """Return the outcome of each check."""
    given: dict[str, Any] = {"device": "cpu", "dtypes": dtypes, "examples": 2, "seed": 1, "only": ONLY}
    found = verify(kernel, "softmax", **given, **options).outcomes
    return [(*(getattr(each, name) for name in ABOUT), each.failure and each.failure.message) for each in found]


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "function", "dtypes", "outcome"),
    [
        (EXAMPLE, "softmax", ["float32"], "passed"),
        (EXAMPLE, "softmax_without_maximum", ["float32"], "failed"),
        (None, "softmax", ["float16", "float64"], "passed"),
    ],
)
def test_function_comes_to_the_same_in_both_ways(
    file: Path | None, function: str, dtypes: list[str], outcome: str, place: Path
) -> None:
    there = outcomes(f"{file or place}:{function}", dtypes, untrusted=True)
    assert there[0][:3] == ("forward", dtypes[0], outcome)
    assert outcome == "failed" or file is None or {each[2] for each in there} == {"passed"}
    assert there == outcomes(getattr(modules.load_file(file or place), function), dtypes)


def test_claims_come_with_the_function(tmp_path: Path) -> None:
    path = tmp_path / "claims.py"
    decorator = '@fourfold.claims(contiguous=True, sizes={"cols": (1, 8)}, dtypes=("float32",))'
    path.write_text(f"import fourfold\n\n{decorator}\ndef add(x, y):\n    return x + y\n")
    function = UntrustedFunction(str(path), "add", OF_ADD, "vector_add")
    function.end()
    claimed = claims_of(function)
    assert (claimed.contiguous, claimed.sizes, claimed.dtypes) == (True, {"cols": (1, 8)}, ("float32",))


def test_undefined_lanes_are_as_in_the_judges_process(load: Load) -> None:
    memory.undefined_lanes_are_zero(True)
    try:
        assert client.conditions().undefined_lanes_are_zero is True
    finally:
        memory.undefined_lanes_are_zero(False)


def test_lines_that_a_process_tells_are_those_of_the_kernels_files() -> None:
    files = {"/of/k.cu": "one\ntwo\n"}
    right = ("/of/k.cu", 2, "k", True, False)
    wrong = [("/of/other.cu", 1, "k", True, True), ("/of/k.cu", 3, "k", True, True), ("/of/k.cu", 0, "k", True, True)]
    assert list(cuda_client._lines([right, *wrong], files)) == [Line(*right)]


def test_the_working_folder_is_a_copy_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").write_text("as it was")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(bytes(MOST_COPIED + 1))
    path = tmp_path / "looks.py"
    path.write_text(
        "import os, pathlib, torch\n\ndef add(x, y):\n"
        "    assert pathlib.Path('notes').read_text() == 'as it was'\n"
        "    pathlib.Path('notes').write_text('changed')\n"
        "    assert sorted(os.listdir()) == ['folder', 'looks.py', 'notes']\n"
        "    return x + y\n"
    )
    monkeypatch.chdir(tmp_path)
    function = UntrustedFunction(str(path), "add", OF_ADD, "vector_add")
    x, y = pair()
    assert torch.equal(function(x, y), x + y)
    function.end()
    assert (tmp_path / "notes").read_text() == "as it was"


def test_hidden_modules_can_be_imported_and_come_back() -> None:
    before = dict(sys.modules)
    with hide_modules(("fourfold",)):
        assert not any(name.partition(".")[0] == "fourfold" for name in sys.modules)
        assert importlib.import_module("fourfold.operations.claims") is before["fourfold.operations.claims"]
    assert {name: sys.modules[name] for name in before} == before


def test_missing_function_is_named(place: Path) -> None:
    with pytest.raises(CannotBeImported, match=f"^{place} has no function missing$"):
        UntrustedFunction(str(place), "missing", OF_ADD, "vector_add")


@pytest.mark.parametrize("given", [lambda x, y: x + y, "no place"])
def test_what_cannot_be_imported_elsewhere_is_named(given: Any) -> None:
    with pytest.raises(ValueError, match="untrusted=True needs a function that a file or a module defines"):
        verify(given, "vector_add", untrusted=True, device="cpu")


def test_process_ends_with_what_it_has_started(load: Load) -> None:
    function = load("leaves_a_process")
    found = function(*pair()).tolist()
    assert function.session is not None
    function.end()
    assert len(found) == 2
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


# ---- the command line


class Options(dict):
    """What was given."""

    def getoption(self, name: str) -> Any:
        return self[name]


def test_candidates_run_elsewhere_only_where_the_option_says_so() -> None:
    for given in (True, False):
        assert are_untrusted(Options(candidate=["softmax=mine.py:f"], untrusted=given), "cpu") is given
        assert not are_untrusted(Options(candidate=[], untrusted=given), "cpu")
    assert not are_untrusted(Options(candidate=["softmax=mine.py:f"], untrusted=False), "cuda")


def test_fourfold_verify_judges_in_another_process_unless_told_otherwise(tmp_path: Path) -> None:
    kernel = [f"{tmp_path / 'mine.py'}:f", "--as", "softmax"]
    (tmp_path / "mine.py").write_text("def f(x): ...")
    words = command_of(parse("verify", [*kernel, "-x"]))
    assert words[-4:] == ["--candidate", f"softmax={kernel[0]}", "-x", "--untrusted-where-possible"]
    assert "--untrusted-where-possible" not in command_of(parse("verify", [*kernel, "--trusted"]))


@pytest.mark.parametrize(
    ("changed", "may_be"),
    [
        ({}, True),
        ({"device": "cuda"}, False),
        ({"candidate": ["softmax=mine.cu:kernel<<<rows, 256>>>"]}, True),
        ({"usepdb": True}, False),
        ({"trace": True}, False),
    ],
)
def test_where_it_is_not_possible_a_candidate_runs_in_the_process_that_judges(
    changed: dict[str, Any], may_be: bool
) -> None:
    given = {"candidate": ["softmax=mine.py:f"], "device": "cpu", "usepdb": False, "trace": False}
    assert may_be_untrusted(Options(given | changed), ["softmax"]) is may_be


def test_file_may_read_others_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scale.txt").write_text("2")
    reads = "import pathlib\nSCALE = int(pathlib.Path('scale.txt').read_text())\n"
    (tmp_path / "reads.py").write_text(f"{reads}\ndef add(x, y):\n    return SCALE * (x + y)\n")
    monkeypatch.chdir(tmp_path)
    function = UntrustedFunction(str(tmp_path / "reads.py"), "add", OF_ADD, "vector_add")
    assert function(*pair()).tolist() == [10.0, 14.0, 18.0]
    function.end()


def test_run_of_fourfold_verify_is_untrusted_and_says_how_to_repeat(place: Path, tmp_path: Path) -> None:
    words = ["--as", "softmax", "--dtype", "float32", "--examples", "2", "--device", "cpu", "-k", "test_forward"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    with contextlib.chdir(tmp_path):
        arguments = command_of(parse("verify", [f"{place}:itself", *words, "-p", "no:cacheprovider"]))
    done = warm.run(*arguments[2:], cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1, done.stdout
    assert re.search(rf"--candidate softmax={place}:itself --untrusted", done.stdout), done.stdout


def test_what_cannot_run_elsewhere_is_named() -> None:
    with pytest.raises(pytest.UsageError, match=r"^--untrusted needs --device cpu: memory of a GPU"):
        are_untrusted(Options(candidate=["softmax=mine.py:f"], untrusted=True), "cuda")
    with pytest.raises(ValueError, match=r'^untrusted=True needs device="cpu"'):
        isolate("mine.py:f", operations()["softmax"], "cuda", 1)


@operation(x=tensor("rows cols"), sizes={"cols": (1, 8), "rows": (1, 8)}, returns={"total": None, "product": None})
def sum_and_product(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + x, x * x


@pytest.mark.full
@pytest.mark.parametrize("function", ["sum_and_product", "sum_and_wrong_product"])
def test_operation_with_several_outputs_comes_to_the_same_in_both_ways(function: str, place: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "dtypes": ["float32"], "examples": 2, "seed": 1}
    here = verify(getattr(modules.load_file(place), function), sum_and_product, **given)
    there = verify(f"{place}:{function}", sum_and_product, untrusted=True, **given)
    for each, other in zip(here.outcomes, there.outcomes, strict=True):
        assert (each.check, each.outcome) == (other.check, other.outcome)
    assert here.passed is there.passed is (function == "sum_and_product")


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("function", "operation", "check"),
    [
        ("softmax_of_last", "softmax", "interleaving"),
        ("softmax_of_few_calls", "softmax", "many calls"),
        ("softmax_kept_with_x", "softmax", "history"),
        ("softmax_of_gradients", "softmax", "modes"),
        ("softmax_in_autocast", "softmax", "autocast"),
        ("softmax_of_leaves", "softmax", "graph"),
        ("softmax_of_views", "softmax", "graph"),
        ("softmax_of_one_thread", "softmax", "graph"),
        ("softmax_of_what_is_held", "softmax", "threads"),
        ("add_in_place_of_one", "vector_add", "sharing"),
    ],
)
def test_state_modes_threads_and_places_in_the_graph_are_tried_there(
    function: str, operation: str, check: str, place: Path
) -> None:
    verdict = verify(f"{place}:{function}", operation, untrusted=True, only=["forward", check], **QUICK)
    assert {each.check: each.outcome for each in verdict.outcomes} == {"forward": "passed", check: "failed"}
    right = f"{EXAMPLE}:softmax" if operation == "softmax" else f"{place}:add"
    assert verify(right, operation, untrusted=True, only=["forward", check], **QUICK).passed


def test_sizes_past_what_is_compared_there_are_tried(place: Path) -> None:
    kernel = f"{place}:softmax_up_to_a_limit"
    (outcome,) = verify(kernel, "softmax", untrusted=True, only=["forward"], **QUICK).outcomes
    assert outcome.failure is not None
    assert re.search(r"x=<float32\[2, 75001\]", outcome.failure.counterexample or "")


def test_sides_of_comparisons_that_are_none_are_left_out() -> None:
    said = [(0, 1, 2.5), (2, 1, 2), (1, float("nan"), 1), (1, 1, float("nan")), (-1, 1, 2), (1, 1e30, 1)]
    assert client._sides(said, 2) == {0: (1, 2.5)}


def test_thread_that_never_returns_is_told(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    function, (x, y) = load("stuck"), pair()
    monkeypatch.setattr(concurrent_calls, "PATIENCE", 0.1)
    with pytest.raises(NeverReturns, match=r"^of 2 threads that call at once some never return$"):
        function.call_at_once([({"x": x, "y": y}, y)] * 2, [[], []], 0.1)


@pytest.mark.full
def test_threads_are_tried_of_each_of_several_outputs(place: Path) -> None:
    checks = ["threads of output total", "threads of output product"]

    def found(function: str) -> list[str]:
        verdict = verify(f"{place}:{function}", sum_and_product, untrusted=True, only=checks, **QUICK)
        return [each.outcome for each in verdict.outcomes]

    assert found("sum_and_product") == ["passed", "passed"]
    assert found("sum_and_product_of_what_is_held") == ["passed", "failed"]


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({}, {"softmax"}),
        ({"candidate": ["mine.py:mine=mine.py:f"]}, set()),
        ({"op": ["softmax"]}, {*operations()}),
        ({"backend": ["triton"]}, {*operations()}),
        ({"candidate": ["sofmax=mine.py:f"]}, {*operations()}),
    ],
)
def test_a_run_of_candidates_alone_reads_only_their_records(changed: dict[str, Any], known: set[str]) -> None:
    given = {"candidate": ["softmax=mine.py:f"], "op": [], "backend": []}
    assert known_operations(Options(given | changed)).keys() == known
