"""cuda-core's private parts: the layout of a tensor map in shared memory."""

from typing import Any

from fourfold.compat import uses


@uses(
    "cuda.core.TensorMapDescriptorOptions().swizzle.SWIZZLE_128B",
    "cuda.core.TensorMapDescriptorOptions().l2_promotion.L2_256B",
)
def swizzled_options(box: tuple[int, ...]) -> Any:
    """Return the options of a tensor map with boxes swizzled by 128 bytes and fetched by 256 bytes into the L2 cache.

    The enumerations' classes have no public name: they are taken from an option's default.
    """
    import cuda.core

    options = cuda.core.TensorMapDescriptorOptions(box_dim=box)
    options.swizzle = type(options.swizzle).SWIZZLE_128B
    options.l2_promotion = type(options.l2_promotion).L2_256B
    return options
