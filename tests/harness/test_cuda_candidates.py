"""Kernels of `.cu` files as candidates: the right ones are accepted, the wrong ones rejected at their line."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import torch
import warm
from samples import sampled

import fourfold
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import CompilationError, compile_kernels
from fourfold.backends.cuda.declarations import NoSuchKernel, kernel_of, kernels
from fourfold.backends.cuda.device_code import device_code
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.candidates.load.cuda_candidates import Launch
from fourfold.candidates.load.expressions import ExpressionError, evaluate
from fourfold.cli.main import parse
from fourfold.cli.verify import command_of
from fourfold.engine.cells import Candidate, SelectionError
from fourfold.operations.outcomes import Unsupported

HERE = pathlib.Path(__file__).resolve().parent / "candidates" / "cuda"
ROOT = HERE.parents[3]
SOFTMAX = ["--as", "softmax", "--grid", "rows", "--block", "64", "--shared", "64 * sizeof(float)"]
MATMUL = ["--as", "matmul", "--grid", "ceil(n / 16), ceil(m / 16)", "--block", "16, 16"]
ADD = ["--as", "vector_add", "--grid", "(n + 255) / 256", "--block", "256"]
LAYER_NORM_ARGS = "out x weight bias rows cols eps"
LAYER_NORM = ["--as", "layer_norm", "--grid", "ceil(rows / 2)", "--block", "64"]

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or ""
)


def verify(folder: pathlib.Path, kernel: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the tests of `fourfold verify` in a user's folder; return the process and the verdict."""
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT))
    options += ("--device", "cpu", "--examples", "3", "-p", "no:cacheprovider", "--verdict", "verdict.json")
    with contextlib.chdir(folder):
        _, _, *command = command_of(parse("verify", [kernel, *options]))  # without ``python -m``
    done = warm.run(*command, cwd=folder, env=environment)
    print(done.stdout, done.stderr)
    verdict = folder / "verdict.json"
    return done, json.loads(verdict.read_text()) if verdict.exists() else {}


def faults(file: str, kernel: str) -> set[int]:
    """Return the lines of a kernel that are marked as faulty."""
    found, name = set(), ""
    for number, line in enumerate((HERE / file).read_text().splitlines(), 1):
        if match := re.search(r"__global__ void (?:__\w+\(\w+\) )?(\w+)\(", line):
            name = match[1]
        if name == kernel and line.endswith("// FAULT"):
            found.add(number)
    return found


# ---- from the command line


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "options"),
    [("softmax.cu:softmax_kernel", SOFTMAX), ("vector_add.cu:vector_add", ADD), ("matmul.cu:matmul_kernel", MATMUL)],
)
def test_a_right_kernel_is_accepted_from_a_folder_of_its_own(kernel, options, tmp_path):
    (tmp_path / "kernels").symlink_to(HERE)
    done, verdict = verify(tmp_path, f"kernels/{kernel}", *options, "--dtype", "float32")
    assert done.returncode == 0
    assert verdict["counts"]["failed"] == 0
    passed = {check["check"].partition(":")[0] for check in verdict["checks"] if check["outcome"] == "passed"}
    assert passed >= {"forward", "errors", "memory", "history", "repeatability", "batch", "large", "laws"}
    forward = next(check for check in verdict["checks"] if check["check"].startswith("forward"))
    assert 0 < forward["worst_error_over_bound"] <= 1


REJECTED = {
    "softmax.cu:no_barrier": (SOFTMAX, r"Race: no_barrier \(softmax\.cu:(\d+)\), block .*no barrier between"),
    "softmax.cu:no_maximum": (SOFTMAX, r"output\[.*\] is (?:nan|inf|0\.0)"),
    "softmax.cu:wrong_index": (SOFTMAX, r"OutOfBounds: wrong_index \(softmax\.cu:(\d+)\), block .*argument 0 \(x\)"),
    "vector_add.cu:no_bounds": (ADD, r"OutOfBounds: no_bounds \(vector_add\.cu:(\d+)\), block .*argument 0 \(a\)"),
    "matmul.cu:no_barrier": (MATMUL, r"Race: no_barrier \(matmul\.cu:(\d+)\), block .*shared array [AB]s"),
}


