"""The hash of compiled code: the same wherever it was compiled, another for other code, functions or constants."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.backends.cuda.compile import compile_ahead_of_time, compile_kernels
from fourfold.backends.cuda.machine_code import Allocation, allocation, code_sha256

SOURCE = """
__constant__ float table[4] = {1, 2, 3, 4};
__device__ __noinline__ float half(float x) { return x * 0.5f + __sinf(x); }
__global__ void taken(const float* x, float* y) { y[threadIdx.x] = half(x[threadIdx.x]) + table[threadIdx.x & 3]; }
"""


def compiled(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str]:
    folder.mkdir()
    monkeypatch.setenv("FOURFOLD_CACHE", str(folder / "cache"))
    (folder / "kernels.cu").write_text(text)
    kernels = compile_kernels(folder / "kernels.cu", "taken", [], "sm_90a")
    return kernels.path.read_bytes(), kernels.lowered_names["taken"]


def hashed(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return code_sha256(*compiled(folder, text, monkeypatch))


def in_reverse(cubin: bytes) -> bytes:
    """Return the same file with its sections listed from the last to the first."""
    content = bytearray(cubin)
    (start,) = struct.unpack_from("<Q", content, 0x28)
    each, count, names = struct.unpack_from("<HHH", content, 0x3A)
    moved = [0, *range(count - 1, 0, -1)]  # it is its own inverse
    headers = [content[start + i * each : start + (i + 1) * each] for i in range(count)]
    for i, header in enumerate(headers):
        kind, offset, size, link, info = *struct.unpack_from("<I", header, 4), *struct.unpack_from("<QQII", header, 24)
        if kind == 2:  # symbols, which name their sections
            for symbol in range(offset, offset + size, 24):
                (section,) = struct.unpack_from("<H", content, symbol + 6)
                struct.pack_into("<H", content, symbol + 6, moved[section] if section < count else section)
        elif kind in (4, 9):  # relocations: the section that they change
            info = info & ~0xFFFFFF | moved[info & 0xFFFFFF]
        struct.pack_into("<II", header, 40, moved[link], info)
        content[start + moved[i] * each : start + (moved[i] + 1) * each] = header
    struct.pack_into("<H", content, 0x3E, moved[names])
    return bytes(content)


def test_code_is_known_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hashed(tmp_path / "one", SOURCE, monkeypatch)
    assert first == hashed(tmp_path / "another_one", f"// moved by a line\n{SOURCE}", monkeypatch)


def test_code_is_known_again_in_another_order_of_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiler with several threads writes the functions of a file in any order.
    cubin, kernel = compiled(tmp_path / "one", SOURCE, monkeypatch)
    reversed_ = in_reverse(cubin)
    assert reversed_ != cubin
    assert in_reverse(reversed_) == cubin
    assert code_sha256(reversed_, kernel) == code_sha256(cubin, kernel)


@pytest.mark.parametrize(
    ("before", "after"),
    [("0.5f", "0.25f"), ("1, 2, 3, 4", "1, 2, 3, 5"), ("& 3]", "& 1]")],
    ids=["device_function", "constant", "kernel"],
)
def test_other_code_has_another_hash(before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert before in SOURCE
    changed = hashed(tmp_path / "now", SOURCE.replace(before, after), monkeypatch)
    assert changed != hashed(tmp_path / "then", SOURCE, monkeypatch)


ALLOCATED = """
__global__ void few(float* y) { y[threadIdx.x] = 1; }
__global__ void many(const float* x, float* y) {
    float sums[24];
    for (int i = 0; i < 24; i++) sums[i] = x[i * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 24; i++) y[i * blockDim.x + threadIdx.x] = sums[i] * sums[23 - i];
}
#if __CUDA_ARCH__ >= 900
__global__ void __cluster_dims__(2, 1, 1) clustered(float* y) { y[threadIdx.x] = 1; }
#endif
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_registers_and_clusters_are_read_from_the_file(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "kernels.cu"
    source.write_text(ALLOCATED)
    names = ["few", "many", *(["clustered"] if arch != "sm_80" else [])]
    found = {}
    for name in names:
        compiled = compile_kernels(source, name, names, arch)
        found[name] = allocation(compiled.path.read_bytes(), compiled.lowered_names[name])
    told = compile_ahead_of_time(source, names, arch)
    clusters = {"clustered": (2, 1, 1)}
    assert found == {name: Allocation(told[name].registers, clusters.get(name, ())) for name in names}
    assert found["many"].registers > found["few"].registers
    with pytest.raises(ValueError, match="does not tell the registers of none"):
        allocation(compiled.path.read_bytes(), "none")


@pytest.mark.parametrize("read", [code_sha256, allocation])
def test_what_is_no_kernel_has_no_hash(read: Callable[[bytes, str], object]) -> None:
    with pytest.raises(ValueError, match="no cubin"):
        read(b"text", "taken")
