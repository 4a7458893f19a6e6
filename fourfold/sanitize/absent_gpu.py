"""An emulation of an absent CUDA GPU: a script for a GPU runs with all of its tensors on the CPU.

Two modes of torch do most of the work. `Names` sees each call of torch's functions, replaces "cuda" by "cpu", and
answers questions about a tensor's device. `StorageMode` sees each operator, and records which storages represent memory
of the GPU, and which of their bytes are unwritten. Functions of torch and Triton that ask about the GPU are replaced.
"""

import contextlib
import functools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction

from fourfold.backends.triton.interpreter import tuning
from fourfold.backends.triton.sanitizer.monitor import EXPOSED, WRITTEN_BYTES, Exposed
from fourfold.compat import torch_internals, triton_internals
from fourfold.instruments.operator_watch import UNWRITTEN, iter_tensors

_DispatchMode: Any = torch_internals.dispatch_mode()
# The attribute of a storage that represents host memory. All other storages represent memory of the GPU.
_ON_HOST = "fourfold_on_host"
_TENSOR = torch.Tensor
GRADIENTS = {torch.ops.aten.native_layer_norm_backward, torch.ops.aten.native_group_norm_backward}
NORMS = GRADIENTS | {torch.ops.aten.native_layer_norm, torch.ops.aten.native_group_norm}
PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3, absent",
    "major": 9,
    "minor": 0,
    "total_memory": 80 << 30,
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_block": 1024,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "gcnArchName": "",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
}


class _ThreadState(threading.local):
    """The state of a thread: the device of new tensors, whether the modes were entered, and whether they are off."""

    device: str | None = None
    entered = False
    names_off = False
    storages_off = False


STATE = _ThreadState()


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor represents one in the host's memory."""
    return getattr(tensor.untyped_storage(), _ON_HOST, False)


def device_type(device: Any) -> str | None:
    """Return the type of a device given to torch as a name, a number or a `torch.device`; None for None."""
    if device is None:
        return None
    if isinstance(device, int):
        return "cuda"
    return (device if isinstance(device, str) else device.type).partition(":")[0]


class StorageMode(_DispatchMode):
    """A dispatch mode that tracks the storages that operators allocate and write."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(iter_tensors(args, kwargs))
        before = STATE.storages_off
        STATE.storages_off = True
        try:
            result = run_operator(operator, args, kwargs)
            self.note(operator, inputs, result)
            for tensor in self.mutated_tensors(operator, args, kwargs):
                mark_written(tensor)
        finally:
            STATE.storages_off = before
        return result

    def note(self, operator: Any, inputs: list[torch.Tensor], result: Any) -> None:
        """Record for each new storage where it is, and mark its bytes as unwritten if the operator leaves them so."""
        known = {id(tensor.untyped_storage()) for tensor in inputs if has_storage(tensor)}
        for tensor in iter_tensors(result):
            if not has_storage(tensor) or id(tensor.untyped_storage()) in known:
                continue
            storage = tensor.untyped_storage()
            if STATE.device:
                host = STATE.device != "cuda"
            elif inputs:
                host = all(on_host(x) for x in inputs if has_storage(x))
            else:
                host = torch_internals.default_device().type != "cuda"
            if host:
                setattr(storage, _ON_HOST, True)
            if torch_internals.overload_packet(operator) in UNWRITTEN and storage.nbytes():
                setattr(storage, WRITTEN_BYTES, np.zeros(storage.nbytes(), bool))

    def mutated_tensors(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that an operator writes."""
        for index, name in torch_internals.mutated_arguments(operator):
            yield from iter_tensors(args[index] if index < len(args) else kwargs.get(name))


