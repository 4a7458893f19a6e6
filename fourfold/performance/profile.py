"""What limits a kernel: the calls that Nsight Compute (``ncu``) is to profile, and what it has measured of them."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fourfold.performance.calls import Call
from fourfold.performance.timings import LEVEL, PeerComparison

RANGE = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
DOMAIN = ":<default domain>:"  # precedes a range's name
TIME, REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
WAVES, OCCUPANCY = "launch__waves_per_multiprocessor", "sm__warps_active.avg.pct_of_peak_sustained_active"
# The percentage of its peak that each part of a GPU achieves. The instructions are those of the busiest pipe, which may
# be the tensor cores.
PARTS = {
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "instructions": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
}
METRICS = (TIME, REGISTERS, *PARTS.values(), OCCUPANCY, WAVES)
# The options with which ``ncu`` measures the calls that `mark` has marked.
OPTIONS = (
    *("--nvtx", "--nvtx-include", "regex:.+", "--csv", "--page", "raw", "--print-units", "base"),
    *("--clock-control", "none", "--metrics", ",".join(METRICS)),
)
NOTHING = "==WARNING== No kernels were profiled."  # in place of a table
BUSY = 60  # the percentage below which, by Nsight Compute's own rule, a part does not limit a kernel
BRIEF = 5e3  # nanoseconds; the beginning and the end are most of a briefer launch
Launch = Mapping[str, float]  # what Nsight Compute has measured, by the `METRICS`
NAMES = ("time", "launches", "registers", *PARTS, "occupancy", "waves", "limit")


def mark(call: Call, name: str) -> None:
    """Make a call within a range of this name, by which Nsight Compute selects its launches.

    The range is one of the process, not of a thread, because autograd calls backward passes in a thread of its own.
    """
    marked = torch.cuda.nvtx.range_start(name)
    try:
        call.run(1)
    finally:
        torch.cuda.nvtx.range_end(marked)


def cells(launches: Sequence[Launch]) -> Iterator[str]:
    """Yield the texts of a call's row, as `NAMES` names them: means over its time, the longest launch's registers."""
    total, longest = math.fsum(launch[TIME] for launch in launches), max(launches, key=lambda launch: launch[TIME])
    mean = {metric: math.fsum(launch[metric] * launch[TIME] for launch in launches) / total for metric in METRICS}
    waves, occupancy = longest[WAVES], mean[OCCUPANCY]
    yield from (f"{total / 1e3:.4g}", f"{len(launches)}", f"{longest[REGISTERS]:.0f}")
    yield from (f"{mean[metric]:.0f}" for metric in (*PARTS.values(), OCCUPANCY))
    yield f"{waves:.2f}"
    # The tensor cores, which may be the busiest pipe, come last in the table and first here.
    busiest = max(reversed(PARTS), key=lambda part: round(mean[PARTS[part]]))
    if mean[PARTS[busiest]] >= BUSY:
        yield f"{busiest} {mean[PARTS[busiest]]:.0f}%"
    elif len(launches) > 1 and total < BRIEF * len(launches):
        yield f"{len(launches)} launches"
    elif waves / max(1, math.ceil(waves)) < occupancy / 100:  # how full the waves are; the last may be small
        yield f"latency: {waves:.2f} waves"
    else:
        yield f"latency: {occupancy:.0f}% occupancy"


def read(file: Path) -> dict[str, list[Launch]]:
    """Return the launches of each call that was marked, by its name, from what ``ncu --csv --page raw`` has written.

    A call that launches no kernel has no entry.

    Raises:
        ValueError: the file lacks the marks or a metric, or its times are not in nanoseconds.
    """
    text = file.read_text(encoding="utf-8")
    if NOTHING in text:
        return {}
    # Messages of ncu and of what it ran may come before and after the table.
    table = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    if missing := [name for name in (RANGE, *METRICS) if name not in (table.fieldnames or ())]:
        raise ValueError(f"expected what ncu --nvtx --csv --page raw writes, found no {', '.join(missing)}")
    if (unit := next(table, {}).get(TIME)) != "ns":
        raise ValueError(f"expected times in ns, as with --print-units base, found {unit}")
    calls: dict[str, list[Launch]] = {}
    for row in table:
        name = row[RANGE].partition(DOMAIN)[2].partition(":")[0]
        calls.setdefault(name, []).append({metric: float(row[metric].replace(",", "")) for metric in METRICS})
    return calls


def markdown(calls: Mapping[str, Sequence[Launch]], rows: Iterable[PeerComparison]) -> str:
    """Return a table of the kernels that are slower than a peer: what limits each. Return "" if none was profiled."""
    slower = [
        f"| {row.benchmark} | {kernel} ({speed:.2f}) | {' | '.join(cells(calls[name]))} |"
        for row in rows
        for kernel, speed in row.speeds.items()
        if speed < LEVEL and (name := f"{row.group}-{kernel}") in calls
    ]
    lines = ["", "## What limits the slower kernels", ""]
    lines += ["By Nsight Compute, each launch alone with cold caches: the time of a call's launches in µs, and the"]
    lines += ["percentage of its peak that each part of the GPU achieves. Registers and waves are those of the longest"]
    lines += [f"launch. A part at {BUSY}% or above is the limit. Below, latency is: too few blocks or warps hide it."]
    lines += ["", f"| workload | kernel | {' | '.join(NAMES)} |", "|---|" + "---|" * (1 + len(NAMES)), *slower, ""]
    return "\n".join(lines) if slower else ""
