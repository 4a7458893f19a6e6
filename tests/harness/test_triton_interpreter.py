"""The corrected interpreter detects accesses outside of a launch's tensors, and has the meaning of compiled code.

test_triton_language.py tests the results of the language's functions.
"""

import inspect
import math
import os
import pathlib

import pytest
import torch
import triton
import triton.language as tl
import warm
from triton.errors import TritonError
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterError

from fourfold.backends.launch import ImpossibleLaunch
from fourfold.operations.blame import Blame, blame_of
from fourfold.operations.refusals import is_fault

BLOCK = 64

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def copy_kernel(
    x_ptr, output_ptr, n, first, LOAD_MASKED: tl.constexpr, STORE_MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    at = first + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask & (at >= 0)) if LOAD_MASKED else tl.load(x_ptr + at)
    if STORE_MASKED:
        tl.store(output_ptr + at, x, mask=mask & (at >= 0))
    else:
        tl.store(output_ptr + at, x)


def copied(n: int, first: int = 0, load_masked: bool = True, store_masked: bool = True) -> torch.Tensor:
    x, output = torch.arange(n, dtype=torch.float32), torch.full((n,), torch.nan)
    copy_kernel[(1,)](x, output, n, first, LOAD_MASKED=load_masked, STORE_MASKED=store_masked, BLOCK=BLOCK)
    return output


class Reinterpreted:
    """An object that Triton accepts as a tensor, as libraries of kernels use for views that torch cannot make."""

    def __init__(self, base: torch.Tensor) -> None:
        self.dtype, self.device, self.data_ptr = base.dtype, base.device, base.data_ptr


def test_a_tensor_without_data_is_refused_as_a_gpu_refuses_it() -> None:
    x = torch.empty(BLOCK, device="meta")
    for argument in (x, Reinterpreted(x)):
        with pytest.raises(ImpossibleLaunch, match="copy_kernel: a tensor on the device meta has no data"):
            copy_kernel[(1,)](argument, torch.empty(BLOCK), BLOCK, 0, True, True, BLOCK)


@triton.jit
def tanh_kernel(x_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(output_ptr + at, libdevice.tanh(tl.load(x_ptr + at)))


def test_a_type_that_libdevice_lacks_is_a_refusal() -> None:
    x, output = torch.ones(BLOCK), torch.empty(BLOCK)
    tanh_kernel[(1,)](x, output, BLOCK)
    assert torch.allclose(output, x.tanh())
    with pytest.raises(InterpreterError, match=r"libdevice\.tanh takes no arguments of the types") as caught:
        tanh_kernel[(1,)](x.bfloat16(), output.bfloat16(), BLOCK)
    assert blame_of(caught.value) is Blame.REFUSAL


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK])
@pytest.mark.parametrize("first", [0, -1])
def test_masked_access_is_accepted(n: int, first: int) -> None:
    end = min(n, BLOCK + first)
    assert torch.equal(copied(n, first)[:end], torch.arange(end, dtype=torch.float32))


def test_load_past_the_end_is_rejected_though_nobody_uses_it() -> None:
    assert copied(BLOCK, load_masked=False) is not None
    with pytest.raises(TritonError, match=r"load of 4 bytes, 4 bytes outside of the memory of x_ptr \(1 of 64"):
        copied(BLOCK - 1, load_masked=False)


class Wrapped:
    """A wrapper of a tensor with its own address, like those of libraries of kernels."""

    def __init__(self, tensor: torch.Tensor, offset: int) -> None:
        self._tensor, self._offset, self.dtype, self.device = tensor, offset, tensor.dtype, tensor.device

    def data_ptr(self) -> int:
        return self._tensor.data_ptr() + self._offset * self._tensor.element_size()


def test_the_memory_of_a_tensor_within_another_object_is_known() -> None:
    x, output = torch.arange(BLOCK + 2, dtype=torch.float32), torch.empty(BLOCK)
    copy_kernel[(1,)](Wrapped(x, 2), output, BLOCK, 0, LOAD_MASKED=False, STORE_MASKED=True, BLOCK=BLOCK)
    assert torch.equal(output, x[2:])
    with pytest.raises(TritonError, match=r"load of 4 bytes, 4 bytes outside of the memory of x_ptr \(1 of 64"):
        copy_kernel[(1,)](Wrapped(x, 3), output, BLOCK, 0, LOAD_MASKED=False, STORE_MASKED=True, BLOCK=BLOCK)


