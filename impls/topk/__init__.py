"""The operation ``topk`` on every backend."""
