"""The indices that are right where numbers are put in order, but are equal or closer together than their errors."""

import numpy as np

Array = np.ndarray


class Ranking:
    """The order in which a function returns the numbers of each row, and the indices that may come at each place.

    Args:
        numbers: the numbers as rows, with their errors.
        descending: whether the largest number comes first.
        nan_first: whether NaN comes first; it is larger than all numbers otherwise.
        stable: whether the lower index comes first among equal numbers.
        is_sorted: whether the returned indices are in order; otherwise the same indices in any order are right.
        first: the place in the order of the first index that the function returns, of all rows or, in a column, of
            each.
    """

    def __init__(
        self,
        numbers: tuple[Array, Array],
        descending: bool = False,
        nan_first: bool = False,
        stable: bool = False,
        is_sorted: bool = True,
        first: int | Array = 0,
    ) -> None:
        value, error = numbers
        unknown = np.isinf(error)
        with np.errstate(invalid="ignore"):
            low = np.where(unknown, -np.inf, np.where(np.isfinite(value), value - error, value))
            high = np.where(unknown, np.nan, np.where(np.isfinite(value), value + error, value))
        # Ranks, in which NaN is an ordinary number and the last one, like numpy.unique's.
        _, ranks = np.unique(np.stack([low, high]), return_inverse=True)
        self.low, self.high = ranks.reshape(2, *value.shape).astype(np.int64)
        if nan_first:
            self.low, self.high = (
                np.where(np.isnan(part), -1, rank) for part, rank in ((low, self.low), (high, self.high))
            )
            self.low, self.high = np.where(unknown, -1, self.low), np.where(unknown, ranks.max(initial=0), self.high)
        if descending:
            self.low, self.high = -self.high, -self.low
        self.stable, self.is_sorted, self.first = stable, is_sorted, first

    def nearest(self, actual: Array, index: Array, row: Array, rank: Array) -> Array:
        """Return the right indices nearest to `actual`, given the exact ones with their rows and places."""
        expected, flat_row, flat_rank = index.reshape(-1).astype(actual.dtype), row.reshape(-1), rank.reshape(-1)
        reported = actual.reshape(-1)
        for group in np.unique(flat_row[reported != expected]):
            places = np.flatnonzero(flat_row == group)
            places = places[np.argsort(flat_rank[places], kind="stable")]
            expected[places] = self._nearest_row(int(group), reported[places], expected[places], flat_rank[places])
        return expected.reshape(index.shape)

    def _nearest_row(self, row: int, reported: Array, exact: Array, rank: Array) -> Array:
        """Return the right indices of one row nearest to `reported`, in the order of their places."""
        low, high = self.low[row], self.high[row]
        size = len(low)
        valid = (reported >= 0) & (reported < size) & (reported == np.trunc(reported))
        index = np.where(valid, reported, 0).astype(np.int64)
        _, first = np.unique(reported, return_index=True)
        repeated = ~np.isin(np.arange(len(reported)), first)
        wrong = ~valid | repeated
        is_prefix = np.array_equal(rank, np.arange(len(rank)))
        absent = np.isin(np.arange(size), index, invert=True)
        if self.is_sorted:
            # The lowest value that each number can have, given those before it.
            lower = np.maximum.accumulate(low[index])
            wrong |= (lower > high[index]) | ~self._may_stand(low, high, index, rank)
            omitted = absent & (high < lower[-1])
        else:
            omitted = absent & (high < low[index].max())
        if not wrong.any() and not (is_prefix and omitted.any()):
            return reported
        repaired = np.where(wrong, exact, reported)
        return exact if np.array_equal(repaired, reported) or not wrong.any() else repaired

    def _may_stand(self, low: Array, high: Array, index: Array, rank: Array) -> Array:
        """Return whether each number may stand at its place in the order, whatever stands at the others."""
        num_below = np.searchsorted(np.sort(high), low[index], side="left")
        num_above = len(low) - np.searchsorted(np.sort(low), high[index], side="right")
        if self.stable:
            for place, number in enumerate(index):
                exact = low[number] == high[number]
                ties = exact & (low == low[number]) & (high == high[number])
                num_below[place] += ties[:number].sum()
                num_above[place] += ties[number + 1 :].sum()
        return (num_below <= rank) & (num_above <= len(low) - 1 - rank)
