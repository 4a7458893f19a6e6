"""The ladders: the articles' successive implementations of one loss, and kernels over a range of sizes.

The articles' kernels are timed with the missing clamp added, which costs two instructions, so that their results can
be compared with the oracle. Their other mistakes do not show on this batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fourfold.impls.giou_loss.torch_eager import concatenated_loss, looped_loss, padded_loss
from fourfold.properties import giou_loss, matmul, softmax
from known_wrong import published

from fourfold import backends
from fourfold.engine.cells import Cell
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.workloads import Make, tiled, whole
from fourfold.performance.measurement import Contender, Measurement, clock_for
from fourfold.performance.plugin import Performance, parametrize
from fourfold.performance.timing import HostClock

Function = Callable[..., torch.Tensor]
BATCH = {"cpu": (16, 32), "cuda": (1024, 256)}
# Rows of softmax, and the numbers of their columns.
ROWS = {"cpu": (8, (64, 256, 1024)), "cuda": (4096, (256, 1024, 4096, 16384))}
# The articles' own times for a loss at batch 1024, in seconds on an L4.
ARTICLE_SECONDS = {
    "01_looped": 938e-3,
    "02_concatenated": 25.4e-3,
    "03_padded": 1.84e-3,
    "04_compiled": 0.83e-3,
    "05_cuda": 0.63e-3,
    "07_triton": 0.89e-3,
    "08_triton_compiled": 0.72e-3,
    "09_triton_native_dtype": 0.62e-3,
}
# m, k and n of matmul, which are equal.
EXTENTS = {"cpu": (32, 64, 128), "cuda": (512, 1024, 2048, 4096, 8192)}


def on_samples(loss: Callable[..., torch.Tensor]) -> Function:
    """Let a loss over a list of each sample's boxes take padded boxes. The list is made at the first call."""
    kept: dict[int, list[torch.Tensor]] = {}

    def of_padded(pred: torch.Tensor, target: torch.Tensor, eps: float) -> torch.Tensor:
        if target.data_ptr() not in kept:
            counts = (target[..., 3] > 0).sum(1).tolist()
            kept[target.data_ptr()] = [boxes[:count] for boxes, count in zip(target, counts)]
        return loss(pred.float(), [boxes.float() for boxes in kept[target.data_ptr()]], eps).to(pred.dtype)

    return of_padded


def on_ragged(loss: Function) -> Function:
    """Let a ragged loss take padded boxes. They are concatenated at the first call."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of_padded(pred: torch.Tensor, target: torch.Tensor, eps: float) -> torch.Tensor:
        if target.data_ptr() not in kept:
            valid = target[..., 3] > 0
            offsets = torch.nn.functional.pad(valid.sum(1).cumsum(0), (1, 0))
            kept[target.data_ptr()] = target[valid], offsets
        return loss(pred, *kept[target.data_ptr()], eps)

    return of_padded


def in_float32(loss: Function) -> Function:
    def of_any(pred: torch.Tensor, target: torch.Tensor, eps: float) -> torch.Tensor:
        return loss(pred.float(), target.float(), eps).to(pred.dtype)

    return of_any


def in_dtype(loss: Function) -> Function:
    def of_any(pred: torch.Tensor, target: torch.Tensor, eps: float) -> torch.Tensor:
        return loss(pred, target, eps).to(pred.dtype)

    return of_any


def compiled(make: Callable[[], Function]) -> Callable[[], Function]:
    def made() -> Function:
        torch.compiler.reset()
        return torch.compile(make(), dynamic=False)

    return made


def naive_softmax(x: torch.Tensor) -> torch.Tensor:
    exponentials = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(-1, keepdim=True)).to(x.dtype)


def loss_rungs(device: str) -> dict[str, Callable[[], Function]]:
    """Return the rungs of the articles' ladder, the lowest first."""
    rungs: dict[str, Callable[[], Function]] = {
        "01_looped": lambda: on_samples(looped_loss),
        "02_concatenated": lambda: on_samples(concatenated_loss),
        "03_padded": lambda: in_float32(padded_loss),
        "04_compiled": compiled(lambda: in_float32(padded_loss)),
        "05_cuda": lambda: in_dtype(published.cuda_loss("multiplied", clamp=True)),
        "06_cuda_early_exit": lambda: in_dtype(published.cuda_loss("skipping", clamp=True)),
        "07_triton": lambda: in_dtype(published.triton_loss(clamp=True)),
    }
    if device == "cuda":  # the interpreter neither compiles nor gains from narrower loads
        rungs["08_triton_compiled"] = compiled(lambda: in_dtype(published.triton_loss(clamp=True)))
        rungs["09_triton_native_dtype"] = lambda: in_dtype(published.triton_loss(clamp=True, native=True))
    for backend in ("cuda", "triton"):
        rungs[f"10_ours_{backend}"] = lambda backend=backend: backends.load("giou_loss", backend)  # type: ignore[misc]
        rungs[f"11_ours_ragged_{backend}"] = lambda backend=backend: on_ragged(  # type: ignore[misc]
            backends.load("giou_loss_ragged", backend)
        )
    return rungs


