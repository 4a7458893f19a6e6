"""The sanitizer of interpreted Triton kernels: accesses outside of tensors, and races."""
