"""``fourfold sanitize``: run a script for a GPU on the CPU, and report memory errors and races."""
