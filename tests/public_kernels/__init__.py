"""Public kernels, put through Fourfold's checks: ``python -m tests.public_kernels --folder DIR``."""
