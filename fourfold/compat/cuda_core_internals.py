"""cuda-core's private parts: how a tensor map is laid out in shared memory."""

from typing import Any

from fourfold.compat import uses


@uses(
    "cuda.core.TensorMapDescriptorOptions().swizzle.SWIZZLE_128B",
    "cuda.core.TensorMapDescriptorOptions().l2_promotion.L2_256B",
)
def swizzled_options(box: tuple[int, ...]) -> Any:
    """The options of a tensor map whose boxes are swizzled by 128 bytes, and fetched by 256 bytes into the L2 cache.

    The enumerations' classes have no public name: they are had of an option's default.
    """
    import cuda.core

    options = cuda.core.TensorMapDescriptorOptions(box_dim=box)
    options.swizzle = type(options.swizzle).SWIZZLE_128B
    options.l2_promotion = type(options.l2_promotion).L2_256B
    return options
