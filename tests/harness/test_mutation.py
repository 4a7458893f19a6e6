"""Each mutant has one small mistake, and its trial tells killed, survived, invalid and not reached apart."""

import ast
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from fourfold.checks.records import operations
from fourfold.checks.search import need
from fourfold.mutation import known, trial
from fourfold.mutation.cuda_mutants import cuda_mutants
from fourfold.mutation.mutant import Mutant
from fourfold.mutation.options import EQUIVALENT
from fourfold.mutation.sources import mutants_of_files, sources
from fourfold.mutation.triton_mutants import triton_mutants
from fourfold.operations.case import Case

ROOT = pathlib.Path(__file__).parents[2]
TRITON = '''
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, n, x_row_stride, x_column_stride, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Not -1 < 2: a docstring."""
    at = tl.program_id(0).to(INDEX) * (BLOCK - 2) + tl.arange(0, BLOCK)
    mask = (at < n) & (at != 3)
    x = tl.load(x_ptr + at * x_row_stride, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    for piece in range(1, n, 4):
        x += tl.where(x > 0.5, -x, piece)  # 1 < 2
    total = tl.sum(tl.abs(x), axis=0) / tl.cdiv(n, 2)
    if n == 7 and BLOCK > 1:
        total = tl.maximum(total, 1.0) if n > 8 else total
    tl.debug_barrier()
    tl.store(x_ptr, total)

def host(n):
    return n + 1
'''

# The replaced texts and their replacements, in the order of the text.
OF_TRITON = [
    ("64 bits dropped", "tl.program_id(0).to(INDEX)", "tl.program_id(0)"),
    ("- to +", "BLOCK - 2", "(BLOCK + 2)"),
    ("constant changed", "2", "3"),
    ("boundary", "at < n", "(at <= n)"),
    ("comparison turned round", "at != 3", "(at == 3)"),
    ("condition dropped", "(at < n) & (at != 3)", "(at != 3)"),
    ("* to +", "at * x_row_stride", "(at + x_row_stride)"),
    ("stride of another axis", "x_row_stride", "x_column_stride"),
    ("constant changed", "0.0", "1.0"),
    ("precision lowered", "tl.float32", "tl.bfloat16"),
    ("loop ends early", "n", "(n) - 1"),
    ("loop ends late", "n", "(n) + 1"),
    ("loop begins late", "1", "(1) + 1"),
    ("loop's step changed", "4", "(4) + 1"),
    ("statement dropped", "x += tl.where(x > 0.5, -x, piece)", "pass"),
    ("branches swapped", "tl.where(x > 0.5, -x, piece)", "tl.where(x > 0.5, piece, -x)"),
    ("negation dropped", "-x", "x"),
    ("sum to max", "sum", "max"),
    ("absolute value dropped", "tl.abs(x)", "x"),
    ("rounded down", "tl.cdiv(n, 2)", "((n) // (2))"),
    ("and to or", "n == 7 and BLOCK > 1", "(n == 7 or BLOCK > 1)"),
    ("branch turned round", "n == 7 and BLOCK > 1", "not (n == 7 and BLOCK > 1)"),
    ("branches swapped", "tl.maximum(total, 1.0) if n > 8 else total", "total if n > 8 else tl.maximum(total, 1.0)"),
    ("maximum to minimum", "maximum", "minimum"),
    ("statement dropped", "tl.debug_barrier()", "pass"),
    ("statement dropped", "tl.store(x_ptr, total)", "pass"),
]

CUDA = """
#include "vectors.cuh"
#define LESS(a, b) ((a) < (b))
constexpr int BLOCK = 256;

// a < b
template <class T, int WIDTH> struct Pair {
    T first, second;
    __device__ Pair(T a, T b) : first(a + 1), second(b) {}
};

template <class T>
__global__ void __launch_bounds__(BLOCK, 2) kernel(const T* x, T* y, long long n, long long row_stride,
                                                          long long column_stride) {
    using C = Compute<T>;
    __shared__ C parts[32];
    const long long first = blockIdx.x * (long long)BLOCK + threadIdx.x;
    C sum = 0;
#pragma unroll 4
    for (long long i = first; i < n && i != 7; i += BLOCK) {
        if (i == 5) continue;
        sum += C(x[i * row_stride]) > C(0) ? C(x[i]) : -C(y[i]);
    }
    asm volatile("bar.sync 0, 1;" ::: "memory");
    parts[threadIdx.x] = maximum(sum, C(2));
    __syncthreads();
    Pair<C, 4> pair(sum, static_cast<C>(parts[0xff & 31]));
    y[first] = T(__shfl_xor_sync(~0u, pair.first, 16));
}
int host(int n) { return n + 1; }
"""

