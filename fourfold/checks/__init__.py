"""The checks: one module a claim, listed in `standard`, and the search for cases on which a claim does not hold."""
