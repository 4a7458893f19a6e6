"""A kernel that kills its process, or never ends, fails its own test: a pytest plugin.

With `-n`, pytest-xdist replaces a worker that has died. Without it, the run goes on in a child of the process that was
started; where that dies, another takes up what is left, and the results so far are told again. A test that Python
cannot interrupt any more is ended, with its process, some time after its time limit. `-n 0` runs all in one process.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.candidates.integrity.watch import WATCH
from fourfold.candidates.process import child
from fourfold.candidates.process.exit_codes import spelled
from fourfold.compat import pytest_internals, xdist_internals
from fourfold.instruments.line_coverage import Executed
from fourfold.operations.outcomes import CRASHED, TIMED_OUT
from fourfold.pytest_plugin.account import Account, conclude
from fourfold.pytest_plugin.black_box import SILENT, BlackBox, Found, new_folder
from fourfold.pytest_plugin.failures import FAILURE, SELECTION, repeat
from fourfold.pytest_plugin.journal import Journal, Pipe
from fourfold.pytest_plugin.leftover_threads import LeftBehind
from fourfold.pytest_plugin.preparation import import_candidates, prepare, time_limit

# Options with which nothing is run, or somebody wants to look into the process that runs it.
NO_RUN = ("--collect-only", "--help", "--version", "--fixtures", "--fixtures-per-test", "--markers", "--cache-show")
INTERACTIVE = ("--pdb", "--trace")

BLACK_BOX = pytest.StashKey[BlackBox]()
TASK = pytest.StashKey["RunTask"]()
LEFT_BEHIND = pytest.StashKey[LeftBehind]()
# In a process that runs tests: which lines of the implementations have run.
LINES = pytest.StashKey[Executed]()
_KEY = "fourfold_black_box"
# Among what a worker tells its controller: what candidates have changed.
CHANGED = "fourfold_changed"
# And which of the implementations' lines have run in it.
EXECUTED = "fourfold_executed"
WORKERS = "fourfold-workers"


@dataclass
class RunTask:
    """What a process that runs tests has to know.

    Attributes:
        box: where it leaves what it has to say.
        told: what others have run before it.
        journal: where it writes what it does; None where nobody reads it.
    """

    box: BlackBox
    told: list[dict[str, Any]] = field(default_factory=list)
    journal: Journal | None = None


class Isolation:
    """The plugin within the process that runs tests."""

    def __init__(self, config: pytest.Config, task: RunTask) -> None:
        self.config, self.box, self.told, self.journal = config, task.box, task.told, task.journal
        self.to_tell = [entry["report"] for entry in self.told if "report" in entry]
        self.retelling = False
        self.session: pytest.Session | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What has been run, or has killed the process, is not run again."""
        done = {entry["nodeid"] for entry in self.told}
        items[:] = [item for item in items if item.nodeid not in done]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Before the first test: what went before it, after which -x may have none follow."""
        self._tell()
        if item.session.shouldfail:
            pytest_internals.stop(item.session, str(item.session.shouldfail))
        self.box.test(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Where no test was left to run."""
        if self.to_tell:
            self._tell()
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # of that which ended the last process
        if xdist_internals.is_worker(self.config):
            outputs = xdist_internals.outputs(self.config)
            outputs[CHANGED], outputs[EXECUTED] = self.changes(), told_of(self.config)

    def _tell(self) -> None:
        """Tell the results of processes that have died. Any earlier and they would pass for errors of collection."""
        self.retelling = True
        for data in self.to_tell:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            self.config.hook.pytest_runtest_logreport(report=report)
        self.to_tell = []
        self.retelling = False

    def _note(self, **entry: Any) -> None:
        if self.journal is not None and not self.retelling:
            self.journal.write(**entry)

    def changes(self) -> list[str]:
        """What candidates have changed of the program that judges them, in this process."""
        watch = self.config.stash.get(WATCH, None)
        if watch is None:
            return []
        watch.changes()
        return list(dict.fromkeys(watch.found))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell which tests are to be run; no plugin is added any more."""
        self._note(nodeid="", collected=[item.nodeid for item in session.items])
        if WATCH in self.config.stash:
            self.config.stash[WATCH].settle()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember what is being run."""
        self.box.case("")
        self._note(nodeid=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what it came to."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._note(nodeid=report.nodeid, report=data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Remember that it did come to its end."""
        self._note(nodeid=nodeid, ended=True)
        self.config.stash[LEFT_BEHIND].note(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """pytest-timeout interrupts Python; what does not heed that is ended."""
        if settings.timeout:
            self.box.expect_within(settings.timeout)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> None:
        """The test is over."""
        self.box.expect_nothing()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """An illegal access spoils the device for the whole process: every later call fails, whoever makes it."""
        report = yield
        if report.failed and (lost := lost_device()):
            if self.journal is None and not xdist_internals.is_worker(self.config):
                item.session.shouldfail = f"{lost}; nothing more can be run in this process, which -n 0 asks for"
                return report
            self.box.say(f"lost the device: {lost}\n{report.longreprtext}")
            os._exit(1)
        return report

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Know whose exit code the process is to have."""
        self.session = session

    def pytest_unconfigure(self) -> None:
        """The run has come to its end."""
        self.box.expect_nothing()
        status = None if self.session is None else int(self.session.exitstatus)
        self._note(nodeid="", ended=True, status=status, changed=self.changes(), executed=told_of(self.config))
        if self.session is not None:
            session = self.session
            self.config.stash[LEFT_BEHIND].end_without_them(lambda: int(session.exitstatus))


def told_of(config: pytest.Config) -> dict[str, Any] | None:
    """Which lines have run in this process; None where nobody looks."""
    executed = config.stash.get(LINES, None)
    return None if executed is None else executed.told()


def lost_device() -> str | None:
    """What the GPU's context died of, if it did."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            return str(error).partition("\n")[0]
    return None


@pytest.hookimpl(trylast=True)  # after pytest's own use of faulthandler, to which it tells its own file
def pytest_configure(config: pytest.Config) -> None:
    """Watch over the workers of pytest-xdist, or over this process."""
    if xdist_internals.is_controller(config):
        config.pluginmanager.register(Workers(config), WORKERS)
        stopped = contextlib.ExitStack()
        stopped.enter_context(child.Stop())
        config.add_cleanup(stopped.close)
        if config.getoption("candidate"):
            adopt_orphans()
        return
    if xdist_internals.is_worker(config):
        child.die_with(os.getppid())
        task = RunTask(BlackBox(Path(xdist_internals.inputs(config)[_KEY])))
    else:
        task = config.stash.get(TASK, None) or RunTask(BlackBox(new_folder()))
    task.box.open()
    config.stash[BLACK_BOX] = task.box
    config.pluginmanager.register(Isolation(config, task), "fourfold-isolated")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the tests in a child, unless that is what this process is."""
    xdist_internals.replace_all_workers(config)  # each that dies has come to the end of a test
    if is_distributed(config) or runs_no_test_of_its_own(config) or any_of(config, INTERACTIVE):
        return None
    return supervise(config)


def folder_of_workers(config: pytest.Config) -> Path | None:
    """In a worker, a folder that all workers of the run share; None elsewhere."""
    return Path(xdist_internals.inputs(config)[_KEY]).parent if xdist_internals.is_worker(config) else None


def is_distributed(config: pytest.Config) -> bool:
    """Whether pytest-xdist is told who runs the tests: workers, or with -n 0 this process."""
    return xdist_internals.is_asked_for(config)


def runs_no_test_of_its_own(config: pytest.Config) -> bool:
    """Whether another process looks after this one, or nothing is run."""
    looked_after = TASK in config.stash or xdist_internals.is_worker(config)
    return looked_after or any_of(config, NO_RUN) or not hasattr(os, "fork")


def any_of(config: pytest.Config, names: Iterable[str]) -> bool:
    """Whether an option is given."""
    return any(config.getoption(name, None) for name in names)


class TrialImport:
    """The plugin of a process that gives tests to others, or runs them by itself."""

    # As a wrapper it comes first: before pytest-xdist asks for the number of GPUs, after which no child could use one.
    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Try the imports that the run depends on."""
        watched = any_of(config, INTERACTIVE) or runs_no_test_of_its_own(config)
        if config.getoption("candidate") and is_distributed(config) and not watched:
            try_import(config)
        return (yield)


def try_import(config: pytest.Config) -> None:
    """Import the candidates in a child: what a run does that must not end when an import does not.

    Raises:
        pytest.UsageError: one cannot be imported; says why.
    """
    box = BlackBox(new_folder())
    said = box.folder / "said"
    sys.stdout.flush()
    sys.stderr.flush()
    with child.Stop(relays=True) as stop:
        if stop.fork() == 0:
            code = 0
            try:
                said.write_text(said_on_import(config, box))
            except KeyboardInterrupt:
                code = int(pytest.ExitCode.INTERRUPTED)
            except Exception:  # of something else, which the run itself comes upon
                said.write_text("")
            finally:
                os._exit(code)
        code, found = stop.wait(), box.found()
    if stop.signal is not None or code == pytest.ExitCode.INTERRUPTED:
        raise SystemExit(int(pytest.ExitCode.INTERRUPTED))
    if said.exists():
        if text := said.read_text():
            raise pytest.UsageError(text)
    elif found.importing:
        cause = spelled(code) if found.cause == SILENT else found.cause
        raise pytest.UsageError(died_of_import(replace(found, cause=cause)))


def said_on_import(config: pytest.Config, box: BlackBox) -> str:
    """Why the candidates cannot be imported; "" where they can."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what they print is told when they are imported to be run
    box.open()
    try:
        prepare(config)
        import_candidates([*config.stash[SELECTION].candidates.values()], time_limit(config), box)
    except pytest.UsageError as error:
        return str(error)
    return ""


def tell_supervisor(config: pytest.Config, about: dict[str, Any]) -> bool:
    """Tell the process that has started this one, if one has, what a run is of; gives whether there is one."""
    task = config.stash.get(TASK, None)
    if task is None or task.journal is None:
        return False
    selection = config.stash[SELECTION]
    task.journal.write(nodeid="", about=about)
    task.journal.candidates = lambda: {str(candidate.file()) for candidate in selection.candidates.values()}
    return True


def import_before_tests(config: pytest.Config) -> None:
    """Import the candidates in the process that runs tests without workers, so that a mistake ends the run at once.

    Raises:
        pytest.UsageError: one cannot be imported; says why.
    """
    candidates = [*config.stash[SELECTION].candidates.values()]
    box = config.stash[TASK].box if TASK in config.stash else None
    if box is not None:
        box.open()
    watch = config.stash.get(WATCH, None)
    if watch is not None:
        watch.settle()
    import_candidates(candidates, 0.0 if any_of(config, INTERACTIVE) else time_limit(config), box)
    if watch is not None:
        watch.changes()
        watch.unsettle()
    config.stash[LEFT_BEHIND].note("a candidate's import")


def died_of_import(found: Found) -> str:
    """What is said of a candidate whose import has ended its process."""
    return f"{found.importing}: the process that imports it {found.cause}"


def supervise(config: pytest.Config) -> int:
    """Fork children, each of which runs what the former have not, until one comes to the end. Gives its exit code."""
    if config.getoption("candidate"):
        adopt_orphans()
    with child.Stop(relays=True) as stop:
        return ended_children(config, stop)


def ended_children(config: pytest.Config, stop: child.Stop) -> int:
    """The exit code of a run by children, of which each takes up what the one before has not run."""
    told: list[dict[str, Any]] = []
    false = 0
    while True:
        code, entries, found, unknown = told_by_child(config, told, stop)
        false += unknown
        end = next((entry for entry in entries if not entry["nodeid"] and entry.get("ended")), None)
        if end is not None:
            if stop.signal is not None:  # which may have killed the process after this
                code = int(pytest.ExitCode.INTERRUPTED if end["status"] is None else end["status"])
            return concluded(config, [*told, *entries], false, code, end)
        ended = {entry["nodeid"] for entry in entries if entry.get("ended")}
        running = [entry["nodeid"] for entry in entries if entry["nodeid"] not in {*ended, ""}]
        if stop.signal is not None:
            return killed(config, [*told, *entries], false, stop.signal, running[-1] if running else "")
        if not running:
            return ended_outside_of_tests(config, [*told, *entries], code, found)
        report = pytest.TestReport(running[-1], ("", None, ""), {}, "failed", "", "call")
        describe(config, report, found)
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        told += [*entries, {"nodeid": report.nodeid, "report": data}]
        print(f"\n{report.nodeid}: the process {found.cause.partition(chr(10))[0]}. Another takes over.")


def told_by_child(
    config: pytest.Config, told: list[dict[str, Any]], stop: child.Stop
) -> tuple[int, list[dict[str, Any]], Found, int]:
    """Fork a child that runs tests; gives its exit code, what it has told, what it has left, and how much is false."""
    folder, pipe = new_folder(), Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if stop.fork() == 0:
        run_as_child(config, RunTask(BlackBox(folder), told, pipe.for_child()))
    pipe.listen()
    code = stop.wait()
    if config.getoption("candidate"):
        end_orphans()
    entries, found = pipe.entries(), BlackBox(folder).found()
    if found.cause == SILENT and code < 0:
        found = replace(found, cause=spelled(code))
    return code, entries, found, pipe.false


def concluded(config: pytest.Config, entries: list[dict[str, Any]], false: int, code: int, end: dict[str, Any]) -> int:
    """The exit code of a run that has come to its end, by what was told; says what contradicts it. Writes the verdict.

    The exit code of the process alone says little: a candidate may end it as it likes.
    """
    code, account, lacking = conclude(config, entries, false, code, end)
    for line in lacking:
        print(f"not passed: {line.removeprefix('not passed: ')}")
    return written(config, account, code, entries)


def killed(config: pytest.Config, entries: list[dict[str, Any]], false: int, number: int, test: str) -> int:
    """The exit code of a run that was stopped, and whose process had to be killed; prints the table.

    Args:
        config: of the process that has started it.
        entries: what was told.
        false: how much more was not the run's own.
        number: the signal.
        test: that was running; "" if none was.
    """
    interrupted = int(pytest.ExitCode.INTERRUPTED)
    _, account, _ = conclude(config, entries, false, interrupted, {"status": interrupted})
    print(f"\n{signal.Signals(number).name} has ended the run" + (f" in {test}" if test else ""))
    if account.matrix.tallies:
        print(" verified ".center(shutil.get_terminal_size().columns, "="), *account.matrix.lines(), sep="\n")
    return written(config, account, interrupted, entries)


def written(config: pytest.Config, account: Account, code: int, entries: list[dict[str, Any]]) -> int:
    """Write the verdict, if a session has begun; gives the exit code."""
    about = next((entry["about"] for entry in entries if "about" in entry), None)
    if about is None or not config.getoption("verdict"):
        return code
    path = config.invocation_params.dir / config.getoption("verdict")
    if failed := account.write(path, code == pytest.ExitCode.OK, about):
        print(failed)
        return code or int(pytest.ExitCode.INTERNAL_ERROR)
    return code


def ended_outside_of_tests(config: pytest.Config, entries: list[dict[str, Any]], code: int, found: Found) -> int:
    """The exit code of a run whose process has ended before its first test, between two, or after the last."""
    if found.importing:
        print(f"ERROR: {died_of_import(found)}\n", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    if code <= 0:
        print(f"\nThe process {spelled(code)} outside of any test.", file=sys.stderr)
        code = int(pytest.ExitCode.INTERNAL_ERROR)
    _, account, _ = conclude(config, entries, 0, code, {"status": code})
    return written(config, account, code, entries)


# The children that this process has besides those that run tests.
_own_children: set[int] = set()


def adopt_orphans() -> None:
    """From here on, what a candidate leaves running becomes a child of this process when its own has ended."""
    _own_children.update(child.children())
    child.adopt_orphans()


def end_orphans() -> None:
    """End the children of this process but for its own: what a candidate has left running could write into files."""
    for process in (left := child.children() - _own_children):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    if left:
        end_orphans()  # the children of those


def end_orphans_of(config: pytest.Config) -> None:
    """Where workers have run candidates, and have ended, end what these have left running."""
    if config.getoption("candidate") and xdist_internals.is_controller(config):
        end_orphans()


def run_as_child(config: pytest.Config, task: RunTask) -> None:
    """Run the tests and leave, past whoever called pytest."""
    config.stash[TASK] = task
    config.option.no_header |= bool(task.told)
    try:
        code = config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        for message in error.args:
            print(f"ERROR: {message}", file=sys.stderr)
        code = pytest.ExitCode.USAGE_ERROR
    raise SystemExit(int(code))


def describe(config: pytest.Config, report: pytest.TestReport, found: Found) -> None:
    """Make the report of a test tell that, and how, it has ended its process."""
    file, _, name = report.nodeid.partition("::")
    report.location = (file, None, name)
    report.longrepr = f"the process that ran this test {found.cause}" + (f"\n\nat {found.case}" if found.case else "")
    repeated = repeat(config, found.path or config.rootpath / file, report.nodeid, found.identity)
    failure = {"message": report.longrepr, "counterexample": found.case or None, "repeat": repeated}
    failure["kind"] = TIMED_OUT if found.timed_out else CRASHED
    if found.identity is not None:
        report.user_properties.append(found.identity.property)
    report.user_properties.append((FAILURE, failure))
    report.sections.append(("repeat with", repeated))


class Workers:
    """The plugin within the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.folder = config, new_folder()
        self.changed: list[str] = []
        self.executed: list[Any] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Keep what a worker that has come to its end tells of candidates. One that has died has failed a test."""
        if error is None:
            unknown = [f"what {xdist_internals.name_of(node)} tells at its end"]
            outputs = xdist_internals.outputs_of(node)
            self.changed += outputs.get(CHANGED, unknown)
            self.executed.append(outputs.get(EXECUTED))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where to leave what it has to say."""
        folder = self.folder / xdist_internals.name_of(node)
        folder.mkdir()
        xdist_internals.inputs_of(node)[_KEY] = str(folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        """Say why a worker has died."""
        describe(self.config, report, BlackBox(Path(xdist_internals.inputs_of(report.node)[_KEY])).found())
