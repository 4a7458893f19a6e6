"""Configurations of kernels: list them, choose one for a launch, and force one in a test.

On a GPU, the first launch of a kind measures the configurations that fit it. The fastest is kept, on disk as well. A
default is used for small launches, on the CPU, while a CUDA graph is captured, and with FOURFOLD_AUTOTUNE=0.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fourfold.backends import known_calls
from fourfold.backends.arguments import FLOATING
from fourfold.backends.cuda.compile import CudaError, cache_folder, digest, directory_lock
from fourfold.backends.cuda.declarations import source_closure
from fourfold.compat import torch_internals
from fourfold.processes.files import write_atomically

# Long enough that the clock's resolution and the jitter of launches do not matter.
MEASURED_MILLISECONDS = 10.0
MOST_RUNS = 50
BATCHES = 3
# About a GPU's clock rate.
CYCLES_PER_SECOND = 2e9

_kernels: dict[str, "Tuner"] = {}
_forced: dict[str, "Forced"] = {}
_only_compiles = False


def anywhere(device: torch.device) -> bool:
    """Accept every device."""
    return True


def on_gpu(device: torch.device) -> bool:
    """Accept a GPU."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Configuration:
    """One way to launch a kernel.

    Attributes:
        name: unique among the kernel's configurations.
        options: interpreted by the kernel's launch function.
        dtypes: the dtypes that the configuration supports.
        runs_on: whether a device can run it.
        needs: what a device must have to run it, for messages.
        of_gradients: whether it launches kernels of gradients alone.
    """

    name: str
    options: Mapping[str, Any] = field(hash=False)
    dtypes: frozenset[torch.dtype] = FLOATING
    runs_on: Callable[[torch.device], bool] = anywhere
    needs: str = ""
    of_gradients: bool = False

    def serves(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the configuration supports a dtype and a device."""
        return dtype in self.dtypes and self.runs_on(device)


@dataclass
class Forced:
    """A configuration that a kernel's launches are forced to use.

    Attributes:
        configuration: the forced one.
        launches: the number of launches that used it.
        alone: whether a launch that it cannot do raises `Misfit` instead of taking the default.
    """

    configuration: Configuration
    launches: int = 0
    alone: bool = False


class Misfit(Exception):
    """An exception for a launch that a forced configuration cannot do."""


class Tuner:
    """Chooser of a configuration of one kernel for each launch.

    Args:
        name: the kernel's name, for `configurations` and `force_configuration`.
        all_configurations: in the order in which they are measured.
        source: the file that defines the kernel. A change of it discards the measurements.
    """

    def __init__(self, name: str, all_configurations: tuple[Configuration, ...], source: pathlib.Path) -> None:
        self.name, self.configurations, self._source = name, all_configurations, source
        self._by_name = {configuration.name: configuration for configuration in all_configurations}
        self._chosen: dict[tuple[Any, Hashable], Configuration] = {}
        _kernels[name] = self

    def choose(
        self,
        device: torch.device,
        kind: Hashable,
        fits: Callable[[Configuration], bool],
        default: Callable[[], Configuration],
        run: Callable[[Configuration], None],
        worthwhile: bool = True,
    ) -> Configuration:
        """Return the configuration for a launch.

        Args:
            device: of the launch.
            kind: everything that the choice depends on. Its repr is the key on disk.
            fits: whether a configuration can do this launch.
            default: returns a configuration that fits, without measuring.
            run: does the launch. It may be called many times.
            worthwhile: whether launches of the kind take long enough that measuring pays.

        Raises:
            Misfit: a configuration that is forced alone does not fit.
        """
        if not _forced and (earlier := self._chosen.get((device, kind))):
            return earlier
        if (recorder := known_calls.recorder()) is not None and worthwhile:
            recorder.refuse()  # the choice may differ at the next call
        if forced := _forced.get(self.name):
            if not fits(forced.configuration):
                if forced.alone:
                    raise Misfit(forced.configuration.name)
                return default()
            forced.launches += 1
            return forced.configuration
        if not worthwhile or device.type == "cpu" or os.environ.get("FOURFOLD_AUTOTUNE") == "0":
            return default()
        if torch.cuda.is_current_stream_capturing():
            return default()
        fitting = [configuration for configuration in self.configurations if fits(configuration)]
        chosen = self._recall(device, kind, fitting) or self._measure(device, kind, fitting, run) or default()
        self._chosen[device, kind] = chosen
        return chosen

    def _file(self, device: torch.device) -> pathlib.Path:
        # An unchanged kernel of a baseline must use the same choice as today's, though its package has another name.
        package = __name__.partition(".")[0]
        own_package = re.compile(rf"\b{package}(?=\.(?:backends|compat|impls)\b)")
        texts = [own_package.sub("", text) for path, text in sorted(source_closure(self._source).items())]
        key = digest(self.name, torch.cuda.get_device_name(device), torch.__version__, texts)
        return cache_folder("tuning") / f"{key}.json"

    def _recall(self, device: torch.device, kind: Hashable, fitting: list[Configuration]) -> Configuration | None:
        configuration = self._by_name.get(_read_choices(self._file(device)).get(repr(kind), ""))
        return configuration if configuration in fitting else None

    def _measure(
        self,
        device: torch.device,
        kind: Hashable,
        fitting: list[Configuration],
        run: Callable[[Configuration], None],
    ) -> Configuration | None:
        # Import late: Triton reads TRITON_INTERPRET when it is imported, and the caller may still have to set it.
        from triton import OutOfResources

        times: dict[Configuration, float] = {}
        for configuration in fitting:
            # Skip a configuration that asks for more resources than the device has.
            with contextlib.suppress(OutOfResources, CudaError):
                if _only_compiles:
                    run(configuration)
                else:
                    times[configuration] = milliseconds(functools.partial(run, configuration))
        if not times:
            return None
        fastest = min(times, key=times.__getitem__)
        file = self._file(device)
        with directory_lock(file.parent), contextlib.suppress(OSError):  # an unwritable choice is measured again
            write_atomically(file, json.dumps({**_read_choices(file), repr(kind): fastest.name}).encode())
        return fastest


def _read_choices(file: pathlib.Path) -> dict[str, str]:
    """Return the fastest configurations recorded in a file, by kind of launch; none if missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        choices = json.loads(file.read_text())
        if isinstance(choices, dict):
            return {kind: name for kind, name in choices.items() if isinstance(name, str)}
    return {}


def milliseconds(run: Callable[[], None]) -> float:
    """Time a warm launch on the current stream: the best mean of a few batches of runs, without the host's time."""
    run()

    def batch(runs: int, host_seconds: float) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Keep the device busy until all runs are enqueued: short ones would otherwise wait for the host.
        torch_internals.keep_stream_busy(int(2 * host_seconds * runs * CYCLES_PER_SECOND))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs

    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    host_seconds = time.perf_counter() - began
    runs = max(1, min(MOST_RUNS, int(MEASURED_MILLISECONDS / max(batch(1, host_seconds), 1e-3))))
    return min(batch(runs, host_seconds) for _ in range(BATCHES))


@contextlib.contextmanager
def only_compile() -> Iterator[None]:
    """Run each configuration once instead of measuring it, and choose the default: others may use the GPU meanwhile."""
    global _only_compiles
    _only_compiles = True
    try:
        yield
    finally:
        _only_compiles = False


def nothing_forced() -> bool:
    """Return whether no kernel is forced to use a configuration."""
    return not _forced


def configurations(kernel: str) -> tuple[Configuration, ...]:
    """Return all configurations of a kernel; none if no module imported so far has a tuner of this name."""
    return _kernels[kernel].configurations if kernel in _kernels else ()


@contextlib.contextmanager
def force_configuration(kernel: str, configuration: str) -> Iterator[Forced]:
    """Launch a kernel with a configuration wherever it fits, and otherwise with its default.

    It yields a `Forced`, whose count of launches shows whether the configuration was used at all, and whose `alone` may
    be set.

    Raises:
        KeyError: there is no such kernel or configuration.
    """
    # A module-wide variable, because autograd runs backward on its own threads.
    force = Forced(_kernels[kernel]._by_name[configuration])
    _forced[kernel] = force
    try:
        yield force
    finally:
        del _forced[kernel]
