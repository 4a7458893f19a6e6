"""`fourfold.monitor`: a kernel in a training or serving run, with a sample of its calls compared off the path."""

import atexit
import contextlib
import functools
import inspect
import logging
import math
import os
import queue
import random
import shlex
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from fourfold.checks.records import operation_named, reference_of
from fourfold.declaration import defaults
from fourfold.monitoring.judge import CHANGED, RETURNED, JudgeProcess
from fourfold.numerics.dtypes import DTYPES, exact_array
from fourfold.operations.case import Case, is_floating
from fourfold.operations.case_file import SUFFIX, CaseFile
from fourfold.operations.claims import Claims, claims_of
from fourfold.operations.layouts import closest
from fourfold.operations.outputs import list_of
from fourfold.operations.record import Operation
from fourfold.processes.files import write_atomically

# The calls that are recorded for each sampled one. The others are judged only if their numbers are unusual.
DRAWS = 4
# Seconds whose share of the budget may be spent at once. Looks at calls that are not drawn leave half of it.
CREDIT = 1.0
# The most calls, on average, between two readings of the clock; more calls than any run has.
MOST_PASSED, NEVER = 64, 1 << 60
# Each of the first unusual calls is judged, and a falling share of later ones: a parameter may be new in every call.
FIRST_UNUSUAL = 64
# The most keys of calls that are remembered.
MOST_KEYS = 4096
# The most reasons of refused calls that are counted apart.
MOST_REASONS = 32
# A magnitude is unusual if none within this factor of 2^n was seen.
BINADES = 4
JUDGE_SECONDS, CLOSE_SECONDS = 300.0, 10.0
COUNTS = (
    "calls",
    "looked at",
    "sampled",
    "unusual",
    "dropped",
    "passed over",
    "judged",
    "imprecise",
    "refused",
    "wrong",
    "errors",
)
logger = logging.getLogger("fourfold.monitor")


class WrongResult(UserWarning):
    """A live call gave a wrong result."""


class NotMonitored(UserWarning):
    """Calls pass through a monitor that cannot record them."""


class NotOfOperation(ValueError):
    """A call is none of the operation."""


@dataclass(frozen=True)
class Counterexample:
    """A live call with a wrong result.

    Attributes:
        message: the wrong element, with its bound.
        case: the inputs.
        path: the file that holds them; None if none was written.
    """

    message: str
    case: Case
    path: Path | None


@dataclass
class _Record:
    """One recorded call: copies of its tensors, on their device."""

    reason: str
    arguments: Mapping[str, Any]
    layouts: Mapping[str, str]
    bytes: int
    inputs: Mapping[str, torch.Tensor]
    results: dict[str, torch.Tensor]
    events: list[torch.cuda.Event]


def monitor(
    kernel: Callable[..., Any],
    operation: Operation | str,
    *,
    rate: float = 0.001,
    budget: float = 0.002,
    claims: Claims | None = None,
    folder: str | Path = ".fourfold",
    files: int = 16,
    on_failure: Callable[[Counterexample], object] | None = None,
    most_calls: int = 8,
    most_bytes: int = 1 << 28,
    seed: int | None = None,
) -> "LiveMonitor":
    """Return the kernel with a sample of its calls compared with the operation's bounds, forward only.

    A call returns what the kernel returns. Calls are recorded at random, and if a look shows that their shapes,
    strides, dtypes or parameters are new; of the random ones, more are recorded and compared if their magnitudes are
    new. A thread hands the records to a process that judges them on the CPU. A wrong result is a warning,
    `WrongResult`, once for each cause and dtype, and a file, which
    ``fourfold verify KERNEL --as OPERATION --case FILE`` repeats and makes smaller.

    The monitor measures the time that its looks and records take, and passes calls through while that exceeds its
    budget: a new size is seen at the first look that the budget allows.

    Gradients are not compared: other consumers of an input add to its gradient, and a hook on the result's own node
    sees those of the arguments only if the kernel is one ``autograd.Function`` whose wrapper passes them on as they
    are. Neither are unchanged inputs. Under torch.compile, while a CUDA graph is captured, under autocast and in forked
    processes calls pass through; a warning, `NotMonitored`, says so for the first two. A replayed graph does not call
    the kernel.

    Args:
        kernel: a function, or an ``autograd.Function``, that takes the operation's arguments by their names or in their
            order.
        operation: a record, see `fourfold.operation`, or the name of a known one, as ``"softmax"`` or
            ``"FILE.py:OPERATION"``.
        rate: the share of calls to compare, from 0 to 1, as far as the budget allows.
        budget: the share of the time that looks and records may take, above 0; ``math.inf`` looks at every call.
        claims: the kernel's claims; by default those of the decorator `fourfold.claims`. Calls outside of them are
            refused. Storage accuracy counts as imprecise, not as wrong.
        folder: the folder for files. It is made at the first wrong result.
        files: the most files for the operation in the folder.
        on_failure: called with each `Counterexample` in the thread.
        most_calls: the most records that wait. Further ones are dropped.
        most_bytes: the most bytes of all records. Larger calls are dropped.
        seed: of the sample; random by default.

    Raises:
        ValueError: `rate` is not between 0 and 1, `budget` is not above 0, or `operation` is unknown.
        TypeError: `kernel` is no function.
    """
    return LiveMonitor(kernel, operation, rate, budget, claims, folder, files, on_failure, most_calls, most_bytes, seed)