@pytest.mark.parametrize("kernel", sampled(REJECTED, "softmax.cu:no_barrier"))
def test_a_wrong_kernel_is_rejected_at_its_line(kernel, tmp_path):
    options, says = REJECTED[kernel]
    done, verdict = verify(tmp_path, str(HERE / kernel), *options, "--dtype", "float32", "-k", "agrees_with_the_oracle")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (check,) = (check for check in verdict["checks"] if check["outcome"] == "failed")
    found = re.search(says, check["message"])
    assert found
    if found.groups():
        assert int(found[1]) in faults(*kernel.split(":"))
    assert check["counterexample"].startswith("Case(")
    # The author's error is shown, and no code of the harness.
    assert "Traceback" not in done.stdout
    assert "launcher.py" not in done.stdout
    assert f"{HERE}/{kernel}<<<" in check["repeat"]


@pytest.mark.full
@pytest.mark.parametrize(
    "kernel",
    sampled(["softmax_kernel", "no_maximum", "no_barrier", "wrong_index"], "softmax_kernel", "no_barrier"),
)
def test_a_kernel_comes_to_the_same_in_a_process_of_its_own(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "1")  # the same cases in both runs
    checks = "agrees_with_the_oracle or memory or history or repeat or error or threads"
    options = [*SOFTMAX, "--dtype", "float32", "--dtype", "float16", "-k", checks]
    about = ("check", "dtype", "outcome", "kind", "reason", "worst_error_over_bound")

    def outcomes(*trusted: str) -> list[tuple]:
        done, verdict = verify(tmp_path, str(HERE / f"softmax.cu:{kernel}"), *options, *trusted)
        assert ("--untrusted" in done.stdout) == (not trusted and kernel != "softmax_kernel")
        found = []
        for check in verdict["checks"]:
            # The search for a smaller failing case counts other examples, and other arguments may lie nearby.
            message = re.sub(r", or \d+ bytes .*", "", check.get("message") or "")
            examples = check["examples"] if check["outcome"] == "passed" else None
            found.append((*map(check.get, about), message, examples))
        return found

    there = outcomes()
    assert there == outcomes("--trusted")
    assert {each[2] for each in there} >= {"passed" if kernel == "softmax_kernel" else "failed"}


@pytest.mark.full
def test_a_kernel_of_a_process_of_its_own_is_never_loaded_by_its_judge(tmp_path, monkeypatch):
    source = HERE / "softmax.cu"
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    candidate = Candidate.parse(f"softmax={source}:softmax_kernel<<<rows, 64, 256>>>", ["softmax"])
    kernel = dataclasses.replace(candidate, call_seconds=60).load()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(kernel(x), torch.softmax(x, -1))
    assert list(tmp_path.rglob("*.so"))
    assert str(tmp_path) not in pathlib.Path("/proc/self/maps").read_text()
    kernel.end()


