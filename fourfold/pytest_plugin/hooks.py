"""The plugin's hooks and fixtures: options, the parametrization by cells, and the table that closes a run."""

import contextlib
import ctypes
import inspect
import os
import zlib
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import torch

from fourfold.backends.triton import compilation
from fourfold.backends.tuning import Configuration
from fourfold.candidates.integrity.escapes import hear_ctrl_c
from fourfold.candidates.integrity.watch import WATCH, ProgramWatch
from fourfold.candidates.process.client import UntrustedFunction
from fourfold.candidates.process.session import end_all
from fourfold.checks.catalogue import ALL, OF_A_CASE, PLAIN, Check, asks_for_gradients, check_named, outputs_for
from fourfold.checks.outputs import select_output, together
from fourfold.checks.search import Search, Subject
from fourfold.compat import pytest_internals, xdist_internals
from fourfold.engine import profiles
from fourfold.engine.cells import CANDIDATE, Cell
from fourfold.engine.exact_math import compute_exactly
from fourfold.engine.run import claims_needed, containment, examine, outcome_of, seeks_claims
from fourfold.engine.verdict import Outcome, holding_lines
from fourfold.instruments.line_coverage import Executed
from fourfold.instruments.line_recorder import recorder
from fourfold.operations.case import Case
from fourfold.operations.not_reached import NotReached
from fourfold.operations.outcomes import NOT_MADE, Status, Unsupported
from fourfold.operations.record import Law, Operation
from fourfold.operations.refusals import Refusals
from fourfold.pytest_plugin import isolation
from fourfold.pytest_plugin.account import Account, is_of_all_checks
from fourfold.pytest_plugin.failures import DEVICE, OUTCOME, SELECTION, refer, reported_outcome, tell
from fourfold.pytest_plugin.identity import Identity
from fourfold.pytest_plugin.isolation import BLACK_BOX, LEFT_BEHIND, LINES
from fourfold.pytest_plugin.leftover_threads import LeftBehind
from fourfold.pytest_plugin.options import add_options
from fourfold.pytest_plugin.paths import file_to_write
from fourfold.pytest_plugin.preparation import CASE, chosen_device, prepare
from fourfold.pytest_plugin.progress import ProgressReporter
from fourfold.pytest_plugin.table import Matrix
from fourfold.pytest_plugin.wrong_cells import WrongCells

# A worker's GPU memory: a context, compiled kernels, and the tensors of a test.
WORKER_BYTES = 3 << 30
# GPU memory that a worker may keep cached between tests, to avoid allocating it again.
KEPT_BYTES = 1 << 30
# A worker whose resident memory exceeds this returns free memory to the system after a test. torch and Triton take
# 600 MB.
KEPT_HOST_BYTES = 800_000_000
# The backends other than torch.
KERNELS = ("triton", "cuda")
TABLE = pytest.StashKey[Matrix]()
# The cells of candidates known to be wrong.
WRONG = pytest.StashKey[WrongCells]()
# The operations whose candidates fail a check within any claims.
FAILURES = pytest.StashKey[dict[str, list[Outcome]]]()
# The packages whose warnings are errors in CI.
OWN = ("fourfold", "tests", "conftest")
# The first words of warnings about a folder without write permission: pytest cannot store test durations and the last
# failures there, and Hypothesis cannot store its cases.
OF_CACHES = ("could not create cache path", "cache could not write path", "The database setting is not configured")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(isolation, "fourfold-isolation")
    pluginmanager.register(isolation.TrialImport(), "fourfold-trial-import")
    add_options(parser.getgroup("fourfold", "verification of kernels").addoption)


