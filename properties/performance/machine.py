"""The machine: what it is, for the record, and what state a GPU is in while it is timed."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "clocks_throttle_reasons.active": "throttle_reasons",
}
# Bits of NVML's throttle reasons.
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
# Not the same machine where one of these differs: times say nothing about each other.
IDENTITY = ("device", "gpu", "cpu", "architecture")


def machine(device: str, cpu: Mapping[str, Any]) -> dict[str, str]:
    """What times depend on.

    Args:
        device: "cpu" or "cuda".
        cpu: what py-cpuinfo says.
    """
    found = {
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
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver_version(),
            "cuda": str(torch.version.cuda),
        }
    return found


def differences(now: Mapping[str, str], then: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is not the same: now and then."""
    keys = dict.fromkeys((*now, *then))
    return {key: (now.get(key, ""), then.get(key, "")) for key in keys if now.get(key, "") != then.get(key, "")}


def incomparable(now: Mapping[str, str], then: Mapping[str, str]) -> str | None:
    """Why times of two machines must not be compared, or None."""
    if not then:
        return "the baseline does not say which machine it is of: it was not recorded by this project's benchmarks"
    other = [f"{key} is {a!r}, but was {b!r}" for key, (a, b) in differences(now, then).items() if key in IDENTITY]
    return "the baseline is of another machine: " + "; ".join(other) if other else None


def gpu_state(device: str) -> dict[str, Any] | None:
    """Clocks, power, temperature and throttle reasons of torch's current GPU; None without one."""
    if device != "cuda":
        return None
    # By its number for the driver, which CUDA_VISIBLE_DEVICES may have changed for torch.
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unknown": str(error)}
    return parse_state(done.stdout) if done.returncode == 0 else {"unknown": (done.stderr or done.stdout).strip()}


def parse_state(line: str) -> dict[str, Any]:
    """One line of nvidia-smi, in the order of `QUERY`."""
    state: dict[str, Any] = {}
    for name, text in zip(QUERY.values(), (part.strip() for part in line.strip().split(","))):
        if name == "throttle_reasons":
            state[name] = _reasons(text)
        else:
            try:
                state[name] = float(text)
            except ValueError:
                state[name] = text  # "[N/A]"
    return state


def throttled(states: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Reasons for which clocks were lower than they could be, other than having nothing to do."""
    reasons = [reason for state in states if state for reason in state.get("throttle_reasons", [])]
    return [reason for reason in dict.fromkeys(reasons) if reason not in ("idle", "application clocks")]


def _reasons(text: str) -> list[str]:
    try:
        bits = int(text, 16)
    except ValueError:
        return [text]
    return [name for bit, name in REASONS.items() if bits & bit]


def _driver_version() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi: {error}", file=sys.stderr)
        return "unknown"