class LiveMonitor:
    """A kernel with a sample of its calls compared: see `monitor`. It is a context that closes at its end."""

    def __init__(
        self,
        kernel: Any,
        operation: Operation | str,
        rate: float,
        budget: float,
        claims: Claims | None,
        folder: str | Path,
        files: int,
        on_failure: Callable[[Counterexample], object] | None,
        most_calls: int,
        most_bytes: int,
        seed: int | None,
    ) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be between 0 and 1, not {rate!r}")
        if not budget > 0:
            raise ValueError(f"budget must be above 0, not {budget!r}")
        if isinstance(kernel, type) and issubclass(kernel, torch.autograd.Function):
            kernel = kernel.apply  # type: ignore[attr-defined]
        if not callable(kernel) or isinstance(kernel, type):
            raise TypeError(f"kernel must be a function, not {kernel!r}")
        functools.update_wrapper(self, kernel)
        self.operation = (
            defaults.complete(operation) if isinstance(operation, Operation) else operation_named(operation)
        )
        self.claims = claims_of(kernel, claims)
        self.reasons: Counter[str] = Counter()
        self._kernel, self._rate, self._random = kernel, rate, random.Random(seed).random
        # The numbers of the next call to look at, and of the next drawn one. A call before them touches few objects:
        # the data of kernels drive them from the caches.
        self._calls, self._next, self._counts = 0, 0, Counter[str]()
        self._next_drawn = self._draw(1)
        self._budget, self._clock, self.spent = budget, time.perf_counter, 0.0
        self._began = self._read_at = self._clock()
        self._read_calls, self._seconds_a_call = 0, 0.0
        # The time at which the budget will have paid what was spent.
        self._paid_at = self._began - CREDIT
        self._place = operation if isinstance(operation, str) else self.operation.name
        self._bind = _binding(kernel, inspect.signature(reference_of(self.operation)))
        self._folder, self._files, self._on_failure = Path(folder), files, on_failure
        self._most_bytes, self._bytes = most_bytes, 0
        self._recent: dict[Any, None] = {}
        self._new = 0
        self._warned: set[Any] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._judge = JudgeProcess(self.operation, self.claims, self.name, JUDGE_SECONDS)
        self._queue: queue.Queue[_Record | None] = queue.Queue(most_calls)
        # torch.compile calls such a function once, as it traces, and not in what it compiles.
        self._tell_compiled = torch.compiler.assume_constant_result(lambda: self._pass_over("torch.compile"))
        self._thread = threading.Thread(target=self._work, name=f"fourfold.monitor {self.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return str(getattr(self._kernel, "__name__", type(self._kernel).__name__))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a model that is copied calls the same kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel; record the call if it is drawn or unusual, and the budget allows it."""
        if is_dynamo_compiling():
            self._tell_compiled()
            return self._kernel(*args, **kwargs)
        self._calls += 1
        if self._calls < self._next:
            return self._kernel(*args, **kwargs)
        began = self._clock()
        reason = self._reason(began, args, kwargs)
        record = self._record(reason, args, kwargs) if reason else None
        self._plan(began)
        if record is None:
            return self._kernel(*args, **kwargs)
        try:
            result = self._kernel(*args, **kwargs)
        except BaseException:
            self._release(record)
            raise
        began = self._clock()
        self._finish(record, result)
        self._plan(began)
        return result

    @property
    def counts(self) -> Counter[str]:
        """Return the numbers of calls by what became of them."""
        return self._counts + Counter(calls=self._calls)

    # ---- in the thread of the run

    def _reason(self, time_of_call: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Look at a call, if the budget allows it; return why to record it, "sampled", "unusual" or "drawn", or ""."""
        self._seconds_a_call = (time_of_call - self._read_at) / max(self._calls - self._read_calls, 1)
        self._read_at, self._read_calls = time_of_call, self._calls
        is_drawn = self._calls >= self._next_drawn
        if is_drawn:
            self._next_drawn = self._draw(self._calls + 1)
        if time_of_call - self._paid_at < (0 if is_drawn else CREDIT / 2):
            return ""
        self._count("looked at")
        if self._is_unusual(args, kwargs):
            return "unusual"
        if not is_drawn:
            return ""
        return "sampled" if self._random() * min(DRAWS * self._rate, 1) < self._rate else "drawn"

    def _is_unusual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Remember a call; return whether it is one of the first of its shapes, strides, dtypes or parameters."""
        try:
            return self._is_new((tuple(kwargs), *map(_key, args), *map(_key, kwargs.values())))
        except TypeError:  # an argument without a hash
            return False

    def _draw(self, first: int) -> int:
        """Draw the number of the next call to record, from `first` on, with the same probability for each call."""
        share = DRAWS * self._rate
        skipped = math.log(1 - self._random()) / math.log1p(-share) if 0 < share < 1 else (0 if share else NEVER)
        return first + int(min(skipped, NEVER))

    def _plan(self, start: float) -> None:
        """Charge the time since `start`, and draw the next call to look at: about when the budget allows a look.

        The number is random because calls recur with the layers of a model. A draw has no memory, so that a later one
        may replace it while the budget allows none.
        """
        current, calls = self._clock(), self._calls
        self._charge(current - start, current)
        waits = [
            min(max(wait, 0) / max(self._seconds_a_call, 1e-9), MOST_PASSED)
            for wait in (self._paid_at - current, self._paid_at + CREDIT / 2 - current)
        ]
        draw, look = (calls + 1 + int(2 * calls_of_wait * self._random()) for calls_of_wait in waits)
        if self._next_drawn < draw:
            self._next_drawn = self._draw(draw)
        self._next = min(self._next_drawn, look)
        end = self._clock()
        self._charge(end - current, end)  # with cold caches this function takes half of the time

    def _charge(self, seconds: float, current: float) -> None:
        """Charge time to the budget."""
        with self._lock:
            self.spent += seconds
            self._paid_at = max(self._paid_at, current - CREDIT) + seconds / self._budget

    def _is_new(self, key: Any) -> bool:
        """Remember a key; return whether to judge its call."""
        with self._lock:
            if key in self._recent:
                return False
            self._recent[key] = None
            if len(self._recent) > MOST_KEYS:
                del self._recent[next(iter(self._recent))]
            self._new += 1
            return self._random() * self._new < FIRST_UNUSUAL

    def _record(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Record | None:
        """Copy the arguments of a call; return None if it cannot be recorded."""
        if self._closed or os.getpid() != self._process:
            return None
        try:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                self._pass_over("CUDA graphs")
                return None
            arguments = _one_by_one(self._bind(args, kwargs), self.operation.lists)
            tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors.values()) or any(
                torch.is_autocast_enabled(kind) for kind in {tensor.device.type for tensor in tensors.values()}
            ):
                self._count("passed over")
                return None
            if reason != "drawn":
                self._count(reason)
            size = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            if self._queue.full() or not self._reserve(size):
                self._count("dropped")
                return None
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            layouts = {name: closest(tensor) for name, tensor in tensors.items()}
            return _Record(reason, {**arguments, **copies}, layouts, size, tensors, {}, [])
        except NotOfOperation as error:
            self._refuse(str(error))
        except Exception:
            self._fail("a call was not recorded")
        return None

    def _finish(self, record: _Record, result: Any) -> None:
        """Copy the results of a call, and hand the record to the thread."""
        try:
            mutated = {n: tensor for n, tensor in record.inputs.items() if list_of(n) in self.operation.mutates}
            results = {f"{CHANGED}{name}": tensor for name, tensor in mutated.items()}
            is_sequence = isinstance(result, tuple | list)
            for place, output in enumerate(result if is_sequence else [result]):
                if isinstance(output, torch.Tensor) and not any(output is tensor for tensor in mutated.values()):
                    results[f"{RETURNED} {place}" if is_sequence else RETURNED] = output
            record.results = {name: tensor.detach().clone() for name, tensor in results.items()}
            for device in {tensor.device for tensor in record.results.values() if tensor.is_cuda}:
                record.events.append(torch.cuda.current_stream(device).record_event())
            record.inputs = {}
            self._queue.put_nowait(record)
        except queue.Full:
            self._release(record)
            self._count("dropped")
        except Exception:
            self._release(record)
            self._fail("a result was not recorded")

    def _reserve(self, size: int) -> bool:
        with self._lock:
            fits = self._bytes + size <= self._most_bytes
            self._bytes += size * fits
            return fits

    def _release(self, record: _Record) -> None:
        with self._lock:
            self._bytes -= record.bytes

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _refuse(self, reason: str) -> None:
        """Count a call that lies outside of the operation or of the claims."""
        self._count("refused")
        if reason in self.reasons or len(self.reasons) < MOST_REASONS:
            self.reasons[reason] += 1

    def _pass_over(self, mode: str) -> None:
        """Count a call that passes through, and say so once."""
        self._count("passed over")
        if mode not in self._warned:
            self._warned.add(mode)
            self._warn(f"{self.name}: calls under {mode} are not monitored", NotMonitored)

    def _warn(self, message: str, category: type[Warning]) -> None:
        """Issue a warning at the kernel's location; log it if a filter makes it an error."""
        code = getattr(inspect.unwrap(self._kernel), "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code else ("fourfold.monitor", 1)
        try:
            warnings.warn_explicit(message, category, *place)
        except Warning:
            logger.warning("%s", message)

    def _fail(self, action: str) -> None:
        """Count the exception that is being handled, and log the first of its type: it must not reach the run."""
        self._count("errors")
        kind = sys.exc_info()[0]
        if (action, kind) not in self._warned:
            self._warned.add((action, kind))
            logger.warning("%s: %s", self.name, action, exc_info=True)

    # ---- in the thread of the monitor

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            began = time.thread_time()
            try:
                self._examine(record)
            except Exception:
                self._fail("a call was not judged")
            self._release(record)
            self._charge(time.thread_time() - began, self._clock())
            del record

    def _examine(self, record: _Record) -> None:
        file = self._file(record)
        is_new = self._is_new(_magnitudes(file.case))
        if record.reason == "drawn":
            if not is_new:
                return
            self._count("unusual")
        try:
            judgement = self._judge.judge(file.encode())
        except TypeError as error:  # of a parameter
            self._refuse(str(error))
            return
        if judgement["status"] == "refused":
            self._refuse(judgement["message"])
            return
        self._count("judged")
        if judgement["status"] != "right":
            self._count(judgement["status"])
        if judgement["status"] == "wrong":
            self._report(replace(file, message=judgement["message"]), (judgement["cause"], file.dtype))

    def _file(self, record: _Record) -> CaseFile:
        """Return a recorded call with its tensors on the host, copied on a stream of its own."""
        tensors = {name: value for name, value in record.arguments.items() if isinstance(value, torch.Tensor)}
        with contextlib.ExitStack() as streams:
            for device in {tensor.device for tensor in (*tensors.values(), *record.results.values()) if tensor.is_cuda}:
                stream = torch.cuda.Stream(device)
                streams.enter_context(torch.cuda.stream(stream))
                for event in record.events:
                    stream.wait_event(event)
            inputs = {name: exact_array(tensor) for name, tensor in tensors.items()}
            results = {name: exact_array(tensor) for name, tensor in record.results.items()}
        of_inputs = (array.dtype.name for name, array in inputs.items() if name not in self.operation.dtypes)
        of_results = (array.dtype.name for array in results.values())
        dtype_name = next((name for name in (*of_inputs, *of_results) if name in DTYPES), "float32")
        parameters = {name: value for name, value in record.arguments.items() if name not in inputs}
        case = Case(inputs, np.zeros((), np.float32), parameters, record.layouts)
        return CaseFile(operation=self.operation.name, dtype=dtype_name, case=case, results=results)

    def _report(self, file: CaseFile, cause: tuple[str, str]) -> None:
        """Write a wrong call to a file, call `on_failure`, and warn of a new cause."""
        path = self._write(file)
        if self._on_failure is not None:
            self._on_failure(Counterexample(file.message, file.case, path))
        if cause not in self._warned:
            self._warned.add(cause)
            command = shlex.join(["fourfold", "verify", "KERNEL", "--as", self._place, "--case", str(path)])
            repeat = f"\nrepeat with: {command}" if path else ""
            self._warn(f"a live call of {self.name} is wrong: {file.message}{repeat}", WrongResult)

    def _write(self, file: CaseFile) -> Path | None:
        path = self._folder / f"{file.operation}-{file.case.digest.hex()[:12]}{SUFFIX}"
        if not path.exists() and len([*self._folder.glob(f"{file.operation}-*{SUFFIX}")]) >= self._files:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.encode())
        return path

    # ---- for the user

    def summary(self) -> str:
        """Return the counts of calls and the share of the time in a line, and the reasons of refused ones."""
        numbers = self.counts
        share = self.spent / max(self._clock() - self._began, self.spent, 1e-9)
        counts = ", ".join(f"{numbers[name]} {name}" for name in COUNTS) + f"; {share:.2%} of the time"
        reasons = [f"  refused {count}: {reason}" for reason, count in self.reasons.most_common()]
        return "\n".join([f"{self.name} as {self.operation.name}: {counts}", *reasons])

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Judge the records that wait, for at most some seconds, and end the thread. Later calls pass through."""
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._process:
            return
        self._closed, self._next = True, NEVER
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(deadline - time.monotonic(), 0))
        with contextlib.suppress(queue.Empty):
            while self._thread.is_alive() and self._queue.get_nowait() is not None:
                self._count("dropped")
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._judge.end()


def _key(value: Any) -> Any:
    """Return what makes an argument usual: a tensor's shape, strides, dtype and device; other values themselves."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return tuple(map(_key, value)) if isinstance(value, tuple | list) else value


def _magnitudes(case: Case) -> Any:
    """Return the rough magnitude of each floating-point input, and whether it has NaN or infinities."""
    result = []
    for name, array in case.inputs.items():
        if is_floating(array) and array.size:
            with np.errstate(all="ignore"):
                largest = float(np.max(np.abs(array)))
            result.append((name, round(math.frexp(largest)[1] / BINADES) if math.isfinite(largest) else repr(largest)))
    return tuple(result)


def _binding(kernel: Any, target: inspect.Signature) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that names the arguments of a kernel's call as the operation does, with those left out."""
    try:
        signature = inspect.signature(kernel)
        by_name = target.parameters.keys() <= signature.parameters.keys()
    except (TypeError, ValueError):  # it is not written in Python
        signature, by_name = target, True
    names = (
        {name: name for name in signature.parameters} if by_name else dict(zip(signature.parameters, target.parameters))
    )
    defaults = {name: p.default for name, p in target.parameters.items() if p.default is not p.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**defaults, **{names.get(name, name): value for name, value in bound.arguments.items()}}
        for name in values.keys() - target.parameters.keys():
            if name not in signature.parameters or values[name] is not signature.parameters[name].default:
                raise NotOfOperation(f"the operation has no argument {name}")
        return {name: values[name] for name in target.parameters}

    return bind


def _one_by_one(arguments: Mapping[str, Any], lists: tuple[str, ...]) -> dict[str, Any]:
    """Return arguments with the tensors of lists one by one, by names such as ``xs[0]``."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        flat |= {f"{name}[{place}]": item for place, item in enumerate(value)} if name in lists else {name: value}
    return flat
