"""What pytest is told here: options, which cells there are, and the table that closes a run."""

import os

# Before NumPy is imported: the tiles that the interpreter multiplies are small, and threads that wait for one another
# on a busy machine take longer over them than one alone.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from properties import isolation
from properties.case import Case
from properties.cells import CANDIDATE, Cell, Selection, SelectionError
from properties.checks import Search, Subject, Unsupported
from properties.isolation import BLACK_BOX
from properties.matrix import Matrix
from properties.operation import Law, operations
from properties.performance.plugin import Performance, add_options, is_benchmark
from properties.progress import ProgressReporter
from properties.verdict import DEVICE, SEARCH, Verdict, skip_reason, tell

hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
# The same cases every time: a pull request fails by what it changes.
hypothesis.settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("nightly", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# Of a GPU's memory: a context, compiled kernels, and what a test holds.
WORKER_BYTES = 3 << 30
# What a worker may hold between its tests, to spare asking for it again.
KEPT_BYTES = 1 << 30
# The backends that are not torch.
KERNELS = ("triton", "cuda")
SELECTION = pytest.StashKey[Selection]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(isolation, "fourfold-isolation")
    group = parser.getgroup("fourfold", "verification of kernels")
    group.addoption("--op", action="append", default=[], metavar="NAME", help="only this operation (repeatable)")
    group.addoption("--backend", action="append", default=[], metavar="NAME", help="only this backend (repeatable)")
    group.addoption("--dtype", action="append", default=[], metavar="NAME", help="only this dtype (repeatable)")
    group.addoption("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if there is one")
    group.addoption("--examples", type=int, metavar="N", help="generated cases a check, in place of the profile's")
    group.addoption(
        "--candidate",
        action="append",
        default=[],
        metavar="OP=FILE_OR_MODULE:FUNCTION",
        help="verify this implementation of an operation (repeatable)",
    )
    group.addoption("--forward-only", action="store_true", help="candidates need not have gradients")
    group.addoption("--forbid-fallback", action="store_true", help="candidates must not compute by torch's operators")
    group.addoption("--verdict", type=Path, metavar="FILE", help="write what each check came to as JSON")
    add_options(parser)
    group.addoption("--reproduce", metavar="BLOB", help="run the one generated case that a failure has named")


def pytest_configure(config: pytest.Config) -> None:
    only = "only(backends=, dtypes=, devices=, tuned=, kernels=, batched=): the cells that a test is about"
    config.addinivalue_line("markers", only)
    device = chosen_device(config)
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no GPU")
    examples = config.getoption("examples")
    if examples is not None and examples < 1:
        raise pytest.UsageError(f"--examples must be at least 1, not {examples}")
    config.stash[DEVICE] = device
    # Triton reads it when it is imported, which nothing has done yet.
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if device == "cuda":
        # Left to themselves, cuBLAS's split products of half types are summed in the half type.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if worker:
            torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())
    elif worker:
        torch.set_num_threads(1)  # the workers are as many as the cores
    try:
        selected = [config.getoption(name) for name in ("op", "backend", "dtype")]
        config.stash[SELECTION] = Selection.of(operations(), config.getoption("candidate"), *selected)
        for candidate in config.stash[SELECTION].candidates.values():
            candidate.load()
    except SelectionError as error:
        raise pytest.UsageError(str(error)) from error
    record = Record(config)
    config.pluginmanager.register(record, "fourfold-record")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ProgressReporter(config), "fourfold-progress")
    performance = Performance(config, config.stash[SELECTION], device, record.matrix)
    config.pluginmanager.register(performance, "fourfold-performance")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """As many as there are cores, in turn on each GPU, while there is memory for them; without one, as xdist thinks.

    Most of a test's time is the host's: a GPU has room for many.
    """
    if chosen_device(config) != "cuda":
        return None
    devices = torch.cuda.device_count()
    room = sum(torch.cuda.get_device_properties(device).total_memory // WORKER_BYTES for device in range(devices))
    return max(devices, min(len(os.sched_getaffinity(0)), room))


def chosen_device(config: pytest.Config) -> str:
    """What --device says; xdist asks before the configuration is made."""
    device = config.getoption("device")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    where = torch.cuda.get_device_name() if device == "cuda" else "no GPU: Triton interpreted, CUDA C++ emulated"
    profile = hypothesis.settings.get_current_profile_name()
    return f"fourfold: {where}; torch {torch.__version__}; {examples(config)} examples a check ({profile})"


def examples(config: pytest.Config) -> int:
    """Generated cases of each check."""
    given = config.getoption("examples")
    return hypothesis.settings().max_examples if given is None else given


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take a cell run for every selected one, those that take a law for every law of its operation."""
    if "cell" not in metafunc.fixturenames:
        return
    selection = metafunc.config.stash[SELECTION]
    only = {key: value for mark in metafunc.definition.iter_markers("only") for key, value in mark.kwargs.items()}
    if metafunc.config.stash[DEVICE] not in only.get("devices", [metafunc.config.stash[DEVICE]]):
        why = pytest.mark.skip(reason=f"needs --device {' or '.join(only['devices'])}")
        metafunc.parametrize("cell", [pytest.param(None, id="none", marks=why)])
        return
    cells = [
        cell
        for cell in selection.cells
        if cell.dtype in only.get("dtypes", [cell.dtype])
        and cell.backend in only.get("backends", [cell.backend])
        and (not only.get("tuned") or selection.tuned(cell))
        and (not only.get("kernels") or computes(cell, metafunc.config))
        and (not only.get("batched") or selection.operations[cell.operation].batched)
    ]
    if "law" in metafunc.fixturenames:
        pairs = [(cell, law) for cell in cells for law in selection.operations[cell.operation].laws]
        metafunc.parametrize("cell,law", pairs, ids=[f"{cell}-{law.__name__}" for cell, law in pairs])
    else:
        metafunc.parametrize("cell", cells, ids=str)


def computes(cell: Cell, config: pytest.Config) -> bool:
    """Whether a cell's implementation is to compute for itself, and not by torch."""
    return cell.backend in (KERNELS if not config.getoption("forbid_fallback") else (*KERNELS, CANDIDATE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.stash[SELECTION].narrowed:
        chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            chosen[Cell.of_test(item.nodeid) is not None or is_benchmark(item)].append(item)
        if chosen[False]:
            config.hook.pytest_deselected(items=chosen[False])
            items[:] = chosen[True]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where kernels run: "cpu" or "cuda"."""
    return pytestconfig.stash[DEVICE]


@pytest.fixture
def cell() -> Cell:
    """The cell that a test is for."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def law() -> Law:
    """The law that a test is for."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def note(pytestconfig: pytest.Config) -> Callable[[Case], None]:
    """To be told of each case before it is run: what is left to be known where it ends the process."""
    box = pytestconfig.stash[BLACK_BOX]
    return lambda case: box.case(repr(case))


@pytest.fixture
def subject(pytestconfig: pytest.Config, cell: Cell, device: str, note: Callable[[Case], None]) -> Subject:
    """The implementation that a test is for; skips, saying why, where it cannot run here."""
    selection = pytestconfig.stash[SELECTION]
    if reason := selection.unsupported(cell, device):
        pytest.skip(reason)
    return selection.subject(cell, device, note)


@pytest.fixture
def search(pytestconfig: pytest.Config, note: Callable[[Case], None]) -> Search:
    """How hard a check looks, and what it saw."""
    return Search(examples=examples(pytestconfig), blob=pytestconfig.getoption("reproduce"), note=note)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A GPU's memory that a test has done with is for the tests of other processes."""
    is_worker = hasattr(item.config, "workerinput")
    if is_worker and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """What an implementation cannot be put through is skipped, and the reason told."""
    try:
        return (yield)
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed check shows the case and the command that repeats it, in place of the way through the machinery."""
    search = getattr(item, "funcargs", {}).get("search")
    if call.when == "call" and search is not None:
        seen = {"worst": search.worst, "examples": search.ran, "seconds": search.seconds}
        item.user_properties.append((SEARCH, seen))
    report = yield
    if report.failed and call.excinfo is not None and Cell.of_test(item.nodeid) is not None:
        tell(item, report, call.excinfo.value)
    return report


class Record:
    """Tallies the reports, of this process or of the workers, and closes the run with the table."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.matrix, self.verdict = config, Matrix(), Verdict()
        self.is_worker = hasattr(config, "workerinput")
        self.path: Path | None = None if self.is_worker else config.getoption("verdict")
        if self.path is not None:
            self.path.unlink(missing_ok=True)  # an old one must not be taken for this run's

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count what a test came to."""
        cell = Cell.of_test(report.nodeid)
        if cell is None or (report.when != "call" and report.passed):
            return
        self.verdict.add(cell, report)
        tally = self.matrix.of(cell)
        if report.skipped:
            reason = skip_reason(report)
            tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
        else:
            tally.failed += report.failed
            tally.passed += report.passed
        for name, seen in report.user_properties if report.when == "call" else ():
            if name == SEARCH:
                tally.worst = max(tally.worst, seen["worst"])
                tally.examples += seen["examples"]
                tally.seconds += seen["seconds"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A candidate has passed where every check has, and none was left out."""
        if self.is_worker:
            return
        left_out = self.verdict.unsupported() and not self.config.getoption("forward_only")
        if self.config.getoption("candidate") and left_out and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path is not None:
            about = {
                "device": torch.cuda.get_device_name() if self.config.stash[DEVICE] == "cuda" else "cpu",
                "examples_a_check": examples(self.config),
                "candidates": self.config.getoption("candidate"),
            }
            self.verdict.write(self.path, session.exitstatus == pytest.ExitCode.OK, about)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        if self.matrix.tallies and not self.is_worker:
            terminalreporter.section("verified", sep="=")
            for line in self.matrix.lines():
                terminalreporter.line(line)
