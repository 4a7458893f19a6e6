"""The checks: one module per claim, listed in `catalogue`, and the search for cases that break a claim."""