def test_load_before_the_beginning_is_rejected() -> None:
    with pytest.raises(TritonError, match=r"load of 4 bytes, 4 bytes outside of the memory of x_ptr \(1 of 64"):
        copied(BLOCK, first=-1, load_masked=False)


def test_store_past_the_end_is_rejected() -> None:
    with pytest.raises(TritonError, match=r"store of 4 bytes, .* outside of the memory of output_ptr"):
        copied(BLOCK - 1, store_masked=False)


def test_gap_between_elements_of_a_tensor_is_its_own_memory() -> None:
    """A kernel may access the gap: some kernels get a view of only a part of the memory that they use."""
    x, output = torch.arange(2.0 * BLOCK), torch.empty(BLOCK)
    copy_kernel[(1,)](x[:1], output, BLOCK, 0, LOAD_MASKED=True, STORE_MASKED=True, BLOCK=BLOCK)
    assert torch.equal(output, x[:BLOCK])


@triton.jit
def sum_kernel(x_ptr, output_ptr, n, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0) if GIVEN else tl.load(x_ptr + at, mask=at < n)
    tl.store(output_ptr, tl.sum(x.to(tl.float32), axis=0).to(output_ptr.dtype.element_ty))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_what_a_mask_leaves_out_is_not_taken_to_be_zero(dtype: torch.dtype) -> None:
    def total(n: int, given: bool) -> float:
        output = torch.empty(1, dtype=dtype)
        sum_kernel[(1,)](torch.ones(n, dtype=dtype), output, n, GIVEN=given, BLOCK=BLOCK)
        return output.item()

    assert total(BLOCK, given=False) == total(BLOCK, given=True) == BLOCK
    assert total(BLOCK - 1, given=True) == BLOCK - 1
    # Whatever lanes are left out.
    for n in range(BLOCK - 6, BLOCK):
        assert total(n, given=False) != total(n, given=True) == n


