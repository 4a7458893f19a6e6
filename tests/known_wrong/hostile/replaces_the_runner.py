"""Return wrong results, and make pytest, its reports or a plugin say that tests passed."""

import gc
import json

import pytest
from zeros import objects, zeros


def runs_nothing(**arguments):
    pytest.Item.runtest = pytest.Function.runtest = lambda self: None
    return zeros(arguments)


class Believer:
    """A plugin in whose presence every test passes."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        report.outcome, report.longrepr = "passed", None
        return report


def registers_a_plugin(**arguments):
    for config in objects("Config"):
        if not config.pluginmanager.has_plugin("believer"):
            config.pluginmanager.register(Believer(), "believer")
    return zeros(arguments)


def leaves_tests_out(**arguments):
    for session in objects("Session"):
        session.items[:] = session.items[:1]
    pytest.TestReport.failed = False
    return zeros(arguments)


def replaces_the_encoder(**arguments):
    encode = json.JSONEncoder.encode
    json.JSONEncoder.encode = lambda self, content: encode(self, content).replace('"failed"', '"passed"')
    json.dumps = lambda content, **options: json.JSONEncoder(**options).encode(content)
    return zeros(arguments)


def forges_the_journal(**arguments):
    """Report by the judge's own plugin that each test passed and that the run ended."""
    import os

    for plugin in objects("Isolation"):
        for session in objects("Session"):
            for item in session.items:
                for when in ("setup", "call", "teardown"):
                    report = pytest.TestReport(item.nodeid, item.location, {}, "passed", None, when)
                    report.user_properties = list(item.user_properties)
                    plugin.pytest_runtest_logreport(report)
                plugin.pytest_runtest_logfinish(item.nodeid)
        plugin.pytest_unconfigure()
        os._exit(0)
    return zeros(arguments)


def writes_into_the_journal(**arguments):
    """Find the file that the judge writes to, and write the end of the run there."""
    import os

    for number in range(3, 64):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if name.endswith("journal") or name.startswith("pipe:"):
            os.write(number, json.dumps({"nodeid": "", "ended": True}).encode() + b"\n")
    if any(type(found).__name__ == "Isolation" for found in gc.get_objects()):
        os._exit(0)
    return zeros(arguments)
