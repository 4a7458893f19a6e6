"""Public kernels, put through Fourfold's checks: ``python -m tools.public_kernels --folder DIR``."""