@triton.jit
def swallowing_kernel(x_ptr, output_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(output_ptr, tl.max(x, axis=0).to(tl.float32))
    tl.store(output_ptr + 1, tl.min(x, axis=0).to(tl.float32))
    tl.store(output_ptr + 2, tl.sum((x > 2).to(tl.int32), axis=0).to(tl.float32))
    tl.store(output_ptr + 3, tl.sum((x < 2).to(tl.int32), axis=0).to(tl.float32))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_what_a_mask_leaves_out_shows_where_nan_is_swallowed(dtype: torch.dtype) -> None:
    output, x = torch.empty(4), torch.full([BLOCK], 2, dtype=dtype)
    swallowing_kernel[(1,)](x, output, BLOCK, BLOCK=BLOCK)
    assert output.tolist() == [2, 2, 0, 0]
    swallowing_kernel[(1,)](x, output, BLOCK - 6, BLOCK=BLOCK)
    largest, least, above, below = output.tolist()
    assert largest > 2 > least
    assert above > 0
    assert below > 0


@triton.jit
def narrow_product_kernel(x_ptr, output_ptr, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :])
    tl.store(output_ptr + m[:, None] * M + m[None, :], tl.dot(x, tl.trans(x)).to(tl.float32))


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 16), (torch.bfloat16, 16), (torch.int8, 32)])
def test_a_product_that_the_compiler_refuses_is_refused(dtype: torch.dtype, least: int) -> None:
    x, output = torch.ones(16, least, dtype=dtype), torch.empty(16, 16)
    narrow_product_kernel[(1,)](x, output, M=16, K=least)
    assert torch.equal(output, torch.full([16, 16], float(least)))
    with pytest.raises(InterpreterError, match=f"K >= {least}"):
        narrow_product_kernel[(1,)](x, output, M=16, K=least // 2)


@triton.jit
def count_kernel(counter_ptr, at):
    tl.atomic_add(counter_ptr + at, 1)


def test_atomic_operation_outside_is_rejected() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    count_kernel[(3,)](counter, 0)
    assert counter.item() == 3
    with pytest.raises(TritonError, match=r"atomic operation of 4 bytes, .* counter_ptr"):
        count_kernel[(3,)](counter, 1)


@triton.jit
def through_address_kernel(addresses_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    tl.store(output_ptr + at, tl.load(x_ptr + at))


def test_pointer_made_of_an_integer_may_lead_anywhere() -> None:
    x, output = torch.arange(float(BLOCK)), torch.empty(BLOCK)
    through_address_kernel[(1,)](torch.tensor([x.data_ptr()]), output, BLOCK=BLOCK)
    assert torch.equal(output, x)


def test_next_launch_after_a_rejected_one_is_looked_at_again() -> None:
    for _ in range(2):
        with pytest.raises(TritonError, match="outside of the memory"):
            copied(BLOCK - 1, load_masked=False)
        assert copied(BLOCK - 1).isfinite().all()


@triton.jit
def product_kernel(a_ptr, b_ptr, output_ptr, EXTENT: tl.constexpr):
    down, across = tl.arange(0, EXTENT)[:, None], tl.arange(0, EXTENT)[None, :]
    at = down * EXTENT + across
    tl.store(output_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_of_a_row_does_not_depend_on_its_place_in_the_tile(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    output, rolled = torch.empty_like(a), torch.empty_like(a)
    product_kernel[(1,)](a, b, output, EXTENT=32)
    torch.testing.assert_close(output, a @ b)
    for places in range(1, 32):
        product_kernel[(1,)](a.roll(places, 0), b, rolled, EXTENT=32)
        assert torch.equal(rolled.roll(-places, 0), output)


@triton.jit
def logic_kernel(x_ptr, output_ptr, n, m, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    positive = n > 0 and m > 0
    output = tl.full((BLOCK,), 2, tl.int32)
    if positive and not (n > m):
        output -= 1
    # If FIRST is not set, nothing is read.
    if FIRST and tl.load(x_ptr + 1000 * (1 - FIRST)) > 0:
        output += 10
    inside = (at > 0 and at < n) or at == m
    tl.store(output_ptr + at, tl.where(inside, output, 0))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("n", "m"), [(0, 5), (3, 5), (5, 3)])
def test_logic_of_blocks_numbers_and_constants(n: int, m: int, first: int) -> None:
    output = torch.empty(8, dtype=torch.int32)
    logic_kernel[(1,)](torch.ones(8), output, n, m, FIRST=first, BLOCK=8)
    value = (1 if 0 < n <= m else 2) + 10 * first
    assert output.tolist() == [value if 0 < i < n or i == m else 0 for i in range(8)]


@triton.jit
def condition_kernel(x_ptr, WAY: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    if WAY == 0:
        if x > 0:
            tl.store(x_ptr, 1.0)
    elif WAY == 1:
        tl.store(x_ptr, 1.0 if x > 0 else 2.0)
    elif WAY == 2:
        while x > 0:
            x -= 1
    else:
        tl.store(x_ptr, tl.where(not BLOCK * tl.program_id(0), 1.0, 2.0))


@pytest.mark.parametrize("way", [0, 1, 2])
def test_condition_that_is_a_block_is_rejected(way: int) -> None:
    """Python treats it as true, and the compiler rejects it."""
    with pytest.raises(TritonError, match="a condition is a block of"):
        condition_kernel[(1,)](torch.ones(4), WAY=way, BLOCK=4)
    if way < 2:
        condition_kernel[(1,)](torch.ones(1), WAY=way, BLOCK=1)


def test_not_of_a_number_of_many_bits_is_rejected() -> None:
    with pytest.raises(TritonError, match="Cannot bitcast"):
        condition_kernel[(1,)](torch.ones(4), WAY=3, BLOCK=4)


@triton.jit
def chain_kernel(x_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(output_ptr + at, tl.where(0 < x < 2, 1.0, 0.0))


def test_chain_of_comparisons_is_of_all_or_rejected() -> None:
    output = torch.empty(4)
    if hasattr(interpreter.ASTTransformer, "visit_Compare"):
        chain_kernel[(1,)](torch.arange(4.0), output, BLOCK=4)
        assert output.tolist() == [0, 1, 0, 0]
    else:
        with pytest.raises(NotImplementedError, match="chain of comparisons: 0 < x < 2"):
            chain_kernel[(1,)](torch.arange(4.0), output, BLOCK=4)


@triton.jit
def same_kernel(x_ptr, y_ptr, output_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(output_ptr + at, x - x)
    tl.store(output_ptr + BLOCK + at, x - y)
    tl.store(output_ptr + 2 * BLOCK + at, tl.where(x > y, x, x) - tl.where(x > y, x, y))


def test_operation_on_a_value_and_itself_is_no_pattern_for_others() -> None:
    """The interpreter records the pattern of an operation at its first call."""
    x, y, output = torch.tensor([5.0, 6.0]), torch.tensor([1.0, 9.0]), torch.empty(6)
    same_kernel[(1,)](x, y, output, BLOCK=2)
    assert output.tolist() == [0, 0, 4, -3, 0, -3]


@triton.jit
def numbers_kernel(output_ptr, zeros_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for i in range(-COUNT, COUNT):
        tl.store(output_ptr + (i + COUNT) * BLOCK + at, at * i + i - (3 - i))
    x = at.to(tl.float32) + 1.0
    tl.store(zeros_ptr + at, 1.0 / (x * 0.0))
    tl.store(zeros_ptr + BLOCK + at, 1.0 / (x * -0.0))
    tl.store(zeros_ptr + 2 * BLOCK + at, x * 1)
    tl.store(zeros_ptr + 3 * BLOCK + at, x * 1.5)


def test_number_of_one_call_is_not_taken_for_that_of_another() -> None:
    output, zeros = torch.empty(40, 4, dtype=torch.int32), torch.empty(4, 4)
    numbers_kernel[(1,)](output, zeros, COUNT=20, BLOCK=4)
    assert output.tolist() == [[at * i + i - (3 - i) for at in range(4)] for i in range(-20, 20)]
    # Triton 3.6 treats all zeros as one.
    negative = math.inf if "get_null_value" in inspect.getsource(TritonSemantic.scalar_constant) else -math.inf
    assert zeros.tolist() == [[math.inf] * 4, [negative] * 4, [1, 2, 3, 4], [1.5, 3, 4.5, 6]]


@triton.jit
def programs_kernel(output_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(output_ptr + at, 100 * x + 10 * y + z)


def test_programs_are_told_apart() -> None:
    for grid in ((2, 3, 4), (4, 3), (2,)):
        extents = (*grid, 1, 1)[:3]
        output = torch.empty(extents, dtype=torch.int32)
        programs_kernel[grid](output)
        x, y, z = torch.meshgrid(*map(torch.arange, extents), indexing="ij")
        assert torch.equal(output, (100 * x + 10 * y + z).int())


@triton.jit
def layouts_kernel(x_ptr, output_ptr, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(output_ptr + tl.arange(0, BLOCK), tl.sum(tl.trans(x) * factor, axis=0))
    tl.store(output_ptr + BLOCK + tl.arange(0, BLOCK), tl.sum(x * factor, axis=1))


def test_sums_of_a_transposed_block() -> None:
    x, output = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)), torch.empty(2, 32)
    layouts_kernel[(1,)](x, output, 0.5, BLOCK=32)
    torch.testing.assert_close(output, torch.stack([(x / 2).sum(1)] * 2))


@triton.jit
def failing_kernel(x_ptr, output_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(output_ptr + tl.arange(0, BLOCK), tl.exp(x))


def test_language_is_as_it_was_after_a_launch_that_fails() -> None:
    before = {name: vars(tl)[name] for name in tl.__all__}, dict(vars(tl.tensor))
    for _ in range(2):
        with pytest.raises(TritonError, match="Expected dtype"):
            failing_kernel[(1,)](torch.ones(4, dtype=torch.bfloat16), torch.ones(4), BLOCK=4)
        assert ({name: vars(tl)[name] for name in tl.__all__}, dict(vars(tl.tensor))) == before


ELSEWHERE = """
import sys
import torch, triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from fourfold.backends.triton.interpreter import corrections as triton_interpreter

triton_interpreter.install()
once = {name: id(value) for name, value in vars(interpreter).items()}, id(tl.tensor.__init__)
triton_interpreter.install()
assert once == ({name: id(value) for name, value in vars(interpreter).items()}, id(tl.tensor.__init__))


@triton.jit
def double_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, x + x)


x = torch.ones(4, dtype=torch.bfloat16)
double_kernel[(1,)](x, BLOCK=4)
assert x.tolist() == [2, 2, 2, 2]
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("impls", "oracles", "properties")))
"""


def test_installed_from_elsewhere_twice_and_without_any_implementation(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE)
    known = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    assert all(
        name == "impls" or name.startswith("fourfold.backends.triton.interpreter.corrections")
        for name in warm.printed(script, env=known).split()
    )


@triton.jit
def steps_kernel(bounds, out, END: tl.constexpr):
    for step in range(tl.load(bounds), tl.load(bounds + 1)):
        tl.store(out + step.to(tl.int64), step.to(tl.float32))
    for step in range(END - 2, END):
        tl.store(out + step.to(tl.int64), -step.to(tl.float32))


def test_a_loop_counter_is_a_tensor() -> None:
    out = torch.zeros(8)
    steps_kernel[(1,)](torch.tensor([1, 4], dtype=torch.int32), out, 8)
    assert out.tolist() == [0, 1, 2, 3, 0, 0, -6, -7]


@triton.jit
def doubled_kernel(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * cols
    for step in range(1, 2):
        numbers = tl.load(x + row + at, mask=at < cols, other=0.0)
        tl.store(out + row + at + step - step, 2 * numbers, mask=at < cols)


@pytest.mark.parametrize("block", [1, 2])
def test_a_block_may_have_one_element(block: int) -> None:
    x, out = torch.arange(6.0), torch.zeros(6)
    doubled_kernel[(6 // block,)](x, out, block, block)
    doubled_kernel[(1,)](x, out, block, block)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


@triton.jit
def described_copy_kernel(
    x_ptr, output_ptr, rows, cols, row_stride, column_stride, ROWS: tl.constexpr, COLS: tl.constexpr
):
    described = tl.make_tensor_descriptor(x_ptr, [rows, cols], [row_stride, column_stride], [ROWS, COLS])
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(output_ptr + at, described.load([0, 0]))


def copied_by_descriptor(x: torch.Tensor) -> torch.Tensor:
    output = torch.full((8, 16), torch.nan, dtype=x.dtype)
    described_copy_kernel[(1,)](x, output, *x.shape, *x.stride(), 8, 16)
    return output[: x.shape[0], : x.shape[1]]


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(32.0).view(4, 8),
        torch.arange(36.0).view(3, 12)[:, :5],
        torch.arange(35.0).view(5, 7)[:1],  # the stride of a single row does not matter
        torch.arange(64.0).view(4, 16)[:, 4:],
    ],
    ids=["contiguous", "wide_rows", "one_row", "aligned_columns"],
)
def test_memory_that_a_descriptor_can_describe_is_read(x: torch.Tensor) -> None:
    assert torch.equal(copied_by_descriptor(x), x)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(4, 7), "stride 0 .* a multiple of 16 bytes, not 7 elements of 4 bytes"),
        (torch.zeros(4, 12, dtype=torch.float16), "stride 0 .* a multiple of 16 bytes, not 12 elements of 2 bytes"),
        (torch.zeros(4, 16)[:, 1:], "begin at a multiple of 16 bytes, not 4 bytes after one"),
    ],
    ids=["odd_rows", "odd_rows_of_halves", "misaligned"],
)
def test_memory_that_a_descriptor_cannot_describe_is_a_fault(x: torch.Tensor, says: str) -> None:
    with pytest.raises(InterpreterError, match=says) as caught:
        copied_by_descriptor(x)
    assert is_fault(caught.value)


@triton.jit
def looped_kernel(bounds_ptr, output_ptr, HAS_STEP: tl.constexpr):
    first, last = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    total = 0
    for number in range(first, last, tl.load(bounds_ptr) + 2) if HAS_STEP else range(first, last):
        total += number
    tl.store(output_ptr, total)


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("programs", [1, 4])
def test_a_loop_over_floats_is_refused_as_the_compiler_refuses_it(has_step: bool, programs: int) -> None:
    output = torch.zeros(1, dtype=torch.int64)
    looped_kernel[(programs,)](torch.tensor([0, 5]), output, has_step)
    assert output == (6 if has_step else 10)
    with pytest.raises(InterpreterError, match=r"bounds and step must all be ints, are \(fp32, fp32") as caught:
        looped_kernel[(programs,)](torch.tensor([0.0, 5.0]), output, has_step)
    assert blame_of(caught.value) is Blame.REFUSAL
