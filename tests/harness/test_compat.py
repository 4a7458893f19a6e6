"""A contract test for each private part of another library that this project relies on, named after it.

If a release has changed one, the test of that name fails; `fourfold.compat.users_of_parts` says which functions use
it.
"""

import _thread
import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda.core
import hypothesis
import pytest
import torch
import triton
import triton.language as tl
import warm
from hypothesis import strategies as st
from one_run import one_run
from torch.autograd import forward_ad

from fourfold import compat
from fourfold.candidates.integrity.snapshot import Snapshot, modules_of
from fourfold.compat import (
    MissingPart,
    cuda_core_internals,
    dynamo_internals,
    hypothesis_internals,
    pytest_internals,
    python_internals,
    torch_internals,
    triton_internals,
    uses,
)

ROOT = Path(__file__).parents[2]
MODULES = [importlib.import_module(f"{compat.__name__}.{m.name}") for m in pkgutil.iter_modules(compat.__path__)]
PARTS = dict(compat.users_of_parts())

Contract = Callable[[], None]
CONTRACTS: dict[str, Contract] = {}


def contract(*parts: str) -> Callable[[Contract], Contract]:
    """Register the decorated test for these parts."""

    def kept(test: Contract) -> Contract:
        CONTRACTS.update(dict.fromkeys(parts, test))
        return test

    return kept


def gives(found: Callable[[], Any], expected: Any, *parts: str) -> None:
    """Register a test that a function which uses these parts returns the expected value."""

    def test() -> None:
        assert found() == expected

    contract(*parts)(test)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_part(part: str) -> None:
    assert part in CONTRACTS, f"{part}, which {', '.join(PARTS[part])} uses, has no contract test"
    CONTRACTS[part]()


def test_every_contract_is_of_a_part_that_is_used() -> None:
    assert set(CONTRACTS) == set(PARTS)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_has_an_underscore_is_named_as_a_part(module: Any) -> None:
    found = [node.attr for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)]
    named = {name for part in PARTS for name in re.findall(r"\w+", part)}
    assert {name for name in found if re.match(r"_[^_]", name)} <= named


@pytest.mark.parametrize("module", [compat, *MODULES], ids=lambda module: module.__name__)
def test_it_imports_nothing_else_of_this_project(module: Any) -> None:
    tree = ast.walk(ast.parse(inspect.getsource(module)))
    imports = [ast.unparse(node) for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {text for text in imports if "fourfold" in text or "from ." in text} <= {
        "from fourfold.compat import uses",
        "from fourfold.compat import find, uses",
    }


# ---- torch

LIBRARY = torch.library.Library("fourfold_compat", "FRAGMENT")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: x.mul(2), "CPU")
DOUBLED = torch.ops.fourfold_compat.doubled.default


class Seen(torch_internals.dispatch_mode()):
    """A mode that records the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


@contract("torch._C._cuda_getCurrentRawStream")
def current_stream_of_a_device() -> None:
    # A build without CUDA lacks it; the stubs are the same for all builds.
    stub = Path(torch.__file__).parent / "_C" / "__init__.pyi"
    assert "def _cuda_getCurrentRawStream(device: _int) -> _int:" in stub.read_text()
    assert hasattr(torch._C, "_cuda_getCurrentRawStream") == (torch.version.cuda is not None)
    if torch.cuda.is_available():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert torch_internals.current_stream(stream.device_index) == stream.cuda_stream != 0


@contract("torch._C._FunctionBase.apply")
def apply_without_a_search_for_wrapped_tensors() -> None:
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    methods = {"forward": forward, "backward": lambda ctx, grad: (ctx.factor * grad, None)}
    scale = type("Scale", (torch.autograd.Function,), {name: staticmethod(each) for name, each in methods.items()})
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch_internals.direct_apply(scale)(x, 2.0).sum(), x)
    assert gradient.tolist() == [2.0] * 3


LEAF = torch.ones(2, requires_grad=True)
gives(
    lambda: [torch_internals.shares_a_base(tensor) for tensor in (LEAF, LEAF * 1, LEAF.view_as(LEAF))],
    [False, False, True],
    "torch.Tensor._is_view",
)


def watched(mode: AbstractContextManager) -> list[bool]:
    with mode:
        within = torch_internals.calls_are_watched()
    return [within, torch_internals.calls_are_watched()]


gives(lambda: watched(Seen()), [True, False], "torch._C._len_torch_dispatch_stack")
gives(lambda: watched(torch.overrides.TorchFunctionMode()), [True, False], "torch._C._len_torch_function_stack")
gives(lambda: watched(forward_ad.dual_level()), [True, False], "torch.autograd.forward_ad._current_level")


@contract("torch._C._are_functorch_transforms_active")
def transforms_that_are_at_work() -> None:
    watched: list[bool] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        watched.append(torch_internals.calls_are_watched())
        return x * 2

    torch.vmap(doubled)(torch.ones(2, 2))
    torch.func.grad(lambda x: doubled(x).sum())(torch.ones(2))
    doubled(torch.ones(2))
    assert watched == [True, True, False]


ZEROS = torch._efficientzerotensor, torch.zeros  # the first without memory
gives(
    lambda: [torch_internals.is_without_memory(make(2)) for make in ZEROS], [True, False], "torch.Tensor._is_zerotensor"
)


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def mode_that_sees_what_is_dispatched() -> None:
    with Seen() as seen:
        torch.ones(3).add(1)
    assert [str(operator) for operator in seen.operators] == ["aten.ones.default", "aten.add.Tensor"]


@contract("torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo")
def mode_without_the_compiler() -> None:
    """Check that a mode neither imports torch's compiler nor prevents compilation before or after it."""
    script = """
import sys
import torch
from fourfold.compat import torch_internals

class Seen(torch_internals.dispatch_mode()):
    seen = 0
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        Seen.seen += 1
        return operator(*args, **(kwargs or {}))

with Seen():
    torch.ones(3).add(1)
assert Seen.seen == 2
assert "torch._dynamo" not in sys.modules
doubled = torch.compile(lambda x: x.cos() * 2, backend="eager")
with Seen():
    assert torch.equal(doubled(torch.zeros(3)), torch.full((3,), 2.0))
assert Seen.seen > 4
assert torch.equal(doubled(torch.zeros(3)), torch.full((3,), 2.0))
"""
    warm.printed(script, cwd=ROOT)


