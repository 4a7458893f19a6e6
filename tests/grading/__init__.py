"""Candidates whose right verdict is known, and what grading says of them: ``python -m tests.grading --help``."""
