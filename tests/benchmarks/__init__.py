"""Benchmarks, which `pytest --benchmark-only` runs."""
