"""Benchmarks recognize compiled code by the launches of a call, tested with a GPU whose driver is simulated."""

import json
import runpy
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fourfold import backends
from fourfold.backends import known_calls, launch_records, operators, workspace
from fourfold.backends.cuda import launch as cuda_launch
from fourfold.backends.cuda import tensor_map
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.checks.outputs import join_outputs
from fourfold.checks.records import operations
from fourfold.compat import torch_internals
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.workloads import Workload, tiled, whole
from fourfold.performance import code_identity, machine
from fourfold.performance.calls import DIRECTIONS, HOST, Call, Replay
from fourfold.performance.ceilings import Ceilings
from fourfold.performance.measurement import Bench, Contender, Measurement
from fourfold.performance.timing import HostClock

FLOAT32 = DTYPES["float32"]
# The number of the simulated GPU. No real one has it: kernels are loaded once on each, and stay loaded.
SIMULATED = 99
SOURCE = """
__global__ void scale_kernel(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Treat every tensor as one on an H100. Kernels are really compiled; the list receives the launches."""
    from cuda.bindings import driver

    found: list[Any] = []
    core = SimpleNamespace(
        launch=lambda stream, config, handle, *values: found.append((config, values)),
        LaunchConfig=lambda **options: SimpleNamespace(**{"cluster": None, **options}),
        Device=lambda device: SimpleNamespace(set_current=lambda: None),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
    )
    handle = SimpleNamespace(handle=0, arguments_info=[])

    def object_code(cubin: Path) -> Any:
        return SimpleNamespace(get_kernel=lambda name: handle)

    monkeypatch.setattr(cuda_launch, "_core", lambda: core)
    monkeypatch.setattr(torch_internals, "launcher", lambda *kernel: None)  # cuda-core launches all
    monkeypatch.setattr(cuda_launch, "_object_code", object_code)
    monkeypatch.setattr(cuda_launch._GpuKernel, "check", lambda kernel, arguments: ())
    monkeypatch.setattr(cuda_launch, "_parameters", lambda *_: [])
    success = SimpleNamespace(value=0)
    monkeypatch.setattr(driver, "cuDeviceGet", lambda device: (success, 0))
    monkeypatch.setattr(driver, "cuKernelGetAttribute", lambda *_: (success, 1 << 20))
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *_: (success,))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: SIMULATED)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: SIMULATED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_internals, "current_stream", lambda device: 7)
    empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch_internals, "empty_on_current_gpu", empty)
    cuda_launch._config.cache_clear()
    cuda_launch._streams.clear()
    monkeypatch.setattr(launch_records, "ALIGNMENT", 64)  # as torch's allocator aligns on the CPU
    with cuda_launch.compiling_only(()):
        yield found
    cuda_launch._config.cache_clear()
    cuda_launch._streams.clear()