def run_operator(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator. Norms of half types use single precision, as on a GPU; the CPU would sum in half precision."""
    name = torch_internals.overload_packet(operator)
    halves = (
        [x.dtype for x in iter_tensors(args) if x.dtype in (torch.float16, torch.bfloat16)] if name in NORMS else []
    )
    if not halves:
        return operator(*args, **kwargs)
    results = operator(*(x.float() if isinstance(x, _TENSOR) and x.is_floating_point() else x for x in args), **kwargs)
    narrow = len(results) if name in GRADIENTS else 1  # the mean and the deviation stay in single precision
    return tuple(x.to(halves[0]) if x is not None and i < narrow else x for i, x in enumerate(results))


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory that kernels may access."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def mark_written(tensor: torch.Tensor) -> None:
    """Mark all elements of a tensor as written."""
    if not has_storage(tensor):
        return
    storage = tensor.untyped_storage()
    written = getattr(storage, WRITTEN_BYTES, None)
    if written is None:
        return
    size = tensor.element_size()
    if tensor.numel() * size >= storage.nbytes() or len(written) != storage.nbytes():
        delattr(storage, WRITTEN_BYTES)
        return
    strides = *(stride * size for stride in tensor.stride()), 1
    torch.from_numpy(written).as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).fill_(True)


class Names(TorchFunctionMode):
    """A function mode that replaces "cuda" by "cpu" in calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.constructors = torch_internals.constructors()
        self.answers: dict[Any, Callable[..., Any]] = {
            _TENSOR.device.__get__: self.device,
            _TENSOR.is_cuda.__get__: lambda call, x: not on_host(x),
            _TENSOR.is_cpu.__get__: lambda call, x: on_host(x),
            _TENSOR.get_device: lambda call, x: -1 if on_host(x) else 0,
            _TENSOR.to: self.to,
            _TENSOR.cuda: lambda call, x, *rest, **options: self.move(x, "cuda"),
            _TENSOR.cpu: lambda call, x, **options: self.move(x, "cpu"),
            _TENSOR.pin_memory: lambda call, x, *rest: x,
            _TENSOR.is_pinned: lambda call, x, *rest: False,
            _TENSOR.record_stream: lambda call, x, stream: None,
            _TENSOR.data_ptr: self.address,
            _TENSOR.numpy: self.share_with_numpy,
            _TENSOR.__array__: self.share_with_numpy,
            torch.from_numpy: self.make_on_host,
            torch.frombuffer: self.make_on_host,
            torch.as_tensor: self.copy_or_share,
            torch.asarray: self.copy_or_share,
        }

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = STATE.names_off
        STATE.names_off = True
        try:
            answer = self.answers.get(function)
            if answer is not None:
                return answer(function, *args, **kwargs)
            return self.call(function, args, kwargs)
        finally:
            STATE.names_off = before

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function on the CPU; mark its results as being on the requested device."""
        if function is torch.device:
            return function(*args, **kwargs)
        kind = None
        if any(isinstance(x, torch.device) and x.type == "cuda" for x in args):
            kind = "cuda"
            args = tuple(torch.device("cpu") if isinstance(x, torch.device) else x for x in args)
        if "device" in kwargs:
            kind = device_type(kwargs["device"]) or kind
            if kind == "cuda":
                kwargs["device"] = "cpu"
        if kind is None and function in self.constructors:
            kind = torch_internals.default_device().type
            if kind == "cuda":  # or the mode of `with torch.device("cuda")` would set "cuda"
                kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        with self.wanting(kind):
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def wanting(self, device: str | None) -> Iterator[None]:
        """Place new tensors on this device inside the block."""
        before = STATE.device
        STATE.device = device if device in ("cuda", "cpu") else None
        try:
            yield
        finally:
            STATE.device = before

    def device(self, call: Any, tensor: Any, *rest: Any) -> torch.device:
        """Return the device that a tensor appears to be on."""
        device = call(tensor)
        return torch.device("cuda", 0) if device.type == "cpu" and not on_host(tensor) else device

    def move(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Return a tensor on another device: a copy, unless it is already there."""
        if on_host(tensor) == (device == "cpu"):
            return tensor
        with self.wanting(device):
            return tensor.clone()

    def to(self, call: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Emulate ``tensor.to(...)``."""
        target = args[0] if args else options.get("other", options.get("device"))
        if "device" in options:
            target = options["device"]
        if isinstance(target, torch.Tensor):
            kind: str | None = "cpu" if on_host(target) else "cuda"
        elif isinstance(target, str | int | torch.device) and not isinstance(target, bool):
            kind = device_type(target)
            if kind == "cuda":
                options = {key: ("cpu" if key == "device" else value) for key, value in options.items()}
                args = ("cpu", *args[1:]) if args and args[0] is target else args
        else:
            kind = None
        if kind not in ("cuda", "cpu"):
            return call(tensor, *args, **options)
        if on_host(tensor) != (kind == "cpu") and len(args) < 4:
            options["copy"] = True
        with self.wanting(kind):
            return call(tensor, *args, **options)

    def address(self, call: Any, tensor: torch.Tensor) -> int:
        """Emulate ``tensor.data_ptr()``, and remember the tensor: a kernel may make a pointer of its address."""
        address = call(tensor)
        if address and has_storage(tensor):
            EXPOSED[address] = Exposed(tensor, address)
        return address

    def share_with_numpy(self, call: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Share a tensor's memory with NumPy, and mark it as written, since NumPy may write all of it."""
        with contextlib.suppress(AttributeError):
            delattr(tensor.untyped_storage(), WRITTEN_BYTES)
        return call(tensor, *args, **options)

    def make_on_host(self, call: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return a tensor in the host's memory that shares memory with NumPy."""
        result = call(*args, **options)
        setattr(result.untyped_storage(), _ON_HOST, True)
        return result

    def copy_or_share(self, call: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return a tensor that shares memory if its device allows."""
        kind = device_type(options.get("device"))
        data = args[0] if args else options.get("data", options.get("obj"))
        if isinstance(data, torch.Tensor):
            result = call(*args, **{**options, "device": None})
            return self.move(result, kind) if kind in ("cuda", "cpu") else result
        kind = kind or torch_internals.default_device().type
        result = call(*args, **{**options, "device": "cpu"})
        if kind == "cuda":
            with self.wanting("cuda"):
                return result.clone()
        setattr(result.untyped_storage(), _ON_HOST, True)
        return result


class Modes:
    """Both modes, also for code that torch runs with its modes turned off."""

    def __init__(self) -> None:
        self.names, self.storages = Names(), StorageMode()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Enter both modes in this thread."""
        before = STATE.names_off, STATE.storages_off, STATE.device, STATE.entered
        with contextlib.ExitStack() as stack:
            if STATE.names_off or not STATE.entered:
                stack.enter_context(self.names)
            if STATE.storages_off or not STATE.entered:
                stack.enter_context(self.storages)
            STATE.names_off, STATE.storages_off, STATE.device, STATE.entered = False, False, None, True
            try:
                yield
            finally:
                STATE.names_off, STATE.storages_off, STATE.device, STATE.entered = before

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to run in both modes, whoever calls it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.on():
                return function(*args, **kwargs)

        return call

    def enter_callbacks(self) -> None:
        """Enter the modes in torch's callbacks: methods of an autograd.Function, and custom operators."""

        def init_subclass(cls: type, **options: Any) -> None:
            for name in ("forward", "backward", "vjp", "jvp", "setup_context"):
                method = vars(cls).get(name)
                if isinstance(method, staticmethod):
                    setattr(cls, name, staticmethod(self.wrap(method.__func__)))

        torch.autograd.Function.__init_subclass__ = classmethod(init_subclass)
        for name in ("custom_op", "triton_op"):
            if hasattr(torch.library, name):
                setattr(torch.library, name, self.registering(getattr(torch.library, name)))

    def registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.library.custom_op(name, function, ...)``, which may also be a decorator."""

        @functools.wraps(register)
        def call(name: str, function: Any = None, /, **options: Any) -> Any:
            if function is None:
                return lambda decorated: call(name, decorated, **options)
            return register(name, self.wrap(function), **options)

        return call


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


class Event:
    """An emulation of ``torch.cuda.Event`` with the processor's clock. It is over as soon as it is recorded."""

    query, synchronize, wait = _answer(True), _answer(None), _answer(None)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.record()

    def record(self, *args: Any) -> None:
        """Record the current time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two events."""
        return max(1e3 * (end.seconds - self.seconds), 1e-3)


class Stream:
    """An emulation of ``torch.cuda.Stream``: all work is already done, in order."""

    cuda_stream = stream_id = device_index = priority = 0
    query, synchronize, wait_stream, wait_event = _answer(True), _answer(None), _answer(None), _answer(None)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        """Record and return an event."""
        event = event or Event()
        event.record()
        return event


class _Nothing(contextlib.nullcontext):
    """A context that does nothing, whatever its arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()


def properties(*device: Any) -> types.SimpleNamespace:
    """Emulate ``torch.cuda.get_device_properties()``."""
    return types.SimpleNamespace(**PROPERTIES)


def replace_cuda() -> None:
    """Replace torch's functions that ask about the GPU."""
    generator = Generator("cuda")
    nothing = "synchronize empty_cache ipc_collect init set_device reset_peak_memory_stats reset_max_memory_allocated"
    nothing += " reset_accumulated_memory_stats manual_seed manual_seed_all seed seed_all set_stream"
    nothing += " set_per_process_memory_fraction"
    # Each name has its own function, because torch's compiler identifies functions by identity, not by name.
    answers: dict[str, Any] = {name: _answer(None) for name in nothing.split()}
    numbers = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached current_device"
    answers |= {name: _answer(0) for name in [*numbers.split(), "utilization"]}
    answers |= {name: _answer(True) for name in ("is_available", "is_initialized", "is_bf16_supported")}
    answers |= {
        "is_current_stream_capturing": _answer(False),
        "device_count": _answer(1),
        "get_device_name": _answer(PROPERTIES["name"]),
        "get_device_capability": _answer((PROPERTIES["major"], PROPERTIES["minor"])),
        "get_device_properties": properties,
        "get_arch_list": _answer([f"sm_{PROPERTIES['major']}{PROPERTIES['minor']}"]),
        "mem_get_info": _answer((PROPERTIES["total_memory"], PROPERTIES["total_memory"])),
        "memory_stats": _answer({}),
        "memory_summary": _answer(""),
        "default_generators": (generator,),
        "get_rng_state": lambda *device: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, *device: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "current_stream": lambda *device: Stream(),
        "default_stream": lambda *device: Stream(),
        "Stream": Stream,
        "Event": Event,
        "stream": type("stream", (_Nothing,), {}),
        "device": type("device", (_Nothing,), {}),
        "device_of": type("device_of", (_Nothing,), {}),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.get_default_device = torch_internals.default_device
    torch_internals.replace_in_compiled_code(_Nothing)
    torch.version.cuda = torch.version.cuda or "12.8"
    accelerator = {
        "is_available": _answer(True),
        "device_count": _answer(1),
        "synchronize": _answer(None),
        "current_accelerator": _answer(torch.device("cuda")),
        "current_device_index": _answer(0),
        "set_device_index": _answer(None),
    }
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, answer)


class Generator(torch.Generator):
    """An emulation of ``torch.Generator``. A GPU's state is two numbers: the seed, and a count of draws."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        """Create a generator on the CPU, for any device."""
        generator = super().__new__(cls, "cpu")
        generator.is_gpu, generator.drawn = device_type(device) == "cuda", 0
        return generator

    is_gpu: bool
    drawn: int

    def get_state(self) -> torch.Tensor:
        """Return the state as bytes."""
        if not self.is_gpu:
            return super().get_state()
        return torch.from_numpy(np.array([self.initial_seed() % 2**63, self.drawn]).view(np.uint8))

    def set_state(self, state: torch.Tensor) -> "Generator":
        """Restore a state."""
        if not self.is_gpu:
            return super().set_state(state)
        seed, drawn = state.numpy().view(np.int64).tolist()
        self.manual_seed(seed)
        self.drawn = drawn
        return self


def replace_classes() -> None:
    """Replace generators and autocast by those of the CPU."""
    torch.Generator = Generator
    shipped = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shipped(self, device_type, dtype, *args, **options)

    torch.amp.autocast_mode.autocast.__init__ = init


def do_bench(
    fn: Callable[[], Any], *args: Any, quantiles: Any = None, return_mode: str = "mean", **options: Any
) -> Any:
    """Emulate ``triton.testing.do_bench``: run the function once, and report a millisecond."""
    fn()
    if quantiles is not None:
        return 1.0 if len(quantiles) == 1 else [1.0] * len(quantiles)
    return [1.0] if return_mode == "all" else 1.0


class Driver(triton_internals.AbsentDriver):
    """An emulation of Triton's driver for the absent GPU, the only device. No benchmark has a cache to clear."""

    get_current_device, set_current_device = _answer(0), _answer(None)
    get_active_torch_device = _answer(torch.device("cuda", 0))
    get_device_interface = _answer(torch.cuda)
    get_benchmarker = _answer(do_bench)
    get_empty_cache_for_benchmark, clear_cache = _answer(torch.zeros(1)), _answer(None)

    def __init__(self) -> None:
        super().__init__(10 * int(str(PROPERTIES["major"])) + int(str(PROPERTIES["minor"])))
        self.utils = types.SimpleNamespace(get_device_properties=self.properties)

    @staticmethod
    def properties(*device: Any) -> dict[str, Any]:
        """Return the GPU's properties that Triton uses."""
        return {
            "max_shared_mem": PROPERTIES["shared_memory_per_block_optin"],
            "max_num_regs": PROPERTIES["regs_per_multiprocessor"],
            "multiprocessor_count": PROPERTIES["multi_processor_count"],
            "warpSize": PROPERTIES["warp_size"],
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }

    def get_device_capability(self, *device: Any) -> tuple[Any, Any]:
        """Return the compute capability."""
        return PROPERTIES["major"], PROPERTIES["minor"]


class CublasLt:
    """An emulation of Triton's binding of cuBLAS, which its examples use for comparison."""

    def __init__(self, workspace: torch.Tensor) -> None:
        """Ignore the workspace."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Compute ``a @ b.T`` into `c`."""
        c.copy_((a.float() @ b.float().T).to(c.dtype))

    def gemm(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, x: float, y: float) -> None:
        """Compute ``x * a @ b.T + y * c`` into `d`."""
        d.copy_((x * (a.float() @ b.float().T) + y * c.float()).to(d.dtype))


class Benchmarks:
    """An emulation of ``triton.testing.perf_report``: it runs each kernel of a benchmark once, at its smallest size."""

    def __init__(self, function: Callable[..., Any], benchmarks: Any) -> None:
        self.function = function
        self.benchmarks = benchmarks if isinstance(benchmarks, list | tuple) else [benchmarks]

    def run(self, *args: Any, return_df: bool = False, **options: Any) -> Any:
        """Run the benchmarks, and print nothing: times mean nothing here."""
        display_options = ("show_plots", "print_data", "save_path", "save_precision", "diff_col")
        arguments = {key: value for key, value in options.items() if key not in display_options}
        for benchmark in self.benchmarks:
            first = benchmark.x_vals[0] if len(benchmark.x_vals) else ()
            values = first if isinstance(first, list | tuple) else [first] * len(benchmark.x_names)
            for line in benchmark.line_vals:
                sizes = dict(zip(benchmark.x_names, values))
                self.function(**sizes, **{benchmark.line_arg: line}, **benchmark.args, **arguments)


class CompiledStub:
    """A stub of the compiled kernel that a launch or a warm-up returns on a GPU, with a plain kernel's numbers.

    Args:
        kernel: the launched kernel.
        options: of the warm-up; a later launch need not repeat them.
    """

    n_regs = 32
    n_spills = 0
    n_max_threads = 1024

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self.name = kernel.fn.__name__
        self.metadata = types.SimpleNamespace(shared=16384, num_warps=4, num_stages=1, num_ctas=1, name=self.name)
        self.asm: dict[str, str] = dict.fromkeys(("ttir", "ttgir", "llir", "ptx", "sass"), "")

    def _init_handles(self) -> None:
        """Do nothing in place of loading the kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            names = self.kernel.arg_names[len(args) :]
            return self.kernel[grid](*args, **{name: self.options[name] for name in names if name in self.options})

        return launch


def replace_warmup() -> None:
    """Make launches and warm-ups return a stub with a compiled kernel's attributes."""
    shipped = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> CompiledStub:
        shipped(kernel, *args, grid=grid, warmup=warmup, **options)
        return CompiledStub(kernel, options)

    InterpretedFunction.run = run


def replace_triton(all_configs: bool) -> None:
    """Replace Triton's functions that ask about the GPU or measure times."""
    triton.runtime.driver.set_active(Driver())
    triton_internals.replace_cublas(CublasLt)
    triton.testing.do_bench = do_bench
    triton.testing.do_bench_cudagraph = do_bench
    triton.testing.perf_report = lambda benchmarks: lambda function: Benchmarks(function, benchmarks)
    tuning.TUNING.all_configs = all_configs
    replace_warmup()


@contextlib.contextmanager
def emulate_gpu(all_configs: bool = False, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Run a script for a CUDA GPU on the CPU inside the block. The process is of no other use afterwards.

    Args:
        all_configs: whether to run every configuration of a tuned kernel, instead of the first that is not pruned.
        capability: of the GPU that the script finds.
    """
    PROPERTIES["major"], PROPERTIES["minor"] = capability
    modes = Modes()
    replace_cuda()
    replace_classes()
    replace_triton(all_configs)
    modes.enter_callbacks()
    with modes.on():
        yield
