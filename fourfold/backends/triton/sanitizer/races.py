"""Find races between the programs of a launch that run one after another.

Programs of a launch have no order on a GPU. Two of them race for an element if one writes it, the other reads or writes
it, not both atomically, and no atomic operations order the two. A chain orders them: one program performs an atomic
operation after its access, and the other performs one at the same address before its own access. Relaxed atomics order
nothing.

Source: L. Lamport, Time, clocks, and the ordering of events in a distributed system, 1978; clocks of each program as in
C. Flanagan and S. Freund, FastTrack: efficient and precise dynamic race detection, 2009.
"""

from typing import NamedTuple

import numpy as np

# A stamp packs the number of a program, its time, and whether its store left the value unchanged.
_TIME_BITS = 24
_LAST_TIME = (1 << _TIME_BITS) - 1
# An atomic operation on more elements than this transfers data; it does not signal that a program is done.
MOST_SIGNALS = 32


def _program(stamps: np.ndarray) -> np.ndarray:
    """Return the number of the program, from 0, or -1 if there is no stamp."""
    return (stamps >> (_TIME_BITS + 1)) - 1


class DataRace(NamedTuple):
    """Two accesses that no atomic operation orders.

    Attributes:
        lane: the index of the first racing access in the given offsets.
        lanes: the number of racing accesses.
        other: the number of the other program.
        what: the other program's access: "stored", "loaded", "updated atomically".
        harmless: whether both leave the same value.
    """

    lane: int
    lanes: int
    other: int
    what: str
    harmless: bool