@dataclass
class Scale:
    """A call of an operator with one kernel, in ways that differ.

    Attributes:
        folder: for the source.
        text: the kernel.
        grid, block, shared_bytes, cluster: of the launch.
        also: a further action of the operator on its argument and its result.
        before: an action of the caller on its argument.
        first: the element with which the argument begins.
        n: the passed number.
    """

    folder: Path
    text: str = SOURCE
    grid: Any = 4
    block: Any = 64
    shared_bytes: int = 0
    cluster: Any = None
    also: Callable[[torch.Tensor, torch.Tensor], Any] = lambda x, y: None
    before: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    first: int = 0
    n: int = 256
    strided: bool = False
    in_place: bool = False
    runs: int = 0
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = len(operators._launches)
        source = self.folder / f"kernels_{number}.cu"
        source.write_text(self.text)
        self.kernel = CudaKernel(source, "scale_kernel")
        schema = f"scale_{number}(Tensor x, float factor) -> Tensor"
        self.operator = operators.define(schema, self.launch, lambda x, factor: torch.empty_like(x), True)
        x = torch.arange(512.0)[self.first : self.first + 256]
        self.arguments = {"x": torch.arange(512.0)[::2] if self.strided else x}

    def launch(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        self.runs += 1
        y = torch.empty(x.shape)
        target = x if self.in_place else y
        options = {"shared_bytes": self.shared_bytes, "cluster": self.cluster}
        self.kernel.launch(self.grid, self.block, x, target, self.n, **options)
        self.also(x, y)
        return y

    def run(self, calls: int) -> None:
        self.operator(self.before(self.arguments["x"]), 2.0)

    @property
    def call(self) -> Any:
        return self


def info_of(call: Any, workload: Workload | None = None, codes: dict[str, Any] | None = None) -> dict[str, Any]:
    record = code_identity.record_of(call)
    return code_identity.describe(record, workload or WORKLOAD, {} if codes is None else codes)


def case_of(seed: int, eps: float = 1e-5) -> Case:
    rng = np.random.default_rng(seed)
    return Case({"x": rng.normal(size=(4, 8)).astype(np.float32)}, np.ones((4, 8), np.float32), {"eps": eps})


WORKLOAD = whole(lambda dtype: case_of(0))(FLOAT32)
MACHINE = {"gpu": "H200", "driver": "580", "cuda": "13.0", "torch": "2.14", "triton": "3.9", "python": "3.12"}


@pytest.mark.usefixtures("launched")
def test_unchanged_code_is_known_again_wherever_its_file_is(tmp_path: Path) -> None:
    codes: dict[str, Any] = {}
    one, other = info_of(Scale(tmp_path), codes=codes), info_of(Scale(tmp_path, text=f"// by a line\n{SOURCE}"))
    assert one == other
    assert one["unknown"] == ""
    assert one["torch"] == []
    (line,) = one["launches"]
    assert line.startswith("scale_kernel ")
    assert ": grid (4, 1, 1), block (64, 1, 1), 0 bytes, arguments " in line
    assert one["kernels"] == list(codes)
    assert code_identity.key(one, MACHINE) == one["sha256"]
    assert launch_records.current is None


DIFFERENT: dict[str, dict[str, Any]] = {
    "code": {"text": SOURCE.replace("2.0f", "3.0f")},
    "cluster of the source": {"text": SOURCE.replace("void scale", "void __cluster_dims__(2, 1, 1) scale")},
    "grid": {"grid": 8},
    "grid of two axes": {"grid": (2, 2)},
    "block": {"block": 128},
    "shared memory": {"shared_bytes": 64},
    "cluster": {"cluster": 2},
    "number": {"n": 255},
    "alignment": {"first": 1},
    "strides": {"strided": True},
    "another tensor": {"in_place": True},
    "a copy before": {"before": torch.clone},
    "a kernel of torch": {"also": lambda x, y: y.add_(1)},
    "a second launch": {"also": "twice"},
}


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_does_anything_else_is_another(what: str, tmp_path: Path) -> None:
    changed = Scale(tmp_path, **DIFFERENT[what])
    if changed.also == "twice":
        changed.also = lambda x, y: changed.kernel.launch(changed.grid, changed.block, x, y, changed.n)
    one, other = info_of(Scale(tmp_path)), info_of(changed)
    assert one["unknown"] == other["unknown"] == ""
    assert one["sha256"] != other["sha256"]
    lines = list(code_identity.differences(one, other, {}, {}))
    assert all(line.startswith(("now: ", "was: ")) for line in lines)
    assert lines


@pytest.mark.usefixtures("launched")
def test_allocations_and_views_launch_nothing(tmp_path: Path) -> None:
    def also(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.empty_like(x.view(2, -1).t()[1:].detach())

    assert info_of(Scale(tmp_path, also=also))["sha256"] == info_of(Scale(tmp_path))["sha256"]


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    "where", [{"also": lambda x, y: y.add_(1)}, {"before": lambda x: x + 1}], ids=["operator", "caller"]
)
def test_kernels_of_torch_are_seen_and_are_the_same_on_the_same_versions_alone(where: Any, tmp_path: Path) -> None:
    info = info_of(Scale(tmp_path, **where))
    assert any(line.startswith("aten.add") for line in info["torch"])
    assert info["unknown"] == ""
    known = code_identity.key(info, MACHINE)
    assert known == code_identity.key(info, {**MACHINE, "python": "3.14", "triton": "3.10"})
    for name in ("torch", "cuda", "driver", "gpu"):
        assert known != code_identity.key(info, {**MACHINE, name: "other"})


@pytest.mark.usefixtures("launched")
def test_without_kernels_of_torch_its_version_makes_no_difference(tmp_path: Path) -> None:
    info = info_of(Scale(tmp_path))
    assert code_identity.key(info, MACHINE) == code_identity.key(info, {**MACHINE, "torch": "2.15", "driver": "590"})


def test_calls_known_again_are_recorded_too(launched: list[Any], tmp_path: Path) -> None:
    scale = Scale(tmp_path)
    repeated = operators.implementation(scale.operator)
    assert repeated is not None
    for _ in range(5):
        repeated(scale.arguments["x"], 2.0)
    assert scale.runs == 2
    assert len(launched) == 5
    assert len(info_of(scale)["launches"]) == 1
    assert scale.runs == 3
    repeated(scale.arguments["x"], 2.0)
    assert scale.runs == 3  # and afterwards they are recognized


@pytest.mark.parametrize("part", [0, 64], ids=["whole", "part"])
def test_a_repeated_call_has_the_tensor_map_of_its_own_tensor(
    part: int, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_map, "_encode", lambda *layout_and_address: SimpleNamespace(at=layout_and_address[-1]))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    scale, runs = Scale(tmp_path), []

    def launch(x: torch.Tensor, factor: float) -> torch.Tensor:
        runs.append(x)
        y = torch.empty(x.shape)
        scale.kernel.launch(4, 64, tensor_map.swizzled_map(x.view(-1)[part:].view(-1, 64), (8, 64)), y, 2)
        return y

    repeater = known_calls.Repeater(launch, (0,), lambda: True)
    tensors = [torch.ones(16, 64) for _ in range(5)]
    for x in tensors:
        repeater(x, 2.0)
    # The map of a part has an address that a later call does not know.
    assert len(runs) == (5 if part else 2)
    assert [values[0].at for _, values in launched] == [x.data_ptr() + 4 * part for x in tensors]


@pytest.mark.usefixtures("launched")
def test_what_no_record_can_tell_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("of_a_stranger", "DEF")
    library.define("copied(Tensor x) -> Tensor")
    library.impl("copied", lambda x: x.clone(), "CPU")

    def fails(x: torch.Tensor, y: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    for also, why in (
        (lambda x, y: torch.ops.of_a_stranger.copied(x), "operator of neither torch nor Fourfold"),
        (fails, "RuntimeError: no memory"),
        (lambda x, y: y.normal_(generator=torch.Generator()), "an argument is a Generator"),
    ):
        info = info_of(Scale(tmp_path, also=also))
        assert why in info["unknown"]
        assert code_identity.key(info, MACHINE) is None
    monkeypatch.setattr(torch_internals, "calls_are_watched", lambda: False)
    assert "launched where torch's operators are not seen" in info_of(Scale(tmp_path))["unknown"]


@pytest.mark.usefixtures("launched")
def test_a_call_without_a_launch_of_ours_is_judged_by_its_time() -> None:
    call = SimpleNamespace(arguments={}, run=lambda calls: torch.ones(3).exp())
    info = info_of(call)
    assert info["torch"]
    assert code_identity.key(info, MACHINE) is None
    assert code_identity.key(None, MACHINE) is None


@pytest.mark.parametrize("other", [case_of(1), case_of(0, eps=1e-6)], ids=["numbers", "parameter"])
def test_another_workload_is_other_work(other: Case) -> None:
    assert code_identity.workload_sha256(whole(lambda dtype: case_of(0))(FLOAT32)) == code_identity.workload_sha256(
        WORKLOAD
    )
    assert code_identity.workload_sha256(whole(lambda dtype: other)(FLOAT32)) != code_identity.workload_sha256(WORKLOAD)
    record = launch_records.LaunchRecord(lambda tensor: None)
    assert (
        len({code_identity.describe(record, on, {})["sha256"] for on in (WORKLOAD, whole(lambda _: other)(FLOAT32))})
        == 2
    )
    repeated = [tiled(lambda dtype: case_of(0), times, "x")(FLOAT32) for times in (4, 8)]
    assert len({code_identity.workload_sha256(workload) for workload in [WORKLOAD, *repeated]}) == 3


@pytest.mark.usefixtures("launched")
def test_a_record_is_of_bounded_size_and_covers_all(tmp_path: Path) -> None:
    def many(last: int) -> dict[str, Any]:
        made = Scale(tmp_path)

        def also(x: torch.Tensor, y: torch.Tensor) -> None:
            for number in range(1000):
                made.kernel.launch(1 if number < 999 else last, 64, x, y, 3)
                torch.cat([x] * 50)

        made.also = also
        return info_of(made)

    one, other = many(1), many(2)
    assert one["sha256"] != other["sha256"]
    assert len(json.dumps(one)) < 8000
    assert one["launches"][-1] == "and 977 more"
    assert code_identity.key(one, MACHINE)


def test_a_tensor_map_is_told_by_what_it_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_records, "ALIGNMENT", 64)
    monkeypatch.setattr(tensor_map, "_encode", lambda *_: object())
    matrices = [torch.zeros(rows, 64) for rows in (8, 8, 16)]
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: SIMULATED)
    with launch_records.recording(lambda tensor: None) as record:
        forms = [record.forms([tensor_map.swizzled_map(matrix, (8, 64))])[0] for matrix in matrices]
        other_box = record.forms([tensor_map.swizzled_map(matrices[0], (4, 64))])[0]
        assert record.unknown == ""
        record.forms([object()])
    assert forms[0] == forms[1]
    assert len({*forms, other_box}) == 3
    assert record.unknown == "an argument is a object"


