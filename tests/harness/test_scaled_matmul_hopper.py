"""scaled_matmul's kernel for Hopper, as compiled.

The checks of operations run it. tests/known_wrong/planted_hopper.py has wrong kernels and their errors.
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
        assert made.instruction_counts["HGMMA"] == blocks * BLOCK // 16
        # A fence and a wait for each block of columns.
        assert made.instruction_counts["WARPGROUP"] == 2 * blocks
        assert configuration.options["shared_bytes"] <= 227 * 1024
