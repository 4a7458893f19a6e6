"""Planted faults in the kernels for Hopper, of products and attention: edits of their emulated sources.

Most concern asynchronous work: waits for a phase of an mbarrier, fences, groups of wgmma, swizzles.
"""

import functools
from typing import Any

import numpy as np
from fourfold.properties import attention as attention_properties
from fourfold.properties import int8_matmul as int8_properties
from fourfold.properties import scaled_matmul as scaled_properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from .edits import Edits
from .planted import GRADIENT, OUTPUT, Fault, named

RACE, DEADLOCK, UNWRITTEN = cuda_on_cpu.Race, cuda_on_cpu.Deadlock, cuda_on_cpu.UninitialisedShared
NOT_LANDED = r"wgmma reads shared address \d+ before the copy to it has landed in line \d+: no wait on its mbarrier"
NO_WAIT = (
    r"wgmma reads shared address \d+, to which a copy was made in line \d+, without a wait on its mbarrier's phase"
)
STILL_READ = r"copies to shared address \d+, which wgmma still reads in line \d+: no wait for its group"
HAS_READ = r"copies to shared address \d+, which thread \d+ has read, with no barrier"
NO_BARRIER = r"wgmma reads shared address \d+, which thread \d+ wrote in line \d+, with no {} between"
# A tuner uses these kernels only on a GPU. Tiles are small and stages few, so that small cases take several steps.
CHOSEN = {
    "matmul": (
        "    _hopper(128, 64, 8, 64, 8), =>     _hopper(128, 64, 2, 64, 8, on_cpu=True),",
        "run_fastest(TUNER, a.device, (m, n, k), kind, fits, default, run) =>"
        " run(HOPPER[4] if fits(HOPPER[4]) else SMALL)",
    ),
    "scaled_matmul": (
        "stages = 14 => stages = 6",
        "run_fastest(TUNERS[name], a.device, (m, n, k), kind, fits, default, run) =>"
        " run(HOPPER[0] if fits(HOPPER[0]) else SMALL)",
    ),
    "int8_matmul": (
        "_int8_hopper(128, 7) => _int8_hopper(128, 2)",
        "run_fastest(TUNERS[name], a.device, (m, n, k), kind, fits, default, run) =>"
        " run(INT8_HOPPER[1] if fits(INT8_HOPPER[1]) else SMALL)",
    ),
    "attention": (
        "hopper_configuration(256, 64, 2)) => hopper_configuration(64, 64, 2))",
        "    backward_configuration(256, (64, 2), (64, 2)),\n =>     backward_configuration(64, (64, 2), (64, 2)),\n",
        "return TUNER.choose(device, None, fits, default, run, worthwhile=False) =>"
        " return next(filter(fits, (HOPPER[-1], BACKWARD_HOPPER[-1], PORTABLE)))",
    ),
}


def of_shape(m: int, k: int, n: int, dtype: DType) -> Case:
    """Return a case of matmul."""

    def waves(rows: int, cols: int) -> np.ndarray:
        return np.cos(np.arange(rows * cols, dtype=np.float64) ** 1.1).reshape(rows, cols).astype(dtype.numpy)

    parameters = {"activation": "leaky_relu", "negative_slope": 0.5}
    return Case({"a": waves(m, k), "b": waves(k, n)}, np.ones((m, n), dtype=dtype.numpy), parameters)


