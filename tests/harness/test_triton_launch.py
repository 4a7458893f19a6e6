"""A cached launch uses the kernel that Triton itself would compile for it, tested with a simulated GPU."""

import json
import pathlib
import tempfile

import pytest
import warm
from one_run import one_run

from fourfold.checks.ahead_of_time import environment

# Triton itself compiles. A stand-in for the driver records the launches.
SETUP = """
import itertools, json, sys, types
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from fourfold.backends.triton import launch as triton_launch


@triton.jit(do_not_specialize=["m"])
def fill_kernel(x_ptr, output_ptr, n, m, scale: tl.float64, factor, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at * n, mask=at < m, other=0.0).to(TYPE) * scale
    tl.store(output_ptr + at, value * factor, mask=at < n)


twin_kernel = triton.jit(do_not_specialize=["m"])(fill_kernel.fn)


@triton.jit
def real_first_kernel(x_ptr, output_ptr, real, n, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    tl.store(output_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + n).to(TYPE) * real)


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
torch.cuda.current_device = lambda: 0
triton_launch.torch_internals.current_stream = lambda device: 0
shipped_run, looked_up = triton.runtime.JITFunction.run, [0]


def run(self, *arguments, **options):
    looked_up[0] += 1
    return shipped_run(self, *arguments, **options)


triton.runtime.JITFunction.run = run


def tensor(dtype, first):
    return torch.zeros(64, dtype=dtype)[first:].as_subclass(OnGpu)


half, single = torch.float16, torch.float32
"""

LAUNCHES = """
options = dict(BLOCK=32, TYPE=tl.float32, num_warps=4)
usual = dict(x=(half, 0), output=(single, 0), n=2, m=2, scale=0.5, factor=2, kernel=fill_kernel, grid=(1,), **options)
other = dict(
    x=[(single, 0), (half, 1), (half, 8)],
    output=[(single, 1), (single, 2)],
    n=[1, 3, 16, 0, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -2**31 - 1],
    m=[1, 16, 2**31],
    scale=[1.0, 0.25, 1],
    factor=[1, 1.0, True, False, 0, float("nan"), float("inf")],
    kernel=[twin_kernel],
    grid=[(2,), (2, 3), (4, 5, 6)],
    BLOCK=[64],
    TYPE=[tl.float64],
    num_warps=[1],
)
cases = [usual] + [{**usual, name: value} for name, values in other.items() for value in values]
# NaN is neither above nor below a limit.
cases += [dict(usual, kernel=real_first_kernel, real=float("nan"), n=n) for n in (2, 16, 2**31, 2**31 + 1)]
disagreements, remember_calls = [], 0
for case in cases + cases[::-1]:
    tensors = tensor(*case["x"]), tensor(*case["output"])
    scalars = case["n"], case["m"], case["scale"], case["factor"]
    if "real" in case:
        scalars = case["real"], case["n"]
    options = {name: case[name] for name in options}
    case["kernel"][case["grid"]](*tensors, *scalars, **options)
    looked_up[0] = 0
    triton_launch.launch(case["kernel"], case["grid"], tensors, scalars, **options)
    remember_calls += not looked_up[0]
    if launches[-1] != launches[-2]:
        disagreements.append([str(case), launches[-2], launches[-1]])
found = dict(cases=2 * len(cases), launches=len(launches), remember_calls=remember_calls, disagreements=disagreements)
print(json.dumps({**found, "kernels": len({launch[0] for launch in launches})}))
"""


RECORDED = """
import contextlib
from fourfold.backends import launch_records
from fourfold.compat import torch_internals

torch_internals.calls_are_watched = lambda: watched
watched = True
x, output = tensor(half, 0), tensor(single, 0)
names = {x.untyped_storage().data_ptr(): "x"}
options = dict(BLOCK=32, TYPE=tl.float32, num_warps=4)


def recorded(launch):
    with launch_records.recording(lambda t: names.get(t.untyped_storage().data_ptr())) as record:
        with triton_launch.record_triton_launches(record):
            launch()
    return [[one.code.name, one.code.arch, one.code.identity, one.configuration, *one.arguments]
            for one in record.launches], record.unknown


def launch(grid=(3,), scalars=(2, 2, 0.5, 2), x=x, output=output, **changed):
    triton_launch.launch(fill_kernel, grid, (x, output), scalars, **{**options, **changed})


looked_up[0] = 0
found = dict(
    first=recorded(launch),
    again=recorded(launch),
    known=looked_up[0] == 1,
    tritons=recorded(lambda: fill_kernel[(3,)](x, output, 2, 2, 0.5, factor=2, **options)),
    grid=recorded(lambda: launch(grid=(3, 2))),
    number=recorded(lambda: launch(scalars=(2, 3, 0.5, 2))),
    warps=recorded(lambda: launch(num_warps=1)),
    block=recorded(lambda: launch(BLOCK=64)),
    other_tensor=recorded(lambda: launch(x=tensor(half, 0))),
    same_tensor=recorded(lambda: launch(output=x)),
    decided=recorded(lambda: fill_kernel[lambda meta: (3,)](x, output, 2, 2, 0.5, 2, **options)),
    compiled=recorded(lambda: fill_kernel.warmup(x, output, 2, 2, 0.5, 2, grid=(3,), **options)),
)
watched = False
print(json.dumps(dict(**found, unseen=recorded(launch))))
"""


