"""The times of kernels beside those of their peers in the same run, and what has changed since a saved run."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.engine.cells import CANDIDATE
from fourfold.engine.tables import table_lines
from fourfold.performance.calls import HOST
from fourfold.performance.charts import quantity
from fourfold.performance.gate import Change
from fourfold.performance.peers import COMPILED, INSTALLED, LIBRARY

OWN = ("triton", "cuda", "candidate")
PEERS = ("torch", COMPILED, LIBRARY, *INSTALLED)
# A kernel is level with a peer if the peer takes at least this share of its time.
LEVEL = 0.97
# Above this number of operations a byte the rate is shown in flop/s, otherwise in B/s. Every GPU computes more a byte.
INTENSE = 8
# The names of the columns. The last one is of a comparison.
NAMES = ("workload", "shapes", "time", "rate", "x torch", "x compile", "change")
# The facts about a run that the page of comparisons states.
ABOUT = ("date", "commit", "driver", "cuda", "torch", "triton", *INSTALLED)
CPU = "no GPU: interpreted and emulated kernels were timed, which says nothing about their speed on one"


@dataclass(frozen=True)
class Timing:
    """The time of a kernel on one workload.

    Attributes:
        benchmark: kernel or operation, workload, dtype and direction, joined by ``-``.
        shapes: the shape of each input.
        seconds: the median time of a call.
        bytes_per_second, flops_per_second: the fewest bytes and operations that the call needs over its time, if known.
        ratio_to: the kernel's time over that of each peer: below 1 the kernel is faster.
        change: the gate's verdict, the ratio to the saved time and its interval; None without a comparison.
    """

    benchmark: str
    shapes: Mapping[str, Sequence[int]]
    seconds: float
    bytes_per_second: float | None
    flops_per_second: float | None
    ratio_to: Mapping[str, float]
    change: Mapping[str, Any] | None

    @property
    def cells(self) -> Iterator[str]:
        """Return the texts of its row, with the two peers that all operations have."""
        yield from (self.benchmark, _shapes(self.shapes), quantity(self.seconds, "s"))
        bandwidth, flops = self.bytes_per_second or 0.0, self.flops_per_second or 0.0
        rate = (flops, "flop/s") if flops > INTENSE * bandwidth else (bandwidth, "B/s")
        yield quantity(*rate) if rate[0] else ""
        for peer in ("torch", "compile"):
            yield f"{self.ratio_to[peer]:.2f}" if peer in self.ratio_to else ""
        if self.change is not None:
            ratio, low, high = (100 * (self.change[end] - 1) for end in ("ratio", "low", "high"))
            yield f"{self.change['verdict']} {ratio:+.1f}% ({low:+.1f} to {high:+.1f})"


def timings(benchmarks: Iterable[Mapping[str, Any]], changes: Iterable[Change] = ()) -> list[Timing]:
    """Return the timings of a run's candidates, from pytest-benchmark's figures and the gate's verdicts."""
    medians: dict[str, dict[str, float]] = {}
    of_name = {change.name: change for change in changes}
    for entry in benchmarks:
        medians.setdefault(entry["group"], {})[entry["extra_info"].get("contender", "")] = entry["median"]
    return [
        Timing(
            benchmark=entry["group"],
            shapes=info["shapes"],
            seconds=entry["median"],
            bytes_per_second=info.get("bytes_per_second"),
            flops_per_second=info.get("flops_per_second"),
            ratio_to={
                n: entry["median"] / base for n, base in medians[entry["group"]].items() if n != CANDIDATE and base
            },
            change=asdict(of_name[entry["fullname"]]) if entry["fullname"] in of_name else None,
        )
        for entry in benchmarks
        if (info := entry["extra_info"]).get("contender") == CANDIDATE
    ]


def column_names(rows: Sequence[Timing]) -> tuple[str, ...]:
    """Return the names of the columns that the rows fill."""
    return NAMES if any(row.change for row in rows) else NAMES[:-1]


def lines(rows: Sequence[Timing]) -> list[str]:
    """Return the table of timings."""
    names = column_names(rows)
    return table_lines([names, *([*row.cells] for row in rows)], right_aligned=range(2, len(names)))


@dataclass(frozen=True)
class PeerComparison:
    """The times of this library's kernels, or of a candidate, and of their peers on one workload.

    Attributes:
        group: the name of the group of benchmarks.
        benchmark: operation, workload, dtype and direction.
        of_host: whether the times are the host's.
        shapes: the shape of each input.
        seconds: the median time of each contender, by its name.
        inexact: the contenders whose results exceed the bound.
    """

    group: str
    benchmark: str
    of_host: bool
    shapes: Mapping[str, Sequence[int]]
    seconds: Mapping[str, float]
    inexact: frozenset[str]

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.benchmark.partition(" ")[0]

    @property
    def best(self) -> str:
        """The name of the fastest peer."""
        return min((name for name in PEERS if name in self.seconds), key=self.seconds.__getitem__)

    @property
    def speeds(self) -> dict[str, float]:
        """Return, for each kernel, the fastest peer's time over the kernel's: above 1 the kernel is faster."""
        return {name: self.seconds[self.best] / self.seconds[name] for name in OWN if name in self.seconds}

    @property
    def worst(self) -> float:
        """The smallest of `speeds`."""
        return min(self.speeds.values())

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in self.speeds.items())
        inexact = ", which is less exact" if self.best in self.inexact else ""
        return f"{self.worst:5.2f}  {self.benchmark}: {speeds} beside {self.best}{inexact}"


