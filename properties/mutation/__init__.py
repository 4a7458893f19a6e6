"""Mutation of kernels: small mistakes made on purpose, one at a time, to see whether the checks reject each.

`triton_mutants` and `cuda_mutants` make the mistakes in a source file's text, `trial` puts each through the checks in
a process of its own, and ``python -m properties.mutation`` is the command.
"""
