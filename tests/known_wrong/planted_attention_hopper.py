"""Planted faults in attention's kernel for Hopper: each is one edit of its own source, which the emulation runs."""

import functools
from pathlib import Path
from typing import Any

import torch
from fourfold.impls.attention import cuda_kernel
from fourfold.impls.attention.arguments import scale_of
from fourfold.impls.attention.operators import Call
from fourfold.impls.attention.torch_eager import attention as right
from fourfold.properties import attention as properties

from fourfold.backends.cuda import emulator as cuda_on_cpu
from fourfold.backends.cuda.compile import cache_folder, digest, source_closure
from fourfold.backends.tuning import Configuration
from fourfold.processes.files import write_atomically

from .generic import with_torchs_gradient
from .planted import OUTPUT, CaseOf, Fault, Implementation, named

Tensor = torch.Tensor
RACE, DEADLOCK, ASTRAY = cuda_on_cpu.Race, cuda_on_cpu.Deadlock, cuda_on_cpu.OutOfBounds
UNDEFINED = cuda_on_cpu.UndefinedArithmetic
STILL_READ = r"copies to shared address \d+, which wgmma still reads in line \d+: no wait for its group"
RELEASES_KEYS = "if (lane == 0) barrier_arrive(k_empty + k_turn.stage * 8);"
RELEASES_VALUES = "if (lane == 0) barrier_arrive(v_empty + v_turn.stage * 8);"
GIVES_TURN = "arrive_threads<2 * WARPGROUP>(TURN + (share + 1) % MULTIPLYING);"
# By name: what stands in the source, what stands there instead, and what is said of it, by which exception.
MISTAKES: dict[str, tuple[str, str, type[Exception] | None, str]] = {
    "none_hidden": ("if ((block + 1) * KEYS > seen_by_all) hide", "if (false) hide", None, OUTPUT),
    "limits_of_the_first_warpgroup": (
        "own_limit = limit + share * 64 + row_here",
        "own_limit = limit + row_here",
        None,
        OUTPUT,
    ),
    "values_of_the_next_sequence": ("if (length < blocks * KEYS) {", "if (false) {", None, OUTPUT),
    "zeros_without_a_fence": (
        "fence_proxy_async();",
        "",
        RACE,
        r"wgmma reads shared address \d+, which thread \d+ wrote in line \d+, with no fence\.proxy\.async between",
    ),
    "zeros_without_a_barrier": (
        "sync_threads<MULTIPLYING * WARPGROUP>(CLEANED);",
        "",
        RACE,
        r"wgmma reads shared address \d+, which thread \d+ wrote in line \d+, with no barrier between",
    ),
    "output_not_rescaled": ("sums[i] *= shrunk[i / 2 % 2];", ";", None, OUTPUT),
    "no_wait_for_the_queries": (
        "barrier_wait(q_full, 0);",
        "",
        RACE,
        r"wgmma reads shared address \d+, to which a copy was made in line \d+, without a wait on its mbarrier's phase",
    ),
    "phase_never_turns": ("stage = 0, parity ^= 1;", "stage = 0;", UNDEFINED, r"1 more arrivals at the mbarrier"),
    "keys_released_early": (
        f"wgmma_wait<1>();\n            wgmma_written(scores);\n            {RELEASES_KEYS}",
        f"{RELEASES_KEYS}\n            wgmma_wait<1>();\n            wgmma_written(scores);",
        RACE,
        STILL_READ,
    ),
    "values_released_early": (
        f"wgmma_wait<0>();\n            wgmma_written(sums);\n            {RELEASES_VALUES}",
        f"{RELEASES_VALUES}\n            wgmma_wait<0>();\n            wgmma_written(sums);",
        RACE,
        STILL_READ,
    ),
    "turn_not_given": (GIVES_TURN, "", DEADLOCK, "waits for ever for the mbarrier"),
    "queries_overwritten": (
        "sync_threads<WARPGROUP>(OWN + share);",
        "",
        RACE,
        r"writes shared address \d+, which thread \d+ has read, with no barrier between",
    ),
    "rows_of_the_next_tile_written": ("if (row >= own_rows || ", "if (", ASTRAY, "output"),
}


def _edited(mistake: str) -> Path:
    """A copy of the kernel's file with the mistake, beside copies of the headers that it includes."""
    kernel = cuda_kernel.HOPPER_SOURCE
    texts, root = source_closure(kernel), kernel.parent.parent
    if mistake:
        old, new, _, _ = MISTAKES[mistake]
        assert texts[str(kernel)].count(old) == 1, f"{old} does not stand in {kernel.name} once"
        texts[str(kernel)] = texts[str(kernel)].replace(old, new)
    # The path is part of what tells a compiled kernel, so that it is the same in each run.
    folder = cache_folder("planted", digest(sorted(texts.values())))
    for path, text in texts.items():
        copy = folder / Path(path).relative_to(root)
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, text.encode())
    return folder / kernel.relative_to(root)


@functools.cache
def _configuration(mistake: str) -> Configuration:
    """Small tiles, so that few keys are several steps."""
    return cuda_kernel.hopper_configuration(64, 64, 2, source=_edited(mistake))


def attention(mistake: str = "") -> Implementation:
    """attention by the kernel with a mistake; of what it does not take, torch's."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Any = None, k_offsets: Any = None, causal: bool = False,
        scale: Any = None, window: Any = (-1, -1),
    ) -> Tensor:  # fmt: skip
        own = q_offsets if k_offsets is None else k_offsets
        call = Call(q, k, v, q_offsets, own, causal, scale_of(q, scale), *window)
        if not q.numel() or not call.batch or not cuda_kernel.fits_hopper(_configuration(mistake), call):
            return right(q, k, v, q_offsets, k_offsets, causal, scale, window)
        output = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        cuda_kernel.launch_hopper(_configuration(mistake), call, output, lse)
        return output

    return with_torchs_gradient("attention", forward)


# Several steps of keys, the last one not whole, for two warpgroups; and a sequence after it.
EXAMPLES: dict[str, CaseOf] = {
    "many_keys": properties.tokens([70, 3], [330, 5], heads=(2, 1), columns=16, causal=True),
    **named(properties, "nothing_finite_in_another_sequence"),
}


def _fault(name: str, raises: type[Exception] | None, says: str) -> Fault:
    more: dict[str, Any] = {"says": says}
    if raises is not None:
        more = {"raises": raises, "says": rf"\(cuda_kernel_hopper\.cu:\d+\).*{says}"}
    about: dict[str, Any] = {"language": "cuda", "dtype": "float16", "only_on": "cpu", "examples": EXAMPLES}
    return Fault(name, "attention", functools.partial(attention, name), **about, **more)


FAULTS = tuple(_fault(name, *expected) for name, (_, _, *expected) in MISTAKES.items())
