"""A launch that is known again is of what Triton would have compiled for it, on a GPU that is not there."""

import json
import pathlib
import subprocess
import sys

from properties.ahead_of_time import environment

# What is compiled is Triton's own; in place of the driver something writes down what it is asked to launch.
SCRIPT = """
import itertools, json, types
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from impls import triton_launch


@triton.jit(do_not_specialize=["m"])
def fill_kernel(x_ptr, output_ptr, n, m, scale: tl.float64, factor, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at * n, mask=at < m, other=0.0).to(TYPE) * scale
    tl.store(output_ptr + at, value * factor, mask=at < n)


twin_kernel = triton.jit(do_not_specialize=["m"])(fill_kernel.fn)


launches, numbers = [], itertools.count()


class Launcher:
    def __init__(self, src, metadata):
        pass

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        launches.append([function, [x, y, z], len(arguments), [str(a) for a in arguments[2:]]])


def load_binary(name, kernel, shared, device):
    return object(), next(numbers), 0, 0, 1024  # each compiled kernel is loaded once


class Driver:
    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        load_binary=load_binary,
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17, "max_num_regs": 1 << 16},
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def allocate_default_profile_scratch(self, size, align, stream):
        return None


class OnGpu(torch.Tensor):
    def get_device(self):
        return 0


driver.set_active(Driver())
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 0
shipped_run, looked_up = triton.runtime.JITFunction.run, [0]


def run(self, *arguments, **options):
    looked_up[0] += 1
    return shipped_run(self, *arguments, **options)


triton.runtime.JITFunction.run = run


def tensor(dtype, first):
    return torch.zeros(64, dtype=dtype)[first:].as_subclass(OnGpu)


half, single = torch.float16, torch.float32
options = dict(BLOCK=32, TYPE=tl.float32, num_warps=4)
usual = dict(x=(half, 0), output=(single, 0), n=2, m=2, scale=0.5, factor=2, kernel=fill_kernel, grid=(1,), **options)
other = dict(
    x=[(single, 0), (half, 1), (half, 8)],
    output=[(single, 1), (single, 2)],
    n=[1, 3, 16, 0, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -2**31 - 1],
    m=[1, 16, 2**31],
    scale=[1.0, 0.25, 1],
    factor=[1, 1.0, True, False, 0],
    kernel=[twin_kernel],
    grid=[(2,), (2, 3), (4, 5, 6)],
    BLOCK=[64],
    TYPE=[tl.float64],
    num_warps=[1],
)
cases = [usual] + [{**usual, name: value} for name, values in other.items() for value in values]
disagreements, known_again = [], 0
for case in cases + cases[::-1]:
    tensors = tensor(*case["x"]), tensor(*case["output"])
    scalars = case["n"], case["m"], case["scale"], case["factor"]
    options = {name: case[name] for name in options}
    case["kernel"][case["grid"]](*tensors, *scalars, **options)
    looked_up[0] = 0
    triton_launch.launch(case["kernel"], case["grid"], tensors, scalars, **options)
    known_again += not looked_up[0]
    if launches[-1] != launches[-2]:
        disagreements.append([str(case), launches[-2], launches[-1]])
found = dict(cases=2 * len(cases), launches=len(launches), known_again=known_again, disagreements=disagreements)
print(json.dumps({**found, "kernels": len({launch[0] for launch in launches})}))
"""


def test_launches_known_again_are_of_the_kernel_that_triton_would_take(tmp_path: pathlib.Path) -> None:
    # Triton reads a kernel's source from its file.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    known = {**environment(), "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], env=known, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["disagreements"] == []
    assert found["launches"] == 2 * found["cases"]
    # Each case comes twice.
    assert found["known_again"] > found["cases"] / 2
    assert found["kernels"] >= 12
