"""Triton's interpreter, corrected to what compiled kernels compute."""