@contract("torch.Tensor._make_wrapper_subclass")
def tensor_without_memory() -> None:
    class Described(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return torch.zeros(())

    seen: list[str] = []
    tensor = torch_internals.wrapper_tensor(Described, (2, 3), (1, 2), 4, torch.float16)
    assert isinstance(tensor, Described)
    assert (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) == ((2, 3), (1, 2), 4, torch.float16)
    torch.neg(tensor)
    assert seen == ["aten.neg.default"]


@contract("torch._dynamo.callback.callback_handler")
def compilation_by_torch() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def compilation() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    def traced(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        events.append("compile")
        return graph

    doubled = torch.compile(lambda x: x.sin() * 2, backend=traced)
    with dynamo_internals.around_compilation(compilation):
        for _ in range(2):
            assert torch.equal(doubled(torch.zeros(3)), torch.zeros(3))
    assert events == ["begin", "compile", "end"]
    torch.compile(lambda x: x.cos() * 2, backend=traced)(torch.zeros(3))
    assert events == ["begin", "compile", "end", "compile"]


@contract("torch._inductor.runtime.benchmarking.benchmarker")
def measurement_by_torch() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    events: list[str] = []

    @contextlib.contextmanager
    def measurement() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    def time(benchmarker: object, function: Callable[[], None], **options: Any) -> float:
        function()
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(benchmarker), "benchmark_gpu", time)
        with dynamo_internals.around_measurements(measurement):
            # The tuner of kernels calls the first one, the choice of a padding the second.
            assert benchmarker.benchmark(lambda: events.append("run"), (), {}, device="cuda") == 1.0
            assert benchmarker.benchmark_gpu(lambda: events.append("run")) == 1.0
        assert events == ["begin", "run", "end"] * 2
        benchmarker.benchmark_gpu(lambda: None)
    assert events == ["begin", "run", "end"] * 2


@contract("torch._decomp.decomposition_table")
def operators_by_simpler_ones() -> None:
    x = torch.rand(1, 1, 2, 2)
    doubled = torch_internals.decompositions()["aten.upsample_nearest2d.default"](x, [4, 4])
    assert torch.equal(doubled, torch.nn.functional.interpolate(x, scale_factor=2.0))


ATEN = torch.ops.aten
OPERATORS = ATEN.add.Tensor, ATEN.view.default, ATEN.t.default, ATEN.clone.default, ATEN.add_.Tensor
OVERLOAD = "torch._ops.OpOverload"
gives(
    lambda: [torch_internals.namespace(operator) for operator in (ATEN.add.Tensor, DOUBLED)],
    ["aten", "fourfold_compat"],
    f"{OVERLOAD}.namespace",
)
gives(lambda: torch_internals.overload_packet(ATEN.add.Tensor), ATEN.add, f"{OVERLOAD}.overloadpacket")
gives(
    lambda: [bool(torch_internals.is_view(operator)) for operator in OPERATORS],
    [False, True, True, False, False],
    f"{OVERLOAD}().is_view",
)
gives(lambda: torch_internals.argument_names(ATEN.softmax.int), ["self", "dim", "dtype"], f"{OVERLOAD}()._schema")


@contract("torch._ops.OpOverload.redispatch", "torch._C.DispatchKey", "torch._C.DispatchKeySet")
def kernel_that_is_run_without_dispatch() -> None:
    x = torch.ones(3)
    with Seen() as seen:
        doubled = torch_internals.run_kernel(DOUBLED, "cpu", (x,), {})
    assert doubled.tolist() == [2, 2, 2]
    # The kernel's calls are seen, the operator itself is not.
    assert [str(operator) for operator in seen.operators] == ["aten.mul.Tensor"]
    assert hasattr(torch._C.DispatchKey, "CUDA")


@contract(
    "torch.ops.aten._to_copy",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._reshape_copy",
    "torch.ops.aten._unsafe_view",
)
def operators_that_copy() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with Seen() as seen:
        x.to(torch.float64)
        x.sum().item()
        torch.matmul(torch.ones(2, 2, 3), torch.ones(3, 2))
        torch.ops.aten._reshape_copy(x.t(), [6])
    assert torch_internals.copying_operators() <= {torch_internals.overload_packet(seen) for seen in seen.operators}


@contract("torch.cuda._sleep")
def wait_of_a_stream() -> None:
    assert list(inspect.signature(torch.cuda._sleep).parameters) == ["cycles"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch_internals.keep_stream_busy(1_000_000_000)
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        event.synchronize()


@contract("torch.autograd.grad saying 'inplace operation'; 'modified inplace' of a custom Function's view")
def error_of_a_tensor_that_was_written_into() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(y.sum(), x)
    assert torch_internals.says_written_into(caught.value)

    class Reshaped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.exp().view(3)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    y = Reshaped.apply(x.view(3, 1))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(y, x, torch.ones(3))
    assert torch_internals.says_written_into(caught.value)
    with pytest.raises(RuntimeError) as other:
        torch.autograd.grad(torch.ones(2).sum(), x)
    assert not torch_internals.says_written_into(other.value)


@contract("torch.Tensor._version")
def version_counts_writes_in_place() -> None:
    x = torch.zeros(2)
    assert torch_internals.version(x) == 0
    x[1:].add_(1)
    x.data.add_(1)  # which autograd must not see
    assert torch_internals.version(x) == torch_internals.version(x.detach()) == 1


@contract("torch._int_mm")
def product_of_int8_matrices() -> None:
    a, b = torch.full((32, 64), -128, dtype=torch.int8), torch.full((64, 16), 127, dtype=torch.int8)
    product = torch_internals.int8_product(a, b)
    assert (product.dtype, product.unique().tolist()) == (torch.int32, [-128 * 127 * 64])


@contract("torch._neg_view")
def view_of_the_negatives() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    view = torch_internals.negated_view(x)
    assert view.is_neg()
    assert (view.data_ptr(), view.stride()) == (x.data_ptr(), x.stride())
    assert view.tolist() == (-x).tolist()


def test_the_public_view_of_the_negatives_holds_the_same() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    view = torch_internals._imaginary_part(x)
    assert view.is_neg()
    assert view.tolist() == (-x).tolist()


@contract("torch.utils._device._device_constructors")
def functions_that_make_tensors_on_the_default_device() -> None:
    assert {torch.empty, torch.rand, torch.tensor, torch.arange} <= torch_internals.constructors()
    assert torch.empty_like not in torch_internals.constructors()


@contract("torch.utils._device.CURRENT_DEVICE")
def the_default_device() -> None:
    assert torch_internals.default_device() == torch.device("cpu")
    torch.set_default_device("meta")
    try:
        assert torch_internals.default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


@contract(
    "torch.cuda._DeviceGuard",
    "torch.cuda._exchange_device",
    "torch.cuda._maybe_exchange_device",
    "torch._C._dynamo.guards._empty_strided_cuda",
)
def what_compiled_code_asks_of_a_gpu() -> None:
    guards = torch._C._dynamo.guards
    places = [(torch.cuda, "_DeviceGuard"), (torch.cuda, "_exchange_device"), (torch.cuda, "_maybe_exchange_device")]
    places += [(guards, "_empty_strided_cuda"), (torch._C, "_cuda_getCurrentRawStream")]
    with pytest.MonkeyPatch.context() as patch:
        for place, name in places:  # so that they are put back
            patch.setattr(place, name, getattr(place, name, None), raising=False)
        torch_internals.replace_in_compiled_code(list)
        assert torch.cuda._DeviceGuard is list
        assert torch.cuda._exchange_device(0) == 0
        assert guards._empty_strided_cuda.__module__ == torch_internals.__name__


@contract("torch._C._dynamo.guards.TensorGuards")
def guards_of_tensors() -> None:
    x, weight = torch.randn(4, 6), torch.nn.Parameter(torch.randn(6))
    match = torch_internals.tensors_match((x, weight))
    assert match is not None, f"try torch {torch.__version__} and set _NEWEST_TRIED"
    assert match(torch.zeros(4, 6), torch.nn.Parameter(torch.ones(6)))
    others = x[:3], x.double(), x.view(6, 4).t(), x.to("meta"), x.clone().requires_grad_(), torch.nn.Parameter(x)
    for other in (*others, torch_internals.negated_view(x), x.view(2, 2, 6), torch.ones(2, 4, 6)[:, 0], None):
        assert not match(other, weight), other
    with torch.no_grad():  # has no effect
        assert match(x, weight)
        assert not match(x, torch.ones(6))
    given = torch.ones(2)
    kept, match = weakref.ref(given), torch_internals.tensors_match((given,))
    del given
    assert kept() is None, "a tensor is kept alive"


@contract("torch._C._StaticCudaLauncher._launch_kernel")
def launcher_of_compiled_code() -> None:
    if torch.version.cuda is None:
        assert torch_internals.launcher(1, (1, 1, 1), (32, 1, 1), 0, "O") is None
        return
    # Without blocks it returns before it needs a GPU.
    launch = torch_internals.launcher(1, (0, 1, 1), (64, 1, 1), 128, "bhilBHIKfdO")
    assert launch is not None, f"try torch {torch.__version__} and set _NEWEST_TRIED"
    assert launch((0,) * 11, 7) is None
    with pytest.raises(TypeError, match="exactly 9 arguments"):
        launch.func()
    # The compiler of this release passes arguments in the same order.
    source = inspect.getsource(importlib.import_module("torch._inductor.runtime.static_triton_launcher"))
    (passed,) = re.findall(r"_launch_kernel\(\s*\S*\bfunction,\s*([^)]*?),?\s*\)", source)
    assert re.findall(r"\w+", passed.replace("self.", "")) == [
        *("grid_x", "grid_y", "grid_z", "num_warps", "shared", "arg_tys", "args", "stream")
    ]
    assert launch.args == (1, 0, 1, 1, 2, 128, "bhilBHIKfdO")
    for block in ((48, 1, 1), (32, 2, 1)):
        assert torch_internals.launcher(1, (1, 1, 1), block, 0, "O") is None
    assert torch_internals.launcher(1, (1 << 16, 1 << 15, 1), (32, 1, 1), 0, "O") is None


@contract("torch.fx.experimental._config.use_duck_shape")
def sizes_that_happen_to_be_equal() -> None:
    def recompiles() -> bool:
        torch.compiler.reset()
        function = torch.compile(lambda x, y: (x.sum(), y.sum()), backend="eager", dynamic=True)
        function(torch.ones(5), torch.ones(5))
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                function(torch.ones(6), torch.ones(7))
            except RuntimeError:
                return True
        return False

    assert recompiles()
    with torch_internals.sizes_are_their_own():
        assert not recompiles()
    torch.compiler.reset()


# ---- Triton


def fill_kernel(x: Any, n: Any, m: Any, BLOCK: tl.constexpr) -> None:
    tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < n + m)


@contract(
    "triton.runtime.JITFunction().params",
    "triton.runtime.jit.KernelParam().name",
    "triton.runtime.jit.KernelParam().is_constexpr",
    "triton.runtime.jit.KernelParam().do_not_specialize",
)
def parameters_of_a_kernel() -> None:
    kernel = triton.JITFunction(fill_kernel, do_not_specialize=["m"])
    expected = [("x", False, False), ("n", False, False), ("m", False, True), ("BLOCK", True, False)]
    assert triton_internals.parameters(kernel) == expected
    assert triton_internals.KNOWS_LAUNCHES


@contract(
    "triton.compiler.CompiledKernel.__getitem__",
    "triton.compiler.CompiledKernel.run",
    "triton.compiler.CompiledKernel().function",
    "triton.compiler.CompiledKernel().packed_metadata",
    "triton.knobs.HookChain().calls",
)
def launches_of_a_compiled_kernel() -> None:
    ran: list[tuple] = []
    compiled = SimpleNamespace(
        _init_handles=lambda: None,
        launch_metadata=lambda *launch: "launch",
        run=lambda *launch: ran.append(launch),
        function="function",
        packed_metadata="metadata",
    )
    shipped = compat.find("triton.compiler.CompiledKernel.__getitem__")
    members = {**vars(compiled), "run": staticmethod(compiled.run)}
    like_it = type("LikeIt", (), {**members, "__getitem__": lambda self, grid: shipped(compiled, grid)})()
    launch = triton_internals.relauncher(like_it, (4, 5, 6))
    triton_internals.launch_compiled(like_it, (4, 5, 6), ("x", 7), 8)
    launch(("x", 7), 8)
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(print)
        launch(("x", 7), 8)
        hook.remove(print)
    assert [(*launch[:6], *launch[9:]) for launch in ran] == [(4, 5, 6, 8, "function", "metadata", "x", 7)] * 4
    described = "launch", *hooks
    assert [launch[6:9] for launch in ran] == [described, (None, None, None), described, described]


# Triton reads a kernel's source from its file, and compiles in no process that interprets.
FILLS = f"import triton, triton.language as tl\n@triton.jit\n{inspect.getsource(fill_kernel).replace(': Any', '')}"
COMPILES = """
import json, sys
import torch, triton
sys.path.insert(0, sys.argv[1])
from fills import fill_kernel
from fourfold.compat import triton_internals

asked, codes, shapes, entries = [], [], [], []

def run(shipped, kernel, *arguments, grid, warmup, **options):
    asked.append([kernel.__name__, list(grid), warmup, len(arguments), sorted(options)])
    compiled = shipped(kernel, *arguments, grid=grid, warmup=True, **options)
    codes.append(triton_internals.code_of(compiled))
    shapes.append(triton_internals.shape_of(compiled))
    entries.append(triton_internals.entry_of(compiled))
    return compiled

shipped, before = triton.JITFunction.run, triton.runtime.driver._active
for capability in (80, 90):
    driver = triton_internals.AbsentDriver(capability)
    with triton_internals.driver_replaced(driver), triton_internals.launches_replaced(run):
        returned = fill_kernel[(3,)](torch.zeros(8), 4, 5, BLOCK=8, num_warps=2)
        assert triton.runtime.driver.active is driver
compilations, shipped_compile = [], triton.JITFunction._do_compile

def compile_or_load(wanted):
    try:
        wanted.load()
        kept = True
    except triton_internals.NotKept:
        kept = False
    compilations.append([wanted.kernel, len(wanted.digest), wanted.sizes, wanted.num_warps, kept])
    return wanted.run()

with triton_internals.driver_replaced(driver), triton_internals.compilations_replaced(compile_or_load):
    for kernel in (fill_kernel, triton.JITFunction(fill_kernel.fn)):  # the second finds on disk what the first compiles
        kernel.warmup(torch.zeros(8), 4, 5, BLOCK=16, num_warps=2, grid=(3,))
compilations.append(triton.JITFunction._do_compile is shipped_compile)
failed = []
with triton_internals.driver_replaced(driver):
    for grid in ((3, 70_000), lambda meta: (meta["BLOCK"],)):
        try:
            fill_kernel[grid](torch.zeros(8), 4, 5, BLOCK=8, num_warps=2)
        except Exception as error:
            failed.append(triton_internals.failed_launch(error))
restored = triton.JITFunction.run is shipped and triton.runtime.driver._active is before
returned = triton_internals.code_of(returned) == codes[1]
codes = [[code.digest, code.name, code.cubin[:4].hex(), code.ptx] for code in codes]
found = dict(asked=asked, restored=restored, returned=returned, codes=codes, shapes=shapes, entries=entries)
found["compilations"] = compilations
found["failed"] = failed
print(json.dumps(found))
"""


@one_run
def compiled_without_a_gpu() -> dict[str, Any]:
    """Return the findings of `COMPILES`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fills.py").write_text(FILLS)
        environment["TRITON_CACHE_DIR"] = folder
        return json.loads(warm.printed(COMPILES, folder, env=environment))


@contract("triton.runtime.JITFunction.run")
def launches_that_are_replaced() -> None:
    found = compiled_without_a_gpu()
    assert found["asked"] == [["fill_kernel", [3], False, 3, ["BLOCK", "num_warps"]]] * 2
    assert found["returned"]
    assert found["failed"] == [["fill_kernel", [3, 70_000]], ["fill_kernel", [8]]]


@contract(
    "triton.runtime.JITFunction._do_compile",
    "triton.runtime.JITFunction().cache_key",
    "triton.backends.nvidia.compiler.CUDABackend.add_stages",
)
def compilations_that_are_replaced() -> None:
    *found, restored = compiled_without_a_gpu()["compilations"]
    about = ["fill_kernel", 64, {"BLOCK": 16}, 2]
    assert found == [[*about, False], [*about, True]]
    assert restored


@contract("triton.runtime.cache.triton_key")
def key_of_triton_is_asked_for_by_its_module() -> None:
    cache = importlib.import_module("triton.runtime.cache")
    assert "triton_key" in cache.get_cache_key.__code__.co_names
    assert not inspect.signature(cache.triton_key).parameters


@contract("triton._C.libtriton.nvidia.cublas.CublasLt")
def calls_of_cublas() -> None:
    cublas = triton._C.libtriton.nvidia.cublas
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublas, "CublasLt", cublas.CublasLt)
        triton_internals.replace_cublas(list)
        assert cublas.CublasLt is list


@contract("triton.backends.compiler.GPUTarget")
def target_that_is_compiled_for() -> None:
    targets = [re.findall(r"^\.target (\w+)", code[3], re.MULTILINE) for code in compiled_without_a_gpu()["codes"]]
    assert [target.rstrip("a") for (target,) in targets] == ["sm_80", "sm_90"]


def compiled_codes(place: int) -> list[str]:
    return [code[place] for code in compiled_without_a_gpu()["codes"]]


gives(
    lambda: compiled_without_a_gpu()["restored"],
    True,
    "triton.runtime.driver._active",
    "triton.runtime.driver.set_active",
)
gives(lambda: len(set(compiled_codes(0))), 2, "triton.compiler.CompiledKernel().hash")
gives(
    lambda: [*compiled_codes(1), *compiled_without_a_gpu()["shapes"]],
    ["fill_kernel", "fill_kernel", [64, 0, 1, [], "sm_80"], [64, 0, 1, [], "sm_90"]],
    "triton.compiler.CompiledKernel().metadata",
)


@contract("triton.compiler.ASTSource().signature")
def what_is_passed_to_a_compiled_kernel() -> None:
    found = compiled_without_a_gpu()
    assert found["entries"] == [[None, [0, 1, 2], "OiiOO"]] * 2
    for _, name, _, ptx in found["codes"]:
        types = re.findall(rf"\.param \.[a-z](\d+)[^,)]* {name}_param_", ptx.partition(f".entry {name}(")[2])
        assert types == ["64", "32", "32", "64", "64"]


@contract("triton.compiler.CompiledKernel().asm")
def code_of_compiled_kernels() -> None:
    for _, name, beginning, ptx in compiled_without_a_gpu()["codes"]:
        assert bytes.fromhex(beginning) == b"\x7fELF"
        assert f".entry {name}(" in ptx


# ---- pytest and its plugins

HOOKS = """
import json, os, pathlib
import pytest
from fourfold.compat import pytest_internals, xdist_internals

def say(**what):
    with pathlib.Path(os.environ["SAID"]).open("a") as file:
        file.write(json.dumps(what) + "\\n")

def pytest_cmdline_main(config):
    say(asked=xdist_internals.is_asked_for(config))
    xdist_internals.replace_all_workers(config)
    xdist_internals.hand_out_one_by_one(config)

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    controller, worker = xdist_internals.is_controller(config), xdist_internals.is_worker(config)
    told = xdist_internals.inputs(config)["told"] if worker else None
    say(controller=controller, worker=worker, told=told, number=xdist_internals.worker_number())

@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    xdist_internals.inputs_of(node)["told"] = "this to " + xdist_internals.name_of(node)

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    say(workers=len(specs))

@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report):
    say(crashed=crashitem.rpartition(":")[2], told=xdist_internals.inputs_of(report.node)["told"])

