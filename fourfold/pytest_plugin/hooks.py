"""What pytest is told here: options, which cells there are, and the table that closes a run."""

import contextlib
import os

# Before NumPy is imported: the tiles that the interpreter multiplies are small, and threads that wait for one another
# on a busy machine take longer over them than one alone.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import zlib
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from fourfold.backends.triton import compilation
from fourfold.backends.tuning import Configuration
from fourfold.candidates.integrity.escapes import hear_ctrl_c, held
from fourfold.candidates.integrity.watch import WATCH, ProgramWatch
from fourfold.candidates.process.client import CALL_SECONDS, UntrustedFunction
from fourfold.candidates.process.session import end_all
from fourfold.checks.catalogue import ALL, PLAIN, Check, named, outputs_for
from fourfold.checks.outputs import of_output, together
from fourfold.checks.search import Search, Subject
from fourfold.compat import xdist_internals
from fourfold.engine import profiles
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.exact_math import compute_exactly
from fourfold.engine.shortcomings import listed
from fourfold.instruments.line_coverage import Executed
from fourfold.instruments.line_recorder import recorder
from fourfold.instruments.tampering import Tampered, random_state_kept
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import BRIEFLY, NOT_MADE, Unsupported
from fourfold.operations.record import Law, Operation
from fourfold.operations.refusals import Refusals
from fourfold.pytest_plugin import isolation
from fourfold.pytest_plugin.account import NEVER, Account, is_of_all_checks
from fourfold.pytest_plugin.failures import DEVICE, FAILURE, SEARCH, SELECTION, refer, tell
from fourfold.pytest_plugin.identity import Identity
from fourfold.pytest_plugin.isolation import BLACK_BOX, LEFT_BEHIND, LINES
from fourfold.pytest_plugin.leftover_threads import LeftBehind
from fourfold.pytest_plugin.paths import file_to_write
from fourfold.pytest_plugin.preparation import chosen_device, prepare
from fourfold.pytest_plugin.progress import ProgressReporter
from fourfold.pytest_plugin.table import Matrix
from fourfold.pytest_plugin.wrong_cells import WrongCells

# Of a GPU's memory: a context, compiled kernels, and what a test holds.
WORKER_BYTES = 3 << 30
# What a worker may hold between its tests, to spare asking for it again.
KEPT_BYTES = 1 << 30
# The backends that are not torch.
KERNELS = ("triton", "cuda")
TABLE = pytest.StashKey[Matrix]()
# The cells of candidates that are known to be wrong.
WRONG = pytest.StashKey[WrongCells]()
# The packages whose warnings are errors in CI.
OWN = ("fourfold", "tests", "conftest")
# How warnings begin that nothing can be kept in a folder that the user must not write to: pytest's, of the seconds
# of each test and of what failed last, and Hypothesis's, of its cases.
OF_CACHES = ("could not create cache path", "cache could not write path", "The database setting is not configured")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(isolation, "fourfold-isolation")
    pluginmanager.register(isolation.TrialImport(), "fourfold-trial-import")
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
    group.addoption(
        "--claims",
        metavar="CLAIMS",
        help='what candidates claim, as in contiguous=True, sizes={"cols": (1, 1024)}, accuracy="storage"',
    )
    group.addoption("--no-refusals", action="store_true", help="a candidate's exception for a valid case is a failure")
    group.addoption(
        "--strict-errors", action="store_true", help="candidates must raise the operation's declared errors"
    )
    group.addoption(
        "--untrusted",
        action="store_true",
        help="run candidates in a process of their own, which cannot change what judges them",
    )
    group.addoption(
        "--untrusted-where-possible",
        action="store_true",
        help="the same for functions of Python on the CPU; run others in this process",
    )
    group.addoption(
        "--call-seconds",
        type=float,
        default=CALL_SECONDS,
        metavar="S",
        help=f"with --untrusted: what a call may take, {CALL_SECONDS:g} unless told",
    )
    group.addoption(
        "--compile-seconds",
        type=float,
        default=compilation.SECONDS,
        metavar="S",
        help=f"on a GPU: what Triton's compiler may take for a kernel, {compilation.SECONDS:g} unless told",
    )
    group.addoption("--verdict", type=Path, metavar="FILE", help="write what each check came to as JSON")
    group.addoption(
        "--executed",
        action="store_true",
        help="name the lines that never ran, of the library's own kernels too, whatever the run leaves out",
    )
    group.addoption("--reproduce", metavar="BLOB", help="run the one generated case that a failure has named")


