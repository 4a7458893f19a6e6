"""Code identity: what a benchmark launches on a GPU, so that unchanged code is known again without a clock.

One call is recorded before it is timed. Its identity is a hash over its launches in order: machine code, registers,
grid, block, shared memory, clusters, numbers, the forms of tensors; over the operators of torch beside them; and over
the workload. Two runs with the same identity give the GPU the same work.
"""

import hashlib
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fourfold.backends import known_calls, operators
from fourfold.backends.cuda.compile import CudaError, resources_of_cubin
from fourfold.backends.launch_records import Code, Launched, LaunchRecord, recording
from fourfold.checks.ahead_of_time import needs
from fourfold.compat import torch_internals
from fourfold.operations.workloads import Workload
from fourfold.performance.calls import Call, Replay
from fourfold.performance.static import pair_kernels

# What a record shows. The hash covers all.
LAUNCHES_SHOWN, OPERATORS_SHOWN, WIDTH = 24, 8, 200
# What the time of torch's own kernels depends on, as `machine.machine` names it.
VERSIONS = ("gpu", "driver", "cuda", "torch")
DISASSEMBLERS = 4  # processes at a time

Info = Mapping[str, Any]


class LaunchingOperators(torch_internals.dispatch_mode()):  # type: ignore[misc]
    """A mode that records the operators of torch which may launch kernels, also those within our own operators."""

    def __init__(self, record: LaunchRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it unless it only allocates, makes a view, or is one of ours."""
        kwargs = kwargs or {}
        function = operators.implementation(operator)
        if function is not None and not kwargs:
            with self:  # what it calls must be seen too
                return function(*args)
        if torch_internals.namespace(operator) != "aten":
            self._record.refuse(f"{operator} is an operator of neither torch nor Fourfold")
        elif operator not in known_calls.MAKE and not torch_internals.is_view(operator):
            self._record.record_operator(operator, [*args, *(part for pair in sorted(kwargs.items()) for part in pair)])
        return operator(*args, **kwargs)


def record_of(
    call: Call, observe: Callable[[LaunchRecord], AbstractContextManager] = lambda record: nullcontext()
) -> LaunchRecord:
    """Make a call once, and return what it launched.

    Args:
        call: a call that has been made before, so that it neither compiles nor tunes.
        observe: a context that records more, given the record.
    """
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in call.arguments.items() if tensor.numel()}

    def name_of(tensor: torch.Tensor) -> str | None:
        return names.get(tensor.untyped_storage().data_ptr())

    with recording(name_of) as record:
        try:
            with observe(record), LaunchingOperators(record):
                call.run(1)
        except Exception as error:  # a call that cannot be recorded is judged by its time
            record.refuse(f"{type(error).__name__}: {error}")
    return record


def on_gpu(call: Call) -> LaunchRecord:
    """Return `record_of` a call on a GPU, with the launches that Triton itself makes."""
    # Triton reads TRITON_INTERPRET when it is imported.
    from fourfold.backends.triton.launch import record_triton_launches

    return record_of(call, record_triton_launches)


def refuse_unrecorded(record: LaunchRecord, replay: Replay) -> None:
    """Refuse a candidate's record if its captured graph has nodes that the record does not explain.

    A candidate may launch kernels that no hook sees, such as those of an extension. Its graph has them all.

    Args:
        record: what one call launched.
        replay: the graph of that call and others like it.
    """
    nodes = _nodes(replay.graph)
    for launch in record.launches:
        nodes[launch.code.mangled] -= replay.calls_per_run
    unexplained = [name for name, count in nodes.items() if count]
    if unexplained:
        record.refuse(f"the candidate's call has nodes that are not recorded: {', '.join(unexplained)}"[:WIDTH])


def _nodes(graph: int) -> Counter[str]:
    """Count the nodes of a CUDA graph: kernels by their mangled names, others by their types."""
    from cuda.bindings import driver

    def result(status: Any, *values: Any) -> Any:
        if status.value:
            raise CudaError(f"the nodes of a CUDA graph cannot be read: {status.name}")
        return values[0] if values else None

    def name(node: Any) -> str:
        kind = result(*driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            return str(kind.name)
        parameters = result(*driver.cuGraphKernelNodeGetParams(node))
        if int(parameters.func):
            return str(result(*driver.cuFuncGetName(parameters.func)).decode())
        return str(result(*driver.cuKernelGetName(parameters.kern)).decode())

    status, _, count = driver.cuGraphGetNodes(graph, 0)
    result(status)
    nodes = result(*driver.cuGraphGetNodes(graph, count)[:2]) if count else []
    return Counter(map(name, nodes))


def describe(record: LaunchRecord, workload: Workload, codes: MutableMapping[str, Code]) -> dict[str, Any]:
    """Return a record as JSON, of a bounded size.

    Args:
        record: what a call launched.
        workload: what it was called on.
        codes: takes the code that was launched, by its hash.

    Returns:
        "sha256", the identity; "launches" and "torch", the first launches and operators in words; "kernels", the hashes
        of the code in order; "workload", a hash; and "unknown", why the identity says nothing, or "".
    """
    digest = hashlib.sha256()
    of_workload = workload_sha256(workload)
    lines, kernels = [], dict[str, None]()
    unknown = record.unknown
    try:
        for event in record.events:
            line = _line(event) if isinstance(event, Launched) else event
            digest.update(f"{line}\n{event.arguments if isinstance(event, Launched) else ''}\n".encode())
            if isinstance(event, Launched):
                lines.append(line)
                kernels[event.code.sha256] = None
                codes[event.code.sha256] = event.code
    except (ValueError, LookupError, struct.error) as error:  # a compiled file of a form that is not known
        unknown = unknown or f"{type(error).__name__}: {error}"
    digest.update(f"{of_workload} {_settings() if record.others else ''}".encode())
    return {
        "sha256": digest.hexdigest(),
        "workload": of_workload,
        "launches": _first(lines, LAUNCHES_SHOWN),
        "kernels": list(kernels)[:LAUNCHES_SHOWN],
        "torch": _first(record.others, OPERATORS_SHOWN),
        "unknown": unknown,
    }


def _line(launched: Launched) -> str:
    arguments = hashlib.sha256(repr(launched.arguments).encode()).hexdigest()
    return f"{launched.code.name} {launched.code.identity[:12]}: {launched.configuration}, arguments {arguments[:8]}"


def _first(lines: Sequence[str], limit: int) -> list[str]:
    omission = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines[:limit]] + omission


def _settings() -> tuple[Any, ...]:
    """Return the settings that, beside the version, determine torch's choice of kernels."""
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


def workload_sha256(workload: Workload) -> str:
    """Return a hash of a workload: shapes and parameters of its case, and the numbers of the part that it repeats."""
    digest = hashlib.sha256(repr(sorted(workload.case.parameters.items())).encode())
    digest.update(repr(sorted(workload.case.layouts.items())).encode())
    for side in (workload.case, workload.part):
        arrays = {**side.inputs, "grad_output": side.grad_output}
        digest.update(repr([(name, array.shape, array.dtype.name) for name, array in arrays.items()]).encode())
    for array in (*workload.part.inputs.values(), workload.part.grad_output):
        digest.update(array.tobytes())
    return digest.hexdigest()


def key(info: Info | None, machine: Mapping[str, str]) -> str | None:
    """Return what two runs have in common if one's GPU does the same work as the other's; None if that is not known.

    Where torch launches kernels of its own, they are the same only on the same versions of torch, CUDA and the driver.
    A call without a launch of ours is judged by its time.

    Args:
        info: what `describe` returned in a run, or None.
        machine: the machine of that run, as `machine.machine` describes it.
    """
    if not info or info["unknown"] or not info["launches"]:
        return None
    if info["torch"]:
        return " ".join([info["sha256"], *(f"{name} {machine.get(name, '')}" for name in VERSIONS)])
    return info["sha256"]


def resources(codes: Mapping[str, Code]) -> dict[str, dict[str, Any]]:
    """Return the registers, spills, shared memory and instructions of code, by its hash; without what has no answer."""

    of_file: dict[bytes, dict[str, Code]] = {}  # a file is disassembled once, whatever it holds
    for sha256, code in codes.items():
        of_file.setdefault(code.cubin, {})[sha256] = code

    def needs_of(cubin: bytes) -> dict[str, dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernels.cubin")
            path.write_bytes(cubin)
            try:
                return {
                    sha256: needs(replace(resources_of_cubin(path, code.mangled, code.arch), name=code.name))
                    for sha256, code in of_file[cubin].items()
                }
            except (CudaError, LookupError):  # there is no disassembler, or it says other things than it did
                return {}

    with ThreadPoolExecutor(DISASSEMBLERS) as pool:
        return {sha256: kernel for kernels in pool.map(needs_of, of_file) for sha256, kernel in kernels.items()}


def kernels_by_cell(
    benchmarks: Iterable[Mapping[str, Any]], kernels: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return the resources of what benchmarks have launched, each kernel once, by operation, contender and dtype.

    Args:
        benchmarks: the benchmarks of a record.
        kernels: the `resources` of their code.
    """
    by_cell: dict[str, dict[str, Mapping[str, Any]]] = {}
    for info in (entry.get("extra_info", {}) for entry in benchmarks):
        known = {sha256: kernels[sha256] for sha256 in info.get("launched", {}).get("kernels", ()) if sha256 in kernels}
        if known:
            by_cell.setdefault("-".join(info[name] for name in ("operation", "contender", "dtype")), {}).update(known)
    return {name: [*of_cell.values()] for name, of_cell in by_cell.items()}


def differences(
    new: Info | None, old: Info | None, kernels: Mapping[str, Any], former: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what differs between the launches of two runs of a benchmark; nothing if one was not recorded.

    Args:
        new, old: what `describe` returned in either run.
        kernels, former: the `resources` of either run.
    """
    if not new or not old or (new["sha256"] == old["sha256"] and not new["unknown"] and not old["unknown"]):
        return
    lines = []
    if unknown := new["unknown"] or old["unknown"]:
        lines.append(f"what it launches is not known: {unknown}")
    if new["workload"] != old["workload"]:
        lines.append("the workload is another one")
    new_codes, old_codes = (
        [codes[sha256] for sha256 in info["kernels"] if sha256 in codes]
        for info, codes in ((new, kernels), (old, former))
    )
    lines += [str(pair) for pair in pair_kernels(new_codes, old_codes) if not pair.same]
    for category in ("launches", "torch"):
        new_lines: Counter[str] = Counter(new[category])
        old_lines: Counter[str] = Counter(old[category])
        lines += [f"now: {line}" for line in (new_lines - old_lines).elements()]
        lines += [f"was: {line}" for line in (old_lines - new_lines).elements()]
    yield from lines or ["the launches come in another order, or differ in what the record does not show"]
