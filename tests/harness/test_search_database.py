"""The next run of a search finds its failures again, whatever other searches have run in between."""

import itertools
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from fourfold.checks.search import Search
from fourfold.operations.case import Case

CASES = st.integers(0, 1000).map(lambda number: Case({"x": np.array(number)}, np.zeros(())))


@pytest.fixture(autouse=True)
def database() -> Iterator[InMemoryExampleDatabase]:
    """Replace the profile's database by one for this test alone."""
    current, own = hypothesis.settings.get_current_profile_name(), InMemoryExampleDatabase()
    hypothesis.settings.register_profile("in memory", database=own, deadline=None, derandomize=False)
    hypothesis.settings.load_profile("in memory")
    yield own
    hypothesis.settings.load_profile(current)


def tried(name: str, wrong: range) -> list[int]:
    """Return the numbers that a search tries if some of them fail."""
    numbers: list[int] = []

    def body(case: Case) -> None:
        numbers.append(int(case["x"]))
        assert numbers[-1] not in wrong

    search = Search(examples=200)
    if wrong:
        with pytest.raises(AssertionError):
            search.for_all(name, CASES, body, shrink=False)
    else:
        search.for_all(name, CASES, body)
    return numbers


def test_a_failure_is_tried_first_by_the_search_that_found_it_and_by_no_other() -> None:
    found = tried("forward softmax", range(500, 1001))[-1]
    assert found >= 500
    # A search deletes the entries that it tries again and that no longer fail.
    others = tried("backward softmax", range(0))
    assert others[0] != found
    assert tried("forward softmax", range(500, 1001))[0] == found


def test_a_failure_that_is_mended_is_forgotten(database: InMemoryExampleDatabase) -> None:
    tried("forward softmax", range(500, 1001))
    assert any(database.data.values())
    tried("forward softmax", range(0))
    assert not any(values for key, values in database.data.items() if not key.endswith(b"pareto"))


def test_without_a_database_nothing_is_kept(database: InMemoryExampleDatabase) -> None:
    hypothesis.settings.register_profile("no database", database=None, deadline=None)
    hypothesis.settings.load_profile("no database")
    tried("forward softmax", range(500, 1001))
    assert not database.data


def test_a_failure_that_comes_otherwise_each_time_is_that_failure() -> None:
    class Race(Exception):
        pass

    races = itertools.count()

    def body(case: Case) -> None:
        # The cause of the failure differs, like the threads of a race, so Hypothesis treats it as another failure.
        try:
            raise [ValueError, KeyError, IndexError][next(races) % 3]
        except LookupError as error:
            raise Race("two threads write to one element") from error
        except ValueError:
            raise Race("two threads write to one element") from None

    with pytest.raises(Race, match="two threads"):
        Search(examples=20).for_all("races", CASES, body)
