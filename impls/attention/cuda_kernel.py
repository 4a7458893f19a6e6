"""attention in CUDA C++: FlashAttention over packed sequences, on tensor cores for half types.

On Hopper, half types have kernels with wgmma and the copy engine (TMA), unless there is a window; backward, also unless
there are slopes. On the CPU they are emulated where a configuration is forced, as tests do.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel
from fourfold.backends.cuda.tensor_map import swizzled_map
from fourfold.backends.launch import available_shared_memory, cdiv, is_hopper_or_emulated, multiprocessors
from fourfold.backends.tuning import Configuration, Tuner

from .operators import Call, has_whole_vectors, register

SOURCE = Path(__file__).parent / "cuda_kernel.cu"
HOPPER_SOURCE = SOURCE.with_name("cuda_kernel_hopper.cu")
BACKWARD_SOURCE = SOURCE.with_name("cuda_kernel_hopper_backward.cu")
# By the size of an element: rows of a block forward and backward, the most first, and of a step, as in the source.
FORWARD_ROWS, BACKWARD_ROWS = {2: (64, 32, 16), 4: (64, 32, 16), 8: (16,)}, {2: (64, 32, 16), 4: (32, 16), 8: (16,)}
FORWARD_STEP, BACKWARD_STEP = {2: 64, 4: 32, 8: 16}, {2: 32, 4: 32, 8: 16}
# The columns of a block's results: their sums take half as many registers of each thread, or twice as many for float64.
COLUMNS = {2: (64, 128), 4: (64, 128), 8: (64,)}


def _kernels(name: str, *options: str) -> Mapping[tuple[torch.dtype, int, str], CudaKernel]:
    return {
        (dtype, columns, mask): CudaKernel(
            SOURCE, f"attention_{name}_kernel<{', '.join((cpp, str(columns), mask, *options))}>"
        )
        for dtype, cpp in CPP_TYPES.items()
        for columns in COLUMNS[dtype.itemsize]
        for mask in ("PLAIN", "WINDOW", "BIAS")
    }


FORWARD = _kernels("forward")
# Of queries, and of keys.
BACKWARD = _kernels("backward", "false"), _kernels("backward", "true")
SPLIT = CudaKernel(SOURCE, "attention_split_kernel")
DELTA = {dtype: CudaKernel(SOURCE, f"attention_delta_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
SUMS = {dtype: CudaKernel(SOURCE, f"attention_sum_of_heads_kernel<{cpp}>") for dtype, cpp in CPP_TYPES.items()}
_BY_TYPE = FORWARD, *BACKWARD, DELTA, SUMS
KERNELS = (*(kernel for kernels in _BY_TYPE for kernel in kernels.values()), SPLIT)

# Of the Hopper kernel: columns of a copy, bytes of keys and values that stay in the L2 cache, and scales that float32
# takes in base 2 as well.
LINE, KEPT_BYTES, LEAST_SCALE, MOST_SCALE = 64, 32 << 20, 1e-30, 1e30


def hopper_configuration(columns: int, keys: int, warpgroups: int, source: Path = HOPPER_SOURCE) -> Configuration:
    """Return the Hopper kernel for these columns of a head, these keys of a step and 64 queries a warpgroup.

    A block has this many warpgroups; one alone, if else some multiprocessors have no block. The bits are the same.
    """
    stages = 2
    name, dtypes = "attention_forward_hopper_kernel", (torch.float16, torch.bfloat16)
    kernels = {
        (dtype, bias, count): CudaKernel(
            source, f"{name}<{CPP_TYPES[dtype]}, {columns}, {keys}, {count}, {stages}, {str(bias).lower()}>"
        )
        for dtype in dtypes
        for count in (1, warpgroups)
        # With a bias, the registers of each of three warpgroups would be too few.
        for bias in ((False, True) if warpgroups < 3 else (False,))
    }
    shared_bytes = {
        n: 2 * columns * (64 * n + 2 * stages * keys) + 8 * (1 + 4 * stages) + 1024 for n in (1, warpgroups)
    }
    return Configuration(
        f"hopper_{64 * warpgroups}x{keys}x{columns}",
        {
            "kernels": kernels,
            "columns": columns,
            "keys": keys,
            "warpgroups": warpgroups,
            "has_bias": warpgroups < 3,
            "shared_bytes": shared_bytes,
        },
        frozenset(dtypes),
        is_hopper_or_emulated,
        "compute capability 9.0: wgmma and TMA",
    )


# By the most columns of a head: their sums, and the scores of a step, fill the registers.
HOPPER = (hopper_configuration(64, 128, 3), hopper_configuration(128, 128, 2), hopper_configuration(256, 64, 2))
PORTABLE = Configuration("portable", {}, HOPPER[0].dtypes)


def backward_configuration(columns: int, *steps: tuple[int, int]) -> Configuration:
    """Return the Hopper kernels of the gradients of queries, and of keys and values, for these columns of a head.

    Args:
        columns: the most columns.
        *steps: for each of the two, how many keys or queries a step takes, and how many steps are in shared memory.
    """
    name, dtypes = "attention_backward_hopper_kernel", (torch.float16, torch.bfloat16)
    # Heads that share their keys have gradients in float32, which are added up.
    kernels = {
        (dtype, of_keys, result): CudaKernel(
            BACKWARD_SOURCE,
            f"{name}<{CPP_TYPES[dtype]}, {CPP_TYPES[result]}, {columns}, {step}, {stages}, {str(of_keys).lower()}>",
        )
        for dtype in dtypes
        for of_keys, (step, stages) in zip((False, True), steps)
        for result in ((dtype, torch.float32) if of_keys else (dtype,))
    }
    # As in `Shared`: with more than 128 columns, keys are split, and queries have one stage of values.
    wide = columns > 128
    rows = 128, 64 if wide else 128
    shared_bytes = []
    for of_keys, (step, stages) in zip((False, True), steps):
        tiles = stages + (1 if wide and not of_keys else stages)
        numbers = of_keys * (8 * stages * step + wide * 256 * step)
        shared_bytes.append(2 * columns * (2 * rows[of_keys] + tiles * step) + numbers + 8 * (1 + 2 * tiles) + 1024)
    return Configuration(
        f"hopper_{rows[0]}x{'x'.join(str(step) for step, _ in steps)}x{columns}",
        {
            "kernels": kernels,
            "columns": columns,
            "has_bias": False,
            "rows": rows,
            "steps": [step for step, _ in steps],
            "shared_bytes": shared_bytes,
        },
        frozenset(dtypes),
        is_hopper_or_emulated,
        HOPPER[0].needs,
        of_gradients=True,
    )


BACKWARD_HOPPER = (
    backward_configuration(64, (128, 2), (64, 4)),
    backward_configuration(128, (128, 2), (64, 3)),
    backward_configuration(256, (64, 2), (64, 2)),
)
TUNER = Tuner("attention_cuda", (*HOPPER, *BACKWARD_HOPPER, PORTABLE), Path(__file__))


def _shared_bytes(size: int, *tiles: tuple[int, int]) -> int:
    """Return the bytes of shared memory for tiles, given as (rows, columns); `line_of` in products.cuh sets a row's."""
    part, parts = (2, 3) if size == 4 else (size, 1)
    return sum(rows * (parts * part * columns + 16) for rows, columns in tiles)


