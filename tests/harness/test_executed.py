"""Lines that never ran are named with their condition, in Python, in kernels and in runs; lines that ran are not."""

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import warm
from samples import sampled
from triton.runtime.errors import InterpreterError

import fourfold
from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.candidates.load import modules
from fourfold.candidates.process.client import start
from fourfold.instruments import line_recorder
from fourfold.instruments.cuda_line_coverage import condition_of
from fourfold.instruments.evaluation import blame_implementation
from fourfold.instruments.line_coverage import BLIND, COMPILED, SHOWN, Executed, StatementMap, bad_input

ROOT = Path(__file__).parents[2]
# A wrapper, the functions that it calls, and a Triton kernel, each with a branch that no case reaches.
UNREACHED = """
import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    y = tl.load(y_ptr + at, mask=mask)
    if n > 1 << 30:
        x = x + 1
        y = y - 1
    tl.store(out_ptr + at, x + y, mask=mask)


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, y = x.contiguous(), y.contiguous()
        if x.ndim > 40:
            return x
        if x.numel():
            add_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), 256)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return None, None
        return grad_output.clone(), grad_output.clone()


def check(x, y):
    if x.shape != y.shape:
        raise ValueError("x and y must have the same shape")


def unused():
    return 1


def add(x, y):
    check(x, y)
    return Add.apply(x, y)


def not_called():
    return 2
"""
NEVER = [
    ("14-15", "n > 1 << 30"),
    ("25", "x.ndim > 40"),
    ("33", "grad_output is None"),
]
IN_CUDA = """// Adds two vectors.
__device__ float sum(float left, float right) {
    return left + right;
}

__global__ void add(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (n > 100000000) {
        out[i] = x[i];
        out[i] += 2 * y[i];
    } else if (i < n) {
        float left = x[i];
        out[i] = sum(left, y[i]);
    }
    for (int k = 0; k < n - 200000000; k++)
        out[k] = 0;
}

__global__ void another(float* out) {
    out[0] = 1;
}
"""
PLAIN = """
def add(x, y):
    if x.numel() >= 0:
        return x + y
    return x
"""
WHOLE = """
def add(x, y):
    out = x.clone()
    out += y
    return out
"""