@pytest.mark.full
def test_the_command_that_repeats_a_failure_does(tmp_path):
    options = [*ADD, "--dtype", "float32", "-k", "output_agrees"]
    _, verdict = verify(tmp_path, str(HERE / "vector_add.cu:no_bounds"), *options)
    (check,) = verdict["checks"]
    command = shlex.split(check["repeat"])
    assert command[0] == "pytest"
    again = warm.run(*command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert check["message"] in again.stdout


@pytest.mark.full
def test_a_kernel_of_float_is_verified_in_float32_and_says_so_of_other_dtypes(tmp_path):
    done, verdict = verify(tmp_path, str(HERE / "vector_add.cu:vector_add"), *ADD, "-k", "output_agrees")
    assert done.returncode == 0
    reasons = {check["dtype"]: check.get("reason") for check in verdict["checks"] if "forward" in check["check"]}
    assert reasons["float32"] is None
    assert reasons["float16"] == "vector_add of vector_add.cu takes const float* and float*: float32 only"
    done, _ = verify(tmp_path, str(HERE / "vector_add.cu:vector_add"), *ADD, "--dtype", "float16", "-k", "agrees")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "nothing was verified" in done.stdout


@pytest.mark.full
def test_a_template_is_verified_in_every_dtype(tmp_path):
    options = [*LAYER_NORM, "--dtype", "float16", "--dtype", "bfloat16", "--dtype", "float32"]
    done, verdict = verify(tmp_path, str(HERE / "layer_norm.cu:layer_norm_kernel"), *options, "-k", "output_agrees")
    assert done.returncode == 0
    passed = {check["dtype"] for check in verdict["checks"] if check["outcome"] == "passed"}
    assert passed == {"float16", "bfloat16", "float32"}


@pytest.mark.full
def test_pytest_takes_the_launch_as_it_is_written_in_cuda(tmp_path):
    candidate = f"softmax={HERE}/softmax.cu:softmax_kernel<<<rows, 64, 256>>>(x, y, rows, cols)"
    command = ["pytest", "tests/operations/test_forward.py", "--candidate", candidate]
    command += ["--dtype", "float32", "--examples", "2", "--device", "cpu", "-q", "-p", "no:cacheprovider"]
    done = warm.run(*command, cwd=ROOT, env=os.environ)
    assert "1 passed" in done.stdout


# ---- what cannot be launched is refused in one line


def test_the_command_line_says_what_is_missing(tmp_path):
    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "fourfold", "verify", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr.rstrip()

    missing = said(f"{HERE / 'softmax.cu'}:softmax_kernel", "--as", "softmax", "--block", "64")
    assert missing.splitlines()[0].endswith("needs --grid and --block, as --grid rows --block 256")
    (tmp_path / "my.py").write_text("def softmax(x): return x.softmax(-1)\n")
    foreign = said("my.py:softmax", "--as", "softmax", "--block", "64")
    assert "are for a kernel of a .cu file, and my.py:softmax is none" in foreign


def test_a_file_that_does_not_compile_is_refused_with_file_and_line(tmp_path, device):
    if device != "cpu":
        pytest.skip("it is about the compiler of the CPU")
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void k(const float* x, float* y, int rows, int cols) {\n    y[0] = missing(x);\n}\n")
    with pytest.raises(
        SelectionError, match=r"broken\.cu does not compile for the CPU: broken\.cu:2:\d+: error: .*missing"
    ):
        Candidate.parse(f"softmax={source}:k<<<1, 1>>>", ["softmax"]).load()


@pytest.mark.full
def test_a_template_has_no_instance_for_a_dtype_that_it_does_not_compile_for(tmp_path, device):
    if device != "cpu":
        pytest.skip("it is about the compiler of the CPU")
    source = tmp_path / "some.cu"
    source.write_text(
        "template <class T> __global__ void k(const T* x, const T* y, T* out, int n) {\n"
        '    static_assert(sizeof(T) <= 4, "no doubles");\n    out[0] = x[0] + y[0];\n}\n'
    )
    candidate = Candidate.parse(f"vector_add={source}:k<<<1, 1>>>", ["vector_add"]).of_cuda
    assert candidate.unsupported("float32", "cpu") is None
    assert "some.cu:2:29: error: static assertion failed: no doubles" in candidate.unsupported("float64", "cpu")
    # The file does not include cuda_fp16.h.
    assert "no kernel of this name with these template arguments: " in candidate.unsupported("float16", "cpu")


@pytest.mark.full
def test_what_a_kernel_does_not_take_is_unsupported():
    text = f"matmul={HERE}/matmul.cu:matmul_kernel<<<(ceil(n / 16), ceil(m / 16)), (16, 16)>>>"
    candidate = Candidate.parse(text, ["matmul"]).of_cuda
    a = torch.ones(2, 3)
    assert torch.equal(candidate(a, a.t()), a @ a.t())
    with pytest.raises(Unsupported, match="matmul_kernel does not take activation, which is 'none' for it"):
        candidate(a, a.t(), activation="relu")
    with pytest.raises(ValueError, match="activation"):
        candidate(a, a.t(), activation="relus")


# ---- how a launch is read


def test_a_launch_is_read_and_written():
    launch = Launch.parse("my/k.cu:ns::copy<float, 4><<<(ceil(n / 16), m), (16, 16), n * 4>>>(x, y, n, 1.5)")
    assert launch == Launch(
        "my/k.cu", "ns::copy<float, 4>", "(ceil(n / 16), m)", "(16, 16)", "n * 4", ("x", "y", "n", "1.5")
    )
    assert Launch.parse(f"{launch.file}:{launch.launched}") == launch
    assert Launch.parse("kernels.py:softmax") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(n + 255) / 256", 4),
        ("ceil(n / 256)", 4),
        ("n / 256", 3),
        ("ceil(n / 256) * 2, max(1, n % 7)", (8, 6)),
        ("cdiv(n, 256)", 4),
        ("next_power_of_2(n)", 1024),
        ("x.shape[0] * x.numel() - -1", 13),
        ("2 * sizeof(float)", 8),
        ("nullptr", None),
    ],
)
def test_an_expression_has_its_value(text, value):
    assert evaluate(text, {"n": 1000, "x": torch.zeros(2, 3)}) == value


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "n.__class__", "x.shape", "[n]", "lambda: n", "n if n else 1", "n +", "9 ** 9 ** 9", "n / 0"],
)
def test_an_expression_is_arithmetic_alone(text):
    with pytest.raises(ExpressionError):
        evaluate(text, {"n": 3, "x": torch.zeros(2)})