OF_CUDA = [
    ("+ to -", "+", "-"),
    ("64 bits dropped", "(long long)", ""),
    ("boundary", "<", "<="),
    ("comparison turned round", "<", ">="),
    ("&& to ||", "&&", "||"),
    ("comparison turned round", "!=", "=="),
    ("+= to -=", "+=", "-="),
    ("statement dropped", "continue;", ";"),
    ("statement dropped", "sum += C(x[i * row_stride]) > C(0) ? C(x[i]) : -C(y[i]);", ";"),
    ("stride of another axis", "row_stride", "column_stride"),
    ("boundary", ">", ">="),
    ("branches swapped", "C(x[i]) : -C(y[i])", "-C(y[i]) : C(x[i])"),
    ("negation dropped", "-", ""),
    ("precision lowered", "C(x[i])", "C(float(__half(float(x[i]))))"),
    ("maximum to minimum", "maximum", "minimum"),
    ("barrier dropped", "__syncthreads();", ";"),
    ("constant changed", "0xff", "0x7f"),
    ("& to |", "&", "|"),
    ("constant changed", "16", "17"),
    ("constant changed", "16", "15"),
    ("__shfl_xor_sync to __shfl_down_sync", "__shfl_xor_sync", "__shfl_down_sync"),
    ("negation dropped", "~", ""),
]


def named(mutants: list[Mutant]) -> list[tuple[str, str, str]]:
    return [(mutant.operator, mutant.before, mutant.after) for mutant in mutants]


@pytest.mark.parametrize(("operator", "before", "after"), OF_TRITON)
def test_triton_mutant_is_made(operator: str, before: str, after: str) -> None:
    assert (operator, before, after) in named(triton_mutants("kernel.py", TRITON))


@pytest.mark.parametrize(("operator", "before", "after"), OF_CUDA)
def test_cuda_mutant_is_made(operator: str, before: str, after: str) -> None:
    assert (operator, before, after) in named(cuda_mutants("kernel.cu", CUDA))


def test_each_triton_mutant_parses_and_differs_in_one_statement() -> None:
    def statements(text: str) -> list[str]:
        tree = ast.parse(text)
        return [
            ast.dump(node.test if isinstance(node, ast.If) else node.iter if isinstance(node, ast.For) else node)
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef)
        ]

    original = statements(TRITON)
    for mutant in triton_mutants("kernel.py", TRITON):
        changed = statements(mutant.text)
        assert len(changed) == len(original), mutant.diff(TRITON)
        assert sum(a != b for a, b in zip(changed, original)) == 1, mutant.diff(TRITON)


def test_operands_of_a_changed_sign_stay_together() -> None:
    kernel = "import triton\n@triton.jit\ndef kernel(a, b, c):\n    a = (a - b) * c + a * (b + c) * 2\n"
    signs = [mutant.text for mutant in triton_mutants("", kernel) if " to " in mutant.operator]
    values = {eval(text.splitlines()[3].partition("= ")[2], {"a": 7, "b": 3, "c": 5}) for text in signs}
    a, b, c = 7, 3, 5
    assert values == {
        (a + b) * c + a * (b + c) * 2,
        (a - b + c) + a * (b + c) * 2,
        (a - b) * c - a * (b + c) * 2,
        (a - b) * c + (a + (b + c)) * 2,
        (a - b) * c + a * (b - c) * 2,
        (a - b) * c + (a * (b + c) + 2),
    }  # fmt: skip