def pytest_runtest_logreport(report):
    if report.when == "call" and report.failed:
        say(message=pytest_internals.message_of(report))
    if report.skipped:
        say(reason=pytest_internals.skip_reason_of(report))

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if item.name == "test_never":
        pytest_internals.stop(item.session, "no further")
"""
Said = list[dict[str, Any]]


def run_pytest(tests: str, *runs: Sequence[str], hooks: str = "") -> tuple[Said, str]:
    """Run pytest several times in one folder; return what the hooks of the last run say, and its output."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        environment = warm.variables(PYTHONPATH=str(ROOT), SAID=str(said))
        Path(folder, "conftest.py").write_text(HOOKS + hooks)
        Path(folder, "test_some.py").write_text(tests)
        for options in runs:
            said.write_text("")
            # Hypothesis's plugin takes a second to import.
            alone = ["-p", "no:hypothesispytest", "-c", os.devnull, "--rootdir", folder]
            command = [sys.executable, "-m", "pytest", folder, *alone, *options]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        return [json.loads(line) for line in said.read_text().splitlines()], done.stdout + done.stderr


CRASHES = "import os\n" + "".join(f"def test_{number}(): os._exit(1)\n" for number in range(6))


@one_run
def crashing_workers() -> tuple[Said, str]:
    """Run one worker that dies more than four times: by default pytest-xdist gives up then."""
    return run_pytest(CRASHES, ("-n", "1"))


