"""Configurations of kernels: which there are, which of them a launch takes, and how a test forces each.

On a GPU the first launch of a kind measures the configurations that fit it, and the fastest is kept, on disk too. A
default is taken, without measuring, for little work, on the CPU, while a CUDA graph is captured, and where
FOURFOLD_AUTOTUNE is 0.
"""

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from impls.arguments import FLOATING
from impls.cuda_compile import CudaError, cache_directory, digest, locked, source_closure, write_atomically

# Long enough that the clock's resolution and a launch's jitter are small against it.
MEASURED_MILLISECONDS = 10.0
MOST_RUNS = 50
BATCHES = 3

_kernels: dict[str, "Tuner"] = {}
_forced: dict[str, "Forced"] = {}


def anywhere(device: torch.device) -> bool:
    """Every device."""
    return True


@dataclass(frozen=True)
class Configuration:
    """One way to launch a kernel.

    Attributes:
        name: no other configuration of the kernel has it.
        options: what the launch makes of it.
        dtypes: for which it is.
        runs_on: the devices that can run it.
        needs: what others lack.
    """

    name: str
    options: Mapping[str, Any] = field(hash=False)
    dtypes: frozenset[torch.dtype] = FLOATING
    runs_on: Callable[[torch.device], bool] = anywhere
    needs: str = ""

    def serves(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it is for a dtype and a device."""
        return dtype in self.dtypes and self.runs_on(device)


@dataclass
class Forced:
    """A configuration that a kernel's launches take, and how many have."""

    configuration: Configuration
    launches: int = 0


class Tuner:
    """The configurations of one kernel, and which of them a launch takes.

    Args:
        name: of the kernel, as `configurations` and `forced` know it.
        all_configurations: in the order in which they are measured.
        source: the file that defines the kernel; what was measured counts until it changes.
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
        """The configuration for a launch.

        Args:
            device: of the launch.
            kind: whatever the choice depends on; its repr names it on disk.
            fits: whether a configuration can do this launch.
            default: one that fits, chosen without measuring.
            run: does the launch, and may do it many times.
            worthwhile: whether launches of the kind take so long that measuring pays.
        """
        if not _forced and (found := self._chosen.get((device, kind))):
            return found
        if forced := _forced.get(self.name):
            if not fits(forced.configuration):
                return default()
            forced.launches += 1
            return forced.configuration
        if not worthwhile or device.type == "cpu" or os.environ.get("FOURFOLD_AUTOTUNE") == "0":
            return default()
        if torch.cuda.is_current_stream_capturing():
            return default()
        fitting = [configuration for configuration in self.configurations if fits(configuration)]
        chosen = self._remembered(device, kind, fitting) or self._measured(device, kind, fitting, run) or default()
        self._chosen[device, kind] = chosen
        return chosen

    def _file(self, device: torch.device) -> pathlib.Path:
        # A baseline's kernels, where they are the same, are to run as today's: their package has another name.
        package = __name__.partition(".")[0]
        texts = [text.replace(package, "") for path, text in sorted(source_closure(self._source).items())]
        what = digest(self.name, torch.cuda.get_device_name(device), torch.__version__, texts)
        return cache_directory() / "tuning" / f"{what}.json"

    def _remembered(self, device: torch.device, kind: Hashable, fitting: list[Configuration]) -> Configuration | None:
        file = self._file(device)
        if not file.exists():
            return None
        found = self._by_name.get(json.loads(file.read_text()).get(repr(kind)))
        return found if found in fitting else None

    def _measured(
        self,
        device: torch.device,
        kind: Hashable,
        fitting: list[Configuration],
        run: Callable[[Configuration], None],
    ) -> Configuration | None:
        # Not before somebody has said whether Triton is to interpret, which it takes in as it is imported.
        from triton.runtime.errors import OutOfResources

        times: dict[Configuration, float] = {}
        for configuration in fitting:
            # One that asks for more than the device has is no candidate there.
            with contextlib.suppress(OutOfResources, CudaError):
                times[configuration] = milliseconds(functools.partial(run, configuration))
        if not times:
            return None
        fastest = min(times, key=times.__getitem__)
        file = self._file(device)
        with locked(file.parent):
            known = json.loads(file.read_text()) if file.exists() else {}
            write_atomically(file, json.dumps({**known, repr(kind): fastest.name}).encode())
        return fastest


def milliseconds(run: Callable[[], None]) -> float:
    """How long a launch takes on the current stream, once it is warm: the best of a few batches of runs."""
    run()

    def batch(runs: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs

    runs = max(1, min(MOST_RUNS, int(MEASURED_MILLISECONDS / max(batch(1), 1e-3))))
    return min(batch(runs) for _ in range(BATCHES))


def kernels() -> tuple[str, ...]:
    """The kernels that have configurations, of the modules that are imported."""
    return tuple(_kernels)


def configurations(kernel: str) -> tuple[Configuration, ...]:
    """All configurations of a kernel."""
    return _kernels[kernel].configurations


@contextlib.contextmanager
def forced(kernel: str, configuration: str) -> Iterator[Forced]:
    """Within it, launches of a kernel take a configuration wherever it fits, and the others their default.

    Gives a `Forced`, whose count of launches says whether it was taken at all.

    Raises:
        KeyError: there is no such kernel or configuration.
    """
    # Not by thread: autograd runs backward on threads of its own.
    force = Forced(_kernels[kernel]._by_name[configuration])
    _forced[kernel] = force
    try:
        yield force
    finally:
        del _forced[kernel]
