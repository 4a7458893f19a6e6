"""The times of kernels beside those of their peers in the same run, and what has changed since a saved run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.engine.cells import CANDIDATE
from fourfold.engine.tables import table_lines
from fourfold.performance.charts import quantity
from fourfold.performance.gate import Change
from fourfold.performance.peers import COMPILED, INSTALLED, LIBRARY

OWN = ("triton", "cuda", "candidate")
PEERS = ("torch", COMPILED, LIBRARY, *INSTALLED)
# Above this number of operations a byte the rate is shown in flop/s, otherwise in B/s. Every GPU computes more a byte.
INTENSE = 8
# The heads of the columns; the last one only in a comparison.
NAMES = ("workload", "shapes", "time", "rate", "x torch", "x compile", "change")
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
        shapes = " ".join("x".join(map(str, shape)) or "1" for shape in self.shapes.values())
        yield from (self.benchmark, shapes, quantity(self.seconds, "s"))
        moved, computed = self.bytes_per_second or 0.0, self.flops_per_second or 0.0
        rate = (computed, "flop/s") if computed > INTENSE * moved else (moved, "B/s")
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
    for one in benchmarks:
        medians.setdefault(one["group"], {})[one["extra_info"].get("contender", "")] = one["median"]
    return [
        Timing(
            benchmark=one["group"],
            shapes=info["shapes"],
            seconds=one["median"],
            bytes_per_second=info.get("bytes_per_second"),
            flops_per_second=info.get("flops_per_second"),
            ratio_to={
                n: one["median"] / other for n, other in medians[one["group"]].items() if n != CANDIDATE and other
            },
            change=asdict(of_name[one["fullname"]]) if one["fullname"] in of_name else None,
        )
        for one in benchmarks
        if (info := one["extra_info"]).get("contender") == CANDIDATE
    ]


def lines(rows: Sequence[Timing]) -> list[str]:
    """Return the table of timings."""
    names = NAMES if any(row.change for row in rows) else NAMES[:-1]
    return table_lines([names, *([*row.cells] for row in rows)], right=range(2, len(names)))


@dataclass(frozen=True)
class Beside:
    """A kernel beside its fastest peer.

    Attributes:
        benchmark: operation, workload, dtype and direction.
        kernel: "triton", "cuda" or "candidate".
        speed: the peer's median time over the kernel's: above 1 the kernel is faster.
        peer: the fastest one's name.
        exact: whether the peer's result keeps to the bound, as the kernel's does.
    """

    benchmark: str
    kernel: str
    speed: float
    peer: str
    exact: bool

    def __str__(self) -> str:
        inexact = "" if self.exact else ", which is less exact"
        return f"{self.speed:5.2f}  {self.benchmark}: {self.kernel} beside {self.peer}{inexact}"


def beside_the_best(benchmarks: Iterable[Mapping[str, Any]]) -> list[Beside]:
    """Return each kernel of a run beside its fastest peer, the slowest first, from pytest-benchmark's rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in benchmarks:
        groups.setdefault(one["group"], []).append(one)
    return sorted((beside for group in groups.values() for beside in _of(group)), key=lambda beside: beside.speed)


def _of(group: Sequence[Mapping[str, Any]]) -> Iterator[Beside]:
    by_name = {one["extra_info"].get("contender"): one for one in group}
    peers = [name for name in PEERS if name in by_name]
    if not peers:
        return
    best = min(peers, key=lambda name: by_name[name]["median"])
    for kernel in OWN:
        if kernel in by_name:
            info = by_name[kernel]["extra_info"]
            yield Beside(
                benchmark=" ".join(info[key] for key in ("operation", "workload", "dtype", "direction")),
                kernel=kernel,
                speed=by_name[best]["median"] / by_name[kernel]["median"],
                peer=best,
                exact="disagreement" not in by_name[best]["extra_info"],
            )