@contract("pytest.Config().workerinput", "xdist.workermanage.WorkerController().workerinput")
def what_workers_are_told() -> None:
    said, printed = crashing_workers()
    told = [one["told"] for one in said if one.get("worker")]
    assert told[:6] == [f"this to gw{number}" for number in range(6)], printed
    crashed = {one["told"] for one in said if "crashed" in one}
    assert crashed == {f"this to gw{number}" for number in range(6)}


WORKERS_TELL = """
def pytest_sessionfinish(session):
    if xdist_internals.is_worker(session.config):
        xdist_internals.outputs(session.config)["last"] = ["all", "done"]

@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    say(down=xdist_internals.outputs_of(node).get("last"))
"""


WAITS = """
import pathlib, time
import pytest

@pytest.mark.parametrize("number", range(64))
def test_it(number):
    here = pathlib.Path(__file__).parent
    (here / f"ran{number}").touch()
    while number == 0 and len(list(here.glob("ran*"))) < 63:
        time.sleep(0.01)
"""


@one_run
def two_workers() -> tuple[Said, str]:
    """Return what two workers say: one is at the first test until the other has run all but two."""
    return run_pytest(WAITS, ("-n", "2"), hooks=WORKERS_TELL)


@contract("pytest.Config().workeroutput", "xdist.workermanage.WorkerController().workeroutput")
def what_workers_tell() -> None:
    said, printed = two_workers()
    assert [one["down"] for one in said if "down" in one] == [["all", "done"]] * 2, printed