def test_a_tensor_given_twice_is_told_from_two() -> None:
    record = launch_records.LaunchRecord(lambda tensor: None)
    x, y = (torch.zeros(512, dtype=torch.uint8) for _ in range(2))
    both = record.forms([x, y])
    assert both != record.forms([x, x])
    assert record.forms([x, x]) == record.forms([y, y]) or x.data_ptr() % 512 != y.data_ptr() % 512


def test_which_counter_a_launch_takes_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(2, dtype=torch.int32)
    taken = iter((counters[:1], counters[1:]))
    monkeypatch.setattr(workspace, "_gpu_workspace", lambda device: next(taken))
    with launch_records.recording(lambda tensor: None) as record:
        assert {record.forms([workspace.counter(torch.device("cuda", 0))]) for _ in range(2)} == {("counter",)}


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "cross_entropy"])
def test_our_operations_launch_the_same_in_each_call(name: str, direction: str) -> None:
    operation = operations()[name]
    workload = operation.workloads["cpu"]["small"](FLOAT32)
    function = backends.load(name, "cuda")
    infos, codes = [], {}
    for _ in range(2):
        call = Call(function, operation, workload, FLOAT32, "cpu", direction)
        call.run(2)
        infos.append(info_of(call, workload, codes))
    assert infos[0] == infos[1]
    assert infos[0]["unknown"] == ""
    assert infos[0]["launches"]
    assert {code.arch for code in codes.values()} == {"sm_90a"}
    assert known_calls.recorder() is None