@pytest.mark.full(but=3)
@pytest.mark.parametrize(
    ("operation", "parameters", "args"),
    [
        ("softmax", "const float* input, float* output, int n_rows, int n_cols", "input→x output→out rows cols"),
        ("softmax", "float* out, const float* inp, int N, int C", "out x rows cols"),
        ("softmax", "float* d_in, float* d_out, int M, int N", "x out rows cols"),
        ("softmax", "float* y, float* x, int cols", "out x cols"),
        ("vector_add", "const float* a, const float* b, float* c, int n", "x y out numel"),
        ("vector_add", "const float* y, const float* x, float* out, size_t n_elements", "y x out numel"),
        ("matmul", "float* C, const float* B, const float* A, int N, int M, int K", "out b a n m k"),
        ("layer_norm", "float* out, float* x, float* weight, float* bias, int N, int C, float eps", LAYER_NORM_ARGS),
    ],
)  # fmt: skip
def test_arguments_are_found_by_the_names_of_the_parameters(operation, parameters, args, tmp_path):
    source = tmp_path / "k.cu"
    source.write_text(f"__global__ void k({parameters}) {{}}\n")
    candidate = Candidate.parse(f"{operation}={source}:k<<<1, 1>>>", [operation]).of_cuda
    assert candidate.args == tuple(word.rpartition("→")[2] for word in args.split())


@pytest.mark.parametrize(
    "parameters", ["const float* x, float* y, int n", "float* p, float* q, int cols", "const float* x, int cols"]
)
def test_arguments_that_are_not_clear_are_asked_for(parameters, tmp_path):
    source = tmp_path / "k.cu"
    source.write_text(f"__global__ void k({parameters}) {{}}\n")
    with pytest.raises(SelectionError, match=r" is ambiguous: give --args"):
        Candidate.parse(f"softmax={source}:k<<<1, 1>>>", ["softmax"]).load()


def test_declarations_are_read():
    text = """
    typedef float real;  // __global__ void none(int n);
    template <typename T, int N, bool B = true>
    __global__ void __launch_bounds__(256, 2) first(const T* __restrict__ x, real y[], const int n = 3) {}
    extern "C" __global__ void second(float4 const* const in, unsigned long long n) {}
    """
    first, second = kernels(text)
    assert (first.name, first.template, first.values) == ("first", ("T",), ("N",))
    assert [(p.name, p.type) for p in first.parameters] == [("x", "const T*"), ("y", "float*"), ("n", "const int")]
    assert [(p.name, p.is_output) for p in second.parameters] == [("in", False), ("n", False)]


