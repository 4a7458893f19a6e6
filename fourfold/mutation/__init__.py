"""Mutation testing of kernels: make one small mistake at a time, and see whether the checks reject it.

`triton_mutants` and `cuda_mutants` make the mistakes in a source file's text. `trial` runs the checks on each mutant
in its own process. ``python -m fourfold.mutation`` is the command.
"""
