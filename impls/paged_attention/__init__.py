"""The operation ``paged_attention`` on every backend."""