FORKS = """
from fourfold.processes.child import Child

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    xdist_internals.set_by = os.getpid()
    forking = xdist_internals.forking_workers(lambda work: Child.fork(work, session=False))
    forking.__enter__()
    config.add_cleanup(lambda: forking.__exit__(None, None, None))

def pytest_sessionfinish(session):
    if xdist_internals.is_worker(session.config):
        say(parent=os.getppid(), set_by=vars(xdist_internals).get("set_by"))
"""


@contract("execnet.gateway_io.create_io", "execnet.gateway_io.popen_bootstrapline", "execnet.gateway_base.Popen2IO")
def workers_that_are_forked() -> None:
    """Three workers, one in the place of one that dies: each has the modules of the controller."""
    tests = CRASHES[: CRASHES.index("def test_1")] + "".join(f"def test_{each}(): pass\n" for each in range(1, 8))
    said, printed = run_pytest(tests, ("-n", "2"), hooks=FORKS)
    ended = [one for one in said if "set_by" in one]
    assert len(ended) == 2, printed
    assert "1 failed, 7 passed" in printed
    assert all(one["set_by"] == one["parent"] for one in ended)


gives(
    lambda: [one["number"] for one in crashing_workers()[0] if "controller" in one][:7],
    [None, 0, 1, 2, 3, 4, 5],
    "xdist.workermanage.WorkerController().gateway.id",
)
gives(
    lambda: re.findall(r"\b6 failed\b", crashing_workers()[1]), ["6 failed"], "pytest.Config().option.maxworkerrestart"
)
# A worker holds one test besides the running one; by default it holds seven, and the first never ends.
gives(lambda: re.findall(r"\b64 passed\b", two_workers()[1]), ["64 passed"], "pytest.Config().option.maxschedchunk")