def test_what_cannot_be_read_or_disassembled_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "calls_are_watched", lambda: True)
    broken = launch_records.Code("k", "k", "sm_90", b"\x7fELF\x02 and no more")
    record = launch_records.LaunchRecord(lambda tensor: None)
    record.record_launch(broken, "grid (1, 1, 1)", [])
    info = code_identity.describe(record, WORKLOAD, {})
    assert info["unknown"]
    assert code_identity.key(info, MACHINE) is None
    assert code_identity.resources({"a": broken}) == {}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm", "cross_entropy", "giou", "topk"])
def test_a_gpus_launches_are_all_recorded(name: str, backend: str, direction: str) -> None:
    operation = operations()[name]
    workload = operation.workloads["cuda"]["small"](FLOAT32)
    function = join_outputs(backends.load(name, backend), operation)
    infos, codes = [], {}
    for _ in range(2):
        call = Call(function, operation, workload, FLOAT32, "cuda", direction)
        call.run(3)
        record = code_identity.on_gpu(call)
        infos.append(code_identity.describe(record, workload, codes))
    assert infos[0] == infos[1]
    assert infos[0]["unknown"] == ""
    assert infos[0]["launches"]
    assert code_identity.resources(codes).keys() == codes.keys()
    if record.others:
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call.run(1)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        pytest.skip("torch's profiler sees no kernels on this machine")
    assert len(on_device) == len(record.launches), [event.name for event in on_device]


