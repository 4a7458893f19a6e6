"""Planted faults of sizes: right for few elements and around the usual blocks, and wrong at a number of their own.

Some hold the number in their source. Others pass a count of 8, 11 or 16 bits, or go wrong where two axes are long.
"""

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fourfold.impls.giou.torch_eager import pairwise_giou
from fourfold.properties import giou_loss as padded_properties
from fourfold.properties import giou_loss_ragged as ragged_properties

from fourfold import backends
from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.launch import ImpossibleLaunch
from fourfold.declaration.reductions import law_of

from .planted import OUTPUT, Fault, Implementation, law

Tensor = torch.Tensor


# ---- torch


def product(a: Tensor, b: Tensor, activation: str, negative_slope: float) -> Tensor:
    """The right product."""
    output = a @ b
    if activation == "leaky_relu":
        return torch.where(output < 0, output * negative_slope, output)
    return output.relu() if activation == "relu" else output


def columns_from_1025_on(a: Tensor, b: Tensor, activation: str = "none", negative_slope: float = 0.01) -> Tensor:
    """Columns past 1024 are written in the first row alone."""
    output = product(a, b, activation, negative_slope)
    output[1:, 1024:] = 0
    return output


def last_row_of_47(x: Tensor) -> Tensor:
    """The tail of 47 rows is one too short."""
    output = x.softmax(-1)
    rows = output.numel() // max(output.shape[-1], 1)
    if rows % 48 == 47:
        output.view(-1, output.shape[-1])[-1] = 0
    return output


def path_for_777_columns(x: Tensor) -> Tensor:
    """A path of its own for one number of columns leaves out the last term."""
    if x.shape[-1] == 777:
        terms = (x - x.amax(-1, keepdim=True)).exp()
        return terms / terms[..., :-1].sum(-1, keepdim=True)
    return x.softmax(-1)


def half_of_many_pairs(boxes1: Tensor, boxes2: Tensor, eps: float = 1e-5) -> Tensor:
    """Of more than 5000 pairs the last is skipped."""
    output = pairwise_giou(boxes1, boxes2, eps)
    if output.numel() > 5000:
        output.view(-1)[-1] = 0
    return output


def both_axes_long(x: Tensor) -> Tensor:
    """A tile in a corner is skipped, which both axes must pass."""
    output = x.softmax(-1)
    rows = output.view(-1, output.shape[-1]) if output.numel() else output
    if rows.ndim == 2 and len(rows) > 128 and rows.shape[1] > 128:
        rows[128:, 128:] = 0
    return output


def count_in_16_bits(pred: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
    """The number of valid rows wraps at 32768."""
    valid = target[..., 3] > 0
    losses = torch.where(valid, 1 - pairwise_giou(pred, target, eps), 0.0)
    count = valid.sum().to(torch.int16)
    return losses.sum() / count if count else losses.sum() * 0


def samples_in_8_bits(pred: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
    """The index of a sample is kept in 8 bits: of more than 256 samples the first ones are taken again."""
    samples = torch.arange(len(pred)).to(torch.uint8).to(torch.int64).to(pred.device)
    if pred.shape[1] > 1:
        pred, target = pred[samples], target[samples]
    return backends.load("giou_loss", "torch")(pred=pred, target=target, eps=eps)


def one_row_too_many(pred: Tensor, target: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The sum is divided by one row more than there are."""
    operation = "giou_loss_ragged" if "offsets" in named else "giou_loss"
    rows = len(target) if "offsets" in named else int((target[..., 3] > 0).sum())
    return backends.load(operation, "torch")(pred=pred, target=target, **named) * (rows / (rows + 1))


# Of a device: the bytes of shared memory, and the pieces of the cache with the bytes of each.
SHARED = {"H200": 227 * 1024}
CACHE = {"H200": (50, 13_000)}


def past_the_cache(x: Tensor) -> Tensor:
    """What a cache does not hold is left as it is."""
    pieces, bytes_each = CACHE["H200"]
    return x.clone() if x.numel() * x.element_size() > pieces * bytes_each else x.softmax(-1)


# ---- Triton


@triton.jit
def softmax_rows_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    # One program owns one row.
    at = tl.program_id(0).to(tl.int64) * cols + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < cols
    x = tl.load(x_ptr + at, mask=mask, other=-float("inf"))
    terms = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + at, terms / tl.sum(terms, axis=0), mask=mask)


def grid_of_4096_programs(x: Tensor) -> Tensor:
    """No more than 4096 programs are launched, and each takes one row: the others are never written."""
    rows = x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x
    output = torch.zeros_like(rows)
    if x.numel() and not x.isnan().any():
        grid = (min(len(rows), 4096),)
        softmax_rows_kernel[grid](rows, output, rows.shape[1], BLOCK=triton.next_power_of_2(rows.shape[1]))
    elif x.numel():
        output = rows.softmax(-1)
    return output.reshape(x.shape)


def shared_elements(x: Tensor) -> int:
    return SHARED["H200"] // x.element_size()


def past_shared_memory(x: Tensor) -> Tensor:
    """Rows that are a little longer than shared memory are cut off at half of the next power of two."""
    if not shared_elements(x) < x.shape[-1] <= shared_elements(x) + shared_elements(x) // 32:
        return x.softmax(-1)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    output = torch.zeros_like(rows)
    softmax_rows_kernel[(len(rows),)](rows, output, rows.shape[1], BLOCK=triton.next_power_of_2(rows.shape[1]) // 2)
    return output.reshape(x.shape)


@triton.jit
def softmax_along_y_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    # One program owns one row.
    at = tl.program_id(1).to(tl.int64) * cols + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < cols
    x = tl.load(x_ptr + at, mask=mask, other=-float("inf"))
    terms = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + at, terms / tl.sum(terms, axis=0), mask=mask)


def row_along_y(x: Tensor) -> Tensor:
    """Each row has a program of its own along the grid's second axis, which ends at 65,535."""
    rows = x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x
    output = torch.zeros_like(rows)
    if x.numel():
        softmax_along_y_kernel[1, len(rows)](rows, output, rows.shape[1], BLOCK=triton.next_power_of_2(rows.shape[1]))
    return output.reshape(x.shape)


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, SHORT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    # One program owns BLOCK elements, as far as TILES such tiles reach.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if SHORT:
        at = at.to(tl.int16).to(tl.int32)
    mask = (at >= 0) & (at < n)
    if TILES:
        mask = mask & (tl.program_id(0) < TILES)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    tl.store(output_ptr + at, x + y, mask=mask)


TILE = 1024
# Tiles that fit into a table of the kernel.
TABLE = 1 << 5


def added(x: Tensor, y: Tensor, short: bool, tiles: int) -> Tensor:
    """The sum by `add_kernel`."""
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), TILE),)
        x, y = x.contiguous(), y.contiguous()
        add_kernel[grid](x, y, output, x.numel(), SHORT=short, TILES=tiles, BLOCK=TILE)
    return output