MACROS = """
#define KERNEL(NAME) __global__ void NAME
#define DEVICE __device__ __forceinline__
#ifndef __device__
#define __device__
#endif
#define DEFINE_SCALE(T, SUFFIX)                                 \\
    KERNEL(scale_##SUFFIX)(const T* x, T* out, int n) {         \\
        if (threadIdx.x < n) out[threadIdx.x] = twice(x[threadIdx.x]); \\
    }
#define ANY(NAME, ...) KERNEL(NAME)(__VA_ARGS__)

DEVICE float twice(float x) { return 2 * x; }
DEFINE_SCALE(float, f32)
DEFINE_SCALE(double, f64)
void host(const float* x) { scale_f32<<<1, 32>>>(x, nullptr, 0); }
template <typename T>
KERNEL(softmax_of)(const T* x, T* out) {}
ANY(copies, const float* x, int n) {}
"""


def test_kernels_that_macros_define_are_known_by_their_names(tmp_path, monkeypatch):
    found = {kernel.name: [f"{p.type} {p.name}" for p in kernel.parameters] for kernel in kernels(MACROS)}
    assert found == {
        "scale_f32": ["const float* x", "float* out", "int n"],
        "scale_f64": ["const double* x", "double* out", "int n"],
        "softmax_of": ["const T* x", "T* out"],
        "copies": ["const float* x", "int n"],
    }
    assert "<<<" not in device_code(MACROS)
    source = tmp_path / "macros.cu"
    definition = "#define KERNEL(NAME) __global__ void NAME\n"
    (tmp_path / "kernel.cuh").write_text(definition)
    source.write_text(MACROS.replace(definition, '#include "kernel.cuh"\n'))
    assert kernel_of(source, "softmax_of").parameters == kernels(MACROS)[2].parameters
    x, out = torch.arange(4.0), torch.zeros(4)
    CudaKernel(source, "scale_f32").launch(1, 32, x, out, 4)
    assert torch.equal(out, 2 * x)
    monkeypatch.setenv("CXX", "no_such_compiler")
    kernels.cache_clear()
    with pytest.raises(NoSuchKernel, match="install no_such_compiler"):
        kernel_of(source, "scale_f32")
    kernels.cache_clear()


def test_functions_of_the_host_are_left_out_and_lines_keep_their_numbers():
    text = (HERE / "vector_add.cu").read_text()
    kept = device_code(text)
    assert "<<<" not in kept
    assert "int main" not in kept
    assert "blocks_for" not in kept
    lines = text.splitlines()
    assert {number for number, line in enumerate(kept.splitlines()) if line.strip() and line != lines[number]} == set()
    assert len(kept) == len(text)
    assert all(f"__global__ void {name}(" in kept for name in ("vector_add", "no_bounds", "in_fours"))


def test_a_header_of_its_own_may_hold_functions_of_the_host(tmp_path):
    (tmp_path / "common.h").write_text(
        "#pragma once\n#include <cuda_runtime.h>\n#include <stdlib.h>\n"
        "inline void check(cudaError_t e) { if (e) { printf(cudaGetErrorString(e)); exit(1); } }\n"
        "__device__ float twice(float x) { return 2 * x; }\n"
    )
    source = tmp_path / "doubles.cu"
    source.write_text(
        '#include "common.h"\n'
        "__global__ void k(const float* x, float* out, int n) {\n"
        "    int i = threadIdx.x;\n    out[i] = twice(x[i]);\n}\n"
        "void launch(float* x) { k<<<1, 1>>>(x, x, 1); check(cudaGetLastError()); }\n"
    )
    x, out = torch.arange(4.0), torch.zeros(4)
    CudaKernel(source, "k").launch(1, 4, x, out, 4)
    assert torch.equal(out, 2 * x)
    assert compile_kernels(source, "k", [], "sm_80").lowered_names["k"]
    with pytest.raises(cuda_on_cpu.OutOfBounds, match=r"\(doubles\.cu:4\)"):
        CudaKernel(source, "k").launch(1, 5, x, out, 4)


