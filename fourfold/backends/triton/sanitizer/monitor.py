"""Watch every access of interpreted kernels, and report errors that a GPU would not.

The monitor detects accesses outside of the memory of the pointer's tensor, loads of unwritten memory, and races. A
kernel continues after a finding: an access outside is skipped, and a load of it returns 0.

A pointer carries the number of its tensor in its highest 16 bits, which no address uses. So the number follows the
pointer everywhere: through sums, `tl.where`, transposition and memory. A kernel may access all of a tensor's storage,
because a kernel that receives ``x[0]`` and strides addresses the other samples from there.

Programs run many at once, to save time, until something may be wrong. Then the launch restarts, one program after
another, and its findings are reported: see `Suspicion`.
"""

import contextlib
import ctypes
import inspect
import linecache
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter, jit
from triton.tools.tensor_descriptor import TensorDescriptor

from fourfold.backends.triton.interpreter import batches, earlier_releases
from fourfold.backends.triton.interpreter import corrections as corrected
from fourfold.backends.triton.interpreter.arithmetic import Handle, numpy_type
from fourfold.backends.triton.interpreter.memory import CheckedMemory, array_at, holds, tensor_of
from fourfold.backends.triton.sanitizer.races import (
    MOST_SIGNALS,
    Accesses,
    DataRace,
    Order,
    load_in_step,
    stamps_of,
    store_in_step,
)

_TAG = 48
_ADDRESS = np.uint64((1 << _TAG) - 1)
# A number whose bytes are all 1, by its size: the mark of an element whose bytes were all written.
_WRITTEN = {size: np.array([1] * size, np.uint8).view(f"u{size}")[0] for size in (1, 2, 4, 8)}
# A program may wait for another one if it reads one value from one address this often without a store in between.
_PATIENCE = 1000
# It waits forever if it reads the value this often, and no other program is left to run.
_ENDLESS = 20_000
# Modules whose frames do not belong to a kernel.
_MACHINERY = ("triton.language", "triton.runtime", "fourfold.backends.triton")
# The attribute of a storage that marks its written bytes; a storage without it is completely written.
WRITTEN_BYTES = "fourfold_written_bytes"

OUTSIDE, UNWRITTEN, RACE = "out of bounds", "unwritten", "race"


class Suspicion(BaseException):
    """Programs that run at once may have done something wrong: they must run one after another to find out.

    No handler of a kernel's catches it.
    """


@dataclass
class Violation:
    """An error in a kernel.

    Attributes:
        kind: `OUTSIDE`, `UNWRITTEN` or `RACE`.
        access: "load", "store" or "atomic operation".
        kernel: the kernel's name.
        file: the file of the access.
        line: its line, from 1.
        parameter: the kernel's parameter that the pointer was made from.
        program: the index of the program in `grid`.
        grid: the number of programs along each axis.
        offset: of the first wrong element from the tensor's first, in elements; None if the pointer has no tensor.
        message: a description of the error.
        warning: whether no result depends on it.
        count: the number of occurrences.
    """

    kind: str
    access: str
    kernel: str
    file: str
    line: int
    parameter: str
    program: tuple[int, ...]
    grid: tuple[int, ...]
    offset: int | None
    message: str
    warning: bool = False
    count: int = 1

    def __str__(self) -> str:
        severity = "warning" if self.warning else "error"
        source = linecache.getline(self.file, self.line).strip()
        return (
            f"{self.file}:{self.line}: {severity}: {self.message}\n    {source}\n"
            f"    first in program {self.program} of a grid of {self.grid}, kernel {self.kernel}"
        )


@dataclass
class Report:
    """All findings, and statistics of the watched launches.

    Attributes:
        on_finding: called with each new finding.
        findings: the findings by the attributes that distinguish them.
        kernels: the names of the kernels that ran.
        launches: the number of launches.
        programs: the number of programs that ran.
    """

    on_finding: Callable[[Violation], None]
    findings: dict[tuple, Violation] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    launches: int = 0
    programs: int = 0

    def add(self, finding: Violation) -> None:
        """Report a new finding, or count a known one."""
        key = finding.kind, finding.access, finding.file, finding.line, finding.parameter, finding.warning
        if key in self.findings:
            self.findings[key].count += 1
        else:
            self.findings[key] = finding
            self.on_finding(finding)

    @property
    def errors(self) -> list[Violation]:
        """The findings that are not warnings."""
        return [finding for finding in self.findings.values() if not finding.warning]

    @property
    def warnings(self) -> list[Violation]:
        """The findings that no result depends on."""
        return [finding for finding in self.findings.values() if finding.warning]


