"""Isolation of tests: a kernel that kills its process, or never ends, fails only its own test.

With `-n`, pytest-xdist replaces a worker that died. Without it, the tests run in a child of the started process; if
the child dies, another one runs the remaining tests and reports the earlier results again. If Python cannot interrupt
a test, its process is ended some time after the time limit. `-n 0` runs all tests in one process.
"""

import contextlib
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.candidates.integrity.watch import WATCH
from fourfold.candidates.process.first_process import adopt_first_process, end_first_process
from fourfold.candidates.process.session import end_candidates, fork_first_process
from fourfold.compat import pytest_internals, torch_internals, xdist_internals
from fourfold.engine.verdict import Finding, Outcome
from fourfold.instruments.line_coverage import Executed
from fourfold.operations.outcomes import Kind, Status
from fourfold.processes import family
from fourfold.processes.child import Child, Death
from fourfold.processes.stop import Stop
from fourfold.pytest_plugin.account import Account, conclude
from fourfold.pytest_plugin.black_box import SILENT, BlackBox, DeathRecord
from fourfold.pytest_plugin.failures import DEVICE, OUTCOME, REPEAT, SELECTION, repeat
from fourfold.pytest_plugin.journal import Journal, Pipe
from fourfold.pytest_plugin.leftover_threads import LeftBehind
from fourfold.pytest_plugin.preparation import are_untrusted, import_candidates, prepare, time_limit

# Options that run no test, and options that debug the process that runs the tests.
NO_RUN = ("--collect-only", "--help", "--version", "--fixtures", "--fixtures-per-test", "--markers", "--cache-show")
INTERACTIVE = ("--pdb", "--trace")

BLACK_BOX = pytest.StashKey[BlackBox]()
TASK = pytest.StashKey["RunTask"]()
LEFT_BEHIND = pytest.StashKey[LeftBehind]()
# In a process that runs tests: the lines of the implementations that ran.
LINES = pytest.StashKey[Executed]()
_KEY = "fourfold_black_box"
# A worker's output for its controller: the changes that candidates made.
CHANGED = "fourfold_changed"
# Another one: the lines of the implementations that ran in it.
EXECUTED = "fourfold_executed"
WORKERS = "fourfold-workers"


@dataclass
class RunTask:
    """The task of a process that runs tests.

    Attributes:
        box: the black box that it fills.
        entries: the entries of earlier processes.
        journal: the journal that it writes; None if nothing reads it.
    """

    box: BlackBox
    entries: list[dict[str, Any]] = field(default_factory=list)
    journal: Journal | None = None