def pytest_configure(config: pytest.Config) -> None:
    only = "only(backends=, dtypes=, devices=, kernels=, batched=, whole=, plain=): the cells that a test is about"
    full = "full(but=0): a test of the profiles full and nightly; the default profile runs `but` of its parameter sets"
    check = "check(name): the check that a test makes, whose dtypes, devices and number of examples it takes"
    for marker in (only, check, full):
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
    config.stash[FAILURES] = {}
    config.stash[WRONG] = WrongCells(isolation.folder_of_workers(config))
    hear_ctrl_c()
    prepare(config)
    share_the_machine(config.stash[DEVICE])
    limits = contextlib.ExitStack()
    limits.enter_context(
        compilation.limit_compilation(
            config.stash[DEVICE],
            config.getoption("compile_seconds"),
            list(dict.fromkeys(cell.dtype for cell in config.stash[SELECTION].cells)),
            # The workers of pytest-xdist leave no core idle.
            1 if xdist_internals.is_asked_for(config) else len(os.sched_getaffinity(0)),
        )
    )
    config.add_cleanup(limits.close)
    if config.stash[DEVICE] == "cuda":  # on a CPU, neighbours in one process share the oracle's results
        xdist_internals.hand_out_one_by_one(config)
    record = RunReporter(config)
    runs_tests = not xdist_internals.is_controller(config)
    if config.getoption("candidate") and runs_tests and not config.getoption("untrusted"):
        config.stash[WATCH] = ProgramWatch(config, config.stash[SELECTION].operations)
    watches_lines = config.getoption("candidate") or config.getoption("executed")
    if watches_lines and runs_tests:
        of_cuda = any(candidate.is_cuda for candidate in config.stash[SELECTION].candidates.values())
        traces = config.stash[DEVICE] == "cpu" and (of_cuda or config.getoption("executed"))
        config.stash[LINES] = Executed(traces=traces)
        recorder.users += 1  # to the end of the process
    # Each worker imports a candidate in its first test of it.
    if runs_tests and not xdist_internals.is_worker(config):
        isolation.import_before_tests(config)
    config.pluginmanager.register(record, "fourfold-record")
    if not xdist_internals.is_worker(config):
        config.pluginmanager.register(ProgressReporter(config), "fourfold-progress")
    config.stash[TABLE] = record.account.matrix


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of cores, limited by the memory of the GPUs and at least one per GPU; without a GPU, None.

    Workers take the GPUs in turn. The host takes most of a test's time, so that a GPU has room for many workers. None
    leaves the number to xdist.
    """
    if chosen_device(config) != "cuda":
        return None
    devices = torch.cuda.device_count()
    room = sum(torch.cuda.get_device_properties(device).total_memory // WORKER_BYTES for device in range(devices))
    return max(devices, min(len(os.sched_getaffinity(0)), room))


def share_the_machine(device: str) -> None:
    """Assign GPU and threads; disable inexact math."""
    worker = xdist_internals.worker_number()
    if device == "cuda":
        compute_exactly()
        if worker is not None:
            torch.cuda.set_device(worker % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)  # there are as many workers as cores, and tensors are small


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    machine = torch.cuda.get_device_name() if device == "cuda" else "no GPU: Triton interpreted, CUDA C++ emulated"
    profile = hypothesis.settings.get_current_profile_name()
    return f"fourfold: {machine}; torch {torch.__version__}; {examples(config)} examples a check ({profile})"


def examples(config: pytest.Config, is_own: bool = False) -> int:
    """Return the number of generated cases a check; the default profile draws fewer for our kernels."""
    count = config.getoption("examples")
    return count if count is not None else profiles.examples(is_own)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with the selected cells, and with each law, configuration or output that they also take."""
    if "cell" not in metafunc.fixturenames:
        return
    selection = metafunc.config.stash[SELECTION]
    limits = {key: value for mark in metafunc.definition.iter_markers("only") for key, value in mark.kwargs.items()}
    if check := check_of(metafunc.definition):
        limits = {"devices": check.devices, "batched": check.batched} | limits
    if metafunc.config.stash[DEVICE] not in limits.get("devices", [metafunc.config.stash[DEVICE]]):
        skip = pytest.mark.skip(reason=f"needs --device {' or '.join(limits['devices'])}")
        metafunc.parametrize("cell", [pytest.param(None, id="none", marks=skip)])
        return
    cells = [
        cell
        for cell in selection.cells
        if cell.dtype in limits.get("dtypes", [cell.dtype])
        and cell.backend in limits.get("backends", [cell.backend])
        and (not limits.get("kernels") or computes(cell, metafunc.config))
        and (not limits.get("batched") or selection.operations[cell.operation].batched)
        and (check is None or check.applies_to(selection.operations[cell.operation]))
    ]
    if check:
        cells = cells_for_check(cells, check, hypothesis.settings.get_current_profile_name() == profiles.NIGHTLY)
    is_plain = not profiles.is_full() and not names_parameters(metafunc.config)
    if is_plain:
        cells = default_cells(cells, limits.get("plain", check.plain if check else PLAIN))
    samples = is_plain and not selection.narrowed
    everywhere = PLAIN if check and check.everywhere else ()
    if samples:
        cells = spread(cells, metafunc.definition.name, everywhere)
    if "law" in metafunc.fixturenames:
        triples = [
            (cell, law, output)
            for cell in cells
            for output in outputs_for(check, selection.operations[cell.operation])
            for law in record_of(selection.operations[cell.operation], output).laws
        ]
        named_by = [f"{_cell_id(cell, output)}-{law.__name__}" for cell, law, output in triples]
        metafunc.parametrize("cell,law,output", triples, ids=named_by)
    elif "configuration" in metafunc.fixturenames:
        choices = [(cell, configuration) for cell in cells for configuration in selection.configurations(cell)]
        metafunc.parametrize("cell,configuration", choices, ids=[f"{cell}-{c.name}" for cell, c in choices])
    elif "output" in metafunc.fixturenames and not limits.get("whole"):
        pairs = [(cell, name) for cell in cells for name in outputs_for(check, selection.operations[cell.operation])]
        if samples:
            pairs = spread_outputs(pairs, metafunc.definition.name, everywhere)
        metafunc.parametrize("cell,output", pairs, ids=[_cell_id(cell, output) for cell, output in pairs])
    else:
        metafunc.parametrize("cell", cells, ids=str)