# ---- the Python function of a kernel


@pytest.fixture(scope="module")
def functions():
    return Candidate("softmax", str(HERE / "kernels.py"), "softmax")._module()


def test_a_kernel_is_a_python_function(functions):
    x, w = torch.randn(300, 5).t(), torch.randn(300)
    torch.testing.assert_close(functions.softmax(x), x.softmax(-1))
    torch.testing.assert_close(functions.matmul(x, b=x.t()), x @ x.t(), rtol=1e-4, atol=1e-4)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 1e-1)):
        expected = torch.nn.functional.layer_norm(x, (300,), w, w, 1e-3)
        found = functions.layer_norm(x.to(dtype), w.to(dtype), w.to(dtype), eps=1e-3)
        torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)


def test_a_kernel_of_vectors_gets_memory_that_is_aligned():
    def arguments(x, y, out):
        return x, y, out, x.numel()

    add = fourfold.cuda_kernel(HERE / "vector_add.cu", "in_fours", grid=1, block=32, arguments=arguments)
    x = torch.arange(40.0)
    assert torch.equal(add(x[1:38], x[2:39]), x[1:38] + x[2:39])
    as_it_is = fourfold.cuda_kernel(
        HERE / "vector_add.cu", "in_fours", grid=1, block=32, arguments=arguments, contiguous=False
    )
    with pytest.raises(cuda_on_cpu.Misaligned):
        as_it_is(x[1:38], x[2:39])


def test_the_dtype_is_that_of_the_first_tensor_of_numbers(tmp_path):
    (tmp_path / "gather.cu").write_text(
        "__global__ void gather(const int* at, const float* x, float* out, int n) {\n"
        "    if (threadIdx.x < n) out[threadIdx.x] = x[at[threadIdx.x]];\n}\n"
    )
    gather = fourfold.cuda_kernel(
        tmp_path / "gather.cu", "gather", grid=1, block=32, arguments=lambda at, x, out: (at, x, out, at.numel())
    )
    at, x = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0.5, 1.5, 2.5])
    assert torch.equal(gather(at, x), x[at.long()])


def test_a_kernel_of_integers_alone_takes_their_type(tmp_path):
    (tmp_path / "codes.cu").write_text(
        "__global__ void low(const unsigned char* codes, unsigned char* out, int n) {\n"
        "    if (threadIdx.x < n) out[threadIdx.x] = codes[threadIdx.x] & 15;\n}\n"
        "template <typename T> __global__ void twice(const T* x, T* out, int n) {\n"
        "    if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x];\n}\n"
    )
    low, twice = (
        fourfold.cuda_kernel(
            tmp_path / "codes.cu", name, grid=1, block=32, arguments=lambda x, out: (x, out, x.numel())
        )
        for name in ("low", "twice")
    )
    codes = torch.tensor([0x21, 0xFF, 0x30], dtype=torch.uint8)
    assert torch.equal(low(codes), codes & 15)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.tensor([1, -50, torch.iinfo(dtype).max // 2], dtype=dtype)
        assert torch.equal(twice(x), 2 * x)


def test_a_gradient_is_that_of_an_autograd_function():
    candidate = Candidate("vector_add", str(HERE / "kernels.py"), "Sum").load()
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(3, 5).t().requires_grad_()
    grad_output = torch.randn(3, 5).t()
    output = candidate(x=x, y=y)
    assert torch.equal(output, x + y)
    assert all(torch.equal(g, grad_output) for g in torch.autograd.grad(output, (x, y), grad_output))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda f: f.softmax(torch.zeros(2, 3).double()),
            TypeError,
            "there is no|takes float32, but a tensor of float64",
        ),
        (lambda f: f.layer_norm(torch.zeros(2, 3), torch.zeros(3).half(), torch.zeros(3)), TypeError, r"\(weight\)"),
        (lambda f: f.softmax(), TypeError, "missing a required argument: 'x'"),
        (lambda f: f.softmax(3), Exception, "no argument is a tensor|has no attribute"),
    ],
)
def test_a_wrong_call_is_an_error(call, error, says, functions):
    with pytest.raises(error, match=says):
        call(functions)


