"""What a strategy draws, for tests of how often something occurs."""

from typing import TypeVar

from hypothesis import strategies as st

from fourfold.checks.search import draws

# One search's draws resemble one another: Hypothesis goes on from what it drew before. Shares are those of several.
SEARCHES = 6

Example = TypeVar("Example")


def collect(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """Return about `count` draws, the same in each run: those of several searches."""
    return [drawn for seed in range(SEARCHES) for drawn in draws(strategy, -(-count // SEARCHES), seed)]
