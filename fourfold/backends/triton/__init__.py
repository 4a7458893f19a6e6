"""Triton kernels: launched on a GPU, interpreted on the CPU, or compiled ahead of time on a machine without a GPU."""