def write_file(folder: Path, text: str, name: str = "kernels.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def entries(told: Executed) -> list[tuple[str, str]]:
    return [(each.lines, each.condition) for each in told.never()]


def executed(file: Path, call: Callable[[ModuleType], Any]) -> Executed:
    """Return the executed lines after one call of a file's function `run`."""
    module, told = modules.load_file(file, anew=True), Executed()
    told.watch(file, "run", "cpu")
    try:
        with blame_implementation():
            call(module)
    finally:
        line_recorder.recorder.close()
    told.add(told.report())
    return told


def never_of(text: str, call: Callable[[ModuleType], Any], folder: Path) -> list[tuple[str, str]]:
    """Return the lines of the function `run` that never ran in a single call."""
    return entries(executed(write_file(folder, textwrap.dedent(text)), call))


# ---- lines and conditions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if n > 5:\n    n = 1\n    n = 2\nelse:\n    n = 3\nreturn n", [("3-4", "n > 5")]),
        ("if n < 5:\n    return n\nn += 1\nreturn n", [("4-5", "not (n < 5)")]),
        ("if n < 5:\n    n = 1\nelif n > 7:\n    n = 2\nreturn n", [("4-5", "not (n < 5)")]),
        ("for i in range(0):\n    n += i\nreturn n", [("3", "for i in range(0)")]),
        ("while n > 9:\n    n -= 1\nreturn n", [("3", "n > 9")]),
        ("try:\n    n += 1\nexcept (OSError, TypeError):\n    n = 0\nreturn n", [("5", "except (OSError, TypeError)")]),
        ("match n:\n    case 1:\n        n = 2\n    case [a, *b]:\n        n = a\nreturn n", [("6", "case [a, *b]")]),
        ("if n > 5: return 1\nreturn n", [("2", "n > 5")]),
        ("if n < 5: return 1\nreturn n", [("3", "not (n < 5)")]),
        ("return -n if n > 5 else 2 * n", [("2", "n > 5")]),
        ("return n + (n if n < 5 else 2 * n)", [("2", "not (n < 5)")]),
        ("return [i if i else n for i in range(n)]", [("2", "i")]),
        ("return -n if n else ~n if n > 5 else 2 * n", [("2", "not n"), ("2", "n > 5"), ("2", "not (n > 5)")]),
        ("def inner(a=-n if n > 5 else 2 * n): return a\nreturn inner()", [("2", "n > 5")]),
        ('"""Says nothing."""\nx: int\nif False:\n    n = 1\nreturn n', []),
        ("def inner():\n    return 1\nreturn n", [("3", "inner is never called")]),
        ("n = sum(\n    i\n    for i in range(n)\n)\nreturn n", []),
        ("with open('/dev/null') as f:\n    n += 1\n    if f is None:\n        n += 1\nreturn n", [("5", "f is None")]),
    ],
)  # fmt: skip
def test_what_never_ran_is_named_with_its_condition(text: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    source = "def run(n):\n" + textwrap.indent(text, "    ")
    assert never_of(source, lambda module: module.run(1), tmp_path) == expected


LACKING = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def kernel(output_ptr, n):
        first = n + 1
        if n > 5:
            first += 1
            first = tl.inline_asm_elementwise("none.b32 $0, $1;", "=r,r", [first], tl.int32, True, 1)
        tl.store(output_ptr, first)

    def run(n):
        output = torch.zeros(1, dtype=torch.int32)
        if n > 5:
            n += 1
        kernel[(1,)](output, n)
        return output
"""


def test_a_call_that_the_interpreter_lacks_something_for_executes_no_lines(tmp_path: Path) -> None:
    def call(module: ModuleType) -> None:
        for n in (9, 1):
            with contextlib.suppress(InterpreterError), blame_implementation():
                module.run(n)

    assert never_of(LACKING, call, tmp_path) == [("9-10", "n > 5"), ("16", "n > 5")]
    assert never_of(LACKING.replace("none", "not"), call, tmp_path) == []


FOR_BAD_INPUT = """
    def described(shape):
        return tuple(shape)

    def run(x, y):
        if x.ndim > 1:
            raise ValueError(f"x has the shape {described(x.shape)}")
        if y.shape != x.shape:
            y = y.expand_as(x)
            y = y.clone()
        return x + y if x.ndim else y + x
"""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_lines_that_only_bad_input_reaches_are_named(elsewhere: bool, tmp_path: Path) -> None:
    file, told = write_file(tmp_path, textwrap.dedent(FOR_BAD_INPUT)), Executed()
    run: Any = modules.load_file(file, anew=True).run
    if elsewhere:
        run = start(str(file), "run", inspect.signature(run), "run", 60.0, os.getpid())
    told.watch(file, "run", "cpu", run if elsewhere else None)
    one, row = torch.ones(1), torch.ones(3)
    with bad_input(run), blame_implementation():
        run(row, one)
        run(one[0], row[0])
        with pytest.raises(ValueError, match="x has the shape"):
            run(row.view(1, 3), row)
    with blame_implementation():
        run(row, row)
    told.gather()
    line_recorder.recorder.close()
    told.add(told.report())
    assert entries(told) == [("11", "not x.ndim"), ("9-10", "y.shape != x.shape")]


PARTS_OF_LINES = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def kernel(output_ptr, n, FLAG: tl.constexpr):
        first = 1 if n > 5 else (2 if FLAG else 3)
        if n > 7: first = 4
        if n < 7: first += 1
        if n > 9:
            first = 5 if FLAG else 6
        tl.store(output_ptr, first if n < 3 and n > 0 else 0)

    def run(n):
        output = torch.zeros(1, dtype=torch.int32)
        kernel[(1,)](output, n, FLAG=True)
        kernel[(1,)](output, n + 1, FLAG=True)
        return output
"""


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [("7", "n > 5"), ("7", "not FLAG"), ("8", "n > 7"), ("12", "not (n < 3 and n > 0)"), ("11", "n > 9")]),
        # The inner expression of line 7 never runs.
        (
            9,
            [("7", c) for c in ("not (n > 5)", "FLAG", "not FLAG")]
            + [("9", "n < 7"), ("11", "not FLAG"), ("12", "n < 3 and n > 0")],
        ),
    ],
)
def test_parts_of_a_kernel_s_line_that_never_ran_are_named(
    n: int, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert set(never_of(PARTS_OF_LINES, lambda module: module.run(n), tmp_path)) == set(expected)


def test_functions_that_are_not_reached_by_name_do_not_count(tmp_path: Path) -> None:
    text = "import functools\n\n@functools.cache\ndef kept():\n    return 1\n\ndef helper():\n    return kept()\n\n"
    text += "def other():\n    return 1\n\nCHOSEN = other()\n\ndef run(n):\n    return n or helper() or CHOSEN\n"
    assert never_of(text, lambda module: module.run(1), tmp_path) == [("8", "helper is never called")]


def test_functions_that_an_operator_is_made_of_count(tmp_path: Path) -> None:
    """One is ``layer_norm = register("triton", _forward, _backward)``, which the wrapper calls."""
    text = "def made(f, g):\n    return lambda n: n or g(n)\n\ndef forward(n):\n    return n\n\n"
    text += "def backward(n):\n    return 2 * n\n\nOPERATOR = made(forward, backward)\n\n"
    text += "def run(n):\n    return OPERATOR(n)\n"
    expected = [("5", "forward is never called"), ("8", "backward is never called")]
    assert never_of(text, lambda module: module.run(1), tmp_path) == expected


def test_of_a_whole_module_functions_that_run_on_import_do_not_count(tmp_path: Path) -> None:
    text = """
    def squares(n):
        return [i * i for i in range(n)]

    def later():
        return 1

    TABLE = {"squares": squares(3), "later": lambda: later()}

    def depends_on_batch(dtype, device):
        return None

    def run(n):
        return TABLE["squares"][n]
    """
    source = StatementMap(write_file(tmp_path, textwrap.dedent(text)))
    ((_, statements),) = source.statements.items()
    assert {each.function for each in statements.values()} == {"later", "run"}


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, two = (
        [str(folder / "kernel.py"), 1, 1, "", "run", 1, False, False] for folder in (tmp_path / "a", tmp_path / "b")
    )
    other = [str(tmp_path / "a" / "other.py"), 1, 1, "", "run", 1, False, False]
    told = Executed()
    told.add({"unseen": [], "statements": [one, two, other]})
    assert [each.file for each in told.never()] == ["a/kernel.py", "other.py", "b/kernel.py"]


def test_functions_of_files_beside_it_count(tmp_path: Path) -> None:
    beside = write_file(tmp_path, "def doubled(n):\n    if n > 5:\n        return n\n    return 2 * n\n", "beside.py")
    source = StatementMap(
        write_file(tmp_path, "from beside import doubled\n\ndef run(n):\n    return doubled(n)\n"), "run"
    )
    assert sorted(source.statements[str(beside)]) == [2, 3, 4]


def test_a_long_condition_is_cut_and_many_entries_are_counted(tmp_path: Path) -> None:
    tests = " or ".join(f"n == {number}" for number in range(10, 40))
    body = f"def run(n):\n    if {tests}:\n        n = 1\n" + "".join(
        f"    if n == {k}:\n        n = 0\n" for k in range(50, 64)
    )
    lines = list(executed(write_file(tmp_path, body), lambda module: module.run(1)).lines())
    assert lines[0].startswith("never executed: kernels.py:3 (n == 10 or n == 11")
    assert lines[0].endswith("...)")
    assert lines[SHOWN:] == ["never executed: and 5 more"]


# ---- beside other tools


def test_a_trace_function_that_is_there_already_stays(tmp_path: Path) -> None:
    seen: list[str] = []
    before = sys.gettrace()

    def debugger(frame: Any, event: str, argument: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return None

    def call(module: ModuleType) -> None:
        assert sys.gettrace() in (debugger, None)
        module.run(1)

    file = write_file(tmp_path, "def run(n):\n    return n\n")
    sys.settrace(debugger)
    try:
        told = executed(file, call)
        assert sys.gettrace() is debugger
        assert list(told.lines()) == ([BLIND] if line_recorder.monitoring is None else [])
    finally:
        sys.settrace(before)
        line_recorder.recorder.blind = False
    assert "run" in seen


@pytest.mark.skipif(line_recorder.monitoring is not None, reason="there is no trace function from Python 3.12 on")
def test_tracing_ends_with_the_call_and_with_the_last_line(tmp_path: Path) -> None:
    file, found = write_file(tmp_path, "def run(n):\n    if n > 1:\n        return n\n    return 0\n"), list[Any]()
    told, module = Executed(), modules.load_file(file, anew=True)
    told.watch(file, "run", "cpu")
    for number in (1, 2, 3):
        with blame_implementation():
            found.append(sys.gettrace())
            module.run(number)
        assert sys.gettrace() is None
    assert [each is None for each in found] == [False, False, True]
    line_recorder.recorder.close()


def test_threads_are_seen_where_they_call(tmp_path: Path) -> None:
    def call(module: ModuleType) -> None:
        def in_thread() -> None:
            with blame_implementation():
                module.run(9)

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()

    text = "def run(n):\n    if n > 5:\n        return 1\n    return 2\n"
    assert never_of(text, call, tmp_path) == [("4", "not (n > 5)")]


def test_nothing_is_said_of_functions_that_torch_compiles(tmp_path: Path) -> None:
    text = "import torch\n\n@torch.compile(backend='eager')\ndef run(x):\n    if x.ndim > 4:\n        return x\n"
    file = write_file(tmp_path, f"{text}    return x + 1\n")
    told = executed(file, lambda module: module.run(torch.ones(2)))
    assert list(told.lines()) == [COMPILED]


# A process that never closes its recorder. The first exit handler runs last, and prints what remains.
UNCLOSED = """
import atexit, sys, types

callbacks = {}
if not hasattr(sys, "monitoring"):  # before Python 3.12
    sys.monitoring = types.SimpleNamespace(
        events=types.SimpleNamespace(PY_START=1, LINE=2, INSTRUCTION=4, NO_EVENTS=0),
        get_tool=lambda tool: None,
        use_tool_id=lambda tool, name: None,
        register_callback=lambda tool, event, callback: None,
        set_events=lambda tool, events: None,
        set_local_events=lambda tool, code, events: None,
        restart_events=lambda: None,
        free_tool_id=lambda tool: None,
    )
shipped = sys.monitoring.register_callback


def register(tool, event, callback):
    callbacks[event] = callback
    return shipped(tool, event, callback)


sys.monitoring.register_callback = register
atexit.register(lambda: print(sorted(event for event, callback in callbacks.items() if callback is not None)))
from fourfold.instruments.line_recorder import recorder

recorder.users += 1
recorder.watch({"/nowhere.py": {1: 1}})
assert all(callbacks.values()) and len(callbacks) == 3
"""


def test_nothing_watches_while_the_interpreter_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", UNCLOSED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# ---- verify


@pytest.mark.full
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("text", "expected"),
    [(UNREACHED, NEVER), (WHOLE, [])],
    ids=["kernel", "whole"],
)
def test_verify_names_what_never_ran(text: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    kernel = modules.load_file(write_file(tmp_path, text), anew=True).add
    verdict = fourfold.verify(kernel, "vector_add", device="cpu", seed=1)
    assert verdict.passed
    assert verdict.never_executed is not None
    assert [(each.lines, each.condition) for each in verdict.never_executed] == expected
    told = [f"never executed: kernels.py:{lines} ({condition})" for lines, condition in expected]
    assert [line for line in str(verdict).splitlines() if line.startswith("never executed")] == told
    assert [each["lines"] for each in json.loads(verdict.json())["never_executed"]] == [lines for lines, _ in expected]


@pytest.mark.full
@pytest.mark.usefixtures("on_the_cpu")
def test_lines_are_seen_in_a_process_of_its_own(tmp_path: Path) -> None:
    verdict = fourfold.verify(f"{write_file(tmp_path, PLAIN)}:add", "vector_add", device="cpu", seed=1, untrusted=True)
    assert verdict.passed
    assert verdict.never_executed is not None
    assert [(each.lines, each.condition) for each in verdict.never_executed] == [("5", "not (x.numel() >= 0)")]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("options", [{"only": ["forward"]}, {"dtypes": ["float32"]}, {"examples": 3}])
def test_a_part_of_the_checks_accuses_nobody(options: dict[str, Any], tmp_path: Path) -> None:
    kernel = modules.load_file(write_file(tmp_path, PLAIN), anew=True).add
    verdict = fourfold.verify(kernel, "vector_add", device="cpu", seed=1, **{"only": ["forward"], **options})
    assert verdict.never_executed is None


@pytest.mark.full
def test_a_wrong_kernel_is_not_accused_of_lines(tmp_path: Path, device: str) -> None:
    text = "def add(x, y):\n    if x.numel() < 0:\n        return x\n    return x - y\n"
    kernel = modules.load_file(write_file(tmp_path, text), anew=True).add
    assert fourfold.verify(kernel, "vector_add", device=device, seed=1).never_executed is None


@pytest.mark.full
def test_a_kernel_that_ran_before_is_not_accused(tmp_path: Path) -> None:
    write_file(tmp_path, UNREACHED)
    script = """
import sys, torch, fourfold, kernels
assert "fourfold.backends.triton.interpreter.corrections" not in sys.modules
kernels.add(torch.ones(3), torch.ones(3))
verdict = fourfold.verify(kernels.add, "vector_add", device="cpu", seed=1)
print(*[each.lines for each in verdict.never_executed])
"""
    write_file(tmp_path, script, "script.py")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "TRITON_INTERPRET": "1"}
    done = warm.run("script", cwd=tmp_path, env=environment)
    assert done.stdout.split() == [lines for lines, _ in NEVER], done.stderr


# ---- the command line


def run(folder: Path, *options: str, kernel: str = "kernels.py:add") -> tuple[str, dict[str, Any]]:
    """Run `fourfold verify` on a kernel of the folder; return its output and its verdict."""
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT))
    command = ["pytest", str(ROOT / "tests/operations"), "-p", "fourfold", "-p", "no:cacheprovider", "--device=cpu"]
    command += [f"--candidate=vector_add={kernel}", "--verdict=verdict.json", *options]
    done = warm.run(*command, cwd=folder, env=environment)
    print(done.stdout, done.stderr)
    verdict = folder / "verdict.json"
    return done.stdout, json.loads(verdict.read_text()) if verdict.exists() else {}


