"""Candidates: load foreign kernels, run them in their own process, and detect cheating."""
