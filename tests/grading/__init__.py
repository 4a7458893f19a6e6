"""Candidates whose right verdict is known, and their comparison with grading: ``python -m tests.grading --help``."""