@pytest.mark.full
@pytest.mark.parametrize("processes", [(), ("--untrusted", "-n2")])
def test_a_run_names_what_never_ran_in_any_of_its_processes(processes: tuple[str, ...], tmp_path: Path) -> None:
    write_file(tmp_path, UNREACHED)
    printed, verdict = run(tmp_path, *processes)
    assert verdict["passed"]
    told = [line for line in printed.splitlines() if line.startswith("never executed")]
    assert told == [f"never executed: kernels.py:{lines} ({condition})" for lines, condition in NEVER]
    found = [(each["file"], each["lines"], each["condition"]) for each in verdict["never_executed"]]
    assert found == [("kernels.py", *each) for each in NEVER]


PART = ("-k", "oracle and float32")


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--dtype=float32",), ("--examples=3",)])
def test_a_run_of_a_part_accuses_nobody(options: tuple[str, ...], tmp_path: Path) -> None:
    write_file(tmp_path, PLAIN)
    printed, verdict = run(tmp_path, *options, *PART)
    assert verdict["passed"]
    assert "never executed" not in printed
    assert "never_executed" not in verdict


@pytest.mark.full
def test_a_run_of_a_part_names_what_never_ran_if_it_is_asked(tmp_path: Path) -> None:
    write_file(tmp_path, PLAIN)
    printed, verdict = run(tmp_path, "--dtype=float32", "--examples=3", *PART, "--executed")
    assert [each["lines"] for each in verdict["never_executed"]] == ["5"]
    assert "never executed: kernels.py:5 (not (x.numel() >= 0))" in printed


