"""Run ``python -m MODULE`` in a fork of a process that has imported torch, and little else.

Importing torch takes two seconds of processor time, more than the rest of many runs of pytest. The forked process has
the arguments, the folder, the variables, the search path and the output of a new process.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

# The limit for a process that ends by itself much sooner.
MOST_SECONDS = 300
# The first call of torch.autograd.grad imports the second, with all of sympy, in half a second.
LOADED = ("torch", "torch.fx.experimental.symbolic_shapes")
# Make a forked process print where each of its threads is, and those of its children.
SAY_WHERE, SECONDS_TO_SAY = signal.SIGUSR1, 1.0


def run(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str], loaded: tuple[str, ...] = LOADED
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ARGUMENTS``; like `subprocess.run` with its output captured.

    Args:
        *arguments: a module, and its arguments.
        cwd: the folder that the process is in.
        env: its variables. Those that Python reads when it starts have no effect, but for PYTHONPATH.
        loaded: modules that the forking process has imported.

    Raises:
        TimeoutError: it has not ended within `MOST_SECONDS`. It is then killed. The message says where it was.
    """
    command = [sys.executable, "-m", *map(str, arguments)]
    request = json.dumps({"command": command, "cwd": str(cwd), "env": dict(env)})
    with contextlib.ExitStack() as stack:
        given, output, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(request)
        given.seek(0)
        connection, process = server(loaded)
        try:
            socket.send_fds(connection, [b"."], [file.fileno() for file in (given, output, errors)])
            answer = connection.recv(64)
            if not answer:
                raise ChildProcessError(f"the process that was to run {shlex.join(command)} has ended")
        except BaseException as error:  # Ctrl-C and time limits among them
            if isinstance(error, TimeoutError):
                os.killpg(process.pid, SAY_WHERE)
                time.sleep(SECONDS_TO_SAY)
                output.seek(0)
                errors.seek(0)
                error.add_note(output.read() + errors.read())
            server.cache_clear()
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, int(answer), output.read(), errors.read())


def variables(*others: str, **more: str) -> dict[str, str]:
    """Return this process's variables and more, but none of pytest's and none whose names begin with others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", *others))}
    return kept | more


def printed(
    program: str | Path, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a Python program, by its text or its file, in a new process that must succeed; return its output.

    Triton reads the source of a kernel from a file.
    """
    words = [str(program)] if isinstance(program, Path) else ["-c", program]
    command = [sys.executable, "-W", "ignore", *words, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def server(loaded: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the process that forks, and a connection to it. It ends when the connection does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-W", "ignore", __file__, str(there.fileno()), *loaded]
        # In its own group, which is killed with all its children.
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, process_group=0)
    here.settimeout(MOST_SECONDS)
    atexit.register(_end, here, process)
    return here, process


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


def serve(connection: socket.socket) -> None:
    """Fork for each request, and answer with the exit code; the negative number of the signal, if it died of one."""
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # these objects stay in the memory that the forked processes share
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1, 3)
        if not message:
            return
        process = os.fork()
        if process == 0:
            connection.close()
            become(*files)
            return
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        try:
            connection.send(str(code).encode())
        except BrokenPipeError:
            return


def become(given: int, output: int, errors: int) -> None:
    """Run what a request asks for, in this process."""
    with open(given) as file:
        request = json.load(file)
    for file_number, standard in ((output, 1), (errors, 2)):
        os.dup2(file_number, standard)
        os.close(file_number)
    faulthandler.register(SAY_WHERE, file=2)
    # A shell makes background processes ignore the first of these, and nohup the second.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(request["cwd"])
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd(), *map(os.path.abspath, own), *(p for p in sys.path[1:] if p not in inherited)]
    os.environ.clear()
    os.environ.update(request["env"])
    _, _, module, *arguments = sys.orig_argv = request["command"]
    sys.argv = ["-m", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(SAY_WHERE, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        listening.set_inheritable(False)
        serve(listening)
