"""A kernel that kills its process, or never ends, fails its own test: a pytest plugin.

With `-n`, pytest-xdist replaces a worker that has died. Without it, the run goes on in a child of the process that was
started; where that dies, another takes up what is left, and the results so far are told again. A test that Python
cannot interrupt any more is ended, with its process, some time after its time limit. `-n 0` runs all in one process.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from properties.verdict import FAILURE, repeat

# Past its time limit a test is first interrupted, by pytest-timeout; it has as long again to heed that.
MOST_GRACE_SECONDS = 30.0
# Options with which nothing is run, or somebody wants to look into the process that runs it.
NO_RUN = ("collectonly", "help", "version", "showfixtures", "show_fixtures_per_test", "markers", "cacheshow")
INTERACTIVE = ("usepdb", "trace")

SILENT = "ended without a word: it called exit, or was killed"

BLACK_BOX = pytest.StashKey["BlackBox"]()
TASK = pytest.StashKey["Task"]()
_KEY = "fourfold_black_box"
_PR_SET_PDEATHSIG = 1


def own_frames(trace: str) -> str:
    """Of what faulthandler has written, the frames between a kernel and its test."""
    frames = trace.partition("Extension modules")[0].strip().splitlines()
    ends = (number for number, line in enumerate(frames) if "/_pytest/" in line or "/pluggy/" in line)
    return "\n".join(frames[: next(ends, None)])


class BlackBox:
    """What a process leaves behind for those who look into its death.

    Args:
        folder: an existing one, of this process alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._case: IO[bytes] | None = None
        self._words: IO[str] | None = None

    def open(self) -> None:
        """From here on a fatal signal, too, leaves its trace."""
        self._case = (self.folder / "case").open("wb", buffering=0)
        self._words = (self.folder / "words").open("w")
        faulthandler.enable(self._words, all_threads=False)

    def case(self, text: str) -> None:
        """The process is about to run a kernel on this case."""
        if self._case is not None:
            encoded = text.encode()
            os.pwrite(self._case.fileno(), encoded, 0)
            os.ftruncate(self._case.fileno(), len(encoded))

    def say(self, text: str) -> None:
        """A reason for which the process is going to end."""
        if self._words is not None:
            self._words.write(text + "\n")
            self._words.flush()

    def expect_within(self, seconds: float) -> None:
        """End the process unless `expect_nothing` is called in time; needs neither Python's lock nor its loop."""
        if self._words is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._words)

    def expect_nothing(self) -> None:
        """The process may take as long as it likes."""
        faulthandler.cancel_dump_traceback_later()

    def found(self) -> tuple[str, str]:
        """Of a process that has died: why, as far as it could say, and the case that it was at."""
        words, case = (self._read(name) for name in ("words", "case"))
        for pattern, cause in (
            (r"Fatal Python error: (.*)", "died of: {}"),
            (r"Timeout \((\S+)\)!", "had to be ended: it did not come back within {}, its time limit and a grace"),
            (r"(lost the device: .*)", "{}"),
        ):
            if match := re.search(pattern, words):
                where = own_frames(words[match.end() :])
                return cause.format(match[1]) + (f"\n{where}" if where else ""), case
        return SILENT, case

    def _read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace")
        return ""


@dataclass
class Task:
    """What a process that runs tests has to know.

    Attributes:
        box: where it leaves what it has to say.
        told: what others have run before it.
        journal: where it writes what it does; None where nobody reads it.
    """

    box: BlackBox
    told: list[dict[str, Any]] = field(default_factory=list)
    journal: IO[str] | None = None


