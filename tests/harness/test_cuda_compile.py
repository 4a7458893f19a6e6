"""NVRTC without a GPU: kernels compile for every architecture, and their resources are reported."""

import pathlib
import time

import pytest
from samples import sampled

from fourfold.backends.cuda import compile as cuda_compile
from fourfold.backends.cuda.compile import (
    CompilationError,
    CudaError,
    cache_directory,
    compile_ahead_of_time,
    compile_kernels,
    nvrtc_options,
)

CUDA = pathlib.Path(__file__).resolve().parent / "cuda"
CONTROLS = CUDA / "controls.cu"
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120"]
NAMES = [
    *(f"softmax<{type_}>" for type_ in ("float", "double", "__half", "__nv_bfloat16")),
    *("matmul<float, 16>", "two_stage_sum<false>", "last_warp_sums", "atomics", "warp_intrinsics", "mathematics"),
    *("reverses_in_dynamic_shared", "adds_vectors", "pairs<__half, __half2>", "pairs<__nv_bfloat16, __nv_bfloat162>"),
    *("tensor_cores<__half>", "tensor_cores<__nv_bfloat16>", "atomic_sum<unsigned long long>", "spills"),
]


@pytest.fixture(params=sampled(ARCHITECTURES, "sm_90a"))
def arch(request):
    try:
        cuda_compile._nvrtc_version()
    except CudaError as error:
        pytest.skip(str(error))
    return request.param


def test_the_kernels_that_run_on_the_cpu_compile_for_each_architecture(arch):
    resources = compile_ahead_of_time(CONTROLS, NAMES, arch)
    assert list(resources) == NAMES
    for name, needs in resources.items():
        assert (needs.name, needs.arch) == (name, arch)
        assert 0 < needs.registers <= 255
        # Constant bank 0 holds the driver's data and then the parameters, at least 16 bytes in each of these kernels.
        assert needs.constant_bytes >= 16
        assert needs.instruction_counts["EXIT"] >= 1
        assert len(needs.code_sha256) == 64
    assert len({needs.code_sha256 for needs in resources.values()}) == len(NAMES)


def test_resources_are_those_of_the_kernel(arch):
    resources = compile_ahead_of_time(CONTROLS, NAMES, arch)
    # Tiles of 16 x 16 and 16 x 17 floats, 32 partial results, a tile of 256 halves. Dynamic memory does not count.
    for name, shared_bytes in (
        ("matmul<float, 16>", (256 + 272) * 4),
        ("softmax<float>", 2 * 32 * 4),
        ("softmax<double>", 2 * 32 * 8),
        ("tensor_cores<__half>", 512),
        ("reverses_in_dynamic_shared", 0),
        ("adds_vectors", 0),
    ):
        assert resources[name].shared_bytes == shared_bytes, name
    tensor_cores = resources["tensor_cores<__half>"].instruction_counts
    assert tensor_cores["HMMA"] > 0
    assert "HMMA" not in resources["matmul<float, 16>"].instruction_counts
    assert resources["matmul<float, 16>"].instruction_counts["FFMA"] >= 16
    assert resources["matmul<float, 16>"].instruction_counts["BAR"] >= 2
    assert resources["softmax<double>"].instruction_counts["DFMA"] > 0
    assert "DFMA" not in resources["softmax<__half>"].instruction_counts


def test_spilled_registers_are_counted(arch):
    resources = compile_ahead_of_time(CONTROLS, NAMES, arch)
    spilled = resources["spills"]
    # With 1024 threads, each thread has 64 registers, but this kernel keeps 200 values.
    assert spilled.registers <= 64
    assert min(spilled.spill_store_bytes, spilled.spill_load_bytes, spilled.stack_bytes) > 0
    plain = resources["matmul<float, 16>"]
    assert (plain.spill_store_bytes, plain.spill_load_bytes, plain.stack_bytes) == (0, 0, 0)


