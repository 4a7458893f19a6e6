"""CUDA C++ launches on a GPU: right numbers on any stream, on any thread and in a graph, and clear errors."""

import itertools
import math
import pathlib
import threading

import numpy as np
import pytest
import torch
from fourfold.impls import norm_rows
from fourfold.impls.softmax import cuda_kernel as softmax_kernel

from fourfold.backends.cuda import launch as cuda_launch
from fourfold.backends.cuda.launch import CudaError, CudaKernel
from fourfold.backends.launch import reciprocal
from fourfold.compat import torch_internals

CONTROLS = pathlib.Path(__file__).resolve().parent / "cuda" / "controls.cu"
DTYPES = {"float": torch.float32, "double": torch.float64, "__half": torch.float16, "__nv_bfloat16": torch.bfloat16}
SOFTMAX = {dtype: CudaKernel(CONTROLS, f"softmax<{type_}>") for type_, dtype in DTYPES.items()}
SUM, REVERSE = CudaKernel(CONTROLS, "two_stage_sum<true>"), CudaKernel(CONTROLS, "reverses_in_dynamic_shared")
VECTORS, MATHEMATICS = CudaKernel(CONTROLS, "adds_vectors"), CudaKernel(CONTROLS, "mathematics")
TENSOR_CORES = CudaKernel(CONTROLS, "tensor_cores<__half>")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def softmax(x):
    y = torch.full_like(x, math.nan)
    SOFTMAX[x.dtype].launch(x.shape[0], 256, x, y, x.shape[1])
    return y


# ---- tests that need no GPU


@pytest.mark.parametrize(
    ("mangled", "types"),
    [
        ("_Z4axpyIfEvPKT_PS0_dx", ["float const*", "float*", "double", "long long"]),
        ("_Z1kP6float4bPKv", ["float4*", "bool", "void const*"]),
        ("_Z1kI6__halfLi4EEvPKT_PS1_", ["__half const*", "__half*"]),
        ("_Z1kv", []),
        ("plain_c_name", None),
    ],
)
def test_parameter_types_are_read_from_the_mangled_name(mangled, types):
    assert cuda_launch._parameter_types(mangled) == types


def test_a_parameter_knows_what_it_takes():
    parameters = cuda_launch._parameters("_Z1kPKfdxbi", [8, 8, 8, 1, 4])
    values = [torch.zeros(1), None, 1.0, 1, True]
    taken = [[value for value in values if parameter.takes(value)] for parameter in parameters]
    assert taken == [[values[0], None], [1.0, 1], [1], [True], [1]]
    # A kernel with a C name reveals only the sizes of its parameters.
    parameters = cuda_launch._parameters("k", [8, 1])
    taken = [[value for value in values if parameter.takes(value)] for parameter in parameters]
    assert taken == [[values[0], None, 1.0, 1], [True]]


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120")]
)
def test_an_architecture_has_its_own_instructions(capability, name):
    assert cuda_launch.architecture(*capability) == name


def test_a_template_has_instances_for_each_dtype_and_option():
    kernels = CudaKernel.instances(pathlib.Path("none.cu"), "copies<{T}, {}>", {True: "{W}", False: "1"})
    assert {key: kernel.name for key, kernel in kernels.items() if key[0].itemsize != 8} == {
        (torch.float16, True): "copies<__half, 8>",
        (torch.float16, False): "copies<__half, 1>",
        (torch.bfloat16, True): "copies<__nv_bfloat16, 8>",
        (torch.bfloat16, False): "copies<__nv_bfloat16, 1>",
        (torch.float32, True): "copies<float, 4>",
        (torch.float32, False): "copies<float, 1>",
    }
    assert kernels[torch.float64, True].name == "copies<double, 2>"


def test_only_a_gpu_runs_clusters():
    with pytest.raises(ValueError, match="device must be a GPU"):
        SUM.resident_clusters(torch.device("cpu"), 64, 2)


# ---- tests that need a GPU


@on_gpu
def test_a_gpu_holds_fewer_clusters_of_more_blocks():
    device = torch.device("cuda", torch.cuda.current_device())
    pairs, eights = (SUM.resident_clusters(device, 1024, blocks, 200_000) for blocks in (2, 8))
    assert 1 <= eights <= pairs // 4 <= torch.cuda.get_device_properties(device).multi_processor_count // 8


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_softmax_is_right(dtype):
    x = torch.randn(5, 300, dtype=torch.float64, device="cuda").to(dtype)
    torch.testing.assert_close(softmax(x), x.double().softmax(-1).to(dtype))