@contract("pytest.Config().option.tx")
def controller_of_workers() -> None:
    said, _ = crashing_workers()
    assert said[0] == {"asked": True}
    assert [one["controller"] for one in said if "controller" in one][:3] == [True, False, False]
    assert [one["workers"] for one in said if "workers" in one] == [1]


OUTCOMES = """
import pytest
def test_wrong(): raise ValueError("so it is")
@pytest.mark.skip(reason="for a reason")
def test_marked(): pass
def test_skips(): pytest.skip("on the way")
def test_never(): pass
def test_after(): pass
"""


@one_run
def outcomes() -> tuple[Said, str]:
    """Run tests that fail, skip or stop the run."""
    return run_pytest(OUTCOMES, ("-n", "0"))


def test_this_process_runs_the_tests_itself_where_there_are_no_workers() -> None:
    load = run_pytest("def test_one(): pass", ("--dist", "load"))
    for (said, printed), asked, passed in ((outcomes(), True, "1 failed"), (load, False, "1 passed")):
        assert passed in printed
        assert said[0] == {"asked": asked}
        assert [(one["controller"], one["worker"]) for one in said if "controller" in one] == [(False, False)]


def said_of(what: str) -> list[Any]:
    return [one[what] for one in outcomes()[0] if what in one]


gives(lambda: said_of("message")[:1], ["ValueError: so it is"], "pytest.TestReport().longrepr.reprcrash")
gives(lambda: said_of("reason"), ["for a reason", "on the way"], "pytest.TestReport().longrepr[2]")
gives(
    lambda: re.findall(r"= (1 failed, 2 skipped) in ", outcomes()[1]), ["1 failed, 2 skipped"], "pytest.Session.Failed"
)


