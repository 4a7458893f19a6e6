"""A row's result depends neither on the number of rows nor on the lane that stores it, and long rows are whole."""

import importlib
import json
import re
from dataclasses import replace

import pytest
import torch
import warm
from subjects import subject_of

from fourfold import backends
from fourfold.checks.ahead_of_time import environment
from fourfold.checks.forward import forward_agrees
from fourfold.checks.outputs import together
from fourfold.checks.records import operations
from fourfold.checks.search import Search

# Triton specializes a kernel for an argument that is 1 or a multiple of 16.
COMPILED = """
import json, sys
import torch
from fourfold import backends
from fourfold.backends.triton import compile as triton_compile

operation = backends.load(sys.argv[1], "triton")
code = []
for rows in (1, 2, 16, 17, 32):
    x = torch.zeros(rows, 3, requires_grad=True)
    others = [torch.ones(3, requires_grad=True) for _ in range(int(sys.argv[2]))]
    with triton_compile.compile_launches(90) as kernels:
        operation(x, *others).backward(torch.ones(rows, 3))
    code.append({kernel.name: kernel.code_sha256 for kernel in kernels})
print(json.dumps(code))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        pytest.param("softmax", 0, marks=pytest.mark.full),
        pytest.param("layer_norm", 2, marks=pytest.mark.full),
        ("rms_norm", 1),
    ],
)
def test_kernels_of_rows_are_compiled_once_for_any_number_of_them(operation: str, parameters: int) -> None:
    one, two, *many = json.loads(warm.printed(COMPILED, operation, parameters, env=environment()))
    # The gradient of few rows of a norm is another kernel.
    assert one == two
    assert many[0] == many[1] == many[2]
    assert len(one) >= 2


# Here the lanes of a warp share a row of layer_norm, and each lane stores the row's mean and variance.
ASSEMBLY = """
import torch
from fourfold import backends
from fourfold.backends.triton import compile as triton_compile
from fourfold.compat import triton_internals

code = {}

def run(shipped, *args, **kwargs):
    compiled = shipped(*args, **kwargs)
    found = triton_internals.code_of(compiled)
    code[found.name] = found.ptx
    return compiled

x, ones = torch.zeros(24, 3), torch.ones(3)
with triton_internals.launches_replaced(run), triton_compile.compile_launches(90):
    backends.load("layer_norm", "triton")(x, ones, ones)
print(code["norm_forward_kernel"])
"""


@pytest.mark.full
def test_lanes_that_share_a_row_round_its_variance_alike() -> None:
    assembly = warm.printed(ASSEMBLY, env=environment())
    shuffled = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)[|,]", assembly))
    assert shuffled
    added = set(re.findall(r"add\.f32\s+%\w+, %\w+, (%\w+);", assembly))
    assert shuffled & added
    # A fused a * a + (other lane's b * b) rounds only the other lane's square, so the two lanes' sums may differ.
    fused = set(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", assembly))
    assert not shuffled & fused


@pytest.mark.parametrize("cols", [20, 64, 250])
def test_a_row_has_the_same_gradient_among_few_rows_and_among_many(cols: int, device: str) -> None:
    # In CUDA C++ a whole warp shares one of few short rows, and fewer lanes one of many.
    rms_norm, weight = backends.load("rms_norm", "cuda"), torch.randn(cols, device=device)
    x, grad = torch.randn(2, 8192, cols, device=device)[:, : 8192 if device == "cuda" else 130]

    def gradient(rows: int) -> torch.Tensor:
        some = x[:rows].detach().requires_grad_()
        return torch.autograd.grad(rms_norm(some, weight, 1e-6), some, grad[:rows])[0]

    whole = gradient(len(x))
    for rows in (1, 5, 20):
        assert torch.equal(gradient(rows), whole[:rows])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"])
def test_a_long_row_is_read_in_pieces(name: str) -> None:
    # A multiple of 16 columns: two blocks of 16384 columns and a part of a third.
    make = importlib.import_module(f"fourfold.properties.{name}").rows(2, 33_024)
    subject = subject_of(replace(operations()[name], examples={"long": make}), backend="triton")
    search = Search(examples=1)
    forward_agrees(together(subject), search)
    assert search.ran > 1


def test_topk_finds_more_results_than_a_program_sorts_of_a_longer_row() -> None:
    x = torch.randn(1, 8500, generator=torch.Generator().manual_seed(0))
    values, indices = backends.load("topk", "triton")(x, 8300)
    assert torch.equal(values, torch.topk(x, 8300).values)
    assert torch.equal(values, x.gather(1, indices.long()))
