"""A row's result depends neither on how many rows there are nor on who stores it: the code that is run says so."""

import json
import re
import subprocess
import sys

import pytest

from properties.ahead_of_time import environment

# Triton compiles a kernel anew for an argument that is 1, or a multiple of 16.
COMPILED = """
import json, sys
import torch
from impls import backends, triton_compile

operation = backends.load(sys.argv[1], "triton")
code = []
for rows in (1, 2, 16):
    x = torch.zeros(rows, 3, requires_grad=True)
    others = [torch.ones(3, requires_grad=True) for _ in range(int(sys.argv[2]))]
    with triton_compile.compiled_for(90) as kernels:
        operation(x, *others).backward(torch.ones(rows, 3))
    code.append({kernel.name: kernel.code_sha256 for kernel in kernels})
print(json.dumps(code))
"""


@pytest.mark.parametrize(("operation", "parameters"), [("softmax", 0), ("layer_norm", 2)])
def test_kernels_of_rows_are_compiled_once_for_any_number_of_them(operation: str, parameters: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, operation, str(parameters)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    one, two, sixteen = json.loads(done.stdout)
    assert one == two == sixteen
    assert len(one) >= 2


# layer_norm's rows are shared by the lanes of a warp here, each of which stores the row's mean and variance.
ASSEMBLY = """
import torch, triton
from impls import backends, triton_compile

shipped_run, code = triton.runtime.JITFunction.run, {}

def run(self, *args, **kwargs):
    kernel = shipped_run(self, *args, **kwargs)
    code[kernel.metadata.name] = kernel.asm["ptx"]
    return kernel

triton.runtime.JITFunction.run = run
x, ones = torch.zeros(24, 3), torch.ones(3)
with triton_compile.compiled_for(90):
    backends.load("layer_norm", "triton")(x, ones, ones)
print(code["layer_norm_forward_kernel"])
"""


def test_lanes_that_share_a_row_round_its_variance_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASSEMBLY], env=environment(), capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    shuffled = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)[|,]", done.stdout))
    assert shuffled
    added = set(re.findall(r"add\.f32\s+%\w+, %\w+, (%\w+);", done.stdout))
    assert shuffled & added
    # a * a + b, with b the other lane's b * b, is rounded once where the other lane has it the other way round.
    fused = set(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", done.stdout))
    assert not shuffled & fused
