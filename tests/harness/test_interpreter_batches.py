"""Programs that the interpreter runs at once give the same results as one after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import InterpreterError

from fourfold.backends.triton.interpreter import batches

PROGRAMS = 100  # more than in the first batch

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of programs of each call of a kernel."""
    found: list[int] = []
    shipped = batches.Runner.batch

    def batch(self: Any, programs: Any, divisions: int) -> None:
        found.append(len(programs))
        shipped(self, programs, divisions)

    monkeypatch.setattr(batches.Runner, "batch", batch)
    return found


@triton.jit
def add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


def test_programs_run_at_once(calls: list[int]) -> None:
    x, y = torch.arange(1598.0), torch.zeros(1598)
    add_kernel[(PROGRAMS,)](x, y, 1598, BLOCK=16)
    assert torch.equal(y, x + 1)
    assert calls == [batches.FIRST, PROGRAMS - batches.FIRST]


@triton.jit
def branch_kernel(x_ptr, y_ptr, n):
    program = tl.program_id(0)
    x = tl.load(x_ptr + program)
    tl.store(y_ptr + program, 7.0)
    if x > 0:
        tl.store(y_ptr + program, x)
    elif program % 2 == 0:
        tl.store(y_ptr + program, -x)


def test_programs_that_differ_in_a_condition_run_in_parts(calls: list[int]) -> None:
    x = torch.tensor([3.0, -2, -5, 4, -1, 6, -7, 8])
    y = torch.zeros(8)
    branch_kernel[(8,)](x, y, 8)
    assert y.tolist() == [3, 7, 5, 4, 1, 6, 7, 8]
    assert calls == [8, 4, 4, 1, 3]


@triton.jit
def add_in_place_kernel(x_ptr, rounds_ptr, n):
    program = tl.program_id(0)
    tl.store(x_ptr + program, tl.load(x_ptr + program) + 1)
    for _ in range(tl.load(rounds_ptr + program)):
        tl.store(x_ptr + program, tl.load(x_ptr + program) * 2)


def test_what_was_stored_before_programs_differ_is_undone() -> None:
    x, rounds = torch.ones(6), torch.tensor([0, 1, 2, 0, 1, 3], dtype=torch.int32)
    add_in_place_kernel[(6,)](x, rounds, 6)
    assert x.tolist() == [2, 4, 8, 2, 4, 16]


@triton.jit
def persistent_kernel(x_ptr, y_ptr, n, PYTHONS: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if PYTHONS:
        for at in range(program, n, programs):
            tl.store(y_ptr + at, tl.load(x_ptr + at) + at)
    else:
        for at in tl.range(program, n, programs):
            tl.store(y_ptr + at, tl.load(x_ptr + at) + at)


@pytest.mark.parametrize("pythons", [True, False])
@pytest.mark.parametrize("n", [0, 5, 8, 21])
def test_programs_that_go_round_as_often_stay_together(n: int, pythons: bool, calls: list[int]) -> None:
    x, y = torch.arange(21.0), torch.zeros(21)
    persistent_kernel[(8,)](x, y, n, PYTHONS=pythons)
    assert torch.equal(y[:n], 2 * x[:n])
    assert not y[n:].any()
    assert calls == ([8] if n % 8 == 0 else [8, n % 8, 8 - n % 8])


@triton.jit
def last_kernel(x_ptr, partial_ptr, counter_ptr, y_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    # The last program adds up the values that all programs stored.
    program = tl.program_id(0)
    tl.store(partial_ptr + program, tl.sum(tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))))
    if tl.atomic_add(counter_ptr, 1) == PROGRAMS - 1:
        tl.store(y_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, PROGRAMS))))


def test_each_program_gets_a_ticket_of_its_own(calls: list[int]) -> None:
    x, partial, y = torch.arange(512.0), torch.full((128,), torch.nan), torch.zeros(1)
    counter = torch.zeros(1, dtype=torch.int32)
    last_kernel[(128,)](x, partial, counter, y, PROGRAMS=128, BLOCK=4)
    assert (y.item(), counter.item()) == (x.sum().item(), 128)
    assert sum(calls) < 300


@triton.jit
def chain_kernel(flags_ptr, y_ptr):
    # Each program waits for the one before it.
    program = tl.program_id(0)
    while tl.load(flags_ptr + program, volatile=True) == 0:
        pass
    tl.store(y_ptr + program + 1, tl.load(y_ptr + program) * 2)
    tl.atomic_xchg(flags_ptr + program + 1, 1)