def _split(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what kernels multiply: float32 as three bfloat16, and columns up to a multiple of 16; others unchanged.

    At most four tensors are split, in one launch.
    """
    if tensors[0].dtype != torch.float32:
        return tensors
    columns = tensors[0].shape[2]
    width = cdiv(columns, 16) * 16
    parts = tuple(x.new_empty((3, *x.shape[:2], width), dtype=torch.bfloat16) for x in tensors)
    wholes = [(x, part, x.shape[0] * x.shape[1], x.shape[1], *x.stride()[:2]) for x, part in zip(tensors, parts)]
    grid = cdiv(max(whole[2] for whole in wholes), 4), len(wholes)
    wholes += wholes[:1] * (4 - len(wholes))
    SPLIT.launch(grid, 128, *(argument for whole in wholes for argument in whole), columns, width)
    return parts


def _launch(
    kernels: Mapping[tuple[torch.dtype, int, str], CudaKernel],
    call: Call,
    own_keys: bool,
    operands: tuple[torch.Tensor, ...],
    numbers: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor | None, ...],
    group: int = 1,
) -> None:
    """Launch a kernel that is given operands, offsets, slopes, the numbers of each query, and the results.

    Args:
        kernels: by dtype, columns and mask.
        call: what is launched.
        own_keys: whether a block owns keys, not queries.
        operands: q, k and v, or the gradient of the output before them, as `_split` returns them.
        numbers: lse and delta, of a gradient.
        results: what the kernel writes.
        group: of keys, how many heads a block adds up.
    """
    size, head_size = call.q.element_size(), call.q.shape[2]
    step = (BACKWARD_STEP if numbers else FORWARD_STEP)[size]
    columns = next((c for c in COLUMNS[size] if c >= head_size), COLUMNS[size][-1])
    width = cdiv(head_size, 16) * 16
    for own_rows in (BACKWARD_ROWS if numbers else FORWARD_ROWS)[size]:
        if numbers:
            shared_bytes = _shared_bytes(size, (2 * (own_rows + step), width), (own_rows * (1 + own_keys), step))
        else:
            shared_bytes = _shared_bytes(size, (own_rows + step, width), (step, columns), (own_rows, step))
        if shared_bytes <= available_shared_memory(call.q.device):
            break
    total_q, total_k, _, heads, _ = call.sizes
    tiles = call.tiles(total_k if own_keys else total_q, own_rows)
    mask = "BIAS" if call.slopes is not None else "WINDOW" if call.is_windowed else "PLAIN"
    kernels[call.q.dtype, columns, mask].launch(
        tiles * (heads // group) * cdiv(head_size, columns),
        own_rows * (4 if size == 4 else 2),
        *operands,
        *call[3:5],
        call.slopes,
        *numbers,
        *results,
        *call.sizes,
        head_size,
        *(n for x in operands for n in x.stride()[-3:-1]),
        *(x is not None and x.dtype == torch.int64 for x in (call.q_offsets, call.k_offsets)),
        has_whole_vectors(*operands),
        call.causal,
        *call.window,
        call.scale,
        *([group] if numbers else []),
        shared_bytes=shared_bytes,
    )


Sizes = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _outer_first(sizes: Sizes, strides: Sizes) -> tuple[Sizes, Sizes, bool] | None:
    """Return a tensor ``[tokens, heads, columns]`` for the copy engine: sizes, strides, and whether heads are outside.

    None where it cannot: a distance is no multiple of 16 bytes, or that of the outer axis none of the inner one's.
    """
    (tokens, heads, columns), (token, head, _) = sizes, strides
    # An axis of one element has no distance. As the outer one it takes any.
    heads_outer = heads == 1 or (tokens > 1 and head > token)
    outer, inner = (heads, tokens) if heads_outer else (tokens, heads)
    near, far = (token, head) if heads_outer else (head, token)
    near = columns if inner == 1 else near
    far = inner * near if outer == 1 else far
    if near % 8 or near < columns or far % near or far < inner * near:
        return None
    return (outer, inner, columns), (far, near, 1), heads_outer


def _maps(rows: tuple[int, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[bool]]:
    """Return each tensor's map for boxes of so many rows, and whether heads are its outer axis. `fits_hopper` holds."""
    maps, heads_outer = [], []
    for n, x in zip(rows, tensors):
        sizes, strides, outer = _outer_first(tuple(x.shape), x.stride()) or ((), (), False)
        maps.append(swizzled_map(x.as_strided(sizes, strides), (1, n, LINE) if outer else (n, 1, LINE)))
        heads_outer.append(outer)
    return maps, heads_outer


def fits_hopper(configuration: Configuration, call: Call, grad_output: torch.Tensor | None = None) -> bool:
    """Return whether a configuration of Hopper kernels takes a call, or its gradient, apart from its device."""
    columns = call.q.shape[2]
    given = call[:3] if grad_output is None else (*call[:3], grad_output)
    return (
        call.q.dtype in configuration.dtypes
        and (call.slopes is None or configuration.options["has_bias"])
        and columns <= configuration.options["columns"]
        and columns % 8 == 0
        and min(len(call.q), len(call.k)) > 0
        and not call.is_windowed
        and LEAST_SCALE < call.scale < MOST_SCALE
        and all(x.data_ptr() % 16 == 0 and _outer_first(tuple(x.shape), x.stride()) for x in given)
    )


def launch_hopper(configuration: Configuration, call: Call, output: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the Hopper kernel in a configuration that takes the call."""
    options = configuration.options
    total_q, total_k, _, heads, kv_heads = call.sizes
    warpgroups = options["warpgroups"]
    if call.tiles(total_q, 64 * warpgroups) * heads < multiprocessors(call.q.device):
        warpgroups = 1
    rows = 64 * warpgroups
    maps, outer = _maps((rows, options["keys"], options["keys"]), call[:3])
    # As many heads at once as have keys and values that stay in the cache; others wait for their turn.
    kept = max(1, KEPT_BYTES // (4 * total_k * call.k.shape[2]))
    options["kernels"][call.q.dtype, call.slopes is not None, warpgroups].launch(
        call.tiles(total_q, rows) * heads,
        128 * (1 + warpgroups),
        *maps,
        call.q_offsets,
        call.k_offsets,
        call.slopes,
        output,
        lse,
        *call.sizes,
        call.q.shape[2],
        *(x is not None and x.dtype == torch.int64 for x in (call.q_offsets, call.k_offsets)),
        *outer,
        min(heads, kept * (heads // kv_heads)),
        call.causal,
        call.scale,
        shared_bytes=options["shared_bytes"][warpgroups],
    )


def _choose(call: Call, grad_output: torch.Tensor | None, run: Callable[[Configuration], None]) -> Configuration:
    """Return the configuration for a call, or for its gradient."""
    device = call.q.device

    def fits(configuration: Configuration) -> bool:
        return configuration is PORTABLE or (
            configuration.of_gradients == (grad_output is not None)
            and configuration.runs_on(device)
            and fits_hopper(configuration, call, grad_output)
        )

    def default() -> Configuration:
        if device.type == "cpu":
            return PORTABLE  # It takes less to emulate.
        # The first one has the fewest columns, and is the fastest.
        return next(filter(fits, TUNER.configurations))

    # No times are taken: a sample has the same bits in every batch.
    return TUNER.choose(device, None, fits, default, run, worthwhile=False)


def _forward(call: Call, output: torch.Tensor, lse: torch.Tensor) -> None:
    def run(configuration: Configuration) -> None:
        if configuration is PORTABLE:
            _launch(FORWARD, call, False, _split(*call[:3]), (), (output, lse))
        else:
            launch_hopper(configuration, call, output, lse)

    run(_choose(call, None, run))


def launch_hopper_backward(
    configuration: Configuration,
    call: Call,
    grad_output: torch.Tensor,
    numbers: tuple[torch.Tensor | None, ...],
    of_keys: bool,
    *results: torch.Tensor | None,
) -> None:
    """Launch the Hopper kernel of the gradient of q, or of k and v.

    `numbers` are the output and grad_lse, from which the first one makes delta, lse and delta.
    """
    options = configuration.options
    queries, keys = (call.q, grad_output), (call.k, call.v)
    own, others = (keys, queries) if of_keys else (queries, keys)
    rows, step, heads = options["rows"][of_keys], options["steps"][of_keys], call.q.shape[1]
    maps, outer = _maps((rows, rows, step, step), (*own, *others))
    result = next(x.dtype for x in results if x is not None)
    options["kernels"][call.q.dtype, of_keys, result].launch(
        call.tiles(len(own[0]), rows) * heads,
        3 * 128,
        *maps,
        call.q_offsets,
        call.k_offsets,
        *numbers,
        *results,
        *call.sizes,
        call.q.shape[2],
        *(x is not None and x.dtype == torch.int64 for x in (call.q_offsets, call.k_offsets)),
        *outer,
        call.causal,
        call.scale,
        shared_bytes=options["shared_bytes"][of_keys],
    )


def _launch_of_keys(
    call: Call,
    launch: Callable[..., None],
    dtype: torch.dtype,
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Launch the kernel of the gradients of k and v, in this dtype where heads share keys, and add these up."""
    (total_k, kv_heads, columns), heads = call.k.shape, call.q.shape[1]
    if heads == kv_heads:
        launch(*grads)
        return
    # More blocks, whose lengths differ less.
    of_heads = call.k.new_empty((2, total_k, heads, columns), dtype=dtype)
    launch(*(None if grad is None else x for x, grad in zip(of_heads, grads)))
    rows = total_k * kv_heads
    SUMS[call.k.dtype].launch((cdiv(rows, 4), 2), 128, of_heads, *grads, rows, columns, heads // kv_heads)


def _backward(
    call: Call,
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad_q: torch.Tensor | None,
    grad_k: torch.Tensor | None,
    grad_v: torch.Tensor | None,
) -> None:
    total_q, heads, columns = output.shape
    of_keys = (grad_k is not None or grad_v is not None) and len(call.k) > 0

    def run(configuration: Configuration) -> None:
        if configuration is PORTABLE or grad_q is None:
            sizes = total_q, heads, columns, *grad_output.stride()[:2]
            DELTA[output.dtype].launch(cdiv(total_q * heads, 4), 128, grad_output, grad_lse, output, delta, *sizes)
        if configuration is PORTABLE:
            operands = _split(grad_output, *call[:3])

            def launch_of_keys(*grads: torch.Tensor | None, group: int = 1) -> None:
                _launch(BACKWARD[True], call, True, operands, (lse, delta), grads, group)

            if grad_q is not None and total_q:
                _launch(BACKWARD[False], call, False, operands, (lse, delta), (grad_q, None))
            if of_keys and call.k.dtype in PORTABLE.dtypes:
                launch_of_keys(grad_k, grad_v, group=heads // call.k.shape[1])
            elif of_keys:
                _launch_of_keys(call, launch_of_keys, call.k.dtype, (grad_k, grad_v))
            return
        numbers = output, grad_lse, lse, delta
        launch = functools.partial(launch_hopper_backward, configuration, call, grad_output, numbers)
        if grad_q is not None:
            launch(False, grad_q, None)
        if of_keys:
            _launch_of_keys(call, functools.partial(launch, True), torch.float32, (grad_k, grad_v))

    run(_choose(call, grad_output, run))


attention, attention_with_lse = register("cuda", _forward, _backward)
