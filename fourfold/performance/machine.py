"""The machine: its description for the record, and the state of its GPU during a benchmark."""

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pynvml
import torch

# The bits of NVML's clocks-throttle reasons.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
# The packages of the libraries that `peers` calls.
PEERS = {"liger": "liger-kernel", "quack": "quack-kernels", "flaggems": "flag-gems"}
# If one of these differs, it is another machine, and the times cannot be compared.
IDENTITY = ("device", "gpu", "cpu", "architecture")


def toolchain() -> dict[str, str]:
    """Return the environment variables that keep Triton's assembler and cache as they are.

    torch.compile sets those that are not set, to an assembler of its own: kernels compiled later have other code.
    """
    from triton import knobs

    return {"TRITON_PTXAS_PATH": knobs.nvidia.ptxas.path, "TRITON_CACHE_DIR": knobs.cache.dir}


def machine(device: str, cpu: Mapping[str, Any]) -> dict[str, str]:
    """Describe the hardware and the versions that times depend on.

    Args:
        device: "cpu" or "cuda".
        cpu: the dictionary of py-cpuinfo.
    """
    fields = {
        "device": device,
        "gpu": "",
        "driver": "",
        "cuda": "",
        "cpu": str(cpu.get("brand_raw", platform.processor())),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }
    if device == "cuda":
        fields |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver_version(),
            "cuda": str(torch.version.cuda),
        }
    for name, package in PEERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            fields[name] = importlib.metadata.version(package)
    return fields


def run(root: Path) -> dict[str, str]:
    """Return the date of a run, and the commit of the repository around a folder: "-dirty" if files have changed.

    Without git, or outside of a repository, there is no commit.
    """
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        process = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if process.returncode == 0:
            return {"date": date, "commit": process.stdout.strip()}
    return {"date": date, "commit": ""}


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    packages = ("torch", "triton", "numpy", "hypothesis")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def differences(new: Mapping[str, str], old: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the entries that differ, each as a pair of now and then."""
    keys = dict.fromkeys((*new, *old))
    return {key: (new.get(key, ""), old.get(key, "")) for key in keys if new.get(key, "") != old.get(key, "")}


def incomparable(new: Mapping[str, str], old: Mapping[str, str]) -> str | None:
    """Return why the times of two machines must not be compared, or None if they may be."""
    if not old:
        return "the baseline does not say which machine it is of: it was not recorded by this project's benchmarks"
    mismatches = [f"{key} is {a!r}, but was {b!r}" for key, (a, b) in differences(new, old).items() if key in IDENTITY]
    return "the baseline is of another machine: " + "; ".join(mismatches) if mismatches else None


@functools.cache
def _nvml() -> Any:
    pynvml.nvmlInit()
    return pynvml


def gpu_state(device: str) -> dict[str, Any] | None:
    """Return clocks, power, temperature and throttle reasons of torch's current GPU; None on the CPU."""
    if device != "cuda":
        return None
    # Use the UUID: CUDA_VISIBLE_DEVICES may give the GPU another number in torch than in NVML.
    return state_of(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")


def state_of(uuid: str) -> dict[str, Any]:
    """Return the same for the GPU with this UUID. Omit what the driver does not tell; "unknown" says why."""
    try:
        nvml = _nvml()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        return {"unknown": str(error)}
    questions: dict[str, Callable[[], Any]] = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
    }
    state: dict[str, Any] = {}
    for name, ask in questions.items():
        try:
            state[name] = ask()
        except pynvml.NVMLError as error:
            state["unknown"] = f"{name}: {error}"
    return state


def throttled(states: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return the reasons why clocks were reduced, except idleness and application clocks."""
    reasons = [reason for state in states if state for reason in state.get("throttle_reasons", [])]
    return [reason for reason in dict.fromkeys(reasons) if reason not in ("idle", "application clocks")]


def _reasons(bits: int) -> list[str]:
    return [name for bit, name in REASONS.items() if bits & bit]


def _driver_version() -> str:
    try:
        return str(_nvml().nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown: {error}"
