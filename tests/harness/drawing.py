"""Draws of a strategy, for tests of how often something occurs."""

from typing import TypeVar

from hypothesis import strategies as st

from fourfold.checks.search import draws

# The draws of one search resemble one another, because Hypothesis varies earlier draws. Shares need several searches.
SEARCHES = 6

Example = TypeVar("Example")


def collect(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """Return about `count` draws of several searches, the same in each run."""
    return [drawn for seed in range(SEARCHES) for drawn in draws(strategy, -(-count // SEARCHES), seed)]
