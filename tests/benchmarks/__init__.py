"""Benchmarks: run by --benchmark-only."""
