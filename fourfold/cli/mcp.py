"""``fourfold mcp``: serve commands to programs that write kernels, by the Model Context Protocol over standard input.

Each call of a tool runs the command in its own process group. A kernel that crashes, hangs or exits ends its own call
and nothing else.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from fourfold.processes.family import die_with

# The characters of a command's output that an answer holds: the end counts.
SHOWN = 8000
SECONDS = 600
INSTRUCTIONS = "Never report a kernel as done before verify answers passed: true. A failure says what to repair."
_KERNEL = "kernel is FILE_OR_MODULE:FUNCTION from the server's folder, operation a known name or FILE.py:OPERATION."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, metavar="N", help=f"the time limit of a call: {SECONDS} by default"
    )


def command(args: argparse.Namespace) -> int:
    """Serve until standard input ends; return 0, or 2 if the SDK is missing."""
    try:
        from mcp.server import MCPServer
    except ModuleNotFoundError:
        args.error("the Python SDK of the Model Context Protocol is missing: pip install 'fourfold[mcp]'")
    server = MCPServer("fourfold", instructions=INSTRUCTIONS)
    run = partial(answer, seconds=args.seconds)

    async def verify(kernel: str, operation: str, options: list[str] | None = None) -> dict[str, Any]:
        return await run("verify", kernel, "--as", operation, *(options or []), result="--json")

    async def sanitize(script: str, options: list[str] | None = None) -> dict[str, Any]:
        return await run("sanitize", *(options or []), script, result="--json")

    async def bench(kernel: str, operation: str, options: list[str] | None = None) -> dict[str, Any]:
        return await run("bench", kernel, "--as", operation, *(options or []), result="--json")

    async def explain(topic: str) -> dict[str, Any]:
        return await run("explain", topic)

    see = "options are those of"
    for tool, description in (
        (verify, f"Run every check of an operation on a kernel. {_KERNEL} {see} `fourfold verify --help`."),
        (sanitize, f"Run a script with Triton kernels on the CPU; find memory errors. {see} `fourfold sanitize`."),
        (bench, f"Time a kernel beside torch and torch.compile. {_KERNEL} {see} `fourfold bench --help`."),
        (explain, "Explain a check, a kind of verdict or an operation, such as memory, imprecise or softmax."),
    ):
        server.add_tool(tool, description=description)
    server.run()
    return 0


async def answer(*words: str, seconds: float, result: str = "") -> dict[str, Any]:
    """Run a command in its own process group, and end the group with the call.

    Args:
        *words: the command's, behind ``fourfold``.
        seconds: the time limit.
        result: the option that takes the file for the command's result; "" without any.

    Returns:
        ``exit_code``, None after the time limit; ``output``, the end of what it printed; and ``result``, the JSON that
        it wrote, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, name = Path(folder, "result.json"), words[0]
        arguments = [name, *([f"{result}={file}"] if result else []), *words[1:]]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fourfold", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        code, late = None, ""
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), seconds)
            code = process.returncode
        except TimeoutError:
            printed, late = b"", f"not done after {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        text = file.read_text() if file.is_file() else ""
        output = late or printed.decode(errors="replace")[-SHOWN:]
        return {"exit_code": code, "output": output, "result": json.loads(text) if text else None}