# Run in a new process: the command selects Triton's interpreter before it imports Triton.
FUNCTIONS = """
import sys
from fourfold.mutation.__main__ import arguments, mutants_of

mutants, _ = mutants_of(arguments(sys.argv[2:]), None)
print(*{mutant.function for mutant in mutants if mutant.file == sys.argv[1]})
"""


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("operation", "backend", "file", "used", "unused"),
    [
        # elementwise.cuh, which vector_add includes, names `load`, `store` and `unpack`, and these name the others.
        ("vector_add", "cuda", "vectors.cuh", {"load", "store", "bits", "unpack", "unpacked"}, {"store_streaming"}),
        # giou uses the `load` of its boxes, not this one.
        pytest.param(*("giou", "cuda", "vectors.cuh", set(), {"load", "store"}), marks=pytest.mark.full),
        pytest.param(
            *("softmax", "cuda", "vectors.cuh", {"load", "store_streaming", "bits", "unpack", "unpacked"}, set()),
            marks=pytest.mark.full,
        ),
        ("layer_norm", "triton", "triton_rows.py", {"row_offsets", "load_tile", "load_parameter"}, set()),
        pytest.param(
            *("softmax", "triton", "triton_rows.py", {"row_offsets"}, {"load_tile", "load_parameter"}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("rms_norm", "cuda", "rows.cuh", {"row_offset", "take", "sum_over_row"}, set()), marks=pytest.mark.full
        ),
        # Its kernels are all another operation's.
        (
            *("attention_with_lse", "triton", "attention/triton_kernel.py"),
            *({"attention_forward_kernel", "attention_delta_kernel", "place_of"}, set()),
        ),
        pytest.param(
            *("paged_attention", "triton", "attention/triton_kernel.py"),
            *({"product_of_rows"}, {"attention_forward_kernel", "place_of"}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("ciou_loss", "cuda", "giou/measures.cuh", {"angle_of", "score_of"}, set()), marks=pytest.mark.full
        ),
        pytest.param(
            *("ciou_loss", "cuda", "giou_loss/cuda_kernel.cu", {"giou_loss_forward_kernel"}, set()),
            marks=pytest.mark.full,
        ),
    ],
)
def test_mutants_of_a_shared_file_are_those_of_functions_that_the_operation_uses(
    operation: str, backend: str, file: str, used: set[str], unused: set[str]
) -> None:
    options = ["--op", operation, "--backend", backend]
    done = subprocess.run(
        [sys.executable, "-c", FUNCTIONS, file, *options], capture_output=True, text=True, cwd=ROOT, check=True
    )
    functions = set(done.stdout.split())
    assert used <= functions
    assert not unused & functions


@pytest.mark.parametrize(("make", "text"), [(triton_mutants, TRITON), (cuda_mutants, CUDA)], ids=["triton", "cuda"])
def test_only_kernels_are_changed_and_no_two_mutants_are_alike(make, text: str) -> None:
    mutants = make("kernel", text)
    assert len({mutant.identity for mutant in mutants}) == len({mutant.text for mutant in mutants}) == len(mutants)
    changed = [line for mutant in mutants for line in mutant.diff(text).splitlines()[3:] if line[0] == "-"]
    assert changed
    untouched = (
        "docstring",
        "#define",
        "#include",
        "#pragma",
        "asm",
        "host",
        "// a",
        "template",
        "n + 1",
        "@",
        "BLOCK, 2",
    )
    assert not [line for line in changed if any(part in line for part in untouched)]


def test_identity_outlives_edits_elsewhere() -> None:
    before = {mutant.identity for mutant in triton_mutants("kernel.py", TRITON)}
    after = {mutant.identity for mutant in triton_mutants("kernel.py", "# longer\n\n" + TRITON)}
    assert before == after


def test_diff_makes_the_mutant_of_the_original(tmp_path: pathlib.Path) -> None:
    mutant = triton_mutants("kernel.py", TRITON)[10]
    (tmp_path / "kernel.py").write_text(TRITON)
    command = ["git", "apply", "--unidiff-zero", "-p0", "-"]
    subprocess.run(command, input=mutant.diff(TRITON), text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "kernel.py").read_text() == mutant.text


# ---- the list of equivalent mutants

LIST = """
[["kernel.py".equivalent]]
operator = "negation dropped"
before = "-x"
reason = "x is 0"
"""


def listed(tmp_path: pathlib.Path, text: str) -> list[known.ReviewedMutant]:
    (tmp_path / "list.toml").write_text(text)
    return known.read_list(tmp_path / "list.toml")


def test_listed_mutant_that_survives_is_no_problem(tmp_path: pathlib.Path) -> None:
    mutants = triton_mutants("kernel.py", TRITON)
    (negation,) = [mutant for mutant in mutants if mutant.operator == "negation dropped"]
    found, problems = known.classify(listed(tmp_path, LIST), mutants, {negation.identity: "survived"})
    assert list(found) == [negation.identity]
    assert not problems


def test_listed_mutant_that_is_killed_or_that_there_is_not_is_a_problem(tmp_path: pathlib.Path) -> None:
    mutants = triton_mutants("kernel.py", TRITON)
    entries = listed(tmp_path, LIST + LIST.replace("-x", "-y"))
    _, problems = known.classify(entries, mutants, {mutant.identity: "killed" for mutant in mutants})
    assert ["but killed" in problem for problem in problems] == [True, False]
    assert "no such mutant" in problems[1]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('reason = "x is 0"\n', "", "no reason"),
        ('operator = "negation dropped"\n', "", "no operator"),
        ('"kernel.py".', "", r"\[\[equivalent\]\] names no file"),
        ("equivalent", "unkown", "unknown kind"),
        ("before", "befor", r"befor\?"),
    ],
)
def test_list_without_a_reason_or_a_place_is_refused(old: str, new: str, says: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(known.ListError, match=says):
        listed(tmp_path, LIST.replace(old, new))


def test_each_entry_of_the_repositorys_list_speaks_of_a_mutant() -> None:
    entries, problems, files = known.read_list(EQUIVALENT), [], set()
    for language in ("triton", "cuda"):
        texts: dict[str, str] = {}
        for operation in operations():
            texts |= sources(operation, language)
        problems += known.classify(entries, mutants_of_files(texts, language), {})[1]
        files |= texts.keys()
    assert not problems
    assert {file for entry in entries for file in entry.alternatives("file")} <= files


# ---- trials, in a process that has not imported a kernel

KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def never_called(x):
    return x + 1


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(output_ptr + at, x + y, mask=at < n)


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        output = torch.empty(x.shape, dtype=x.dtype)
        if output.numel():
            add_kernel[(triton.cdiv(x.numel(), 512),)](x.contiguous(), y.contiguous(), output, x.numel(), BLOCK=512)
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), grad.clone()


