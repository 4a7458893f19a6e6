"""A time limit for Triton's compiler: for a row in one block its last stage may take minutes, or hours.

A kernel that is not in the cache is compiled in a child process, which has the limit, and leaves it in the cache. A
compiler within this process could not be interrupted.

Where cores are idle, other children compile ahead what a run is likely to need next: the same kernel in the other
dtypes, and for integers that are multiples of 16 or not.
"""

import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fourfold.backends.cuda.compile import cache_folder
from fourfold.operations.not_reached import NotReached
from fourfold.operations.refusals import chain
from fourfold.processes.child import Child, Limits

if TYPE_CHECKING:
    from fourfold.compat.triton_internals import Compilation, Specialisation

# A child that takes this many times its limit by the clock does nothing but wait.
CLOCK = 30
_TOO_LONG = 3
# The most children that compile ahead.
MOST_AHEAD = 8
# One compilation at a time, so that no thread holds one of the compiler's locks while another one forks.
_turn = threading.RLock()


@contextlib.contextmanager
def limit_compilation(device: str, seconds: float, dtypes: Sequence[str] = (), cores: int = 1) -> Iterator[None]:
    """Raise `NotReached` on a GPU for a launch whose kernel takes the compiler longer than this.

    A launch of the same kernel with constants at least as large raises it, too. The cache records exceeded limits.

    Args:
        device: "cpu", where Triton compiles nothing, or "cuda".
        seconds: the limit of processor time for a kernel; it applies to the compiler and to the assembler separately.
        dtypes: the floating-point dtypes of the run, in its order. What the first one needs is compiled ahead for the
            others.
        cores: the number of cores that this process may keep busy. With one, nothing is compiled ahead.
    """
    if device == "cpu":
        yield
        return
    # Imported here, because it imports Triton: whether kernels are interpreted is decided then.
    from fourfold.compat.triton_internals import FLOATS, NotKept, compilations_replaced

    floating = [dtype for dtype in dtypes if dtype in FLOATS.values()]
    ahead = Ahead(floating, min(cores - 1, MOST_AHEAD), math.ceil(seconds))
    try:
        with compilations_replaced(functools.partial(_compile_with_limit, math.ceil(seconds), NotKept, ahead)):
            yield
    finally:
        ahead.end()


def _compile_with_limit(seconds: int, not_kept: type[BaseException], ahead: "Ahead", compilation: "Compilation") -> Any:
    """Return the requested kernel, from the cache or compiled within the limit.

    Raises:
        NotReached: it takes longer.
    """
    with _turn:
        with contextlib.suppress(not_kept):
            return compilation.load()
        abandoned = Abandoned(compilation)
        if not abandoned.covers(seconds):
            ahead.compile_with(compilation)
            if not ends_within(compilation.run, seconds):
                abandoned.add(seconds)
        if least := abandoned.covers(seconds):
            sizes = "".join(f" {name}={size}" for name, size in least["sizes"].items())
            reason = f"{compilation.kernel}{' with' * bool(sizes)}{sizes} takes its compiler more than {seconds} s"
            raise NotReached(reason)
        return compilation.run()


class Ahead:
    """The kernels that a run is likely to need next, and the children that compile them for Triton's cache.

    Args:
        dtypes: the floating-point dtypes of the run, in its order.
        most: the most children at a time.
        seconds: the limit of processor time for a child.
    """

    def __init__(self, dtypes: Sequence[str], most: int, seconds: int) -> None:
        self.dtypes, self.most, self.seconds, self.owner = dtypes, most, seconds, os.getpid()
        self._children: list[Child] = []
        self._waiting: list[Callable[[], object]] = []
        self._begun = set[tuple[str, str]]()  # the digest and the specialisation of each kernel

    def compile_with(self, compilation: "Compilation") -> None:
        """Compile others ahead while this process compiles a kernel.

        They go to a single child: to fork a process with a GPU takes as long as to compile a small kernel.
        """
        if self.most < 1 or self.owner != os.getpid():
            return
        self._begun.add((compilation.digest, compilation.specialisation.name))
        for related in self._likely(compilation.specialisation):
            if (key := (compilation.digest, related.name)) not in self._begun:
                self._begun.add(key)
                self._waiting.append(functools.partial(compilation.run_as, related))
        self._children = [child for child in self._children if child.poll() is None]
        if self._waiting and len(self._children) < self.most:
            work, limits = functools.partial(_compile_all, self._waiting), Limits(processor=self.seconds)
            self._children.append(Child.fork(work, quiet=True, limits=limits))
            self._waiting = []

    def end(self) -> None:
        """End the children."""
        if self.owner == os.getpid():
            for child in self._children:
                child.kill()

    def _likely(self, specialisation: "Specialisation") -> "Iterator[Specialisation]":
        """Yield what the kernel is likely to be needed for: other integers first, then other dtypes."""
        other = specialisation.with_other_integers()
        if other is not None:
            yield other
        if specialisation.dtype() in self.dtypes[:1]:
            for each in filter(None, (specialisation, other)):
                yield from map(each.with_dtype, self.dtypes[1:])


def _compile_all(works: Sequence[Callable[[], object]]) -> None:
    """Compile some kernels in a child, whose other state is lost."""
    gc.disable()  # garbage may hold memory of the GPU, which is the parent's
    for work in works:
        with contextlib.suppress(Exception):
            work()


class Abandoned:
    """The record of a kernel's abandoned compilations, in this process and in others."""

    def __init__(self, compilation: "Compilation") -> None:
        self.compilation = compilation
        self._file = cache_folder("abandoned") / hashlib.sha256(compilation.digest.encode()).hexdigest()

    def add(self, seconds: int) -> None:
        """Record that the requested compilation takes longer than this."""
        line = {"seconds": seconds, "sizes": self.compilation.sizes, "num_warps": self.compilation.num_warps}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def covers(self, seconds: int) -> dict[str, Any] | None:
        """Return an abandoned compilation with at least this limit and no larger sizes per warp."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return next((line for line in map(json.loads, lines) if self._is_as_large_as(line, seconds)), None)

    def _is_as_large_as(self, line: dict[str, Any], seconds: int) -> bool:
        sizes = self.compilation.sizes
        return (
            line["seconds"] >= seconds
            and line["num_warps"] >= self.compilation.num_warps
            and line["sizes"].keys() == sizes.keys()
            and all(sizes[name] >= size for name, size in line["sizes"].items())
        )


def ends_within(work: Callable[[], Any], seconds: int) -> bool:
    """Run some work in a child; return whether it ended within its limit, even by an exception.

    Args:
        work: affects only files, as the child's other state is lost.
        seconds: the limit of processor time for the child and for each process that it starts.
    """
    child = Child.fork(functools.partial(_work, work), quiet=True, limits=Limits(processor=seconds))
    try:
        death = child.wait(CLOCK * seconds)
    finally:  # also after an interrupt, such as a test's time limit
        child.kill()  # and the child's own children
    return death is not None and death.code not in (_TOO_LONG, -signal.SIGXCPU)


def _work(work: Callable[[], Any]) -> int:
    """Do the work in a child; return its exit code."""
    gc.disable()  # garbage may hold memory of the GPU, which is the parent's
    try:
        work()
    except BaseException as error:
        # The assembler, a process of its own, has the same limit.
        late = any(getattr(cause, "returncode", None) == -signal.SIGXCPU for cause in chain(error))
        return _TOO_LONG if late else 0
    return 0