EXAMPLES: dict[str, dict[str, Any]] = {
    # One step and three incomplete steps; then blocks with more than one tile.
    "matmul": {
        "one_step": functools.partial(of_shape, 60, 56, 56),
        "one_tile": functools.partial(of_shape, 60, 136, 56),
        "several_tiles": functools.partial(of_shape, 200, 136, 136),
    },
    # One block of terms, and three, the last one incomplete, in tiles that end inside the result.
    "scaled_matmul": {
        "one_block": scaled_properties.rows(60, 60, 128),
        "several_tiles": scaled_properties.rows(150, 300, 300),
    },
    # One step, and five, the last one incomplete, in tiles that end inside the result.
    "int8_matmul": {
        "one_step": int8_properties.INT8.example(m=60, n=60, k=128),
        "several_tiles": int8_properties.INT8.example(m=150, n=200, k=600),
    },
    # Several steps of keys, the last one incomplete, for two warpgroups; and a sequence after it.
    "attention": {
        "many_keys": attention_properties.tokens([70, 3], [330, 5], heads=(2, 1), columns=16, causal=True),
        **named(attention_properties, "nothing_finite_in_another_sequence"),
        "slopes": attention_properties.tokens(70, 90, heads=(2, 1), columns=16, slopes=(0.5, -0.25)),
    },
    "attention backward": {
        "many_of_both": attention_properties.tokens([150, 3], [330, 5], heads=(2, 1), columns=16, causal=True),
        **named(attention_properties, "nothing_finite_in_another_sequence"),
    },
}


# The kernel whose warpgroups share the products of a block of keys.
CHOSEN["attention shared"] = (CHOSEN["attention"][0], CHOSEN["attention"][2])


def _faults(operation: str, *faults: tuple[Any, ...], gradient: bool = False, chosen: str = "") -> tuple[Fault, ...]:
    """Return faults, of a gradient or else of the output, with a name, edits, the exception (None for a wrong result),
    and its message."""
    of, examples = Edits(operation, "cuda"), EXAMPLES[f"{operation} backward" if gradient else operation]
    place = r"\((?:cuda_kernel(?:_int8)?_hopper(?:_backward)?\.cu|boxes\.cuh|results\.cuh):\d+\).*"
    return tuple(
        (of.gradient if gradient else of)(
            name,
            *CHOSEN[chosen or operation],
            *edits,
            says=f"{place}{says}" if error else says,
            **({"raises": error} if error else {}),
            dtype="float16",
            only_on="cpu",
            examples=examples,
        )
        for name, *edits, error, says in faults
    )


