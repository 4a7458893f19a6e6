"""A row's result does not depend on how many rows there are: the code that is run does not."""

import json
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
    code.append({kernel.name: kernel.cubin_sha256 for kernel in kernels})
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
