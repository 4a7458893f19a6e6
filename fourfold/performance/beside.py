"""The speed of each kernel relative to the fastest peer of the same run, the slowest first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.performance.peers import COMPILED, INSTALLED, LIBRARY

OWN = ("triton", "cuda", "candidate")
PEERS = ("torch", COMPILED, LIBRARY, *INSTALLED)


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
    """Each kernel of a run, as pytest-benchmark gives it to its table, beside its fastest peer; the slowest first."""
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