class Accesses:
    """The last accesses to each element of a storage in a launch.

    Args:
        nbytes: the size of the storage.
        unit: the bytes of an element.
    """

    def __init__(self, nbytes: int, unit: int) -> None:
        self.unit = unit
        length = -(-nbytes // unit)
        # Untouched pages take no memory.
        self.stores, self.atomics, self.first_loads, self.last_loads = (np.zeros(length, np.int64) for _ in range(4))
        # Whether anything was stored or updated: most tensors are only loaded.
        self.changed = False

    def places(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return the indices of the elements at some offsets in bytes; wider accesses have one row each."""
        if size % self.unit or bool((offsets % self.unit).any()):
            self.divide(int(np.gcd.reduce(np.gcd(offsets, np.gcd(size, self.unit)), axis=None)))
        first = offsets // self.unit
        count = size // self.unit
        return first if count == 1 else first[:, None] + np.arange(count)

    def divide(self, unit: int) -> None:
        """Split the elements into smaller ones of `unit` bytes."""
        parts = self.unit // unit
        for name in ("stores", "atomics", "first_loads", "last_loads"):
            setattr(self, name, np.repeat(getattr(self, name), parts))
        self.unit = unit


class Order:
    """The vector clocks of a launch's programs: the running program, and its known clock.

    Args:
        programs: the number of programs.
    """

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.program, self.time = 0, 0
        # For each program, the time before which all its accesses precede the running program's next one.
        self.clock: np.ndarray | None = None
        # The clocks released by atomic operations, by address.
        self.released: dict[int, np.ndarray] = {}

    def begin(self, program: int) -> None:
        """Start the next program."""
        self.program, self.time, self.clock = program, 0, None

    def stamp(self) -> int:
        """Return the stamp of an access by the running program now."""
        return (self.program + 1) << (_TIME_BITS + 1) | self.time << 1

    def concurrent_accesses(self, stamps: np.ndarray) -> np.ndarray:
        """Return which accesses are another program's and not known to have happened before."""
        others = _program(stamps)
        concurrent = (stamps != 0) & (others != self.program)
        if self.clock is not None and concurrent.any():
            concurrent[concurrent] = self.clock[others[concurrent]] <= (stamps[concurrent] >> 1 & _LAST_TIME)
        return concurrent

    def acquire(self, addresses: list[int]) -> None:
        """Acquire the clocks released at these addresses."""
        for address in addresses:
            clocks = self.released.get(address)
            if clocks is not None:
                self.clock = clocks.copy() if self.clock is None else np.maximum(self.clock, clocks)

    def release(self, addresses: list[int]) -> None:
        """Release the running program's clocks at these addresses, and advance its time."""
        self.time = min(self.time + 1, _LAST_TIME)
        if self.clock is None:
            self.clock = np.zeros(self.programs, np.int32)
        self.clock[self.program] = self.time
        clocks = self.clock.copy()
        self.released.update(dict.fromkeys(addresses, clocks))

    def load(self, accesses: Accesses, places: np.ndarray, volatile: bool) -> DataRace | None:
        """Record a load of these elements; return its race, if any."""
        stores, atomics = accesses.stores[places], accesses.atomics[places]
        stamp = self.stamp()
        if volatile:  # it waits for another program's store
            return None
        before = accesses.first_loads[places]
        accesses.first_loads[places] = np.where(before == 0, stamp, before)
        accesses.last_loads[places] = stamp
        return self._race(stores, "stored", unchanged=(stores & 1) == 1) or self._race(atomics, "updated atomically")

    def store(self, accesses: Accesses, places: np.ndarray, unchanged: np.ndarray) -> DataRace | None:
        """Record a store to these elements; return its race, if any.

        Args:
            accesses: of the storage.
            places: the elements' indices.
            unchanged: whether each element already had the stored value.
        """
        if places.ndim > unchanged.ndim:
            unchanged = np.broadcast_to(unchanged[:, None], places.shape)
        loads = self.concurrent_accesses(accesses.first_loads[places]), accesses.last_loads[places]
        race = (
            self._race(accesses.stores[places], "stored", unchanged)
            or self._race(accesses.atomics[places], "updated atomically")
            or self._race(np.where(loads[0], accesses.first_loads[places], loads[1]), "loaded", unchanged)
        )
        accesses.stores[places] = self.stamp() | unchanged.astype(np.int64)
        accesses.changed = True
        return race

    def atomic(self, accesses: Accesses, places: np.ndarray, exchanges: bool) -> DataRace | None:
        """Record an atomic operation on these elements; return its race, if any.

        An operation that exchanges values may meet a lock that a plain store opens, so it never races.
        """
        stores, loads = accesses.stores[places], accesses.last_loads[places]
        accesses.atomics[places] = self.stamp()
        accesses.changed = True
        return None if exchanges else self._race(stores, "stored") or self._race(loads, "loaded")

    def _race(self, stamps: np.ndarray, what: str, unchanged: np.ndarray | None = None) -> DataRace | None:
        if not stamps.any():
            return None
        racing = self.concurrent_accesses(stamps)
        if not racing.any():
            return None
        harmful = racing if unchanged is None else racing & ~unchanged
        reported = harmful if harmful.any() else racing
        index = int(np.flatnonzero(reported)[0])
        lanes = reported.any(axis=1) if reported.ndim > 1 else reported
        return DataRace(
            lane=int(np.flatnonzero(lanes)[0]),
            lanes=int(np.count_nonzero(lanes)),
            other=int(_program(stamps.flat[index])),
            what=what,
            harmless=not harmful.any(),
        )


def stamps_of(programs: np.ndarray) -> np.ndarray:
    """Return the stamps of programs, by their numbers, that have performed no atomic operation."""
    return (programs.astype(np.int64) + 1) << (_TIME_BITS + 1)


def load_in_step(accesses: Accesses, places: np.ndarray, stamps: np.ndarray) -> bool:
    """Record a load by several programs at once; return whether it may race.

    Args:
        accesses: of the storage.
        places: the elements' indices, in the order of the programs.
        stamps: the stamp of the program of each element.
    """
    places, stamps = _rows(places, stamps)
    if accesses.changed and (_others(accesses.stores[places], stamps) or accesses.atomics[places].any()):
        return True
    # Of several values for one place the last remains. These are the lowest and the highest program.
    before = accesses.first_loads[places]
    first = np.where(before == 0, stamps, np.minimum(before, stamps))
    accesses.first_loads[places[::-1]] = first[::-1]
    accesses.last_loads[places] = np.maximum(accesses.last_loads[places], stamps)
    return False


def store_in_step(accesses: Accesses, places: np.ndarray, stamps: np.ndarray, unchanged: np.ndarray) -> bool:
    """Record a store by several programs at once; return whether it may race. See `load_in_step`."""
    unchanged = _rows(places, unchanged)[1]
    places, stamps = _rows(places, stamps)
    if accesses.changed and (_others(accesses.stores[places], stamps) or accesses.atomics[places].any()):
        return True
    if _others(accesses.first_loads[places], stamps) or _others(accesses.last_loads[places], stamps):
        return True
    accesses.stores[places] = stamps | unchanged
    accesses.changed = True
    return _others(accesses.stores[places], stamps)


def _rows(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in one dimension, each with the value of its row."""
    return places.ravel(), values if places.ndim == 1 else np.repeat(values, places.shape[1])


def _others(recorded: np.ndarray, stamps: np.ndarray) -> bool:
    """Return whether any of these stamps is another program's."""
    return bool(((recorded != 0) & (_program(recorded) != _program(stamps))).any())
