"""Ask Triton's compiler about the kernels that the interpreter has run, on a machine without a GPU.

The interpreter runs what the compiler refuses: ``break``, or a number of the module that is no `tl.constexpr`. The
compiler's front end says so without a GPU, in some 20 ms for a kernel. A forked process asks it, because in the process
itself every kernel and every function of the language is one for the interpreter.
"""

import gc
import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fourfold.backends.triton import takeover
from fourfold.processes.child import Child, Limits

# Compute capabilities times 10. A kernel that the compiler accepts for one of them is not refused.
ARCHITECTURES = (90, 80, 100)
# The limit in seconds of processor time.
SECONDS = 60
# Exceptions by which the language refuses something. Others may be due to the GPU that is missing.
_REFUSALS = (AttributeError, NameError, TypeError, ValueError, AssertionError, NotImplementedError)


class CompilerRefusal(NamedTuple):
    """A kernel that runs in the interpreter, and that the compiler refuses.

    Attributes:
        kernel: its name.
        reason: the compiler's words.
        file, line, text: the line that it refuses.
    """

    kernel: str
    reason: str
    file: str
    line: int
    text: str


class CompilerAnswer(NamedTuple):
    """What the compiler says of the kernels that ran: how many it accepts, which it refuses, and which are unknown."""

    accepted: int
    refused: list[CompilerRefusal]
    unknown: list[str]


def forget_launches() -> None:
    """Forget the launches so far."""
    from fourfold.backends.triton.interpreter import launches

    launches.known.clear()


def answer() -> CompilerAnswer:
    """Return what the compiler says of the launches that are remembered."""
    from fourfold.backends.triton.interpreter import launches

    if not launches.known:
        return CompilerAnswer(0, [], [])
    with tempfile.TemporaryFile("w+") as file:
        child = Child.fork(
            lambda: _ask(list(launches.known.values()), file), quiet=True, limits=Limits(processor=SECONDS)
        )
        death = child.wait()
        file.seek(0)
        lines = [json.loads(line) for line in file]
    refused = dict.fromkeys(CompilerRefusal(*line) for line in lines if isinstance(line, list))
    unknown = dict.fromkeys(line for line in lines if isinstance(line, str))
    if len(lines) < len(launches.known):
        unknown[f"the process of the compiler {death.cause if death else 'was lost'}"] = None
    return CompilerAnswer(lines.count(None), list(refused), list(unknown))


def _ask(launches: list[Any], file: IO[str]) -> None:
    """Ask the compiler, in a process of its own; write a line of JSON for each launch."""
    gc.disable()
    from fourfold.compat import triton_internals

    takeover.compile_kernels()
    triton_internals.stop_after_front_end()
    for launch in launches:
        print(json.dumps(_verdict(launch)), file=file, flush=True)


def _verdict(launch: Any) -> CompilerRefusal | str | None:
    """Return the refusal of a launch; None if the compiler accepts it; words if it is not known."""
    verdict: CompilerRefusal | str | None = None
    for architecture in ARCHITECTURES:
        verdict = _verdict_for(launch, architecture)
        if not isinstance(verdict, CompilerRefusal):
            break
    return verdict


def _verdict_for(launch: Any, architecture: int) -> CompilerRefusal | str | None:
    from fourfold.compat import triton_internals

    try:
        with triton_internals.driver_replaced(triton_internals.AbsentDriver(architecture)):
            launch.kernel.run(*launch.arguments, grid=(1,), warmup=True, **launch.options)
    except triton_internals.AcceptedByFrontEnd:
        return None
    except Exception as error:
        return _refusal(launch.kernel, error) or f"{launch.kernel.__name__}: {type(error).__name__}: {error}"
    return f"{launch.kernel.__name__}: the compiler was not asked"


def _refusal(kernel: Any, error: BaseException) -> CompilerRefusal | None:
    """Return the refusal that an exception of the compiler states; None if it may be due to something else."""
    from triton.compiler import CompilationError

    if not isinstance(error, CompilationError):
        return None
    refusal: Any = error
    while isinstance(refusal.__cause__, CompilationError):
        refusal = refusal.__cause__
    reason = next((each for each in _contexts(refusal) if not isinstance(each, CompilationError)), None)
    if reason is not None and not (isinstance(reason, _REFUSALS) and _is_of_the_language(reason)):
        return None
    message = str(reason or refusal.error_message or type(error).__name__).strip()
    return CompilerRefusal(kernel.__name__, message, *_place(refusal))


def _contexts(error: BaseException) -> Iterator[BaseException]:
    while (context := error.__cause__ or error.__context__) is not None:
        yield context
        error = context


def _is_of_the_language(error: BaseException) -> bool:
    """Return whether Triton's compiler or language raised an exception, and not a function or driver that they called.

    Triton removes the frames of its compiler from the traceback.
    """
    import triton

    from fourfold.compat.triton_internals import AbsentDriver

    if isinstance(error, AttributeError) and isinstance(error.obj, AbsentDriver):
        return False
    if error.__traceback__ is None:
        return True
    file = Path(inspect.getinnerframes(error.__traceback__, 0)[-1].filename)
    package = Path(triton.__file__).parent
    return package / "language" in file.parents or package / "compiler" in file.parents


def _place(error: Any) -> tuple[str, int, str]:
    """Return the file, the line and its text, at which the compiler refuses a kernel or a function that it calls."""
    from triton.runtime.jit import JITFunction

    number = getattr(error.node, "lineno", 1)
    for function in gc.get_objects():
        if type(function) is JITFunction and function.src == error.src:
            lines, first = inspect.getsourcelines(function.fn)
            begin = next((at for at, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
            text = lines[min(begin + number, len(lines)) - 1]
            return inspect.getsourcefile(function.fn) or "", first + begin + number - 1, text.strip()
    return "", number, ""