def pytest_configure(config: pytest.Config) -> None:
    only = "only(backends=, dtypes=, devices=, kernels=, batched=, whole=, plain=): the cells that a test is about"
    full = "full: a test that the profiles full and nightly run, and the default profile leaves out"
    check = "check(name): the check that a test makes, whose dtypes, devices and number of examples it takes"
    decisive = "decisive: a candidate that has failed here is known to be wrong, and other checks are brief"
    for marker in (only, check, decisive, full):
        config.addinivalue_line("markers", marker)
    if os.environ.get("CI"):
        for package in OWN:
            config.addinivalue_line("filterwarnings", rf"error:::{package}\b")
    for warning in OF_CACHES:
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    for name in ("call_seconds", "compile_seconds"):
        if not config.getoption(name) > 0:
            raise pytest.UsageError(f"--{name.replace('_', '-')} must be above 0, not {config.getoption(name)}")
    if config.getoption("examples") is not None and config.getoption("examples") < 1:
        raise pytest.UsageError(f"--examples must be at least 1, not {config.getoption('examples')}")
    config.stash[LEFT_BEHIND] = LeftBehind()
    config.stash[WRONG] = WrongCells(isolation.folder_of_workers(config))
    hear_ctrl_c()
    prepare(config)
    share_the_machine(config.stash[DEVICE])
    limits = contextlib.ExitStack()
    limits.enter_context(compilation.compilation_limited(config.stash[DEVICE], config.getoption("compile_seconds")))
    config.add_cleanup(limits.close)
    if config.stash[DEVICE] == "cuda":  # on a CPU neighbours in one process share what the oracle gave
        xdist_internals.hand_out_one_by_one(config)
    record = RunReporter(config)
    runs_tests = not xdist_internals.is_controller(config)
    if config.getoption("candidate") and runs_tests and not config.getoption("untrusted"):
        config.stash[WATCH] = ProgramWatch(config, config.stash[SELECTION].operations)
    watches_lines = config.getoption("candidate") or config.getoption("executed")
    if watches_lines and runs_tests:
        of_cuda = any(each.is_cuda for each in config.stash[SELECTION].candidates.values())
        traces = config.stash[DEVICE] == "cpu" and (of_cuda or config.getoption("executed"))
        config.stash[LINES] = Executed(traces=traces)
        recorder.users += 1  # to the end of the process
    # With workers, each of them imports a candidate in the first test of it.
    if runs_tests and not xdist_internals.is_worker(config):
        isolation.import_before_tests(config)
    config.pluginmanager.register(record, "fourfold-record")
    if not xdist_internals.is_worker(config):
        config.pluginmanager.register(ProgressReporter(config), "fourfold-progress")
    config.stash[TABLE] = record.account.matrix


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """As many as there are cores, in turn on each GPU, while there is memory for them; without one, as xdist thinks.

    Most of a test's time is the host's: a GPU has room for many.
    """
    if chosen_device(config) != "cuda":
        return None
    devices = torch.cuda.device_count()
    room = sum(torch.cuda.get_device_properties(device).total_memory // WORKER_BYTES for device in range(devices))
    return max(devices, min(len(os.sched_getaffinity(0)), room))


def share_the_machine(device: str) -> None:
    """Let a worker take its part, and torch compute as exactly as kernels are to."""
    worker = xdist_internals.worker_number()
    if device == "cuda":
        compute_exactly()
        if worker is not None:
            torch.cuda.set_device(worker % torch.cuda.device_count())
    elif worker is not None:
        torch.set_num_threads(1)  # the workers are as many as the cores


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    where = torch.cuda.get_device_name() if device == "cuda" else "no GPU: Triton interpreted, CUDA C++ emulated"
    profile = hypothesis.settings.get_current_profile_name()
    return f"fourfold: {where}; torch {torch.__version__}; {examples(config)} examples a check ({profile})"


def examples(config: pytest.Config, own: bool = False) -> int:
    """Generated cases of each check; of this library's `own` implementations fewer under the default profile."""
    given = config.getoption("examples")
    return given if given is not None else profiles.examples(own)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take a cell run for every selected one, and for every law or configuration of it if they take one."""
    if "cell" not in metafunc.fixturenames:
        return
    selection = metafunc.config.stash[SELECTION]
    only = {key: value for mark in metafunc.definition.iter_markers("only") for key, value in mark.kwargs.items()}
    if check := check_of(metafunc.definition):
        only = {"devices": check.devices, "batched": check.batched} | only
    if metafunc.config.stash[DEVICE] not in only.get("devices", [metafunc.config.stash[DEVICE]]):
        why = pytest.mark.skip(reason=f"needs --device {' or '.join(only['devices'])}")
        metafunc.parametrize("cell", [pytest.param(None, id="none", marks=why)])
        return
    cells = [
        cell
        for cell in selection.cells
        if cell.dtype in only.get("dtypes", [cell.dtype])
        and cell.backend in only.get("backends", [cell.backend])
        and (not only.get("kernels") or computes(cell, metafunc.config))
        and (not only.get("batched") or selection.operations[cell.operation].batched)
        and (check is None or check.applies_to(selection.operations[cell.operation]))
    ]
    if check:
        cells = looked_at(cells, check, hypothesis.settings.get_current_profile_name() == profiles.NIGHTLY)
    if not profiles.is_full():
        cells = thinned(cells, only.get("plain", check.plain if check else PLAIN))
    if "law" in metafunc.fixturenames:
        triples = [
            (cell, law, output)
            for cell in cells
            for output in outputs_for(check, selection.operations[cell.operation])
            for law in record_of(selection.operations[cell.operation], output).laws
        ]
        named_by = [f"{_of(cell, output)}-{law.__name__}" for cell, law, output in triples]
        metafunc.parametrize("cell,law,output", triples, ids=named_by)
    elif "configuration" in metafunc.fixturenames:
        choices = [(cell, configuration) for cell in cells for configuration in selection.configurations(cell)]
        metafunc.parametrize("cell,configuration", choices, ids=[f"{cell}-{one.name}" for cell, one in choices])
    elif "output" in metafunc.fixturenames and not only.get("whole"):
        pairs = [(cell, name) for cell in cells for name in outputs_for(check, selection.operations[cell.operation])]
        metafunc.parametrize("cell,output", pairs, ids=[_of(cell, output) for cell, output in pairs])
    else:
        metafunc.parametrize("cell", cells, ids=str)


def record_of(operation: Operation, output: str) -> Operation:
    """The record of one of the outputs; of all of them without a name of one."""
    return operation.outputs.get(output, operation)


def _of(cell: Cell, output: str) -> str:
    return f"{cell}-{output.replace(' ', '_')}" if output else str(cell)


def check_of(test: pytest.Item) -> Check | None:
    """The check whose name a test is marked with."""
    mark = test.get_closest_marker("check")
    return named(*mark.args) if mark else None


def looked_at(cells: list[Cell], check: Check, nightly: bool) -> list[Cell]:
    """The cells of the dtypes that a check looks at.

    Where it looks at all of them under the nightly profile, a plain run looks at its `dtypes`, or at all of an
    operation and a backend where none of these is selected. What depends little on the dtype takes less time this way.
    """
    if check.only is not None:
        return [cell for cell in cells if cell.dtype == check.only]
    if not check.dtypes or (check.all_nightly and nightly):
        return cells
    if not check.all_nightly:
        return [cell for cell in cells if cell.dtype in check.dtypes]
    return of_dtypes(cells, check.dtypes)


def of_dtypes(cells: list[Cell], dtypes: Collection[str]) -> list[Cell]:
    """The cells of some dtypes, and all of an operation and backend that has none of these."""
    those = {(cell.operation, cell.backend) for cell in cells if cell.dtype in dtypes}
    return [cell for cell in cells if cell.dtype in dtypes or (cell.operation, cell.backend) not in those]


def thinned(cells: list[Cell], dtypes: Collection[str]) -> list[Cell]:
    """The cells of candidates, and those `of_dtypes` of this library's implementations; all where no dtype is named."""
    kept = set(of_dtypes(cells, dtypes)) if dtypes else set(cells)
    return [cell for cell in cells if cell.backend == CANDIDATE or cell in kept]


def computes(cell: Cell, config: pytest.Config) -> bool:
    """Whether a cell's implementation is to compute for itself, and not by torch."""
    return cell.backend in (KERNELS if not config.getoption("forbid_fallback") else (*KERNELS, CANDIDATE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not profiles.is_full():
        leave_out(config, items, [item for item in items if item.get_closest_marker("full")])
    if config.getoption("candidate"):
        # Its result decides whether the other checks are brief.
        items.sort(key=lambda item: item.get_closest_marker("decisive") is None)
    elif config.stash[DEVICE] == "cpu":
        side_by_side(items)
    elif xdist_internals.is_worker(config) and config.stash[DEVICE] == "cuda":
        items.sort(key=order_on_gpu)
    of_cells = {item: identity for item in items if (identity := Identity.of_item(item))}
    for item, identity in of_cells.items():
        item.user_properties.append(identity.property)
    if config.stash[SELECTION].narrowed:
        leave_out(config, items, [item for item in items if item not in of_cells and not is_benchmark(item)])


def leave_out(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    """Deselect the `others` of the items."""
    if others:
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]


def side_by_side(items: list[pytest.Item]) -> None:
    """Order the tests of cells by operation and dtype, so that one process asks the oracle once for all backends."""
    identities = [(place, item, Identity.of_item(item)) for place, item in enumerate(items)]
    of_cells = [(place, item, identity.cell) for place, item, identity in identities if identity]
    first: dict[tuple[str, str], int] = {}
    for place, _, cell in of_cells:
        first.setdefault((cell.operation, cell.dtype), place)
    wanted = sorted(of_cells, key=lambda each: first[each[2].operation, each[2].dtype])
    for (place, _, _), (_, item, _) in zip(of_cells, wanted):
        items[place] = item


def order_on_gpu(item: pytest.Item) -> tuple[int, int]:
    """How tests are ordered for workers that share a GPU, where most of the time is Triton's compiler's.

    Tests of no cell come first, in their own order. Of the others those come first that compile every configuration of
    a kernel, then Triton's. They are shuffled, always in the same way: neighbours need the same kernels, and workers
    that need one at the same time compile it once each.
    """
    identity = Identity.of_item(item)
    if identity is None:
        return 0, 0
    of_configuration = "configuration" in getattr(item, "fixturenames", ())
    return 1 if of_configuration else 2 if identity.cell.backend == "triton" else 3, zlib.crc32(item.nodeid.encode())


def is_benchmark(item: pytest.Item) -> bool:
    """Whether a test takes pytest-benchmark's fixture, by itself or through another."""
    return "benchmark" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where kernels run: "cpu" or "cuda"."""
    return pytestconfig.stash[DEVICE]


@pytest.fixture
def cell() -> Cell:
    """The cell that a test is for."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def output() -> str:
    """The name of the output that a test is for, where there are several: see `outputs_for`."""
    return ""


@pytest.fixture
def law() -> Law:
    """The law that a test is for."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def configuration() -> Configuration:
    """The configuration of a tuned kernel that a test is for."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def note(pytestconfig: pytest.Config) -> Callable[[Case], None]:
    """To be told of each case before it is run: what is left to be known where it ends the process."""
    box = pytestconfig.stash[BLACK_BOX]
    return lambda case: box.case(repr(case))


@pytest.fixture
def subject(
    request: pytest.FixtureRequest, cell: Cell, output: str, device: str, note: Callable[[Case], None]
) -> Subject:
    """The implementation that a test is for; skips, saying why, where it cannot run here."""
    selection = request.config.stash[SELECTION]
    if reason := selection.unsupported(cell, device):
        request.node.user_properties.append((NEVER, True))
        pytest.skip(reason)
    if LINES in request.config.stash and (cell.backend == CANDIDATE or request.config.getoption("executed")):
        function = selection.implementation(cell.operation, cell.backend)
        elsewhere = function if isinstance(function, UntrustedFunction) else None
        request.config.stash[LINES].watch(*selection.source(cell), device, elsewhere)
    made = selection.subject(cell, device, note)
    if output:
        made = together(made) if output == ALL else of_output(made, output)
    request.config.stash[BLACK_BOX].case("")  # which was to find out what it can do
    if cell.backend == CANDIDATE and WATCH in request.config.stash:
        request.config.stash[WATCH].hold_subject(made)
    return made


@pytest.fixture
def search(request: pytest.FixtureRequest, pytestconfig: pytest.Config, note: Callable[[Case], None]) -> Search:
    """How hard a check looks, and what it saw."""
    identity, check = Identity.of_item(request.node), check_of(request.node)
    own = identity is not None and identity.cell.backend != CANDIDATE
    most = examples(pytestconfig, own)
    made = Search(
        shares=own,
        examples=min(most, check.examples) if check and check.examples else most,
        blob=pytestconfig.getoption("reproduce"),
        note=note,
        refusals=Refusals() if _may_refuse(identity, pytestconfig) else None,
        brief=identity is not None and identity.cell in pytestconfig.stash[WRONG],
    )
    if WATCH in pytestconfig.stash:
        pytestconfig.stash[WATCH].hold_search(made)
    return made


def _may_refuse(identity: Identity | None, config: pytest.Config) -> bool:
    """Whether an exception of the implementation's own is a refusal: of a candidate's, unless an option forbids it."""
    return identity is not None and identity.cell.backend == CANDIDATE and not config.getoption("no_refusals")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A GPU's memory that a test has done with is for the tests of other processes."""
    is_worker = xdist_internals.is_worker(item.config)
    if is_worker and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """What an implementation cannot be put through is skipped, and the reason told; and none ends the run.

    Raises:
        Tampered: a candidate has changed what judges it.
    """
    identity = Identity.of_item(pyfuncitem)
    try:
        if identity is None:
            return (yield)
        if pyfuncitem.config.stash[DEVICE] == "cuda" and identity.cell in pyfuncitem.config.stash[WRONG]:
            raise Unsupported(NOT_MADE)
        with random_state_kept(), held(pytest.skip.Exception, pytest.exit.Exception):
            result = yield
    except (Unsupported, NotReached) as reason:
        _tampered(pyfuncitem.config, identity)
        pytest.skip(str(reason))
    except Exception:
        _tampered(pyfuncitem.config, identity)
        raise
    _tampered(pyfuncitem.config, identity)
    return result


def _tampered(config: pytest.Config, identity: Identity | None) -> None:
    if identity is None or identity.cell.backend != CANDIDATE or WATCH not in config.stash:
        return
    if changes := config.stash[WATCH].changes():
        raise Tampered(f"the candidate changed what judges it: {listed(dict.fromkeys(changes))}") from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed check shows the case and the command that repeats it, in place of the way through the machinery."""
    search = getattr(item, "funcargs", {}).get("search")
    if call.when == "call" and search is not None:
        seen = {"worst": search.worst, "examples": search.ran, "seconds": search.seconds, "grade": search.grade}
        seen |= {"refusals": dict(search.refusals.counts) if search.refusals else {}, "warnings": search.warnings}
        seen["remarks"], seen["unreached"] = search.remarks, search.unreached.lines()
        seen["constants"], seen["boundary"] = search.constants, search.boundary.as_dict()
        item.user_properties.append((SEARCH, seen))
    report = yield
    identity = Identity.of_item(item)
    if report.failed and call.excinfo is not None and identity is not None:
        tell(item, report, call.excinfo.value, identity, item.config.stash[BLACK_BOX].last)
        if identity.cell.backend == CANDIDATE and item.get_closest_marker("decisive"):
            item.config.stash[WRONG].add(identity.cell)
    if report.passed and call.when == "call" and search is not None and search.brief:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, BRIEFLY)
    return report


class RunReporter:
    """Tallies the reports, of this process or of the workers, and closes the run with the table."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.account = config, Account(config)
        self.causes: dict[str, str] = {}  # of failures, and the test that had each first
        self.shortcomings: list[str] = []
        self.passed = False
        self.is_worker = xdist_internals.is_worker(config)
        self.path: Path | None = None
        if config.getoption("verdict") and not self.is_worker:
            self.path = file_to_write("--verdict", config.getoption("verdict"), config.invocation_params.dir)
            try:
                self.path.unlink(missing_ok=True)  # an old one must not be taken for this run's
            except OSError as error:
                raise pytest.UsageError(f"--verdict {self.path}: it cannot be replaced: {error.strerror}") from error
        if isolation.tell_supervisor(config, self.about()):
            self.path = None

    def about(self) -> dict[str, Any]:
        """What the run is of, for its verdict."""
        return {
            "device": torch.cuda.get_device_name() if self.config.stash[DEVICE] == "cuda" else "cpu",
            "examples_a_check": examples(self.config),
            "candidates": self.config.getoption("candidate"),
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """With workers, each tells which tests are to be run."""
        self.account.collected(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count what a test came to."""
        identity = self.account.add(report)
        if identity is None:
            return
        if not self.is_worker:
            self._shorten(report)

    def _shorten(self, report: Any) -> None:
        """Show a cause once: what else fails by it refers to the first."""
        cause = next((seen.get("cause") for name, seen in report.user_properties if name == FAILURE), None)
        if cause and isinstance(report.longrepr, str):
            first = self.causes.setdefault(cause, report.nodeid)
            if first != report.nodeid:
                refer(report, first)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """What was asked for has passed where every check has, and none was left out."""
        if LINES in self.config.stash:
            self.config.stash[LINES].gather()
        end_all()  # from here on no candidate in a process of its own writes into files
        if self.is_worker:
            yield
            return
        if workers := self.config.pluginmanager.get_plugin(isolation.WORKERS):
            self.account.changed += workers.changed
        for told in workers.executed if workers else [isolation.told_of(self.config)]:
            self.account.executed.add(told)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.shortcomings = self.account.shortcomings()
        if self.shortcomings:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.passed = session.exitstatus == pytest.ExitCode.OK
        yield
        if self.path is not None:  # the workers have ended by now
            isolation.end_orphans_of(self.config)
            if failed := self.account.write(self.path, session.exitstatus == pytest.ExitCode.OK, self.about()):
                print(failed)
                session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        if self.is_worker:
            return
        if self.account.matrix.tallies:
            terminalreporter.section("verified", sep="=")
            for line in self.account.matrix.lines():
                terminalreporter.line(line)
        if self.passed and is_of_all_checks(self.config):
            for line in self.account.executed.lines(self.config.getoption("executed")):
                terminalreporter.line(line)
        for line in self.shortcomings:
            terminalreporter.line(line, red=True)
