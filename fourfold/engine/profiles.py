"""Hypothesis profiles: how many cases a run draws, whether they are random, and what the default profile leaves out."""

import hypothesis

from fourfold.compat.hypothesis_internals import ignore_local_constants
from fourfold.inputs.large_cases import DEAR_LIMIT

# Random cases, every dtype and every test: "full" for each night on a CPU, "nightly" with more cases on a GPU.
FULL, NIGHTLY = "full", "nightly"
# The default profile draws the same cases in every run, so that a failure is due to a change. For this library's own
# implementations it draws fewer cases, takes a part of the large and the combined ones, and makes most checks in one
# dtype (see `Check.plain`), for one of `OWN_OPERATIONS` operations and on one of its backends (see `Check.everywhere`).
# It leaves out tests marked `full`.
OWN_EXAMPLES, OWN_OPERATIONS = 4, 10
# The share of the large cases from constants of the source, by the profile. A candidate gets all of its cases.
OWN_SHARE, OWN_SHARE_OF_FULL = 0.04, 0.25
# The price limit of the one large case that forward takes past its budget, for an own implementation in the default
# profile: such a case may take ten seconds.
OWN_DEAR_LIMIT = 1_200_000
# A check takes one of this number of combined cases; other dtypes take other cases.
OWN_EVERY = 15

# A profile inherits from the loaded one: if CI is set, Hypothesis loads one without random cases. Its "default" draws
# random cases.
_RANDOM = hypothesis.settings.get_profile("default")
hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(FULL, _RANDOM, max_examples=25, deadline=None)
hypothesis.settings.register_profile(NIGHTLY, _RANDOM, max_examples=1000, deadline=None)
hypothesis.settings.load_profile("default")
ignore_local_constants()


def is_full() -> bool:
    """Return whether the profile makes every check in every dtype, and runs every test."""
    return hypothesis.settings.get_current_profile_name() in (FULL, NIGHTLY)


def share(is_own: bool) -> float:
    """Return the share of the large cases that a check takes for a candidate, or for one of our kernels."""
    return (OWN_SHARE_OF_FULL if is_full() else OWN_SHARE) if is_own else 1.0


def dear_limit(is_own: bool) -> float:
    """Return the price limit of the one large case past the budget, for a candidate or for one of our kernels."""
    return OWN_DEAR_LIMIT if is_own and not is_full() else DEAR_LIMIT


def examples(is_own: bool) -> int:
    """Return the number of generated cases a check draws for a candidate, or for one of our kernels."""
    limit = hypothesis.settings().max_examples
    return min(limit, OWN_EXAMPLES) if is_own and not is_full() else limit
