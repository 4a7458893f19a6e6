"""What a strategy draws, for tests of how often something occurs."""

from typing import TypeVar

import hypothesis
from hypothesis import strategies as st

# One search's draws resemble one another: Hypothesis goes on from what it drew before. Shares are those of several.
SEARCHES = 6

Example = TypeVar("Example")


def collect(strategy: st.SearchStrategy[Example], count: int) -> list[Example]:
    """About `count` examples, the same in each run: those of several searches."""
    drawn: list[Example] = []

    def searched(seed: int) -> None:
        # Use only the generate phase: the first draws of a search must be as varied as its later ones.
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=-(-count // SEARCHES),
            phases=[hypothesis.Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def keep(example: Example) -> None:
            drawn.append(example)

        keep()

    for seed in range(SEARCHES):
        searched(seed)
    return drawn