def test_a_compile_error_shows_the_compilers_words(arch, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void k(float* c) { c[0] = undeclared; }")
    said = rf"broken\.cu does not compile for {arch}[\s\S]*broken\.cu\(1\).*undeclared"
    with pytest.raises(CompilationError, match=said):
        compile_ahead_of_time(source, ["k"], arch)


def test_a_name_that_the_file_lacks_is_an_error(arch):
    with pytest.raises(CudaError, match="no_such_kernel"):
        compile_ahead_of_time(CONTROLS, ["no_such_kernel<float>"], arch)


def test_a_kernel_that_does_not_compile_leaves_the_others_of_its_file(arch, tmp_path):
    source = tmp_path / "one_broken.cu"
    source.write_text("template <class T> __global__ void k(T* c) { c[0] = T(1) << 3; }\n")
    assert set(compile_kernels(source, "k<int>", ["k<float>", "k<int>"], arch).lowered_names) == {"k<int>"}
    with pytest.raises(CudaError, match="float"):
        compile_kernels(source, "k<float>", ["k<float>", "k<int>"], arch)


def test_a_kernel_is_compiled_once_until_a_header_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "k.cu", tmp_path / "value.cuh"
    source.write_text('#include "value.cuh"\ntemplate <class T> __global__ void k(T* c) { c[threadIdx.x] = VALUE; }')
    header.write_text("#define VALUE 1\n")
    compiled = []
    compile_ = cuda_compile._compile
    monkeypatch.setattr(cuda_compile, "_compile", lambda *a: compiled.append(a[1]) or compile_(*a))
    names = ["k<double>", "k<float>"]
    first = compile_kernels(source, names[0], names, "sm_90a")
    assert compile_kernels(source, names[1], names, "sm_90a") == first
    assert compiled == [names]
    header.write_text("#define VALUE 2\n")
    assert compile_kernels(source, names[0], names, "sm_90a").path.read_bytes() != first.path.read_bytes()
    assert compiled == [names, names]


def test_resources_are_of_kernels_that_were_compiled_together(tmp_path, monkeypatch):
    # The code of a kernel depends on the others, as that of matmul's in float32 does on the sums of parts in float64.
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "k.cu"
    source.write_text("template <class T> __global__ void k(T* c) { c[threadIdx.x] *= 2; }")
    compiled = []
    compile_ = cuda_compile._compile
    monkeypatch.setattr(cuda_compile, "_compile", lambda *a: compiled.append(a[1]) or compile_(*a))
    launched = ["k<double>", "k<float>"]
    compile_kernels(source, launched[0], launched, "sm_90a")
    for together in (["k<float>"], ["k<float>", "k<int>"], ["k<int>", "k<float>"]):
        assert [*compile_ahead_of_time(source, together, "sm_90a")] == together
    assert compiled == [launched, ["k<float>"], ["k<float>", "k<int>"]]


@pytest.mark.full
def test_what_was_compiled_for_another_cache_is_described_as_well(tmp_path, monkeypatch):
    # A driver caches what NVRTC compiles, but not the log with the resources. The compiled code contains the time.
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "first"))
    first = compile_ahead_of_time(CONTROLS, NAMES, "sm_90a")
    compiled_by = int(time.time())
    while int(time.time()) == compiled_by:
        time.sleep(0.01)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "second"))
    assert compile_ahead_of_time(CONTROLS, NAMES, "sm_90a") == first


def test_arithmetic_is_exact(tmp_path):
    options = nvrtc_options(CONTROLS, "sm_90a")
    assert "--gpu-architecture=sm_90a" in options
    assert not [option for option in options if "fast" in option or "ftz" in option or "fmad" in option]
    # A division with IEEE 754 rounding begins with a check for hard cases, an approximate one does not.
    source = tmp_path / "divide.cu"
    source.write_text("__global__ void k(float* c) { c[0] = c[1] / c[2]; }")
    counts = compile_ahead_of_time(source, ["k"], "sm_90a")["k"].instruction_counts
    assert counts["FCHK"] == 1


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("FOURFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "fourfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "fourfold"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "file" / "below"))
    fallback = cache_directory()
    assert fallback.is_dir()
    assert tmp_path not in fallback.parents