def test_a_function_that_is_not_written_in_python_is_a_candidate(tmp_path):
    # Like a function from torch.utils.cpp_extension.load_inline, which needs a GPU and NVIDIA's compiler.
    source = tmp_path / "extension.py"
    source.write_text("import torch\n\nadd = torch.add\n")
    x = torch.arange(3.0)
    assert torch.equal(Candidate("vector_add", str(source), "add").load()(y=x, x=x), 2 * x)


def test_a_function_of_a_kernel_is_a_candidate_whose_source_is_the_calling_file(tmp_path):
    (tmp_path / "add.cu").write_text(
        "__global__ void add(const float* x, const float* y, float* out, int n) {\n"
        "    for (int i = threadIdx.x; i < n; i += 37) out[i] = x[i] + y[i];\n}\n"
    )
    (tmp_path / "add.py").write_text(
        "import fourfold\n\n\ndef arguments(x, y, out):\n    return x, y, out, x.numel()\n\n\n"
        "add = fourfold.cuda_kernel('add.cu', 'add', grid=1, block=37, arguments=arguments)\n"
    )
    add = Candidate("vector_add", str(tmp_path / "add.py"), "add").load()
    options: dict[str, Any] = {"dtypes": ["float32"], "only": ["forward"], "examples": 2, "device": "cpu"}
    verdict = fourfold.verify(add, "vector_add", claims=fourfold.Claims(gradients=False), **options)
    assert verdict.passed, verdict
    assert verdict.source.startswith("import fourfold")


def test_the_package_offers_cuda_kernel():
    assert "cuda_kernel" in dir(fourfold)


# ---- the language


STYLES = {
    name: CudaKernel(HERE / "styles.cu", name)
    for name in ("sum_by_warps", "sum_by_cub", "sum_by_cub_again", "extremes")
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["sum_by_warps", "sum_by_cub"])
def test_the_usual_reductions_run_on_the_cpu(name):
    x, out = torch.arange(100.0), torch.zeros(1)
    STYLES[name].launch(1, 64, x, out, 100)
    assert out.item() == 4950


def test_the_usual_constants_and_functions_are_there():
    x, out = torch.tensor([0.5, -2.0, 3.0]), torch.zeros(4)
    STYLES["extremes"].launch(1, 1, x, out, 3)
    torch.testing.assert_close(out, torch.tensor([3.0, -2.0, 0.25 * 1.6487212707, 6.2831853]))


def test_storage_of_cub_that_is_used_again_without_a_barrier_is_a_race():
    with pytest.raises(cuda_on_cpu.Race) as caught:
        STYLES["sum_by_cub_again"].launch(1, 64, torch.ones(64), torch.zeros(1), 64)
    assert caught.value.line in faults("styles.cu", "sum_by_cub_again")


@pytest.mark.full(but=2)
@pytest.mark.parametrize("file", ["softmax.cu", "vector_add.cu", "matmul.cu", "layer_norm.cu", "styles.cu"])
def test_the_same_files_compile_for_a_gpu(file):
    source = HERE / file
    names = [f"{k.name}<float>" if k.template else k.name for k in kernels(source.read_text())]
    for name in names:
        assert compile_kernels(source, name, names, "sm_80").lowered_names[name]


def test_torchs_headers_are_refused_on_every_device():
    with pytest.raises(SelectionError, match=r"of_torch\.cu includes torch/extension\.h.*load_inline on a GPU"):
        Candidate.parse(f"softmax={HERE}/of_torch.cu:softmax_kernel<<<rows, 64>>>", ["softmax"]).load()
    with pytest.raises(CompilationError, match=r"of_torch\.cu includes torch/extension\.h"):
        compile_kernels(HERE / "of_torch.cu", "softmax_kernel", [], "sm_80")