def comparisons(benchmarks: Iterable[Mapping[str, Any]]) -> list[PeerComparison]:
    """Return the comparison of each group of rows that has a kernel and a peer, the slowest first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in benchmarks:
        groups.setdefault(entry["group"], []).append(entry)
    rows = []
    for name, group in groups.items():
        info = group[0]["extra_info"]
        seconds = {entry["extra_info"].get("contender", ""): entry["median"] for entry in group}
        if {*seconds} & {*PEERS} and {*seconds} & {*OWN}:
            rows.append(
                PeerComparison(
                    group=name,
                    benchmark=" ".join(info[key] for key in ("operation", "workload", "dtype", "direction")),
                    of_host=info["direction"] == HOST,
                    shapes=info.get("shapes", {}),
                    seconds=seconds,
                    inexact=frozenset(
                        entry["extra_info"]["contender"] for entry in group if "disagreement" in entry["extra_info"]
                    ),
                )
            )
    return sorted(rows, key=lambda row: row.worst)


def contenders(rows: Iterable[PeerComparison]) -> list[str]:
    """Return the names of the peers and kernels that any comparison has, peers first."""
    timed = {name for row in rows for name in row.seconds}
    return [name for name in (*PEERS, *OWN) if name in timed]


def markdown(runs: Iterable[tuple[Mapping[str, Any], Sequence[PeerComparison]]]) -> str:
    """Return the comparisons of runs as a page in Markdown.

    Args:
        runs: the description of each machine, and its comparisons.
    """
    lines = ["# Kernels beside their peers", ""]
    lines += [
        "Median times in µs. In parentheses: the time of the fastest peer, which is bold, over the kernel's. Below 1"
    ]
    lines += [
        "the kernel is slower. The workload with the slowest kernel comes first. A * marks a result that exceeds the"
    ]
    lines += [
        "bound that the kernels keep to. The first table counts the workloads of each operation on which a kernel is"
    ]
    lines += [f"at least {LEVEL} times as fast as the fastest peer, and gives the median of these ratios."]
    for machine, rows in runs:
        of_gpu, of_host = [row for row in rows if not row.of_host], [row for row in rows if row.of_host]
        lines += ["", f"## {machine['gpu'] or machine['cpu']}", ""]
        lines += [", ".join(f"{name} {machine[name]}" for name in ABOUT if machine.get(name))]
        if of_gpu:
            lines += ["", *_summary(of_gpu), "", *_table(of_gpu)]
        if of_host:
            lines += ["", "The times of the host, until the call returns:", "", *_table(of_host)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[PeerComparison]) -> Iterator[str]:
    """Yield the table of all comparisons."""
    names = contenders(rows)
    yield f"| workload | shapes | {' | '.join(names)} |"
    yield f"|---|---|{'---|' * len(names)}"
    for row in rows:
        yield f"| {row.benchmark} | {_shapes(row.shapes)} | {' | '.join(_cells(row, names))} |"


def _summary(rows: Sequence[PeerComparison]) -> Iterator[str]:
    """Yield the table of the operations: for each kernel, on how many workloads it is level with the fastest peer."""
    kernels = [name for name in OWN if any(name in row.seconds for row in rows)]
    yield f"| operation | workloads | {' | '.join(kernels)} |"
    yield f"|---|---|{'---|' * len(kernels)}"
    operations: dict[str, list[PeerComparison]] = {}
    for row in rows:
        operations.setdefault(row.operation, []).append(row)
    for operation, group in sorted(operations.items()):
        cells = []
        for kernel in kernels:
            speeds = [row.speeds[kernel] for row in group if kernel in row.speeds]
            level = sum(speed >= LEVEL for speed in speeds)
            cells.append(f"{level} of {len(speeds)}, {statistics.median(speeds):.2f}" if speeds else "")
        yield f"| {operation} | {len(group)} | {' | '.join(cells)} |"


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return " ".join("x".join(map(str, shape)) or "1" for shape in shapes.values())


def _cells(row: PeerComparison, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name not in row.seconds:
            yield ""
            continue
        text = f"{1e6 * row.seconds[name]:.4g}{'*' if name in row.inexact else ''}"
        text += f" ({row.speeds[name]:.2f})" if name in row.speeds else ""
        yield f"**{text}**" if name == row.best else text