def add(x, y):
    return Add.apply(x, y)
"""

TRIALS = """
import json, os, pathlib, sys
os.environ["TRITON_INTERPRET"] = "1"
import dataclasses
from fourfold.engine.cells import Candidate
from fourfold.mutation import trial
from fourfold.mutation.__main__ import main
from fourfold.mutation.triton_mutants import triton_mutants

directory = pathlib.Path(sys.argv[1])
NEVER, SOON = 600.0, 0.1
trial.GRACE_SECONDS = NEVER
text = (directory / "kernels.py").read_text()
candidate = Candidate("vector_add", str(directory / "kernels.py"), "add")
trials = trial.Trials("vector_add", "candidate", candidate, ["float32"], 2, directory / "trials", quick=True)
unmutated = trials.unmutated()
some = triton_mutants(candidate.place, text)
inside = next(mutant for mutant in some if mutant.function == "add_kernel")
outside = next(mutant for mutant in some if mutant.function == "never_called")
sum_line = "    tl.store(output_ptr + at, x + y, mask=at < n)"
texts = {
    "right": text.replace("x + y,", "y + x,"),
    "wrong": text.replace("x + y,", "x - y,"),
    "reads outside": text.replace("y_ptr + at, mask=at < n", "y_ptr + at, mask=at <= n"),
    "hangs": text.replace(sum_line, "    while True:\\n        pass"),
    "crashes": text.replace(sum_line, "    import os, signal\\n    os.kill(os.getpid(), signal.SIGSEGV)"),
    "exits": text.replace(sum_line, "    import os\\n    os._exit(0)"),
    "raises": text.replace(sum_line, "    raise SystemExit"),
    "refused": text.replace("x + y,", "x +,"),
}
fork = trials._fork

def with_little_grace(body, limit, mutant):
    def limit_of_started(step):
        trial.GRACE_SECONDS = NEVER if step is None else SOON
        return limit(step)

    yield from fork(body, limit_of_started, mutant)
    trial.GRACE_SECONDS = NEVER

outcomes = {}
for name, changed in texts.items():
    trials._fork = with_little_grace if name == "hangs" else fork
    outcomes[name] = trials.outcome(dataclasses.replace(inside, text=changed), unmutated)
outcomes["not reached"] = trials.outcome(outside, unmutated)
(directory / "kernels.py").write_text(texts["wrong"])
try:
    trials.unmutated()
except trial.UnmutatedFailed as error:
    outcomes["wrong from the start"] = trial.TrialResult(status="refused", reason=str(error))