@pytest.mark.usefixtures("launched")
def test_the_difference_of_code_is_shown_in_instructions(tmp_path: Path) -> None:
    now, then = dict[str, Any](), dict[str, Any]()
    changed = SOURCE.replace("2.0f * x[i]", "2.0f * x[i] + __sinf(x[i])")
    sides = info_of(Scale(tmp_path, text=changed, block=32), codes=now), info_of(Scale(tmp_path), codes=then)
    lines = list(code_identity.differences(*sides, code_identity.resources(now), code_identity.resources(then)))
    assert lines[0].startswith("scale_kernel for sm_90a: ")
    assert "+1 MUFU" in lines[0]
    assert [line[:17] for line in lines[1:]] == ["now: scale_kernel", "was: scale_kernel"]
    assert "block (32, 1, 1)" in lines[1]
    kernels = code_identity.resources(now)
    assert not list(code_identity.differences(sides[0], sides[0], kernels, kernels))
    assert not list(code_identity.differences(sides[0], None, kernels, {}))


def measurement_of(contender: str, direction: str = "forward") -> Measurement:
    cell = Cell("vector_add", contender, "float32") if contender != "library" else None
    return Measurement(
        operation=operations()["vector_add"],
        workload="small",
        make=operations()["vector_add"].workloads["cpu"]["small"],
        dtype="float32",
        direction=direction,
        of=Contender(contender, lambda: lambda x, y: x + y, cell),
        clock=HostClock(),
    )


@pytest.mark.parametrize(
    ("device", "of", "recorded"),
    [
        ("cuda", measurement_of("cuda"), True),
        ("cuda", measurement_of("triton", "both"), True),
        ("cuda", measurement_of("torch"), False),
        ("cuda", measurement_of("library"), False),
        ("cuda", measurement_of(CANDIDATE), True),
        ("cuda", measurement_of("cuda", HOST), False),  # the host's time does not depend on this code alone
        ("cpu", measurement_of("cuda"), False),
    ],
    ids=str,
)
def test_kernels_on_a_gpus_clock_are_recorded(
    device: str, of: Measurement, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_identity, "on_gpu", lambda call: launch_records.LaunchRecord(lambda tensor: None))
    selection: Any = None
    found = Bench(selection, device).launched(of, SimpleNamespace(single_call=None))  # type: ignore[arg-type]
    assert (found is not None) == recorded


def nodes_of(monkeypatch: pytest.MonkeyPatch, **nodes: int) -> None:
    """Give every graph these nodes."""
    monkeypatch.setattr(code_identity, "_nodes", lambda graph: Counter(nodes))


