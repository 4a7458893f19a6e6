"""What the interpreter is made to see, accesses outside of a launch's tensors, and to compute alike everywhere."""

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from impls import triton_launch

BLOCK = 64


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not triton_launch.INTERPRETED:
        pytest.skip("kernels are not interpreted")


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


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK])
@pytest.mark.parametrize("first", [0, -1])
def test_masked_access_is_accepted(n: int, first: int) -> None:
    end = min(n, BLOCK + first)
    assert torch.equal(copied(n, first)[:end], torch.arange(end, dtype=torch.float32))


def test_load_past_the_end_is_rejected_though_nobody_uses_it() -> None:
    assert copied(BLOCK, load_masked=False) is not None
    with pytest.raises(TritonError, match=r"load of 4 bytes, 4 bytes outside of the memory of x_ptr \(1 of 64"):
        copied(BLOCK - 1, load_masked=False)


def test_load_before_the_beginning_is_rejected() -> None:
    with pytest.raises(TritonError, match=r"load of 4 bytes, 4 bytes outside of the memory of x_ptr \(1 of 64"):
        copied(BLOCK, first=-1, load_masked=False)


def test_store_past_the_end_is_rejected() -> None:
    with pytest.raises(TritonError, match=r"store of 4 bytes, .* outside of the memory of output_ptr"):
        copied(BLOCK - 1, store_masked=False)


def test_gap_between_elements_of_a_tensor_is_its_own_memory() -> None:
    """Some kernels are given a part of what they use."""
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
    left_out = math.nan if dtype.is_floating_point else -1
    assert total(BLOCK - 1, given=False) == pytest.approx(BLOCK - 1 + left_out, nan_ok=True)


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