class Isolation:
    """The plugin within the process that runs tests."""

    def __init__(self, config: pytest.Config, task: Task) -> None:
        self.config, self.box, self.told, self.journal = config, task.box, task.told, task.journal
        self.to_tell = [entry["report"] for entry in self.told if "report" in entry]
        self.retelling = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What has been run, or has killed the process, is not run again."""
        done = {entry["nodeid"] for entry in self.told}
        items[:] = [item for item in items if item.nodeid not in done]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Before the first test: what went before it, after which -x may have none follow."""
        self._tell()
        if item.session.shouldfail:
            raise item.session.Failed(item.session.shouldfail)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Where no test was left to run."""
        if self.to_tell:
            self._tell()
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # of that which ended the last process

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
            self.journal.write(json.dumps(entry) + "\n")
            self.journal.flush()

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

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """pytest-timeout interrupts Python; what does not heed that is ended."""
        if settings.timeout:
            self.box.expect_within(settings.timeout + min(settings.timeout, MOST_GRACE_SECONDS))

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
            if self.journal is None and not hasattr(self.config, "workerinput"):
                item.session.shouldfail = f"{lost}; nothing more can be run in this process, which -n 0 asks for"
                return report
            self.box.say(f"lost the device: {lost}\n{report.longreprtext}")
            os._exit(1)
        return report

    def pytest_unconfigure(self) -> None:
        """The run has come to its end."""
        self.box.expect_nothing()
        self._note(nodeid="", ended=True)


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
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Workers(config), "fourfold-workers")
        return
    if hasattr(config, "workerinput"):
        task = Task(BlackBox(Path(config.workerinput[_KEY])))
    else:
        task = config.stash.get(TASK, None) or Task(BlackBox(new_folder()))
    task.box.open()
    config.stash[BLACK_BOX] = task.box
    config.pluginmanager.register(Isolation(config, task), "fourfold-isolated")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the tests in a child, unless that is what this process is."""
    option = config.option
    if getattr(option, "maxworkerrestart", None) is None:
        option.maxworkerrestart = sys.maxsize  # each that dies has come to the end of a test
    distributed = getattr(option, "numprocesses", None) is not None or getattr(option, "tx", None)
    otherwise = any(getattr(option, name, None) for name in (*NO_RUN, *INTERACTIVE))
    if distributed or otherwise or TASK in config.stash or hasattr(config, "workerinput") or not hasattr(os, "fork"):
        return None
    return supervise(config)


def supervise(config: pytest.Config) -> int:
    """Fork children, each of which runs what the former have not, until one comes to the end. Gives its exit code."""
    told: list[dict[str, Any]] = []
    while True:
        folder = new_folder()
        journal = folder / "journal"
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            run_as_child(config, Task(BlackBox(folder), told, journal.open("w")))
        code = wait_for(process)
        entries = []
        for line in journal.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last, cut off
                entries.append(json.loads(line))
        ended = {entry["nodeid"] for entry in entries if entry.get("ended")}
        running = [entry["nodeid"] for entry in entries if entry["nodeid"] not in ended]
        if not running:
            if code < 0 or (not code and "" not in ended):
                print(f"\nThe process {spelled(code)} outside of any test.", file=sys.stderr)
                return int(pytest.ExitCode.INTERNAL_ERROR)
            return code
        cause, case = BlackBox(folder).found()
        if code < 0 and cause == SILENT:
            cause = spelled(code)
        report = pytest.TestReport(running[-1], ("", None, ""), {}, "failed", "", "call")
        describe(config, report, cause, case)
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        told += [*entries, {"nodeid": report.nodeid, "report": data}]
        print(f"\n{report.nodeid}: the process {cause.partition(chr(10))[0]}. Another takes over.")


def run_as_child(config: pytest.Config, task: Task) -> None:
    """Run the tests and leave, past whoever called pytest."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    config.stash[TASK] = task
    config.option.no_header |= bool(task.told)
    try:
        code = config.hook.pytest_cmdline_main(config=config)
    except pytest.UsageError as error:
        for message in error.args:
            print(f"ERROR: {message}", file=sys.stderr)
        code = pytest.ExitCode.USAGE_ERROR
    raise SystemExit(int(code))


def wait_for(process: int) -> int:
    """A process's exit code; the negative number of the signal that it died of. Ctrl-C is the child's to answer."""
    handlers: dict[int, Any] = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGTERM: lambda *_: os.kill(process, signal.SIGTERM),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def spelled(code: int) -> str:
    """What an exit code says."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal.Signals(-code).name}" + (", as where memory runs out" if code == -signal.SIGKILL else "")


def describe(config: pytest.Config, report: pytest.TestReport, cause: str, case: str) -> None:
    """Make the report of a test tell that, and how, it has ended its process."""
    path, _, name = report.nodeid.partition("::")
    report.location = (path, None, name)
    report.longrepr = f"the process that ran this test {cause}" + (f"\n\nat {case}" if case else "")
    repeated = repeat(config, report.nodeid)
    failure = {"message": report.longrepr, "counterexample": case or None, "repeat": repeated}
    report.user_properties.append((FAILURE, failure))
    report.sections.append(("repeat with", repeated))


class Workers:
    """The plugin within the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.folder = config, new_folder()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where to leave what it has to say."""
        folder = self.folder / node.gateway.id
        folder.mkdir()
        node.workerinput[_KEY] = str(folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        """Say why a worker has died."""
        describe(self.config, report, *BlackBox(Path(report.node.workerinput[_KEY])).found())


def new_folder() -> Path:
    """A folder that this process, and none that is forked from it, removes when it ends."""
    folder, owner = tempfile.mkdtemp(prefix="fourfold-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)