@pytest.mark.full
@pytest.mark.skipif(cuda_on_cpu.unavailable_reason() is not None, reason=cuda_on_cpu.unavailable_reason() or "")
@pytest.mark.parametrize("processes", sampled([(), ("--untrusted", "-n2")], ()))
def test_lines_of_a_cuda_kernel_are_named_too(processes: tuple[str, ...], tmp_path: Path) -> None:
    write_file(tmp_path, IN_CUDA, "add.cu")
    printed, verdict = run(tmp_path, "--forward-only", *processes, kernel="add.cu:add<<<(n + 255) / 256, 256>>>")
    assert verdict["passed"]
    found = [(each["file"], each["lines"], each["condition"]) for each in verdict["never_executed"]]
    assert found == [("add.cu", "9-10", "n > 100000000"), ("add.cu", "16", "for (int k = 0; k < n - 200000000; k++)")]
    assert "never executed: add.cu:9-10 (n > 100000000)" in printed


CONDITIONS = """__global__ void f(int a, int b) {
    if (a > (b + 1))
        a = 1;  // "if (no) {"
    else
        b = 2;
    a = 3;
    for (int i = 0; i < 3; i++) {
        b += i;
        if (i == 2 &&
            a) {
            b = 1;
        }
        b = 2;
    }
    if constexpr (sizeof(int) == 4) {
        a = 4;
    } else {
        switch (b) {
            case 1: a = 2;
        }
    }
    b = 5;
}
"""


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        (2, ""),
        (3, "a > (b + 1)"),
        (5, "else"),
        (6, ""),
        (8, "for (int i = 0; i < 3; i++)"),
        (11, "i == 2 && a"),
        (13, "for (int i = 0; i < 3; i++)"),
        (16, "sizeof(int) == 4"),
        (18, "else"),
        (19, "switch (b)"),
        (22, ""),
    ],
)
def test_condition_of_a_line_of_cuda_is_the_innermost_around_it(line: int, condition: str, tmp_path: Path) -> None:
    assert condition_of(write_file(tmp_path, CONDITIONS, "f.cu"), line) == condition