def test_frames_of_pytest_are_told_from_those_of_a_test() -> None:
    # As faulthandler writes them.
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.function}' for frame in inspect.stack()]
    assert not pytest_internals.is_own_frame(lines[0])
    assert pytest_internals.is_own_frame(lines[1])
    assert pytest_internals.is_own_frame(next(line for line in lines if "pluggy" in line))


BENCHMARKS = """
import glob
from fourfold.compat import pytest_benchmark_internals
from conftest import say

def test_kept(benchmark):
    benchmark(lambda: sum(range(100 + 20_000 * len(glob.glob("kept/*/*.json")))))  # slower in the second run
    say(median=pytest_benchmark_internals.median_of(benchmark), name=pytest_benchmark_internals.name_of(benchmark))

def test_discarded(benchmark):
    benchmark(lambda: None)
    pytest_benchmark_internals.discard(benchmark)
"""
BENCHMARK_HOOKS = """
from fourfold.compat import pytest_benchmark_internals

@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_compare_machine_info(config, benchmarksession, machine_info, compared_benchmark):
    runs = pytest_benchmark_internals.saved_runs(benchmarksession)
    say(recorded=[[one["fullname"] for one in run["benchmarks"]] for run in runs])
    loads.append(compared_benchmark)

loads = []

def pytest_collection_modifyitems(config):
    if config.getoption("--benchmark-compare"):
        before = len(loads)
        pytest_benchmark_internals.load_again(config)
        say(loads=[before, len(loads)])

@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_group_stats(config, benchmarks):
    today = pytest_benchmark_internals.current_benchmarks(benchmarks)
    say(today=[[one["fullname"], one["median"]] for one in today], compared=len(benchmarks))
    say(withdrawn=sorted(pytest_benchmark_internals.withdraw_regressions(config, benchmarks)))

def pytest_sessionfinish(session):
    folder = pytest_benchmark_internals.storage_folder(session.config)
    say(
        json=str(pytest_benchmark_internals.json_file(session.config)),
        folder=str(folder),
        files=[file.name[:5] for file in pytest_benchmark_internals.saved_files(folder)],
        processor="arch" in pytest_benchmark_internals.processor(session.config),
    )
"""


@one_run
def compared_benchmarks() -> dict[str, Any]:
    """Compare a run of benchmarks with an earlier one."""
    options = ["-n", "0", "--benchmark-autosave", "--benchmark-storage=file://kept", "--benchmark-json=record.json"]
    options += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=3"]
    compare = ["--benchmark-compare", "--benchmark-compare-fail=median:50%"]
    said, printed = run_pytest(BENCHMARKS, options, [*options, *compare], hooks=BENCHMARK_HOOKS)
    return {"printed": printed, **{name: value for one in said for name, value in one.items()}}


@contract("pytest_benchmark.fixture.BenchmarkFixture().stats", "pytest_benchmark.fixture.BenchmarkFixture().fullname")
def median_of_a_benchmark() -> None:
    found = compared_benchmarks()
    assert [found["name"], found["median"]] in found["today"], found["printed"]
    assert found["name"] == "test_some.py::test_kept"


@contract("pytest_benchmark.fixture.BenchmarkFixture().has_error")
def benchmark_that_is_left_out() -> None:
    found = compared_benchmarks()
    assert "test_some.py::test_discarded" in [name for name, _ in found["today"]]
    assert found["recorded"] == [["test_some.py::test_kept"]]


def compared(*names: str) -> list[Any]:
    return [compared_benchmarks()[name] for name in names]


SESSION, STORAGE = "pytest_benchmark.session.BenchmarkSession", "pytest_benchmark.storage.file.FileStorage"
gives(lambda: [len(compared("today")[0]), *compared("compared")], [2, 3], f"{SESSION}.prepare_benchmarks giving 'path'")
gives(lambda: compared("recorded"), [[["test_some.py::test_kept"]]], f"{SESSION}().storage.load")
gives(
    lambda: compared("folder", "files"),
    ["kept", ["0001_", "0002_"]],
    f"{STORAGE} of file://FOLDER",
    f"{STORAGE}.save to MACHINE/0001_NAME.json",
)
gives(
    lambda: [*compared("withdrawn"), re.findall("PerformanceRegression", compared_benchmarks()["printed"])],
    [["test_some.py::test_kept"], []],
    "pytest.Config()._benchmarksession.performance_regressions by name_format and compare_fail",
)
gives(lambda: compared("loads"), [[1, 2]], "pytest.Config()._benchmarksession.handle_loading")
gives(lambda: compared("json"), ["record.json"], "pytest.Config().option.benchmark_json")


def test_the_processor_is_told() -> None:
    assert compared_benchmarks()["processor"]


# ---- Hypothesis