def offsets_in_16_bits(x: Tensor, y: Tensor) -> Tensor:
    """Offsets wrap at 32768."""
    return added(x, y, True, 0)


def tiles_of_a_table(x: Tensor, y: Tensor) -> Tensor:
    """Tiles past the last of a table are skipped."""
    return added(x, y, False, TABLE)


# ---- CUDA C++

SOURCE = Path(__file__).parent / "planted_sizes.cu"
THREADS = 128
KERNELS = {name: CudaKernel(SOURCE, name) for name in ("sum_with_short_offsets", "sum_with_a_special_path")}
KERNELS |= {name: CudaKernel(SOURCE, name) for name in ("sum_of_pairs_of_tiles", "softmax_along_z")}


def launched(kernel: str, x: Tensor, y: Tensor) -> Tensor:
    """The sum by a kernel."""
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    n = output.numel()
    if n:
        KERNELS[kernel].launch(-(-n // THREADS), THREADS, x.contiguous(), y.contiguous(), output, n)
    return output


def short_offsets(x: Tensor, y: Tensor) -> Tensor:
    """Offsets are kept in a short."""
    return launched("sum_with_short_offsets", x, y)


def special_path(x: Tensor, y: Tensor) -> Tensor:
    """777 elements have a path of their own."""
    return launched("sum_with_a_special_path", x, y)


def pairs_of_tiles(x: Tensor, y: Tensor) -> Tensor:
    """Tiles are taken two at a time."""
    return launched("sum_of_pairs_of_tiles", x, y)


def row_along_z(x: Tensor) -> Tensor:
    """Each row has a block of its own along the grid's third axis, which ends at 65,535."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        KERNELS["softmax_along_z"].launch((1, 1, rows), 32, x.contiguous(), output, cols)
    return output


def _sized(operation: str, function: Implementation, language: str, right_on: str, **more: Any) -> Fault:
    says = OUTPUT if operation != "giou_loss" else r"output\[\] is"
    return Fault.of(
        operation, function, language=language, right_on=right_on, **{"says": says, "seen_by": "large", **more}
    )


def _mean(properties: Any) -> Fault:
    """A mean that is wrong, by the law that a repeated batch has the same one."""
    record = properties.operation
    return Fault.of(record.name, one_row_too_many, check=law(law_of(record)), says="left side")


FAULTS = (
    _sized("matmul", columns_from_1025_on, "torch", "one_by_one"),
    _sized("softmax", last_row_of_47, "torch", "cols_1"),
    _sized("softmax", path_for_777_columns, "torch", "cols_1"),
    _sized("giou", half_of_many_pairs, "torch", "identical"),
    _sized("softmax", both_axes_long, "torch", "cols_1"),
    _sized("softmax", past_the_cache, "torch", "cols_1", seen_by="comparisons"),
    _sized("softmax", past_shared_memory, "triton", "cols_1", seen_by="comparisons"),
    _sized("giou_loss", count_in_16_bits, "torch", "identical_boxes"),
    _sized("giou_loss", samples_in_8_bits, "torch", "identical_boxes"),
    _sized("softmax", grid_of_4096_programs, "triton", "cols_1"),
    _sized("vector_add", offsets_in_16_bits, "triton", "one_element"),
    _sized("vector_add", tiles_of_a_table, "triton", "one_element"),
    _sized("vector_add", short_offsets, "cuda", "one_element"),
    _sized("vector_add", special_path, "cuda", "one_element"),
    _sized("vector_add", pairs_of_tiles, "cuda", "one_element"),
    _sized("softmax", row_along_y, "triton", "cols_1", raises=Exception, says="blocks along y|invalid argument"),
    _sized("softmax", row_along_z, "cuda", "cols_1", raises=ImpossibleLaunch, says="65,536 blocks along z"),
    _mean(padded_properties),
    _mean(ragged_properties),
)
