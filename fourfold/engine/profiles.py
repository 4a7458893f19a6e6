"""Hypothesis profiles: how many cases a run draws, whether they are random, and what the default profile leaves out."""

import hypothesis

# Random cases, every dtype and every test: for each night on a CPU, and with more cases on a GPU.
FULL, NIGHTLY = "full", "nightly"
# The default profile draws the same cases in every run, so that a failure is due to a change. For this library's own
# implementations it draws fewer cases and takes a part of the large and the combined ones; most of their checks it
# makes in one dtype (see `Check.plain`). Tests that are marked `full` it leaves out.
OWN_EXAMPLES = 6
# The part of the large cases that come from constants of the source, by the profile: of a candidate's all.
OWN_SHARE, OWN_SHARE_OF_FULL = 0.1, 0.25
# One of so many combined cases; the other dtypes take others.
OWN_EVERY = 15

# A profile inherits what Hypothesis has loaded: where CI is set, that draws no random cases. Its first profile does.
_RANDOM = hypothesis.settings.get_profile("default")
hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(FULL, _RANDOM, max_examples=25, deadline=None)
hypothesis.settings.register_profile(NIGHTLY, _RANDOM, max_examples=1000, deadline=None)
hypothesis.settings.load_profile("default")


def is_full() -> bool:
    """Whether the profile makes every check in every dtype, and runs every test."""
    return hypothesis.settings.get_current_profile_name() in (FULL, NIGHTLY)


def share(own: bool) -> float:
    """Return the part of the large cases that a check takes of a candidate, or of an `own` implementation."""
    return (OWN_SHARE_OF_FULL if is_full() else OWN_SHARE) if own else 1.0


def examples(own: bool) -> int:
    """Generated cases of a check of a candidate, or of one of this library's `own` implementations."""
    most = hypothesis.settings().max_examples
    return min(most, OWN_EXAMPLES) if own and not is_full() else most
