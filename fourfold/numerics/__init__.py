"""Numbers: the dtypes under test, values with a bound on their error, and the comparison of results."""