def record_of(operation: Operation, output: str) -> Operation:
    """Return the record of the named output, or of the whole operation if there is no such name."""
    return operation.outputs.get(output, operation)


def _cell_id(cell: Cell, output: str) -> str:
    return f"{cell}-{output.replace(' ', '_')}" if output else str(cell)


def check_of(test: pytest.Item) -> Check | None:
    """Return the check that a test's marker names, or None."""
    mark = test.get_closest_marker("check")
    return check_named(*mark.args) if mark else None


def cells_for_check(cells: list[Cell], check: Check, nightly: bool) -> list[Cell]:
    """Return the cells of the dtypes that a check takes.

    If the check takes all dtypes under the nightly profile, a plain run takes its `dtypes`, or all dtypes of an
    operation and a backend if none of these is selected. This saves time in checks that depend little on the dtype.
    """
    if check.only is not None:
        return [cell for cell in cells if cell.dtype == check.only]
    if not check.dtypes or (check.all_nightly and nightly):
        return cells
    if not check.all_nightly:
        return [cell for cell in cells if cell.dtype in check.dtypes]
    return of_dtypes(cells, check.dtypes)


def of_dtypes(cells: list[Cell], dtypes: Collection[str]) -> list[Cell]:
    """Return the cells of the given dtypes, and all cells of an operation and backend that have none of them."""
    pairs = {(cell.operation, cell.backend) for cell in cells if cell.dtype in dtypes}
    return [cell for cell in cells if cell.dtype in dtypes or (cell.operation, cell.backend) not in pairs]


def default_cells(cells: list[Cell], dtypes: Collection[str]) -> list[Cell]:
    """Return the cells of candidates, and `of_dtypes` for the library's own; all cells if `dtypes` is empty."""
    selected = set(of_dtypes(cells, dtypes)) if dtypes else set(cells)
    return [cell for cell in cells if cell.backend == CANDIDATE or cell in selected]