@triton.jit
def lock_kernel(lock_ptr, y_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) * 2 + 1)
    tl.atomic_xchg(lock_ptr, 0)


def test_programs_that_wait_for_one_another_take_turns() -> None:
    flags, y = torch.zeros(11, dtype=torch.int32), torch.ones(11)
    flags[0] = 1
    chain_kernel[(10,)](flags, y)
    assert y.tolist() == [2.0**n for n in range(11)]
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    lock_kernel[(10,)](lock, total)
    assert total.item() == 2**10 - 1


@triton.jit
def stray_kernel(x_ptr, y_ptr):
    program = tl.program_id(0)
    tl.store(y_ptr + program, 1.0)
    tl.store(y_ptr + program, tl.load(x_ptr + program * program))


def test_an_error_is_that_of_the_first_program_that_is_wrong() -> None:
    """The programs before it have stored, and those after it have not."""
    x, y = torch.arange(10.0), torch.zeros(8)
    with pytest.raises(InterpreterError, match=r"load of 4 bytes, 28 bytes outside of the memory of x_ptr \(1 of 1"):
        stray_kernel[(8,)](x, y)
    assert y.tolist() == [0, 1, 4, 9, 1, 0, 0, 0]


@triton.jit
def tiles_kernel(x_ptr, y_ptr, rows, cols, GROUP: tl.constexpr):
    # Python's min and max of numbers that differ between programs.
    program = tl.program_id(0)
    first = program // (GROUP * cols) * GROUP
    size = min(rows - first, GROUP)
    row = first + program % (GROUP * cols) % size
    col = max(program % (GROUP * cols) // size, 0)
    tl.store(y_ptr + row * cols + col, tl.load(x_ptr + row * cols + col) + program)


def test_pythons_min_and_max_do_not_divide_a_batch(calls: list[int]) -> None:
    x, y = torch.zeros(15), torch.full((15,), -1.0)
    tiles_kernel[(15,)](x, y, 5, 3, GROUP=2)
    assert sorted(y.tolist()) == list(range(15))
    assert calls == [15]


def test_a_kernel_whose_batches_come_apart_is_run_one_program_at_a_time(calls: list[int]) -> None:
    def run(kernel: Callable[..., Any], rounds: list[int]) -> None:
        kernel[(len(rounds),)](torch.ones(len(rounds)), torch.tensor(rounds, dtype=torch.int32), len(rounds))

    for _ in range(batches.COME_APART):
        run(doubling_kernel, [0, 1, 2, 3])
    calls.clear()
    run(doubling_kernel, [0, 0, 0, 0])
    assert calls == []


@triton.jit
def doubling_kernel(x_ptr, rounds_ptr, n):
    program = tl.program_id(0)
    for _ in range(tl.load(rounds_ptr + program)):
        tl.store(x_ptr + program, tl.load(x_ptr + program) * 2)


@triton.jit
def reduce_kernel(x_ptr, y_ptr, index_ptr, running_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + program * BLOCK + at)
    both = tl.reshape(x, (2, BLOCK // 2))
    tl.store(y_ptr + program * 4 + tl.arange(0, 2), tl.sum(both, axis=1))
    tl.store(y_ptr + program * 4 + 2, tl.sum(tl.max(both, axis=0), axis=0))
    tl.store(y_ptr + program * 4 + 3, tl.sum(tl.trans(both) * 1.0))
    tl.store(index_ptr + program, tl.argmax(x, axis=0))
    tl.store(running_ptr + program * BLOCK + at, tl.cumsum(x, axis=0, reverse=True))


def test_reductions_and_scans_are_of_each_program() -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    y, index, running = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int32), torch.zeros(5, 16)
    reduce_kernel[(5,)](x, y, index, running, BLOCK=16)
    halves = x.reshape(5, 2, 8)
    expected = torch.cat([halves.sum(2), halves.amax(1).sum(1, keepdim=True), x.sum(1, keepdim=True)], dim=1)
    torch.testing.assert_close(y, expected)
    assert torch.equal(index.long(), x.argmax(1))
    torch.testing.assert_close(running, x.flip(1).cumsum(1).flip(1))
