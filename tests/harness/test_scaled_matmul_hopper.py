"""The kernels of scaled_matmul and int8_matmul for Hopper, as compiled.

The checks of operations run them. tests/known_wrong/planted_hopper.py has wrong kernels and their errors.
"""

import pytest
from fourfold.impls.scaled_matmul import cuda_kernel
from fourfold.impls.scaled_matmul.torch_eager import BLOCK

from fourfold.backends.cuda.compile import compile_ahead_of_time
from fourfold.backends.tuning import Configuration


@pytest.mark.full(but=1)
@pytest.mark.parametrize("configuration", [pytest.param(each, id=each.name) for each in cuda_kernel.HOPPER])
def test_products_do_not_wait_for_one_another_and_no_register_is_spilled(configuration: Configuration) -> None:
    """If the compiler serializes wgmma, a wait follows each one."""
    blocks, kernels = configuration.options["blocks"], configuration.options["kernels"].values()
    resources = compile_ahead_of_time(cuda_kernel.HOPPER_SOURCE, [kernel.name for kernel in kernels], "sm_90a")
    for kernel in kernels:
        made = resources[kernel.name]
        assert (made.spill_store_bytes, made.spill_load_bytes, made.stack_bytes) == (0, 0, 0)
        # Of each half of a block of columns and each 16 terms.
        assert made.instruction_counts["HGMMA"] == 2 * blocks * BLOCK // 16
        # Two fences and a wait for each half. One more wait is for terms in registers, and one for the last sums.
        assert made.instruction_counts["WARPGROUP"] == 2 * blocks * (2 + 1) + 2
        assert configuration.options["shared_bytes"] <= 227 * 1024


@pytest.mark.parametrize("configuration", [pytest.param(each, id=each.name) for each in cuda_kernel.INT8_HOPPER])
def test_products_of_int8_are_those_of_integers_and_no_register_is_spilled(configuration: Configuration) -> None:
    kernels = configuration.options["kernels"].values()
    resources = compile_ahead_of_time(cuda_kernel.INT8_SOURCE, [kernel.name for kernel in kernels], "sm_90a")
    for kernel in kernels:
        made = resources[kernel.name]
        assert (made.spill_store_bytes, made.spill_load_bytes, made.stack_bytes) == (0, 0, 0)
        # Of each 32 of a line's terms.
        assert made.instruction_counts["IGMMA"] == 4
        # A fence, a wait for the products of the step before, and one for the last ones.
        assert made.instruction_counts["WARPGROUP"] == 3
    assert configuration.options["shared_bytes"] <= 227 * 1024
