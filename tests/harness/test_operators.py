"""An operator bypasses torch's dispatcher only if nothing observes the dispatch."""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from fourfold.impls.matmul.operators import MATMUL
from samples import sampled
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold import backends
from fourfold.backends import known_calls, operators
from fourfold.backends.cuda.launch import compiling_only

KERNELS = ("triton", "cuda")
NAME = "operators_test"
LAUNCHES: list[str] = []


def forward(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    LAUNCHES.append("forward")
    assert not x.is_neg()  # a kernel would read the memory without the negation
    return x * y * scale, torch.full((2,), scale, dtype=x.dtype)


def backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    kept: torch.Tensor,
    scale: float,
    needs_x: bool,
    needs_y: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    LAUNCHES.append(f"backward {needs_x} {needs_y} {y is None}")
    assert kept.tolist() == [scale] * 2
    factor = torch.ones_like(x) if y is None else y
    return grad_output * factor * scale, grad_output * x * scale


SCALED_PRODUCT = operators.Operator(
    schema=f"{NAME}(Tensor x, Tensor y, float scale) -> (Tensor output, Tensor kept)",
    fake=lambda x, y, scale: (torch.empty_like(x), x.new_empty(2)),
    saves=("x", "y", "kept", "scale"),
    saves_if={"y": lambda x, y, scale: scale != 1},
    gradients={"x": "x", "y": "x"},
)
scaled_product = SCALED_PRODUCT.register("cpu", forward, backward)


class Seen(TorchDispatchMode):
    """A mode that records the operators that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_launches() -> None:
    LAUNCHES.clear()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects this test's operators as they are called through the dispatcher."""
    names: list[str] = []
    for suffix in ("cpu", "cpu_backward"):
        name = f"{NAME}_{suffix}"
        packet = getattr(torch.ops.fourfold, name)
        real = packet.default._op

        def counted(*args: object, real: Callable = real, name: str = name) -> object:
            names.append(name)
            return real(*args)

        monkeypatch.setattr(packet.default, "_op", counted)
    return names


def numbers(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


def test_schema_of_backward_follows_from_that_of_forward() -> None:
    assert MATMUL._backward_schema() == (
        "(Tensor grad_output, Tensor a, Tensor b, Tensor? output, str activation, float negative_slope,"
        " bool needs_a, bool needs_b) -> (Tensor, Tensor)"
    )


def test_a_gradient_may_have_the_shape_of_the_cotangent_alone() -> None:
    doubled = operators.Operator(
        schema="doubled(Tensor x, Tensor? scale) -> Tensor output",
        fake=lambda x, scale: torch.empty_like(x),
        saves=("scale",),
        gradients={"x": "grad_output"},
    )
    assert doubled._backward_schema() == "(Tensor grad_output, Tensor? scale) -> Tensor"
    call = doubled.register("cpu", lambda x, scale: 2 * x, lambda grad_output, scale: 2 * grad_output)
    x = numbers(1, 2, 3, grad=True)
    traced = torch.compile(lambda x: call(x, None).sum(), fullgraph=True, backend="aot_eager")
    assert torch.autograd.grad(traced(x), x)[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("grad", [False, True], ids=["no_gradient", "gradient"])
def test_a_call_that_nobody_watches_goes_past_the_dispatcher(grad: bool, dispatched: list[str]) -> None:
    x, y = numbers(1, 2, grad=grad), numbers(3, 4)
    output, _ = scaled_product(x, y, 0.5)
    assert output.tolist() == [1.5, 4]
    assert output.requires_grad is grad
    if grad:
        assert torch.autograd.grad(output.sum(), x)[0].tolist() == [1.5, 2]
    assert dispatched == []


def test_only_what_is_asked_for_is_saved_and_wanted() -> None:
    for scale, x_grad, y_grad in ((2.0, True, True), (2.0, False, True), (1.0, True, False)):
        x, y = numbers(1, 2, grad=x_grad), numbers(3, 4, grad=y_grad)
        output, kept = scaled_product(x, y, scale)
        assert not kept.requires_grad
        output.sum().backward()
        assert (x.grad is not None, y.grad is not None) == (x_grad, y_grad)
        assert LAUNCHES[-1] == f"backward {x_grad} {y_grad} {scale == 1}"


def test_modes_and_kinds_of_tensors_of_their_own_see_the_operator() -> None:
    x, y = numbers(1, 2, grad=True), numbers(3, 4)
    with Seen() as seen:
        output, _ = scaled_product(x, y, 0.5)
        output.sum().backward()
    assert {f"fourfold.{NAME}_cpu.default", f"fourfold.{NAME}_cpu_backward.default"} <= set(seen.names)

    class Kind(torch.Tensor):
        """A tensor subclass."""

    assert isinstance(scaled_product(numbers(1).as_subclass(Kind), numbers(2), 0.5)[0], Kind)


def test_views_that_are_not_their_memory_are_read_as_their_values() -> None:
    negative = torch._neg_view(numbers(-1, -2))
    assert scaled_product(negative, numbers(3, 4), 0.5)[0].tolist() == [1.5, 4]


@pytest.mark.parametrize("scale", [1, True, torch.tensor(1.0)], ids=str)
def test_numbers_that_are_not_floats_are_converted(scale: object) -> None:
    seen: list[type] = []

    def keep(x: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(type(scale))
        return x * scale

    kind = type(scale).__name__
    operator = operators.Operator(
        schema=f"{NAME}_{kind}(Tensor x, float scale) -> Tensor output",
        fake=lambda x, scale: torch.empty_like(x),
        backward=lambda ctx, grad_output: (grad_output, None),
    ).register("cpu", keep)
    assert operator(numbers(3), scale).tolist() == [3]
    assert seen == [float]


@pytest.mark.full
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_a_whole_number_may_be_given_for_a_parameter(backend: str, device: str) -> None:
    boxes = torch.tensor([[0.0, 0.0, 1.0, 2.0], [1.0, 1.0, 4.0, 2.0]], device=device)
    matrix = torch.tensor([[1.0, -2.0], [3.0, 0.5]], device=device)
    calls: dict[str, Callable] = {
        "giou": lambda f, one: f(boxes, boxes.flip(0), one),
        "layer_norm": lambda f, one: f(matrix, matrix[0], matrix[1], one),
        "rms_norm": lambda f, one: f(matrix, matrix[0], one),
        "cross_entropy": lambda f, one: f(matrix, torch.arange(2, device=device), -100, one),
        "matmul": lambda f, one: f(matrix, matrix, "leaky_relu", one),
    }
    for operation, call in calls.items():
        function = backends.load(operation, backend)
        assert torch.equal(call(function, 1), call(function, 1.0))


def test_a_cotangent_of_zeros_that_has_no_memory_gives_zeros(dispatched: list[str]) -> None:
    x, y = numbers(1, 2, grad=True), numbers(3, 4)
    zeros = torch._efficientzerotensor((2,))
    assert zeros.data_ptr() == 0
    output, _ = scaled_product(x, y, 0.5)
    assert torch.autograd.grad(output, x, zeros)[0].tolist() == [0, 0]
    assert dispatched == [f"{NAME}_cpu_backward"]


def test_a_result_without_a_cotangent_gives_no_gradient() -> None:
    class Dropped(torch.autograd.Function):
        """The identity, without a gradient."""

        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad_output: torch.Tensor) -> None:
            return None

    x, y = numbers(1, 2, grad=True), numbers(3, 4)
    output, _ = scaled_product(x, y, 0.5)
    (Dropped.apply(output).sum() + x.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    assert LAUNCHES == ["forward"]


def arguments_of(operation: str, x: torch.Tensor) -> tuple:
    """Return arguments for an operation. Only x, a 4x4 matrix, requires a gradient."""
    constant = x.detach()
    given = {
        "softmax": (x,),
        "layer_norm": (x, constant[0], constant[1]),
        "rms_norm": (x, constant[0]),
        "cross_entropy": (x, torch.arange(4, device=x.device)),
        "rope": (x[None], constant[:, :2], constant[:, 2:]),
        "cumsum": (x,),
        "topk": (x, 2),
    }
    return given.get(operation, (x, constant.flip(0)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    "operation", sampled(["layer_norm", "rms_norm", "cross_entropy", "topk", "giou_loss"], "rms_norm", "topk")
)
def test_results_that_have_no_cotangent_need_no_zeros(operation: str, backend: str, traced: bool, device: str) -> None:
    """Autograd would fill a tensor for each, and on a GPU that takes as long as the kernel of a small call."""
    x = torch.arange(16.0, device=device).reshape(4, 4).requires_grad_()
    function = backends.load(operation, backend)
    with Seen() if traced else contextlib.nullcontext():  # a mode sends the call through the dispatcher
        output = function(*arguments_of(operation, x))
    output = output[0] if isinstance(output, tuple) else output
    cotangent = torch.ones_like(output)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(output, x, cotangent)
    assert {event.key for event in profile.events()}.isdisjoint({"aten::zeros", "aten::zero_", "aten::fill_"})


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    "operation",
    sampled(["softmax", "layer_norm", "rms_norm", "cross_entropy", "rope", "cumsum", "matmul", "giou"], "rope"),
)
def test_a_gradient_of_a_gradient_raises(operation: str, backend: str, device: str) -> None:
    x = torch.arange(16.0, device=device).reshape(4, 4).requires_grad_()
    output = backends.load(operation, backend)(*arguments_of(operation, x))
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{operation}_{backend}_backward.* has no derivative"):
        torch.autograd.grad(gradient.sum(), x)


# ---- arguments that a caller passes only on a GPU, because they raise on the CPU


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("n", "offsets"),
    [
        (5, [1, 3, 5]),
        (5, [-1, 2, 5]),
        (5, [0, 2, 4]),
        (5, [0, 3, 6]),
        (5, [0, 4, 3, 5]),
        (3, [0, 10**9, -(10**9), 3]),
        (5000, [0, 3, 4999]),
        (1100, [*range(1090), 7, 1100]),
    ],
)
def test_sums_of_segments_that_do_not_fit_are_nan(n: int, offsets: list[int], backend: str, device: str) -> None:
    backends.load("cumsum", backend)
    operator, x = getattr(torch.ops.fourfold, f"cumsum_{backend}"), torch.ones(7, n, device=device)
    for kind, exclusive, reverse in itertools.product((torch.int32, torch.int64), (False, True), (False, True)):
        assert operator(x, torch.tensor(offsets, dtype=kind, device=device), exclusive, reverse).isnan().all()


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [64, 19])
def test_tokens_at_positions_that_there_are_not_are_nan_and_no_other(
    dim: int, interleaved: bool, backend: str, device: str
) -> None:
    x, table = (torch.ones(shape, device=device) for shape in ((2, 3, 5, dim), (4, 8)))
    positions = torch.tensor([[0, 4, 3], [-1, 2, 2**40]], device=device)
    function = backends.load("rope", backend)
    found = getattr(torch.ops.fourfold, f"rope_{backend}")(x, table, table, positions, interleaved)
    right = function(x, table, table, positions.clamp(0, 3), interleaved)
    outside = (positions < 0) | (positions > 3)
    assert found[outside].isnan().all()
    assert torch.equal(found[~outside], right[~outside])


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return a list with an item for each call that repeats a recorded one."""
    repeat, made = known_calls.KnownCalls.repeat, []
    monkeypatch.setattr(known_calls.KnownCalls, "repeat", lambda *given: made.append(given) or repeat(*given))
    return made


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", KERNELS)
def test_calls_alike_are_repeated_on_a_gpu(backend: str, repeated: list[tuple]) -> None:
    x, y, weight, table = (torch.randn(n, 8, device="cuda") for n in (6, 6, 2, 9))
    boxes = torch.rand(2, 3, 4, device="cuda").cumsum(-1)
    integers = torch.tensor([0, 2, 4, 3, 1, 3], device="cuda")
    calls: dict[str, tuple] = {
        "vector_add": (x, y),
        "swiglu": (x, y),
        "softmax": (x,),
        "layer_norm": (x, weight[0], weight[1], 1e-5),
        "rms_norm": (x, weight[0], 1e-6),
        "add_rms_norm": (x, y, weight[0], 1e-6),
        "cross_entropy": (x, integers, -100, 0.0, "mean"),
        "giou_loss": (boxes, boxes.flip(0), 1e-5),
        "giou_loss_ragged": (boxes, boxes[:, :2].flatten(0, 1), integers[:3], 1e-5),
        "embedding": (table, integers, None),
        "topk": (x, 2, True),
        # Large enough for descriptors.
        "matmul": (*(torch.randn(*s, device="cuda").bfloat16() for s in ((512, 64), (64, 1024))), "leaky_relu", 0.01),
        "scaled_matmul": (
            *(torch.randn(n, 128, device="cuda").to(torch.float8_e4m3fn) for n in (1024, 512)),
            *(torch.ones(n, 1, device="cuda") for n in (1024, 4)),
            torch.bfloat16,
        ),
        "rowwise_scaled_matmul": (
            *(torch.randn(n, 128, device="cuda").to(torch.float8_e5m2) for n in (1024, 512)),
            *(torch.ones(n, device="cuda") for n in (1024, 512)),
            torch.bfloat16,
        ),
        "int8_matmul": (
            *(torch.randint(-128, 128, (n, 128), device="cuda", dtype=torch.int8) for n in (1024, 512)),
            *(torch.ones(n, device="cuda") for n in (1024, 512)),
            torch.bfloat16,
        ),
        "paged_attention": (
            torch.randn(2, 4, 32, device="cuda"),
            *torch.randn(2, 5, 8, 2, 32, device="cuda"),
            torch.tensor([[0, 3], [4, 1]], device="cuda", dtype=torch.int32),
            torch.tensor([9, 16], device="cuda", dtype=torch.int32),
            0.25,
        ),
        "attention": (*torch.randn(3, 32, 2, 64, device="cuda").half(), None, None, True, None, (-1, -1), None),
    }
    without_gradient = {"paged_attention", "scaled_matmul", "rowwise_scaled_matmul", "int8_matmul"}
    for operation, arguments in calls.items():
        function, results = backends.load(operation, backend), []
        for _ in range(5):
            given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            given[0].requires_grad_(operation not in without_gradient)
            with compiling_only(()):
                outputs = function(*given)
                first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
                of_first = torch.autograd.grad(first.square().sum(), given[0]) if first.requires_grad else ()
                results.append((first, *of_first, function(*arguments)))
        repeated.clear()
        function(*arguments)
        assert len(repeated) == 1, operation
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", KERNELS)
def test_other_boxes_of_a_known_shape_have_their_own_kept_boxes_on_a_gpu(backend: str, repeated: list[tuple]) -> None:
    nms, definition = backends.load("nms", backend), backends.load("nms", "torch")
    seen = []
    with compiling_only(()):
        for _ in range(5):
            corners = torch.rand(200, 2, device="cuda")
            boxes, scores = torch.cat([corners, corners + 0.25], 1), torch.rand(200, device="cuda")
            kept = nms(boxes, scores, 0.3)
            assert kept.tolist() == definition(boxes, scores, 0.3).tolist()
            seen.append(kept.tolist())
    assert len(repeated) == 3
    assert len({*map(tuple, seen)}) == len(seen)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", KERNELS)
def test_steps_of_adam_are_repeated_with_their_own_numbers_on_a_gpu(backend: str, repeated: list[tuple]) -> None:
    adam = backends.load("adam", backend)
    tensors = [torch.rand(1000, device="cuda") for _ in range(4)]
    with compiling_only(()):
        for step in (1, 2, 2, 3, 4):
            dispatched = [tensor.clone() for tensor in tensors]
            with Seen():  # no call that a mode sees is repeated
                adam(*dispatched, lr=0.5, weight_decay=0.25, step=step)
            adam(*tensors, lr=0.5, weight_decay=0.25, step=step)
            torch.testing.assert_close(tensors, dispatched, rtol=0, atol=0)
    assert len(repeated) == 3