# fmt: off
TURN = "if (++stage == STAGES) stage = 0, parity ^= 1;"
READ = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
FENCE = "fence_proxy_async();"
HANDED_OVER = "                    sync_threads<WARPGROUP>(warpgroup);\n                    if (!by_map) {"
OF_MATMUL = _faults(
    "matmul",
    ("no_wait", "barrier_wait(full + stage * 8, parity); =>", RACE, NOT_LANDED),
    ("one_warp_waits", "barrier_wait(full + stage * 8, parity); =>"
     " if (thread < 32) barrier_wait(full + stage * 8, parity);", RACE, NO_WAIT),
    ("wrong_parity", "barrier_wait(full + stage * 8, parity); => barrier_wait(full + stage * 8, parity ^ 1);", RACE,
     NOT_LANDED),
    ("parity_never_turns", f"before = stage;\n                {TURN} => before = stage;\n"
     "                if (++stage == STAGES) stage = 0;", RACE, STILL_READ),
    ("stage_reused", "            if (lane == 0) barrier_arrive(empty + before * 8);\n =>",
     "if (step > part.first && lane == 0) barrier_arrive(empty + before * 8); =>", "                wgmma_wait<1>(); =>"
     " if (lane == 0) barrier_arrive(empty + stage * 8);\n                wgmma_wait<1>();", RACE, STILL_READ),
    ("no_barrier_before_reuse", "MULTIPLYING<TILE_M> * WARPGROUP / 32); => 1);", "            if (lane == 0) barrier =>"
     "             if (thread + share == 0) barrier", "&& lane == 0) => && thread + share == 0)", RACE,
     HAS_READ),
    ("no_wgmma_fence", "                wgmma_fence();\n =>", RACE,
     "wgmma takes registers that the threads have used, with no wgmma.fence between"),
    ("registers_read_early", "            wgmma_wait<0>();\n            wgmma_written(sums); =>", None,
     r"output\[.* is nan, expected"),
    ("no_proxy_fence", f"{FENCE} =>", RACE,
     r"a bulk copy reads shared address \d+, which thread \d+ wrote in line \d+, with no fence"),
    ("no_mbarrier_fence", "fence_mbarrier_init();\n        prefetch(a_map); => prefetch(a_map);", RACE,
     r"a bulk copy with the mbarrier at .*, with no fence after its initialisation"),
    ("no_barrier_after_init", "    __syncthreads();\n\n    const int tiles_m =>     const int tiles_m", RACE,
     r"the mbarrier at .* was initialised by thread \d+, with no barrier between"),
    ("too_few_bytes", "(barrier, Memory::STAGE_BYTES); => (barrier, A::BYTES);", RACE, NOT_LANDED),
    ("too_many_bytes", "(barrier, Memory::STAGE_BYTES); => (barrier, 2 * Memory::STAGE_BYTES);", DEADLOCK,
     r"waits for ever for the mbarrier at .*, whose phase 0 lacks 0 arrivals and 24576 bytes"),
    ("result_overwritten", f"if (thread == 0) {READ} =>", RACE,
     r"writes shared address \d+, which a bulk copy still reads in line \d+: no wait for"),
    ("leaves_early", 'if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); =>', RACE,
     r"leaves the kernel while a bulk copy still reads shared memory"),
    ("not_swizzled", "column % LINE / 8 ^ row % 8; => column % LINE / 8;", None, OUTPUT),
    ("wrong_stride", "TILE_K * LINE_BYTES : 16, SWIZZLED); => TILE_K * LINE_BYTES : 16, SWIZZLED / 2);", None, OUTPUT),
    ("not_aligned", "(shared_address(raw) + SWIZZLED - 1) / SWIZZLED * SWIZZLED =>"
     " (shared_address(raw) + 15) / 16 * 16", cuda_on_cpu.Misaligned,
     r"a bulk copy to shared address \d+, which is not a multiple of 128"),
    ("no_sync_before_store", f"{FENCE}\n{HANDED_OVER} => {FENCE}\n                    if (!by_map) {{", UNWRITTEN,
     r"a bulk copy reads shared address \d+, which nothing in this block has wri"),
)
LOADS = "            load_terms<TYPE>(numbers[1], left, 1);\n"
RELEASES = "            if (block) release(2);\n            release(1);\n"
OF_SCALED_MATMUL = _faults(
    "scaled_matmul",
    ("no_wait", "scaled_matmul/cuda_kernel_hopper.cu: barrier_wait(full + turn.stage * 8, turn.parity); =>", RACE,
     NOT_LANDED.removeprefix("wgmma ")),
    ("rows_released_early", f"{RELEASES} =>", f"{LOADS} => {RELEASES}{LOADS}", RACE, HAS_READ),
    ("columns_released_early", "wgmma_wait<1>();\n                add => release(2);\n wgmma_wait<1>(); add",
     "if (j % 2 == 0) release(2); =>", RACE, STILL_READ),
    ("rows_not_swizzled", "((half * 4 + i + lane / 16) ^ row % 8) * 16 => (half * 4 + i + lane / 16) * 16", None,
     OUTPUT),
    ("terms_in_their_order", "bits[e / 4 * 2 + e % 2] >> e % 4 / 2 * 16 => bits[e / 4 * 2 + e % 4 / 2] >> e % 2 * 16",
     None, OUTPUT),
    ("terms_converted_early", "wgmma_wait<1>();\n            load_terms => load_terms", RACE,
     r"waits for wgmma, one of whose registers was overwritten while it was reading in line \d+"),
    ("registers_read_early", "wgmma_wait<1>();\n                add => add", None, OUTPUT),
    ("one_scale_of_rows", "of_row[r * next_row => of_row[0 * next_row", None, OUTPUT),
    ("one_scale_of_columns", "of_column[i * next_column]; => of_column[0];", None, OUTPUT),
    ("scales_not_advanced", "of_row += scale_a_column_stride, =>", None, OUTPUT),
    ("pairs_not_exchanged", "odd ? first : second, 1); => odd ? first : second, 0);", None, OUTPUT),
    ("columns_past_the_end_written", "if (column + e < n) to[e] => to[e]", RACE,
     r"write at byte \d+ of argument 4 \(c\).*, which thread \d+ of block \d+ wrote in line \d+"),
)
INT8 = "scaled_matmul/cuda_kernel_int8_hopper.cu: "
OF_INT8_MATMUL = _faults(
    "int8_matmul",
    ("no_wait", f"{INT8}barrier_wait(full + turn.stage * 8, turn.parity); =>", RACE, NOT_LANDED),
    ("released_early", f"{INT8}        if (lane == 0) barrier_arrive(empty + before * 8);\n =>",
     f"{INT8}if (step > 0 && lane == 0) barrier_arrive(empty + before * 8); =>",
     f"{INT8}            wgmma_wait<1>(); =>"
     " if (lane == 0) barrier_arrive(empty + turn.stage * 8);\n            wgmma_wait<1>();", RACE, STILL_READ),
    ("no_wgmma_fence", f"{INT8}            wgmma_fence();\n =>", RACE,
     "wgmma takes registers that the threads have used, with no wgmma.fence between"),
    ("registers_read_early", f"{INT8}        wgmma_wait<0>();\n        wgmma_written(sums); =>", None, OUTPUT),
    ("wrong_stride", f"{INT8}matrix_descriptor(b + i, 16, SWIZZLED) => matrix_descriptor(b + i, 16, SWIZZLED / 2)",
     None, OUTPUT),
    ("terms_of_another_product", f"{INT8}matrix_descriptor(a + i, => matrix_descriptor(a + i / 2,", None, OUTPUT),
    ("one_scale_of_rows", f"{INT8}(of_rows[i / 2 % 2] * => (of_rows[0] *", None, OUTPUT),
    ("scales_past_the_last_column", f"{INT8}scale_b[min(column, n - 1) * => scale_b[column *", cuda_on_cpu.OutOfBounds,
     "scale_b"),
)
RELEASES_KEYS = "if (lane == 0) barrier_arrive(k_empty + k_turn.stage * 8);"
RELEASES_VALUES = "if (lane == 0) barrier_arrive(v_empty + v_turn.stage * 8);"
OF_ATTENTION = _faults(
    "attention",
    ("none_hidden", "if ((block + 1) * KEYS > seen_by_all) hide => if (false) hide", None, OUTPUT),
    ("limits_of_the_first_warpgroup", "own_limit = limit + share * 64 + row_here => own_limit = limit + row_here", None,
     OUTPUT),
    ("slopes_not_in_base_2", "slopes[head] * LOG2_E => slopes[head]", None, OUTPUT),
    ("values_of_the_next_sequence", "if (length < blocks * KEYS) { => if (false) {", None, OUTPUT),
    ("zeros_without_a_fence", "fence_proxy_async(); =>", RACE, NO_BARRIER.format(r"fence\.proxy\.async")),
    ("zeros_without_a_barrier", "sync_threads<MULTIPLYING * WARPGROUP>(CLEANED); =>", RACE,
     NO_BARRIER.format("barrier")),
    ("output_not_rescaled", "sums[i] *= shrunk[i / 2 % 2]; => ;", None, OUTPUT),
    ("no_wait_for_the_queries", "barrier_wait(q_full, 0); =>", RACE, NO_WAIT),
    ("phase_never_turns", "hopper.cuh: stage = 0, parity ^= 1; => stage = 0;", cuda_on_cpu.UndefinedArithmetic,
     r"1 more arrivals at the mbarrier"),
    ("keys_released_early", f"wgmma_wait<1>();\n            wgmma_written(scores);\n            {RELEASES_KEYS} =>"
     f" {RELEASES_KEYS}\n            wgmma_wait<1>();\n            wgmma_written(scores);", RACE, STILL_READ),
    ("values_released_early", f"wgmma_wait<0>();\n            wgmma_written(sums);\n            {RELEASES_VALUES} =>"
     f" {RELEASES_VALUES}\n            wgmma_wait<0>();\n            wgmma_written(sums);", RACE, STILL_READ),
    ("turn_not_given", "arrive_threads<2 * WARPGROUP>(TURN + (share + 1) % MULTIPLYING); =>", DEADLOCK,
     "waits for ever for the mbarrier"),
    ("queries_overwritten", "sync_threads<WARPGROUP>(OWN + share); =>", RACE,
     r"writes shared address \d+, which thread \d+ has read, with no barrier between"),
    ("rows_of_the_next_tile_written", "if (row >= own_rows ||  => if (", cuda_on_cpu.OutOfBounds, "output"),
)
NUMBERS_ARRIVE = "                barrier_arrive(c_ring.full(turn.stage));\n"
RELEASES_STAGE = "                c_ring.release(before);\n"
OF_ATTENTION_BACKWARD = _faults(
    "attention",
    ("none_hidden", "if (is_hidden(block)) =>3 if (false)", None, GRADIENT),
    ("places_of_the_first_warpgroup", "diagonal + first_row + row_here - column => diagonal + row_here - column", None,
     GRADIENT),
    ("rows_of_the_next_sequence", "if (length < (last + 1) * STEP) { => if (false) {", None, GRADIENT),
    ("zeros_without_a_barrier", "sync_threads<THREADS>(CLEANED); =>", RACE, NO_BARRIER.format("barrier")),
    ("no_wait_for_own_tiles", "barrier_wait(own_full, 0); =>", RACE,
     r"copies to shared address \d+, which thread \d+ has read, with no barrier between"),
    ("delta_of_a_quarter", "            sum = sum_of_row(sum);\n =>", None, GRADIENT),
    ("stage_released_early", f"{RELEASES_STAGE} =>", "                add_up(before, => "
     f"{RELEASES_STAGE}                add_up(before,", RACE,
     r"copies to shared address \d+, which thread \d+ has read, with no barrier between"),
    ("numbers_not_awaited", f"{NUMBERS_ARRIVE} =>", "                to[0] = =>"
     f"{NUMBERS_ARRIVE}                to[0] =", RACE,
     r"read at byte \d+ of shared array raw, which thread \d+ of block 0 wrote in line \d+, with no barrier"),
    ("products_read_early", "                wgmma_wait<0>();\n                wgmma_written(products); =>", None,
     GRADIENT),
    ("terms_of_the_wrong_stage", "add_up(before, => add_up(turn.stage,", None, GRADIENT),
    ("not_scaled", "one : one * float(scale) => one : one", None, GRADIENT),
    ("last_head_not_added", "head < group; head++, from += => head < group - 1; head++, from +=", None, GRADIENT),
    ("rows_past_the_end_written", "if (row < own_rows && => if (", RACE,
     r"write at byte \d+ of .*, which thread \d+ of block \d+ wrote in line \d+"),
    gradient=True,
)
OF_SHARED_PRODUCTS = _faults(
    "attention",
    ("weights_not_awaited", "sync_threads<MULTIPLYING * WARPGROUP>(TURN + 1); =>"
     " arrive_threads<MULTIPLYING * WARPGROUP>(TURN + 1);", RACE,
     r"thread \d+ of block 0 (wrote|read|has read) in line \d+, with no barrier"),
    ("weights_overwritten", "sync_threads<MULTIPLYING * WARPGROUP>(TURN); =>"
     " arrive_threads<MULTIPLYING * WARPGROUP>(TURN);", RACE, r"in line \d+, with no barrier"),
    ("numbers_released_early", "                    take_weights(stage, block);\n =>",
     "mine.release(stage);\n                    if => mine.release(stage); take_weights(stage, block); if", RACE,
     r"several threads of block \d+ read in line \d+, with no barrier"),
    ("other_tile_not_awaited", "if (share == 0) other.wait(turn); =>", RACE, NOT_LANDED),
    ("gradients_exchanged", "SPLIT && share == 0, 0 => SPLIT && share == 1, 0", None, GRADIENT),
    gradient=True,
    chosen="attention shared",
)
# fmt: on
FAULTS = (*OF_MATMUL, *OF_SCALED_MATMUL, *OF_INT8_MATMUL, *OF_ATTENTION, *OF_ATTENTION_BACKWARD, *OF_SHARED_PRODUCTS)