def spread(cells: list[Cell], test: str, everywhere: Collection[str]) -> list[Cell]:
    """Return the cells of one backend for some of the operations, and all cells of the dtypes `everywhere`.

    The names of the test and of the operation choose both, so that a new operation or a new test changes no other
    choice. At least one operation is chosen.
    """
    backends: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        backends.setdefault((cell.operation, cell.dtype), []).append(cell.backend)
    numbers = {cell.operation: number_of(test, cell.operation) for cell in cells}
    smallest = min(numbers.values(), default=0)
    backend_of = {
        (operation, dtype): names[numbers[operation] // profiles.OWN_OPERATIONS % len(names)]
        for (operation, dtype), names in backends.items()
        if numbers[operation] % profiles.OWN_OPERATIONS == 0 or numbers[operation] == smallest
    }
    return [c for c in cells if c.dtype in everywhere or c.backend == backend_of.get((c.operation, c.dtype))]


def number_of(test: str, operation: str) -> int:
    """Return a number that depends on the names of a test and of an operation alone."""
    return zlib.crc32(f"{test} {operation}".encode())


def spread_outputs(pairs: list[tuple[Cell, str]], test: str, everywhere: Collection[str]) -> list[tuple[Cell, str]]:
    """Return the pairs of one output of each operation, and all pairs of the dtypes `everywhere`.

    As in `spread`, the names of the test and of the operation choose.
    """
    outputs: dict[str, dict[str, None]] = {}
    for cell, output in pairs:
        outputs.setdefault(cell.operation, {})[output] = None
    chosen = {
        (operation, [*names][number_of(test, operation) // 100 % len(names)]) for operation, names in outputs.items()
    }
    return [(cell, output) for cell, output in pairs if cell.dtype in everywhere or (cell.operation, output) in chosen]


def names_parameters(config: pytest.Config) -> bool:
    """Return whether the command line names a parametrized test by its id. Then the profile leaves no cell out."""
    return any("[" in argument for argument in config.args)


def computes(cell: Cell, config: pytest.Config) -> bool:
    """Return whether a cell's implementation must compute without torch's operators."""
    return cell.backend in (KERNELS if not config.getoption("forbid_fallback") else (*KERNELS, CANDIDATE))


@pytest.hookimpl(trylast=True)  # after -k and -m: of the tests that they select, the default profile takes a sample
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not profiles.is_full():
        leave_out(config, items, beyond_default(items))
    if CASE in config.stash:
        unrelated = (item for item in items if (check := check_of(item)) is None or check.name not in OF_A_CASE)
        leave_out(config, items, list(unrelated))
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


def beyond_default(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that the default profile leaves out.

    These are the tests marked `full`, and all but `n` parameter sets of a test marked `full(but=n)`. Those that remain
    are spread evenly over the collected ones.
    """
    left_out: list[pytest.Item] = []
    sampled: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        marks = list(item.iter_markers("full"))
        if not marks:
            continue
        count = min(mark.kwargs.get("but", 0) for mark in marks)
        if count:
            sampled.setdefault((item.nodeid.partition("[")[0], count), []).append(item)
        else:
            left_out.append(item)
    for (_, limit), members in sampled.items():
        places = {(2 * place + 1) * len(members) // (2 * limit) for place in range(min(limit, len(members)))}
        left_out += [item for place, item in enumerate(members) if len(members) > limit and place not in places]
    return left_out


def leave_out(config: pytest.Config, items: list[pytest.Item], omitted_items: list[pytest.Item]) -> None:
    """Deselect `omitted_items`."""
    if omitted_items:
        config.hook.pytest_deselected(items=omitted_items)
        omitted = set(omitted_items)
        items[:] = [item for item in items if item not in omitted]


def side_by_side(items: list[pytest.Item]) -> None:
    """Order the tests of cells by operation and dtype, so that a process computes the oracle once for all backends."""
    identities = [(place, item, Identity.of_item(item)) for place, item in enumerate(items)]
    of_cells = [(place, item, identity.cell) for place, item, identity in identities if identity]
    first: dict[tuple[str, str], int] = {}
    for place, _, cell in of_cells:
        first.setdefault((cell.operation, cell.dtype), place)
    ordered = sorted(of_cells, key=lambda entry: first[entry[2].operation, entry[2].dtype])
    for (place, _, _), (_, item, _) in zip(of_cells, ordered):
        items[place] = item


def order_on_gpu(item: pytest.Item) -> tuple[int, int]:
    """Return a sort key for tests of workers that share a GPU, where Triton's compiler takes most of the time.

    Tests without a cell come first, in their own order. Then come tests that compile every configuration of a kernel,
    then Triton's, then the rest. Each group is shuffled, always in the same way: neighbours need the same kernels, and
    workers that need one at the same time each compile it.
    """
    identity = Identity.of_item(item)
    if identity is None:
        return 0, 0
    of_configuration = "configuration" in getattr(item, "fixturenames", ())
    return 1 if of_configuration else 2 if identity.cell.backend == "triton" else 3, zlib.crc32(item.nodeid.encode())


def is_benchmark(item: pytest.Item) -> bool:
    """Return whether a test takes pytest-benchmark's fixture, directly or through another fixture."""
    return "benchmark" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Return the type of the device that runs kernels: "cpu" or "cuda"."""
    return pytestconfig.stash[DEVICE]


@pytest.fixture
def cell() -> Cell:
    """Return the cell under test."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def output() -> str:
    """Return the name of the output under test; "" if the operation has only one: see `outputs_for`."""
    return ""


@pytest.fixture
def law() -> Law:
    """Return the law under test."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def configuration() -> Configuration:
    """Return the configuration of a tuned kernel under test."""
    raise NotImplementedError("pytest_generate_tests gives it")


@pytest.fixture
def note(pytestconfig: pytest.Config) -> Callable[[Case | None], None]:
    """Record each case before it runs."""
    box = pytestconfig.stash[BLACK_BOX]
    return lambda case: box.case("" if case is None else repr(case))


@pytest.fixture
def subject(
    request: pytest.FixtureRequest, cell: Cell, output: str, device: str, note: Callable[[Case | None], None]
) -> Subject:
    """Return the implementation under test; skip the test with a reason if it cannot run here."""
    selection = request.config.stash[SELECTION]
    if reason := selection.unsupported(cell, device):
        raise pytest.skip.Exception(str(reason)) from reason
    if LINES in request.config.stash and (cell.backend == CANDIDATE or request.config.getoption("executed")):
        function = selection.implementation(cell.operation, cell.backend)
        elsewhere = function if isinstance(function, UntrustedFunction) else None
        request.config.stash[LINES].watch(*selection.source(cell), device, elsewhere)
    check = check_of(request.node)
    result = selection.subject(cell, device, note, gradients=check is None or asks_for_gradients(check.name))
    if output:
        result = together(result) if output == ALL else select_output(result, output)
    request.config.stash[BLACK_BOX].case("")  # this call only asked for the implementation's abilities
    if cell.backend == CANDIDATE and WATCH in request.config.stash:
        request.config.stash[WATCH].hold_subject(result)
    return result


@pytest.fixture
def search(request: pytest.FixtureRequest, pytestconfig: pytest.Config, note: Callable[[Case | None], None]) -> Search:
    """Return the search of a check: its settings, and the record of its results."""
    identity, check = Identity.of_item(request.node), check_of(request.node)
    is_own = identity is not None and identity.cell.backend != CANDIDATE
    limit = examples(pytestconfig, is_own)
    failures = pytestconfig.stash[FAILURES].get(identity.cell.operation, []) if identity is not None else []
    result = Search(
        shares=is_own,
        examples=min(limit, check.examples) if check and check.examples else limit,
        blob=pytestconfig.getoption("reproduce"),
        case=pytestconfig.stash[CASE].case if CASE in pytestconfig.stash else None,
        note=note,
        refusals=Refusals() if _may_refuse(identity, pytestconfig) else None,
        brief=identity is not None and identity.cell in pytestconfig.stash[WRONG],
        seeks_claims=identity is not None and seeks_claims(failures),
        other_claims=claims_needed(failures),
    )
    if WATCH in pytestconfig.stash:
        pytestconfig.stash[WATCH].hold_search(result)
    return result


def _may_refuse(identity: Identity | None, config: pytest.Config) -> bool:
    """Return whether the implementation's exceptions are refusals: a candidate's are, unless an option forbids it."""
    return identity is not None and identity.cell.backend == CANDIDATE and not config.getoption("no_refusals")


@pytest.hookimpl(trylast=True)  # when the fixtures have released their tensors, and a simulated GPU is gone
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Release cached memory of the GPU and of the host for other workers."""
    if not xdist_internals.is_worker(item.config):
        return
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    if psutil.Process().memory_info().rss > KEPT_HOST_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # of glibc alone
            ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip a test that does not apply, with the reason, and keep an implementation from ending the run.

    Raises:
        Tampered: a candidate changed the code that judges it.
    """
    stash, identity = pyfuncitem.config.stash, Identity.of_item(pyfuncitem)
    try:
        if identity is None:
            return (yield)
        is_watched = identity.cell.backend == CANDIDATE and WATCH in stash
        with containment(stash[WATCH].changes if is_watched else list, pytest.skip.Exception, pytest.exit.Exception):
            if stash[DEVICE] == "cuda" and identity.cell in stash[WRONG]:
                raise Unsupported(NOT_MADE)
            try:
                return (yield)
            except Exception as error:
                judge_again(pyfuncitem, error)
                raise
    except (Unsupported, NotReached) as reason:
        raise pytest.skip.Exception(str(reason)) from reason


def judge_again(item: pytest.Function, error: Exception) -> None:
    """Examine the failure of a check of an operation, by running its test on other subjects."""
    arguments: dict[str, Any] = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    if {"subject", "search"} <= arguments.keys():

        def check(subject: Subject, search: Search) -> None:
            item.obj(**{**arguments, "subject": subject, "search": search})

        examine(check, arguments["subject"], arguments["search"], error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failed check by its case and the command that repeats it, without the harness's own frames."""
    report = yield
    identity, error = Identity.of_item(item), call.excinfo.value if call.excinfo is not None else None
    if identity is None or (report.failed and error is None) or (report.passed and call.when != "call"):
        return report
    if report.skipped:
        reason = error.__cause__ if error is not None else None
        typed = isinstance(reason, Unsupported | NotReached)
        error = reason if typed else Unsupported(pytest_internals.skip_reason_of(report))
    elif report.passed:
        error = None
    search = getattr(item, "funcargs", {}).get("search") if call.when == "call" else None
    origin = item.config.stash[SELECTION].origin(identity.cell) if report.failed else Path()
    last = item.config.stash[BLACK_BOX].last
    outcome = outcome_of(error, identity.check, identity.cell.dtype, search, origin, last)
    if outcome.failure is not None and error is not None:
        item.config.stash[FAILURES].setdefault(identity.cell.operation, []).append(outcome)
        cause = tell(item, report, error, identity, outcome.failure)
        if identity.cell.backend == CANDIDATE and item.get_closest_marker("decisive"):
            item.config.stash[WRONG].add(identity.cell)
        if not cause and outcome.failure.cause and identity.cell in item.config.stash[WRONG]:
            cause = f"{identity.cell}: {outcome.failure.cause}"
        outcome = replace(outcome, failure=replace(outcome.failure, cause=cause))
    elif report.passed and outcome.outcome is not Status.PASSED:
        path, line, _ = item.reportinfo()
        report.outcome, report.longrepr = "skipped", (str(path), line or 0, str(outcome.reason))
    report.user_properties.append((OUTCOME, outcome.as_dict()))
    return report


class RunReporter:
    """The plugin that tallies the reports of this process or its workers, and prints the table at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.account = config, Account(config)
        self.causes: dict[str, str] = {}  # of failures: the first test with each
        self.shortcomings: list[str] = []
        self.passed = False
        self.is_worker = xdist_internals.is_worker(config)
        self.path: Path | None = None
        if config.getoption("verdict") and not self.is_worker:
            self.path = file_to_write("--verdict", config.getoption("verdict"), config.invocation_params.dir)
            try:
                self.path.unlink(missing_ok=True)  # an old file must not pass for this run's
            except OSError as error:
                raise pytest.UsageError(f"--verdict {self.path}: it cannot be replaced: {error.strerror}") from error
        if isolation.tell_supervisor(config, self.about()):
            self.path = None

    def about(self) -> dict[str, Any]:
        """Return the device, examples and candidates of the run, for its verdict."""
        return {
            "device": torch.cuda.get_device_name() if self.config.stash[DEVICE] == "cuda" else "cpu",
            "examples_a_check": examples(self.config),
            "candidates": self.config.getoption("candidate"),
            "claims": self.config.getoption("claims") or "",
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Record the tests that a worker collected."""
        self.account.expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test's report."""
        identity = self.account.add(report)
        if identity is None:
            return
        if not self.is_worker:
            self._shorten(report)

    def _shorten(self, report: Any) -> None:
        """Show a cause once: later failures with the same cause refer to the first."""
        failure = reported_outcome(report).failure
        if failure and failure.cause and isinstance(report.longrepr, str):
            first = self.causes.setdefault(failure.cause, report.nodeid)
            if first != report.nodeid:
                refer(report, first, failure)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Fail the session for its shortcomings, and write the verdict."""
        if LINES in self.config.stash:
            self.config.stash[LINES].gather()
        end_all()  # afterwards no candidate's process can write files
        if self.is_worker:
            yield
            return
        if workers := self.config.pluginmanager.get_plugin(isolation.WORKERS):
            self.account.changed += workers.changed
        for lines in workers.executed if workers else [isolation.recorded_lines(self.config)]:
            self.account.executed.add(lines)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.shortcomings = self.account.shortcomings()
        if self.shortcomings:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.passed = session.exitstatus == pytest.ExitCode.OK
        yield
        if self.path is not None:  # the workers have ended by now
            isolation.end_orphans_of(self.config)
            if error := self.account.write(self.path, session.exitstatus == pytest.ExitCode.OK, self.about()):
                print(error)
                session.exitstatus = session.exitstatus or pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        if self.is_worker:
            return
        if self.account.matrix.tallies:
            terminalreporter.section("verified", sep="=")
            for line in self.account.matrix.lines():
                terminalreporter.line(line)
            if self.config.getoption("claims"):
                terminalreporter.line(f"within the claims {self.config.getoption('claims')}")
            if not self.passed:
                for line in holding_lines(self.account.matrix.suggested_claim(False), "--accept-claims"):
                    terminalreporter.line(line)
        if self.passed and is_of_all_checks(self.config):
            for line in self.account.executed.lines(self.config.getoption("executed")):
                terminalreporter.line(line)
        for line in self.shortcomings:
            terminalreporter.line(f"not passed: {line}", red=True)