class Region:
    """The storage of the tensor that a pointer was made from: the memory that the pointer may access.

    Args:
        tag: the number that its pointers carry.
        name: the kernel's parameter, or a description in its place.
        tensor: the torch tensor.
    """

    def __init__(self, tag: int, name: str, tensor: "torch.Tensor | Exposed") -> None:
        storage = tensor.untyped_storage()
        self.name, self.start, self.nbytes = name, storage.data_ptr(), storage.nbytes()
        self.first = tag << _TAG | tensor.data_ptr()
        self.low = tag << _TAG | self.start
        self.high = self.low + self.nbytes
        self.base = np.uint64(self.low)
        self.unit = tensor.element_size()
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), str(tensor.dtype)[6:]
        self.written: np.ndarray | None = getattr(storage, WRITTEN_BYTES, None)

    def __str__(self) -> str:
        before = (self.first - self.low) // self.unit
        last = self.nbytes // self.unit - before - 1
        holds = f"whose memory holds elements {-before} to {last}" if self.nbytes else "which has no memory"
        return (
            f"{self.name}, a {self.dtype} tensor of shape {list(self.shape)} with strides {list(self.strides)}, {holds}"
        )

    def memory(self, size: int) -> np.ndarray:
        """Return the storage as unsigned integers of `size` bytes."""
        return array_at(self.start, self.nbytes // size, np.dtype(f"u{size}"))

    def bits(self, offsets: np.ndarray, size: int) -> np.ndarray | None:
        """Return the elements at some offsets as unsigned integers, or None if they are not aligned."""
        return None if (offsets % size).any() else self.memory(size)[offsets // size]

    def find_unwritten(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return which of the elements are unwritten."""
        assert self.written is not None
        if (offsets % size).any():
            return ~self.written[offsets]
        return self.written[: self.nbytes // size * size].view(f"u{size}")[offsets // size] != _WRITTEN[size]

    def write(self, offsets: np.ndarray, size: int) -> None:
        """Mark elements as written."""
        assert self.written is not None
        if (offsets % size).any():
            self.written[offsets[:, None] + np.arange(size)] = True
        else:
            self.written[: self.nbytes // size * size].view(f"u{size}")[offsets // size] = _WRITTEN[size]


class RegionAccess(NamedTuple):
    """The lanes of an access that lie in one region.

    Attributes:
        region: the memory.
        offsets: of the elements from its beginning, in bytes.
        lanes: selects these lanes among those that are not masked.
    """

    region: Region
    offsets: np.ndarray
    lanes: Any


class Access(NamedTuple):
    """A checked access, ready to be performed.

    Attributes:
        pointers: plain addresses.
        mask: the mask without the lanes that are outside.
        parts: the performed lanes, by region.
        size: of an element, in bytes.
        active: the lanes that the kernel does not mask; None if it masks none.
    """

    pointers: Handle
    mask: Any
    parts: list[RegionAccess]
    size: int
    active: np.ndarray | None

    def select_lanes(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the lanes that are not masked, in one dimension."""
        values = np.broadcast_to(values, self.pointers.data.shape)
        return values.ravel() if self.active is None else values[self.active]


class Exposed:
    """A tensor whose address was taken as an integer, from which a kernel may make a pointer.

    It holds only a weak reference to the tensor's storage.

    Args:
        tensor: the torch tensor.
        address: of its first element.
    """

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        self.storage, self.address = weakref.ref(tensor.untyped_storage()), address
        self.size, self.strides = tensor.element_size(), tensor.stride()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def untyped_storage(self) -> Any:
        """Return its storage, or None if the storage was freed."""
        return self.storage()

    def data_ptr(self) -> int:
        """Return the address of its first element."""
        return self.address

    def element_size(self) -> int:
        """Return the size of an element, in bytes."""
        return self.size

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in elements."""
        return self.strides


# By address.
EXPOSED: dict[int, Exposed] = {}


class LaunchMonitor:
    """The state of the running launch.

    Args:
        report: receives the findings.
        kernel: the kernel's name.
    """

    def __init__(self, report: Report, kernel: str) -> None:
        self.report, self.kernel = report, kernel
        self.regions: dict[int, Region] = {}
        self.accesses: dict[int, Accesses] = {}
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.program: tuple[int, ...] = (0, 0, 0)
        self.order: Order | None = None
        # An address, the value that the running program has repeatedly read there, and the number of these reads.
        self.waits: tuple[int, int, int] = (0, 0, 0)
        self.run_next: Callable[[], bool] = lambda: False
        # Whether a finding only raises `Suspicion`.
        self.is_first_try = False

    def start_anew(self) -> None:
        """Forget the accesses of a first try."""
        self.is_first_try, self.accesses, self.waits = False, {}, (0, 0, 0)
        self.order = Order(int(np.prod(self.grid)))

    def wait(self, access: Access) -> None:
        """Count the reads of a loop that may wait for another program, and run other programs if it does.

        Raises:
            RuntimeError: the program waits, and no other program is left that could end the wait.
        """
        if len(access.parts) != 1 or access.parts[0].offsets.size != 1:
            return
        region, offsets, _ = access.parts[0]
        value = region.bits(offsets, access.size)
        if value is None:
            return
        place = region.start + int(offsets[0]), int(value[0])
        times = self.waits[2] + 1 if self.waits[:2] == place else 1
        self.waits = *place, times
        if times % _PATIENCE or self.run_others():
            return
        if times >= _ENDLESS:
            raise RuntimeError(f"program {self.program} waits for what no other program does")

    def run_others(self) -> bool:
        """Run the next program in the middle of this one; return whether there was one."""
        program, order, waits = self.program, self.order, self.waits
        clocks = None if order is None else (order.program, order.time, order.clock)
        has_run = self.run_next()
        self.program, self.waits = program, (0, 0, 0) if has_run else waits
        if order is not None and clocks is not None:
            order.program, order.time, order.clock = clocks
        return has_run

    def start(self, grid: tuple[int, ...]) -> None:
        """Begin the launch of a grid."""
        self.grid = grid
        programs = int(np.prod(grid))
        self.order = Order(programs) if programs > 1 else None
        self.report.launches += 1
        self.report.programs += programs
        self.report.kernels.add(self.kernel)

    def begin(self, program: tuple[int, ...]) -> None:
        """Begin a program."""
        self.program = program
        if self.order is not None:
            x, y, z = program
            self.order.begin((x * self.grid[1] + y) * self.grid[2] + z)

    def region(self, name: str, tensor: torch.Tensor | Exposed) -> Region:
        """Register a tensor's memory, and return the region that its pointers may access."""
        tag = len(self.regions) + 1
        if tag >= 1 << 15:
            raise ValueError(f"a launch takes up to {(1 << 15) - 1} tensors")
        region = self.regions[tag] = Region(tag, name, tensor)
        return region

    def access(self, operation: str, pointers: Any, mask: Any) -> Access:
        """Check the addresses of an access, and report those outside."""
        addresses = pointers.data
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        allowed = np.asarray(mask.data)
        lanes = None if allowed.all() else np.broadcast_to(allowed, addresses.shape)
        active = addresses.ravel() if lanes is None else addresses[lanes]
        plain = Handle(addresses & _ADDRESS, pointers.dtype)
        if not active.size:
            return Access(plain, mask, [], size, lanes)
        low, high = int(active.min()), int(active.max())
        region = self.regions.get(low >> _TAG)
        if region is not None and region.low <= low and high + size <= region.high:
            offsets = (active - region.base).view(np.int64)
            return Access(plain, mask, [RegionAccess(region, offsets, slice(None))], size, lanes)
        parts, inside = self.group_by_region(active, size)
        if not inside.all():
            self.outside(operation, active, inside, size)
            inside_lanes = np.ones(addresses.shape, bool) if lanes is None else lanes.copy()
            inside_lanes[inside_lanes] = inside
            mask = Handle(inside_lanes, tl.int1)
        return Access(plain, mask, parts, size, lanes)

    def group_by_region(self, addresses: np.ndarray, size: int) -> tuple[list[RegionAccess], np.ndarray]:
        """Return the lanes of an access by region, and a mask of the lanes that lie in one."""
        parts, inside = [], np.zeros(addresses.shape, bool)
        tags = addresses >> np.uint64(_TAG)
        for tag in np.unique(tags):
            region = self.regions.get(int(tag))
            if region is None or region.nbytes < size:
                continue
            lanes = (tags == tag) & (addresses >= region.base) & (addresses <= np.uint64(region.high - size))
            if lanes.any():
                parts.append(RegionAccess(region, (addresses[lanes] - region.base).view(np.int64), lanes))
                inside |= lanes
        return parts, inside

    def outside(self, operation: str, addresses: np.ndarray, inside: np.ndarray, size: int) -> None:
        """Report an access that leaves the memory of its tensor."""
        self.suspect()
        stray = int(addresses[~inside][0])
        count = f"{np.count_nonzero(~inside)} of the {addresses.size} elements that it does not mask"
        region = self.regions.get(stray >> _TAG)
        if region is None:
            message = f"{operation} through a pointer that leads to no tensor, of {count}"
            self.add_finding(OUTSIDE, operation, "", None, message)
            return
        offset = (stray - region.first) // region.unit
        message = f"{operation} at element {offset} of {region}; outside are {count}"
        wrapped = next((n for n in (1, -1) if region.low <= stray + n * (size << 32) <= region.high - size), None)
        if wrapped:
            message += "; 2^32 elements off: an offset of 32 bits has overflowed"
        self.add_finding(OUTSIDE, operation, region.name, offset, message)

    def report_unwritten(self, operation: str, access: Access) -> None:
        """Report a load of unwritten memory."""
        for region, offsets, _ in access.parts:
            if region.written is None:
                continue
            unwritten = region.find_unwritten(offsets, access.size)
            if unwritten.any():
                lane = int(np.flatnonzero(unwritten)[0])
                offset = self.element(region, offsets[lane])
                count = f"{np.count_nonzero(unwritten)} of {offsets.size} elements, the first is element {offset}"
                message = f"{operation} of memory that nothing has written: {count} of {region}"
                self.add_finding(UNWRITTEN, operation, region.name, offset, message)

    def element(self, region: Region, offset: Any) -> int:
        """Return the index of an element relative to the tensor's first."""
        return (region.low + int(offset) - region.first) // region.unit

    def record_of(self, part: RegionAccess, size: int) -> tuple[Accesses, np.ndarray]:
        """Return the accesses to a region's storage in this launch, and the indices of the part's elements in them."""
        region = part.region
        accesses = self.accesses.get(region.start)
        if accesses is None:
            accesses = self.accesses[region.start] = Accesses(region.nbytes, region.unit)
        return accesses, accesses.places(part.offsets, size)

    def report_race(self, operation: str, part: RegionAccess, race: DataRace | None) -> None:
        """Report a race."""
        if race is None:
            return
        region = part.region
        offset = self.element(region, part.offsets[race.lane])
        other = tuple(int(number) for number in np.unravel_index(race.other, self.grid))
        message = (
            f"{operation} at element {offset} of {region}, which program {other} has {race.what} in the same launch:"
            f" nothing orders the two ({race.lanes} of {part.offsets.size} elements)"
        )
        if race.harmless:
            message += "; both leave the same value"
        self.add_finding(RACE, operation, region.name, offset, message, warning=race.harmless)

    def suspect(self) -> None:
        """Raise `Suspicion` in a first try."""
        if self.is_first_try:
            raise Suspicion

    def add_finding(
        self, kind: str, operation: str, parameter: str, offset: int | None, message: str, warning: bool = False
    ) -> None:
        """Add a finding at the kernel's current line."""
        self.suspect()
        place = self.kernel, *_place()
        self.report.add(
            Violation(kind, operation, *place, parameter, self.program, self.grid, offset, message, warning)
        )


def _place() -> tuple[str, int]:
    """Return the file and the line of the kernel that runs."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__") or "triton.language"  # a replayed operation's has no name
        if not module.startswith(_MACHINERY) and not module.startswith("numpy"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "?", 0


class MonitoredMemory(CheckedMemory):
    """Loads, stores and atomic operations that the monitor looks at first."""

    # Of the running launch.
    watch: LaunchMonitor
    # Set by `Batches`, for several programs at once.
    batch: np.ndarray | None
    in_step: bool
    # The beginning and the end of the storage that holds the whole access, if there is one.
    within: tuple[int, int] | None = None

    def set_grid_dim(self, *grid: int) -> None:
        """Set the number of programs along each axis."""
        super().set_grid_dim(*grid)
        self.watch.start(grid)

    def set_grid_idx(self, *program: int) -> None:
        """Start the next program."""
        super().set_grid_idx(*program)
        self.watch.begin(program)

    def check(self, access: str, pointers: Any, mask: np.ndarray) -> tuple[bool, tuple[int, int] | None]:
        """Return whether no lane is masked, and the storage of the access. The monitor has checked the access."""
        return bool(np.all(mask)), self.within

    def distances(self, addresses: np.ndarray) -> np.ndarray:
        """Return the bytes from the beginning of its storage to each address; 0 where the storage is unknown."""
        regions = [self.watch.regions.get(int(address) >> _TAG) for address in addresses]
        beginnings = [int(address) if region is None else region.low for address, region in zip(addresses, regions)]
        return addresses.view(np.int64) - np.array(beginnings, np.int64)

    def pass_to_monitor(self, operation: str, pointers: Any, mask: Any) -> Access:
        """Pass an access to the monitor."""
        access = self.watch.access(operation, pointers, mask)
        self.within = None
        if len(access.parts) == 1 and access.mask is mask:
            region = access.parts[0].region
            self.within = region.start, region.start + region.nbytes
        return access

    def stamps(self, access: Access) -> np.ndarray:
        """Return the stamp of the program of each lane that is not masked, of several programs at once."""
        assert self.batch is not None
        program_stamps = stamps_of(np.ravel_multi_index(tuple(self.batch.T), self.watch.grid))
        shape = access.pointers.data.shape
        return access.select_lanes(program_stamps.reshape(-1, *(1,) * (len(shape) - 1)))

    def load_in_step(self, access: Access) -> None:
        """Look at a load by several programs at once."""
        watch = self.watch
        assert self.batch is not None
        lane_stamps = self.stamps(access) if self.in_step else None
        for part in access.parts:
            accesses, places = watch.record_of(part, access.size)
            if lane_stamps is not None:
                stamps_of_programs = [lane_stamps[part.lanes]]
            else:  # all programs load the same
                ends = stamps_of(np.ravel_multi_index(tuple(self.batch[[0, -1]].T), watch.grid))
                stamps_of_programs = [np.full(len(places), stamp) for stamp in ends]
            for stamps in stamps_of_programs:
                if load_in_step(accesses, places, stamps):
                    raise Suspicion

    def store_in_step(self, access: Access, part: RegionAccess, unchanged: np.ndarray) -> None:
        """Look at a store by several programs at once."""
        watch = self.watch
        if not self.in_step:  # all programs store to the same elements
            raise Suspicion
        accesses, places = watch.record_of(part, access.size)
        if store_in_step(accesses, places, self.stamps(access)[part.lanes], unchanged):
            raise Suspicion

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        """Perform tl.load. A masked lane without another value is 0, as in NVIDIA's compiler."""
        access = self.pass_to_monitor("load", ptrs, mask)
        watch = self.watch
        watch.report_unwritten("load", access)
        if self.batch is not None:
            self.load_in_step(access)
        elif watch.order is not None:
            volatile = bool(options.get("is_volatile", rest[-1] if rest else False))
            if volatile:
                watch.wait(access)
            for part in access.parts:
                race = watch.order.load(*watch.record_of(part, access.size), volatile)
                watch.report_race("load", part, race)
        if other is None and (access.active is not None or access.mask is not mask):
            kind = ptrs.get_element_ty()
            other = Handle(np.zeros(ptrs.data.shape, numpy_type(kind)), kind)
        return super().create_masked_load(access.pointers, access.mask, other, *rest, **options)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        """Perform tl.store."""
        access = self.pass_to_monitor("store", ptrs, mask)
        watch = self.watch
        watch.waits = 0, 0, 0
        size = access.size
        values = None
        if value.data.itemsize == size:
            values = access.select_lanes(value.data).view(f"u{size}")
        for part in access.parts:
            if watch.order is not None:
                before = part.region.bits(part.offsets, size)
                unchanged = np.zeros(part.offsets.shape, bool)
                if before is not None and values is not None:
                    unchanged = before == values[part.lanes]
                if self.batch is not None:
                    self.store_in_step(access, part, unchanged)
                else:
                    race = watch.order.store(*watch.record_of(part, size), unchanged)
                    watch.report_race("store", part, race)
            if watch.is_first_try:
                self.prepare_store(self.within)
            if part.region.written is not None:
                part.region.write(part.offsets, size)
        stored = super().create_masked_store(access.pointers, value, access.mask, *rest, **options)
        if values is not None:
            self.compare_lanes(access, values)
        return stored

    def compare_lanes(self, access: Access, values: np.ndarray) -> None:
        """Report a store of different values to one element: which one remains is undefined."""
        for part in access.parts:
            region, offsets, lanes = part
            if (offsets[1:] > offsets[:-1]).all():
                continue
            remaining = region.bits(offsets, access.size)
            if remaining is None:
                continue
            lost = remaining != values[lanes]
            if lost.any():
                offset = self.watch.element(region, offsets[np.flatnonzero(lost)[0]])
                message = (
                    f"store of several values at element {offset} of {region}: which of them remains is not defined"
                    f" ({np.count_nonzero(lost)} of {offsets.size} elements are lost)"
                )
                self.watch.add_finding(RACE, "store", region.name, offset, message)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, *rest: Any) -> Any:
        """Perform tl.atomic_add, tl.atomic_max and so on."""
        exchanges = rmwOp.name == "XCHG"
        access = self.atomic(ptr, mask, sem, exchanges)
        return super().create_atomic_rmw(rmwOp, access.pointers, val, access.mask, sem, *rest)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, *rest: Any) -> Any:
        """Perform tl.atomic_cas."""
        mask = Handle(np.ones(ptr.data.shape, bool), tl.int1)
        access = self.atomic(ptr, mask, sem, exchanges=True)
        if access.mask is not mask:
            return Handle(np.zeros_like(cmp.data), cmp.dtype.scalar)
        return super().create_atomic_cas(access.pointers, cmp, val, sem, *rest)

    def atomic(self, pointers: Any, mask: Any, sem: Any, exchanges: bool) -> Access:
        """Check an atomic operation, and record the order that it establishes."""
        self.watch.suspect()
        access = self.pass_to_monitor("atomic operation", pointers, mask)
        watch = self.watch
        watch.wait(access)
        if not exchanges:
            watch.report_unwritten("atomic operation", access)
        addresses: list[int] = []
        for part in access.parts:
            if part.region.written is not None:
                part.region.write(part.offsets, access.size)
            addresses += (part.offsets + part.region.start).tolist() if part.offsets.size <= MOST_SIGNALS else []
            if watch.order is not None:
                race = watch.order.atomic(*watch.record_of(part, access.size), exchanges)
                watch.report_race("atomic operation", part, race)
        if watch.order is not None and addresses and sem.name != "RELAXED":
            watch.order.acquire(addresses)
            watch.order.release(addresses)
        return access

    def create_int_to_ptr(self, src: Any, dst_type: Any) -> Any:
        """Make a pointer from an integer: the address of a tensor, which the script has taken."""
        self.watch.suspect()
        bits = src.data.astype(np.uint64)
        for number in np.unique(bits):
            if 0 < int(number) < 1 << _TAG:
                bits[bits == number] = self.pointer_to(int(number))
        return super(CheckedMemory, self).create_int_to_ptr(Handle(bits, tl.uint64), dst_type)

    def pointer_to(self, address: int) -> int:
        """Return an address with the number of its tensor, or the address itself if its tensor is unknown."""
        for region in self.watch.regions.values():
            if region.start <= address < region.start + region.nbytes:
                return address | (region.low >> _TAG) << _TAG
        tensor = next((exposed for exposed in EXPOSED.values() if holds(exposed, address)), None)
        if tensor is None:
            return address
        region = self.watch.region("a tensor whose data_ptr() was taken", tensor)
        return address | (region.low >> _TAG) << _TAG


class MonitoredBuilder(corrected.Builder, MonitoredMemory):
    """The interpreter's builder, which passes each access to the monitor first."""

    most_bytes = 1 << 28
    # The former contents of the memory that a first try stores into, by its start addresses.
    first_contents: dict[int, bytes]

    def prepare_store(self, storage: tuple[int, int] | None) -> None:
        """Save the contents of a storage, and the marks of its written bytes, so that the store can be undone.

        Programs that part keep the marks of the batch: an element that only another program has written is a race.
        """
        super().prepare_store(storage)
        if not self.watch.is_first_try:
            return
        if storage is None or storage[1] - storage[0] > self.most_bytes:
            raise Suspicion
        self.save_first(*storage)
        region = next(region for region in self.watch.regions.values() if region.start == storage[0])
        if region.written is not None:
            start = region.written.ctypes.data
            self.save_first(start, start + region.written.nbytes)

    def save_first(self, start: int, end: int) -> None:
        """Save what `start_anew` restores."""
        if start not in self.first_contents:
            self.first_contents[start] = ctypes.string_at(start, end - start)

    def start_anew(self) -> None:
        """Restore the memory that a first try has changed."""
        for start, content in self.first_contents.items():
            ctypes.memmove(start, content, len(content))
        self.watch.start_anew()


def _wrapped_tensor(argument: Any) -> torch.Tensor:
    """Return the tensor whose address an object of another class gives as its own, such as Triton's TensorWrapper."""
    tensor = tensor_of(argument)
    if tensor is None:
        raise TypeError(f"the memory of an argument of type {type(argument).__name__} is not known: it is no tensor")
    offset = (argument.data_ptr() - tensor.untyped_storage().data_ptr()) // tensor.element_size()
    return tensor.as_strided((), (), offset)


class MonitoredLaunch(corrected.InterpretedLaunch):
    """A launch of a kernel under the monitor."""

    report: Report

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copy nothing: the memory of an absent GPU is the host's."""
        return args_dev, kwargs

    def _restore_args_dev(self, *args: Any) -> None:
        """Copy nothing back."""

    def run_programs(self, arguments: dict[str, Any]) -> None:
        """Run all programs under a monitor of this launch."""
        builder = interpreter.interpreter_builder
        before, builder.watch = getattr(builder, "watch", None), LaunchMonitor(self.report, self.fn.__name__)
        try:
            with earlier_releases.supply():
                super().run_programs(arguments)
        finally:
            builder.watch = before

    def run_together(self, programs: list[tuple[int, int, int]], values: dict[str, Any]) -> None:
        """Run these programs at once; on a suspicion, undo that and run them one after another."""
        builder, history = interpreter.interpreter_builder, batches.history_of(self.fn)
        if not history.alone:
            builder.watch.is_first_try, builder.first_contents = True, {}
            try:
                return super().run_together(programs, values)
            except Suspicion:
                history.alone = True
                builder.start_anew()
            finally:
                builder.watch.is_first_try, builder.first_contents = False, {}
        return self.run_each(iter(programs), values)

    def run_each(self, programs: Iterator[tuple[int, int, int]], values: dict[str, Any]) -> None:
        """Run the programs one after another. A program that waits for a later one runs that in the middle."""
        builder = interpreter.interpreter_builder

        def run_next() -> bool:
            index = next(programs, None)
            if index is None:
                return False
            waiting = builder.grid_idx
            builder.set_grid_idx(*index)
            self.fn(**values)
            builder.grid_idx = waiting
            return True

        builder.watch.run_next = run_next
        super().run_each(programs, values)

    def value(self, name: str, argument: Any) -> Any:
        """Return an argument as the kernel sees it: a tensor is a pointer that carries its number."""
        if isinstance(argument, tuple):
            parts = [self.value(f"{name}[{i}]", part) for i, part in enumerate(argument)]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        if isinstance(argument, TensorDescriptor):
            descriptor = super().value(name, argument)
            descriptor.handle.base = self.pointer(name, argument.base).handle
            return descriptor
        if hasattr(argument, "data_ptr"):
            return self.pointer(name, argument)
        return super().value(name, argument)

    def pointer(self, name: str, argument: Any) -> tl.tensor:
        """Return a pointer to a tensor's first element."""
        watch = interpreter.interpreter_builder.watch
        region = watch.region(name, argument if isinstance(argument, torch.Tensor) else _wrapped_tensor(argument))
        kind = tl.str_to_ty(jit.mangle_type(argument), None)
        return tl.tensor(Handle(np.array([region.first], np.uint64), kind), kind)


@contextlib.contextmanager
def watching(report: Report) -> Iterator[None]:
    """Watch every launch of an interpreted kernel.

    Args:
        report: receives the findings.

    Raises:
        RuntimeError: Triton's interpreter is not in use, or this release of it is unknown.
    """
    corrected.install()
    builder = interpreter.interpreter_builder
    rewriter = interpreter.FunctionRewriter
    before = builder.__class__, interpreter.GridExecutor, rewriter.ast_transformer
    builder.__class__, rewriter.ast_transformer = (
        MonitoredBuilder,
        property(lambda self: earlier_releases.EarlierSource(self.fn)),
    )
    interpreter.GridExecutor = type("WatchedLaunch", (MonitoredLaunch,), {"report": report})
    try:
        yield
    finally:
        builder.__class__, interpreter.GridExecutor, rewriter.ast_transformer = before