@on_gpu
def test_the_last_block_may_read_what_the_others_wrote():
    x, counter = torch.arange(1000.0, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(100):
        out, partial = torch.zeros(1, device="cuda"), torch.full((7,), math.nan, device="cuda")
        SUM.launch(7, 64, x, partial, counter, out, 1000)
        assert out.item() == 499500.0


@on_gpu
def test_tensor_cores_multiply():
    a, b = torch.randn(32, 48, device="cuda").half(), torch.randn(16, 48, device="cuda").half()
    c = torch.zeros(32, 16, device="cuda")
    TENSOR_CORES.launch((1, 2), 32, a, b, c, 32, 16, 48)
    expected = torch.nn.functional.leaky_relu(a.double() @ b.double().t(), 0.5)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("n", [100, 6144, 12000])
def test_dynamic_shared_memory_may_exceed_48_kilobytes(n):
    x = torch.rand(n, dtype=torch.float64, device="cuda")
    y = torch.zeros_like(x)
    REVERSE.launch(1, 128, x, y, n, shared_bytes=8 * n)
    assert torch.equal(y, x.flip(0))


@on_gpu
def test_more_shared_memory_than_the_device_has_is_an_error_and_leaves_it_working():
    x = torch.rand(8, dtype=torch.float64, device="cuda")
    y = torch.zeros_like(x)
    with pytest.raises(CudaError, match=r"reverses_in_dynamic_shared.*dynamic shared memory"):
        REVERSE.launch(1, 128, x, y, 8, shared_bytes=1 << 24)
    REVERSE.launch(1, 128, x, y, 8, shared_bytes=64)
    assert torch.equal(y, x.flip(0))


@on_gpu
def test_none_bool_and_float_arrive():
    x, shift = torch.rand(10, 4, device="cuda"), torch.tensor([1.0, 2.0], device="cuda")
    y = torch.zeros_like(x)
    VECTORS.launch(1, 32, x, shift, y, 10)
    torch.testing.assert_close(y, x + shift.repeat(2))
    VECTORS.launch(1, 32, x, None, y, 10)
    assert torch.equal(y, x)
    out = torch.zeros(9, 4, device="cuda")
    for negate, sign in ((True, -1.0), (False, 1.0)):
        MATHEMATICS.launch(1, 32, torch.ones(4, device="cuda"), out, negate, 3.0, 4)
        assert out[6].tolist() == [sign * 3.0 * 10**i for i in range(4)]


@on_gpu
def test_a_launch_joins_the_current_stream():
    stream = torch.cuda.Stream()
    x = torch.randn(64, 4096, device="cuda")
    expected = (x * 2.0).softmax(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch_internals.keep_stream_busy(50_000_000)
        doubled = x * 2.0
        y = softmax(doubled)
    stream.synchronize()
    torch.testing.assert_close(y, expected)


@on_gpu
def test_a_thread_without_a_context_may_launch():
    x = torch.randn(5, 300, device="cuda")
    y = torch.zeros_like(x)
    failures = []

    def work():
        try:
            SOFTMAX[x.dtype].launch(5, 256, x, y, 300)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    torch.testing.assert_close(y, x.softmax(-1))


@on_gpu
def test_autograds_thread_may_launch():
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad_output):
            return softmax(grad_output)

    x = torch.randn(5, 300, device="cuda", requires_grad=True)
    grad_output = torch.randn(5, 300, device="cuda")
    Softmax.apply(x).backward(grad_output)
    torch.testing.assert_close(x.grad, grad_output.softmax(-1))


@on_gpu
def test_a_launch_may_be_captured_in_a_graph():
    x, y = torch.randn(5, 300, device="cuda"), torch.zeros(5, 300, device="cuda")
    SOFTMAX[x.dtype].launch(5, 256, x, y, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SOFTMAX[x.dtype].launch(5, 256, x, y, 300)
    x.copy_(torch.randn(5, 300))
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, x.softmax(-1))


@on_gpu
def test_a_grid_is_counted_in_blocks_also_with_clusters():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    x = torch.randn(6, 300, device="cuda")
    y = torch.full_like(x, math.nan)
    SOFTMAX[x.dtype].launch(6, 256, x, y, 300, cluster=2)
    torch.testing.assert_close(y, x.softmax(-1))
    with pytest.raises(ValueError, match="clusters of 4"):
        SOFTMAX[x.dtype].launch(6, 256, x, y, 300, cluster=4)


@on_gpu
def test_wrong_arguments_are_refused_before_the_launch():
    x = torch.randn(5, 300, device="cuda")
    kernel = SOFTMAX[x.dtype]
    with pytest.raises(TypeError, match="takes 3 arguments, but 2 were given"):
        kernel.launch(5, 256, x, x)
    with pytest.raises(TypeError, match=r"argument 2 \(cols\) is long long in C\+\+, but float was given"):
        kernel.launch(5, 256, x, x, 300.0)
    with pytest.raises(ValueError, match="different devices: argument 0 on cuda:0, argument 1 on cpu"):
        kernel.launch(5, 256, x, x.cpu(), 300)
    with pytest.raises(ValueError, match="1,056 threads"):
        kernel.launch(5, (32, 33), x, x, 300)
    kernel.launch((0, 3), 256, x, x, 300)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_launch_is_on_the_tensors_device_whichever_is_current():
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(5, 300, device=device)
        torch.testing.assert_close(softmax(x), x.softmax(-1))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("most", [1, 8, 16])
def test_the_blocks_that_share_a_row_of_softmax_hold_all_of_it(most: int) -> None:
    for itemsize, tensors, cols in itertools.product((2, 4), (1, 2), range(8192, 300_000, 1237)):
        plan = softmax_kernel.plan(cols, itemsize, True, tensors, 200 << 10, most)
        if plan.variant.split:
            vectors = (64 if itemsize == 2 else 32) * itemsize // 16 // tensors  # that a thread keeps, of each tensor
            assert plan.threads * vectors * 16 >= cols * itemsize
            assert plan.threads // plan.block in [blocks for blocks in (1, 2, 4, 8, 16) if blocks <= most]
            assert plan.threads % plan.block == 0
            assert plan.block <= 1024
        else:
            assert plan.threads == plan.block


@pytest.mark.parametrize(
    ("itemsize", "tensors", "cols", "blocks", "block"),
    [
        (4, 1, 65536, 8, 256),
        (4, 1, 36864, 4, 288),
        (2, 1, 32768, 1, 512),
        (2, 2, 65536, 8, 256),
        (2, 2, 20000, 2, 320),
        (2, 2, 262144, 16, 512),
        (4, 2, 262144, 16, 1024),
    ],
)
def test_softmax_shares_a_row_among_smaller_blocks_where_they_were_faster(
    itemsize: int, tensors: int, cols: int, blocks: int, block: int
) -> None:
    plan = softmax_kernel.plan(cols, itemsize, True, tensors, 200 << 10, 16)
    assert (plan.threads // plan.block, plan.block) == (blocks, block)


@pytest.mark.parametrize(("mean", "added"), itertools.product((False, True), repeat=2))
def test_the_blocks_that_share_a_row_of_a_norm_hold_all_of_it(mean: bool, added: bool) -> None:
    for itemsize, most, cols in itertools.product((2, 4, 8), (1, 8), range(2048, 300_000, 976)):
        plan = norm_rows.forward_plan(cols, norm_rows.Layout.WHOLE, itemsize, mean, added, most)
        width, vectors, _ = plan.kind
        if vectors == norm_rows.SHARED_VECTORS:
            assert plan.sharing in [blocks for blocks in (1, 2, 4, 8) if blocks <= most]
            assert plan.sharing * plan.threads * vectors * width >= cols
            # The bounds with which the kernels are compiled.
            assert plan.threads <= (512 if mean or added else 384)
        else:
            assert plan.sharing == 1


ROW_OFFSETS = """
#include "rows.cuh"
__global__ void offsets(const long long* rows, const long long* inners, const long long* reciprocals, long long* outer,
                        long long* rest) {
    const long long row = rows[threadIdx.x], inner = inners[threadIdx.x];
    outer[threadIdx.x] = row_offset(row, inner, 1, 0);
    rest[threadIdx.x] = row_offset(row, inner, 0, 1);
    const Divided divided_row = divided(row, inner, reciprocals[threadIdx.x]);
    outer[threadIdx.x + blockDim.x] = divided_row.quotient;
    rest[threadIdx.x + blockDim.x] = divided_row.rest;
}
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_the_place_of_a_row_is_exact_without_a_division_of_integers(device: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "offsets.cu").write_text(ROW_OFFSETS)
    kernel, rng = CudaKernel(tmp_path / "offsets.cu", "offsets"), np.random.default_rng(1)
    inner = np.exp(rng.uniform(0, np.log(2.0**42), (50, 128))).astype(np.int64)
    row = np.exp(rng.uniform(0, np.log(2.0**42), inner.shape)).astype(np.int64)
    # In turn any row; and the last and the first row of a step along the outer axis.
    row = np.where(rng.random(row.shape) < 0.5, row, row // inner * inner - rng.integers(2, size=row.shape)).clip(0)
    for rows, inners in zip(row, inner):
        reciprocals = np.array([reciprocal(size) for size in inners.tolist()])
        given = [torch.from_numpy(numbers).to(device) for numbers in (rows, inners, reciprocals)]
        found = [given[0].new_empty(2, 128) for _ in range(2)]
        kernel.launch(1, 128, *given, *found)
        outer, rest = (numbers.cpu().numpy() for numbers in found)
        # With an inner axis of 1, all rows lie along the outer one.
        assert (outer == rows // inners).all()
        assert (rest == rows % inners).all()