(directory / "kernels.py").write_text(text)
command = ["--candidate", f"vector_add={candidate.place}:add", "--function", "add_kernel", "--dtype", "float32"]
command += ["--quick", "--examples", "2", "--sample", "8", "--known", str(directory / "list.toml")]
status = main([*command, "--report", str(directory / "report.json")])
steps = [step.name for step in trials.steps]
print(json.dumps({"status": status, "steps": steps, **{name: vars(outcome) for name, outcome in outcomes.items()}}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the outcomes by kernel, and "status", "report" and "printed" of the command."""
    directory = tmp_path_factory.mktemp("mutation")
    (directory / "kernels.py").write_text(KERNELS)
    command = [sys.executable, "-c", TRIALS, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *printed, told = done.stdout.splitlines()
    report = json.loads((directory / "report.json").read_text())
    return {**json.loads(told), "report": report["outcomes"], "printed": "\n".join(printed)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "status", "by"),
    [
        ("right", "survived", ""),
        ("wrong", "killed", "forward float32, case one_number_without_axes"),
        ("reads outside", "killed", "forward float32, case one_number_without_axes"),
        ("hangs", "killed", "time limit in forward float32"),
        ("crashes", "killed", "crash in forward float32"),
        ("exits", "killed", "crash in forward float32"),
        ("raises", "killed", "forward float32, case one_number_without_axes"),
        ("refused", "invalid", ""),
        ("not reached", "not reached", ""),
    ],
)
def test_outcome(kernel: str, status: str, by: str, outcomes: dict) -> None:
    assert outcomes[kernel]["status"] == status, outcomes[kernel]
    assert outcomes[kernel]["by"].startswith(by)


@pytest.mark.full
def test_quick_trials_run_the_checks_that_reject_most(outcomes: dict) -> None:
    assert outcomes["steps"] == ["forward", "backward", "memory", "offsets"]


REFUSED = """
import dataclasses, json, os, pathlib, sys
os.environ["TRITON_INTERPRET"] = "1"
from fourfold.mutation import trial
from fourfold.mutation.__main__ import arguments, mutants_of

trials = trial.Trials("vector_add", "cuda", None, ["float64"], 1, pathlib.Path(sys.argv[1]), quick=True)
unmutated = trials.unmutated()
mutant = mutants_of(arguments(["--op", "vector_add", "--backend", "cuda"]), None)[0][0]
refused = dataclasses.replace(mutant, text=mutant.text + "\\nundeclared;\\n")
print(json.dumps(vars(trials.outcome(refused, unmutated))))
"""


@pytest.mark.full
def test_what_the_compiler_refuses_is_no_mutant_by_whichever_name_it_is_called(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", REFUSED, str(tmp_path / "trials")]
    named = {**os.environ, "CXX": shutil.which(os.environ.get("CXX") or "g++") or ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=named)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["status"] == "invalid", outcome
    assert outcome["reason"].startswith("CompilationError: cuda_kernel.cu does not compile for the CPU"), outcome


COMPILED = """
import json, os, pathlib, sys
os.environ["TRITON_INTERPRET"] = "1"
from fourfold.mutation import trial
from fourfold.mutation.__main__ import arguments, mutants_of

directory, log = map(pathlib.Path, sys.argv[1:])
trials = trial.Trials("vector_add", "cuda", None, ["float64", "float16"], 1, directory / "unmutated", quick=True)
unmutated = trials.unmutated()
trials.directory = directory / "worker"
dropped = [m for m in mutants_of(arguments(["--op", "vector_add", "--backend", "cuda"]), None)[0]
           if m.function == "elementwise" and m.operator == "statement dropped"]
trials.outcome(dropped[0], unmutated)
log.write_text("")
outcome = trials.outcome(dropped[1], unmutated)
print(json.dumps({"by": outcome.by, "launched": sorted(unmutated.launched[0]), "log": log.read_text().splitlines()}))
"""


@pytest.mark.full
def test_of_a_mutant_only_what_its_trial_launches_is_compiled(tmp_path: pathlib.Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    units = 'for a; do case "$a" in *.cpp) echo "unit $a"; grep -o "FOURFOLD_KERNEL(.*)" "$a";; esac; done'
    real = shutil.which(os.environ.get("CXX") or "g++")
    compiler.write_text(f'#!/bin/sh\n({units}) >> "{log}"\nexec "{real}" "$@"\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-c", COMPILED, str(tmp_path / "trials"), str(log)]
    logged = {**os.environ, "CXX": str(compiler)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=logged)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["by"].startswith("forward float64"), found
    # Only the kernels' unit is compiled: the runtime's was compiled for the mutant before.
    assert sum(line.startswith("unit ") for line in found["log"]) == 1, found
    kernels = [line.removeprefix("FOURFOLD_KERNEL(")[:-1] for line in found["log"] if line.startswith("FOURFOLD")]
    assert kernels == found["launched"]
    assert kernels
    assert all("double" in kernel for kernel in kernels)


@pytest.mark.full
def test_kernels_that_do_not_pass_as_they_are_have_no_mutants(outcomes: dict) -> None:
    assert "forward float32, case one_number_without_axes: " in outcomes["wrong from the start"]["reason"]


@pytest.mark.full
def test_command_reports_every_mutant_and_fails_where_one_survives_that_is_not_listed(outcomes: dict) -> None:
    rows = outcomes["report"]
    survivors = [row for row in rows if row["status"] == "survived"]
    assert len(rows) == 8
    assert {row["status"] for row in rows} <= {"killed", "survived"}
    assert len(survivors) <= 2, survivors
    assert outcomes["status"] == bool(survivors)
    assert "8 mutants in" in outcomes["printed"]
    assert outcomes["printed"].count("survived: ") == len(survivors)


def test_a_case_that_a_check_has_no_use_for_is_left_out() -> None:
    cases = {name: Case({}, np.full(1, value)) for name, value in (("none", 0.0), ("some", 1.0))}
    seen: list[float] = []

    def body(case: Case) -> None:
        need(case.grad_output.any())
        seen.extend(case.grad_output)

    trial.FixedSearch(examples=len(cases), named_cases=cases, selects=lambda name: True).cases(None, "forward", body)
    assert seen == [1.0]


def test_a_check_that_is_repeated_by_wider_bounds_has_the_same_cases() -> None:
    given = trial.FixedSearch(examples=1, named_cases={"none": Case({}, np.zeros(1))}, selects=lambda name: True)
    assert dataclasses.replace(given, keeps=False).named_cases is given.named_cases


@pytest.mark.full
@pytest.mark.parametrize(
    ("operation", "backend", "dtypes"),
    # scaled_matmul has no gradients, and no results in float64.
    [
        ("vector_add", "triton", "float64"),
        ("vector_add", "cuda", "float64"),
        ("scaled_matmul", "triton", "float32 float64"),
    ],
)
def test_the_kernels_of_an_operation_pass_every_check_as_they_are(
    operation: str, backend: str, dtypes: str, tmp_path: pathlib.Path
) -> None:
    chosen = ["--op", operation, "--backend", backend, "--examples", "2", "--sample", "1"]
    chosen += [word for dtype in dtypes.split() for word in ("--dtype", dtype)]
    command = [sys.executable, "-m", "fourfold.mutation", *chosen, "--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True)
    assert "as they are the kernels pass" in done.stdout, done.stdout + done.stderr
    # Entries for functions of a shared file that only other operations use are not reported as missing.
    assert "there is no such mutant" not in done.stdout
    assert len(json.loads((tmp_path / "report.json").read_text())["outcomes"]) == 1


OF_CLAIMS = """
import os, pathlib, sys
os.environ["TRITON_INTERPRET"] = "1"
from fourfold.mutation import trial
from fourfold.engine.cells import Candidate

directory = pathlib.Path(sys.argv[1])
candidate = Candidate("vector_add", str(directory / "kernels.py"), "add")
dtypes = ["float32", "float16"]
trials = trial.Trials("vector_add", "candidate", candidate, dtypes, 2, directory / "trials", quick=False)
trials.steps = tuple(step for step in trials.steps if step.name in ("forward", "backward"))
assert {step.name for step in trials.steps} == {"forward", "backward"}
trials.unmutated()
print("passed")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("claims", "passes"), [('gradients=False, dtypes=("float32",)', True), ("gradients=False", False)]
)
def test_claims_of_the_source_are_heard(claims: str, passes: bool, tmp_path: pathlib.Path) -> None:
    forward_alone = f"""
import fourfold


@fourfold.claims({claims})
def add(x, y):
    if x.dtype != torch.float32:
        raise AttributeError("no kernel for this dtype")
    return Add.apply(x.detach(), y.detach())
"""
    (tmp_path / "kernels.py").write_text(KERNELS + forward_alone, encoding="utf-8")
    command = [sys.executable, "-c", OF_CLAIMS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("passed" in done.stdout) is passes, done.stderr