def softmax_rungs() -> dict[str, Callable[[], Function]]:
    return {
        "naive": lambda: naive_softmax,
        "compiled": compiled(lambda: naive_softmax),
        "torch": lambda: lambda x: torch.softmax(x, -1),
        "triton": lambda: backends.load("softmax", "triton"),
        "cuda": lambda: backends.load("softmax", "cuda"),
    }


def matmul_rungs() -> dict[str, Callable[[], Function]]:
    return {
        "cublas": lambda: lambda a, b, **_: a @ b,
        "triton": lambda: backends.load("matmul", "triton"),
        "cuda": lambda: backends.load("matmul", "cuda"),
    }


def ladders(device: str) -> Iterator[tuple[str, str, Make, dict[str, Callable[[], Function]]]]:
    """Yield the operation, name, workload and rungs of each ladder."""
    batch, boxes = BATCH[device]
    yield "giou_loss", f"ladder_{batch}x{boxes}", whole(giou_loss.article_batch(batch, boxes)), loss_rungs(device)
    all_rows, lengths = ROWS[device]
    for cols in lengths:
        rows = min(all_rows, 32)
        few = softmax.rows(rows, cols=cols)
        make = whole(few) if rows == all_rows else tiled(few, all_rows // rows, "x")
        yield "softmax", f"ladder_{cols}", make, softmax_rungs()
    for extent in EXTENTS[device]:
        few = min(extent, 64) if extent > 128 else extent
        part = matmul.random_example(few, extent, few)
        make = tiled(part, extent // few, "a", across=("b",)) if few < extent else whole(part)
        yield "matmul", f"ladder_{extent}", make, matmul_rungs()


def rung_measurements(performance: Performance, names: Sequence[str]) -> Iterator[Measurement]:
    device = performance.device
    for name, workload, make, rungs in ladders(device):
        for dtype in performance.dtypes if name in names else ():
            for rung, function in rungs.items():
                own = next((backend for backend in backends.BACKENDS if rung.endswith(backend)), None)
                # Without a cell a larger error of an article's kernel, as in half types, is recorded only.
                cell = Cell(name, own, dtype) if own and ("ours" in rung or name != "giou_loss") else None
                yield Measurement(
                    operation=performance.selection.operations[name],
                    workload=workload,
                    make=make,
                    dtype=dtype,
                    direction="forward",
                    of=Contender(rung, function, cell),
                    clock=clock_for(device, "forward"),
                    in_ladder=True,
                )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "measurement" not in metafunc.fixturenames:
        return
    performance = metafunc.config.pluginmanager.getplugin("fourfold-performance")
    options = metafunc.config.option
    # The ladders are left out if the command selects backends or a candidate.
    whole_ladders = not (options.backend or options.candidate)
    names = options.op or list(performance.selection.operations)
    parametrize(metafunc, rung_measurements(performance, names) if whole_ladders else ())


def test_timed_rung_is_right(benchmark: Any, measurement: Measurement, performance: Performance) -> None:
    performance.time(benchmark, measurement)
    if measurement.operation.name == "giou_loss":
        benchmark.extra_info["article_seconds_on_l4"] = ARTICLE_SECONDS.get(measurement.contender)


@pytest.mark.benchmark(group="giou_loss-ladder-copy", timer=HostClock())
def test_copy_of_a_batch_to_the_device(benchmark: Any, performance: Performance) -> None:
    """Time the copy of a batch's targets to the GPU, which precedes any loss, from a loader's pageable memory."""
    if performance.device != "cuda":
        pytest.skip("needs --device cuda")
    float32 = DTYPES["float32"]
    held = giou_loss.article_batch(*BATCH["cuda"])(float32).tensor("target", float32, "cpu")

    def copy() -> torch.Tensor:
        copied = held.to("cuda")
        torch.cuda.synchronize()
        return copied

    copied = benchmark.pedantic(copy, rounds=100, warmup_rounds=5)
    assert torch.equal(copied.cpu(), held)
    benchmark.extra_info |= {"device": "cuda", "bytes": held.nbytes, "timed": "host, until the copy is there"}
