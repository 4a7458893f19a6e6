"""Candidates: kernels of others, how they are loaded, run in their own process, and kept from cheating."""
