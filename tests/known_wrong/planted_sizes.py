"""Planted faults of sizes: right for few elements and around the usual blocks, and wrong past some number.

The source of some contains the number. Others exceed a count of 8, 11 or 16 bits, or fail if two axes are long.
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
from fourfold.declaration.reductions import law_of

from .edits import Edits
from .planted import OUTPUT, Fault, Implementation, law
from .planted_emulation import exponentials_kernel, softmax

Tensor = torch.Tensor


# ---- torch


def product(a: Tensor, b: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Return the right product."""
    output = a @ b
    if activation == "leaky_relu":
        return torch.where(output < 0, output * negative_slope, output)
    return output.relu() if activation == "relu" else output


def count_in_16_bits(pred: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
    """Wrap the number of valid rows at 32768."""
    valid = target[..., 3] > 0
    losses = torch.where(valid, 1 - pairwise_giou(pred, target, eps), 0.0)
    count = valid.sum().to(torch.int16)
    return losses.sum() / count if count else losses.sum() * 0


def one_row_too_many(pred: Tensor, target: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Divide the sum by one row too many."""
    operation = "giou_loss_ragged" if "offsets" in named else "giou_loss"
    rows = len(target) if "offsets" in named else int((target[..., 3] > 0).sum())
    return backends.load(operation, "torch")(pred=pred, target=target, **named) * (rows / (rows + 1))


SHARED = {"H200": 227 * 1024}  # the bytes of shared memory of a device


# ---- Triton


def grid_of_4096_programs(x: Tensor) -> Tensor:
    """Launch at most 4096 programs, each for one row: the other rows are never written."""
    rows = x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x
    output = torch.zeros_like(rows)
    if x.numel() and not x.isnan().any():
        grid = (min(len(rows), 4096),)
        exponentials_kernel[grid](rows, output, rows.shape[1], AXIS=0, BLOCK=triton.next_power_of_2(rows.shape[1]))
    elif x.numel():
        output = rows.softmax(-1)
    return output.reshape(x.shape)


def shared_elements(x: Tensor) -> int:
    return SHARED["H200"] // x.element_size()


def past_shared_memory(x: Tensor) -> Tensor:
    """Truncate rows slightly longer than shared memory at half of the next power of two."""
    if not shared_elements(x) < x.shape[-1] <= shared_elements(x) + shared_elements(x) // 32:
        return x.softmax(-1)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    output = torch.zeros_like(rows)
    block = triton.next_power_of_2(rows.shape[1]) // 2
    exponentials_kernel[(len(rows),)](rows, output, rows.shape[1], AXIS=0, BLOCK=block)
    return output.reshape(x.shape)


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, SHORT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    # One program owns BLOCK elements, within the first TILES tiles.
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
    """Return the sum by `add_kernel`."""
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), TILE),)
        x, y = x.contiguous(), y.contiguous()
        add_kernel[grid](x, y, output, x.numel(), SHORT=short, TILES=tiles, BLOCK=TILE)
    return output


def offsets_in_16_bits(x: Tensor, y: Tensor) -> Tensor:
    """Wrap offsets at 32768."""
    return added(x, y, True, 0)


def tiles_of_a_table(x: Tensor, y: Tensor) -> Tensor:
    """Skip tiles past the last entry of a table."""
    return added(x, y, False, TABLE)


# ---- CUDA C++

SOURCE = Path(__file__).parent / "planted_sizes.cu"
NAMES = "sum_with_short_offsets", "sum_with_a_special_path", "sum_of_pairs_of_tiles"
THREADS = 128
KERNELS = {name: CudaKernel(SOURCE, name) for name in NAMES}


def launched(kernel: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum by a kernel."""
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    n = output.numel()
    if n:
        KERNELS[kernel].launch(-(-n // THREADS), THREADS, x.contiguous(), y.contiguous(), output, n)
    return output


def short_offsets(x: Tensor, y: Tensor) -> Tensor:
    """Keep offsets in a short."""
    return launched("sum_with_short_offsets", x, y)


def special_path(x: Tensor, y: Tensor) -> Tensor:
    """Take another path for 777 elements."""
    return launched("sum_with_a_special_path", x, y)


def pairs_of_tiles(x: Tensor, y: Tensor) -> Tensor:
    """Take tiles two at a time."""
    return launched("sum_of_pairs_of_tiles", x, y)


def row_along_z(x: Tensor) -> Tensor:
    """Give each row a block along the grid's third axis, which ends at 65,535; leave long rows to torch."""
    return softmax("cuda", "rows_along_z")(x) if x.shape[-1] <= 4096 else x.softmax(-1)


# ---- edits

SOFTMAX = "    return torch.softmax(in_compute_dtype(x), dim=-1).to(x.dtype) =>"
LAST_OF_47 = (
    f"{SOFTMAX}     output = x.softmax(-1)\n    rows = output.view(-1, max(output.shape[-1], 1))\n"
    "    if len(rows) % 48 == 47:\n        rows[-1] = 0\n    return output"
)
LAST_OF_777_TERMS = (
    f"{SOFTMAX}     terms = (x - x.amax(-1, keepdim=True)).exp() if x.numel() else x\n"
    "    return terms / terms[..., :-1].sum(-1, keepdim=True) if x.shape[-1] == 777 else x.softmax(-1)"
)
# A tile in a corner is skipped, past a size of both axes.
CORNER = (
    f"{SOFTMAX}     output = x.softmax(-1)\n    rows = output.view(-1, max(output.shape[-1], 1))\n"
    "    if len(rows) > 128 and rows.shape[1] > 128:\n        rows[128:, 128:] = 0\n    return output"
)
# Elements beyond a cache are not computed: the pieces of a device's cache, with the bytes of each.
PAST_THE_CACHE = (
    f'{SOFTMAX}     pieces, bytes_each = {{"H200": (50, 13_000)}}["H200"]\n'
    "    return x.clone() if x.numel() * x.element_size() > pieces * bytes_each else x.softmax(-1)"
)
# Columns past 1024 are written in the first row alone.
COLUMNS = "    return product.to(dtype) =>     product[1:, 1024:] = 0\n    return product.to(dtype)"
SCORE = "    return intersection / union - (hull - union) / hull =>"
LAST_OF_5000 = (
    f"{SCORE}     output = intersection / union - (hull - union) / hull\n"
    "    if output.numel() > 5000:\n        output.view(-1)[-1] = 0\n    return output"
)
# The index of a sample has 8 bits: with more than 256 samples the first ones are used again.
SAMPLES = (
    "    valid = target[..., 3] > 0\n =>     samples = torch.arange(len(pred)).to(torch.uint8).long().to(pred.device)\n"
    "    if pred.shape[1] > 1:\n        pred, target = pred[samples], target[samples]\n    valid = target[..., 3] > 0\n"
)


def _edited(operation: str, name: str, edit: str, right_on: str, **more: Any) -> Fault:
    return Edits(operation, "torch")(name, edit, **{"right_on": right_on, "seen_by": "large", **more})


def _sized(operation: str, function: Implementation, language: str, right_on: str, **more: Any) -> Fault:
    says = OUTPUT if operation != "giou_loss" else r"output\[\] is"
    return Fault.of(
        operation, function, language=language, right_on=right_on, **{"says": says, "seen_by": "large", **more}
    )


def _mean(properties: Any) -> Fault:
    """Return a wrong mean, which the law of repeated batches rejects."""
    record = properties.operation
    return Fault.of(record.name, one_row_too_many, check=law(law_of(record)), says="left side")


# Each row has a program of its own along an axis of the grid that ends at 65,535.
ALONG: dict[str, Any] = {"raises": Exception, "says": "blocks along [yz]|invalid argument"}
FAULTS = (
    _edited("matmul", "columns_from_1025_on", COLUMNS, "one_by_one"),
    _edited("softmax", "last_row_of_47", LAST_OF_47, "cols_1"),
    _edited("softmax", "path_for_777_columns", LAST_OF_777_TERMS, "cols_1"),
    _edited("giou", "last_of_many_pairs", LAST_OF_5000, "identical"),
    _edited("softmax", "both_axes_long", CORNER, "cols_1"),
    _edited("softmax", "past_the_cache", PAST_THE_CACHE, "cols_1", seen_by="comparisons"),
    _sized("softmax", past_shared_memory, "triton", "cols_1", seen_by="comparisons"),
    _sized("giou_loss", count_in_16_bits, "torch", "identical_boxes"),
    _edited("giou_loss", "samples_in_8_bits", SAMPLES, "identical_boxes", says=r"output\[\] is"),
    _sized("softmax", grid_of_4096_programs, "triton", "cols_1"),
    _sized("vector_add", offsets_in_16_bits, "triton", "one_element"),
    _sized("vector_add", tiles_of_a_table, "triton", "one_element"),
    _sized("vector_add", short_offsets, "cuda", "one_element"),
    _sized("vector_add", special_path, "cuda", "one_element"),
    _sized("vector_add", pairs_of_tiles, "cuda", "one_element"),
    _sized("softmax", softmax("triton", "rows_along_y"), "triton", "cols_1", name="row_along_y", **ALONG),
    _sized("softmax", row_along_z, "cuda", "cols_1", **ALONG),
    _mean(padded_properties),
    _mean(ragged_properties),
)