@pytest.mark.full
def test_the_library_s_own_kernels_are_looked_at_when_asked() -> None:
    command = ["pytest", "tests/operations/test_forward.py", "-p", "no:cacheprovider", "--device=cpu", "--executed"]
    command += ["--op=softmax", "--backend=triton", "--dtype=float32", "--examples=3"]
    printed = warm.run(*command, cwd=ROOT, env=warm.variables("TRITON_INT")).stdout
    print(printed)
    assert re.search(r"never executed: triton_kernel.py:\d+-\d+ \(softmax_backward_kernel is never called\)", printed)
    assert re.search(r"never executed: \d+ stretches of \d+ statements of .*triton_kernel.py", printed)


def test_what_a_process_tells_is_not_believed_to_be_well_formed() -> None:
    told = Executed()
    for each in (
        None,
        1,
        {},
        {"unseen": 1},
        {"unseen": [], "statements": [1]},
        {"unseen": [], "statements": [[1] * 8]},
    ):
        told.add(each)
    told.add({"unseen": ["two\nlines \x1b[31m"], "statements": [["k.py", 1, 1, "a\n\x1b[0mb", "f", 1, False, False]]})
    assert [line for line in told.lines() if not line.isprintable()] == []
    assert "two lines [31m" in told.unseen


def test_an_unreached_line_costs_a_call_little(tmp_path: Path) -> None:
    """An unreached line keeps the trace function, which sees calls of Python functions, but no line of other files."""
    text = "import torch\n\ndef run(x):\n    if x is None:\n        return x\n    return torch.relu(x)\n"

    def call(module: ModuleType) -> None:
        for _ in range(3):
            module.run(torch.ones(1))
        tracer = sys.gettrace()
        if tracer is not None:
            assert tracer(inspect.currentframe(), "call", None) is None  # a frame of this file is not traced

    assert never_of(text, call, tmp_path) == [("5", "x is None")]