# Properties that a future version of Triton may specialize on. `shipped` is the installed version.
FUTURE = {
    "multiples_of_32": ("type(a) is int and specialise and a % 32 == 0", "number = "),
    "zero": ("type(a) is int and specialise and a == 0", "number = "),
    "small_integers": ("type(a) is int and -128 <= a < 128", "plain = "),
    "reals_of_1": ("type(a) is float and a == 1.0", "plain = 1.0"),
    "truth": ("a is True", "plain = True"),
    "pointers_to_multiples_of_128": ("hasattr(a, 'data_ptr') and a.data_ptr() % 128 == 0", "pointer = "),
    "tensors_below_2_GiB": ("hasattr(a, 'data_ptr') and a.untyped_storage().nbytes() < 2**31", "2^31 bytes"),
    "contiguous_tensors": ("hasattr(a, 'data_ptr') and a.is_contiguous()", "strided"),
}
CONTRACT = """
shipped, of_the_future = triton.runtime.jit.native_specialize_impl, ""


def specialise_impl(backend, a, is_const, specialise, align):
    found = shipped(backend, a, is_const, specialise, align)
    return (found[0], f"{found[1]}F") if of_the_future and eval(of_the_future) else found


triton.runtime.jit.native_specialize_impl = specialise_impl


def launched():
    looked_up[0] = 0
    options = dict(BLOCK=32, TYPE=tl.float32, num_warps=4)
    for _ in range(3):
        triton_launch.launch(fill_kernel, (1,), (tensor(half, 0), tensor(single, 0)), (3, 2, 0.5, 5), **options)
    return dict(unkeyed_properties=triton_launch.unkeyed_properties(0), remember_calls=3 - looked_up[0])


found = dict(version=triton.__version__)
for name, of_the_future in json.loads(sys.argv[1]).items():
    # As a new process.
    for kernel in (fill_kernel, triton_launch.triton_contract.probe_kernel):
        kernel.device_caches.clear()
    triton_launch._compiled.clear()
    triton_launch.unkeyed_properties.cache_clear()
    found[name] = launched()
# As if Triton no longer had what it is asked by.
del triton_launch.triton_contract.probe_kernel.device_caches
triton_launch._compiled.clear()
triton_launch.unkeyed_properties.cache_clear()
found["unasked"] = launched()
print(json.dumps(found))
"""


def ran(script: str, tmp_path: pathlib.Path, *arguments: str) -> dict:
    """Run a script in a new process and return the JSON that it prints."""
    # Triton reads a kernel's source from its file.
    file = tmp_path / "script.py"
    file.write_text(script)
    known = {**environment(), "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    return json.loads(warm.printed(file, *arguments, env=known))


@pytest.mark.full
def test_launches_known_again_are_of_the_kernel_that_triton_would_take(tmp_path: pathlib.Path) -> None:
    found = ran(SETUP + LAUNCHES, tmp_path)
    assert found["disagreements"] == []
    assert found["launches"] == 2 * found["cases"]
    # The script runs each case twice.
    assert found["remember_calls"] > found["cases"] / 2
    assert found["kernels"] >= 12


def test_launches_are_recorded_whoever_makes_them(tmp_path: pathlib.Path) -> None:
    found = ran(SETUP + RECORDED, tmp_path)
    ((launched,), unknown) = found["first"]
    name, arch, identity, configuration, *arguments = launched
    assert (name, arch, unknown) == ("fill_kernel", "sm_90", "")
    assert len(identity) == 64
    assert configuration.startswith("grid (3, 1, 1), block (128, 1, 1), 0 bytes")
    assert [argument.partition(" ")[0] for argument in arguments] == ["x:", "made:", "2", "2", "0.5", "2"]
    assert found["known"]
    assert found["again"] == found["tritons"] == found["first"]
    same_code = {name: found[name][0][0][2] == identity for name in ("grid", "number", "other_tensor", "same_tensor")}
    assert all(same_code[name] for name in ("grid", "number", "other_tensor"))
    assert not same_code["same_tensor"]  # it has another dtype
    for other in ("grid", "number", "warps", "block", "other_tensor", "same_tensor"):
        assert found[other] != found["first"], other
    assert found["grid"][0][0][3].startswith("grid (3, 2, 1)")
    assert found["warps"][0][0][3].startswith("grid (3, 1, 1), block (32, 1, 1)")
    assert found["block"][0][0][2] != identity
    assert "as argument 0" in found["same_tensor"][0][0][5]
    assert found["decided"] == found["first"]
    assert found["compiled"] == [[], ""]
    assert found["unseen"][1] == "fill_kernel was launched where torch's operators are not seen"


@one_run
def key_misses() -> dict:
    """Return, for each set of properties, what the key misses and how many of three launches the cache finds."""
    conditions = {"shipped": "", **{name: condition for name, (condition, _) in FUTURE.items()}}
    with tempfile.TemporaryDirectory() as folder:
        return ran(SETUP + CONTRACT, pathlib.Path(folder), json.dumps(conditions))


@pytest.fixture
def contract() -> dict:
    return key_misses()


def test_the_key_tells_apart_all_that_triton_compiles_for(contract: dict) -> None:
    unkeyed_properties = contract["shipped"]["unkeyed_properties"]
    assert unkeyed_properties == [], f"Triton {contract['version']} compiles for more than launch_key tells apart"
    assert contract["shipped"]["remember_calls"] == 2


@pytest.mark.parametrize("name", FUTURE)
def test_what_a_triton_to_come_compiles_for_is_named_and_no_launch_is_known_again(name: str, contract: dict) -> None:
    assert any(FUTURE[name][1] in line for line in contract[name]["unkeyed_properties"]), contract[name][
        "unkeyed_properties"
    ][:5]
    assert contract[name]["remember_calls"] == 0


def test_where_triton_cannot_be_asked_no_launch_is_known_again(contract: dict) -> None:
    assert "does not say what it specialises" in contract["unasked"]["unkeyed_properties"][0]
    assert contract["unasked"]["remember_calls"] == 0
