"""The operation ``attention_with_lse`` on every backend: attention's kernels, with both of their results."""