@pytest.mark.parametrize(
    ("nodes", "complete"),
    [
        ({"scale_kernel": 3}, True),
        ({"scale_kernel": 4}, False),
        ({"scale_kernel": 3, "hidden_kernel": 3}, False),
        ({"hidden_kernel": 3}, False),
        ({"scale_kernel": 3, "CU_GRAPH_NODE_TYPE_MEMCPY": 3}, False),
    ],
    ids=str,
)
def test_a_candidates_record_explains_every_node_of_its_graph(
    nodes: dict[str, int], complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "calls_are_watched", lambda: True)
    nodes_of(monkeypatch, **nodes)
    record = launch_records.LaunchRecord(lambda tensor: None)
    record.record_launch(launch_records.Code("scale_kernel", "scale_kernel", "sm_90", b""), "grid (1, 1, 1)", ())
    graph: Any = SimpleNamespace(graph=0, calls_per_run=3)
    code_identity.refuse_unrecorded(record, graph)
    assert (record.unknown == "") == complete


def test_the_variables_of_the_toolchain_are_those_that_triton_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembler = tmp_path / "ptxas"
    shutil.copy(machine.toolchain()["TRITON_PTXAS_PATH"], assembler)
    # torch.compile sets variables that are not set, and no others.
    given = {"TRITON_PTXAS_PATH": str(assembler), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert machine.toolchain() == given


HIDES_A_LAUNCH = """
import torch
import triton
import triton.language as tl

@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n)
    tl.store(y_ptr + places, 2.0 * x, mask=places < n)

def doubled(x, hidden):
    y = torch.empty_like(x)
    compiled = double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), BLOCK=128)
    if hidden:
        compiled[(1, 1, 1)](x, y, x.numel(), 128, stream=torch.cuda.current_stream().cuda_stream)
    return y
"""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("hidden", [False, True])
def test_a_launch_that_no_hook_sees_makes_a_candidates_record_incomplete(hidden: bool, tmp_path: Path) -> None:
    path = tmp_path / "hides_a_launch.py"
    path.write_text(HIDES_A_LAUNCH)
    function = runpy.run_path(str(path))["doubled"]
    operation = operations()["softmax"]
    workload = operation.workloads["cuda"]["small"](FLOAT32)
    replay = Replay(
        lambda: Call(lambda x, *rest: function(x, hidden), operation, workload, FLOAT32, "cuda", "forward"), 0
    )
    record = code_identity.on_gpu(replay.single_call)
    assert record.unknown == ""
    code_identity.refuse_unrecorded(record, replay)
    assert ("double_kernel" in record.unknown) == hidden


class Fixture:
    """The timer of pytest-benchmark, which takes 1 ms for each call."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.stats = {"median": 1e-3}

    def pedantic(self, run: Callable[[int], None], args: tuple[int], setup: Callable[[], None], rounds: int) -> None:
        setup()
        run(*args)


@pytest.mark.parametrize("waits", [False, True], ids=["device", "waits_for_host"])
def test_a_time_that_includes_the_hosts_is_never_judged_by_code(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    selection: Any = SimpleNamespace()
    bench = Bench(selection, "cpu")
    bench.__dict__["ceilings"] = Ceilings(1e15, {"float32": 1e15}, 1e-6)
    info = {"sha256": "a", "workload": "", "launches": ["k"], "kernels": ["a"], "torch": [], "unknown": ""}
    monkeypatch.setattr(Bench, "launched", lambda bench, measurement, runnable: info)
    measurement, benchmark = measurement_of("torch"), Fixture()
    measurement.clock.waits_for_host = waits  # type: ignore[attr-defined]
    bench.time(benchmark, measurement, 1, 0.01)
    kept = benchmark.extra_info["launched"]
    assert (code_identity.key(kept, MACHINE) is None) == waits