class Isolation:
    """The plugin in the process that runs tests."""

    def __init__(self, config: pytest.Config, task: RunTask) -> None:
        self.config, self.box, self.entries, self.journal = config, task.box, task.entries, task.journal
        self.to_tell = [entry["report"] for entry in self.entries if "report" in entry]
        self.retelling = False
        self.session: pytest.Session | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove tests that already ran or killed their process."""
        reported = {entry["nodeid"] for entry in self.entries}
        items[:] = [item for item in items if item.nodeid not in reported]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Report earlier results before the first test, because -x may stop the run after them."""
        self._tell()
        if item.session.shouldfail:
            pytest_internals.stop(item.session, str(item.session.shouldfail))
        self.box.test(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report earlier results if no test was left to run, and send a worker's records to the controller."""
        if self.to_tell:
            self._tell()
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # the test that ended the last process failed
        if xdist_internals.is_worker(self.config):
            outputs = xdist_internals.outputs(self.config)
            outputs[CHANGED], outputs[EXECUTED] = self.changes(), recorded_lines(self.config)

    def _tell(self) -> None:
        """Report the results of dead processes; reported any earlier, they would pass for collection errors."""
        self.retelling = True
        for data in self.to_tell:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            if isinstance(report.longrepr, list):  # in JSON, the tuple of a skipped test
                report.longrepr = tuple(report.longrepr)
            self.config.hook.pytest_runtest_logreport(report=report)
        self.to_tell = []
        self.retelling = False

    def _note(self, **entry: Any) -> None:
        if self.journal is not None and not self.retelling:
            self.journal.write(**entry)

    def changes(self) -> list[str]:
        """Return what candidates in this process changed of the program that judges them."""
        watch = self.config.stash.get(WATCH, None)
        if watch is None:
            return []
        watch.changes()
        return list(dict.fromkeys(watch.tampering))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the collected tests; no plugin is added from now on."""
        self._note(nodeid="", collected=[item.nodeid for item in session.items])
        if WATCH in self.config.stash:
            self.config.stash[WATCH].settle()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test starts."""
        self.box.case("")
        self._note(nodeid=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's report."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._note(nodeid=report.nodeid, report=data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record that a test ended."""
        self._note(nodeid=nodeid, ended=True)
        self.config.stash[LEFT_BEHIND].note(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """End the process if a test ignores pytest-timeout's interrupt."""
        if settings.timeout:
            self.box.expect_within(settings.timeout)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> None:
        """Cancel the limit once the test is over."""
        self.box.expect_nothing()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """End the process after an illegal access: it breaks the device, so that every later call would fail."""
        report = yield
        if report.failed and (error := device_error()):
            if self.journal is None and not xdist_internals.is_worker(self.config):
                item.session.shouldfail = f"{error}; nothing more can be run in this process, which -n 0 asks for"
                return report
            self.box.say(f"lost the device: {error}\n{report.longreprtext}")
            os._exit(1)
        return report

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session for its exit status."""
        self.session = session

    def pytest_unconfigure(self) -> None:
        """Record the end of the run, and end the process without leftover threads."""
        self.box.expect_nothing()
        status = None if self.session is None else int(self.session.exitstatus)
        self._note(nodeid="", ended=True, status=status, changed=self.changes(), executed=recorded_lines(self.config))
        if self.session is not None:
            session = self.session
            self.config.stash[LEFT_BEHIND].end_without_them(lambda: int(session.exitstatus))


def recorded_lines(config: pytest.Config) -> dict[str, Any] | None:
    """Return the lines that ran in this process, or None if no one records them."""
    executed = config.stash.get(LINES, None)
    return None if executed is None else executed.report()


def device_error() -> str | None:
    """Return the error that broke the GPU's context, or None."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            return str(error).partition("\n")[0]
    return None


@pytest.hookimpl(trylast=True)  # after pytest has set up faulthandler with its own file
def pytest_configure(config: pytest.Config) -> None:
    """Watch over the workers of pytest-xdist, or over this process."""
    if xdist_internals.is_controller(config):
        config.pluginmanager.register(Workers(config), WORKERS)
        stopped = contextlib.ExitStack()
        stopped.enter_context(Stop())
        config.add_cleanup(stopped.close)
        if config.getoption("candidate"):
            adopt_orphans()
        return
    if xdist_internals.is_worker(config):
        family.die_with(os.getppid())
        task = RunTask(BlackBox(Path(xdist_internals.inputs(config)[_KEY])))
    else:
        task = config.stash.get(TASK, None) or RunTask(BlackBox(family.temporary_folder()))
    task.box.open()
    config.stash[BLACK_BOX] = task.box
    config.pluginmanager.register(Isolation(config, task), "fourfold-isolated")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the tests in a child, unless this process is the child."""
    xdist_internals.replace_all_workers(config)  # each worker that dies has ended a test
    if xdist_internals.is_asked_for(config) or runs_no_test_of_its_own(config) or any_of(config, INTERACTIVE):
        return None
    if config.getoption("candidate"):
        adopt_orphans()
    with Stop(relays=True) as stop:
        return supervise(config, stop)


def folder_of_workers(config: pytest.Config) -> Path | None:
    """Return the folder that all workers of the run share, or None outside of a worker."""
    return Path(xdist_internals.inputs(config)[_KEY]).parent if xdist_internals.is_worker(config) else None


def runs_no_test_of_its_own(config: pytest.Config) -> bool:
    """Return whether another process supervises this one, or nothing runs."""
    looked_after = TASK in config.stash or xdist_internals.is_worker(config)
    return looked_after or any_of(config, NO_RUN) or not hasattr(os, "fork")


def any_of(config: pytest.Config, names: Iterable[str]) -> bool:
    """Return whether any of the options is given."""
    return any(config.getoption(name, None) for name in names)


class TrialImport:
    """The plugin of a process that distributes tests, or runs them by itself."""

    # A wrapper runs first: before pytest-xdist asks for the number of GPUs, after which no forked child could use one.
    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Try to import the candidates before workers start."""
        is_interactive = any_of(config, INTERACTIVE) or runs_no_test_of_its_own(config)
        if config.getoption("candidate") and xdist_internals.is_asked_for(config) and not is_interactive:
            try_import(config)
        return (yield)


def try_import(config: pytest.Config) -> None:
    """Import the candidates in a child, so that a failing import does not end the run.

    Raises:
        pytest.UsageError: one cannot be imported; says why.
    """
    box = BlackBox(family.temporary_folder())
    answer = box.folder / "said"
    with Stop(relays=True) as stop:
        death = stop.fork(functools.partial(import_in_child, config, box, answer)).wait()
        assert death is not None
        record = box.read(death.cause)
    if stop.signal is not None or death.code == pytest.ExitCode.INTERRUPTED:
        raise SystemExit(int(pytest.ExitCode.INTERRUPTED))
    if answer.exists():
        if text := answer.read_text():
            raise pytest.UsageError(text)
    elif record.importing:
        raise pytest.UsageError(died_of_import(record))


def import_in_child(config: pytest.Config, box: BlackBox, file: Path) -> int:
    """Import the candidates, and write into a file why they cannot be imported, or nothing; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # their output appears when the run imports them
    box.open()
    text = ""
    adopt_first_process()
    try:
        prepare(config)
        import_candidates([*config.stash[SELECTION].candidates.values()], time_limit(config), box)
    except pytest.UsageError as error:
        text = str(error)
    except KeyboardInterrupt:
        return int(pytest.ExitCode.INTERRUPTED)
    except Exception:  # another error, which the run itself will report
        pass
    end_candidates()
    file.write_text(text)
    return 0


def fork_worker(work: Callable[[], object]) -> Child:
    """Fork a worker of pytest-xdist, for which the first process of this process is forked too."""
    first = fork_first_process()

    def begin() -> None:
        adopt_first_process(first)
        work()

    child = Child.fork(begin, session=False, handlers={signal.SIGINT: signal.default_int_handler})
    first.connection.close()
    return child


def tell_supervisor(config: pytest.Config, facts: dict[str, Any]) -> bool:
    """Send the supervising process a description of the run; return whether there is such a process."""
    task = config.stash.get(TASK, None)
    if task is None or task.journal is None:
        return False
    selection = config.stash[SELECTION]
    task.journal.write(nodeid="", about=facts)
    task.journal.candidates = lambda: {str(candidate.file()) for candidate in selection.candidates.values()}
    return True


def import_before_tests(config: pytest.Config) -> None:
    """Import the candidates before the tests in a run without workers, so that a mistake ends the run at once.

    Raises:
        pytest.UsageError: one cannot be imported; says why.
    """
    candidates = [*config.stash[SELECTION].candidates.values()]
    box = config.stash[TASK].box if TASK in config.stash else None
    if box is not None:
        box.open()
        adopt_first_process()
    watch = config.stash.get(WATCH, None)
    if watch is not None:
        watch.settle()
    import_candidates(candidates, 0.0 if any_of(config, INTERACTIVE) else time_limit(config), box)
    if watch is not None:
        watch.changes()
        watch.unsettle()
    config.stash[LEFT_BEHIND].note("a candidate's import")


def died_of_import(death: DeathRecord) -> str:
    """Return the message about a candidate whose import ended its process."""
    return f"{death.importing}: the process that imports it {death.cause}"


def supervise(config: pytest.Config, stop: Stop) -> int:
    """Fork one child after another until one finishes; each runs the tests that its predecessor left.

    Returns:
        the exit code of the run.
    """
    reports: list[dict[str, Any]] = []
    false = 0
    while True:
        code, entries, record, unknown = run_in_child(config, reports, stop)
        false += unknown
        end = next((entry for entry in entries if not entry["nodeid"] and entry.get("ended")), None)
        if end is not None:
            if stop.signal is not None:  # the signal may have killed the process after this entry
                code = int(pytest.ExitCode.INTERRUPTED if end["status"] is None else end["status"])
            return finish_run(config, [*reports, *entries], false, code, end)
        finished = {entry["nodeid"] for entry in entries if entry.get("ended")}
        running = [entry["nodeid"] for entry in entries if entry["nodeid"] not in {*finished, ""}]
        if stop.signal is not None:
            return report_killed(config, [*reports, *entries], false, stop.signal, running[-1] if running else "")
        if not running:
            return ended_outside_of_tests(config, [*reports, *entries], code, record)
        report = pytest.TestReport(running[-1], ("", None, ""), {}, "failed", "", "call")
        describe(config, report, record)
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        reports += [*entries, {"nodeid": report.nodeid, "report": data}]
        print(f"\n{report.nodeid}: the process {record.cause.partition(chr(10))[0]}. Another takes over.")


def run_in_child(
    config: pytest.Config, reports: list[dict[str, Any]], stop: Stop
) -> tuple[int, list[dict[str, Any]], DeathRecord, int]:
    """Fork a child that runs tests; return its exit code, entries and black box, and the number of false entries."""
    folder, pipe = family.temporary_folder(), Pipe()

    def run_as_child() -> int:
        return run_tests(config, RunTask(BlackBox(folder), reports, pipe.for_child()))

    child = stop.fork(run_as_child, handles_exit=True)
    pipe.listen()
    death = child.wait()
    assert death is not None
    end_first_process()  # it served the child; another child starts its own
    if config.getoption("candidate"):
        end_orphans()
    code = int(pytest.ExitCode.INTERNAL_ERROR) if death.code is None else death.code
    record = BlackBox(folder).read(death.cause if code < 0 else SILENT)
    return code, pipe.entries(), record, pipe.false


def finish_run(config: pytest.Config, entries: list[dict[str, Any]], false: int, code: int, end: dict[str, Any]) -> int:
    """Return a finished run's exit code according to its entries; print contradictions, and write the verdict.

    The exit code of the process alone proves little, because a candidate may end the process with any code.
    """
    code, account, lacking = conclude(config, entries, false, code, end)
    for line in lacking:
        print(f"not passed: {line}")
    return write_verdict(config, account, code, entries)


def report_killed(config: pytest.Config, entries: list[dict[str, Any]], false: int, number: int, test: str) -> int:
    """Return the exit code of a stopped run whose process had to be killed; print the table.

    Args:
        config: of the parent process.
        entries: of the journal.
        false: the number of further entries that were not the run's own.
        number: the signal.
        test: the running test; "" if there was none.
    """
    interrupted = int(pytest.ExitCode.INTERRUPTED)
    _, account, _ = conclude(config, entries, false, interrupted, {"status": interrupted})
    print(f"\n{signal.Signals(number).name} has ended the run" + (f" in {test}" if test else ""))
    if account.matrix.tallies:
        print(" verified ".center(shutil.get_terminal_size().columns, "="), *account.matrix.lines(), sep="\n")
    return write_verdict(config, account, interrupted, entries)


def write_verdict(config: pytest.Config, account: Account, code: int, entries: list[dict[str, Any]]) -> int:
    """Write the verdict if a session began; return the exit code."""
    facts = next((entry["about"] for entry in entries if "about" in entry), None)
    if facts is None or not config.getoption("verdict"):
        return code
    path = config.invocation_params.dir / config.getoption("verdict")
    if error := account.write(path, code == pytest.ExitCode.OK, facts):
        print(error)
        return code or int(pytest.ExitCode.INTERNAL_ERROR)
    return code


def ended_outside_of_tests(config: pytest.Config, entries: list[dict[str, Any]], code: int, death: DeathRecord) -> int:
    """Return the exit code of a run whose process ended before its first test, between two, or after the last."""
    if death.importing:
        print(f"ERROR: {died_of_import(death)}\n", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    if code <= 0:
        print(f"\nThe process {Death(code).cause} outside of any test.", file=sys.stderr)
        code = int(pytest.ExitCode.INTERNAL_ERROR)
    _, account, _ = conclude(config, entries, 0, code, {"status": code})
    return write_verdict(config, account, code, entries)


# The children of this process other than those that run tests.
_own_children: set[int] = set()


def adopt_orphans() -> None:
    """Adopt the processes that candidates leave behind when their own parents end."""
    _own_children.update(family.children())
    family.adopt_orphans()


def end_orphans() -> None:
    """Kill all children except our own, because processes that a candidate left running could write files."""
    family.kill_children(_own_children)


def end_orphans_of(config: pytest.Config) -> None:
    """Kill the processes that candidates left running, once the workers have ended."""
    if config.getoption("candidate") and xdist_internals.is_controller(config):
        end_orphans()


def run_tests(config: pytest.Config, task: RunTask) -> int:
    """Run the tests in a child; return the exit code."""
    config.stash[TASK] = task
    config.option.no_header |= bool(task.entries)
    try:
        return int(config.hook.pytest_cmdline_main(config=config))
    except pytest.UsageError as error:
        for message in error.args:
            print(f"ERROR: {message}", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)


def describe(config: pytest.Config, report: pytest.TestReport, death: DeathRecord) -> None:
    """Describe in a test's report how the test ended its process."""
    file, _, name = report.nodeid.partition("::")
    report.location = (file, None, name)
    report.longrepr = f"the process that ran this test {death.cause}" + (f"\n\nat {death.case}" if death.case else "")
    kind = Kind.TIMED_OUT if death.timed_out else Kind.CRASHED
    failure = Finding(message=report.longrepr, counterexample=death.case or None, kind=kind)
    outcome = Outcome(check="", dtype="", outcome=Status.FAILED, grade="", failure=failure)
    if death.identity is not None:
        report.user_properties.append(death.identity.property)
    report.user_properties.append((OUTCOME, outcome.as_dict()))
    command = repeat(config, death.path or config.rootpath / file, report.nodeid, death.identity, None)
    report.sections.append((REPEAT, command))


class Workers:
    """The plugin in the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.folder = config, family.temporary_folder()
        self.changed: list[str] = []
        self.executed: list[Any] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config) -> None:
        """Fork the workers, unless a worker may use a GPU: it cannot use one that this process has asked for."""
        if are_untrusted(config, config.stash[DEVICE]):
            torch_internals.import_for_gradients()
            forking = contextlib.ExitStack()
            forking.enter_context(xdist_internals.forking_workers(fork_worker))
            config.add_cleanup(forking.close)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Keep the records of a worker that finished; a worker that died has failed a test."""
        if error is None:
            unknown = [f"what {xdist_internals.name_of(node)} tells at its end"]
            outputs = xdist_internals.outputs_of(node)
            self.changed += outputs.get(CHANGED, unknown)
            self.executed.append(outputs.get(EXECUTED))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker the folder of its black box."""
        folder = self.folder / xdist_internals.name_of(node)
        folder.mkdir()
        xdist_internals.inputs_of(node)[_KEY] = str(folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        """Report why a worker died."""
        describe(self.config, report, BlackBox(Path(xdist_internals.inputs_of(report.node)[_KEY])).read())
