"""A cache never fails a run: a damaged entry is made again, and an unwritable cache is not used."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from samples import sampled
from subjects import cache_with_runtime

from fourfold.backends import tuning
from fourfold.backends.cuda import compile as cuda_compile
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import CudaError, cache_directory, cache_folder, compile_kernels, directory_lock
from fourfold.backends.cuda.emulator import build
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.tuning import Configuration, Tuner
from fourfold.performance import gated, sources

KERNEL = """__global__ void fill(float* out, long long n) {
    // One thread owns one element.
    out[threadIdx.x + n] = 1.0f;
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a kernel in a folder with a blank, and a cache that nothing else uses."""
    folder = tmp_path_factory.mktemp("of somebody") / "my kernels"
    folder.mkdir()
    source = folder / "fill.cu"
    source.write_text(KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOURFOLD_CACHE", str(cache_with_runtime(folder.parent / "the cache")))
        yield source


def cut_off(file: Path) -> None:
    """Truncate a file, as a process that is killed while it writes or a full disk does."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


# ---- compiled kernels

on_cpu = pytest.mark.skipif(cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or "")


@on_cpu
@pytest.mark.parametrize("damage", sampled(["*.so", "*.json"], "*.json"))
def test_kernel_of_the_emulation_that_is_damaged_is_compiled_anew(damage: str, kernel: Path) -> None:
    built = build.build(kernel, "fill", [], checked=False)
    whole = built.path.read_bytes()
    (entry,) = built.path.parent.glob(damage)
    cut_off(entry)
    again = build.build(kernel, "fill", [], checked=False)
    assert again == built
    assert len(again.path.read_bytes()) == len(whole)


@pytest.mark.full
@on_cpu
def test_runtime_of_the_emulation_that_is_damaged_is_compiled_anew(kernel: Path) -> None:
    build.build(kernel, "fill", [], checked=False)
    runtime = cache_directory() / "cuda_on_cpu_runtime"
    shared = runtime.resolve()
    runtime.unlink()
    shutil.copytree(shared, runtime)  # other processes use the shared one
    # There is one for each version of its sources.
    schedulers = [*runtime.glob("*/scheduler.o")]
    sizes = [scheduler.stat().st_size for scheduler in schedulers]
    for scheduler in schedulers:
        cut_off(scheduler)
    kernel.write_text(KERNEL + "// changed, so that it is linked again\n")
    build.build(kernel, "fill", [], checked=False)
    assert [scheduler.stat().st_size == size for scheduler, size in zip(schedulers, sizes)].count(True) == 1


@pytest.mark.parametrize("damage", ["*.cubin", "*.json"])
def test_kernel_for_a_gpu_that_is_damaged_is_compiled_anew(damage: str, kernel: Path) -> None:
    try:
        cuda_compile._nvrtc_version()
    except CudaError as error:
        pytest.skip(str(error))
    compiled = compile_kernels(kernel, "fill", [], "sm_90a")
    size = compiled.path.stat().st_size
    (entry,) = compiled.path.parent.glob(damage)
    cut_off(entry)
    assert compile_kernels(kernel, "fill", [], "sm_90a").lowered_names == compiled.lowered_names
    assert compiled.path.stat().st_size == size


@on_cpu
def test_fault_in_a_folder_with_a_blank_has_its_line(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", "checked")
    with pytest.raises(cuda_on_cpu.OutOfBounds) as caught:
        CudaKernel(kernel, "fill").launch(1, 32, torch.zeros(32), 1)
    assert caught.value.file == str(kernel.resolve())
    assert caught.value.line == 1 + KERNEL.splitlines().index("    out[threadIdx.x + n] = 1.0f;")


# ---- what was measured


@pytest.mark.parametrize("content", ["{", "[]", '{"\'kind\'": ["fast"]}', ""])
def test_measurements_that_are_damaged_are_made_anew(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "milliseconds", lambda run: run.args[0].options["takes"])
    monkeypatch.setattr(tuning, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    slow, fast = Configuration("slow", {"takes": 2.0}), Configuration("fast", {"takes": 1.0})
    gpu = torch.device("cuda", 0)

    def chosen() -> Configuration:
        kernel = Tuner("kernel", (slow, fast), Path(__file__))
        return kernel.choose(gpu, "kind", lambda one: True, lambda: slow, lambda one: None)

    assert chosen() == fast
    (file,) = tmp_path.glob("tuning/*.json")
    kept = file.read_text()
    file.write_text(content)
    assert chosen() == fast
    assert file.read_text() == kept


# ---- sources of a baseline


def test_sources_that_are_damaged_are_named_and_not_a_traceback(tmp_path: Path) -> None:
    path = sources.save(tmp_path / "sources", {"fourfold/impls/a.py": b"a = 1\n" * 1000})
    cut_off(path)
    with pytest.raises(sources.SourceError) as caught:
        sources.Baseline(path)
    assert f"{path} is damaged" in str(caught.value)
    # The damaged file is reported even if another folder lacks the sources.
    baseline, why = gated._baseline([tmp_path, tmp_path / "other"], {"sha256": path.stem})
    assert baseline is None
    assert f"{path} is damaged" in why


def test_sources_that_are_damaged_are_kept_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    files = {"fourfold/impls/a.py": b"a = 1\n" * 1000}
    cut_off(sources.save(tmp_path, files))
    baseline = sources.Baseline(sources.save(tmp_path, files))
    (extracted,) = baseline.directory.rglob("a.py")
    cut_off(extracted)
    sources.Baseline(sources.save(tmp_path, files))
    assert extracted.read_bytes() == files["fourfold/impls/a.py"]


# ---- folders that cannot be written to


def test_folder_of_the_cache_that_takes_no_files_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    assert cache_folder("cuda", "1") == tmp_path / "cuda" / "1"
    (tmp_path / "tuning").write_text("")  # like a folder of another user, it is no writable folder
    instead = cache_folder("tuning")
    assert instead.is_dir()
    assert tmp_path not in instead.parents
    assert cache_folder("tuning") == instead


def test_full_disk_holds_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 1000

    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(cuda_compile.shutil, "disk_usage", lambda folder: Full)
    assert tmp_path / "own" not in (cache_directory(), *cache_directory().parents)


def test_what_cannot_be_locked_is_done_without_a_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with directory_lock(tmp_path):
        assert os.listdir(tmp_path) == ["lock"]
