"""The sanitizer of interpreted Triton kernels: detects accesses outside of tensors, and races."""
