"""pytest-xdist's private parts: the role of this process, and the data that a controller sends its workers."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fourfold.compat import uses


@uses("pytest.Config().workerinput")
def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist.

    The public ``xdist.is_xdist_worker`` takes a session, and uses only its configuration; hooks run before there is a
    session. PYTEST_XDIST_WORKER is also in the environment of a pytest that a test starts.
    """
    return hasattr(config, "workerinput")


def is_asked_for(config: pytest.Config) -> bool:
    """Return whether the command line sets the number of workers, even to 0 by ``-n 0``."""
    return config.getoption("--numprocesses", None) is not None or bool(config.getoption("--tx", None))


@uses("pytest.Config().option.tx")
def is_controller(config: pytest.Config) -> bool:
    """Return whether this process leaves its tests to workers. Call it from `pytest_configure` or later.

    pytest-xdist has filled in ``--tx`` for ``-n`` by then. The public ``xdist.is_xdist_controller`` needs a session,
    and does not see that ``--dist load`` alone makes no worker.
    """
    distributed = config.getoption("--dist", "no") != "no" and bool(config.getoption("--tx", None))
    return distributed and not is_worker(config)


@uses("pytest.Config().option.maxworkerrestart")
def replace_all_workers(config: pytest.Config) -> None:
    """Replace every worker that dies, unless the command line limits the number.

    The option ``--max-worker-restart`` is the user's; its default, four per worker, cannot be set by a plugin.
    """
    if config.getoption("--max-worker-restart", None) is None:
        config.option.maxworkerrestart = sys.maxsize


@uses("pytest.Config().option.maxschedchunk")
def hand_out_one_by_one(config: pytest.Config) -> None:
    """Give a worker that is free one test, unless the command line says otherwise.

    Tests take from milliseconds to minutes. By default a worker is given several at once, and may be left with the
    longest ones while the others have nothing to do.
    """
    if config.getoption("--maxschedchunk", None) is None:
        config.option.maxschedchunk = 1


@uses(
    "execnet.gateway_io.create_io",
    "execnet.gateway_io.popen_bootstrapline",
    "execnet.gateway_base.Popen2IO",
    otherwise=contextlib.nullcontext,
)
@contextlib.contextmanager
def forking_workers(fork: Callable[[Callable[[], object]], Any]) -> Iterator[None]:
    """Fork the local workers that start inside the context, so that they need not import again what this process has.

    Args:
        fork: forks a child that does the given work, and returns the child, with methods `wait` and `kill`.
    """
    gateway_io: Any = importlib.import_module("execnet.gateway_io")
    gateway_base: Any = importlib.import_module("execnet.gateway_base")
    former = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        if not spec.popen or spec.python or spec.via:
            return former(spec, execmodel)
        (read, requests), (answers, write) = os.pipe(), os.pipe()

        def work() -> None:
            for file, standard in ((read, 0), (write, 1)):
                os.dup2(file, standard)
                os.close(file)
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            exec(gateway_io.popen_bootstrapline, {})

        child = fork(work)
        os.close(read)
        os.close(write)
        io = gateway_base.Popen2IO(os.fdopen(requests, "wb"), os.fdopen(answers, "rb"), execmodel)
        io.wait, io.kill = child.wait, child.kill
        return io

    gateway_io.create_io = create_io
    try:
        yield
    finally:
        gateway_io.create_io = former


@uses("xdist.workermanage.WorkerController().gateway.id")
def name_of(node: Any) -> str:
    """Return the name of a worker, "gw0", of the object that stands for it in the controller's hooks."""
    return node.gateway.id


@uses("xdist.workermanage.WorkerController().workerinput")
def inputs_of(node: Any) -> dict[str, Any]:
    """Return what the controller sends to a worker: `pytest_configure_node` may add serialisable values."""
    return node.workerinput


@uses("xdist.workermanage.WorkerController().workeroutput")
def outputs_of(node: Any) -> dict[str, Any]:
    """Return what a finished worker sent to the controller."""
    return node.workeroutput


@uses("pytest.Config().workeroutput")
def outputs(config: pytest.Config) -> dict[str, Any]:
    """Return what this worker sends to the controller when it ends: serialisable values may be added."""
    return config.workeroutput  # type: ignore[attr-defined]


@uses("pytest.Config().workerinput")
def inputs(config: pytest.Config) -> dict[str, Any]:
    """Return what the controller sent to this worker."""
    return config.workerinput  # type: ignore[attr-defined]


@uses("xdist.workermanage.WorkerController().gateway.id")
def worker_number() -> int | None:
    """Return the number at the end of this worker's name: 3 of "gw3", 0 where `--tx` has given it a name without one.

    The environment says so, which is documented, to what a worker's tests start too. None elsewhere.
    """
    name = os.environ.get("PYTEST_XDIST_WORKER")
    if name is None:
        return None
    number = re.search(r"\d+$", name)
    return int(number[0]) if number else 0