class Shown:
    """An object with a text of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"Shown(number={self.number})")


TRIED: list[int] = []


def is_small(case: Shown) -> None:
    TRIED.append(case.number)
    assert case.number < 7


def search() -> Callable[[], None]:
    settings = hypothesis.settings(print_blob=True, database=None, deadline=None)
    return settings(hypothesis.given(case=st.integers(0, 1000).map(Shown))(is_small))


@functools.cache
def notes_of_a_failure() -> str:
    with pytest.raises(AssertionError) as caught:
        search()()
    return "\n".join(caught.value.__notes__)


@contract("hypothesis.internal.conjecture.providers._get_local_constants")
def constants_of_loaded_modules() -> None:
    draws = (
        "import sys, loaded\n"
        "from hypothesis.internal.conjecture.providers import HypothesisProvider\n"
        "from fourfold.compat.hypothesis_internals import ignore_local_constants\n"
        "if sys.argv[1:]:\n"
        "    ignore_local_constants()\n"
        "print(987654321 in HypothesisProvider(None)._local_constants.set_for_type('integer'))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "loaded.py").write_text("NUMBER = 987654321\n")
        drawn = [warm.printed(draws, *more, cwd=Path(folder)) for more in ((), ("ignore",))]
    assert drawn == ["True\n", "False\n"]


@contract("hypothesis.internal.conjecture.engine.MAX_SHRINKS")
def limit_of_shrinking() -> None:
    with hypothesis_internals.shrinking_at_most(0), pytest.raises(AssertionError) as caught:
        search()()
    assert "Shown(number=7)" not in str(caught.value.__notes__)
    assert "Shown(number=7)" in notes_of_a_failure()


@contract("hypothesis.reproduce_failure in a failure's notes")
def blob_that_repeats_a_failure() -> None:
    blob = hypothesis_internals.find_blob(notes_of_a_failure())
    assert blob is not None
    TRIED.clear()
    with pytest.raises(AssertionError):
        hypothesis.reproduce_failure(hypothesis.__version__, blob.encode())(search())()
    assert set(TRIED) == {7}


# ---- cuda-core, Python


@contract(
    "cuda.core.TensorMapDescriptorOptions().swizzle.SWIZZLE_128B",
    "cuda.core.TensorMapDescriptorOptions().l2_promotion.L2_256B",
)
def options_of_a_tensor_map() -> None:
    options = cuda_core_internals.swizzled_options((128, 64))
    assert tuple(options.box_dim) == (128, 64)
    # As the driver's CUtensorMapSwizzle and CUtensorMapL2promotion number them.
    assert (int(options.swizzle), int(options.l2_promotion)) == (3, 3)
    default = cuda.core.TensorMapDescriptorOptions(box_dim=(128, 64))
    assert type(options.swizzle) is type(default.swizzle)


@contract("threading._DummyThread")
def thread_that_python_did_not_start() -> None:
    found: list[threading.Thread] = []
    done = threading.Event()

    def run() -> None:
        found.append(threading.current_thread())
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(10)
    assert python_internals.is_foreign(found[0])
    assert not python_internals.is_foreign(threading.current_thread())


@contract("threading._shutdown", "atexit._run_exitfuncs")
def end_of_threads_and_exit_handlers() -> None:
    program = """
        import atexit, os, threading, time
        from fourfold.compat.python_internals import handle_exit
        atexit.register(print, "handler", flush=True)
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
        handle_exit()
        os._exit(3)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (3, ["thread", "handler"], "")


# ---- a missing part


@pytest.fixture(autouse=True)
def same_parts() -> Iterator[None]:
    """Forget the marks of a test."""
    yield
    compat.users_of_parts().clear()
    compat.users_of_parts().update(PARTS)


def test_what_is_marked_after_a_candidate_was_loaded_is_no_tampering() -> None:
    # pytest imports files of tests, and they parts of the harness, when candidates are watched already.
    before = Snapshot((), modules_of("fourfold"))
    compat.uses("os.a_part_of_this_test")(lambda: None)
    assert compat.users_of_parts()["os.a_part_of_this_test"]
    assert before.changes() == []


def test_a_missing_part_is_named_with_its_library_and_version() -> None:
    @uses("torch.cuda._sleep", "torch.cuda._no_such_function")
    def wait() -> None:
        raise AssertionError("it must not be called")

    with pytest.raises(MissingPart, match=r"^torch 2\.\d+\.\S+ has no torch\.cuda\._no_such_function, which .*wait "):
        wait()


def test_a_missing_attribute_of_an_instance_is_named_too() -> None:
    @uses("pytest.Session().nothing_such")
    def ask(session: Any, name: str) -> Any:
        return getattr(session, name)

    with pytest.raises(MissingPart, match=r"^pytest [\d.]+ has no pytest\.Session\(\)\.nothing_such, which .*ask "):
        ask(object(), "nothing_such")
    with pytest.raises(AttributeError, match="something_else"):
        ask(object(), "something_else")


def test_a_public_way_takes_the_place_of_a_missing_part() -> None:
    @uses("torch._C._no_such_function", otherwise=lambda: "public")
    def ask() -> str:
        return "private"

    assert ask() == "public"


@pytest.mark.parametrize("part", ["torch.cuda", "torch.utils._python_dispatch.TorchDispatchMode", "threading.Thread"])
def test_what_is_there_is_found(part: str) -> None:
    assert compat.exists(part)
    assert not compat.exists(f"{part}._no_such_part")
    assert not compat.exists(f"no_such_library.{part}")


def test_calls_are_taken_to_be_watched_where_nobody_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    spec = importlib.util.find_spec(torch_internals.__name__)
    assert spec is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.calls_are_watched()


def test_launches_are_left_to_triton_where_it_does_not_say_for_what_it_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_internals, "parameters", lambda kernel: [])
    assert not triton_internals._knows_launches()
